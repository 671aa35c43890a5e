"""The plans of all-gathers, for nests of one structure.

A plan holds everything that does not depend on values: it is made once for a call, a
structure, dtypes, and shapes without the axis. The lengths along the axis may differ
between ranks and between calls, so the ranks exchange them:

- `HeaderGather`, for host arrays of ranks whose headers go through the core: the
  lengths are sent with the header, and small arrays too, which then takes one exchange.
  Large arrays are gathered after it, in one of the two ways below.
- `ArenaGather`, on one node: every rank makes its results in its arena, as if all
  lengths were the same, and says in the header where they are; then each writes its
  arrays to the results of all. If lengths differ, the results are made again, and
  another header says where. If the arena of a rank is full, it is as between nodes.
- `MpiGather`, for all others: MPI concatenates (``Iallgather``, ``Iallgatherv``), once
  for each array, or once for all if they are small. Without `HeaderGather` the header
  says whether the lengths are the same on all ranks, which is the usual case; otherwise
  they are exchanged.

No memory is written while it is read: for small arrays see ``channel.h``. A rank
returns its results after a step that all make when they have read them; until then they
are referred to here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mpidist import _native
from mpidist._agreement.channel import LEFT, NOWHERE, LeftError
from mpidist._agreement.mismatch import Call, fingerprint
from mpidist._base import backend
from mpidist._base.memory import LINE
from mpidist._base.types import Array, DType, HostArray, Shape
from mpidist._engine.node import Node
from mpidist._engine.plan import Plan, Results
from mpidist._engine.resources import Resources
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
_HAVE_MEMORY: Final = Call("all_gather, with memory for the result")


@dataclasses.dataclass(frozen=True, slots=True)
class GatherLeaf:
    """What is known of a leaf: everything except its values and its length.

    Attributes:
        dtype: of the elements.
        before: the sizes of the dimensions before the axis.
        after: of those after it.
        row_bytes: bytes of an array of length 1.
    """

    dtype: DType
    before: Shape
    after: Shape
    row_bytes: int = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        size = math.prod(self.before) * math.prod(self.after) * self.dtype.itemsize
        object.__setattr__(self, "row_bytes", size)

    @property
    def axis(self) -> int:
        """The axis, from 0."""
        return len(self.before)

    @property
    def is_flat(self) -> bool:
        """Whether the arrays of the ranks are contiguous in the result."""
        return math.prod(self.before) == 1

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


def make(resources: Resources, signature: GatherSignature) -> Plan:
    """Return the plan of a signature; of the same class on all ranks."""
    leaves, guard = len(signature.leaves), resources.guard
    by_mpi = MpiGather(resources, signature)
    if not signature.on_host:
        return by_mpi
    node, room = resources.node, _QUICK_BYTES
    is_shared = node is not None and signature.transports.host.name == "shared"
    if is_shared and _native.core.EAGER_BYTES - 8 * leaves > LINE:
        assert node is not None
        large = ArenaGather(resources, signature, node, by_mpi)
        return HeaderGather(resources, signature, node.channel, large, room)
    channel: _native.Between = guard.channel
    if _native.core is None or type(channel) is not _native.core.Between:
        return by_mpi
    fits = 8 * leaves + LINE <= channel.room
    if not guard.enabled or channel.merges or not fits:
        return by_mpi
    # Not larger ones: a rank that comes by Python has memory for the result before the
    # lengths are known, and agrees on it with nobody if all are the same.
    quick_bytes = channel.room - LINE
    return HeaderGather(resources, signature, channel, by_mpi, quick_bytes)


class Memory(NamedTuple):
    """The results of a gather, and what was allocated with them.

    Attributes:
        results: of each leaf.
        offset: of their memory in this rank's arena; `NOWHERE`: they are not in it.
        messages: what MPI sends and receives; for other gathers none.
    """

    results: list[Array]
    offset: int = NOWHERE
    messages: Sequence[_Message] = ()


class HeaderGather(Plan):
    """All-gathers host arrays; lengths and small arrays travel with the header.

    Args:
        resources: of the strategy.
        signature: of the calls.
        channel: exchanges the headers.
        large: gathers large arrays, when their lengths are known.
        quick_bytes: see `Plan`.
    """

    def __init__(
        self,
        resources: Resources,
        signature: GatherSignature,
        channel: _native.Channel | _native.Between,
        large: ArenaGather | MpiGather,
        quick_bytes: int,
    ) -> None:
        super().__init__(resources, signature.call)
        self._leaves = leaves = signature.leaves
        self._axes = [leaf.axis for leaf in leaves]
        self.large = large
        rows = [
            (math.prod(leaf.before), math.prod(leaf.after) * leaf.dtype.itemsize)
            for leaf in leaves
        ]
        number, patience = signature.call.fingerprint, resources.guard.patience_ms
        self._core = core = _native.core.Gather(channel, rows, number, patience)
        large.core = core
        self._raw = any(backend.is_bfloat16(leaf.dtype) for leaf in leaves)
        if len(leaves) == 1 and not self._raw:
            self.quick = core
            self.quick_bytes = quick_bytes

    def __call__(
        self,
        arrays: Sequence[Array],
        call: Call | None = None,
        timeout: float | None = None,
    ) -> Results:
        """Agree with the other ranks, and gather; see `Plan`."""
        guard, call, meet = self._guard, self.call, self._core.meet
        lengths = tuple([x.shape[k] for x, k in zip(arrays, self._axes, strict=True)])
        sources = _as_buffers(arrays) if self._raw else list(arrays)
        memory: Memory | None = None
        if not self._core.fits(lengths):
            try:
                memory = self.large.guess(arrays, lengths)
            except Exception as error:
                raise guard.fail(call, error) from None
        offset = NOWHERE if memory is None else memory.offset
        number, patience = call.fingerprint, guard.enter(call, timeout)
        with guard.payload(call):
            status = meet(sources, lengths, number, patience, offset)
            if status is None:  # not contiguous
                sources = [x.copy("C") for x in sources]
                status = meet(sources, lengths, number, patience, offset)
        if status:
            guard.conclude(
                status, lambda ms: meet(sources, lengths, number, ms, offset)
            )
        else:
            guard.count()
        return self._conclude(sources, memory, timeout)

    def concluded(self, status: int, x: HostArray, result: HostArray | None) -> Array:
        """End a call of `quick` that has not given a result; see `Plan`."""
        guard, meet, number = self._guard, self._core.meet, self.call.fingerprint
        lengths = (x.shape[self._axes[0]],)
        if status:
            guard.conclude(status, lambda ms: meet([x], lengths, number, ms, NOWHERE))
        else:
            guard.count()
        found: Array = self._conclude([x], None, None)[0]
        return found

    def _conclude(
        self, sources: list[Array], memory: Memory | None, timeout: float | None
    ) -> Results:
        """Return the results, after a header of all ranks with their lengths.

        Args:
            sources: the leaves as the core took them.
            memory: for results, as if all lengths were those of this rank.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        totals = self._core.totals()
        if totals is None:
            return self.large.gather(sources, self._core.lengths(), memory, timeout)
        try:  # of a small result: the others learn of it with the next call
            results: Results = [
                np.empty(leaf.shape(n), leaf.dtype)
                for leaf, n in zip(self._leaves, totals, strict=True)
            ]
        except MemoryError as error:
            raise self._guard.fail(self.call, error) from None
        self._core.get(_as_buffers(results) if self._raw else results)
        return results


