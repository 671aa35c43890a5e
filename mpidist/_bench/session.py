"""What the benchmarks of one run share: ranks, a strategy, and rows of results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

import mpidist
from mpidist._base.types import HostArray
from mpidist._bench.aims import aim_of
from mpidist._bench.job import Job, WrongResultError
from mpidist._bench.table import Row
from mpidist._bench.timing import Call, Effort, Timing, measure
from mpidist._bench.units import show_size

_SPARE: Final = 0.8  # the share of free memory that may be used
_PERIOD: Final = 13  # the numbers repeat: small integers, whose sums are exact
_TILE: Final = 10_000  # periods that are made at once


class Session:
    """One run of benchmarks.

    Attributes:
        job: the ranks, with ``comm`` and ``mpi`` for hand-written code.
        strategy: a strategy with all defaults, on host memory.
        sizes: the requested sizes in bytes; None: the default of each benchmark.
        effort: how long to measure.
        rows: the results so far.
        notes: remarks for the reader of the rows.
    """

    def __init__(self, job: Job, sizes: Sequence[int] | None, effort: Effort) -> None:
        """Make the strategy. Collective."""
        self.job = job
        self.strategy = mpidist.MPIStrategy(device="cpu")
        self.sizes = sizes
        self.effort = effort
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.cores = job.cores()

    def context(self) -> mpidist.ReplicaContext:
        """Return the context of the running replica function.

        Raises:
            RuntimeError: if no replica function is running.
        """
        context: mpidist.ReplicaContext | None = mpidist.get_replica_context()
        if context is None:
            raise RuntimeError("Session.context: call it inside `strategy.run`")
        return context

    def numbers(self, count: int) -> HostArray:
        """Return float32 numbers that differ between ranks; their sums are exact."""
        return _cycle(count, self.job.rank + 1)

    def total(self, count: int) -> HostArray:
        """Return the sum of `numbers` over all ranks, without communicating."""
        return _cycle(count, self.job.size * (self.job.size + 1) // 2)

    def numbers_of_all(self, count: int) -> HostArray:
        """Return the `numbers` of all ranks, in rank order."""
        return np.concatenate([_cycle(count, k + 1) for k in range(self.job.size)])

    def check(self, work: str, **right: bool) -> None:
        """Raise on all ranks if a result was wrong on any of them. Collective.

        Args:
            work: what was done.
            **right: for each implementation, whether its result is right here.

        Raises:
            WrongResultError: if a result is wrong; it names the implementation and
                the ranks.
        """
        everywhere = self.job.comm.allgather(right)
        for name in right:
            wrong = [k for k, one in enumerate(everywhere) if not one[name]]
            if wrong:
                raise WrongResultError(
                    f"{work}: {name} gave a wrong result on rank "
                    f"{', '.join(map(str, wrong))}; nothing was timed. Please report "
                    "this, with the output of `mpidist info`"
                )

    def measure(self, *calls: Call, times: float = 1.0) -> list[Timing]:
        """Time calls alternately; return the timing of each. Collective.

        Args:
            *calls: implementations of the same work.
            times: how many times as long as usual to measure.
        """
        seconds = times * self.effort.seconds
        effort = dataclasses.replace(self.effort, seconds=seconds)
        return measure(self.job, calls, effort)

    def add(
        self,
        bench: str,
        raw: Timing,
        ours: Timing,
        *,
        work: str | None = None,
        nbytes: int | None = None,
        aim: str | None = None,
    ) -> None:
        """Add a row.

        Args:
            bench: the name of the benchmark.
            raw: the time of the hand-written code.
            ours: the time of mpidist.
            work: what was done; None: ``bench``.
            nbytes: the bytes that each rank contributes.
            aim: the kind of work whose aim applies; None: ``bench``.
        """
        job = self.job
        found = aim_of(aim or bench, nbytes or 0, job.size, job.nodes, self.cores)
        self.rows.append(Row(bench, work or bench, nbytes, raw, ours, found))

    def note(self, text: str) -> None:
        """Add a remark for the reader, once."""
        if text not in self.notes:
            self.notes.append(text)

    def has_room(self, work: str, nbytes: int, copies: int) -> bool:
        """Return whether there is memory for the work; note it if not. Collective.

        Args:
            work: what is done.
            nbytes: the bytes that each rank contributes.
            copies: how many times ``nbytes`` each rank needs.
        """
        most, free = self.effort.most_bytes, _free_memory()
        if most is not None and nbytes > most:
            self.note(f"{work} was left out: it is too large for a quick run.")
            return False
        needed = copies * nbytes
        fits = free is None or needed * self.job.local_size <= _SPARE * free
        if self.job.everywhere(fits):
            return True
        self.note(
            f"{work} was left out: it takes {show_size(needed)} on each rank, and "
            "there is less free memory."
        )
        return False

    def close(self) -> None:
        """Close the strategy. Collective."""
        self.strategy.close()


def _cycle(count: int, factor: int) -> HostArray:
    """Return ``count`` numbers 0, 1, ... 12, 0, 1, ... times a factor, in float32."""
    once = np.arange(_PERIOD, dtype=np.float32) * np.float32(factor)
    return np.resize(np.tile(once, min(_TILE, -(-count // _PERIOD))), count)


def _free_memory() -> int | None:
    """Return the bytes of memory that are available; None if unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
