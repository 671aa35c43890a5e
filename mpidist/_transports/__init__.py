"""Ways to move one flat buffer between ranks; one file each.

A transport takes one-dimensional, C-contiguous arrays. `choose` picks one for each
kind of array when the strategy is made.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mpidist import _arrays
from mpidist._comm import AnyCommunicator
from mpidist._options import CommunicationImplementation
from mpidist._transports._arena import NOWHERE, Arena
from mpidist._transports._compression import Compression
from mpidist._transports._devices import Devices, DeviceTransport, place_text
from mpidist._transports._direct import DirectTransport
from mpidist._transports._hosting import IGNORED, LINE, HostedLeaf, Hosting
from mpidist._transports._nccl import NcclTransport
from mpidist._transports._nodes import set_up as set_up_shared
from mpidist._transports._resident import Block, Blocks, Target
from mpidist._transports._shared import SharedTransport
from mpidist._transports._staged import StagedTransport
from mpidist._transports._stream import COMBINE, Schedule

Transport = DeviceTransport

__all__ = [
    "Arena",
    "Block",
    "Blocks",
    "COMBINE",
    "Compression",
    "Devices",
    "DirectTransport",
    "HostedLeaf",
    "Hosting",
    "IGNORED",
    "LINE",
    "NOWHERE",
    "NcclTransport",
    "Schedule",
    "SharedTransport",
    "StagedTransport",
    "Target",
    "Transport",
    "Transports",
    "choose",
    "place_text",
    "set_up_shared",
]


@dataclasses.dataclass(frozen=True)
class Transports:
    """The transports of a strategy: one for host arrays, one for GPU arrays.

    Attributes:
        host: moves host arrays.
        device: moves GPU arrays.
        reason: why that one.
        host_reason: why the one for host arrays.
    """

    host: DirectTransport
    device: Transport
    reason: str
    host_reason: str = ""

    def of(self, x: Any) -> Transport:
        """Return the transport for the array ``x``."""
        return self.device if _arrays.is_device_array(x) else self.host

    def check(self) -> None:
        """Look for failures of earlier calls; before the ranks agree on the next.

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
) -> Transports:
    """Pick the transports, and say why.

    Args:
        comm: the ranks.
        implementation: what the options ask for, or the environment.
        shared: the transport of the ranks' shared memory, where there is one.
        devices: the ways of GPU buffers.

    Raises:
        ValueError: for an implementation that there is not.
    """
    wanted = implementation
    if (
        wanted is CommunicationImplementation.SHARED
        and shared is None
        and comm.size > 1
    ):
        raise ValueError(
            "MPIStrategy: `CommunicationImplementation.SHARED` needs room in /dev/shm, "
            "and to be asked for on all ranks when the strategy is made; write AUTO"
        )
    host: DirectTransport = DirectTransport(comm) if shared is None else shared
    if wanted is CommunicationImplementation.DIRECT:
        host = DirectTransport(comm)
    device, reason = devices.pick(wanted, host)
    return Transports(host, device, reason, _host_reason(comm, wanted, shared))


def _host_reason(
    comm: AnyCommunicator,
    wanted: CommunicationImplementation,
    shared: DirectTransport | None,
) -> str:
    if comm.size == 1:
        return "one rank"
    if wanted is CommunicationImplementation.DIRECT:
        return "asked for"
    if wanted is CommunicationImplementation.SHARED:
        return "asked for"
    if comm.num_nodes == 1:
        if shared is None:
            return "the ranks share no memory: see /dev/shm"
        return "all ranks are on one node"
    nodes = f"{comm.num_nodes} nodes"
    if comm.num_nodes == comm.size:
        return f"{nodes} of one rank"
    if shared is None:
        return f"{nodes}, whose ranks share no memory: see /dev/shm"
    return f"{nodes}, whose ranks share memory for large arrays"
