"""Mirrored variables: who may write what, and that the copies never differ."""

import contextlib
import gc

import numpy as np
import pytest
from replicas import (
    FIRST,
    MEAN,
    NONE,
    SUM,
    assert_mirrored,
    context,
    everywhere,
    make,
    mirrored_of,
    raises_everywhere,
)

import mpidist
from mpidist._strategy.strategy import group_of
from mpidist._values.variable import storage_of

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]


# --- creation -------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_initial_values_may_differ_in_shape_and_dtype(strategy, rank):
    """Only rank 0's counts, so the others need not even have one."""
    initial = np.ones((2, 2), np.float32) if rank == 0 else "no array at all"
    v = make(strategy, initial)
    assert (v.shape, v.dtype) == ((2, 2), np.float32)
    assert_mirrored(strategy, v, np.ones((2, 2)))


@pytest.mark.parametrize(
    ("initial", "dtype", "expected"),
    [
        (1.0, None, np.float64(1.0)),
        (3, None, np.int64(3)),
        (3, "float32", np.float32(3)),
        ([1, 2], np.float64, np.array([1.0, 2.0])),
        ([[1.5], [2.5]], None, np.array([[1.5], [2.5]])),
        ((1, 2), "int8", np.array([1, 2], np.int8)),
        (np.float16(2), None, np.float16(2)),
        (np.array([True, False]), None, np.array([True, False])),
        (1j, "complex64", np.complex64(1j)),
        (np.zeros((0, 3)), None, np.zeros((0, 3))),
        (np.asfortranarray([[1, 2], [3, 4]]), None, np.array([[1, 2], [3, 4]])),
        (np.arange(6)[::2], None, np.array([0, 2, 4])),
        (np.array([1, 2], ">i4"), None, np.array([1, 2], np.int32)),
    ],
    ids=repr,
)
def test_initial_values(strategy, initial, dtype, expected):
    v = make(strategy, initial, dtype=dtype)
    assert v.dtype == expected.dtype
    assert v.shape == expected.shape
    assert_mirrored(strategy, v, expected)


def test_bfloat16(strategy, rank, size):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    v = make(strategy, [1.0, 2.0], dtype=ml_dtypes.bfloat16, aggregation=SUM)
    strategy.run(lambda: v.assign_add(np.ones(2, ml_dtypes.bfloat16)))
    assert v.dtype == ml_dtypes.bfloat16
    assert_mirrored(strategy, v, np.array([1.0 + size, 2.0 + size], v.dtype))
    v.assign([3.0, 4.0])
    assert_mirrored(strategy, v, np.array([3.0, 4.0], v.dtype))
    assert "bfloat16" in repr(v)


def test_the_users_initial_array_stays_the_users(strategy):
    initial = np.ones(3)
    v = make(strategy, initial)
    initial[...] = 7.0
    assert_mirrored(strategy, v, np.ones(3))
    v.assign(np.zeros(3))
    np.testing.assert_array_equal(initial, [7.0] * 3)


def test_initial_values_from_variables_and_mirrored(strategy):
    v = make(strategy, [1.0, 2.0])
    w = make(strategy, v)
    x = make(strategy, mirrored_of(strategy, 3.0))
    v.assign([5.0, 6.0])
    assert_mirrored(strategy, w, [1.0, 2.0])
    assert_mirrored(strategy, x, 3.0)


def test_attributes(strategy, rank):
    v = make(
        strategy,
        [1.0],
        trainable=False,
        name="weights",
        synchronization=mpidist.VariableSynchronization.ON_WRITE,
        aggregation=SUM,
        shape=(1,),
    )
    assert v.name == "weights"
    assert v.trainable is False
    assert v.aggregation is SUM
    assert v.synchronization is mpidist.VariableSynchronization.ON_WRITE
    assert v.distribute_strategy is strategy
    assert v.device == strategy.extended.worker_devices[rank]
    plain = make(strategy, 1.0)
    assert plain.trainable is True
    assert plain.aggregation is NONE
    assert plain.synchronization is mpidist.VariableSynchronization.ON_WRITE
    assert plain.name


