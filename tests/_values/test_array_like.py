"""What acts as an array: variables, Mirrored, and the PerReplica of one replica."""

import operator

import numpy as np
import pytest
from replicas import (
    FIRST,
    MEAN,
    ON_READ,
    SUM,
    assert_copies,
    make,
    merge,
    mirrored_of,
)

import mpidist
from mpidist._values.array_like import ArrayLike

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]

X = np.array([[1.0, 2.0], [3.0, 5.0]])
Y = np.array([2.0, 4.0])

# Ways to read: each gives of an object what it gives of the array itself.
WAYS = [
    np.asarray,
    np.sqrt,
    np.sum,
    lambda v: np.array(v, dtype=np.float32),
    lambda v: np.concatenate([v, v]),
    lambda v: np.where(v > 2, v, 0.0),
    lambda v: v + 1.0,
    lambda v: 1.0 - v,
    lambda v: v @ Y,
    lambda v: -v,
    lambda v: v == 3.0,
    lambda v: divmod(v, 2)[1],
    lambda v: v.sum(),
    lambda v: v.T,
    lambda v: v.tolist(),
    lambda v: v[1],
    lambda v: 3.0 in v,
    list,
]
MORE_WAYS = [
    *(np.array, np.shape, np.zeros_like, np.linalg.inv, np.add.reduce),
    *(operator.attrgetter(name) for name in ("shape", "dtype", "ndim", "size")),
    *(operator.attrgetter(name) for name in ("nbytes", "strides")),
    lambda v: np.matmul(X, v),
    lambda v: np.einsum("ij,ij->i", v, X),
    lambda v: np.add(v, v, dtype=np.float32),
    lambda v: np.add.outer(v[0], v[1]),
    lambda v: np.array([v, v]),
    lambda v: np.asarray(v, dtype=np.float32),
    lambda v: np.take(X, v.astype(int) % 2, axis=0),
    lambda v: np.result_type(v, np.float32),
    lambda v: Y @ v,
    lambda v: v + v,
    lambda v: v[v > 2],
    lambda v: v[-1, ::-1],
    lambda v: 4.0 in v,
    len,
]
WAYS_OF_NUMBERS = [
    *(float, int, complex, bool, np.sqrt, np.ndim),
    lambda v: bool(v - v),
    lambda v: v * 2,
    lambda v: 2 < v < 3,
    lambda v: operator.lt(v, 2),
    lambda v: f"{v:.3f}",
    lambda v: round(v, 1),
    lambda v: round(v),
    lambda v: v.item(),
]
WAYS_OF_INTEGERS = [
    lambda v: [*range(v)],
    lambda v: "abcdef"[v],
    lambda v: f"{v:04d}",
    lambda v: "x" * int(v),
]

KINDS = {
    "variable": lambda s, x: make(s, x, name="v"),
    "ON_READ": lambda s, x: make(
        s, x, name="v", synchronization=ON_READ, aggregation=FIRST
    ),
    "Mirrored": mirrored_of,
    "PerReplica of one": lambda s, x: (
        mpidist.get_strategy().extended.call_for_each_replica(lambda: x)
    ),
}
of_several = pytest.mark.parametrize("like", list(KINDS)[:3], indirect=True)


@pytest.fixture(params=KINDS)
def like(request, strategy):
    """A function that returns an object of this kind for an array or number."""
    return lambda x: KINDS[request.param](strategy, x)


def test_reading_an_array(like):
    v = like(X)
    for read in (*WAYS, *MORE_WAYS):
        got, expected = read(v), read(X)
        assert type(got) is type(expected)
        np.testing.assert_array_equal(got, expected)
    for one, read, error in (
        ("truth value", bool, ValueError),
        (None, float, TypeError),
        (None, lambda v: format(v, ".2f"), TypeError),
        (None, lambda v: v[5], IndexError),
        ("no_such_attribute", lambda v: v.no_such_attribute, AttributeError),
    ):
        with pytest.raises(error, match=one):
            read(v)
    host = v.numpy()
    host[...] = 0.0  # a copy
    np.testing.assert_array_equal(v, X)
    np.testing.assert_array_equal(X[like(np.array([1, 0]))], X[[1, 0]])


def test_reading_a_number(like):
    v, n = like(2.5), like(3)
    for one, number, ways in (
        (v, np.float64(2.5), WAYS_OF_NUMBERS),
        (n, np.int64(3), WAYS_OF_INTEGERS),
    ):
        for read in ways:
            got = read(one)
            assert not isinstance(got, ArrayLike)
            np.testing.assert_array_equal(got, read(number))
    assert (v.shape, v.dtype, v.ndim, v.size) == ((), np.float64, 0, 1)
    assert max(v, n) is n
    assert not like(0.0)
    with pytest.raises(TypeError):
        len(v)


