"""Stages without a parent: where the elements of a `Dataset` come from."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mpidist._base import nest
from mpidist._base.types import DType, HostArray, Nest, Shape
from mpidist.data._blocks import RowBlock, block_of, gather
from mpidist.data._records import ArraySpec
from mpidist.data._stage import (
    INFINITE,
    UNKNOWN,
    Pass,
    Stage,
    Token,
    Tokens,
    name_of,
    read_only,
    specs_of,
)


class _Numbered(Stage):
    """A source whose tokens are the numbers of its elements."""

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        return indices


class Slices(_Numbered):
    """The rows of arrays."""

    def __init__(self, leaves: Sequence[Any], structure: nest.Structure) -> None:
        self._leaves = leaves
        self._structure = structure
        self._plain = all(
            isinstance(leaf, np.ndarray) and leaf.dtype.isnative for leaf in leaves
        )
        self.size = int(leaves[0].shape[0])
        self.text = f"{self.size} rows"

    def block(self, tokens: Tokens) -> RowBlock:
        indices = np.asarray(tokens, np.int64)
        return RowBlock(
            [gather(leaf, indices) for leaf in self._leaves], self._structure
        )

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        if isinstance(tokens, (np.ndarray, Sequence)):
            block = self.block(tokens)  # one access for all
            yield from map(block.row, range(len(tokens)))
        elif self._plain:
            for token in tokens:
                yield self._structure.unflatten([_row(x, token) for x in self._leaves])
        else:
            for token in tokens:
                yield self.block([token]).row(0)

    def spec(self) -> Nest | None:
        specs = [
            ArraySpec(tuple(map(int, leaf.shape[1:])), _dtype_of(leaf))
            for leaf in self._leaves
        ]
        return self._structure.unflatten(specs)


def _row(x: HostArray, index: int) -> Nest:
    """Return a row as a new array, or as a number."""
    return x[index] if x.ndim == 1 else np.array(x[index])


def _dtype_of(leaf: Any) -> DType:
    dtype = getattr(leaf, "dtype", None)
    if not isinstance(dtype, np.dtype):
        dtype = np.asarray(leaf[0:0]).dtype
    return dtype if dtype.isnative else dtype.newbyteorder("=")


class Rows(_Numbered):
    """The items of a source with ``__len__`` and ``__getitem__``: one row each."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.size = len(source)
        self.text = f"{self.size} rows of a {type(source).__name__}"

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        for token in tokens:
            yield self._source[int(token)]


class Range(_Numbered):
    """Numbers with a constant difference."""

    def __init__(self, start: int, stop: int | None, step: int, dtype: DType) -> None:
        if stop is None:  # without end
            self.size = INFINITE
            self.text = f"range({start}, ...)"
        else:
            self.size = len(range(start, stop, step))
            self.text = f"range({start}, {stop}, {step})"
        self._start, self._step, self._dtype = start, step, dtype

    def block(self, tokens: Tokens) -> RowBlock:
        numbers = np.asarray(tokens, np.int64) * self._step + self._start
        return block_of(numbers.astype(self._dtype), "Dataset.range")

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        for token in tokens:
            yield self._dtype.type(self._start + int(token) * self._step)

    def spec(self) -> Nest | None:
        return ArraySpec((), self._dtype)


class Single(_Numbered):
    """One element."""

    def __init__(self, block: RowBlock) -> None:
        self.size = 1
        self._spec = specs_of(block, batched=False)
        self._element = read_only(block.nest())
        self.text = "1 element"

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        for _ in tokens:
            yield self._element

    def spec(self) -> Nest | None:
        return self._spec


