"""How `mpidist bench` measures: samples of two calls in turn, on all ranks."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

import mpidist
from mpidist._base.types import HostArray
from mpidist._cli.facts import is_crowded
from mpidist._cli.job import Job, WrongResultError
from mpidist._cli.units import show_size
from mpidist._strategy.strategy import group_of

_KIB: Final = 2**10
_MIB: Final = 2**20
_ALL_REDUCE_SIZES: Final = (
    *(4, _KIB, 16 * _KIB, 64 * _KIB, 256 * _KIB),
    *(_MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB),
)
_ALL_GATHER_SIZES: Final = (4, _KIB, 16 * _KIB, 64 * _KIB, _MIB, 16 * _MIB)
# Between nodes larger arrays take many seconds, and show nothing new.
_GATHERED_BETWEEN_NODES: Final = (4, 64 * _KIB)
_LARGEST_BETWEEN_NODES: Final = 16 * _MIB
_MOST_CALLS: Final = 20_000  # of a sample
_SCATTERED: Final = 20  # times as long a sample, if ranks leave barriers ms apart
_NOISE: Final = 0.3  # the distance of the quartiles, as a share of the median
_SPARE: Final = 0.8  # the share of free memory that may be used
_PERIOD: Final = 13  # the numbers repeat: small integers, whose sums are exact

Call = Callable[[], Any]  # its result, of any type, is dropped


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: about how long one row of the table takes.
        most: the most samples of each call.
        fewest: the fewest samples of each call, however slow it is.
        sample_seconds: the least time of a sample.
        most_bytes: larger work is left out; None: nothing is left out.
    """

    seconds: float = 1.0
    most: int = 31
    fewest: int = 3
    sample_seconds: float = 1e-3
    most_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds for one call: the slowest rank's, over ``samples`` of ``calls`` calls."""

    median: float
    lower: float
    upper: float
    samples: int
    calls: int

    @property
    def is_noisy(self) -> bool:
        """Whether the quartiles are far apart."""
        return self.upper - self.lower > _NOISE * self.median


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of work; ``nbytes`` is what each rank contributes, if it has a size."""

    bench: str
    work: str
    nbytes: int | None
    raw: Timing
    ours: Timing

    @property
    def ratio(self) -> float:
        """The time of mpidist divided by that of the hand-written code."""
        return self.ours.median / self.raw.median

    @property
    def is_noisy(self) -> bool:
        """Whether one of the two is."""
        return self.raw.is_noisy or self.ours.is_noisy


class Bench:
    """One run of benchmarks.

    Attributes:
        job: the ranks, with ``comm`` and ``mpi`` for hand-written code.
        strategy: a strategy with all defaults, on host memory.
        first_seconds: what making it took, on the slowest rank.
        first_files: how many more files were open then, on the rank with the most.
        nodes: the number of nodes, which may be simulated.
        crowded: whether a machine has more ranks than cores.
        rows: the results so far.
        notes: remarks for the reader of the rows.
    """

    def __init__(
        self,
        job: Job,
        sizes: Sequence[int] | None,
        effort: Effort,
        show: Callable[[Row], None] = lambda row: None,
    ) -> None:
        """Make the strategy. Collective.

        Args:
            job: the ranks.
            sizes: sizes in bytes for all_reduce and all_gather; None: the defaults.
            effort: how long to measure.
            show: called with each row, on all ranks.
        """
        self.job = job
        self.crowded = is_crowded(job)
        self._show = show
        job.slowest([0.0])  # connects ranks that are not connected yet
        files = _open_files()
        job.comm.Barrier()
        start = time.perf_counter()
        self.strategy = mpidist.MPIStrategy(device="cpu")
        seconds = time.perf_counter() - start
        files = _open_files() - files
        self.first_seconds, most = job.slowest([seconds, files])
        self.first_files = int(most)
        self.nodes: int = group_of(self.strategy).communicator.num_nodes
        if self.crowded or self.nodes > 1:
            seconds = effort.sample_seconds * _SCATTERED
            effort = dataclasses.replace(effort, sample_seconds=seconds)
        self._effort = effort
        self.all_reduce_sizes = sizes or [
            size
            for size in _ALL_REDUCE_SIZES
            if self.nodes == 1 or size <= _LARGEST_BETWEEN_NODES
        ]
        self.all_gather_sizes = sizes or (
            _ALL_GATHER_SIZES if self.nodes == 1 else _GATHERED_BETWEEN_NODES
        )
        self.rows: list[Row] = []
        self.notes: list[str] = []

    def context(self) -> mpidist.ReplicaContext:
        """Return the context of the running replica function."""
        context: mpidist.ReplicaContext | None = mpidist.get_replica_context()
        assert context is not None
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

    def are_sums(self, arrays: Sequence[HostArray]) -> bool:
        """Return whether arrays are the sums of `numbers` of their sizes."""
        return all(np.array_equal(x.reshape(-1), self.total(x.size)) for x in arrays)

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

    def row(
        self,
        bench: str,
        raw: Call,
        ours: Call,
        *,
        work: str | None = None,
        nbytes: int | None = None,
        after: Call | None = None,
    ) -> None:
        """Time two calls alternately, and add a row. Collective.

        Args:
            bench: the name of the benchmark.
            raw: does the work once by hand.
            ours: does it once with mpidist.
            work: what is done; None: ``bench``.
            nbytes: the bytes that each rank contributes.
            after: undoes a call, untimed; each sample is then one call.
        """
        raw_time, our_time = self.measure([raw, ours], after)
        self.add(Row(bench, work or bench, nbytes, raw_time, our_time))

    def add(self, row: Row) -> None:
        """Add a row, and show it."""
        self.rows.append(row)
        self._show(row)

    def measure(
        self, calls: Sequence[Call], after: Call | None = None, times: float = 1.0
    ) -> list[Timing]:
        """Time calls alternately; return the timing of each. Collective.

        Args:
            calls: collective functions that do the work once.
            after: see `row`.
            times: how many times as long as usual to measure.
        """
        batches = [self._batch_size(call, after) for call in calls]
        rounds = int(times * self._effort.seconds / sum(time for _, time in batches))
        rounds = max(self._effort.fewest, min(self._effort.most, rounds))
        samples: list[list[float]] = [[] for _ in calls]
        for first in range(rounds):
            for step in range(len(calls)):
                i = (first + step) % len(calls)
                samples[i].append(self._sample(calls[i], batches[i][0], after))
        timings = []
        for mine, (size, _) in zip(samples, batches, strict=True):
            slowest = self.job.slowest(mine)
            lower, median, upper = np.quantile(slowest, (0.25, 0.5, 0.75)).tolist()
            timings.append(Timing(median, lower, upper, rounds, size))
        return timings

    def _batch_size(self, call: Call, after: Call | None) -> tuple[int, float]:
        """Return the calls of a sample, and its seconds, after warming up."""
        size, seconds = 1, 0.0
        for _ in range(2):
            seconds = max(self.job.slowest([self._sample(call, size, after)])[0], 1e-9)
            wanted = math.ceil(self._effort.sample_seconds / seconds)
            size = 1 if after else max(1, min(_MOST_CALLS, wanted))
        return size, size * seconds

    def _sample(self, call: Call, size: int, after: Call | None) -> float:
        self.job.comm.Barrier()
        start = time.perf_counter()
        for _ in range(size):
            call()
        seconds = (time.perf_counter() - start) / size
        if after is not None:
            after()
        return seconds

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
        most, free = self._effort.most_bytes, _free_memory()
        if most is not None and nbytes > most:
            self.note(f"{work} was left out: it is too large for a quick run.")
            return False
        needed = copies * nbytes
        fits = free is None or needed * self.job.local_size <= _SPARE * free
        if self.job.everywhere(fits):
            return True
        self.note(
            f"{work} was left out: it takes {show_size(needed)}\non each rank, and "
            "there is less free memory."
        )
        return False


def _cycle(count: int, factor: int) -> HostArray:
    """Return ``count`` numbers 0, 1, ... 12, 0, 1, ... times a factor, in float32."""
    whole = np.arange(count, dtype=np.int32) % _PERIOD * np.int32(factor)
    return whole.astype(np.float32)


def _open_files() -> int:
    """Return how many files this process has open; 0 if unknown."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


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
