"""Functions as reduce operations: order, bits, structures, and what goes wrong."""

import functools
import math

import numpy as np
import pytest
from ml_dtypes import bfloat16
from replicas import (
    all_reduce,
    assert_usable,
    everywhere,
    from_replicas,
    local,
    make,
    merge,
    outcomes,
    own,
    raises_everywhere,
    sample,
)

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]


def matrix(rank):
    return np.array([[1.0, rank + 1.0], [0.5, 2.0]])


def test_in_the_order_of_the_ranks_with_the_same_bits(strategy, rank, size):
    product = all_reduce(strategy, lambda a, b: a @ b, matrix(rank))
    expected = functools.reduce(np.matmul, [matrix(i) for i in range(size)])
    assert {x.tobytes() for x in everywhere(product)} == {expected.tobytes()}


@pytest.mark.parametrize("count", [1, 1000, 50_000])
def test_a_ufunc(strategy, rank, size, count):
    rows = [sample(i, count, np.float64) for i in range(size)]
    total = all_reduce(strategy, np.logaddexp, rows[rank])
    expected = functools.reduce(np.logaddexp, rows)
    assert {x.tobytes() for x in everywhere(total)} == {expected.tobytes()}
    assert total.base is None
    total += 1.0  # it is this rank's own
    np.testing.assert_array_equal(rows[rank], sample(rank, count, np.float64))


def test_nests_numbers_and_dtypes(strategy, rank, size):
    tree = {
        "number": rank + 1,
        "list": [np.float32(rank), np.full((2, 0), rank), np.array(rank + 2j)],
        "byte": np.array([rank, 200], np.uint8),
    }
    result = all_reduce(strategy, max, {"a": rank + 1.5, "b": rank})
    assert result == {"a": size + 0.5, "b": size - 1}
    assert (type(result["a"]), type(result["b"])) == (float, int)
    result = all_reduce(strategy, np.multiply, tree)
    assert result["number"] == math.factorial(size)
    assert type(result["number"]) is int
    number, empty, point = result["list"]
    assert (type(number), number) == (np.float32, 0.0)
    assert (empty.shape, empty.dtype) == ((2, 0), tree["list"][1].dtype)
    one = np.asarray(rank + 1.0, bfloat16)
    product = all_reduce(strategy, lambda a, b: float(a * b), one)
    assert (product.dtype, float(product)) == (bfloat16, math.factorial(size))
    assert (point.shape, point[()]) == ((), math.prod(i + 2j for i in range(size)))
    assert result["byte"].dtype == np.uint8
    assert all_reduce(strategy, np.add, {}) == {}


def test_functions_of_every_kind(strategy, rank, size):
    class Last:
        def __call__(self, a, b):
            return b

        def method(self, a, b):
            return a

    def in_place(a, b):
        a += b
        return a

    x = np.full(3, float(rank))
    for function, expected in [
        (Last(), size - 1),
        (Last().method, 0),
        (functools.partial(np.add), sum(range(size))),
        (in_place, sum(range(size))),
        (max, size - 1),
    ]:
        value = x if function is not max else float(rank)
        result = all_reduce(strategy, function, value)
        np.testing.assert_array_equal(result, np.full(np.shape(value), expected))
    np.testing.assert_array_equal(x, np.full(3, float(rank)))


def test_strategy_reduce(strategy, rank, size):
    value = from_replicas(strategy, lambda i: {"x": np.arange(2.0) + i})
    result = strategy.reduce(lambda a, b: a - b, value, axis=None)
    expected = functools.reduce(np.subtract, [np.arange(2.0) + i for i in range(size)])
    np.testing.assert_array_equal(result["x"], expected)
    scale = 2.0

    def merge_fn(distribution, x):
        return distribution.reduce(lambda a, b: a + scale * b, x, axis=None)

    merged = own(strategy, merge(strategy, merge_fn, np.ones(2)))
    np.testing.assert_array_equal(merged, np.full(2, 1 + 2.0 * (size - 1)))


def test_what_is_refused(strategy):
    value = strategy.run(lambda: np.ones(2))
    reduce, one = strategy.reduce, np.ones(2)
    for kind, part, call in (
        (
            TypeError,
            "expected axis=None with a function",
            lambda: reduce(max, value, 0),
        ),
        (
            ValueError,
            "expected a PerReplica with a function",
            lambda: reduce(np.logaddexp, 3.0, axis=None),
        ),
        (
            TypeError,
            "strategy.reduce(function, value, axis=None)",
            lambda: strategy.extended.reduce_to(np.add, value, value),
        ),
        (TypeError, 'write "MAX"', lambda: all_reduce(strategy, np.max, one)),
        (TypeError, 'write "SUM"', lambda: all_reduce(strategy, sum, one)),
    ):
        raises_everywhere(kind, call, part)
    assert_usable(strategy)


@pytest.mark.processes
def test_an_operation_of_mpi4py(strategy):
    """It is a function, too, by which Python compares two objects: it drops NaN."""
    from mpi4py import MPI

    for value in (math.nan, np.ones(2)):
        raises_everywhere(
            TypeError,
            lambda value=value: all_reduce(strategy, MPI.MAX, value),
            'write "SUM", "MAX"',
        )
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda a, b: a.sum(), r"float64 \(\)"),
        (lambda a, b: (a + b).astype(np.float32), r"float32 \(2,\)"),
        (lambda a, b: [a, b], "expected an array, got a list"),
        (lambda a, b: None, "got None"),
    ],
)
def test_results_of_another_shape_or_dtype(strategy, function, got):
    with pytest.raises(TypeError, match=got):
        strategy.run(
            lambda: mpidist.get_replica_context().all_reduce(function, np.ones(2))
        )
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_an_exception_in_the_function_on_one_rank(strategy, rank, size):
    def function(a, b):
        if rank == size - 1:
            raise KeyError("on purpose")
        return a + b

    rows = outcomes(lambda: all_reduce(strategy, function, 1.0))
    assert [row.name for row in rows] == ["ReplicaError"] * (size - 1) + ["KeyError"]
    assert all("on purpose" in row.message for row in rows)
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_functions(strategy, rank):
    others = {
        "ufuncs": np.add if rank else np.multiply,
        "functions": (lambda a, b: a + b) if rank else (lambda a, b: b),
        "operations": np.add if rank else "SUM",
    }
    for function in others.values():
        messages = raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda f=function: all_reduce(strategy, f, np.ones(2)),
        )
        assert "do not make the same call" in messages[0]

    def by_rank(a, b):
        return a + rank * b

    (message, *_) = raises_everywhere(
        mpidist.CollectiveMismatchError, lambda: all_reduce(strategy, by_rank, 1.0)
    )
    assert "by_rank" in message
    assert "giving" in message
    assert_usable(strategy)


def test_arguments_that_are_no_arrays(strategy):
    for value in ("text", None, mpidist.IndexedSlices(np.ones((1, 2)), [0], (3, 2))):
        raises_everywhere(
            TypeError, lambda x=value: all_reduce(strategy, np.add, [1.0, x])
        )
    assert_usable(strategy)


def test_a_variable_and_a_replica_that_differs_in_shape(strategy, rank, size):
    v = make(strategy, np.ones(2), synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: v.assign(np.full(2, float(rank))))
    assert (
        local(
            strategy, lambda: mpidist.get_replica_context().all_reduce(np.maximum, v)
        ).tolist()
        == [size - 1.0] * 2
    )
    if size > 1:
        raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda: all_reduce(strategy, np.add, np.ones(2 + rank)),
        )
