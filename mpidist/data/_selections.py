"""Stages that give elements of one dataset: some, in another order, or kept."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np

from mpidist._base import nest
from mpidist._base.types import HostArray, Nest
from mpidist.data._options import Options
from mpidist.data._rows import LazyBlock, RowBlock, copied, protected, unshared
from mpidist.data._stages import (
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

# The maximum total number of rows in the orders that a shuffle keeps.
_ORDERS_ROWS: Final = 2**20
_FIRST_PASS: Final = (0,)


class Part(Via):
    """Some of the elements, as in a slice of a list: `take`, `skip` and `shard`."""

    start: int = 0
    stop: int | None = None
    step: int = 1

    def __post_init__(self) -> None:
        size = 0 if self.stop == 0 else self.parent.size
        if size != UNKNOWN and (self.stop is not None or size < INFINITE):
            stop = size if self.stop is None else min(size, self.stop)
            size = len(range(self.start, stop, self.step))
        self.inherit(size)

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        return self.parent.at(self.start + indices * self.step, in_pass)

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        tokens = self.parent.tokens(in_pass)
        return itertools.islice(tokens, self.start, self.stop, self.step)


class Same(Via):
    """The elements of the parent: `prefetch` and `with_options`."""

    buffer_size: int = 0
    added: Options | None = None

    def __post_init__(self) -> None:
        self.inherit()
        self.depth = max(self.buffer_size, self.parent.depth)
        if self.added is not None:
            self.options = self.parent.options.merge(self.added)


class WithCardinality(Via):
    """The parent, whose number of elements the user knows. Reading compares it."""

    count: int

    def __post_init__(self) -> None:
        self.inherit(self.count)
        # Else reading finds the difference, so it goes through the elements in order.
        self.indexed = self.parent.indexed and self.parent.size == self.count

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        number = 0
        for token in self.parent.tokens(in_pass):
            if number >= self.count:
                raise ValueError(
                    "Dataset.assert_cardinality: the dataset has more than the "
                    f"{self.count} elements that were promised"
                )
            yield token
            number += 1
        if number < self.count:
            many = "endlessly many" if self.count >= INFINITE else self.count
            raise ValueError(
                f"Dataset.assert_cardinality: expected {many} elements, but the "
                f"dataset ended after {number}"
            )


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
        self.inherit(size)

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        if self.parent.size >= INFINITE or not len(indices):
            return self.parent.at(indices, (*in_pass, 0))
        rounds, within = np.divmod(indices, self.parent.size)
        starts = np.flatnonzero(np.diff(rounds, prepend=-1))
        parts = [
            self.parent.at(within[a:b], (*in_pass, int(rounds[a])))
            for a, b in itertools.pairwise([*starts, len(rounds)])
        ]
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts)
        return list(itertools.chain(*parts))

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        for number in itertools.count() if self.count is None else range(self.count):
            empty = True
            for token in self.parent.tokens((*in_pass, number)):
                empty = False
                yield token
            if empty and self.count is None:
                return  # or an endless repeat of nothing would never return


class Shuffle(Via):
    """The parent in a different order in each pass, as in tf.data.

    The next element is a random one of a buffer of elements. If the parent is indexed
    and has an end, the order of a pass is computed at once, so it is indexed, too; a
    buffer for all elements gives a permutation.
    """

    call: str = dataclasses.field(init=False)
    buffer_size: int | None  # None: for all
    seed: int
    seeded: bool  # by the program
    reshuffle_each_iteration: bool = True

    def __post_init__(self) -> None:
        size = "" if self.buffer_size is None else f"{self.buffer_size}, "
        seed = f"seed={self.seed}" if self.seeded else f"no seed: {self.seed}"
        always = "" if self.reshuffle_each_iteration else ", always in one order"
        self.call = f"shuffle({size}{seed}{always})"
        self.inherit()
        self.indexed = self.parent.indexed and self.parent.size < INFINITE
        self._orders: list[tuple[Pass, HostArray]] = []

    def shuffle_seeds(self) -> list[int]:
        return super().shuffle_seeds() + ([] if self.seeded else [self.seed])

    def with_shuffle_seeds(self, seeds: Iterator[int]) -> Stage:
        stage: Any = super().with_shuffle_seeds(seeds)
        seed = self.seed if self.seeded else next(seeds)
        return stage if seed == self.seed else dataclasses.replace(stage, seed=seed)

    def _random(self, in_pass: Pass) -> np.random.RandomState:
        # RandomState's streams do not change with the version of NumPy, so a run that
        # continues after an upgrade has the same order. The same holds for
        # SeedSequence.
        words = np.random.SeedSequence([self.seed, len(in_pass), *in_pass])
        return np.random.RandomState(np.random.MT19937(words))

    def _order(self, in_pass: Pass) -> HostArray:
        """Return the numbers of the elements, in the order of a pass."""
        for known, order in self._orders:
            if known == in_pass:
                return order
        order = _mixed_numbers(self._random(in_pass), self.size, self.buffer_size)
        # At least two: a batch may span the end of one pass and the start of the next.
        kept = max(2, min(16, _ORDERS_ROWS // max(1, self.size)))
        self._orders = [(in_pass, order), *self._orders[: kept - 1]]
        return order

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        order = self._order(in_pass if self.reshuffle_each_iteration else ())
        return self.parent.at(order[indices], in_pass)

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        random = self._random(in_pass if self.reshuffle_each_iteration else ())
        tokens = self.parent.tokens(in_pass)
        held = list(itertools.islice(tokens, self.buffer_size))
        for token in tokens:
            place = random.randint(len(held))
            yield held[place]
            held[place] = token
        for place in random.permutation(len(held)):
            yield held[place]


def _mixed_numbers(
    random: np.random.RandomState, size: int, buffer_size: int | None
) -> HostArray:
    """Return what `Shuffle.in_order` makes of the numbers from 0, without its loop."""
    held = min(size, buffer_size or size)
    if held == size:
        return random.permutation(size)
    # The place that each number goes to. It comes out when the next one goes there.
    places = np.concatenate([np.arange(held), random.randint(held, size=size - held)])
    by_place = np.argsort(places, kind="stable")
    before = np.empty_like(by_place)
    before[by_place[1:]] = by_place[:-1]
    last = by_place[np.flatnonzero(np.diff(places[by_place], append=held))]
    return np.concatenate([before[held:], last[random.permutation(held)]])


class Filter(Derived):
    """Elements that a predicate chooses.

    `take_while` has those before the first that it refuses.
    """

    predicate: Callable[..., object]

    def __post_init__(self) -> None:
        self.inherit(UNKNOWN)
        self.indexed = False
        if self.batch_size is not None:
            self.whole = f"the `{self.method}` after `batch`"

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        for element in self.parent.load(self.parent.tokens(in_pass)):
            if self._accepts(element):
                yield element
            elif self.method == "take_while":
                return

    def _accepts(self, element: Nest) -> bool:
        answer: Any = apply(self.predicate, element)
        shape = getattr(answer, "shape", None)
        if isinstance(answer, bool) or (shape == () and answer.dtype == bool):
            return bool(answer)
        got = f"{answer!r:.60} of type {type(answer).__name__}"
        raise TypeError(
            f"Dataset.{self.method}: expected a bool from the predicate, got "
            f"{got if shape is None else f'a {answer.dtype} array of shape {shape}'}; "
            "write `bool(...)` of one value, such as `x.any()`"
        )


class Cache(Derived):
    """The elements of the parent, each of which is loaded once and kept in memory.

    In every pass they are those of the first one, as in tf.data. Tokens are numbers.
    An element that is not requested is not loaded: ranks keep their own rows.
    """

    def __post_init__(self) -> None:
        self.inherit()
        self.workers = self.parent.workers
        self._lock = threading.RLock()  # iterators in several threads share the rest
        self._values: dict[int, Nest] = {}
        self._parts: dict[tuple[int, int, int], RowBlock | None] = {}
        # Of a parent that is not indexed:
        self._tokens: list[Token] = []
        self._source: Iterator[Token] | None = None
        self._ended = False
        _caches.add(self)

    def at(self, indices: HostArray, in_pass: Pass) -> Tokens:
        return indices

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        return itertools.takewhile(self._exists, itertools.count())

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
        failure: Exception | None = None
        while failure is None:
            numbers: list[int] = []
            try:
                numbers.extend(itertools.islice(source, max(1, self.workers)))
            except Exception as error:  # the numbers before it are in the list
                failure = error
            if not numbers:
                break
            with self._lock:
                missing = [n for n in dict.fromkeys(numbers) if n not in self._values]
                # Copies, as a function of the program may change what it gets.
                tokens = map(copied, map(self._parent_token, missing))
                loaded = self.parent.load(tokens)
                try:
                    for number, value in zip(missing, loaded, strict=True):
                        self._values[number] = protected(value)
                        if not self.parent.indexed and self.batch_size is None:
                            self._tokens[number] = None  # not needed again
                except Exception as error:  # those before it come first
                    failure = error
                known = itertools.takewhile(self._values.__contains__, numbers)
                found = [self._values[number] for number in known]
            # What cannot be made read-only is given away as a copy.
            yield from (nest.map_structure(unshared, x) for x in found)
        if failure is not None:
            raise failure

    def open(self, token: Token) -> LazyBlock:
        number = int(token)
        kept = self._parent_token(number)

        def read(start: int, stop: int) -> RowBlock | None:
            key = (number, start, stop)
            with self._lock:
                if key not in self._parts:
                    part = self.parent.open(copied(kept)).part(start, stop)
                    self._parts[key] = part and RowBlock(
                        protected(list(part.leaves)), part.structure
                    )
                part = self._parts[key]
            return part and RowBlock([*map(unshared, part.leaves)], part.structure)

        return LazyBlock(self.parent.open(kept).rows, read)


_caches: Final[weakref.WeakSet[Cache]] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child, in which the thread that held a lock does not exist."""
    for cache in list(_caches):
        cache._lock, cache._source = threading.RLock(), None


os.register_at_fork(after_in_child=_renew_locks)
