"""How calls that do the same work are timed against each other.

- A **sample** is a batch of k consecutive calls, from a barrier to the end of the last
  call, by this rank's clock, divided by k. k is chosen so that a batch takes at least
  a millisecond, which makes the clock and the differences between ranks that leave the
  barrier negligible. All ranks use the k of the slowest rank.
- The calls alternate, sample by sample, and which is first changes from round to round,
  so other activity on the machine affects all of them equally.
- A sample counts as the time of the **slowest rank**: a collective is done when the
  last rank has its result (t_max of the Intel MPI Benchmarks; Hunold and Carpen-Amarie,
  "Reproducible MPI Benchmarking Is Still Not as Easy as You Think", IEEE Trans.
  Parallel Distrib. Syst. 27 (12), 2016).
- The result is the median, and the quartiles, over the samples.

The garbage collector runs as it does in a program.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from mpidist._bench.job import Job

_MOST_CALLS: Final = 20_000
_NOISE: Final = 0.3  # the distance of the quartiles, as a share of the median

Call = Callable[[], Any]  # its result, of any type, is dropped


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds for one call: the slowest rank's, over the samples.

    Attributes:
        median: the median of the samples.
        lower: the lower quartile.
        upper: the upper quartile.
        samples: how many samples were taken.
        calls: how many calls are in each sample.
    """

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


QUICK: Final = Effort(
    seconds=0.01, most=3, fewest=1, sample_seconds=1e-5, most_bytes=2**27
)


def measure(job: Job, calls: Sequence[Call], effort: Effort) -> list[Timing]:
    """Time calls alternately. Collective.

    Args:
        job: the ranks.
        calls: collective functions that do the work once.
        effort: how long to measure.

    Returns:
        The timing of each call, the same on all ranks.
    """
    batches = [_batch_size(job, call, effort) for call in calls]
    room = effort.seconds / sum(seconds for _, seconds in batches)
    rounds = max(effort.fewest, min(effort.most, int(room)))
    samples: list[list[float]] = [[] for _ in calls]
    for first in range(rounds):
        for step in range(len(calls)):
            i = (first + step) % len(calls)
            samples[i].append(_sample(job, calls[i], batches[i][0]))
    return [_summary(job.slowest(samples[i]), batches[i][0]) for i in range(len(calls))]


def _batch_size(job: Job, call: Call, effort: Effort) -> tuple[int, float]:
    """Return the calls of a sample, and the seconds of a sample, after warming up."""
    size, seconds = 1, 0.0
    for _ in range(2):
        seconds = max(job.slowest([_sample(job, call, size)])[0], 1e-9)
        size = max(1, min(_MOST_CALLS, math.ceil(effort.sample_seconds / seconds)))
    return size, size * seconds


def _sample(job: Job, call: Call, size: int) -> float:
    job.comm.Barrier()
    start = time.perf_counter()
    for _ in range(size):
        call()
    return (time.perf_counter() - start) / size


def _summary(samples: list[float], size: int) -> Timing:
    lower, median, upper = (float(q) for q in np.quantile(samples, (0.25, 0.5, 0.75)))
    return Timing(median, lower, upper, len(samples), size)
