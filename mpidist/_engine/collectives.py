"""The collectives of a group: one object for replicas, strategies and commands.

Every collective has the same steps: check the arguments, agree with the other ranks
(`Guard`), move the bytes (a plan, or `Transports`), and wrap the result. What can fail
on one rank alone is done before the agreement, and its failure is told to all ranks.

Each class that `Collectives` derives from has one job, in a file of its name. Here are
the all-reduce, and what concerns them all: the choice of GPU transports, and release.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call
from mpidist._agreement.root_messages import RootMessages
from mpidist._base import backend, checksums, nest
from mpidist._base.environment import Environment
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.options import CommunicationImplementation, CommunicationOptions
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array, Nest
from mpidist._engine import ROUTES
from mpidist._engine.all_gather import AllGathers
from mpidist._engine.buckets import FlatBuffers
from mpidist._engine.compression import Compression
from mpidist._engine.memory import NO_MEMORY, SharedMemory
from mpidist._engine.node import Node
from mpidist._engine.nodes import Nodes
from mpidist._engine.plans import PlanResources, Plans, Signature, leaves_of
from mpidist._engine.pool import Pool
from mpidist._engine.registered_buffers import RegisteredBuffers
from mpidist._engine.resources import UNCOMPRESSED
from mpidist._engine.rows import Rows
from mpidist._engine.share import Sharing
from mpidist._engine.staged import StagedTransport
from mpidist._engine.staging import Staging
from mpidist._engine.transports import DirectTransport, Transports
from mpidist._mpi.communicator import AnyCommunicator


class Collectives(AllGathers, RegisteredBuffers, Sharing, Rows):
    """The collectives of one group of replicas; the arguments of `Resources`.

    Attributes:
        plans: of all-reduces.
        all_reduce: `Plans.all_reduce`, with what the core does itself of it.
    """

    def __init__(
        self,
        comm: AnyCommunicator,
        guard: Guard,
        options: CommunicationOptions,
        environment: Environment,
        device: backend.Device,
        memory: SharedMemory = NO_MEMORY,
    ) -> None:
        super().__init__(comm, guard, options, environment, device, memory)
        self._staging: Staging | None = None
        self.plans: Plans = Plans(
            self._plan_resources(),
            ROUTES,
            self._describe,
            self.merge_options,
            self.invalid,
            self._all_reduce_rows,
        )
        self.all_reduce: Callable[..., Nest] = self.plans.small.entry

    def _plan_resources(self) -> PlanResources:
        if self._staging is not None:
            self._staging.close()
        node = self.node if self.nodes is None else self.nodes.node
        self._staging = None if node is None else Staging(node)
        return PlanResources(
            self.comm,
            self.guard,
            self.node,
            self.nodes,
            self.pool,
            FlatBuffers(),
            self._staging,
        )

    def decide_device_transports(self, timeout_seconds: float) -> None:
        """Choose, with all ranks, how GPU buffers move. Collective, and once.

        Args:
            timeout_seconds: how long NCCL may take to connect the ranks; 0: no limit.

        Raises:
            ValueError: on all ranks, if the implementation is not available.
        """
        self.devices.decide(
            self.implementation, self.transports.host, timeout_seconds or None
        )
        self.transports = self.transports_of(self.options)
        self.plans.restart(self._plan_resources())
        staged = self.transports.device
        if (
            self.device.kind == "gpu"
            and not self.devices.decision.mixed
            and isinstance(staged, StagedTransport)
        ):
            try:  # page-locked memory, which may be refused on one rank
                staged.prepare(self.device.array_module.empty(1, np.uint8))
            except Exception as error:
                self.invalid("MPIStrategy(...)", error)
            self.guard.agree(Call("MPIStrategy(...), with memory for GPU buffers"))

    def close(self) -> None:
        """Release the resources of the GPU transports. Collective."""
        self.devices.close()

    def abandon(self) -> None:
        """Do what `close` does, without the ranks that are lost. Not collective."""
        self.devices.abandon()

    def release(self) -> None:
        """Let go of shared memory: the strategy is being closed. Not collective."""
        self._memory, self._shared = NO_MEMORY, None
        self.node: Node | None = None
        self.nodes: Nodes | None = None
        self.messages: RootMessages = self._make_messages()
        self.comm.traffic.leave_core()
        self.pool: Pool = Pool(0)  # its memory goes with the last result
        self.plans.restart(self._plan_resources())
        self._forget_gathers()
        direct = DirectTransport(self.comm)
        closed = Transports(direct, direct, "closed")
        self.transports: Transports = closed
        self._chosen = dict.fromkeys(CommunicationImplementation, self.transports)

    def _describe(
        self,
        op: ReduceOp,
        structure: nest.Structure,
        arrays: list[Array],
        call: str,
        options: CommunicationOptions,
        root: int | None,
    ) -> Signature:
        """Return the signature of an all-reduce.

        Everything that a route looks at is in the text, or the same on all ranks.
        """
        bytes_per_pack = options.bytes_per_pack
        implementation = options.implementation
        compression = self.compression
        if options is not self.options:
            compression = self.compression_of(options)
        text = structure.render([backend.describe(x) for x in arrays])
        if bytes_per_pack != self.options.bytes_per_pack:
            # The ranks must cut their buffers at the same places.
            text += f" with bytes_per_pack={bytes_per_pack}"
        if implementation is not self.options.implementation:
            text += f" with implementation={implementation.name}"
        if compression != self.compression:
            text += f" with {compression}"
        # For the same reason: GPU arrays have their own buckets and routes.
        text += self.text_of_devices(arrays, structure)
        compress = None
        if compression != UNCOMPRESSED and self.comm.num_nodes > 1:
            compress = functools.partial(Compression, *compression)
        to_root = "" if root is None else f" to rank {root}"
        return Signature(
            Call(f"{call}{to_root} {op.name} {text}"),
            leaves_of(op, arrays, call),
            root,
            self.transports_of(options),
            bytes_per_pack or self._environment.bytes_per_pack,
            compress,
        )

    def _all_reduce_rows(
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
        try:
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
        except Exception as error:
            self.invalid(call, error)
        gathered = self.all_gather(parts, 0, options, call)
        for i, (values, indices) in zip(sparse, gathered, strict=True):
            results[i] = IndexedSlices(values, indices, leaves[i].dense_shape)
        if dense:
            reduced = iter(self.all_reduce(op, dense, options, call, None))
            results = [
                x if i in sparse else next(reduced) for i, x in enumerate(results)
            ]
        return structure.unflatten(results if to_here else [None] * len(results))

    def check_plain(self, call: str, values: list[Nest]) -> None:
        """Check that each rank passed the same values. Collective."""
        if not self.guard.checks:
            return
        texts = [
            checksums.summarize(backend.as_array(value, call)[0])
            for value in values
            if backend.is_number(value) or backend.is_array(value)
        ]
        if texts:
            self.guard.agree(
                Call(
                    f"{call} of {', '.join(texts)}, which is not per replica (what "
                    "differs between ranks comes from `strategy.run`: write "
                    "`strategy.run(lambda: value)` in its place)"
                )
            )
