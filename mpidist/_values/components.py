"""The components of values and copies of variables, and what creates and changes them.

Which are equal on all ranks, which are this rank's, and which this code can see; and
the operations that create, copy, read and change a variable on all ranks.
"""

from __future__ import annotations

from mpidist._agreement.mismatch import Call
from mpidist._base import backend, checksums, nest
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.types import Array, Nest
from mpidist._runtime import context, dispatch
from mpidist._runtime.dispatch import OnRank0
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import home_of, key_of
from mpidist._values.arguments import Attributes
from mpidist._values.distributed import (
    DistributedValues,
    Mirrored,
    PerReplica,
    own_component,
)
from mpidist._values.variable import Variable, set_up, storage_of


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
    if frame.coordinator is not None and frame.group is group:
        frame.coordinator.fetch(leaves)
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


def results_of_leaf(leaf: Nest) -> tuple[Nest, ...]:
    if isinstance(leaf, (DistributedValues, Variable)):
        return tuple(leaf.values)
    return (leaf,)


# --- operations -----------------------------------------------------------------------


@dispatch.operation("create_variable")
def _create_variable(
    group: ReplicaGroup, value: Array, attributes: Attributes, marked: OnRank0
) -> Variable:
    """Create the variable that merge_fn creates.

    Args:
        group: the group that it belongs to.
        value: the initial array.
        attributes: its attributes.
        marked: on rank 0 the variable whose constructor runs; unused on the others.
    """
    return set_up(marked.value, group, value, attributes)


@dispatch.operation("copy_variable")
def _copy_variable(group: ReplicaGroup, variable: Variable, text: str) -> Variable:
    group.guard.agree(Call(text))
    storage = storage_of(variable)
    part = getattr(storage, "part", None)  # of a divided one
    return set_up(None, group, storage.array, storage.attributes, part)


@dispatch.operation("read_variable")
def _read_variable(group: ReplicaGroup, variable: Variable) -> Array:
    """Return the combined copies of an ON_READ variable. Collective."""
    return storage_of(variable).read()


@dispatch.operation("assign_variable")
def _assign_variable(
    group: ReplicaGroup, variable: Variable, how: str, value: Nest
) -> None:
    """Assign a value that is the same on all ranks, and check that it is."""
    collectives, storage = group.collectives, storage_of(variable)
    call = storage.describe_call(how)
    try:  # not `checking`, which takes four calls of Python
        prepared = storage.prepare(how, value)
    except Exception as error:
        collectives.invalid(call, error)
    parts = [prepared]
    if isinstance(prepared, IndexedSlices):
        parts = [prepared.values, prepared.indices]
    text = f"{call} {backend.describe(parts[0])}"
    if collectives.guard.checks and not is_same(group, value):
        text += f" = {' at '.join([checksums.summarize(x) for x in parts])}"
    collectives.guard.agree(Call(text))
    storage.store(how, prepared)
