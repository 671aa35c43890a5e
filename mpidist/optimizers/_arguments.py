"""The arguments of optimizers, checked: numbers, variables and their gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final, TypeAlias

import numpy as np

from mpidist._base import backend, checksums
from mpidist._base.expect import expect
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.names import listed
from mpidist._base.types import Array, DType, Nest
from mpidist._base.variable_enums import VariableSynchronization
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import component
from mpidist._values.components import check_owner
from mpidist._values.distributed import DistributedValues, PerReplica
from mpidist._values.variable import Variable, array_of, is_same, storage_of

APPLY: Final = "apply_gradients"
# NumPy's functions also take CuPy arrays (`__array_ufunc__`), but their types do not.
array_functions: Final[ModuleType] = np
Gradient: TypeAlias = Nest
"""An array, a number, a distributed value of these, or None; never a container."""


def split_pairs(
    pairs: list[tuple[Gradient, Variable]],
) -> tuple[list[Gradient], list[Variable]]:
    """Return the gradients and the variables.

    Raises:
        ValueError: if an item is not a pair.
    """
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(
                f"{APPLY}: expected (gradient, variable) pairs, got {pair!r:.80}; "
                "write `apply_gradients(zip(gradients, variables, strict=True))`"
            )
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def group_among(
    given: Sequence[object], built_for: ReplicaGroup | None
) -> ReplicaGroup:
    """Return the group that reports a wrong argument to the other ranks.

    Outside every scope, and before the first `Optimizer.build`, the variables among the
    given objects or pairs determine it.
    """
    current = context.current().group
    if context.has_strategy():
        return current
    if built_for is not None:
        return built_for
    for item in given:
        for x in item if isinstance(item, (list, tuple)) else (item,):
            if isinstance(x, Variable) and storage_of(x).group.is_mpi:
                return storage_of(x).group
    return current


def group_for(
    variables: list[Variable],
    known: dict[int, int],
    built_for: ReplicaGroup | None,
    call: str,
) -> tuple[ReplicaGroup, bool]:
    """Return the group of variables, checked, and whether all ranks make one call.

    If not, each replica makes it.

    Args:
        variables: the user's argument.
        known: the variables, by id, of an optimizer that has its state; they are
            already checked.
        built_for: the group of that.
        call: the name of the call.

    Raises:
        TypeError, ValueError: unless they are mirrored, floating-point variables of one
            strategy.
        RuntimeError: if the optimizer cannot use the variables here.
    """
    _check_variables(variables, call, known)
    frame = context.current()
    first = variables[0]
    group = storage_of(first).group
    if frame.level is context.Level.UPDATE:
        raise RuntimeError(
            f"{call}: this code runs {frame.level.value}, which changes one variable "
            f"without communication; call `{call}` before or after the `update`"
        )
    if frame.group is not group and context.has_strategy():
        if not group.is_mpi:
            raise RuntimeError(
                f"{call}: Variable {first.name!r} was created outside every scope, so "
                f"each rank has its own, but {frame.group} is the current strategy; "
                "create it in `with strategy.scope():`"
            )
        raise RuntimeError(
            f"{call}: Mixing different Strategy objects: Variable {first.name!r} "
            f"belongs to {group}, but {frame.group} is the current strategy; use the "
            "optimizer in the scope of its own strategy"
        )
    if built_for is not None and built_for is not group:
        raise RuntimeError(
            f"{call}: Mixing different Strategy objects: the optimizer was built for "
            f"variables of {built_for}, Variable {first.name!r} belongs to {group}; "
            "create an optimizer for each strategy"
        )
    in_replica = frame.group is group and frame.level is context.Level.REPLICA
    return group, group.is_mpi and not in_replica


def _check_variables(variables: list[Any], call: str, known: dict[int, int]) -> None:
    if not variables:
        raise ValueError(f"{call}: expected at least one variable, got none")
    seen: set[int] = set()
    for variable in variables:
        if not isinstance(variable, Variable):
            hint = "a pair is (gradient, variable), in this order" * (call == APPLY)
            expect(False, call, "a `mpidist.Variable`", variable, hint)
        if id(variable) in seen:
            raise ValueError(
                f"{call}: Variable {variable.name!r} is given twice; add its "
                "gradients, and pass it once"
            )
        seen.add(id(variable))
        if id(variable) in known and id(variables[0]) in known:
            continue
        name = variable.name
        if variable.synchronization is VariableSynchronization.ON_READ:
            raise ValueError(
                f"{call}: Variable {name!r} is ON_READ, so its copies differ; an "
                "optimizer changes mirrored variables: create it without "
                "`synchronization`"
            )
        dtype = variable.dtype
        if backend.number_kind(dtype) != "f":
            raise TypeError(
                f"{call}: expected variables of floating dtypes, got Variable {name!r} "
                f"of {dtype.name}"
            )
        check_owner(storage_of(variables[0]).group, call, variable)


# --- gradients ----------------------------------------------------------------------


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
        x = _cast(x, kind, array.dtype, call)
    return backend.contiguous(x)


def _cast(x: Array, kind: str, dtype: DType, call: str) -> Array:
    """Return a gradient in a variable's dtype, if it is of floats or a Python int."""
    of_int = kind == "number" and x.dtype.kind == "i"
    if backend.number_kind(x.dtype) != "f" and not of_int:
        write = f"gradient.astype({dtype.name!r})"
        if x.dtype.kind == "c":
            write = "gradient.real"
        raise TypeError(
            f"{call}: expected dtype {dtype.name}, got {backend.describe(x)}; write "
            f"`{write}`"
        )
    return x.astype(dtype)


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
        _copy_views(given.arrays, kept, variables)
    return given


def _copy_views(
    arrays: list[Array], kept: list[int], variables: list[Variable]
) -> None:
    """Copy gradients that are views of variables, and would change in the update."""
    owners = set(map(id, map(_owner, map(array_of, variables))))
    for i, x in enumerate(arrays):
        if i not in kept and id(_owner(x)) in owners:
            arrays[i] = x.copy()


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
