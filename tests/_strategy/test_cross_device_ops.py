"""CrossDeviceOps: how a user chooses or implements reductions."""

import numpy as np
import posing
import pytest
from ml_dtypes import bfloat16
from replicas import (
    ON_READ,
    SUM,
    Traffic,
    assert_mirrored,
    assert_usable,
    context,
    local,
    make,
    merge,
    own,
    raises_everywhere,
)

import mpidist
from mpidist._strategy.strategy import group_of
from mpidist._values.distributed import own_component

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]


@pytest.fixture
def strategy_with(strategy):
    """Make strategies with CrossDeviceOps, closed after the test."""
    made = []

    def make_strategy(ops, **kwargs):
        options = mpidist.experimental.CommunicationOptions(
            timeout_seconds=60, implementation=kwargs.pop("implementation", "AUTO")
        )
        made.append(
            mpidist.MPIStrategy(
                communication_options=options, cross_device_ops=ops, **kwargs
            )
        )
        return made[-1]

    yield make_strategy
    for one in made:
        one.close()


class Recording(mpidist.CollectiveAllReduce):
    """Records the calls, and passes them to the base class."""

    def __init__(self):
        self.calls = []

    def reduce_implementation(self, op, value, destinations, options):
        assert mpidist.get_cross_replica_context() is not None
        assert isinstance(value, (mpidist.PerReplica, mpidist.Variable))
        self.calls.append(("reduce", op.name, options))
        return super().reduce_implementation(op, value, destinations, options)

    def batch_reduce_implementation(self, op, pairs, options):
        self.calls.append(("batch", op.name, len(pairs)))
        return super().batch_reduce_implementation(op, pairs, options)

    def broadcast_implementation(self, tensor, destinations):
        self.calls.append(("broadcast",))
        return super().broadcast_implementation(tensor, destinations)

    def take(self):
        calls, self.calls = self.calls, []
        return calls


def check_all_operations(strategy, rtol=0.0):
    """Check the result of every operation."""
    rank, size = strategy.replica_id, strategy.num_replicas_in_sync
    total = size * (size + 1) / 2
    v = make(strategy, np.zeros(3))
    metric = make(strategy, np.zeros(3), synchronization=ON_READ, aggregation=SUM)
    strategy.run(lambda: metric.assign(np.full(3, rank + 1.0)))
    value = strategy.run(lambda: np.full(3, rank + 1.0))
    extended = strategy.extended

    def same(found, want):
        np.testing.assert_allclose(found, want, rtol=rtol)

    def check(distribution, x):
        extended = distribution.extended
        for op, want in (("SUM", total), ("MEAN", total / size)):
            same(distribution.reduce(op, x, axis=None), [want] * 3)
            mirrored = extended.reduce_to(op, x, v)
            assert isinstance(mirrored, mpidist.Mirrored)
            same(mirrored, [want] * 3)
            first, second = extended.batch_reduce_to(op, [(x, v), (x, x)])
            same(first, [want] * 3)
            same(second, [want] * 3)
        same(extended.reduce_to("SUM", metric, metric), [total] * 3)
        v.assign(extended.reduce_to("SUM", x, v))
        same(extended.broadcast_to(np.arange(3.0), v), np.arange(3.0))
        assert extended.broadcast_to(4, v) == 4

    check(strategy, value)
    merge(strategy, check, np.full(3, rank + 1.0))
    for root, device in enumerate(extended.worker_devices):
        result = extended.reduce_to("MEAN", value, device)
        assert (result is None) == (rank != root)
        if rank == root:
            same(result, [total / size] * 3)

    def replica_fn():
        nest = {"a": np.full(3, rank + 1.0), "b": [rank + 1.0]}
        reduced = context().all_reduce("SUM", nest)
        same(reduced["a"], [total] * 3)
        same(reduced["b"][0], total)
        return reduced["a"]

    same(local(strategy, replica_fn), [total] * 3)
    mpidist.check_in_sync(v)


