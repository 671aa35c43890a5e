"""Datasets, iterators and run_steps (b.11, b.12)."""

from __future__ import annotations

from conformance.registry import Section
from conformance.results import Raised

splitting = Section("How global batches are split")


def rows(d, number, dtype="float32"):
    """Return a dataset of the numbers from 0."""
    return d.Dataset.from_tensor_slices(d.numbers(d.array([*range(number)], dtype)))


def elements(d, distributed):
    """Show all elements, each with the parts of the replicas."""
    return [d.replicas(x) for x in distributed]


def _split(number, batch, policy, drop):
    def function(d):
        dataset = rows(d, number).batch(batch, drop_remainder=drop)
        return elements(d, d.distribute(dataset, policy))

    dropped = ", drop_remainder" if drop else ""
    splitting.add(
        f"split_{policy.lower()}_{number}_by_{batch}{'_drop' if drop else ''}",
        f"{policy}: {number} rows in batches of {batch}{dropped}.",
        function,
    )


for _policy in ("AUTO", "DATA", "OFF"):
    for _number, _batch, _drop in (
        (12, 12, False),
        (5, 5, False),
        (7, 7, False),
        (14, 8, False),
        (14, 8, True),
        (10, 4, False),
        (3, 2, False),
        (4, 1, False),
        (13, 12, False),
    ):
        _split(_number, _batch, _policy, _drop)


@splitting.program
def split_empty_parts(d):
    """A replica without rows gets an empty array of the right dtype and row shape."""
    dataset = d.Dataset.from_tensor_slices(d.numbers(d.array([[1, 2, 3]], "int32")))
    (element,) = d.distribute(dataset.batch(1))
    return d.run(lambda x: [list(x.shape), x], element)


@splitting.program
def split_structures(d):
    """Elements that are dicts or tuples keep their structure."""
    x = d.numbers(d.array([[i, 2.0] for i in range(6)]))
    data = {"x": x, "y": d.numbers(d.array([*range(6)], "int64"))}
    pair = (x, {"y": d.numbers(d.array([*range(6)], "float64"))})
    return [
        elements(d, d.distribute(d.Dataset.from_tensor_slices(given).batch(batch)))
        for given, batch in ((data, 4), (pair, 6))
    ]


@splitting.program
def split_kind(d):
    """The leaves are PerReplica."""
    (element,) = d.distribute(rows(d, 6).batch(6))
    return d.kind(element)


@splitting.program
def split_after_other_stages(d):
    """map, take and repeat before it; prefetch after `batch`; in the scope."""
    changed = rows(d, 10).map(lambda x: x * 2).take(5).repeat(2).batch(4)
    fetched = rows(d, 7).batch(4).prefetch(2)
    found = [elements(d, d.distribute(dataset)) for dataset in (changed, fetched)]
    with d.strategy.scope():
        return [*found, elements(d, d.distribute(rows(d, 5).batch(5)))]


@splitting.program
def split_after_shuffle(d):
    """Shuffled rows: each row comes exactly once."""
    dataset = rows(d, 12).shuffle(12, seed=1)
    seen = []
    for element in d.distribute(dataset.batch(4)):
        total = d.strategy.run(lambda x: d.sum(x), args=(element,))
        seen.append(float(d.strategy.reduce("SUM", total, axis=None)))
    return len(seen), sum(seen)


@splitting.program
def split_unbatched_scalars(d):
    """Rows that are not batched are an error."""
    result = d.attempt(lambda: elements(d, d.distribute(rows(d, 4))))
    return isinstance(result, Raised)


@splitting.differs(
    "Without `batch` TensorFlow takes a row for a batch, and splits its columns.",
    tensorflow="accepted",
    mpidist=Raised("ValueError"),
)
def split_unbatched_rows(d):
    """Rows of several columns that are not batched."""
    data = d.numbers(d.array([[1.0, 2.0, 3.0, 4.0]] * 2))
    return d.refused(
        lambda: elements(d, d.distribute(d.Dataset.from_tensor_slices(data)))
    )


@splitting.program
def split_per_replica_mode(d):
    """PER_REPLICA is not for global batches: a NotImplementedError."""
    mode = d.dist.InputReplicationMode.PER_REPLICA
    return d.attempt(
        lambda: d.distribute(rows(d, 4).batch(2), experimental_replication_mode=mode)
    )


