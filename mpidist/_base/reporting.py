"""What the user is told, written by a thread: no report may block a wait.

A rank that waits for others tells the user so. The pipe behind standard error may be
full, because nobody reads it, and a logging handler of the user may block, raise, or
make a collective call. If the rank itself wrote, its deadline would never come, and the
ranks that wait for it would wait on. So one daemon thread writes all reports of a
process. Whoever reports waits for that, so that lines keep their order, but not for
long, and not at all while the thread is stuck in an earlier report.

Rejected: non-blocking writes (a handler is the user's code).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import queue
import select
import sys
import threading
import traceback
from collections.abc import Callable
from typing import IO, Final, TypeAlias

from mpidist._base import threads

_WRITE_SECONDS: Final = 1.0
_MOST_PENDING: Final = 10_000  # while the thread is stuck; later ones are lost
_logger: Final = logging.getLogger("mpidist")

_Job: TypeAlias = tuple[Callable[[], object], threading.Event]
"""What writes a report, and what is set when it is written."""


class _Writer:
    """The thread, which is started by the first report."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        # Of the last one that this process did not wait for.
        self.late: threading.Event | None = None
        self.thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            if self.thread is None:
                self.thread = threads.start_thread("reports", self._work)

    def _work(self) -> None:
        while True:
            write, done = self.jobs.get()
            try:
                write()
            except BaseException:  # a handler's; SystemExit would end the thread
                with contextlib.suppress(BaseException):
                    write_stderr(traceback.format_exc())
            done.set()


_writer = _Writer()


def _forget() -> None:
    global _writer
    _writer = _Writer()  # a forked child has no such thread


os.register_at_fork(after_in_child=_forget)


def start() -> None:
    """Start the thread; from Python 3.12 on, none can be started at exit."""
    _writer.start()


def is_reporting() -> bool:
    """Return whether this thread is the one that writes reports."""
    return threading.current_thread() is _writer.thread


def is_stuck() -> bool:
    """Return whether a report is still being written that nobody waits for any more."""
    late = _writer.late
    if late is not None and late.is_set():
        late = _writer.late = None
    return late is not None


def write(write: Callable[[], object], seconds: float = _WRITE_SECONDS) -> None:
    """Call a function that writes, in the thread for reports. Not collective.

    Args:
        write: what it raises is printed.
        seconds: how long this thread waits for its end.
    """
    if is_reporting():
        write()
        return
    stuck = is_stuck()
    if stuck and _writer.jobs.qsize() >= _MOST_PENDING:
        return
    _writer.start()
    done = threading.Event()
    _writer.jobs.put((write, done))
    if stuck or not done.wait(seconds):
        _writer.late = done


def say(text: str) -> None:
    """Write a line to standard error, in the thread for reports."""
    write(lambda: write_stderr(f"{text}\n"))


def write_stderr(text: str) -> None:
    """Write to standard error, in this thread, past the buffer of Python.

    A thread that is stuck in the buffer has its lock, and Python flushes it at the end.
    If the program has closed it, or replaced it by something that raises, the text goes
    where the process began to write.
    """
    for stream in (sys.stderr, sys.__stderr__, sys.__stdout__):
        if stream is not None:
            with contextlib.suppress(Exception):
                _write_to(stream, text)
                return


def _write_to(stream: IO[str], text: str) -> None:
    if stream is not sys.__stderr__ and stream is not sys.__stdout__:  # the program's
        stream.write(text)
        stream.flush()
        return
    file = stream.fileno()
    data = text.encode(stream.encoding, "backslashreplace")
    while data:
        select.select([], [file], [])  # it may have been made non-blocking
        data = data[os.write(file, data) :]


def flush_streams() -> None:
    """Flush what Python holds of the program's output, as far as it can be flushed.

    At the end of the process. What is written then does not stay in its memory, where
    torch.distributed's hook for exceptions has others write.
    """
    if isinstance(sys.stderr, io.StringIO):
        sys.stderr = sys.__stderr__ or sys.stderr
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, None, or the program's own
            stream.flush()


def warn(text: str) -> None:
    """Warn the user, by the logger "mpidist"."""
    log(_logger, logging.WARNING, "%s", text)


def log(logger: logging.Logger, level: int, message: str, *args: object) -> None:
    """As ``logger.log``, in the thread for reports.

    If there is no handler, or one raises, the message goes to standard error.
    """

    def write_record() -> None:
        try:
            if logger.hasHandlers():
                logger.log(level, message, *args)
                return
        except BaseException:
            write_stderr(traceback.format_exc())
        write_stderr(f"{message % args}\n")

    if logger.isEnabledFor(level):
        write(write_record)
