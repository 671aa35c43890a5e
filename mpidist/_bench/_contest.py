"""How calls are timed against each other.

A *contest* has several contestants that do the same work. Each is called once, and its
result is checked on all ranks, before anything is timed. Then:

- a **sample** is a batch of k calls in a row, between a barrier and the end of the
  last call on this rank; its time is divided by k. k is such that a batch takes a
  millisecond or more, so that neither the clock nor the way in which ranks leave the
  barrier counts; all ranks use the same k, that of the slowest.
- the contestants take turns, sample by sample, and who begins changes from round to
  round: whatever else happens on the machine meets all of them alike.
- of each sample the time of the **slowest rank** counts: a collective is done when
  the last rank has its result (the rule of the Intel MPI Benchmarks' t_max, and of
  Hunold and Carpen-Amarie, "Reproducible MPI Benchmarking Is Still Not as Easy as
  You Think", IEEE Trans. Parallel Distrib. Syst. 27 (12), 2016).
- reported are the median and the quartiles over the samples.

The garbage collector runs as it does in a program.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from mpidist._bench._job import Job, WrongResultError

_MOST_CALLS: Final = 20_000
_FEWEST_SAMPLES: Final = 3

Body = Callable[[], None]


def _plainly(body: Body) -> None:
    body()


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to do the work.

    Attributes:
        name: what its column is called.
        call: does the work once. Collective.
        check: given what ``call`` returned, says whether it is right on this rank.
        within: calls a function in the context that ``call`` needs, such as
            ``strategy.run``. It is outside the time that is measured.
        prepare: called once after the check, for example to set buffers that are
            summed in place to zero, so that they do not overflow.
    """

    name: str
    call: Callable[[], Any]
    check: Callable[[Any], bool]
    within: Callable[[Body], Any] = _plainly
    prepare: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds for one call: of the slowest rank, over the samples.

    Attributes:
        median: of the samples.
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


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        repeats: the most samples of each contestant.
        seconds: after about how many seconds a contest is over; slow contestants get
            fewer samples, but three.
        sample_seconds: how long a sample takes at least.
    """

    repeats: int = 31
    seconds: float = 1.0
    sample_seconds: float = 1e-3


def measure(
    job: Job, title: str, contestants: Sequence[Contestant], effort: Effort
) -> dict[str, Timing]:
    """Check all contestants once, then time them in turn. Collective.

    Args:
        job: the ranks.
        title: what they do, for the message about a wrong result.
        contestants: at least one.
        effort: how long.

    Returns:
        The timing of each, by name, the same on all ranks.

    Raises:
        WrongResultError: if a result is wrong on any rank.
    """
    for one in contestants:
        _verify(job, title, one)
    calls, lengths = zip(
        *(_calls_of_a_sample(job, one, effort) for one in contestants), strict=True
    )
    room = effort.seconds / max(sum(lengths), 1e-9)
    fewest = min(_FEWEST_SAMPLES, effort.repeats)
    repeats = max(fewest, min(effort.repeats, int(room)))
    samples: list[list[float]] = [[] for _ in contestants]
    for turn in range(repeats):
        for step in range(len(contestants)):
            i = (turn + step) % len(contestants)
            samples[i].append(_sample(job, contestants[i], calls[i]))
    return {
        one.name: _summary(job.slowest(samples[i]), calls[i])
        for i, one in enumerate(contestants)
    }


def _verify(job: Job, title: str, contestant: Contestant) -> None:
    result: list[Any] = []
    contestant.within(lambda: result.append(contestant.call()))
    right = contestant.check(result.pop())
    wrong = [rank for rank, good in enumerate(job.comm.allgather(right)) if not good]
    if wrong:
        raise WrongResultError(
            f"{title}: {contestant.name} gave a wrong result on rank "
            f"{', '.join(map(str, wrong))}; nothing was timed. Please report this, "
            "with the output of `mpidist info`"
        )
    if contestant.prepare is not None:
        contestant.prepare()


def _calls_of_a_sample(
    job: Job, contestant: Contestant, effort: Effort
) -> tuple[int, float]:
    """Return the calls of a sample, and how long it takes, after warming up."""
    calls, seconds = 1, 0.0
    for _ in range(2):
        seconds = max(job.slowest([_sample(job, contestant, calls)])[0], 1e-9)
        calls = max(1, min(_MOST_CALLS, math.ceil(effort.sample_seconds / seconds)))
    return calls, calls * seconds


def _sample(job: Job, contestant: Contestant, calls: int) -> float:
    seconds = 0.0
    call, barrier, clock = contestant.call, job.comm.Barrier, time.perf_counter

    def batch() -> None:
        nonlocal seconds
        barrier()
        start = clock()
        for _ in range(calls):
            call()
        seconds = clock() - start

    contestant.within(batch)
    return seconds / calls


def _summary(samples: list[float], calls: int) -> Timing:
    lower, median, upper = (float(q) for q in np.quantile(samples, (0.25, 0.5, 0.75)))
    return Timing(median, lower, upper, len(samples), calls)
