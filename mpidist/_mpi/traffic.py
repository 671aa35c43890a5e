"""What this rank has communicated: seconds, calls and bytes."""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Any


@dataclasses.dataclass
class Traffic:
    """What a communicator was given to move, per rank.

    Attributes:
        calls: number of MPI calls, by kind.
        bytes: bytes of this rank's buffers in them, by kind.
        seconds: time spent in collectives and in waiting for other ranks.
        core: the native core's channel, which counts what goes through it by itself.
    """

    calls: dict[str, int] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(int)
    )
    bytes: dict[str, int] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(int)
    )
    seconds: float = 0.0
    core: Any = None
    _depth: int = 0
    _start: float = 0.0

    def __enter__(self) -> None:
        """Begin to count time; of nested blocks the outermost counts."""
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
        """Return the seconds, calls and bytes, with those that the core counts."""
        calls, nbytes = dict(self.calls), dict(self.bytes)
        if self.core is not None and self.core.reductions:
            calls["Allreduce"] = calls.get("Allreduce", 0) + self.core.reductions
            nbytes["Allreduce"] = nbytes.get("Allreduce", 0) + self.core.reduced
        return self.seconds + self._seconds_of_core(), calls, nbytes

    def leave_core(self) -> None:
        """Take over what the core has counted, and let go of its memory."""
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
