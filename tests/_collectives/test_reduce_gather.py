"""Strategy.reduce and gather, and all_gather: what is combined, and how."""

import collections
import dataclasses
import functools
import itertools
import time
import types

import ml_dtypes
import numpy as np
import pytest
from replicas import (
    DIRECT,
    assert_usable,
    context,
    everywhere,
    from_replicas,
    own,
    raises_everywhere,
    rarely,
)

import mpidist
from mpidist._base import checksums
from mpidist._runtime.registry import key_of
from mpidist._strategy.strategy import group_of

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]

REDUCERS = {op.name: getattr(np, op.name.lower()) for op in mpidist.ReduceOp}


def assert_same_on_all(x):
    x = np.asarray(x)
    # Not the padding of longdouble, in which anything may be.
    rows = everywhere((x.shape, x.dtype.str, checksums.value_bytes(x).tobytes()))
    assert rows == [rows[0]] * len(rows)


def reduce(strategy, x, axis=None, op="SUM"):
    return strategy.reduce(op, strategy.run(lambda: x), axis)


def gather(strategy, x, axis=0):
    return strategy.gather(strategy.run(lambda: x), axis)


def all_gather(strategy, x, axis=0, options=None):
    return own(strategy, strategy.run(lambda: context().all_gather(x, axis, options)))


# --- reduce, element by element -------------------------------------------------------


def test_aggregations_are_taken_for_operations(strategy, size):
    value = strategy.run(lambda: 2.0)
    sum_, mean = mpidist.VariableAggregation.SUM, mpidist.VariableAggregation.MEAN
    assert strategy.reduce(sum_, value, axis=None) == 2.0 * size
    assert strategy.reduce(mean, value, axis=None) == 2.0


def test_numbers_stay_numbers(strategy, rank, size):
    value = strategy.run(lambda: {"i": rank, "f": 1.5, "s": np.float32(2), "c": 1j})
    total = strategy.reduce("SUM", value, axis=None)
    assert total == {
        "i": size * (size - 1) // 2,
        "f": 1.5 * size,
        "s": 2 * size,
        "c": 1j * size,
    }
    assert [type(x) for x in total.values()] == [int, float, np.float32, complex]
    mean = strategy.reduce("MEAN", value, axis=None)
    assert type(mean["i"]) is float
    assert mean["i"] == (size - 1) / 2
    x = np.array(1.5, np.longdouble)  # of no dimensions is an array by all ways
    assert type(reduce(strategy, x, op="MAX")) is np.ndarray


def test_small_floats_are_summed_in_float32(strategy, size):
    """2048 + 1 + 1 + ... is 2048 in float16, and rounded once it is not."""
    value = from_replicas(strategy, lambda i: np.float16([2048 if i == 0 else 1]))
    result = strategy.reduce("SUM", value, axis=None)
    assert result.dtype == np.float16
    assert result[0] == np.float16(2048 + size - 1)
    rows = strategy.run(lambda: np.full(5000, 1.0, np.float16))
    assert strategy.reduce("MEAN", rows, axis=0) == 1.0
    assert strategy.reduce("SUM", rows, axis=0) == np.float16(5000 * size)


def test_inputs_are_not_changed(strategy):
    x = np.arange(6.0).reshape(2, 3)
    value = strategy.run(lambda: x)
    for axis in (None, 0, (0, 1)):
        result = strategy.reduce("SUM", value, axis=axis)
        np.asarray(result)[...] = -1.0
    strategy.gather(value, axis=0)[...] = -1.0
    np.testing.assert_array_equal(x, np.arange(6.0).reshape(2, 3))


def test_bool_and_complex(strategy, rank, size):
    x = np.array([rank == 0, True, False])
    for op, first in (("MAX", True), ("MIN", size == 1)):
        result = reduce(strategy, x, op=op)
        np.testing.assert_array_equal(result, [first, True, False])
        assert result.dtype == np.bool_
        assert reduce(strategy, x, 0, op) == (op == "MAX")
    x = np.array([rank + 1j, 2.0], np.complex64)
    total = reduce(strategy, x)
    assert total.dtype == np.complex64
    want = [size * (size - 1) / 2 + 1j * size, 2.0 * size]
    np.testing.assert_array_equal(total, want)
    assert reduce(strategy, x, 0, "MEAN") == np.complex64(total.sum() / 2 / size)


