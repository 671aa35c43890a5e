"""The plans of all-gathers, for nests of one structure.

A plan holds everything that does not depend on values: it is made once for a call, a
structure, dtypes, and shapes without the axis. The lengths along the axis may differ
between ranks and between calls, so the ranks exchange them:

- `CoreGather`, for host arrays on one node: the lengths are sent with the header, and
  small arrays too, which then takes one exchange. Large arrays: every rank makes its
  results in its arena, as if all lengths were the same, and says in the header where
  they are; then each writes its arrays to the results of all. If lengths differ, the
  results are made again, and another header says where. If the arena of a rank is full,
  every rank sends its arrays to all, piece by piece.
- `MpiGather`, for all others: the header says whether the lengths are the same on all
  ranks, which is the usual case. Otherwise they are exchanged. Then MPI concatenates
  (``Iallgather``, ``Iallgatherv``), once for each array, or once for all if they are
  small.
- `BetweenGather`, the same for few ranks without shared memory: their headers carry the
  lengths, and arrays that have room behind them.

No memory is written while it is read: for small arrays see ``channel.h``. A rank
returns its results after a step that all make when they have read them; until then they
are referred to here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, NoReturn, TypeAlias

import numpy as np

from mpidist import _native
from mpidist._agreement.channel import LEFT, NOWHERE, LeftError
from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call, fingerprint
from mpidist._base import backend
from mpidist._base.memory import LINE
from mpidist._base.types import Array, DType, HostArray, Shape
from mpidist._engine.buckets import Results
from mpidist._engine.node import Node
from mpidist._engine.pool import Pool
from mpidist._engine.transports import Transports

# Arrays of a nest are packed for MPI below this average and this total size.
_PACKED_BYTES: Final = 16 * 1024
_PACKED_BYTES_IN_ALL: Final = 2**20
# Up to this size results are allocated before lengths are known, as if they were the
# same on all ranks.
_GUESSED_BYTES: Final = 256 * 2**20
_QUICK_BYTES: Final = 32 * 1024  # which travel with the header on one node
Lengths: TypeAlias = Sequence[int]
"""The length of each leaf along the axis, on one rank."""
Index: TypeAlias = tuple[slice, ...]
"""Where in a result the array of one rank is."""
_HAVE_MEMORY: Final = Call("all_gather, with memory for the result")


@dataclasses.dataclass(frozen=True, slots=True)
class GatherLeaf:
    """What is known of a leaf: everything except its values and its length.

    Attributes:
        dtype: of the elements.
        before: the sizes of the dimensions before the axis.
        after: of those after it.
        row_bytes: bytes of an array of length 1.
        is_flat: whether the arrays of the ranks are contiguous in the result.
    """

    dtype: DType
    before: Shape
    after: Shape
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

    def shape(self, length: int) -> Shape:
        """Return the shape of an array of this length along the axis."""
        return (*self.before, length, *self.after)


@dataclasses.dataclass(frozen=True)
class GatherSignature:
    """What is known of a call before its values and lengths.

    Attributes:
        call: what the header says.
        leaves: of the nest.
        transports: of the call.
        on_host: whether all arrays are on the host, on all ranks.
    """

    call: Call
    leaves: list[GatherLeaf]
    transports: Transports
    on_host: bool


def make(
    guard: Guard, signature: GatherSignature, node: Node | None, pool: Pool
) -> CoreGather | MpiGather:
    """Return the plan of a signature; of the same class on all ranks.

    Args:
        guard: of the strategy.
        signature: of the calls.
        node: what all ranks share, if they are on one node.
        pool: private memory for results.
    """
    is_shared = signature.on_host and signature.transports.host.name == "shared"
    if node is not None and is_shared:
        room = _native.core.EAGER_BYTES - 8 * len(signature.leaves)
        if room > LINE:
            return CoreGather(guard, signature, node)
    if signature.on_host and _gathers_behind_headers(guard, len(signature.leaves)):
        return BetweenGather(guard, signature, pool)
    return MpiGather(guard, signature, pool)


def _gathers_behind_headers(guard: Guard, leaves: int) -> bool:
    """Return whether headers carry the lengths of so many leaves, of each rank."""
    channel: _native.Between = guard.channel
    if _native.core is None or type(channel) is not _native.core.Between:
        return False
    fits = 8 * leaves + LINE <= channel.room
    return guard.enabled and not channel.merges and fits


def _new_core(
    channel: _native.Channel | _native.Between, guard: Guard, signature: GatherSignature
) -> _native.Gather:
    """Return the nest in the core."""
    rows = []
    for leaf in signature.leaves:
        before = math.prod(leaf.before)
        row = math.prod(leaf.after) * leaf.dtype.itemsize
        rows.append((before, row))
    return _native.core.Gather(
        channel, rows, signature.call.fingerprint, guard.patience_ms
    )


# --- through the core -----------------------------------------------------------------


class _Target(NamedTuple):
    """The results of a gather.

    Attributes:
        offset: of their memory in this rank's arena; ``NOWHERE`` if it had no room.
        results: views of that memory; private memory, if it had no room.
    """

    offset: int
    results: list[Array]


class CoreGather:
    """All-gathers host arrays of one node; small ones travel with the header."""

    def __init__(self, guard: Guard, signature: GatherSignature, node: Node) -> None:
        leaves, transports = signature.leaves, signature.transports
        self._guard = guard
        self.call: Call = signature.call
        self._leaves = leaves
        self._axes = [leaf.axis for leaf in leaves]
        self.node = node
        self._transport = transports.host
        self._core = _new_core(node.channel, guard, signature)
        self._raw = any(backend.is_bfloat16(leaf.dtype) for leaf in leaves)
        alone = len(leaves) == 1 and not self._raw
        self.quick: _native.Gather = self._core if alone else None
        self.quick_bytes: int = _QUICK_BYTES

    def __call__(
        self, arrays: Sequence[Array], timeout: float | None = None
    ) -> Results:
        """Return the results. Collective.

        Args:
            arrays: the leaves, in any order of memory.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        guard, call, meet = self._guard, self.call, self._core.meet
        lengths = tuple([x.shape[k] for x, k in zip(arrays, self._axes, strict=True)])
        sources = list(arrays)
        if self._raw:
            sources = _as_buffers(sources)
        guess, offset = None, _native.core.NOWHERE
        if not self._core.fits(lengths):
            try:
                guess = self._reserve(tuple([n * self.node.size for n in lengths]))
            except Exception as error:
                raise guard.fail(call, error, "invalid") from None
            offset = guess.offset
        number = call.fingerprint
        patience = guard.enter(call, timeout)
        try:
            status = meet(sources, lengths, number, patience, offset)
            if status is None:  # not contiguous
                sources = [x.copy("C") for x in sources]
                status = meet(sources, lengths, number, patience, offset)
        except BaseException as error:
            raise guard.leave_payload(call, error) from None
        return self._conclude(status, sources, lengths, guess, timeout)

    def concluded(self, status: int, x: HostArray, result: None) -> Array:
        """End a call of `quick` that has not given a result; see `_native`."""
        lengths = (x.shape[self._axes[0]],)
        found: Array = self._conclude(status, [x], lengths, None, None)[0]
        return found

    def interrupted(self, error: BaseException) -> NoReturn:
        """End a call of `quick` that raised."""
        raise self._guard.leave_payload(self.call, error) from None

    def _conclude(
        self,
        status: int,
        sources: list[Array],
        lengths: Lengths,
        guess: _Target | None,
        timeout: float | None,
    ) -> Results:
        """Return the results, after a header that had this status.

        Args:
            status: of the header.
            sources: the leaves as the core took them.
            lengths: of the leaves.
            guess: the results if all lengths are the same; None: small leaves.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        guard, meet, number = self._guard, self._core.meet, self.call.fingerprint
        if status:
            offset = _native.core.NOWHERE if guess is None else guess.offset
            guard.conclude(
                status, lambda ms: meet(sources, lengths, number, ms, offset)
            )
        else:
            guard.count()
        totals = self._core.totals()
        if totals is None:
            _, _, same_lengths, in_arenas, _ = self.node.channel.verdict
            if guess is not None and same_lengths and in_arenas:
                return guess.results
            return self._gather_again(sources, timeout)
        try:  # of a small result: the others learn of it with the next call
            results: Results = [
                np.empty(leaf.shape(n), leaf.dtype)
                for leaf, n in zip(self._leaves, totals, strict=True)
            ]
        except MemoryError as error:
            raise guard.fail(self.call, error, "invalid") from None
        self._core.get(_as_buffers(results) if self._raw else results)
        return results

    def _gather_again(self, sources: list[Array], timeout: float | None) -> Results:
        """Gather large arrays, now that all lengths are known."""
        guard = self._guard
        rows = self._core.lengths()
        try:
            target = self._reserve(tuple([sum(n) for n in zip(*rows, strict=True)]))
        except Exception as error:
            raise guard.fail(self.call, error, "invalid") from None
        in_arenas = guard.agree_offset(_HAVE_MEMORY, target.offset, timeout)
        try:
            if not in_arenas:
                self._send_all(rows, sources, target.results)
            elif self._core.spread(sources) == LEFT:
                raise LeftError(self.node.channel.who)
        except BaseException as error:
            raise guard.leave_payload(self.call, error) from None
        return target.results

    def _reserve(self, totals: tuple[int, ...]) -> _Target:
        """Return memory for results of these lengths."""
        starts = self._core.layout(totals)
        slot = self.node.pool.take(starts[-1])
        results: list[Array] = []
        for leaf, n, start in zip(self._leaves, totals, starts[:-1], strict=True):
            shape = leaf.shape(n)
            if slot is None:
                results.append(np.empty(shape, leaf.dtype))
            else:
                in_slot: Callable[..., Array] = np.ndarray
                results.append(in_slot(shape, leaf.dtype, slot, start))
        return _Target(_native.core.NOWHERE if slot is None else slot.offset, results)

    def _indices(self, rows: list[Lengths]) -> list[list[Index]]:
        """Return the indices of the arrays of each rank in the results."""
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

    def _send_all(
        self, rows: list[Lengths], sources: list[Array], results: list[Array]
    ) -> None:
        """Send the arrays of every rank to all others."""
        own, targets = self.node.rank, results
        if self._raw:
            targets = _as_buffers(results)
        for root, indices in enumerate(self._indices(rows)):
            for where, x, result in zip(indices, sources, targets, strict=True):
                part = x if root == own else np.ascontiguousarray(result[where])
                self._transport.broadcast(backend.as_bytes(part), root)
                result[where] = part


def _as_buffers(arrays: list[Array]) -> list[Array]:
    """Return arrays with the buffer protocol, which bfloat16 lacks."""
    return [x.view(np.uint16) if backend.is_bfloat16(x.dtype) else x for x in arrays]


# --- by MPI ---------------------------------------------------------------------------


class _Packed(NamedTuple):
    """The bytes of this rank's arrays, and memory for those of all ranks."""

    send: HostArray
    receive: HostArray