@dataclasses.dataclass(frozen=True)
class Declared:
    """What a leaf of a generator's elements is declared to be.

    Attributes:
        dtype: its dtype.
        shape: its shape, with None for sizes that differ; None: of any shape.
    """

    dtype: DType
    shape: tuple[int | None, ...] | None

    def check(self, x: Nest) -> HostArray:
        """Return a leaf as an array of this dtype.

        Raises:
            TypeError: if it cannot be converted, or would lose its fraction.
            ValueError: if it has another shape.
        """
        call = "Dataset.from_generator"
        try:
            array: HostArray = np.asarray(x)
        except Exception as error:
            raise TypeError(
                f"{call}: the generator yielded {x!r:.80}, which is not an array of "
                f"{self.dtype}: {error}"
            ) from error
        if not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise TypeError(
                f"{call}: expected elements of dtype {self.dtype}, as in the "
                f"`output_signature`, but the generator yielded {array.dtype}: "
                f"{x!r:.80}"
            )
        if self.shape is not None and not _fits(array.shape, self.shape):
            raise ValueError(
                f"{call}: expected elements of shape {self.shape}, as in the "
                f"`output_signature`, but the generator yielded one of shape "
                f"{array.shape}"
            )
        return array.astype(self.dtype, copy=False)


def _fits(shape: Shape, declared: tuple[int | None, ...]) -> bool:
    return len(shape) == len(declared) and all(
        size in (None, own) for own, size in zip(shape, declared, strict=True)
    )


class Generated(Stage):
    """The elements of a user's generator. Each pass calls its function anew."""

    def __init__(
        self,
        function: Callable[..., Iterable[Nest]],
        args: tuple[Any, ...],
        declared: Nest | None,
    ) -> None:
        self.indexed = False
        self.size = UNKNOWN
        self.text = f"the generator {name_of(function)}"
        self._function, self._args, self._declared = function, args, declared

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        made = self._function(*self._args)
        if not hasattr(made, "__iter__"):
            raise TypeError(
                "Dataset.from_generator: expected a function that returns an iterable, "
                f"got {made!r:.80} of type {type(made).__name__} from it; write a "
                "function with `yield`"
            )
        try:
            for element in itertools.islice(made, start, None):
                if self._declared is None:
                    array = nest.map_structure(_text_to_array, lists_to_arrays(element))
                else:
                    array = _declared_nest(self._declared, element)
                # A copy, as in tf.data: generators may fill one buffer again and again.
                yield nest.map_structure(_copied, array)
        finally:
            # A generator or a file, which nobody reads any more.
            if hasattr(made, "__next__") and hasattr(made, "close"):
                made.close()

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        return iter(tokens)

    def spec(self) -> Nest | None:
        if self._declared is None:
            return None
        leaves, structure = nest.flatten(self._declared)
        if any(leaf.shape is None for leaf in leaves):
            return None
        return structure.unflatten([ArraySpec(x.shape, x.dtype) for x in leaves])


def _copied(x: Any) -> Any:
    return x.copy() if isinstance(x, np.ndarray) else x


def _text_to_array(x: Any) -> Any:
    return np.asarray(x)[()] if isinstance(x, (str, bytes)) else x


def _declared_nest(declared: Nest, element: Nest) -> Nest:
    """Return an element with the structure and the dtypes that are declared."""
    if isinstance(declared, Declared):
        return declared.check(element)
    if isinstance(declared, dict):
        if isinstance(element, dict) and element.keys() == declared.keys():
            return type(declared)(
                {
                    key: _declared_nest(part, element[key])
                    for key, part in declared.items()
                }
            )
    elif isinstance(element, (tuple, list)) and len(element) == len(declared):
        parts = [_declared_nest(*pair) for pair in zip(declared, element, strict=True)]
        kind = type(declared)
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    raise TypeError(
        f"Dataset.from_generator: expected elements like {nest.flatten(declared)[1]}, "
        f"as in the `output_signature`, but the generator yielded {element!r:.80}"
    )


def lists_to_arrays(tree: Nest) -> Nest:
    """Convert lists of numbers in a nest to arrays."""
    if isinstance(tree, list):
        if _holds_numbers(tree):
            return np.asarray(tree)
        return [lists_to_arrays(part) for part in tree]
    if isinstance(tree, dict):
        return type(tree)({key: lists_to_arrays(part) for key, part in tree.items()})
    if isinstance(tree, tuple):
        parts = [lists_to_arrays(part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree


def _holds_numbers(tree: Nest) -> bool:
    if isinstance(tree, list):
        return bool(tree) and all(_holds_numbers(part) for part in tree)
    return isinstance(tree, (bool, int, float, complex, str, np.generic))
