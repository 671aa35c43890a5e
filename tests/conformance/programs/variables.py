"""Variables (b.8): who may write what, reading, attributes, scatter_*."""

from __future__ import annotations

import numpy as np

from conformance.registry import Difference, Section, differs
from conformance.results import Raised

AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
OPERATIONS = ("assign", "assign_add", "assign_sub")

# --- the matrix: every synchronization, aggregation and context -----------------------


WRITERS = {
    "replica_array": (
        "an array of the replica's, in a replica function",
        lambda d: lambda method: d.each(lambda: method(d.own(lambda i: 3.0 + 2 * i))),
    ),
    "replica_number": (
        "a Python number, in a replica function",
        lambda d: lambda method: d.each(lambda: method(4.0)),
    ),
    "cross_plain": (
        "a plain array, in cross-replica context",
        lambda d: lambda method: _in_scope(d, lambda: method(d.array(6.0))),
    ),
    "cross_number": (
        "a Python number, in cross-replica context",
        lambda d: lambda method: _in_scope(d, lambda: method(6.0)),
    ),
    "cross_per_replica": (
        "a PerReplica, in cross-replica context",
        lambda d: (
            lambda method: _in_scope(d, lambda: method(d.arrays(lambda i: 2.0 + i)))
        ),
    ),
    "cross_mirrored": (
        "a Mirrored, in cross-replica context",
        lambda d: lambda method: _in_scope(d, lambda: method(d.mirrored(5.0))),
    ),
    "merge_fn": (
        "a plain array, in merge_fn",
        lambda d: (
            lambda method: d.each(
                lambda: d.merge(lambda strategy: (method(d.array(6.0)), None)[1])
            )
        ),
    ),
    "merge_fn_mirrored": (
        "a Mirrored that reduce_to gave, in merge_fn",
        lambda d: (
            lambda method: d.each(
                lambda: d.merge(_assign_reduced, method, d.own(lambda i: i + 1.0))
            )
        ),
    ),
}


def _in_scope(d, function):
    with d.strategy.scope():
        function()


def _assign_reduced(strategy, method, x):
    method(strategy.extended.reduce_to("SUM", x, x))


def written(n, values):
    """Return what `write` gives where the copies get ``values`` as the argument."""
    results = {
        "assign": [float(v) for v in values],
        "assign_add": [1.0 + v for v in values],
        "assign_sub": [1.0 - v for v in values],
    }
    return {name: ["accepted", copies] for name, copies in results.items()}


def refused(n, error):
    """Return what it gives where every operation raises, and nothing changes."""
    return {name: [Raised(error), [1.0] * n] for name in OPERATIONS}


DIVERGE = "In TensorFlow the copies diverge silently; mpidist raises."
ON_WRITE: dict[tuple[str, str], Difference] = {
    ("replica_array", "NONE"): differs(
        DIVERGE + " (Older TensorFlow raised here too.)",
        tensorflow=lambda n: written(n, [3.0 + 2 * i for i in range(n)]),
        mpidist=lambda n: refused(n, "ValueError") if n > 1 else written(n, [3.0]),
    ),
    ("replica_number", "SUM"): differs(
        "In mpidist Python numbers count as scalars.",
        tensorflow=lambda n: refused(n, "ValueError"),
        mpidist=lambda n: written(n, [4.0 * n] * n),
    ),
    **{
        ("cross_per_replica", aggregation): differs(
            DIVERGE,
            tensorflow=lambda n: written(n, [2.0 + i for i in range(n)]),
            mpidist=lambda n: refused(n, "TypeError"),
        )
        for aggregation in AGGREGATIONS
    },
}


def spread(n, value):
    """Return what mpidist's ON_READ SUM copies are after writing a plain value."""
    rest = [1.0] * (n - 1)
    return {
        "assign": ["accepted", [value / n] * n],
        "assign_add": ["accepted", [1.0 + value, *rest]],
        "assign_sub": ["accepted", [1.0 - value, *rest]],
    }


def spread_or_refused(n, value):
    """Return what TensorFlow's are."""
    return refused(n, "ValueError") | {"assign": ["accepted", [value / n] * n]}


def set_then_failed(n, value):
    """Return that the copies are written, and that there is an error all the same."""
    return {
        name: [Raised("ValueError"), copies]
        for name, (_, copies) in written(n, [value] * n).items()
    }


