"""Ranks that fail while others are in a header, in data, or in a call that blocks.

Between simulated nodes of one rank, or "direct", by MPI on one node; between hosts that
are cut off: test_hosts.
"""

from __future__ import annotations

import re
import textwrap
import uuid
from pathlib import Path

import pytest
from launching import FILES, NAME_FILES, left_over, run_ranks
from replicas import long_only, rarely

pytestmark = pytest.mark.core

TESTS = Path(__file__).parents[1]
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import mpi4py
import numpy as np
import posing
import pytest
import mpidist
from mpidist._strategy.strategy import group_of

where, fault, level = sys.argv[1:]
mpi4py.rc.thread_level = level
options = mpidist.experimental.CommunicationOptions
blocks = where == "blocking"
if blocks:
    cupy = posing.install(pytest.MonkeyPatch())
strategy = mpidist.MPIStrategy(
    communication_options=options(
        timeout_seconds=60,
        implementation="AUTO" if where in ("header", "data") else "DIRECT",
    ),
    device="gpu" if blocks else "cpu",
)
rank = strategy.replica_id
pids = strategy.gather(strategy.run(lambda: np.array([os.getpid()])), axis=0)
with strategy.scope():
    v = mpidist.Variable(7.0)
# More than the core moves itself, and several pieces.
arrays = [np.full(300_000, rank + 1.0) for _ in range(2)]
if blocks:
    arrays = [cupy.asarray(x) for x in arrays]
buffers = group_of(strategy).communicator.buffers


def reduce():
    return mpidist.get_replica_context().all_reduce("SUM", arrays)


before = strategy.run(reduce)
if fault != "raise":
    group_of(strategy).guard.timeout_seconds = 4


def fail():
    if fault == "raise":
        raise KeyboardInterrupt
    if fault == "sleep":
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


if rank == 1:
    if where == "header":
        fail()
    name = "_block" if blocks else "start"
    call, calls = getattr(buffers, name), []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == (2 if fault == "raise" else 1):  # between two pieces
            fail()
        return call(*arguments)

    setattr(buffers, name, failing)
start = time.monotonic()
try:
    strategy.run(reduce)
except (mpidist.CollectiveTimeoutError, KeyboardInterrupt) as error:
    seconds = time.monotonic() - start
    for value in strategy.experimental_local_results(before):
        assert (value[0] == sum(range(1, len(pids) + 1))).all()
    assert v.numpy() == 7.0 and (arrays[1] == rank + 1.0).all()
    text = " ".join(str(error).split())
    print(f"rank {rank} after {seconds:.1f}: {type(error).__name__} {text}\\n", end="",
          flush=True)
    Path(f"{sys.argv[0]}.{rank}").touch()
    if fault == "stop" and rank == 0:
        folder = Path(sys.argv[0]).parent
        while len(list(folder.glob("program.py.*"))) < len(pids) - 1:
            time.sleep(0.05)
        os.kill(int(pids[1]), signal.SIGKILL)
    if fault == "raise":
        sys.exit(0)
    time.sleep(60)
print("not reached", flush=True)
"""


def run_job(tmp_path: Path, size: int, where: str, fault: str, level: str = "multiple"):
    program = tmp_path / "program.py"
    program.write_text(NAME_FILES + textwrap.dedent(PROGRAM))
    settings = {
        "MPIDIST_SIMULATED_NODES": "1" if where == "direct" else str(size),
        "MPIDIST_STALL_SECONDS": "2",
        "MPIDIST_CUDA_AWARE": "1",
        # Several pieces on any number of ranks.
        "MPIDIST_ALLREDUCE": "iallgather:2" if fault == "raise" else "iallreduce:2",
        "PYTHONPATH": str(TESTS),
        FILES: uuid.uuid4().hex,
    }
    done = run_ranks(size, [program, where, fault, level], timeout=100, env=settings)
    assert left_over(settings[FILES]) == set()
    assert "not reached" not in done.stdout, done
    return done


@pytest.mark.parametrize("where", ["data", rarely("header"), rarely("blocking")])
def test_a_rank_that_is_killed_between_nodes(tmp_path, where):
    done = run_job(tmp_path, 3, where, "kill")
    assert done.returncode != 0, done


@pytest.mark.parametrize("size", [3, pytest.param(9, marks=long_only)])
@pytest.mark.parametrize("where", ["header", "data", "direct"])
def test_a_rank_that_is_stopped_between_nodes(tmp_path, where, size):
    done = run_job(tmp_path, size, where, "stop")
    found = re.findall(r"^rank (\d+) after \S+ Collecti\w+ (.*)$", done.stdout, re.M)
    assert sorted(int(rank) for rank, _ in found) == [0, *range(2, size)], done
    what = "rank 1 did not reach" if where == "header" else "made no progress in call"
    what = f"rank 1 {what}" if where == "direct" else what
    assert all(what in text for _, text in found), done
    assert where != "direct" or f"mpidist: {what}" in done.stderr, done


@pytest.mark.parametrize(
    ("fault", "level", "text"),
    [
        ("stop", "multiple", "rank 1 made no progress in call"),
        rarely("sleep", "multiple", "rank 1 made no progress in call"),
        rarely("stop", "serialized", "in a call of MPI that blocks for"),
    ],
)
def test_a_rank_that_does_not_come_to_a_call_that_blocks(tmp_path, fault, level, text):
    """No exception ends such a call: the others end the job, and say why."""
    done = run_job(tmp_path, 3, "blocking", fault, level)
    assert done.returncode != 0, done
    assert re.search(rf"^mpidist: .*{text}", done.stderr, re.M), done
    assert re.search(rf"CollectiveTimeoutError: \[rank .*{text}", done.stderr), done


@pytest.mark.parametrize("size", [3, rarely(9)])
def test_a_rank_that_raises_between_two_pieces(tmp_path, size):
    done = run_job(tmp_path, size, "data", "raise")
    found = dict(re.findall(r"^rank (\d+) after (\S+ \w+) ", done.stdout, re.M))
    assert sorted(map(int, found)) == list(range(size)), done
    for rank, text in found.items():
        seconds, name = text.split(": ")
        error = "KeyboardInterrupt" if rank == "1" else "CollectiveTimeoutError"
        assert name == error, done
        assert float(seconds) < 40, done  # not by the deadline
