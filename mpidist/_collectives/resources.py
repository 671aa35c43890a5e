"""What the collectives of a group share: ranks, guard, options, transports, memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, NoReturn, ParamSpec, TypeVar

from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call
from mpidist._agreement.root_messages import RootMessages
from mpidist._base import backend, gpus, nest
from mpidist._base.environment import Environment
from mpidist._base.options import CommunicationImplementation, CommunicationOptions
from mpidist._base.types import Array
from mpidist._collectives.node import Node
from mpidist._collectives.nodes import NO_MEMORY, Nodes, SharedMemory
from mpidist._collectives.pool import Pool
from mpidist._collectives.staged import StagedTransport
from mpidist._collectives.transport_choice import Finding, TransportChoice
from mpidist._collectives.transports import DirectTransport, Transports
from mpidist._mpi.any_communicator import AnyCommunicator
from mpidist._mpi.library import query_cuda_support

_P = ParamSpec("_P")
_R = TypeVar("_R")

_POOL_BYTES: Final = 512 * 2**20


class CompressionChoice(NamedTuple):
    """The format of sums between nodes, and whether errors are fed back."""

    scheme: str
    error_feedback: bool

    def __str__(self) -> str:
        feedback = " and error_feedback" if self.error_feedback else ""
        return f"compression={self.scheme}{feedback}"


UNCOMPRESSED: Final = CompressionChoice("none", False)


def timed(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Count the time that a collective takes in the statistics."""

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        own: Any = args[0]  # `self`, which a ParamSpec cannot name
        with own.resources.comm.traffic:
            return method(*args, **kwargs)

    return call