def total(n):
    """Return the sum of what the replicas bring along to merge_fn."""
    return n * (n + 1) / 2


ON_READ_VALUES = {
    "cross_plain": lambda n: 6.0,
    "cross_number": lambda n: 6.0,
    "cross_mirrored": lambda n: 5.0,
    "merge_fn": lambda n: 6.0,
    "merge_fn_mirrored": total,
}
ON_READ: dict[tuple[str, str], Difference] = {
    **{
        (context, "NONE"): differs(
            "TensorFlow writes the copies, and then fails as it reads the result, "
            "which has no aggregation.",
            tensorflow=lambda n, value=value: set_then_failed(n, value(n)),
            mpidist=lambda n, value=value: written(n, [value(n)] * n),
        )
        for context, value in ON_READ_VALUES.items()
    },
    **{
        (context, "SUM"): differs(
            "TensorFlow refuses assign_add and assign_sub. Here they change the copy "
            "of replica 0, so that the sum changes by the value.",
            tensorflow=lambda n, value=value: spread_or_refused(n, value(n)),
            mpidist=lambda n, value=value: spread(n, value(n)),
        )
        for context, value in ON_READ_VALUES.items()
    },
    ("cross_per_replica", "SUM"): differs(
        "mpidist's error says what to write.",
        tensorflow=lambda n: (
            refused(n, "ValueError") | {"assign": [Raised("TypeError"), [1.0] * n]}
        ),
        mpidist=lambda n: refused(n, "TypeError"),
    ),
    **{
        ("cross_per_replica", aggregation): differs(
            "TensorFlow's error is about a missing dtype, mpidist's says what to "
            "write.",
            tensorflow=lambda n: refused(n, "AttributeError"),
            mpidist=lambda n: refused(n, "TypeError"),
        )
        for aggregation in ("NONE", "MEAN", "ONLY_FIRST_REPLICA")
    },
}


def _matrix(section, synchronization, declared):
    for aggregation in AGGREGATIONS:
        for name, (what, writer) in WRITERS.items():

            def function(d, aggregation=aggregation, writer=writer):
                variable = d.in_scope(
                    1.0,
                    synchronization=d.Synchronization[synchronization],
                    aggregation=d.Aggregation[aggregation],
                )
                return write_all(d, variable, writer(d))

            section.add(
                f"{synchronization.lower()}_{aggregation.lower()}_{name}",
                f"{aggregation}: assign, assign_add and assign_sub of {what}.",
                function,
                declared.get((name, aggregation)),
            )


def write_all(d, variable, writer):
    """Return whether each operation was accepted, and the copies after it."""
    result = {}
    for operation in OPERATIONS:
        d.strategy.extended.update(variable, _set_to_one)
        method = getattr(variable, operation)
        result[operation] = [d.refused(lambda m=method: writer(m)), d.copies(variable)]
    return result


def _set_to_one(copy):
    copy.assign(1.0)


on_write = Section("Writing a mirrored variable (ON_WRITE)")
_matrix(on_write, "ON_WRITE", ON_WRITE)
on_read = Section("Writing a sync-on-read variable (ON_READ)")
_matrix(on_read, "ON_READ", ON_READ)

# --- reading --------------------------------------------------------------------------

reading = Section("Reading variables")


def readings(d, variable):
    """Return what the ways of reading give, or how they fail."""
    ways = {
        "read_value": lambda: d.numbers(variable.read_value()),
        "value": lambda: d.numbers(variable.value()),
        "convert": lambda: d.numbers(d.convert(variable)),
        "plus_one": lambda: d.numbers(variable + 1),
        "minus": lambda: d.numbers(-variable),
        "numpy": lambda: d.numbers(d.array(variable.numpy())),
    }
    return {name: d.attempt(way) for name, way in ways.items()}


