"""The state of an optimizer, and how a step changes the variables in place.

Variables are changed block by block. A block fits into a core's cache, so that the many
operations of a step read and write memory once. All blocks share their scratch memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from mpidist._base import backend
from mpidist._base.types import Array, DType, HostArray
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.variable import Variable, array_of
from mpidist.optimizers._arguments import (
    GivenGradients,
    array_functions,
    compute_dtype,
    listed,
    unique,
)
from mpidist.optimizers._clipping import Clipping, blocks
from mpidist.optimizers._rule import Block, Numbers

Formula = Callable[[Array, Array, Block, Numbers], None]
"""`Optimizer._step` of a class."""


@dataclasses.dataclass(frozen=True)
class _Target:
    """One variable with its slots, laid out for the update; created once."""

    array: Array
    copy: Array | None  # in C order, of an array that is not in C order
    blocks: tuple[Block, ...]

    def update(
        self,
        formula: Formula,
        gradient: Array,
        scale: Array | None,
        limit: float | None,
        constants: Numbers,
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
            formula(w, g, block, constants)
            if block.wide is not None:
                block.w[...] = w
        if copy is not None:
            array[...] = copy


def _lay_out(
    variables: list[Variable], slots: list[tuple[Variable, ...]]
) -> list[_Target]:
    """Divide all variables and their slots into blocks, with shared scratch memory."""
    scratch: dict[DType, list[Array]] = {}
    targets = {}
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
        narrow = dtype != array.dtype
        made = []
        for part in parts:
            t, u, wide = (x[: part.stop - part.start] for x in scratch[dtype])
            own = tuple(slot[part] for slot in flat_slots)
            made.append(Block(part, flat[part], own, t, u, wide if narrow else None))
        targets[index] = _Target(array, copy, tuple(made))
    return [targets[index] for index in range(len(variables))]


class State:
    """The state of an optimizer that has been built. Creating one is collective.

    Args:
        group: of the variables.
        variables: that the optimizer changes.
        decayed: for each of them, whether its weights decay.
        name: of the optimizer.
        slot_names: the slots that each variable has.

    Attributes:
        iterations: the number of completed steps.
        slots: of each variable.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        variables: list[Variable],
        decayed: list[bool],
        name: str,
        slot_names: tuple[str, ...],
    ) -> None:
        def make(initial: Callable[[], HostArray], what: str) -> Variable:
            return Variable(initial, trainable=False, name=f"{name}/{what}")

        self.group = group
        self.variables = variables
        with context.entered(group.cross_frame):
            self.iterations = make(lambda: np.zeros((), np.int64), "iterations")
            self.slots = [
                tuple(make(_zeros_for(v), f"{slot}/{its_name}") for slot in slot_names)
                for v, its_name in zip(
                    variables, unique([v.name for v in variables]), strict=True
                )
            ]
        self._decayed = decayed
        self.index = {id(variable): i for i, variable in enumerate(variables)}
        self._targets: list[_Target] = []  # made by the first step

    def check_known(self, variables: list[Variable], call: str) -> None:
        """Raise a ValueError if one of the variables is not of this state."""
        for variable in variables:
            if id(variable) not in self.index:
                known = [v.name for v in self.variables]
                raise ValueError(
                    f"{call}: Variable {variable.name!r} {backend.describe(variable)} "
                    f"is not one of those that the optimizer was built for: "
                    f"{listed(known)}; pass all variables to `optimizer.build"
                    "(variables)` first, or create another optimizer for this one"
                )

    def prepare(self) -> None:
        """Allocate the memory that steps need."""
        if not self._targets:
            self._targets = _lay_out(self.variables, self.slots)

    def update(
        self,
        formula: Formula,
        constants: tuple[Numbers, Numbers],
        clipping: Clipping,
        scratch: Array,
        given: GivenGradients,
    ) -> None:
        """Apply one step to this rank's copies. Not collective, and does not fail.

        Args:
            formula: `Optimizer._step` of the optimizer.
            constants: from `Optimizer._constants`, without and with decay.
            clipping: of the gradients.
            scratch: the memory that clipping needs.
            given: the gradients, summed over the replicas, and their variables.
        """
        with np.errstate(all="ignore"):
            scales = clipping.scales(given.arrays, scratch)
            limit = clipping.clipvalue
            for variable, gradient, scale in zip(
                given.variables, given.arrays, scales, strict=True
            ):
                index = self.index[id(variable)]
                numbers = constants[self._decayed[index]]
                self._targets[index].update(formula, gradient, scale, limit, numbers)
            count = array_of(self.iterations)
            array_functions.add(count, 1, out=count)


def _zeros_for(variable: Variable) -> Callable[[], HostArray]:
    return lambda: np.zeros(variable.shape, compute_dtype(variable.dtype))
