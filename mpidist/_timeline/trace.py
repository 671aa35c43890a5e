"""The trace: a line for each collective call of a rank (``MPIDIST_TRACE``)."""

from __future__ import annotations

import logging
from typing import Final

from mpidist._base import reporting
from mpidist._timeline.observer import Span

# So that a line is one write, also through a pipe (PIPE_BUF is 4,096 bytes).
_LONGEST_TEXT: Final = 1024

_logger: Final = logging.getLogger("mpidist.trace")


class Lines:
    """An observer that writes lines, of one strategy on one rank.

    Args:
        rank: of this process.
        size: how many ranks there are.
        strategy: the number of the strategy in this process.
        begins: whether calls also have a line when they begin.
    """

    def __init__(self, rank: int, size: int, strategy: int, *, begins: bool) -> None:
        self._who = f"rank={rank}/{size}"
        if strategy > 1:
            self._who += f" strategy={strategy}"
        self._begins = begins
        if _logger.level == logging.NOTSET:
            _logger.setLevel(logging.INFO)
        if _stderr not in _logger.handlers:
            _logger.addHandler(_stderr)

    def begins(self, span: Span) -> None:
        """Write a line, if lines of begins are wanted."""
        if self._begins:
            self._write("begin", span)

    def waits(self, span: Span) -> None:
        """Write a line."""
        self._write("waits", span, f"seconds={span.seconds:.6f} ")

    def ends(self, span: Span, section: Span | None) -> None:
        """Write a line; that of a section's last call is about all of it."""
        seconds = f"seconds={span.seconds:.6f} "
        if section is not None:
            seconds = f"seconds={section.seconds:.6f} waited={span.seconds:.6f} "
        self._write("end", span, seconds)

    def has_worked(self, span: Span) -> None:
        """Do nothing: lines are about calls."""

    def _write(self, event: str, span: Span, seconds: str = "") -> None:
        text = " ".join(span.text.split())
        if len(text) > _LONGEST_TEXT:
            text = f"{text[:_LONGEST_TEXT]} ..."
        raised = f"raised={span.raised} " if span.raised else ""
        reporting.log(
            _logger,
            logging.INFO,
            "%s call=%d %s bytes=%d route=%s %s%s%s",
            self._who,
            span.number,
            event,
            span.nbytes,
            span.route,
            seconds,
            raised,
            text,
        )


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

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a line without a lock, which `logging` needs from Python 3.13 on."""
        kept = bool(self.filter(record))
        if kept:
            self.emit(record)
        return kept

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
