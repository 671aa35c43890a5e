"""A job of many processes: right calls, a mismatch, a rank that is late, its costs."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpidist

# Made when a rank is reported: the last but one comes then.
REPORTED = Path(sys.argv[1])


class Reports(logging.Handler):
    """Prints each report, behind a line of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"REPORT\n{record.getMessage()}", file=sys.stderr, flush=True)
        REPORTED.touch()


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
    while rank == size - 2 and not REPORTED.exists():
        time.sleep(0.1)
    mpidist.get_replica_context().all_reduce("SUM", np.ones(1))


def main() -> None:
    """Print what rank 0 has seen, as JSON."""
    logging.getLogger("mpidist").addHandler(Reports())
    MPI.COMM_WORLD.allreduce(1)  # MPI's own connections
    before = files()
    strategy = mpidist.MPIStrategy()
    rank, size = strategy.replica_id, strategy.num_replicas_in_sync
    strategy.run(mean, args=(rank, size))
    found: dict[str, object] = {"size": size, "files": files() - before}
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
