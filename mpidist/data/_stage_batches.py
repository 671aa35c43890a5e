"""Stages that stack elements into batches, and take batches apart."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from mpidist._base import backend, nest
from mpidist._base.types import Array, DType, HostArray, Nest
from mpidist.data._blocks import RowBlock, as_leaf, block_of, describe_block
from mpidist.data._records import ArraySpec
from mpidist.data._stage import INFINITE, UNKNOWN, Derived, Opened, Pass, Token, Tokens


@dataclasses.dataclass(eq=False, repr=False)
class Batch(Derived):
    """A given number of elements of the parent, stacked.

    A token is the sequence of the tokens of its rows.
    """

    rows: int
    drop_remainder: bool

    def __post_init__(self) -> None:
        self.inherit_rows("batch")

    def inherit_rows(self, method: str) -> None:
        """Set the attributes."""
        size = self.parent.size
        if 0 <= size < INFINITE:
            whole, rest = divmod(size, self.rows)
            size = whole + (1 if rest and not self.drop_remainder else 0)
        also = ", drop_remainder=True" if self.drop_remainder else ""
        self.inherit(f".{method}({self.rows}{also})", size)
        self.batch_size = self.rows

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        bounds = [(int(i) * self.rows, (int(i) + 1) * self.rows) for i in indices]
        return [
            self.parent.at(np.arange(first, min(last, self.parent.size)), in_pass)
            for first, last in bounds
        ]

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        tokens = self.parent.tokens(in_pass, start * self.rows)
        while rows := list(itertools.islice(tokens, self.rows)):
            if len(rows) == self.rows or not self.drop_remainder:
                yield rows

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        for token in tokens:
            block = self.stacked(token)
            if block is not None:  # as a batch has a row at least
                yield block.nest()

    def stacked(self, tokens: Tokens) -> RowBlock | None:
        """Return some rows of a batch."""
        return self.parent.block(tokens)

    def open(self, token: Token) -> Opened:
        return Opened(len(token), lambda start, stop: self.stacked(token[start:stop]))

    def spec(self) -> Nest | None:
        inner = self.parent.spec()
        if inner is None:
            return None
        return nest.map_structure(
            lambda one: ArraySpec((self.spec_rows(), *one.shape), one.dtype), inner
        )

    def spec_rows(self) -> int | None:
        """Return the number of rows that the spec declares."""
        return self.rows if self.drop_remainder else None


@dataclasses.dataclass(frozen=True)
class _Shape:
    """A shape that rows are padded to: None where the longest row decides."""

    sizes: tuple[int | None, ...]


@dataclasses.dataclass(eq=False, repr=False)
class PaddedBatch(Batch):
    """A given number of elements of the parent, padded to one shape and stacked.

    If the longest row of a batch decides the shape, its rows must be read together.
    """

    shapes: Nest  # None: the longest row decides
    values: Nest  # None: 0, False or an empty string

    def __post_init__(self) -> None:
        self.inherit_rows("padded_batch")
        if not _is_known(self.shapes):
            self.whole = (
                "the `padded_batch`, whose longest row decides (with `padded_shapes` "
                "without None or -1 it works row by row)"
            )
        if self.shapes is not None:
            self.text += f" to {self.shapes}"

    def stacked(self, tokens: Tokens) -> RowBlock | None:
        call = "Dataset.padded_batch"
        rows = [block_of(row, call) for row in self.parent.load(tokens)]
        if not rows:
            return None
        structure = rows[0].structure
        for row in rows:
            if row.structure != structure:
                raise ValueError(
                    f"{call}: expected rows of one structure, got {structure} and "
                    f"{row.structure}"
                )
        columns = list(zip(*(row.leaves for row in rows), strict=True))
        if self.shapes is None:
            shapes = [_Shape((None,) * column[0].ndim) for column in columns]
        else:
            shapes, _ = nest.flatten(_shapes_like(rows[0].nest(), self.shapes))
        values = self._values(structure, len(columns))
        leaves = [
            _padded(column, shape.sizes, value)
            for column, shape, value in zip(columns, shapes, values, strict=True)
        ]
        return RowBlock(leaves, structure)

    def _values(self, structure: nest.Structure, count: int) -> list[Any]:
        values, given = nest.flatten(self.values)
        if given.is_leaf:
            return values * count
        if given != structure:
            raise TypeError(
                f"Dataset.padded_batch: expected `padding_values` like an element, "
                f"{structure}, or one number, got {self.values!r}"
            )
        return values

    def spec(self) -> Nest | None:
        inner = self.parent.spec()
        if inner is None:
            return None
        leaves, structure = nest.flatten(inner)
        if self.shapes is None:
            sizes = [(None,) * len(leaf.shape) for leaf in leaves]
        else:
            shapes, _ = nest.flatten(_shapes_like(inner, self.shapes))
            sizes = [shape.sizes for shape in shapes]
        return structure.unflatten(
            ArraySpec((self.spec_rows(), *size), leaf.dtype)
            for leaf, size in zip(leaves, sizes, strict=True)
        )


def _is_known(shapes: Nest) -> bool:
    """Whether shapes have no size that the rows of a batch decide."""
    if shapes is None:
        return False
    if isinstance(shapes, dict):
        return all(map(_is_known, shapes.values()))
    if isinstance(shapes, (tuple, list)):
        return all(map(_is_known, shapes))
    return bool(shapes != -1)


def _shapes_like(element: Nest, shapes: Nest) -> Nest:
    """Return the nest of `_Shape` for an element, or for its specs."""
    if isinstance(element, dict):
        if isinstance(shapes, dict) and shapes.keys() == element.keys():
            return type(element)(
                {key: _shapes_like(part, shapes[key]) for key, part in element.items()}
            )
    elif isinstance(element, (tuple, list)):
        if isinstance(shapes, (tuple, list)) and len(shapes) == len(element):
            parts = [_shapes_like(*both) for both in zip(element, shapes, strict=True)]
            kind = type(element)
            return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    elif isinstance(shapes, (tuple, list)) and all(map(_is_size, shapes)):
        return _Shape(tuple(None if size in (None, -1) else size for size in shapes))
    raise TypeError(
        "Dataset.padded_batch: expected `padded_shapes` to have a tuple of sizes for "
        f"each array of an element, got {shapes!r}"
    )


def _is_size(x: object) -> bool:
    return x is None or (isinstance(x, (int, np.integer)) and bool(x >= -1))


def _padded(
    column: tuple[Array, ...], sizes: tuple[int | None, ...], value: Any
) -> Array:
    """Stack arrays, after padding each at its end."""
    call = "Dataset.padded_batch"
    for row in column:
        if row.ndim != len(sizes):
            raise ValueError(
                f"{call}: expected arrays of {len(sizes)} dimensions, got one of shape "
                f"{tuple(row.shape)}"
            )
    longest = np.max([row.shape for row in column], axis=0, initial=0)
    target = [
        int(own) if size is None else size
        for own, size in zip(longest, sizes, strict=True)
    ]
    if any(own > size for own, size in zip(longest, target, strict=True)):
        raise ValueError(
            f"{call}: expected arrays that fit into `padded_shapes` {tuple(target)}, "
            f"got one of shape {max(tuple(row.shape) for row in column)}; cut them in "
            "a `map` before"
        )
    xp: Any = backend.module_of(column[0])
    dtype = xp.result_type(*column)
    filled: Array = xp.full((len(column), *target), _padding(value, dtype), dtype)
    for number, row in enumerate(column):
        filled[(number, *map(slice, row.shape))] = row
    return filled


def _padding(value: Any, dtype: DType) -> Any:
    if value is None:
        return "" if dtype.kind == "U" else b"" if dtype.kind == "S" else 0
    given = np.asarray(as_leaf(value, "Dataset.padded_batch"))
    if given.shape != () or not np.can_cast(given.dtype, dtype, "same_kind"):
        raise TypeError(
            f"Dataset.padded_batch: expected `padding_values` of one {dtype}, got "
            f"{value!r}"
        )
    return given[()]


@dataclasses.dataclass(eq=False, repr=False)
class Unbatch(Derived):
    """The rows of the parent's elements. A token is a row, which has been read."""

    def __post_init__(self) -> None:
        size = self.parent.size
        self.inherit(".unbatch()", size if size in (0, INFINITE) else UNKNOWN)
        self.indexed, self.batch_size, self.whole = False, None, ""

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        return itertools.islice(self._rows(in_pass), start, None)

    def _rows(self, in_pass: Pass) -> Iterator[Token]:
        for element in self.parent.load(self.parent.tokens(in_pass)):
            block = block_of(element, "Dataset.unbatch")
            rows = {leaf.shape[:1] for leaf in block.leaves}
            if len(rows) != 1 or () in rows:
                raise ValueError(
                    "Dataset.unbatch: expected elements whose arrays have the same "
                    f"first dimension, got {describe_block(block)}"
                )
            ((count,),) = rows
            yield from map(block.row, range(count))

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        return iter(tokens)

    def spec(self) -> Nest | None:
        inner = self.parent.spec()
        if inner is None or not all(one.shape for one in nest.flatten(inner)[0]):
            return None
        return nest.map_structure(
            lambda one: ArraySpec(one.shape[1:], one.dtype), inner
        )
