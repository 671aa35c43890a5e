"""The trace: a line for each collective call of a rank (``MPIDIST_TRACE``)."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Final

from mpidist._base import reporting
from mpidist._mpi.traffic import Traffic
from mpidist._timeline.observer import Event, Span

# So that a line is one write, also through a pipe (PIPE_BUF is 4,096 bytes).
_LONGEST_TEXT: Final = 1024

_logger: Final = logging.getLogger("mpidist.trace")


class Lines:
    """An observer that writes lines, of one strategy on one rank.

    They go to the handlers of the user; without any, to standard error.

    Args:
        rank: of this process.
        size: how many ranks there are.
        strategy: the number of the strategy in this process.
        begins: whether calls also have a line when they begin.
        traffic: counts the calls of MPI.
    """

    def __init__(
        self, rank: int, size: int, strategy: int, *, begins: bool, traffic: Traffic
    ) -> None:
        self._traffic = traffic
        self._counted: Counter[str] = Counter()  # until the end of the last call
        self._who = f"rank={rank}/{size}"
        if strategy > 1:
            self._who += f" strategy={strategy}"
        self._begins = begins
        if _logger.level == logging.NOTSET:
            _logger.setLevel(logging.INFO)

    def see(self, event: Event, span: Span, section: Span | None = None) -> None:
        """Write a line; that of a section's last call is about all of it."""
        if event == "work" or (event == "begin" and not self._begins):
            return
        seconds = f"seconds={span.seconds:.6f} "
        if event == "begin":
            seconds = ""
        elif section is not None:
            seconds = f"seconds={section.seconds:.6f} waited={span.seconds:.6f} "
        text = " ".join(span.text.split())
        if len(text) > _LONGEST_TEXT:
            text = f"{text[:_LONGEST_TEXT]} ..."
        raised = f"raised={span.raised} " if span.raised else ""
        line = (
            f"{self._who} call={span.number} {event} bytes={span.nbytes} "
            f"route={span.route} {self._functions(event)}{seconds}{raised}{text}"
        )
        if not _logger.hasHandlers():
            now = time.time()
            clock = time.strftime("%H:%M:%S", time.localtime(now))
            clock += f".{int(now % 1 * 1000):03d}"
            line = f"mpidist.trace {clock} {line}"
        reporting.log(_logger, logging.INFO, "%s", line)

    def _functions(self, event: Event) -> str:
        """Return which functions of MPI the call has called until now."""
        counted = Counter(self._traffic.total_mpi())
        made = counted - self._counted
        if event == "end":
            self._counted = counted
        texts = [f"{n}*{name}" if n > 1 else name for name, n in made.items()]
        return f"mpi={','.join(text.split()[0] for text in texts)} " if made else ""
