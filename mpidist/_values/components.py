"""The components of values and copies of variables.

Which differ by replica, which are this rank's, and which this code can see.
"""

from __future__ import annotations

from mpidist._base import nest
from mpidist._base.types import Nest
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.distributed import (
    DistributedValues,
    PerReplica,
    components_of,
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


def local_results(value: Nest) -> tuple[Nest, ...]:
    """Return the components that this code can see, one nest for each replica."""
    leaves, structure = nest.flatten(value)
    columns = components_of(leaves)
    rows = max(map(len, columns), default=1)
    columns = [c if len(c) == rows else c * rows for c in columns]
    return tuple(structure.unflatten([c[i] for c in columns]) for i in range(rows))