@pytest.mark.parametrize(
    "ops",
    [
        mpidist.CollectiveAllReduce,
        mpidist.ReductionToOneDevice,
        mpidist.NcclAllReduce,
        mpidist.HierarchicalCopyAllReduce,
        Recording,
    ],
    ids=lambda c: c.__name__,
)
def test_all_operations(strategy_with, ops):
    check_all_operations(strategy_with(ops()))


def test_all_operations_by_an_accumulation_function(strategy, strategy_with):
    for device in (None, strategy.extended.worker_devices[-1]):
        called = []

        def accumulate(values, called=called):
            called.append(len(values))
            return np.sum(values, axis=0)

        mine = strategy_with(mpidist.ReductionToOneDevice(device, accumulate))
        check_all_operations(mine)
        center = 0 if device is None else mine.num_replicas_in_sync - 1
        assert bool(called) == (mine.replica_id == center)
        assert set(called) <= {mine.num_replicas_in_sync}


def test_what_goes_through_it(strategy_with, size):
    ops = Recording()
    strategy = strategy_with(ops)
    v = make(strategy, 0.0, aggregation=SUM)
    metric = make(strategy, 0.0, synchronization=ON_READ, aggregation=SUM)
    x = strategy.run(lambda: 1.0)
    options = mpidist.experimental.CommunicationOptions(bytes_per_pack=100)
    run, extended = strategy.run, strategy.extended
    for call, expected in (
        (lambda: strategy.reduce("MAX", x, axis=None), [("reduce", "MAX", None)]),
        (
            lambda: extended.reduce_to("SUM", x, v, options),
            [("reduce", "SUM", options)],
        ),
        (lambda: extended.reduce_to("SUM", {"a": x, "b": x}, v), [("batch", "SUM", 2)]),
        (
            lambda: extended.batch_reduce_to("MEAN", [(x, v)] * 3),
            [("batch", "MEAN", 3)],
        ),
        (lambda: extended.broadcast_to(np.ones(2), v), [("broadcast",)]),
        (
            lambda: run(lambda: context().all_reduce("MIN", [1, 2])),
            [("batch", "MIN", 2)],
        ),
        (lambda: extended.reduce_to("MEAN", 3.0, v), []),
        (
            lambda: merge(strategy, lambda s, y: s.reduce("SUM", y, axis=None), 1.0),
            [("reduce", "SUM", None)],
        ),
        # Variables are aggregated by it.
        (lambda: run(lambda: v.assign_add(1.0) and None), [("reduce", "SUM", None)]),
        (lambda: run(lambda: metric.assign(2.0, read_value=False)), []),
        (lambda: metric.value(), [("reduce", "SUM", None)]),
    ):
        call()
        assert ops.take() == expected  # on every rank
    assert (float(v), float(metric)) == (size, 2.0 * size)


def test_called_directly(strategy, rank, size):
    """Without a strategy that was made with it."""
    v = make(strategy, np.zeros(2))
    x = strategy.run(lambda: np.full(2, rank + 1.0))
    total = size * (size + 1) / 2
    for ops in (mpidist.CollectiveAllReduce(), mpidist.ReductionToOneDevice()):
        mirrored = ops.reduce("SUM", x, v)
        assert isinstance(mirrored, mpidist.Mirrored)
        v.assign(mirrored)
        assert_mirrored(strategy, v, [total] * 2)
        first, second = ops.batch_reduce("MEAN", [(x, v), (x, x)])
        np.testing.assert_array_equal(first, second)
        with strategy.scope():
            copied = ops.broadcast(np.array([rank + 3.0]), v)
        np.testing.assert_array_equal(copied, [3.0])
        metric = make(strategy, rank, synchronization=ON_READ, aggregation=SUM)
        strategy.run(lambda m=metric: m.assign(2))
        assert ops.broadcast(metric, v) == 2 * size
        assert ops.broadcast(1.5, v) == 1.5
        np.testing.assert_array_equal(ops.reduce("MEAN", v, v), [total] * 2)
        np.testing.assert_array_equal(ops.reduce("SUM", mirrored, x), v * size)
        for bad in (1.0, np.ones(2), None):
            raises_everywhere(
                ValueError,
                lambda ops=ops, bad=bad: ops.reduce("SUM", bad, v),
                "expected a `mpidist.PerReplica`",
            )
        for bad in ("", "nowhere", [v], None):
            raises_everywhere(
                ValueError, lambda ops=ops, bad=bad: ops.reduce("SUM", x, bad)
            )
            with strategy.scope():
                raises_everywhere(
                    ValueError, lambda ops=ops, bad=bad: ops.broadcast(v, bad)
                )
        raises_everywhere(ValueError, lambda ops=ops: ops.reduce("total", x, v))
    with pytest.raises(NotImplementedError, match="reduce_implementation"):
        mpidist.CrossDeviceOps().reduce("SUM", x, v)


