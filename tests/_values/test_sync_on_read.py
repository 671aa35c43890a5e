"""ON_READ variables in all their places."""

import copy
import inspect

import ml_dtypes
import numpy as np
import posing
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
    copies_of,
    everywhere,
    local,
    make,
    merge,
    own,
    raises_everywhere,
    set_deadline,
)

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]

OPERATIONS = {
    "assign": lambda old, x: x,
    "assign_add": lambda old, x: old + x,
    "assign_sub": lambda old, x: old - x,
}


@pytest.fixture
def metric(strategy, rank):
    """Give a function that makes an ON_READ variable whose copies are 1, 2, 3, ..."""

    def make_metric(aggregation=SUM, initial=0.0, **kwargs):
        v = make(
            strategy,
            initial,
            synchronization=ON_READ,
            aggregation=aggregation,
            name="metric",
            **kwargs,
        )
        strategy.run(lambda: v.assign_add(np.full(v.shape, rank + 1, v.dtype)))
        return v

    return make_metric


# --- writing: who may write what is in tests/conformance/programs/variables.py --------


@pytest.mark.parametrize("synchronization", [ON_WRITE, ON_READ], ids=lambda s: s.name)
def test_a_per_replica_is_not_assigned(strategy, size, synchronization):
    v = make(strategy, 1.0, synchronization=synchronization, aggregation=SUM)
    value = strategy.run(lambda: np.float64(3.0))
    for how in OPERATIONS:
        assign = getattr(v, how)
        for write in (
            lambda assign=assign: assign(value),
            lambda assign=assign: merge(strategy, lambda s, x: assign(x), 3.0),
        ):
            raises_everywhere(
                TypeError,
                write,
                f"variable.{how}(strategy.reduce(",
                "strategy.extended.reduce_to(",
            )
    assert [float(c) for c in copies_of(strategy, v)] == [1.0] * size


# --- reading --------------------------------------------------------------------------


def test_aggregation_none_has_no_one_value(strategy, rank, size, metric):
    v = metric(NONE)
    attempts = [
        lambda: v.numpy(),
        lambda: v + 1.0,
        lambda: float(v),
        lambda: strategy.extended.read_var(v),
        lambda: strategy.extended.broadcast_to(v, v),
        lambda: make(strategy, v),
        lambda: merge(strategy, lambda s: v.numpy()),
        lambda: strategy.run(lambda: read_synchronised(v)),
    ]
    for attempt in attempts:
        raises_everywhere(
            ValueError,
            attempt,
            "aggregation=NONE has no one value",
            "`strategy.experimental_local_results(variable)`",
        )
    assert local(strategy, lambda: float(v)) == rank + 1
    v.assign(6.0)  # TensorFlow writes, and then raises since it reads the result
    assert_copies(strategy, v, [6.0] * size)
    v.assign_add(1.0)
    assert_copies(strategy, v, [7.0] * size)


def read_synchronised(v):
    with mpidist.variable_sync_on_read_context():
        return v.numpy()


def test_printing_and_properties_do_not_communicate(strategy, rank, metric):
    """One rank may print, in a debugger too."""
    v = metric(MEAN)
    before = strategy.communication_statistics().calls
    if rank == 0:
        text = repr(v) + str(v) + f"{v}"
        assert "ON_READ MEAN" in text
        assert "value on replica 0=1." in text
        kinds = inspect.getmembers(mpidist.Variable, lambda x: isinstance(x, property))
        for name, _ in kinds:
            getattr(v, name)
        assert len(kinds) > 10
        assert (v.itemsize, v.nbytes, v.strides) == (8, 8, ())
    assert strategy.communication_statistics().calls == before


# --- variable_sync_on_read_context ----------------------------------------------------


def test_sync_on_read_context_nested_and_left_by_an_exception(
    strategy, rank, size, metric
):
    v = metric()
    total = size * (size + 1) / 2

    def fn():
        with mpidist.variable_sync_on_read_context():
            with mpidist.variable_sync_on_read_context():
                inner = float(v)
            between = float(v)
        after = float(v)
        try:
            with mpidist.variable_sync_on_read_context():
                raise KeyError
        except KeyError:
            caught = float(v)
        with mpidist.variable_sync_on_read_context():
            v.assign(v + 1.0)  # reads the sum, writes the own copy
            merged = context().merge_call(lambda s: s.reduce("MAX", v, axis=None))
            again = float(v)
        return inner, between, after, caught, merged, again, float(v)

    assert local(strategy, fn) == (
        *(total, total, rank + 1, rank + 1),
        *(total + 1, size * (total + 1), total + 1),
    )


