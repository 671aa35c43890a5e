"""The components of values: equal on all ranks or not, this rank's, and those seen."""

from __future__ import annotations

from mpidist._base import nest
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import home_of, key_of
from mpidist._values.distributed import (
    DistributedValues,
    Mirrored,
    PerReplica,
    own_component,
)
from mpidist._values.variable import Variable, storage_of


def is_same(group: ReplicaGroup, value: Nest) -> bool:
    """Return whether a value is known to be the same on all ranks of a group."""
    if isinstance(value, Mirrored):
        return key_of(value) is not None and home_of(value) is group.registry
    if not isinstance(value, Variable):
        return False
    storage = storage_of(value)
    return storage.group is group and group.is_mpi and not storage.on_read


def differs(value: Nest) -> bool:
    """Return whether a value has a component of its own on each replica."""
    if isinstance(value, DistributedValues):
        return isinstance(value, PerReplica)
    return isinstance(value, Variable) and storage_of(value).on_read


def component_of(value: Nest) -> Nest:
    """Return this rank's component of a distributed value, or copy of a variable.

    Raises:
        ValueError: for a variable whose elements are divided among the ranks.
    """
    if isinstance(value, Variable):
        return storage_of(value).component()
    return own_component(value)


def check_owner(group: ReplicaGroup, call: str, variable: Variable) -> None:
    """Raise if a variable belongs to another group.

    Raises:
        RuntimeError: if it does.
    """
    owner = storage_of(variable).group
    if owner is not group:
        raise RuntimeError(
            f"{call}: Mixing different Strategy objects: {variable!r} belongs to "
            f"{owner}, not to {group}"
        )


def local_results(group: ReplicaGroup, value: Nest) -> tuple[Nest, ...]:
    """Return the components that this process can see, one nest for each replica."""
    leaves, structure = nest.flatten(value)
    frame = context.current()
    coordinator = frame.coordinator if frame.group is group else None
    fetch(coordinator, leaves)
    columns = [results_of_leaf(leaf) for leaf in leaves]
    distributed = [
        len(column)
        for leaf, column in zip(leaves, columns, strict=True)
        if isinstance(leaf, (DistributedValues, Variable))
    ]
    rows = max(distributed, default=1)
    columns = [c if len(c) == rows else c * rows for c in columns]
    return tuple(
        structure.unflatten([column[i] for column in columns]) for i in range(rows)
    )


def fetch(coordinator: context.Commander | None, leaves: list[Nest]) -> None:
    """Gather all of these values at once, on the coordinator."""
    if coordinator is not None:
        coordinator.fetch([x for x in leaves if isinstance(x, DistributedValues)])


def results_of_leaf(leaf: Nest) -> tuple[Nest, ...]:
    if isinstance(leaf, (DistributedValues, Variable)):
        return tuple(leaf.values)
    return (leaf,)
