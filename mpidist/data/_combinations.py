"""Stages whose elements are made of several: of one dataset, or of several datasets."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from mpidist._base import backend, nest
from mpidist._base.types import Array, DType, HostArray, Nest
from mpidist.data._ahead import read_ahead, stop_reading
from mpidist.data._options import ArraySpec
from mpidist.data._rows import (
    LazyBlock,
    RowBlock,
    as_leaf,
    block_of,
    can_have,
    common_spec,
    join,
    longest_text,
    name_of_dtype,
    parts_like,
)
from mpidist.data._stages import (
    END,
    INFINITE,
    UNKNOWN,
    Derived,
    Pass,
    Stage,
    Token,
    Tokens,
    Via,
    apply,
)

_PADDED: Final = "Dataset.padded_batch"


class Batch(Derived):
    """A given number of elements of the parent, stacked.

    A token is the sequence of the tokens of its rows.
    """

    size_of_batch: int
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        size = self.parent.size
        if 0 <= size < INFINITE:
            full, rest = divmod(size, self.size_of_batch)
            size = full + (1 if rest and not self.drop_remainder else 0)
        self.inherit(size)
        self.batch_size, self.full = self.size_of_batch, self.drop_remainder

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        size, rows = self.parent.size, self.size_of_batch
        starts = [int(index) * rows for index in indices]
        return [
            self.parent.at(np.arange(first, min(first + rows, size)), in_pass)
            for first in starts
        ]

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        tokens = self.parent.tokens(in_pass)
        while rows := list(itertools.islice(tokens, self.size_of_batch)):
            if len(rows) == self.size_of_batch or not self.drop_remainder:
                yield rows

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        for token in tokens:
            block = self.stacked(token)
            if block is not None:  # as a batch has a row at least
                yield block.nest()

    def stacked(self, tokens: Tokens) -> RowBlock | None:
        """Return some rows of a batch."""
        return self.parent.block(tokens)

    def open(self, token: Token) -> LazyBlock:
        return LazyBlock(
            len(token), lambda start, stop: self.stacked(token[start:stop])
        )

    def spec_of(self, *inner: Nest) -> Nest | None:
        rows = self.size_of_batch if self.drop_remainder else None
        return nest.map_structure(
            lambda one: ArraySpec((rows, *one.shape), one.dtype), inner[0]
        )


_Shape: TypeAlias = tuple[int | None, ...]
"""A shape that rows are padded to: None where the longest row decides."""


class PaddedBatch(Batch):
    """A given number of elements of the parent, padded to one shape and stacked.

    If the longest row of a batch decides the shape, its rows must be read together.
    """

    shapes: Nest = None  # None: the longest row decides
    values: Nest = None  # None: 0, False or an empty string

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shapes is None or {None, -1} & set(nest.flatten(self.shapes)[0]):
            self.whole = (
                "the `padded_batch`, whose longest row decides (with `padded_shapes` "
                "without None or -1 it works row by row)"
            )

    def stacked(self, tokens: Tokens) -> RowBlock | None:
        rows = [block_of(row, _PADDED) for row in self.parent.load(tokens)]
        if not rows:
            return None
        structure = rows[0].structure
        for row in rows:
            if row.structure != structure:
                raise ValueError(
                    f"{_PADDED}: expected rows of one structure, got {structure} and "
                    f"{row.structure}"
                )
        columns = list(zip(*(row.leaves for row in rows), strict=True))
        shapes = self._shapes([column[0].shape for column in columns], structure)
        values = self._values(structure, len(columns))
        leaves = map(_padded, columns, shapes, values)
        return RowBlock(list(leaves), structure)

    def _shapes(self, own: list[Any], structure: nest.Structure) -> list[_Shape]:
        if self.shapes is None:
            return [(None,) * len(shape) for shape in own]
        arrays = structure.unflatten([None] * len(own))
        try:
            return [_as_shape(sizes) for sizes in parts_like(arrays, self.shapes)]
        except LookupError:
            raise TypeError(
                f"{_PADDED}: expected `padded_shapes` to have a tuple of sizes for "
                f"each array of an element, got {self.shapes!r}"
            ) from None

    def _values(self, structure: nest.Structure, count: int) -> list[Any]:
        values, given = nest.flatten(self.values)
        if given.is_leaf:
            return values * count
        if given != structure:
            raise TypeError(
                f"{_PADDED}: expected `padding_values` like an element, {structure}, "
                f"or one number, got {self.values!r}"
            )
        return values

    def spec_of(self, *inner: Nest) -> Nest | None:
        leaves, structure = nest.flatten(inner[0])
        shapes = [leaf.shape for leaf in leaves]
        shapes = shapes if self.shapes is None else self._shapes(shapes, structure)
        both = zip(leaves, shapes, strict=True)
        rows = structure.unflatten([ArraySpec(s, one.dtype) for one, s in both])
        return super().spec_of(rows)


def _as_shape(sizes: object) -> _Shape:
    if _is_size(sizes) and sizes is not None:
        sizes = (sizes,)
    if not isinstance(sizes, (tuple, list)) or not all(map(_is_size, sizes)):
        raise LookupError
    return tuple(None if size in (None, -1) else int(size) for size in sizes)


def _is_size(x: object) -> bool:
    if isinstance(x, bool):  # which is an int, and meant for another argument
        return False
    return x is None or (isinstance(x, (int, np.integer)) and bool(x >= -1))


def _padded(column: tuple[Array, ...], shape: _Shape, value: Any) -> Array:
    """Stack arrays, after padding each at its end."""
    for row in column:
        if row.ndim != len(shape):
            raise ValueError(
                f"{_PADDED}: expected arrays of {len(shape)} dimensions, got one "
                f"of shape {tuple(row.shape)}"
            )
    longest = np.max([row.shape for row in column], axis=0, initial=0)
    both = zip(longest, shape, strict=True)
    target = [int(own) if size is None else size for own, size in both]
    if any(map(operator.gt, longest, target)):
        wrong = next(row for row in column if any(map(operator.gt, row.shape, target)))
        raise ValueError(
            f"{_PADDED}: expected arrays that fit into `padded_shapes` "
            f"{tuple(target)}, got one of shape {tuple(wrong.shape)}; cut them in a "
            "`map` before"
        )
    xp: Any = backend.module_of(column[0])
    dtype = xp.result_type(*column)
    for row in column if dtype.kind in "SU" else ():  # NumPy makes text of numbers
        if row.dtype.kind != dtype.kind:
            kind = name_of_dtype(dtype)
            raise ValueError(f"{_PADDED}: expected rows of {kind}, got {row!r:.80}")
    padding = _padding(value, dtype)
    dtype = longest_text(dtype, np.asarray(padding).dtype)
    filled: Array = xp.full((len(column), *target), padding, dtype)
    for number, row in enumerate(column):
        filled[(number, *map(slice, row.shape))] = row
    return filled


def _padding(value: Any, dtype: DType) -> Any:
    if value is None:
        return "" if dtype.kind == "U" else b"" if dtype.kind == "S" else 0
    given = np.asarray(as_leaf(value, _PADDED))
    if given.shape != () or not can_have(given, dtype):
        raise TypeError(
            f"{_PADDED}: expected `padding_values` of one {dtype}, got {value!r}"
        )
    return given[()]


def _common_rows(leaves: Sequence[Any], element: object) -> int | None:
    """Return the first dimension of arrays or their specs; None if it is unknown."""
    rows = {leaf.shape[:1] for leaf in leaves}
    known = rows - {(None,)}
    if not rows or () in rows or len(known) > 1:
        raise ValueError(
            "Dataset.unbatch: expected elements whose arrays have the same first "
            f"dimension, got {element}"
        )
    return known.pop()[0] if known else None


class Unbatch(Derived):
    """The rows of the parent's elements."""

    has_batches = False

    def __post_init__(self) -> None:
        size, spec = self.parent.size, self.parent.spec()
        count = None if spec is None else _common_rows(nest.flatten(spec)[0], spec)
        if 0 < size < INFINITE:
            size = UNKNOWN if count is None else min(size * count, INFINITE - 1)
        self.inherit(size)
        self.indexed, self.batch_size, self.whole = False, None, ""

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        for element in self.parent.load(self.parent.tokens(in_pass)):
            block = block_of(element, "Dataset.unbatch")
            count = _common_rows(block.leaves, block)
            yield from map(block.row, range(count or 0))

    def spec_of(self, *inner: Nest) -> Nest | None:
        leaves, structure = nest.flatten(inner[0])
        if not all(one.shape for one in leaves):
            return None
        return structure.unflatten(
            [ArraySpec(one.shape[1:], one.dtype) for one in leaves]
        )


