"""All-reduces whose results are where the other ranks read and write them.

The memory of the results of a call is one place in this rank's part of an arena, with
the leaves side by side. So nothing is copied but what has to cross from rank to rank.
The place is cut into one slice for each rank.

1. Every rank copies its arrays into its own place, but for its own slice, and says in
   its header where the place is (`Board.note`).
2. Every rank adds up its slice, of what is in the places of the others, and of its own
   arrays, in the order rank 0, 1, 2, ...; and copies the sum to the places of all.

The header is the tick (`Board`) after the first step, and all tick after the second.
What does not fit into the cache goes through this in pieces: a rank copies the next
piece in before it waits for this one.

Why no rank reads what is not written, or writes what is still in use:

- *A slice is added up when its rank has seen all ranks' ticks for the copy in.*
- *A slice of a place is read by one rank only, the one that writes the sum there*,
  after it has read it. The rank whose place it is writes to that slice when it copies
  in, before it ticks, and not again.
- *A rank returns when all have ticked for their last sum.* Until then its results are
  referred to here, so their place is not given out again.

Where a rank has no place left, or goes another way (its mark is another), all ranks see
that in the headers, and go the other way. A rank that is interrupted leaves for good
(`Guard.leave_payload`): no place is given out any more, and what others still write
goes to results that nobody has got.

Measured on 2 ranks, one float32 array, as a ratio to in-place Allreduce (Open MPI and
MPICH; a throw-away script, interleaved), at 64 KiB, 1, 4 and 16 MiB:

- through areas in the window: 0.69 0.49, 1.2 1.0, 1.5 1.3, 1.3 1.4;
- as above, in one piece: 0.59 0.39, 0.66 0.43, 0.73 0.53, 0.9 0.8;
- in pieces of 512 KiB: the same, 0.57 0.41, 0.67 0.53, 0.78 0.68;
- sums read from the places of those that made them, which takes one more wait:
  0.68 0.49, 0.68 0.48, 0.8 0.6, 1.0 0.8.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mpidist._transports._stream import COMBINE

if TYPE_CHECKING:
    from mpidist._board import Board
    from mpidist._comm import MPIOp
    from mpidist._transports._arena import Arena
    from mpidist._transports._resident import Block

# What overflows becomes infinite, as it does in MPI, and a user's NumPy may raise. The
# caller ignores the warnings (entering `numpy.errstate` costs more than a small sum).
IGNORED: Final = (RuntimeWarning, FloatingPointError)

LINE: Final = 64
_PIECE: Final = 512 * 1024
_MOST_PLACES: Final = 16


@dataclasses.dataclass(frozen=True, slots=True)
class HostedLeaf:
    """What is known of a leaf: its shape and dtype, and how it is reduced.

    Attributes:
        shape: of the leaf; it has one element or more.
        dtype: that travels; `LINE` is a multiple of its size.
        op: of MPI.
        mean: whether the sum is divided by the number of ranks.
    """

    shape: tuple[int, ...]
    dtype: Any
    op: MPIOp
    mean: bool


# A part of a leaf: the number of the leaf, which of its elements (None: all), and the
# bytes of the place where they are.
_Part = tuple[int, slice | None, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """What one rank does with a piece.

    Attributes:
        dtype: of its elements.
        combine: adds up.
        count: what the sum is divided by; None: it is not.
        entries: what this rank copies in.
        own: what it adds up.
        start, stop: the bytes of its slice.
    """

    dtype: Any
    combine: Any
    count: Any
    entries: list[_Part]
    own: list[_Part]
    start: int
    stop: int


# Views of the places of one call. Copied in: leaf, which elements, where to. Added up:
# the function, leaf, which elements, the same in the places of all ranks, where the sum
# goes, what it is divided by. Copied to the others: the sums of a piece, and where to.
_Entry = tuple[int, slice | None, Any]
_Sum = tuple[Any, int, slice | None, list[Any], Any, Any]
_Step = tuple[list[_Sum], Any, list[Any]]


class Hosting:
    """The all-reduces of some leaves, through places in an arena.

    Args:
        board: of the ranks.
        arena: of the ranks.
        leaves: what is reduced; the same on all ranks, and at least one.
        rank: this rank.
        ranks: how many there are.

    Attributes:
        nbytes: the size of a place.
        tiny: the leaves whose results are better copied than kept in a place.
    """

    def __init__(
        self,
        board: Board,
        arena: Arena,
        leaves: list[HostedLeaf],
        rank: int,
        ranks: int,
    ) -> None:
        self._board = board
        self._arena = arena
        self._leaves = leaves
        self._me = rank
        self._ranks = ranks
        self._starts, self.nbytes, self._pieces = _lay_out(leaves, rank, ranks)
        # A loss that is kept must not keep the gradients beside it.
        self.tiny = [
            number
            for number, leaf in enumerate(leaves)
            if math.prod(leaf.shape) * leaf.dtype.itemsize <= LINE < self.nbytes
        ]
        # By where the places are: making a view takes as long as a small sum.
        self._entries: dict[int, list[list[_Entry]]] = {}
        self._steps: dict[tuple[int, ...], list[_Step]] = {}

    def place(self) -> tuple[Any, int] | None:
        """Return memory for results, and where it is in this rank's part, if any."""
        return self._arena.empty(self.nbytes)

    def results(self, block: Any) -> list[Any]:
        """Return the arrays for the results, whose memory is ``block``."""
        return [
            np.ndarray(leaf.shape, leaf.dtype, block, start)
            for leaf, start in zip(self._leaves, self._starts, strict=True)
        ]

    def copy_in(self, offset: int, arrays: list[Any], piece: int = 0) -> None:
        """Copy a piece of the arrays into this rank's place, but for its own slice.

        Args:
            offset: where the place is in this rank's part.
            arrays: one-dimensional.
            piece: its number.
        """
        entries = self._entries.get(offset)
        if entries is None:
            entries = self._find_entries(offset)
        for leaf, part, out in entries[piece]:
            out[...] = arrays[leaf] if part is None else arrays[leaf][part]

    def reduce(self, offsets: tuple[int, ...], arrays: list[Any]) -> None:
        """Reduce, where all ranks have copied the first piece in. Collective.

        Args:
            offsets: for each rank where its place is.
            arrays: as in `copy_in`.
        """
        steps = self._steps.get(offsets)
        if steps is None:
            if len(self._steps) >= _MOST_PLACES:
                self._steps.clear()
            steps = self._steps[offsets] = self._find_steps(offsets)
        board, last = self._board, len(steps) - 1
        for number, (sums, result, others) in enumerate(steps):
            if number < last:
                self.copy_in(offsets[self._me], arrays, number + 1)
            if number:
                board.wait()
            for combine, leaf, part, parts, out, count in sums:
                x = arrays[leaf] if part is None else arrays[leaf][part]
                self._add_up(combine, x, parts, out, count)
            for other in others:
                other[...] = result
            board.tick()
        board.wait()

    def reduce_resident(
        self, offsets: tuple[int, ...], block: Block, starts: list[int]
    ) -> None:
        """Reduce arrays that all ranks can read where they are. Collective.

        Nothing is copied in, so no rank waits for another before all sums are made.

        Args:
            offsets: as in `reduce`.
            block: where the arrays are.
            starts: for each leaf the byte of the block where it begins.
        """
        key = (id(self), offsets, tuple(starts))
        _, steps = block.steps.get(key, (None, None))
        if steps is None:
            if len(block.steps) >= _MOST_PLACES:
                block.steps.clear()
            steps = self._find_steps(offsets, block.parts, starts)
            block.steps[key] = (self, steps)  # which keeps the id
        for sums, result, others in steps:
            for combine, _, _, parts, out, count in sums:
                self._add_up(combine, parts[self._me], parts, out, count)
            for other in others:
                other[...] = result
        self._board.step()

    def _add_up(
        self, combine: Any, x: Any, parts: list[Any], out: Any, count: Any
    ) -> None:
        """Add up ``x`` and the parts of the other ranks, in the order of the ranks."""
        me = self._me
        first = parts[0] if me else x
        second = x if me == 1 else parts[1]
        try:
            combine(first, second, out=out)
        except IGNORED:  # the sum is whole
            pass
        for rank in range(2, self._ranks):
            try:
                combine(out, x if rank == me else parts[rank], out=out)
            except IGNORED:
                pass
        if count is not None:
            try:
                np.true_divide(out, count, out=out)
            except IGNORED:
                pass

    def _find_entries(self, offset: int) -> list[list[_Entry]]:
        place = self._view(self._me, offset)
        if len(self._entries) >= _MOST_PLACES:
            self._entries.clear()
        found = self._entries[offset] = [
            [
                (leaf, part, place[start:stop].view(piece.dtype))
                for leaf, part, start, stop in piece.entries
            ]
            for piece in self._pieces
        ]
        return found

    def _find_steps(
        self,
        offsets: tuple[int, ...],
        sources: list[Any] | None = None,
        starts: list[int] | None = None,
    ) -> list[_Step]:
        """Return what is done in each piece.

        Args:
            offsets: for each rank where its place is.
            sources: for each rank the memory that has its arrays; None: its place.
            starts: for each leaf where it begins there.
        """
        places = [self._view(rank, offset) for rank, offset in enumerate(offsets)]
        steps = []
        for piece in self._pieces:
            sums = []
            for leaf, which, start, stop in piece.own:
                shift = 0 if starts is None else starts[leaf] - self._starts[leaf]
                parts = [
                    source[start + shift : stop + shift].view(piece.dtype)
                    for source in sources or places
                ]
                out = places[self._me][start:stop].view(piece.dtype)
                sums.append((piece.combine, leaf, which, parts, out, piece.count))
            slices = [place[piece.start : piece.stop] for place in places]
            # The next rank first, so that not all write to one.
            others = slices[self._me + 1 :] + slices[: self._me]
            steps.append((sums, slices[self._me], others))
        return steps

    def _view(self, rank: int, offset: int) -> Any:
        """Return the place of a rank.

        Of this rank too, it does not share its base with the results: the arena counts
        the references to what it gave out.
        """
        return self._arena.parts[rank][offset : offset + self.nbytes]


