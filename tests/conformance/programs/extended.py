"""StrategyExtended: reduce_to and its kin, update, attributes (b.7, b.9)."""

from __future__ import annotations

from conformance.registry import Section
from conformance.results import Raised

section = Section("reduce_to, batch_reduce_to, broadcast_to")


@section.program
def reduce_to_itself(d):
    """To the value itself, or another one's devices: a Mirrored on all replicas."""
    x, y = d.arrays(lambda i: [i, 1.0]), d.arrays(float)
    reduce_to = d.strategy.extended.reduce_to
    total = reduce_to("SUM", x, x)
    mean = reduce_to(d.dist.ReduceOp.MEAN, x, x)
    other = reduce_to("SUM", y, x)
    options = d.experimental.CommunicationOptions(bytes_per_pack=8)
    with_options = reduce_to("SUM", y, y, options)
    values = (total, mean, other, with_options)
    return d.kind(total), *(d.replicas(value) for value in values)


@section.program
def reduce_to_variable(d):
    """To a variable: a Mirrored where that lives; the variable does not change."""
    v = d.in_scope([5.0, 6.0])
    x = d.arrays(lambda i: [i, 1.0])
    total = d.strategy.extended.reduce_to("SUM", x, v)
    return d.kind(total), d.replicas(total), d.copies(v)


@section.program
def reduce_to_ints(d):
    """MEAN of integers."""
    x = d.arrays(lambda i: [i, 1], "int32")
    return [
        d.replicas(d.strategy.extended.reduce_to(op, x, x)) for op in ("SUM", "MEAN")
    ]


@section.program
def reduce_to_device(d):
    """To one device: the value, read on that device."""
    x = d.arrays(lambda i: [i, 1.0])
    device = d.strategy.extended.worker_devices[0]
    result = d.strategy.extended.reduce_to("SUM", x, device)
    return d.coordinator(d.numbers(result))


@section.differs(
    "mpidist names the possible destinations.",
    tensorflow=[
        Raised("AssertionError"),
        Raised("ValueError"),
        Raised("AttributeError"),
    ],
    mpidist=[Raised("ValueError"), Raised("ValueError"), Raised("ValueError")],
)
def reduce_to_bad_destinations(d):
    """Invalid destinations: a list, an empty string, a number."""
    x = d.arrays(float)
    return [
        d.attempt(lambda bad=bad: d.strategy.extended.reduce_to("SUM", x, bad))
        for bad in ([x], "", 3)
    ]


@section.differs(
    "The API page has `reduce_to(VariableAggregation.SUM, ...)`.",
    tensorflow=Raised("AssertionError"),
    mpidist=lambda n: [n * (n - 1) / 2] * n,
)
def reduce_to_by_aggregation(d):
    """A VariableAggregation as the operation."""
    x = d.arrays(float)
    return d.attempt(
        lambda: d.replicas(d.strategy.extended.reduce_to(d.Aggregation.SUM, x, x))
    )


@section.differs(
    "The older name of `options`, which the 2.3 pages use.",
    tensorflow=Raised("TypeError"),
    mpidist=lambda n: [n * (n - 1) / 2] * n,
)
def reduce_to_experimental_hints(d):
    """The keyword `experimental_hints`."""
    x = d.arrays(float)
    return d.attempt(
        lambda: d.replicas(
            d.strategy.extended.reduce_to(
                "SUM",
                x,
                x,
                experimental_hints=d.experimental.CollectiveHints(bytes_per_pack=8),
            )
        )
    )


@section.program
def reduce_to_plain(d):
    """A plain value: MEAN gives it, SUM is a ValueError."""
    x = d.array([1.0, 2.0])
    mean = d.strategy.extended.reduce_to("MEAN", x, x)
    return d.replicas(mean), d.attempt(
        lambda: d.strategy.extended.reduce_to("SUM", x, x),
        says="A non-DistributedValues value",
    )


@section.program
def reduce_to_mirrored_mean(d):
    """MEAN of a Mirrored gives it back."""
    m = d.mirrored([1.0, 2.0])
    return d.replicas(d.strategy.extended.reduce_to("MEAN", m, m))