def test_sync_on_read_context_outside_every_scope():
    v = mpidist.Variable(3.0, synchronization=ON_READ, aggregation=SUM)
    with mpidist.variable_sync_on_read_context():
        assert v + 1.0 == 4.0
    v.assign_add(1.0)
    assert float(v) == 4.0


@pytest.mark.mpi(min_size=2)
def test_sync_on_read_context_on_some_ranks_only(strategy, rank, size, metric):
    v = metric()

    def fn():
        if rank != size - 1:
            return read_synchronised(v)
        return v.numpy()

    messages = raises_everywhere(
        mpidist.CollectiveMismatchError, lambda: strategy.run(fn)
    )
    assert "Variable 'metric'.reading" in messages[0]
    assert float(v) == size * (size + 1) / 2


@pytest.mark.mpi(min_size=2)
def test_reading_on_one_rank_only(new_strategy, rank):
    """At program level: never a silent hang, but an error that names the call."""
    v = make(new_strategy(), 0.0, synchronization=ON_READ, aggregation=SUM, name="m")
    broken = mpidist.MPIStrategy()  # in the end
    w = make(
        broken,
        *(0.0, None, "m"),
        synchronization=ON_READ,
        aggregation=SUM,
    )

    def read_or_assign():
        return float(v) if rank == 0 else v.assign(1.0)

    messages = raises_everywhere(mpidist.CollectiveMismatchError, read_or_assign)
    assert "Variable 'm'.reading" in messages[-1]
    assert "Variable 'm'.assign" in messages[0]
    assert float(v) == 0.0
    set_deadline(broken, 0.7)
    if rank == 0:
        with pytest.raises(mpidist.CollectiveTimeoutError) as caught:
            float(w)
        assert "Variable 'm'.reading" in str(caught.value)
        assert "rank 1" in str(caught.value) or "ranks 1" in str(caught.value)
    everywhere(None)


# --- dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
def test_integers_are_shared_out_exactly(strategy, rank, size, dtype):
    """assign(7) reads back 7 on any number of replicas; TensorFlow gives 6 on two."""
    v = make(
        strategy, [0, 0, 0, 0], dtype=dtype, synchronization=ON_READ, aggregation=SUM
    )
    info = np.iinfo(dtype)
    values = np.array([7, 1, info.max, info.min], dtype)
    v.assign(values)
    np.testing.assert_array_equal(v, values)
    assert v.numpy().dtype == dtype
    shares = np.array(copies_of(strategy, v))
    assert (np.ptp(shares.astype(object), axis=0) <= 1).all()
    v.assign_sub(np.array([2, 1, 1, 0], dtype))
    np.testing.assert_array_equal(v, values - np.array([2, 1, 1, 0], dtype))
    strategy.run(lambda: v.assign(np.full(4, rank, dtype)))
    assert v.tolist() == [size * (size - 1) // 2] * 4


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST], ids=lambda a: a.name)
@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.complex64, np.longdouble]
)
def test_other_dtypes(strategy, rank, size, metric, dtype, aggregation):
    v = metric(aggregation, np.zeros(3, dtype))
    total = size * (size + 1) / 2
    want = {SUM: total, MEAN: total / size, FIRST: 1.0}[aggregation]
    assert v.dtype == dtype
    assert v.numpy().dtype == dtype
    np.testing.assert_array_equal(v, np.full(3, want, dtype))
    v.assign(np.array([12.0, 0.0, -24.0], dtype))
    np.testing.assert_array_equal(v, np.array([12.0, 0.0, -24.0], dtype))
    np.testing.assert_array_equal(local(strategy, v.numpy).dtype, np.dtype(dtype))
    if aggregation is SUM:
        assert_copies(strategy, v, [np.array([12.0, 0, -24.0], dtype) / size] * size)


def test_values_that_do_not_fit(strategy, rank, size, metric):
    v = metric(SUM, np.zeros(2))
    for bad in (np.ones(3), 1.0, np.ones(2) * 1j):
        raises_everywhere(ValueError, lambda bad=bad: v.assign(bad))
        raises_everywhere(
            ValueError, lambda bad=bad: strategy.run(lambda: v.assign(bad))
        )
    assert_copies(strategy, v, [np.full(2, i + 1.0) for i in range(size)])
    for call in ("add", "update"):
        rows = mpidist.IndexedSlices([1.0], [0])

        def scatter(call=call, rows=rows):
            getattr(v, f"scatter_{call}")(rows)

        for attempt in (scatter, lambda s=scatter: strategy.run(s)):
            raises_everywhere(
                NotImplementedError, attempt, "ON_READ", "variable.assign(new)"
            )