# --- reduce along axes ----------------------------------------------------------------


def test_no_axes(strategy, size):
    """An empty tuple is no axis at all: element by element."""
    value = from_replicas(strategy, lambda i: np.arange(3.0) + i)
    for op in REDUCERS:
        np.testing.assert_array_equal(
            strategy.reduce(op, value, axis=()), strategy.reduce(op, value, axis=None)
        )


def rows_of(i):
    """Return another number of rows on each replica; none on the first and third."""
    return np.arange(2.0 * i).reshape(i, 2) + i if i % 2 else np.zeros((0, 2))


@pytest.mark.mpi(min_size=2)
def test_replicas_without_rows(strategy, size):
    """They count for nothing: the result is that of all rows together."""
    value = from_replicas(strategy, rows_of)
    everything = np.concatenate([rows_of(i) for i in range(size)])
    for (op, function), axis in itertools.product(REDUCERS.items(), (0, (0, 1))):
        result = strategy.reduce(op, value, axis=axis)
        np.testing.assert_allclose(result, function(everything, axis=axis))
        assert_same_on_all(result)


@pytest.mark.mpi(min_size=2)
def test_the_extreme_of_replicas_without_rows(strategy):
    """Their neutral element is no value of its own: also for the largest numbers."""
    dtypes = ("int8", "uint8", "float16", "float64", "bool")
    for op, dtype in itertools.product(("MIN", "MAX"), dtypes):
        x = np.array([1, 0], dtype) if op == "MIN" else np.array([0, 1], dtype)
        value = from_replicas(strategy, lambda i, x=x: x if i == 1 else x[:0])
        result = strategy.reduce(op, value, axis=0)
        assert result == x[1]
        assert np.asarray(result).dtype == dtype
        assert isinstance(result, np.generic)


def test_nothing_anywhere(strategy):
    """No rows on any replica: NaN without a warning, 0, 1."""
    value = strategy.run(lambda: np.zeros((0, 2)))
    assert np.isnan(strategy.reduce("MEAN", value, axis=0)).all()
    np.testing.assert_array_equal(strategy.reduce("SUM", value, axis=0), [0, 0])
    np.testing.assert_array_equal(strategy.reduce("PROD", value, axis=0), [1, 1])
    for nothing in (value, np.zeros((0, 2))):
        raises_everywhere(ValueError, lambda x=nothing: strategy.reduce("MAX", x, 0))


@pytest.mark.mpi(min_size=2)
def test_axes_or_dtypes_that_differ(strategy, rank):
    """What is reduced over the axes may have one shape and dtype all the same."""
    x = np.eye(2, dtype=np.float32)
    narrow = x.astype(np.float16) if rank == 1 else x
    for value, axis in ((x, min(rank, 1)), (narrow, 0)):
        raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda value=value, axis=axis: reduce(strategy, value, axis),
        )


# --- reduce of what is not per replica ------------------------------------------------


def test_values_that_are_not_per_replica(strategy):
    """b.6: MEAN returns the value; SUM would count it nobody knows how often."""
    x = np.array([[1.0, 2.0], [3.0, 6.0]])
    assert strategy.reduce("MAX", 5, axis=None) == 5
    np.testing.assert_array_equal(strategy.reduce("MEAN", x, axis=0), [2.0, 4.0])
    assert strategy.reduce("MIN", x, axis=(0, 1)) == 1.0
    assert strategy.reduce("MEAN", np.array([1, 2]), axis=0) == 1.5
    for op in ("SUM", "PROD"):
        for axis in (None, 0):
            for message in raises_everywhere(
                ValueError,
                lambda op=op, axis=axis: strategy.reduce(op, x, axis=axis),
            ):
                assert "A non-DistributedValues value" in message
                assert f"ReduceOp.{op}" in message
                assert "strategy.run(lambda: x), axis=None)" in message
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_rows_that_are_not_per_replica_and_differ(strategy, rank):
    for values, indices in (([1.0], [rank]), ([float(rank)], [0])):
        rows = mpidist.IndexedSlices(values, indices)
        raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda rows=rows: strategy.reduce("MEAN", rows, axis=None),
        )
    same = mpidist.IndexedSlices([1.0], [2])
    assert strategy.reduce("MEAN", same, axis=None).indices == [2]


