"""The collectives of a group: one object for replicas, strategies and commands.

Every collective has the same steps: check the arguments, agree with the other ranks
(`Guard`), move the bytes (a plan, or `Transports`), and wrap the result. What can fail
on one rank alone is done before the agreement, and its failure is told to all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from mpidist._agreement.guard import Guard
from mpidist._base import backend, gpus, nest
from mpidist._base.environment import Environment
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.options import CommunicationOptions
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Nest
from mpidist._collectives.all_gather import AllGathers
from mpidist._collectives.copies import Copies
from mpidist._collectives.nodes import NO_MEMORY, SharedMemory
from mpidist._collectives.plan import PlanCache
from mpidist._collectives.plans import Plans
from mpidist._collectives.resources import Resources
from mpidist._collectives.transport_choice import Finding
from mpidist._mpi.communicator import AnyCommunicator


class Collectives(Copies):
    """The collectives of one group of replicas. It has the arguments of `Resources`.

    Attributes:
        resources: what the collectives share.
        comm: the ranks.
        guard: compares the calls of the ranks.
        options: of the strategy.
        device: of this rank.
        plans: makes and keeps the plans of all-reduces.
        all_reduce: `Plans.all_reduce`; the core runs plans of small arrays (`quick`).
        all_gather: `AllGathers.all_gather`, in the same way.
    """

    def __init__(
        self,
        comm: AnyCommunicator,
        guard: Guard,
        options: CommunicationOptions,
        environment: Environment,
        device: gpus.Device,
        memory: SharedMemory = NO_MEMORY,
    ) -> None:
        resources = Resources(comm, guard, options, environment, device, memory)
        super().__init__(resources)
        self.comm = comm
        self.guard = guard
        self.options = options
        self.device = device
        self.invalid: Callable[[str, BaseException], NoReturn] = resources.invalid
        self.cache: PlanCache = PlanCache()
        self.plans: Plans = Plans(resources, self.cache, self._reduce_slices)
        self.all_reduce: Callable[..., Nest] = self.plans.quick.entry
        self._gathers = resources.observing(AllGathers)(resources, self.cache)
        self.all_gather: Callable[..., Nest] = self._gathers.quick.entry

    def decide_device_transports(
        self, findings: Sequence[Finding], timeout_seconds: float
    ) -> None:
        """Choose, with all ranks, how GPU buffers move; see `Resources`. Collective."""
        self.resources.decide_devices(findings, timeout_seconds)
        self._forget()

    def close(self) -> None:
        """Release the resources of the GPU transports. Collective."""
        self.resources.transport_choice.close()

    def abandon(self) -> None:
        """Do what `close` does, without the ranks that are lost. Not collective."""
        self.resources.transport_choice.abandon()

    def release(self) -> None:
        """Let go of shared memory: the strategy is being closed. Not collective."""
        self.resources.release()
        self._forget()

    def _forget(self) -> None:
        self.cache.clear()
        self.plans.quick.forget()
        self._gathers.quick.forget()

    def _reduce_slices(
        self,
        op: ReduceOp,
        tree: Nest,
        options: CommunicationOptions | None,
        call: str,
        root: int | None,
    ) -> Nest:
        """All-reduce a nest with `IndexedSlices`, whose rows are concatenated."""
        to_here = root is None or root == self.comm.rank
        if root is not None:
            call = f"{call} to rank {root}"
        leaves, structure = nest.flatten(tree)
        sparse = [i for i, x in enumerate(leaves) if isinstance(x, IndexedSlices)]
        call = f"{call} of IndexedSlices"
        with self.guard.checking(call):
            if op not in (ReduceOp.SUM, ReduceOp.MEAN):
                raise TypeError(
                    f"{call}: {op.name} is not defined, only SUM and MEAN; reduce a "
                    "dense array"
                )
            results = list(leaves)
            dense = [x for i, x in enumerate(leaves) if i not in sparse]
            parts = []
            for i in sparse:
                values, kind = backend.as_array(leaves[i].values, call)
                if op is ReduceOp.MEAN:
                    values = values / values.dtype.type(self.comm.size)
                parts.append([backend.as_given(values, kind), leaves[i].indices])
        gathered = self.all_gather(parts, 0, options, call)
        for i, (values, indices) in zip(sparse, gathered, strict=True):
            results[i] = IndexedSlices(values, indices, leaves[i].dense_shape)
        if dense:
            reduced = iter(self.all_reduce(op, dense, options, call, None))
            results = [
                x if i in sparse else next(reduced) for i, x in enumerate(results)
            ]
        return structure.unflatten(results if to_here else [None] * len(results))
