"""`Strategy.buffers_like`: arrays that are reduced where they are."""

import dataclasses
import random
import time

import numpy as np
import posing
import pytest
from replicas import (
    DIRECT,
    SHARED,
    all_reduce,
    context,
    merge,
    outcomes,
    own,
    raises_everywhere,
    share_memory,
)

import mpidist
from mpidist import _native
from mpidist._base import nest
from mpidist._strategy.strategy import group_of

pytestmark = [pytest.mark.mpi, pytest.mark.core]

LIKE = {
    "floats": [np.zeros(n, "f4") for n in (7, 100_000, 1, 0, 300_000)],
    "double": np.zeros((30, 40, 5)),
    "ints": np.zeros((3, 1000), "i8"),
    "complex": np.zeros(3000, "c16"),
    "number": np.float64(0),
    "half": np.zeros(999, "f2"),
}


@pytest.fixture
def shared(new_strategy):
    return new_strategy(implementation=SHARED)


def flat(tree):
    return nest.flatten(tree)[0]


def sample(rank, like, step=0):
    """Return random arrays like those of a nest, which other ranks can make as well."""
    rng = np.random.default_rng([rank, step])

    def values(x):
        found = rng.normal(size=x.shape) * 10.0 ** rng.integers(-2, 3, x.shape)
        if x.dtype.kind == "c":
            found = found * (1 + 2j)
        return np.asarray(found > 0 if x.dtype.kind == "b" else found, x.dtype)

    leaves, structure = nest.flatten(like)
    return structure.unflatten([values(x) for x in leaves])


def write(buffers, values):
    for x, y in zip(flat(buffers), flat(values), strict=True):
        x[...] = y


def assert_same(found, expected):
    for x, y in zip(flat(found), flat(expected), strict=True):
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def in_place(strategy, call):
    """Return what ``call`` returns, and how many calls read arrays where they are."""
    node = group_of(strategy).collectives.resources.node
    before = node.channel.sources_in_arena if node is not None else 0
    found = call()
    return found, (node.channel.sources_in_arena if node is not None else 0) - before


def test_buffers_are_zeros_of_the_same_kind(shared):
    with shared.scope():
        variable = mpidist.Variable(np.ones((2, 3), "f4"), name="w")
    value = shared.run(lambda: np.ones(4))
    like = {**LIKE, "variable": variable, "value": value, "int": 2}
    zeros = {"variable": np.zeros((2, 3), "f4"), "value": np.zeros(4)}
    zeros |= {"number": np.zeros(()), "int": np.zeros((), int)}
    buffers, again = shared.buffers_like(like), shared.buffers_like(like)
    assert_same(buffers, {**LIKE, **zeros})
    for x, y in zip(flat(buffers), flat(again), strict=True):
        assert type(x) is np.ndarray
        assert x.flags.writeable
        assert x.ctypes.data % 64 == 0 or not share_memory(shared)
        assert not x.size or not np.shares_memory(x, y)
    default = mpidist.get_strategy()
    with default.scope():
        made = default.buffers_like({"x": np.ones((2, 2), "f4")})
    assert own(default, made)["x"].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("op", ["SUM", "MEAN", "PROD", "MIN", "MAX"])
def test_results_are_those_of_ordinary_arrays(shared, rank, op):
    like = dict(LIKE)
    if op in ("MIN", "MAX"):
        del like["complex"]
        like["bool"] = np.zeros(5000, "?")
    buffers = shared.buffers_like(like)
    for step in range(3):
        values = sample(rank, like, step)
        write(buffers, values)
        with np.errstate(all="ignore"):
            found, count = in_place(shared, lambda: all_reduce(shared, op, buffers))
            known = all_reduce(shared, op, values)
        assert_same(found, known)
        # Means of integers are made floats first, elsewhere if they are few.
        assert count == (share_memory(shared) and op != "MEAN")
        # The buffers keep their values, and the results are apart from them.
        assert_same(buffers, values)
        for x in flat(found):
            x.fill(0)
        assert_same(buffers, values)