@pytest.mark.parametrize(
    ("arguments", "kind", "part"),
    [
        ({"initial_value": "text"}, TypeError, "'text'"),
        ({"initial_value": None}, TypeError, "None"),
        ({"initial_value": np.array([None])}, TypeError, "dtype object"),
        ({"initial_value": [1, "a"]}, TypeError, "dtype <U"),
        ({"initial_value": 3, "aggregation": MEAN}, ValueError, "not floating"),
        ({"initial_value": [True], "aggregation": MEAN}, ValueError, "not floating"),
        (
            {"initial_value": 1.0, "dtype": "int32", "aggregation": MEAN},
            ValueError,
            "not floating",
        ),
        ({"initial_value": [1.0], "shape": (2,)}, ValueError, "shape (2,)"),
        ({"initial_value": 1.0, "aggregation": "MAX"}, ValueError, "aggregation"),
        ({"initial_value": 1.0, "name": 3}, TypeError, "`name`"),
        ({"initial_value": 1.0, "dtype": "no dtype"}, TypeError, "no dtype"),
        (
            {
                "initial_value": 1.0,
                "synchronization": mpidist.VariableSynchronization.NONE,
            },
            ValueError,
            "`NONE` variable synchronization mode is not supported",
        ),
        (
            {"initial_value": 1.0, "synchronization": "ON"},
            ValueError,
            "synchronization",
        ),
    ],
)
def test_bad_arguments(strategy, arguments, kind, part):
    def call():
        make(strategy, **arguments)

    for message in raises_everywhere(kind, call):
        assert part in message
    assert_mirrored(strategy, make(strategy, 1.0), 1.0)


@pytest.mark.mpi(min_size=2)
def test_bad_arguments_on_one_rank(strategy, rank):
    def call():
        aggregation = "MAX" if rank == 1 else SUM
        make(strategy, 1.0, aggregation=aggregation)

    for message in raises_everywhere(ValueError, call):
        assert "aggregation" in message
    assert_mirrored(strategy, make(strategy, 1.0), 1.0)


def test_an_initial_function_that_raises(strategy):
    def initial():
        raise ZeroDivisionError("on purpose")

    messages = raises_everywhere(ZeroDivisionError, lambda: make(strategy, initial))
    assert {*messages} == {"on purpose"}
    assert_mirrored(strategy, make(strategy, 1.0), 1.0)


@pytest.mark.one_size
def test_a_per_replica_initial_value(strategy):
    value = strategy.run(lambda: 1.0)
    for message in raises_everywhere(TypeError, lambda: make(strategy, value)):
        assert "strategy.reduce(" in message


# --- assignment in a replica context --------------------------------------------------


def test_first_replica_with_a_mirrored_variable_as_value(strategy, rank):
    v = make(strategy, [1.0, 2.0], aggregation=FIRST)
    w = make(strategy, [7.0, 8.0])
    strategy.run(lambda: v.assign(w))
    assert_mirrored(strategy, v, [7.0, 8.0])


@pytest.mark.one_size
def test_values_that_do_not_fit_in_a_replica_context(strategy):
    v = make(strategy, [1.0, 2.0], aggregation=MEAN)
    for bad, kind in (
        (np.ones(3), ValueError),
        (np.ones(2) * 1j, ValueError),
        ("text", TypeError),
        (None, TypeError),
    ):
        raises_everywhere(kind, lambda bad=bad: strategy.run(lambda: v.assign(bad)))
        assert_mirrored(strategy, v, [1.0, 2.0])


@pytest.mark.mpi(min_size=2)
def test_a_value_that_does_not_fit_on_one_replica(strategy, rank, size):
    v = make(strategy, [1.0, 2.0], aggregation=SUM)
    bad = np.ones(3 if rank == size - 1 else 2)
    for message in raises_everywhere(
        ValueError, lambda: strategy.run(lambda: v.assign(bad))
    ):
        assert "shape (2,)" in message
    assert_mirrored(strategy, v, [1.0, 2.0])