def test_mixed_nests(strategy, rank, size):
    value = strategy.run(lambda: float(rank))
    result = strategy.reduce("MEAN", {"p": value, "n": 7.0}, axis=None)
    assert result == {"p": (size - 1) / 2, "n": 7.0}
    raises_everywhere(
        ValueError, lambda: strategy.reduce("SUM", [value, 7.0], axis=None)
    )
    assert_usable(strategy)


# --- gather ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "int8", "uint64", "float16", "float32", "longdouble", "complex64"),
        *(">f8", "bfloat16"),
    ],
)
def test_gather_keeps_the_dtype(strategy, size, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16

    def make(i):
        return np.arange(2 * i).reshape(i, 2).astype(dtype)

    rows = np.concatenate([make(i) for i in range(size)])
    for result, expected in (
        (strategy.gather(from_replicas(strategy, make), axis=0), rows),
        (strategy.gather(from_replicas(strategy, lambda i: make(i).T), axis=1), rows.T),
        (gather(strategy, make(2)[:0]), rows[:0]),
        (gather(strategy, make(2)[:0], axis=1), np.zeros((0, 2 * size), dtype)),
    ):
        assert result.dtype == np.dtype(dtype).newbyteorder("=")
        np.testing.assert_array_equal(result, expected)


def test_gather_of_one_value(strategy):
    """b.5: returned unchanged, not n times."""
    x = np.arange(3)
    assert strategy.gather(x, axis=0) is x
    value = strategy.run(lambda: x)
    mirrored = strategy.extended.reduce_to("MAX", value, value)
    np.testing.assert_array_equal(strategy.gather(mirrored, axis=0), x)
    with strategy.scope():
        v = mpidist.Variable([1.0, 2.0])
    np.testing.assert_array_equal(strategy.gather(v, axis=0), [1.0, 2.0])


# --- all_gather -----------------------------------------------------------------------


def test_all_gather_of_nothing(strategy):
    assert all_gather(strategy, []) == []
    assert all_gather(strategy, {}) == {}


def gather_both(strategies, make, axis=0):
    """Return what all_gather gives on each strategy, and what is right."""
    size = strategies[0].num_replicas_in_sync
    rank = strategies[0].replica_id
    parts = [make(i) for i in range(size)]
    expected = [np.concatenate(column, axis) for column in zip(*parts, strict=True)]

    def step():
        return context().all_gather(make(rank), axis)

    return [own(strategy, strategy.run(step)) for strategy in strategies], expected


@pytest.mark.parametrize(
    "leaves",
    [1, 9, 128, 129, pytest.param(1500, marks=pytest.mark.processes)],
)
def test_all_gather_of_many_leaves(strategy, new_strategy, leaves):
    """Their lengths have different places, and more than a small area has room for."""
    strategies = [strategy, new_strategy(implementation=DIRECT)]

    def make(i):
        return [np.full(((i + k) % 3, 2), 10 * i + k, np.int32) for k in range(leaves)]

    for _ in range(1 + (leaves < 1000)):
        results, expected = gather_both(strategies, make)
        for result in results:
            for x, y in zip(result, expected, strict=True):
                assert x.dtype == np.int32
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_all_gather_of_what_is_small_on_some_ranks(strategy, new_strategy, size, axis):
    """The ranks take one way, whatever the sizes, and return to the other."""
    strategies = [strategy, new_strategy(guard=False)]

    def make(i, large):
        shape = [3, 2, 5]
        shape[axis] = 60_001 if large in (i, "all") else i
        x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + i
        length = 2 if large == "all" else i + 1
        return [x, np.full((2, length, 3), float(i)).swapaxes(1, axis)]

    for large in (size - 1, None, "all", 0, "all", None):
        results, expected = gather_both(strategies, lambda i: make(i, large), axis)  # noqa: B023
        for result in results:
            for x, y in zip(result, expected, strict=True):
                assert x.flags.c_contiguous
                np.testing.assert_array_equal(x, y)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [rarely(1), 100_000])