class Resources:
    """What the collectives of one group of replicas share.

    Args:
        comm: the ranks.
        guard: compares their calls.
        options: of the strategy.
        environment: what ``MPIDIST_*`` says.
        device: of this rank.
        memory: what the ranks share.

    Attributes:
        node: the memory that all ranks share; None if they do not.
        nodes: the memory that the ranks of each node share; None if they do not.
        messages: from rank 0 to the others.
        transport_choice: chooses how buffers move.
        pool: private memory for large results, and for nests that are packed.
        device_names: of all ranks, after `decide_devices`.
        compression: of the strategy's sums between nodes.
        transports: of calls without options.
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
        self.comm = comm
        self.guard = guard
        self.options = options
        self.environment = environment
        self.device = device
        self.device_names: list[str] = [device.name_on(comm.rank)]
        self._released = False
        self._share(memory)
        self.transport_choice: TransportChoice = TransportChoice(
            comm, device, environment
        )
        self.pool: Pool = Pool(_POOL_BYTES)
        self.compression: CompressionChoice = self.compression_of(options)
        # GPU buffers are moved whole until `decide_devices`.
        wanted = self._resolve(options.implementation)
        if wanted is CommunicationImplementation.NCCL:
            wanted = CommunicationImplementation.STAGED
        self.transports: Transports = self._choose(wanted)

    def _share(self, memory: SharedMemory) -> None:
        """Use the memory that the ranks share, in place of the one before."""
        self.node: Node | None = memory.node
        self.nodes: Nodes | None = memory.nodes
        own = self.node if self.nodes is None else self.nodes.node
        channel = None if self.node is None else self.node.channel
        self._why_not_shared = memory.problem
        self._shared: DirectTransport | None = None
        if own is not None or memory.in_process:
            self._shared = DirectTransport(self.comm, own is not None, channel)
        make = self.observing(RootMessages)
        self.messages: RootMessages = make(self.comm, self.guard, channel)

    def observing(self, kind: type[_R]) -> type[_R]:
        """Return a class, or one that is observed, if calls are."""
        observers = self.guard.observers
        return kind if observers is None else observers.observing(kind)

    def find_transports(self) -> Finding:
        """Return what this rank finds of how its GPU buffers can move.

        Does not raise if something is missing.
        """
        device, aware = self.device, self.environment.cuda_aware
        gpu = queried = no_nccl = ""
        if device.kind == "gpu":
            try:
                host = self.comm.host_names[self.comm.rank]
                gpu = f"{host} {gpus.gpu_bus_id(device)}"
                gpus.nccl_module()
            except Exception as error:  # of CUDA, or of an incompatible library
                no_nccl = f"{error}"
            queried = query_cuda_support() if aware is None else ""
        wanted = self._resolve(self.options.implementation).name
        return Finding(wanted, device.kind, device.index, gpu, aware, queried, no_nccl)

    def decide_devices(
        self, findings: Sequence[Finding], timeout_seconds: float
    ) -> None:
        """Choose, with all ranks, how GPU buffers move. Collective, and once.

        Args:
            findings: of `find_transports` on all ranks.
            timeout_seconds: how long NCCL may take to connect the ranks; 0: no limit.

        Raises:
            ValueError: on all ranks, if the implementation is not available.
        """
        wanted = self._resolve(self.options.implementation)
        self.transport_choice.decide(wanted, findings, timeout_seconds or None)
        self.device_names = [
            gpus.Device(one.kind, one.index).name_on(rank)
            for rank, one in enumerate(findings)
        ]
        self.transports = self._choose(wanted)
        self.transports.device.check()
        if self.device.kind != "gpu" or self.transport_choice.decision.mixed:
            return
        if not isinstance(self.transports.device, StagedTransport):
            return
        with self.guard.checking("MPIStrategy(...)"):
            # Page-locked memory, which may be refused on one rank.
            self.transport_choice.memory.prepare()
        self.guard.agree(Call("MPIStrategy(...), with memory for GPU buffers"))

    def release(self) -> None:
        """Let go of shared memory: the strategy is being closed. Not collective."""
        self._released = True
        self._share(NO_MEMORY)
        self.comm.traffic.leave_core()
        self.pool.close()
        direct = DirectTransport(self.comm)
        self.transports = Transports(direct, direct, "closed")

    def _resolve(
        self, wanted: CommunicationImplementation
    ) -> CommunicationImplementation:
        """Return what options ask for; if they say AUTO, what the environment does."""
        if wanted is CommunicationImplementation.AUTO:
            return self.environment.implementation
        return wanted

    def _choose(self, wanted: CommunicationImplementation) -> Transports:
        return self.transport_choice.choose(wanted, self._shared, self._why_not_shared)

    def transports_of(self, options: CommunicationOptions) -> Transports:
        """Return the transports of a call with these options.

        Raises:
            ValueError: if the implementation is not available.
            RuntimeError: if an earlier call has failed, as NCCL reports only later.
        """
        chosen = self.transports
        if options is not self.options and not self._released:
            chosen = self._choose(self._resolve(options.implementation))
        chosen.device.check()
        return chosen

    def merge_options(
        self, options: CommunicationOptions | None
    ) -> CommunicationOptions:
        """Return the strategy's options, overridden by those of one call.

        Raises:
            ValueError: if the call sets ``guard``, which is the strategy's.
        """
        if options is None:
            return self.options
        merged = self.options.merge(options)
        if options.guard is not None and options.guard != self.guard.enabled:
            raise ValueError(
                "`guard` cannot be changed for one call, since the ranks would wait "
                "for different things; write `MPIStrategy(communication_options="
                "CommunicationOptions(guard=...))`"
            )
        return merged

    def compression_of(self, options: CommunicationOptions) -> CompressionChoice:
        """Return what ``options`` and the environment say of compression."""
        scheme = options.compression
        if scheme is None:
            scheme = self.environment.compression
        direct = CommunicationImplementation.DIRECT
        if scheme == "none" or self._resolve(options.implementation) is direct:
            return UNCOMPRESSED
        feedback = options.error_feedback
        if feedback is None:
            feedback = self.environment.error_feedback
        return CompressionChoice(scheme, feedback)

    def invalid(self, call: str, error: BaseException) -> NoReturn:
        """Raise ``error``, which this rank found in its arguments, on all ranks.

        An error that a collective call raised is already known to all.
        """
        with self.guard.checking(call):
            raise error

    def text_of_devices(self, arrays: list[Array], structure: nest.Structure) -> str:
        """Return, for a call's text, which of its arrays are on a GPU; "" for none.

        If the ranks have devices of different kinds, GPU buffers make the same calls of
        MPI as host buffers; it is enough if devices are equal within one call.
        """
        places = [backend.is_device_array(x) for x in arrays]
        mixed = self.transport_choice.decision.mixed
        if not any(places) or (mixed and all(places)):
            return ""
        if all(places):
            return " on the GPU"
        names = ["GPU" if place else "host" for place in places]
        return f" on {structure.render(names)}"
