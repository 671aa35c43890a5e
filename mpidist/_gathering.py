"""The ways of an all-gather, for nests of one structure.

What does not depend on the values is made once for a call, a structure, dtypes and
shapes without the axis. How long the arrays are along the axis may differ from rank to
rank, and from call to call. So the ranks have to tell each other:

- `SharedGather`, for host arrays on one node: the lengths are published with the header
  of the guard, and beside them the arrays themselves, where those of this rank are
  small. If those of all ranks are, one exchange was all. If not, every rank has its
  results in its part of the arena, and its own arrays in them, says where that is
  (`Board.note`), and copies those of the others from their results. It guesses that
  the lengths are the same on all ranks, and so does this with the same header; where
  they are not, with another. Where a rank has no room there, the arrays go in pieces
  through the input areas of the transport.
- `MpiGather`, for all others: the header says whether the lengths are the same on all
  ranks, as they mostly are. Only if not they are exchanged. Then MPI concatenates, once
  for each array, or once for all where they are small.

Why nothing is written that is still read: of the fused places see `_lean`, whose they
are. A rank returns its results when all have ticked for having read them; until then
they are referred to here. The input areas are used by turns, piece by piece, with one
step of the board for each: a rank writes piece k + 2 after the step of k + 1, for which
every rank has ticked, which it does when it has read k. The first piece comes after a
header, which a rank begins when it has left all earlier calls, and a last step ends the
last one.

Measured on 2 ranks with 256 KiB, 1 and 4 MiB of each, as a ratio to Allgather (Open MPI
and MPICH): through the arena 1.6 1.2, 0.8 0.8, 1.0 0.8; in pieces of 512 KiB 2.6 1.6,
1.5 1.3, 1.1 1.1. Reading the memory of the other process (process_vm_readv) was as fast
as pieces, and is not allowed on every system.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mpidist import _arrays
from mpidist._board import SPARE_WORDS
from mpidist._pool import SMALLEST
from mpidist._reports import Call, fingerprint
from mpidist._transports import NOWHERE, SharedTransport, Transports

if TYPE_CHECKING:
    from mpidist._guard import Guard
    from mpidist._pool import Pool

_LINE: Final = 64
_WORD: Final = 8
_MOST_WAYS: Final = 256
_MOST_SCHEDULES: Final = 16
# Arrays of a nest that are smaller on average, and in all, are packed for MPI.
_PACKED_BYTES: Final = 16 * 1024
_PACKED_BYTES_IN_ALL: Final = 2**20
# Memory for results up to this is made before lengths are known, as if all had those
# of this rank.
_GUESSED_BYTES: Final = 256 * 2**20
_HAVE_MEMORY: Final = Call("all_gather, with memory for the result")


@dataclasses.dataclass(frozen=True, slots=True)
class GatherLeaf:
    """What is known of a leaf: everything but its values, and its length.

    Attributes:
        dtype: of the elements.
        before: the sizes of the dimensions before the axis.
        after: of those after it.
        row_bytes: bytes of an array of length 1.
        is_flat: whether the arrays of the ranks lie side by side in the result.
    """

    dtype: Any
    before: tuple[int, ...]
    after: tuple[int, ...]
    row_bytes: int = dataclasses.field(init=False, compare=False)
    is_flat: bool = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        before = math.prod(self.before)
        size = before * math.prod(self.after) * self.dtype.itemsize
        object.__setattr__(self, "row_bytes", size)
        object.__setattr__(self, "is_flat", before == 1)

    @property
    def axis(self) -> int:
        """The axis, from 0."""
        return len(self.before)

    def shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of an array of this length along the axis."""
        return (*self.before, length, *self.after)


def make(
    guard: Guard,
    call: Call,
    leaves: list[GatherLeaf],
    transports: Transports,
    pool: Pool,
    *,
    anywhere: bool,
) -> SharedGather | MpiGather:
    """Return the way for leaves of these kinds; alike on all ranks.

    Args:
        guard: of the strategy.
        call: what the header says.
        leaves: what is known of the arrays.
        transports: of the call.
        pool: where memory for results comes from.
        anywhere: whether some of the arrays may be on a GPU, on some rank.
    """
    host = transports.host
    if (
        isinstance(host, SharedTransport)
        and not anywhere
        and (len(leaves) <= SPARE_WORDS or _WORD * len(leaves) <= host.fused_bytes)
    ):
        return SharedGather(guard, call, leaves, host, pool)
    return MpiGather(guard, call, leaves, transports, pool, packs=not anywhere)


