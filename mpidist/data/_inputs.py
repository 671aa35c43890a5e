"""Inputs of a distributed dataset that are not a `Dataset`, as stages.

A sequence of batches, an iterable, or a function that returns the next one.
"""

from __future__ import annotations

import base64
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from mpidist._base import shuffle_seeds
from mpidist._base.types import Nest
from mpidist.data._dataset import Dataset, stage_of
from mpidist.data._positions import OutOfRangeError
from mpidist.data._rows import RowBlock, block_of, protected
from mpidist.data._stage import END, INFINITE, UNKNOWN, Block, Stage, too_short


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
        self.again = hasattr(items, "__len__") and hasattr(items, "__getitem__")
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
        if self.again:
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
            element = self._items[self._next - 1]
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
            self._items.set_state(_from_json(state))
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
        return _to_json(self._items.get_state(), type(self._items).__name__)


def state_of(stream: Iterator[Block] | None) -> Any:
    """Return the state of a user's iterator at its position; None if it has none."""
    return stream.state() if isinstance(stream, _ItemStream) else None


def input_of(dataset: object, call: str) -> Stage:
    """Return the stage for a user's dataset."""
    if isinstance(dataset, Dataset):
        return stage_of(dataset)
    if _holds_rows(dataset):
        raise TypeError(
            f"{call}: got {_describe(dataset)}, which is not a dataset of batches; "
            "write `mpidist.data.Dataset.from_tensor_slices(x).batch("
            "global_batch_size)` for its rows, or a list of batches"
        )
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if indexed or hasattr(dataset, "__iter__"):
        return Items(dataset, call)
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
    try:
        return f"{block_of(x, 'dataset')!s:.160}"
    except TypeError:
        return f"{x!r:.80}"


# --- the state of a source, as JSON -------------------------------------------------


def _to_json(value: Any, name: str) -> Any:
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {key: _to_json(part, name) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(part, name) for part in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"state: the `get_state()` of {name} has a {type(value).__name__}, which is "
        "not bytes, a number, a string, a list or a dict"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"__bytes__"}:
            return base64.b64decode(value["__bytes__"])
        return {key: _from_json(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_from_json(part) for part in value]
    return value