# --- assignment in cross-replica context ----------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("length", [0, 2, 1000])
def test_a_plain_value_that_differs(strategy, rank, size, how, length):
    shape = (length,) if length else ()
    v = make(strategy, np.ones(shape), name="v")
    value = np.ones(shape)
    if rank == size - 1:
        value = np.nextafter(value, 2.0)  # one bit
        if length:
            value[:-1] = 1.0
    messages = raises_everywhere(
        mpidist.CollectiveMismatchError, lambda: getattr(v, how)(value)
    )
    for message in messages:
        assert f"Variable 'v'.{how}" in message
        assert "the value must be the same on all ranks: pass what" in message
        assert f"rank {size - 1}" in message
    assert_mirrored(strategy, v, np.ones(shape))
    v.assign(np.zeros(shape))
    assert_mirrored(strategy, v, np.zeros(shape))


@pytest.mark.mpi(min_size=2)
def test_zeros_of_another_sign_and_nan(strategy, rank):
    """-0.0 equals 0.0, but the copies would have other bits; NaN equals itself here."""
    v = make(strategy, 1.0)
    raises_everywhere(
        mpidist.CollectiveMismatchError,
        lambda: v.assign(-0.0 if rank else 0.0),
    )
    assert_mirrored(strategy, v, 1.0)
    v.assign(np.nan)
    assert_mirrored(strategy, v, np.nan)


@pytest.mark.mpi(min_size=2)
def test_another_value_on_each_rank_as_mirrored_is_a_contradiction(strategy, rank):
    """A Mirrored that was made by hand of values that differ: not taken on trust."""
    v = make(strategy, 1.0)
    with strategy.scope():
        m = mpidist.Mirrored([float(rank)] * strategy.num_replicas_in_sync)
    raises_everywhere(mpidist.CollectiveMismatchError, lambda: v.assign(m))
    assert_mirrored(strategy, v, 1.0)


# --- in update and in merge_fn --------------------------------------------------------


def test_a_variable_made_in_merge_fn_is_one_object_with_one_array(strategy, rank):
    """Of its own class on rank 0; and there is no other that shares its array."""

    class Named(mpidist.Variable):
        def __init__(self, value):
            super().__init__(value, name="made")
            self.more = "set after the constructor of Variable"

    made = []

    def merge_fn(distribution):
        v = Named(np.arange(3.0))
        v.assign_add(np.ones(3))
        made.append(v)

    strategy.run(lambda: context().merge_call(merge_fn, ()))
    registry = group_of(strategy).registry
    storages = []
    for x in gc.get_objects():
        if issubclass(type(x), mpidist.Variable):
            # One whose constructor has raised has none, until it is collected.
            with contextlib.suppress(AttributeError):
                storages.append(storage_of(x))
    # Other tests may have left variables on a stand-in of a device.
    storages = [one for one in storages if type(one.array) is np.ndarray]
    if rank == 0:
        (v,) = made
        assert (type(v), v.more) == (Named, "set after the constructor of Variable")
        assert registry.get(storage_of(v).key) is v
        mine = storage_of(v)
        assert [x for x in storages if np.shares_memory(x.array, mine.array)] == [mine]
    key = everywhere(storage_of(made[0]).key if made else None)[0]
    assert registry.get(key).numpy().tolist() == [1.0, 2.0, 3.0]


def test_a_variable_that_can_not_be_made_in_merge_fn_is_not_there(strategy, rank):
    before = group_of(strategy).registry.count

    def merge_fn(distribution):
        mpidist.Variable(np.ones(2), shape=(3,))

    def step():
        context().merge_call(merge_fn, ())

    for message in raises_everywhere(ValueError, lambda: strategy.run(step)):
        assert "expected an initial value of shape (3,)" in message
    counts = everywhere(group_of(strategy).registry.count - before)
    assert counts == [counts[0]] * len(counts)
    assert_mirrored(strategy, make(strategy, 1.0), 1.0)