class ArenaGather:
    """Gathers large arrays in the arenas of a node.

    Args:
        resources: of the strategy.
        signature: of the calls.
        node: the memory.
        by_mpi: gathers if an arena is full.

    Attributes:
        core: the nest in the core.
    """

    core: _native.Gather

    def __init__(
        self,
        resources: Resources,
        signature: GatherSignature,
        node: Node,
        by_mpi: MpiGather,
    ) -> None:
        self._guard = resources.guard
        self._leaves = signature.leaves
        self.node = node
        self._by_mpi = by_mpi
        self._call = signature.call

    def guess(self, arrays: Sequence[Array], lengths: Lengths) -> Memory:
        """Return memory for results, as if all ranks had arrays of these lengths."""
        return self._reserve([n * self.node.size for n in lengths])

    def gather(
        self,
        sources: list[Array],
        rows: list[Lengths],
        memory: Memory | None,
        timeout: float | None,
    ) -> Results:
        """Return the results, now that all know the lengths of all. Collective."""
        guard = self._guard
        _, _, same_lengths, in_arenas, _ = self.node.channel.verdict
        if memory is not None and same_lengths and in_arenas:
            return memory.results
        try:
            memory = self._reserve([sum(n) for n in zip(*rows, strict=True)])
        except Exception as error:
            raise guard.fail(self._call, error) from None
        if not guard.agree_offset(_HAVE_MEMORY, memory.offset, timeout):
            return self._by_mpi.gather(sources, rows, None, timeout)
        with guard.payload(self._call):
            if self.core.spread(sources) == LEFT:
                raise LeftError(self.node.channel.who)
        return memory.results

    def _reserve(self, totals: Sequence[int]) -> Memory:
        """Return memory for results of these lengths."""
        starts = self.core.layout(tuple(totals))
        slot = self.node.pool.take(starts[-1])
        results: list[Array] = []
        for leaf, n, start in zip(self._leaves, totals, starts[:-1], strict=True):
            shape = leaf.shape(n)
            if slot is None:
                results.append(np.empty(shape, leaf.dtype))
            else:
                in_slot: Callable[..., Array] = np.ndarray
                results.append(in_slot(shape, leaf.dtype, slot, start))
        return Memory(results, NOWHERE if slot is None else slot.offset)


