"""What every collective of a group uses: ranks, guard, options, transports, memory.

The classes of the collectives derive from `Resources`, one job in each file
(`share`, `rows`, `all_gather`, `registered_buffers`), and `collectives.Collectives` is
all of them together, with the all-reduce.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn, ParamSpec, TypeVar

from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call
from mpidist._agreement.root_messages import RootMessages
from mpidist._base import backend, nest
from mpidist._base.environment import Environment
from mpidist._base.options import CommunicationImplementation, CommunicationOptions
from mpidist._base.types import Array
from mpidist._engine.devices import Devices, place_text
from mpidist._engine.memory import SharedMemory
from mpidist._engine.node import Node
from mpidist._engine.nodes import Nodes
from mpidist._engine.pool import Pool
from mpidist._engine.transports import DirectTransport, SharedTransport, Transports
from mpidist._mpi.communicator import AnyCommunicator

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
        resources: Any = args[0]  # `self`, which a ParamSpec cannot name
        with resources.comm.traffic.timed():
            return method(*args, **kwargs)

    return call


class Resources:
    """What the collectives of one group of replicas have in common.

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
        devices: how GPU buffers move.
        pool: private memory for large results.
        compression: of the strategy's sums between nodes.
        transports: of calls without options.
    """

    def __init__(
        self,
        comm: AnyCommunicator,
        guard: Guard,
        options: CommunicationOptions,
        environment: Environment,
        device: backend.Device,
        memory: SharedMemory,
    ) -> None:
        self.comm = comm
        self.guard = guard
        self.options = options
        self.device = device
        self.node: Node | None = memory.node
        self.nodes: Nodes | None = memory.nodes
        self.messages: RootMessages = self._make_messages()
        self.devices: Devices = Devices(comm, device, environment)
        self.pool: Pool = Pool(_POOL_BYTES)
        self._environment = environment
        self._memory = memory
        self._shared: DirectTransport | None = None
        if memory.node is not None or memory.nodes is not None:
            channel = None if memory.node is None else memory.node.channel
            self._shared = SharedTransport(comm, guard, channel)
        elif memory.in_process:
            self._shared = DirectTransport(comm)
        self._chosen: dict[CommunicationImplementation, Transports] = {}
        self.compression: CompressionChoice = self.compression_of(options)
        # GPU buffers are moved whole until `decide_device_transports`.
        wanted = self.implementation
        if wanted is CommunicationImplementation.NCCL:
            wanted = CommunicationImplementation.STAGED
        self.transports: Transports = self._choose(wanted)

    def _make_messages(self) -> RootMessages:
        ring = None if self.node is None else self.node.channel
        calls = self.guard.calls
        make = RootMessages if calls is None else calls.observing(RootMessages)
        return make(self.comm, self.guard, ring)

    @property
    def implementation(self) -> CommunicationImplementation:
        """What the options ask for; if they say AUTO, what the environment does."""
        return self._resolve(self.options.implementation)

    def _resolve(
        self, wanted: CommunicationImplementation
    ) -> CommunicationImplementation:
        if wanted is CommunicationImplementation.AUTO:
            return self._environment.implementation
        return wanted

    def _choose(self, wanted: CommunicationImplementation) -> Transports:
        return self.devices.choose(wanted, self._shared, self._memory.problem)

    def transports_of(self, options: CommunicationOptions) -> Transports:
        """Return the transports of a call with these options.

        Raises:
            ValueError: if the implementation is not available.
            RuntimeError: if an earlier call has failed, as NCCL reports only later.
        """
        wanted = options.implementation
        chosen = self._chosen.get(wanted)
        if chosen is None:
            chosen = self._chosen[wanted] = self._choose(self._resolve(wanted))
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
            scheme = self._environment.compression
        direct = CommunicationImplementation.DIRECT
        if scheme == "none" or self._resolve(options.implementation) is direct:
            return UNCOMPRESSED
        feedback = options.error_feedback
        if feedback is None:
            feedback = self._environment.error_feedback
        return CompressionChoice(scheme, feedback)

    def invalid(self, call: str, error: BaseException) -> NoReturn:
        """Raise ``error``, which this rank found in its arguments, on all ranks.

        An error that a collective call raised is already known to all.
        """
        raise self.guard.fail(Call(f"{call} with invalid arguments"), error, "invalid")

    def text_of_devices(self, arrays: list[Array], structure: nest.Structure) -> str:
        """Return, for a call's text, which of its arrays are on a GPU."""
        mixed = self.devices.decision.mixed
        return place_text(arrays, structure, mixed)
