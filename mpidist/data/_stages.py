"""Stages of a `Dataset`: what they have in common.

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
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias, dataclass_transform

import numpy as np

from mpidist._base import shuffle_seeds
from mpidist._base.fingerprint import fingerprint
from mpidist._base.types import HostArray, Nest
from mpidist.data._options import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Options,
    spec_with_rows,
)
from mpidist.data._rows import LazyBlock, RowBlock, block_of, stack

INFINITE: Final = sys.maxsize
UNKNOWN: Final = UNKNOWN_CARDINALITY
_TOKENS_AT_ONCE: Final = 64
END: Final = object()
"""What `next` returns at the end."""
Pass: TypeAlias = tuple[int, ...]
Token: TypeAlias = Any
"""The name of an element; only its stage knows what it is."""
Tokens: TypeAlias = HostArray | Sequence[Token]
Block: TypeAlias = RowBlock | LazyBlock


class TooShortError(ValueError):
    """An input ends before a position."""


def too_short(position: int, where: str) -> TooShortError:
    """Return the error of an input that ends before a position."""
    return TooShortError(
        f"restore: expected an input of {position} or more elements, got one that ends "
        f"{where}; pass the input that the state was taken from"
    )


class Stage:
    """A sequence of elements.

    Attributes:
        parents: the stages that it is made of.
        size: the number of elements; `INFINITE` or more if infinite; `UNKNOWN` if only
            reading tells. That of an indexed stage is never unknown.
        indexed: whether the token of any element is found by its number.
        batch_size: the number of rows in a full batch; None before `batch`.
        full: whether all batches have this number of rows.
        whole: why an element can only be read as a whole; empty if it can be read in
            part.
        again: whether a position can be read again after an error.
        one_shot: whether it can be read only once.
        depth: how far a thread reads ahead; 0: there is no thread.
        workers: how many elements `load` loads at the same time; 0: no threads.
        options: the options of the dataset.
        text: how it was created, for users and for comparing ranks.
    """

    parents: Sequence[Stage] = ()
    size: int
    indexed: bool = True
    batch_size: int | None = None
    full: bool = False
    whole: str = ""
    again: bool = True
    one_shot: bool = False
    depth: int = 0
    workers: int = 0
    options: Options = Options()
    text: str = ""

    @property
    def has_batches(self) -> bool:
        """Whether the first dimension of an element counts rows, as in tf.data."""
        if self.batch_size is not None:
            return True
        return bool(self.parents) and all(x.has_batches for x in self.parents)

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        """Return the tokens of elements, if the stage is indexed. Reads nothing.

        By default their numbers.
        """
        return indices

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        """Yield the tokens of all elements, if the stage is not indexed."""
        raise NotImplementedError

    def sample(self) -> int:
        """Return a checksum of some rows of arrays in memory; 0: it has none."""
        found = [parent.sample() for parent in self.parents]
        return fingerprint(str(found)) & 0x7FFFFFFF if any(found) else 0

    def shuffle_seeds(self) -> list[int]:
        """Return the seeds of shuffles for which the program gave none."""
        return [seed for parent in self.parents for seed in parent.shuffle_seeds()]

    def with_shuffle_seeds(self, seeds: Iterator[int]) -> Stage:
        """Return this stage with other `shuffle_seeds`; itself if they are the same."""
        return self

    def tokens(self, in_pass: Pass, start: int = 0) -> Iterator[Token]:
        """Return the tokens from an element on.

        Reads up to it, so that what fails before it fails here.
        """
        first = max(0, start - 1)
        if self.indexed:
            found = self._by_number(in_pass, first)
        else:
            found = itertools.islice(self.in_order(in_pass), first, None)
        if start and next(found, END) is END:
            raise too_short(start, "before")
        return found

    def _by_number(self, in_pass: Pass, start: int) -> Iterator[Token]:
        while start < self.size:
            stop = min(self.size, start + _TOKENS_AT_ONCE)
            yield from self.at(np.arange(start, stop), in_pass)
            start = stop

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        """Yield elements, as nests; by default the tokens are the elements.

        Of an iterator it takes at most `workers` tokens more than it has yielded
        elements, or one. Those of a sequence may be read all at once.
        """
        return iter(tokens)

    def block(self, tokens: Tokens) -> RowBlock | None:
        """Return elements as a block; None if there are none, of unknown spec."""
        found = list(self.load(tokens))
        return stack(found, "Dataset.batch") if found else None

    def open(self, token: Token) -> LazyBlock:
        """Return a batch, to read some of its rows, if it can be read in part."""
        raise NotImplementedError

    def opened(self, tokens: Iterable[Token]) -> Iterator[Block]:
        """Return elements, to read some of their rows."""
        if self.whole or self.batch_size is None:
            return (block_of(element, "Dataset") for element in self.load(tokens))
        return map(self.open, tokens)

    def stream(
        self,
        iteration: int,
        position: int,
        state: Any = None,
        earlier: Iterator[Block] | None = None,
    ) -> Iterator[Block]:
        """Return the elements of an iteration, from a position on.

        Args:
            iteration: its number.
            position: the number of the first element.
            state: the state of a user's iterator there, as JSON; None if it has none.
            earlier: the result of an earlier call, to go on with, of an input that can
                be read only once.
        """
        return self.opened(self.tokens((iteration,), position))

    def spec(self, *, trial: bool = False) -> Nest | None:
        """Return the nest of specs of an element; None if only known after reading.

        With ``trial`` the function of a `map` may be called to find it.
        """
        inner = [parent.spec(trial=trial) for parent in self.parents]
        return None if not inner or None in inner else self.spec_of(*inner)

    def spec_of(self, *inner: Nest) -> Nest | None:
        """Return the spec of an element, given those of the parents."""
        return inner[0]

    @functools.cached_property
    def element_spec(self) -> Nest:
        """The nest of specs of an element, found by reading the first if necessary."""
        spec = self.spec()
        if spec is not None:
            return spec
        block = next(self.opened(self.tokens((0,))), None)
        rows = None if block is None or not self.full else block.rows
        if isinstance(block, LazyBlock):
            block = block.part(0, 1)
        if block is not None:
            spec = block.spec()
            return spec if self.batch_size is None else spec_with_rows(spec, rows)
        message = (
            "Dataset.element_spec: the dataset is empty, so its elements are unknown"
        )
        try:
            spec = self.spec(trial=True)
        except Exception as error:
            raise ValueError(
                f"{message}; the function of a `map`, called with zeros, raised a "
                f"{type(error).__name__}: {error}"
            ) from error
        if spec is None:
            raise ValueError(message)
        return spec

    def cardinality(self) -> int:
        """Return the number of elements, or one of the two constants."""
        return INFINITE_CARDINALITY if self.size >= INFINITE else self.size

    def require_length(self, kind: str, remedy: str = "") -> int:
        """Return ``len`` of a dataset of a class, or say what to do if unknown."""
        count = self.cardinality()
        if count == INFINITE_CARDINALITY:
            raise TypeError(f"{kind}: an infinite dataset has no len()")
        if count == UNKNOWN_CARDINALITY:
            raise TypeError(
                f"{kind}: the number of elements is not known before the end{remedy}"
            )
        return count


@dataclass_transform(eq_default=False, field_specifiers=(dataclasses.field,))
@dataclasses.dataclass(eq=False, repr=False)
class Derived(Stage):
    """A stage made of others. Each class of them is a dataclass.

    Attributes:
        call: the method that made it, with the arguments that determine the elements.
    """

    parents: Sequence[Stage] = dataclasses.field()
    call: str

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(eq=False, repr=False)(cls)

    def inherit(self, size: int | None = None) -> None:
        """Set the attributes to those of the parents; ``size`` too, if it is None."""
        first = self.parent
        self.size = first.size if size is None else size
        self.batch_size, self.whole = first.batch_size, first.whole
        self.full = first.full and len(self.parents) == 1
        self.indexed = all(parent.indexed for parent in self.parents)
        self.depth = max(parent.depth for parent in self.parents)
        options = [parent.options for parent in self.parents]
        self.options = functools.reduce(Options.merge, options)
        self.text = f"{first.text}.{self.call}" if self.call else first.text

    @property
    def parent(self) -> Stage:
        """The only parent, or the first."""
        return self.parents[0]

    @property
    def method(self) -> str:
        """The name of the method that made this stage."""
        return self.call.partition("(")[0]

    def with_shuffle_seeds(self, seeds: Iterator[int]) -> Stage:
        made = [parent.with_shuffle_seeds(seeds) for parent in self.parents]
        same = all(map(operator.is_, made, self.parents))
        return self if same else dataclasses.replace(self, parents=made)

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        return self.parent.at(indices, in_pass)

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        return self.parent.tokens(in_pass)


class Via(Derived):
    """A stage whose elements are its parent's, in another order or number.

    Its tokens are its parent's.
    """

    def inherit(self, size: int | None = None) -> None:
        super().inherit(size)
        self.workers = max(parent.workers for parent in self.parents)

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        return self.parent.load(tokens)

    def block(self, tokens: Tokens) -> RowBlock | None:
        return self.parent.block(tokens)

    def open(self, token: Token) -> LazyBlock:
        return self.parent.open(token)


def apply(function: Callable[..., Any], element: Nest) -> Any:
    """Call a user's function with an element: the parts of a tuple are arguments."""
    # Not `with`: this is called for each element.
    shuffle_seeds.reading.depth += 1
    try:
        return function(*element) if type(element) is tuple else function(element)
    finally:
        shuffle_seeds.reading.depth -= 1


def name_of(function: object) -> str:
    """Return the name of a user's function, for the text of a stage."""
    return getattr(function, "__qualname__", "a function")
