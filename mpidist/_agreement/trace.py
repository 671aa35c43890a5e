"""The trace: each collective call of a rank, as a line or in a timeline.

Lines are asked for by ``MPIDIST_TRACE``, a timeline by ``MPIDIST_TIMELINE`` or
`mpidist.timeline`. A rank that is traced has a `TracedGuard` and `TracedCollectives`,
which are made instead of the plain ones when the strategy is made. Without the trace a
call has no additional test.

A line is about a *call*, from its begin on this rank until it returns, with the wait
for the others. The code that knows its bytes and its route opens it (`Trace.call`); the
guard names it, by the text that its own messages have. What calls do inside, such as
the header of a broadcast, has no line. A *section*, such as `run`, has calls inside:
these have lines of their own.

Rejected: tests in the calls themselves (they cost time also without a trace); methods
set on instances (mypy does not see them, and they make cycles, so that strategies are
collected later).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Final

from mpidist._base import reporting, threads
from mpidist._timeline.recorder import Event, Kind, Recorder

NO_ROUTE: Final = "agreement"
"""The route of calls that are a header and nothing else."""

SECTION: Final = "section"
"""The route of sections."""

END_OF: Final = "the end of "
"""What the text of a section's last call begins with."""

# So that a line is one write, also through a pipe (PIPE_BUF is 4,096 bytes).
_LONGEST_TEXT: Final = 1024

_logger: Final = logging.getLogger("mpidist.trace")
_made = threads.ReplicaLocal(lambda: itertools.count(1))


@dataclasses.dataclass(eq=False)
class Record:
    """A call in progress.

    Attributes:
        nbytes: of this rank's buffers.
        route: how they move.
        text: of the call; "" before it is known.
        number: of the call, as in the messages of the guard.
        start: when this rank came to it.
        section: the one that it ends.
        is_message: whether it is a message, which is part of a call of the guard.
        raised: the name of the exception that it ended with. Not the exception, since
            the frames of its traceback refer to the record.
    """

    nbytes: int
    route: str
    text: str = ""
    number: int = 0
    start: float = dataclasses.field(default_factory=time.perf_counter)
    section: Section | None = None
    is_message: bool = False
    raised: str = ""

    @property
    def seconds(self) -> float:
        """How long it has taken until now."""
        return time.perf_counter() - self.start

    def ends_with(self, error: BaseException | None) -> None:
        """Set the exception that the call ends with, if any."""
        self.raised = "" if error is None else type(error).__name__


@dataclasses.dataclass(eq=False)
class Section:
    """A part of the program that has calls inside.

    Attributes:
        key: identifies its end.
        start: when this rank entered it.
    """

    key: object
    start: float = dataclasses.field(default_factory=time.perf_counter)


@dataclasses.dataclass(frozen=True)
class TraceOptions:
    """What is traced, and where it goes.

    Attributes:
        lines: 1: a line for each call; 2: also when it begins; 0: none.
        recorder: of the timeline; None: there is none.
    """

    lines: int = 0
    recorder: Recorder | None = None


