"""Data that go with the header, since the same call came there before (guess.h).

Programs that repeat their calls, and leave the pattern in every way: each result is
compared, each fault is an error on all ranks, and the strategy goes on. Sizes may also
differ across what has room behind a header.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import run_ranks
from replicas import long_only, rarely

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.core

PROGRAM = """
import sys
import numpy as np
import mpidist

options = mpidist.experimental.CommunicationOptions(timeout_seconds=60)
strategy = mpidist.MPIStrategy(communication_options=options)
rank, size = strategy.replica_id, strategy.num_replicas_in_sync
ranks = range(size)


def array(length, seed, of):
    return (np.arange(length) % 97 + seed + of).astype(np.float32)


def check(kind, length, seed):
    ctx = mpidist.get_replica_context()
    x, xs = array(length, seed, rank), [array(length, seed, r) for r in ranks]
    if kind == "sum":
        result, expected = ctx.all_reduce("SUM", x), np.sum(xs, 0)
    elif kind == "begun":
        result, expected = ctx.all_reduce_async("MAX", x).result(), np.max(xs, 0)
    elif kind == "nest":
        result = np.concatenate(ctx.all_reduce("SUM", [x, x[:9]]))
        expected = np.concatenate([np.sum(xs, 0), np.sum(xs, 0)[:9]])
    elif kind == "kinds":
        result = np.concatenate(ctx.all_reduce("MIN", [x, x.astype(np.int16)]))
        expected = np.tile(np.min(xs, 0), 2)
    elif kind == "gather":
        result, expected = ctx.all_gather(x, 0), np.concatenate(xs)
    elif kind == "uneven":
        result = ctx.all_gather(np.resize(x, length + rank), 0)
        expected = np.concatenate([np.resize(y, length + r) for r, y in enumerate(xs)])
    else:
        result, expected = ctx.merge_call(lambda _: seed), seed
    np.testing.assert_array_equal(result, expected, err_msg=f"{kind} {length} {seed}")


def run(calls):
    strategy.run(lambda: [check(*call, seed) for seed, call in enumerate(calls)])


LENGTH = 20_000
step = [("sum", LENGTH), ("gather", 9_000), ("merge", 0), ("nest", 5_000), ("sum", 3)]
for _ in range(2):
    run(step * 3)
chosen = np.random.default_rng(int(sys.argv[1]))
kinds = ["sum", "begun", "nest", "kinds", "gather", "uneven", "merge"]
calls = [
    (str(chosen.choice(kinds)), int(chosen.choice([3, 9_000, LENGTH, 300_000])))
    for _ in range(int(sys.argv[2]))
]
run(calls)
same = 3 * [("gather", 9_000)]
run(step + same + [("gather", 9), *same, ("uneven", 9_000), *same, ("gather", LENGTH)])


def raises():
    raise ValueError("of one rank")


ctx = mpidist.get_replica_context
for odd in {0, size - 1}:
    x = np.ones(130 if rank == odd else 128)
    try:
        strategy.run(lambda: ctx().all_reduce("SUM", x))
    except mpidist.CollectiveMismatchError as error:
        assert "(128,)" in str(error), error
        assert "(130,)" in str(error), error
        print("differs\\n", end="", flush=True)
    counts = [200 if k == odd else 1 for k in range(size)]
    x = np.full(counts[rank], float(rank))
    (rows,) = strategy.experimental_local_results(
        strategy.run(lambda: ctx().all_gather(x, 0))
    )
    assert rows.tolist() == np.repeat(np.arange(size), counts).tolist(), odd
faults = {
    "raises": raises,
    "another size": lambda: ctx().all_reduce("SUM", np.ones(100, np.float32)),
    "another operation": lambda: ctx().all_reduce("MAX", np.ones(LENGTH, np.float32)),
    "another call": lambda: ctx().all_gather(np.ones(LENGTH, np.float32), 0),
    "merge_call": lambda: ctx().merge_call(lambda _: 1),
    "returns": lambda: None,
}
for name, fault in faults.items():
    run(4 * [("sum", LENGTH)])

    def fails():
        for seed in range(3):
            check("sum", LENGTH, seed)
        fault() if rank == size - 1 else check("sum", LENGTH, 3)

    try:
        strategy.run(fails)
    except (mpidist.CollectiveMismatchError, mpidist.ReplicaError, ValueError):
        print(f"found {name}\\n", end="", flush=True)
    run(step)
print("right\\n", end="", flush=True)
"""


@pytest.mark.parametrize(
    "size", [2, rarely(3), rarely(9), pytest.param(17, marks=long_only)]
)
def test_programs_that_repeat_their_calls_and_then_do_not(
    tmp_path: Path, size: int
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    nodes = {"MPIDIST_SIMULATED_NODES": str(size)}
    arguments = [str(size), "80" if size < 9 else "30"]
    done = run_ranks(size, [program, *arguments], timeout=300, env=nodes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == size, done.stdout + done.stderr
    assert done.stdout.count("found") == 6 * size, done.stdout
    assert done.stdout.count("differs") == 2 * size, done.stdout
