"""Programs that libraries for TensorFlow contain, and the names that they use."""

import contextlib
import functools
import logging

import numpy as np
import pytest
from replicas import (
    Traffic,
    assert_mirrored,
    assert_usable,
    from_replicas,
    local,
    make,
    raises_everywhere,
    this_replica,
)

import mpidist
from mpidist._base import gpus, threads
from mpidist._base.remedies import tables

pytestmark = [pytest.mark.mpi, pytest.mark.replicas(2, 3)]


# --- strategies by other names --------------------------------------------------------


def test_strategies_by_other_names(strategy, rank, size):
    ring = mpidist.experimental.CommunicationImplementation.RING
    options = mpidist.experimental.CommunicationOptions(bytes_per_pack=2**20)
    ops = mpidist.ReductionToOneDevice()
    for create in (
        mpidist.MirroredStrategy,
        lambda: mpidist.MirroredStrategy(["/cpu:0"] * size),
        lambda: mpidist.MirroredStrategy(devices=["/job:w/device:CPU:0"] * size),
        lambda: mpidist.MirroredStrategy(cross_device_ops=ops),
        mpidist.MultiWorkerMirroredStrategy,
        lambda: mpidist.MultiWorkerMirroredStrategy(communication_options=options),
        lambda: mpidist.MultiWorkerMirroredStrategy(strategy.cluster_resolver),
        lambda: mpidist.MultiWorkerMirroredStrategy(
            mpidist.cluster.TFConfigClusterResolver()
        ),
        lambda: mpidist.experimental.MultiWorkerMirroredStrategy(communication=ring),
        lambda: mpidist.MultiWorkerMirroredStrategy(communication="auto"),
        lambda: mpidist.experimental.MultiWorkerMirroredStrategy(ring),
    ):
        made = create()
        assert isinstance(made, mpidist.MPIStrategy)
        assert made.num_replicas_in_sync == size
        value = from_replicas(made, lambda i: float(i))
        assert made.reduce("SUM", value, axis=None) == sum(range(size))
        made.close()


@pytest.mark.mpi(min_size=2)
def test_a_strategy_of_another_class_on_one_rank(rank):
    kinds = mpidist.MPIStrategy, mpidist.MirroredStrategy
    with pytest.raises(mpidist.CollectiveMismatchError, match=r" MirroredStrategy\("):
        kinds[min(rank, 1)]()


def test_any_strategy_is_mirrored(strategy):
    class Own(mpidist.MirroredStrategy):
        pass

    for kind in (mpidist.MirroredStrategy, mpidist.MultiWorkerMirroredStrategy):
        assert isinstance(strategy, kind)
        assert not isinstance(mpidist.get_strategy(), kind)
    assert not isinstance(strategy, Own)


def test_no_strategy_is_for_tpus_or_has_servers(strategy):
    for kind in (
        mpidist.TPUStrategy,
        mpidist.ParameterServerStrategy,
        mpidist.CentralStorageStrategy,
        mpidist.experimental.TPUStrategy,
        mpidist.experimental.ParameterServerStrategy,
        mpidist.experimental.CentralStorageStrategy,
    ):
        for one in (strategy, mpidist.get_strategy()):
            assert not isinstance(one, kind)
        for message in raises_everywhere(
            NotImplementedError, lambda kind=kind: kind("anything")
        ):
            assert message.startswith(f"{kind.__name__}: ")
            assert "write `mpidist.MPIStrategy(" in message
    assert_usable(strategy)


def test_each_rank_has_its_own_strategy_of_one_device(strategy, rank, size, caplog):
    assert not isinstance(strategy, mpidist.OneDeviceStrategy)
    with caplog.at_level(logging.WARNING):
        one = mpidist.OneDeviceStrategy("/cpu:0")
    if threads.current() is None:  # threads of a run share the log
        warned = [x for x in caplog.messages if x.startswith("mpidist: OneDevice")]
        assert len(warned) == (rank == 0 and size > 1)
        assert all(f"each of the {size} ranks has one of its own" in x for x in warned)
    assert isinstance(one, mpidist.OneDeviceStrategy)
    assert one.num_replicas_in_sync == 1
    assert_usable(one)
    if rank == 0:  # not collective
        mpidist.OneDeviceStrategy(device="CPU:0").close()
    one.close()
    raises_everywhere(
        ValueError, lambda: mpidist.OneDeviceStrategy(0), "0 is not a device"
    )
    assert_usable(strategy)


