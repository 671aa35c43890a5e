"""The plan of all-gathers by the transports of a call, and its signature.

MPI concatenates (``Iallgather``, ``Iallgatherv``), once for each array, or once for all
if they are small. The header says whether the lengths are the same on all ranks, which
is the usual case; otherwise they are exchanged (`core_gather` knows them before).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mpidist._agreement.channel import NOWHERE
from mpidist._agreement.mismatch import Call, fingerprint
from mpidist._base import backend
from mpidist._base.types import Array, DType, Shape, record
from mpidist._collectives.plan import Plan, Results
from mpidist._collectives.resources import Resources
from mpidist._collectives.transports import Transports

# Arrays of a nest are packed for MPI below this average and this total size.
_PACKED_BYTES: Final = 16 * 1024
_PACKED_BYTES_IN_ALL: Final = 2**20
# Up to this size results are allocated before lengths are known, as if they were the
# same on all ranks.
_GUESSED_BYTES: Final = 256 * 2**20
Lengths: TypeAlias = Sequence[int]
"""The length of each leaf along the axis, on one rank."""
HAVE_MEMORY: Final = Call("all_gather, with memory for the result")


@record
class GatherLeaf:
    """The dtype and shape of a leaf, without its length along the axis.

    Attributes:
        dtype: of the elements.
        before: the sizes of the dimensions before the axis.
        after: of those after it.
    """

    dtype: DType
    before: Shape
    after: Shape

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of an array of length 1."""
        return math.prod(self.before) * math.prod(self.after) * self.dtype.itemsize

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


@record
class GatherSignature:
    """The signature of an all-gather: all that its plan depends on.

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


class Buffers(NamedTuple):
    """The buffers of one call of MPI: of one leaf, or of several that are packed.

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


class Memory(NamedTuple):
    """The results of a gather, and what was allocated with them.

    Attributes:
        results: of each leaf.
        offset: of their memory in this rank's arena; `NOWHERE`: they are not in it.
        buffers: what MPI sends and receives; for other gathers none.
    """

    results: list[Array]
    offset: int = NOWHERE
    buffers: Sequence[Buffers] = ()

    @property
    def where(self) -> tuple[int, Array | None]:
        """The offset of the results in the arena, and their block if there is one."""
        blocks = [x.receive for x in self.buffers if not x.unpacks]
        alone = len(blocks) == len(self.results) == 1
        return self.offset, blocks[0] if alone else None


class MpiGather(Plan):
    """All-gathers arrays of any kind by the transports of a call.

    Args:
        resources: of the strategy.
        signature: of the calls.

    Attributes:
        is_one_block: whether the result is what MPI gathers, as it comes.
    """

    def __init__(self, resources: Resources, signature: GatherSignature) -> None:
        super().__init__(resources, signature.call)
        self._leaves = signature.leaves
        self._transports = signature.transports
        self._pool = resources.pool
        self._packs = signature.on_host and len(signature.leaves) > 1
        self.is_one_block: bool = (
            len(signature.leaves) == 1 and signature.leaves[0].is_flat
        )

    def _run(
        self, arrays: Sequence[Array], call: Call, timeout: float | None
    ) -> Results:
        with self._comm.traffic:
            guard, comm = self._guard, self._comm
            pairs = zip(arrays, self._leaves, strict=True)
            lengths = [int(x.shape[leaf.axis]) for x, leaf in pairs]
            try:  # as in `PreparedPlan`
                self._transports.device.check()
                memory = self.guess(arrays, lengths)
            except Exception as error:
                raise guard.fail(call, error) from None
            value = lengths[0] if len(lengths) == 1 else fingerprint(str(lengths))
            all_lengths: list[Lengths] = [lengths] * comm.size
            if not guard.agree_on(call, value, timeout=timeout):
                all_lengths = list(comm.all_gather_integers(lengths))
            return self.gather(arrays, memory, timeout, all_lengths)

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
        memory: Memory | None,
        timeout: float | None,
        all_lengths: list[Lengths],
    ) -> Results:
        """Return the results, now that all know the lengths of all. Collective.

        Args:
            arrays: the leaves.
            memory: for results, if all lengths were those of this rank.
            timeout: seconds to wait for the others; None: the strategy's.
            all_lengths: the lengths of each rank.
        """
        guard, own = self._guard, all_lengths[self._comm.rank]
        same = all(lengths == own for lengths in all_lengths)
        if memory is None or not same:  # on all ranks, or on none: see `guess`
            with guard.checking(self.call):
                memory = self._reserve(arrays, all_lengths)
            guard.agree(HAVE_MEMORY, timeout)
        with guard.payload(self.call):
            for buffers in memory.buffers:
                counts = [
                    self._nbytes(lengths, buffers.leaves) for lengths in all_lengths
                ]
                transport = self._transports.of(buffers.send)
                transport.all_gather(buffers.send, buffers.receive, counts)
                if buffers.unpacks:
                    self._unpack(buffers, counts, all_lengths, memory.results)
        return memory.results

    def _nbytes(self, lengths: Lengths, leaves: Sequence[int] | None = None) -> int:
        """Return the bytes of a rank's leaves; of all, or some."""
        numbers = range(len(self._leaves)) if leaves is None else leaves
        return sum(self._leaves[i].row_bytes * lengths[i] for i in numbers)

    def _reserve(self, arrays: Sequence[Array], all_lengths: list[Lengths]) -> Memory:
        every = range(len(self._leaves))
        results: list[Array] = []
        for i, (x, leaf) in enumerate(zip(arrays, self._leaves, strict=True)):
            shape = leaf.shape(sum(lengths[i] for lengths in all_lengths))
            results.append(self._pool.empty_like(x, shape, leaf.dtype))
        limit = min(_PACKED_BYTES * len(every), _PACKED_BYTES_IN_ALL)
        packs = self._packs and max(map(self._nbytes, all_lengths)) <= limit
        all_buffers = []
        for group in [every] if packs else [[i] for i in every]:
            parts: list[Any] = [
                backend.as_bytes(backend.contiguous(arrays[i])) for i in group
            ]
            send = parts[0] if len(parts) == 1 else np.concatenate(parts)
            if not packs and self._leaves[group[0]].is_flat:
                receive = backend.as_bytes(results[group[0]])
                all_buffers.append(Buffers(group, send, receive, unpacks=False))
                continue
            total = sum(self._nbytes(lengths, group) for lengths in all_lengths)
            receive = backend.empty_like(send, (total,), np.uint8)
            all_buffers.append(Buffers(group, send, receive, unpacks=True))
        return Memory(results, NOWHERE, all_buffers)

    def _unpack(
        self,
        buffers: Buffers,
        counts: list[int],
        all_lengths: list[Lengths],
        results: list[Array],
    ) -> None:
        """Copy the arrays of all ranks into the results."""
        ends = [0] * len(self._leaves)  # along the axis
        for lengths, start in zip(
            all_lengths, itertools.accumulate([0, *counts]), strict=False
        ):
            for i in buffers.leaves:
                leaf, length = self._leaves[i], lengths[i]
                part = buffers.receive[start : start + length * leaf.row_bytes]
                start += part.size
                where = (*[slice(None)] * leaf.axis, slice(ends[i], ends[i] + length))
                results[i][where] = backend.from_bytes(
                    part, leaf.dtype, leaf.shape(length)
                )
                ends[i] += length
