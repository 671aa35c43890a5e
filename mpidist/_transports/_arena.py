"""Memory for results that the ranks of a node can read in one another.

An *arena* is a window in which each rank has a part of the same size. A rank places its
results in its own part, where it likes, and tells the others where (`Board.note`).
They read and write there while a call lasts (`_hosting`), and never after it.

A result keeps its place for as long as the user keeps it, or a view of it, also when
the strategy is closed; then the place is used again. Memory of a window comes from a
file system of limited size, where a page that can not be had ends the process. So
places that were not used before are only taken while much is free.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any, Final

import numpy as np

from mpidist._comm import Communicator
from mpidist._holdings import Segment

NOWHERE: Final = -1
"""The place of a result that has none in the arena."""

SMALLEST: Final = 2**20
_LARGEST: Final = 2**30
# A program that keeps thousands of results must not have all of them looked at in each
# call: so many places, and after a search that found no room so many calls without one.
_LOOKS: Final = 16
_PAUSE: Final = 64
_PAGE: Final = 4096
# Where results begin in their first page: see `_pool`.
_OFFSET: Final = _PAGE // 2


class Arena:
    """Places for results, in a part of a window for each rank.

    Args:
        segment: the window.
        rank: this rank.
        ranks: how many there are.
        nbytes: the size of a part.
    """

    def __init__(self, segment: Segment, rank: int, ranks: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._segment = segment
        self._me = rank
        self.parts = [segment.view(k) for k in range(ranks)]
        self._kept: dict[int, _Places] = {}  # what was given out, by size
        self._end = 0  # what is above is free
        self._high = 0  # what is above was never used
        self._pause = 0
        weakref.finalize(self, segment.seal).atexit = False

    def empty(self, nbytes: int) -> tuple[Any, int] | None:
        """Return memory of this rank's part, and where it begins in it.

        Args:
            nbytes: more than 0.

        Returns:
            An array of uint8 whose values are not set, and its offset in the part; None
            where there is no room.
        """
        places = self._kept.get(nbytes)
        if places is not None:
            number = places.find()
            if number is not None:
                place = places.kept[number]
                return place.block, place.start
        room = _pages(nbytes)
        start: int | None = self._end
        if self._end + room > self.nbytes:
            if self._pause > 0:
                self._pause -= 1
                return None
            self._release()
            start = self._gap(room)
            if start is None:
                self._pause = _PAUSE
                return None
        assert start is not None
        stop = start + room
        if stop > self._high:
            # All ranks may look at this moment, before any has written.
            if (stop - self._high) * len(self.parts) > free_bytes():
                return None
            self._high = stop
        self._end = max(self._end, stop)
        start += _OFFSET
        block = self._segment.view(self._me, start, nbytes)
        # In one step: what a signal raises may come between any two.
        self._kept.setdefault(nbytes, _Places([])).kept.append(_Place(start, block))
        return block, start

    def _gap(self, room: int) -> int | None:
        """Return where the first gap of so many bytes begins."""
        end = 0
        for start, stop in sorted(
            (place.start - _OFFSET, place.start - _OFFSET + _pages(size))
            for size, places in self._kept.items()
            for place in places.kept
        ):
            if start - end >= room:
                return end
            end = stop
        self._end = end
        return end if end + room <= self.nbytes else None

    def _release(self) -> None:
        """Forget the places that are not in use."""
        for size in list(self._kept):
            used = self._kept[size].used()
            if used.kept:
                self._kept[size] = used
            else:
                del self._kept[size]


class _Place:
    """Where a place begins, and its memory."""

    __slots__ = ("block", "start")

    def __init__(self, start: int, block: Any) -> None:
        self.start = start
        self.block = block


class _Places:
    """Places of one size."""

    __slots__ = ("_next", "kept")

    def __init__(self, kept: list[_Place]) -> None:
        self.kept = kept
        self._next = 0

    def find(self) -> int | None:
        """Return the number of one that is not in use; looks at a few."""
        kept, count = self.kept, len(self.kept)
        number = self._next
        for _ in range(min(count, _LOOKS)):
            if number >= count:
                number = 0
            if sys.getrefcount(kept[number].block) <= _UNUSED:
                self._next = number
                return number
            number += 1
        self._next = number
        return None

    def used(self) -> _Places:
        """Return those that are in use."""
        return _Places(
            [place for place in self.kept if sys.getrefcount(place.block) > _UNUSED]
        )


def _count_unused() -> int:
    """Return the references to an array that only a place has, as Python counts."""
    place = _Place(0, np.empty(0, np.uint8))
    return sys.getrefcount(place.block)


_UNUSED: Final = _count_unused()


def _pages(nbytes: int) -> int:
    """Return the room that a result takes, in bytes."""
    return -(-(nbytes + _OFFSET) // _PAGE) * _PAGE


def set_up(comm: Communicator) -> Arena | None:
    """Make an arena, where the node has memory for one. Collective."""
    room = free_bytes() // 2 // comm.local_size
    nbytes = comm.all_min(min(room, _LARGEST) // _PAGE * _PAGE)
    if nbytes < SMALLEST:
        return None
    segment = None
    try:
        segment = comm.share_segment(nbytes, 0)
    except Exception as error:  # all else can do without
        print(f"mpidist: no memory for results: {error}", file=sys.stderr)
    if not comm.all_min(int(segment is not None)) or segment is None:
        return None
    return Arena(segment, comm.local_rank, comm.local_size, nbytes)


def free_bytes() -> int:
    """Return how much shared memory the node has left, half of it kept for others."""
    try:
        status = os.statvfs("/dev/shm")
        return status.f_bavail * status.f_frsize // 2
    except OSError:
        return 0
