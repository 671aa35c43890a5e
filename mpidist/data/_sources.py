"""Stages without a parent: where the elements of a `Dataset` come from."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from mpidist._base import backend, nest, shuffle_seeds
from mpidist._base.expect import expect
from mpidist._base.types import DType, HostArray, Nest
from mpidist.data._options import ArraySpec, can_have, longest_text
from mpidist.data._rows import (
    RowBlock,
    as_leaf,
    block_of,
    convert_lists,
    exact_array,
    gather,
    lists_to_arrays,
    map_like,
    unshared,
)
from mpidist.data._stages import (
    END,
    INFINITE,
    UNKNOWN,
    Pass,
    Stage,
    Token,
    Tokens,
    name_of,
)

_SAMPLED: Final = 16  # rows of arrays, to compare them
_SAMPLED_BYTES: Final = 4096  # of each row
_COMPARABLE: Final = "biufcmMSU"  # kinds of dtypes whose bytes are their values


class Slices(Stage):
    """The rows of arrays."""

    def __init__(self, leaves: Sequence[Any], structure: nest.Structure) -> None:
        self._leaves, self._structure = leaves, structure
        self.size = int(leaves[0].shape[0])
        self.text = f"{self.size} rows"

    def block(self, tokens: Tokens) -> RowBlock:
        indices = np.asarray(tokens, np.int64)
        return RowBlock([gather(x, indices) for x in self._leaves], self._structure)

    def sample(self) -> int:
        # Others, such as files, are read by the rank that needs them.
        if not self.size or any(
            type(x) is not np.ndarray or x.dtype.kind not in _COMPARABLE
            for x in self._leaves
        ):
            return 0
        rows = np.unique(np.linspace(0, self.size - 1, _SAMPLED, dtype=np.int64))
        try:
            leaves = [_starts(leaf, rows) for leaf in self._leaves]
            checksum = RowBlock(leaves, self._structure).checksum()
        except Exception:  # it only helps: the call must work without
            return 0
        return checksum & 0x7FFFFFFF or 1

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        if isinstance(tokens, (np.ndarray, Sequence)):
            block = self.block(tokens)  # one access for all
            return map(block.row, range(len(tokens)))
        return (self.block([token]).row(0) for token in tokens)

    def spec(self, *, trial: bool = False) -> Nest | None:
        specs = [
            ArraySpec(tuple(map(int, leaf.shape[1:])), _dtype_of(leaf))
            for leaf in self._leaves
        ]
        return self._structure.unflatten(specs)


def _starts(leaf: HostArray, rows: HostArray) -> HostArray:
    """Return a copy of the first values of some rows of an array."""
    most = max(1, _SAMPLED_BYTES // max(1, leaf.itemsize))
    found = np.concatenate([leaf[i : i + 1].flat[:most] for i in rows.tolist()])
    if found.dtype.kind in "fc":
        with np.errstate(all="ignore"):
            found = found + 0.0  # -0.0 equals 0.0
    return found.astype(found.dtype.newbyteorder("="), copy=False)


def _dtype_of(leaf: Any) -> DType:
    dtype = getattr(leaf, "dtype", None)
    if not isinstance(dtype, np.dtype):
        dtype = np.asarray(leaf[0:0]).dtype
    return dtype if dtype.isnative else dtype.newbyteorder("=")


class Rows(Stage):
    """The items of a source with ``__len__`` and ``__getitem__``: one row each."""

    def __init__(self, source: Any, text: str = "", spec: Nest | None = None) -> None:
        self._source, self._spec = source, spec
        self.size = len(source)
        self.text = text or f"{self.size} rows of a {type(source).__name__}"

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        for token in tokens:
            # New dicts, lists and arrays: functions of the program may change them.
            yield convert_lists(self._source[int(token)], copy.copy, unshared)

    def spec(self, *, trial: bool = False) -> Nest | None:
        return self._spec


class Element(Rows):
    """One nest of arrays, which is a batch of their rows."""

    has_batches = True

    def __init__(self, element: Nest, spec: Nest) -> None:
        super().__init__([element], "1 element", spec)


class Range(Stage):
    """Numbers with a constant difference; without end for a stop of None."""

    def __init__(self, start: int, stop: int | None, step: int, dtype: DType) -> None:
        self.size = INFINITE
        if stop is not None:
            self.size = min(max(0, -((start - stop) // step)), INFINITE - 1)
        self.text = f"range({start}, {'...' if stop is None else stop}, {step})"
        self._start, self._step, self._dtype = start, step, dtype
        self._is_wide = max(start, (stop or 0) - 1) >= 2**63

    def block(self, tokens: Tokens) -> RowBlock:
        # Modulo 2**64, as one of these dtypes has all of them.
        start, step = (np.uint64(x % 2**64) for x in (self._start, self._step))
        numbers = np.asarray(tokens, np.int64).view(np.uint64) * step + start
        numbers = numbers.view(np.uint64 if self._is_wide else np.int64)
        return block_of(numbers.astype(self._dtype), "Dataset.range")

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        for token in tokens:
            # As `block`: a number that the dtype does not have is wrapped.
            number = np.asarray(self._start + int(token) * self._step)
            yield number.astype(self._dtype)[()]

    def spec(self, *, trial: bool = False) -> Nest | None:
        return ArraySpec((), self._dtype)


_GENERATOR: Final = "Dataset.from_generator"


def _as_declared(spec: ArraySpec, x: Nest) -> HostArray:
    """Return a leaf of a generator's element as an array of its declared spec."""
    try:
        is_text = isinstance(x, (str, bytes, list))
        array: HostArray = exact_array(x) if is_text else np.asarray(x)
    except Exception as error:
        raise TypeError(
            f"{_GENERATOR}: the generator yielded {x!r:.80}, which is not an array of "
            f"{spec.dtype}: {error}"
        ) from error
    if array.size and not can_have(array, spec.dtype):
        raise TypeError(
            f"{_GENERATOR}: expected elements of dtype {spec.dtype}, as in the "
            f"`output_signature`, but the generator yielded {array.dtype}: {x!r:.80}"
        )
    shape: Any = spec.shape  # None: any
    if shape is not None and not (
        len(shape) == array.ndim
        and all(a in (None, b) for a, b in zip(shape, array.shape, strict=True))
    ):
        raise ValueError(
            f"{_GENERATOR}: expected elements of shape {shape}, as in the "
            "`output_signature`, but the generator yielded one of shape "
            f"{array.shape}"
        )
    return array.astype(longest_text(spec.dtype, array.dtype), copy=False)


