"""Stages of several datasets: side by side, one after the other, in turn."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Final

import numpy as np

from mpidist._base import nest
from mpidist._base.types import HostArray, Nest
from mpidist.data._blocks import RowBlock, join
from mpidist.data._prefetch import Prefetcher
from mpidist.data._stage import (
    INFINITE,
    UNKNOWN,
    Derived,
    Opened,
    Pass,
    Stage,
    Token,
    Tokens,
    apply,
    common_spec,
    name_of,
)


@dataclasses.dataclass(eq=False, repr=False)
class Zip(Stage):
    """Elements of several datasets side by side, as far as the shortest goes.

    A token is a tuple of theirs.
    """

    parents: Sequence[Stage]
    structure: nest.Structure

    def __post_init__(self) -> None:
        parents = self.parents
        sizes = [parent.size for parent in parents]
        self.size = UNKNOWN if UNKNOWN in sizes else min(sizes)
        self.indexed = all(parent.indexed for parent in parents)
        self.depth = max(parent.depth for parent in parents)
        self.workers = max(parent.workers for parent in parents)
        batches = {parent.batch_size for parent in parents}
        if len(batches) == 1:
            (self.batch_size,) = batches
            self.whole = next((one.whole for one in parents if one.whole), "")
        for parent in parents:
            self.options = self.options.merge(parent.options)
        self.text = f"zip{self.structure.render([one.text for one in parents])}"

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        found = [parent.at(indices, in_pass) for parent in self.parents]
        return list(zip(*found, strict=True))

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        found = [parent.tokens(in_pass, start) for parent in self.parents]
        return zip(*found, strict=False)

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        copies = itertools.tee(tokens, len(self.parents))
        loaded = [
            parent.load(map(itemgetter(number), copy))
            for number, (parent, copy) in enumerate(
                zip(self.parents, copies, strict=True)
            )
        ]
        return map(self.structure.unflatten, zip(*loaded, strict=True))

    def block(self, tokens: Tokens) -> RowBlock | None:
        if not len(tokens):
            return None
        columns = zip(*tokens, strict=True)
        return self._side_by_side(
            [
                parent.block(column)
                for parent, column in zip(self.parents, columns, strict=True)
            ]
        )

    def _side_by_side(self, blocks: list[RowBlock | None]) -> RowBlock | None:
        found = [block for block in blocks if block is not None]
        if len(found) < len(blocks):
            return None
        tree = self.structure.unflatten([block.nest() for block in found])
        leaves, structure = nest.flatten(tree)
        return RowBlock(leaves, structure)

    def open(self, token: Token) -> Opened:
        if self.batch_size is None or self.whole:
            return super().open(token)
        opened = [
            parent.open(part) for parent, part in zip(self.parents, token, strict=True)
        ]
        rows = [one.rows for one in opened]
        if min(rows) < max(rows):
            raise ValueError(
                f"Dataset.zip: expected batches with the same number of rows, got "
                f"{rows}; write `zip` before `batch`"
            )
        return Opened(
            rows[0],
            lambda start, stop: self._side_by_side(
                [one.read(start, stop) for one in opened]
            ),
        )

    def spec(self) -> Nest | None:
        specs = [parent.spec() for parent in self.parents]
        if any(spec is None for spec in specs):
            return None
        return self.structure.unflatten(specs)


class _Parts:
    """Loading for stages whose tokens are pairs: a stage, and its token."""

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        for stage, run in itertools.groupby(tokens, itemgetter(0)):
            yield from stage.load(map(itemgetter(1), run))

    def block(self, tokens: Tokens) -> RowBlock | None:
        by_stage: dict[Stage, list[int]] = {}
        for place, (stage, _) in enumerate(tokens):
            by_stage.setdefault(stage, []).append(place)
        found = [
            stage.block([tokens[place][1] for place in places])
            for stage, places in by_stage.items()
        ]
        blocks = [block for block in found if block is not None]
        if not blocks:
            return None
        joined = join(blocks)
        if len(blocks) == 1:
            return joined
        order = np.argsort(np.concatenate(list(by_stage.values())))
        return RowBlock([leaf[order] for leaf in joined.leaves], joined.structure)

    def open(self, token: Token) -> Opened:
        stage, part = token
        opened: Opened = stage.open(part)
        return opened


@dataclasses.dataclass(eq=False, repr=False)
class Concatenate(_Parts, Stage):
    """The elements of one dataset, and then those of another."""

    first: Stage
    second: Stage

    def __post_init__(self) -> None:
        parents = (self.first, self.second)
        sizes = [parent.size for parent in parents]
        self.size = sum(sizes)
        if max(sizes) >= INFINITE:
            self.size = INFINITE
        elif UNKNOWN in sizes:
            self.size = UNKNOWN
        self.indexed = all(parent.indexed for parent in parents)
        self.depth = max(parent.depth for parent in parents)
        self.workers = max(parent.workers for parent in parents)
        batches = [parent.batch_size for parent in parents]
        if None not in batches:
            self.batch_size = max(size for size in batches if size is not None)
        self.whole = self.first.whole or self.second.whole
        self.options = self.first.options.merge(self.second.options)
        self.text = f"{self.first.text}.concatenate({self.second.text})"

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        ours = indices < self.first.size
        tokens: list[Token] = [None] * len(indices)
        for number, (stage, mask, offset) in enumerate(
            ((self.first, ours, 0), (self.second, ~ours, self.first.size))
        ):
            places = np.flatnonzero(mask)
            if len(places):
                found = stage.at(indices[places] - offset, (*in_pass, number))
                for place, token in zip(places, found, strict=True):
                    tokens[place] = (stage, token)
        return tokens

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        number = 0
        first, second = (*in_pass, 0), (*in_pass, 1)
        if not 0 <= self.first.size <= start:
            for token in self.first.tokens(first, 0):
                if number >= start:
                    yield self.first, token
                number += 1
        else:
            number = self.first.size
        for token in self.second.tokens(second, max(0, start - number)):
            yield self.second, token

    def spec(self) -> Nest | None:
        one, two = self.first.spec(), self.second.spec()
        if one is None or two is None:
            return None
        return nest.map_structure(common_spec, one, two)


_END: Final = object()


@dataclasses.dataclass(eq=False, repr=False)
class Interleave(_Parts, Derived):
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

    def __post_init__(self) -> None:
        size = self.parent.size
        text = f".interleave({name_of(self.function)}, {self.cycle}, {self.length})"
        self.inherit(text, 0 if size == 0 else UNKNOWN)
        self.indexed, self.batch_size, self.whole = False, None, ""

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        return itertools.islice(self._turns(in_pass), start, None)

    def _turns(self, in_pass: Pass) -> Iterator[Token]:
        inputs = enumerate(self.parent.load(self.parent.tokens(in_pass)))
        places: list[_Place | None] = [None] * self.cycle
        turn, given, more = 0, 0, True
        try:
            while more or any(places):
                place = places[turn]
                if place is None and more:
                    number, element = next(inputs, (0, _END))
                    if element is _END:
                        more = False
                        continue
                    stage = apply(self.function, element)
                    ahead = self.length if turn < self.readers else 0
                    tokens = stage.tokens((*in_pass, number))
                    places[turn] = _Place(stage, tokens, ahead)
                    continue
                if place is not None:
                    token = next(place.tokens, _END)
                    if token is not _END:
                        yield place.stage, token
                        given += 1
                    else:
                        place.close()
                        places[turn] = None
                        given = self.length
                if place is None or given == self.length:
                    turn, given = (turn + 1) % self.cycle, 0
        finally:
            for open_place in places:
                if open_place is not None:
                    open_place.close()


class _Place:
    """One of the datasets that an interleave reads in turn."""

    def __init__(self, stage: Stage, tokens: Iterator[Token], ahead: int) -> None:
        self.stage = stage
        self.tokens = Prefetcher(tokens, ahead) if ahead else tokens

    def close(self) -> None:
        """Stop the thread, if there is one."""
        if isinstance(self.tokens, Prefetcher):
            self.tokens.close(wait=False)
