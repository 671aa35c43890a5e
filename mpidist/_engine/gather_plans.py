"""The plans of all-gathers, for nests of one structure.

What does not depend on the values is made once for a call, a structure, dtypes and
shapes without the axis. How long the arrays are along the axis may differ from rank to
rank, and from call to call. So the ranks have to tell each other:

- `CoreGather`, for host arrays on one node: the lengths travel with the header, and
  where the arrays of all ranks are small these do too: then one exchange was all. If
  not, every rank makes its results in its arena and copies its own arrays into them;
  all agree on where they are; and each copies the arrays of the others from there.
  Where a rank has no room in its arena, every rank sends its arrays to all, piece by
  piece.
- `MpiGather`, for all others: the header says whether the lengths are the same on all
  ranks, as they mostly are. Only if not they are exchanged. Then MPI concatenates, once
  for each array, or once for all where they are small.

Why nothing is written that is still read: of small arrays see ``channel.h``. A rank
returns its results when all have made a step for having read them; until then they are
referred to here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from mpidist import _native
from mpidist._agreement.channel import LEFT, LeftError
from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call, fingerprint
from mpidist._base import backend
from mpidist._base.memory import LINE, round_up
from mpidist._engine.node import Node
from mpidist._engine.pool import Pool
from mpidist._transports import Transports

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
    node: Node | None,
    pool: Pool,
    *,
    anywhere: bool,
) -> CoreGather | MpiGather:
    """Return the plan for leaves of these kinds; of the same class on all ranks.

    Args:
        guard: of the strategy.
        call: what the header says.
        leaves: what is known of the arrays.
        transports: of the call.
        node: what all ranks share, if they are on one node.
        pool: where memory for results comes from.
        anywhere: whether some of the arrays may be on a GPU, on some rank.
    """
    if node is not None and not anywhere and transports.host.name == "shared":
        room = _native.core.EAGER_BYTES - 8 * len(leaves)
        if room > LINE:
            return CoreGather(guard, call, leaves, transports, node)
    return MpiGather(guard, call, leaves, transports, pool, packs=not anywhere)


# --- through the core -----------------------------------------------------------------


class CoreGather:
    """All-gathers host arrays of one node; small ones travel with the header."""

    def __init__(
        self,
        guard: Guard,
        call: Call,
        leaves: list[GatherLeaf],
        transports: Transports,
        node: Node,
    ) -> None:
        self._guard = guard
        self._call = call
        self._leaves = leaves
        self._axes = [leaf.axis for leaf in leaves]
        self._node = node
        self._transport = transports.host
        self._traffic = transports.host.comm.traffic
        rows = []
        for leaf in leaves:
            before = math.prod(leaf.before)
            row = math.prod(leaf.after) * leaf.dtype.itemsize
            rows.append((before, row))
        self._core = _native.core.Gather(node.channel, rows)
        self._row_bytes = [leaf.row_bytes for leaf in leaves]
        self._raw = any(backend.is_bfloat16(leaf.dtype) for leaf in leaves)

    def __call__(
        self, arrays: Sequence[Any], timeout: float | None = None
    ) -> list[Any]:
        """Return the results. Collective.

        Args:
            arrays: the leaves, in any order of memory.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        guard, call, meet = self._guard, self._call, self._core.meet
        lengths = tuple([x.shape[k] for x, k in zip(arrays, self._axes, strict=True)])
        sources = list(arrays)
        if self._raw:
            sources = _as_buffers(sources)
        number = call.fingerprint
        patience = guard.enter(call, timeout)
        try:
            status = meet(sources, lengths, number, patience)
            if status is None:  # not contiguous
                sources = [x.copy("C") for x in sources]
                status = meet(sources, lengths, number, patience)
        except BaseException as error:
            raise guard.leave_payload(call, error) from None
        if status:
            guard.conclude(status, lambda ms: meet(sources, lengths, number, ms))
        else:
            guard.count()
        totals = self._core.totals()
        self._traffic.calls["Allgatherv"] += 1
        self._traffic.bytes["Allgatherv"] += sum(
            [n * size for n, size in zip(lengths, self._row_bytes, strict=True)]
        )
        if totals is None:
            is_same = self._node.channel.verdict[2]
            rows = [lengths] * self._node.size if is_same else self._core.lengths()
            return self._gather_large(arrays, rows, timeout)
        try:  # of little: the others learn of it with the next call
            results = [
                np.empty(leaf.shape(n), leaf.dtype)
                for leaf, n in zip(self._leaves, totals, strict=True)
            ]
        except MemoryError as error:
            raise guard.fail(call, error, "invalid") from None
        self._core.get(_as_buffers(results) if self._raw else results)
        return results

    def _gather_large(
        self, arrays: Sequence[Any], rows: list[tuple[int, ...]], timeout: float | None
    ) -> list[Any]:
        guard, node = self._guard, self._node
        try:
            indices = self._indices(rows)
            place, starts, shapes, results = self._reserve(rows)
            for result, where, x in zip(
                results, indices[node.rank], arrays, strict=True
            ):
                result[where] = x
        except Exception as error:
            raise guard.fail(self._call, error, "invalid") from None
        placed = guard.agree_place(_HAVE_MEMORY, place, timeout)
        try:
            if placed:
                self._read(starts, shapes, indices, results)
            else:
                self._send_all(indices, results)
        except BaseException as error:
            raise guard.leave_payload(self._call, error) from None
        return results

    def _reserve(
        self, rows: list[tuple[int, ...]]
    ) -> tuple[int, list[int], list[tuple[int, ...]], list[Any]]:
        """Return the place of the results, where each begins in it, and they."""
        starts, shapes, end = [], [], 0
        for i, leaf in enumerate(self._leaves):
            total = sum(row[i] for row in rows)
            starts.append(end)
            shapes.append(leaf.shape(total))
            end += round_up(leaf.row_bytes * total, LINE)
        block = self._node.pool.take(end)
        dtypes = [leaf.dtype for leaf in self._leaves]
        if block is None:
            results = [np.empty(s, d) for s, d in zip(shapes, dtypes, strict=True)]
            return _native.core.NOWHERE, starts, shapes, results
        results = [
            np.ndarray(shape, dtype, block, start)
            for shape, dtype, start in zip(shapes, dtypes, starts, strict=True)
        ]
        return block.offset, starts, shapes, results

    def _indices(self, rows: list[tuple[int, ...]]) -> list[list[Any]]:
        """Return where in the results the arrays of each rank go."""
        ends = [0] * len(self._leaves)
        indices = []
        for row in rows:
            where = []
            for i, (leaf, length) in enumerate(zip(self._leaves, row, strict=True)):
                part = slice(ends[i], ends[i] + length)
                where.append((*[slice(None)] * leaf.axis, part))
                ends[i] += length
            indices.append(where)
        return indices

    def _read(
        self,
        starts: list[int],
        shapes: list[tuple[int, ...]],
        indices: list[list[Any]],
        results: list[Any],
    ) -> None:
        """Copy the arrays of the others from their results to the own ones."""
        node = self._node
        channel, memory = node.channel, node.memory
        places = channel.places()
        for shift in range(1, node.size):
            rank = (node.rank + shift) % node.size
            first = channel.arena(rank) + places[rank]
            for leaf, shape, start, where, result in zip(
                self._leaves, shapes, starts, indices[rank], results, strict=True
            ):
                theirs = np.ndarray(shape, leaf.dtype, memory, first + start)
                result[where] = theirs[where]
        channel.publish()
        if channel.wait() == LEFT:
            raise LeftError(channel.who)

    def _send_all(self, indices: list[list[Any]], results: list[Any]) -> None:
        """Have every rank send its arrays to all."""
        node = self._node
        for root in range(node.size):
            for where, result in zip(indices[root], results, strict=True):
                part = np.ascontiguousarray(result[where])
                self._transport.broadcast(backend.as_bytes(part), root)
                if root != node.rank:
                    result[where] = part


