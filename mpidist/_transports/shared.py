"""Flat buffers through the memory that the ranks of one node share, after a header.

Routes through the core exchange headers themselves (`mpidist._engine.core_routes`).
This transport moves buffers on which the ranks have already agreed: staged GPU arrays,
packed leaves, and broadcasts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import numpy as np

from mpidist import _native
from mpidist._agreement.channel import LEFT, LeftError
from mpidist._agreement.guard import Guard
from mpidist._base.cache import Cache
from mpidist._base.types import Array
from mpidist._mpi.communicator import AnyCommunicator, MPIOp
from mpidist._transports.direct import DirectTransport

_MOST_REDUCTIONS: Final = 256


class SharedTransport(DirectTransport):
    """Reduces and copies host buffers through the core.

    Args:
        comm: the ranks, all on one node.
        guard: is told if this rank leaves a call in the middle.
        channel: of the node.
        piece_bytes: the size of its piece areas.
    """

    name = "shared"

    def __init__(
        self,
        comm: AnyCommunicator,
        guard: Guard,
        channel: _native.Channel,
        piece_bytes: int,
    ) -> None:
        super().__init__(comm)
        self._guard = guard
        self._channel = channel
        self._piece_bytes = piece_bytes
        self._reductions: Cache[tuple[str, MPIOp, int], _native.Reduce] = Cache(
            _MOST_REDUCTIONS
        )

    def allreduce(self, send: Array, receive: Array, op: MPIOp) -> None:
        """Reduce ``send`` of all ranks into ``receive``."""
        if send.size == 0:
            return
        self.comm.traffic.count("Allreduce", send.nbytes)
        name = f"{send.dtype.kind}{send.dtype.itemsize}"
        key = (name, op, send.size)
        reduction = self._reductions.get(key)
        if reduction is None:
            leaf = _native.ReduceLeaf(name, op, (send.size,), 0)
            reduction = _native.core.Reduce(self._channel, [leaf], self._piece_bytes)
            self._reductions[key] = reduction
        self._do(reduction.run, send, receive)

    def allreduce_in_place(self, buffer: Array, op: MPIOp) -> None:
        """Reduce ``buffer`` of all ranks into itself."""
        self.allreduce(buffer, buffer, op)

    def _reducer(self, op: MPIOp) -> Callable[[Array, Array], None]:
        return functools.partial(self.allreduce, op=op)

    def reduce(self, buffer: Array, op: MPIOp, root: int) -> None:
        """Reduce ``buffer`` of all ranks into that of the root."""
        result = buffer if self.comm.rank == root else np.empty_like(buffer)
        self.allreduce(buffer, result, op)

    def broadcast(self, buffer: Array, root: int) -> None:
        """Copy the root's ``buffer`` to all ranks."""
        self.comm.traffic.count("Bcast", buffer.nbytes)
        self._do(self._channel.broadcast, buffer, root)

    def all_gather(self, send: Array, receive: Array, counts: list[int]) -> None:
        """Concatenate bytes of all ranks, on all ranks."""
        self.comm.traffic.count("Allgatherv", send.nbytes)
        start = 0
        for root, count in enumerate(counts):
            part = receive[start : start + count]
            if root == self.comm.rank:
                part[...] = send
            self._do(self._channel.broadcast, part, root)
            start += count

    def _do(self, step: Callable[..., int], *args: object) -> None:
        """Make a step with all ranks; if interrupted, release the others."""
        try:
            if step(*args) == LEFT:
                raise LeftError(self._channel.who)
        except BaseException as error:
            raise self._guard.leave_call(error) from None
