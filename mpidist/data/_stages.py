"""The stages of a `Dataset`: each returns any of its elements, by number.

So only requested elements are read, a rank can read some rows of a batch, and a
position in a dataset is a number. Requests include the *pass*: the number of the
iteration over the dataset and of the round of each `repeat` around the stage. A shuffle
computes its order from its seed and the pass, identically on all ranks.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from mpidist._base import nest
from mpidist._base.types import DType, HostArray, Nest
from mpidist.data._blocks import RowBlock, block_of, gather, join, stack
from mpidist.data._records import ArraySpec

INFINITE: Final = sys.maxsize
# The maximum total number of rows in the orders that a shuffle caches.
_ORDERS_ROWS: Final = 2**20
Pass = tuple[int, ...]
Route = list[tuple[HostArray, Pass]]


@dataclasses.dataclass
class Opened:
    """An element whose rows can be read in part.

    Attributes:
        rows: the number of rows.
        read: returns the rows from a start to a stop; None if there are none and their
            spec is unknown.
        whole: the element, if it has been read as a whole anyway.
    """

    rows: int
    read: Callable[[int, int], RowBlock | None]
    whole: RowBlock | None = None


class Stage:
    """A sequence of elements.

    Attributes:
        size: the number of elements; `INFINITE` or more if infinite.
        batch_size: the number of rows in a full batch; None before `batch`.
        reads_whole: whether an element can only be read as a whole.
        depth: how far a thread reads ahead; 0: there is no thread.
        text: how it was created, for users and for comparing ranks.
    """

    size: int
    batch_size: int | None = None
    reads_whole = False
    depth = 0
    text = ""

    def elements(self, indices: HostArray, in_pass: Pass) -> list[Nest]:
        """Return elements, as nests."""
        raise NotImplementedError

    def fetch(self, indices: HostArray, in_pass: Pass) -> RowBlock | None:
        """Return elements as a block; None if there are none, of unknown spec."""
        found = self.elements(indices, in_pass)
        return stack(found, "Dataset.batch") if found else None

    def open(self, index: int, in_pass: Pass) -> Opened:
        """Return an element for reading some of its rows."""
        whole = block_of(self.elements(np.array([index]), in_pass)[0], "Dataset")
        rows = whole.leaves[0].shape[0] if whole.leaves and whole.leaves[0].ndim else 1
        return Opened(rows, whole.part, whole)

    def spec(self) -> Nest | None:
        """Return the nest of specs of an element; None if only known after reading."""
        return None


class Slices(Stage):
    """The rows of arrays."""

    def __init__(self, leaves: Sequence[Any], structure: nest.Structure) -> None:
        self._leaves = leaves
        self._structure = structure
        self.size = int(leaves[0].shape[0])
        self.text = f"{self.size} rows"

    def fetch(self, indices: HostArray, in_pass: Pass) -> RowBlock:
        return RowBlock(
            [gather(leaf, indices) for leaf in self._leaves], self._structure
        )

    def elements(self, indices: HostArray, in_pass: Pass) -> list[Nest]:
        block = self.fetch(indices, in_pass)
        return [block.row(i) for i in range(len(indices))]

    def spec(self) -> Nest | None:
        specs = [
            ArraySpec(tuple(map(int, leaf.shape[1:])), _dtype_of(leaf))
            for leaf in self._leaves
        ]
        return self._structure.unflatten(specs)


def _dtype_of(leaf: Any) -> DType:
    dtype = getattr(leaf, "dtype", None)
    if not isinstance(dtype, np.dtype):
        dtype = np.asarray(leaf[0:0]).dtype
    return dtype if dtype.isnative else dtype.newbyteorder("=")


class Rows(Stage):
    """The items of a source with ``__len__`` and ``__getitem__``: one row each."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.size = len(source)
        self.text = f"{self.size} rows of a {type(source).__name__}"

    def elements(self, indices: HostArray, in_pass: Pass) -> list[Nest]:
        return [self._source[int(i)] for i in indices]


class Via(Stage):
    """A stage whose elements are its parent's, in another order or number."""

    def __init__(self, parent: Stage, size: int, text: str) -> None:
        self.parent = parent
        self.size = size
        self.batch_size = parent.batch_size
        self.reads_whole = parent.reads_whole
        self.depth = parent.depth
        self.text = f"{parent.text}{text}"

    def route(self, indices: HostArray, in_pass: Pass) -> Route:
        """Return the corresponding elements of the parent."""
        return [(indices, in_pass)]

    def elements(self, indices: HostArray, in_pass: Pass) -> list[Nest]:
        return [
            element
            for part, its_pass in self.route(indices, in_pass)
            for element in self.parent.elements(part, its_pass)
        ]

    def fetch(self, indices: HostArray, in_pass: Pass) -> RowBlock | None:
        blocks = [self.parent.fetch(*part) for part in self.route(indices, in_pass)]
        found = [block for block in blocks if block is not None]
        return join(found) if found else None

    def open(self, index: int, in_pass: Pass) -> Opened:
        ((part, its_pass),) = self.route(np.array([index]), in_pass)
        return self.parent.open(int(part[0]), its_pass)

    def spec(self) -> Nest | None:
        return self.parent.spec()


class Take(Via):
    """The first elements."""

    def __init__(self, parent: Stage, count: int) -> None:
        size = parent.size if count < 0 else min(count, parent.size)
        super().__init__(parent, size, f".take({count})")