@splitting.differs(
    "TensorFlow refuses it in distribute_datasets_from_function only.",
    tensorflow="accepted",
    mpidist=Raised("ValueError"),
)
def split_place_on_device(d):
    """experimental_place_dataset_on_device without PER_REPLICA."""
    return d.refused(
        lambda: d.distribute(
            rows(d, 4).batch(2), experimental_place_dataset_on_device=True
        )
    )


@splitting.program
def split_global_mean(d):
    """A mean over uneven batches: `reduce` over axis 0 counts the rows."""
    return [
        d.strategy.reduce("MEAN", element, axis=0)
        for element in d.distribute(rows(d, 13).batch(5))
    ]


@splitting.program
def split_training_loop(d):
    """A step over uneven batches: sums and counts, as the guide on input has it."""
    v = d.in_scope(0.0)
    for element in d.distribute(rows(d, 11).batch(4)):

        def fn(x):
            context = d.dist.get_replica_context()
            total, count = context.all_reduce(
                "SUM", [d.sum(x), d.array(float(x.shape[0]))]
            )
            return total / count

        mean = d.strategy.run(fn, args=(element,))
        with d.strategy.scope():
            v.assign_add(d.strategy.reduce("MEAN", mean, axis=None))
    return d.copies(v)


# --- distributed datasets and iterators -----------------------------------------------

iterating = Section("Distributed datasets and iterators")


@iterating.program
def dataset_twice(d):
    """Each `iter` begins again."""
    distributed = d.distribute(rows(d, 6).batch(4))
    return [elements(d, distributed) for _ in range(2)]


@iterating.program
def iterator_next(d):
    """next(); at the end StopIteration, or the default."""
    iterator, other = (iter(d.distribute(rows(d, 4).batch(4))) for _ in range(2))
    next(other)
    first = d.replicas(next(iterator))
    return first, d.attempt(lambda: next(iterator)), next(other, "end")


@iterating.program
def iterator_get_next(d):
    """get_next(), and OutOfRangeError at the end."""
    iterator = iter(d.distribute(rows(d, 4).batch(4)))
    return d.replicas(iterator.get_next()), d.attempt(iterator.get_next)


@iterating.program
def iterator_get_next_as_optional(d):
    """get_next_as_optional(): has_value and get_value."""
    iterator = iter(d.distribute(rows(d, 4).batch(4)))
    first = iterator.get_next_as_optional()
    second = iterator.get_next_as_optional()
    return [
        bool(first.has_value()),
        d.replicas(first.get_value()),
        bool(second.has_value()),
    ]


@iterating.program
def iterator_in_replica(d):
    """next(iterator) in a replica function is a ValueError that says what to write."""
    iterator = iter(d.distribute(rows(d, 4).batch(4)))
    return d.run(
        lambda: d.refused(
            lambda: next(iterator),
            says="should be called from outside of replica_fn",
        )
    )


@iterating.program
def iterator_run(d):
    """The loop of the API page: run(fn, args=(next(iterator),))."""
    iterator = iter(d.distribute(rows(d, 8).batch(4)))
    return [
        d.run(lambda x: d.sum(x) * 10, next(iterator)),
        d.run(lambda x: d.sum(x) * 10, next(iterator)),
    ]


@iterating.program
def dataset_reduce(d):
    """DistributedDataset.reduce, in cross-replica context."""
    distributed = d.distribute(rows(d, 10).batch(4))

    def add(state, element):
        parts = d.strategy.run(lambda x: d.sum(x), args=(element,))
        return state + d.strategy.reduce("SUM", parts, axis=None)

    return distributed.reduce(d.array(0.0), add)


@iterating.program
def dataset_cardinality(d):
    """cardinality: the number of steps."""
    distributed = d.distribute(rows(d, 10).batch(4))
    cardinality = distributed.cardinality
    return int(cardinality() if callable(cardinality) else cardinality)


@iterating.program
def dataset_no_indexing(d):
    """A distributed dataset cannot be indexed."""
    distributed = d.distribute(rows(d, 4).batch(2))
    return d.refused(lambda: distributed[0])


@iterating.program
def make_numpy_dataset(d):
    """experimental_make_numpy_dataset of a tuple, a list, and a dict (v1 strategy).

    A list of arrays is stacked: each row is one array.
    """
    x = d.numbers(d.array([[i, 1.0] for i in range(5)]))
    pair = (x, d.numbers(d.array([*range(5)], "int32")))
    listed = [d.numbers(d.array([float(i), 1.0])) for i in range(4)]
    make = d.strategy.extended.experimental_make_numpy_dataset
    of_v1 = d.v1_strategy().experimental_make_numpy_dataset({"x": x})
    datasets = [make(pair).batch(4), make(listed).batch(4), of_v1.batch(5)]
    return [elements(d, d.distribute(dataset)) for dataset in datasets]


