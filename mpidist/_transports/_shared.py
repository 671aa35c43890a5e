"""Memory that the ranks of a node share, and the reductions that go through it.

Each rank adds a part to the window: its board (`_board`), two places for small arrays
that travel with their header (`_lean`), and two input areas for the pieces of all other
arrays (`_stream`); the first rank also adds two areas for results.

This is for strategies whose ranks are all on one node; for several see `_nodes`.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any, Final

from mpidist import _board as board_module
from mpidist._board import Board
from mpidist._comm import Communicator, MPIOp
from mpidist._transports import _arena as arena_module
from mpidist._transports._arena import Arena
from mpidist._transports._direct import DirectTransport
from mpidist._transports._stream import Stream

# Above this, adding up slices and copying the sums takes less time than one more wait.
_FUSED_BYTES: Final = 32 * 1024
_LARGEST_AREA: Final = 16 * 2**20
SMALLEST_AREA: Final = 64 * 1024
_MOST_MEMORY: Final = 2**30
_PAGE: Final = 4096
# Two areas of each rank and the piece of the array itself are in a core's cache.
_PIECE: Final = 512 * 1024


class SharedTransport(DirectTransport):
    """All-reduces host arrays through a window; all else as `DirectTransport`."""

    name = "shared"

    def __init__(self, comm: Communicator, area_bytes: int, *, crowded: bool) -> None:
        """Make the window. Collective."""
        super().__init__(comm)
        self.comm: Communicator = comm
        self._me = comm.local_rank
        self._ranks = comm.local_size
        self.area_bytes = area_bytes = min(area_bytes, _PIECE)
        self.fused_bytes = _FUSED_BYTES
        own = board_module.BYTES + 2 * self.fused_bytes + 2 * area_bytes
        if self._me == 0:
            own += 2 * area_bytes
        parts = comm.share_memory(own, board_module.BYTES)
        self.board = make_board(comm, parts, crowded=crowded)
        comm.use_board(self.board)
        start = board_module.BYTES
        self._fused = [areas_of(part, start, self.fused_bytes) for part in parts]
        start += 2 * self.fused_bytes
        self._inputs = [areas_of(part, start, area_bytes) for part in parts]
        self._results = areas_of(parts[0], start + 2 * area_bytes, area_bytes)
        self.arena: Arena | None = arena_module.set_up(comm)
        self.stream = Stream(
            self.board, self._me, self._inputs, self._results, area_bytes
        )

    def fused_parts(self, turn: int, shape: tuple[int, ...], dtype: Any) -> list[Any]:
        """Return the places of all ranks for an array of at most `fused_bytes`."""
        nbytes = math.prod(shape) * dtype.itemsize
        return [pair[turn][:nbytes].view(dtype).reshape(shape) for pair in self._fused]

    def input_areas(self, turn: int) -> list[Any]:
        """Return the input areas of all ranks for pieces of a turn."""
        return [pair[turn] for pair in self._inputs]

    def streams(self, nbytes: int, *, compressed: bool = False) -> bool:
        """Whether arrays of so many bytes together go as a stream: all do."""
        return True

    def allreduce(self, send: Any, receive: Any, op: MPIOp) -> None:
        """Reduce ``send`` of all ranks into ``receive``."""
        if send.size == 0:
            return
        self.comm.traffic.count("Allreduce", send.nbytes)
        schedule = self.stream.schedule((send.size,), send.dtype)
        self.stream.reduce(schedule, [send], [receive], op)

    def allreduce_in_place(self, buffer: Any, op: MPIOp) -> None:
        """Reduce ``buffer`` of all ranks into itself."""
        self.allreduce(buffer, buffer, op)


def make_board(comm: Communicator, parts: list[Any], *, crowded: bool) -> Board:
    """Return the board at the beginning of the parts of a window."""
    return Board(
        [part[: board_module.BYTES] for part in parts],
        comm.local_rank,
        crowded=crowded,
        fence=None if board_module.STRONGLY_ORDERED else comm.fence,
        progress=comm.progress,
        patience=lambda: comm.patience,
    )


def areas_of(part: Any, start: int, nbytes: int) -> tuple[Any, Any]:
    """Return two neighbouring areas of a part, which are used in turn."""
    return part[start : start + nbytes], part[start + nbytes : start + 2 * nbytes]


def set_up(
    comm: Communicator, *, wanted: bool, crowded: bool
) -> SharedTransport | None:
    """Make a `SharedTransport` where all ranks want one, and can. Collective."""
    area = 0
    if wanted and comm.local_size == comm.size > 1:
        area = area_bytes_for(comm.local_size)
    area = comm.all_min(area)
    if area < SMALLEST_AREA:
        return None
    made: SharedTransport | None = None
    try:
        made = SharedTransport(comm, area, crowded=crowded)
    except Exception as error:  # an MPI that has no such windows here
        print(f"mpidist: no memory that the ranks share: {error}", file=sys.stderr)
    if comm.all_min(int(made is not None)):
        return made
    comm.use_board(None)
    return None


def area_bytes_for(ranks: int) -> int:
    """Return how large an area may be, of the memory that the node has for this."""
    try:
        status = os.statvfs("/dev/shm")
        free = status.f_bavail * status.f_frsize
    except OSError:
        free = 0
    room = min(free // 4, _MOST_MEMORY) // (2 * ranks + 2)
    return min(room, _LARGEST_AREA) // _PAGE * _PAGE
