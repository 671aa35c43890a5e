"""Stages of a `Dataset`: what they have in common, and those on one parent.

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
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias, dataclass_transform

import numpy as np

from mpidist._base import nest, shuffle_seeds
from mpidist._base.fingerprint import fingerprint
from mpidist._base.types import HostArray, Nest
from mpidist.data._ahead import Ahead
from mpidist.data._options import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Options,
)
from mpidist.data._rows import (
    LazyBlock,
    RowBlock,
    block_of,
    common_spec,
    copied,
    protected,
    spec_with_rows,
    stack,
    unshared,
)

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
        """Return the tokens from an element on."""
        if self.indexed:
            return self._by_number(in_pass, start)
        return itertools.islice(self.in_order(in_pass), start, None)

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
        # Up to the position, so that what fails there fails here, on all ranks.
        skipped = 1 if position and not self.indexed else 0
        tokens = self.tokens((iteration,), position - skipped)
        if skipped and next(tokens, END) is END:
            raise too_short(position, "before")
        return self.opened(tokens)

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


# --- order and number ---------------------------------------------------------------

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
        rounds = itertools.count() if self.count is None else range(self.count)
        for number in rounds:
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


# --- functions, a cache ------------------------------------------------------------


class Map(Derived):
    """The result of a function for each element.

    Its tokens are its parent's, so the function runs for requested elements only.
    """

    function: Callable[..., Nest]
    calls: int  # at the same time; 0: no threads

    def __post_init__(self) -> None:
        self.inherit()
        if self.batch_size is not None:
            self.whole = "the `map` after `batch` (one before it works row by row)"
        self.workers = max(self.calls, self.parent.workers)

    def load(self, tokens: Iterable[Token]) -> Iterator[Nest]:
        elements = self.parent.load(tokens)
        if self.calls:
            return Ahead(functools.partial(apply, self.function), elements, self.calls)
        return (apply(self.function, element) for element in elements)

    def spec(self, *, trial: bool = False) -> Nest | None:
        return super().spec(trial=True) if trial else None

    def spec_of(self, *inner: Nest) -> Nest:
        def of_size(unknown: int) -> Nest:
            zeros = nest.map_structure(
                lambda one: np.zeros(
                    [unknown if size is None else size for size in one.shape], one.dtype
                )[()],
                inner[0],
            )
            return block_of(apply(self.function, zeros), "Dataset.map").spec()

        # Sizes that follow those that are unknown are unknown.
        return nest.map_structure(common_spec, of_size(2), of_size(3))


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

    def renew_lock(self) -> None:
        """In a forked child, in which the thread that held the lock does not exist."""
        self._lock, self._source = threading.RLock(), None

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
                    if part is not None:
                        part = RowBlock(protected(list(part.leaves)), part.structure)
                    self._parts[key] = part
                part = self._parts[key]
            return part and RowBlock([*map(unshared, part.leaves)], part.structure)

        return LazyBlock(self.parent.open(kept).rows, read)


_caches: Final[weakref.WeakSet[Cache]] = weakref.WeakSet()


def _renew_locks() -> None:
    """Replace the locks in a forked child: its parent may have held them."""
    for cache in list(_caches):
        cache.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)