@section.differs(
    "TensorFlow has no message.",
    tensorflow=Raised("AssertionError"),
    mpidist=Raised("ValueError"),
)
def reduce_to_mirrored_sum(d):
    """SUM of a Mirrored."""
    m = d.mirrored([1.0, 2.0])
    return d.attempt(lambda: d.replicas(d.strategy.extended.reduce_to("SUM", m, m)))


@section.program
def reduce_to_shapes_differ(d):
    """Shapes that differ are an error."""
    x = d.arrays(lambda i: [1.0] * (i + 1))
    return isinstance(
        d.attempt(lambda: d.strategy.extended.reduce_to("SUM", x, x)), Raised
    )


@section.program
def batch_reduce_to_order(d):
    """Results in the order of the pairs, of other shapes and dtypes."""
    x = d.arrays(float)
    y = d.arrays(lambda i: [[i, 1.0]], "float64")
    z = d.arrays(lambda i: [2.0 * i] * 3)
    v = d.in_scope(0.0)
    results = d.strategy.extended.batch_reduce_to("SUM", [(x, v), (y, y), (z, x)])
    return type(results).__name__, [d.replicas(r) for r in results]


@section.program
def batch_reduce_to_mean(d):
    """MEAN, by its name."""
    x = d.arrays(float)
    results = d.strategy.extended.batch_reduce_to("mean", [(x, x)] * 2)
    return [[d.kind(r), d.replicas(r)] for r in results]


@section.differs(
    "There is nothing to reduce.",
    tensorflow=Raised("AttributeError"),
    mpidist=[],
)
def batch_reduce_to_nothing(d):
    """No pairs."""
    return d.attempt(lambda: d.strategy.extended.batch_reduce_to("SUM", []))


@section.differs(
    "TensorFlow multiplies by the number of replicas, and refuses in reduce_to.",
    tensorflow=lambda n: [[1.0 * n, 2.0 * n]] * n,
    mpidist=Raised("ValueError"),
)
def batch_reduce_to_mirrored_sum(d):
    """SUM of a Mirrored."""
    m = d.mirrored([1.0, 2.0])
    return d.attempt(
        lambda: d.replicas(d.strategy.extended.batch_reduce_to("SUM", [(m, m)])[0])
    )


@section.program
def broadcast_to_variable(d):
    """An array to the devices of a variable: a Mirrored, which can be assigned."""
    v = d.in_scope([0.0, 0.0])
    result = d.strategy.extended.broadcast_to(d.array([1.0, 2.0]), v)
    numbers = [d.strategy.extended.broadcast_to(x, v) for x in (1, 2.5)]
    before = d.copies(v)
    v.assign(result)
    return d.kind(result), d.replicas(result), before, numbers, d.copies(v)


# --- update ---------------------------------------------------------------------------

updating = Section("update and group")


@updating.program
def update_grouped(d):
    """It runs once for each copy; results come back as Mirrored, in nests; or None."""
    v, w = d.in_scope([1.0, 2.0]), d.in_scope(1.0)
    update = d.strategy.extended.update
    result = update(v, lambda w: w * 10)
    nest = update(w, lambda w: {"a": w + 1, "b": [w * 5]})
    nothing = update(w, lambda w: None), update(w, lambda w: None, group=False)
    return d.kind(result), d.replicas(result), d.copies(v), d.replicas(nest), nothing


@updating.program
def update_assigns(d):
    """assign, assign_add and assign_sub in the function change the copies."""
    v = d.in_scope([1.0, 2.0])

    def fn(w, x, *, factor):
        w.assign_add(x)
        w.assign(w * factor)
        w.assign_sub(x)

    with d.strategy.scope():
        d.strategy.extended.update(
            v, fn, args=(d.array([1.0, 1.0]),), kwargs={"factor": 3.0}
        )
    return d.copies(v)


@updating.program
def update_mirrored_args(d):
    """Mirrored arguments arrive as their value."""
    v = d.in_scope([1.0, 2.0])
    x = d.arrays(lambda i: [i, 1.0])
    total = d.strategy.extended.reduce_to("SUM", x, v)
    result = d.strategy.extended.update(v, lambda w, t: w + t, args=(total,))
    return d.replicas(result)


@updating.program
def update_ungrouped(d):
    """With `group=False` the results come as a tuple."""
    v = d.in_scope(1.0)
    result = d.strategy.extended.update(v, lambda w: w + 1, group=False)
    return type(result).__name__, d.stack([d.numbers(x) for x in result])[0]


