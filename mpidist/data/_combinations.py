"""Stages that give the elements of several datasets: side by side, or in turn."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator

from mpidist._base import nest
from mpidist._base.types import HostArray, Nest
from mpidist.data._ahead import read_ahead, stop_reading
from mpidist.data._options import common_spec
from mpidist.data._rows import LazyBlock, RowBlock, join
from mpidist.data._stages import (
    END,
    INFINITE,
    UNKNOWN,
    Derived,
    Pass,
    Stage,
    Token,
    Tokens,
    Via,
    apply,
)


class Zip(Via):
    """Elements of several datasets side by side, as far as the shortest goes.

    A token is a tuple of theirs.
    """

    call: str = dataclasses.field(init=False, default="")
    structure: nest.Structure

    def __post_init__(self) -> None:
        sizes = [parent.size for parent in self.parents]
        self.inherit(UNKNOWN if UNKNOWN in sizes else min(sizes))
        if len({parent.batch_size for parent in self.parents}) > 1:
            self.batch_size = None
        wholes = (parent.whole for parent in self.parents if parent.whole)
        self.whole = "" if self.batch_size is None else next(wholes, "")
        self.text = f"zip{self.structure.render([one.text for one in self.parents])}"

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        found = [parent.at(indices, in_pass) for parent in self.parents]
        return list(zip(*found, strict=True))

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        return zip(*(parent.tokens(in_pass) for parent in self.parents), strict=False)

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        copies = enumerate(itertools.tee(tokens, len(self.parents)))
        columns = [map(operator.itemgetter(number), copy) for number, copy in copies]
        both = zip(self.parents, columns, strict=True)
        loaded = [parent.load(column) for parent, column in both]
        return map(self.structure.unflatten, zip(*loaded, strict=True))

    def block(self, tokens: Tokens) -> RowBlock | None:
        if not len(tokens):
            return None
        columns = zip(*tokens, strict=True)
        both = zip(self.parents, columns, strict=True)
        return self._side_by_side([parent.block(column) for parent, column in both])

    def _side_by_side(self, blocks: list[RowBlock | None]) -> RowBlock | None:
        found = [block.nest() for block in blocks if block is not None]
        if len(found) < len(blocks):
            return None
        leaves, structure = nest.flatten(self.structure.unflatten(found))
        return RowBlock(leaves, structure)

    def open(self, token: Token) -> LazyBlock:
        both = zip(self.parents, token, strict=True)
        parts = [parent.open(part) for parent, part in both]
        rows = [part.rows for part in parts]
        if min(rows) < max(rows):
            raise ValueError(
                f"Dataset.zip: expected batches with the same number of rows, got "
                f"{rows}; write `zip` before `batch`"
            )
        return LazyBlock(
            rows[0],
            lambda start, stop: self._side_by_side(
                [x.part(start, stop) for x in parts]
            ),
        )

    def spec_of(self, *inner: Nest) -> Nest:
        return self.structure.unflatten(inner)


class _Pairs(Stage):
    """A stage whose tokens are pairs: a stage, and its token."""

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        for stage, run in itertools.groupby(tokens, operator.itemgetter(0)):
            yield from stage.load(map(operator.itemgetter(1), run))

    def block(self, tokens: Tokens) -> RowBlock | None:
        runs = itertools.groupby(tokens, operator.itemgetter(0))
        found = [stage.block([token for _, token in run]) for stage, run in runs]
        blocks = [block for block in found if block is not None]
        return join(blocks) if blocks else None

    def open(self, token: tuple[Stage, Token]) -> LazyBlock:
        stage, inner = token
        return stage.open(inner)


class Concatenate(_Pairs, Via):
    """The elements of one dataset, and then those of another.

    If the first is one of these, its parents are parents here: a loop may make a chain.
    """

    call: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        *before, second = self.parents
        first = functools.reduce(lambda one, two: Concatenate([one, two]), before)
        self.parents = [first, second]
        sizes = [first.size, second.size]
        size = min(sum(sizes), INFINITE)
        if UNKNOWN in sizes:
            size = INFINITE if max(sizes) >= INFINITE else UNKNOWN
        self.call = f"concatenate({second.text})"
        self.inherit(size)
        one, two = first.batch_size, second.batch_size
        self.batch_size = None if one is None or two is None else max(one, two)
        self.whole = first.whole or second.whole
        self._spec = super().spec()
        if isinstance(first, Concatenate):
            self.parents = [*first.parents, second]

    def _pass_of(self, number: int, in_pass: Pass) -> Pass:
        """Return the pass of a parent, as of pairs of pairs: orders depend on it."""
        around = len(self.parents) - 1 - max(number, 1)
        return *in_pass, *[0] * around, min(number, 1)

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        starts = [0, *itertools.accumulate(x.size for x in self.parents[:-1])]
        tokens = []
        for index in indices:
            number = bisect.bisect(starts, index) - 1
            stage, here = self.parents[number], index[None] - starts[number]
            (token,) = stage.at(here, self._pass_of(number, in_pass))
            tokens.append((stage, token))
        return tokens

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        for number, stage in enumerate(self.parents):
            for token in stage.tokens(self._pass_of(number, in_pass)):
                yield stage, token

    def spec(self, *, trial: bool = False) -> Nest | None:
        return super().spec(trial=True) if trial else self._spec

    def spec_of(self, *inner: Nest) -> Nest:
        return functools.reduce(
            functools.partial(nest.map_structure, common_spec), inner
        )


class Interleave(_Pairs, Derived):
    """The elements of a dataset for each element of the parent, in turn.

    The order is that of TensorFlow (`interleave_dataset_op.cc`). There are ``cycle``
    places. A place that is empty gets the dataset of the next element of the parent;
    otherwise it gives up to ``length`` elements before it is the turn of the next
    place. A dataset that has ended leaves its place empty until its next turn.
    """

    function: Callable[..., Stage]
    cycle: int
    length: int
    readers: int  # places whose dataset a thread reads ahead
    has_batches = False  # the function's datasets are known after reading only

    def __post_init__(self) -> None:
        self.inherit(0 if self.parent.size == 0 else UNKNOWN)
        self.indexed, self.batch_size, self.whole = False, None, ""

    def spec(self, *, trial: bool = False) -> Nest | None:
        return None

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        inputs = enumerate(self.parent.load(self.parent.tokens(in_pass)))
        places: list[tuple[Stage, Iterator[Token]] | None] = []
        turn, count = 0, self.cycle
        try:
            while True:
                if turn == len(places):
                    places.append(None)
                if places[turn] is None:
                    number, element = next(inputs, (0, END))
                    if element is not END:
                        stage = apply(self.function, element)
                        tokens = stage.tokens((*in_pass, number))
                        depth = self.length if turn < self.readers else 0
                        places[turn] = stage, read_ahead(tokens, depth)
                    elif not any(places):
                        return
                    else:  # the others stay empty
                        count = len(places)
                if place := places[turn]:
                    stage, tokens = place
                    given = 0
                    for token in itertools.islice(tokens, self.length):
                        yield stage, token
                        given += 1
                    if given < self.length:
                        stop_reading(tokens, wait=False)
                        places[turn] = None
                turn = (turn + 1) % count
        finally:
            for _, tokens in filter(None, places):
                stop_reading(tokens, wait=False)