@pytest.mark.mpi(min_size=2)
def test_in_merge_fn_it_is_not_called_directly(strategy):
    """There rank 0 is alone: an error, and no hang."""
    ops = mpidist.CollectiveAllReduce()
    raises_everywhere(
        RuntimeError,
        lambda: merge(strategy, lambda s, x: ops.reduce("SUM", x, x), 1.0),
        "merge_fn runs on this rank alone",
    )


@pytest.mark.parametrize(
    "kind", [mpidist.NcclAllReduce, mpidist.HierarchicalCopyAllReduce]
)
def test_num_packs(strategy_with, rank, size, kind):
    for number, messages in ((0, 6), (1, 1), (2, 2), (3, 3)):
        # Packs are for MPI: through shared memory all values go as one stream, and
        # small nests, of two ranks up to 1 MiB, behind their header.
        strategy = strategy_with(kind(num_packs=number), implementation="DIRECT")
        values = strategy.run(lambda: [np.full(60_000, rank + 1.0)] * 6)
        traffic = Traffic(strategy)
        results = strategy.reduce("SUM", values, axis=None)
        for result in results:
            total = size * (size + 1) / 2
            np.testing.assert_array_equal(result, np.full(60_000, total))
        if size > 1:
            assert traffic.calls["Allreduce"] == messages
    for bad, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="num_packs"):
            kind(num_packs=bad)


def test_reduction_to_one_device(strategy, strategy_with, rank, size):
    ops = mpidist.ReductionToOneDevice(strategy.extended.worker_devices[-1])
    mine = strategy_with(ops)
    x = mine.run(lambda: {"i": rank, "h": np.float16([rank]), "n": np.zeros((0, 2))})
    mean = mine.reduce("MEAN", x, axis=None)
    assert mean["i"] == (size - 1) / 2
    assert isinstance(mean["i"], float)
    assert mean["h"].dtype == np.float16
    assert mean["n"].shape == (0, 2)
    assert mine.reduce("MAX", x["i"], axis=None) == size - 1
    calls = mine.communication_statistics().calls
    if size > 1:
        assert calls["Reduce"]
        assert "Allreduce" not in calls
    rows = mine.run(lambda: mpidist.IndexedSlices([float(rank)], [rank]))
    assert mine.reduce("SUM", rows, axis=None).indices.tolist() == [*range(size)]

    def merge_fn(distribution, one, other):  # the result for one rank has its own key
        distribution.extended.reduce_to("SUM", one, ops._device)
        return distribution.extended.reduce_to("SUM", other, other)

    held = mine.run(lambda: (1.0, 2.0))
    kept = mine.extended.reduce_to("SUM", held[0], ops._device)
    assert kept == (size if rank == size - 1 else None)
    second = merge(mine, merge_fn, np.zeros(2), np.ones(3))
    assert own(mine, second).tolist() == [size] * 3
    any_device = mpidist.ReductionToOneDevice("/device:CPU:0")
    x = strategy.run(lambda: 1.0)
    assert any_device.reduce("SUM", x, x) == size
    wrong = mpidist.ReductionToOneDevice(f"/job:worker/task:{size}")
    raises_everywhere(
        ValueError, lambda: wrong.reduce("SUM", x, x), "destinations must be"
    )