def test_views_in_any_order_are_reduced_in_place(shared, rank, size):
    buffers = shared.buffers_like({"a": np.zeros((200, 50)), "b": np.zeros(9000)})
    write(buffers, sample(rank, buffers))
    a, b = buffers["a"], buffers["b"]
    for nest_, fit in (
        ([b.reshape(90, 100), a[100:], a.ravel(), b[3:7000], a], True),
        ([a[:, ::2], b], False),
        ([a.T, b], False),
        ([a.copy(), b, np.ones(3)], False),
        ([b, b], True),
    ):
        found, count = in_place(shared, lambda n=nest_: all_reduce(shared, "SUM", n))
        assert count == (share_memory(shared) and fit)
        assert_same(found, all_reduce(shared, "SUM", [x.copy() for x in nest_]))


def test_ranks_that_pass_different_arrays_get_the_right_sums(shared, rank, size):
    buffers = shared.buffers_like([np.zeros(20_000), np.zeros(20_000)])
    other = shared.buffers_like(buffers)
    for x in (*buffers, *other):
        x[:] = 10**rank
    plain = [x.copy() for x in buffers]
    for of_last, fit in (
        (plain, False),
        ([buffers[0], plain[1]], False),
        (buffers[::-1], False),
        (buffers, True),
        (other, True),  # they lie in the same order
    ):
        given = of_last if rank == size - 1 else buffers
        found, count = in_place(shared, lambda n=given: all_reduce(shared, "SUM", n))
        assert all((x == sum(10.0**r for r in range(size))).all() for x in found)
        assert count == (share_memory(shared) and fit)


def test_steps_of_changing_values_at_different_speeds(shared, rank, size):
    like = {"a": np.zeros(3000, "f4"), "b": [np.zeros(70_000, "f4"), np.zeros(5)]}
    buffers = shared.buffers_like(like)
    pause = random.Random(rank)

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
            if step % 7 == 0:  # with others between
                count = context().all_reduce("SUM", np.ones(20_000))
                assert (count == size).all()

    shared.run(steps)


def test_cross_replica_verbs_and_merge_fn(shared, rank, size):
    buffers = shared.buffers_like({"w": np.zeros(30_000), "b": np.zeros(5_000)})
    write(buffers, {"w": rank, "b": 2 * rank})
    expected = size * (size - 1) / 2
    value = shared.run(lambda: buffers)
    found, count = in_place(shared, lambda: shared.reduce("SUM", value, None))
    assert (found["w"] == expected).all()
    assert (found["b"] == 2 * expected).all()
    reduce = group_of(shared).collectives.all_reduce
    found = reduce(mpidist.ReduceOp.SUM, buffers, root=size - 1)
    if rank == size - 1:
        assert (found["b"] == 2 * expected).all()
    else:
        assert found == {"w": None, "b": None}
    with shared.scope():
        w, b = (mpidist.Variable(np.zeros(n), name="v") for n in (30_000, 5_000))

    def merged(strategy, *values):
        pairs = list(zip(values, (w, b), strict=True))
        for total, v in zip(
            strategy.extended.batch_reduce_to("SUM", pairs), (w, b), strict=True
        ):
            strategy.extended.update(v, lambda v, t: v.assign(t), (total,))

    _, again = in_place(
        shared, lambda: merge(shared, merged, buffers["w"], buffers["b"])
    )
    assert (w.numpy() == expected).all()
    assert (b.numpy() == 2 * expected).all()
    assert count == again == share_memory(shared)
    assert (buffers["b"] == 2 * rank).all()


def test_in_replica_functions_and_merge_fn_it_says_where_to_make_them(shared):
    like = np.zeros(3)
    raises_everywhere(
        RuntimeError, lambda: shared.run(lambda: shared.buffers_like(like))
    )
    rows = outcomes(lambda: merge(shared, lambda s: s.buffers_like(like)))
    assert all("at program level" in row.message for row in rows)


