"""Arrays that live in memory which the ranks of a node share, reduced where they are.

A *block* is one window. Each rank has a part of it, all of one layout, where the leaves
of a nest are. The first rank's part ends with a *ring*: two areas for results.

A range of bytes of the block is reduced in pieces. In each piece

1. every rank reduces its slice over the parts of all ranks, in the order rank 0, 1, 2,
   ..., into one area of the ring, by turns;
2. all ranks tick, and wait for each other (`Board`);
3. every rank copies the result of the piece out, to where the caller wants it.

Nothing is copied in. The call begins with a tick of all, before the first piece.

Why no rank reads what is not written, or writes what is still read:

- *A part is read only when its rank is in the call.* The first tick of a call comes
  after a rank has written its part, and all wait for it before they read.
- *A part is not overwritten while it is read.* A rank returns from the call after the
  wait of the last piece: by then every rank has ticked for it, and so has read all that
  it reads of any part. Only then can the caller write to it again.
- *An area of the ring is not overwritten while it is read.* A rank writes piece k + 2
  after the wait of piece k + 1, for which every rank has ticked, which it does after it
  has copied piece k out. The first two pieces of a call come after the first tick,
  which a rank makes when it has left all earlier calls.

A piece is small enough for the ring to stay in a cache that the cores share, and large
enough for the ticks not to count (measured: `PIECE_BYTES`).

A block is kept for as long as an array of this rank views its own part, and is given
back when that is so on no rank any more (`_holdings`).
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from mpidist._board import Board
from mpidist._comm import Communicator, MPIOp
from mpidist._transports._shared import COMBINE, SharedTransport

LINE: Final = 64
_PAGE: Final = 4096
PIECE_BYTES: Final = 2**20


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an array is: in which block, and at which byte."""

    block: int
    start: int


class Block:
    """One window with a part for each rank of the node, all of one layout."""

    def __init__(
        self, number: int, parts: list[Any], used: int, board: Board, me: int
    ) -> None:
        self.number = number
        self.start: int = parts[me].__array_interface__["data"][0]
        self.used = used
        self._board = board
        self._me = me
        self._ranks = len(parts)
        self._parts = parts
        ring = parts[0][used:]
        self._ring = [ring[:PIECE_BYTES], ring[PIECE_BYTES : 2 * PIECE_BYTES]]
        self._turn = 0

    def reduce(
        self,
        start: int,
        stop: int,
        dtype: Any,
        op: MPIOp,
        take: Callable[[int, int, Any], None],
    ) -> None:
        """Reduce a range of the block over the ranks of the node. Collective.

        Args:
            start, stop: the range, in bytes; a multiple of the size of ``dtype``.
            dtype: of the elements.
            op: the operation.
            take: called with a range in bytes, and the results for it, which it must
                copy before it returns.
        """
        self._board.step()
        combine = COMBINE[op]
        me, ranks, size = self._me, self._ranks, dtype.itemsize
        for first in range(start, stop, PIECE_BYTES):
            last = min(first + PIECE_BYTES, stop)
            self._turn ^= 1
            area = self._ring[self._turn][: last - first].view(dtype)
            lines = -(-(last - first) // LINE)
            low = min(lines * me // ranks * LINE, last - first)
            high = min(lines * (me + 1) // ranks * LINE, last - first)
            if low < high:
                a, b = self._parts[0], self._parts[1]
                out = area[low // size : high // size]
                own = slice(first + low, first + high)
                combine(a[own].view(dtype), b[own].view(dtype), out=out)
                for part in self._parts[2:]:
                    combine(out, part[own].view(dtype), out=out)
            self._board.step()
            take(first, last, area)


class Blocks:
    """The blocks of a strategy that this rank has arrays in."""

    def __init__(self, comm: Communicator, transport: SharedTransport) -> None:
        self._comm = comm
        self._board = transport.board
        self._made = 0
        self._kept: dict[int, Block] = {}

    def get(self, number: int) -> Block:
        """Return the block of that number."""
        return self._kept[number]

    def make(self, nbytes: int) -> Any | None:
        """Make a block, and return this rank's part of it: zeros. Collective.

        Args:
            nbytes: how large a part is; the same on all ranks.

        Returns:
            An array of uint8, or None on all ranks where there is no room.
        """
        comm = self._comm
        used = -(-max(nbytes, 1) // _PAGE) * _PAGE
        needed = used * comm.local_size + 2 * PIECE_BYTES
        comm.settle()
        if not comm.all_min(int(needed <= _free_bytes())):
            return None
        own = used + (2 * PIECE_BYTES if comm.local_rank == 0 else 0)
        segment = comm.share_segment(own, own)
        parts = [segment.view(rank) for rank in range(comm.local_size)]
        self._made += 1
        number = self._made
        block = Block(number, parts, used, self._board, comm.local_rank)
        mine = segment.view(comm.local_rank)
        segment.seal()
        self._kept[number] = block
        # When no array of this rank is left, the views of the other parts go too.
        weakref.finalize(mine.base, self._kept.pop, number, None).atexit = False
        return mine[:nbytes]

    def find(self, x: Any) -> Place | None:
        """Return where an array is; None for one that is in no block as a whole."""
        base = x.base
        if base is None or not x.flags.c_contiguous:
            return None
        while type(base) is np.ndarray:
            base = base.base
        if type(base).__name__ != "_Memory":
            return None
        address: int = x.__array_interface__["data"][0]
        for number, block in list(self._kept.items()):
            start = address - block.start
            if 0 <= start and start + x.nbytes <= block.used:
                return Place(number, start)
        return None


def _free_bytes() -> int:
    """Return how much shared memory the node has left, half of it kept for others."""
    try:
        status = os.statvfs("/dev/shm")
        return status.f_bavail * status.f_frsize // 2
    except OSError:
        return 0
