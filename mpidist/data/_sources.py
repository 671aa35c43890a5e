"""Stages without a parent: where the elements of a `Dataset` come from.

And those of a distributed dataset of anything else: a sequence of batches, an iterable,
or a function that returns the next one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from mpidist._base import backend, nest, shuffle_seeds, state_json
from mpidist._base.expect import expect
from mpidist._base.types import DType, HostArray, Nest
from mpidist.data._options import ArraySpec
from mpidist.data._positions import OutOfRangeError
from mpidist.data._rows import (
    RowBlock,
    as_leaf,
    block_of,
    can_have,
    convert_lists,
    exact_array,
    gather,
    lists_to_arrays,
    longest_text,
    map_like,
    protected,
    unshared,
)
from mpidist.data._stages import (
    END,
    INFINITE,
    UNKNOWN,
    Block,
    Pass,
    Stage,
    Token,
    Tokens,
    name_of,
    too_short,
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
    dtype = longest_text(spec.dtype, array.dtype)
    return array.astype(dtype, copy=False)


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
        if not hasattr(made, "__iter__"):
            raise TypeError(
                f"{_GENERATOR}: expected a function that returns an iterable, got "
                f"{made!r:.80} of type {type(made).__name__} from it; write a function "
                "with `yield`"
            )
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
        return not isinstance(x, np.ma.MaskedArray)
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
        return nest.map_structure(lambda dtype: _spec(None, dtype), types)
    try:
        return map_like(lambda dtype, shape: _spec(shape, dtype), types, shapes)
    except LookupError:
        raise TypeError(
            f"{_GENERATOR}: expected `output_shapes` to have a shape for each of "
            f"`output_types` {types!r}, got {shapes!r}"
        ) from None


def _declared_spec(leaf: Any) -> ArraySpec:
    if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
        raise TypeError(
            f"{_GENERATOR}: expected `output_signature` to be a nest of "
            f"`mpidist.data.ArraySpec(shape, dtype)`, got {leaf!r:.80} in it"
        )
    return _spec(leaf.shape, leaf.dtype)


def _spec(shape: Any, dtype: Any) -> ArraySpec:
    sizes: Any = None if shape is None else tuple(shape)
    return ArraySpec(sizes, as_dtype(dtype, "from_generator"))


def as_dtype(value: Any, method: str) -> DType:
    """Return a dtype."""
    try:
        dtype: DType = np.dtype(value)
    except TypeError as error:
        raise TypeError(
            f"Dataset.{method}: expected a dtype of NumPy, got {value!r:.60}"
        ) from error
    return dtype


# --- what is not a Dataset ---------------------------------------------------------


class Calls(Iterable[Nest]):
    """The results of a function without arguments, called until it ends the input.

    StopIteration or OutOfRangeError does that.
    """

    def __init__(self, function: Callable[[], Nest]) -> None:
        self.function = function

    def __iter__(self) -> Iterator[Nest]:
        with contextlib.suppress(StopIteration, OutOfRangeError):
            while True:
                yield self.function()


class Items(Stage):
    """Elements that are the items of a sequence, or what an iterable iterates over."""

    indexed = False

    def __init__(self, items: Any, call: str) -> None:
        self._items, self._call = items, call
        self._turn, self._turns = 0, 1
        self._numbered = hasattr(items, "__len__") and hasattr(items, "__getitem__")
        self.again = self._numbered
        self.one_shot = hasattr(items, "__next__") or isinstance(items, Calls)
        self.cardinality()
        self.text = type(items).__name__
        if isinstance(items, Calls):
            self.text = getattr(items.function, "__qualname__", "a function")
        if self.again:
            endless = self.size >= INFINITE
            many = "without end" if endless else f"of {self.size} elements"
            self.text += f" {many}"
        self.whole = f"the {self.text}"
        self._opened = False

    def deal(self, turn: int, turns: int) -> None:
        """Keep every ``turns``-th element, from number ``turn`` on."""
        self._turn, self._turns = turn, turns
        self.again = self.again and turns == 1

    def cardinality(self) -> int:
        # Each time: the length of a DataLoader may differ from epoch to epoch.
        try:
            self.size = len(self._items)
        except (TypeError, NotImplementedError):
            self.size = UNKNOWN
        if 0 <= self.size < INFINITE:
            self.size = len(range(self._turn, self.size, self._turns))
        return super().cardinality()

    @functools.cached_property
    def element_spec(self) -> Nest:
        raise ValueError(
            f"element_spec: the elements of a {self.text} are not known before the "
            "first was read; call `next(iterator)` first"
        )

    def stream(
        self,
        iteration: int,
        position: int,
        state: Any = None,
        earlier: Iterator[Block] | None = None,
    ) -> Iterator[Block]:
        found = earlier
        if not isinstance(found, _ItemStream):
            turn = (self._turn, self._turns)
            found = _ItemStream(self._begin(), self._call, *turn)
        found.seek(position, state)
        return found

    def _begin(self) -> Iterator[Nest]:
        if self._numbered:
            return _Numbered(self._items)
        if self._opened and hasattr(self._items, "__next__"):
            raise RuntimeError(
                f"{self._call}: a {self.text} can be read only once, and this "
                "is the second `iter(...)`; give an object whose `__iter__` starts "
                "from the beginning (a list, a DataLoader), or create the dataset for "
                "each epoch"
            )
        self._opened = True
        with shuffle_seeds.reading:
            return iter(self._items)


class _Numbered(Iterator[Nest]):
    """Iterates over the items of a sequence, from any on.

    None items are skipped, as in grain (its ``filter`` returns them).
    """

    def __init__(self, items: Any) -> None:
        self._items, self._next = items, 0

    def __next__(self) -> Nest:
        while self._next < len(self._items):
            self._next += 1
            try:
                element = self._items[self._next - 1]
            except StopIteration as error:  # which the loop would take for the end
                raise RuntimeError(
                    "the input raised StopIteration inside an element"
                ) from error
            if element is not None:
                return element
        raise StopIteration

    def get_state(self) -> int:
        """Return the number of the next item."""
        return self._next

    def set_state(self, state: Any) -> None:
        """Go to an item."""
        self._next = int(state)


class _ItemStream(Iterator[RowBlock]):
    """Reads what a user's iterator returns."""

    def __init__(self, items: Iterator[Nest], call: str, turn: int, turns: int) -> None:
        self._items: Any = items
        self._call = call
        self._position = 0
        self._skipped, self._turns = turn, turns  # items of others before the next

    def seek(self, position: int, state: Any) -> None:
        """Go to the element with this number; ``state`` is the `state` there."""
        if state is None and isinstance(self._items, _Numbered) and self._turns == 1:
            state = position
        if state is not None and hasattr(self._items, "set_state"):
            found = state_json.unpack(_as_now(state), lambda *_: None)
            self._items.set_state(found)
            self._position = position
            if position:
                self._skipped = self._turns - 1
            return
        if position < self._position:
            raise RuntimeError(
                f"restore: this iterator has read {self._position} elements of a "
                "source that can be read only once, and cannot go back to "
                f"{position}; restore a new iterator of a new source"
            )
        while self._position < position:
            if self._read() is END:
                raise too_short(position, f"after {self._position}")

    def _read(self) -> Nest:
        element: Nest = None
        with shuffle_seeds.reading:
            for _ in range(self._skipped + 1):
                element = next(self._items, END)
        if element is not END:
            self._skipped = self._turns - 1
            self._position += 1
        return element

    def __next__(self) -> RowBlock:
        element = self._read()
        if element is END:
            raise StopIteration
        block = block_of(element, self._call)
        if isinstance(self._items, _Numbered):
            # The item may be requested again, so it must not be written to.
            block.leaves = [protected(x) for x in block.leaves]
        return block

    def state(self) -> Any:
        """Return the state of the user's iterator, as JSON; None if it has none."""
        if not all(hasattr(self._items, x) for x in ("get_state", "set_state")):
            return None
        name = type(self._items).__name__
        packed = state_json.pack(self._items.get_state(), name, "state")
        what = f"a `get_state()` of {name} without tensors and large arrays"
        expect(not packed.arrays, "state", what, [*packed.arrays])
        return packed.value


def state_of(stream: Iterator[Block] | None) -> Any:
    """Return the state of a user's iterator at its position; None if it has none."""
    return stream.state() if isinstance(stream, _ItemStream) else None


def _as_now(state: Any) -> Any:
    """Return a state in JSON with bytes and tuples as older versions saved them."""
    if isinstance(state, tuple):
        return {"$tuple": [*map(_as_now, state)]}
    if isinstance(state, list):
        return [*map(_as_now, state)]
    if not isinstance(state, dict):
        return state
    names = {"__bytes__": "$bytes"} if len(state) == 1 else {}
    return {names.get(key, key): _as_now(x) for key, x in state.items()}
