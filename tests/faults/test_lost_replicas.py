"""Jobs that outlive their ranks: what the others get when one of them is killed.

In each job a rank dies in one phase after the other. The survivors check what they got,
shrink the communicator, make another strategy on it, and go on with the next phase.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest
from launching import ULFM, outlives_ranks, run_ranks
from replicas import rarely

import mpidist
from mpidist._agreement import lives
from mpidist._agreement.stacks import Process
from mpidist._base.machine import status_of
from mpidist._mpi.any_communicator import AnyCommunicator

pytestmark = pytest.mark.core

# Arguments: for each phase its name and the rank that dies, of those that are left.
PROGRAM = r"""
import itertools, os, signal, sys, tempfile, threading, time
import numpy as np
from mpi4py import MPI
import mpidist
from mpidist._collectives import nodes
from mpidist._mpi import communicator

nodes.LEAST_RANKS = 2
options = mpidist.experimental.CommunicationOptions(timeout_seconds=600)
context = mpidist.get_replica_context
folder = os.environ["TEST_FOLDER"]


def make(comm):
    return mpidist.MPIStrategy(comm, communication_options=options)


def die():
    with open(f"{folder}/died", "w") as file:
        file.write(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def reduced(strategy, x):
    total = strategy.run(lambda: context().all_reduce("SUM", x))
    return strategy.experimental_local_results(total)[0]


def new_variable(strategy):
    with strategy.scope():
        return mpidist.Variable(np.zeros(1000))


def add(strategy, v, function=lambda v, x: v.assign_add(x)):
    def merge_fn(strategy, x):
        total = strategy.extended.reduce_to("SUM", x, v)
        strategy.extended.update(v, function, args=(total,))

    strategy.run(lambda: context().merge_call(merge_fn, args=(np.ones(1000),)))


def check(strategy):
    "Calls of several kinds give what they should."
    size = strategy.num_replicas_in_sync
    assert reduced(strategy, 1.0) == size
    assert (reduced(strategy, np.ones(300_000)) == size).all()
    v = new_variable(strategy)
    add(strategy, v)
    assert (v.numpy() == size).all()


# --- phases: each ends in an exception, or in the death of this rank ------------------


def header(strategy, victim):
    if victim:
        die()
    reduced(strategy, 1.0)


def payload(strategy, victim):
    if victim:
        threading.Timer(0.1, die).start()

    def step():
        for _ in itertools.count():
            context().all_reduce("SUM", np.ones(500_000))

    strategy.run(step)


def merge_fn(strategy, victim):
    def merge_fn(strategy):
        if victim:
            die()

    strategy.run(lambda: context().merge_call(merge_fn))


def update(strategy, victim):
    def function(v, x):
        if victim:
            die()
        v.assign_add(x)

    add(strategy, new_variable(strategy), function)


def end_of_run(strategy, victim):
    strategy.run(lambda: die() if victim else None)


def reading(strategy, victim):
    def dataset(input_context):
        def rows():
            for i in itertools.count():
                if victim and i == 100:
                    die()
                yield np.float64(i)

        return mpidist.data.Dataset.from_generator(rows)

    for _ in strategy.distribute_datasets_from_function(dataset):
        pass


def save(strategy, victim):
    class State:
        def state_dict(self):
            if victim:
                die()
            return {}

        def load_state_dict(self, state):
            pass

    mpidist.Checkpoint(s=State(), v=new_variable(strategy)).save(f"{folder}/saved")


def restore(strategy, victim):
    checkpoint = mpidist.Checkpoint(v=new_variable(strategy))
    path = checkpoint.save(f"{folder}/to-restore")
    if victim:
        die()
    checkpoint.restore(path)


def construct(strategy, victim):
    if victim:
        communicator.Communicator._find_node = lambda self, nodes: die()
    make(comm)


# --------------------------------------------------------------------------------------

world = MPI.COMM_WORLD.Get_rank()
comm = MPI.COMM_WORLD.Dup()
strategy = make(comm)
check(strategy)
for phase in sys.argv[1:]:
    name, victim = phase.split(":")
    victim, rank = int(victim), comm.Get_rank()
    comm.Barrier()
    try:
        globals()[name](strategy, rank == victim)
        print(f"WRONG: {name} ended", flush=True)
    except mpidist.ReplicaLostError as error:
        with open(f"{folder}/died") as file:
            after = time.monotonic() - float(file.read())
        assert error.replicas in ((), (victim,)), error.replicas
        assert error.call, error
        if name != "construct":
            assert str(error).startswith(f"[rank {rank}] the process of "), error
    try:
        reduced(strategy, 1.0)
        print("WRONG: the strategy went on", flush=True)
    except mpidist.ReplicaLostError:
        pass
    strategy.close()
    comm.Revoke()
    comm = comm.Shrink()
    strategy = make(comm)
    check(strategy)
    print(f"{name}: {after * 1000:.0f} ms", flush=True)
print("survived", flush=True)
"""


def run_job(n, *program, **env):
    if not outlives_ranks():
        pytest.skip("this MPI ends a job with its first dead process")
    return run_ranks(n, program, timeout=100, env=env, options=ULFM)


@pytest.mark.parametrize(
    ("phases", "env"),
    [
        ("construct:1 header:2 merge_fn:0 reading:1", {}),
        ("payload:0 save:3 update:1 end_of_run:0", {}),
        rarely("header:0 payload:3 restore:1", {"MPIDIST_IMPLEMENTATION": "direct"}),
        ("payload:1 merge_fn:0 save:0", {"MPIDIST_SIMULATED_NODES": "2"}),
        rarely("header:0 payload:3 merge_fn:0", {"MPIDIST_SIMULATED_NODES": "5"}),
    ],
)
def test_survivors_of_a_killed_rank_go_on(phases, env, tmp_path):
    names = phases.split()
    result = run_job(5, "-c", PROGRAM, *names, TEST_FOLDER=str(tmp_path), **env)
    said = result.stdout.split("\n")
    assert said.count("survived") == 5 - len(names), result.stdout + result.stderr
    for left, name in enumerate(reversed(names), 5 - len(names)):
        times = [line for line in said if line.startswith(name.split(":")[0] + ": ")]
        assert len(times) == left, result.stdout + result.stderr
    assert "WRONG" not in result.stdout, result.stdout


def test_a_stopped_rank_is_not_lost_and_a_loss_that_nobody_catches_ends_the_job():
    result = run_job(
        3,
        "-c",
        """
import os, signal, subprocess
import mpidist
strategy = mpidist.MPIStrategy()
if strategy.replica_id == 1:
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
def step():
    return mpidist.get_replica_context().all_reduce("SUM", 1.0)
total = strategy.run(step)
print(strategy.experimental_local_results(total)[0], flush=True)
if strategy.replica_id == 0:
    os.kill(os.getpid(), signal.SIGKILL)
strategy.run(step)
""",
    )
    assert result.stdout.split() == ["3.0"] * 3, result.stdout + result.stderr
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stderr.count("mpidist.ReplicaLostError: ") == 1, result.stderr
    assert "the process of rank 0 has died" in result.stderr, result.stderr


# --- what is known of processes -------------------------------------------------------


@pytest.fixture
def child():
    program = [sys.executable, "-c", "input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def wait_for_state(pid, letters):
    end = time.monotonic() + 30
    while (status := status_of(pid)) is None or status.state not in letters:
        assert time.monotonic() < end, status
        time.sleep(0.01)
    return status


def watch(pid, start=None):
    """Return the lives of this process and another one."""
    status = status_of(pid)
    assert status is not None
    mine, machine = os.getpid(), "here"
    found = lives.Lives(AnyCommunicator())
    found.watch(
        [
            Process(machine, mine, -1, "", status_of(mine).start),
            Process(machine, pid, -1, "", status.start if start is None else start),
        ]
    )
    return found


def test_a_process_that_was_stopped_lives(child, monkeypatch):
    monkeypatch.setattr(lives, "_LAUNCHER_SECONDS", -1.0)
    found = watch(child.pid)
    assert found.losses() is None
    child.send_signal(signal.SIGSTOP)
    wait_for_state(child.pid, "T")
    assert found.losses() is None
    child.send_signal(signal.SIGCONT)
    wait_for_state(child.pid, "SR")
    assert found.losses() is None


def test_a_process_that_was_killed_is_dead_also_as_a_zombie(child, monkeypatch):
    monkeypatch.setattr(lives, "_LAUNCHER_SECONDS", -1.0)
    found = watch(child.pid)
    child.kill()
    assert wait_for_state(child.pid, "Z").ended
    assert found.losses() == (1,)
    child.wait()
    assert status_of(child.pid) is None
    assert found.losses() == (1,)


def test_another_process_of_the_same_number_is_not_looked_at(child, monkeypatch):
    monkeypatch.setattr(lives, "_LAUNCHER_SECONDS", -1.0)
    assert watch(child.pid, start=1).losses() is None


def test_the_launcher_may_end_the_job_first(child, monkeypatch):
    found = watch(child.pid)
    child.kill()
    child.wait()
    assert found.losses() is None
    monkeypatch.setattr(lives, "_LAUNCHER_SECONDS", -1.0)
    assert found.losses() == (1,)


def test_the_error_can_be_pickled_and_has_its_fields():
    error = mpidist.ReplicaLostError("text", (1, 3), "run(step)")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.replicas, copy.call) == ("text", (1, 3), "run(step)")
    assert isinstance(copy, mpidist.CollectiveError)
