"""Stages that give the elements of their parent in another order or number."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from mpidist._base.forks import RepairedInChildren
from mpidist._base.types import HostArray, Nest
from mpidist.data._blocks import RowBlock
from mpidist.data._options import Options
from mpidist.data._stage import (
    INFINITE,
    UNKNOWN,
    Opened,
    Pass,
    Stage,
    Token,
    Tokens,
    Via,
    open_whole,
    read_only,
    unshared,
)

# The maximum total number of rows in the orders that a shuffle keeps.
_ORDERS_ROWS: Final = 2**20


@dataclasses.dataclass(eq=False, repr=False)
class Take(Via):
    """The first elements; all for a negative count."""

    count: int

    def __post_init__(self) -> None:
        size = self.parent.size
        if self.count >= 0 and size != UNKNOWN:
            size = min(self.count, size)
        self.inherit(f".take({self.count})", size)

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        tokens = self.parent.tokens(in_pass, start)
        if self.count < 0:
            return tokens
        return itertools.islice(tokens, max(0, self.count - start))


@dataclasses.dataclass(eq=False, repr=False)
class Skip(Via):
    """All but the first elements; none for a negative count."""

    count: int

    def __post_init__(self) -> None:
        size = self.parent.size
        if self.count < 0:
            size = 0
        elif 0 <= size < INFINITE:
            size = max(0, size - self.count)
        self.inherit(f".skip({self.count})", size)

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        return self.parent.at(indices + self.count, in_pass)

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        if self.count < 0:
            return iter(())
        return self.parent.tokens(in_pass, start + self.count)


@dataclasses.dataclass(eq=False, repr=False)
class Shard(Via):
    """Every n-th element, from a given one on."""

    shards: int
    index: int

    def __post_init__(self) -> None:
        size = self.parent.size
        if 0 <= size < INFINITE:
            size = max(0, -(-(size - self.index) // self.shards))
        self.inherit(f".shard({self.shards}, {self.index})", size)

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        return self.parent.at(indices * self.shards + self.index, in_pass)

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        tokens = self.parent.tokens(in_pass, start * self.shards + self.index)
        return itertools.islice(tokens, 0, None, self.shards)


@dataclasses.dataclass(eq=False, repr=False)
class Prefetch(Via):
    """A request for a thread that reads ahead."""

    buffer_size: int

    def __post_init__(self) -> None:
        self.inherit(f".prefetch({self.buffer_size})")
        self.depth = max(self.buffer_size, self.parent.depth)


@dataclasses.dataclass(eq=False, repr=False)
class WithOptions(Via):
    """The parent, with options."""

    added: Options

    def __post_init__(self) -> None:
        self.inherit("")
        self.options = self.parent.options.merge(self.added)


@dataclasses.dataclass(eq=False, repr=False)
class WithCardinality(Via):
    """The parent, whose number of elements the user knows. Reading compares it."""

    count: int

    def __post_init__(self) -> None:
        self.inherit("", self.count)
        # Else reading finds the difference, so it goes through the elements in order.
        self.indexed = self.parent.indexed and self.parent.size == self.count

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        number = start
        for token in self.parent.tokens(in_pass, start):
            if number >= self.count:
                raise ValueError(
                    "Dataset.assert_cardinality: the dataset has more than the "
                    f"{self.count} elements that were promised"
                )
            yield token
            number += 1
        if number < self.count:
            raise ValueError(
                f"Dataset.assert_cardinality: expected {self.count} elements, but the "
                f"dataset ended after {number}"
            )


@dataclasses.dataclass(eq=False, repr=False)
class Repeat(Via):
    """The parent, repeated; without end for a count of None."""

    count: int | None

    def __post_init__(self) -> None:
        size, count = self.parent.size, self.count
        if count == 0:
            size = 0
        elif count is None:
            size = INFINITE if size else 0
        elif 0 <= size < INFINITE:
            size = min(size * count, INFINITE)
        text = "" if count is None else count
        self.inherit(f".repeat({text})", size)

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        if self.parent.size >= INFINITE or not len(indices):
            return self.parent.at(indices, (*in_pass, 0))
        rounds, within = np.divmod(indices, self.parent.size)
        starts = np.flatnonzero(np.diff(rounds, prepend=-1))
        if len(starts) == 1:
            return self.parent.at(within, (*in_pass, int(rounds[0])))
        stops = [*starts[1:], len(rounds)]
        parts = [
            self.parent.at(within[a:b], (*in_pass, int(rounds[a])))
            for a, b in zip(starts, stops, strict=True)
        ]
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts)
        return list(itertools.chain(*parts))

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        return itertools.islice(self._rounds(in_pass), start, None)

    def _rounds(self, in_pass: Pass) -> Iterator[Token]:
        rounds = itertools.count() if self.count is None else range(self.count)
        for number in rounds:
            empty = True
            for token in self.parent.tokens((*in_pass, number)):
                empty = False
                yield token
            if empty:
                return  # or an endless repeat of nothing would never return


@dataclasses.dataclass(eq=False, repr=False)
class Shuffle(Via):
    """The parent in a different order in each pass.

    If the parent is indexed and has an end: a full permutation. Otherwise the order of
    tf.data: the next element is a random one of a buffer of elements.
    """

    seed: int
    anew: bool
    buffer_size: int | None  # None: for the first case only

    def __post_init__(self) -> None:
        also = "" if self.anew else ", reshuffle_each_iteration=False"
        full = self.parent.indexed and self.parent.size < INFINITE
        if not full and self.buffer_size is not None:
            also = f", buffer_size={self.buffer_size}{also}"
        self.inherit(f".shuffle({self.seed}{also})")
        self.indexed = full
        self._orders: list[tuple[Pass, HostArray]] = []

    def _random(self, key: Pass) -> np.random.RandomState:
        # RandomState's streams do not change with the version of NumPy, so a run that
        # continues after an upgrade has the same order. The same holds for
        # SeedSequence.
        words = np.random.SeedSequence([self.seed, len(key), *key])
        return np.random.RandomState(np.random.MT19937(words))

    def order(self, in_pass: Pass) -> HostArray:
        """Return the permutation of a pass."""
        key = in_pass if self.anew else ()
        for known, order in self._orders:
            if known == key:
                return order
        order = self._random(key).permutation(self.size)
        # At least two: a batch may span the end of one pass and the start of the next.
        kept = max(2, min(16, _ORDERS_ROWS // max(1, self.size)))
        self._orders = [(key, order), *self._orders[: kept - 1]]
        return order

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        return self.parent.at(self.order(in_pass)[indices], in_pass)

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        return itertools.islice(self._mixed(in_pass), start, None)

    def _mixed(self, in_pass: Pass) -> Iterator[Token]:
        random = self._random(in_pass if self.anew else ())
        tokens = self.parent.tokens(in_pass)
        held = list(itertools.islice(tokens, self.buffer_size))
        for token in tokens:
            place = random.randint(len(held))
            yield held[place]
            held[place] = token
        for place in random.permutation(len(held)):
            yield held[place]


_FIRST_PASS: Final = (0,)


@dataclasses.dataclass(eq=False, repr=False)
class Cache(Via):
    """The elements of the parent, each of which is loaded once and kept in memory.

    In every pass they are those of the first one, as in tf.data. Tokens are numbers.
    An element that is not requested is not loaded: ranks keep their own rows.
    """

    def __post_init__(self) -> None:
        self.inherit(".cache()")
        self._lock = threading.RLock()  # iterators in several threads share the rest
        self._values: dict[int, Nest] = {}
        self._parts: dict[tuple[int, int, int], RowBlock | None] = {}
        # Of a parent that is not indexed:
        self._tokens: list[Token] = []
        self._source: Iterator[Token] | None = None
        self._ended = False
        _caches.add(self)

    def renew_lock(self) -> None:
        """In a forked child, in which the thread that held the lock does not exist."""
        self._lock, self._source = threading.RLock(), None

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        return indices

    def in_order(self, in_pass: Pass, start: int) -> Iterator[Token]:
        return itertools.takewhile(self._exists, itertools.count(start))

    def _exists(self, number: int) -> bool:
        with self._lock:
            while len(self._tokens) <= number and not self._ended:
                if self._source is None:
                    self._source = self.parent.tokens(_FIRST_PASS, len(self._tokens))
                try:
                    self._tokens.append(next(self._source))
                except StopIteration:
                    self._ended = True
                except BaseException:
                    self._source = None  # an exception ends a generator
                    raise
            return number < len(self._tokens)

    def _parent_token(self, number: int) -> Token:
        if not self.parent.indexed:
            return self._tokens[number]
        return self.parent.at(np.array([number]), _FIRST_PASS)[0]

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        source = map(int, tokens)
        while numbers := list(itertools.islice(source, max(1, self.workers))):
            with self._lock:
                missing = [n for n in dict.fromkeys(numbers) if n not in self._values]
                loaded = self.parent.load(map(self._parent_token, missing))
                for number, value in zip(missing, loaded, strict=True):
                    self._values[number] = read_only(value)
                    if not self.parent.indexed:
                        self._tokens[number] = None  # not needed again
                found = [self._values[number] for number in numbers]
            # Tensors of torch cannot be made read-only: each is given away as a copy.
            yield from map(unshared, found)

    def block(self, tokens: Tokens) -> RowBlock | None:
        return Stage.block(self, tokens)

    def open(self, token: Token) -> Opened:
        number = int(token)
        if self.batch_size is None or self.whole or number in self._values:
            (element,) = self.load([number])
            return open_whole(element)
        opened = self.parent.open(self._parent_token(number))

        def read(start: int, stop: int) -> RowBlock | None:
            key = (number, start, stop)
            with self._lock:
                if key not in self._parts:
                    part = opened.read(start, stop)
                    if part is not None:
                        part = RowBlock(
                            [read_only(leaf) for leaf in part.leaves], part.structure
                        )
                    self._parts[key] = part
                return self._parts[key]

        return Opened(opened.rows, read)


_caches: Final = RepairedInChildren(Cache.renew_lock)