@pytest.mark.parametrize("destination", ["center", "others", "all"])
@pytest.mark.parametrize(
    "what", ["raises", "wrong shape", "fractions", "beyond", "no array"]
)
def test_accumulation_functions_that_fail(strategy, rank, size, destination, what):
    """They run on one rank; all ranks raise, at this very call."""

    def accumulate(values):
        if what == "raises":
            raise KeyError("on purpose")
        wrong = {"fractions": np.ones(2, bfloat16), "beyond": np.full(2, 2**40)}
        return wrong.get(what, np.ones(7) if what == "wrong shape" else "text")

    ops = mpidist.ReductionToOneDevice(accumulation_fn=accumulate)
    x = strategy.run(
        lambda: np.ones(2, "i4" if what in ("fractions", "beyond") else "f8")
    )
    devices = strategy.extended.worker_devices
    to = {"center": devices[0], "others": devices[-1], "all": x}[destination]
    kind = {"raises": KeyError, "no array": TypeError}.get(what, ValueError)
    raises_everywhere(kind, lambda: ops.reduce("SUM", x, to))
    assert strategy.reduce("SUM", x, axis=None).tolist() == [size] * 2
    raises_everywhere(ValueError, lambda: ops.reduce("MAX", x, to), "SUM or MEAN")
    x = strategy.run(lambda: np.array(2.0))  # on rank 0, too, the mean is an array
    mean = mpidist.ReductionToOneDevice(accumulation_fn=sum).reduce("MEAN", x, x)
    assert type(own(strategy, mean)) is np.ndarray
    if size > 1:  # the ranks waited for each other until the deadline
        ops = mpidist.ReductionToOneDevice(devices[rank], sum)
        kind = mpidist.CollectiveMismatchError
        raises_everywhere(kind, lambda: ops.reduce("SUM", x, x), "from rank 1 float64")


class Halves(mpidist.CollectiveAllReduce):
    """The example of the docstring: sums in half precision."""

    def reduce_implementation(self, op, value, destinations, options):
        run = mpidist.get_strategy().run
        half = run(lambda x: np.asarray(x).astype("float16"), args=(value,))
        total = super().reduce_implementation(op, half, destinations, options)
        return None if total is None else total.astype("float64")


def test_a_class_of_the_user_that_compresses(strategy_with, rank, size):
    strategy = strategy_with(Halves())
    x = strategy.run(lambda: np.full(1000, 0.1))
    traffic = Traffic(strategy)
    total = strategy.reduce("SUM", x, axis=None)
    np.testing.assert_allclose(total, 0.1 * size, rtol=2e-3)
    assert total[0] != 0.1 * size
    assert total.dtype == np.float64
    assert traffic.bytes["Allreduce"] <= 4000
    device = strategy.extended.worker_devices[-1]
    result = strategy.extended.reduce_to("SUM", x, device)
    assert (result is None) == (rank != size - 1)

    def merge_fn(distribution, x):
        return distribution.extended.batch_reduce_to("SUM", [(x, x), (x, x)])

    first, _ = merge(strategy, merge_fn, np.full(10, 0.1))
    np.testing.assert_allclose(own(strategy, first), 0.1 * size, rtol=2e-3)
    several = local(strategy, lambda: context().all_reduce("SUM", [0.1, 0.1]))
    assert several == [float(np.float16(0.1) * np.float16(size))] * 2