# --- what fits ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("initial", "value", "expected"),
    [
        (np.zeros(2, np.float32), np.array([1.5, 2.5]), [1.5, 2.5]),
        (np.zeros(2, np.float32), np.array([1, 2]), [1, 2]),
        (np.zeros(2, np.complex64), np.array([1.5, 2]), [1.5, 2]),
        (np.zeros(2), [1, 2], [1, 2]),
        (np.zeros(2, np.int8), [1, 2], [1, 2]),
        (np.zeros((), np.float32), 3, 3),
        (np.zeros((), np.uint8), 255, 255),
        (np.zeros((), np.int64), True, 1),
        (np.zeros(2), np.array([True, False]), [1, 0]),
        (np.zeros((2, 0)), np.zeros((2, 0)), np.zeros((2, 0))),
    ],
    ids=repr,
)
def test_values_that_fit(strategy, initial, value, expected):
    v = make(strategy, initial)
    v.assign(value)
    assert v.dtype == initial.dtype
    assert_mirrored(strategy, v, np.asarray(expected, initial.dtype))


@pytest.mark.parametrize(
    ("initial", "value", "kind"),
    [
        (np.zeros(2), np.ones(3), ValueError),
        (np.zeros(2), 1.0, ValueError),  # no broadcasting: say what you mean
        (np.zeros(2), np.ones((1, 2)), ValueError),
        (np.zeros(2, int), np.ones(2), ValueError),
        (np.zeros(2, np.float32), np.ones(2, complex), ValueError),
        (np.zeros((), np.int32), 1.5, ValueError),
        (np.zeros(2, bool), np.ones(2, int), ValueError),
        (np.zeros((), np.uint8), -1, ValueError),
        (np.zeros((), np.uint8), 256, ValueError),
        (np.zeros((), np.int8), 300, ValueError),  # and not 44
        (np.zeros(2, np.int32), [1.5, 2.5], ValueError),
        (np.zeros(2, np.int32), [2**40, 0], ValueError),
        (np.zeros(2), "ab", TypeError),
        (np.zeros(2), None, TypeError),
        (np.zeros(2), {"a": 1}, TypeError),
        (np.zeros(2), np.array([None, None]), TypeError),
    ],
    ids=repr,
)
def test_values_that_do_not_fit(strategy, initial, value, kind):
    v = make(strategy, initial, name="target")
    for message in raises_everywhere(kind, lambda: v.assign(value)):
        assert "Variable 'target'.assign" in message
        if "fits into" in message:
            assert f"`numpy.asarray(value).astype('{initial.dtype}')`" in message
    assert_mirrored(strategy, v, initial)


# --- as an array ----------------------------------------------------------------------


@pytest.fixture
def x():
    return np.array([[1.0, 2.0], [3.0, 5.0]])


@pytest.fixture
def v(strategy, x):
    return make(strategy, x, name="v", aggregation=SUM)


def test_numpy_functions(v, x):
    for got, expected in [
        (np.sum(v), 11.0),
        (np.mean(v, axis=0), x.mean(axis=0)),
        (np.max(v), 5.0),
        (np.concatenate([v, x, v]), np.concatenate([x, x, x])),
        (np.vstack((v, v)), np.vstack((x, x))),
        (np.where(v > 2, v, 0.0), np.where(x > 2, x, 0.0)),
        (np.matmul(x, v), x @ x),
        (np.matmul(v, x), x @ x),
        (np.dot(v, v), x @ x),
        (np.einsum("ij,ij->i", v, x), (x * x).sum(axis=1)),
        (np.sqrt(v), np.sqrt(x)),
        (np.exp(v), np.exp(x)),
        (np.maximum(v, 2), np.maximum(x, 2)),
        (np.add(v, v, dtype=np.float32), (x + x).astype(np.float32)),
        (np.add.reduce(v), x.sum(axis=0)),
        (np.add.outer(v[0], v[1]), np.add.outer(x[0], x[1])),
        (np.clip(v, 2, 3), np.clip(x, 2, 3)),
        (np.linalg.inv(v), np.linalg.inv(x)),
        (np.linalg.norm(v), np.linalg.norm(x)),
        (np.zeros_like(v), np.zeros((2, 2))),
        (np.transpose(v), x.T),
        (np.stack([v[0], v[1]]), x),
        (np.asarray(v), x),
        (np.array(v), x),
        (np.array([v, v]), np.array([x, x])),
        (np.asarray(v, dtype=np.float32), x.astype(np.float32)),
        (np.copy(v), x),
        (np.argmax(v), 3),
        (np.isnan(v), np.full((2, 2), False)),
        (np.atleast_3d(v), x[:, :, None]),
    ]:
        assert not isinstance(got, mpidist.Variable)
        np.testing.assert_array_equal(got, expected)
    assert np.shape(v) == (2, 2)
    assert np.allclose(v, x)
    assert np.array_equal(v, x)
    assert np.result_type(v, np.float32) == np.float64