class _Memory(NamedTuple):
    """Memory of an all-gather by transports.

    Attributes:
        results: of each leaf.
        spaces: where a leaf is received, if not in its result.
        packed: the bytes of this rank and of all ranks, if leaves are packed.
    """

    results: list[Array]
    spaces: list[Array | None]
    packed: _Packed | None


class MpiGather:
    """All-gathers arrays of any kind by the transports of a call."""

    def __init__(self, guard: Guard, signature: GatherSignature, pool: Pool) -> None:
        self._guard = guard
        self.call: Call = signature.call
        self._leaves = signature.leaves
        self._transports = signature.transports
        self._comm = signature.transports.host.comm
        self._pool = pool
        self._packs = signature.on_host and len(signature.leaves) > 1
        self.quick_bytes: int = 0  # of arrays that travel with the header

    def __call__(
        self, arrays: Sequence[Array], timeout: float | None = None
    ) -> Results:
        """Return the results. Collective.

        Args:
            arrays: the leaves, in any order of memory.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        with self._comm.traffic.timed():
            return self._gather(arrays, timeout)

    def _gather(self, arrays: Sequence[Array], timeout: float | None) -> Results:
        guard, comm = self._guard, self._comm
        pairs = zip(arrays, self._leaves, strict=True)
        lengths = [int(x.shape[leaf.axis]) for x, leaf in pairs]
        # As if all ranks had arrays of these lengths.
        rows: list[Lengths] = [lengths] * comm.size
        memory: _Memory | None = None
        try:
            sends = [backend.contiguous(x) for x in arrays]
            if self._is_guessed(lengths):
                memory = self._reserve(arrays, rows)
        except Exception as error:
            raise guard.fail(self.call, error, "invalid") from None
        same = False
        if guard.enabled:
            value = lengths[0] if len(lengths) == 1 else fingerprint(str(lengths))
            same = guard.agree_and_compare(self.call, value, timeout)
        else:
            guard.agree(self.call)  # that the strategy can be used
        if not same:
            rows = list(comm.all_gather_integers(lengths))
        return self._move(sends, rows, memory, timeout)

    def _move(
        self,
        sends: list[Array],
        rows: list[Lengths],
        memory: _Memory | None,
        timeout: float | None,
    ) -> Results:
        """Return the results, now that all know the lengths of all. Collective.

        Args:
            sends: the leaves, contiguous.
            rows: the lengths of each rank.
            memory: for results, if all lengths were those of this rank.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        guard, own = self._guard, rows[self._comm.rank]
        same = all(row == own for row in rows)
        if not (same and memory is not None):  # alike: see `BetweenGather.quick_bytes`
            try:
                if memory is None or not same:
                    memory = self._reserve(sends, rows)
            except Exception as error:
                raise guard.fail(self.call, error, "invalid") from None
            guard.agree(_HAVE_MEMORY, timeout)
        assert memory is not None
        results, spaces, packed = memory
        if packed is not None:
            self._gather_packed(sends, packed, rows, results)
            return list(results)
        for i, leaf in enumerate(self._leaves):
            counts = [row[i] * leaf.row_bytes for row in rows]
            send = backend.as_bytes(sends[i])
            transport = self._transports.of(sends[i])
            space = spaces[i]
            if space is None:
                transport.all_gather(send, backend.as_bytes(results[i]), counts)
            else:
                transport.all_gather(send, space, counts)
                starts = [0, *itertools.accumulate(counts)]
                _unpack(leaf, space, starts, [row[i] for row in rows], results[i])
        return list(results)

    def _is_guessed(self, lengths: Lengths) -> bool:
        """Whether results are allocated before lengths are known; alike if they are."""
        return self._nbytes(lengths) * self._comm.size <= _GUESSED_BYTES

    def _reserve(self, arrays: Sequence[Array], rows: list[Lengths]) -> _Memory:
        results: list[Array] = []
        spaces: list[Array | None] = []
        counts = [self._nbytes(row) for row in rows]
        packed: _Packed | None = None
        limit = min(_PACKED_BYTES * len(self._leaves), _PACKED_BYTES_IN_ALL)
        if self._packs and max(counts) <= limit:
            own = counts[self._comm.rank]
            packed = _Packed(np.empty(own, np.uint8), np.empty(sum(counts), np.uint8))
        for i, (x, leaf) in enumerate(zip(arrays, self._leaves, strict=True)):
            total = sum(row[i] for row in rows)
            shape, space = leaf.shape(total), None
            result: Array
            if backend.is_device_array(x):
                result = backend.empty_like(x, shape, leaf.dtype)
            else:
                result = self._pool.empty(shape, leaf.dtype)
            if not leaf.is_flat and packed is None:
                space = backend.empty_like(x, (total * leaf.row_bytes,), np.uint8)
            results.append(result)
            spaces.append(space)
        return _Memory(results, spaces, packed)

    def _nbytes(self, row: Lengths) -> int:
        return sum(
            leaf.row_bytes * n for leaf, n in zip(self._leaves, row, strict=True)
        )

    def _gather_packed(
        self,
        sends: list[Array],
        packed: tuple[HostArray, HostArray],
        rows: list[Lengths],
        results: list[Array],
    ) -> None:
        """Gather all arrays as one message."""
        send, receive = packed
        np.concatenate([backend.as_bytes(backend.to_host(x)) for x in sends], out=send)
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


