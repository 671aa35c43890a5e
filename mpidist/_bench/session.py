"""What the benchmarks of one run share: ranks, a strategy, and the rows they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

import mpidist
from mpidist._bench.aims import aim_of
from mpidist._bench.job import Job, WrongResultError
from mpidist._bench.table import Row
from mpidist._bench.timing import Call, Effort, Timing, measure
from mpidist._bench.units import show_size

_SPARE: Final = 0.8  # of the memory that is free, this much may be used
_PERIOD: Final = 13  # of the numbers: small integers, whose sums are exact
_TILE: Final = 10_000  # periods are made at once


class Session:
    """One run of benchmarks.

    Attributes:
        job: the ranks, with ``comm`` and ``mpi`` for code by hand.
        strategy: with all defaults, on host memory.
        sizes: in bytes, that were asked for; None: those of each benchmark.
        effort: how long to measure.
        rows: that were made.
        notes: sentences that the reader of the rows has to know.
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
        """Return the context of the replica function that runs.

        Raises:
            RuntimeError: outside of a replica function.
        """
        context: mpidist.ReplicaContext | None = mpidist.get_replica_context()
        if context is None:
            raise RuntimeError("Session.context: only inside `strategy.run`")
        return context

    def numbers(self, count: int) -> Any:
        """Return float32 numbers that differ between ranks; their sums are exact."""
        return _cycle(count, self.job.rank + 1)

    def total(self, count: int) -> Any:
        """Return the sum of `numbers` over all ranks, made without communication."""
        return _cycle(count, self.job.size * (self.job.size + 1) // 2)

    def numbers_of_all(self, count: int) -> Any:
        """Return the `numbers` of all ranks, one after the other."""
        return np.concatenate([_cycle(count, k + 1) for k in range(self.job.size)])

    def check(self, work: str, **right: bool) -> None:
        """Raise on all ranks if a result was wrong on any of them. Collective.

        Args:
            work: what was done.
            **right: who did it, and whether its result is right on this rank.

        Raises:
            WrongResultError: naming who, and the ranks.
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
        """Time calls in turn; return the timing of each. Collective.

        Args:
            *calls: ways to do the same work.
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
            raw: the time of the code by hand.
            ours: the time of mpidist.
            work: what was done, if the name does not say it.
            nbytes: what each rank put in.
            aim: the kind of work whose aim holds, if not ``bench``.
        """
        job = self.job
        found = aim_of(aim or bench, nbytes or 0, job.size, job.nodes, self.cores)
        self.rows.append(Row(bench, work or bench, nbytes, raw, ours, found))

    def note(self, text: str) -> None:
        """Keep a sentence for the reader, once."""
        if text not in self.notes:
            self.notes.append(text)

    def has_room(self, work: str, nbytes: int, copies: int) -> bool:
        """Return whether to measure work on so many bytes; note it if not. Collective.

        Args:
            work: what is done.
            nbytes: what each rank puts in.
            copies: how many times as many bytes each rank needs.
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
            f"{work} was left out: it takes {show_size(needed)} on each rank, which "
            "are not free."
        )
        return False

    def close(self) -> None:
        """Close the strategy. Collective."""
        self.strategy.close()


def _cycle(count: int, factor: int) -> Any:
    """Return ``count`` numbers 0, 1, ... 12, 0, 1, ... times a factor, in float32."""
    once = np.arange(_PERIOD, dtype=np.float32) * np.float32(factor)
    return np.resize(np.tile(once, min(_TILE, -(-count // _PERIOD))), count)


def _free_memory() -> int | None:
    """Return the bytes of memory that programs can still have; None if unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
