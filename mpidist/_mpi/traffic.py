"""What this rank has communicated: seconds, calls and bytes."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable

from mpidist import _native


def _counts() -> dict[str, int]:
    return defaultdict(int)  # a Counter is slower to write to


@dataclasses.dataclass
class Traffic:
    """What one rank has moved through a communicator.

    Attributes:
        calls: number of collectives, by the name of MPI's operation of the same
            meaning, whatever moved them.
        bytes: bytes of this rank's buffers in them, by kind.
        mpi_calls: number of calls of MPI's own functions, by name.
        seconds: time spent in collectives and in waiting for other ranks.
        core: the native core's channel, which has its own counts; None without one.
    """

    calls: dict[str, int] = dataclasses.field(default_factory=_counts)
    bytes: dict[str, int] = dataclasses.field(default_factory=_counts)
    mpi_calls: dict[str, int] = dataclasses.field(default_factory=_counts)
    seconds: float = 0.0
    core: _native.Channel | _native.Between | None = None
    mpi_calls_of_core: Callable[[], dict[str, int]] | None = None
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
        calls, nbytes, core = dict(self.calls), dict(self.bytes), self.core
        if core is not None:
            for name, count, size in (
                ("Allreduce", core.reductions, core.reduced),
                ("Allgatherv", core.gathers, core.gathered),
            ):
                if count:
                    calls[name] = calls.get(name, 0) + count
                    nbytes[name] = nbytes.get(name, 0) + size
        return self.seconds + self._seconds_of_core(), calls, nbytes

    def count_mpi(self, name: str) -> None:
        """Add one call of a function of MPI."""
        self.mpi_calls[name] += 1

    def total_mpi(self) -> dict[str, int]:
        """Return the calls of MPI's functions, with those of the core."""
        of_core = {} if self.mpi_calls_of_core is None else self.mpi_calls_of_core()
        return dict(Counter(self.mpi_calls) + Counter(of_core))  # without those of 0

    def leave_core(self) -> None:
        """Add the counts of the core, and release its memory."""
        self.seconds, calls, nbytes = self.total()
        self.mpi_calls.update(self.total_mpi())
        self.mpi_calls_of_core = None
        self.core = None
        self.calls.update(calls)
        self.bytes.update(nbytes)

    def count(self, kind: str, nbytes: int) -> None:
        """Add one collective, whatever moved these bytes of this rank's buffers."""
        self.calls[kind] += 1
        self.bytes[kind] += nbytes