def test_programs_count_devices_to_choose_a_strategy(strategy, size):
    devices = mpidist.cluster.replica_devices()
    assert len(devices) == len(mpidist.cluster.replica_devices("CPU")) == size
    assert mpidist.cluster.replica_devices(device_type="TPU") == []
    for given in (devices, [device.name for device in devices]):
        mirrored = mpidist.MirroredStrategy(given)
        assert f"device:{devices[0].device_type}" in mirrored.extended.worker_devices[0]
        mirrored.close()
    if size > 1:
        with pytest.raises(ValueError, match=f"`mpirun -n {size - 1}`"):
            mpidist.MirroredStrategy(devices[1:])


def test_arguments_of_strategies_that_make_no_sense(strategy, size):
    mirrored, workers = mpidist.MirroredStrategy, mpidist.MultiWorkerMirroredStrategy
    too_many = ["CPU:0"] * (size + 1)
    no_gpu = [*too_many[2:], "GPU:99"]  # of the last rank
    kind = ValueError if gpus.count_gpus()[0] else RuntimeError
    for error, create, match in [
        (ValueError, lambda: mirrored(too_many), f"`mpirun -n {size + 1}`"),
        (kind, lambda: mirrored(no_gpu), "gpu:99"),
        (ValueError, lambda: mirrored(["TPU:0"] * size), "'TPU:0' is not a device"),
        (TypeError, lambda: mirrored("GPU:0"), "list of strings"),
        (TypeError, lambda: mirrored(2), "list of strings"),
        (TypeError, lambda: workers(object()), "leave it out"),
        (TypeError, lambda: workers(communication="AUTO", communication_options=1), ""),
    ]:
        raises_everywhere(error, create, match)
    for name, keyword in tables()["keywords"]["MPIStrategy"].items():
        raises_everywhere(
            TypeError,
            lambda name=name: mpidist.MPIStrategy(**{name: "x"}),
            f"MPIStrategy: got an unexpected keyword argument {name!r}",
            keyword["write"],
        )
    assert_usable(strategy)


def test_an_argument_that_is_wrong_on_one_rank(strategy, rank, size):
    """The others are on their way to the constructor, and must not wait there."""
    last = rank == size - 1
    devices = ["TPU:0" if last else "CPU:0"] * size
    resolver = object() if last else None
    for error, create in [
        (ValueError, lambda: mpidist.MirroredStrategy(devices)),
        (TypeError, lambda: mpidist.MultiWorkerMirroredStrategy(resolver)),
    ]:
        raises_everywhere(error, create)
    assert_usable(strategy)


# --- library code ---------------------------------------------------------------------


class LibraryOptimizer:
    """As those of Keras 2: it may merge, and it updates each copy."""

    def __init__(self, rate):
        self.rate = rate

    def apply_gradients(self, grads_and_vars):
        grads_and_vars = tuple(grads_and_vars)
        strategy = mpidist.get_strategy()
        if not mpidist.in_cross_replica_context():
            grads, variables = zip(*grads_and_vars, strict=True)
            context = mpidist.get_replica_context()
            if mpidist.strategy_supports_no_merge_call():
                total = grads
            else:
                total = context.all_reduce(mpidist.ReduceOp.SUM, grads)
            grads_and_vars = tuple(zip(total, variables, strict=True))
        return mpidist.maybe_merge_call(
            self._distributed_apply, strategy, grads_and_vars, name="apply"
        )

    def _distributed_apply(self, strategy, grads_and_vars, name):
        assert name == "apply"

        def apply(variable, gradient):
            return variable.assign_sub(self.rate * gradient)

        for gradient, variable in grads_and_vars:
            strategy.extended.update(variable, apply, args=(gradient,), group=False)


