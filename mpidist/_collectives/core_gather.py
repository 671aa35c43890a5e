"""All-gathers of host arrays whose headers go through the core.

- `HeaderGather`: the lengths travel with the header, and small arrays too, which then
  takes one exchange. It leaves large ones to one of the two below.
- `ArenaGather`, on one node: every rank makes its results in its arena, as if all
  lengths were the same, and says in the header where they are; then each writes its
  arrays to the results of all. If lengths differ, the results are made again, and
  another header says where. If the arena of a rank is full, MPI gathers.
- `MpiGather`, between nodes (`mpi_gather`). If one array has equal lengths along axis 0
  on all ranks, the core gathers it behind the header, without Python in between.

No memory is written while it is read: for small arrays see ``channel.h``. A rank
returns its results after a step that all make when they have read them; until then they
are referred to here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidist import _native
from mpidist._agreement.channel import LEFT, NOWHERE, LeftError
from mpidist._agreement.mismatch import Call
from mpidist._base.memory import lay_out
from mpidist._base.types import Array, HostArray
from mpidist._collectives.mpi_gather import (
    HAVE_MEMORY,
    GatherSignature,
    Lengths,
    Memory,
    MpiGather,
)
from mpidist._collectives.node import Node
from mpidist._collectives.plan import Plan, Results
from mpidist._collectives.pool import arrays_in
from mpidist._collectives.resources import Resources


class HeaderGather(Plan):
    """All-gathers host arrays; lengths and small arrays travel with the header.

    Args:
        resources: of the strategy.
        signature: of the calls.
        core: the nest in the core.
        large: gathers large arrays, when their lengths are known.
        quick_bytes: see `Plan`.
    """

    def __init__(
        self,
        resources: Resources,
        signature: GatherSignature,
        core: _native.Gather,
        large: MpiGather,
        quick_bytes: int,
    ) -> None:
        super().__init__(resources, signature.call)
        self._leaves = leaves = signature.leaves
        self._axes = [leaf.axis for leaf in leaves]
        self.large = large
        self._core = core
        if len(leaves) == 1:
            self.quick = core
            self.quick_bytes = quick_bytes

    def _run(
        self, arrays: Sequence[Array], call: Call, timeout: float | None
    ) -> Results:
        guard, meet = self._guard, self._core.meet
        guard.settle()  # the communication thread may be in the core
        lengths = tuple([x.shape[k] for x, k in zip(arrays, self._axes, strict=True)])
        sources = list(arrays)
        memory: Memory | None = None
        if not self._core.fits(lengths):
            with guard.checking(call):
                memory = self.large.guess(arrays, lengths)
        where: tuple[object, ...] = (NOWHERE, None) if memory is None else memory.where
        fingerprint, timeout_ms = call.fingerprint, guard.enter(call, timeout)
        with guard.payload(call):
            status = meet(sources, lengths, fingerprint, timeout_ms, *where)
        if status is None:  # not contiguous, and nothing was sent
            with guard.checking(call):
                sources = [x.copy("C") for x in sources]
            with guard.payload(call):
                status = meet(sources, lengths, fingerprint, timeout_ms, *where)
        guard.conclude(
            status, lambda ms: meet(sources, lengths, fingerprint, ms, *where)
        )
        return self._conclude(sources, memory, timeout)

    def concluded(self, status: int, x: HostArray, result: HostArray | None) -> Array:
        """End a call of `quick` that has not given a result; see `Plan`."""
        guard, meet = self._guard, self._core.meet
        fingerprint = self.call.fingerprint
        lengths = (x.shape[self._axes[0]],)
        guard.conclude(
            status, lambda ms: meet([x], lengths, fingerprint, ms, NOWHERE, result)
        )
        memory = None if result is None else Memory([result])
        return self._conclude([x], memory, None)[0]

    def _conclude(
        self, sources: list[Array], memory: Memory | None, timeout: float | None
    ) -> Results:
        """Return the results, after a header of all ranks with their lengths.

        Args:
            sources: the leaves as the core took them.
            memory: for results, as if all lengths were those of this rank.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        if memory is not None and self._core.filled:
            return memory.results
        all_lengths: list[Lengths] = self._core.lengths()
        if self._guard.largest:  # the arrays of some rank did not fit
            return self.large.gather(sources, memory, timeout, all_lengths)
        totals = _totals(all_lengths)
        try:  # of a small result: the others learn of it with the next call
            results: Results = [
                np.empty(leaf.shape(n), leaf.dtype)
                for leaf, n in zip(self._leaves, totals, strict=True)
            ]
        except MemoryError as error:
            raise self._guard.fail(self.call, error) from None
        self._core.get(results)
        return results


class ArenaGather(MpiGather):
    """Gathers large arrays in the arenas of a node; by MPI, if one of them is full.

    Args:
        resources: of the strategy.
        signature: of the calls.
        core: the nest in the core.
        node: the memory.
    """

    def __init__(
        self,
        resources: Resources,
        signature: GatherSignature,
        core: _native.Gather,
        node: Node,
    ) -> None:
        super().__init__(resources, signature)
        self._core = core
        self.node = node

    def guess(self, arrays: Sequence[Array], lengths: Lengths) -> Memory:
        """Return memory for results, as if all ranks had arrays of these lengths."""
        return self._in_arena([n * self.node.size for n in lengths])

    def gather(
        self,
        arrays: Sequence[Array],
        memory: Memory | None,
        timeout: float | None,
        all_lengths: list[Lengths],
    ) -> Results:
        """Return the results, now that all know the lengths of all. Collective."""
        guard = self._guard
        with guard.checking(self.call):
            memory = self._in_arena(_totals(all_lengths))
        guard.agree_on(HAVE_MEMORY, offset=memory.offset, timeout=timeout)
        if not guard.in_arenas:
            return super().gather(arrays, None, timeout, all_lengths)
        with guard.payload(self.call):
            if self._core.spread(arrays) == LEFT:
                raise LeftError(self.node.channel.who)
        return memory.results

    def _in_arena(self, totals: Sequence[int]) -> Memory:
        """Return memory for results of these lengths."""
        pairs = list(zip(self._leaves, totals, strict=True))
        kinds = [(leaf.shape(n), leaf.dtype) for leaf, n in pairs]
        layout = lay_out(n * leaf.row_bytes for leaf, n in pairs)
        return Memory(*arrays_in(self.node.pool, kinds, *layout))


def _totals(all_lengths: list[Lengths]) -> Lengths:
    """Return the lengths of the results."""
    return [sum(lengths) for lengths in zip(*all_lengths, strict=True)]
