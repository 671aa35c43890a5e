"""What is known of the elements of a `Dataset`, and iterating over them."""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

from mpidist._base import backend, nest
from mpidist._base.remedies import explain_attributes
from mpidist._base.types import Nest
from mpidist.data._ahead import read_ahead
from mpidist.data._options import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Options
from mpidist.data._positions import FORMAT, OF_DATASET, check_state
from mpidist.data._rows import block_of
from mpidist.data._stage import INFINITE, Stage, open_tokens


class OutOfRangeError(LookupError):
    """`DistributedIterator.get_next` was called at the end of the input.

    On all ranks together. It is not a StopIteration, which a generator or a ``for``
    loop around the call would interpret as its own end.
    """


class Optional:
    """An element of an input, or nothing at its end."""

    __slots__ = ("_element", "_has_value", "_spec")

    def __init__(
        self,
        element: Nest = None,
        *,
        has_value: bool = False,
        spec: Callable[[], Nest] | None = None,
    ) -> None:
        self._element = element
        self._has_value = has_value
        self._spec = spec

    def has_value(self) -> bool:
        """Return whether there is an element."""
        return self._has_value

    def get_value(self) -> Nest:
        """Return the element.

        Raises:
            ValueError: at the end of the input.
        """
        if not self._has_value:
            raise ValueError(
                "Optional.get_value: the input has ended and this holds no element; "
                "ask `has_value()` first"
            )
        return self._element

    @property
    def element_spec(self) -> Nest:
        """The nest of `ArraySpec` of an element, as that of the iterator.

        Raises:
            ValueError: if it is not known.
        """
        if self._spec:
            return self._spec()
        return block_of(self.get_value(), "element_spec").spec()

    def __repr__(self) -> str:
        return f"Optional({self._element!r})" if self._has_value else "Optional()"


class DatasetIterator(collections.abc.Iterator[Nest]):
    """Iterates over the elements of a `Dataset`: the result of ``iter(dataset)``.

    Its threads, if there are any, end with it. An exception ends it, too; to continue
    after one, pass its `state` to `restore`.
    """

    def __init__(self, dataset: Elements) -> None:
        """Not for users: call ``iter(dataset)``."""
        self._dataset = dataset
        self._iterations = iterations_of(dataset)
        self._go_to(self._iterations.count, 0)

    def _go_to(self, iteration: int, position: int) -> None:
        self._iteration, self._position = iteration, position
        self._iterations.count = iteration + 1
        self._elements: Iterator[Nest] | None = None
        self._ended = False

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Nest:
        if self._ended:
            raise StopIteration
        try:
            if self._elements is None:
                stage = stage_of(self._dataset)
                tokens = stage.tokens((self._iteration,), self._position)
                elements = stage.load(tokens)
                self._elements = elements
                if stage.depth:
                    self._elements = read_ahead(elements, stage.depth)
            element = next(self._elements)
        except BaseException:  # StopIteration too
            self._ended, self._elements = True, None
            raise
        self._position += 1
        return element

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
        spec = operator.attrgetter("element_spec")
        for element in self:
            return Optional(element, has_value=True, spec=lambda: spec(self))
        return Optional(spec=lambda: spec(self))

    @property
    def element_spec(self) -> Nest:
        """The nest of `ArraySpec` of an element: that of the dataset."""
        return self._dataset.element_spec

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
        state = check_state("DatasetIterator.restore", state, OF_DATASET)
        self._go_to(int(state["iteration"]), int(state["position"]))


@dataclasses.dataclass
class Iterations:
    """The number of iterations over a dataset so far: the next one's first pass."""

    count: int = 0


class _Names(type):
    """The class of `Dataset`, whose missing attributes have a message."""


class Elements(metaclass=_Names):
    """The part of `Dataset` that makes no other dataset."""

    def __init__(self, stage: Stage) -> None:
        """Not for users: call `Dataset.from_tensor_slices`."""
        self._stage = stage
        self._iterations = Iterations()
        self._spec: Nest | None = None

    def options(self) -> Options:
        """Return a copy of the options."""
        return copy.deepcopy(self._stage.options)

    @property
    def element_spec(self) -> Nest:
        """The nest of `ArraySpec` of an element.

        After a `map`, and where it is not declared, it is found by reading the first
        element; if there is none, by calling the function of the `map` with zeros.

        Raises:
            ValueError: if the dataset is empty, and that does not tell it.
        """
        if self._spec is None:
            self._spec = self._stage.spec()
        if self._spec is None:
            self._spec = self._spec_of_first()
        return self._spec

    def _spec_of_first(self) -> Nest:
        stage = self._stage
        opened = next(open_tokens(stage, stage.tokens((0,))), None)
        if opened is not None:
            block = opened.whole or opened.read(0, 1)
            if block is not None:
                return block.spec(batched=stage.batch_size is not None)
        message = (
            "Dataset.element_spec: the dataset is empty, so its elements are unknown"
        )
        try:
            spec = stage.spec(trial=True)
        except Exception as error:
            raise ValueError(
                f"{message}; the function of a `map`, called with zeros, raised a "
                f"{type(error).__name__}: {error}"
            ) from error
        if spec is None:
            raise ValueError(message)
        return spec

    def cardinality(self) -> int:
        """Return the number of elements.

        `INFINITE_CARDINALITY` (-1) if infinite, `UNKNOWN_CARDINALITY` (-2) if it is
        known only after reading.
        """
        size = self._stage.size
        return INFINITE_CARDINALITY if size >= INFINITE else size

    def __len__(self) -> int:
        count = self.cardinality()
        if count == INFINITE_CARDINALITY:
            raise TypeError("Dataset: an infinite dataset has no len()")
        if count == UNKNOWN_CARDINALITY:
            raise TypeError(
                "Dataset: the number of elements is not known before the end; write "
                "`sum(1 for _ in dataset)`, or `dataset.assert_cardinality(n)`"
            )
        return count

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self)

    def reduce(
        self,
        initial_state: Nest,
        reduce_func: Callable[..., Nest],
        name: str | None = None,
    ) -> Nest:
        """Fold the elements: ``state = reduce_func(state, element)`` for each."""
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def as_numpy_iterator(self) -> Iterator[Nest]:
        """Iterate over the elements, with the arrays of a GPU on the host."""
        return map(_on_host, self)

    def __repr__(self) -> str:
        return f"<mpidist.data.Dataset of {self._stage.text}>"


def _on_host(element: Nest) -> Nest:
    return nest.map_structure(
        lambda x: backend.to_host(x) if backend.is_device_array(x) else x, element
    )


def stage_of(dataset: Elements) -> Stage:
    """Return the last stage of a dataset."""
    return dataset._stage


def iterations_of(dataset: Elements) -> Iterations:
    """Return how often a dataset has been iterated over."""
    return dataset._iterations


explain_attributes(_Names, "Dataset")
explain_attributes(Elements, "Dataset")