@iterating.differs(
    "MirroredStrategy is one worker; here each rank is one, with a pipeline of its "
    "own.",
    tensorflow=lambda n: [[1, 0, n]],
    mpidist=lambda n: [[n, 0, n]],
)
def from_function_contexts(d):
    """distribute_datasets_from_function: the InputContext (on rank 0)."""
    seen = []

    def dataset_fn(context):
        seen.append(
            [
                context.num_input_pipelines,
                context.input_pipeline_id,
                context.num_replicas_in_sync,
            ]
        )
        return rows(d, 4).batch(2)

    d.strategy.distribute_datasets_from_function(dataset_fn)
    return d.coordinator(seen)


@iterating.program
def from_function_per_replica(d):
    """With PER_REPLICA there is one pipeline for each replica, on both sides."""
    options = d.dist.InputOptions(
        experimental_place_dataset_on_device=False,
        experimental_replication_mode=d.dist.InputReplicationMode.PER_REPLICA,
        experimental_fetch_to_device=False,
    )

    def dataset_fn(context):
        part = rows(d, 4 * context.num_replicas_in_sync).shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        return part.batch(3)

    distributed = d.strategy.distribute_datasets_from_function(dataset_fn, options)
    return elements(d, distributed)


@iterating.program
def from_function_place_on_device(d):
    """experimental_place_dataset_on_device without PER_REPLICA is a ValueError."""
    options = d.dist.InputOptions(experimental_place_dataset_on_device=True)
    return d.attempt(
        lambda: d.strategy.distribute_datasets_from_function(
            lambda context: rows(d, 4).batch(2), options
        )
    )


@iterating.program
def from_function_per_replica_batch_size(d):
    """get_per_replica_batch_size in it."""
    sizes = []

    def dataset_fn(context):
        sizes.append(context.get_per_replica_batch_size(12 * d.n))
        return rows(d, 4).batch(2)

    d.strategy.distribute_datasets_from_function(dataset_fn)
    return d.coordinator(sizes)