class Shard(Via):
    """Every n-th element, from a given one on."""

    def __init__(self, parent: Stage, shards: int, index: int) -> None:
        size = parent.size
        if size < INFINITE:
            size = max(0, -(-(size - index) // shards))
        super().__init__(parent, size, f".shard({shards}, {index})")
        self._shards, self._index = shards, index

    def route(self, indices: HostArray, in_pass: Pass) -> Route:
        return [(indices * self._shards + self._index, in_pass)]


class Prefetch(Via):
    """A request for a thread that reads ahead."""

    def __init__(self, parent: Stage, depth: int) -> None:
        super().__init__(parent, parent.size, f".prefetch({depth})")
        self.depth = max(depth, parent.depth)


class Repeat(Via):
    """The parent, repeated."""

    def __init__(self, parent: Stage, count: int | None) -> None:
        size = parent.size
        if 0 < size < INFINITE:
            size = INFINITE if count is None else size * count
        elif count == 0:
            size = 0
        text = "" if count is None else count
        super().__init__(parent, min(size, INFINITE), f".repeat({text})")

    def route(self, indices: HostArray, in_pass: Pass) -> Route:
        if self.parent.size >= INFINITE:
            return [(indices, (*in_pass, 0))]
        rounds, within = np.divmod(indices, self.parent.size)
        starts = np.flatnonzero(np.diff(rounds, prepend=-1))
        if len(starts) <= 1:
            number = int(rounds[0]) if len(rounds) else 0
            return [(within, (*in_pass, number))]
        stops = [*starts[1:], len(rounds)]
        return [
            (within[a:b], (*in_pass, int(rounds[a])))
            for a, b in zip(starts, stops, strict=True)
        ]


class Shuffle(Via):
    """The parent in a different order in each pass."""

    def __init__(self, parent: Stage, seed: int, anew: bool) -> None:
        also = "" if anew else ", reshuffle_each_iteration=False"
        super().__init__(parent, parent.size, f".shuffle({seed}{also})")
        self._seed, self._anew = seed, anew
        self._orders: list[tuple[Pass, HostArray]] = []

    def order(self, in_pass: Pass) -> HostArray:
        """Return the permutation of a pass."""
        key = in_pass if self._anew else ()
        for known, order in self._orders:
            if known == key:
                return order
        # RandomState's streams do not change with the version of NumPy, so a run that
        # continues after an upgrade has the same order. The same holds for
        # SeedSequence.
        words = np.random.SeedSequence([self._seed, len(key), *key])
        order = np.random.RandomState(np.random.MT19937(words)).permutation(self.size)
        # At least two: a batch may span the end of one pass and the start of the next.
        kept = max(2, min(16, _ORDERS_ROWS // max(1, self.size)))
        self._orders = [(key, order), *self._orders[: kept - 1]]
        return order

    def route(self, indices: HostArray, in_pass: Pass) -> Route:
        if not len(indices):
            return [(indices, in_pass)]
        return [(self.order(in_pass)[indices], in_pass)]


class Map(Stage):
    """The result of a function for each element."""

    def __init__(self, parent: Stage, fn: Callable[..., Nest]) -> None:
        self.parent = parent
        self.size = parent.size
        self.batch_size = parent.batch_size
        self.reads_whole = parent.batch_size is not None
        self.depth = parent.depth
        self.text = f"{parent.text}.map({getattr(fn, '__qualname__', 'a function')})"
        self._fn = fn

    def elements(self, indices: HostArray, in_pass: Pass) -> list[Nest]:
        return [self._apply(x) for x in self.parent.elements(indices, in_pass)]

    def _apply(self, element: Nest) -> Nest:
        # As in tf.data: a tuple is passed as separate arguments.
        if type(element) is tuple:
            return self._fn(*element)
        return self._fn(element)


class Batch(Stage):
    """A given number of elements of the parent, stacked."""

    def __init__(self, parent: Stage, rows: int, drop_remainder: bool) -> None:
        self.parent = parent
        self.batch_size = self._rows = rows
        self.reads_whole = parent.reads_whole
        self.depth = parent.depth
        self._drop = drop_remainder
        whole, rest = divmod(parent.size, rows)
        self.size = whole + (1 if rest and not drop_remainder else 0)
        if parent.size >= INFINITE:
            self.size = INFINITE
        also = ", drop_remainder=True" if drop_remainder else ""
        self.text = f"{parent.text}.batch({rows}{also})"

    def elements(self, indices: HostArray, in_pass: Pass) -> list[Nest]:
        opened = [self.open(int(i), in_pass) for i in indices]
        blocks = [one.read(0, one.rows) for one in opened]
        return [block.nest() for block in blocks if block is not None]

    def open(self, index: int, in_pass: Pass) -> Opened:
        first = index * self._rows
        last = min(first + self._rows, self.parent.size)

        def read(start: int, stop: int) -> RowBlock | None:
            rows = np.arange(first + start, min(first + stop, last))
            return self.parent.fetch(rows, in_pass)

        return Opened(last - first, read)

    def spec(self) -> Nest | None:
        inner = self.parent.spec()
        if inner is None:
            return None
        rows = self._rows if self._drop else None
        return nest.map_structure(
            lambda one: ArraySpec((rows, *one.shape), one.dtype), inner
        )


def spec_of(element: Nest, batch: Sequence[int | None] | None) -> Nest:
    """Return the specs of an element that was read.

    Args:
        element: a nest of arrays.
        batch: a list with the first dimension to report; None: the actual one.
    """
    block = block_of(element, "element_spec")
    specs = [
        ArraySpec(
            tuple(leaf.shape)
            if batch is None or not leaf.ndim
            else (*batch, *leaf.shape[1:]),
            leaf.dtype,
        )
        for leaf in block.leaves
    ]
    return block.structure.unflatten(specs)