@updating.program
def update_ungrouped_parts(d):
    """With `group=False` each replica has its own result."""
    v = d.on_read(0.0, "SUM")
    d.each(lambda: v.assign(d.own(float)))
    return d.parts(d.strategy.extended.update(v, lambda w: w + 1, group=False))


@updating.differs(
    "A Mirrored whose results are not the same; `group=False` gives each replica its "
    "own.",
    tensorflow=lambda n: [1.0 + i for i in range(n)],
    mpidist=Raised("CollectiveMismatchError"),
)
def update_grouped_results_differ(d):
    """Grouped results that are not the same on all replicas."""
    v = d.on_read(0.0, "SUM")
    d.each(lambda: v.assign(d.own(float)))
    return d.attempt(lambda: d.replicas(d.strategy.extended.update(v, lambda w: w + 1)))


@updating.differs(
    "The copies would diverge. The page forbids such arguments, but TensorFlow does "
    "not check it.",
    tensorflow=lambda n: ["accepted", [float(i) for i in range(n)]],
    mpidist=lambda n: [Raised("CollectiveMismatchError"), [1.0] * n],
)
def update_per_replica_args(d):
    """A PerReplica among the arguments."""
    v = d.in_scope(1.0)
    x = d.arrays(float)

    def update():
        d.strategy.extended.update(v, lambda w, y: w.assign(y), args=(x,))

    return [d.refused(update), d.copies(v)]


@updating.differs(
    "The page promises `fn(var, ...)` for a variable that is not distributed.",
    tensorflow=Raised("AssertionError"),
    mpidist=3.0,
)
def update_plain_variable(d):
    """A variable made outside every scope."""
    v = d.variable(1.0)
    return d.attempt(lambda: d.strategy.extended.update(v, lambda w: w + 2))


@updating.program
def update_raises(d):
    """What the function raises, `update` raises."""
    v = d.in_scope(1.0)

    def fn(w):
        raise LookupError("in update")

    first = d.attempt(lambda: d.strategy.extended.update(v, fn), says="in update")
    return first, d.copies(v)


@updating.program
def update_other_variable(d):
    """The function may assign a second variable."""
    v, slot = d.in_scope(1.0), d.in_scope(0.0)

    def fn(w):
        slot.assign_add(w * 2)
        w.assign_sub(slot + 0.5)

    d.strategy.extended.update(v, fn)
    return d.copies(v), d.copies(slot)


@updating.program
def update_on_read(d):
    """Of a sync-on-read variable each copy is updated from its own value."""
    v = d.on_read(0.0, "SUM")
    d.each(lambda: v.assign(d.own(float)))
    d.strategy.extended.update(v, lambda w: w.assign_add(10.0))
    return d.copies(v)


@updating.program
def update_non_slot(d):
    """It runs the function once for each device; with `group=False` gives a tuple."""
    update = d.strategy.extended.update_non_slot
    devices = d.strategy.extended.non_slot_devices([])
    total = update(devices, lambda x, y: x + y, args=(d.array(1.0), 2.0))
    parts = update(devices, lambda: d.array(4.0), group=False)
    nothing = update(devices, lambda: None)
    return d.replicas(total), nothing, type(parts).__name__, parts[0]


@updating.program
def update_non_slot_in_merge_fn(d):
    """In merge_fn too."""

    def merge_fn(strategy, x):
        devices = strategy.extended.non_slot_devices([])
        total = strategy.extended.reduce_to("SUM", x, x)
        return strategy.extended.update_non_slot(
            devices, lambda t: t + 1, args=(total,)
        )

    return d.run(lambda: d.merge(merge_fn, d.own(float)))


@updating.program
def non_slot_devices(d):
    """The devices for other variables: those of all replicas."""
    v = d.in_scope(1.0)
    devices = d.strategy.extended.non_slot_devices([v])
    return len(devices), list(devices) == list(d.strategy.extended.parameter_devices)


@updating.program
def group_of_results(d):
    """`Strategy.group` of the results of an update gives None."""
    v = d.in_scope(1.0)
    parts = d.strategy.run(lambda: v.read_value())
    return d.attempt(lambda: d.strategy.group(parts))


@updating.program
def unwrap_of_results(d):
    """`Strategy.unwrap` is the old name of experimental_local_results."""
    x = d.arrays(float)
    rows = d.strategy.unwrap(x)
    return type(rows).__name__, rows[0] * 0


