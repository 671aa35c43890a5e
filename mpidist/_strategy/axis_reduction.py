"""`Strategy.reduce` over axes: each replica reduces its array, then all combine."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from mpidist._base import backend
from mpidist._base.expect import as_int
from mpidist._base.reduce_op import RULES, ReduceOp
from mpidist._base.types import Array, DType, Nest
from mpidist._collectives import dtype_table
from mpidist._collectives.collectives import Collectives

_CALL = "Strategy.reduce"
_NO_AXES: Final = "; each replica has a number, which has no axes: write `axis=None`"


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
        result = xp.full(kept, _identity(op, x.dtype), x.dtype)
    else:
        result = function(x, axis=axes)
    return Partial(result, count, x.dtype, kind)


def reduce_same(op: ReduceOp, leaf: object, axes: tuple[int, ...]) -> Nest:
    """Reduce a value that is the same on all replicas over axes. Not collective."""
    part = reduce_axes(op, leaf, axes)
    return _result_of(op, part.array, part.elements, part)


def combine(collectives: Collectives, op: ReduceOp, parts: list[Partial]) -> list[Nest]:
    """Combine the partial results of all replicas. Collective.

    Raises:
        ValueError: for MIN and MAX, if no replica has any elements.
    """
    how = ReduceOp(RULES[op].combining)
    call = f"{_CALL} {op.name} over axes"
    arrays = [part.array for part in parts]
    counts = np.array([part.elements for part in parts], np.int64)
    if how is ReduceOp.SUM:
        arrays, totals = collectives.all_reduce(how, (arrays, counts), call=call)
    else:
        totals = collectives.all_reduce(ReduceOp.SUM, counts, call=call)
        arrays = collectives.all_reduce(how, arrays, call=call)
    if op in (ReduceOp.MIN, ReduceOp.MAX) and not all(totals):
        raise ValueError(
            f"{_CALL}: {op.name} over an axis that has no elements on any replica"
        )
    return [_result_of(op, *row) for row in zip(arrays, totals, parts, strict=True)]


def _result_of(op: ReduceOp, reduced: Any, total: int, part: Partial) -> Nest:
    """Return the result of all parts, given what they and their elements add up to."""
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