def test_out_and_where_with_plain_arrays(v, x):
    target = np.zeros((2, 2))
    assert np.add(v, 1, out=target) is target
    np.testing.assert_array_equal(target, x + 1)
    target += v
    np.testing.assert_array_equal(target, 2 * x + 1)
    np.copyto(target, v)
    np.testing.assert_array_equal(target, x)
    target[...] = v
    np.testing.assert_array_equal(target, x)
    target[0] = v[1]
    np.testing.assert_array_equal(target, x[[1, 1]])
    np.add(x, x, out=target, where=v > 2)
    np.testing.assert_array_equal(target[x > 2], (2 * x)[x > 2])


def test_indexing(strategy, v, x):
    index = make(strategy, np.array([1, 0]))
    for got, expected in [
        (v[0], x[0]),
        (v[0, 1], 2.0),
        (v[:, 1], x[:, 1]),
        (v[..., None], x[..., None]),
        (v[v > 2], x[x > 2]),
        (v[[1, 0]], x[[1, 0]]),
        (v[index], x[[1, 0]]),
        (v[-1, ::-1], x[-1, ::-1]),
        (np.take(v, index, axis=0), x[[1, 0]]),
    ]:
        np.testing.assert_array_equal(got, expected)
    with pytest.raises(IndexError):
        v[5]


def test_array_attributes(v, x):
    assert (v.shape, v.dtype, v.ndim, v.size, v.nbytes) == ((2, 2), float, 2, 4, 32)
    np.testing.assert_array_equal(v.T, x.T)
    assert v.sum() == 11.0
    assert v.max() == 5.0
    np.testing.assert_array_equal(v.mean(axis=1), x.mean(axis=1))
    np.testing.assert_array_equal(v.reshape(4), x.reshape(4))
    np.testing.assert_array_equal(v.astype(int), x.astype(int))
    assert v.tolist() == x.tolist()
    with pytest.raises(AttributeError, match="no_such_attribute"):
        v.no_such_attribute  # noqa: B018


def test_scalars(strategy):
    v = make(strategy, 2.5)
    n = make(strategy, 3)
    assert (float(v), int(v), bool(v), complex(v)) == (2.5, 2, True, 2.5 + 0j)
    assert v.item() == 2.5
    assert f"{v:.3f}" == "2.500"
    assert f"{n:04d}" == "0003"
    assert f"{v}" == str(v)
    assert f"{v:>6}".strip() == "2.5"
    assert [*range(n)] == [0, 1, 2]
    assert "abcd"[n] == "d"
    assert not make(strategy, 0.0)
    assert v > 2
    assert v + 1 == 3.5
    assert round(float(v)) == 2
    assert np.isscalar(float(v))
    with pytest.raises(TypeError):
        len(v)


