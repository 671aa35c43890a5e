"""The components of distributed values that this process can see."""

from __future__ import annotations

from mpidist._base import nest
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.distributed import DistributedValues
from mpidist._values.variable import Variable


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
