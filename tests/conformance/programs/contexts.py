"""Contexts and scopes (b.1)."""

from __future__ import annotations

import threading
from typing import Any

from conformance.registry import Section
from conformance.results import Raised

section = Section("Contexts and scopes")


def facts(d: Any) -> dict[str, Any]:
    """Return which context this is."""
    context = d.dist.get_replica_context()
    return {
        "has_strategy": d.dist.has_strategy(),
        "cross_replica": d.dist.in_cross_replica_context(),
        "is_ours": d.dist.get_strategy() is d.strategy,
        "replica_context": None
        if context is None
        else [
            int(context.replica_id_in_sync_group),
            context.num_replicas_in_sync,
            context.strategy is d.strategy,
        ],
    }


@section.program
def context_outside(d):
    """Outside every scope the default strategy's replica context, 0 of 1, holds."""
    return facts(d), d.dist.get_strategy() is d.dist.get_strategy()


@section.program
def context_in_scope(d):
    """In `scope()`: cross-replica, no replica context; `as` gives the strategy."""
    with d.strategy.scope() as given:
        return facts(d), given is d.strategy


@section.program
def context_after_scope(d):
    """Leaving a scope, also by an exception, restores the previous one."""

    def leave():
        with d.strategy.scope():
            raise KeyError("x")

    return d.attempt(leave), d.dist.has_strategy(), d.dist.in_cross_replica_context()


@section.program
def context_scope_again(d):
    """The scope of the same strategy can be entered again inside itself."""
    with d.strategy.scope(), d.strategy.scope():
        inner = facts(d)
    return inner, d.dist.has_strategy()


@section.program
def context_in_run(d):
    """In `run`, outside the scope and in it: the replica's number and the strategy."""
    outside = d.run(lambda: facts(d))
    with d.strategy.scope():
        return outside, d.run(lambda: facts(d)), facts(d)


@section.program
def context_in_merge_fn(d):
    """In `merge_fn`: cross-replica; back in the replica function: not."""

    def fn():
        merged = d.merge(lambda strategy: facts(d))
        return merged, facts(d)

    return d.run(fn)


@section.program
def context_in_update(d):
    """In the function of `update`: cross-replica, no replica context."""
    variable = d.in_scope(0.0)
    with d.strategy.scope():
        return d.replicas(
            d.strategy.extended.update(
                variable,
                lambda v: [facts(d)["cross_replica"], facts(d)["replica_context"]],
                group=False,
            )[0]
        )


@section.program
def context_in_value_fn(d):
    """experimental_distribute_values_from_function passes the replica id."""

    def value_fn(context):
        return [context.replica_id_in_sync_group, context.num_replicas_in_sync]

    return d.replicas(d.strategy.experimental_distribute_values_from_function(value_fn))


@section.program
def context_nested_run(d):
    """`run` inside `merge_fn` gives a replica context again, and it can merge."""

    def inner():
        total = d.dist.get_replica_context().all_reduce("SUM", d.own(lambda i: i + 1.0))
        return d.replica_id(), total

    def merge_fn(strategy):
        ids, totals = strategy.run(inner)
        return strategy.experimental_local_results(
            ids
        ), strategy.experimental_local_results(totals)

    return d.run(lambda: d.merge(merge_fn))


@section.program
def context_of_threads(d):
    """A thread started in a scope is not in it."""
    seen = []
    with d.strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(d.dist.has_strategy()))
        thread.start()
        thread.join()
    return seen


@section.program
def set_strategy(d):
    """`experimental_set_strategy` enters, replaces and leaves a scope."""
    other = d.new_strategy()
    seen = []
    try:
        for strategy in (d.strategy, other, None):
            d.dist.experimental_set_strategy(strategy)
            seen.append(
                [
                    d.dist.has_strategy(),
                    d.dist.get_strategy() is d.strategy,
                    d.dist.get_strategy() is other,
                    d.dist.in_cross_replica_context(),
                ]
            )
    finally:
        d.dist.experimental_set_strategy(None)
    return seen


@section.program
def set_strategy_in_scope(d):
    """`experimental_set_strategy` inside a scope is an error."""
    with d.strategy.scope():
        return d.attempt(
            lambda: d.dist.experimental_set_strategy(d.strategy),
            says="must not be called inside",
        ), d.attempt(lambda: d.dist.experimental_set_strategy(None))


@section.program
def set_strategy_makes_variables(d):
    """A variable made after `experimental_set_strategy` is the strategy's."""
    d.dist.experimental_set_strategy(d.strategy)
    try:
        variable = d.variable(1.0)
    finally:
        d.dist.experimental_set_strategy(None)
    return variable.distribute_strategy is d.strategy, d.replicas(variable)


