"""Raw mpi4py and mpidist, timed alternately in the same processes.

- A **sample** is a batch of k consecutive calls, from a barrier to the end of the last
  call, divided by k, which is the same on all ranks and long enough for the clock.
- The calls alternate, sample by sample, and which is first changes from round to round,
  so other activity on the machine affects both equally.
- A sample counts as the time of the **slowest rank**: a collective is done when the
  last rank has its result (t_max of the Intel MPI Benchmarks; Hunold and Carpen-Amarie,
  IEEE Trans. Parallel Distrib. Syst. 27 (12), 2016).
- A figure is the median over the samples.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import mpidist
from mpidist._base.names import show_seconds
from mpidist._base.types import HostArray
from mpidist._cli.facts import Job, WrongResultError
from mpidist._cli.speaking import say
from mpidist._strategy.strategy import group_of

_KIB: Final = 2**10
_MIB: Final = 2**20
_SIZES: Final = {
    "all_reduce": (
        *(4, _KIB, 16 * _KIB, 64 * _KIB, 256 * _KIB),
        *(_MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB),
    ),
    "all_gather": (4, _KIB, 16 * _KIB, 64 * _KIB, _MIB, 16 * _MIB),
}
# Larger ones take long, and show nothing new.
_BETWEEN_NODES: Final = {
    "all_reduce": _SIZES["all_reduce"][:-1],
    "all_gather": (4, 64 * _KIB),
}
_MOST_CALLS: Final = 20_000  # of a sample
_SCATTERED: Final = 20  # times as long a sample, if ranks leave barriers ms apart
NOISE: Final = 0.3  # the distance of the quartiles, as a share of the median
_SPARE: Final = 0.8  # the share of free memory that may be used
_PERIOD: Final = 13  # the numbers repeat: small integers, whose sums are exact

Call = Callable[[], Any]


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
        return self.upper - self.lower > NOISE * self.median


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


class Bench:
    """One run of benchmarks.

    Args:
        job: the ranks.
        sizes: sizes in bytes for all_reduce and all_gather; None: the defaults.
        seconds: about how long a row of the table takes.
        quick: whether to take few samples.

    Attributes:
        strategy: a strategy with all defaults, on host memory.
        nodes: the number of nodes, which may be simulated.
        crowded: whether a machine has more ranks than cores.
        rows: the results so far.
        notes: remarks for the reader of the rows.
    """

    def __init__(
        self,
        job: Job,
        sizes: Sequence[int] | None = None,
        seconds: float = 1.0,
        *,
        quick: bool = False,
    ) -> None:
        """Make the strategy. Collective."""
        self.job = job
        self.strategy = mpidist.MPIStrategy(device="cpu")
        communicator = group_of(self.strategy).communicator
        self.nodes: int = communicator.num_nodes
        self.crowded: bool = communicator.crowded
        self.quick = quick
        self._seconds = 0.01 if quick else seconds
        self._fewest, self._most = (1, 3) if quick else (3, 31)
        self._sample_seconds = 1e-5 if quick else 1e-3
        if self.crowded or self.nodes > 1:
            self._sample_seconds *= _SCATTERED
        self._sizes = sizes
        self.rows: list[Row] = []
        self.notes: list[str] = []

    def sizes_of(self, case: str) -> Sequence[int]:
        """Return the sizes of the arrays of all_reduce or all_gather."""
        return self._sizes or (_BETWEEN_NODES if self.nodes > 1 else _SIZES)[case]

    def numbers(self, count: int, rank: int | None = None) -> HostArray:
        """Return float32 numbers of a rank (default: this one); sums are exact."""
        return _cycle(count, (self.job.rank if rank is None else rank) + 1)

    def total(self, count: int) -> HostArray:
        """Return the sum of `numbers` over all ranks, without communicating."""
        return _cycle(count, self.job.size * (self.job.size + 1) // 2)

    def check(self, work: str, expected: Any, **calls: Call) -> None:
        """Raise on all ranks if a result is wrong on any of them. Collective.

        Args:
            work: what is done.
            expected: the right result: an array, a number, or a list of these.
            **calls: the implementations, by name.

        Raises:
            WrongResultError: it names the implementation and the ranks.
        """
        right = {name: _is_equal(call(), expected) for name, call in calls.items()}
        everywhere = self.job.comm.allgather(right)
        for name in right:
            wrong = [str(k) for k, one in enumerate(everywhere) if not one[name]]
            if wrong:
                raise WrongResultError(
                    f"{work}: {name} gave a wrong result on rank {', '.join(wrong)}; "
                    "nothing was timed. Please report this, with the output of "
                    "`mpidist info`"
                )

    def compare(
        self,
        bench: str,
        raw: Call,
        ours: Call,
        expected: Any,
        *,
        work: str = "",
        nbytes: int | None = None,
    ) -> None:
        """Check the results of two calls, time them, and add a row. Collective.

        Args:
            bench: the name of the benchmark.
            raw: does the work once by hand.
            ours: does it once with mpidist.
            expected: what both return the first time.
            work: what is done; default: ``bench``.
            nbytes: the bytes that each rank contributes.
        """
        size = "" if nbytes is None else f" of {show_size(nbytes)}"
        self.check(work or bench + size, expected, mpi4py=raw, mpidist=ours)
        self.add(Row(bench, work or bench, nbytes, *self.measure([raw, ours])))

    def add(self, row: Row) -> None:
        """Add a row, and print it."""
        self.rows.append(row)
        size = "" if row.nbytes is None else show_size(row.nbytes)
        times = [show_seconds(t.median) + "~" * t.is_noisy for t in (row.raw, row.ours)]
        say(line_of(row.work, size, *times, f"{row.ratio:.2f}"))

    def measure(
        self, calls: Sequence[Call], after: Call | None = None, times: float = 1.0
    ) -> list[Timing]:
        """Time calls alternately; return the timing of each. Collective.

        Args:
            calls: collective functions that do the work once.
            after: undoes a call, untimed; each sample is then one call.
            times: how many times as long as usual to measure.
        """
        batches = [self._batch_size(call, after) for call in calls]
        rounds = int(times * self._seconds / sum(time for _, time in batches))
        rounds = max(self._fewest, min(self._most, rounds))
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
        """Return the calls of a sample, and its seconds, after warming up.

        By the fastest of some samples: others may have been interrupted.
        """
        size, seconds = 1, math.inf
        for _ in range(4):
            took = self.job.slowest([self._sample(call, size, after)])[0]
            seconds = min(seconds, max(took, 1e-9))
            wanted = math.ceil(self._sample_seconds / seconds)
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

    def has_room(self, work: str, nbytes: int, copies: int) -> bool:
        """Return whether there is memory for the work; note it if not. Collective.

        Args:
            work: what is done.
            nbytes: the bytes that each rank contributes.
            copies: how many times ``nbytes`` each rank needs.
        """
        needed = copies * nbytes
        fits = needed * self.job.local_size <= _SPARE * _free_memory()
        if all(self.job.comm.allgather(fits)):
            return True
        self.notes.append(
            f"{work} was left out: it takes {show_size(needed)}\non each rank, and "
            "there is less free memory."
        )
        return False


def line_of(work: str, *cells: str) -> str:
    """Return a line of the table."""
    return f"{work:<30}" + "".join(f"{cell:>11}" for cell in cells)


def _cycle(count: int, factor: int) -> HostArray:
    """Return ``count`` numbers 0, 1, ... 12, 0, 1, ... times a factor, in float32."""
    whole = np.arange(count, dtype=np.int32) % _PERIOD * np.int32(factor)
    return whole.astype(np.float32)


def _is_equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return all(map(_is_equal, found, expected))
    return bool(np.array_equal(found, expected))


def _free_memory() -> float:
    """Return the bytes of memory that are available."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return math.inf


_SIZE: Final = re.compile(
    r"((?:\d+\.?\d*|\.\d+)(?:E[-+]?\d+)?)\s*(?:(?:([KMG])(I?))?B)?"
)


def parse_size(text: str) -> int:
    """Return the bytes that a text such as ``64KiB``, ``1MB`` or ``4`` means.

    Raises:
        ArgumentTypeError: if it has another form, or the size is below one byte.
    """
    nbytes = 0.0
    if match := _SIZE.fullmatch(text.strip().upper()):
        number, letter, binary = match.groups()
        base = 1024 if binary else 1000
        nbytes = float(number) * base ** " KMG".index(letter or " ")
    if not 1 <= nbytes < math.inf:
        raise ArgumentTypeError(
            f"expected a size such as 4B, 64KiB or 1MB, got {text!r}"
        )
    return int(nbytes)


def show_size(nbytes: int) -> str:
    """Return for example ``64 KiB``, or ``102.2 MB`` if no binary unit divides it."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if scale <= nbytes < 1024 * scale and nbytes % scale == 0:
            return f"{nbytes // scale} {unit}"
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"
