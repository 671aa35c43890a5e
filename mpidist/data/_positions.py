"""What iterators have in common: an end, and positions that can be restored.

The state of an iterator is a small dict for JSON. States come from checkpoints, so from
files, which anyone may have changed.
"""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Self

from mpidist._base.types import Nest
from mpidist.data._ahead import read_ahead, stop_reading
from mpidist.data._options import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from mpidist.data._rows import block_of
from mpidist.data._stages import Stage, Token

FORMAT: Final = 1
_KINDS: Final = {
    "own": "inputs from a function (`distribute_datasets_from_function`)",
    "global": "global batches (`experimental_distribute_dataset`)",
    "dataset": "a `Dataset` that is not distributed",
}
_SAME: Final = "make the same dataset"
_ALIKE: Final = {  # for which inputs it must be the same; what to write if it is not
    "input": (_KINDS, _SAME),
    "shuffle_seeds": (_KINDS, f"{_SAME}, or write `shuffle(n, seed=...)` in both"),
    "batch_size": (("global",), _SAME),
    "cardinality": (("global",), _SAME),
    "replicas": (
        ("own",),
        "restart on the same number of ranks, or use "
        "`experimental_distribute_dataset`, whose position holds on any number",
    ),
}


class OutOfRangeError(LookupError):
    """`DistributedIterator.get_next` was called at the end of the input.

    On all ranks together. It is not a StopIteration, which a generator or a ``for``
    loop around the call would take for its own end. What ``next`` raises is both.
    """


class _EndOfInputError(StopIteration, OutOfRangeError):
    """What `next` raises: a StopIteration that ``except OutOfRangeError`` catches too.

    TensorFlow's `next` raises the one in eager code and the other in a ``tf.function``.
    StopIteration comes first: ``yield from`` crashes if its ``__init__`` did not run.
    """


class Optional:
    """An element of an input, or nothing at its end."""

    __slots__ = ("_element", "_has_value", "_spec")

    def __init__(
        self,
        element: Nest = None,
        *,
        has_value: bool = False,
        spec: Callable[[], Nest] | None = None,
    ) -> None:
        self._element, self._has_value, self._spec = element, has_value, spec

    @classmethod
    def from_value(cls, value: Nest) -> Self:
        """Return one that holds ``value``, a nest of arrays and numbers."""
        return cls(value, has_value=True)

    @classmethod
    def empty(cls, element_structure: Nest) -> Self:
        """Return one without an element, whose `element_spec` is given."""
        return cls(spec=lambda: element_structure)

    def has_value(self) -> bool:
        """Return whether there is an element."""
        return self._has_value

    def get_value(self) -> Nest:
        """Return the element.

        Raises:
            ValueError: at the end of the input.
        """
        if not self._has_value:
            raise ValueError(
                "Optional.get_value: the input has ended and this holds no element; "
                "ask `has_value()` first"
            )
        return self._element

    @property
    def element_spec(self) -> Nest:
        """The nest of `ArraySpec` of an element, as that of the iterator.

        Raises:
            ValueError: if it is not known.
        """
        if self._spec:
            return self._spec()
        return block_of(self.get_value(), "element_spec").spec()

    def __repr__(self) -> str:
        return f"Optional({self._element!r})" if self._has_value else "Optional()"