class Trace:
    """Writes the lines of one strategy on one rank, and records its timeline.

    Args:
        rank: of this process.
        size: how many ranks there are.
        identity: of the strategy; the same on all its ranks.
        options: where it goes.
        stall_seconds: the length of a wait after which it has a line.

    Attributes:
        recorder: of the timeline, if there is one.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        identity: str,
        options: TraceOptions,
        *,
        stall_seconds: float,
    ) -> None:
        number = next(_made.get())
        self._who = f"rank={rank}/{size}"
        if number > 1:
            self._who += f" strategy={number}"
        self._lines = options.lines > 0
        self._begins = options.lines > 1
        self.recorder = options.recorder
        self._recorded = 0  # the number of this strategy in the timeline
        if self.recorder is not None:
            self._recorded = self.recorder.add_strategy(identity, rank, size)
        self._stall = stall_seconds
        self._open: Record | None = None
        self._sections: list[Section] = []
        self._waited = 0.0
        self._reported = False
        if self._lines:
            _prepare_logger()

    @contextlib.contextmanager
    def call(
        self, nbytes: int, route: str, text: str = "", number: int = 0
    ) -> Iterator[Record]:
        """Trace the block as a call, unless it is part of another call.

        Args:
            nbytes: of this rank's buffers.
            route: how they move.
            text: of the call; "": the guard will set it (`name`).
            number: of the call, with a text.
        """
        if self._open is not None:
            yield self._open
            return
        record = self._open = Record(nbytes, route)
        if text:
            record.is_message = True
            self.name(text, number)
        try:
            yield record
        except BaseException as error:
            record.ends_with(error)
            raise
        finally:
            self._open = None
            if record.text:  # else the ranks have not met
                self._end(record)

    def name(self, text: str, number: int) -> None:
        """Set the text and number of the call in progress, if they are not set yet."""
        record = self._open
        if record is None or record.text:
            return
        record.text, record.number = text, number
        if self._begins:
            self._write("begin", record)

    @contextlib.contextmanager
    def section(self, key: object, text: str, number: int) -> Iterator[None]:
        """Trace the calls inside the block, also if it is part of a call.

        Args:
            key: the argument of `ends`.
            text: of its end.
            number: of the first call that may be inside.
        """
        outer, self._open = self._open, None
        section = Section(key)
        if self._begins:
            begin = text.removeprefix(END_OF)
            self._write("begin", Record(0, SECTION, begin, number))
        self._sections.append(section)
        try:
            yield
        finally:
            self._sections.pop()
            self._open = outer

    def ends(self, key: object) -> Section | None:
        """Return the innermost section, if it is the one with this key."""
        if self._sections and self._sections[-1].key is key:
            return self._sections[-1]
        return None

    @contextlib.contextmanager
    def whole(self, text: str, number: Callable[[], int]) -> Iterator[None]:
        """Trace a section that does not end with a call of its own.

        Args:
            text: of the line.
            number: returns the number of the last call.
        """
        record = Record(0, SECTION, text)
        try:
            with self.section(record, text, number() + 1):
                yield
        except BaseException as error:
            record.ends_with(error)
            raise
        finally:
            record.number = number()
            self._end(record)

    @contextlib.contextmanager
    def span(self, text: str, number: int) -> Iterator[None]:
        """Record the block in the timeline, as a section without a line.

        Args:
            text: what it is.
            number: of the first call that may be inside.
        """
        record = Record(0, SECTION, text, number)
        try:
            yield
        except BaseException as error:
            record.ends_with(error)
            raise
        finally:
            if self.recorder is not None:
                end = time.perf_counter()
                self._record("section", record, record.start, end)

    def look(self, what: str, waited: float, number: int) -> None:
        """Trace a wait, once, if it is long.

        Args:
            what: this rank waits for.
            waited: for so many seconds, until now.
            number: of the call, if none is in progress.
        """
        if waited < self._waited:  # another wait than last time
            self._reported = False
        self._waited = waited
        if self._reported or waited < self._stall:
            return
        self._reported = True
        record = Record(0, NO_ROUTE, what, number)
        if self._open is not None:  # the wait may be part of it
            record.nbytes, record.route = self._open.nbytes, self._open.route
            record.number = self._open.number or number
        self._write("waits", record, f"seconds={waited:.6f} ")
        if self.recorder is not None:
            now = time.perf_counter()
            self._record("waits", record, now - waited, now)
            self.recorder.flush()  # it may never end

    def _end(self, record: Record) -> None:
        end = time.perf_counter()
        seconds = end - record.start
        if record.section is None:
            self._write("end", record, f"seconds={seconds:.6f} ")
        else:
            whole = end - record.section.start
            self._write("end", record, f"seconds={whole:.6f} waited={seconds:.6f} ")
        if self.recorder is not None:
            if record.section is not None:
                self._record("section", record, record.section.start, end)
            self._record(_kind_of(record), record, record.start, end)

    def _record(self, kind: Kind, record: Record, start: float, end: float) -> None:
        text = record.text[:_LONGEST_TEXT]
        if kind == "section":
            text = text.removeprefix(END_OF)
        assert self.recorder is not None
        self.recorder.add(
            Event(
                self._recorded,
                kind,
                record.number,
                round(start, 7),
                round(end, 7),
                record.nbytes,
                record.route,
                record.raised,
                text,
            )
        )

    def _write(self, event: str, record: Record, seconds: str = "") -> None:
        if not self._lines:
            return
        text = " ".join(record.text.split())
        if len(text) > _LONGEST_TEXT:
            text = f"{text[:_LONGEST_TEXT]} ..."
        raised = f"raised={record.raised} " if record.raised else ""
        reporting.log(
            _logger,
            logging.INFO,
            "%s call=%d %s bytes=%d route=%s %s%s%s",
            self._who,
            record.number,
            event,
            record.nbytes,
            record.route,
            seconds,
            raised,
            text,
        )


def _kind_of(record: Record) -> Kind:
    if record.section is not None:
        return "end of section"
    if record.route == SECTION:
        return "section"
    return "message" if record.is_message else "call"


class _StderrHandler(logging.Handler):
    """Writes to the current stderr, if there is no other handler."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(
            logging.Formatter(
                "mpidist.trace %(asctime)s.%(msecs)03d %(message)s", "%H:%M:%S"
            )
        )

    def createLock(self) -> None:  # noqa: N802 - of logging
        """Have none: one thread writes, and may be stuck when Python ends."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line in one write; nothing if the user has a handler."""
        if not _is_heard(self):
            reporting.write_stderr(f"{self.format(record)}\n")


def _is_heard(but: logging.Handler) -> bool:
    """Whether another handler gets the lines: of this logger or of a parent."""
    logger: logging.Logger | None = _logger
    while logger is not None:
        if any(handler is not but for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


_stderr: Final = _StderrHandler()


def _prepare_logger() -> None:
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    if _stderr not in _logger.handlers:
        _logger.addHandler(_stderr)
