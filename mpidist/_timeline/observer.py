"""What an observer of a strategy's calls is told, and who tells it.

An `Observer` is told when a call of this rank begins and ends, and when it waits long.
There are two: `trace.Lines` (``MPIDIST_TRACE``) and `recorder.Recorder` (timelines).
`Observers` tells them. A strategy without an observer has no `Observers`.

Methods say themselves how they are observed: `observed` marks them with a context in
which they then run, and changes nothing else, so a strategy without an observer pays
nothing. `Observers.observing` makes the class whose marked methods run in their
contexts: the guard, the collectives and the messages of an observed strategy are of
such classes.

A call is observed from its begin on this rank until it returns, with the wait for the
others. The code that knows its bytes and its route opens it (`Observers.call`); the
guard names it, by the text that its own messages have. What a call does inside, such as
the header of a broadcast, is part of it. A *section*, such as `run`, has calls inside,
which are observed by themselves, and ends with a call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, Protocol, TypeVar

NO_ROUTE: Final = "agreement"
"""The route of calls that are a header and nothing else."""

SECTION: Final = "section"
"""The route of sections."""

END_OF: Final = "the end of "
"""What the text of a section's last call begins with."""

NOTHING: Final[AbstractContextManager[Any]] = contextlib.nullcontext()
"""The context of a method that is not a call of its own."""

Kind = Literal[
    "call", "section", "end of section", "message", "waits", "waits for begun"
]

Event = Literal["begin", "waits", "end", "work"]

_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C")


@dataclasses.dataclass(slots=True)
class Span:
    """What a rank did for some time.

    Attributes:
        rank: of the process among those of the job; 0 until timelines are merged.
        strategy: its number in the process; in a merged timeline, on all its ranks.
        kind: a "section" has others inside, and ends with a call, its "end of section".
            A "message" is between rank 0 and the others, within a call. "waits" is the
            begin of a call that has not ended since. "waits for begun" is the program's
            own wait for calls that were begun.
        number: of the call, the same on all ranks of the strategy.
        start: in seconds of `time.perf_counter`, or from the begin of the timeline.
        end: as ``start``.
        nbytes: of this rank's buffers.
        route: how they move.
        raised: the name of the exception that it ended with; "" if none. (Not the
            exception, since the frames of its traceback refer to the span.)
        text: the call, as in the messages of mpidist; "" before it is known.
        waited: seconds, from its start, until the last rank came to the call.
        waited_for: the rank of the process that came last; -1: this one, or none.
        begun: whether the thread of calls that were begun did it, beside the program.
    """

    rank: int
    strategy: int
    kind: Kind
    number: int
    start: float
    end: float
    nbytes: int
    route: str
    raised: str = ""
    text: str = ""
    waited: float = 0.0
    waited_for: int = -1
    begun: bool = False

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class Observer(Protocol):
    """The interface that a trace or timeline implements, called in each thread."""

    def see(self, event: Event, span: Span, section: Span | None = None) -> None:
        """Something has begun, waits, or has ended.

        Args:
            event: a call has got its name, or a section has begun ("begin"); this rank
                has waited long, until now, once for each wait ("waits"); a call or a
                section has ended ("end"); or this rank has done a part of its own work,
                such as reading input ("work").
            span: what it is about.
            section: the section that ends with this call; None: none does.
        """


Opens = Callable[..., AbstractContextManager[Any]]
"""Gets the `Observers` and a method's arguments; returns the context of the method."""

Returns = Callable[[Any, Any], None]
"""Gets what the context gave (a `Span`, or None), and the result of the method."""


def observed(opens: Opens, returns: Returns | None = None) -> Callable[[_F], _F]:
    """Mark a method: observers run it in a context.

    Args:
        opens: makes the context.
        returns: called in the context with the result.
    """

    def mark(function: _F) -> _F:
        function._observed = opens, returns  # type: ignore[attr-defined]
        return function

    return mark


class _Here(threading.local):
    """The call in progress in this thread; asynchronous calls have a thread of theirs.

    Attributes:
        span: of the call; None: there is none.
        begun: whether it is the thread of calls that were begun.
    """

    span: Span | None = None
    begun: bool = False