class PositionedIterator(Iterator[Nest]):
    """An iterator that knows its position: what all iterators have in common.

    Attributes:
        _iteration: the number of the iteration over the dataset.
        _position: the number of elements that were returned.
        _unit: what it counts.
        _stage: what it reads: that of the dataset, with the seeds of the shuffles that
            `restore` has set.
    """

    _iteration: int
    _position: int
    _unit: str = "elements"
    _stage: Stage

    def _step(self, call: str) -> tuple[bool, Nest]:
        """Return whether there is a next element, and it. ``call``: the user's."""
        raise NotImplementedError

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Nest:
        found, element = self._step("next(iterator)")
        if not found:
            error = _EndOfInputError(self._end_text("next(iterator)"))
            error.value = None  # of `x = yield from iterator`
            raise error
        return element

    def get_next(self) -> Nest:
        """Return the next element.

        Raises:
            OutOfRangeError: the one in `mpidist.data`, at the end.
        """
        found, element = self._step("get_next")
        if not found:
            raise OutOfRangeError(self._end_text("get_next"))
        return element

    def _end_text(self, call: str) -> str:
        return f"{call}: the input has ended, after {self._position} {self._unit}"

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or nothing at the end."""
        found, element = self._step("get_next_as_optional")
        return Optional(element, has_value=found, spec=lambda: self.element_spec)

    @property
    def element_spec(self) -> Nest:
        """The nest of `mpidist.data.ArraySpec` of an element: that of the dataset."""
        return self._stage.element_spec

    def state(self) -> dict[str, Any]:
        """Return the position, as a small nest for JSON.

        It counts the elements that were returned, not those that a thread has read
        ahead, and has the seeds of shuffles that the program gave none. Pass it to
        `restore`, in this run or another.
        """
        return {
            "format": FORMAT,
            "input": "dataset",
            "iteration": self._iteration,
            "position": self._position,
            "shuffle_seeds": self._stage.shuffle_seeds(),
        }


def _is_count(x: object) -> bool:
    """Return whether ``x`` is an integer from 0 on, of 64 bits."""
    if isinstance(x, bool) or not hasattr(x, "__index__"):
        return False
    return 0 <= operator.index(x) < 2**63


_FITS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "format": lambda x: bool(x == FORMAT),
    "input": lambda x: isinstance(x, str) and x in _KINDS,
    "batch_size": lambda x: x is None or _is_count(x),
    "cardinality": lambda x: (
        _is_count(x) or x in (INFINITE_CARDINALITY, UNKNOWN_CARDINALITY)
    ),
    "sources": lambda x: isinstance(x, dict),
    "shuffle_seeds": lambda x: isinstance(x, list) and all(map(_is_count, x)),
}


def checked_state(call: str, state: object, own: dict[str, Any]) -> dict[str, Any]:
    """Return a state that an iterator whose own state is ``own`` can restore.

    Raises:
        ValueError: if it is no state, or that of another dataset.
    """
    what = f"{call}: expected the result of an iterator's `state()`, got"
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{what} {state!r:.200}")
    # Older versions have no such entry, and the seed 0.
    state = {"shuffle_seeds": [0] * len(own["shuffle_seeds"]), **state}
    for name, wanted in own.items():
        found: Any = state.get(name)
        if not _FITS.get(name, _is_count)(found):
            raise ValueError(f"{what} one in which {name!r} is {found!r:.80}")
        inputs, remedy = _ALIKE.get(name, ((), ""))
        if own["input"] not in inputs:
            continue
        if name == "shuffle_seeds":
            wanted, found = len(wanted), len(found)
        if len({wanted, found} - {None, UNKNOWN_CARDINALITY}) > 1:
            raise ValueError(
                f"{call}: the state is that of an iterator over another input: "
                f"expected {name!r} {_KINDS.get(wanted, wanted)}, as of this one, got "
                f"{_KINDS.get(found, found)}; {remedy}"
            )
    return state


# --- the iterator of a Dataset --------------------------------------------------------


class _Tokens:
    """The tokens of a stage, which go on after an element that failed.

    Attributes:
        left: those that were taken, and whose elements were not returned.
        error: what finding them raised.
    """

    def __init__(self, opened: Callable[[], Iterator[Token]]) -> None:
        self._opened = opened
        self._tokens: Iterator[Token] | None = None
        self.left: collections.deque[Token] = collections.deque()
        self.error: Exception | None = None

    def take(self) -> Iterator[Token]:
        """Yield those that are left, and then the others."""
        yield from tuple(self.left)
        while self.error is None:
            try:
                if self._tokens is None:
                    self._tokens = self._opened()
                token = next(self._tokens)
            except StopIteration:
                return
            except Exception as error:
                self.error = error
                break
            self.left.append(token)
            yield token
        raise self.error


class DatasetIterator(PositionedIterator):
    """Iterates over the elements of a `Dataset`: the result of ``iter(dataset)``.

    Its threads, if there are any, end with it. An element whose function raised an
    exception is skipped, a batch with all its rows: the next call goes on after it; to
    try it again, pass `state` to `restore`. After an exception of what finds the
    elements (a generator, a predicate, the function of `interleave`), the next call
    raises a RuntimeError, and the input has ended.
    """

    def __init__(
        self, stage: Stage, iteration: int, begun: Callable[[Stage, int], None]
    ) -> None:
        """Not for users: call ``iter(dataset)``."""
        self._stage, self._begun = stage, begun
        self._go_to(iteration, 0)

    def _go_to(self, iteration: int, position: int) -> None:
        self._iteration, self._position = iteration, position
        self._tokens: _Tokens | None = None
        self._elements: Iterator[Nest] | None = None
        self._ended = self._failed = False
        self._broken: Exception | None = None  # by what finds the elements
        self._begun(self._stage, iteration + 1)

    def _step(self, call: str) -> tuple[bool, Nest]:
        if self._ended:
            return False, None
        if self._broken:
            self._ended = True  # for a loop that ignores errors
            raise RuntimeError(
                f"{call}: the input raised a {type(self._broken).__name__} and cannot "
                "continue; make a new iterator with `iter(dataset)`"
            ) from self._broken
        tokens = self._tokens
        if tokens is None:
            at = (self._iteration,), self._position
            tokens = _Tokens(functools.partial(self._stage.tokens, *at))
            self._tokens = tokens
        if self._failed:
            self._position += 1
            tokens.left.popleft()
            self._failed = False
        try:
            if self._elements is None:
                loaded = self._stage.load(tokens.take())
                self._elements = read_ahead(loaded, self._stage.depth)
            element = next(self._elements)
        except StopIteration:
            self._ended, self._elements = True, None
            return False, None
        except Exception as error:
            elements, self._elements = self._elements, None
            if error is tokens.error:
                self._broken = error
            elif tokens.left:
                self._failed = True
                stop_reading(elements, wait=True)  # the thread takes tokens
            raise
        except BaseException:  # Ctrl-C: the element is read again
            self._elements = self._tokens = None
            raise
        tokens.left.popleft()
        self._position += 1
        return True, element

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a position: the next element is the one after it.

        Args:
            state: the result of `state` of an iterator over the same dataset. Shuffles
                without a seed get those of the state, here and in later iterators.

        Raises:
            ValueError: if it is not such a state.
        """
        state = checked_state("DatasetIterator.restore", state, self.state())
        self._stage = self._stage.with_shuffle_seeds(iter(state["shuffle_seeds"]))
        self._go_to(int(state["iteration"]), int(state["position"]))