def test_len_and_iter(v, x):
    assert len(v) == 2
    for got, expected in zip(v, x, strict=True):
        np.testing.assert_array_equal(got, expected)
    first, second = v
    np.testing.assert_array_equal(second, x[1])
    np.testing.assert_array_equal(first, x[0])
    with pytest.raises(ValueError, match="truth value"):
        bool(v)
    with pytest.raises(TypeError):
        float(v)
    with pytest.raises(TypeError):
        format(v, ".2f")


def test_contains(v):
    """As for an array: whether any element is equal."""
    assert 5.0 in v
    assert 4.0 not in v


def test_repr_and_str(strategy, v, x):
    assert repr(v).startswith("<mpidist.Variable 'v' shape=(2, 2) dtype=float64")
    assert "[3. 5.]" in repr(v)
    assert str(v) == str(make(strategy, x, name="v"))
    assert type(v).__module__ == "mpidist"
    large = make(strategy, np.zeros(100_000))
    assert len(repr(large)) < 500


@pytest.mark.one_size
def test_it_is_not_pickled_or_copied_in_part(v):
    import copy
    import pickle

    for attempt in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="cannot be pickled") as caught:
            attempt(v)
        assert "variable.numpy()" in str(caught.value)


def test_writes_are_refused_and_say_what_to_write(v, x):
    kept = v
    y = np.ones((2, 2))

    def in_place_add(v):
        v += 1

    def in_place_matmul(v):
        v @= y

    def set_item(v):
        v[0] = 7.0

    def set_all(v):
        v[...] = 7.0

    attempts = {
        "+=": in_place_add,
        "@=": in_place_matmul,
        "[...] = ": set_item,
        "[...] =": set_all,
        "numpy.add(": lambda v: np.add(y, y, out=v),
        "numpy.exp(": lambda v: np.exp(v, out=v),
        "numpy.sum(": lambda v: np.sum(y[None], axis=0, out=v),
        "numpy.concatenate(": lambda v: np.concatenate([y[:1], y[:1]], out=v),
        "numpy.copyto(": lambda v: np.copyto(v, y),
    }
    for what, attempt in attempts.items():
        with pytest.raises(TypeError, match="one copy of Variable 'v' only") as caught:
            attempt(v)
        assert what in str(caught.value)
        instead = "`new[1:3] = value`" if "[" in what else "variable.assign_add(value)"
        assert instead in str(caught.value)
    assert v is kept
    np.testing.assert_array_equal(v, x)


def test_a_copy_can_not_be_changed_through_numpy(v, x):
    """Neither through what np.asarray gives nor through functions that write."""
    assert not np.asarray(v).flags.writeable
    (value,) = v.values
    assert np.shares_memory(v.value(), value)
    for view in (np.asarray(v), value, v.value(), v[0], v[...], v.T, v.reshape(4), *v):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0.0
    for attempt in (
        lambda: np.add.at(v, (0, 0), 1.0),
        lambda: np.put(v, [0], [9.0]),
        lambda: np.fill_diagonal(v, 0.0),
        lambda: np.place(v, x > 0, [0.0]),
    ):
        with pytest.raises((ValueError, TypeError)):
            attempt()
    np.testing.assert_array_equal(v, x)


def test_the_address_stays_for_life(strategy, rank, v, x):
    def address():
        return np.asarray(v).__array_interface__["data"][0]

    before = address()
    v.assign(x + 1)
    v.assign_add(x)
    strategy.run(lambda: v.assign(x))
    strategy.run(lambda: v.assign_sub(x))
    with strategy.scope():
        strategy.extended.update(v, lambda v: v.assign(x + 2))
    strategy.run(lambda: context().merge_call(lambda s: v.assign(x + 3)))
    raises_everywhere(ValueError, lambda: v.assign(np.ones(3)))
    assert address() == before
    assert_mirrored(strategy, v, x + 3)


def test_assigning_its_own_views(strategy, v, x):
    """The value may overlap the variable: the result is as if it had been copied."""
    v.assign(v.T)
    assert_mirrored(strategy, v, x.T)
    v.assign_add(v[::-1])
    assert_mirrored(strategy, v, x.T + x.T[::-1])
    v.assign(np.asarray(v)[::-1, ::-1])
    assert_mirrored(strategy, v, (x.T + x.T[::-1])[::-1, ::-1])


