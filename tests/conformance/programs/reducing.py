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
def all_reduce_scalar(d):
    """A scalar."""
    return d.run(lambda: all_reduce(d, "SUM", d.own(lambda i: i + 0.5)))


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
def all_reduce_of_variable_value(d):
    """What a variable holds can be all-reduced."""
    v = d.in_scope([1.0, 2.0])
    return d.run(lambda: all_reduce(d, "SUM", v.read_value()))


@section.program
def all_reduce_several(d):
    """Several in sequence, each of the result of the one before."""

    def fn():
        x = d.own(lambda i: i + 1.0)
        total = all_reduce(d, "SUM", x)
        share = x / total
        return share, all_reduce(d, "SUM", share), all_reduce(d, "MEAN", total)

    return d.run(fn)


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


@gathering.program
def all_gather_scalar(d):
    """A scalar cannot be gathered."""
    result = d.attempt(lambda: d.strategy.run(lambda: all_gather(d, d.own(float), 0)))
    return isinstance(result, Raised)


@gathering.program
def all_gather_bad_axis(d):
    """An axis that does not exist."""
    result = d.attempt(
        lambda: d.strategy.run(lambda: all_gather(d, d.own(lambda i: [1.0]), 1))
    )
    return isinstance(result, Raised)


@gathering.program
def all_gather_other_dimension_differs(d):
    """Another dimension differs: an error."""
    result = d.attempt(
        lambda: d.strategy.run(
            lambda: all_gather(d, d.own(lambda i: [[1.0] * (i + 1)]), 0)
        )
    )
    return isinstance(result, Raised)


@gathering.program
def all_gather_ranks_differ(d):
    """Arrays of one and of two dimensions: an error."""

    def fn():
        return all_gather(d, d.own(lambda i: [1.0] if i == 0 else [[1.0]]), 0)

    return isinstance(d.attempt(lambda: d.strategy.run(fn)), Raised)


@gathering.program
def gather_axes(d):
    """`Strategy.gather` along each axis gives one plain array."""
    x = d.arrays(lambda i: [[i, 1.0], [2.0, i + 3.0]])
    y = d.strategy.gather(x, axis=0)
    return d.kind(y), y, d.strategy.gather(x, axis=1)


@gathering.program
def gather_uneven(d):
    """Sizes that differ along the axis."""
    x = d.arrays(lambda i: [[float(i), k] for k in range(i + 1)], "float64")
    return d.strategy.gather(x, axis=0)


@gathering.program
def gather_empty_part(d):
    """A replica without rows counts for nothing."""
    x = d.strategy.run(lambda: d.array([[1.0, 2.0]] * 2)[: d.replica_id()])
    return d.strategy.gather(x, axis=0)


@gathering.program
def gather_plain(d):
    """A value that is not distributed comes back once."""
    return d.strategy.gather(d.array([1.0, 2.0]), axis=0)


@gathering.program
def gather_in_scope(d):
    """`gather` in the scope."""
    with d.strategy.scope():
        return d.strategy.gather(d.arrays(lambda i: [i], "int32"), axis=0)


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
def reduce_axis_0(d):
    """`axis=0`: each array over the axis, then over the replicas."""
    x = d.arrays(lambda i: [[i, 1.0], [2.0, 3.0]])
    return [d.strategy.reduce(op, x, axis=0) for op in ("SUM", "MEAN")]


@reducing.program
def reduce_axis_1(d):
    """`axis=1`."""
    x = d.arrays(lambda i: [[i, 1.0], [2.0, 3.0]], "float64")
    return [d.strategy.reduce(op, x, axis=1) for op in ("SUM", "MEAN")]


@reducing.program
def reduce_axis_negative(d):
    """Negative axes count from the end."""
    x = d.arrays(lambda i: [[i, 1.0], [2.0, 3.0]])
    return [d.strategy.reduce(op, x, axis=-1) for op in ("SUM", "MEAN")]


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
    """Batches of other sizes: MEAN divides by the rows of all replicas."""
    x = d.arrays(lambda i: [float(10 * i + k) for k in range(i + 1)])
    return [d.strategy.reduce(op, x, axis=0) for op in ("SUM", "MEAN")]


@reducing.program
def reduce_uneven_rows(d):
    """The same with rows."""
    x = d.arrays(lambda i: [[i, 1.0]] * (i + 1))
    return [d.strategy.reduce(op, x, axis=0) for op in ("SUM", "MEAN")]


@reducing.program
def reduce_empty_replica(d):
    """A replica without rows counts 0."""
    x = d.strategy.run(lambda: d.array([1.0, 2.0, 6.0])[: 2 * d.replica_id()])
    return [d.strategy.reduce(op, x, axis=0) for op in ("SUM", "MEAN")]


@reducing.program
def reduce_ints_axis(d):
    """MEAN of integers over an axis."""
    x = d.arrays(lambda i: [i, 1, 1], "int32")
    return [d.strategy.reduce(op, x, axis=0) for op in ("SUM", "MEAN")]


@reducing.program
def reduce_axis_out_of_range(d):
    """An axis that does not exist is a ValueError."""
    x = d.arrays(lambda i: [1.0, 2.0])
    return d.attempt(lambda: d.strategy.reduce("SUM", x, axis=1))


@reducing.program
def reduce_axis_of_bad_type(d):
    """An axis that is neither an int nor a tuple is a TypeError."""
    x = d.arrays(lambda i: [1.0, 2.0])
    return d.attempt(lambda: d.strategy.reduce("MEAN", x, axis="0"))


@reducing.program
def reduce_scalars_axis_0(d):
    """Scalars have no axis 0."""
    x = d.arrays(float)
    return isinstance(d.attempt(lambda: d.strategy.reduce("SUM", x, axis=0)), Raised)


@reducing.program
def reduce_plain_mean(d):
    """MEAN of a value that is not distributed gives it back."""
    return d.strategy.reduce("MEAN", d.array([1.0, 2.0]), axis=None)


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


@reducing.program
def reduce_plain_mean_axis(d):
    """MEAN over an axis of a value that is not distributed."""
    return d.attempt(lambda: d.strategy.reduce("MEAN", d.array([1.0, 2.0]), axis=0))


@reducing.program
def reduce_mirrored_mean(d):
    """MEAN of a Mirrored gives its value."""
    return d.numbers(d.strategy.reduce("MEAN", d.mirrored([1.0, 2.0]), axis=None))


@reducing.differs(
    "TensorFlow has no message.",
    tensorflow=Raised("AssertionError"),
    mpidist=Raised("ValueError"),
)
def reduce_mirrored_sum(d):
    """SUM of a Mirrored."""
    m = d.mirrored([1.0, 2.0])
    return d.attempt(lambda: d.numbers(d.strategy.reduce("SUM", m, axis=None)))


@reducing.program
def reduce_mirrored_variable_mean(d):
    """MEAN of a mirrored variable gives its value."""
    v = d.in_scope([1.0, 2.0])
    return d.numbers(d.strategy.reduce("MEAN", v, axis=None))


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
def reduce_needs_axis(d):
    """`axis` has no default."""
    x = d.arrays(float)
    return d.attempt(lambda: d.strategy.reduce("SUM", x))


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
