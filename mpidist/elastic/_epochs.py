"""`ElasticDataset`: a distributed dataset whose loop goes on where a commit was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpidist._base import nest
from mpidist._base.types import Nest
from mpidist.data import DistributedDataset, DistributedIterator


class ElasticDataset:
    """A `DistributedDataset` in a `State`: a loop over it goes on after a loss.

    ``for batch in state.batches`` begins an epoch, as for the dataset itself; but the
    first loop after the state went back to a commit goes on with the epoch that was
    open in it, after the last batch before the commit. An epoch ends when its last
    batch was asked for, or, if its loop was left earlier, with the next commit of the
    program. So after a commit in a loop the rest of this epoch follows, which may be
    nothing; and after one behind a loop the next epoch.

    It has the methods and properties of the dataset.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        """Wrap a dataset from which nothing was read yet. Not for users."""
        self._dataset = dataset
        # The first epoch, open and at its beginning.
        self._iterator: DistributedIterator = iter(dataset)
        self._open = True
        self._left = False
        self._goes_on = True

    def __iter__(self) -> Iterator[Nest]:
        if not self._goes_on:
            self._iterator = iter(self._dataset)
            self._open = True
        self._goes_on = self._left = False
        return self._rest_of(self._iterator)

    def _rest_of(self, iterator: DistributedIterator) -> Iterator[Nest]:
        try:
            yield from iterator
        except GeneratorExit:  # a loop that is left drops this generator
            self._left = iterator is self._iterator
            raise
        if iterator is self._iterator:
            self._open = False

    def __len__(self) -> int:
        return len(self._dataset)

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __repr__(self) -> str:
        kind = "open" if self._open else "at its end"
        return f"<mpidist.elastic dataset: {self._iterator!r}, {kind}>"

    def state(self) -> dict[str, Any]:
        """Return the number of the epoch, and the position if it is open."""
        if self._left:
            self._open = False
        return {"open": self._open, "iterator": self._iterator.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a state. Collective."""
        position = state["iterator"]
        if not state["open"]:  # the next loop begins the next epoch
            position = {**position, "position": 0, "sources": {}}
        self._iterator = iter(self._dataset)
        self._iterator.restore(position)
        self._open = self._goes_on = bool(state["open"])
        self._left = False


def wrap(name: str, value: Nest) -> Nest:
    """Return a nest with an `ElasticDataset` in place of each dataset.

    Raises:
        ValueError: for an input in it, ``name``, that does not outlive a replica.
    """

    def wrapped(x: Nest) -> Nest:
        inputs = DistributedDataset, DistributedIterator
        if isinstance(x, inputs) and (problem := x.__elastic_problem__()):
            raise ValueError(f"State: {name!r} {problem}")
        return ElasticDataset(x) if isinstance(x, DistributedDataset) else x

    return nest.map_structure(wrapped, value)


def stay_open(value: Nest) -> None:
    """Have the epochs of loops that were left since the last commit stay open."""
    for x in nest.flatten(value)[0]:
        if isinstance(x, ElasticDataset):
            x._left = False
