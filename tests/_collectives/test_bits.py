"""Whether MPI gives all ranks the same bits: what is compared, and what follows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from launching import run_ranks
from replicas import all_reduce, core_by_mpi, everywhere

from mpidist._collectives import bits


def test_sums_of_all_ranks_and_of_those_with_peers_are_compared():
    assert bits.are_same([(b"a", b""), (b"a", b"")])
    assert bits.are_same([(b"a", b"p"), (b"a", b"p"), (b"a", b"")])
    assert not bits.are_same([(b"a", b""), (b"b", b"")])
    assert not bits.are_same([(b"a", b"p"), (b"a", b"q")])


@pytest.mark.core
@pytest.mark.parametrize(
    ("device", "implementation", "reduce"),
    [("cpu", "AUTO", "Ireduce"), ("gpu", "DIRECT", "Reduce")],
)
def test_ranks_that_get_other_bits_are_given_copies(device, implementation, reduce):
    """One rank says that its sums are others: all reduce to rank 0, and broadcast."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import numpy as np
import posing
import pytest
import mpidist
from mpi4py import MPI
from mpidist._cli import facts
from mpidist._collectives import bits
from mpidist._strategy.strategy import group_of
cupy = posing.install(pytest.MonkeyPatch())
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
real = bits.digests_of_sums
if rank == size - 1:
    bits.digests_of_sums = lambda *a: (b"others", real(*a)[1])
options = mpidist.experimental.CommunicationOptions(implementation={implementation!r})
strategy = mpidist.MPIStrategy(device={device!r}, communication_options=options)
assert not group_of(strategy).communicator.buffers.same_bits
x = np.full(10_000, rank + 1, np.int64)
if {device!r} == "gpu":
    x = cupy.asarray(x)
def step():
    return mpidist.get_replica_context().all_reduce("SUM", x)
total = strategy.experimental_local_results(strategy.run(step))[0]
assert (total == size * (size + 1) // 2).all()
made = strategy.communication_statistics().mpi_calls
assert made[{reduce!r}] == 1, made
assert "Allreduce" not in made, made
assert "summed on one rank" in facts.transport_facts(strategy)["host"]["text"]
"""
    env = {"MPIDIST_SIMULATED_NODES": "3", "MPIDIST_CUDA_AWARE": "1"}
    done = run_ranks(3, ["-c", code], timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("gives ranks different bits") == 1


@core_by_mpi
@pytest.mark.parametrize("implementation", ["AUTO", "DIRECT"])
def test_sums_of_different_nans_are_the_same_one(
    new_strategy, rank, size, implementation, monkeypatch
):
    """MPICH adds up to 2 KiB on each rank, which begins with its own numbers."""
    monkeypatch.setenv("MPIDIST_SIMULATED_NODES", str(size))
    strategy = new_strategy(implementation=implementation)
    nan = np.uint64(0x7FF8 << 48) + np.uint64(rank + 1)
    for dtype in ("float64", "complex128"):
        x = np.full(200, nan | np.uint64(rank % 2 << 63), np.uint64).view(dtype)
        for op in ("SUM", "MEAN", "PROD"):
            found = everywhere(all_reduce(strategy, op, x).tobytes())
            assert found == [found[0]] * size, (dtype, op)
