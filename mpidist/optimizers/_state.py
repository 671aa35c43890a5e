"""The state of an optimizer, and how a step sums gradients and changes the variables.

Variables are changed block by block. A block fits into a core's cache, so that the many
operations of a step read and write memory once. All blocks share their scratch memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._base import backend, checksums, partition
from mpidist._base.errors import CheckpointError
from mpidist._base.names import listed, unique
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array, DType, HostArray, Nest, record
from mpidist._collectives.plan import Plan
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.arguments import check_attributes
from mpidist._values.distributed import PerReplica
from mpidist._values.storage import Part
from mpidist._values.variable import Variable, array_of, set_up, storage_of
from mpidist.optimizers._arguments import (
    APPLY,
    GivenGradients,
    array_functions,
    as_gradient,
)
from mpidist.optimizers._clipping import blocks, norm_scratch, scales_for

Numbers = tuple[float, ...]


@record
class Block:
    """A block of a variable and of its slots, and scratch memory: all flat.

    ``t``, ``u`` and ``wide`` are scratch memory of the same size. ``u`` may be the
    gradient itself: write to it only in or after the last use of that. ``wide`` is None
    if the step is computed in the variable's own dtype.
    """

    part: slice
    w: Array
    slots: tuple[Array, ...]
    t: Array
    u: Array
    wide: Array | None


Formula = Callable[[Array, Array, Block, Numbers], None]
"""`Optimizer._step` of a class."""
_BYTES_AT_ONCE: Final = 1 << 24  # of sharded variables, while the parts are shared


def _update(
    block: Block,
    formula: Formula,
    gradient: Array,
    scale: Array | None,
    limit: float | None,
    constants: Numbers,
) -> None:
    """Apply one step to a block of this rank's copy. Not collective.

    Args:
        block: what to change.
        formula: `Optimizer._step` of the optimizer.
        gradient: of the whole variable, flat: the sum over the replicas.
        scale: the factor for the gradient; None: 1.
        limit: the maximum magnitude of its elements; None: none.
        constants: from `Optimizer._constants`.
    """
    w, g = block.w, gradient[block.part]
    if block.wide is not None:
        block.u[...] = g
        block.wide[...] = w
        w, g = block.wide, block.u
    if scale is not None:
        g = array_functions.multiply(g, scale, out=block.u)
    if limit is not None:
        g = array_functions.minimum(g, limit, out=block.u)
        g = array_functions.maximum(g, -limit, out=block.u)
    formula(w, g, block, constants)
    if block.wide is not None:
        block.w[...] = w


def _lay_out(
    variables: list[Variable], slots: list[tuple[Variable, ...]], parts: list[slice]
) -> list[list[Block]]:
    """Divide all variables and their slots into blocks, with shared scratch memory."""
    scratch: dict[DType, list[Array]] = {}
    made: list[list[Block]] = [[] for _ in variables]
    # The largest first: its scratch memory suffices for all others of its dtype.
    sizes = [part.stop - part.start for part in parts]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        flat = backend.flat(array_of(variables[index]))[parts[index]]
        flat_slots = [backend.flat(array_of(slot)) for slot in slots[index]]
        dtype = backend.widened(flat.dtype)
        narrow = dtype != flat.dtype
        for part in blocks(flat):
            if dtype not in scratch:
                scratch[dtype] = [
                    backend.empty_like(flat, (part.stop,), dtype) for _ in range(3)
                ]
            t, u, wide = (x[: part.stop - part.start] for x in scratch[dtype])
            own = tuple(slot[part] for slot in flat_slots)
            start = parts[index].start
            place = slice(start + part.start, start + part.stop)
            made[index].append(
                Block(place, flat[part], own, t, u, wide if narrow else None)
            )
    return made


def _described(x: Nest) -> str:
    return "nothing" if x is None else backend.describe(x)


def counter(name: str) -> Variable:
    """Return a new variable for the completed steps of an optimizer. Collective."""
    return Variable(np.zeros((), np.int64), trainable=False, name=f"{name}/iterations")


class State:
    """The state of an optimizer that has been built. Creating one is collective.

    Args:
        group: of the variables.
        variables: that the optimizer changes.
        decayed: for each of them, whether its weights decay.
        name: of the optimizer.
        slot_names: the slots that each variable has.
        shard: whether each rank has, and updates, only a part of the elements.
        iterations: None, or that the program has read already.

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
        shard: bool,
        iterations: Variable | None,
    ) -> None:
        def make_slot(variable: Variable, part: slice, what: str) -> Variable:
            dtype, slot = backend.widened(variable.dtype), f"{name}/{what}"
            if not self._is_sharded:
                return Variable(
                    lambda: np.zeros(variable.shape, dtype), trainable=False, name=slot
                )
            own = np.zeros(part.stop - part.start, dtype)
            attributes = check_attributes(False, slot, "ON_READ", "SUM")
            place = Part(variable.shape, part.start)
            return set_up(None, group, own, attributes, place)

        self.group = group
        self.variables = variables
        self._is_sharded = shard and group.num_replicas > 1
        self._parts = self._own_parts()
        names = unique([v.name for v in variables])
        with group.cross_frame:
            self.iterations = counter(name) if iterations is None else iterations
            self.slots = [
                tuple(make_slot(v, part, f"{slot}/{own}") for slot in slot_names)
                for v, part, own in zip(variables, self._parts, names, strict=True)
            ]
        self._decayed = decayed
        self.index = {id(variable): i for i, variable in enumerate(variables)}
        self._blocks: list[list[Block]] = []  # made by the first step
        self._scratch: Array = np.empty(0)  # for norms of gradients

    def _own_parts(self) -> list[slice]:
        """Return the elements of each variable that this rank changes."""
        if not self._is_sharded:
            return [slice(0, variable.size) for variable in self.variables]
        by_dtype: dict[DType, list[int]] = {}
        for i, variable in enumerate(self.variables):
            by_dtype.setdefault(variable.dtype, []).append(i)
        parts = [slice(0, 0)] * len(self.variables)
        for members in by_dtype.values():
            sizes = [self.variables[i].size for i in members]
            divided = partition.evenly(sizes, self.group.num_replicas)
            for place, start, stop in divided.pieces(self.group.replica_id):
                parts[members[place]] = slice(start, stop)
        return parts

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

    def prepared(
        self, arrays: dict[str, HostArray], partial: bool, path: str, call: str
    ) -> list[tuple[Variable, Array]]:
        """Return the variables of this state, and what to restore them to.

        Raises:
            CheckpointError: if the arrays, which a checkpoint has for their names, are
                others than these variables; with ``partial``, if one does not fit.
        """
        own = {v.name: v for v in (self.iterations, *itertools.chain(*self.slots))}
        # One that was saved before it was built has no slots.
        partial = partial or [*arrays] == [self.iterations.name]
        wrong = [] if partial else sorted(own.keys() ^ arrays.keys())
        for name in own.keys() & arrays.keys():
            x, v = arrays[name], own[name]
            if (x.dtype, x.shape) != (v.dtype, v.shape):
                wrong.append(name)
        if wrong:
            raise CheckpointError(
                f"{call}: the checkpoint {path!r}, restored before, does not fit: "
                + "; ".join(
                    f"{name!r}: expected {_described(own.get(name))}, got "
                    f"{_described(arrays.get(name))}"
                    for name in sorted(wrong)[:5]
                )
            )
        return [
            (v, storage_of(v).own_part(storage_of(v).prepare("assign", arrays[name])))
            for name, v in own.items()
            if name in arrays
        ]

    def prepare(self, limits: dict[str, float], arrays: list[Array]) -> None:
        """Allocate the memory that a step needs.

        Args:
            limits: of the gradients, from `check_limits`.
            arrays: the gradients.
        """
        if not self._blocks:
            self._blocks = _lay_out(self.variables, self.slots, self._parts)
        if limits and "clipvalue" not in limits:
            self._scratch = norm_scratch(arrays)

    def find_plan(self, given: GivenGradients) -> Plan | None:
        """Return how gradients are summed; None if there is nothing to sum."""
        if self.group.num_replicas == 1 or not given.summed:
            return None
        arrays = [given.arrays[i] for i in given.summed]
        places = (self.index[id(given.variables[i])] for i in given.summed)
        return self.group.collectives.plans.find(arrays, APPLY, self, places)

    def sum(self, plan: Plan | None, call: Call, given: GivenGradients) -> None:
        """Put the sums over the replicas in the gradients' places. Collective.

        Nothing changes before all ranks have agreed.

        Args:
            plan: from `find_plan`.
            call: the contents of the header.
            given: the gradients of this replica.
        """
        ops = self.group.custom_ops
        arrays = [given.arrays[i] for i in given.summed]
        if plan is not None and ops is None:
            arrays = plan(arrays, call)
        else:
            self.group.guard.agree(call)
            if ops is not None and arrays:
                variables = [given.variables[i] for i in given.summed]
                arrays = _sums_by(ops, self.group, arrays, variables)
        for place, x in zip(given.summed, arrays, strict=True):
            given.arrays[place] = x

    def update(
        self,
        formula: Formula,
        constants: tuple[Numbers, Numbers],
        limits: dict[str, float],
        given: GivenGradients,
    ) -> None:
        """Apply one step to this rank's part. Not collective, and does not fail.

        Args:
            formula: `Optimizer._step` of the optimizer.
            constants: from `Optimizer._constants`, without and with decay.
            limits: of the gradients, from `check_limits`.
            given: the gradients, summed over the replicas, and their variables.
        """
        with np.errstate(all="ignore"):
            limit = limits.get("clipvalue")
            scales: Sequence[Array | None] = [None] * len(given.arrays)
            if limits and limit is None:
                scales = scales_for(limits, given.arrays, self._scratch)
            for variable, gradient, scale in zip(
                given.variables, given.arrays, scales, strict=True
            ):
                index = self.index[id(variable)]
                numbers = constants[self._decayed[index]]
                gradient = gradient.reshape(-1)
                if scale is not None:
                    scale = scale.astype(backend.widened(gradient.dtype))
                for block in self._blocks[index]:
                    _update(block, formula, gradient, scale, limit, numbers)
            count = array_of(self.iterations)
            count += 1

    def share(self, variables: list[Variable], call: str) -> None:
        """Give all ranks the parts that the others have changed. Collective if sharded.

        Args:
            variables: that the step has changed.
            call: the name of the call.

        Raises:
            MemoryError: the strategy is then unusable, since the copies of the
                variables differ.
        """
        if not self._is_sharded:
            return
        changed = sorted(self.index[id(variable)] for variable in variables)
        while changed:
            some: list[int] = []
            room = _BYTES_AT_ONCE
            while changed and (not some or self.variables[changed[0]].nbytes <= room):
                some.append(changed.pop(0))
                room -= self.variables[some[-1]].nbytes
            arrays = [backend.flat(array_of(self.variables[i])) for i in some]
            own = [x[self._parts[i]] for x, i in zip(arrays, some, strict=True)]
            try:
                gathered = self.group.collectives.all_gather(own, 0, None, call)
            except MemoryError as error:
                raise self.group.guard.abandon(None, error) from None
            for x, whole in zip(arrays, gathered, strict=True):
                x[...] = whole


def _sums_by(
    ops: Any, group: ReplicaGroup, arrays: list[Array], variables: list[Variable]
) -> list[Array]:
    """Return the sums by the user's `CrossDeviceOps`, if all ranks have the same."""
    registry = group.registry
    # If this fails, some rank may not have made the call: it is counted afterwards.
    pairs = [
        (registry.wrap(PerReplica, x, (registry.count, -1 - i)), variable)
        for i, (x, variable) in enumerate(zip(arrays, variables, strict=True))
    ]
    with group.cross_frame:  # an exception is raised on all ranks
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
    registry.next_key()
    return results
