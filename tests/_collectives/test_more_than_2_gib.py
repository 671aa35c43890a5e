"""Values of more than 2 GiB, which MPI's counts and C's int do not hold.

``launch/test --long`` runs them (``MPIDIST_FUZZ`` is set), on 2 ranks. They need 14 GiB
of memory, and 2 of disk.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from replicas import (
    all_reduce,
    everywhere,
    merge,
    on_every_rank_free_memory,
    watch_peak,
)

import mpidist

# What elements are: the place and the rank show which ones moved.
PERIOD = np.repeat(np.arange(101, dtype=np.uint8), 4093)
NBYTES = int(os.environ.get("MPIDIST_TEST_BYTES", 2**31 + 2**20 + 12))
_NEEDED = 7 * NBYTES

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.one_size,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not os.environ.get("MPIDIST_FUZZ"), reason="large: for launch/test --long"
    ),
]


def check(found, want):
    """Check each element, without a copy of the array."""
    step = 2**24
    for start in range(0, len(found), step):
        part = found[start : start + step]
        expected = want(start, start + len(part))
        if not (part == expected).all():
            np.testing.assert_array_equal(part, expected)


def numbers(rank, start, stop):
    first = (start + 7 * rank * 4093) % len(PERIOD)
    return np.resize(np.roll(PERIOD, -first), stop - start)


def of_rank(rank, count, dtype):
    x = np.empty(count, dtype)
    step = 2**24
    for start in range(0, count, step):
        stop = min(start + step, count)
        x[start:stop] = numbers(rank, start, stop)
    return x


@pytest.fixture(autouse=True)
def room(two_replicas):
    if min(on_every_rank_free_memory()) < _NEEDED:
        pytest.skip(f"less than {_NEEDED / 2**30:.0f} GiB of memory are free")


@pytest.mark.parametrize("implementation", ["AUTO", "DIRECT"])
def test_all_reduce(new_strategy, implementation, rank, size):
    strategy = new_strategy(implementation=implementation, timeout_seconds=600)
    found = all_reduce(strategy, "SUM", of_rank(rank, NBYTES // 4, "f4"))
    check(found, lambda i, j: sum(numbers(r, i, j) for r in range(size)))


@pytest.mark.parametrize("implementation", ["AUTO", "DIRECT"])
def test_all_gather(new_strategy, implementation, rank, size):
    strategy = new_strategy(implementation=implementation, timeout_seconds=600)
    count = NBYTES // size + 1
    x = of_rank(rank, count + rank, "u1")

    def gather():
        return mpidist.get_replica_context().all_gather(x, axis=0)

    (found,) = strategy.experimental_local_results(strategy.run(gather))
    assert found.nbytes > NBYTES
    check(found[:count], lambda i, j: numbers(0, i, j))
    check(found[count:], lambda i, j: numbers(1, i, j))


def test_local_results_in_merge_fn(new_strategy, rank, size):
    strategy = new_strategy(timeout_seconds=600)
    x = of_rank(rank, NBYTES, "u1")

    def merge_fn(strategy, x):
        for r, part in enumerate(strategy.experimental_local_results(x)):
            check(part, lambda i, j, r=r: numbers(r, i, j))

    merge(strategy, lambda strategy, x: None, np.ones(3))
    peak = watch_peak()
    everywhere(None)
    merge(strategy, merge_fn, x)
    # `check` needs some itself; beyond the arrays one copy of each component.
    assert peak() / NBYTES < (size - 1 if rank == 0 else 0) + 0.3


def test_a_variable_and_its_checkpoint(new_strategy, same_folder: Path, rank):
    strategy = new_strategy(timeout_seconds=600)
    with strategy.scope():
        weights = mpidist.Variable(of_rank(5 if rank == 0 else 6, NBYTES, "u1"))
    value = weights.numpy()
    check(value, lambda i, j: numbers(5, i, j))  # rank 0's, on all ranks
    checkpoint = mpidist.Checkpoint(weights=weights)
    path = checkpoint.save(str(same_folder / "large"))
    del value
    weights.assign(of_rank(8, NBYTES, "u1"))
    check(weights.numpy(), lambda i, j: numbers(8, i, j))
    checkpoint.restore(path)
    check(weights.numpy(), lambda i, j: numbers(5, i, j))
