"""A job of many processes: right calls, a mismatch, a rank that is late, its costs."""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
from mpi4py import MPI

import mpidist

LATE = float(sys.argv[1])  # seconds that the last rank but one sleeps


def kib() -> int:
    """Return the memory of this process that no other one shares."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        lines = [line.split() for line in file]
    return sum(int(x[1]) for x in lines if x[0].startswith("Private_"))


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mean(rank: int, size: int) -> None:
    context = mpidist.get_replica_context()
    for length in (1, 100, 100_000):
        got = context.all_reduce("MEAN", np.full(length, rank, np.float64))
        np.testing.assert_array_equal(got, (size - 1) / 2)
    got = context.all_gather(np.array([rank]), axis=0)
    np.testing.assert_array_equal(got, np.arange(size))
    total = context.merge_call(
        lambda strategy, x: strategy.extended.reduce_to("SUM", x, x),
        args=(np.array([rank]),),
    )
    assert total[0] == size * (size - 1) // 2


def differ(rank: int) -> None:
    mpidist.get_replica_context().all_reduce("SUM", np.ones(2 + (rank > 9)))


def late(rank: int, size: int) -> None:
    if rank == size - 2:
        time.sleep(LATE)
    mpidist.get_replica_context().all_reduce("SUM", np.ones(1))


def main() -> None:
    """Print what rank 0 has seen, as JSON."""
    MPI.COMM_WORLD.allreduce(1)  # MPI's own connections
    before = (kib(), files())
    began = time.perf_counter()
    strategy = mpidist.MPIStrategy()
    seconds = time.perf_counter() - began
    rank, size = strategy.replica_id, strategy.num_replicas_in_sync
    strategy.run(mean, args=(rank, size))
    found = {"size": size, "seconds": seconds}
    found["kib"], found["files"] = kib() - before[0], files() - before[1]
    try:
        strategy.run(differ, args=(rank,))
    except mpidist.CollectiveMismatchError as error:
        found["mismatch"] = str(error)
    strategy.run(late, args=(rank, size))
    strategy.run(mean, args=(rank, size))
    if not rank:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