@pytest.mark.parametrize("initial", [0.0, X], ids=["0d", "2d"])
@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST], ids=lambda a: a.name)
def test_reading_on_read_in_each_context(strategy, rank, size, aggregation, initial):
    v = make(strategy, initial, synchronization=ON_READ, aggregation=aggregation)
    strategy.run(lambda: v.assign_add(np.full(v.shape, rank + 1.0)))
    copies = [np.asarray(initial + i + 1) for i in range(size)]
    total = {SUM: sum(copies), MEAN: sum(copies) / size, FIRST: copies[0]}[aggregation]

    def read(v, seen):
        for way in (v.value, v.numpy, v.read_value):
            assert type(way()) is np.ndarray
            np.testing.assert_array_equal(way(), seen)
        for way in WAYS if v.ndim else WAYS_OF_NUMBERS:
            np.testing.assert_array_equal(way(v), way(seen[()]))
        for changed in (v.numpy(), v.read_value()):
            changed[...] = 77.0  # a copy
        assert not v.value().flags.writeable
        np.testing.assert_array_equal(v.numpy(), seen)

    total = np.asarray(total)
    read(v, total)
    with strategy.scope():
        read(v, total)
        with mpidist.variable_sync_on_read_context():
            read(v, total)
        strategy.extended.update(v, lambda v: read(v, copies[rank]))
        strategy.extended.update_non_slot(
            strategy.extended.non_slot_devices([v]), lambda: read(v, copies[rank])
        )
    merge(strategy, lambda s: read(v, total))
    merge(strategy, lambda s, w: read(w, total), v)

    def replica_fn():
        read(v, copies[rank])
        with mpidist.variable_sync_on_read_context():
            read(v, total)
        read(v, copies[rank])

    strategy.run(replica_fn)
    assert_copies(strategy, v, copies)


def test_plain_arrays_take_its_value(like):
    v, target = like(X), np.zeros((2, 2))
    assert np.add(v, 1, out=target) is target
    np.testing.assert_array_equal(target, X + 1)
    target += v
    np.testing.assert_array_equal(target, 2 * X + 1)
    np.copyto(target, v)
    np.testing.assert_array_equal(target, X)
    target[...] = 0.0
    target[...] = v
    target[0] = v[1]
    np.testing.assert_array_equal(target, X[[1, 1]])
    np.add(X, X, out=target, where=v > 2)
    np.testing.assert_array_equal(target[X > 2], (2 * X)[X > 2])


def in_place_add(v):
    v += 1


def in_place_matmul(v):
    v @= X


@pytest.mark.parametrize(
    ("what", "write"),
    {
        "+=": in_place_add,
        "@=": in_place_matmul,
        "[...] =": lambda v: operator.setitem(v, 0, 7.0),
        "numpy.add(": lambda v: np.add(X, X, out=v),
        "numpy.add.at(": lambda v: np.add.at(v, (0, 0), 1.0),
        "numpy.exp(": lambda v: np.exp(v, out=v),
        "numpy.sum(": lambda v: np.sum(X[None], axis=0, out=v),
        "numpy.concatenate(": lambda v: np.concatenate([X[:1], X[:1]], out=v),
        "numpy.copyto(": lambda v: np.copyto(v, Y),
    }.items(),
)
def test_writes_are_refused_and_say_what_to_write(like, what, write):
    v = like(X)
    with pytest.raises(TypeError) as caught:
        write(v)
    text = str(caught.value)
    assert what in text
    if isinstance(v, mpidist.Variable):
        assert "one copy of Variable 'v' only" in text
        assert ("new[1:3] = value`" if "[" in what else "variable.assign_add(") in text
    else:
        assert "one replica only" in text
    np.testing.assert_array_equal(v, X)


@of_several
def test_a_copy_can_not_be_changed_through_numpy(like):
    """Neither through what np.asarray gives nor through functions that write."""
    v = like(X)
    for view in (np.asarray(v), *v.values, v.value(), v[0], v.T, v.reshape(4), *v):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0.0
    for attempt in (
        lambda: np.put(v, [0], [9.0]),
        lambda: np.fill_diagonal(v, 0.0),
        lambda: np.place(v, X > 0, [0.0]),
        lambda: v.sort(),
        lambda: v.fill(7.0),
    ):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            attempt()
    np.testing.assert_array_equal(v, X)
