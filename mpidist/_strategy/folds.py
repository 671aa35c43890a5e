"""Reductions beyond one all-reduce: over the axes of arrays, and by a user's function.

Over axes each replica reduces its array, and then all combine what they have.

A function may be anything that combines two arrays, such as a product of matrices, so
each rank has to see all components: an all-gather, then ``f(f(x0, x1), x2)`` and so on,
on every rank. In a section of the guard, as user code: an exception on one rank is told
to all, and the results, which must have the same bits, are compared.
"""

from __future__ import annotations

import math
import types
from typing import Any, Final, NamedTuple

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._agreement.sections import SectionResult, run_section
from mpidist._base import backend, checksums, nest
from mpidist._base.expect import as_int
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.options import CallOptions
from mpidist._base.reduce_op import RULES, ReduceFunction, ReduceOp, check_function
from mpidist._base.types import Array, DType, Nest
from mpidist._collectives import dtype_table
from mpidist._collectives.collectives import Collectives
from mpidist._merge.argument_equality import fingerprint_of_function
from mpidist._merge.object_parts import function_in
from mpidist._runtime.group import ReplicaGroup
from mpidist._strategy.contexts import warn_of_own_value
from mpidist._values.components import component_of, differs

_CALL: Final = "Strategy.reduce"
_NO_AXES: Final = "; each replica has a number, which has no axes: write `axis=None`"
_SHOWN_BITS: Final = 0xFFFFFF  # of a fingerprint: six digits


def fold(
    group: ReplicaGroup,
    function: ReduceFunction,
    tree: Nest,
    options: CallOptions,
    call: str,
) -> Nest:
    """Fold each leaf of a nest over the ranks, in their order. Collective.

    Args:
        group: the replicas.
        function: takes two arrays of the shape and dtype of a leaf, returns another.
        tree: this rank's components: arrays and numbers.
        options: of this call.
        call: the name of the call in messages.

    Returns:
        The nest of results, new arrays, with the same bits on all ranks.
    """
    if not group.is_mpi:
        warn_of_own_value()
    call = f"{call} with {_name_of(function)}"
    collectives = group.collectives
    with collectives.guard.checking(call):
        if type(function).__module__ == "mpi4py.MPI":
            raise TypeError(
                f"{call}: got an operation of mpi4py, which combines Python objects; "
                'write "SUM", "MAX", "MIN" or "PROD", or a function of two arrays, '
                "such as `numpy.logical_and`"
            )
        check_function(function, call)
        leaves, structure = nest.flatten(tree)
        if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
            raise TypeError(f"{call}: got IndexedSlices; reduce a dense array")
        pairs = backend.as_arrays(leaves, structure, call)
        rows = structure.unflatten([array[None] for array, _ in pairs])
    gathered = nest.flatten(collectives.all_gather(rows, 0, options, call))[0]

    def body(section: SectionResult) -> list[Array]:
        section.kind = "raised"
        results = [
            _fold_rows(function, x, kind, call)
            for x, (_, kind) in zip(gathered, pairs, strict=True)
        ]
        if group.guard.checks:
            text = ", ".join(checksums.summarize(x) for x in results)
            section.set_result(f"giving {text}")
        return results

    results = run_section(group.guard, Call(f"{call}, the function"), body)
    return structure.unflatten(backend.restore_all(results, pairs))


def reduce_with(
    group: ReplicaGroup, function: ReduceFunction, value: Nest, axis: object
) -> Nest:
    """Fold the components of per-replica values: `Strategy.reduce`. Collective."""
    with group.guard.checking(_CALL):
        if axis is not None:
            raise TypeError(
                f"{_CALL}: expected axis=None with a function, got axis={axis!r}; "
                "reduce over the axes of each array in the replica function, as by "
                "`numpy.logaddexp.reduce(x, axis=0)`"
            )
        leaves, structure = nest.flatten(value)
        for leaf in leaves:
            group.registry.check(_CALL, leaf)
            if group.is_mpi and not differs(leaf):
                raise ValueError(
                    f"{_CALL}: expected a PerReplica with a function, got "
                    f"{leaf!r:.80}, which is not per replica; pass what `strategy.run` "
                    "returned"
                )
        own = structure.unflatten([component_of(leaf) for leaf in leaves])
    return fold(group, function, own, None, _CALL)


def _fold_rows(
    function: ReduceFunction, rows: Array, kind: backend.LeafKind, call: str
) -> Array:
    """Return the fold of all rows of an array; it is not a view of it.

    The function gets arrays of the library that the leaf was of.
    """
    result: Array = rows[0, ...]
    for number in range(1, len(rows)):
        given = [backend.as_given(x, kind) for x in (result, rows[number, ...])]
        result = _checked(function(*given), rows, call)
    return result.copy()


def _checked(returned: object, rows: Array, call: str) -> Array:
    x, kind = backend.as_array(returned, f"{call}, the result of the function")
    if kind == "number" and backend.fits(x, rows.dtype):
        x = x.astype(rows.dtype)  # Python's float for a 0-d float32
    if x.dtype != rows.dtype or x.shape != rows.shape[1:]:
        one = backend.describe(rows[0, ...])
        raise TypeError(
            f"{call}: expected the function to return {one}, as its two arguments are, "
            f"got {backend.describe(x)}; convert the values before the call, or the "
            "result in the function"
        )
    return backend.like(rows, x) if type(x) is not type(rows) else x


