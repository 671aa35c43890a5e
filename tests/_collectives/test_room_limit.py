"""Calls that differ in size across what has room behind a header: no rank hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import run_ranks
from replicas import long_only, rarely

pytest.importorskip("mpi4py")

PROGRAM = """
import numpy as np
import mpidist

options = mpidist.experimental.CommunicationOptions(timeout_seconds=60)
strategy = mpidist.MPIStrategy(communication_options=options)
rank, size = strategy.replica_id, strategy.num_replicas_in_sync
for odd in {0, size - 1}:
    x = np.ones(130 if rank == odd else 128)
    try:
        strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", x))
    except mpidist.CollectiveMismatchError as error:
        assert "(128,)" in str(error), error
        assert "(130,)" in str(error), error
        print("differs\\n", end="", flush=True)
    counts = [200 if k == odd else 1 for k in range(size)]
    x = np.full(counts[rank], float(rank))
    rows = strategy.run(lambda: mpidist.get_replica_context().all_gather(x, 0))
    (rows,) = strategy.experimental_local_results(rows)
    assert rows.tolist() == np.repeat(np.arange(size), counts).tolist(), odd
x = np.full(130, rank + 1.0)
total = strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", x))
(total,) = strategy.experimental_local_results(total)
assert (total == size * (size + 1) / 2).all()
"""


@pytest.mark.parametrize("size", [3, rarely(9), pytest.param(17, marks=long_only)])
def test_sizes_on_both_sides_of_the_room(tmp_path: Path, size: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    nodes = {"MPIDIST_SIMULATED_NODES": str(size)}
    done = run_ranks(size, [program], timeout=200, env=nodes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("differs") == 2 * size, done.stdout