# --- in all verbs ---------------------------------------------------------------------


OPERATORS = {
    "SUM": np.sum,
    "MEAN": np.mean,
    "MIN": np.min,
    "MAX": np.max,
    "PROD": np.prod,
}


def test_in_verbs(strategy, rank, size, metric):
    """At program level, in a scope and in merge_fn, which sees all copies."""
    v = metric(SUM, np.zeros(2))
    rows = np.array([[i + 1.0] * 2 for i in range(size)])
    same = np.testing.assert_array_equal

    def check(distribution, seen):
        extended = distribution.extended
        for op, reference in OPERATORS.items():
            same(distribution.reduce(op, v, axis=None), reference(rows, axis=0))
            over_axis = distribution.reduce(op, v, axis=0)
            np.testing.assert_allclose(over_axis, reference(rows), rtol=1e-12)
            reduced = extended.reduce_to(op, v, v)
            assert isinstance(reduced, mpidist.Mirrored)
            same(reduced, reference(rows, axis=0))
        same(distribution.gather(v, axis=0), rows.ravel())
        same(extended.broadcast_to(v, v), rows.sum(axis=0))
        same(extended.read_var(v), rows.sum(axis=0))
        assert extended.read_var(v).flags.writeable
        pair = extended.batch_reduce_to("SUM", [(v, v), ({"v": [v]}, v)])
        same(pair[1]["v"][0], rows.sum(axis=0))
        results = distribution.experimental_local_results({"v": v})
        for result, value, row in zip(results, v.values, seen, strict=True):
            same(result["v"], row)
            assert not value.flags.writeable

    check(strategy, rows[rank : rank + 1])
    assert strategy.extended.value_container(v.values[0]) is v
    with strategy.scope():
        check(strategy, rows[rank : rank + 1])

    def merge_fn(distribution, w, nest):
        assert w is v
        assert nest == [v]
        check(distribution, rows)
        doubled = distribution.run(lambda v: 2 * v, args=(v,))
        return v, doubled, v.values[-1], v + 1.0

    returned, doubled, last, more = merge(strategy, merge_fn, v, [v])
    assert returned is v
    same(own(strategy, doubled), 2 * rows[rank])
    same(own(strategy, last), rows[-1])
    same(own(strategy, more), rows.sum(axis=0) + 1.0)
    assert_copies(strategy, v, list(rows))


def test_in_verbs_of_a_replica(strategy, rank, size, metric):
    v = metric(SUM, np.zeros(2))
    rows = np.array([[i + 1.0] * 2 for i in range(size)])

    def fn(w, nest):
        assert w is v
        assert nest["v"][0] is v
        total = context().all_reduce("SUM", {"v": v})["v"]
        np.testing.assert_array_equal(total, rows.sum(axis=0))
        with mpidist.variable_sync_on_read_context():
            total = context().all_reduce("SUM", v)  # still the copies
        np.testing.assert_array_equal(total, rows.sum(axis=0))
        gathered = context().all_gather(v, axis=0)
        np.testing.assert_array_equal(gathered, rows.ravel())
        (mine,) = strategy.experimental_local_results(v)
        np.testing.assert_array_equal(mine, rows[rank])
        return v, v + 0.0

    returned, computed = strategy.run(fn, args=(v,), kwargs={"nest": {"v": [v]}})
    assert returned is v
    np.testing.assert_array_equal(own(strategy, computed), rows[rank])


def test_as_the_value_of_another_variable(strategy, rank, size, metric):
    v = metric()
    total = size * (size + 1) / 2
    w = make(strategy, v, aggregation=MEAN)
    assert_mirrored(strategy, w, total)
    w.assign_add(v)
    assert_mirrored(strategy, w, 2 * total)
    merge(strategy, lambda s: w.assign_sub(v))
    assert_mirrored(strategy, w, total)
    strategy.run(lambda: w.assign(v))  # the mean of the copies
    assert_mirrored(strategy, w, total / size)
    strategy.run(lambda: mirror_synchronised(w, v))
    assert_mirrored(strategy, w, total)
    v.assign(w)
    assert float(v) == pytest.approx(total)
    other = metric(FIRST)
    strategy.run(lambda: other.assign(v))  # copy by copy
    assert_copies(strategy, other, [total / size] * size)
    v.assign_add(v)
    assert float(v) == pytest.approx(2 * total)
    made = merge(strategy, lambda s: mpidist.Variable(v, name="made"))
    assert_mirrored(strategy, made, float(v))


def mirror_synchronised(w, v):
    with mpidist.variable_sync_on_read_context():
        w.assign(v)


