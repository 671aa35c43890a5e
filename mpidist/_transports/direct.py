"""Buffers by collectives of MPI, without copies to other memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpidist._base import backend
from mpidist._base.types import Array
from mpidist._mpi.communicator import AnyCommunicator, MPIOp


class DirectTransport:
    """Passes buffers to MPI: host memory, or GPU memory if MPI is CUDA-aware."""

    name = "direct"

    def __init__(self, comm: AnyCommunicator) -> None:
        self.comm = comm

    def reducer(
        self, op: MPIOp, divisor: int | None = None
    ) -> Callable[[Array, Array], None]:
        """Return a function that reduces one host array into another.

        It is the fastest one for C-contiguous arrays without compression, and does not
        count what it moves.

        Args:
            op: the operation.
            divisor: what the result is divided by; None: nothing.
        """
        reduce = self._reducer(op)
        if divisor is None:
            return reduce

        def reduce_and_divide(send: Array, receive: Array) -> None:
            reduce(send, receive)
            with np.errstate(all="ignore"):
                receive /= receive.dtype.type(divisor)

        return reduce_and_divide

    def _reducer(self, op: MPIOp) -> Callable[[Array, Array], None]:
        reduce: Callable[[Array, Array], None] = self.comm.reducer(op)
        return reduce

    def allreduce(self, send: Array, receive: Array, op: MPIOp) -> None:
        """Reduce ``send`` of all ranks into ``receive``."""
        backend.synchronize(send)
        self.comm.allreduce(send, receive, op)

    def allreduce_in_place(self, buffer: Array, op: MPIOp) -> None:
        """Reduce ``buffer`` of all ranks into itself."""
        backend.synchronize(buffer)
        self.comm.allreduce_in_place(buffer, op)

    def reduce(self, buffer: Array, op: MPIOp, root: int) -> None:
        """Reduce ``buffer`` of all ranks into that of the root."""
        backend.synchronize(buffer)
        self.comm.reduce(buffer, op, root)

    def broadcast(self, buffer: Array, root: int) -> None:
        """Copy the root's ``buffer`` to all ranks."""
        backend.synchronize(buffer)
        self.comm.broadcast(buffer, root)

    def all_gather(self, send: Array, receive: Array, counts: list[int]) -> None:
        """Concatenate bytes of all ranks, on all ranks."""
        backend.synchronize(send)
        self.comm.all_gather(send, receive, counts)


class NodesTransport(DirectTransport):
    """The same, if the ranks of each of several nodes share memory.

    Large nests use that memory (the route *hierarchical*); this moves all others.
    """

    name = "shared"
