"""Stages that stack elements into batches, and take batches apart."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np

from mpidist._base import backend, nest
from mpidist._base.types import Array, DType, HostArray, Nest
from mpidist.data._options import ArraySpec
from mpidist.data._rows import (
    LazyBlock,
    RowBlock,
    as_leaf,
    block_of,
    longest_text,
    map_like,
)
from mpidist.data._stage import (
    INFINITE,
    UNKNOWN,
    Derived,
    Pass,
    Token,
    Tokens,
)

_PADDED: Final = "Dataset.padded_batch"


@dataclasses.dataclass(eq=False, repr=False)
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

    def spec(self, *, trial: bool = False) -> Nest | None:
        inner = self.parent.spec(trial=trial)
        if inner is None:
            return None
        rows = self.size_of_batch if self.drop_remainder else None
        return nest.map_structure(
            lambda one: ArraySpec((rows, *one.shape), one.dtype),
            self.spec_of_row(inner),
        )

    def spec_of_row(self, inner: Nest) -> Nest:
        """Return the spec of a row of a batch, given that of an element."""
        return inner


_Shape: TypeAlias = tuple[int | None, ...]
"""A shape that rows are padded to: None where the longest row decides."""


@dataclasses.dataclass(eq=False, repr=False)
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
        shapes: dict[int, _Shape] = {}
        numbers = structure.unflatten(range(len(own)))
        try:
            map_like(
                lambda number, sizes: shapes.update({number: _as_shape(sizes)}),
                numbers,
                self.shapes,
            )
        except LookupError:
            raise TypeError(
                f"{_PADDED}: expected `padded_shapes` to have a tuple of sizes for "
                f"each array of an element, got {self.shapes!r}"
            ) from None
        return [shapes[number] for number in range(len(own))]

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

    def spec_of_row(self, inner: Nest) -> Nest:
        leaves, structure = nest.flatten(inner)
        shapes = self._shapes([leaf.shape for leaf in leaves], structure)
        both = zip(leaves, shapes, strict=True)
        return structure.unflatten([ArraySpec(s, one.dtype) for one, s in both])


def _as_shape(sizes: object) -> _Shape:
    if not isinstance(sizes, (tuple, list)) or not all(map(_is_size, sizes)):
        raise LookupError
    return tuple(None if size in (None, -1) else int(size) for size in sizes)


def _is_size(x: object) -> bool:
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
    if any(own > size for own, size in zip(longest, target, strict=True)):
        raise ValueError(
            f"{_PADDED}: expected arrays that fit into `padded_shapes` "
            f"{tuple(target)}, got one of shape "
            f"{max(tuple(row.shape) for row in column)}; cut them in a `map` before"
        )
    xp: Any = backend.module_of(column[0])
    dtype = xp.result_type(*column)
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
    if given.shape != () or not np.can_cast(given.dtype, dtype, "same_kind"):
        raise TypeError(
            f"{_PADDED}: expected `padding_values` of one {dtype}, got {value!r}"
        )
    return given[()]


@dataclasses.dataclass(eq=False, repr=False)
class Unbatch(Derived):
    """The rows of the parent's elements."""

    def __post_init__(self) -> None:
        size = self.parent.size
        self.inherit(size if size in (0, INFINITE) else UNKNOWN)
        self.indexed, self.batch_size, self.whole = False, None, ""

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        for element in self.parent.load(self.parent.tokens(in_pass)):
            block = block_of(element, "Dataset.unbatch")
            rows = {leaf.shape[:1] for leaf in block.leaves}
            if len(rows) != 1 or () in rows:
                raise ValueError(
                    "Dataset.unbatch: expected elements whose arrays have the same "
                    f"first dimension, got {block}"
                )
            ((count,),) = rows
            yield from map(block.row, range(count))

    def spec(self, *, trial: bool = False) -> Nest | None:
        inner = self.parent.spec(trial=trial)
        if inner is None or not all(one.shape for one in nest.flatten(inner)[0]):
            return None
        return nest.map_structure(
            lambda one: ArraySpec(one.shape[1:], one.dtype), inner
        )
