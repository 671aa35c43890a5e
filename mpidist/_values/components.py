"""The components of values and copies of variables.

Which differ by replica, which are this rank's, and which this code can see.
"""

from __future__ import annotations

from mpidist._base import nest
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.distributed import (
    DistributedValues,
    PerReplica,
    is_away,
    own_component,
)
from mpidist._values.variable import Variable, storage_of


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
    if frame.coordinator is not None and frame.group is group:
        frame.coordinator.fetch(leaves)
    columns = _columns_of(group, leaves)
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


def _columns_of(group: ReplicaGroup, leaves: list[Nest]) -> list[tuple[Nest, ...]]:
    """Return the visible components of each leaf; one call gathers those of several."""
    together = [i for i, leaf in enumerate(leaves) if _is_gathered(group, leaf)]
    if len(together) < 2:
        return [results_of_leaf(leaf) for leaf in leaves]
    own = [component_of(leaves[i]) for i in together]
    call = f"experimental_local_results of {len(own)} values"
    rows = group.collectives.collect_on_all(own, call)
    found = dict(zip(together, zip(*rows, strict=True), strict=True))
    return [found.get(i) or results_of_leaf(leaf) for i, leaf in enumerate(leaves)]


def _is_gathered(group: ReplicaGroup, leaf: Nest) -> bool:
    """Return whether reading ``values`` of a leaf gathers them in this group."""
    frame = context.current()
    in_program = frame.coordinator is None and frame.level is not context.Level.UPDATE
    if not (group.registry.shows_all and in_program and differs(leaf)):
        return False
    if isinstance(leaf, Variable):
        return storage_of(leaf).group is group
    return isinstance(leaf, PerReplica) and is_away(leaf, group.registry)


def results_of_leaf(leaf: Nest) -> tuple[Nest, ...]:
    if isinstance(leaf, (DistributedValues, Variable)):
        return tuple(leaf.values)
    return (leaf,)
