"""Writes one process's part of a timeline.

A part is a text file of JSON lines, which grows while the program runs, so that a
process that is killed leaves all but its last second. Its first line is about the
process; a line that is an object is about a strategy, and a list is an event: the
`FIELDS` of a span. The last line of a complete part is `END`.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import IO, Final

from mpidist._base import reporting
from mpidist._base.machine import boot_id
from mpidist._timeline.observer import END_OF, Span

FORMAT: Final = 1
END: Final = "end"
FIELDS: Final = (
    *("strategy", "kind", "number", "start", "end"),
    *("nbytes", "route", "raised", "text"),
)
"""Of a `Span`: what a line of an event has."""

_LONGEST_TEXT: Final = 1024
_FLUSH_SECONDS: Final = 1.0
_FLUSH_EVENTS: Final = 1000
_logger: Final = logging.getLogger("mpidist")


@dataclasses.dataclass(frozen=True)
class Process:
    """The first line of a part.

    Attributes:
        rank: of the process among those of the job.
        host: the name of its machine.
        boot: identifies the clock: the same for processes of one machine.
        epoch: the time of day, in seconds since 1970, at the clock's zero.
    """

    rank: int
    host: str
    boot: str
    epoch: float


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
        self._stopped = False
        self._lines: list[object] = []
        self._flushed = time.perf_counter()

    def open(self, rank: int) -> None:
        """Open the file, the first time that it is called.

        Raises:
            OSError: if it cannot be written.
        """
        if self._file is not None or self._stopped:
            return
        self.rank = rank
        part = part_of(self.path, rank)
        for path in (self.path, part):
            if path.exists() and not path.is_file():
                # A pipe that nobody reads would block this process, now or at its end.
                raise OSError(
                    errno.EINVAL, "expected a file, or a path where none is", str(path)
                )
        self._file = open(part, "w", encoding="utf-8")  # noqa: SIM115 - until `close`
        epoch = time.time() - time.perf_counter()
        host = socket.gethostname()
        process = Process(rank, host, boot_id() or host, round(epoch, 6))
        header = {"mpidist timeline": FORMAT, **dataclasses.asdict(process)}
        self._lines.insert(0, header)
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
        self._lines.append({"strategy": number, **about})

    def begins(self, span: Span) -> None:
        """Do nothing: an event is recorded at its end."""

    def waits(self, span: Span) -> None:
        """Record and write a wait: it may never end."""
        self.has_worked(span)
        self.flush()

    def ends(self, span: Span, section: Span | None) -> None:
        """Record a section, and the call with which it ends."""
        if section is not None:
            self.has_worked(section)
        self.has_worked(span)

    def has_worked(self, span: Span) -> None:
        """Record a span; write those that there are now and then."""
        if self._stopped:
            return
        text = span.text[:_LONGEST_TEXT]
        if span.kind == "section":
            text = text.removeprefix(END_OF)
        times = round(span.start, 7), round(span.end, 7)
        how = span.nbytes, span.route, span.raised, text
        self._lines.append((span.strategy, span.kind, span.number, *times, *how))
        late = span.end - self._flushed > _FLUSH_SECONDS
        if late or len(self._lines) >= _FLUSH_EVENTS or span.raised:
            self.flush()

    def flush(self) -> None:
        """Write what was recorded. A disk that is full ends the recording."""
        if os.getpid() != self._process_id:
            return
        self._flushed = time.perf_counter()
        if self._file is None:
            return
        lines, self._lines = self._lines, []
        try:
            self._file.writelines(f"{json.dumps(line)}\n" for line in lines)
            self._file.flush()
        except OSError as error:  # what was written can still be read
            self._stop()
            reporting.log(
                _logger,
                logging.WARNING,
                "mpidist.timeline: rank %d cannot write %s: %s; it records no more",
                self.rank,
                part_of(self.path, self.rank),
                error.strerror or error,
            )

    def close(self) -> None:
        """Write the rest, and that it is complete."""
        if self._file is not None and os.getpid() == self._process_id:
            self._lines.append(END)
            self.flush()
            self._stop()

    def _stop(self) -> None:
        file, self._file = self._file, None
        self._lines, self._stopped = [], True
        if file is not None:
            try:
                file.close()
            except OSError:
                return
