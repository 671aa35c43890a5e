"""`Strategy.buffers_like`: arrays that are reduced where they are."""

import dataclasses
import random
import time
import warnings

import numpy as np
import posing
import pytest
from replicas import (
    DIRECT,
    SHARED,
    all_reduce,
    context,
    everywhere,
    local,
    merge,
    own,
    raises_everywhere,
    share_memory,
)

import mpidist
from mpidist import _native
from mpidist._strategy.strategy import group_of

pytestmark = [pytest.mark.mpi, pytest.mark.core]


@pytest.fixture
def shared(new_strategy):
    return new_strategy(implementation=SHARED)


def sample(rank, like, step=0):
    """Return random values for a nest of arrays, which others can make as well."""
    rng = np.random.default_rng([rank, step])

    def values(x):
        found = rng.normal(size=x.shape) * 10.0 ** rng.integers(-2, 3, x.shape)
        if x.dtype.kind == "c":
            return (found * (1 + 2j)).astype(x.dtype)
        return found.astype(x.dtype) if x.dtype.kind != "b" else found > 0

    return {
        key: [values(y) for y in x] if isinstance(x, list) else values(x)
        for key, x in like.items()
    }


def write(buffers, values):
    for key, x in values.items():
        if isinstance(x, list):
            for y, z in zip(buffers[key], x, strict=True):
                y[...] = z
        else:
            buffers[key][...] = x


def flat(nest):
    return [y for x in nest.values() for y in (x if isinstance(x, list) else [x])]