class Failing(mpidist.CollectiveAllReduce):
    def __init__(self, when, rank):
        self.when, self.rank = when, rank

    def reduce_implementation(self, op, value, destinations, options):
        return self._run(
            lambda: super(Failing, self).reduce_implementation(
                op, value, destinations, options
            )
        )

    def broadcast_implementation(self, tensor, destinations):
        return self._run(
            lambda: super(Failing, self).broadcast_implementation(tensor, destinations)
        )

    def _run(self, work):
        mine = mpidist.get_strategy().replica_id == self.rank
        if mine and self.when == "before":
            raise KeyError("on purpose")
        result = work()
        if mine and self.when == "after":
            raise KeyError("on purpose")
        if mine and self.when == "differs":
            return np.nextafter(np.asarray(result), 100.0)
        if mine and self.when == "nothing":
            return None
        return result


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("when", ["before", "after", "differs", "nothing"])
def test_a_class_of_the_user_that_fails_on_one_rank(strategy_with, rank, size, when):
    """All raise at this call; a result that differs would let copies diverge."""
    strategy = strategy_with(Failing(when, size - 1))
    v = make(strategy, np.zeros(2))
    x = strategy.run(lambda: np.ones(2))
    kind = KeyError if when in ("before", "after") else mpidist.CollectiveMismatchError
    for call in (
        lambda: strategy.reduce("SUM", x, axis=None),
        lambda: v.assign(strategy.extended.reduce_to("SUM", x, v)),
        lambda: v.assign(strategy.extended.broadcast_to(np.ones(2), v)),
        lambda: merge(
            strategy, lambda s, y: v.assign(s.extended.reduce_to("SUM", y, v)), 1.0
        ),
    ):
        raises_everywhere(kind, call)
        assert_mirrored(strategy, v, np.zeros(2))

    def replica_fn():
        with pytest.raises((KeyError, mpidist.CollectiveMismatchError)):
            context().all_reduce("SUM", np.ones(2))
        return context().all_gather(np.ones(1), axis=0)

    assert local(strategy, replica_fn).tolist() == [1.0] * size
    group_of(strategy).custom_ops.when = "never"
    check_all_operations(strategy)


@pytest.mark.one_size
@pytest.mark.mpi(min_size=2)
def test_rows_whose_numbers_differ(strategy_with, rank, size):
    class Shifted(mpidist.CollectiveAllReduce):
        def reduce_implementation(self, *args):
            rows = own_component(super().reduce_implementation(*args))
            return mpidist.IndexedSlices(rows.values, rows.indices + (rank == size - 1))

    strategy = strategy_with(Shifted())
    v = make(strategy, np.zeros(9))
    x = strategy.run(lambda: mpidist.IndexedSlices([1.0], [rank]))
    for call in (
        lambda: strategy.reduce("SUM", x, axis=None),
        lambda: strategy.extended.reduce_to("SUM", x, v),
    ):
        raises_everywhere(mpidist.CollectiveMismatchError, call)


def test_a_result_that_is_the_value_itself(strategy_with):
    """What is reduced is not it; nor is what is read of an ON_READ variable."""

    class Unchanged(mpidist.CollectiveAllReduce):
        def batch_reduce_implementation(self, op, pairs, options):
            return [value for value, _ in pairs]

        def reduce_implementation(self, op, value, destinations, options):
            return value

    strategy = strategy_with(Unchanged())
    v = make(strategy, np.ones(2), synchronization="ON_READ", aggregation=SUM)
    with strategy.scope():
        before = v.value()
    strategy.run(lambda: v.assign_add(np.ones(2)))
    np.testing.assert_array_equal(before, [1.0, 1.0])
    np.testing.assert_array_equal(local(strategy, v.value), [2.0, 2.0])
    x = np.ones(2)
    results = local(strategy, lambda: context().all_reduce("SUM", [x, (x, 2.0)]))
    total = strategy.reduce("SUM", strategy.run(lambda: x), axis=None)
    for result in (results[0], results[1][0], total):
        result[...] = 3.0
    np.testing.assert_array_equal(x, [1.0, 1.0])


def test_reading_where_operations_write_into_what_they_get(strategy_with):
    class Doubled(mpidist.CollectiveAllReduce):
        def reduce_implementation(self, op, value, destinations, options):
            own_component(value)[...] *= 2
            return own_component(value)[:]

    strategy = strategy_with(Doubled())
    v = make(strategy, np.ones(2), synchronization="ON_READ", aggregation=SUM)
    with strategy.scope():
        first = v.value().copy()
        np.testing.assert_array_equal(v.value(), first)
    x = np.ones(2)
    total = local(strategy, lambda: context().all_reduce("SUM", x))
    total[...] = 3.0
    np.testing.assert_array_equal(x, [1.0, 1.0])