@section.program
def other_scope_in_scope(d):
    """The scope of another strategy inside a scope is an error."""
    other = d.new_strategy()

    def enter():
        with other.scope():
            pass

    with d.strategy.scope():
        return d.attempt(enter, says="mixing different")


@section.program
def other_run_in_scope(d):
    """`run` and `reduce` of another strategy inside a scope are errors."""
    other = d.new_strategy()
    value = d.arrays(float)
    with d.strategy.scope():
        return [
            d.attempt(lambda: other.run(lambda: None), says="mixing different"),
            d.attempt(
                lambda: other.reduce("SUM", value, axis=None), says="mixing different"
            ),
        ]


@section.program
def default_scope_in_scope(d):
    """The default strategy's scope inside a scope is an error."""
    default = d.dist.get_strategy()

    def enter():
        with default.scope():
            pass

    with d.strategy.scope():
        return d.attempt(enter, says="must not nest")


IN_REPLICA = {
    "run": lambda d, s, x, v: s.run(lambda: None),
    "reduce": lambda d, s, x, v: s.reduce("SUM", x, axis=None),
    "gather": lambda d, s, x, v: s.gather(x, axis=0),
    "reduce_to": lambda d, s, x, v: s.extended.reduce_to("SUM", x, v),
    "batch_reduce_to": lambda d, s, x, v: s.extended.batch_reduce_to("SUM", [(x, v)]),
    "broadcast_to": lambda d, s, x, v: s.extended.broadcast_to(x, v),
    "call_for_each_replica": lambda d, s, x, v: s.extended.call_for_each_replica(
        lambda: None
    ),
    "update_non_slot": lambda d, s, x, v: s.extended.update_non_slot(
        s.extended.worker_devices, lambda: None
    ),
    "experimental_make_numpy_dataset": (
        lambda d, s, x, v: s.extended.experimental_make_numpy_dataset(
            d.numbers(d.array([1.0, 2.0]))
        )
    ),
    "scope": lambda d, s, x, v: s.scope().__enter__(),
}


def _refused_in_replica(name, call):
    def function(d):
        variable = d.in_scope(0.0)

        def fn():
            x = d.array([1.0])
            return d.refused(
                lambda: call(d, d.strategy, x, variable), says="cross-replica context"
            )

        return d.run(fn)

    section.add(
        f"in_replica_{name}",
        f"`{name}` in a replica function is an error that names the context.",
        function,
    )


for _name, _call in IN_REPLICA.items():
    _refused_in_replica(_name, _call)


@section.differs(
    "The copies diverge in TensorFlow; here the variable keeps its value.",
    tensorflow=lambda n: ["accepted", [float(i) for i in range(n)]],
    mpidist=lambda n: [Raised("CollectiveMismatchError"), [0.0] * n],
)
def in_replica_update(d):
    """`extended.update` in a replica function, with an argument of the replica's."""
    variable = d.in_scope(0.0)

    def fn():
        d.strategy.extended.update(
            variable, lambda v, x: v.assign(x), args=(d.own(float),)
        )

    result = d.refused(lambda: d.strategy.run(fn))
    return [result, d.copies(variable)]


@section.differs(
    "TensorFlow makes a whole PerReplica on each replica; here a replica has its own "
    "value only.",
    tensorflow=lambda n: ["accepted"] * n,
    mpidist=lambda n: [Raised("RuntimeError")] * n,
)
def in_replica_distribute_values(d):
    """`experimental_distribute_values_from_function` in a replica function."""

    def fn():
        return d.refused(
            lambda: d.strategy.experimental_distribute_values_from_function(
                lambda c: 1.0
            )
        )

    return d.run(fn)


@section.program
def in_replica_local_results(d):
    """`experimental_local_results` may be called anywhere, on anything."""
    return d.run(lambda: d.strategy.experimental_local_results(d.own(float)))


CAPTURED = {
    "all_reduce": lambda d, c: c.all_reduce("SUM", d.array(1.0)),
    "all_gather": lambda d, c: c.all_gather(d.array([1.0]), axis=0),
    "merge_call": lambda d, c: c.merge_call(lambda strategy: None),
}


def _captured(name, call):
    def function(d):
        kept = []
        d.strategy.run(lambda: kept.append(d.dist.get_replica_context()))
        with d.strategy.scope():
            return d.attempt(
                lambda: call(d, kept[0]), says="inside `call_for_each_replica()`"
            )

    section.add(
        f"captured_context_{name}",
        f"`{name}` of a context that was kept, in cross-replica context: an error.",
        function,
    )

    def in_merge_fn(d):
        def fn():
            context = d.dist.get_replica_context()
            return d.merge(lambda strategy: d.refused(lambda: call(d, context)))

        return d.run(fn)

    section.add(
        f"outer_context_{name}",
        f"`{name}` of the replica's context inside merge_fn is an error.",
        in_merge_fn,
    )


