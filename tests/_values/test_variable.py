"""Mirrored variables: who may write what, and that the copies never differ."""

import numpy as np
import pytest
from replicas import (
    FIRST,
    MEAN,
    NONE,
    ON_READ,
    ON_WRITE,
    SUM,
    assert_copies,
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


def test_initial_values(strategy):
    for initial, dtype, expected in (
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
        ([1, 2], ">f4", np.array([1, 2], np.float32)),
    ):
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
    whole = make(strategy, [1, 2])
    raises_everywhere(ValueError, lambda: whole.assign(v), "expected a value that fits")
    for name in ("float8_e5m2", "float8_e4m3fn"):  # NumPy says that one is a float
        x = np.array([1.5, 2.5], getattr(ml_dtypes, name))
        raises_everywhere(TypeError, lambda x=x: whole.assign(x), f"of dtype {name}")
    assert_mirrored(strategy, whole, [1, 2])


def test_initial_values_are_copied(strategy):
    initial = np.array([1.0, 2.0])
    v = make(strategy, initial)
    w = make(strategy, v)
    x = make(strategy, mirrored_of(strategy, 3.0))
    initial[...] = 7.0
    assert_mirrored(strategy, v, [1.0, 2.0])
    v.assign([5.0, 6.0])
    np.testing.assert_array_equal(initial, [7.0] * 2)
    assert_mirrored(strategy, w, [1.0, 2.0])
    assert_mirrored(strategy, x, 3.0)


def test_attributes(strategy, rank):
    def attributes(*args, **kwargs):
        v = make(strategy, *args, **kwargs)
        assert v.distribute_strategy is strategy
        assert v.device == strategy.extended.worker_devices[rank]
        assert v.is_initialized()
        assert strategy.extended.variable_created_in_scope(v)
        return v.name, v.trainable, v.synchronization, v.aggregation

    assert attributes(1.0) == ("Variable", True, ON_WRITE, NONE)
    given = {"synchronization": "on_read", "aggregation": "Sum", "shape": (1,)}
    assert attributes([1.0], name="w", **given) == ("w", False, ON_READ, SUM)
    assert attributes([1.0], True, "w", **given) == ("w", True, ON_READ, SUM)
    given = {"synchronization": ON_WRITE, "aggregation": FIRST}
    assert attributes(1.0, False, "w", **given) == ("w", False, ON_WRITE, FIRST)


def fail():
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize(
    ("arguments", "kind", "part"),
    [
        ({"initial_value": fail}, ZeroDivisionError, "on purpose"),
        ({"initial_value": "text"}, TypeError, "'text'"),
        ({"initial_value": None}, TypeError, "None"),
        ({"initial_value": np.array([None])}, TypeError, "dtype object"),
        ({"initial_value": [1, "a"]}, TypeError, "dtype <U"),
        ({"initial_value": [[1], [1, 2]]}, ValueError, "': expected an array or lists"),
        ({"initial_value": 3, "aggregation": MEAN}, ValueError, "not floating"),
        ({"initial_value": [True], "aggregation": MEAN}, ValueError, "not floating"),
        (
            {"initial_value": 1.0, "dtype": "int32", "aggregation": MEAN},
            ValueError,
            "not floating",
        ),
        ({"initial_value": [True], "aggregation": SUM}, ValueError, "of bool"),
        ({"initial_value": [1.0], "shape": 2}, ValueError, "shape (2,)"),
        ({"initial_value": [300], "dtype": "int8"}, ValueError, "fits into int8"),
        *(
            (
                {"initial_value": 1.0, "aggregation": name},
                ValueError,
                "NONE, SUM, MEAN, ONLY_FIRST_REPLICA",
            )
            for name in ("MAX", "ONLY_FIRST", 3)
        ),
        ({"initial_value": 1.0, "name": 3}, TypeError, "`name`"),
        ({"initial_value": 1.0, "dtype": "text"}, TypeError, "': dtype='text': data"),
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

    raises_everywhere(kind, call, part)
    assert_mirrored(strategy, make(strategy, 1.0), 1.0)


@pytest.mark.mpi(min_size=2)
def test_bad_arguments_on_one_rank(strategy, rank):
    def call():
        aggregation = "MAX" if rank == 1 else SUM
        make(strategy, 1.0, aggregation=aggregation)

    raises_everywhere(ValueError, call, "aggregation")
    assert_mirrored(strategy, make(strategy, 1.0), 1.0)


@pytest.mark.one_size
def test_a_per_replica_initial_value(strategy):
    value = strategy.run(lambda: 1.0)
    raises_everywhere(TypeError, lambda: make(strategy, value), "strategy.reduce(")


# --- assignment in a replica context --------------------------------------------------


def test_first_replica_with_a_mirrored_variable_as_value(strategy, rank):
    v = make(strategy, [1.0, 2.0], aggregation=FIRST)
    w = make(strategy, [7.0, 8.0])
    strategy.run(lambda: v.assign(w))
    assert_mirrored(strategy, v, [7.0, 8.0])


# --- assignment in cross-replica context ----------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("synchronization", [ON_WRITE, ON_READ], ids=lambda s: s.name)
def test_values_that_differ_in_few_bits_or_in_a_mirrored(
    strategy, rank, size, synchronization
):
    """-0.0 equals 0.0, but the copies would have other bits; NaN equals itself here.

    A Mirrored that was made by hand of values that differ is not taken on trust.
    """
    v = make(strategy, 1.0, synchronization=synchronization, aggregation=MEAN)
    with strategy.scope():
        mirrored = mpidist.Mirrored([float(rank)] * size)
    for value in (-0.0 if rank else 0.0, np.nextafter(1.0, 1.0 + rank), mirrored):
        raises_everywhere(
            mpidist.CollectiveMismatchError, lambda value=value: v.assign(value)
        )
        assert_copies(strategy, v, [1.0] * size)
    v.assign(np.nan)
    assert_copies(strategy, v, [np.nan] * size)


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


# --- in update and in merge_fn --------------------------------------------------------


def test_a_variable_made_in_merge_fn_is_one_object(strategy, rank):
    """Of its own class on rank 0."""

    class Named(mpidist.Variable):
        def __init__(self, value):
            super().__init__(value, name="made")
            self.more = "set after the constructor of Variable"

    made = []

    def merge_fn(distribution):
        made.append(Named(np.arange(3.0)))
        made[0].assign_add(np.ones(3))

    strategy.run(lambda: context().merge_call(merge_fn, ()))
    key = everywhere(storage_of(made[0]).key if made else None)[0]
    found = group_of(strategy).registry.get(key)
    assert found.numpy().tolist() == [1.0, 2.0, 3.0]
    if rank == 0:
        assert found is made[0]
        assert (type(found), found.more) == (
            Named,
            "set after the constructor of Variable",
        )


def test_a_variable_that_can_not_be_made_in_merge_fn_is_not_there(strategy, rank):
    before = group_of(strategy).registry.count

    def merge_fn(distribution):
        mpidist.Variable(np.ones(2), shape=(3,))

    def step():
        context().merge_call(merge_fn, ())

    raises_everywhere(
        ValueError,
        lambda: strategy.run(step),
        "expected an initial value of shape (3,)",
    )
    counts = everywhere(group_of(strategy).registry.count - before)
    assert counts == [counts[0]] * len(counts)
    assert_mirrored(strategy, make(strategy, 1.0), 1.0)


# --- what fits ------------------------------------------------------------------------


def test_values_that_fit(strategy):
    for initial, value, expected in (
        (np.zeros(2, np.float32), np.array([1.5, 2.5]), [1.5, 2.5]),
        (np.zeros(2, np.float32), np.array([1, 2]), [1, 2]),
        (np.zeros(2, np.complex64), np.array([1.5, 2]), [1.5, 2]),
        (np.zeros(2), [1, 2], [1, 2]),
        (np.zeros(2, np.int8), [1, 2], [1, 2]),
        (np.zeros((), np.float32), 3, 3),
        (np.zeros((), np.uint8), 255, 255),
        (np.zeros(2, np.uint8), np.array([0, 255]), [0, 255]),
        (np.zeros(1, np.uint64), np.array([2**63 - 1]), [2**63 - 1]),
        (np.zeros((), np.int64), True, 1),
        (np.zeros(2), np.array([True, False]), [1, 0]),
        (np.zeros((2, 0)), np.zeros((2, 0)), np.zeros((2, 0))),
    ):
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
        (np.zeros(2, np.uint8), np.array([1, -1]), ValueError),  # and not 255
        (np.zeros(2, np.uint64), np.array([1, -1]), ValueError),
        (np.zeros((), np.int8), 300, ValueError),  # and not 44
        (np.zeros(2, np.int32), [1.5, 2.5], ValueError),
        (np.zeros(2, np.int32), [2**40, 0], ValueError),
        (np.zeros(2, np.int32), np.array([2**40, 0]), ValueError),  # and not 0
        (np.zeros(2, np.int64), np.array([2**63, 0], np.uint64), ValueError),
        (np.zeros(2), "ab", TypeError),
        (np.zeros(2), None, TypeError),
        (np.zeros(2), {"a": 1}, TypeError),
        (np.zeros(2), [1, [2]], ValueError),
        (np.zeros(2), np.array([None, None]), TypeError),
    ],
    ids=repr,
)
def test_values_that_do_not_fit(strategy, rank, size, initial, value, kind):
    v = make(strategy, initial, name="target")
    for attempt in (
        lambda: v.assign(value),
        lambda: strategy.run(lambda: v.assign(value)),
        lambda: strategy.run(lambda: v.assign(value if rank == size - 1 else initial)),
    ):
        for message in raises_everywhere(kind, attempt):
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


def test_the_address_stays_for_life(strategy, rank, v, x):
    def address():
        (value,) = v.values
        assert np.shares_memory(v.value(), value)
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
    raises_everywhere(
        ValueError,
        lambda: strategy.run(lambda: v.assign(unlike)),
        "You must specify an aggregation method",
        "the replicas' values differ",
    )
    assert_mirrored(strategy, v, initial)
    raises_everywhere(
        mpidist.CollectiveMismatchError,
        lambda: strategy.run(lambda: v.assign(unlike) if rank else None),
    )
    assert_mirrored(strategy, v, initial)


@pytest.mark.mpi(min_size=2)
def test_sets_of_variables_if_one_rank_has_made_more_strategies(rank):
    """The numbers of the strategies differ, and the order must not."""
    others = [mpidist.OneDeviceStrategy("CPU:0") for _ in range(3 * (rank == 0))]
    strategy = mpidist.MPIStrategy()
    variables = [make(strategy, 0.0, name=f"v{i}") for i in range(40)]
    order = [v.name for v in {*variables}]
    assert everywhere(order) == [order] * strategy.num_replicas_in_sync
    for one in (*others, strategy):
        one.close()


def test_ranks_go_through_a_set_of_variables_in_the_same_order(strategy, rank):
    """As in `apply_gradients(zip(g, set(variables)))`."""
    gone = [make(strategy, 0.0) for _ in range(3)]
    other = [[] for _ in range(1000 * rank)]  # addresses differ between ranks
    variables = [make(strategy, 1.0 * i, name=f"v{i}") for i in range(40)]
    del gone[1]
    order = [v.name for v in set(variables)]
    references = {v.ref(): v for v in variables + variables}
    assert all(ref.deref() is v for ref, v in references.items())
    orders = [order, [v.name for v in references.values()]]
    assert len(references) == 40
    assert everywhere(orders) == [orders] * strategy.num_replicas_in_sync
    assert len({*variables, *gone, mpidist.Variable(1.0), mpidist.Variable(2.0)}) == 44
    assert other[:1] in ([], [[]])
    optimizer = mpidist.optimizers.SGD(1.0)
    strategy.run(lambda: optimizer.apply_gradients([(1.0, v) for v in set(variables)]))
    assert_mirrored(strategy, variables[7], 7.0 - strategy.num_replicas_in_sync)