# --- several datasets --------------------------------------------------------------


class Zip(Via):
    """Elements of several datasets side by side, as far as the shortest goes.

    A token is a tuple of theirs.
    """

    call: str = dataclasses.field(init=False, default="")
    structure: nest.Structure

    def __post_init__(self) -> None:
        sizes = [parent.size for parent in self.parents]
        self.inherit(UNKNOWN if UNKNOWN in sizes else min(sizes))
        if len({parent.batch_size for parent in self.parents}) > 1:
            self.batch_size = None
        wholes = (parent.whole for parent in self.parents if parent.whole)
        self.whole = "" if self.batch_size is None else next(wholes, "")
        self.text = f"zip{self.structure.render([one.text for one in self.parents])}"

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        found = [parent.at(indices, in_pass) for parent in self.parents]
        return list(zip(*found, strict=True))

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        found = [parent.tokens(in_pass) for parent in self.parents]
        return zip(*found, strict=False)

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        copies = enumerate(itertools.tee(tokens, len(self.parents)))
        columns = [map(operator.itemgetter(number), copy) for number, copy in copies]
        both = zip(self.parents, columns, strict=True)
        loaded = [parent.load(column) for parent, column in both]
        return map(self.structure.unflatten, zip(*loaded, strict=True))

    def block(self, tokens: Tokens) -> RowBlock | None:
        if not len(tokens):
            return None
        columns = zip(*tokens, strict=True)
        both = zip(self.parents, columns, strict=True)
        return self._side_by_side([parent.block(column) for parent, column in both])

    def _side_by_side(self, blocks: list[RowBlock | None]) -> RowBlock | None:
        found = [block.nest() for block in blocks if block is not None]
        if len(found) < len(blocks):
            return None
        leaves, structure = nest.flatten(self.structure.unflatten(found))
        return RowBlock(leaves, structure)

    def open(self, token: Token) -> LazyBlock:
        both = zip(self.parents, token, strict=True)
        parts = [parent.open(part) for parent, part in both]
        rows = [part.rows for part in parts]
        if min(rows) < max(rows):
            raise ValueError(
                f"Dataset.zip: expected batches with the same number of rows, got "
                f"{rows}; write `zip` before `batch`"
            )
        return LazyBlock(
            rows[0],
            lambda start, stop: self._side_by_side(
                [x.part(start, stop) for x in parts]
            ),
        )

    def spec_of(self, *inner: Nest) -> Nest:
        return self.structure.unflatten(inner)