def test_calls_of_a_rank_that_comes_late(new_strategy, rank, size, count):
    """All exchange their headers once more, and nothing is lost."""
    strategy = new_strategy()
    guard = group_of(strategy).guard
    # Of the late rank alone: the others have the time to wait for it.
    short = mpidist.experimental.CommunicationOptions(timeout_seconds=4)

    def step():
        x = np.full(count, float(rank))
        before = guard.sequence
        for k in range(3):
            options = None
            if k == 1 and rank == size - 1:
                time.sleep(2.2)  # more than half of the shortest deadline
                options = short
            found = context().all_gather(x, 0, options)
            np.testing.assert_array_equal(found, np.repeat(np.arange(size), count))
            total = context().all_reduce("SUM", x, options)
            assert (total == size * (size - 1) / 2).all()
        return guard.sequence - before

    headers = own(strategy, strategy.run(step))
    assert len({*everywhere(headers)}) == 1
    assert_usable(strategy)


@pytest.mark.processes  # patches one rank alone
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("implementation", ["AUTO", "DIRECT"])
def test_all_gather_without_memory_on_one_rank(
    new_strategy, rank, size, monkeypatch, implementation
):
    """What one rank has no memory for, all ranks raise, and nothing hangs."""
    strategy = new_strategy(implementation=implementation)
    x = np.ones(200_000 + rank)

    def step(x=x):
        return context().all_gather(x, 0)

    strategy.run(step)
    if rank == size - 1:
        collectives = group_of(strategy).collectives
        if collectives.resources.node is None:
            monkeypatch.setattr(collectives.resources.pool, "empty", no_memory)
        else:
            full = types.SimpleNamespace(take=no_memory)
            for plan in collectives.cache.plans():
                node = dataclasses.replace(plan.large.node, pool=full)
                monkeypatch.setattr(plan.large, "node", node)
    for message in raises_everywhere(MemoryError, lambda f=step, s=strategy: s.run(f)):
        assert "no memory here" in message
    monkeypatch.undo()
    assert own(strategy, strategy.run(step)).size == sum(
        200_000 + i for i in range(size)
    )


@pytest.mark.parametrize("nodes", [1, 2])
def test_all_gather_without_memory_for_a_copy(new_strategy, rank, nodes, monkeypatch):
    """An array that is not contiguous is copied before anything has moved."""
    monkeypatch.setenv("MPIDIST_SIMULATED_NODES", str(nodes))
    strategy = new_strategy()
    huge = np.broadcast_to(np.float64(0.0), (2**44,))  # of one number in memory

    def step(x):
        return context().all_gather(x, 0)

    raises_everywhere(MemoryError, lambda: strategy.run(step, args=(huge,)))
    assert own(strategy, strategy.run(step, args=(np.ones(2),))).all()


def no_memory(*args):
    raise MemoryError("no memory here")


# --- what is refused, on all replicas ------------------------------------------------


class Losses(collections.ChainMap):
    """Is no node of a nest: mpidist sees one object."""


def reduce_per_replica(strategy, x, op):
    return strategy.reduce(op, from_replicas(strategy, lambda i: x), axis=None)


def reduce_to(strategy, x, op):
    return strategy.extended.reduce_to(op, strategy.run(lambda: x), "/cpu:0")


def gather_one(strategy, x):
    return strategy.gather(x, axis=0)