class Generated(Stage):
    """The elements of a user's generator. Each pass calls its function anew."""

    indexed = False
    size = UNKNOWN
    has_batches = True

    def __init__(
        self,
        function: Callable[..., Iterable[Nest]],
        args: tuple[Any, ...],
        declared: Nest | None,
    ) -> None:
        self.text = f"the generator {name_of(function)}"
        self._function, self._args, self._declared = function, args, declared

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        with shuffle_seeds.reading:
            made = self._function(*self._args)
        what, hint = "a function that returns an iterable", "write one with `yield`"
        expect(hasattr(made, "__iter__"), _GENERATOR, what, made, hint)
        try:
            elements = iter(made)
            while True:
                with shuffle_seeds.reading:
                    element = next(elements, END)
                if element is END:
                    return
                # A copy, as in tf.data: generators may fill one buffer again and again.
                yield nest.map_structure(_kept, self._converted(element))
        finally:
            # A generator or a file, which nobody reads any more.
            if hasattr(made, "__next__") and hasattr(made, "close"):
                made.close()

    def _converted(self, element: Nest) -> Nest:
        if self._declared is None:
            return lists_to_arrays(element)
        try:
            return map_like(_as_declared, self._declared, element)
        except LookupError:
            raise TypeError(
                f"{_GENERATOR}: expected elements like "
                f"{nest.flatten(self._declared)[1]}, as in the `output_signature`, but "
                f"the generator yielded {element!r:.80}"
            ) from None

    def spec(self, *, trial: bool = False) -> Nest | None:
        specs: list[Any] = nest.flatten(self._declared)[0]
        known = all(spec is not None and spec.shape is not None for spec in specs)
        return self._declared if known else None


