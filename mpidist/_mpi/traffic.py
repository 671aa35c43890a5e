"""What this rank has communicated: seconds, calls and bytes."""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Protocol


class Counters(Protocol):
    """What the native core counts by itself."""

    @property
    def seconds(self) -> float:
        """Seconds of waiting for other ranks, and of moving bytes."""

    @property
    def reductions(self) -> int:
        """Number of all-reduces."""

    @property
    def reduced(self) -> int:
        """Bytes of this rank's buffers in them."""

    @property
    def gathers(self) -> int:
        """Number of all-gathers."""

    @property
    def gathered(self) -> int:
        """Bytes of this rank's buffers in them."""


@dataclasses.dataclass
class Traffic:
    """What one rank has moved through a communicator.

    Attributes:
        calls: number of MPI calls, by kind.
        bytes: bytes of this rank's buffers in them, by kind.
        seconds: time spent in collectives and in waiting for other ranks.
        core: the native core's channel, which has its own counts; None without one.
    """

    calls: dict[str, int] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(int)
    )
    bytes: dict[str, int] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(int)
    )
    seconds: float = 0.0
    core: Counters | None = None
    _depth: int = 0
    _start: float = 0.0

    def __enter__(self) -> None:
        """Start to count time; of nested blocks the outermost counts."""
        if not self._depth:
            self._start = time.perf_counter() - self._seconds_of_core()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        """Add the time to ``seconds``."""
        self._depth -= 1
        if not self._depth:
            now = time.perf_counter() - self._seconds_of_core()
            self.seconds += now - self._start

    def _seconds_of_core(self) -> float:
        return 0.0 if self.core is None else self.core.seconds

    def total(self) -> tuple[float, dict[str, int], dict[str, int]]:
        """Return seconds, calls and bytes, with those of the core."""
        calls, nbytes = dict(self.calls), dict(self.bytes)
        core = self.core
        if core is not None and core.reductions:
            calls["Allreduce"] = calls.get("Allreduce", 0) + core.reductions
            nbytes["Allreduce"] = nbytes.get("Allreduce", 0) + core.reduced
        if core is not None and core.gathers:
            calls["Allgatherv"] = calls.get("Allgatherv", 0) + core.gathers
            nbytes["Allgatherv"] = nbytes.get("Allgatherv", 0) + core.gathered
        return self.seconds + self._seconds_of_core(), calls, nbytes

    def leave_core(self) -> None:
        """Add the counts of the core, and release its memory."""
        self.seconds, calls, nbytes = self.total()
        self.core = None
        self.calls.update(calls)
        self.bytes.update(nbytes)

    def timed(self) -> Traffic:
        """Return a context manager whose time is added to ``seconds``."""
        return self

    def count(self, kind: str, nbytes: int) -> None:
        """Add one MPI call that moves ``nbytes`` of this rank's memory."""
        self.calls[kind] += 1
        self.bytes[kind] += nbytes
