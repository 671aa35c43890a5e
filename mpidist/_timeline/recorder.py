"""Writes one process's part of a timeline.

A part is a list in the Trace Event Format (Google, 2016), an event in a line, which
grows while the program runs, so that a process that is killed leaves all but its last
second; Perfetto and Chrome show it, too. Complete events (phase X) are spans, with
times in microseconds; metadata events (phase M) are about the process, which is a rank,
and about its strategies, which are its threads. A complete part ends with `END`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import IO, Any, Final

from mpidist._base import reporting
from mpidist._base.machine import boot_id
from mpidist._timeline.observer import END_OF, Event, Span

FORMAT: Final = 3
PROCESS: Final = "process_name"
STRATEGY: Final = "thread_name"
END: Final = "end of the recording"

_LONGEST_NAME: Final = 60
_LONGEST_TEXT: Final = 1024
_MICROSECONDS: Final = 1e6
_FLUSH_SECONDS: Final = 1.0
# Viewers want the slices of a thread inside each other: calls that were begun have one.
_BEGUN: Final = 1_000_000
_FLUSH_EVENTS: Final = 1000


def event_of(span: Span) -> dict[str, Any]:
    """Return the event of a span."""
    text = " ".join(span.text.split())[:_LONGEST_TEXT]
    if span.kind == "section":
        text = text.removeprefix(END_OF)
    args: dict[str, Any] = {
        "call": span.number,
        "text": text,
        "bytes": span.nbytes,
        "route": span.route,
    }
    if span.waited_for >= 0:
        args["waited for rank"] = span.waited_for
    if span.waited:
        args["waited us"] = round(span.waited * _MICROSECONDS, 3)
    if span.raised:
        args["raised"] = span.raised
    return {
        "ph": "X",
        "name": text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}...",
        "cat": span.kind,
        "pid": span.rank,
        "tid": thread_of(span),
        "ts": round(span.start * _MICROSECONDS, 3),
        "dur": round(span.seconds * _MICROSECONDS, 3),
        "args": args,
    }


def thread_of(span: Span) -> int:
    """Return the number of the thread of a span, by which viewers group them."""
    return span.strategy + (_BEGUN if span.begun else 0)


def name_of_thread(span: Span) -> str:
    """Return the name of the thread of a span."""
    return f"strategy {span.strategy}" + (", asynchronous calls" if span.begun else "")


def span_of(event: dict[str, Any]) -> Span:
    """Return the span of an event."""
    args = event["args"]
    start = event["ts"] / _MICROSECONDS
    return Span(
        rank=event["pid"],
        strategy=event["tid"] % _BEGUN,
        kind=event["cat"],
        number=args["call"],
        start=start,
        end=start + event["dur"] / _MICROSECONDS,
        nbytes=args["bytes"],
        route=args["route"],
        raised=args.get("raised", ""),
        text=args["text"],
        waited=args.get("waited us", 0.0) / _MICROSECONDS,
        waited_for=args.get("waited for rank", -1),
        begun=event["tid"] > _BEGUN,
    )


def metadata(name: str, rank: int, strategy: int = 0, /, **args: Any) -> dict[str, Any]:
    """Return an event that is about a process, or about a strategy of it."""
    return {"ph": "M", "name": name, "pid": rank, "tid": strategy, "args": args}


def part_of(path: Path, rank: int) -> Path:
    """Return the path of a process's part of the timeline ``path``."""
    return path.with_name(f"{path.name}.rank{rank}")


class Recorder:
    """An observer that writes the part of this process; nothing in a forked child.

    Args:
        path: of the timeline.

    Attributes:
        path: of the timeline, absolute: programs change their directory.
        rank: of this process; -1 before `open`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.rank = -1
        self._file: IO[str] | None = None
        self._process_id = os.getpid()
        self._lock = threading.RLock()  # a signal's handler may make calls
        self._stopped = False
        self._events: list[dict[str, Any]] = []
        self._flushed = time.perf_counter()

    def open(self, rank: int, size: int) -> None:
        """Open the file, the first time that it is called.

        Args:
            rank: of this process among those of the job.
            size: how many processes the job has.

        Raises:
            OSError: if it cannot be written.
        """
        if self._file is not None or self._stopped:
            return
        part = part_of(self.path, rank)
        for path in (self.path, part):
            if path.exists() and not path.is_file():
                # A pipe that nobody reads would block this process, now or at its end.
                raise OSError(
                    errno.EINVAL, "expected a file, or a path where none is", str(path)
                )
        self._file = open(part, "w", encoding="utf-8")  # noqa: SIM115 - until `close`
        self.rank = rank
        self._file.write("[\n")
        host = os.uname().nodename
        self._events.insert(
            0,
            metadata(
                PROCESS,
                rank,
                name=f"rank {rank} on {host}",
                host=host,
                size=size,
                format=FORMAT,
                # Identifies the clock; and the time of day at its zero.
                boot=boot_id() or host,
                epoch=round(time.time() - time.perf_counter(), 6),
            ),
        )
        self.flush()

    def add_strategy(self, number: int, identity: str, rank: int, size: int) -> None:
        """Record that a strategy was made.

        Args:
            number: of the strategy in this process.
            identity: the same on its ranks, and of no other strategy of the job.
            rank: of this process in it.
            size: how many ranks it has.
        """
        about = {"identity": identity, "rank": rank, "size": size}
        name = f"strategy {number}"
        self._events.append(metadata(STRATEGY, 0, number, name=name, **about))

    def see(self, event: Event, span: Span, section: Span | None = None) -> None:
        """Record a span at its end, after the section that ends with it."""
        if event == "begin" or self._stopped:
            return
        new = [event_of(x) for x in (section, span) if x is not None]
        self._events.extend(new)  # at once: calls that were begun have a thread
        late = span.end - self._flushed > _FLUSH_SECONDS or event == "waits"
        if late or len(self._events) >= _FLUSH_EVENTS or span.raised:
            self.flush()

    def flush(self) -> None:
        """Write what was recorded. A disk that is full ends the recording."""
        if os.getpid() != self._process_id:
            return
        with self._lock:
            if self._file is None:
                return
            self._flushed = time.perf_counter()
            events, self._events = self._events, []
            try:
                for event in events:
                    event["pid"] = self.rank
                    self._file.write(f"{json.dumps(event)},\n")
                self._file.flush()
                return
            except OSError as failure:  # what was written can still be read
                error = failure.strerror or failure
                self._stop()
        reporting.warn(
            f"mpidist.timeline: rank {self.rank} cannot write "
            f"{part_of(self.path, self.rank)}: {error}; it records no more"
        )

    def close(self) -> None:
        """Write the rest, and that it is complete."""
        if self._file is not None and os.getpid() == self._process_id:
            self._events.append(metadata(END, self.rank))
            self.flush()
            self._stop()

    def _stop(self) -> None:
        file, self._file = self._file, None
        self._events, self._stopped = [], True
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
