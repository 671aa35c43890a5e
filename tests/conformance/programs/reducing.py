"""all_reduce, all_gather, gather and reduce (b.4 to b.6)."""

from __future__ import annotations

import numpy as np

from conformance.registry import Section
from conformance.results import Raised

NAN = float("nan")


def all_reduce(d, op, value):
    """Call all_reduce of the current replica."""
    return d.dist.get_replica_context().all_reduce(op, value)


def all_gather(d, value, axis):
    """Call all_gather of the current replica."""
    return d.dist.get_replica_context().all_gather(value, axis=axis)


# --- all_reduce -----------------------------------------------------------------------

section = Section("all_reduce")

DTYPES = ["float16", "float32", "float64", "int32", "int64"]


def _dtypes(op, dtype, difference=None):
    def function(d):
        return d.run(
            lambda: all_reduce(d, op, d.own(lambda i: [i + 1, 2 * i, 7], dtype))
        )

    what = f"{op} of {dtype}: values and dtype."
    section.add(f"all_reduce_{op.lower()}_{dtype}", what, function, difference)


for _op in ("SUM", "MEAN"):
    for _dtype in DTYPES:
        _dtypes(_op, _dtype)


@section.differs(
    "TensorFlow's collectives take floats, int32 and int64 only.",
    tensorflow=[Raised("OpError")] * 4,
    mpidist=lambda n: [
        [np.complex64(n + 1j * n * (n - 1) / 2)] * n,
        [[n, n]] * n,
        [[n, n]] * n,
        [[n, n]] * n,
    ],
)
def all_reduce_other_dtypes(d):
    """SUM of complex64, uint8, int16 and uint32."""

    def attempt(value, dtype):
        return d.attempt(
            lambda: d.run(lambda: all_reduce(d, "SUM", d.own(value, dtype)))
        )

    return [
        attempt(lambda i: 1 + 1j * i, "complex64"),
        *(attempt(lambda i: [1, 1], t) for t in ("uint8", "int16", "uint32")),
    ]


@section.program
def all_reduce_names(d):
    """The operation as an enum, and by its name in any case."""
    ops = [d.dist.ReduceOp.SUM, "SUM", "sum", "Mean", d.dist.ReduceOp.MEAN]
    return d.run(lambda: [all_reduce(d, op, d.own(float)) for op in ops])


@section.program
def all_reduce_unknown_name(d):
    """An unknown operation is a ValueError."""
    return d.attempt(
        lambda: d.strategy.run(lambda: all_reduce(d, "MEDIAN", d.own(float))),
        says="'MEDIAN' is not a valid ReduceOp",
    )


@section.differs(
    "MIN, MAX and PROD are extensions of mpidist.",
    tensorflow=Raised("ValueError"),
    mpidist=lambda n: [[0.0, float(n - 1), 0.0]] * n,
)
def all_reduce_min_max(d):
    """MIN, MAX and PROD."""

    def fn():
        return [all_reduce(d, op, d.own(float)) for op in ("MIN", "MAX", "PROD")]

    return d.attempt(lambda: d.run(fn))


@section.program
def all_reduce_nest(d):
    """A nest of floats: the same nest comes back."""

    def fn():
        x = d.own(float)
        return all_reduce(
            d, "SUM", {"a": x, "b": [x + 1, (x + 2, d.own(lambda i: [i, 1.0]))]}
        )

    return d.run(fn)


@section.program
def all_reduce_nest_of_dtypes(d):
    """A nest whose leaves have other dtypes and shapes."""

    def fn():
        return all_reduce(
            d,
            "MEAN",
            [
                d.own(lambda i: [i, 1.0], "float64"),
                d.own(lambda i: [[i], [2.0]], "float32"),
                d.own(float, "float64"),
            ],
        )

    return d.run(fn)