ROWS, LOSSES = np.ones((2, 3)), Losses({"x": np.ones(2)})
BOOLS = mpidist.IndexedSlices([True, False], [0, 1])
EIGHT_BITS = np.ones(2, ml_dtypes.float8_e5m2)
REFUSED = [
    *((reduce, (ROWS, x), TypeError, "`axis`") for x in ("0", 1.0, True, {0})),
    *((reduce, (ROWS, x), TypeError, "`axis`") for x in ((0, "1"), [0, "1"])),
    *((reduce, (ROWS, (0, 0), op), ValueError, "") for op in REDUCERS),
    *((reduce, (ROWS, (1, -1), op), ValueError, "") for op in REDUCERS),
    *(
        (reduce_per_replica, (x, op), TypeError, "Strategy.reduce")
        for x in (None, "text", np.array([None]), {1, 2})
        for op in ("SUM", "MEAN")
    ),
    *(
        (reduce, (np.ones(3, bool), axis, op), TypeError, "bool is not def")
        for op in ("SUM", "MEAN", "PROD")
        for axis in (None, 0)
    ),
    (reduce, (np.ones(3, bool),), TypeError, "astype(int)"),
    (reduce, (BOOLS, None, "MEAN"), TypeError, "MEAN of bool is not defined"),
    # It has NumPy's kind of floats, but no type of MPI, which broke the call off.
    *((reduce, (EIGHT_BITS, None, op), TypeError, "float8") for op in ("SUM", "MAX")),
    *((reduce, (1j * ROWS, x, "MAX"), TypeError, "complex128") for x in (None, 0)),
    *((reduce, (ROWS[:0], 0, op), ValueError, "no elem") for op in ("MIN", "MAX")),
    # MEAN and MAX gave each rank its own.
    (reduce, (LOSSES,), ValueError, "run(lambda: x)"),
    (reduce_to, (LOSSES, "SUM"), ValueError, "run(lambda: x)"),
    *((reduce, (LOSSES, None, op), TypeError, "dict(") for op in ("MEAN", "MAX")),
    *((reduce_to, (LOSSES, op), TypeError, "dict(") for op in ("MEAN", "MAX")),
    *(
        (call, (x, axis), kind, part)
        for call in (gather, all_gather)
        for x, axis, kind, part in (
            (1.0, 0, ValueError, "at least one dimension"),
            (np.float32(1), 0, ValueError, "numpy.reshape(x, (1,))"),
            (np.ones(2), 1, ValueError, "expected -1 <= axis < 1"),
            (np.ones((2, 2)), -3, ValueError, "expected -2 <= axis < 2"),
            *((np.ones(2), axis, TypeError, "`axis`") for axis in ("0", None, 0.0)),
            (np.ones(2), (0,), TypeError, "`axis`"),
            (np.array(["a"]), 0, TypeError, "dtype"),
        )
    ),
    *((gather_one, (x,), TypeError, "Strategy.gather") for x in ("text", None)),
    (gather_one, ([1.0, 2.0],), TypeError, "Strategy.gather"),
    (gather_one, ({"a": ROWS},), TypeError, "Strategy.gather"),
    *((all_gather, (x,), TypeError, "all_gather") for x in ("text", {"a": None})),
    (all_gather, ([1.0, 2.0],), ValueError, "`numpy.asarray(x)` for an array of them"),
]


