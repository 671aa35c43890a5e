"""The gradients of one step: as arrays, and summed over the replicas."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._base import backend, checksums
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array
from mpidist._base.variable_enums import VariableSynchronization
from mpidist._collectives.plan import Plan
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import component
from mpidist._values.components import is_same
from mpidist._values.distributed import DistributedValues, PerReplica
from mpidist._values.variable import Variable, array_of
from mpidist.optimizers._arguments import APPLY, Gradient, listed


def as_gradient(
    group: ReplicaGroup,
    gradient: Gradient,
    variable: Variable,
    in_replica: bool,
    skip: bool,
) -> Array:
    """Return this rank's gradient: of the variable's dtype and shape, in C order."""
    array = array_of(variable)
    call = f"{APPLY}: the gradient of Variable {variable.name!r}"
    group.registry.check(APPLY, gradient)
    if isinstance(gradient, IndexedSlices):
        raise TypeError(
            f"{call}: expected an array, got IndexedSlices; write "
            "`g = numpy.zeros(variable.shape)`, `numpy.add.at(g, slices.indices, "
            "slices.values)`"
        )
    on_read = VariableSynchronization.ON_READ
    if isinstance(gradient, Variable) and gradient.synchronization is on_read:
        if not in_replica:
            raise TypeError(
                f"{call} is Variable {gradient.name!r}, which is ON_READ; write "
                "`variable.read_value()`"
            )
        gradient = array_of(gradient)
    if isinstance(gradient, PerReplica) and not in_replica and skip:
        raise ValueError(
            f"{call} is a PerReplica, which must be reduced; leave out "
            "`skip_gradients_aggregation`"
        )
    if isinstance(gradient, DistributedValues):
        gradient = component(gradient)
    x: Array
    x, kind = backend.as_array(gradient, call)
    if tuple(x.shape) != tuple(array.shape):
        raise ValueError(
            f"{call}: expected shape {tuple(array.shape)}, got {backend.describe(x)}"
        )
    if backend.is_device_array(x) != backend.is_device_array(array):
        if kind not in ("scalar", "number"):
            where = "on the GPU" if backend.is_device_array(array) else "on the host"
            raise TypeError(
                f"{call}: expected an array {where}, as the variable is; write "
                "`strategy.array_module.asarray(gradient)`, or `gradient.get()`"
            )
        x = backend.like(array, x)
    if x.dtype != array.dtype:
        of_int = kind == "number" and x.dtype.kind == "i"
        if backend.number_kind(x.dtype) != "f" and not of_int:
            write = f"gradient.astype({array.dtype.name!r})"
            if x.dtype.kind == "c":
                write = "gradient.real"
            raise TypeError(
                f"{call}: expected dtype {array.dtype.name}, got {backend.describe(x)}"
                f"; write `{write}`"
            )
        x = x.astype(array.dtype)
    return backend.contiguous(x)


@dataclasses.dataclass(slots=True)
class GivenGradients:
    """The gradients of one step on this rank, without those that are None."""

    arrays: list[Array] = dataclasses.field(default_factory=list)
    variables: list[Variable] = dataclasses.field(default_factory=list)
    # The places of those that are summed over the replicas; summaries of the others,
    # for the header.
    summed: list[int] = dataclasses.field(default_factory=list)
    summaries: list[str] = dataclasses.field(default_factory=list)


def collect(
    group: ReplicaGroup,
    gradients: list[Gradient],
    variables: list[Variable],
    in_replica: bool,
    skip: bool,
) -> GivenGradients:
    """Return this rank's gradients as arrays.

    Raises:
        TypeError, ValueError: for a gradient of another shape or kind, or None for
            all.
    """
    given = GivenGradients()
    checks = group.guard.checks
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is None:
            continue
        array = array_of(variable)
        x: Array = gradient
        if not _is_usual(gradient, array):
            x = as_gradient(group, gradient, variable, in_replica, skip)
        if not skip and (in_replica or isinstance(gradient, PerReplica)):
            given.summed.append(len(given.arrays))
        elif checks and not is_same(group, gradient):
            given.summaries.append(checksums.summarize(x))
        given.arrays.append(x)
        given.variables.append(variable)
    if not given.arrays:
        raise ValueError(
            f"{APPLY}: No gradients provided for any variable: got None for "
            f"{listed([v.name for v in variables])}"
        )
    # Sums get buffers of their own, if there are several replicas.
    kept = given.summed if group.collectives.comm.size > 1 else []
    if len(kept) < len(given.arrays):
        # A gradient that is a view of a variable changes while that is updated.
        owners = {id(_owner(array_of(variable))) for variable in variables}
        for i, x in enumerate(given.arrays):
            if i not in kept and id(_owner(x)) in owners:
                given.arrays[i] = x.copy()
    return given


def _is_usual(gradient: Gradient, array: Array) -> bool:
    """Return whether a gradient can be used unchanged, as most can."""
    return (
        type(gradient) is np.ndarray
        and isinstance(array, np.ndarray)
        and gradient.dtype == array.dtype
        and gradient.shape == array.shape
        and gradient.flags.c_contiguous
    )


def _owner(x: Array) -> Array:
    """Return the array whose memory this is a view of."""
    while (base := getattr(x, "base", None)) is not None and backend.is_array(base):
        x = base
    return x


def find_plan(group: ReplicaGroup, given: GivenGradients) -> Plan | None:
    """Return how gradients are summed; None if there is nothing to sum."""
    collectives = group.collectives
    if collectives.comm.size == 1 or not given.summed:
        return None
    arrays = [given.arrays[i] for i in given.summed]
    return collectives.plans.find(ReduceOp.SUM, arrays, APPLY)


def sum_gradients(
    group: ReplicaGroup, plan: Plan | None, call: Call, given: GivenGradients
) -> None:
    """Put the sums over the replicas in the gradients' places. Collective.

    Nothing changes before all ranks have agreed.

    Args:
        group: the ranks.
        plan: from `find_plan`.
        call: the contents of the header.
        given: the gradients of this replica.
    """
    ops = group.custom_ops
    arrays = [given.arrays[i] for i in given.summed]
    if plan is not None and ops is None:
        arrays = plan(arrays, call)
    else:
        group.guard.agree(call)
        if ops is not None and arrays:
            variables = [given.variables[i] for i in given.summed]
            arrays = _sums_by(ops, group, arrays, variables)
    for place, x in zip(given.summed, arrays, strict=True):
        given.arrays[place] = x


def _sums_by(
    ops: Any, group: ReplicaGroup, arrays: list[Array], variables: list[Variable]
) -> list[Array]:
    """Return the sums by the user's `CrossDeviceOps`, if all ranks have the same."""
    number = group.registry.next_key()
    pairs = [
        (group.registry.wrap(PerReplica, x, (number, i)), variable)
        for i, (x, variable) in enumerate(zip(arrays, variables, strict=True))
    ]
    with context.entered(group.cross_frame):  # an exception is raised on all ranks
        sums = ops.batch_reduce(ReduceOp.SUM, pairs, None)
    with group.guard.checking(APPLY):
        results = [
            as_gradient(group, x, variable, False, True)
            for x, variable in zip(sums, variables, strict=True)
        ]
        text = f"{APPLY} with gradients that `cross_device_ops` has reduced to "
        if group.guard.checks:
            text += ", ".join(checksums.summarize(x) for x in results)
    group.guard.agree(Call(text))
    return results