def _reading(synchronization, aggregation):
    def make(d):
        v = d.in_scope(
            [1.0, 2.0],
            synchronization=d.Synchronization[synchronization],
            aggregation=d.Aggregation[aggregation],
        )
        if synchronization == "ON_READ":
            d.each(lambda: v.assign(d.own(lambda i: [i, 10.0 * i])))
        return v

    def cross(d):
        v = make(d)
        with d.strategy.scope():
            return readings(d, v)

    def outside(d):
        return readings(d, make(d))

    def replica(d):
        v = make(d)
        result = d.strategy.run(lambda: without_numpy(readings(d, v)))
        return d.replicas(result)

    def merge_fn(d):
        v = make(d)
        return d.run(lambda: d.merge(lambda strategy: without_numpy(readings(d, v))))

    def update(d):
        v = make(d)
        extended = d.strategy.extended
        ways = [lambda w: w.read_value(), lambda w: w + 1, d.convert]
        return [d.parts(extended.update(v, way, group=False)) for way in ways]

    kind = f"{synchronization.lower()}_{aggregation.lower()}"
    for where, text, function in (
        ("cross", "in cross-replica context", cross),
        ("outside", "outside every scope", outside),
        ("replica", "in a replica function", replica),
        ("merge_fn", "in merge_fn", merge_fn),
        ("update", "of the copy, in the function of `update`", update),
    ):
        reading.add(
            f"read_{kind}_{where}",
            f"{synchronization} {aggregation}: the ways of reading, {text}.",
            function,
        )


def without_numpy(ways):
    """TensorFlow's MirroredVariable.numpy is for cross-replica context."""
    return {name: way for name, way in ways.items() if name != "numpy"}


_reading("ON_WRITE", "NONE")
for _aggregation in AGGREGATIONS:
    _reading("ON_READ", _aggregation)


