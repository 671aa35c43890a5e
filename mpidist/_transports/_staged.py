"""GPU buffers through page-locked host memory."""

from __future__ import annotations

from typing import Any

from mpidist import _arrays
from mpidist._comm import MPIOp
from mpidist._transports._direct import DirectTransport


class StagedTransport:
    """Copies a GPU buffer to the host, has MPI move it there, and copies it back.

    The host buffers are page-locked, which makes the copies asynchronous for the
    driver and about twice as fast, and are kept: page-locking is slow.
    """

    name = "staged"

    def __init__(self, direct: DirectTransport) -> None:
        self._direct = direct
        self._buffers: dict[str, Any] = {}

    def allreduce(self, send: Any, receive: Any, op: MPIOp) -> None:
        """Reduce ``send`` of all ranks into ``receive``."""
        host = self._copy_in("send", send)
        self._direct.allreduce_in_place(host, op)
        _arrays.fill(receive, host)

    def allreduce_in_place(self, buffer: Any, op: MPIOp) -> None:
        """Reduce ``buffer`` of all ranks into itself."""
        self.allreduce(buffer, buffer, op)

    def reduce(self, buffer: Any, op: MPIOp, root: int) -> None:
        """Reduce ``buffer`` of all ranks into that of the root."""
        host = self._copy_in("send", buffer)
        self._direct.reduce(host, op, root)
        if self._direct.comm.rank == root:
            _arrays.fill(buffer, host)

    def broadcast(self, buffer: Any, root: int) -> None:
        """Copy the root's ``buffer`` to all ranks."""
        if self._direct.comm.rank == root:
            self._direct.broadcast(self._copy_in("send", buffer), root)
            return
        host = self._buffer("send", buffer.size, buffer.dtype)
        self._direct.broadcast(host, root)
        _arrays.fill(buffer, host)

    def all_gather(self, send: Any, receive: Any, counts: list[int]) -> None:
        """Concatenate bytes of all ranks, on all ranks."""
        host = self._copy_in("send", send)
        gathered = self._buffer("receive", receive.size, receive.dtype)
        self._direct.all_gather(host, gathered, counts)
        _arrays.fill(receive, gathered)

    def _copy_in(self, name: str, x: Any) -> Any:
        host = self._buffer(name, x.size, x.dtype)
        if x.size:
            _arrays.synchronize(x)
            x.get(out=host)
        return host

    def _buffer(self, name: str, count: int, dtype: Any) -> Any:
        nbytes = count * dtype.itemsize
        kept = self._buffers.get(name)
        if kept is None or kept.nbytes < nbytes:
            kept = self._buffers[name] = _arrays.pinned_empty(max(nbytes, 1), "u1")
        return kept[:nbytes].view(dtype)
