"""The iterator of a `Dataset` that is not distributed."""

from __future__ import annotations

import collections.abc
import dataclasses
from collections.abc import Iterator
from typing import Any, Final

from mpidist._base.types import Nest
from mpidist.data._iterator_states import FORMAT, Entries, check_state, is_count
from mpidist.data._prefetch import Prefetcher
from mpidist.data._records import Optional, OutOfRangeError
from mpidist.data._stage import Stage

_ENTRIES: Final[Entries] = {
    "input": lambda x: x == "dataset",
    "iteration": is_count,
    "position": is_count,
}


@dataclasses.dataclass
class Iterations:
    """The number of iterations over a dataset so far: the next one's first pass."""

    count: int = 0


class DatasetIterator(collections.abc.Iterator[Nest]):
    """Iterates over the elements of a `Dataset`: the result of ``iter(dataset)``.

    Its threads, if there are any, end with it. An exception ends it, too; to continue
    after one, pass its `state` to `restore`.
    """

    def __init__(self, stage: Stage, iterations: Iterations) -> None:
        """Not for users: call ``iter(dataset)``."""
        self._stage = stage
        self._iterations = iterations
        self._iteration = iterations.count
        iterations.count += 1
        self._position = 0
        self._elements: Iterator[Nest] | None = None
        self._ended = False

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Nest:
        if self._ended:
            raise StopIteration
        if self._elements is None:
            self._elements = self._from(self._iteration, self._position)
        try:
            element = next(self._elements)
        except BaseException:  # StopIteration too
            self._ended, self._elements = True, None
            raise
        self._position += 1
        return element

    def _from(self, iteration: int, position: int) -> Iterator[Nest]:
        tokens = self._stage.tokens((iteration,), position)
        elements = self._stage.load(tokens)
        if self._stage.depth:
            return Prefetcher(elements, self._stage.depth)
        return elements

    def get_next(self) -> Nest:
        """Return the next element.

        Raises:
            OutOfRangeError: the one in `mpidist.data`, at the end.
        """
        for element in self:
            return element
        raise OutOfRangeError(
            f"get_next: the dataset has ended, after {self._position} elements"
        )

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or nothing at the end."""
        for element in self:
            return Optional(element, has_value=True)
        return Optional()

    def state(self) -> dict[str, Any]:
        """Return the position, as a small nest for JSON.

        It counts the elements that were returned, not those that a thread has read
        ahead.
        """
        return {
            "format": FORMAT,
            "input": "dataset",
            "iteration": self._iteration,
            "position": self._position,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a position: the next element is the one after it.

        Args:
            state: the result of `state` of an iterator over the same dataset.

        Raises:
            ValueError: if it is not such a state.
        """
        state = check_state("DatasetIterator.restore", state, _ENTRIES)
        self._iteration = int(state["iteration"])
        self._position = int(state["position"])
        self._elements, self._ended = None, False
        self._iterations.count = self._iteration + 1