def _as_buffers(arrays: list[Any]) -> list[Any]:
    """Return arrays that have the buffer protocol, which bfloat16 has not."""
    return [x.view(np.uint16) if backend.is_bfloat16(x.dtype) else x for x in arrays]


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
            sends = [backend.contiguous(x) for x in arrays]
            if is_guessed:
                memory = self._reserve(arrays, rows)
        except Exception as error:
            raise guard.fail(self._call, error, "invalid") from None
        same = False
        if guard.enabled:
            value = lengths[0] if len(lengths) == 1 else fingerprint(str(lengths))
            same = guard.agree_and_compare(self._call, value, timeout)
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
            send = backend.as_bytes(sends[i])
            transport = self._transports.of(sends[i])
            if spaces[i] is None:
                transport.all_gather(send, backend.as_bytes(results[i]), counts)
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
            if backend.is_device_array(x):
                result = backend.empty_like(x, shape, leaf.dtype)
            else:
                result = self._pool.empty(shape, leaf.dtype)
            if not leaf.is_flat and packed is None:
                space = backend.empty_like(x, (total * leaf.row_bytes,), np.uint8)
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
        np.concatenate([backend.as_bytes(x) for x in sends], out=send)
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
        result[where] = backend.from_bytes(part, leaf.dtype, leaf.shape(length))
        first += length