def assert_same(found, expected):
    for x, y in zip(flat(found), flat(expected), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert x.tobytes() == y.tobytes()


def in_place(strategy, call):
    """Return what ``call`` returns, and how many calls read arrays where they are."""
    node = group_of(strategy).collectives.resources.node
    before = node.channel.sources_in_arena if node is not None else 0
    found = call()
    return found, (node.channel.sources_in_arena if node is not None else 0) - before


LIKE = {
    "floats": [np.zeros(n, "f4") for n in (7, 100_000, 1, 0, 300_000)],
    "double": np.zeros((30, 40, 5)),
    "ints": np.zeros((3, 1000), "i8"),
    "complex": np.zeros(3000, "c16"),
    "number": np.float64(0),
    "half": np.zeros(999, "f2"),
}


def test_buffers_are_zeros_of_the_same_kind(shared):
    buffers = shared.buffers_like(LIKE)
    assert_same(buffers, {**LIKE, "number": np.zeros(())})
    assert all(type(x) is np.ndarray and x.flags.writeable for x in flat(buffers))
    assert all(
        x.ctypes.data % 64 == 0 or not share_memory(shared) for x in flat(buffers)
    )
    again = shared.buffers_like(LIKE)
    assert not any(
        np.shares_memory(x, y)
        for x, y in zip(flat(buffers), flat(again), strict=True)
        if x.size
    )


def test_buffers_like_variables_and_per_replica_values(shared, rank):
    with shared.scope():
        variable = mpidist.Variable(np.ones((2, 3), "f4"), name="w")
    value = shared.run(lambda: np.ones(rank_independent))
    made = shared.buffers_like([variable, value, 2])
    assert [(x.shape, x.dtype.name) for x in made] == [
        ((2, 3), "float32"),
        ((4,), "float64"),
        ((), "int64"),
    ]
    assert not any(x.any() for x in made)


rank_independent = 4


@pytest.mark.parametrize("op", ["SUM", "MEAN", "PROD", "MIN", "MAX"])
def test_results_are_those_of_ordinary_arrays(shared, rank, size, op):
    like = dict(LIKE)
    if op in ("MIN", "MAX"):
        like = {k: v for k, v in like.items() if k != "complex"}
        like["bool"] = np.zeros(5000, "?")
    buffers = shared.buffers_like(like)
    for step in range(3):
        values = sample(rank, like, step)
        write(buffers, values)
        with np.errstate(all="ignore"):
            found, count = in_place(shared, lambda: all_reduce(shared, op, buffers))
            known = all_reduce(shared, op, values)
        known["number"] = np.asarray(known["number"])
        assert_same(found, known)
        # Means of integers are made floats first: then nothing is read in place.
        assert count == (share_memory(shared) and op != "MEAN")
        # The buffers keep their values, and the results are apart from them.
        values["number"] = np.asarray(values["number"])
        assert_same(buffers, values)
        for x in flat(found):
            x.fill(0)
        assert_same(buffers, values)


def test_views_in_any_order_are_reduced_in_place(shared, rank, size):
    buffers = shared.buffers_like({"a": np.zeros((200, 50)), "b": np.zeros(9000)})
    values = sample(rank, buffers)
    write(buffers, values)
    buffers["b"] += 1
    np.multiply(buffers["a"], 2, out=buffers["a"])
    a, b = buffers["a"], buffers["b"]
    views = [b.reshape(90, 100), a[100:], a.ravel(), b[3:7000], a]
    for nest, fit in (
        (views, True),
        ([a[:, ::2], b], False),
        ([a.T, b], False),
        ([a.copy(), b, np.ones(3)], False),
        ([b, b], True),
    ):
        found, count = in_place(shared, lambda n=nest: all_reduce(shared, "SUM", n))
        copies = [x.copy() for x in nest]
        known = all_reduce(shared, "SUM", copies)
        assert count == (share_memory(shared) and fit)
        for x, y in zip(found, known, strict=True):
            assert x.tobytes() == y.tobytes()


def test_ranks_that_pass_different_arrays_get_the_right_sums(shared, rank, size):
    buffers = shared.buffers_like([np.zeros(20_000), np.zeros(20_000)])
    for x in buffers:
        x[:] = 10**rank
    plain = [x.copy() for x in buffers]
    expected = sum(10.0**r for r in range(size))
    last = rank == size - 1
    for nest, places in (
        (plain if last else buffers, 0),
        ([buffers[0], plain[1]] if last else buffers, 0),
        (buffers[::-1] if last else buffers, 0),
        (buffers, 1),
    ):
        found, count = in_place(shared, lambda n=nest: all_reduce(shared, "SUM", n))
        assert all((x == expected).all() for x in found)
        assert count == share_memory(shared) * places
    # Buffers of another call may do on some rank, if they lie in the same order.
    other = shared.buffers_like(plain)
    for x in other:
        x[:] = 10**rank
    found, count = in_place(
        shared,
        lambda: all_reduce(shared, "SUM", other if last else buffers),
    )
    assert all((x == expected).all() for x in found)
    assert count == share_memory(shared)


@pytest.mark.mpi(min_size=2)
def test_a_call_of_other_shapes_is_the_usual_error(shared, rank, size):
    buffers = shared.buffers_like([np.zeros(20_000), np.zeros((200, 100))])
    nest = buffers[::-1] if rank == size - 1 else buffers
    raises_everywhere(
        mpidist.CollectiveMismatchError,
        lambda: shared.run(lambda: context().all_reduce("SUM", nest)),
    )
    raises_everywhere(
        mpidist.CollectiveMismatchError,
        lambda: shared.buffers_like(np.zeros(3 + rank)),
    )
    raises_everywhere(TypeError, lambda: shared.buffers_like({"x": "text"}))
    total = all_reduce(shared, "SUM", buffers)
    assert not total[0].any()


def test_steps_of_changing_values_at_different_speeds(shared, rank, size):
    like = {"a": np.zeros(3000, "f4"), "b": [np.zeros(70_000, "f4"), np.zeros(5)]}
    buffers = shared.buffers_like(like)
    pause = random.Random(rank)
    total = {"a": 0.0, "b": 0.0}

    def steps():
        for step in range(60):
            for x in flat(buffers):
                x[...] = step + rank
                if pause.random() < 0.2:
                    time.sleep(pause.random() * 2e-3)
            found = context().all_reduce("SUM" if step % 2 else "MEAN", buffers)
            for x in flat(buffers):
                x[...] = -1e6  # at once: nobody may read it any more
            expected = step * size + size * (size - 1) / 2
            if step % 2 == 0:
                expected /= size
            for x in flat(found):
                assert (x == np.asarray(expected, x.dtype)).all(), step
            total["a"] += float(found["a"][0])
            if step % 7 == 0:  # with others between
                count = context().all_reduce("SUM", np.ones(20_000))
                assert (count == size).all()

    shared.run(steps)
    assert len({tuple(x.items()) for x in everywhere(total)}) == 1


def test_cross_replica_verbs_and_merge_fn(shared, rank, size):
    buffers = shared.buffers_like({"w": np.zeros(30_000), "b": np.zeros(5_000)})

    def fill():
        buffers["w"][...] = rank
        buffers["b"][...] = 2.0 * rank
        return buffers

    expected = size * (size - 1) / 2
    value = shared.run(fill)
    found, count = in_place(shared, lambda: shared.reduce("SUM", value, None))
    assert (found["w"] == expected).all()
    assert (found["b"] == 2 * expected).all()
    assert count == share_memory(shared)
    with shared.scope():
        variables = [mpidist.Variable(np.zeros(n), name="v") for n in (30_000, 5_000)]

    def step():
        values = fill()

        def merged(strategy, w, b):
            sums = strategy.extended.batch_reduce_to(
                "SUM", [(w, variables[0]), (b, variables[1])]
            )
            for variable, total in zip(variables, sums, strict=True):
                strategy.extended.update(variable, lambda v, t: v.assign(t), (total,))

        context().merge_call(merged, (values["w"], values["b"]))

    _, count = in_place(shared, lambda: shared.run(step))
    assert (variables[0].numpy() == expected).all()
    assert (variables[1].numpy() == 2 * expected).all()
    assert count == share_memory(shared)


def test_reduce_to_one_rank(shared, rank, size):
    (buffer,) = shared.buffers_like([np.zeros(40_000)])
    buffer[:] = rank + 1
    found, _ = in_place(
        shared,
        lambda: group_of(shared).collectives.all_reduce(
            mpidist.ReduceOp.SUM, [buffer], root=size - 1
        ),
    )
    if rank == size - 1:
        assert (found[0] == size * (size + 1) / 2).all()
    else:
        assert found == [None]
    assert (buffer == rank + 1).all()


def test_in_replica_functions_and_merge_fn_it_says_where_to_make_them(shared):
    like = np.zeros(3)
    raises_everywhere(
        RuntimeError, lambda: shared.run(lambda: shared.buffers_like(like))
    )
    texts = raises_everywhere_of_merge(
        shared, lambda strategy: strategy.buffers_like(like)
    )
    assert all("at program level" in text for text in texts)


def raises_everywhere_of_merge(strategy, merge_fn):
    error = None
    try:
        merge(strategy, merge_fn)
    except RuntimeError as raised:
        error = raised
    return everywhere(str(error))


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("implementation", [DIRECT, SHARED])
def test_everywhere_else_they_are_ordinary_arrays(
    new_strategy, rank, size, implementation, guard
):
    one = new_strategy(implementation=implementation, guard=guard)
    buffers = one.buffers_like([np.zeros(10_000), np.zeros(20_000)])
    for x in buffers:
        x[:] = rank
    nest = [x.copy() for x in buffers] if rank == 0 else buffers
    for given in (nest, buffers):
        found = all_reduce(one, "SUM", given)
        assert all((x == size * (size - 1) / 2).all() for x in found)


def test_without_room_they_are_ordinary_arrays(shared, rank, size, monkeypatch):
    node = group_of(shared).collectives.resources.node
    if rank == size - 1 and node is not None:  # on one rank alone
        without = dataclasses.replace(node, pool=_native.core.Pool(node.memory, 0, 0))
        monkeypatch.setattr(group_of(shared).collectives.resources, "node", without)
    (buffer,) = shared.buffers_like([np.zeros(10_000)])
    buffer[:] = 1
    found, count = in_place(shared, lambda: all_reduce(shared, "SUM", buffer))
    assert count == 0
    assert (found == size).all()


def test_one_call_with_another_implementation(shared, rank, size):
    options = mpidist.experimental.CommunicationOptions(implementation=DIRECT)
    (buffer,) = shared.buffers_like([np.zeros(10_000)])
    buffer[:] = 1
    found, count = in_place(
        shared,
        lambda: all_reduce(shared, "SUM", buffer, options),
    )
    assert count == 0
    assert (found == size).all()


def test_gpu_arrays_have_gpu_buffers(monkeypatch, new_strategy, rank, size):
    posing.install(monkeypatch)
    one = new_strategy(device="gpu", implementation=SHARED)
    like = {"x": one.array_module.ones(20_000), "host": np.ones(20_000)}
    buffers = one.buffers_like(like)
    assert isinstance(buffers["x"], posing.ndarray)
    assert type(buffers["host"]) is np.ndarray
    buffers["x"][...] = float(rank)
    buffers["host"][...] = rank
    found = all_reduce(one, "SUM", buffers)
    assert isinstance(found["x"], posing.ndarray)
    assert (found["x"].get() == size * (size - 1) / 2).all()
    assert (found["host"] == size * (size - 1) / 2).all()


def test_the_default_strategy_has_ordinary_ones():
    default = mpidist.get_strategy()
    with default.scope():
        made = default.buffers_like({"x": np.ones((2, 2), "f4")})
    assert own(default, made)["x"].tolist() == [[0, 0], [0, 0]]


def test_an_optimizer_reads_the_sums_where_they_are(shared, rank, size):
    shapes = [(100, 30), (30,), (5000,), (4,)]
    with shared.scope():
        ours = [
            mpidist.Variable(np.ones(s), name=f"a{i}") for i, s in enumerate(shapes)
        ]
        same = [
            mpidist.Variable(np.ones(s), name=f"b{i}") for i, s in enumerate(shapes)
        ]
    buffers = shared.buffers_like(ours)
    kinds = [
        lambda: mpidist.optimizers.SGD(0.1, momentum=0.9),
        lambda: mpidist.optimizers.Adam(0.1, global_clipnorm=1.0),
    ]
    for make_one in kinds:
        first, second = make_one(), make_one()

        def step(number, first=first, second=second):
            rng = np.random.default_rng([rank, number])
            plain = [rng.normal(size=s) for s in shapes]
            for x, g in zip(buffers, plain, strict=True):
                x[...] = g
            first.apply_gradients(zip(buffers, ours, strict=True))
            for x in buffers:
                x[...] = np.nan  # they are free again
            second.apply_gradients(zip(plain, same, strict=True))

        for number in range(5):
            shared.run(lambda n=number: step(n))
        for x, y in zip(ours, same, strict=True):
            assert np.array_equal(x.numpy(), y.numpy())
            assert not np.array_equal(x.numpy(), np.ones(x.shape))
        mpidist.check_in_sync(ours)


def test_an_optimizer_of_ranks_that_differ(shared, rank, size):
    with shared.scope():
        one = mpidist.Variable(np.zeros(10_000), name="one")
        two = mpidist.Variable(np.zeros(10_000), name="two")
    buffers = shared.buffers_like([one, two])
    optimizer = mpidist.optimizers.SGD(1.0)
    for given in (
        buffers if rank else [np.zeros(10_000), np.zeros(10_000)],
        buffers,
        [buffers[0], buffers[0]],
        [buffers[1], np.zeros(10_000)],
    ):
        for x in given:
            x[...] = 1
        before = one.numpy().copy()
        shared.run(
            lambda g=given: optimizer.apply_gradients(zip(g, [one, two], strict=True))
        )
        assert (one.numpy() == before - size).all()
        assert (two.numpy() == one.numpy()).all()


@pytest.mark.parametrize("how", ["raise", "error"])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_overflow_where_one_rank_has_numpy_raise(shared, rank, size, op, how):
    """It must not raise in the middle, where the others wait for it."""
    buffers = shared.buffers_like(np.zeros(30_000, np.float32))
    buffers[...] = np.finfo(np.float32).max

    def reduce():
        with warnings.catch_warnings(), np.errstate(all="warn"):
            warnings.simplefilter("error")
            if how == "raise":
                np.seterr(all="raise" if rank == 0 else "ignore")
            return context().all_reduce(op, buffers)

    found, runs = in_place(shared, lambda: local(shared, reduce))
    assert runs == share_memory(shared)
    expected = np.float32(np.inf) if size > 1 else buffers[0]
    np.testing.assert_array_equal(found, np.full(30_000, expected))


def test_overflow_in_an_optimizer_where_numpy_raises(shared, rank, size):
    with shared.scope():
        v = mpidist.Variable(np.zeros(10_000, np.float32))
        optimizer = mpidist.optimizers.SGD(1.0)
    gradient = shared.buffers_like(v)
    gradient[...] = np.finfo(np.float32).max

    def step():
        with np.errstate(over="raise" if rank == 0 else "ignore"):
            optimizer.apply_gradients([(gradient, v)])

    shared.run(step)
    expected = -np.inf if size > 1 else -gradient[0]
    np.testing.assert_array_equal(v.numpy(), np.full(10_000, expected, np.float32))