class _Pairs(Stage):
    """A stage whose tokens are pairs: a stage, and its token."""

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        for stage, run in itertools.groupby(tokens, operator.itemgetter(0)):
            yield from stage.load(map(operator.itemgetter(1), run))

    def block(self, tokens: Tokens) -> RowBlock | None:
        runs = itertools.groupby(tokens, operator.itemgetter(0))
        found = [stage.block([token for _, token in run]) for stage, run in runs]
        blocks = [block for block in found if block is not None]
        return join(blocks) if blocks else None

    def open(self, token: tuple[Stage, Token]) -> LazyBlock:
        stage, inner = token
        return stage.open(inner)


class Concatenate(_Pairs, Via):
    """The elements of one dataset, and then those of another."""

    call: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        first, second = self.parents
        sizes = [first.size, second.size]
        size = min(sum(sizes), INFINITE)
        if UNKNOWN in sizes:
            size = INFINITE if max(sizes) >= INFINITE else UNKNOWN
        self.call = f"concatenate({second.text})"
        self.inherit(size)
        if first.batch_size is None or second.batch_size is None:
            self.batch_size = None
        else:
            self.batch_size = max(first.batch_size, second.batch_size)
        self.whole = first.whole or second.whole

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        size, tokens = self.parents[0].size, []
        for index in indices:
            number = int(index >= size)
            stage = self.parents[number]
            (token,) = stage.at(index[None] - number * size, (*in_pass, number))
            tokens.append((stage, token))
        return tokens

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        for number, stage in enumerate(self.parents):
            for token in stage.tokens((*in_pass, number)):
                yield stage, token

    def spec_of(self, *inner: Nest) -> Nest:
        return nest.map_structure(common_spec, *inner)


class Interleave(_Pairs, Derived):
    """The elements of a dataset for each element of the parent, in turn.

    The order is that of TensorFlow (`interleave_dataset_op.cc`). There are ``cycle``
    places. A place that is empty gets the dataset of the next element of the parent;
    otherwise it gives up to ``length`` elements before it is the turn of the next
    place. A dataset that has ended leaves its place empty until its next turn.
    """

    function: Callable[..., Stage]
    cycle: int
    length: int
    readers: int  # places whose dataset a thread reads ahead
    has_batches = False  # the function's datasets are known after reading only

    def __post_init__(self) -> None:
        self.inherit(0 if self.parent.size == 0 else UNKNOWN)
        self.indexed, self.batch_size, self.whole = False, None, ""

    def spec(self, *, trial: bool = False) -> Nest | None:
        return None

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        inputs = enumerate(self.parent.load(self.parent.tokens(in_pass)))
        places: list[tuple[Stage, Iterator[Token]] | None] = []
        turn, count = 0, self.cycle
        try:
            while True:
                if turn == len(places):
                    places.append(None)
                if places[turn] is None:
                    number, element = next(inputs, (0, END))
                    if element is not END:
                        stage = apply(self.function, element)
                        tokens = stage.tokens((*in_pass, number))
                        depth = self.length if turn < self.readers else 0
                        places[turn] = stage, read_ahead(tokens, depth)
                    elif not any(places):
                        return
                    else:  # the others stay empty
                        count = len(places)
                if place := places[turn]:
                    stage, tokens = place
                    given = 0
                    for token in itertools.islice(tokens, self.length):
                        yield stage, token
                        given += 1
                    if given < self.length:
                        stop_reading(tokens, wait=False)
                        places[turn] = None
                turn = (turn + 1) % count
        finally:
            for _, tokens in filter(None, places):
                stop_reading(tokens, wait=False)
