"""scatter_*: rows of a variable, against NumPy, in each context and aggregation."""

import ml_dtypes
import numpy as np
import posing
import pytest
from replicas import (
    FIRST,
    MEAN,
    NONE,
    SUM,
    assert_mirrored,
    make,
    merge,
    outcomes,
    raises_everywhere,
)

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]

OPERATIONS = ["add", "sub", "mul", "div", "min", "max", "update"]
INITIAL = np.arange(1.0, 13.0).reshape(6, 2)


def rows_of(rank):
    """Return rows and indices of a rank: uneven, with duplicates, none on rank 1."""
    count = {0: 4, 1: 0, 2: 1}.get(rank, 3)
    values = (np.arange(2.0 * count).reshape(count, 2) + 2.0) * 2.0 ** (rank % 2)
    return values, np.array([3, 0, 3, 5][:count], np.int64)


def reference(how, array, values, indices):
    """Apply rows one after the other."""
    array = array.copy()
    for row, index in zip(values, indices, strict=True):
        old = array[index].copy()
        array[index] = {
            "add": old + row,
            "sub": old - row,
            "mul": old * row,
            "div": old / row,
            "min": np.minimum(old, row),
            "max": np.maximum(old, row),
            "update": row,
        }[how]
    return array


def slices(pair):
    return mpidist.IndexedSlices(*pair)


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST], ids=lambda a: a.name)
@pytest.mark.parametrize("how", OPERATIONS)
def test_each_operation_in_each_context(strategy, rank, size, how, aggregation):
    """One row, the same on all replicas: programs of tests/conformance."""
    every = [rows_of(i) for i in range(size)]
    first = reference(how, INITIAL, *every[0])

    def scatter(v, rows=every[0]):
        assert getattr(v, f"scatter_{how}")(slices(rows)) is v

    def update(v):
        strategy.extended.update(v, lambda v, x: scatter(v, x) and None, (every[0],))

    refused = how in ("min", "max", "update") and aggregation in (SUM, MEAN)
    for write in (
        scatter,
        lambda v: merge(strategy, lambda s: scatter(v)),
        update,
        lambda v: strategy.run(lambda: scatter(v, every[0])),
    )[: 3 if aggregation in (SUM, MEAN) else 4]:
        v = make(strategy, INITIAL, aggregation=aggregation, name="rows")
        if refused and write is not update:
            parts = "'rows'", "ONLY_FIRST_REPLICA"
            raises_everywhere(NotImplementedError, lambda w=write, v=v: w(v), *parts)
            assert_mirrored(strategy, v, INITIAL)
        elif not refused:
            write(v)
            assert_mirrored(strategy, v, first)


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST], ids=lambda a: a.name)
@pytest.mark.parametrize("how", ["add", "sub", "mul", "div"])
def test_rows_of_each_replica_are_combined(strategy, rank, size, how, aggregation):
    every = [rows_of(i) for i in range(size)]
    v = make(strategy, INITIAL, aggregation=aggregation)
    strategy.run(lambda: getattr(v, f"scatter_{how}")(slices(every[rank])))
    chosen = every[:1] if aggregation is FIRST else every
    values = np.concatenate([x for x, _ in chosen])
    values /= size if aggregation is MEAN else 1
    indices = np.concatenate([i for _, i in chosen])
    mpidist.check_in_sync(v)
    np.testing.assert_allclose(v, reference(how, INITIAL, values, indices), rtol=1e-14)


def test_a_mirrored_of_rows(strategy):
    """It is n times the rows of one, each divided by n."""
    v = make(strategy, INITIAL)
    value = strategy.run(lambda: slices(rows_of(0)))
    mean = strategy.extended.reduce_to("MEAN", value, v)
    assert isinstance(mean, mpidist.Mirrored)
    v.scatter_add(mean)
    mpidist.check_in_sync(v)
    expected = reference("add", INITIAL, *rows_of(0))
    np.testing.assert_allclose(v, expected, rtol=1e-14)