@pytest.mark.mpi(min_size=2)
def test_an_unreadable_initial_value_on_one_rank(strategy, rank, metric):
    """What one rank finds wrong is told to all."""
    v = metric(NONE)
    messages = raises_everywhere(
        ValueError, lambda: make(strategy, v if rank == 1 else 1.0)
    )
    assert "has no one value" in messages[0]
    messages = raises_everywhere(
        ValueError,
        lambda: strategy.extended.broadcast_to(v if rank == 1 else 1.0, v),
    )
    assert "has no one value" in messages[0]


# --- nothing lets mirrored copies diverge ---------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_an_update_that_would_let_the_copies_diverge(strategy, rank, size, metric):
    """Through an ON_READ variable, what fn closes over, rows, or what it returns."""
    v, slot = make(strategy, np.zeros(3), name="v"), make(strategy, 1.0, name="slot")
    large = make(strategy, np.zeros(400_000))
    on_read = metric(SUM, np.zeros(3))
    extended = strategy.extended

    def write_one_slot(v):
        if rank == size - 1:
            slot.assign(2.0)

    def write_the_middle_of_a_large_one(w):
        w.scatter_add(mpidist.IndexedSlices(np.ones(100_000) * rank, range(100_000)))

    attempts = [
        lambda: extended.update(v, lambda v: v.assign(on_read)),
        lambda: extended.update(v, lambda v: v.assign_add(np.full(3, float(rank)))),
        lambda: extended.update(v, lambda v, x: v.assign(x), (rank * np.ones(3),)),
        lambda: extended.update(slot, lambda v, x: v.assign(x), (1.0 + rank,)),
        lambda: extended.update(
            v,
            lambda v, x: v.scatter_add(x),
            args=(mpidist.IndexedSlices([1.0], [rank % 2]),),
        ),
        lambda: extended.update(v, write_one_slot),
        lambda: extended.update(large, lambda w: w.assign(np.full(w.shape, rank))),
        lambda: extended.update(v, lambda v: float(rank)),
        lambda: extended.update_non_slot(
            extended.non_slot_devices([v]), lambda: slot.assign(float(rank))
        ),
    ]
    for attempt in attempts:
        raises_everywhere(mpidist.CollectiveMismatchError, attempt, "update")
        mpidist.check_in_sync([v, slot, large])
        # As it was (rank 0 had not written it), or as rank 0 left it.
        assert_mirrored(strategy, slot, 0.0 if attempt is attempts[-1] else 1.0)
    raises_everywhere(
        ValueError,
        lambda: extended.update(v, lambda v, x: v.assign(x), (on_read,)),
        "read_var(variable)",
    )
    results = extended.update(v, lambda v: float(rank), group=False)
    assert results == (float(rank),)  # not taken for the same


@pytest.mark.mpi(min_size=2)
def test_a_mirrored_of_components_that_differ(strategy, size):
    v = make(strategy, 0.0)

    def merge_fn(distribution):
        v.assign(mpidist.Mirrored([float(i) for i in range(size)]))

    raises_everywhere(
        ValueError, lambda: merge(strategy, merge_fn), "mpidist.PerReplica(...)"
    )
    assert_mirrored(strategy, v, 0.0)
    merge(strategy, lambda s: v.assign(mpidist.Mirrored([2.0] * size)))
    assert_mirrored(strategy, v, 2.0)


def test_all_ranks_keep_their_copies_in_c_order(strategy, rank):
    """A sum depends on the order of the elements, in its last bits."""
    random = np.random.default_rng(0)
    v = make(strategy, lambda: np.asfortranarray(random.normal(size=(50, 40))))
    assert v.value().flags.c_contiguous
    assert len(set(everywhere(float(v.sum())))) == 1