# --- attributes and the rest ----------------------------------------------------------

others = Section("Attributes, options and other values")


@others.program
def extended_devices(d):
    """worker_devices and parameter_devices: one text per replica, all different."""
    extended = d.strategy.extended
    return [
        type(extended.worker_devices).__name__,
        len(set(extended.worker_devices)),
        extended.parameter_devices == extended.worker_devices,
        all(isinstance(device, str) for device in extended.worker_devices),
    ]


def _attribute(name):
    def function(d):
        return d.attempt(lambda: d.coordinator(getattr(d.strategy.extended, name)))

    others.add(f"extended_{name}", f"`extended.{name}` (on rank 0).", function)


for _name in (
    "experimental_require_static_shapes",
    "experimental_should_init",
    "should_checkpoint",
    "should_save_summary",
):
    _attribute(_name)


@others.differs(
    "As in MultiWorkerMirroredStrategy.",
    tensorflow=False,
    mpidist=True,
)
def extended_experimental_between_graph(d):
    """`extended.experimental_between_graph`."""
    return d.strategy.extended.experimental_between_graph


@others.program
def value_container_of_variable(d):
    """value_container of a variable, and of a plain value."""
    v = d.in_scope(1.0)
    extended = d.strategy.extended
    x = d.arrays(float)
    text = "text"
    return [
        extended.value_container(v) is v,
        extended.value_container(x) is x,
        extended.value_container(text) is text,
    ]


@others.program
def value_container_of_copy(d):
    """value_container of a copy, in the function of `update`: the variable."""
    v = d.in_scope(1.0)
    seen = d.strategy.extended.update(
        v, lambda w: d.strategy.extended.value_container(w) is v, group=False
    )
    return seen[0]


@others.program
def variable_created_in_scope(d):
    """variable_created_in_scope: ownership by strategy."""
    other = d.new_strategy()
    mine, plain = d.in_scope(1.0), d.variable(1.0)
    with other.scope():
        theirs = d.variable(1.0)
    extended = d.strategy.extended
    return [
        [extended.variable_created_in_scope(v) for v in (mine, plain, theirs)],
        [
            d.dist.get_strategy().extended.variable_created_in_scope(v)
            for v in (mine, plain)
        ],
    ]


@others.program
def colocate_vars_with(d):
    """colocate_vars_with: variables made inside are the strategy's."""
    v = d.in_scope(1.0)
    with d.strategy.scope(), d.strategy.extended.colocate_vars_with(v):
        slot = d.variable([0.0, 1.0])
    return d.kind(slot), slot.distribute_strategy is d.strategy, d.copies(slot)


@others.program
def colocate_vars_with_wrong(d):
    """colocate_vars_with a variable of no strategy, or outside the scope: errors."""

    def enter(v):
        with d.strategy.extended.colocate_vars_with(v):
            pass

    v, plain = d.in_scope(1.0), d.variable(1.0)
    says = "`colocate_vars_with` must only be passed a variable created in"
    with d.strategy.scope():
        of_none = d.attempt(lambda: enter(plain), says=says)
    return of_none, d.attempt(lambda: enter(v), says="Need to be inside")


@others.program
def read_var_mirrored(d):
    """read_var of a mirrored variable: its value."""
    v = d.in_scope([1.0, 2.0])
    return d.numbers(d.strategy.extended.read_var(v))


def _read_var(aggregation):
    def function(d):
        v = d.on_read([0.0, 1.0], aggregation)
        d.each(lambda: v.assign_add(d.own(lambda i: [i, 1.0])))
        return d.numbers(d.strategy.extended.read_var(v))

    others.add(
        f"read_var_{aggregation.lower()}",
        f"read_var of a sync-on-read variable ({aggregation}): the aggregate.",
        function,
    )


for _aggregation in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
    _read_var(_aggregation)


@others.program
def value_context(d):
    """ValueContext: its numbers and defaults; they cannot be set."""
    context = d.experimental.ValueContext(2, 4)
    default = d.experimental.ValueContext()
    return [
        [context.replica_id_in_sync_group, context.num_replicas_in_sync],
        [default.replica_id_in_sync_group, default.num_replicas_in_sync],
        d.refused(lambda: setattr(context, "num_replicas_in_sync", 5)),
    ]


