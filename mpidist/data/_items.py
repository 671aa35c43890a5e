"""The stage of a distributed dataset that is no `Dataset`: of anything with elements.

A sequence of batches, an iterable, or a function that returns the next one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mpidist._base import guests, shuffle_seeds, state_json
from mpidist._base.errors import warn_caller
from mpidist._base.expect import expect
from mpidist._base.types import Nest
from mpidist.data._positions import OutOfRangeError
from mpidist.data._rows import RowBlock, block_of, protected
from mpidist.data._stages import END, INFINITE, UNKNOWN, Block, Stage, too_short


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
            self.text += " without end" if endless else f" of {self.size} elements"
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
        if position and guests.shuffles(self._items):
            warn_caller(
                f"{self._call}: a DataLoader that shuffles has a new order in each "
                f"pass, so the {position} elements that are skipped are not those that "
                "were read: rows come twice or never. Write `Dataset.from_tensor_slices"
                "(torch_dataset).shuffle(seed=1).batch(n)`, or give it a sampler whose "
                "order depends on a seed and the epoch alone"
            )
        if not isinstance(found, _ItemStream):
            found = _ItemStream(self._begin(), self._call, self._turn, self._turns)
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
        self._next, count = int(state), len(self._items)
        if self._next > count:
            raise too_short(self._next, f"after {count}")


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
            self._items.set_state(state_json.unpack(_as_now(state), lambda *_: None))
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
