"""The inputs of a distributed dataset: a Dataset, a sequence, an iterable.

A source describes what is known about it; a *stream* reads it from a position.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np

from mpidist._base import backend, nest
from mpidist._base.types import Array, Nest
from mpidist.data._blocks import RowBlock
from mpidist.data._dataset import Dataset
from mpidist.data._dataset_base import stage_of
from mpidist.data._records import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    OutOfRangeError,
)
from mpidist.data._stage import (
    INFINITE,
    Opened,
    Stage,
    open_from,
    open_tokens,
    open_whole,
)

SourceState: TypeAlias = Any
"""The state of a user's input, as JSON; None if it has none."""


class Stream(Protocol):
    """Reads elements in order."""

    def seek(self, position: int, state: SourceState = None) -> None:
        """Go to the element with this number; ``state`` is the `state` there."""

    def read(self) -> Opened | None:
        """Return the next element, or None at the end."""

    def state(self) -> SourceState:
        """Return the source's own state at its position; None if it has none."""


class Source(Protocol):
    """What is known about an input.

    Attributes:
        text: a description for users.
        batch_size: the number of rows in a full batch, None if not known (yet).
        reads_whole: whether elements can only be read as a whole.
        depth: how far a thread may read ahead.
        again: whether a position can be read again after an error.
        one_shot: whether it can be read only once.
        spec: the nest of specs of an element, or None if only known after reading.
    """

    text: str
    batch_size: int | None
    reads_whole: bool
    depth: int
    again: bool
    one_shot: bool
    spec: Nest | None

    def cardinality(self) -> int:
        """Return the number of elements, or one of the two constants."""

    def open(self, iteration: int) -> Stream:
        """Return a stream, at the first element."""


class DatasetSource:
    """A `Dataset`.

    Args:
        dataset: the dataset that this rank reads.
        whole: the dataset of which that is this replica's part, by files; or None.
    """

    again = True
    one_shot = False

    def __init__(self, dataset: Dataset, whole: Dataset | None = None) -> None:
        self.dataset = dataset
        self.by_file = whole is not None
        self.stage = stage_of(dataset)
        self.text = f"Dataset of {stage_of(whole or dataset).text}"
        self.batch_size = self.stage.batch_size
        self.reads_whole = bool(self.stage.whole)
        self.depth = self.stage.depth
        self.spec = self.stage.spec()

    def cardinality(self) -> int:
        size = self.stage.size
        return INFINITE_CARDINALITY if size >= INFINITE else size

    def open(self, iteration: int) -> Stream:
        return _StageStream(self.stage, iteration)


class _StageStream:
    def __init__(self, stage: Stage, iteration: int) -> None:
        self._stage = stage
        self._pass = (iteration,)
        self._elements = open_from(stage, self._pass, 0)

    def seek(self, position: int, state: SourceState = None) -> None:
        if position and not self._stage.indexed:
            # Up to the position, so that what fails there fails here, on all ranks.
            tokens = self._stage.tokens(self._pass, position - 1)
            if next(tokens, _END) is _END:
                raise ValueError(
                    f"restore: expected an input of {position} or more elements, got "
                    "one that ends before; pass the input that the state was taken from"
                )
            self._elements = open_tokens(self._stage, tokens)
        else:
            self._elements = open_from(self._stage, self._pass, position)

    def read(self) -> Opened | None:
        return next(self._elements, None)

    def state(self) -> SourceState:
        return None


class SequenceSource:
    """Anything with ``__len__`` and ``__getitem__``: each item is an element.

    None items are skipped, as in grain (its ``filter`` returns them).
    """

    reads_whole = True
    depth = 0
    again = True
    one_shot = False
    spec = None

    def __init__(self, items: Any, call: str) -> None:
        self.items = items
        self.call = call
        self.size = len(items)
        self.batch_size: int | None = None
        many = "without end" if self.size >= INFINITE else f"of {self.size} elements"
        self.text = f"{type(items).__name__} {many}"

    def cardinality(self) -> int:
        return INFINITE_CARDINALITY if self.size >= INFINITE else self.size

    def open(self, iteration: int) -> Stream:
        return _SequenceStream(self)


class _SequenceStream:
    def __init__(self, source: SequenceSource) -> None:
        self._source = source
        self._position = 0

    def seek(self, position: int, state: SourceState = None) -> None:
        self._position = position if state is None else int(state)

    def read(self) -> Opened | None:
        source = self._source
        while self._position < source.size:
            element = source.items[self._position]
            self._position += 1
            if element is not None:
                opened = open_whole(element, source.call)
                if opened.whole is not None:
                    # The item may be requested again, so it must not be written to.
                    opened.whole.leaves = [_read_only(x) for x in opened.whole.leaves]
                return opened
        return None

    def state(self) -> SourceState:
        return self._position


def _read_only(x: Array) -> Array:
    if isinstance(x, np.ndarray):
        x = x.view()
        x.flags.writeable = False
    return x


