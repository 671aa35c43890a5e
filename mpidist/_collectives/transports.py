"""Transports: each moves one flat buffer between ranks that have agreed on it.

A transport takes one-dimensional, C-contiguous arrays. `Transports` has one for host
arrays and one for GPU arrays; `transport_choice` chooses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist import _native
from mpidist._agreement.channel import LEFT, LeftError
from mpidist._base import backend
from mpidist._base.reduce_op import MPIOp
from mpidist._base.types import Array, DType, record
from mpidist._mpi.any_communicator import AnyCommunicator
from mpidist._mpi.buffers import BufferReduction


class Transport:
    """Moves buffers of one kind, on the host or on GPUs.

    The kind is that of the arrays for which `Transports.of` returns it, which no type
    says: so the buffers are of `Any`.

    Attributes:
        name: as `mpidist info` and the trace print it.
    """

    name: str

    def supports(self, dtype: DType, op: str) -> bool:
        """Return whether it reduces buffers of a dtype with an operation of MPI."""
        return False

    def allreduce(self, reductions: Sequence[BufferReduction]) -> None:
        """Reduce buffers over all ranks, into buffers of all ranks."""
        raise NotImplementedError

    def reduce(self, buffer: Any, op: MPIOp, root: int) -> None:
        """Reduce ``buffer`` of all ranks into that of the root; others keep theirs."""
        raise NotImplementedError

    def broadcast(self, buffer: Any, root: int) -> None:
        """Copy the root's ``buffer`` to all ranks; to be called in `Guard.payload`."""
        raise NotImplementedError

    def all_gather(self, send: Any, receive: Any, counts: list[int]) -> None:
        """Concatenate bytes of all ranks, on all ranks."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise if an earlier call has failed, which NCCL reports only later."""


class DirectTransport(Transport):
    """Passes buffers to MPI: host memory, or GPU memory if MPI is CUDA-aware.

    Of ranks that share memory the core broadcasts;
    all else that is in that memory has a route (`core_routes`, `hierarchical_route`).

    Args:
        comm: the ranks.
        shares: whether ranks share memory.
        channel: of the node, if all ranks are on one.
    """

    def __init__(
        self,
        comm: AnyCommunicator,
        shares: bool = False,
        channel: _native.Channel | None = None,
    ) -> None:
        self.comm = comm
        self.name = "shared" if shares else "direct"
        self._channel = channel

    def supports(self, dtype: DType, op: str) -> bool:
        """Return True."""
        return True

    def allreduce(self, reductions: Sequence[BufferReduction]) -> None:
        """Reduce buffers over all ranks, into buffers of all ranks."""
        for send, receive, *_ in reductions:
            backend.synchronize(receive if send is None else send)
        self.comm.allreduce(reductions)

    def reduce(self, buffer: Array, op: MPIOp, root: int) -> None:
        """Reduce ``buffer`` of all ranks into that of the root."""
        backend.synchronize(buffer)
        self.comm.reduce(buffer, op, root)

    def broadcast(self, buffer: Array, root: int) -> None:
        """Copy the root's ``buffer`` to all ranks."""
        channel = self._channel
        if channel is None:
            backend.synchronize(buffer)
            self.comm.broadcast(buffer, root)
            return
        self.comm.traffic.count("Bcast", buffer.nbytes)
        if channel.broadcast(buffer, root) == LEFT:
            raise LeftError(channel.who)

    def all_gather(self, send: Array, receive: Array, counts: list[int]) -> None:
        """Concatenate bytes of all ranks, on all ranks."""
        backend.synchronize(send)
        self.comm.all_gather(send, receive, counts)


@record
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

    def of(self, x: Array) -> Transport:
        """Return the transport for the array ``x``."""
        return self.device if backend.is_device_array(x) else self.host
