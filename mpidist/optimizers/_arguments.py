"""Checks of optimizer arguments: pairs, variables and gradients."""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np

from mpidist._base import backend
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.options import VariableSynchronization
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.distributed import DistributedValues, PerReplica
from mpidist._values.variable import Variable

APPLY: Final = "apply_gradients"


def array_of(variable: Variable) -> Any:
    """Return this rank's copy of a variable, for changing it in place.

    The only function that accesses a variable's internals. Use it only for changes that
    are identical on all ranks.
    """
    return variable._array


def compute_dtype(dtype: Any) -> Any:
    """Return the dtype that steps are computed in and slots are stored in."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def listed(names: list[str]) -> str:
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


def split_pairs(pairs: list[Any]) -> tuple[list[Any], list[Any]]:
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(
                f"{APPLY}: expected (gradient, variable) pairs, got {pair!r:.80}; "
                "write `apply_gradients(zip(gradients, variables, strict=True))`"
            )
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def variables_among(given: list[Any]) -> list[Variable]:
    """Return the variables of an MPI strategy among given objects or pairs."""
    each = [x for g in given for x in (g if isinstance(g, (list, tuple)) else (g,))]
    return [x for x in each if isinstance(x, Variable) and x._group.is_mpi]


def check_variables(variables: list[Any], call: str, known: dict[int, int]) -> None:
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
                f"{call}: Variable {variable.name!r} is there twice; add up its "
                "gradients, and pass it once"
            )
        seen.add(id(variable))
        if id(variable) in known and id(variables[0]) in known:
            continue
        name = variable.name
        if variable.synchronization is VariableSynchronization.ON_READ:
            raise ValueError(
                f"{call}: Variable {name!r} is ON_READ, so each replica has another "
                "value; an optimizer changes mirrored variables"
            )
        dtype = variable.dtype
        if dtype.kind != "f" and not backend.is_bfloat16(dtype):
            raise TypeError(
                f"{call}: expected variables of floating dtypes, got Variable {name!r} "
                f"of {dtype.name}"
            )
        other = variables[0]._group
        if variable._group is not other:
            raise RuntimeError(
                f"{call}: Mixing different Strategy objects: Variable {name!r} belongs "
                f"to {variable._group}, Variable {variables[0].name!r} to "
                f"{other}"
            )


def as_gradient(
    group: ReplicaGroup, gradient: Any, variable: Variable, in_replica: bool, skip: bool
) -> Any:
    """Return this rank's gradient as an array of the variable's dtype and shape."""
    array = array_of(variable)
    if (
        type(gradient) is np.ndarray
        and type(array) is np.ndarray
        and gradient.dtype == array.dtype
        and gradient.shape == array.shape
    ):
        return gradient  # the most common case
    call = f"{APPLY}: the gradient of Variable {variable.name!r}"
    group.registry.check(APPLY, gradient)
    if isinstance(gradient, IndexedSlices):
        raise TypeError(
            f"{call}: got IndexedSlices, and optimizers take arrays; write "
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
            f"{call} is a PerReplica, which has to be reduced; leave out "
            "`skip_gradients_aggregation`"
        )
    if isinstance(gradient, DistributedValues):
        gradient = gradient._own
    x, kind = backend.as_array(gradient, call)
    if tuple(x.shape) != tuple(array.shape):
        raise ValueError(
            f"{call}: expected shape {tuple(array.shape)}, got {backend.describe(x)}"
        )
    if backend.is_device_array(x) != backend.is_device_array(array):
        if kind == "array":
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


def apart(arrays: dict[int, Any], variables: list[Variable]) -> dict[int, Any]:
    """Copy gradients that are views of variables, because the step changes these.

    Gradients that are not reduced, for example on one replica, have no separate
    buffers.
    """
    owners = {id(_owner(array_of(variable))) for variable in variables}
    return {i: x.copy() if id(_owner(x)) in owners else x for i, x in arrays.items()}


def _owner(x: Any) -> Any:
    """Return the array whose memory this is a view of."""
    while (base := getattr(x, "base", None)) is not None and backend.is_array(base):
        x = base
    return x