def _name_of(function: ReduceFunction) -> str:
    """Return a text that is the same on all ranks if the function is."""
    inner: object = function_in(function)
    if isinstance(inner, np.ufunc):
        return f"numpy.{inner.__name__}"
    if isinstance(inner, types.FunctionType):
        digits = fingerprint_of_function(inner) & _SHOWN_BITS
        return f"{inner.__qualname__.rpartition('<locals>.')[2]} #{digits:06x}"
    name = getattr(inner, "__qualname__", None) or getattr(inner, "__name__", None)
    return str(name or type(inner).__qualname__)


# --- over axes ----------------------------------------------------------------------


class Partial(NamedTuple):
    """The array of one replica, reduced over axes."""

    array: Array
    elements: int  # the number that each of its elements combines
    dtype: DType  # of the array before the reduction
    kind: backend.LeafKind


def as_axes(axis: object) -> tuple[int, ...] | None:
    """Return the axes as a tuple; None for None.

    Raises:
        TypeError: if ``axis`` is not an int, a tuple or list of ints or None.
    """
    if axis is None:
        return None
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    kind = "an int, a tuple of ints or None"
    return tuple(as_int(_CALL, "axis", one, kind=kind) for one in axes)


def reduce_axes(op: ReduceOp, leaf: object, axes: tuple[int, ...]) -> Partial:
    """Reduce one replica's array over its axes. Not collective.

    Raises:
        TypeError: if it is not an array.
        ValueError: if an axis is out of range.
    """
    x: Array
    x, kind = backend.as_array(leaf, _CALL)
    entry = dtype_table.reduction(x.dtype, op, _CALL)
    for axis in axes:
        if not -x.ndim <= axis < x.ndim:
            limits = f"-{x.ndim} <= axis < {x.ndim}" if x.ndim else "axis=None"
            raise ValueError(
                f"{_CALL}: expected {limits} for "
                f"{backend.describe(x)}, got axis={axis}{'' if x.ndim else _NO_AXES}"
            )
    xp = backend.module_of(x)
    function = getattr(xp, RULES[op].numpy)
    count = math.prod(x.shape[axis] for axis in axes)
    if op in (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD):
        result = function(x, axis=axes, dtype=entry.compute)
    elif count == 0:
        reduced = {axis % x.ndim for axis in axes}
        kept = [n for k, n in enumerate(x.shape) if k not in reduced]
        result = xp.full(kept, _identity(op, x.dtype), x.dtype)[()]  # as numpy.max
    else:
        result = function(x, axis=axes)
    return Partial(result, count, x.dtype, kind)


def reduce_same(op: ReduceOp, leaf: object, axes: tuple[int, ...]) -> Nest:
    """Reduce a value that is the same on all replicas over axes. Not collective."""
    part = reduce_axes(op, leaf, axes)
    return _result_of(op, part.array, part.elements, part)


def combine(
    collectives: Collectives, op: ReduceOp, parts: list[Partial], axes: tuple[int, ...]
) -> list[Nest]:
    """Combine the partial results of all replicas. Collective."""
    how = ReduceOp(RULES[op].combining)
    # What the partial results do not show, but all ranks must have in common:
    dtypes = ", ".join(str(part.dtype) for part in parts)
    call = f"{_CALL} {op.name} of {dtypes} over axes {axes}:"
    arrays = [part.array for part in parts]
    counts = np.array([part.elements for part in parts], np.int64)
    if how is ReduceOp.SUM:
        arrays, totals = collectives.all_reduce(how, (arrays, counts), call=call)
    else:
        totals = collectives.all_reduce(ReduceOp.SUM, counts, call=call)
        arrays = collectives.all_reduce(how, arrays, call=call)
    return [_result_of(op, *row) for row in zip(arrays, totals, parts, strict=True)]


def _result_of(op: ReduceOp, reduced: Any, total: int, part: Partial) -> Nest:
    """Return the result of all parts, given what they and their elements add up to.

    Raises:
        ValueError: for MIN and MAX, if no replica has any elements.
    """
    if op in (ReduceOp.MIN, ReduceOp.MAX) and not total:
        raise ValueError(
            f"{_CALL}: {op.name} over an axis that has no elements on any replica"
        )
    entry = dtype_table.reduction(part.dtype, op, _CALL)
    if op is ReduceOp.MEAN:
        with np.errstate(invalid="ignore", divide="ignore"):
            reduced = np.true_divide(reduced, entry.compute.type(total))
    result = reduced.astype(entry.result, copy=False)
    return backend.as_given(result, part.kind)


def _identity(op: ReduceOp, dtype: DType) -> bool | int | float:
    """Return what MIN or MAX of no elements is."""
    if dtype.kind == "b":
        return op is ReduceOp.MIN
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return int(limits.max if op is ReduceOp.MIN else limits.min)
    return np.inf if op is ReduceOp.MIN else -np.inf