def test_an_optimizer_that_may_merge(strategy, rank, size):
    w = make(strategy, np.zeros(3))
    optimizer = LibraryOptimizer(0.5)

    def step(x):
        optimizer.apply_gradients([(x * np.ones(3), w)])

    strategy.run(step, args=(from_replicas(strategy, lambda i: i + 1.0),))
    assert_mirrored(strategy, w, np.full(3, -0.5 * sum(range(size + 1))))
    # The same library without a strategy.
    plain = mpidist.Variable(np.zeros(3))
    optimizer.apply_gradients([(np.ones(3), plain)])
    np.testing.assert_array_equal(plain, np.full(3, -0.5))
    assert mpidist.strategy_supports_no_merge_call()
    assert not local(strategy, mpidist.strategy_supports_no_merge_call)


def test_a_loop_with_run_options_and_a_penalty(strategy, size):
    w = make(strategy, np.array([1.0, 2.0]))
    options = mpidist.RunOptions(experimental_enable_dynamic_batch_size=False)

    def step():
        penalty = np.sum(w**2)
        return (
            mpidist.scale_regularization_loss(penalty),
            mpidist.scale_regularization_loss(np.ones(3, np.float32)),
            mpidist.scale_regularization_loss(6),
        )

    shares = strategy.run(step, options=options)
    total, three, six = strategy.reduce("SUM", shares, axis=None)
    assert total == pytest.approx(5.0)
    assert three == pytest.approx(3.0)
    assert three.dtype == np.float32
    assert six == pytest.approx(6.0)
    assert mpidist.scale_regularization_loss(4.0) == 4.0
    with strategy.scope(), pytest.raises(RuntimeError, match=r"strategy\.run"):
        mpidist.scale_regularization_loss(4.0)
    with pytest.raises(TypeError, match="scale_regularization_loss: expected"):
        mpidist.scale_regularization_loss("x")


def test_variable_creator_scope(strategy, size):
    """As Sonnet's Replicator: variables that replicas make are its own kind."""
    seen = []

    def replica_local(next_creator, **kwargs):
        seen.append(("inner", sorted(kwargs)))
        if kwargs["synchronization"] is mpidist.VariableSynchronization.AUTO:
            kwargs["synchronization"] = mpidist.VariableSynchronization.ON_READ
            kwargs["aggregation"] = mpidist.VariableAggregation.SUM
        return next_creator(**kwargs)

    def named(next_creator, **kwargs):
        seen.append(("outer", kwargs["name"]))
        mpidist.Variable(0.0)  # its own, which no creator sees
        return next_creator(**kwargs | {"name": "scope/" + kwargs["name"]})

    with strategy.scope(), mpidist.variable_creator_scope(named):
        with mpidist.variable_creator_scope(replica_local):
            count = mpidist.Variable(np.ones(2), name="count")
        other = mpidist.Variable(np.ones(2), False, "other")
    assert [who for who, _ in seen] == ["inner", "outer", "outer"]
    assert {"initial_value", "trainable", "dtype", "aggregation"} < {*seen[0][1]}
    assert (count.name, other.name) == ("scope/count", "scope/other")
    assert (count.trainable, other.trainable) == (False, False)
    np.testing.assert_array_equal(count.numpy(), np.full(2, size))
    assert make(strategy, 1.0, name="after").name == "after"
    with strategy.scope(), mpidist.variable_creator_scope(named):
        optimizer = mpidist.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build([other])
    assert all(v.name.startswith("scope/") for v in optimizer.variables)