@others.differs(
    "The names of the libraries; and TensorFlow writes two spaces.",
    tensorflow="tf.distribute.ValueContext(replica id 2,  total replicas in sync: 4)",
    mpidist="mpidist.ValueContext(replica id 2, total replicas in sync: 4)",
)
def value_context_text(d):
    """`str` of a ValueContext."""
    return str(d.experimental.ValueContext(2, 4))


@others.program
def input_context(d):
    """InputContext: numbers, defaults, and batch sizes, which divide exactly."""
    context = d.dist.InputContext(3, 1, 6)
    default = d.dist.InputContext()
    return [
        *(
            [c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync]
            for c in (context, default)
        ),
        context.get_per_replica_batch_size(12),
        d.attempt(lambda: context.get_per_replica_batch_size(13)),
    ]


@others.differs(
    "The names of the libraries.",
    tensorflow="tf.distribute.InputContext(input pipeline id 1, total: 3)",
    mpidist="mpidist.InputContext(input pipeline id 1, total: 3)",
)
def input_context_text(d):
    """`str` of an InputContext."""
    return str(d.dist.InputContext(3, 1, 6))


@others.program
def reduce_op_enum(d):
    """ReduceOp: values, and from_variable_aggregation."""
    op, aggregation = d.dist.ReduceOp, d.Aggregation
    return [
        [op.SUM.value, op.MEAN.value, op("SUM").name],
        [
            op.from_variable_aggregation(a).name
            for a in (aggregation.SUM, aggregation.MEAN)
        ],
        d.attempt(lambda: op.from_variable_aggregation(aggregation.NONE)),
        d.attempt(lambda: op("MEDIAN"), says="'MEDIAN' is not a valid ReduceOp"),
    ]


@others.program
def variable_enums(d):
    """VariableSynchronization and VariableAggregation: names and values."""
    return [
        {name: getattr(enum, name).value for name in names.split()}
        for enum, names in (
            (d.Synchronization, "AUTO NONE ON_WRITE ON_READ"),
            (d.Aggregation, "NONE SUM MEAN ONLY_FIRST_REPLICA"),
        )
    ]


@others.program
def replication_modes(d):
    """InputReplicationMode and CommunicationImplementation: names and values."""
    mode, kind = d.dist.InputReplicationMode, d.experimental.CommunicationImplementation
    return [
        [mode.PER_WORKER.value, mode.PER_REPLICA.value],
        [kind.AUTO.value, kind.RING.value, kind.NCCL.value],
        d.experimental.CollectiveCommunication.AUTO is kind.AUTO,
    ]


@others.program
def communication_options(d):
    """CommunicationOptions: defaults, names of implementations, and `merge`."""
    options = d.experimental.CommunicationOptions
    made = options(bytes_per_pack=10, timeout_seconds=3.0, implementation="ring")
    first = options(bytes_per_pack=10, timeout_seconds=3.0)
    merged = first.merge(options(timeout_seconds=5.0))  # what the other sets wins
    return [
        [
            getattr(one, name)
            for one in (options(), made)
            for name in ("bytes_per_pack", "timeout_seconds", "implementation")
        ],
        d.attempt(lambda: options(bytes_per_pack=-1)),
        [merged.bytes_per_pack, merged.timeout_seconds, first.timeout_seconds],
    ]


@others.program
def distribute_values(d):
    """experimental_distribute_values_from_function: always a PerReplica."""
    values = d.strategy.experimental_distribute_values_from_function(
        lambda context: d.array([10.0 - int(context.replica_id_in_sync_group)])
    )
    return d.kind(values), d.replicas(values)


@others.differs(
    "MirroredStrategy has None, mpidist one that reports what MPI knows.",
    tensorflow=True,
    mpidist=False,
)
def cluster_resolver(d):
    """Is `cluster_resolver` None?"""
    return d.strategy.cluster_resolver is None


@others.program
def strategy_extended_of_strategy(d):
    """`extended` is one object; num_replicas_in_sync is the number of replicas."""
    return d.strategy.extended is d.strategy.extended, d.strategy.num_replicas_in_sync


@others.program
def loss_reduction(d):
    """`get_loss_reduction` of the v1 API: SUM."""
    return d.v1("get_loss_reduction")()
