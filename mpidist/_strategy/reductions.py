"""Reductions, broadcasts and destinations: what operations and `CrossDeviceOps` share.

Every rank calls these functions, each with its own components.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from mpidist._base import backend, nest
from mpidist._base.options import CallOptions
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array, Nest
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import home_of
from mpidist._values.array_like import ArrayLike
from mpidist._values.components import check_owner, component_of
from mpidist._values.distributed import (
    DistributedValues,
    Mirrored,
    PerReplica,
    is_per_replica,
    own_component,
)
from mpidist._values.variable import Variable, storage_of

Everywhere: TypeAlias = DistributedValues | ArrayLike | Array
"""A destination on every replica."""
Destination: TypeAlias = Everywhere | str
"""The destination of a result: every replica or, for the device of a rank, that one."""
Pair: TypeAlias = tuple[Nest, Destination]
"""A value, and where its reduction goes."""

_NUMBERS: Final = (bool, int, float, complex)
_DEVICE: Final = re.compile(
    r"(?:/job:(?P<job>\w+))?(?:/replica:\d+)?(?:/task:(?P<task>\d+))?"
    r"/?(?:(?:device:)?[CGT]PU(?::(?:\d+|\*))?)?",
    re.IGNORECASE,
)


def reduce_by_ops(
    group: ReplicaGroup,
    op: ReduceOp,
    tree: Nest,
    options: CallOptions = None,
    call: str = "",
) -> Nest:
    """All-reduce a nest of this rank's components by the user's `CrossDeviceOps`.

    Collective: it is `ReplicaGroup.all_reduce` if there is one.
    """
    leaves, structure = nest.flatten(tree)
    registry = group.registry
    # Copies: the user's operations may add in place, or return what they get. If this
    # fails, some rank may not have made the call: it is counted afterwards.
    wrapped = [
        registry.wrap(
            PerReplica, backend.copied(own_component(x)), (registry.count, -1 - i)
        )
        for i, x in enumerate(leaves)
    ]
    results = group.custom_ops.batch_reduce(op, [(x, x) for x in wrapped], options)
    registry.next_key()
    return structure.unflatten(map(own_component, results))


def reduce_pairs(
    group: ReplicaGroup,
    op: ReduceOp,
    pairs: Sequence[Pair],
    options: CallOptions,
    call: str,
) -> list[Nest]:
    """All-reduce nests of per-replica values; reduce those for one rank to it.

    Collective. Results for all ranks become Mirrored.
    """
    roots = [root_of(group, destinations) for _, destinations in pairs]
    results: list[Nest] = [None] * len(pairs)
    for root in sorted({*roots}, key=lambda r: -1 if r is None else r):
        members = [i for i, one in enumerate(roots) if one == root]
        own = [nest.map_structure(component_of, pairs[i][0]) for i in members]
        reduced = group.collectives.all_reduce(op, own, options, call, root)
        for i, x in zip(members, reduced, strict=True):
            results[i] = x
    mirrored = [i for i, root in enumerate(roots) if root is None]
    wrapped = group.registry.wrap_tree(Mirrored, [results[i] for i in mirrored])
    for i, x in zip(mirrored, wrapped, strict=True):
        results[i] = x
    return results


def broadcast_value(group: ReplicaGroup, get: Callable[[], Nest]) -> Nest:
    """Copy the value that ``get`` returns on rank 0 to all ranks. Collective."""

    def make() -> list[Nest]:
        value = get()
        if is_per_replica(value):
            raise TypeError(
                "broadcast_to: got a PerReplica, which is not one value; write "
                "`strategy.extended.reduce_to(op, value, destinations)`"
            )
        if isinstance(value, _NUMBERS):
            return [value]
        if isinstance(value, ArrayLike):
            value = value.value()
        # A copy: later changes to the array must not show on one rank only.
        array, kind = backend.as_array(value, "broadcast_to")
        return [backend.as_given(array.copy(), kind)]

    (value,) = group.collectives.share(make, "broadcast_to")
    if isinstance(value, _NUMBERS):
        return value
    return group.registry.wrap_tree(Mirrored, value)


def group_of_values(values: list[Nest]) -> ReplicaGroup:
    """Return the group that these values belong to, or else the current one.

    Users may call `CrossDeviceOps` outside every scope, where the current group is that
    of the default strategy.
    """
    for value in values:
        if isinstance(value, Variable):
            return storage_of(value).group
        home = home_of(value) if isinstance(value, DistributedValues) else None
        if home is not None:
            return home.group
    return context.current().group


def root_of(
    group: ReplicaGroup, destinations: Destination, call: str = "reduce_to"
) -> int | None:
    """Return the rank of a device string; None for all other destinations.

    A string of `StrategyExtended.worker_devices`, or with a task of a job, is that of
    one rank. Every rank has a "/cpu:0".

    Raises:
        ValueError: if it is no device.
    """
    if not isinstance(destinations, str):
        return None
    if destinations in group.device_names:
        return group.device_names.index(destinations) if group.is_mpi else None
    match = _DEVICE.fullmatch(destinations)
    if match is None or not destinations.strip("/"):
        raise _not_a_destination(group, destinations, call)
    if match["job"] == "localhost" or match["task"] is None:
        return None
    if int(match["task"]) >= group.num_replicas:
        raise _not_a_destination(group, destinations, call)
    return int(match["task"]) if group.is_mpi else None


def check_destinations(
    group: ReplicaGroup, destinations: Destination, call: str
) -> None:
    """Raise a ValueError if the destinations are invalid."""
    everywhere = isinstance(destinations, (DistributedValues, ArrayLike))
    if isinstance(destinations, Variable):
        check_owner(group, call, destinations)
    elif isinstance(destinations, str):
        root_of(group, destinations, call)
    elif not (everywhere or backend.is_array(destinations)):
        raise _not_a_destination(group, destinations, call)


def _not_a_destination(
    group: ReplicaGroup, destinations: object, call: str
) -> ValueError:
    return ValueError(
        f"{call}: destinations must be a `mpidist.Variable`, a distributed value, an "
        f'array, a device that every rank has, such as "/cpu:0", or one of '
        f"{group.device_names}, got {destinations!r:.80}"
    )
