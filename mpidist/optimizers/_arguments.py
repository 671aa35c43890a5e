"""The arguments of optimizers, checked: pairs, variables and gradients."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Final, TypeAlias

import numpy as np

from mpidist._base import backend, checksums
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.types import Array, DType, Nest
from mpidist._base.variable_enums import VariableSynchronization
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import component
from mpidist._values.distributed import DistributedValues, PerReplica
from mpidist._values.locality import is_same
from mpidist._values.variable import Variable, array_of, storage_of

APPLY: Final = "apply_gradients"
# NumPy's functions also take CuPy arrays (`__array_ufunc__`), but their types do not.
array_functions: Final[ModuleType] = np
Gradient: TypeAlias = Nest
"""An array, a number, a distributed value of these, or None; never a container."""


def compute_dtype(dtype: DType) -> DType:
    """Return the dtype that steps are computed in and slots are stored in."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def listed(names: list[str]) -> str:
    """Return the first names, for a message."""
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def unique(names: list[str]) -> list[str]:
    """Return the names, with a number appended to repeated ones."""
    taken: set[str] = set()
    result = []
    for name in names:
        candidates = itertools.chain(
            [name], (f"{name}_{k}" for k in itertools.count(1))
        )
        result.append(next(c for c in candidates if c not in taken))
        taken.add(result[-1])
    return result


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
    variables: list[Variable], built_for: ReplicaGroup | None, call: str
) -> ReplicaGroup:
    """Return the group of these variables.

    Raises:
        RuntimeError: if the optimizer cannot use the variables here.
    """
    frame = context.current()
    group = storage_of(variables[0]).group
    name = variables[0].name
    if frame.level is context.Level.UPDATE:
        raise RuntimeError(
            f"{call}: this code runs {frame.level.value}, which changes one variable "
            f"without communication; call `{call}` before or after the `update`"
        )
    if context.has_strategy() and frame.group is not group:
        if not group.is_mpi:
            raise RuntimeError(
                f"{call}: Variable {name!r} was created outside every scope, so each "
                f"rank has its own, but {frame.group} is the current strategy; create "
                "it in `with strategy.scope():`"
            )
        raise RuntimeError(
            f"{call}: Mixing different Strategy objects: Variable {name!r} belongs to "
            f"{group}, but {frame.group} is the current strategy; use the optimizer "
            "in the scope of its own strategy"
        )
    if built_for is not None and built_for is not group:
        raise RuntimeError(
            f"{call}: Mixing different Strategy objects: the optimizer was built for "
            f"variables of {built_for}, Variable {name!r} belongs to {group}; create "
            "an optimizer for each strategy"
        )
    return group


def check_variables(
    variables: Sequence[object], call: str, known: dict[int, int]
) -> None:
    """Raise unless these are mirrored, floating-point variables of one strategy.

    Args:
        variables: the user's argument.
        call: the name of the call.
        known: the variables, by id, of an optimizer that has its state; they are
            already checked.
    """
    if not variables:
        raise ValueError(f"{call}: expected at least one variable, got none")
    seen: set[int] = set()
    first: Variable | None = None
    for variable in variables:
        if not isinstance(variable, Variable):
            hint = (
                "; a pair is (gradient, variable), in this order"
                if call == APPLY
                else ""
            )
            raise TypeError(
                f"{call}: expected a `mpidist.Variable`, got a "
                f"{type(variable).__name__}{hint}"
            )
        if id(variable) in seen:
            raise ValueError(
                f"{call}: Variable {variable.name!r} is given twice; add its "
                "gradients, and pass it once"
            )
        seen.add(id(variable))
        first = variable if first is None else first
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
        owner, other = storage_of(variable).group, storage_of(first).group
        if owner is not other:
            raise RuntimeError(
                f"{call}: Mixing different Strategy objects: Variable {name!r} belongs "
                f"to {owner}, Variable {first.name!r} to {other}"
            )


def as_gradient(
    group: ReplicaGroup,
    gradient: Gradient,
    variable: Variable,
    in_replica: bool,
    skip: bool,
) -> Array:
    """Return this rank's gradient as an array of the variable's dtype and shape."""
    array = array_of(variable)
    if (
        type(gradient) is np.ndarray
        and isinstance(array, np.ndarray)
        and gradient.dtype == array.dtype
        and gradient.shape == array.shape
    ):
        return gradient  # the most common case
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
        raise TypeError(
            f"{call} is Variable {gradient.name!r}, which is ON_READ; write "
            "`variable.read_value()`"
        )
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
        if kind != "number" or x.dtype.kind not in "if":
            raise TypeError(
                f"{call}: expected dtype {array.dtype.name}, got {backend.describe(x)}"
                f"; write `gradient.astype({array.dtype.name!r})`"
            )
        x = x.astype(array.dtype)
    return x


@dataclasses.dataclass(frozen=True, slots=True)
class GivenGradients:
    """The gradients of one step on this rank, without those that are None."""

    arrays: list[Array]
    variables: list[Variable]
    all_variables: list[Variable]  # also those whose gradient is None
    summed: list[int]  # the places of those that are summed over the replicas
    summaries: str  # of the others, for the header

    def copied_if_views(self, *, keep_sums: bool) -> list[Array]:
        """Copy gradients that are views of variables, because the step changes these.

        Args:
            keep_sums: whether those that are summed have separate buffers. On one
                replica they have none.
        """
        owners = {id(_owner(array_of(variable))) for variable in self.all_variables}
        kept = set(self.summed) if keep_sums else ()
        return [
            x.copy() if i not in kept and id(_owner(x)) in owners else x
            for i, x in enumerate(self.arrays)
        ]


def collect(
    group: ReplicaGroup,
    gradients: list[Gradient],
    variables: list[Variable],
    in_replica: bool,
    skip: bool,
) -> GivenGradients:
    """Return this rank's gradients as arrays.

    Raises:
        TypeError, ValueError: for a gradient of another shape or dtype, or None for
            all.
    """
    taken = [i for i, g in enumerate(gradients) if g is not None]
    if not taken:
        raise ValueError(
            f"{APPLY}: No gradients provided for any variable: got None for "
            f"{listed([v.name for v in variables])}"
        )
    arrays = [
        backend.contiguous(
            as_gradient(group, gradients[i], variables[i], in_replica, skip)
        )
        for i in taken
    ]
    summed = [
        place
        for place, i in enumerate(taken)
        if not skip and (in_replica or isinstance(gradients[i], PerReplica))
    ]
    summaries = ""
    if group.guard.checks and len(summed) < len(taken):
        others = ", ".join(
            checksums.summarize(arrays[place])
            for place in sorted(set(range(len(taken))).difference(summed))
            if not is_same(group, gradients[taken[place]])
        )
        if others:
            summaries = f", given {others} (which are not per replica)"
    return GivenGradients(
        arrays, [variables[i] for i in taken], variables, summed, summaries
    )


def _owner(x: Array) -> Array:
    """Return the array whose memory this is a view of."""
    while (base := getattr(x, "base", None)) is not None and backend.is_array(base):
        x = base
    return x
