"""Reductions of any number of host arrays as one stream, cut into pieces.

The arrays are taken as one long sequence, which is cut into pieces that fit into the
cache, whatever the borders of the arrays. A piece goes in three steps:

1. every rank copies its piece into its input area, but for the slice of it that it will
   reduce itself;
2. every rank reduces its slice over all ranks, in the order rank 0, 1, 2, ..., into the
   result area;
3. every rank copies the result out.

Between the steps all ranks tick (`Board`). The copy in of the next piece comes before
the wait for this one. Packing is the copy in, and unpacking the copy out, so a nest
needs no buffer; and what is copied has not left the cache when it is read.

Why two areas for each are enough: a rank writes piece k + 2 when it has seen the result
of piece k + 1, so all have reduced k. The result of k + 2 is written when all have
copied k + 2 in, before which they have copied k out.

Results are written by copies only. The stores of an addition would first read the
memory that they overwrite, which costs as much as the addition; those of a large copy
do not. For one array of two ranks without the slices (each adds up all of it) this made
0.8 of the time at 1 MiB.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mpidist._comm import MPIOp

if TYPE_CHECKING:
    from mpidist._board import Board

COMBINE: Final[dict[str, Any]] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
}
_LINE: Final = 64
_MOST_SCHEDULES: Final = 64
_SMALLEST_PIECE: Final = 32 * 1024  # elements

Convert = Callable[[int, Any, Any], Any]


# A part of an array: its number, where the part is in it (None: all of it), and where
# it is in the piece.
Segment = tuple[int, slice | None, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A piece, as one rank sees it: what it reduces, and what the others do."""

    first: int
    last: int
    own: list[Segment]
    others: list[Segment]
    all: list[Segment]


class Schedule:
    """Where each part of some arrays goes: made once for their sizes and dtype."""

    __slots__ = ("dtype", "pieces", "sizes")

    def __init__(
        self,
        sizes: tuple[int, ...],
        dtype: Any,
        room: int,
        rank: int,
        ranks: int,
        *,
        halve: bool = True,
    ) -> None:
        """Cut arrays of these sizes into pieces of at most ``room`` elements."""
        self.dtype = dtype
        self.sizes = sizes
        self.pieces: list[Piece] = []
        if halve or sum(sizes) > room:
            room = _room(sum(sizes), room)
        segments: list[Segment] = []
        used = 0
        for leaf, size in enumerate(sizes):
            start = 0
            while start < size:
                taken = min(size - start, room - used)
                where = None if taken == size else slice(start, start + taken)
                segments.append((leaf, where, used, used + taken))
                used += taken
                start += taken
                if used == room:
                    self.pieces.append(_piece(segments, used, dtype, rank, ranks))
                    segments, used = [], 0
        if used:
            self.pieces.append(_piece(segments, used, dtype, rank, ranks))


def _piece(
    segments: list[Segment], count: int, dtype: Any, rank: int, ranks: int
) -> Piece:
    """Give each rank a slice of a piece: of whole lines of the cache."""
    first, last = slice_of(count, dtype, rank, ranks)
    own, others = [], []
    for segment in segments:
        own += _clip(segment, first, last)
        others += _clip(segment, 0, first)
        others += _clip(segment, last, count)
    return Piece(first, last, own, others, segments)