def _kept(x: Any) -> Any:
    return exact_array(x)[()] if isinstance(x, (str, bytes)) else backend.copied(x)


def slices_of(tensors: Nest) -> Stage:
    """Return the stage for the argument of ``from_tensor_slices``."""
    name = "Dataset.from_tensor_slices"
    hint = 'write `from_tensor_slices(numpy.load(path, mmap_mode="r"))` for its rows'
    is_path = isinstance(tensors, (str, bytes, os.PathLike))
    what = "arrays of at least one dimension, not text or the name of a file"
    expect(not is_path, name, what, tensors, hint, error=ValueError)
    if _is_row_source(tensors):
        return Rows(tensors)
    leaves, structure = nest.flatten(lists_to_arrays(tensors, tuples=True))
    arrays = [x if _is_array_like(x) else as_leaf(x, name) for x in leaves]
    shapes = [tuple(x.shape) for x in arrays]
    if not shapes or not all(shapes):
        what = "arrays of at least one dimension, got"
    elif len({shape[0] for shape in shapes}) > 1:
        what = "arrays with the same first dimension, got shapes"
    else:
        return Slices(arrays, structure)
    texts = structure.render([str(shape) for shape in shapes])
    raise ValueError(f"{name}: expected {what} {texts}")


def _is_row_source(x: object) -> bool:
    """Whether this is one object whose items are rows."""
    return (
        hasattr(x, "__getitem__")
        and hasattr(x, "__len__")
        and not isinstance(x, list)
        and not is_nest(x)
    )


def is_nest(x: object) -> bool:
    """Return whether this is an array, text, a tuple or a dict."""
    return (
        hasattr(x, "shape")
        or isinstance(x, (str, bytes, tuple))
        or (hasattr(x, "keys") and hasattr(x, "items"))
    )


def _is_array_like(x: Any) -> bool:
    """Whether this supports slices of rows, and need not be converted."""
    if isinstance(x, np.ndarray):
        return not backend.is_masked(x)
    return (
        not hasattr(x, "__dlpack__")
        and hasattr(x, "shape")
        and hasattr(x, "__getitem__")
    )


def declared(signature: Nest, types: Nest, shapes: Nest) -> Nest | None:
    """Return the nest of specs that the arguments of ``from_generator`` declare.

    Their shapes are None where any is allowed.
    """
    if signature is not None:
        if types is None and shapes is None:
            return nest.map_structure(_declared_spec, signature)
        raise TypeError(
            f"{_GENERATOR}: got `output_signature` together with `output_types` or "
            "`output_shapes`; write the first only"
        )
    if types is None:
        if shapes is None:
            return None
        raise TypeError(f"{_GENERATOR}: got `output_shapes` without `output_types`")
    if shapes is None:
        return nest.map_structure(_spec, types)
    try:
        return map_like(_spec, types, shapes)
    except LookupError:
        raise TypeError(
            f"{_GENERATOR}: expected `output_shapes` to have a shape for each of "
            f"`output_types` {types!r}, got {shapes!r}"
        ) from None


def _declared_spec(leaf: Any) -> ArraySpec:
    is_spec = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    what = "`output_signature` to be a nest of `mpidist.data.ArraySpec(shape, dtype)`"
    expect(is_spec, _GENERATOR, what, leaf)
    return _spec(leaf.dtype, leaf.shape)


def _spec(dtype: Any, shape: Any = None) -> ArraySpec:
    sizes: Any = None if shape is None else tuple(shape)
    return ArraySpec(sizes, as_dtype(dtype, "from_generator"))


def as_dtype(value: Any, method: str) -> DType:
    """Return a dtype."""
    try:
        return np.dtype(value)
    except TypeError as error:
        raise TypeError(
            f"Dataset.{method}: expected a dtype of NumPy, got {value!r:.60}"
        ) from error