# --- the copies stay equal ------------------------------------------------------------


def test_many_updates_keep_the_copies_equal(strategy, rank, size):
    """Sums of numbers of very different size, in an order that MPI chooses."""
    v = make(strategy, np.zeros(1001, np.float32), aggregation=MEAN)
    w = make(strategy, np.zeros(1001, np.float16), aggregation=SUM)
    random = np.random.default_rng(rank)
    for _ in range(5):
        x = (random.normal(size=1001) * 10.0 ** random.integers(-6, 3, 1001)).astype(
            np.float32
        )
        strategy.run(lambda x: (v.assign_add(x), w.assign_sub(x * 1e-3))[:0], args=(x,))
    assert_mirrored(strategy, v, v.numpy())
    assert_mirrored(strategy, w, w.numpy())
    assert np.isfinite(v).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("value", [1.0, np.ones(3)], ids=["number", "array"])
def test_update_with_arguments_that_differ(strategy, rank, value):
    """At program level plain arguments are each rank's own.

    As for assign: an error on every rank, and not copies that silently differ.
    """
    v = make(strategy, 0.0 * value)

    def call():
        with strategy.scope():
            strategy.extended.update(v, lambda v, x: v.assign(x), args=(rank * value,))

    raises_everywhere(mpidist.CollectiveMismatchError, call)
    assert_mirrored(strategy, v, 0.0 * value)


@pytest.mark.parametrize("initial", [1.0, np.ones(20000), np.float32([[1.0]])], ids=str)
def test_without_an_aggregation_replicas_write_equal_values(
    strategy, rank, size, initial
):
    """Such as a counter; values that differ anywhere are refused."""
    v = make(strategy, initial, aggregation=NONE)
    count, rows = make(strategy, 0), make(strategy, [0.0, 0.0, 0.0])

    def step():
        count.assign_add(1)
        rows.scatter_add(mpidist.IndexedSlices(np.array([2.0, 3.0]), [1, 1]))
        v.assign_sub(v * 0.5)
        v.assign(2 * v.read_value())

    strategy.run(step)
    assert_mirrored(strategy, count, 1)
    assert_mirrored(strategy, rows, [0.0, 5.0, 0.0])
    assert_mirrored(strategy, v, initial)
    if size == 1:
        return
    unlike = np.array(initial)
    unlike[...,] = 3
    unlike.flat[unlike.size // 3] += rank == size - 1  # one element, on one rank
    for message in raises_everywhere(
        ValueError, lambda: strategy.run(lambda: v.assign(unlike))
    ):
        assert "You must specify an aggregation method" in message
        assert "the replicas' values differ" in message
    assert_mirrored(strategy, v, initial)
    raises_everywhere(
        mpidist.CollectiveMismatchError,
        lambda: strategy.run(lambda: v.assign(unlike) if rank else None),
    )
    assert_mirrored(strategy, v, initial)


def test_ranks_go_through_a_set_of_variables_in_the_same_order(strategy, rank):
    """As in `apply_gradients(zip(g, set(variables)))`."""
    gone = [make(strategy, 0.0) for _ in range(3)]
    other = [[] for _ in range(1000 * rank)]  # addresses differ between ranks
    variables = [make(strategy, 1.0 * i, name=f"v{i}") for i in range(40)]
    del gone[1]
    order = [v.name for v in set(variables)]
    assert everywhere(order) == [order] * strategy.num_replicas_in_sync
    assert len({*variables, *gone, mpidist.Variable(1.0), mpidist.Variable(2.0)}) == 44
    assert other[:1] in ([], [[]])
    optimizer = mpidist.optimizers.SGD(1.0)
    strategy.run(lambda: optimizer.apply_gradients([(1.0, v) for v in set(variables)]))
    assert_mirrored(strategy, variables[7], 7.0 - strategy.num_replicas_in_sync)
