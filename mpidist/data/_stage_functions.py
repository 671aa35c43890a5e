"""Stages that call a function of the user for each element."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from mpidist._base.types import Nest
from mpidist.data._stage import UNKNOWN, Derived, Pass, Token, apply, name_of
from mpidist.data._workers import ordered_map


@dataclasses.dataclass(eq=False, repr=False)
class Map(Derived):
    """The result of a function for each element.

    Its tokens are its parent's, so the function runs for requested elements only.
    """

    function: Callable[..., Nest]
    calls: int  # at the same time; 0: no threads

    def __post_init__(self) -> None:
        self.inherit(f".map({name_of(self.function)})")
        if self.batch_size is not None:
            self.whole = "the `map` after `batch` (one before it works row by row)"
        self.workers = max(self.calls, self.parent.workers)

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        elements = self.parent.load(tokens)
        if self.calls:
            return ordered_map(self._apply, elements, self.calls)
        return (apply(self.function, element) for element in elements)

    def _apply(self, element: Nest) -> Nest:
        return apply(self.function, element)


@dataclasses.dataclass(eq=False, repr=False)
class _Chosen(Derived):
    """Elements that a predicate chooses. A token is the element, which it has read."""

    predicate: Callable[..., object]

    def choose(self, method: str) -> None:
        """Set the attributes."""
        self.inherit(f".{method}({name_of(self.predicate)})", UNKNOWN)
        self.indexed = False
        if self.batch_size is not None:
            self.whole = f"the `{method}` after `batch`"

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        return iter(tokens)

    def spec(self) -> Nest | None:
        return self.parent.spec()

    def accepts(self, element: Nest) -> bool:
        """Return what the predicate says.

        Raises:
            TypeError: if that is not one bool.
        """
        answer: Any = apply(self.predicate, element)
        if isinstance(answer, (bool, np.bool_)):
            return bool(answer)
        if getattr(answer, "shape", None) == () and answer.dtype == bool:
            return bool(answer)
        shape = getattr(answer, "shape", None)
        got = f"{answer!r:.60} of type {type(answer).__name__}"
        raise TypeError(
            f"Dataset{self.text}: expected a bool from the predicate, got "
            f"{got if shape is None else f'a {answer.dtype} array of shape {shape}'}; "
            "write `bool(...)` of one value, such as `x.any()`"
        )


@dataclasses.dataclass(eq=False, repr=False)
class Filter(_Chosen):
    """The elements that a predicate accepts."""

    def __post_init__(self) -> None:
        self.choose("filter")

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        elements = self.parent.load(self.parent.tokens(in_pass))
        return itertools.islice(filter(self.accepts, elements), start, None)


@dataclasses.dataclass(eq=False, repr=False)
class TakeWhile(_Chosen):
    """The elements before the first that a predicate refuses."""

    def __post_init__(self) -> None:
        self.choose("take_while")

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        elements = self.parent.load(self.parent.tokens(in_pass))
        return itertools.islice(
            itertools.takewhile(self.accepts, elements), start, None
        )