def _lay_out(
    leaves: list[HostedLeaf], rank: int, ranks: int
) -> tuple[list[int], int, list[_Piece]]:
    """Return where each leaf begins, the size of all, and the pieces.

    Leaves that are reduced alike lie side by side, each on a line of the cache.
    """
    groups: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves):
        groups.setdefault((leaf.dtype, leaf.op, leaf.mean), []).append(number)
    starts = [0] * len(leaves)
    end = 0
    pieces: list[_Piece] = []
    for (dtype, op, mean), members in groups.items():
        first = end
        spans = []
        for number in members:
            starts[number] = end
            stop = end + math.prod(leaves[number].shape) * dtype.itemsize
            spans.append((number, end, stop))
            end = -(-stop // LINE) * LINE
        lines = (end - first) // LINE
        count = max(1, round((end - first) / _PIECE))
        for number in range(count):
            low, high = lines * number // count, lines * (number + 1) // count
            edges = [
                first + (low + (high - low) * k // ranks) * LINE
                for k in range(ranks + 1)
            ]
            start, stop = edges[rank], edges[rank + 1]
            entries = _clip(spans, edges[0], start, dtype)
            entries += _clip(spans, stop, edges[-1], dtype)
            own = _clip(spans, start, stop, dtype)
            divisor = dtype.type(ranks) if mean else None
            pieces.append(
                _Piece(dtype, COMBINE[op], divisor, entries, own, start, stop)
            )
    return starts, end, pieces


def _clip(
    spans: list[tuple[int, int, int]], low: int, high: int, dtype: Any
) -> list[_Part]:
    """Return the parts of leaves that are between two bytes of the place."""
    size = dtype.itemsize
    parts: list[_Part] = []
    for number, start, stop in spans:
        a, b = max(start, low), min(stop, high)
        if a >= b:
            continue
        which = slice((a - start) // size, (b - start) // size)
        parts.append((number, None if (a, b) == (start, stop) else which, a, b))
    return parts