for _name, _call in CAPTURED.items():
    _captured(_name, _call)


@section.program
def context_of_another_strategy(d):
    """A kept context of another strategy, in a replica function: an error."""
    other = d.new_strategy()
    kept = []
    other.run(lambda: kept.append(d.dist.get_replica_context()))
    return d.run(
        lambda: d.refused(
            lambda: kept[0].all_reduce("SUM", d.array(1.0)), says="mismatching"
        )
    )


@section.program
def replica_context_by_hand(d):
    """A ReplicaContext made by hand can be entered."""
    context = d.dist.ReplicaContext(d.strategy, d.own_replica)
    with context:
        inside = [
            d.dist.get_replica_context() is context,
            d.dist.get_strategy() is d.strategy,
            d.dist.in_cross_replica_context(),
            context.num_replicas_in_sync,
        ]
    return inside, d.dist.has_strategy()


@section.program
def replica_context_by_hand_merges(d):
    """In a hand-made context merge_call runs merge_fn in cross-replica context."""
    context = d.dist.ReplicaContext(d.strategy, d.own_replica)
    with context:
        return context.merge_call(
            lambda strategy, x: [strategy is d.strategy, facts(d), x],
            args=("text",),
        )


@section.program
def replica_context_bad_id(d):
    """A replica id that is not a number is a ValueError."""
    return d.attempt(
        lambda: d.dist.ReplicaContext(d.strategy, "0"), says="can only be an integer"
    )


@section.differs(
    "TensorFlow nests lists: [(dev,)] or [[dev]]. The page has a tuple of strings.",
    tensorflow=lambda n: [False] * n,
    mpidist=lambda n: [True] * n,
)
def replica_context_devices(d):
    """`ReplicaContext.devices` is a tuple of one string."""

    def fn():
        devices = d.dist.get_replica_context().devices
        return isinstance(devices, tuple) and isinstance(devices[0], str)

    return d.run(fn)


@section.program
def default_run(d):
    """`run` of the default strategy calls the function and returns what it returns."""
    default = d.dist.get_strategy()
    result = default.run(
        lambda x, y: {"sum": x + y}, args=(d.array(1.0),), kwargs={"y": 2}
    )
    return default.experimental_local_results(result)


@section.program
def default_strategy(d):
    """The default strategy has one replica: results are the values themselves."""
    default, context = d.dist.get_strategy(), d.dist.get_replica_context()
    row, rows = d.array([2.0, 3.0]), d.array([[1.0, 2.0], [3.0, 4.0]])
    return [
        default.num_replicas_in_sync,
        [default.reduce(op, row, axis=None) for op in ("SUM", "MEAN")],
        [default.reduce(op, rows, axis=0) for op in ("SUM", "MEAN")],
        default.gather(row, axis=0),
        default.experimental_local_results(row),
        context.all_gather(row, axis=0),
        context.all_reduce("MEAN", {"a": d.array(2.0), "b": [row]}),
    ]


@section.program
def default_merge_call(d):
    """merge_call outside every scope calls the function with the arguments given."""
    default = d.dist.get_strategy()

    def merge_fn(strategy, x, *, y):
        return [
            strategy is default,
            d.dist.has_strategy(),
            d.dist.in_cross_replica_context(),
            x + y,
        ]

    context = d.dist.get_replica_context()
    return context.merge_call(merge_fn, args=(d.array(1.0),), kwargs={"y": 2.0})


@section.program
def run_without_scope(d):
    """`run`, `reduce` and `reduce_to` need no scope."""
    values = d.strategy.run(lambda: d.own(lambda i: i + 1.0))
    total = d.strategy.reduce("SUM", values, axis=None)
    mean = d.strategy.extended.reduce_to("MEAN", values, values)
    return total, d.replicas(mean)


@section.program
def run_in_scope_of_itself(d):
    """`run` enters the scope: variables made in the function are the strategy's."""

    def fn():
        return d.variable(2.0, name="made").distribute_strategy is d.strategy

    return d.run(fn)


@section.differs(
    "Here a strategy is a group of processes, with a communicator.",
    tensorflow=[Raised("RuntimeError"), "accepted"],
    mpidist=[Raised("TypeError"), Raised("TypeError")],
)
def copying_a_strategy(d):
    """`copy.copy` and `copy.deepcopy` of a strategy."""
    import copy

    return [
        d.refused(lambda: copy.copy(d.strategy)),
        d.refused(lambda: copy.deepcopy(d.strategy)),
    ]
