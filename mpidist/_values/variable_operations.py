"""The operations that create, copy, read and change a variable on all ranks."""

from __future__ import annotations

from mpidist._agreement.mismatch import Call
from mpidist._base import backend, checksums
from mpidist._base.indexed_slices import Scatter
from mpidist._base.types import Array, Nest
from mpidist._runtime import dispatch
from mpidist._runtime.dispatch import OnRank0
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.arguments import Attributes
from mpidist._values.locality import is_same
from mpidist._values.storage import Assignment
from mpidist._values.variable import InitialCopy, Variable, set_up, storage_of


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
    given = InitialCopy(group, value, attributes)
    variable: Variable | None = marked.value
    if variable is None:
        return Variable(given)
    set_up(variable, given)
    return variable


@dispatch.operation("copy_variable")
def _copy_variable(group: ReplicaGroup, variable: Variable, text: str) -> Variable:
    group.guard.agree(Call(text))
    storage = storage_of(variable)
    part = getattr(storage, "part", None)  # of a divided one
    return Variable(InitialCopy(group, storage.array, storage.attributes, part))


@dispatch.operation("read_variable")
def _read_variable(group: ReplicaGroup, variable: Variable) -> Array:
    """Return the combined copies of an ON_READ variable. Collective."""
    return storage_of(variable).read()


@dispatch.operation("assign_variable")
def _assign_variable(
    group: ReplicaGroup, variable: Variable, how: Assignment, value: Nest
) -> None:
    """Assign a value that is the same on all ranks, and check that it is."""
    collectives, storage = group.collectives, storage_of(variable)
    call = storage.describe_call(how)
    try:  # not `checking`, which takes four calls of Python
        prepared = storage.prepare(how, value)
    except Exception as error:
        collectives.invalid(call, error)
    text = f"{call} {backend.describe(prepared)}"
    if collectives.guard.checks and not is_same(group, value):
        text += f" = {checksums.summarize(prepared)}"
    collectives.guard.agree(Call(text))
    storage.store(how, prepared)


@dispatch.operation("scatter_variable")
def _scatter_variable(
    group: ReplicaGroup, variable: Variable, how: Scatter, value: Nest
) -> None:
    """Change rows with values that are the same on all ranks; check that they are."""
    collectives, storage = group.collectives, storage_of(variable)
    call = storage.describe_call(f"scatter_{how}")
    with collectives.guard.checking(call):
        indices, rows = storage.prepare_slices(how, value)
    text = f"{call} {backend.describe(rows)}"
    if collectives.guard.checks and not is_same(group, value):
        text += f" = {checksums.summarize(rows)} at {checksums.summarize(indices)}"
    collectives.guard.agree(Call(text))
    storage.apply_slices(how, indices, rows)