def _sharded(number):
    def function(d):
        def dataset_fn(context):
            pipelines = context.num_input_pipelines
            if pipelines == 1:  # the batches go to the replicas in turn
                return rows(d, number).batch(2)
            batches = [
                [x for x in (2 * k, 2 * k + 1) if x < number]
                for k in range(context.input_pipeline_id, -(-number // 2), pipelines)
            ]
            mine = [x for batch in batches for x in batch]
            return (
                d.Dataset.from_tensor_slices(d.numbers(d.array(mine or [0.0])))
                .take(len(mine))
                .batch(2)
            )

        return elements(d, d.strategy.distribute_datasets_from_function(dataset_fn))

    iterating.add(
        f"from_function_{number}_rows",
        f"{number} rows in per-replica batches of 2, batch k on replica k modulo n: a "
        "replica whose input ends first gets empty arrays.",
        function,
    )


for _number in (12, 16, 14, 5):
    _sharded(_number)


@iterating.program
def from_function_by_its_old_name(d):
    """experimental_distribute_datasets_from_function."""
    distributed = d.strategy.experimental_distribute_datasets_from_function(
        lambda context: (
            rows(d, 2).batch(2).repeat(d.n // context.num_input_pipelines or 1)
        )
    )
    return d.replicas(next(iter(distributed)))


@iterating.program
def input_options_defaults(d):
    """InputOptions: the defaults."""
    options = d.dist.InputOptions()
    return [
        options.experimental_fetch_to_device in (None, True),
        options.experimental_replication_mode,
        options.experimental_place_dataset_on_device,
        options.experimental_per_replica_buffer_size,
    ]


@iterating.program
def auto_shard_policies(d):
    """AutoShardPolicy: names and values."""
    return {
        p: d.AutoShardPolicy[p].value for p in ["OFF", "AUTO", "FILE", "DATA", "HINT"]
    }


@iterating.program
def make_dataset_iterator(d):
    """make_dataset_iterator of the v1 API, with `run` and `experimental_run`."""
    strategy = d.v1_strategy()
    with strategy.scope():
        one, other = (
            strategy.make_dataset_iterator(rows(d, 8).batch(4)) for _ in range(2)
        )
        one.initialize()
        other.initialize()
        found = [
            strategy.run(lambda x: d.sum(x), args=(one.get_next(),)),
            strategy.experimental_run(lambda x: d.sum(x), other),
        ]
        return [strategy.reduce("SUM", parts, axis=None) for parts in found]


@iterating.program
def make_input_fn_iterator(d):
    """make_input_fn_iterator of the v1 API: a dataset of per-replica batches."""
    strategy = d.v1_strategy()
    with strategy.scope():
        iterator = strategy.make_input_fn_iterator(
            lambda context: d.Dataset.from_tensor_slices(
                d.numbers(d.array([1.0] * 4 * d.n))
            ).batch(2)
        )
        iterator.initialize()
        parts = strategy.run(lambda x: d.sum(x), args=(iterator.get_next(),))
        return strategy.reduce("SUM", parts, axis=None)


# --- run_steps ------------------------------------------------------------------------

stepping = Section("experimental_run_steps_on_iterator")


def run_steps(d, fn, iterations=2, number=12, batch=4, **options):
    """Call it on a distributed dataset."""
    iterator = iter(d.distribute(rows(d, number).batch(batch)))
    with d.strategy.scope():
        return d.strategy.extended.experimental_run_steps_on_iterator(
            fn, iterator, iterations, **options
        )


@stepping.program
def run_steps_reduced_output(d):
    """The last step's output, reduced in cross-replica context."""

    def fn(context, element):
        parts = d.strategy.run(lambda x: d.sum(x), args=(element,))
        context.set_last_step_output("loss", parts, reduce_op=d.dist.ReduceOp.SUM)

    context = run_steps(d, fn, initial_loop_values={"loss": d.array(0.0)})
    return context.last_step_outputs["loss"]


@stepping.program
def run_steps_output_in_replica(d):
    """An output that is set in the replica function."""

    def fn(context, element):
        d.each_of(
            lambda x: context.set_last_step_output(
                "loss", d.sum(x), reduce_op=d.dist.ReduceOp.MEAN
            ),
            element,
        )

    context = run_steps(d, fn, initial_loop_values={"loss": d.array(0.0)})
    return d.numbers(context.last_step_outputs["loss"])


@stepping.program
def run_steps_non_tensor_output(d):
    """An output that is not an array, set in cross-replica context."""

    def fn(context, element):
        context.set_non_tensor_output("text", "a text")

    return run_steps(d, fn).non_tensor_outputs["text"]


@stepping.program
def run_steps_counts(d):
    """The function is called `iterations` times."""
    v = d.in_scope(0.0)

    def fn(context, element):
        parts = d.strategy.run(lambda x: d.sum(x), args=(element,))
        v.assign_add(d.strategy.reduce("SUM", parts, axis=None))

    run_steps(d, fn, iterations=3)
    return d.copies(v)


@stepping.differs(
    "TensorFlow needs `initial_loop_values` for graphs.",
    tensorflow=Raised("ValueError"),
    mpidist=22.0,
)
def run_steps_without_initial_values(d):
    """An output without `initial_loop_values`."""

    def fn(context, element):
        parts = d.strategy.run(lambda x: d.sum(x), args=(element,))
        context.set_last_step_output("loss", parts, reduce_op="SUM")

    return d.attempt(lambda: run_steps(d, fn).last_step_outputs["loss"])


@stepping.differs(
    "mpidist says what to write.",
    tensorflow=Raised("AssertionError"),
    mpidist=Raised("ValueError"),
)
def run_steps_output_in_replica_without_op(d):
    """An output that is set in the replica function without a reduce_op."""

    def fn(context, element):
        d.each_of(lambda x: context.set_last_step_output("loss", d.sum(x)), element)

    return d.refused(lambda: run_steps(d, fn))


@stepping.differs(
    "TensorFlow fails if an output is asked for.",
    tensorflow="accepted",
    mpidist=Raised("ValueError"),
)
def run_steps_no_iterations(d):
    """`iterations=0`."""
    return d.refused(lambda: run_steps(d, lambda context, element: None, iterations=0))


@stepping.program
def run_steps_end(d):
    """The input ends before: OutOfRangeError."""
    return d.attempt(lambda: run_steps(d, lambda context, element: None, iterations=9))
