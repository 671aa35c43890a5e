"""What the stages of a `Dataset` have in common.

A stage first names its elements, and then loads those that are requested. The name of
an element is a *token*; what it is only its stage knows: a row number, or the element
itself where it can only be got by reading. A rank of a distributed dataset goes through
the tokens of a global batch, and loads those of its own rows only.

An *indexed* stage returns the token of any element by number (`Stage.at`), so every
position is reached directly. The tokens of the others come in order: a position is
reached by passing those before it.

Requests for tokens include the *pass*: the number of the iteration over the dataset,
and of the round of each `repeat` around the stage. A shuffle computes its order from
its seed and the pass, identically on all ranks.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from mpidist._base.types import HostArray, Nest
from mpidist.data._options import UNKNOWN_CARDINALITY, Options
from mpidist.data._rows import RowBlock, block_of, stack

INFINITE: Final = sys.maxsize
UNKNOWN: Final = UNKNOWN_CARDINALITY
_TOKENS_AT_ONCE: Final = 64
Pass: TypeAlias = tuple[int, ...]
Token: TypeAlias = Any
"""The name of an element; only its stage knows what it is."""
Tokens: TypeAlias = HostArray | Sequence[Token]


class Stage:
    """A sequence of elements.

    Attributes:
        size: the number of elements; `INFINITE` or more if infinite; `UNKNOWN` if only
            reading tells. That of an indexed stage is never unknown.
        indexed: whether the token of any element is found by its number.
        batch_size: the number of rows in a full batch; None before `batch`.
        whole: why an element can only be read as a whole; empty if it can be read in
            part.
        depth: how far a thread reads ahead; 0: there is no thread.
        workers: how many elements `load` loads at the same time; 0: no threads.
        options: the options of the dataset.
        text: how it was created, for users and for comparing ranks.
    """

    size: int
    indexed: bool = True
    batch_size: int | None = None
    whole: str = ""
    depth: int = 0
    workers: int = 0
    options: Options = Options()
    text: str = ""

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        """Return the tokens of elements, if the stage is indexed. Reads nothing."""
        raise NotImplementedError

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        """Yield the tokens from an element on, if the stage is not indexed."""
        raise NotImplementedError

    def tokens(self, in_pass: Pass, start: int = 0) -> Iterator[Token]:
        """Return the tokens from an element on."""
        return (self._by_number if self.indexed else self.in_order)(in_pass, start)

    def _by_number(self, in_pass: Pass, start: int) -> Iterator[Token]:
        while start < self.size:
            stop = min(self.size, start + _TOKENS_AT_ONCE)
            yield from self.at(np.arange(start, stop), in_pass)
            start = stop

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        """Yield elements, as nests.

        Of an iterator it takes at most `workers` tokens more than it has yielded
        elements, or one. Those of a sequence may be read all at once.
        """
        raise NotImplementedError

    def block(self, tokens: Tokens) -> RowBlock | None:
        """Return elements as a block; None if there are none, of unknown spec."""
        found = list(self.load(tokens))
        return stack(found, "Dataset.batch") if found else None

    def rows(self, token: Token) -> int:
        """Return the number of rows of a batch, if it can be read in part."""
        raise NotImplementedError

    def part(self, token: Token, start: int, stop: int) -> RowBlock | None:
        """Return some rows of such a batch; None for none, of unknown spec."""
        raise NotImplementedError

    def spec(self, *, trial: bool = False) -> Nest | None:
        """Return the nest of specs of an element; None if only known after reading.

        Args:
            trial: whether the function of a `map` may be called to find it.
        """
        return None


@dataclasses.dataclass
class Opened:
    """An element whose rows can be read in part.

    Attributes:
        rows: the number of rows.
        read: returns the rows from a start to a stop; None if there are none and their
            spec is unknown.
        whole: the element, if it has been read as a whole anyway.
    """

    rows: int
    read: Callable[[int, int], RowBlock | None]
    whole: RowBlock | None = None


def open_whole(element: Nest, call: str = "Dataset") -> Opened:
    """Return an element that was read as a whole, to read some of its rows."""
    whole = block_of(element, call)
    rows = whole.leaves[0].shape[0] if whole.leaves and whole.leaves[0].ndim else 1
    return Opened(int(rows), whole.part, whole)


def open_tokens(stage: Stage, tokens: Iterable[Token]) -> Iterator[Opened]:
    """Return the elements of tokens, to read some of their rows."""
    if stage.whole or stage.batch_size is None:
        return map(open_whole, stage.load(tokens))
    return (_in_part(stage, token) for token in tokens)


def _in_part(stage: Stage, token: Token) -> Opened:
    return Opened(stage.rows(token), lambda a, b: stage.part(token, a, b))


@dataclasses.dataclass(eq=False, repr=False)
class Derived(Stage):
    """A stage on another one.

    `dataclasses.replace(stage, parent=other)` makes the same of another parent.

    Attributes:
        parent: the other stage.
        call: the method that made this one, with the arguments that determine the
            elements.
    """

    parent: Stage
    call: str

    def inherit(self, size: int | None = None) -> None:
        """Set the attributes of a stage to those of its parent.

        Args:
            size: the number of elements; None: as many as the parent has.
        """
        parent = self.parent
        self.size = parent.size if size is None else size
        self.indexed = parent.indexed
        self.batch_size = parent.batch_size
        self.whole = parent.whole
        self.depth = parent.depth
        self.options = parent.options
        self.text = f"{parent.text}.{self.call}" if self.call else parent.text

    @property
    def method(self) -> str:
        """The name of the method that made this stage."""
        return self.call.partition("(")[0]

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        return self.parent.at(indices, in_pass)

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        return self.parent.tokens(in_pass, start)


@dataclasses.dataclass(eq=False, repr=False)
class Via(Derived):
    """A stage whose elements are its parent's, in another order or number.

    Its tokens are its parent's.
    """

    def inherit(self, size: int | None = None) -> None:
        super().inherit(size)
        self.workers = self.parent.workers

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        return self.parent.load(tokens)

    def block(self, tokens: Tokens) -> RowBlock | None:
        return self.parent.block(tokens)

    def rows(self, token: Token) -> int:
        return self.parent.rows(token)

    def part(self, token: Token, start: int, stop: int) -> RowBlock | None:
        return self.parent.part(token, start, stop)

    def spec(self, *, trial: bool = False) -> Nest | None:
        return self.parent.spec(trial=trial)


def apply(function: Callable[..., Any], element: Nest) -> Any:
    """Call a user's function with an element: the parts of a tuple are arguments."""
    return function(*element) if type(element) is tuple else function(element)


def name_of(function: object) -> str:
    """Return the name of a user's function, for the text of a stage."""
    return getattr(function, "__qualname__", "a function")