def slice_of(count: int, dtype: Any, rank: int, ranks: int) -> tuple[int, int]:
    """Return where the slice of a rank begins and ends: on lines of the cache."""
    line = max(1, _LINE // dtype.itemsize)
    lines = math.ceil(count / line)
    first = min(lines * rank // ranks * line, count)
    last = min(lines * (rank + 1) // ranks * line, count)
    return first, last


def _clip(segment: Segment, first: int, last: int) -> list[Segment]:
    """Return the part of a segment that is between two places of the piece."""
    leaf, where, start, stop = segment
    a, b = max(start, first), min(stop, last)
    if a >= b:
        return []
    if (a, b) == (start, stop):
        return [segment]
    origin = (0 if where is None else where.start) - start
    return [(leaf, slice(origin + a, origin + b), a, b)]


def _room(count: int, room: int) -> int:
    """Return the size of pieces: equal ones where there are few."""
    if count <= room:
        # Two halves, of which one is copied while the other is reduced.
        return max(math.ceil(count / 2 / _LINE) * _LINE, _SMALLEST_PIECE)
    pieces = math.ceil(count / room)
    return math.ceil(count / pieces / _LINE) * _LINE


class Stream:
    """Reduces through two input areas of each rank, and two result areas.

    Args:
        board: of the ranks.
        rank: this rank.
        inputs: for each rank its two areas, arrays of uint8 of one size.
        results: the two areas for results.
    """

    def __init__(
        self, board: Board, rank: int, inputs: list[Any], results: Any, piece_bytes: int
    ) -> None:
        self._board = board
        self._me = rank
        self._ranks = len(inputs)
        self._inputs = inputs
        self._results = results
        self.piece_bytes = piece_bytes
        self._turn = 0
        self._schedules: dict[Any, Schedule] = {}
        self._views: dict[Any, tuple[list[Any], Any]] = {}

    def schedule(self, sizes: tuple[int, ...], dtype: Any) -> Schedule:
        """Return the schedule for arrays of these sizes."""
        key = (sizes, dtype)
        found = self._schedules.get(key)
        if found is None:
            if len(self._schedules) >= _MOST_SCHEDULES:
                self._schedules.clear()
                self._views.clear()
            room = self.piece_bytes // dtype.itemsize
            found = self._schedules[key] = Schedule(
                sizes, dtype, room, self._me, self._ranks
            )
        return found

    def reduce(
        self,
        schedule: Schedule,
        sends: list[Any],
        receives: list[Any],
        op: MPIOp,
        divisor: int | None = None,
        encode: Convert | None = None,
        decode: Convert | None = None,
    ) -> None:
        """Reduce arrays of all ranks. Collective.

        Args:
            schedule: for their sizes, and the dtype that travels.
            sends: one-dimensional arrays; may be the ``receives``.
            receives: one-dimensional arrays, for the results.
            op: the operation.
            divisor: what the results are divided by, before they are decoded.
            encode: ``encode(number of the array, part of it, where to write it)``, for
                arrays of other dtypes.
            decode: ``decode(number of the array, what came out, where to write it)``.
        """
        with np.errstate(all="ignore"):
            self._reduce(schedule, sends, receives, op, divisor, encode, decode)

    def _reduce(
        self,
        schedule: Schedule,
        sends: list[Any],
        receives: list[Any],
        op: MPIOp,
        divisor: int | None,
        encode: Convert | None,
        decode: Convert | None,
    ) -> None:
        board, dtype, me = self._board, schedule.dtype, self._me
        by = None if divisor is None else dtype.type(divisor)
        before: Any = None
        for piece in schedule.pieces:
            self._turn ^= 1
            turn = self._turn
            for leaf, where, start, stop in (
                piece.others if encode is None else piece.all
            ):
                x = sends[leaf] if where is None else sends[leaf][where]
                area = self._view(turn, start, stop, dtype)[0][me]
                if encode is None:
                    area[...] = x
                else:
                    encode(leaf, x, area)
            if before is not None:
                self._copy_out(before, receives, dtype, decode)
            board.step()
            if encode is not None:
                self._combine(turn, piece.first, piece.last, dtype, op, None, by)
            else:
                for leaf, where, start, stop in piece.own:
                    x = sends[leaf] if where is None else sends[leaf][where]
                    self._combine(turn, start, stop, dtype, op, x, by)
            board.tick()
            before = (turn, piece.all)
        if before is not None:
            self._copy_out(before, receives, dtype, decode)

    def _combine(
        self,
        turn: int,
        start: int,
        stop: int,
        dtype: Any,
        op: MPIOp,
        own: Any,
        by: Any,
    ) -> None:
        """Reduce a part of a piece into the result area, in the order of the ranks."""
        if start == stop:
            return
        parts, out = self._view(turn, start, stop, dtype)
        if own is not None:
            parts = [*parts[: self._me], own, *parts[self._me + 1 :]]
        combine = COMBINE[op]
        combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            combine(out, part, out=out)
        if by is not None:
            np.true_divide(out, by, out=out)

    def _copy_out(
        self,
        piece: tuple[int, list[Segment]],
        receives: list[Any],
        dtype: Any,
        decode: Convert | None,
    ) -> None:
        turn, segments = piece
        self._board.wait()
        for leaf, where, start, stop in segments:
            result = self._view(turn, start, stop, dtype)[1]
            out = receives[leaf] if where is None else receives[leaf][where]
            if decode is None:
                out[...] = result
            else:
                decode(leaf, result, out)

    def _view(self, turn: int, start: int, stop: int, dtype: Any) -> Any:
        """Return elements ``start`` to ``stop`` of the input areas, and the result."""
        key = (turn, start, stop, dtype)
        found = self._views.get(key)
        if found is None:
            a, b = start * dtype.itemsize, stop * dtype.itemsize
            found = (
                [pair[turn][a:b].view(dtype) for pair in self._inputs],
                self._results[turn][a:b].view(dtype),
            )
            self._views[key] = found
        return found