def test_run_enters_the_scope_of_a_derived_class(rank, size):
    """As Sonnet's Replicator, whose optimizers make variables in the first step."""

    class Replicator(mpidist.MPIStrategy):
        @contextlib.contextmanager
        def scope(self):
            if rank in failing:
                raise OSError("not here")
            with super().scope(), mpidist.variable_creator_scope(on_read):
                yield

    def on_read(next_creator, **kwargs):
        return next_creator(**kwargs | {"synchronization": "ON_READ"})

    slots, failing = [], []

    def step():
        if not slots:
            slots.append(mpidist.Variable(0.0))
        slots[0].assign_add(this_replica() + 1.0)
        return slots[0].read_value()

    replicator = Replicator()
    for k in (1.0, 2.0):
        assert local(replicator, step) == k * (rank + 1)
    with replicator.scope():
        assert mpidist.Variable(1.0).synchronization.name == "ON_READ"
    context = mpidist.get_replica_context

    def merged():
        return context().merge_call(lambda strategy: strategy.run(lambda: 2.0))

    assert local(replicator, merged) == 2.0

    def nested():
        replicator.run(lambda: 2.0)

    with pytest.raises(RuntimeError, match=r"run: Method requires"):
        replicator.run(nested)
    failing.append(size - 1)
    raises_everywhere(OSError, lambda: replicator.run(lambda: 2.0))
    failing.clear()
    assert local(replicator, merged) == 2.0
    replicator.close()


def test_creators_that_make_no_sense(strategy):
    for creator in (
        lambda next_creator, **kwargs: None,
        lambda next_creator, **kwargs: mpidist.Variable(**kwargs),
    ):
        with strategy.scope(), mpidist.variable_creator_scope(creator):
            raises_everywhere(
                TypeError,
                lambda: mpidist.Variable(1.0),
                "return next_creator(**kwargs)",
            )
    with pytest.raises(TypeError, match="expected a function"):
        mpidist.variable_creator_scope(3).__enter__()
    assert_usable(strategy)


def test_a_mirrored_strategy_shows_the_values_of_all_replicas(strategy, rank, size):
    mirrored = mpidist.MirroredStrategy()
    local, n = mirrored.experimental_local_results, range(size)
    with mirrored.scope():
        written = mpidist.Variable(2.0)
        read = mpidist.Variable(0.0, synchronization="ON_READ", aggregation="SUM")

    def step():
        i = mpidist.get_replica_context().replica_id_in_sync_group
        read.assign(float(i))
        return {"rows": np.full((i + 1, 2), i), "i": i}

    results = mirrored.run(step)
    assert results["i"].values == tuple(n)
    assert [x.shape for x in results["rows"].values] == [(i + 1, 2) for i in n]
    assert np.concatenate(results["rows"].values, axis=0).sum() == 2 * sum(
        i * (i + 1) for i in n
    )
    assert [row["i"] for row in local(results)] == list(n)
    assert [float(x) for x in local(written)] == [2.0] * size
    assert [float(x) for x in read.values] == list(n)
    assert float(read) == sum(n)
    texts = mirrored.experimental_distribute_values_from_function(
        lambda context: f"replica {context.replica_id_in_sync_group}"
    )
    assert local(texts) == tuple(f"replica {i}" for i in n)
    assert local(3.0) == (3.0,)
    (seen,) = {x.values for x in mirrored.run(lambda: (results["i"].values[-1],))}
    assert seen == (size - 1,) * size
    total = mirrored.extended.reduce_to("SUM", results["i"], destinations=written)
    assert [float(x) for x in total.values] == [sum(n)] * size
    mirrored.extended.update(written, lambda v: v.assign(results["i"].values[0] * 0.0))
    update = functools.partial(mirrored.extended.update, written, group=False)
    assert update(lambda v: v.read_value() + rank) == tuple(float(i) for i in n)
    assert update(lambda _: "text") == ("text",)
    assert update(lambda _: len(results["i"].values)) == (1,) * size
    dataset = mpidist.data.Dataset.range(2 * size).batch(2 * size)
    for batch in mirrored.experimental_distribute_dataset(dataset):
        assert [x.tolist() for x in batch.values] == [[2 * i, 2 * i + 1] for i in n]
    if size > 1:
        raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda: results["i"].values if rank else mirrored.run(lambda: 0),
            "values",
        )

    # Those of a nest are gathered by one call.
    def calls_of(value):
        traffic = Traffic(mirrored)
        return local(value), traffic.calls

    leaves = mirrored.run(lambda: {f"leaf {k}": this_replica() + k for k in range(9)})
    nest = {**leaves, "read": read, "written": written, "total": total, "same": 3.0}
    rows, calls = calls_of(nest)
    assert calls == calls_of(leaves["leaf 0"])[1]
    assert len(rows) == size
    for i, row in enumerate(rows):
        assert [row[f"leaf {k}"] for k in range(9)] == [i + k for k in range(9)]
        seen = float(row["read"]), float(row["written"]), float(row["total"])
        assert (*seen, row["same"]) == (i, 0.0, sum(n), 3.0)
    if size > 1:
        raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda: local([*leaves.values()][rank:]),
            "experimental_local_results of 9 values",
        )
    own = strategy.run(lambda: rank)  # of an MPIStrategy
    assert strategy.experimental_local_results(own) == own.values == (rank,)
    mirrored.close()


