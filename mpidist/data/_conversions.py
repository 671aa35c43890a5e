"""Stages that make other elements of those of one dataset."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from mpidist._base import backend, nest
from mpidist._base.types import Array, DType, HostArray, Nest
from mpidist.data._ahead import Ahead
from mpidist.data._options import (
    ArraySpec,
    can_have,
    common_spec,
    longest_text,
    name_of_dtype,
)
from mpidist.data._rows import LazyBlock, RowBlock, as_leaf, block_of, parts_like
from mpidist.data._stages import INFINITE, UNKNOWN, Derived, Pass, Token, Tokens, apply


class Map(Derived):
    """The result of a function for each element.

    Its tokens are its parent's, so the function runs for requested elements only.
    """

    function: Callable[..., Nest]
    calls: int  # at the same time; 0: no threads

    def __post_init__(self) -> None:
        self.inherit()
        if self.batch_size is not None:
            self.whole = "the `map` after `batch` (one before it works row by row)"
        self.workers = max(self.calls, self.parent.workers)

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        elements = self.parent.load(tokens)
        if self.calls:
            return Ahead(functools.partial(apply, self.function), elements, self.calls)
        return (apply(self.function, element) for element in elements)

    def spec(self, *, trial: bool = False) -> Nest | None:
        return super().spec(trial=True) if trial else None

    def spec_of(self, *inner: Nest) -> Nest:
        def of_size(unknown: int) -> Nest:
            zeros = nest.map_structure(
                lambda one: np.zeros(
                    [unknown if size is None else size for size in one.shape], one.dtype
                )[()],
                inner[0],
            )
            return block_of(apply(self.function, zeros), "Dataset.map").spec()

        # Sizes that follow those that are unknown are unknown.
        return nest.map_structure(common_spec, of_size(2), of_size(3))


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
    filled = xp.full((len(column), *target), padding, dtype)
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
