"""`run`: what goes in and what comes out (b.2)."""

from __future__ import annotations

import collections
import functools

from conformance.registry import Section, differs
from conformance.results import Raised

section = Section("run")

Point = collections.namedtuple("Point", ["x", "y"])


@section.program
def run_plain_results(d):
    """None, equal strings and empty containers come back; `options` has no effect."""
    return [
        d.strategy.run(lambda: None),
        d.strategy.run(lambda: None, options=None),
        d.strategy.run(lambda: "text"),
        d.strategy.run(lambda: {"a": [], "b": (), "c": {}}),
    ]


@section.program
def run_arrays(d):
    """Arrays come back with one component per replica, dtype and shape kept."""
    return d.run(lambda: d.own(lambda i: [[i, 2.0 * i], [3.0, 4.0]]))


@section.program
def run_dtypes(d):
    """Arrays of all dtypes come back as they are."""

    def fn():
        i = d.replica_id()
        names = ["float16", "float64", "int32", "int64", "uint8", "complex64"]
        return {name: d.array([i, i + 1], name) for name in names} | {
            "bool": d.array([i > 0, True], "bool")
        }

    return d.run(fn)


@section.program
def run_nest(d):
    """Dicts, lists, tuples and named tuples come back in their structure."""

    def fn():
        x = d.own(float)
        return {"a": [x, x + 1], "b": (x + 2, {"c": x + 3}), "d": Point(x + 4, [])}

    result = d.strategy.run(fn)
    return [
        [type(result[k]).__name__ for k in "abd"],
        d.replicas(result),
    ]


@section.program
def run_strings_that_differ(d):
    """Strings that differ come back, each to its replica."""
    return d.run(lambda: f"replica {d.replica_id()}")


@section.differs(
    "Only arrays and numbers are wrapped; each rank has its own string.",
    tensorflow="PerReplica",
    mpidist="plain",
)
def run_strings_that_differ_kind(d):
    """The type of strings that differ."""
    return d.kind(d.strategy.run(lambda: f"replica {d.replica_id()}"))


@section.program
def run_bools_and_numbers(d):
    """Python numbers and bools come back with their values."""
    return d.run(lambda: [d.replica_id(), d.replica_id() * 0.5, d.replica_id() > 0])


@section.program
def run_arrays_kind(d):
    """An array made on each replica comes back as a PerReplica."""
    return d.kind(d.strategy.run(lambda: d.own(float)))


@section.differs(
    "TensorFlow unwraps the same Python object, such as small ints. In mpidist the "
    "type does not depend on the value.",
    tensorflow=["plain", "plain"],
    mpidist=["PerReplica", "PerReplica"],
)
def run_same_object_kind(d):
    """The types of a literal, and of an array that the function closes over."""
    outer = d.array([1.0])
    return [
        d.kind(d.strategy.run(lambda: 7)),
        d.kind(d.strategy.run(lambda: outer)),
    ]


@section.program
def run_same_object(d):
    """An array that the function closes over comes back on all replicas."""
    outer = d.array([1.0, 2.0])
    return d.run(lambda: [outer, outer])


@section.program
def run_args(d):
    """PerReplica arguments, nested too, arrive as the replica's component."""
    x = d.arrays(float)
    y = d.arrays(lambda i: [i, 2.0 * i], "float64")
    return d.run(lambda a, b, *, c: [a, b["y"][0], c[1]], x, {"y": [y, 3]}, c=(x, y))


@section.program
def run_args_kinds(d):
    """In the replica function arguments have no wrapper any more."""
    x = d.arrays(float)
    m = d.mirrored(2.0)
    v = d.in_scope(1.0)
    return d.run(lambda *args: [d.kind(a) for a in args], x, m, v, 1.0, "text", None)


@section.program
def run_mirrored_args(d):
    """A Mirrored argument arrives as its value."""
    x = d.arrays(lambda i: [i, 1.0])
    total = d.strategy.extended.reduce_to("SUM", x, x)
    return d.run(lambda a, b: a + b, total, x)