def _join(parts: list[Any]) -> Array:
    return np.concatenate(parts)


def _as_buffers(arrays: Sequence[Array]) -> list[Array]:
    """Return arrays with the buffer protocol, which bfloat16 lacks."""
    return [x.view(np.uint16) if backend.is_bfloat16(x.dtype) else x for x in arrays]


class _Message(NamedTuple):
    """What MPI gathers in one call: one leaf, or several that are packed.

    Attributes:
        leaves: their numbers.
        send: the bytes of this rank's arrays.
        receive: memory for those of all ranks.
        unpacks: whether they are copied from there to the results.
    """

    leaves: Sequence[int]
    send: Array
    receive: Array
    unpacks: bool


class MpiGather(Plan):
    """All-gathers arrays of any kind by the transports of a call.

    Attributes:
        core: see `ArenaGather`; not used.
    """

    core: _native.Gather = None

    def __init__(self, resources: Resources, signature: GatherSignature) -> None:
        super().__init__(resources, signature.call)
        self._leaves = signature.leaves
        self._transports = signature.transports
        self._pool = resources.pool
        self._packs = signature.on_host and len(signature.leaves) > 1

    def __call__(
        self,
        arrays: Sequence[Array],
        call: Call | None = None,
        timeout: float | None = None,
    ) -> Results:
        """Agree with the other ranks, and gather; see `Plan`."""
        with self._comm.traffic.timed():
            guard, comm = self._guard, self._comm
            pairs = zip(arrays, self._leaves, strict=True)
            lengths = [int(x.shape[leaf.axis]) for x, leaf in pairs]
            try:
                memory = self.guess(arrays, lengths)
            except Exception as error:
                raise guard.fail(self.call, error) from None
            same = False
            if guard.enabled:
                value = lengths[0] if len(lengths) == 1 else fingerprint(str(lengths))
                same = guard.agree_and_compare(self.call, value, timeout)
            else:
                guard.agree(self.call)  # that the strategy can be used
            rows: list[Lengths] = [lengths] * comm.size
            if not same:
                rows = list(comm.all_gather_integers(lengths))
            return self.gather(arrays, rows, memory, timeout)

    def guess(self, arrays: Sequence[Array], lengths: Lengths) -> Memory | None:
        """Return memory for results, as if all ranks had arrays of these lengths.

        None if it would be very large: on all ranks, if they have.
        """
        if self._nbytes(lengths) * self._comm.size > _GUESSED_BYTES:
            return None
        return self._reserve(arrays, [lengths] * self._comm.size)

    def gather(
        self,
        arrays: Sequence[Array],
        rows: list[Lengths],
        memory: Memory | None,
        timeout: float | None,
    ) -> Results:
        """Return the results, now that all know the lengths of all. Collective.

        Args:
            arrays: the leaves.
            rows: the lengths of each rank.
            memory: for results, if all lengths were those of this rank.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        guard, own = self._guard, list(rows[self._comm.rank])
        same = all(list(row) == own for row in rows)
        if memory is None or not same:  # alike on all ranks: see `make`
            try:
                memory = self._reserve(arrays, rows)
            except Exception as error:
                raise guard.fail(self.call, error) from None
            guard.agree(_HAVE_MEMORY, timeout)
        for message in memory.messages:
            counts = [self._nbytes(row, message.leaves) for row in rows]
            transport = self._transports.of(message.send)
            transport.all_gather(message.send, message.receive, counts)
            if message.unpacks:
                self._unpack(message, counts, rows, memory.results)
        return memory.results

    def _nbytes(self, row: Lengths, leaves: Sequence[int] | None = None) -> int:
        """Return the bytes of a rank's leaves; of all, or some."""
        numbers = range(len(self._leaves)) if leaves is None else leaves
        return sum(self._leaves[i].row_bytes * row[i] for i in numbers)

    def _reserve(self, arrays: Sequence[Array], rows: list[Lengths]) -> Memory:
        every = range(len(self._leaves))
        results: list[Array] = []
        for i, (x, leaf) in enumerate(zip(arrays, self._leaves, strict=True)):
            shape = leaf.shape(sum(row[i] for row in rows))
            if backend.is_device_array(x):
                results.append(backend.empty_like(x, shape, leaf.dtype))
            else:
                results.append(self._pool.empty(shape, leaf.dtype))
        limit = min(_PACKED_BYTES * len(every), _PACKED_BYTES_IN_ALL)
        packs = self._packs and max(self._nbytes(row) for row in rows) <= limit
        messages = []
        for group in [every] if packs else [[i] for i in every]:
            parts = [backend.as_bytes(backend.contiguous(arrays[i])) for i in group]
            send = parts[0] if len(parts) == 1 else _join(parts)
            if not packs and self._leaves[group[0]].is_flat:
                receive = backend.as_bytes(results[group[0]])
                messages.append(_Message(group, send, receive, unpacks=False))
                continue
            total = sum(self._nbytes(row, group) for row in rows)
            receive = backend.empty_like(send, (total,), np.uint8)
            messages.append(_Message(group, send, receive, unpacks=True))
        return Memory(results, NOWHERE, messages)

    def _unpack(
        self,
        message: _Message,
        counts: list[int],
        rows: list[Lengths],
        results: list[Array],
    ) -> None:
        """Copy the arrays of all ranks into the results."""
        ends = [0] * len(self._leaves)  # along the axis
        for row, start in zip(rows, itertools.accumulate([0, *counts]), strict=False):
            for i in message.leaves:
                leaf, length = self._leaves[i], row[i]
                part = message.receive[start : start + length * leaf.row_bytes]
                start += part.size
                where = (*[slice(None)] * leaf.axis, slice(ends[i], ends[i] + length))
                results[i][where] = backend.from_bytes(
                    part, leaf.dtype, leaf.shape(length)
                )
                ends[i] += length