class BetweenGather(MpiGather):
    """All-gathers host arrays of few ranks; small ones travel with the header."""

    def __init__(self, guard: Guard, signature: GatherSignature, pool: Pool) -> None:
        super().__init__(guard, signature, pool)
        self._core = _new_core(guard.channel, guard, signature)
        self._raw = any(backend.is_bfloat16(leaf.dtype) for leaf in self._leaves)
        alone = len(self._leaves) == 1 and not self._raw
        self.quick: _native.Gather = self._core if alone else None
        # Not larger ones: a rank that comes by Python has memory for the result before
        # the lengths are known, and agrees on it with nobody if all are the same.
        channel: _native.Between = guard.channel
        self.quick_bytes = channel.room - LINE

    def _gather(self, arrays: Sequence[Array], timeout: float | None) -> Results:
        guard, meet, number = self._guard, self._core.meet, self.call.fingerprint
        pairs = zip(arrays, self._leaves, strict=True)
        lengths = tuple([int(x.shape[leaf.axis]) for x, leaf in pairs])
        memory: _Memory | None = None
        try:
            sends: list[Array] = [np.ascontiguousarray(x) for x in arrays]
            sources = _as_buffers(sends) if self._raw else sends
            if not self._core.fits(lengths) and self._is_guessed(lengths):
                memory = self._reserve(sends, [lengths] * self._comm.size)
        except Exception as error:
            raise guard.fail(self.call, error, "invalid") from None

        def exchange(patience: int) -> int:
            status: int = meet(sources, lengths, number, patience, NOWHERE)
            return status

        patience = guard.enter(self.call, timeout)
        try:
            status = exchange(patience)
        except BaseException as error:
            raise guard.leave_payload(self.call, error) from None
        guard.conclude(status, exchange)
        return self._conclude(sends, memory, timeout)

    def concluded(self, status: int, x: HostArray, result: None) -> Array:
        """End a call of `quick` that has not given a result; see `_native`."""
        lengths = (x.shape[self._leaves[0].axis],)
        meet, number = self._core.meet, self.call.fingerprint
        self._guard.conclude(status, lambda ms: meet([x], lengths, number, ms, NOWHERE))
        found: Array = self._conclude([x], None, None)[0]
        return found

    def interrupted(self, error: BaseException) -> NoReturn:
        """End a call of `quick` that raised."""
        raise self._guard.leave_payload(self.call, error) from None

    def _conclude(
        self, sends: list[Array], memory: _Memory | None, timeout: float | None
    ) -> Results:
        """Return the results, after a header of all ranks with their lengths."""
        totals = self._core.totals()
        if totals is None:
            return self._move(sends, self._core.lengths(), memory, timeout)
        try:  # of a small result: the others learn of it with the next call
            results: Results = [
                np.empty(leaf.shape(n), leaf.dtype)
                for leaf, n in zip(self._leaves, totals, strict=True)
            ]
        except MemoryError as error:
            raise self._guard.fail(self.call, error, "invalid") from None
        self._core.get(_as_buffers(results) if self._raw else results)
        return results


def _unpack(
    leaf: GatherLeaf, raw: Array, starts: list[int], lengths: list[int], result: Array
) -> None:
    """Copy the arrays of all ranks, given their first bytes, into the result."""
    first = 0
    for start, length in zip(starts, lengths, strict=False):
        part = raw[start : start + length * leaf.row_bytes]
        where = (*[slice(None)] * leaf.axis, slice(first, first + length))
        result[where] = backend.from_bytes(part, leaf.dtype, leaf.shape(length))
        first += length
