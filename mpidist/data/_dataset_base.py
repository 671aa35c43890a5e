"""What is known of the elements of a `Dataset`, and iterating over them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from mpidist._base import backend, nest
from mpidist._base.remedies import explain_attributes
from mpidist._base.types import Nest
from mpidist.data._dataset_iterator import DatasetIterator, Iterations
from mpidist.data._options import Options
from mpidist.data._records import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from mpidist.data._stage import INFINITE, Stage, open_from, specs_of


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
        element.

        Raises:
            ValueError: if this is needed and there is no element.
        """
        if self._spec is None:
            self._spec = self._stage.spec()
        if self._spec is None:
            opened = next(open_from(self._stage, (0,), 0), None)
            batched = self._stage.batch_size is not None
            block = None if opened is None else opened.whole
            if block is None and opened is not None:
                block = opened.read(0, 1)
            if block is None:
                raise ValueError(
                    "Dataset.element_spec: the dataset is empty, so its elements are "
                    "unknown"
                )
            self._spec = specs_of(block, batched=batched)
        return self._spec

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
        return DatasetIterator(self._stage, self._iterations)

    def reduce(self, initial_state: Nest, reduce_func: Callable[..., Nest]) -> Nest:
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


explain_attributes(_Names, "Dataset")
explain_attributes(Elements, "Dataset")