@section.program
def run_plain_args(d):
    """Plain arguments arrive as they are."""
    array = d.array([1.0])
    marker = {"a": [array, None, "text", 3]}
    return d.run(
        lambda m, s: [m["a"][0] + 1, m["a"][1], m["a"][2], m["a"][3], s],
        marker,
        "other",
    )


@section.program
def run_variable_args(d):
    """A variable arrives as itself, and comes back as itself."""
    variable = d.in_scope([1.0, 2.0])
    is_itself = d.run(lambda v: v is variable, variable)
    back = d.strategy.run(lambda v: v, args=(variable,))
    nested = d.strategy.run(lambda v: {"v": [v]}, args=(variable,))
    return is_itself, back is variable, nested["v"][0] is variable


@section.program
def run_kwargs(d):
    """Keyword arguments; `kwargs=None` is allowed."""
    x = d.arrays(float)
    first = d.replicas(d.strategy.run(lambda a, b=5.0: a + b, args=[x]))
    second = d.replicas(d.strategy.run(lambda a, b=5.0: a + b, kwargs={"a": x, "b": 1}))
    return first, second, d.strategy.run(lambda: None, args=(), kwargs=None)


@section.program
def run_wrong_arguments(d):
    """Arguments that are no list or tuple, and a function that cannot be called."""
    return [
        d.attempt(
            lambda: d.strategy.run(lambda x: x, args=3),
            says="positional args must be a list or tuple, got <class 'int'>",
        ),
        isinstance(d.attempt(lambda: d.strategy.run(3)), Raised),
    ]


@section.program
def run_other_callables(d):
    """Partial functions and objects that can be called are run."""

    class Adder:
        def __call__(self, x):
            return x + 10

    x = d.arrays(float)
    partial = functools.partial(lambda a, b: a - b, b=1.0)
    return d.run(partial, x), d.run(Adder(), x)


@section.program
def run_raises(d):
    """What all replicas raise, of any class, `run` raises; the strategy is usable."""

    def attempt(kind, text):
        def fn():
            raise kind(text)

        return d.attempt(lambda: d.strategy.run(fn), says=text)

    errors = [attempt(KeyError, "missing"), attempt(CustomError, "mine")]
    return errors, d.run(lambda: d.own(float))


@section.program
def run_raises_on_one(d):
    """What one replica alone raises, `run` raises; the strategy stays usable."""

    def fn():
        if d.replica_id() == d.n - 1:
            raise ZeroDivisionError("on the last")
        return d.array(1.0)

    first = d.attempt(lambda: d.strategy.run(fn), says="on the last")
    total = d.run(lambda: d.dist.get_replica_context().all_reduce("SUM", d.array(1.0)))
    return first, total


@section.program
def run_raises_while_others_wait(d):
    """One replica raises while the others wait in an all-reduce: no hang."""

    def fn():
        if d.replica_id() == 1:
            raise LookupError("replica 1")
        return d.dist.get_replica_context().all_reduce("SUM", d.array(1.0))

    first = d.attempt(lambda: d.strategy.run(fn), says="replica 1")
    return first, d.run(lambda: d.replica_id())


class CustomError(Exception):
    """An exception class of the user's."""


STRUCTURES = {
    "structures": ("a list and a tuple", lambda i, x: [x] if i == 0 else (x,)),
    "lengths": ("lists of other lengths", lambda i, x: [x] * (1 + i)),
    "keys": ("dicts with other keys", lambda i, x: {f"key{i}": x}),
}


def _differ(name, what, make):
    def function(d):
        return d.attempt(
            lambda: d.strategy.run(lambda: make(d.replica_id(), d.own(float)))
        )

    section.add(
        f"run_{name}_differ",
        f"Replicas return {what}.",
        function,
        differs(
            "mpidist shows both structures, on all ranks.",
            tensorflow=Raised("AssertionError"),
            mpidist=Raised("CollectiveMismatchError"),
        ),
    )


for _name, (_what, _make) in STRUCTURES.items():
    _differ(_name, _what, _make)