# --- through memory that the ranks share ----------------------------------------------

# The arrays of all ranks, the axis, and the shape of the result or None.
_Parts = tuple[list[Any], int, tuple[int, ...] | None]
# Part of a result (index into its two-dimensional view), and what is copied there.
_Copy = tuple[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Own:
    """How this rank publishes arrays of certain lengths.

    Attributes:
        words: the lengths, as bytes.
        places: for even and odd headers the places of the arrays; none where the
            arrays are not small.
        nbytes: of the arrays.
        alike: what all ranks say, if their arrays have these lengths too, and
        guess: what follows then; None where they are small.
    """

    words: bytes
    places: tuple[list[Any], list[Any]]
    nbytes: int
    alike: bytes
    guess: _Way | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """What follows on the lengths of all ranks.

    Attributes:
        lengths: for each rank those of its leaves.
        shapes: of the results.
        starts: where they begin in a place of the arena, and
        nbytes: its size.
        indices: for each rank where in the results its arrays go.
        parts: for even and odd headers, and for each leaf, the arrays of all ranks in
            the fused places, the axis, and where its result has memory of the pool the
            shape; None if the arrays of some rank are not there.
    """

    lengths: list[tuple[int, ...]]
    shapes: list[tuple[int, ...]]
    starts: list[int]
    nbytes: int
    indices: list[list[Any]]
    parts: tuple[list[_Parts], list[_Parts]] | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """One piece of each rank.

    Attributes:
        own: for each part of this rank's piece its leaf, where it is in the flat
            array, its place in the area, and where it goes in the result.
        others: the leaf of each part of the others' pieces, and the copies.
    """

    own: list[tuple[int, slice, Any, list[tuple[Any, slice]]]]
    others: list[tuple[int, list[_Copy]]]


class SharedGather:
    """All-gathers host arrays of one node; small ones travel with the header."""

    def __init__(
        self,
        guard: Guard,
        call: Call,
        leaves: list[GatherLeaf],
        transport: SharedTransport,
        pool: Pool,
    ) -> None:
        self._guard = guard
        self._call = call
        self._data = guard.pack(call, 0)
        self._leaves = leaves
        self._axes = [leaf.axis for leaf in leaves]
        self._transport = transport
        self._traffic = transport.comm.traffic
        self._me = transport.comm.local_rank
        self._ranks = transport.comm.local_size
        self._pool = pool
        self._struct = struct.Struct(f"{len(leaves)}q")
        whole, byte = (transport.fused_bytes,), np.dtype(np.uint8)
        self._areas = [transport.fused_parts(turn, whole, byte) for turn in (0, 1)]
        # The lengths have a place on the board, or else before the arrays.
        nbytes = _WORD * len(leaves)
        self._start = 0
        if len(leaves) <= SPARE_WORDS:
            beside = [transport.board.beside(turn) for turn in (0, 1)]
        else:
            self._start = _round_up(nbytes)
            beside = [[memoryview(x) for x in areas] for areas in self._areas]
        self._words = [[words[:nbytes] for words in rows] for rows in beside]
        self._own: dict[tuple[int, ...], _Own] = {}
        self._ways: dict[bytes, _Way] = {}
        self._schedules: dict[bytes, list[_Step]] = {}

    def __call__(self, arrays: Sequence[Any], timeout: float | None = None) -> Any:
        """Return the results. Collective.

        Args:
            arrays: the leaves, in any order of memory.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        start = time.perf_counter()
        lengths = tuple([x.shape[k] for x, k in zip(arrays, self._axes, strict=True)])
        own = self._own.get(lengths)
        if own is None:
            own = self._place(lengths)
        board = self._transport.board
        guessed: list[Any] = []
        offset = NOWHERE
        if own.guess is not None:
            try:
                guessed, offset = self._reserve(own.guess, arrays)
            except MemoryError:  # which there is time for when all lengths are known
                pass
        while True:
            turn = board.headers & 1
            words = self._words[turn]
            words[self._me][:] = own.words
            for place, x in zip(own.places[turn], arrays, strict=False):
                place[...] = x
            if own.guess is not None:
                board.note(offset)
            if self._agree(timeout):
                break  # else the ranks have met twice, and the places may be in use
        said = b"".join(words)
        # What is asked here is alike on all ranks; whose arrays are not small has noted
        # where its results are.
        guess = own.guess if said == own.alike else None
        way = guess or self._ways.get(said) or self._find_way(said)
        results = []
        if guess is not None and min(board.notes()) != NOWHERE:
            results = guessed
            self._read(way, board.notes(), results)
        elif way.parts is None:
            del guessed
            results = self._move(arrays, said, way, timeout)
        else:
            try:
                for (parts, axis, shape), x in zip(
                    way.parts[turn], arrays, strict=False
                ):
                    if shape is None:
                        result = np.concatenate(parts, axis)
                    else:
                        result = self._concatenate(parts, axis, shape, x)
                    results.append(result)
            except MemoryError as error:  # of little: the others learn of it later
                raise self._guard.fail(self._call, error, "invalid") from None
        self._traffic.add("Allgatherv", own.nbytes, start)
        return results

    def _agree(self, timeout: float | None) -> bool:
        """Agree; return whether that took one header."""
        guard = self._guard
        if timeout is None or timeout == guard.timeout_seconds:
            return guard.agree_packed(self._call, self._data, 0)
        number = self._transport.board.headers + 1
        guard.agree_softly(self._call, 0, timeout)
        return self._transport.board.headers == number

    def _concatenate(
        self, parts: list[Any], axis: int, shape: tuple[int, ...], own: Any
    ) -> Any:
        """Return what is not quite small, in memory of the pool."""
        parts = list(parts)
        parts[self._me] = own  # which is nearer than its copy
        return np.concatenate(parts, axis, self._pool.empty(shape, own.dtype))

    def _offsets(self, lengths: tuple[int, ...]) -> list[int]:
        """Return where the arrays of a rank begin in its fused place, and the end."""
        offsets = [self._start]
        for leaf, length in zip(self._leaves, lengths, strict=True):
            offsets.append(_round_up(offsets[-1] + leaf.row_bytes * length))
        return offsets

    def _is_small(self, lengths: tuple[int, ...]) -> bool:
        return self._offsets(lengths)[-1] <= self._transport.fused_bytes

    def _views(self, turn: int, rank: int, lengths: tuple[int, ...]) -> list[Any]:
        """Return the places of a rank's arrays of these lengths."""
        area = self._areas[turn][rank]
        return [
            area[a : a + leaf.row_bytes * n].view(leaf.dtype).reshape(leaf.shape(n))
            for leaf, n, a in zip(
                self._leaves, lengths, self._offsets(lengths)[:-1], strict=True
            )
        ]

    def _place(self, lengths: tuple[int, ...]) -> _Own:
        places: tuple[list[Any], list[Any]] = ([], [])
        if self._is_small(lengths):
            me = self._me
            places = (self._views(0, me, lengths), self._views(1, me, lengths))
        nbytes = sum(
            leaf.row_bytes * n for leaf, n in zip(self._leaves, lengths, strict=True)
        )
        if len(self._own) >= _MOST_WAYS:
            self._own.clear()
        words = self._struct.pack(*lengths)
        alike = words * self._ranks
        guess = None if self._is_small(lengths) else self._find_way(alike)
        own = self._own[lengths] = _Own(words, places, nbytes, alike, guess)
        return own

    def _find_way(self, said: bytes) -> _Way:
        unpack, nbytes = self._struct.unpack_from, self._struct.size
        lengths = [unpack(said, rank * nbytes) for rank in range(self._ranks)]
        shapes = [
            leaf.shape(sum(row[i] for row in lengths))
            for i, leaf in enumerate(self._leaves)
        ]
        starts = [0]
        for leaf, shape in zip(self._leaves, shapes, strict=True):
            starts.append(_round_up(starts[-1] + leaf.row_bytes * shape[leaf.axis]))
        parts = None
        if all(self._is_small(row) for row in lengths):
            turns = []
            for turn in (0, 1):
                rows = [self._views(turn, k, row) for k, row in enumerate(lengths)]
                turns.append(
                    [
                        (list(column), leaf.axis, self._pooled(leaf, shape))
                        for column, leaf, shape in zip(
                            zip(*rows, strict=True), self._leaves, shapes, strict=True
                        )
                    ]
                )
            parts = (turns[0], turns[1])
        if len(self._ways) >= _MOST_WAYS:
            self._ways.clear()
        way = self._ways[said] = _Way(
            *(lengths, shapes, starts[:-1], starts[-1]),
            *(self._indices(lengths), parts),
        )
        return way

    @staticmethod
    def _pooled(leaf: GatherLeaf, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        nbytes = leaf.row_bytes * shape[leaf.axis]
        return shape if nbytes >= SMALLEST else None

    # --- what is not small -----------------------------------------------------

    def _move(
        self, arrays: Sequence[Any], said: bytes, way: _Way, timeout: float | None
    ) -> list[Any]:
        """Copy all arrays in and out, piece by piece. Collective."""
        guard, board = self._guard, self._transport.board
        try:
            sends = [_arrays.flat(_arrays.contiguous(x)) for x in arrays]
            results, offset = self._reserve(way, arrays)
            steps = self._steps(said, way)
        except Exception as error:
            raise guard.fail(self._call, error, "invalid") from None
        board.note(offset)
        number = board.headers + 1
        guard.agree_softly(_HAVE_MEMORY, 0, timeout)
        offsets = board.notes() if board.headers == number else (NOWHERE,)
        if min(offsets) == NOWHERE:
            self._move_pieces(steps, sends, results)
        else:
            self._read(way, offsets, results)
        return results

    def _reserve(self, way: _Way, arrays: Sequence[Any]) -> tuple[list[Any], int]:
        """Return memory for the results, and where it is in the arena.

        If it is there, this rank's arrays are in it.
        """
        arena = self._transport.arena
        place = None
        if arena is not None and 0 < way.nbytes <= arena.nbytes // 2:
            place = arena.empty(way.nbytes)
        pairs = list(zip(way.shapes, self._leaves, strict=True))
        if place is None:
            return [
                self._pool.empty(shape, leaf.dtype) for shape, leaf in pairs
            ], NOWHERE
        block, offset = place
        results = []
        own = way.indices[self._me]
        for (shape, leaf), start, where, x in zip(
            pairs, way.starts, own, arrays, strict=True
        ):
            result = np.ndarray(shape, leaf.dtype, block, start)
            result[where] = x
            results.append(result)
        return results, offset

    def _indices(self, lengths: list[tuple[int, ...]]) -> list[list[Any]]:
        """Return where in the results the arrays of each rank go."""
        ends = [0] * len(self._leaves)
        rows = []
        for row in lengths:
            indices = []
            for i, (leaf, length) in enumerate(zip(self._leaves, row, strict=True)):
                where = slice(ends[i], ends[i] + length)
                indices.append((*[slice(None)] * leaf.axis, where))
                ends[i] += length
            rows.append(indices)
        return rows

    def _read(self, way: _Way, offsets: Sequence[int], results: list[Any]) -> None:
        """Copy the arrays of the others from their results to the own ones."""
        arena = self._transport.arena
        assert arena is not None
        try:
            for rank, offset in enumerate(offsets):
                if rank == self._me:
                    continue
                part, indices = arena.parts[rank], way.indices[rank]
                for leaf, shape, start, where, result in zip(
                    self._leaves, way.shapes, way.starts, indices, results, strict=True
                ):
                    theirs = np.ndarray(shape, leaf.dtype, part, offset + start)
                    result[where] = theirs[where]
            self._transport.board.step()
        except BaseException as error:
            raise self._guard.leave_payload(self._call, error) from None

    def _move_pieces(
        self, steps: list[_Step], sends: list[Any], results: list[Any]
    ) -> None:
        """Copy all arrays in and out, piece by piece."""
        rows = [
            x.reshape(math.prod(leaf.before), -1) if x.size else x
            for x, leaf in zip(results, self._leaves, strict=True)
        ]
        try:
            for step in steps:
                for i, where, place, targets in step.own:
                    x = sends[i][where]
                    place[...] = x
                    for target, source in targets:
                        out = rows[i][target]
                        out[...] = x[source].reshape(out.shape)
                self._transport.board.step()
                for i, copies in step.others:
                    for target, part in copies:
                        rows[i][target] = part
            self._transport.board.step()
        except BaseException as error:
            raise self._guard.leave_payload(self._call, error) from None

    def _steps(self, said: bytes, way: _Way) -> list[_Step]:
        steps = self._schedules.get(said)
        if steps is None:
            if len(self._schedules) >= _MOST_SCHEDULES:
                self._schedules.clear()
            steps = self._schedules[said] = self._cut(way)
        return steps

    def _cut(self, way: _Way) -> list[_Step]:
        """Cut the arrays of all ranks into pieces."""
        size = self._transport.area_bytes
        pieces = [list(_pieces(self._leaves, lengths, size)) for lengths in way.lengths]
        starts = [
            [0, *itertools.accumulate(row[i] for row in way.lengths)]
            for i in range(len(self._leaves))
        ]
        steps = []
        for number, row in enumerate(itertools.zip_longest(*pieces, fillvalue=())):
            step = _Step([], [])
            areas = self._transport.input_areas(number & 1)
            for rank, piece in enumerate(row):
                for i, first, last, offset in piece:
                    leaf = self._leaves[i]
                    nbytes = (last - first) * leaf.dtype.itemsize
                    place = areas[rank][offset : offset + nbytes].view(leaf.dtype)
                    width = math.prod(leaf.after)
                    targets = list(
                        _rectangles(
                            first,
                            last,
                            starts[i][rank] * width,
                            way.lengths[rank][i] * width,
                        )
                    )
                    if rank == self._me:
                        step.own.append((i, slice(first, last), place, targets))
                        continue
                    copies = []
                    for target, source in targets:
                        part = place[source]
                        if isinstance(target[0], slice):
                            part = part.reshape(target[0].stop - target[0].start, -1)
                        copies.append((target, part))
                    step.others.append((i, copies))
            steps.append(step)
        return steps


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


def _pieces(leaves: list[GatherLeaf], lengths: tuple[int, ...], size: int) -> Any:
    """Yield pieces of a rank's arrays, each of at most ``size`` bytes.

    Each is a list of parts: the leaf, the elements where the part begins and ends, and
    the byte of the piece where it is.
    """
    piece: list[tuple[int, int, int, int]] = []
    used = 0
    for i, (leaf, length) in enumerate(zip(leaves, lengths, strict=True)):
        itemsize = leaf.dtype.itemsize
        count = leaf.row_bytes * length // itemsize
        first = 0
        while first < count:
            last = min(count, first + (size - used) // itemsize)
            if last > first:
                piece.append((i, first, last, used))
                used = _round_up(used + (last - first) * itemsize)
                first = last
            if first < count:
                yield piece
                piece, used = [], 0
    if piece:
        yield piece


def _rectangles(first: int, last: int, column: int, width: int) -> Any:
    """Yield where some elements of an array go in rows of the result.

    The array has rows of ``width`` elements, which begin at ``column`` of the rows of
    the result. With each place comes which of the elements go there.

    Args:
        first: the first of the elements.
        last: the one behind the last.
        column: where the rows of the array begin.
        width: of its rows.
    """
    at = first
    while at < last:
        row, start = divmod(at, width)
        if start or last - at < width:
            stop = min(width, start + last - at)
            target: Any = (row, slice(column + start, column + stop))
            taken = stop - start
        else:
            rows = (last - at) // width
            target = (slice(row, row + rows), slice(column, column + width))
            taken = rows * width
        yield target, slice(at - first, at - first + taken)
        at += taken


# --- by MPI ---------------------------------------------------------------------------


class MpiGather:
    """All-gathers arrays of any kind by the transports of a call."""

    def __init__(
        self,
        guard: Guard,
        call: Call,
        leaves: list[GatherLeaf],
        transports: Transports,
        pool: Pool,
        *,
        packs: bool,
    ) -> None:
        self._guard = guard
        self._call = call
        self._leaves = leaves
        self._transports = transports
        self._comm = transports.host.comm
        self._pool = pool
        self._packs = packs and len(leaves) > 1

    def __call__(self, arrays: Sequence[Any], timeout: float | None = None) -> Any:
        """Return the results. Collective.

        Args:
            arrays: the leaves, in any order of memory.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        with self._comm.traffic.timed():
            return self._gather(arrays, timeout)

    def _gather(self, arrays: Sequence[Any], timeout: float | None) -> list[Any]:
        guard, comm = self._guard, self._comm
        pairs = zip(arrays, self._leaves, strict=True)
        lengths = [int(x.shape[leaf.axis]) for x, leaf in pairs]
        # As if all ranks had arrays of these lengths.
        rows = [lengths] * comm.size
        is_guessed = self._nbytes(lengths) * comm.size <= _GUESSED_BYTES
        memory: Any = None
        try:
            sends = [_arrays.contiguous(x) for x in arrays]
            if is_guessed:
                memory = self._reserve(arrays, rows)
        except Exception as error:
            raise guard.fail(self._call, error, "invalid") from None
        same = False
        if guard.enabled:
            soft = lengths[0] if len(lengths) == 1 else fingerprint(str(lengths))
            same = guard.agree_softly(self._call, soft, timeout)
        else:
            guard.agree(self._call)  # that the strategy can be used
        if not same:
            rows = comm.all_gather_integers(lengths)
        if not (same and is_guessed):  # alike on all ranks
            try:
                if memory is None or any(row != lengths for row in rows):
                    memory = self._reserve(arrays, rows)
            except Exception as error:
                raise guard.fail(self._call, error, "invalid") from None
            guard.agree(_HAVE_MEMORY, timeout)
        results, spaces, packed = memory
        if packed is not None:
            self._gather_packed(sends, packed, rows, results)
            return list(results)
        for i, leaf in enumerate(self._leaves):
            counts = [row[i] * leaf.row_bytes for row in rows]
            send = _arrays.as_bytes(sends[i])
            transport = self._transports.of(sends[i])
            if spaces[i] is None:
                transport.all_gather(send, _arrays.as_bytes(results[i]), counts)
            else:
                transport.all_gather(send, spaces[i], counts)
                starts = [0, *itertools.accumulate(counts)]
                _unpack(leaf, spaces[i], starts, [row[i] for row in rows], results[i])
        return list(results)

    def _reserve(
        self, arrays: Sequence[Any], rows: list[list[int]]
    ) -> tuple[list[Any], list[Any], Any]:
        """Return memory for the results, and for what is received, if not there.

        That is for each of them, or else for all together, if they are packed: those
        of this rank, and those of all.
        """
        results: list[Any] = []
        spaces: list[Any] = []
        counts = [self._nbytes(row) for row in rows]
        packed: Any = None
        limit = min(_PACKED_BYTES * len(self._leaves), _PACKED_BYTES_IN_ALL)
        if self._packs and max(counts) <= limit:
            own = counts[self._comm.rank]
            packed = np.empty(own, np.uint8), np.empty(sum(counts), np.uint8)
        for i, (x, leaf) in enumerate(zip(arrays, self._leaves, strict=True)):
            total = sum(row[i] for row in rows)
            shape, space = leaf.shape(total), None
            if _arrays.is_device_array(x):
                result = _arrays.empty_like(x, shape, leaf.dtype)
            else:
                result = self._pool.empty(shape, leaf.dtype)
            if not leaf.is_flat and packed is None:
                space = _arrays.empty_like(x, (total * leaf.row_bytes,), np.uint8)
            results.append(result)
            spaces.append(space)
        return results, spaces, packed

    def _nbytes(self, row: list[int]) -> int:
        return sum(
            leaf.row_bytes * n for leaf, n in zip(self._leaves, row, strict=True)
        )

    def _gather_packed(
        self, sends: list[Any], packed: Any, rows: list[list[int]], results: list[Any]
    ) -> None:
        """Gather all arrays as one message."""
        send, receive = packed
        np.concatenate([_arrays.as_bytes(x) for x in sends], out=send)
        counts = [self._nbytes(row) for row in rows]
        self._transports.host.all_gather(send, receive, counts)
        starts = [0, *itertools.accumulate(counts)]
        for i, leaf in enumerate(self._leaves):
            lengths = [row[i] for row in rows]
            _unpack(leaf, receive, starts, lengths, results[i])
            starts = [
                start + n * leaf.row_bytes
                for start, n in zip(starts, lengths, strict=False)
            ]


def _unpack(
    leaf: GatherLeaf, raw: Any, starts: list[int], lengths: list[int], result: Any
) -> None:
    """Copy the arrays of all ranks, which begin at these bytes, into the result."""
    first = 0
    for start, length in zip(starts, lengths, strict=False):
        part = raw[start : start + length * leaf.row_bytes]
        where = (*[slice(None)] * leaf.axis, slice(first, first + length))
        result[where] = _arrays.from_bytes(part, leaf.dtype, leaf.shape(length))
        first += length
