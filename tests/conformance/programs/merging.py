"""`merge_call` (b.3)."""

from __future__ import annotations

from conformance.registry import Section
from conformance.results import Raised

section = Section("merge_call")


@section.program
def merge_call_page_example(d):
    """The example of the API page: s = 7 on two replicas, and the results 10 and 11."""

    def merge_fn(distribution, three_plus_replica_id):
        return sum(
            int(x)
            for x in distribution.experimental_local_results(three_plus_replica_id)
        )

    def fn(three):
        v = three + d.replica_id()
        s = d.merge(merge_fn, v)
        return s, s + v

    with d.strategy.scope():
        return d.run(fn, 3)


@section.program
def merge_fn_runs_once(d):
    """merge_fn runs once, and gets the strategy first."""
    calls = []

    def merge_fn(strategy, *args):
        calls.append([strategy is d.strategy, len(args)])

    d.strategy.run(lambda: d.merge(merge_fn, d.own(float)))
    return d.coordinator(calls)


@section.program
def merge_fn_of_replica_0(d):
    """The merge_fn of replica 0 is the one that runs."""

    def fn():
        i = d.replica_id()
        return d.merge(lambda strategy: f"of replica {i}")

    return d.run(fn)


@section.program
def merge_result_per_replica(d):
    """A PerReplica in the result, made there or by a nested `run` too, is scattered."""

    def made_there(strategy):
        return strategy.experimental_distribute_values_from_function(
            lambda c: d.array([10.0 * int(c.replica_id_in_sync_group)])
        )

    def from_run(strategy, x):
        return strategy.run(lambda a: a * 2, args=(x,))

    return [
        d.run(lambda: d.merge(lambda strategy, x: x, d.own(float))),
        d.run(lambda: d.merge(made_there)),
        d.run(lambda: d.merge(from_run, d.own(float))),
    ]


@section.program
def merge_result_mirrored(d):
    """A Mirrored in the result arrives as its value."""

    def merge_fn(strategy, x):
        return strategy.extended.reduce_to("SUM", x, x)

    def fn():
        result = d.merge(merge_fn, d.own(lambda i: [i, 1.0]))
        return d.kind(result), result

    return d.run(fn)


@section.program
def merge_result_nest(d):
    """Nests of them arrive unpacked, in their structure."""

    def merge_fn(strategy, x):
        total = strategy.extended.reduce_to("SUM", x, x)
        return {"x": [x, (total, None)], "y": "text", "z": 3}

    return d.run(lambda: d.merge(merge_fn, d.own(float)))


@section.program
def merge_plain_values(d):
    """Plain results go to all replicas; plain arguments, also in a list, arrive."""

    def fn():
        context = d.dist.get_replica_context()
        return context.merge_call(lambda s, a, b: [a, b], args=["x", "y"], kwargs=None)

    given = (None, "text", ["a", None])
    return [
        d.run(lambda: d.merge(lambda strategy: [d.array([1.0, 2.0]), "text", None])),
        d.run(lambda: d.merge(lambda strategy: None)),
        d.run(lambda: d.merge(lambda strategy, *args: list(args), *given)),
        d.run(fn),
    ]


@section.program
def merge_result_variable(d):
    """A variable in the result arrives as itself."""
    v = d.in_scope(1.0)
    return d.run(lambda: d.merge(lambda strategy: v) is v)


@section.program
def merge_args_kinds(d):
    """Arrays arrive as PerReplica, in lists and dicts too; variables as themselves."""
    v = d.in_scope(1.0)

    def merge_fn(strategy, x, listed, mapped, variable, *, key):
        return [
            d.kind(x),
            type(listed).__name__,
            d.kind(listed[0]),
            d.kind(mapped["a"]),
            variable is v,
            d.kind(key),
        ]

    def fn():
        x = d.own(float)
        return d.merge(merge_fn, x, [x], {"a": x}, v, key=x + 1)

    return d.run(fn)