@section.program
def run_results_differ(d):
    """None or a string on one replica; arrays of other shapes and dtypes."""
    dtypes = ["int32", "float64"]
    return [
        d.run(lambda: None if d.replica_id() == 0 else d.own(float)),
        d.run(lambda: "text" if d.replica_id() == 0 else d.own(float)),
        d.run(lambda: d.array([1] * d.replica_id(), dtypes[d.replica_id() % 2])),
    ]


@section.program
def run_captured_per_replica(d):
    """A PerReplica has no operators; only in a replica function it can be converted."""
    x, y = d.arrays(float), d.arrays(lambda i: [i, 1.0])
    return [
        d.run(lambda: [d.kind(x), d.refused(lambda: x + 1)]),
        d.run(lambda: d.convert(y)),
        d.attempt(lambda: x + 1),
        isinstance(d.attempt(lambda: d.convert(x)), Raised),
    ]


@section.program
def run_nested(d):
    """`run` in a replica function is an error."""
    return d.run(lambda: d.refused(lambda: d.strategy.run(lambda: None)))


@section.program
def run_results_into_run(d):
    """The result of one `run` can be passed to the next."""
    first = d.strategy.run(lambda: {"x": d.own(lambda i: i + 1.0)})
    second = d.strategy.run(lambda a: {"x": a["x"] * 2}, args=(first,))
    return d.run(lambda a: a["x"] + 0.5, second)


@section.program
def run_creates_variable(d):
    """A variable made in the function is one distributed variable."""

    def fn():
        return d.variable(d.array([1.0, 2.0]), name="v")

    variable = d.strategy.run(fn)
    return d.kind(variable), d.replicas(variable), variable.shape[0]


@section.program
def run_creates_variable_once(d):
    """Its initial value is computed on replica 0 only."""

    def fn():
        return d.variable(lambda: d.array(5.0 + d.replica_id()), name="v")

    return d.copies(d.strategy.run(fn))


@section.program
def run_creates_two_variables(d):
    """Several variables are matched by the order in which they are made."""

    def fn():
        a = d.variable(1.0, name="a")
        b = d.variable(2.0, name="b")
        return [b, a]

    b, a = d.strategy.run(fn)
    return d.replicas(a), d.replicas(b)


@section.program
def run_creates_variable_and_uses_it(d):
    """It can be used in the function, and assigned."""

    def fn():
        v = d.variable(1.0, name="v", aggregation=d.Aggregation.SUM)
        v.assign_add(d.own(float))
        return v + 1

    return d.run(fn)


@section.program
def run_creates_other_names(d):
    """Variables of other names on the replicas are an error."""

    def fn():
        return d.variable(1.0, name=f"v{d.replica_id()}")

    return d.attempt(lambda: d.strategy.run(fn))


@section.program
def run_with_side_effects(d):
    """Assignments to variables in the function last."""
    v = d.in_scope([0.0, 0.0], aggregation=d.Aggregation.SUM)
    for _ in range(3):
        d.strategy.run(lambda: v.assign_add(d.own(lambda i: [1.0, i])))
    return d.replicas(v)


@section.differs(
    "The old name of `run`, which the 2.0 pages use.",
    tensorflow=Raised("AttributeError"),
    mpidist=lambda n: [float(i) for i in range(n)],
)
def run_by_its_old_name(d):
    """`experimental_run_v2`."""
    return d.attempt(
        lambda: d.replicas(d.strategy.experimental_run_v2(lambda: d.own(float)))
    )


@section.program
def run_same_as_call_for_each_replica(d):
    """`extended.call_for_each_replica` is `run`."""
    x = d.arrays(float)
    return d.replicas(
        d.strategy.extended.call_for_each_replica(
            lambda a, b: a + b, args=(x,), kwargs={"b": 1.0}
        )
    )


@section.program
def experimental_run(d):
    """`experimental_run` of the v1 strategy: run without an iterator."""
    strategy = d.v1_strategy()
    return strategy.experimental_run(lambda: None)
