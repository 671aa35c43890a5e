"""Buffers by MPI messages, from where they are and to where they go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpidist._base import backend
from mpidist._mpi.communicator import AnyCommunicator, MPIOp


class DirectTransport:
    """Hands buffers to MPI: host memory, or GPU memory where MPI is CUDA-aware."""

    name = "direct"

    def __init__(self, comm: AnyCommunicator) -> None:
        self.comm = comm

    def reducer(
        self, nbytes: int, op: MPIOp, divisor: int | None = None
    ) -> Callable[[Any, Any], None]:
        """Return the fastest way from a host array to one for its result.

        It does not count what it moves.

        Args:
            nbytes: of the array, which is C-contiguous and goes uncompressed.
            op: the operation.
            divisor: what the result is divided by.
        """
        reduce = self.comm.reducer(op)
        if divisor is None:
            return reduce

        def reduce_and_divide(send: Any, receive: Any) -> None:
            reduce(send, receive)
            with np.errstate(all="ignore"):
                np.true_divide(receive, receive.dtype.type(divisor), out=receive)

        return reduce_and_divide

    def allreduce(self, send: Any, receive: Any, op: MPIOp) -> None:
        """Reduce ``send`` of all ranks into ``receive``."""
        backend.synchronize(send)
        self.comm.allreduce(send, receive, op)

    def allreduce_in_place(self, buffer: Any, op: MPIOp) -> None:
        """Reduce ``buffer`` of all ranks into itself."""
        backend.synchronize(buffer)
        self.comm.allreduce_in_place(buffer, op)

    def reduce(self, buffer: Any, op: MPIOp, root: int) -> None:
        """Reduce ``buffer`` of all ranks into that of the root."""
        backend.synchronize(buffer)
        self.comm.reduce(buffer, op, root)

    def broadcast(self, buffer: Any, root: int) -> None:
        """Copy the root's ``buffer`` to all ranks."""
        backend.synchronize(buffer)
        self.comm.broadcast(buffer, root)

    def all_gather(self, send: Any, receive: Any, counts: list[int]) -> None:
        """Concatenate bytes of all ranks, on all ranks."""
        backend.synchronize(send)
        self.comm.all_gather(send, receive, counts)


class NodesTransport(DirectTransport):
    """The same where the ranks of each of several nodes share memory.

    Large nests go through that memory (the route *hierarchical*); this moves the rest.
    """

    name = "shared"
