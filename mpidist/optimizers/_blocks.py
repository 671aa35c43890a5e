"""The update of variables in place, block by block.

A block fits into a core's cache, so that the many operations of a step read and write
memory once. All blocks share their scratch memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mpidist._base import backend
from mpidist._base.types import Array, DType
from mpidist._values.variable import Variable, array_of
from mpidist.optimizers._arguments import array_functions, compute_dtype
from mpidist.optimizers._clipping import blocks

Formula = Callable[
    [Array, Array, tuple[Array, ...], Array, Array, tuple[float, ...]], None
]
"""`Optimizer._step` of a class: the weights, gradient, slots, scratch, constants."""


@dataclasses.dataclass(frozen=True)
class _Block:
    """A part of a variable that is processed at a time, and its scratch memory."""

    part: slice
    w: Array
    slots: tuple[Array, ...]
    t: Array
    u: Array
    wide: Array | None  # None if the step is computed in the variable's own dtype


@dataclasses.dataclass(frozen=True)
class Target:
    """One variable with its slots, laid out for the update; created once."""

    variable: Variable
    index: int
    array: Array
    copy: Array | None  # in C order, of an array that is not in C order
    blocks: tuple[_Block, ...]

    def update(
        self,
        formula: Formula,
        gradient: Array,
        scale: Array | None,
        limit: float | None,
        constants: tuple[float, ...],
    ) -> None:
        """Apply one step to this rank's copy of the variable. Not collective.

        Args:
            formula: `Optimizer._step` of the optimizer.
            gradient: the sum over the replicas, in C order.
            scale: the factor for the gradient; None: 1.
            limit: the maximum magnitude of its elements; None: none.
            constants: from `Optimizer._constants`.
        """
        array, copy = self.array, self.copy
        if copy is not None:
            copy[...] = array
        gradient = backend.flat(gradient)
        if scale is not None:
            scale = scale.astype(compute_dtype(array.dtype))
        for block in self.blocks:
            w, g = block.w, gradient[block.part]
            if block.wide is not None:
                g = block.u
                g[...] = gradient[block.part]
                w = block.wide
                w[...] = block.w
            if scale is not None:
                g = array_functions.multiply(g, scale, out=block.u)
            if limit is not None:
                g = array_functions.minimum(g, limit, out=block.u)
                g = array_functions.maximum(g, -limit, out=block.u)
            formula(w, g, block.slots, block.t, block.u, constants)
            if block.wide is not None:
                block.w[...] = w
        if copy is not None:
            array[...] = copy


def lay_out(
    variables: list[Variable], slots: list[tuple[Variable, ...]]
) -> list[Target]:
    """Divide all variables and their slots into blocks, with shared scratch memory."""
    scratch: dict[DType, list[Array]] = {}
    targets = []
    # The largest first: its scratch memory suffices for all others of its dtype.
    sizes = [variable.size for variable in variables]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        array = array_of(variables[index])
        copy = None if array.flags.c_contiguous else backend.contiguous(array)
        flat = backend.flat(array if copy is None else copy)
        flat_slots = [backend.flat(array_of(slot)) for slot in slots[index]]
        parts = list(blocks(flat))
        dtype = compute_dtype(array.dtype)
        if parts and dtype not in scratch:
            scratch[dtype] = [
                backend.empty_like(flat, (parts[0].stop,), dtype) for _ in range(3)
            ]
        made = []
        for part in parts:
            t, u, wide = (x[: part.stop - part.start] for x in scratch[dtype])
            narrow = dtype != array.dtype
            own = tuple(slot[part] for slot in flat_slots)
            made.append(_Block(part, flat[part], own, t, u, wide if narrow else None))
        targets.append(Target(variables[index], index, array, copy, tuple(made)))
    return sorted(targets, key=lambda target: target.index)
