"""Where a value is: the same on all ranks, one for each, and which is this rank's."""

from __future__ import annotations

from mpidist._base.types import Nest
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
    """Return this rank's component of a distributed value, or copy of a variable."""
    return (
        storage_of(value).array if isinstance(value, Variable) else own_component(value)
    )


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
