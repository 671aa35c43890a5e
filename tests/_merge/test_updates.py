"""Updates in merge_fn: rank 0 does not wait for the others, and nothing gets lost.

Each test runs where the ranks share memory, and by MPI alone.
"""

import collections
import contextlib
import gc
import time
import weakref

import numpy as np
import pytest
from replicas import (
    assert_mirrored,
    assert_usable,
    everywhere,
    make,
    merge,
    outcomes,
    own,
    this_replica,
)

import mpidist
from mpidist._strategy.strategy import group_of
from mpidist._values.variable import storage_of

pytestmark = [
    *(pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)),
    pytest.mark.parametrize("implementation", ["SHARED", "DIRECT"]),
]

LAST = "the last rank raises"
calls = collections.Counter()  # of this rank's functions
arguments, alive = [], []


def last_replica():
    return mpidist.get_strategy().num_replicas_in_sync - 1


def add_one(variable, ballast=b""):
    calls["add_one"] += 1
    variable.assign_add(np.ones(variable.shape))


def fail_on_last(variable, ballast=b""):
    variable.assign_add(np.ones(variable.shape))
    if this_replica() == last_replica():
        variable.assign_add(np.full(variable.shape, 7.0))
        raise ArithmeticError(LAST)


@pytest.fixture
def strategy(implementation, new_strategy):
    return new_strategy(implementation=implementation)


def names_of(rows):
    return [row.name for row in rows]


def assert_raised_by_last(rows):
    assert names_of(rows) == ["ReplicaError"] * (len(rows) - 1) + ["ArithmeticError"]
    for text in (row.text for row in rows):
        assert LAST in text
        assert "raised in update of Variable 'v' [#" in text, text


def run_merge(strategy, merge_fn, *args):
    return outcomes(lambda: merge(strategy, merge_fn, *args))


def count_alive(variable, array, *, more):
    """Count the arrays of updates that are alive on this rank."""
    variable.assign_add(array[:3])
    arguments.extend(map(weakref.ref, (array, more)))
    alive.append(sum(ref() is not None for ref in arguments))


# --- many updates -------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 300, 3000, 5000, 20_000])
def test_many_updates_in_a_row(strategy, size, length):
    """More, and longer ones, than there is room for at a time."""
    v, w = make(strategy, np.zeros(3)), make(strategy, np.zeros((2, 2)))

    def merge_fn(distribution, x):
        update = distribution.extended.update
        total = distribution.extended.reduce_to("SUM", x, v)
        for k in range(50):
            update(v, add_one, args=(bytes(length),))
            update(v, lambda v, t, k: v.assign_sub(k * t), args=(total, float(k)))
            update(w, lambda w: w.assign_add(np.full((2, 2), 2.0)))
        return "done"

    assert {*names_of(run_merge(strategy, merge_fn, np.ones(3)))} == {"NoneType"}
    assert_mirrored(strategy, v, np.full(3, 50.0 - size * 49 * 50 / 2))
    assert_mirrored(strategy, w, np.full((2, 2), 100.0))
    assert_usable(strategy)