@pytest.mark.mpi(min_size=2)
def test_a_call_of_other_shapes_is_the_usual_error(shared, rank, size):
    buffers = shared.buffers_like([np.zeros(20_000), np.zeros((200, 100))])
    given = buffers[::-1] if rank == size - 1 else buffers
    for kind, call in (
        (mpidist.CollectiveMismatchError, lambda: all_reduce(shared, "SUM", given)),
        (
            mpidist.CollectiveMismatchError,
            lambda: shared.buffers_like(np.zeros(3 + rank)),
        ),
        (TypeError, lambda: shared.buffers_like({"x": "text"})),
    ):
        raises_everywhere(kind, call)
    assert not all_reduce(shared, "SUM", buffers)[0].any()


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("where", ["by MPI", "by MPI in one call", "no room", "shared"])
def test_everywhere_else_they_are_ordinary_arrays(
    new_strategy, rank, size, where, guard, monkeypatch
):
    """Also where one rank has no room for them, and passes other arrays."""
    one = new_strategy(
        implementation=DIRECT if where == "by MPI" else SHARED, guard=guard
    )
    resources, options = group_of(one).collectives.resources, None
    if where == "by MPI in one call":
        options = mpidist.experimental.CommunicationOptions(implementation=DIRECT)
    if where == "no room" and rank == size - 1 and resources.node is not None:
        none = _native.core.Pool(resources.node.memory, 0, 0)
        without = dataclasses.replace(resources.node, pool=none)
        monkeypatch.setattr(resources, "node", without)
    buffers = one.buffers_like([np.zeros(10_000), np.zeros(20_000)])
    monkeypatch.undo()
    write(buffers, [rank, rank])
    for given in ([x.copy() for x in buffers] if rank == 0 else buffers, buffers):
        found, count = in_place(one, lambda n=given: all_reduce(one, "SUM", n, options))
        assert all((x == size * (size - 1) / 2).all() for x in found)
    assert count == (where == "shared" and share_memory(one))


def test_gpu_arrays_have_gpu_buffers(monkeypatch, new_strategy, rank, size):
    posing.install(monkeypatch)
    one = new_strategy(device="gpu", implementation=SHARED)
    like = {"x": one.array_module.ones(20_000), "host": np.ones(20_000)}
    buffers = one.buffers_like(like)
    write(buffers, {"x": float(rank), "host": rank})
    for found in (buffers, all_reduce(one, "SUM", buffers)):
        assert isinstance(found["x"], posing.ndarray)
        assert type(found["host"]) is np.ndarray
    assert (found["x"].get() == size * (size - 1) / 2).all()
    assert (found["host"] == size * (size - 1) / 2).all()


@pytest.mark.parametrize(
    "make_one",
    [
        lambda: mpidist.optimizers.SGD(0.1, momentum=0.9),
        lambda: mpidist.optimizers.Adam(0.1, global_clipnorm=1.0),
    ],
    ids=["SGD", "Adam"],
)
def test_an_optimizer_reads_the_sums_where_they_are(shared, rank, size, make_one):
    shapes = [(100, 30), (30,), (5000,), (4,)]
    with shared.scope():
        ours, same = (
            [mpidist.Variable(np.ones(s), name=f"{x}{i}") for i, s in enumerate(shapes)]
            for x in "ab"
        )
    buffers = shared.buffers_like(ours)
    first, second = make_one(), make_one()

    def step(number):
        plain = flat(sample(rank, buffers, number))
        write(buffers, plain)
        first.apply_gradients(zip(buffers, ours, strict=True))
        write(buffers, [np.nan] * len(shapes))  # they are free again
        second.apply_gradients(zip(plain, same, strict=True))

    for number in range(5):
        shared.run(lambda n=number: step(n))
    for x, y in zip(ours, same, strict=True):
        assert np.array_equal(x.numpy(), y.numpy())
        assert not np.array_equal(x.numpy(), np.ones(x.shape))
    mpidist.check_in_sync(ours)


def test_an_optimizer_of_ranks_that_differ(shared, rank, size):
    with shared.scope():
        both = [mpidist.Variable(np.zeros(10_000, "f4"), name=x) for x in "ab"]
    buffers = shared.buffers_like(both)
    zeros = np.zeros(10_000, "f4")
    optimizer = mpidist.optimizers.SGD(1.0)

    def apply(given, value):
        write(given, [value, value])
        with np.errstate(over="raise" if rank == 0 else "ignore"):
            optimizer.apply_gradients(zip(given, both, strict=True))

    for turn, given in enumerate(
        (
            buffers if rank else [zeros, zeros.copy()],
            buffers,
            [buffers[0], buffers[0]],
            [buffers[1], zeros],
        )
    ):
        shared.run(lambda g=given: apply(g, 1))
        for v in both:
            assert (v.numpy() == -size * (turn + 1)).all()
    # Overflow is no error of a rank whose NumPy raises: the others would wait for it.
    largest = np.finfo(np.float32).max
    shared.run(lambda: apply(buffers, largest))
    for v in both:
        assert (v.numpy() == (-largest if size == 1 else -np.inf)).all()
