"""The inputs of a distributed dataset: a Dataset, a sequence, an iterable, a function.

A source describes what is known about it; a *stream* iterates over its elements.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np

from mpidist._base import backend, nest
from mpidist._base.types import Nest
from mpidist.data._dataset import Dataset
from mpidist.data._elements import OutOfRangeError, stage_of
from mpidist.data._options import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from mpidist.data._positions import Position
from mpidist.data._rows import RowBlock, protected
from mpidist.data._stage import INFINITE, Opened, Stage, open_tokens, open_whole

SourceState: TypeAlias = Any
"""The state of a user's input, as JSON; None if it has none."""
Stream: TypeAlias = Iterator[Opened]
_END: Final = object()


class Source:
    """What is known about an input.

    Attributes:
        text: a description for users.
        batch_size: the number of rows in a full batch, None if not known (yet).
        reads_whole: whether elements can only be read as a whole.
        depth: how far a thread may read ahead.
        again: whether a position can be read again after an error.
        one_shot: whether it can be read only once.
        spec: the nest of specs of an element, or None if only known after reading.
        dataset: the `Dataset`, if it is one.
    """

    text: str
    batch_size: int | None = None
    reads_whole: bool = True
    depth: int = 0
    again: bool = True
    one_shot: bool = False
    spec: Nest | None = None
    dataset: Dataset | None = None

    def cardinality(self) -> int:
        """Return the number of elements, or one of the two constants."""
        raise NotImplementedError

    def open(self, at: Position, stream: Stream | None = None) -> Stream:
        """Return an iterator over the elements, from a position on.

        Args:
            at: the position, with the source's own state if it has one.
            stream: the result of an earlier call, to go on with, of a source that can
                be read only once.
        """
        raise NotImplementedError


def state_of(stream: Stream) -> SourceState:
    """Return the source's own state at its position; None if it has none."""
    return stream.state() if isinstance(stream, _Items) else None


class DatasetSource(Source):
    """A `Dataset`.

    Args:
        dataset: the dataset of which this rank reads its rows.
        part: the stage that it reads, if that is a part of the dataset, by files.
    """

    def __init__(self, dataset: Dataset, part: Stage | None = None) -> None:
        self.dataset = dataset if part is None else Dataset(part)
        self.by_file = part is not None
        self.stage = stage_of(self.dataset)
        self.text = f"Dataset of {stage_of(dataset).text}"
        self.batch_size = self.stage.batch_size
        self.reads_whole = bool(self.stage.whole)
        self.depth = self.stage.depth
        self.spec = self.stage.spec()

    def cardinality(self) -> int:
        size = self.stage.size
        return INFINITE_CARDINALITY if size >= INFINITE else size

    def open(self, at: Position, stream: Stream | None = None) -> Stream:
        # Up to the position, so that what fails there fails here, on all ranks.
        skipped = 1 if at.position and not self.stage.indexed else 0
        tokens = self.stage.tokens((at.iteration,), at.position - skipped)
        if skipped and next(tokens, _END) is _END:
            raise _too_short(at.position, "before")
        return open_tokens(self.stage, tokens)


def _too_short(position: int, where: str) -> ValueError:
    return ValueError(
        f"restore: expected an input of {position} or more elements, got one that ends "
        f"{where}; pass the input that the state was taken from"
    )


class ItemsSource(Source):
    """An object whose items, or what it is iterated over, are elements.

    Args:
        items: anything with ``__len__`` and ``__getitem__``, or an iterable.
        call: the name of the call, for messages.
        text: the description, if it is not the type.
    """

    def __init__(self, items: Any, call: str, text: str = "") -> None:
        self._items, self._call = items, call
        self.again = hasattr(items, "__len__") and hasattr(items, "__getitem__")
        self.one_shot = hasattr(items, "__next__")
        self.text = text or type(items).__name__
        if self.again:
            many = (
                "without end" if len(items) >= INFINITE else f"of {len(items)} elements"
            )
            self.text += f" {many}"
        self._opened = False

    def cardinality(self) -> int:
        try:
            size = len(self._items)
        except (TypeError, NotImplementedError):
            return UNKNOWN_CARDINALITY
        return INFINITE_CARDINALITY if size >= INFINITE else size

    def open(self, at: Position, stream: Stream | None = None) -> Stream:
        if not isinstance(stream, _Items):
            stream = _Items(self._begin(), self._call)
        stream.seek(at.position, at.source)
        return stream

    def _begin(self) -> Iterator[Nest]:
        if self.again:
            return _Numbered(self._items)
        if self.one_shot and self._opened:
            raise RuntimeError(
                f"{self._call}: a {self.text} can be read only once, and this "
                "is the second `iter(...)`; give an object whose `__iter__` starts "
                "from the beginning (a list, a DataLoader), or create the dataset for "
                "each epoch"
            )
        self._opened = True
        return iter(self._items)


