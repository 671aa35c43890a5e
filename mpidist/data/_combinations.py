"""Stages of several datasets, and a replica's part of a dataset by files."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from mpidist._base import nest
from mpidist._base.types import HostArray, Nest
from mpidist.data._ahead import Ahead, read_ahead
from mpidist.data._batches import Batch
from mpidist.data._rows import LazyBlock, RowBlock, common_spec, join, split_by_plan
from mpidist.data._stage import (
    INFINITE,
    UNKNOWN,
    Derived,
    Pass,
    Stage,
    Token,
    Tokens,
    apply,
)
from mpidist.data._stages import Part


class _Several(Stage):
    parents: Sequence[Stage]

    def inherit_from(self, parents: Sequence[Stage]) -> None:
        """Set the attributes that follow from those of all parents."""
        self.parents = parents
        self.indexed = all(parent.indexed for parent in parents)
        self.depth = max(parent.depth for parent in parents)
        self.workers = max(parent.workers for parent in parents)
        for parent in parents:
            self.options = self.options.merge(parent.options)

    def of(self, parents: Sequence[Stage]) -> Stage:
        """Return the same of other parents."""
        raise NotImplementedError

    def shuffle_seeds(self) -> list[int]:
        return [seed for parent in self.parents for seed in parent.shuffle_seeds()]

    def with_shuffle_seeds(self, seeds: Iterator[int]) -> Stage:
        made = [parent.with_shuffle_seeds(seeds) for parent in self.parents]
        same = all(map(operator.is_, made, self.parents))
        return self if same else self.of(made)


class Zip(_Several):
    """Elements of several datasets side by side, as far as the shortest goes.

    A token is a tuple of theirs.
    """

    def __init__(self, parents: Sequence[Stage], structure: nest.Structure) -> None:
        self._structure = structure
        self.inherit_from(parents)
        sizes = [parent.size for parent in parents]
        self.size = UNKNOWN if UNKNOWN in sizes else min(sizes)
        batches = {parent.batch_size for parent in parents}
        if len(batches) == 1:
            (self.batch_size,) = batches
            self.whole = next((one.whole for one in parents if one.whole), "")
        self.text = f"zip{structure.render([one.text for one in parents])}"

    def of(self, parents: Sequence[Stage]) -> Stage:
        return Zip(parents, self._structure)

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        found = [parent.at(indices, in_pass) for parent in self.parents]
        return list(zip(*found, strict=True))

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        found = [parent.tokens(in_pass) for parent in self.parents]
        return zip(*found, strict=False)

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        copies = enumerate(itertools.tee(tokens, len(self.parents)))
        columns = [map(operator.itemgetter(number), copy) for number, copy in copies]
        both = zip(self.parents, columns, strict=True)
        loaded = [parent.load(column) for parent, column in both]
        return map(self._structure.unflatten, zip(*loaded, strict=True))

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
        leaves, structure = nest.flatten(self._structure.unflatten(found))
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

    def spec(self, *, trial: bool = False) -> Nest | None:
        specs = [parent.spec(trial=trial) for parent in self.parents]
        return None if None in specs else self._structure.unflatten(specs)


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


class Concatenate(_Pairs, _Several):
    """The elements of one dataset, and then those of another."""

    def __init__(self, first: Stage, second: Stage) -> None:
        self.inherit_from((first, second))
        sizes = [first.size, second.size]
        self.size = min(sum(sizes), INFINITE)
        if UNKNOWN in sizes:
            self.size = INFINITE if max(sizes) >= INFINITE else UNKNOWN
        if first.batch_size is not None and second.batch_size is not None:
            self.batch_size = max(first.batch_size, second.batch_size)
        self.whole = first.whole or second.whole
        self.text = f"{first.text}.concatenate({second.text})"

    def of(self, parents: Sequence[Stage]) -> Stage:
        return Concatenate(*parents)

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        size, tokens = self.parents[0].size, []
        for index in indices:
            number = int(index >= size)
            stage = self.parents[number]
            (token,) = stage.at(index[None] - number * size, (*in_pass, number))
            tokens.append((stage, token))
        return tokens

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        for number, stage in enumerate(self.parents):
            for token in stage.tokens((*in_pass, number)):
                yield stage, token

    def spec(self, *, trial: bool = False) -> Nest | None:
        one, two = (parent.spec(trial=trial) for parent in self.parents)
        if one is None or two is None:
            return None
        return nest.map_structure(common_spec, one, two)


_END: Final = object()


@dataclasses.dataclass(eq=False, repr=False)
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

    def __post_init__(self) -> None:
        self.inherit(0 if self.parent.size == 0 else UNKNOWN)
        self.indexed, self.batch_size, self.whole = False, None, ""

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        inputs = enumerate(self.parent.load(self.parent.tokens(in_pass)))
        places: list[tuple[Stage, Iterator[Token]] | None] = [None] * self.cycle
        turn, more = 0, True
        try:
            while more or any(places):
                place = places[turn]
                if place is None and more:
                    number, element = next(inputs, (0, _END))
                    if element is _END:
                        more = False
                        continue
                    stage = apply(self.function, element)
                    tokens = stage.tokens((*in_pass, number))
                    if turn < self.readers:
                        tokens = read_ahead(tokens, self.length)
                    place = places[turn] = stage, tokens
                if place is not None:
                    stage, tokens = place
                    given = 0
                    for token in itertools.islice(tokens, self.length):
                        yield stage, token
                        given += 1
                    if given < self.length:
                        _close(tokens)
                        places[turn] = None
                turn = (turn + 1) % self.cycle
        finally:
            for _, tokens in filter(None, places):
                _close(tokens)


def _close(tokens: Iterator[Token]) -> None:
    """Stop the thread, if there is one."""
    if isinstance(tokens, Ahead):
        tokens.close(wait=False)


# --- AutoShardPolicy.FILE ----------------------------------------------------------

# What these do with a row does not depend on the rows of other replicas. "": options.
_ROW_BY_ROW: Final = (
    "batch", "cache", "filter", "interleave", "map", "padded_batch", "prefetch",
    "repeat", "shuffle", "unbatch", "",
)  # fmt: skip
# After the last `batch` these count steps, which all replicas make.
_OF_STEPS: Final = ("skip", "take")
_CALL: Final = "experimental_distribute_dataset"


def shard_by_file(
    stage: Stage, replicas: int, replica: int, *, batched: bool = False
) -> Stage:
    """Return the part of a pipeline that one replica reads.

    Its `interleave` opens every n-th element of its input, and its last `batch` makes
    the replica's part of a global batch.
    """
    if not isinstance(stage, Derived) or not _has_interleave(stage):
        raise ValueError(
            f"{_CALL}: AutoShardPolicy.FILE is for a dataset that opens files in an "
            "`interleave`: `Dataset.list_files(pattern).interleave(open_one).batch(n)`"
            "; write AutoShardPolicy.DATA"
        )
    if isinstance(stage, Interleave) and not _has_interleave(stage.parent):
        count = stage.parent.size
        if 0 <= count < replicas:
            raise ValueError(
                f"{_CALL}: AutoShardPolicy.FILE needs a file for each of {replicas} "
                f"replicas, and the `interleave` of this dataset has {count}; write "
                "AutoShardPolicy.DATA"
            )
        mine = Part(stage.parent, "", replica, None, replicas)
        return dataclasses.replace(stage, parent=mine)
    if stage.method not in (_ROW_BY_ROW if batched else _ROW_BY_ROW + _OF_STEPS):
        raise ValueError(
            f"{_CALL}: AutoShardPolicy.FILE cannot be used with the `{stage.method}` "
            "after the `interleave`, since it would count the rows of each replica "
            "separately; write AutoShardPolicy.DATA"
        )
    last = isinstance(stage, Batch) and not batched
    parent = shard_by_file(stage.parent, replicas, replica, batched=batched or last)
    if not isinstance(stage, Batch) or not last:
        return dataclasses.replace(stage, parent=parent)
    rows = stage.size_of_batch
    if rows < replicas:
        raise ValueError(
            f"{_CALL}: AutoShardPolicy.FILE needs global batches of a row for each "
            f"replica, {replicas}, and those of this dataset have {rows}"
        )
    first, after = split_by_plan(rows, replicas, replica, rows)
    return dataclasses.replace(stage, parent=parent, size_of_batch=after - first)


def _has_interleave(stage: Stage) -> bool:
    while isinstance(stage, Derived):
        if isinstance(stage, Interleave):
            return True
        stage = stage.parent
    return False