@section.program
def merge_args_local_results(d):
    """Local results, and `values`, have all components there; of a nest, nests."""

    def local(strategy, x):
        rows = strategy.experimental_local_results(x)
        return len(rows), d.stack(list(rows))

    def values(strategy, x):
        return len(x.values), d.stack(list(x.values))

    def nest(strategy, tree):
        return strategy.experimental_local_results(tree)

    return [
        d.run(lambda: d.merge(local, d.own(lambda i: [i, 2.0 * i]))),
        d.run(lambda: d.merge(values, d.own(float))),
        d.run(lambda: d.merge(nest, {"a": d.own(float), "b": [d.own(float) + 1]})),
    ]


@section.program
def merge_args_strings_differ(d):
    """Strings that differ arrive as a PerReplica of strings."""

    def merge_fn(strategy, text):
        return d.kind(text), ", ".join(strategy.experimental_local_results(text))

    return d.run(lambda: d.merge(merge_fn, f"replica {d.replica_id()}"))


@section.differs(
    "The type does not depend on the value.",
    tensorflow=lambda n: ["plain"] * n,
    mpidist=lambda n: ["PerReplica"] * n,
)
def merge_args_equal_numbers(d):
    """A literal number as an argument: its type in merge_fn."""
    return d.run(lambda: d.merge(lambda strategy, x: d.kind(x), 7))


@section.program
def merge_args_same_array(d):
    """An array that all replicas share can be reduced with MEAN."""
    outer = d.array([1.0, 2.0])

    def merge_fn(strategy, x):
        return strategy.reduce("MEAN", x, axis=None)

    return d.run(lambda: d.merge(merge_fn, outer))


@section.program
def merge_counts_differ(d):
    """One replica makes fewer merge_calls: an error, and no hang."""

    def fn():
        for _ in range(1 + (d.replica_id() == 0)):
            d.merge(lambda strategy: None)

    first = d.attempt(lambda: d.strategy.run(fn))
    return first, d.run(lambda: d.merge(lambda strategy: "usable"))


@section.differs(
    "mpidist shows both structures, on all ranks.",
    tensorflow=Raised("AssertionError"),
    mpidist=Raised("CollectiveMismatchError"),
)
def merge_structures_differ(d):
    """Arguments of other structures."""

    def fn():
        x = d.own(float)
        return d.merge(lambda strategy, y: None, [x] * (1 + d.replica_id()))

    return d.attempt(lambda: d.strategy.run(fn))


@section.program
def merge_fn_raises(d):
    """What merge_fn raises, `run` raises; the strategy stays usable."""

    def merge_fn(strategy):
        raise LookupError("in merge_fn")

    first = d.attempt(
        lambda: d.strategy.run(lambda: d.merge(merge_fn)), says="in merge_fn"
    )
    return first, d.run(lambda: d.merge(lambda strategy: "usable"))


@section.differs(
    "Here replica code can catch what merge_fn raises.",
    tensorflow=Raised("LookupError"),
    mpidist=lambda n: ["caught"] * n,
)
def merge_fn_raises_and_is_caught(d):
    """A replica function that catches what merge_fn raises."""

    def merge_fn(strategy):
        raise LookupError("in merge_fn")

    def fn():
        try:
            d.merge(merge_fn)
        except LookupError:
            return "caught"

    return d.attempt(lambda: d.run(fn))


@section.program
def merge_nested_run_raises(d):
    """What a nested `run` raises can be caught in merge_fn."""

    def inner():
        raise LookupError("inner")

    def merge_fn(strategy):
        return d.refused(lambda: strategy.run(inner), says="inner")

    return d.run(lambda: d.merge(merge_fn))


@section.program
def merge_in_nested_run(d):
    """A nested `run` may call merge_call itself."""

    def innermost(strategy, x):
        return strategy.reduce("SUM", x, axis=None)

    def inner(a):
        return d.merge(innermost, a + 1)

    def merge_fn(strategy, x):
        return strategy.run(inner, args=(x,))

    return d.run(lambda: d.merge(merge_fn, d.own(float)))


