"""Ways to move one flat buffer between ranks; one file each.

A transport takes one-dimensional, C-contiguous arrays. `choose` picks one for each
kind of array when the strategy is made.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mpidist import _arrays
from mpidist._comm import AnyCommunicator, query_cuda_support
from mpidist._options import CommunicationImplementation, Environment
from mpidist._transports._compression import Compression
from mpidist._transports._direct import DirectTransport
from mpidist._transports._nodes import set_up as set_up_shared
from mpidist._transports._shared import SharedTransport
from mpidist._transports._staged import StagedTransport

Transport = DirectTransport | StagedTransport

__all__ = [
    "Compression",
    "DirectTransport",
    "SharedTransport",
    "StagedTransport",
    "Transport",
    "Transports",
    "choose",
    "set_up_shared",
]


@dataclasses.dataclass(frozen=True)
class Transports:
    """The transports of a strategy: one for host arrays, one for GPU arrays."""

    host: DirectTransport
    device: Transport
    reason: str

    def of(self, x: Any) -> Transport:
        """Return the transport for the array ``x``."""
        return self.device if _arrays.is_device_array(x) else self.host


def choose(
    comm: AnyCommunicator,
    implementation: CommunicationImplementation,
    environment: Environment,
    device: _arrays.Device,
    shared: DirectTransport | None,
) -> Transports:
    """Pick the transports, and say why.

    Args:
        comm: the ranks.
        implementation: what the options ask for.
        environment: what the variables ask for.
        device: of this rank.
        shared: the transport of the ranks' shared memory, where there is one.

    Raises:
        ValueError: for an implementation that there is not.
    """
    wanted = implementation
    if wanted is CommunicationImplementation.NCCL:
        raise ValueError(
            "MPIStrategy: `CommunicationImplementation.NCCL` is not available in this "
            "version; write AUTO, which is direct where MPI is CUDA-aware and staged "
            "through the host elsewhere"
        )
    if (
        wanted is CommunicationImplementation.SHARED
        and shared is None
        and comm.size > 1
    ):
        raise ValueError(
            "MPIStrategy: `CommunicationImplementation.SHARED` needs room in /dev/shm, "
            "and to be asked for on all ranks when the strategy is made; write AUTO"
        )
    direct = DirectTransport(comm)
    host: DirectTransport = direct if shared is None else shared
    if wanted is CommunicationImplementation.DIRECT:
        return Transports(direct, direct, "direct: asked for in the options")
    staged = StagedTransport(host)
    if wanted is CommunicationImplementation.STAGED:
        return Transports(host, staged, "staged: asked for in the options")
    if environment.cuda_aware is not None:
        value = int(environment.cuda_aware)
        chosen: Transport = direct if environment.cuda_aware else staged
        return Transports(host, chosen, f"MPIDIST_CUDA_AWARE={value}")
    if device.kind == "gpu" and query_cuda_support():
        return Transports(host, direct, "direct: the MPI says it is CUDA-aware")
    return Transports(
        host, staged, "staged: the MPI does not say that it is CUDA-aware"
    )