class FunctionSource(ItemsSource):
    """A function without arguments that returns the next element.

    StopIteration or OutOfRangeError ends it.
    """

    def __init__(self, function: Callable[[], Nest], call: str) -> None:
        self._function = function
        super().__init__(None, call, getattr(function, "__qualname__", "a function"))
        self.one_shot = True

    def _begin(self) -> Iterator[Nest]:
        while True:
            try:
                element = self._function()
            except (StopIteration, OutOfRangeError):
                return
            yield element


class _Numbered(Iterator[Nest]):
    """Iterates over the items of a sequence, from any on.

    None items are skipped, as in grain (its ``filter`` returns them).
    """

    def __init__(self, items: Any) -> None:
        self._items, self._next = items, 0

    def __next__(self) -> Nest:
        while self._next < len(self._items):
            self._next += 1
            element = self._items[self._next - 1]
            if element is not None:
                return element
        raise StopIteration

    def get_state(self) -> int:
        """Return the number of the next item."""
        return self._next

    def set_state(self, state: SourceState) -> None:
        """Go to an item."""
        self._next = int(state)


class _Items(Iterator[Opened]):
    """Reads what a user's iterator returns."""

    def __init__(self, items: Iterator[Nest], call: str) -> None:
        self._items: Any = items
        self._call = call
        self._position = 0

    def seek(self, position: int, state: SourceState) -> None:
        """Go to the element with this number; ``state`` is the `state` there."""
        if state is None and isinstance(self._items, _Numbered):
            state = position
        if state is not None and hasattr(self._items, "set_state"):
            self._items.set_state(_from_json(state))
            self._position = position
            return
        if position < self._position:
            raise RuntimeError(
                f"restore: this iterator has read {self._position} elements of a "
                "source that can be read only once, and cannot go back to "
                f"{position}; restore a new iterator of a new source"
            )
        while self._position < position:
            if next(self._items, _END) is _END:
                raise _too_short(position, f"after {self._position}")
            self._position += 1

    def __next__(self) -> Opened:
        element = next(self._items)
        self._position += 1
        opened = open_whole(element, self._call)
        if isinstance(self._items, _Numbered) and opened.whole is not None:
            # The item may be requested again, so it must not be written to.
            opened.whole.leaves = [protected(x) for x in opened.whole.leaves]
        return opened

    def state(self) -> SourceState:
        if not (
            hasattr(self._items, "get_state") and hasattr(self._items, "set_state")
        ):
            return None
        return _to_json(self._items.get_state(), type(self._items).__name__)


def source_of(dataset: object, call: str) -> Source:
    """Return the source for a user's dataset."""
    if isinstance(dataset, Dataset):
        return DatasetSource(dataset)
    if _holds_rows(dataset):
        raise TypeError(
            f"{call}: got {_describe(dataset)}, which is not a dataset of batches; "
            "write `mpidist.data.Dataset.from_tensor_slices(x).batch("
            "global_batch_size)` for its rows, or a list of batches"
        )
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if indexed or hasattr(dataset, "__iter__"):
        return ItemsSource(dataset, call)
    raise TypeError(
        f"{call}: expected a `mpidist.data.Dataset`, a list of batches, or an iterable "
        f"of them, got {dataset!r:.80} of type {type(dataset).__name__}"
    )


def _holds_rows(x: object) -> bool:
    """Whether this is an array, or a nest of arrays: a tuple or dict is one element."""
    if isinstance(x, list):
        return bool(x) and all(
            isinstance(part, (bool, int, float, complex)) for part in x
        )
    return (
        hasattr(x, "shape")
        or isinstance(x, (str, bytes, tuple))
        or (hasattr(x, "keys") and hasattr(x, "items"))
    )


def _describe(x: object) -> str:
    if hasattr(x, "shape"):
        return f"a {type(x).__name__} of shape {tuple(x.shape)}"
    leaves, structure = nest.flatten(x)
    if isinstance(x, (str, bytes)):
        return f"{x!r:.80}"
    if len(leaves) > 8:
        return f"a {type(x).__name__} of {len(leaves)} leaves"
    texts = [
        backend.describe(backend.as_array(leaf, "dataset")[0])
        if backend.is_array(leaf)
        else type(leaf).__name__
        for leaf in leaves
    ]
    return structure.render(texts)


def whole_block(opened: Opened) -> RowBlock | None:
    """Return all rows of an element."""
    return opened.read(0, opened.rows) if opened.whole is None else opened.whole


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