@pytest.mark.parametrize(
    "function", [reduce, reduce_per_replica, reduce_to, gather, all_gather, gather_one]
)
def test_arguments_that_are_refused(strategy, function):
    for call, arguments, kind, part in REFUSED:
        if call is function:
            raises_everywhere(kind, lambda a=arguments: function(strategy, *a), part)
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "call",
    [
        functools.partial(reduce, op="MEAN"),
        functools.partial(reduce, op="MEAN", axis=0),
        gather,
        all_gather,
    ],
    ids=["reduce", "reduce rows", "gather", "all_gather"],
)
def test_calls_that_differ(strategy, rank, size, call):
    last = rank == size - 1
    for other in (
        np.ones((2, 4)),
        np.ones((2, 3), np.float32),
        np.ones((2, 3, 1)),
        np.ones(3),
    ):
        messages = raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda x=other if last else ROWS: call(strategy, x),
        )
        assert len({message.split("] ", 1)[1] for message in messages}) == 1
        if call in (gather, all_gather):
            assert "float64 (*, 3)" in messages[0]
    for message in raises_everywhere(
        ValueError, lambda: call(strategy, ROWS, axis=5 if last else 0)
    ):
        assert "got axis=5" in message
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_rows_that_differ(strategy, rank):
    """Rank 0's rows were added, the others' divided; shapes were each rank's own.

    An error of one rank was told once more, and waited for until the deadline.
    """
    for op, shape in (("MEAN" if rank else "SUM", None), ("SUM", [5 + rank])):
        rows = mpidist.IndexedSlices([1.0], [rank], shape)
        raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda op=op, rows=rows: reduce(strategy, rows, op=op),
        )
    rows = mpidist.IndexedSlices(np.ones(2), [0, 1])
    raises_everywhere(
        TypeError, lambda: reduce(strategy, rows if rank else np.ones(2, bool))
    )
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_all_gather_with_another_implementation(strategy, rank, size):
    options = mpidist.experimental.CommunicationOptions(implementation=DIRECT)
    total = size * (size - 1) // 2
    assert all_gather(strategy, np.ones(rank), options=options).shape == (total,)
    for message in raises_everywhere(
        mpidist.CollectiveMismatchError,
        lambda: all_gather(strategy, ROWS, options=options if rank else None),
    ):
        assert "with implementation=DIRECT" in message
    assert_usable(strategy)


# --- names of values ------------------------------------------------------------------


def _assign_in_merge_fn(v, value):
    def merge_fn(strategy):
        strategy.extended.update(v, lambda v, x: v.assign(x), args=(value,))

    context().merge_call(merge_fn)


def test_all_ways_of_a_reduction_draw_one_key(new_strategy, rank, size):
    """Which way a rank goes depends on what it passes: here, a pair that is a list.

    Values are named by how many were made before, so the ways must count alike.
    """
    strategy = new_strategy()
    registry = group_of(strategy).registry
    with strategy.scope():
        v = mpidist.Variable(np.zeros(2))
    values = [from_replicas(strategy, lambda r, k=k: np.full(2, r + k)) for k in (0, 1)]
    device = strategy.extended.worker_devices[0]
    for turn in range(size + 1):
        kind = list if rank < turn else tuple
        pairs = [kind((value, v)) for value in values]
        before = registry.count
        first, second = strategy.extended.batch_reduce_to("SUM", pairs)
        assert registry.count == before + 1
        keys = key_of(first), key_of(second)
        assert everywhere(keys) == [keys] * size
        assert len({*keys}) == 2
        # An update in merge_fn names it to the other ranks.
        strategy.run(functools.partial(_assign_in_merge_fn, v, second))
        assert v.numpy().tolist() == [size * (size + 1) / 2] * 2
        # To one rank, and to all, in one call.
        before = registry.count
        mixed = strategy.extended.batch_reduce_to(
            "SUM", [(values[0], device), (values[1], v), (values[0], v)]
        )
        assert registry.count == before + 1
        assert key_of(mixed[1]) != key_of(mixed[2])
        assert (mixed[0] is not None) == (rank == 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("result", ["nothing", "a number"])
def test_values_with_different_names_are_found_by_run(new_strategy, rank, result):
    strategy = new_strategy()

    def fn():
        return None if result == "nothing" else 1.0

    strategy.run(fn)
    if rank == 1:
        group_of(strategy).registry.next_key()  # a mistake in mpidist
    messages = raises_everywhere(
        mpidist.CollectiveMismatchError, lambda: strategy.run(fn)
    )
    for message in messages:
        assert "[#" in message
        assert "rank 1" in message