@reading.differs(
    "TensorFlow stores 7 / n, cut to an int, in each copy, and loses the rest; here "
    "the first copies get it.",
    tensorflow=lambda n: ([7 // n] * n, n * (7 // n)),
    mpidist=lambda n: ([7 // n + (i < 7 % n) for i in range(n)], 7),
)
def on_read_int_sum(d):
    """An int ON_READ variable under SUM: 7 is assigned."""
    v = d.on_read(0, "SUM", "int32")
    with d.strategy.scope():
        v.assign(d.array(7, "int32"))
        return d.copies(v), d.numbers(v.read_value())


@reading.program
def on_read_as_metric(d):
    """The total and count of a metric: added on each replica, read as sums."""
    total, count = d.on_read(0.0, "SUM"), d.on_read(0, "SUM", "int64")
    for step in range(3):

        def fn(step=step):
            x = d.own(lambda i: [float(i + step)] * (i + 1))
            total.assign_add(d.sum(x))
            count.assign_add(d.array(x.shape[0], "int64"))

        d.each(fn)
    with d.strategy.scope():
        return d.numbers(total.read_value()), d.numbers(count.read_value())


@reading.program
def on_read_of_local_values(d):
    """In the replica function each replica sees what it wrote."""
    v = d.on_read(0.0, "MEAN")

    def fn():
        v.assign_add(d.own(float))
        v.assign_add(d.array(1.0))
        return v.read_value()

    return d.run(fn)


@reading.program
def sync_on_read_context(d):
    """`variable_sync_on_read_context`: converting in a replica function aggregates."""
    v = d.on_read(0.0, "SUM")

    def fn():
        v.assign(d.own(lambda i: i + 1.0))
        before = d.convert(v)
        with d.sync_on_read_context():
            inside = d.convert(v)
        return before, inside

    return d.run(fn)


@reading.program
def operators_of_variables(d):
    """Arithmetic and comparisons with arrays, numbers and variables."""
    v = d.in_scope([1.0, 2.0])
    w = d.in_scope([3.0, 5.0])
    with d.strategy.scope():
        return [
            v + 1,
            1 - v,
            v * d.array([2.0, 3.0]),
            d.array([2.0, 3.0]) / v,
            v**2,
            -v,
            abs(-v),
            v > 1.5,
            v + w,
            v[1],
            v[:1],
            w % 2,
            w // 2,
        ]


@reading.program
def operators_in_replica(d):
    """The same in a replica function, with the replica's arrays."""
    v = d.in_scope([1.0, 2.0])
    return d.run(lambda: [v + d.own(lambda i: [i, 1.0]), d.own(float) * v, v[1] - 1])


@reading.program
def reading_shows_later_writes(d):
    """read_value is a copy: it does not follow later assignments."""
    v = d.in_scope([1.0, 2.0])
    before = v.read_value()
    v.assign([5.0, 6.0])
    return before, v.read_value()


# --- creation and attributes ----------------------------------------------------------

creating = Section("Making variables")


@creating.program
def variable_attributes(d):
    """Name, shape, dtype, trainable, synchronization and aggregation."""
    v = d.in_scope([[1.0, 2.0]], "float64", name="weights", trainable=False)
    total, mean = d.on_read(1.0, "SUM"), d.on_read(1.0, "MEAN")
    return [
        v.name.split(":")[0],
        list(v.shape),
        bool(v.dtype == "float64"),
        v.trainable,
        v.aggregation,
        v.distribute_strategy is d.strategy,
        d.in_scope(1.0).trainable,
        total.trainable,
        total.synchronization,
        mean.aggregation,
    ]


@creating.program
def variable_of_dtype(d):
    """The initial value is cast to `dtype`."""
    return [d.replicas(d.in_scope([1, 2], dtype)) for dtype in ("float64", "int32")]


@creating.program
def variable_initial_function(d):
    """A function gives the initial value of all copies; it is called once."""
    calls = []

    def initial():
        calls.append(1)
        return d.array([1.0, 2.0])

    copies = d.copies(d.in_scope(initial))
    return copies, d.coordinator(len(calls)), d.copies(d.on_read(initial, "SUM"))


def _mean_of_ints(synchronization):
    def function(d):
        return d.attempt(
            lambda: d.in_scope(
                1,
                "int32",
                synchronization=d.Synchronization[synchronization],
                aggregation=d.Aggregation.MEAN,
            )
        )

    creating.add(
        f"variable_mean_of_ints_{synchronization.lower()}",
        f"{synchronization}: MEAN of an int variable is refused when it is made.",
        function,
    )


for _synchronization in ("ON_WRITE", "ON_READ"):
    _mean_of_ints(_synchronization)


@creating.program
def variable_synchronization_none(d):
    """Synchronization NONE is a ValueError."""
    return d.attempt(
        lambda: d.in_scope(1.0, synchronization=d.Synchronization.NONE),
        says="variable synchronization mode is not supported",
    )


@creating.program
def variable_outside(d):
    """Outside every scope it is a plain variable, which works as usual."""
    v = d.variable([1.0, 2.0])
    v.assign_add([1.0, 1.0])
    return d.numbers(v), d.dist.get_strategy().extended.variable_created_in_scope(v)


@creating.differs(
    "In mpidist only writing it in another strategy's scope is an error.",
    tensorflow=Raised("RuntimeError"),
    mpidist=[1.0, 2.0],
)
def variable_of_another_strategy(d):
    """A variable of another strategy is read in this one's scope."""
    other = d.new_strategy()
    with other.scope():
        v = d.variable([1.0, 2.0])
    with d.strategy.scope():
        return d.attempt(lambda: d.numbers(v.read_value()))


@creating.program
def assign_to_variable_of_another_strategy(d):
    """A variable of another strategy cannot be written in this one's scope."""
    other = d.new_strategy()
    with other.scope():
        v = d.variable([1.0, 2.0])
    with d.strategy.scope():
        return d.refused(lambda: v.assign([3.0, 4.0]), says="mixing different")


@creating.program
def assign_results(d):
    """assign gives the new value; None with `read_value=False`."""
    v = d.in_scope([1.0, 2.0])
    with d.strategy.scope():
        result = d.replicas(v.assign_add([1.0, 1.0]))
        return result, v.assign([7.0, 8.0], read_value=False)


@creating.differs(
    "Here assign gives the variable, which shows later assignments; write "
    "`v.assign(...).read_value()` for a copy.",
    tensorflow=[2.0, 3.0],
    mpidist=[7.0, 8.0],
)
def assign_results_later(d):
    """What assign gave, after the variable has changed again."""
    v = d.in_scope([1.0, 2.0])
    with d.strategy.scope():
        result = v.assign_add([1.0, 1.0])
        v.assign([7.0, 8.0])
        return d.numbers(result + 0)


@creating.program
def assign_result_in_replica(d):
    """In a replica function it is the replica's new value."""
    v = d.in_scope(1.0, aggregation=d.Aggregation.SUM)
    return d.run(lambda: v.assign_add(d.own(float)) + 0)


@creating.program
def assign_values(d):
    """Lists and variables can be assigned; `use_locking` and `name` are taken."""
    v, w, x = d.in_scope([1.0, 2.0]), d.in_scope([5.0, 6.0]), d.in_scope(1.0)
    with d.strategy.scope():
        v.assign(w)
        v.assign_sub(w * 2)
    w.assign([3, 4.5])
    x.assign(2.0, use_locking=True)
    x.assign_add(1.0, False, "name")
    ints = d.in_scope([1, 2], "int32", aggregation=d.Aggregation.SUM)
    d.each(lambda: ints.assign_add(d.own(lambda i: [i, 1], "int32")))
    return [d.copies(variable) for variable in (x, v, w, ints)]


@creating.program
def assign_wrong_shape(d):
    """Assigning a value of another shape is a ValueError."""
    v = d.in_scope([1.0, 2.0])
    return d.attempt(lambda: v.assign(d.array([1.0, 2.0, 3.0]))), d.copies(v)


@creating.program
def assign_float_to_int(d):
    """A float array assigned to an int variable is an error."""
    v = d.in_scope([1, 2], "int32")
    return isinstance(d.attempt(lambda: v.assign(d.array([1.5, 2.5]))), Raised)


@creating.program
def variable_is_not_hashed_by_value(d):
    """Variables can be kept in lists and found by identity."""
    v, w = d.in_scope(1.0), d.in_scope(1.0)
    return [any(x is w for x in [v]), any(x is v for x in [w, v])]


# --- scatter_* ------------------------------------------------------------------------

scattering = Section("scatter_* of rows")
START = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
SCATTERS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.minimum,
    "max": np.maximum,
    "update": lambda old, new: new,
}


def scattered(n):
    """Return the copies where each replica writes its own row, as TensorFlow does."""
    result = {}
    for name, operation in SCATTERS.items():
        copies = [np.array(START, np.float32) for _ in range(n)]
        for i, copy in enumerate(copies):
            copy[1] = operation(copy[1], np.float32([2.0 + i, 2.0]))
        result[name] = ["accepted", copies]
    return result


def _scatter(aggregation, where):
    def function(d):
        v = d.in_scope(
            START,
            aggregation=d.Aggregation[aggregation],
        )
        result = {}
        for name in SCATTERS:
            v.assign(START)
            scatter = getattr(v, f"scatter_{name}")

            def cross(scatter=scatter):
                with d.strategy.scope():
                    scatter(d.slices([[3.0, 3.0]], [1]))

            def replica(scatter=scatter):
                d.each(lambda: scatter(d.slices([[2.0 + d.replica_id(), 2.0]], [1])))

            call = cross if where == "cross" else replica
            result[name] = [d.refused(call), d.copies(v)]
        return result

    text = "in cross-replica context" if where == "cross" else "in a replica function"
    scattering.add(
        f"scatter_{aggregation.lower()}_{where}",
        f"{aggregation}: all scatter_* methods, {text}.",
        function,
        differs(
            DIVERGE,
            tensorflow=scattered,
            mpidist=lambda n: {
                name: [Raised("ValueError"), [START] * n] for name in SCATTERS
            },
        )
        if (aggregation, where) == ("NONE", "replica")
        else None,
    )


for _aggregation in AGGREGATIONS:
    for _where in ("cross", "replica"):
        _scatter(_aggregation, _where)


@scattering.program
def scatter_rows(d):
    """Each replica's rows under SUM; rows that repeat; of copies, in `update`."""
    v = d.in_scope([[0.0]] * 5, aggregation=d.Aggregation.SUM)
    w, x = d.in_scope([[0.0], [0.0]]), d.in_scope([[0.0], [0.0]])
    d.each(lambda: v.scatter_add(d.slices([[1.0], [10.0]], [d.replica_id(), 4])))
    with d.strategy.scope():
        w.scatter_add(d.slices([[1.0], [2.0], [4.0]], [1, 1, 0]))

    def fn(copy):
        copy.scatter_sub(d.slices([[1.0]], [1]))

    d.strategy.extended.update(x, fn)
    return [d.copies(variable) for variable in (v, w, x)]


def _scatter_on_read(aggregation):
    def function(d):
        v = d.on_read([[0.0], [0.0]], aggregation)
        return d.refused(lambda: d.each(lambda: v.scatter_add(d.slices([[1.0]], [1]))))

    scattering.add(
        f"scatter_on_read_{aggregation.lower()}",
        f"scatter_add of a sync-on-read variable ({aggregation}).",
        function,
    )


for _aggregation in ("SUM", "NONE"):
    _scatter_on_read(_aggregation)