@pytest.mark.parametrize(
    "dtype",
    ["int8", "int64", "uint16", "float16", "float32", "complex64", ml_dtypes.bfloat16],
)
def test_dtypes(strategy, rank, size, dtype):
    dtype = np.dtype(dtype)
    v = make(strategy, np.full(4, 8, dtype), aggregation=SUM)
    indices = np.array([1, 1, 3], np.int32 if rank else np.uint8)
    strategy.run(lambda: v.scatter_add(mpidist.IndexedSlices([1, 1, 2], indices)))
    assert v.dtype == dtype
    assert_mirrored(strategy, v, np.array([8, 8 + 2 * size, 8, 8 + 2 * size], dtype))
    v.scatter_mul(mpidist.IndexedSlices(np.full(2, 2, dtype), [0, 0]))
    assert_mirrored(
        strategy, v, np.array([32, 8 + 2 * size, 8, 8 + 2 * size]).astype(dtype)
    )
    v.scatter_div(mpidist.IndexedSlices(np.full(1, 2, dtype), [2]))
    assert v[2] == 4
    mpidist.check_in_sync(v)


@pytest.mark.parametrize("dtype", [np.int64, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("how", OPERATIONS)
def test_rows_that_are_views_of_the_variable(strategy, how, dtype):
    initial = np.array([2, 4, 8, 32]).astype(dtype)
    v, expected = make(strategy, initial), make(strategy, initial)
    places = [1, 2, 3, 3]
    getattr(v, f"scatter_{how}")(mpidist.IndexedSlices(v.value(), places))
    getattr(expected, f"scatter_{how}")(mpidist.IndexedSlices(initial, places))
    assert_mirrored(strategy, v, expected.numpy())


def test_quotients_of_integers_are_rounded_towards_0(strategy, size):
    v = make(strategy, np.array([7, -7, 7, -7, 9]), aggregation=SUM)
    v.scatter_div(mpidist.IndexedSlices([2, 2, -2, -2, 2, 2], [0, 1, 2, 3, 4, 4]))
    assert_mirrored(strategy, v, [3, -3, -3, 3, 2])
    strategy.run(lambda: v.scatter_div(mpidist.IndexedSlices([-2], [0])))
    assert v[0] == {1: -1, 2: 0}.get(size, 0)
    raises_everywhere(
        ValueError,
        lambda: v.scatter_div(mpidist.IndexedSlices([0], [0])),
        "cannot be divided by 0",
    )
    mpidist.check_in_sync(v)


def test_vectors_and_more_dimensions(strategy, rank, size):
    v = make(strategy, np.zeros(5), aggregation=SUM)
    w = make(strategy, np.zeros((3, 2, 2)), aggregation=SUM)

    def step():
        v.scatter_add(mpidist.IndexedSlices([float(rank)], [rank % 5]))
        w.scatter_add(mpidist.IndexedSlices(np.ones((1, 2, 2)), [2], (3, 2, 2)))

    strategy.run(step)
    assert_mirrored(strategy, v, [*range(size), *[0.0] * (5 - size)])
    own = strategy.run(lambda: mpidist.IndexedSlices([1.0], [rank % 5]))
    strategy.run(lambda: v.scatter_add(own))  # closed over, as by `assign`
    assert_mirrored(strategy, v, [*range(1, size + 1), *[0.0] * (5 - size)])
    assert_mirrored(
        strategy, w, np.array([0.0, 0, size])[:, None, None] * np.ones(4).reshape(2, 2)
    )


def test_no_rows_at_all(strategy):
    v = make(strategy, INITIAL, aggregation=SUM)
    nothing = mpidist.IndexedSlices(np.zeros((0, 2)), [])
    v.scatter_add(nothing)
    strategy.run(lambda: v.scatter_add(nothing))
    assert_mirrored(strategy, v, INITIAL)
    empty = make(strategy, np.zeros((0, 2)))
    empty.scatter_add(nothing)
    raises_everywhere(
        ValueError, lambda: empty.scatter_add(mpidist.IndexedSlices([[1.0, 1.0]], [0]))
    )


@pytest.mark.parametrize("given", [([[1], [1, 2]], [0, 1]), ([1.0], [[1], [1, 2]])])
def test_lists_of_several_lengths(given):
    with pytest.raises(
        ValueError, match=r"^IndexedSlices\(\w+\): expected an array or"
    ):
        mpidist.IndexedSlices(*given)


def test_rows_of_itself(strategy):
    v = make(strategy, INITIAL)
    v.scatter_update(mpidist.IndexedSlices(v[::-1], [*range(6)]))
    assert_mirrored(strategy, v, INITIAL[::-1])
    v.scatter_add(mpidist.IndexedSlices(v, [*range(6)]))
    assert_mirrored(strategy, v, 2 * INITIAL[::-1])


BAD = {
    "negative": (([[1.0, 2.0]], [-1]), ValueError, "indices from 0 to 5, got [-1]"),
    "too large": (([[1.0, 2.0]], [6]), ValueError, "indices from 0 to 5, got [6]"),
    "row shape": (([[1.0, 2.0, 3.0]], [0]), ValueError, "shape (1, 2)"),
    "no row shape": (([1.0], [0]), ValueError, "shape (1, 2)"),
    "dtype": ((np.ones((1, 2)) * 1j, [0]), ValueError, "fits into float64"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_rows(strategy, rank, size, kind):
    pair, error, part = BAD[kind]
    bad, good = slices(pair), mpidist.IndexedSlices([[1.0, 2.0]], [0])
    v = make(strategy, INITIAL, aggregation=SUM, name="rows")
    last = bad if rank == size - 1 else good
    for attempt in (
        lambda: v.scatter_add(bad),
        lambda: merge(strategy, lambda s: v.scatter_add(bad)),
        lambda: strategy.run(lambda: v.scatter_add(bad)),
        lambda: strategy.run(lambda: v.scatter_add(last)),
        lambda: v.scatter_add(last),
    ):
        raises_everywhere(error, attempt, "Variable 'rows'.scatter_add", part)
        assert_mirrored(strategy, v, INITIAL)


@pytest.mark.mpi(min_size=2)
def test_bad_rows_in_update_are_undone(strategy, rank, size):
    v = make(strategy, INITIAL)

    def fn(v):
        v.assign_add(np.ones((6, 2)))
        v.scatter_add(mpidist.IndexedSlices([[1.0, 1.0]], [7 if rank == 1 else 0]))

    rows = outcomes(lambda: strategy.extended.update(v, fn))
    expected = ["ValueError" if i == 1 else "ReplicaError" for i in range(size)]
    assert [row.name for row in rows] == expected
    mpidist.check_in_sync(v)


def test_what_is_no_rows(strategy, rank):
    v, scalar = make(strategy, INITIAL, name="rows"), make(strategy, 1.0)
    flags = make(strategy, [True, False])
    one = mpidist.IndexedSlices([1.0], [0])
    per_replica = strategy.run(lambda: mpidist.IndexedSlices([[1.0, 1.0]], [0]))
    numbers = strategy.run(lambda: np.ones((1, 2)))
    attempts = [
        (
            TypeError,
            "expected a `mpidist.IndexedSlices`",
            lambda: v.scatter_add(INITIAL),
        ),
        (ValueError, "shape () has no rows", lambda: scalar.scatter_add(one)),
        (TypeError, "got a PerReplica", lambda: v.scatter_add(per_replica)),
        (
            TypeError,
            "got a PerReplica",
            lambda: v.scatter_add(mpidist.IndexedSlices(numbers, [0])),
        ),
        (
            ValueError,
            "bool cannot be subtracted",
            lambda: flags.scatter_sub(mpidist.IndexedSlices([True], [0])),
        ),
    ]
    for kind, part, attempt in attempts:
        raises_everywhere(kind, attempt, part)
    assert_mirrored(strategy, v, INITIAL)


@pytest.mark.mpi(min_size=2)
def test_rows_that_differ_in_cross_replica_context(strategy, rank):
    v = make(strategy, INITIAL, name="rows")
    for pair in (
        ([[1.0, float(rank)]], [0]),
        ([[1.0, 1.0]], [rank]),
        (np.ones((rank + 1, 2)), [0] * (rank + 1)),
    ):
        raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda p=pair: v.scatter_add(slices(p)),
            "Variable 'rows'.scatter_add",
        )
    assert_mirrored(strategy, v, INITIAL)


@pytest.mark.mpi(min_size=2)
def test_other_operations_on_other_ranks(strategy, rank):
    v = make(strategy, INITIAL, aggregation=SUM)
    one = mpidist.IndexedSlices([[1.0, 1.0]], [0])

    def step():
        (v.scatter_sub if rank else v.scatter_add)(one)

    raises_everywhere(mpidist.CollectiveMismatchError, lambda: strategy.run(step))
    raises_everywhere(mpidist.CollectiveMismatchError, step)
    assert_mirrored(strategy, v, INITIAL)


def test_indexed_slices_themselves(strategy, rank, size):
    x = mpidist.IndexedSlices(np.ones((2, 3)), [4, 1], dense_shape=[5, 3])
    assert x.dense_shape == (5, 3)
    assert x.dtype == np.float64
    assert repr(x).startswith("IndexedSlices(values=array(")
    for bad, kind in (
        ((np.ones((2, 3)), [0]), ValueError),
        ((np.ones((2, 3)), [[0, 1]]), ValueError),
        ((1.0, [0]), ValueError),
        ((np.ones(2), [0.5, 1.0]), TypeError),
        ((np.ones(1), [True]), TypeError),
        ((None, [0]), TypeError),
    ):
        with pytest.raises(kind):
            mpidist.IndexedSlices(*bad)


def test_in_all_reduce_and_reduce(strategy, rank, size):
    """Rows of all replicas one after the other, not added; TensorFlow does so too."""

    def step():
        mine = mpidist.IndexedSlices(
            np.full((rank + 1, 2), rank + 1.0), [rank] * (rank + 1)
        )
        both = mpidist.get_replica_context().all_reduce("SUM", {"s": mine, "d": 1.0})
        assert both["d"] == size
        return mine, both["s"]

    mine, total = strategy.run(step)
    (total,) = strategy.experimental_local_results(total)
    indices = np.repeat(np.arange(size), np.arange(1, size + 1))
    np.testing.assert_array_equal(total.indices, indices)
    np.testing.assert_array_equal(total.values, (indices + 1.0)[:, None] * [1.0, 1.0])
    again = strategy.reduce("SUM", mine, axis=None)
    np.testing.assert_array_equal(again.values, total.values)
    mean = strategy.extended.reduce_to("MEAN", mine, mine)
    (mean,) = strategy.experimental_local_results(mean)
    np.testing.assert_allclose(mean.values, total.values / size)
    raises_everywhere(TypeError, lambda: strategy.reduce("MAX", mine, axis=None), "MAX")


@pytest.mark.processes  # CuPy's stand-in is one for the process
@pytest.mark.parametrize("implementation", ["STAGED", "DIRECT"])
def test_on_a_device(monkeypatch, new_strategy, implementation):
    module = posing.install(monkeypatch)
    strategy = new_strategy(device="gpu", implementation=implementation)
    rank, size = strategy.replica_id, strategy.num_replicas_in_sync
    every = [rows_of(i) for i in range(size)]
    values = np.concatenate([x for x, _ in every])
    indices = np.concatenate([i for _, i in every])
    for how in OPERATIONS:
        aggregation = SUM if how in ("add", "sub", "mul", "div") else FIRST
        v = make(strategy, INITIAL, aggregation=aggregation)
        mine = [module.asarray(x) for x in rows_of(rank)]
        strategy.run(
            lambda v=v, how=how, mine=mine: getattr(v, f"scatter_{how}")(slices(mine))
        )
        both = (values, indices) if aggregation is SUM else every[0]
        np.testing.assert_allclose(v.numpy(), reference(how, INITIAL, *both))
        getattr(v, f"scatter_{how}")(slices(rows_of(0)))  # from the host
        getattr(v, f"scatter_{how}")(slices([module.asarray(x) for x in rows_of(0)]))
        mpidist.check_in_sync(v)
    raises_everywhere(
        ValueError,
        lambda: v.scatter_add(slices([module.ones((1, 2)), module.asarray([9])])),
        "got [9]",
    )
