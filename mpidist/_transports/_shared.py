"""Reductions through memory that the ranks of a node share.

Each rank has two *input* areas in the window, used in turn, and the node two *result*
areas. A piece of at most the size of an area goes in three steps:

1. every rank copies its piece in, but for the slice that it will reduce itself;
2. every rank reduces its slice over all ranks, in the order rank 0, 1, 2, ..., into the
   result area;
3. every rank copies the result out.

Between the steps all ranks tick (`Board`). The copy of the next piece comes before the
wait for this one. Small arrays take one step less: every rank copies its whole array
in, and all reduce all of it, in the same order.

Why two of each area are enough: a rank writes piece k + 2 when it has seen the result
of piece k + 1, so all have reduced k. The result of k + 2 is written when all have
copied k + 2 in, before which they have copied k out.

This is for strategies whose ranks are all on one node (for several see `_nodes`), and
off unless it is asked for
(`CommunicationImplementation.SHARED`, or ``MPIDIST_IMPLEMENTATION``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from mpidist import _board as board_module
from mpidist._board import Board
from mpidist._comm import Communicator, MPIOp
from mpidist._transports._direct import DirectTransport

_SMALL_BYTES: Final = 32 * 1024
_LARGEST_AREA: Final = 16 * 2**20
_SMALLEST_AREA: Final = 64 * 1024
_MOST_MEMORY: Final = 2**30
_PAGE: Final = 4096
_LINE: Final = 64
_PIECE_BYTES: Final = 2**20

_COMBINE: Final[dict[str, Any]] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
}


class SharedTransport(DirectTransport):
    """All-reduces host arrays through a window; all else as `DirectTransport`."""

    name = "shared"

    def __init__(self, comm: Communicator, area_bytes: int, *, crowded: bool) -> None:
        """Make the window. Collective."""
        super().__init__(comm)
        self.comm: Communicator = comm
        self._me = comm.local_rank
        self._ranks = comm.local_size
        self.area_bytes = area_bytes
        own = board_module.BYTES + 2 * _SMALL_BYTES + 2 * area_bytes
        if self._me == 0:
            own += 2 * area_bytes
        parts = comm.share_memory(own, board_module.BYTES)
        strong = os.uname().machine in ("x86_64", "i686", "AMD64")
        self.board = Board(
            [part[: board_module.BYTES] for part in parts],
            self._me,
            crowded=crowded,
            fence=None if strong else comm.fence,
            progress=comm.progress,
        )
        comm.use_board(self.board)
        start = board_module.BYTES
        self._small = [_pair(part, start, _SMALL_BYTES) for part in parts]
        start += 2 * _SMALL_BYTES
        self._inputs = [_pair(part, start, area_bytes) for part in parts]
        self._results = _pair(parts[0], start + 2 * area_bytes, area_bytes)
        self._views: dict[Any, Any] = {}
        self._turn = 0
        self._small_turn = 0

    def allreduce(self, send: Any, receive: Any, op: MPIOp) -> None:
        """Reduce ``send`` of all ranks into ``receive``."""
        if send.size == 0:
            return
        self.comm.traffic.count("Allreduce", send.nbytes)
        if send.nbytes <= _SMALL_BYTES:
            self._reduce_small(send, receive, op)
        else:
            self._reduce_large(send, receive, op)

    def allreduce_in_place(self, buffer: Any, op: MPIOp) -> None:
        """Reduce ``buffer`` of all ranks into itself."""
        self.allreduce(buffer, buffer, op)

    # --- packing straight into the window ----------------------------------------

    def pack_buffer(self, count: int, dtype: Any) -> Any:
        """Return the memory to pack into; at most `area_bytes`."""
        self._turn ^= 1
        return self._inputs[self._me][self._turn][: count * dtype.itemsize].view(dtype)

    def reduce_packed(self, packed: Any, op: MPIOp) -> Any:
        """Reduce what was packed; return the result, to be read before the next."""
        self.comm.traffic.count("Allreduce", packed.nbytes)
        dtype, count, turn = packed.dtype, packed.size, self._turn
        self.board.step()
        first, last = self._slice(count, dtype)
        result = self._results[turn][: count * dtype.itemsize].view(dtype)
        self._combine_slices(turn, first, last, dtype, result, op, None)
        self.board.step()
        return result

    # --- the steps ----------------------------------------------------------------

    def _reduce_small(self, send: Any, receive: Any, op: MPIOp) -> None:
        self._small_turn ^= 1
        key = (self._small_turn, send.dtype, send.size)
        views = self._views.get(key)
        if views is None:
            if len(self._views) > 256:
                self._views.clear()
            views = self._views[key] = [
                pair[self._small_turn][: send.nbytes].view(send.dtype)
                for pair in self._small
            ]
        views[self._me][...] = send
        self.board.step()
        combine = _COMBINE[op]
        combine(views[0], views[1], out=receive)
        for view in views[2:]:
            combine(receive, view, out=receive)

    def _reduce_large(self, send: Any, receive: Any, op: MPIOp) -> None:
        dtype = send.dtype
        room = min(self.area_bytes, _PIECE_BYTES) // dtype.itemsize
        if send.size < 2 * room:  # two pieces of one size overlap better
            half = -(-send.size // 2)
            room = max(room // 4, min(room, -(-half // _LINE) * _LINE))
        pieces = [slice(i, min(i + room, send.size)) for i in range(0, send.size, room)]
        finish: Callable[[], None] | None = None
        for piece in pieces:
            self._turn ^= 1
            source = send[piece]
            self._copy_in(source)
            if finish is not None:
                finish()
            self.board.step()
            first, last = self._slice(source.size, dtype)
            turn = self._turn
            result = self._results[turn][: source.nbytes].view(dtype)
            self._combine_slices(turn, first, last, dtype, result, op, source)
            self.board.tick()
            finish = self._finisher(result, receive[piece])
        if finish is not None:
            finish()

    def _finisher(self, result: Any, target: Any) -> Callable[[], None]:
        def finish() -> None:
            self.board.wait()
            target[...] = result

        return finish

    def _copy_in(self, source: Any) -> None:
        first, last = self._slice(source.size, source.dtype)
        area = self._inputs[self._me][self._turn][: source.nbytes].view(source.dtype)
        if first:
            area[:first] = source[:first]
        if last < source.size:
            area[last:] = source[last:]

    def _slice(self, count: int, dtype: Any) -> tuple[int, int]:
        """Return where this rank's slice begins and ends: on lines of the cache."""
        line = max(1, _LINE // dtype.itemsize)
        lines = -(-count // line)
        first = lines * self._me // self._ranks * line
        last = lines * (self._me + 1) // self._ranks * line
        return min(first, count), min(last, count)

    def _combine_slices(
        self,
        turn: int,
        first: int,
        last: int,
        dtype: Any,
        result: Any,
        op: MPIOp,
        source: Any,
    ) -> None:
        """Reduce this rank's slice of a piece, in the order of the ranks."""
        if first == last:
            return
        start, stop = first * dtype.itemsize, last * dtype.itemsize
        parts = [pair[turn][start:stop].view(dtype) for pair in self._inputs]
        if source is not None:
            parts[self._me] = source[first:last]
        out = result[first:last]
        combine = _COMBINE[op]
        combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            combine(out, part, out=out)


def _pair(part: Any, start: int, nbytes: int) -> tuple[Any, Any]:
    return part[start : start + nbytes], part[start + nbytes : start + 2 * nbytes]


def set_up(
    comm: Communicator, *, wanted: bool, crowded: bool
) -> SharedTransport | None:
    """Make a `SharedTransport` where all ranks want one, and can. Collective."""
    area = 0
    if wanted and comm.local_size == comm.size > 1:
        area = _area_bytes(comm.local_size)
    area = comm.all_min(area)
    if area < _SMALLEST_AREA:
        return None
    return SharedTransport(comm, area, crowded=crowded)


def _area_bytes(ranks: int) -> int:
    """Return how large an area may be, of the memory that the node has for this."""
    try:
        status = os.statvfs("/dev/shm")
        free = status.f_bavail * status.f_frsize
    except OSError:
        free = 0
    room = min(free // 4, _MOST_MEMORY) // (2 * ranks + 2)
    return min(room, _LARGEST_AREA) // _PAGE * _PAGE
