"""The cross-replica operations that ranks run, at program level or on command.

`StrategyExtended` and `Strategy` perform them by name (`dispatch`).
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

from mpidist._agreement.mismatch import Call, call_of
from mpidist._agreement.sections import SectionResult, run_section
from mpidist._base import backend, nest
from mpidist._base.expect import expect
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.options import CallOptions
from mpidist._base.reduce_op import RULES, ReduceOp, Reduction, as_reduce_op
from mpidist._base.types import Args, Nest
from mpidist._runtime import context, dispatch
from mpidist._runtime.dispatch import OnRank0, check_arguments
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import component, home_of
from mpidist._strategy import folds
from mpidist._strategy.contexts import ValueContext
from mpidist._strategy.reductions import (
    Destination,
    Pair,
    broadcast_value,
    check_destinations,
    reduce_pairs,
    root_of,
)
from mpidist._values.array_like import to_plain
from mpidist._values.components import component_of, differs
from mpidist._values.distributed import (
    Mirrored,
    PerReplica,
    argument_of,
    own_component,
    select_replica,
)
from mpidist._values.variable import Variable, is_same, storage_of


@dispatch.operation("call_for_each_replica")
def _call_for_each_replica(
    group: ReplicaGroup, fn: Callable[..., Nest], args: Args, kwargs: dict[str, Nest]
) -> Nest:
    registry = group.registry
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    call = call_of(f"the end of run({name})")
    several = group.num_replicas > 1 and group.guard.sections
    if several and context.runs_elsewhere(group):
        where = " is in a replica function"
        raise group.guard.breakdown.two_threads(where, call_of(f"run({name})"))

    def body(section: SectionResult) -> Nest:
        hint = "write `strategy.run(fn, args=(x,))`, not `strategy.run(fn(x))`"
        expect(callable(fn), "run", "`fn` to be a function", fn, hint)
        check_arguments("run", args, kwargs)
        for leaf in nest.flatten((args, kwargs))[0] if args or kwargs else ():
            registry.check("Strategy.run", leaf)
        own_args = select_replica(tuple(args)) if args else ()
        own_kwargs = select_replica(kwargs) if kwargs else {}
        section.kind = "raised"
        with group.replica_frame:
            result = fn(*own_args, **own_kwargs)
        # With the number of keys drawn: keys must name the same values on all ranks.
        keys = registry.count
        if result is None:
            section.set_result(nest.LEAF, keys)
            return None
        if isinstance(result, (types.GeneratorType, types.CoroutineType)):
            raise TypeError(
                f"run: {fn!r} is a generator or async function, which has not begun "
                "when it returns; write a plain function"
            )
        section.set_result(str(nest.flatten(result)[1]), keys)
        return result

    result = run_section(group.guard, call, body)
    return registry.wrap_tree(PerReplica, result)


@dispatch.operation("reduce")
def _reduce(
    group: ReplicaGroup, reduce_op: Reduction, value: Nest, axis: object
) -> Nest:
    if type(reduce_op) is not ReduceOp and callable(reduce_op):
        return folds.reduce_with(group, reduce_op, value, axis)
    call = "Strategy.reduce"
    collectives = group.collectives
    if type(value) is PerReplica and axis is None:  # the usual case
        with collectives.guard.checking(call):
            op = as_reduce_op(reduce_op, call)
            group.registry.check(call, value)
        return group.all_reduce(op, component(value), call=call)
    with collectives.guard.checking(call):
        op = as_reduce_op(reduce_op, call)
        axes = folds.as_axes(axis)
        leaves, structure = nest.flatten(value)
        moving, results, plain = _reduce_others(group, op, leaves, axes, call)
        local = [component_of(leaves[i]) for i in moving]
        if axes is not None:
            parts = [folds.reduce_axes(op, x, axes) for x in local]
    if plain:
        collectives.check_plain(call, plain)
    if axes is None:
        reduced = group.all_reduce(op, local, call=call)
    else:
        reduced = folds.combine(collectives, op, parts, axes)
    for i, x in zip(moving, reduced, strict=True):
        results[i] = x
    return structure.unflatten(results)


def _reduce_others(
    group: ReplicaGroup,
    op: ReduceOp,
    leaves: list[Nest],
    axes: tuple[int, ...] | None,
    call: str,
    *,
    kept: tuple[type, ...] = (),
) -> tuple[list[int], list[Nest], list[Nest]]:
    """Reduce the values that do not differ by replica. Not collective.

    Args:
        group: the ranks.
        op: the operation.
        leaves: all values.
        axes: the axes of each value to reduce over, too.
        call: the name of the call, for messages.
        kept: types of values that are returned unchanged, if the operation is the
            identity for them.

    Returns:
        The places of the values that differ; a list with the results at all other
        places; and the values that all ranks have to compare.
    """
    moving: list[int] = []
    results = list(leaves)
    plain: list[Nest] = []
    for i, leaf in enumerate(leaves):
        group.registry.check(call, leaf)
        if differs(leaf):
            component_of(leaf)  # raises for one that has none
            moving.append(i)
            continue
        if not (isinstance(leaf, kept) and RULES[op].idempotent):
            results[i] = _reduce_same(group, op, leaf, axes, call)
        if not is_same(group, leaf):
            plain.append(to_plain(own_component(leaf)))
    return moving, results, plain


def _reduce_same(
    group: ReplicaGroup,
    op: ReduceOp,
    leaf: Nest,
    axes: tuple[int, ...] | None,
    call: str,
) -> Nest:
    """Reduce a value that is not a PerReplica: the same on all replicas."""
    fits = not isinstance(leaf, (list, tuple, types.NoneType))
    expect(fits, call, "a PerReplica", leaf, "pass what `strategy.run` returned")
    if not group.is_mpi and axes is None:
        return argument_of(leaf)  # one replica: no wrapping needed
    if not RULES[op].idempotent and group.is_mpi:
        raise ValueError(
            f"{call}: A non-DistributedValues value {leaf!r:.80} cannot be reduced "
            f"with the given reduce op ReduceOp.{op.name}. It is not per replica, so "
            "it is not clear how often it counts; pass what `strategy.run` returned, "
            f'as in `strategy.reduce("{op.name}", strategy.run(lambda: x), axis=None)`'
        )
    leaf = argument_of(leaf)
    plain = to_plain(leaf)
    if axes is not None:
        return folds.reduce_same(op, plain, axes)
    if not isinstance(plain, (IndexedSlices, str, bytes)):
        backend.as_array(plain, call)  # others may hold what differs between ranks
    return leaf


@dispatch.operation("batch_reduce_to")
def _reduce_pairs(
    group: ReplicaGroup,
    reduce_op: ReduceOp | str,
    pairs: Sequence[Pair],
    options: CallOptions,
    call: str,
) -> list[Nest]:
    """Reduce pairs of values and destinations.

    The usual case comes first. A rank may take it while another does not (one passes a
    list and the other a tuple), so in both cases one key is drawn.
    """
    registry, collectives = group.registry, group.collectives
    own = _components(group, pairs)
    if own is not None:
        with collectives.guard.checking(call):
            op = as_reduce_op(reduce_op, call)
        reduced = collectives.all_reduce(op, own, options, call)
        return registry.wrap_tree(Mirrored, reduced)
    with collectives.guard.checking(call):
        op = as_reduce_op(reduce_op, call)
        structures, leaves, wanted = _flatten_pairs(group, pairs, call)
        moving, results, plain = _reduce_others(
            group, op, leaves, None, call, kept=(Mirrored, Variable)
        )
    if plain:
        collectives.check_plain(call, plain)
    asked = [(leaves[i], wanted[i]) for i in moving]
    custom = group.custom_ops
    if custom is not None and asked:
        reduced = custom.batch_reduce(op, asked, options)
        registry.next_key()  # it draws none if all results are for one rank
    else:
        reduced = reduce_pairs(group, op, asked, options, call)
    for i, x in zip(moving, reduced, strict=True):
        if root_of(group, wanted[i]) is not None:
            # For one rank: None on the others. See `StrategyExtended.reduce_to`. Its
            # key comes after those of the results for all ranks.
            x = registry.wrap(PerReplica, x, (registry.count, len(moving) + i))
        results[i] = x
    remaining = iter(results)
    return [
        structure.unflatten(list(itertools.islice(remaining, structure.num_leaves)))
        for structure in structures
    ]


def _components(group: ReplicaGroup, pairs: object) -> list[Nest] | None:
    """Return this rank's values if all are for variables, the most common case."""
    if type(pairs) is not list or group.custom_ops is not None:
        return None
    registry = group.registry
    own = []
    for pair in pairs:
        if type(pair) is not tuple or len(pair) != 2:
            return None
        value, variable = pair
        if type(value) is not PerReplica or home_of(value) is not registry:
            return None
        if type(variable) is not Variable or storage_of(variable).group is not group:
            return None
        own.append(component(value))
    return own