@pytest.mark.parametrize("n", [37, 131])
def test_sums_of_arrays_that_are_not_in_c_order(strategy, n):
    """On the layout of an array the last bits depend, which have to be the same."""
    x = np.random.default_rng(n).normal(size=(n, n // 2, 2))
    views = [x.T, x[:, :5], x[:, 3::2, 1], x[::-1, ::-2], x.transpose(1, 2, 0)]
    views += [x[..., :1], np.asfortranarray(x[..., 0]), x.astype(">f8").T]
    views += [np.broadcast_to(x, (3, *x.shape)), x.astype(np.float32)[..., 0].T]
    views += [np.lib.stride_tricks.sliding_window_view(x.reshape(-1), 33)]
    variables = [make(strategy, 0.0) for _ in views]

    def merge_fn(distribution):
        for v, view in zip(variables, map(np.ndarray.view, views), strict=True):
            distribution.extended.update(v, lambda v, x: v.assign(np.sum(x)), (view,))
            distribution.extended.update(v, lambda v: v.assign_add(np.sum(view)))  # noqa: B023

    merge(strategy, merge_fn)
    for v, view in zip(variables, views, strict=True):
        assert_mirrored(strategy, v, 2.0 * float(np.sum(view)))


@pytest.mark.processes
def test_arguments_are_dropped_after_their_update(strategy):
    v = make(strategy, np.zeros(3))
    arguments.clear()
    alive.clear()

    def merge_fn(distribution):
        for _ in range(12):
            args, kwargs = (np.ones(5000),), {"more": np.ones(5000)}
            distribution.extended.update(v, count_alive, args, kwargs)
            del args, kwargs

    merge(strategy, merge_fn)
    assert alive == [2] * 12
    assert_mirrored(strategy, v, np.full(3, 12.0))


def test_a_function_is_sent_again_where_it_is_another_one(strategy, size):
    """The same code with other values, modules or defaults."""
    v = make(strategy, np.zeros(2))
    names = {"module": np}

    def merge_fn(distribution):
        update = distribution.extended.update

        def adding(x):
            return lambda v: v.assign_add([x, x])

        for k in range(4):
            update(v, adding(float(k)))  # 6
        plain = [eval("lambda v: v.assign_add(module.ones(2))", names)] * 3
        for fn in plain:
            update(v, fn)  # 3
        other = eval("lambda v, x=1.0: v.assign_add([x, x])", {})
        update(v, other)  # 1
        other.__defaults__ = (10.0,)
        update(v, other)  # 10
        update(v, add_one)  # 1
        update(v, plain[0])  # 1
        names["module"] = np.ma  # whose ones are masked arrays
        with pytest.raises(TypeError, match="masked"):
            update(v, plain[0])
        names["module"] = np
        update(v, plain[0])  # 1

    assert {*names_of(run_merge(strategy, merge_fn))} == {"NoneType"}
    assert_mirrored(strategy, v, [23.0, 23.0])
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_rank_0_goes_on_while_others_are_busy(strategy):
    v = make(strategy, np.zeros(3), name="v")

    def slow(v):
        if this_replica():
            if not v.numpy().any():
                everywhere(None)  # which ends when rank 0 has gone on
            time.sleep(0.05)
        v.assign_add(np.ones(3))

    def merge_fn(distribution):
        for _ in range(3):
            distribution.extended.update(v, slow)
        start = time.perf_counter()
        everywhere(None)
        distribution.extended.update(v, add_one, group=False)  # which waits
        return time.perf_counter() - start

    waited = own(
        strategy,
        strategy.run(lambda: [mpidist.get_replica_context().merge_call(merge_fn)])[0],
    )
    assert waited >= 0.15
    assert_mirrored(strategy, v, [4.0] * 3)


# --- a function raises on one rank --------------------------------------------------


AFTERWARDS = {
    "nothing": lambda s, v: None,
    "updates": lambda s, v: [s.extended.update(v, add_one) for _ in range(100)],
    "long updates": lambda s, v: [
        s.extended.update(v, add_one, args=(bytes(1000),)) for _ in range(100)
    ],
    "a longer one": lambda s, v: s.extended.update(v, add_one, args=(bytes(9000),)),
    "an array": lambda s, v: s.extended.update(
        v, lambda v, x: v.assign_add(x[:3]), args=(np.ones(5000),)
    ),
    "group=False": lambda s, v: s.extended.update(v, lambda v: 1.0, group=False),
    "a verb": lambda s, v: s.extended.broadcast_to(1.0, v),
    "a verb with an array": lambda s, v: v.assign(np.ones(3)),
    "a variable": lambda s, v: mpidist.Variable(np.ones(30)),
    "run": lambda s, v: s.run(lambda: mpidist.get_replica_context().merge_call(str)),
    "reading": lambda s, v: v.numpy().tobytes() * 1000,
    "a pause": lambda s, v: (
        time.sleep(0.3),
        s.extended.update(v, add_one),
        s.extended.update(v, add_one),
    ),
    "a function that communicates": lambda s, v: s.extended.update(v, reducing),
}


def reducing(v):
    """Communicate inside an update, which is allowed where all ranks do."""
    strategy = mpidist.get_strategy()
    values = strategy.run(lambda: np.ones(3))
    v.assign_add(strategy.reduce("SUM", values, axis=None))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize("then", AFTERWARDS)
def test_an_error_of_one_rank_is_told_by_what_follows(strategy, then, caught):
    v = make(strategy, np.zeros(3), name="v")

    def body(distribution):
        add_one_to_v = distribution.extended.update
        add_one_to_v(v, add_one)
        add_one_to_v(v, fail_on_last)
        return AFTERWARDS[then](distribution, v)

    def merge_fn(distribution):
        if not caught:
            return body(distribution)
        try:
            body(distribution)
            mpidist.check_in_sync(v)
        except mpidist.ReplicaError:
            distribution.extended.update(v, add_one)
            return "caught"
        return "not"

    rows = run_merge(strategy, merge_fn)
    if caught:
        assert {*names_of(rows)} == {"NoneType"}, rows
    else:
        assert_raised_by_last(rows)
    copies = everywhere(v.numpy().tolist())
    assert len({*map(str, copies)}) == 1
    assert copies[0][0] >= 2.0 + caught  # rank 0's, on which all have run
    assert_usable(strategy)


@pytest.mark.parametrize("fails", ["raises", "exits", "interrupted"])
@pytest.mark.parametrize("number", [0, 1, 40])
def test_an_error_on_rank_0_is_raised_at_once(strategy, size, number, fails):
    v = make(strategy, np.zeros(3), name="v")
    kind = {
        "raises": ZeroDivisionError,
        "exits": SystemExit,
        "interrupted": KeyboardInterrupt,
    }[fails]
    reached = []

    def fail(v, ballast):
        v.assign_add(np.ones(3))
        if this_replica() == 0:
            raise kind("on rank 0")

    def merge_fn(distribution):
        for k in range(100):
            fn = fail if k == number else add_one
            distribution.extended.update(v, fn, args=(bytes(500),))
            reached.append(k)

    rows = run_merge(strategy, merge_fn)
    assert {*names_of(rows)} == {kind.__name__}
    if this_replica_of(strategy) == 0:
        assert reached == list(range(number))
    assert_mirrored(strategy, v, [number + 1.0] * 3)
    assert_usable(strategy)


def this_replica_of(strategy):
    return strategy.replica_id


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("fn", "count"), [(add_one, 20), (fail_on_last, 1)])
def test_merge_fn_raises_while_others_are_behind_or_have_failed(strategy, fn, count):
    v = make(strategy, np.zeros(3), name="v")

    def merge_fn(distribution):
        with contextlib.suppress(mpidist.ReplicaError):
            for _ in range(count):
                distribution.extended.update(v, fn)
        raise KeyError("of merge_fn")

    assert {*names_of(run_merge(strategy, merge_fn))} == {"KeyError"}
    assert_mirrored(strategy, v, [float(count)] * 3)
    assert_usable(strategy)


@pytest.mark.parametrize(
    ("code", "others"), [(0, "CollectiveMismatchError"), (3, "SystemExit")]
)
def test_a_follower_exits_in_an_update(strategy, size, code, others):
    v = make(strategy, np.zeros(3), name="v")

    def leave(v, code):
        v.assign_add(np.ones(3))
        if this_replica() == last_replica():
            raise SystemExit(code)

    def merge_fn(distribution):
        distribution.extended.update(v, leave, args=(code,))
        for _ in range(20):
            distribution.extended.update(v, add_one)

    names = names_of(run_merge(strategy, merge_fn))
    assert names.pop() == "SystemExit"
    assert {*names} <= {others}
    assert len({*everywhere(v.numpy().tobytes())}) == 1
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_functions_that_communicate_learn_of_an_earlier_error(strategy):
    """The rank that has failed waits at the end of the updates, and answers there."""
    v = make(strategy, np.zeros(3), name="v")
    seen = []

    def patient(v):
        try:
            reducing(v)
        except mpidist.ReplicaError as error:
            seen.append(str(error))
            raise

    def merge_fn(distribution):
        update = distribution.extended.update
        update(v, reducing)
        try:
            update(v, fail_on_last)
            update(v, patient)
        except mpidist.ReplicaError:
            seen.append("merge_fn")
        update(v, reducing)
        return "went on"

    assert {*names_of(run_merge(strategy, merge_fn))} == {"NoneType"}
    if this_replica_of(strategy) == 0:
        assert seen[-1] == "merge_fn"
        assert any(LAST in text for text in seen)
    assert len({*everywhere(v.numpy().tobytes())}) == 1
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("who", ["rank 0", "the last"])
def test_functions_of_which_only_one_communicates(strategy, size, who):
    """The others are told, wherever they are, and nothing hangs."""
    v = make(strategy, np.zeros(3), name="v")
    alone = 0 if who == "rank 0" else size - 1

    def fn(v):
        if this_replica() == alone:
            reducing(v)
        else:
            v.assign_add(np.ones(3))

    def merge_fn(distribution):
        distribution.extended.update(v, add_one)
        distribution.extended.update(v, fn)
        for _ in range(300):
            distribution.extended.update(v, add_one, args=(bytes(1000),))

    rows = run_merge(strategy, merge_fn)
    if alone == 0:
        assert {*names_of(rows)} == {"CollectiveMismatchError"}
    else:
        assert names_of(rows) == ["ReplicaError"] * (size - 1) + ["RuntimeError"]
        assert all("communicates on this rank, and not" in row.text for row in rows)
    assert len({*everywhere(v.numpy().tobytes())}) == 1
    assert_usable(strategy)


def test_an_update_in_an_update(strategy, size):
    v, w = make(strategy, np.zeros(3), name="v"), make(strategy, np.zeros(3), name="w")

    def outer(v):
        mpidist.get_strategy().extended.update(w, add_one)
        v.assign_add(w)
        if this_replica() == last_replica():
            raise ArithmeticError(LAST)

    def merge_fn(distribution):
        distribution.extended.update(v, add_one)
        distribution.extended.update(v, outer)
        distribution.extended.update(w, add_one)

    rows = run_merge(strategy, merge_fn)
    if size > 1:
        assert_raised_by_last(rows)
    for x in (v, w):
        assert len({*everywhere(x.numpy().tobytes())}) == 1
    assert_usable(strategy)


# --- copies that drift apart --------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "how", ["stays", "is overwritten", "is returned", "its shape", "elsewhere"]
)
def test_what_differs_is_found_and_named(strategy, how):
    v = make(strategy, np.zeros(3), name="v")
    w = make(strategy, np.zeros(50_000), name="w")

    def drift(w):
        x = float(this_replica())
        if how == "is returned":
            return np.full(3, x)
        if how == "its shape":
            return np.zeros(4000 + 1000 * int(x))
        if how == "elsewhere":
            return v.assign_add([x] * 3)
        return w.assign_add(np.full(50_000, x))

    def merge_fn(distribution):
        update = distribution.extended.update
        update(v, add_one)
        update(w, drift)
        if how == "is overwritten":
            update(w, lambda w: w.assign(np.ones(50_000)))
        update(v, add_one)

    rows = run_merge(strategy, merge_fn)
    assert {*names_of(rows)} == {"CollectiveMismatchError"}
    for text in (row.text for row in rows):
        assert "must be the same on all replicas" in text
        assert f"update of Variable 'w' [#{storage_of(w).key[0]}]" in text
        differing = [line for line in text.splitlines() if "[#" in line]
        assert len({line.split(":", 1)[1] for line in differing}) > 1
    for x in (v, w):
        assert len({*everywhere(x.numpy().tobytes())}) == 1
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [8_193, 50_000, 300_000])
def test_one_number_that_differs_is_found_before_long(strategy, count):
    """Of large arrays some words are compared: others in each update."""
    v = make(strategy, np.zeros(count), name="v")

    def drift(v):
        x = np.zeros(count)
        x[count // 2] = this_replica()
        v.assign_add(x)

    def look(v):
        v.assign_add(np.zeros(count))

    found = []

    def merge_fn(distribution):
        distribution.extended.update(v, drift)
        for k in range(600):
            try:
                distribution.extended.update(v, look, group=False)
            except mpidist.CollectiveMismatchError:
                found.append(k)
                break

    assert {*names_of(run_merge(strategy, merge_fn))} == {"NoneType"}
    if this_replica_of(strategy) == 0:
        assert found
    assert len({*everywhere(v.numpy().tobytes())}) == 1


# --- what rank 0 drops, and keeps ---------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_variables_that_rank_0_has_dropped_are_dropped_in_spite_of_an_error(strategy):
    v = make(strategy, np.zeros(3), name="v")

    def merge_fn(distribution):
        made = [mpidist.Variable(np.ones(30))]
        distribution.extended.update(v, add_one)
        try:
            distribution.extended.update(v, fail_on_last)
            made.clear()
            distribution.extended.update(v, add_one)
            mpidist.check_in_sync(v)
        except mpidist.ReplicaError:
            made.clear()
        gc.collect()
        distribution.extended.broadcast_to(1.0, v)

    assert {*names_of(run_merge(strategy, merge_fn))} == {"NoneType"}
    assert not group_of(strategy).registry.kept
    assert_usable(strategy)


def test_a_variable_that_some_rank_drops_before_the_end_is_made_equal_too(
    new_strategy, rank, size
):
    """Where the update fails on another rank."""
    strategy = new_strategy()
    v, extra = make(strategy, 0.0), make(strategy, np.zeros(2))
    box = [extra]
    kept = [extra] if rank else []  # rank 0 has no other reference
    del extra

    def change(variable):
        box.pop().assign(np.full(2, 1.0 + this_replica()))
        gc.collect()
        if this_replica() == last_replica():
            raise ArithmeticError(LAST)

    rows = outcomes(lambda: strategy.extended.update(v, change))
    assert {*names_of(rows)} <= {"ReplicaError", "ArithmeticError"}
    values = everywhere([variable.numpy() for variable in kept])
    for value in (value for row in values for value in row):
        np.testing.assert_array_equal(value, np.full(2, 1.0))
    assert_usable(strategy)


@pytest.mark.parametrize("dtype", ["long", "longlong", "ulonglong"])
def test_integers_of_c_that_are_alike_are_one_dtype(strategy, size, dtype):
    """Rank 0's long long becomes a long on the others: no difference of values."""
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(3, dtype))

    def assign(variable, value):
        variable.assign(value)
        return variable.read_value()

    value = np.arange(3).astype(dtype if strategy.replica_id else variable.dtype)
    result = strategy.extended.update(variable, assign, args=(value,))
    assert np.asarray(result).tolist() == [0, 1, 2]
    assert_mirrored(strategy, variable, [0, 1, 2])