@section.program
def merge_reduce(d):
    """`reduce` in merge_fn gives a plain value."""

    def merge_fn(strategy, x):
        total = strategy.reduce("SUM", x, axis=None)
        mean = strategy.reduce("MEAN", x, axis=0)
        return d.kind(total), total, mean

    return d.run(lambda: d.merge(merge_fn, d.own(lambda i: [i, 1.0])))


@section.program
def merge_gather(d):
    """`gather` in merge_fn concatenates."""

    def merge_fn(strategy, x):
        return strategy.gather(x, axis=0)

    return d.run(lambda: d.merge(merge_fn, d.own(lambda i: [float(i)] * (i + 1))))


@section.program
def merge_broadcast_to(d):
    """`broadcast_to` in merge_fn gives every replica the value."""
    v = d.in_scope([0.0, 0.0])

    def merge_fn(strategy):
        return strategy.extended.broadcast_to(d.array([1.0, 2.0]), v)

    return d.run(lambda: d.merge(merge_fn))


@section.program
def merge_batch_reduce_to(d):
    """`batch_reduce_to` in merge_fn reduces several values."""

    def merge_fn(strategy, x, y):
        return strategy.extended.batch_reduce_to("SUM", [(x, x), (y, y)])

    def fn():
        return d.merge(merge_fn, d.own(float), d.own(lambda i: [1.0, i], "float64"))

    return d.run(fn)


@section.program
def merge_update(d):
    """reduce_to and update in merge_fn: a step of an optimizer."""
    v = d.in_scope([1.0, 1.0])

    def merge_fn(strategy, gradient):
        mean = strategy.extended.reduce_to("MEAN", gradient, v)
        strategy.extended.update(
            v, lambda w, g: w.assign_sub(0.5 * g), args=(mean,), group=False
        )

    for _ in range(2):
        d.strategy.run(lambda: d.merge(merge_fn, d.own(lambda i: [i, 1.0])))
    return d.copies(v)


@section.program
def merge_update_result(d):
    """What the function of `update` returns goes back to the replicas."""
    v = d.in_scope(1.0)

    def merge_fn(strategy):
        return strategy.extended.update(v, lambda w: w + 1)

    return d.run(lambda: d.merge(merge_fn))


@section.program
def merge_arithmetic_with_mirrored(d):
    """A Mirrored acts as its value in merge_fn."""

    def merge_fn(strategy, x):
        total = strategy.extended.reduce_to("SUM", x, x)
        return (total + 1) * 2 / total

    return d.run(lambda: d.merge(merge_fn, d.own(lambda i: i + 1.0)))


@section.program
def merge_branches_on_a_value(d):
    """merge_fn may branch on what it reduced."""
    v = d.in_scope(1.0)

    def merge_fn(strategy, x):
        if float(strategy.reduce("SUM", x, axis=None)) > 0:
            v.assign_add(1.0)
            return "changed"
        return "kept"

    first = d.run(lambda: d.merge(merge_fn, d.array(0.0)))
    second = d.run(lambda: d.merge(merge_fn, d.own(float)))
    return first, second, d.copies(v)


@section.program
def merge_creates_variable(d):
    """A variable made in merge_fn is the strategy's, and outlives the call."""

    def merge_fn(strategy):
        return d.variable(3.0, name="slot")

    v = d.strategy.run(lambda: d.merge(merge_fn))
    return d.kind(v), v.distribute_strategy is d.strategy, d.copies(v)


@section.program
def merge_in_loop_with_counter(d):
    """Python variables that merge_fn closes over are replica 0's."""
    count = []

    def merge_fn(strategy):
        count.append(len(count))
        return len(count)

    def fn():
        return [d.merge(merge_fn) for _ in range(3)]

    return d.run(fn), d.coordinator(count)


@section.program
def merge_call_with_scope(d):
    """merge_fn may enter the scope of the strategy again."""

    def merge_fn(strategy):
        with strategy.scope():
            return d.dist.in_cross_replica_context()

    return d.run(lambda: d.merge(merge_fn))