def test_replicas_of_a_mirrored_strategy_take_turns_of_one_input(strategy, rank, size):
    contexts = []

    def own_of(batch):
        rows = batch.values
        return rows[rank % len(rows)]

    def dataset_fn(context):
        contexts.append(context)
        return mpidist.data.Dataset.range(5 * size + 1).batch(2)

    mirrored = mpidist.MirroredStrategy()
    per_replica = mpidist.InputOptions(
        experimental_replication_mode=mpidist.InputReplicationMode.PER_REPLICA
    )
    for make_input in (
        mirrored.distribute_datasets_from_function,
        mirrored.make_input_fn_iterator,
        lambda fn: mirrored.distribute_datasets_from_function(fn, per_replica),
        strategy.distribute_datasets_from_function,
    ):
        batches = []
        for batch in make_input(dataset_fn):
            rows = own_of(batch)
            batches.append([int(x) for x in rows])
        context = contexts.pop()
        all_of_them = [
            [k, k + 1][: 5 * size + 1 - k] for k in range(0, 5 * size + 1, 2)
        ]
        if context.num_input_pipelines == 1 < size or size == 1:
            steps = -(-len(all_of_them) // size)
            own = all_of_them[rank::size]
            assert batches == own + [[]] * (steps - len(own))
        else:
            assert batches == all_of_them
            assert context.input_pipeline_id == rank
        assert context.num_replicas_in_sync == size
    assert not contexts

    batches = [np.arange(k, k + 2) for k in range(2 * size + 1)]

    def own_rows(dataset):
        return [own_of(batch).tolist() for batch in dataset]

    own = [batch.tolist() for batch in batches[rank::size]]
    expected = own + [[]] * (3 - len(own))
    for dataset_fn in (
        lambda _: batches,
        lambda _: iter(batches),
        lambda _: mpidist.data.Dataset.from_generator(lambda: batches),
    ):
        dataset = mirrored.distribute_datasets_from_function(dataset_fn)
        assert own_rows(dataset) == expected
    function = lambda _: functools.partial(next, iter(batches))  # noqa: E731
    assert own_rows(mirrored.make_input_fn_iterator(function)) == expected
    dataset = mirrored.distribute_datasets_from_function(lambda _: batches)
    assert len(dataset) == len(own)
    iterator = iter(dataset)
    next(iterator)
    state = iterator.state()
    again = iter(mirrored.distribute_datasets_from_function(lambda _: batches))
    again.restore(state)
    assert own_rows(again) == own_rows(iterator) == expected[1:]
    mirrored.close()


def test_a_wrapper_for_float16_is_no_optimizer_here(strategy):
    wrapper = mpidist.optimizers.LossScaleOptimizer
    assert not isinstance(mpidist.optimizers.SGD(0.1), wrapper)
    with pytest.raises(NotImplementedError, match="write the optimizer itself"):
        wrapper(mpidist.optimizers.SGD(0.1), dynamic=True)