# --- made in a replica function, and copied -------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "options",
    [
        {"name": "other"},
        {"aggregation": MEAN},
        {"synchronization": ON_READ},
        {"shape": (1,)},
        {"dtype": "float32"},
        {"trainable": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_made_differently_on_one_rank(strategy, rank, options):
    given = {"name": "same"} | (options if rank == 1 else {})

    def fn():
        mpidist.Variable([1.0], **given)

    messages = raises_everywhere(
        mpidist.CollectiveMismatchError, lambda: strategy.run(fn)
    )
    assert "'same'" in messages[0]


def test_deepcopy(strategy, rank, size, metric):
    v = metric(SUM, np.zeros(2))
    w = make(strategy, [5.0, 6.0], aggregation=MEAN, name="w")
    copied = copy.deepcopy({"v": v, "again": v, "w": [w]})
    assert copied["again"] is copied["v"]
    assert_copies(strategy, copied["v"], [np.full(2, i + 1.0) for i in range(size)])
    assert copied["v"].synchronization is ON_READ
    (x,) = copied["w"]
    assert (x.name, x.aggregation) == ("w", MEAN)
    x.assign([7.0, 8.0])
    copied["v"].assign([0.0, 0.0])
    assert_mirrored(strategy, w, [5.0, 6.0])
    assert_mirrored(strategy, x, [7.0, 8.0])
    assert_copies(strategy, v, [np.full(2, i + 1.0) for i in range(size)])
    kept = []

    def merge_fn(distribution):
        kept.append(copy.deepcopy(w))
        return kept[0]

    made = merge(strategy, merge_fn)
    merge(strategy, lambda s: kept[0].assign_add([1.0, 1.0]))  # in a later merge_call
    assert_mirrored(strategy, made, [6.0, 7.0])
    raises_everywhere(
        RuntimeError, lambda: strategy.run(lambda: copy.deepcopy(w)), "copy.deepcopy"
    )
    plain = mpidist.Variable([1.0], synchronization=ON_READ)
    with strategy.scope():
        other = copy.deepcopy(plain)
    local(strategy, lambda: copy.deepcopy(plain).assign([3.0]) and None)
    other.assign([2.0])
    assert plain.tolist() == [1.0]
    assert other.tolist() == [2.0]


@pytest.mark.mpi(min_size=2)
def test_deepcopy_of_different_variables(strategy, rank):
    v, w = make(strategy, 1.0), make(strategy, 1.0)
    raises_everywhere(
        mpidist.CollectiveMismatchError, lambda: copy.deepcopy(w if rank else v)
    )


# --- on a device ----------------------------------------------------------------------


@pytest.mark.processes  # CuPy's stand-in is one for the process
@pytest.mark.parametrize("implementation", ["STAGED", "DIRECT"])
def test_on_a_device(monkeypatch, new_strategy, implementation):
    module = posing.install(monkeypatch)
    strategy = new_strategy(device="gpu", implementation=implementation)
    rank, size = strategy.replica_id, strategy.num_replicas_in_sync
    total = size * (size + 1) / 2
    for aggregation, want in ((SUM, total), (MEAN, total / size), (FIRST, 1.0)):
        v = make(strategy, [0.0] * 3, synchronization=ON_READ, aggregation=aggregation)
        mine = module.full(3, rank + 1.0)
        strategy.run(lambda v=v, mine=mine: v.assign(mine))
        assert isinstance(v.value(), module.ndarray)
        assert v.numpy().tolist() == [want] * 3
        assert (v + 1.0).get().tolist() == [want + 1.0] * 3
        assert own(strategy, merge(strategy, lambda s, v=v: v.numpy())).tolist() == (
            [want] * 3
        )
        v.assign(module.full(3, 12.0))
        assert v.numpy().tolist() == [12.0] * 3
        v.assign_add([1.0, 2.0, 3.0])
        assert v.numpy().tolist() == [13.0, 14.0, 15.0]
        assert copy.deepcopy(v).numpy().tolist() == [13.0, 14.0, 15.0]
    counts = make(strategy, [0, 0], synchronization=ON_READ, aggregation=SUM)
    counts.assign([7, -3])
    assert counts.numpy().tolist() == [7, -3]
    assert "value on replica" in repr(counts)


def test_a_forgotten_scope_is_an_error(strategy, size):
    # Each process has a variable of its own, and nothing would combine their values.
    plain = mpidist.Variable(1.0, aggregation=SUM)
    if size == 1:
        strategy.run(lambda: plain.assign_add(1.0, read_value=False))
        assert float(plain) == 2.0
        return
    with pytest.raises(RuntimeError, match=r"made outside every\s+scope"):
        strategy.run(lambda: plain.assign_add(1.0, read_value=False))
    plain.assign(3.0)
    assert strategy.run(lambda: plain.value() * 1 and None) is None
    own_value = mpidist.Variable(1.0, synchronization=ON_READ)  # it is meant
    strategy.run(lambda: own_value.assign(2.0, read_value=False))
    assert float(own_value) == 2.0


@pytest.mark.parametrize("initial", [0.0, [0.0, 0.0]])
@pytest.mark.parametrize("convert", [np.float64, np.float32, np.asarray])
def test_a_conversion_reads_once(metric, strategy, size, initial, convert):
    """Each read is a reduction: NumPy tries `__float__` before `__array__`."""
    v = metric(initial=np.array(initial))
    before = strategy._group.guard.sequence
    total = convert(v)
    assert strategy._group.guard.sequence - before <= 1
    np.testing.assert_array_equal(total, np.full(v.shape, size * (size + 1) / 2))