class IterableSource:
    """Anything that can be iterated over."""

    reads_whole = True
    depth = 0
    again = False
    spec = None

    def __init__(self, items: Any, call: str) -> None:
        self.items = items
        self.call = call
        self.batch_size: int | None = None
        self.text = type(items).__name__
        self.one_shot = hasattr(items, "__next__")
        self._opened = False

    def cardinality(self) -> int:
        try:
            size = len(self.items)
        except (TypeError, NotImplementedError):
            return UNKNOWN_CARDINALITY
        return INFINITE_CARDINALITY if size >= INFINITE else size

    def open(self, iteration: int) -> Stream:
        if self.one_shot and self._opened:
            raise RuntimeError(
                f"{self.call}: a {self.text} can be read only once, and this "
                "is the second `iter(...)`; give an object whose `__iter__` starts "
                "from the beginning (a list, a DataLoader), or create the dataset for "
                "each epoch"
            )
        self._opened = True
        return _IteratorStream(iter(self.items), self.call)


class _IteratorStream:
    def __init__(self, items: Iterator[Nest], call: str) -> None:
        self._items = items
        self._call = call
        self._position = 0

    def seek(self, position: int, state: SourceState = None) -> None:
        items: Any = self._items
        if state is not None and hasattr(items, "set_state"):
            items.set_state(_from_json(state))
            self._position = position
            return
        if position < self._position:
            raise RuntimeError(
                f"restore: this iterator has read {self._position} elements of a "
                "source that can be read only once, and cannot go back to "
                f"{position}; restore a new iterator of a new source"
            )
        while self._position < position:
            if next(items, _END) is _END:
                raise ValueError(
                    f"restore: expected an input of {position} or more elements, got "
                    f"one that ends after {self._position}; pass the input "
                    "that the state was taken from"
                )
            self._position += 1

    def read(self) -> Opened | None:
        element = next(self._items, _END)
        if element is _END:
            return None
        self._position += 1
        return open_whole(element, self._call)

    def state(self) -> SourceState:
        items: Any = self._items
        if not (hasattr(items, "get_state") and hasattr(items, "set_state")):
            return None
        return _to_json(items.get_state(), type(items).__name__)


_END = object()


class FunctionSource:
    """A function without arguments that returns the next element.

    StopIteration or OutOfRangeError ends it.
    """

    reads_whole = True
    depth = 0
    again = False
    one_shot = True
    spec = None

    def __init__(self, function: Callable[[], Nest], call: str) -> None:
        self.function = function
        self.call = call
        self.batch_size: int | None = None
        self.text = getattr(function, "__qualname__", "a function")

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def open(self, iteration: int) -> Stream:
        return _IteratorStream(self._elements(), self.call)

    def _elements(self) -> Iterator[Nest]:
        while True:
            try:
                element = self.function()
            except (StopIteration, OutOfRangeError):
                return
            yield element


def source_of(dataset: object, call: str) -> Source:
    """Return the source for a user's dataset.

    Raises:
        TypeError: for arrays and nests of arrays, which would be split incorrectly, and
            for objects that are not iterable.
    """
    if isinstance(dataset, Dataset):
        return DatasetSource(dataset)
    if _holds_rows(dataset):
        raise TypeError(
            f"{call}: got {_describe(dataset)}, which is not a dataset of batches; "
            "write `mpidist.data.Dataset.from_tensor_slices(x).batch("
            "global_batch_size)` for its rows, or a list of batches"
        )
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return SequenceSource(dataset, call)
    if hasattr(dataset, "__iter__"):
        return IterableSource(dataset, call)
    raise TypeError(
        f"{call}: expected a `mpidist.data.Dataset`, a list of batches, or an iterable "
        f"of them, got {dataset!r:.80} of type {type(dataset).__name__}"
    )


def _holds_rows(x: object) -> bool:
    """Whether this is an array, or a nest of arrays: a tuple or dict is one element."""
    if hasattr(x, "shape") or isinstance(x, (str, bytes)):
        return True
    if isinstance(x, list):
        return bool(x) and all(
            isinstance(part, (bool, int, float, complex)) for part in x
        )
    return isinstance(x, tuple) or (hasattr(x, "keys") and hasattr(x, "items"))


def _describe(x: object) -> str:
    if hasattr(x, "shape"):
        return f"a {type(x).__name__} of shape {tuple(x.shape)}"
    if isinstance(x, (str, bytes)):
        return repr(x)[:80]
    leaves, structure = nest.flatten(x)
    if len(leaves) > 8:
        return f"a {type(x).__name__} of {len(leaves)} leaves"
    texts = [
        backend.describe(backend.as_array(leaf, "dataset")[0])
        if backend.is_array(leaf)
        else type(leaf).__name__
        for leaf in leaves
    ]
    return structure.render(texts)


# --- the state of a source, as JSON -------------------------------------------------


def _to_json(value: SourceState, name: str) -> SourceState:
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {key: _to_json(part, name) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(part, name) for part in value]
    if isinstance(value, np.generic):
        return value.item()
    try:
        json.dumps(value)
    except TypeError:
        raise TypeError(
            f"state: the `get_state()` of {name} has a {type(value).__name__}, which "
            "is not bytes, a number, a string, a list or a dict"
        ) from None
    return value


def _from_json(value: SourceState) -> SourceState:
    if isinstance(value, dict):
        if set(value) == {"__bytes__"}:
            return base64.b64decode(value["__bytes__"])
        return {key: _from_json(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_from_json(part) for part in value]
    return value


def whole_block(opened: Opened) -> RowBlock | None:
    """Return all rows of an element."""
    return opened.read(0, opened.rows) if opened.whole is None else opened.whole