def test_which_classes_reduce_several_values_one_at_a_time():
    class Named:
        def __init_subclass__(cls, name, **kwargs):
            super().__init_subclass__(**kwargs)

        reduce_implementation = Halves.reduce_implementation

    class Mixed(mpidist.CollectiveAllReduce, Named, name="mixed"):
        reduce_implementation = Named.reduce_implementation

    class First(Named, mpidist.CollectiveAllReduce, name="first"):
        pass

    class Derived(Recording):
        reduce_implementation = Halves.reduce_implementation

    many = mpidist.CrossDeviceOps.batch_reduce_implementation
    assert Mixed.batch_reduce_implementation is many
    assert First.batch_reduce_implementation is many
    assert "batch_reduce_implementation" not in vars(Derived)


def test_wrong_results(strategy_with):
    class Short(mpidist.CollectiveAllReduce):
        def batch_reduce_implementation(self, op, pairs, options):
            return super().batch_reduce_implementation(op, pairs, options)[1:]

    strategy = strategy_with(Short())
    x = strategy.run(lambda: [1.0, 2.0])
    raises_everywhere(
        TypeError,
        lambda: strategy.reduce("SUM", x, axis=None),
        "expected a list of 2 results",
    )


@pytest.mark.one_size
def test_wrong_classes(rank, size):
    for bad in ("NCCL", mpidist.CollectiveAllReduce, 1):
        raises_everywhere(
            TypeError,
            lambda bad=bad: mpidist.MPIStrategy(cross_device_ops=bad),
            "`cross_device_ops` to be a `mpidist.CrossDeviceOps`",
        )
    if size > 1:
        ops = mpidist.NcclAllReduce() if rank else mpidist.CollectiveAllReduce()
        raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda: mpidist.MPIStrategy(cross_device_ops=ops),
            "NcclAllReduce as cross_device_ops",
            "CollectiveAllReduce as cross_device_ops",
        )


@pytest.mark.processes  # CuPy's stand-in is one for the process
@pytest.mark.parametrize("ops", [mpidist.ReductionToOneDevice, mpidist.NcclAllReduce])
def test_on_a_device(monkeypatch, strategy_with, ops):
    module = posing.install(monkeypatch)
    strategy = strategy_with(ops(), device="gpu")
    rank, size = strategy.replica_id, strategy.num_replicas_in_sync
    x = strategy.run(lambda: module.full(3, rank + 1.0))
    for op, want in (("SUM", size * (size + 1) / 2), ("MEAN", (size + 1) / 2)):
        total = strategy.reduce(op, x, axis=None)
        assert isinstance(total, module.ndarray)
        assert total.get().tolist() == [want] * 3
    many = strategy.reduce("SUM", [x, x], axis=None)
    assert many[1].get().tolist() == [size * (size + 1) / 2] * 3
    copied = strategy.extended.broadcast_to(module.full(2, rank + 1.0), x)
    assert copied.value().get().tolist() == [1.0, 1.0]
    for root, device in enumerate(strategy.extended.worker_devices):
        result = strategy.extended.reduce_to("SUM", x, device)
        assert (result is None) == (rank != root)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", ["all_reduce", "reduce", "assign", "apply_gradients"])
def test_a_reduction_that_only_one_rank_makes(strategy_with, rank, how):
    """All raise, and the strategy is usable: none has counted the call."""
    strategy = strategy_with(mpidist.CollectiveAllReduce())
    variable = make(strategy, np.zeros(2), aggregation=SUM)
    optimizer = mpidist.optimizers.SGD(0.1)
    optimizer.build([variable])
    ones = strategy.run(lambda: np.ones(2))
    calls = {
        "all_reduce": lambda: context().all_reduce("SUM", 1),
        "assign": lambda: variable.assign(np.ones(2)),
        "apply_gradients": lambda: optimizer.apply_gradients([(np.ones(2), variable)]),
    }

    def call():
        if how == "reduce":
            if rank:
                strategy.reduce("SUM", ones, axis=None)
            else:
                strategy.run(lambda: 1)
        else:
            strategy.run(calls[how] if rank else lambda: None)

    raises_everywhere(mpidist.CollectiveMismatchError, call)
    assert_usable(strategy)