class Observers:
    """Tells observers of the calls of one strategy on this rank.

    Args:
        observers: who is told.
        strategy: the number of the strategy in this process.
    """

    def __init__(self, observers: Sequence[Observer], strategy: int) -> None:
        self._observers = observers
        self._strategy = strategy
        self._here: _Here = _Here()

    def observing(self, plain: type[_C]) -> type[_C]:
        """Return a class whose marked methods are observed."""
        marked = inspect.getmembers(plain, lambda x: hasattr(x, "_observed"))
        methods = {name: self._observing(method) for name, method in marked}
        return type(f"Observed{plain.__name__}", (plain,), methods)

    def _observing(self, function: _F) -> _F:
        opens, returns = function._observed  # type: ignore[attr-defined]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with opens(self, *args, **kwargs) as span:
                result = function(*args, **kwargs)
                if returns is not None:
                    returns(span, result)
                return result

        return call  # type: ignore[return-value]  # the same type

    @contextlib.contextmanager
    def call(
        self,
        nbytes: int,
        route: str,
        text: str = "",
        number: int = 0,
        *,
        section: Span | None = None,
    ) -> Iterator[Span]:
        """Observe the block as a call, unless it is part of another call.

        Args:
            nbytes: of this rank's buffers.
            route: how they move.
            text: of a message; "": a call that the guard will name (`name`).
            number: of the call, with a text.
            section: that ends with this call.
        """
        if self._here.span is not None:
            yield self._here.span
            return
        kind: Kind = "message" if text else "call"
        if section is not None:
            kind = "end of section"
        span = self._here.span = self._span(kind, route)
        span.nbytes = nbytes
        if text:
            self.name(text, number)
        with self._told("end", span, section):
            yield span

    def name(self, text: str, number: int) -> None:
        """Set the text and number of the call in progress, if they are not set yet."""
        span = self._here.span
        if span is not None and not span.text:
            span.text, span.number = text, number
            self._tell("begin", span)

    @contextlib.contextmanager
    def header(
        self, text: str, number: int, section: Span | None = None
    ) -> Iterator[Span]:
        """Observe the block as a header: of the call in progress, or a call itself.

        Args:
            text: of the call.
            number: of the call.
            section: that ends with it; None: none does.
        """
        route = NO_ROUTE if section is None else SECTION
        with self.call(0, route, section=section) as span:
            self.name(text, number)
            yield span

    @contextlib.contextmanager
    def section(self, text: str, number: int) -> Iterator[Span]:
        """Observe the calls inside the block, also if it is part of a call.

        Args:
            text: of its end.
            number: of the first call that may be inside.
        """
        outer, self._here.span = self._here.span, None
        section = self._span("section", SECTION, text.removeprefix(END_OF), number)
        self._tell("begin", section)
        try:
            yield section
        finally:
            self._here.span = outer

    @contextlib.contextmanager
    def whole(self, call: str, function: object, guard: Any) -> Iterator[None]:
        """Observe a section that does not end with a call of its own.

        Args:
            call: its name.
            function: the user's, which it runs.
            guard: its ``sequence`` is the number of the last call.
        """
        name = getattr(function, "__qualname__", type(function).__qualname__)
        text = f"{END_OF}{call}({name})"
        with self.section(text, guard.sequence + 1) as span, self._told("end", span):
            try:
                yield
            finally:
                span.text, span.number = text, guard.sequence

    def work(
        self, text: str, number: int = 0, kind: Kind = "section"
    ) -> AbstractContextManager[Any]:
        """Return a context that is observed as a part of this rank's own work.

        Args:
            text: what it is.
            number: of the first call that may be inside.
            kind: of its span; or "waits for begun".
        """
        route = SECTION if kind == "section" else NO_ROUTE
        return self._told("work", self._span(kind, route, text, number))

    def makes_begun_calls(self) -> None:
        """Note that this thread makes the calls that were begun."""
        self._here.begun = True

    def waits(self, what: str, waited: float, number: int) -> None:
        """Tell of a wait that is long.

        Args:
            what: the call that this rank waits for.
            waited: for so many seconds, until now.
            number: of the call, if none is in progress.
        """
        span = self._span("waits", NO_ROUTE, what, number)
        span.start -= waited
        if (call := self._here.span) is not None:  # the wait may be part of it
            span.nbytes, span.route = call.nbytes, call.route
            span.number = call.number or number
        self._tell("waits", span)

    def _span(self, kind: Kind, route: str, text: str = "", number: int = 0) -> Span:
        now, begun = time.perf_counter(), self._here.begun
        return Span(
            *(0, self._strategy, kind, number, now, now, 0, route),
            text=text,
            begun=begun,
        )

    @contextlib.contextmanager
    def _told(
        self, event: Event, span: Span, section: Span | None = None
    ) -> Iterator[Span]:
        """Set the end of a span, and the exception that it ends with; tell of it."""
        try:
            yield span
        except BaseException as error:
            span.raised = type(error).__name__
            raise
        finally:
            span.end = time.perf_counter()
            if self._here.span is span:
                self._here.span = None
            if section is not None:
                section.number, section.end = span.number, span.end
                section.raised = span.raised
            if span.text:  # else the ranks have not met
                self._tell(event, span, section)

    def _tell(self, event: Event, span: Span, section: Span | None = None) -> None:
        for observer in self._observers:
            observer.see(event, span, section)
