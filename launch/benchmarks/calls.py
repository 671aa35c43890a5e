"""A reduction of a number, an update of variables, and the making of a strategy."""

import functools
import os
import time
from collections.abc import Callable
from typing import Final

import numpy as np

import mpidist
from mpidist import ReplicaContext
from mpidist._base.names import show_seconds
from mpidist._cli.bench_command import in_replicas
from mpidist._cli.facts import Job
from mpidist._cli.measuring import Bench, Row
from mpidist._cli.speaking import say

VARIABLES: Final = 20
COUNT: Final = 50_000  # numbers of each variable
RATE: Final = np.float32(2.0**-10)  # exact in float32, as the sums are


def reduce(bench: Bench) -> None:
    """Sum a Python number of each replica, against `Allreduce`. Collective."""
    comm, mpi, size = bench.job.comm, bench.job.mpi, bench.job.size
    mine = bench.job.rank + 1.0
    send, receive = np.array([mine]), np.empty(1)
    value = bench.strategy.run(lambda: mine)

    def by_hand() -> float:
        comm.Allreduce(send, receive, mpi.SUM)
        return float(receive[0])

    ours = functools.partial(bench.strategy.reduce, "SUM", value, axis=None)
    expected = size * (size + 1) / 2
    bench.compare("reduce", by_hand, ours, expected, work="reduce of a number")


def update(bench: Bench) -> None:
    """Update 20 variables by gradients, in merge_fn and by hand. Collective."""
    with bench.strategy.scope():
        zeros = np.zeros(COUNT, np.float32)
        variables = [mpidist.Variable(zeros) for _ in range(VARIABLES)]
    update_in_replicas(bench, variables)


@in_replicas
def update_in_replicas(
    bench: Bench, context: ReplicaContext, variables: list[mpidist.Variable]
) -> None:
    comm, mpi = bench.job.comm, bench.job.mpi
    gradients = [bench.numbers(COUNT) for _ in variables]
    arrays = [np.zeros(COUNT, np.float32) for _ in variables]
    total = np.empty(COUNT, np.float32)

    def by_hand() -> list[np.ndarray]:
        for array, gradient in zip(arrays, gradients, strict=True):
            comm.Allreduce(gradient, total, mpi.SUM)
            np.multiply(total, RATE, out=total)
            np.subtract(array, total, out=array)
        return arrays

    def descend(variable: mpidist.Variable, gradient: np.ndarray) -> None:
        variable.assign_sub(RATE * gradient)

    def merge_fn(strategy: mpidist.Strategy, *per_replica: mpidist.PerReplica) -> None:
        pairs = list(zip(per_replica, variables, strict=True))
        totals = strategy.extended.batch_reduce_to("SUM", pairs)
        for variable, gradient in zip(variables, totals, strict=True):
            strategy.extended.update(variable, descend, args=(gradient,))

    def ours() -> list[mpidist.Variable]:
        context.merge_call(merge_fn, tuple(gradients))
        return variables

    expected = [-RATE * bench.total(COUNT)] * VARIABLES
    work, nbytes = f"update of {VARIABLES} x 50k floats", VARIABLES * total.nbytes
    bench.compare("update", by_hand, ours, expected, work=work, nbytes=nbytes)


def strategy(bench: Bench) -> None:
    """Make an MPIStrategy, against a duplicate of a communicator. Collective."""
    ends: list[Callable[[], object]] = []

    def by_hand() -> None:
        ends.append(bench.job.comm.Dup().Free)

    def ours() -> None:
        ends.append(mpidist.MPIStrategy(device="cpu").close)

    timings = bench.measure([by_hand, ours], lambda: ends.pop()())
    bench.add(Row("strategy", "making an MPIStrategy", None, *timings))


def first_strategy(job: Job) -> dict[str, dict[str, float]]:
    """Make the first MPIStrategy of this job, print what it took, and close it.

    Returns:
        The seconds on the slowest rank, and how many more files were open then on the
        rank with the most. Collective.
    """

    def count_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    job.slowest([0.0])  # connects ranks that are not connected yet
    files = count_files()
    job.comm.Barrier()
    start = time.perf_counter()
    strategy = mpidist.MPIStrategy(device="cpu")
    took = time.perf_counter() - start
    seconds, more = job.slowest([took, count_files() - files])
    strategy.close()
    say(
        f"the first MPIStrategy: {show_seconds(seconds)}, {more:.0f} more open files "
        "per rank"
    )
    return {"strategy": {"seconds": seconds, "files": int(more)}}