@section.differs(
    "The example of the API page. MirroredStrategy's own check of devices fails for "
    "two int32 leaves.",
    tensorflow=Raised("ValueError"),
    mpidist=lambda n: (
        [
            [
                {"a": n + n * (n - 1) // 2, "b": [40 * n, n]},
                {"a": 1 + (n - 1) / 2, "b": [40.0, 1.0]},
            ]
        ]
        * n
    ),
)
def all_reduce_nest_of_ints(d):
    """The page's nest of int32: {'a': 1, 'b': [40, 1]}."""

    def fn():
        value = {
            "a": d.own(lambda i: 1 + i, "int32"),
            "b": [d.array(40, "int32"), d.array(1, "int32")],
        }
        return [all_reduce(d, "SUM", value), all_reduce(d, "MEAN", value)]

    return d.attempt(lambda: d.run(fn))


@section.differs(
    "In mpidist Python numbers count as scalars.",
    tensorflow=Raised("AttributeError"),
    mpidist=lambda n: [n * 1.5] * n,
)
def all_reduce_python_number(d):
    """A Python number."""
    return d.attempt(lambda: d.run(lambda: all_reduce(d, "SUM", 1.5)))


@section.differs(
    "There is nothing to reduce.",
    tensorflow=Raised("AttributeError"),
    mpidist=lambda n: [{"a": []}] * n,
)
def all_reduce_empty_nest(d):
    """An empty nest."""
    return d.attempt(lambda: d.run(lambda: all_reduce(d, "SUM", {"a": []})))


@section.program
def all_reduce_bool_is_refused(d):
    """SUM of bool is an error."""
    result = d.attempt(
        lambda: d.strategy.run(lambda: all_reduce(d, "SUM", d.array([True], "bool")))
    )
    return isinstance(result, Raised)


@section.differs(
    "In TensorFlow no collective works any more; here the strategy remains usable.",
    tensorflow=[Raised("InvalidArgumentError"), Raised("InvalidArgumentError")],
    mpidist=lambda n: [Raised("CollectiveMismatchError"), [float(n)] * n],
)
def all_reduce_shapes_differ(d):
    """Shapes that differ; and an all-reduce after that."""

    def fn():
        return all_reduce(d, "SUM", d.own(lambda i: [1.0] * (i + 1)))

    def good():
        return all_reduce(d, "SUM", d.array(1.0))

    return [d.attempt(lambda: d.strategy.run(fn)), d.attempt(lambda: d.run(good))]


@section.program
def all_reduce_dtypes_differ(d):
    """dtypes that differ are an error."""

    def fn():
        dtype = "float32" if d.replica_id() == 0 else "float64"
        return all_reduce(d, "SUM", d.own(lambda i: [1.0], dtype))

    return isinstance(d.attempt(lambda: d.strategy.run(fn)), Raised)


@section.program
def all_reduce_counts_differ(d):
    """One replica calls all_reduce once more: an error, and no hang."""

    def fn():
        for _ in range(1 + (d.replica_id() == 0)):
            all_reduce(d, "SUM", d.own(float))

    return d.attempt(lambda: d.strategy.run(fn))


@section.program
def all_reduce_nan_and_inf(d):
    """NaN and infinity are kept."""

    def fn():
        return all_reduce(
            d,
            "SUM",
            d.own(lambda i: [NAN if i == 0 else 1.0, float("inf"), 1.0, -float("inf")]),
        )

    return d.run(fn)


@section.program
def all_reduce_empty_array(d):
    """An array without elements."""
    return d.run(lambda: all_reduce(d, "SUM", d.array([[], []])))


@section.program
def all_reduce_options(d):
    """`CommunicationOptions` for the call, positional and by name."""
    options = d.experimental.CommunicationOptions(bytes_per_pack=64)

    def fn():
        context = d.dist.get_replica_context()
        values = [d.own(lambda i, k=k: [float(i)] * k) for k in (1, 20, 3)]
        return context.all_reduce("SUM", values, options), context.all_reduce(
            "MEAN", values, options=options
        )

    return d.run(fn)


@section.program
def all_reduce_keeps_its_input(d):
    """The input does not change."""

    def fn():
        x = d.own(float)
        all_reduce(d, "SUM", x)
        return x

    return d.run(fn)


@section.program
def all_reduce_large(d):
    """An array that is larger than any pack."""

    def fn():
        x = d.own(lambda i: [float(i + 1)] * 300_000)
        y = all_reduce(d, "MEAN", x)
        return y.shape[0], y[0], y[299_999], d.sum(y) / 300_000

    return d.run(fn)


# --- all_gather and gather ------------------------------------------------------------

gathering = Section("all_gather and gather")


@gathering.program
def all_gather_axes(d):
    """Along each axis, in the order of the replicas."""

    def fn():
        x = d.own(lambda i: [[i, 1.0], [2.0, i + 3.0], [4.0, 5.0]])
        return [all_gather(d, x, 0), all_gather(d, x, 1)]

    return d.run(fn)


@gathering.program
def all_gather_uneven(d):
    """Sizes that differ along the axis, 0 among them."""

    def fn():
        x = d.own(lambda i: [[10.0 * i + k] for k in range(i)] or [[0.0]])
        x = x[: d.replica_id()]
        return [all_gather(d, x, 0), all_gather(d, x[:, 0], 0)]

    return d.run(fn)


@gathering.program
def all_gather_uneven_other_axis(d):
    """The same along the second axis."""
    return d.run(
        lambda: all_gather(
            d, d.own(lambda i: [[float(i)] * (i + 1), [1.0] * (i + 1)]), 1
        )
    )


@gathering.program
def all_gather_nest(d):
    """A nest; its leaves may have other sizes."""

    def fn():
        x = d.own(lambda i: [float(i)] * (i + 1))
        return all_gather(d, {"a": x, "b": [x[:1], (x * 2,)]}, 0)

    return d.run(fn)


def _gather_dtypes(dtype):
    def function(d):
        return d.run(lambda: all_gather(d, d.own(lambda i: [i, 1], dtype), 0))

    gathering.add(f"all_gather_{dtype}", f"all_gather of {dtype}.", function)


for _dtype in ["float16", "float64", "int32", "int64"]:
    _gather_dtypes(_dtype)


@gathering.differs(
    "mpidist gathers any dtype.",
    tensorflow=Raised("TypeError"),
    mpidist=lambda n: [[i % 2 == 0 for i in range(n)]] * n,
)
def all_gather_bool(d):
    """all_gather of bool."""
    return d.attempt(
        lambda: d.run(lambda: all_gather(d, d.own(lambda i: [i % 2 == 0], "bool"), 0))
    )


@gathering.differs(
    "A negative axis counts from the end, as in NumPy.",
    tensorflow=Raised("ValueError"),
    mpidist=lambda n: [[[float(i), 1.0][k] for i in range(n) for k in (0, 1)]] * n,
)
def all_gather_negative_axis(d):
    """Axis -1."""
    return d.attempt(
        lambda: d.run(lambda: all_gather(d, d.own(lambda i: [i, 1.0]), -1))
    )


NOT_GATHERED = {
    "scalar": ("A scalar cannot be gathered.", float, 0),
    "bad_axis": ("An axis that does not exist.", lambda i: [1.0], 1),
    "other_dimension_differs": (
        "Another dimension differs: an error.",
        lambda i: [[1.0] * (i + 1)],
        0,
    ),
    "ranks_differ": (
        "Arrays of one and of two dimensions: an error.",
        lambda i: [1.0] if i == 0 else [[1.0]],
        0,
    ),
}


def _not_gathered(name, what, value, axis):
    def function(d):
        result = d.attempt(
            lambda: d.strategy.run(lambda: all_gather(d, d.own(value), axis))
        )
        return isinstance(result, Raised)

    gathering.add(f"all_gather_{name}", what, function)


for _name, _case in NOT_GATHERED.items():
    _not_gathered(_name, *_case)


@gathering.program
def gather_axes(d):
    """`Strategy.gather` along each axis gives one plain array."""
    x = d.arrays(lambda i: [[i, 1.0], [2.0, i + 3.0]])
    y = d.strategy.gather(x, axis=0)
    return d.kind(y), y, d.strategy.gather(x, axis=1)


@gathering.program
def gather_parts(d):
    """Sizes that differ; a replica without rows; a plain value; in the scope."""
    uneven = d.arrays(lambda i: [[float(i), k] for k in range(i + 1)], "float64")
    part = d.strategy.run(lambda: d.array([[1.0, 2.0]] * 2)[: d.replica_id()])
    values = [uneven, part, d.array([1.0, 2.0])]
    found = [d.strategy.gather(x, axis=0) for x in values]
    with d.strategy.scope():
        return [*found, d.strategy.gather(d.arrays(lambda i: [i], "int32"), axis=0)]


@gathering.program
def gather_scalars(d):
    """Scalars cannot be gathered."""
    x = d.arrays(float)
    return isinstance(d.attempt(lambda: d.strategy.gather(x, axis=0)), Raised)


@gathering.program
def gather_in_replica(d):
    """In a replica function: an error that names all_gather."""

    def fn():
        return d.refused(
            lambda: d.strategy.gather(d.array([1.0]), axis=0),
            says="use get_replica_context().all_gather() instead",
        )

    return d.run(fn)


# --- reduce ---------------------------------------------------------------------------

reducing = Section("reduce")


@reducing.program
def reduce_axis_none(d):
    """`axis=None`: element by element over the replicas; a plain result."""
    x = d.arrays(lambda i: [i, 1.0])
    total = d.strategy.reduce("SUM", x, axis=None)
    return d.kind(total), total, d.strategy.reduce("MEAN", x, axis=None)


def _reduce_dtypes(dtype):
    def function(d):
        x = d.arrays(lambda i: [i + 1, 2], dtype)
        return [
            d.strategy.reduce("SUM", x, axis=None),
            d.strategy.reduce("MEAN", x, axis=None),
        ]

    reducing.add(
        f"reduce_{dtype}", f"SUM and MEAN of {dtype}, and the dtypes.", function
    )


for _dtype in DTYPES:
    _reduce_dtypes(_dtype)


@reducing.program
def reduce_scalars(d):
    """Scalars that `run` gave."""
    losses = d.strategy.run(lambda: d.own(lambda i: 0.5 + i))
    return [d.strategy.reduce(op, losses, axis=None) for op in ("SUM", "mean")]


@reducing.differs(
    "In mpidist Python numbers count as scalars.",
    tensorflow=Raised("AttributeError"),
    mpidist=lambda n: [n / 2 + n * (n - 1) / 2, n / 2],
)
def reduce_python_numbers(d):
    """Python numbers that `run` gave."""
    numbers = d.strategy.run(lambda: 0.5 + d.replica_id())
    return d.attempt(
        lambda: [d.strategy.reduce(op, numbers, axis=None) for op in ("SUM", "MEAN")]
    )


@reducing.program
def reduce_axes(d):
    """Each array over the axis, then over the replicas; -1 is the last axis."""
    x = d.arrays(lambda i: [[i, 1.0], [2.0, 3.0]])
    y = d.arrays(lambda i: [[i, 1.0], [2.0, 3.0]], "float64")
    return [
        [d.strategy.reduce(op, value, axis=axis) for op in ("SUM", "MEAN")]
        for value, axis in ((x, 0), (y, 1), (x, -1))
    ]


@reducing.program
def reduce_axis_tuple(d):
    """A tuple of axes: MEAN divides by all their elements."""
    x = d.arrays(lambda i: [[[i, 1.0], [2.0, 3.0]]] * 3)
    return [
        d.strategy.reduce(op, x, axis=axes)
        for op in ("SUM", "MEAN")
        for axes in ((0, 1), (0, 2), (0, 1, 2), (0, -1))
    ]


@reducing.program
def reduce_uneven(d):
    """MEAN divides by the rows of all replicas, of which one may have none."""
    values = [
        d.arrays(lambda i: [float(10 * i + k) for k in range(i + 1)]),
        d.arrays(lambda i: [[i, 1.0]] * (i + 1)),
        d.strategy.run(lambda: d.array([1.0, 2.0, 6.0])[: 2 * d.replica_id()]),
        d.arrays(lambda i: [i, 1, 1], "int32"),
    ]
    return [
        [d.strategy.reduce(op, x, axis=0) for op in ("SUM", "MEAN")] for x in values
    ]


@reducing.program
def reduce_bad_axis(d):
    """An axis that does not exist, also of scalars, or of a bad type; and none."""
    x = d.arrays(lambda i: [1.0, 2.0])
    found = [
        d.attempt(lambda: d.strategy.reduce("SUM", x, axis=1)),
        d.attempt(lambda: d.strategy.reduce("MEAN", x, axis="0")),
        d.attempt(lambda: d.strategy.reduce("SUM", x)),
    ]
    scalars = d.attempt(lambda: d.strategy.reduce("SUM", d.arrays(float), axis=0))
    return [*found, isinstance(scalars, Raised)]


@reducing.program
def reduce_mean_of_the_same(d):
    """MEAN of a plain value, a Mirrored and a mirrored variable gives the value."""
    x, v = d.array([1.0, 2.0]), d.in_scope([1.0, 2.0])
    return [
        d.strategy.reduce("MEAN", x, axis=None),
        d.attempt(lambda: d.strategy.reduce("MEAN", x, axis=0)),
        d.numbers(d.strategy.reduce("MEAN", d.mirrored([1.0, 2.0]), axis=None)),
        d.numbers(d.strategy.reduce("MEAN", v, axis=None)),
    ]


@reducing.program
def reduce_plain_sum(d):
    """SUM of a value that is not distributed is a ValueError."""
    return d.attempt(
        lambda: d.strategy.reduce("SUM", d.array([1.0, 2.0]), axis=None),
        says="A non-DistributedValues value",
    )


@reducing.differs(
    "With an axis TensorFlow multiplies by the number of replicas; without one it "
    "refuses, too.",
    tensorflow=lambda n: 3.0 * n,
    mpidist=Raised("ValueError"),
)
def reduce_plain_sum_axis(d):
    """SUM over an axis of a value that is not distributed."""
    return d.attempt(lambda: d.strategy.reduce("SUM", d.array([1.0, 2.0]), axis=0))


@reducing.differs(
    "TensorFlow has no message.",
    tensorflow=Raised("AssertionError"),
    mpidist=Raised("ValueError"),
)
def reduce_mirrored_sum(d):
    """SUM of a Mirrored."""
    m = d.mirrored([1.0, 2.0])
    return d.attempt(lambda: d.numbers(d.strategy.reduce("SUM", m, axis=None)))


@reducing.differs(
    "TensorFlow has no message.",
    tensorflow=Raised("AssertionError"),
    mpidist=Raised("ValueError"),
)
def reduce_mirrored_variable_sum(d):
    """SUM of a mirrored variable."""
    v = d.in_scope([1.0, 2.0])
    return d.attempt(lambda: d.numbers(d.strategy.reduce("SUM", v, axis=None)))


def _reduce_on_read(aggregation):
    def function(d):
        v = d.on_read([0.0, 1.0], aggregation)
        d.each(lambda: v.assign_add(d.own(lambda i: [i, 1.0])))
        return [d.strategy.reduce(op, v, axis=None) for op in ("SUM", "MEAN")]

    reducing.add(
        f"reduce_on_read_{aggregation.lower()}",
        f"SUM and MEAN of a sync-on-read variable ({aggregation}) combine its copies.",
        function,
    )


for _aggregation in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
    _reduce_on_read(_aggregation)


@reducing.program
def reduce_nest(d):
    """A nest of PerReplica, with `axis=None`."""
    result = d.strategy.run(
        lambda: {"a": d.own(float), "b": [d.own(lambda i: [1.0, i])]}
    )
    return d.strategy.reduce("SUM", result, axis=None)


@reducing.program
def reduce_bad_name(d):
    """An unknown operation is a ValueError."""
    x = d.arrays(float)
    return d.attempt(
        lambda: d.strategy.reduce("MEDIAN", x, axis=None),
        says="'MEDIAN' is not a valid ReduceOp",
    )


@reducing.differs(
    "With an axis it is a TypeError in TensorFlow, too.",
    tensorflow=[Raised("AssertionError"), Raised("TypeError")],
    mpidist=[Raised("TypeError"), Raised("TypeError")],
)
def reduce_bad_op(d):
    """An operation that does not exist."""
    x = d.arrays(lambda i: [1.0])
    return [d.attempt(lambda a=a: d.strategy.reduce(3, x, axis=a)) for a in (None, 0)]


@reducing.differs(
    "MIN, MAX and PROD are extensions of mpidist.",
    tensorflow=Raised("ValueError"),
    mpidist=lambda n: [[0.0, 1.0], float(n)],
)
def reduce_min_max(d):
    """MIN over the replicas, and MAX over an axis too."""
    x = d.arrays(lambda i: [i, i + 1.0])
    return d.attempt(
        lambda: [
            d.strategy.reduce("MIN", x, axis=None),
            d.strategy.reduce("MAX", x, axis=0),
        ]
    )


@reducing.program
def reduce_shapes_differ(d):
    """With `axis=None` shapes that differ are an error."""
    x = d.arrays(lambda i: [1.0] * (i + 1))
    return isinstance(d.attempt(lambda: d.strategy.reduce("SUM", x, axis=None)), Raised)


@reducing.program
def reduce_global_mean_by_sums(d):
    """The mean over a global batch, from sums and counts."""
    x = d.arrays(lambda i: [float(i)] * (2 * i))
    total = d.strategy.run(lambda a: (d.sum(a), d.array(float(a.shape[0]))), args=(x,))
    sums, counts = (d.strategy.reduce("SUM", t, axis=None) for t in total)
    return sums / counts


@reducing.program
def local_results_of_values(d):
    """`experimental_local_results` of a PerReplica, a nest and a plain value."""
    x = d.arrays(float)
    return [
        d.replicas(x),
        d.replicas({"a": x, "b": [x]}),
        d.strategy.experimental_local_results(d.array(3.0)),
        d.strategy.experimental_local_results("text"),
        d.strategy.experimental_local_results(None),
    ]
