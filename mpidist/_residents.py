"""All-reduces of arrays that live in memory which the ranks share.

`Residents` knows the blocks of a strategy. For an all-reduce it finds which leaves are
in blocks, by the addresses of their memory: a view of a buffer is as good as the
buffer. Neighbours of one dtype are one *run*, and a whole nest of
`Strategy.buffers_like` is one run for each dtype, whatever the number of its leaves.
All other leaves travel as usual.

The ranks must do the same. Where each leaf is goes into the header as what may differ
(`Guard.agree_softly`): a run is reduced in place only if all leaves are at the same
places on all ranks. If one rank passes its buffers in another order, or other arrays,
every leaf travels as usual on all ranks, which gives the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from mpidist import _fusion
from mpidist._options import ReduceOp
from mpidist._transports import Block, Blocks, Target

_LINE: Final = 64
_MOST_SPLITS: Final = 256
# What is smaller than this in all is copied faster than it is waited for twice.
_LEAST_BYTES: Final = 16 * 1024
_BITS: Final = 2**62 - 1


@dataclasses.dataclass(frozen=True)
class Run:
    """Leaves that lie side by side in a block.

    Attributes:
        block: the number of the block.
        start, stop: the bytes of the run in it.
        members: for each leaf, in the order of their places, its index, and the bytes
            where it begins and ends.
    """

    block: int
    start: int
    stop: int
    members: tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True)
class Split:
    """What of an all-reduce is reduced in place, and what travels in buckets.

    Attributes:
        mark: the same on ranks whose leaves are at the same places.
        runs: what is reduced in place.
        blocks: the blocks of the runs, by number.
        buckets: the rest.
        apart: whether there is no rest, and no two leaves share memory.
        starts: for each leaf the byte of its block where it begins.
    """

    mark: int
    runs: Sequence[Run]
    blocks: dict[int, Block]
    buckets: Sequence[_fusion.Bucket]
    apart: bool
    starts: list[int]

    @property
    def one(self) -> bool:
        """Whether all leaves are in one block."""
        return self.apart and len(self.blocks) == 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """The arrays of a call, and how they are reduced.

    Attributes:
        plan: for which they were looked at.
        arrays: weak references to them. When one of them dies the whole is dropped:
            ``split`` keeps the blocks.
        strides: theirs, the only thing of an array that can change and that is not in
            the plan.
        split: as `Residents.split` returns it.
    """

    plan: Any
    arrays: list[Any]
    strides: list[tuple[int, ...]]
    split: Split

    def is_of(self, plan: Any, arrays: list[Any]) -> bool:
        """Whether these are the arrays. Looking for their places takes much longer."""
        if self.plan is not plan:
            return False
        for x, known, strides in zip(arrays, self.arrays, self.strides, strict=True):
            if known() is not x or x.strides != strides:
                return False
        return True


class Residents:
    """The resident arrays of a strategy."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self._known: dict[int, _Known] = {}  # by the id of the plan
        self._splits: dict[Any, tuple[Any, Any]] = {}

    @property
    def used(self) -> bool:
        """Whether blocks were made; the same on all ranks."""
        return self.blocks.made > 0

    def make(self, shapes: list[tuple[tuple[int, ...], Any]]) -> list[Any] | None:
        """Return zeros of these shapes and dtypes in a new block. Collective.

        Arrays of one dtype lie side by side, each on a line of the cache.

        Returns:
            The arrays, or None on all ranks where there is no room.
        """
        starts = [0] * len(shapes)
        order = sorted(range(len(shapes)), key=lambda i: shapes[i][1].str)
        end = 0
        for i in order:
            shape, dtype = shapes[i]
            starts[i] = end
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            end = -(-(end + nbytes) // _LINE) * _LINE
        if not end:
            return None
        part = self.blocks.make(end)
        if part is None:
            return None
        return [
            np.ndarray(shape, dtype, part, start)
            for (shape, dtype), start in zip(shapes, starts, strict=True)
        ]

    def split(
        self,
        plan: Any,
        leaves: list[_fusion.Leaf],
        arrays: list[Any],
        deal: Callable[[list[_fusion.Leaf]], list[_fusion.Bucket]],
    ) -> Split | None:
        """Return how these arrays are reduced; None if all of them travel.

        Args:
            plan: what the rest of the arguments but ``arrays`` is made for, the same
                object each time.
            leaves: what is known of the arrays.
            arrays: the leaves of this call.
            deal: makes buckets of leaves.
        """
        known_arrays = self._known.get(id(plan))
        if known_arrays is not None and known_arrays.is_of(plan, arrays):
            return known_arrays.split
        blocks: dict[int, Block] = {}
        places: list[int] = []
        find = self.blocks.find
        for leaf, x in zip(leaves, arrays, strict=True):
            found = None
            if x.base is not None and leaf.is_plain:
                found = find(x)
            if found is None:
                places += (0, 0)
            else:
                block, start = found
                blocks[block.number] = block
                places += (block.number, start)
        if not blocks:
            return None
        key = (id(plan), tuple(places))
        known, split = self._splits.get(key, (None, None))
        if known is not plan:
            split = _split(leaves, places, deal)
            if len(self._splits) >= _MOST_SPLITS:
                self._splits.clear()
            self._splits[key] = (plan, split)
        if split is None:
            return None
        mark, runs, buckets, apart = split
        made = Split(mark, runs, blocks, buckets, apart, places[1::2])
        self._remember(plan, arrays, made)
        return made

    def _remember(self, plan: Any, arrays: list[Any], split: Split) -> None:
        """Keep how arrays are reduced, for as long as they all live."""
        if len(self._known) >= _MOST_SPLITS:
            self._known.clear()
        key = id(plan)
        forget = functools.partial(self._known.pop, key)  # gets the reference as well
        references = [weakref.ref(x, forget) for x in arrays]
        strides = [x.strides for x in arrays]
        self._known[key] = _Known(plan, references, strides, split)

    def reduce_here(self, split: Split, leaves: list[_fusion.Leaf]) -> list[Any] | None:
        """All-reduce all leaves into memory that the ranks share. Collective.

        Returns:
            The results, which this rank may read until its next call of this; None,
            on all ranks, where some leaf can not be reduced like this.
        """
        if not split.apart or not all(
            self.blocks.make_results(split.blocks[run.block]) for run in split.runs
        ):
            return None
        results: list[Any] = [None] * len(leaves)
        for run in split.runs:
            block = split.blocks[run.block]
            reduction = leaves[run.members[0][0]].reduction
            operation: Any = reduction.mpi
            block.reduce_here(run.start, run.stop, reduction.wire, operation)
            for i, start, stop in run.members:
                view = block.results[start:stop].view(reduction.wire)
                view.flags.writeable = False
                results[i] = view.reshape(leaves[i].shape)
        return results


def _split(
    leaves: list[_fusion.Leaf],
    places: list[int],
    deal: Callable[[list[_fusion.Leaf]], list[_fusion.Bucket]],
) -> Any:
    """Return what a `Split` has for leaves at these places; None for too few."""
    staying = []
    for i, (leaf, block) in enumerate(zip(leaves, places[::2], strict=True)):
        wire, start = leaf.reduction.wire, places[2 * i + 1]
        if block and start % wire.itemsize == 0:
            stop = start + leaf.size * wire.itemsize
            staying.append((block, wire.str, leaf.reduction.mpi, start, stop, i))
    if sum(stop - start for *_, start, stop, _ in staying) < _LEAST_BYTES:
        return None
    staying.sort()
    runs: list[Run] = []
    last: Any = None
    for block, wire, mpi, start, stop, i in staying:
        # Up to the next line there is nothing but padding.
        if last == (block, wire, mpi) and start in (
            runs[-1].stop,
            -(-runs[-1].stop // _LINE) * _LINE,
        ):
            run = runs.pop()
            members = (*run.members, (i, start, stop))
            runs.append(Run(block, run.start, stop, members))
        else:
            runs.append(Run(block, start, stop, ((i, start, stop),)))
        last = (block, wire, mpi)
    in_place = {i for *_, i in staying}
    rest = [i for i in range(len(leaves)) if i not in in_place]
    buckets = [
        dataclasses.replace(bucket, leaves=tuple(rest[k] for k in bucket.leaves))
        for bucket in (deal([leaves[i] for i in rest]) if rest else ())
    ]
    ranges = sorted((run.block, run.start, run.stop) for run in runs)
    apart = not rest and all(
        block != following or stop <= start
        for (block, _, stop), (following, start, _) in itertools.pairwise(ranges)
    )
    # Numbers hash alike in all processes.
    return (hash(tuple(places)) & _BITS) | 1, runs, buckets, apart


def reduce_run(
    run: Run, split: Split, leaves: list[_fusion.Leaf], size: int, results: list[Any]
) -> None:
    """All-reduce a run into the arrays in ``results``; None takes nothing. Collective.

    Args:
        run: of the ``split``, on which all ranks have agreed.
        split: of the call.
        leaves: of the call.
        size: number of ranks.
        results: of the call.
    """
    first = leaves[run.members[0][0]].reduction
    targets = [
        Target(start, stop, results[i].reshape(-1))
        for i, start, stop in run.members
        if results[i] is not None
    ]
    operation: Any = first.mpi
    block = split.blocks[run.block]
    block.reduce(run.start, run.stop, first.wire, operation, targets)
    if first.op is ReduceOp.MEAN:
        for target in targets:
            first.decode(target.out, size, target.out)
