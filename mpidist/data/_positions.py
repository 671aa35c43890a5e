"""The positions of iterators: their states, and whether `restore` can take one.

States come from checkpoints, so from files, which anyone may have changed.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from mpidist.data._options import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

FORMAT: Final = 1
_KINDS: Final = {
    "own": "inputs from a function (`distribute_datasets_from_function`)",
    "global": "global batches (`experimental_distribute_dataset`)",
}


def _is_count(x: object) -> bool:
    """Return whether ``x`` is an integer from 0 on, of 64 bits."""
    if isinstance(x, bool) or not hasattr(x, "__index__"):
        return False
    return 0 <= operator.index(x) < 2**63


_Entries = Mapping[str, Callable[[Any], bool]]
OF_DATASET: Final[_Entries] = {
    "input": lambda x: x == "dataset",
    "iteration": _is_count,
    "position": _is_count,
}
_OF_REPLICAS: Final[_Entries] = {
    "input": lambda x: x in _KINDS,
    "iteration": _is_count,
    "position": _is_count,
    "batch_size": lambda x: x is None or _is_count(x),
    "cardinality": lambda x: (
        _is_count(x) or x in (INFINITE_CARDINALITY, UNKNOWN_CARDINALITY)
    ),
    "replicas": _is_count,
    "sources": lambda x: isinstance(x, dict),
}


def check_state(call: str, state: object, entries: _Entries) -> dict[str, Any]:
    """Return a state in which all entries are as they have to be.

    Args:
        call: the name of the call, for the message.
        state: what the program passed.
        entries: for each name whether a value of it can be.

    Raises:
        ValueError: if it is something else.
    """
    what = f"{call}: expected the result of an iterator's `state()`, got"
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{what} {state!r:.200}")
    for name, fits in entries.items():
        if not fits(state.get(name)):
            raise ValueError(f"{what} one in which {name!r} is {state.get(name)!r:.80}")
    return state


@dataclasses.dataclass(frozen=True)
class Position:
    """Where an iterator over a distributed dataset is, and what it iterates over.

    Attributes:
        iteration: the number of the iteration over the dataset.
        position: the number of steps so far.
        own: whether each rank has an input of its own.
        batch_size: the number of rows in a full batch; None if not known.
        cardinality: the number of steps, or one of the two constants.
        replicas: the number of replicas.
        source: the state of this rank's input, as JSON; None if it has none.
    """

    iteration: int
    position: int
    own: bool
    batch_size: int | None
    cardinality: int
    replicas: int
    source: Any = None

    def as_state(self, rank: int) -> dict[str, Any]:
        """Return the state of an iterator."""
        # All ranks read the same global batches: one state, for any number of ranks.
        return {
            "format": FORMAT,
            "input": "own" if self.own else "global",
            "iteration": self.iteration,
            "position": self.position,
            "batch_size": self.batch_size,
            "cardinality": self.cardinality,
            "replicas": self.replicas,
            "sources": (
                {}
                if self.source is None
                else {str(rank if self.own else 0): self.source}
            ),
        }

    def of_state(self, state: object, rank: int) -> Position:
        """Return the position in a state; this is one in the same dataset.

        Raises:
            ValueError: if it is no state, or that of another dataset.
        """
        call = "DistributedIterator.restore"
        given = check_state(call, state, _OF_REPLICAS)
        kind = "own" if self.own else "global"
        if given["input"] != kind:
            raise ValueError(
                f"{call}: the state is that of an iterator over "
                f"{_KINDS[given['input']]}, and this one is over {_KINDS[kind]}"
            )
        if self.own and given["replicas"] != self.replicas:
            raise ValueError(
                f"{call}: the state was taken on {given['replicas']} ranks, each with "
                f"an input of its own, and there are {self.replicas} now, so the "
                "inputs differ; restart on the same number of ranks, or use "
                "`experimental_distribute_dataset`, whose position holds on any number"
            )
        sources = given["sources"]
        source = sources.get(str(rank))
        if source is None and not self.own and sources:
            source = next(iter(sources.values()))  # all ranks read the same
        found = dataclasses.replace(
            self,
            iteration=int(given["iteration"]),
            position=int(given["position"]),
            batch_size=given["batch_size"],
            cardinality=given["cardinality"],
            source=source,
        )
        if not self.own and self._differs_from(found):
            raise ValueError(
                f"{call}: the state is that of a dataset of {found.size}, and this one "
                f"has {self.size}"
            )
        return found

    def _differs_from(self, other: Position) -> bool:
        pairs = (
            (self.batch_size, other.batch_size),
            (self.cardinality, other.cardinality),
        )
        unknown = {None, UNKNOWN_CARDINALITY}
        return any(one != two and not unknown & {one, two} for one, two in pairs)

    @property
    def size(self) -> str:
        """For example "6 batches of 4 rows"."""
        names = {-1: "endlessly many", -2: "an unknown number of"}
        many = names.get(self.cardinality, self.cardinality)
        rows = "any number of" if self.batch_size is None else self.batch_size
        return f"{many} batches of {rows} rows"
