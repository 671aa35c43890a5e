"""Transports: each moves one flat buffer between ranks.

A transport takes one-dimensional, C-contiguous arrays. `choose` picks one for each
kind of array when the strategy is made.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from mpidist._base import backend
from mpidist._base.options import CommunicationImplementation
from mpidist._base.types import Array
from mpidist._mpi.communicator import AnyCommunicator, MPIOp
from mpidist._transports.compression import LEAST_BYTES as COMPRESSED_BYTES
from mpidist._transports.compression import Compression
from mpidist._transports.device_transports import Devices, DeviceTransport, place_text
from mpidist._transports.direct import DirectTransport, NodesTransport
from mpidist._transports.nccl import NcclTransport
from mpidist._transports.shared import SharedTransport
from mpidist._transports.staged import StagedTransport

__all__ = [
    "COMPRESSED_BYTES",
    "Compression",
    "Devices",
    "DirectTransport",
    "NcclTransport",
    "NodesTransport",
    "SharedTransport",
    "StagedTransport",
    "Transport",
    "Transports",
    "choose",
    "place_text",
]


class Transport(Protocol):
    """Moves buffers of one kind, on the host or on GPUs.

    The kind is that of the arrays for which `Transports.of` returns it, which no type
    says: so the buffers are of `Any`.
    """

    @property
    def name(self) -> str:
        """The name that `mpidist info` and the trace print."""

    def allreduce(self, send: Any, receive: Any, op: MPIOp) -> None:
        """Reduce ``send`` of all ranks into ``receive``."""

    def allreduce_in_place(self, buffer: Any, op: MPIOp) -> None:
        """Reduce ``buffer`` of all ranks into itself."""

    def reduce(self, buffer: Any, op: MPIOp, root: int) -> None:
        """Reduce ``buffer`` of all ranks into that of the root."""

    def broadcast(self, buffer: Any, root: int) -> None:
        """Copy the root's ``buffer`` to all ranks."""

    def all_gather(self, send: Any, receive: Any, counts: list[int]) -> None:
        """Concatenate bytes of all ranks, on all ranks."""


@dataclasses.dataclass(frozen=True)
class Transports:
    """The transports of a strategy: one for host arrays, one for GPU arrays.

    Attributes:
        host: moves host arrays.
        device: moves GPU arrays.
        reason: why that one.
        host_reason: why the one for host arrays.
        mixed: whether an array may be on a GPU on one rank and on the host on another.
    """

    host: DirectTransport
    device: DeviceTransport
    reason: str
    host_reason: str = ""
    mixed: bool = False

    def of(self, x: Array) -> Transport:
        """Return the transport for the array ``x``."""
        return self.device if backend.is_device_array(x) else self.host

    def check(self) -> None:
        """Check for failures of earlier calls, before the ranks agree on the next.

        Raises:
            RuntimeError: if NCCL reports one.
        """
        if isinstance(self.device, NcclTransport):
            self.device.check()


def choose(
    comm: AnyCommunicator,
    implementation: CommunicationImplementation,
    shared: DirectTransport | None,
    devices: Devices,
    why_not_shared: str,
) -> Transports:
    """Pick the transports, and say why.

    Args:
        comm: the ranks.
        implementation: what the options ask for, or the environment.
        shared: the transport of the ranks' shared memory, where there is one.
        devices: chooses the transport of GPU buffers.
        why_not_shared: why the ranks of a node share no memory.

    Raises:
        ValueError: if the implementation is not available here.
    """
    wanted = implementation
    why_not_shared = why_not_shared or "see /dev/shm"
    if (
        wanted is CommunicationImplementation.SHARED
        and shared is None
        and comm.num_nodes < comm.size  # else there is nothing to share
    ):
        raise ValueError(
            "MPIStrategy: `CommunicationImplementation.SHARED` needs room in /dev/shm, "
            "the native core, and the same request on all ranks when the strategy is "
            f"made ({why_not_shared}); write AUTO"
        )
    host: DirectTransport = DirectTransport(comm) if shared is None else shared
    if wanted is CommunicationImplementation.DIRECT:
        host = DirectTransport(comm)
    device, reason = devices.pick(wanted, host)
    mixed = devices.decision.mixed
    return Transports(
        host, device, reason, _host_reason(comm, wanted, shared, why_not_shared), mixed
    )


def _host_reason(
    comm: AnyCommunicator,
    wanted: CommunicationImplementation,
    shared: DirectTransport | None,
    why_not_shared: str,
) -> str:
    if comm.size == 1:
        return "one rank"
    if wanted is CommunicationImplementation.DIRECT:
        return "asked for"
    if wanted is CommunicationImplementation.SHARED:
        return "asked for"
    if comm.num_nodes == 1:
        if shared is None:
            return f"the ranks share no memory: {why_not_shared}"
        return "all ranks are on one node"
    nodes = f"{comm.num_nodes} nodes"
    if comm.num_nodes == comm.size:
        return f"{nodes} of one rank"
    if shared is None:
        return f"{nodes}, whose ranks share no memory: {why_not_shared}"
    return f"{nodes}, whose ranks share memory for large arrays"