def _flatten_pairs(
    group: ReplicaGroup, pairs: Any, call: str
) -> tuple[list[nest.Structure], list[Nest], list[Destination]]:
    """Return the structures of the values, all leaves, and the destination of each."""
    structures: list[nest.Structure] = []
    leaves: list[Nest] = []
    wanted: list[Destination] = []
    fits = isinstance(pairs, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
    )
    what = "`value_destination_pairs` to be a list of (value, destinations) tuples"
    expect(fits, call, what, pairs, error=ValueError)
    for value, destinations in pairs:
        check_destinations(group, destinations, call)
        flat, structure = nest.flatten(value)
        structures.append(structure)
        leaves += flat
        wanted += [destinations] * len(flat)
    return structures, leaves, wanted


@dispatch.operation("broadcast_to")
def _broadcast_to(
    group: ReplicaGroup, marked: OnRank0, destinations: Destination
) -> Nest:
    ops = group.custom_ops
    if ops is not None:
        with group.cross_frame:
            return ops.broadcast(marked.value, destinations)

    def get() -> Nest:
        check_destinations(group, destinations, "broadcast_to")
        return marked.value

    return broadcast_value(group, get)


@dispatch.operation("gather")
def _gather(group: ReplicaGroup, value: Nest, axis: int) -> Nest:
    collectives, call = group.collectives, "Strategy.gather"
    moves = differs(value)
    with collectives.guard.checking(call):
        group.registry.check(call, value)
        # Not per replica: returned unchanged, not n times (as in TensorFlow).
        own = component_of(value) if moves else argument_of(value)
        if isinstance(value, (list, tuple, dict)):
            raise TypeError(
                f"{call}: expected one PerReplica or array, got a "
                f"{type(value).__name__}; gather its parts one by one, or write "
                "`all_gather` in the replica function, which takes nests"
            )
        if not moves and isinstance(own, IndexedSlices):
            raise NotImplementedError(
                f"{call} does not support IndexedSlices; gather its `values` and "
                "`indices`"
            )
        if not moves:
            backend.as_array(to_plain(own), call)
    if moves:
        return collectives.all_gather(own, axis, call=call)
    if is_same(group, value):
        collectives.guard.agree(Call(f"{call} of a value that is the same"))
    else:
        collectives.check_plain(call, [to_plain(own)])
    return own


@dispatch.operation("distribute_values")
def _distribute_values(
    group: ReplicaGroup, value_fn: Callable[[ValueContext], Nest]
) -> Nest:
    value_context = ValueContext(group.replica_id, group.num_replicas)
    call = Call("experimental_distribute_values_from_function")

    def body(section: SectionResult) -> Nest:
        section.kind = "raised"
        value = value_fn(value_context)
        section.set_result(str(nest.flatten(value)[1]))
        return value

    value = run_section(group.guard, call, body)
    registry = group.registry
    leaves, shape = nest.flatten(value)
    number = registry.next_key()
    return shape.unflatten(
        [registry.wrap(PerReplica, x, (number, i)) for i, x in enumerate(leaves)]
    )
