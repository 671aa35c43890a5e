"""Faults that need a job of their own: kills, stops, settings; and what a job opens.

Each job runs at three ranks. Afterwards no process of it is left, nor a file of mpidist
in /dev/shm.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import uuid

import pytest
from launching import (
    FILES,
    NAME_FILES,
    find_mpirun,
    left_over,
    run_command,
    run_ranks,
)

pytestmark = pytest.mark.core

PROLOGUE = """
import os, signal, sys, threading, time
import numpy as np
ranks = [os.environ.get(name) for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK")]
RANK = int(ranks[0] or ranks[1])
import mpidist
from mpidist._strategy.strategy import group_of
context = mpidist.get_replica_context
def all_reduce(strategy, x):
    total = strategy.run(lambda: context().all_reduce("SUM", x))
    return strategy.experimental_local_results(total)[0]
def wait_until_stopped(pid):
    while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.05)
def set_deadline(strategy, seconds):
    # When it is made, which takes longer on a busy machine, and the ranks are here.
    all_reduce(strategy, 1.0)
    group_of(strategy).guard.timeout_seconds = seconds
"""


def run_job(body, timeout=100, **env):
    program = NAME_FILES + PROLOGUE + textwrap.dedent(body)
    env[FILES] = uuid.uuid4().hex
    result = run_ranks(3, ["-c", program], timeout=timeout, env=env)
    assert left_over(env[FILES]) == set()
    return result


# Where each rank is when rank 1 is killed, by itself.
PHASES = {
    "header": """
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(strategy, 1.0)
    """,
    "data": """
        def step():
            if RANK == 1:
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            for _ in range(100_000):
                context().all_reduce("SUM", np.ones(100_000))
        strategy.run(step)
    """,
    "begun": """
        def step():
            calls = [context().all_reduce_async("SUM", np.ones(n)) for n in (3, 10**6)]
            if RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            for call in calls:
                call.result()
            context().all_reduce("SUM", 1.0)
        strategy.run(step)
    """,
    "merge_fn": """
        def update(v):
            if RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            v.assign_add(1.0)
        def merge_fn(strategy):
            for _ in range(1000):
                strategy.extended.update(v, update)
        strategy.run(lambda: context().merge_call(merge_fn))
    """,
    "saving": """
        class State:
            def state_dict(self):
                if RANK == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return {}
            def load_state_dict(self, state):
                pass
        mpidist.Checkpoint(v=v, state=State()).save(os.environ["FOLDER"] + "/saved")
    """,
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_is_killed_ends_the_job(phase, tmp_path):
    body = """
    strategy = mpidist.MPIStrategy()
    with strategy.scope():
        v = mpidist.Variable(0.0)
    """
    text = textwrap.dedent(body) + textwrap.dedent(PHASES[phase])
    text += "\ntime.sleep(1)\nprint('not reached', flush=True)\n"
    result = run_job(text, FOLDER=str(tmp_path))
    assert result.returncode != 0, result
    assert "not reached" not in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_stopped_and_goes_on_in_time():
    result = run_job("""
    def continue_when_stopped(pid):
        wait_until_stopped(pid)
        time.sleep(0.5)  # the others wait for it
        os.kill(pid, signal.SIGCONT)

    strategy = mpidist.MPIStrategy()
    pids = strategy.gather(strategy.run(lambda: np.array([os.getpid()])), axis=0)
    for count in (3, 100_000):  # with its header, and in pieces
        if RANK == 0:
            threading.Thread(target=continue_when_stopped, args=(int(pids[1]),)).start()
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        assert (all_reduce(strategy, np.ones(count)) == 3).all()
    print("done", flush=True)
    """)
    assert (result.returncode, result.stdout.split()) == (0, ["done"] * 3), result


def test_a_rank_that_is_stopped_for_longer_than_the_deadline():
    body = """
    strategy = mpidist.MPIStrategy()
    pids = strategy.gather(strategy.run(lambda: np.array([os.getpid()])), axis=0)
    set_deadline(strategy, 3)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        all_reduce(strategy, 1.0)
    except mpidist.CollectiveTimeoutError as error:
        print("told", flush=True)
        assert "rank 1" in str(error)
    if RANK == 0:
        os.kill(int(pids[1]), signal.SIGCONT)
    try:
        all_reduce(strategy, 1.0)
    except mpidist.CollectiveTimeoutError:
        print("unusable", flush=True)
    """
    result = run_job(body)
    assert sorted(result.stdout.split()) == ["told"] * 3 + ["unusable"] * 3, result
    assert result.returncode == 0, result


def test_one_rank_tells_that_another_was_stopped():
    body = """
    strategy = mpidist.MPIStrategy()
    set_deadline(strategy, 2)
    if RANK == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_reduce(strategy, 1.0)
    """
    result = run_job(body)
    assert result.returncode != 0, result
    assert result.stderr.count("raised an exception, ending the job") == 1, result
    assert result.stderr.count("Traceback (most recent call last)") == 1, result


def test_the_deadline_of_a_rank_that_comes_after_another_was_stopped(tmp_path):
    """The header is exchanged once more, with the same deadline."""
    body = """
    strategy = mpidist.MPIStrategy()
    pid = int(strategy.gather(strategy.run(lambda: np.array([os.getpid()])), axis=0)[2])
    set_deadline(strategy, 5)
    if RANK == 1:
        wait_until_stopped(pid)
        time.sleep(0.5)
    if RANK == 2:  # it has published its header by then
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    start = time.monotonic()
    try:
        all_reduce(strategy, 1.0)
    except mpidist.CollectiveTimeoutError as error:
        assert "rank 2 did not reach" in str(error), error
        assert "within 5 s" in str(error), error
        assert RANK == 2 or time.monotonic() - start < 20
        print(RANK, flush=True)
        told = os.environ["FOLDER"] + "/told"
        if RANK == 1:
            open(told, "w").close()
        while RANK == 0 and not os.path.exists(told):
            time.sleep(0.05)
        if RANK == 0:  # rather than wait for it at the end
            os.kill(pid, signal.SIGKILL)
    """
    settings = {"MPIDIST_STALL_SECONDS": "0.5", "FOLDER": str(tmp_path)}
    result = run_job(body, **settings)
    assert {"0", "1"} <= set(result.stdout.split()), result


def test_a_rank_that_knows_the_ends_of_all_others_tells_its_own():
    """They wait for it, while it would wait for them in MPI_Finalize."""
    result = run_job(
        """
    from mpi4py import MPI
    from mpidist._runtime import job_end
    strategy = mpidist.MPIStrategy()
    set_deadline(strategy, 1)
    (guard,) = job_end.guards.get()
    if RANK == 2:
        MPI.COMM_WORLD.Barrier()  # until the others have given up
    try:
        all_reduce(strategy, 1.0)
    except mpidist.CollectiveTimeoutError:
        print("told", flush=True)
    if RANK != 2:
        MPI.COMM_WORLD.Barrier()
    notices = guard.breakdown.notices
    limit = time.monotonic() + 60
    while RANK == 2 and not notices.all_ended and time.monotonic() < limit:
        notices.read()
    """
    )
    assert (result.returncode, result.stdout.split()) == (0, ["told"] * 3), result


def test_a_constructor_that_timed_out_leaves_nothing_after_the_next_one():
    """What it leaves on the user's communicator the next one goes on with."""
    result = run_job("""
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    mine = world.Dup()
    def in_vain(comm):
        os.environ["MPIDIST_TIMEOUT"] = "1"
        try:
            mpidist.MPIStrategy(comm)
            raise AssertionError("made without all ranks")
        except mpidist.CollectiveTimeoutError as error:
            assert "not all ranks of the communicator made this call" in str(error)
            assert "the next MPIStrategy on it goes on with that" in str(error)
        del os.environ["MPIDIST_TIMEOUT"]

    for missing, comm, too_late in (2, mine, True), (0, world, False):
        others = [rank for rank in range(3) if rank != missing]
        if RANK == missing:
            for other in others:
                mine.recv(source=other)
            if too_late:
                in_vain(comm)
            for other in others:
                mine.send(None, other)
        else:
            in_vain(comm)
            mine.send(None, missing)
            mine.recv(source=missing)
        strategy = mpidist.MPIStrategy(comm)
        assert all_reduce(strategy, 1.0) == 3
        strategy.close()
        comm.Ibarrier().Wait()  # the user's, as are these
        assert comm.allreduce(RANK) == 3
        assert comm.Dup().allreduce(RANK) == 3
    print("done", flush=True)
    """)
    assert (result.returncode, result.stdout.split()) == (0, ["done"] * 3), result


def test_settings_of_one_rank_that_can_not_be_read():
    result = run_job("""
    texts = ["soon", "-1", "nan", "inf", "1e300", 5000 * "9", "\\udcff", "../../etc"]
    numbers = ["TIMEOUT", "STALL_SECONDS", "FUSION_MB", "STAGING_MB", "SIMULATED_NODES"]
    words = ["ABORT", "ALONE", "GUARD", "CUDA_AWARE", "ERROR_FEEDBACK", "TRACE"]
    words += ["IMPLEMENTATION", "ALLREDUCE", "COMPRESSION"]
    # The first one before MPI runs.
    pairs = [(name, text) for name in numbers for text in texts]
    pairs += [(name, text) for name in words for text in ("maybe", "-1", 5000 * "1")]
    for name, text in pairs:
        if RANK == 1:
            os.environ[f"MPIDIST_{name}"] = text
        try:
            mpidist.MPIStrategy()
            raise AssertionError(f"{name}={text[:20]!r} was taken")
        except ValueError as error:
            message = str(error)
            assert f"rank 1 cannot take part" in message, message
            assert f"MPIDIST_{name}" in message and len(message) < 1000, message
        os.environ.pop(f"MPIDIST_{name}", None)
    os.environ["MPIDIST_ABORT"] = str(int(RANK > 0))  # it can be read, but differs
    try:
        mpidist.MPIStrategy()
        raise AssertionError("they differ")
    except mpidist.CollectiveMismatchError as error:
        assert "MPIDIST_ABORT=0" in str(error)
    os.environ["MPIDIST_ABORT"] = "1"
    assert all_reduce(mpidist.MPIStrategy(), 1.0) == 3
    print("done", flush=True)
    """)
    assert (result.returncode, result.stdout.split()) == (0, ["done"] * 3), result


def test_shared_memory_that_others_have_filled(tmp_path):
    """Memory that is touched and is not there ends a process by SIGBUS."""
    mount = 'mount -t tmpfs -o size=60m tmpfs /dev/shm && exec "$@"'
    own = ["unshare", "-m", "sh", "-c", mount, "sh"]
    probe = subprocess.run([*own, "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no mounts here: {probe.stderr.decode()}")
    body = PROLOGUE + textwrap.dedent("""
    strategy = mpidist.MPIStrategy()
    from mpi4py import MPI
    total = all_reduce(strategy, np.ones(50_000))
    MPI.COMM_WORLD.Barrier()
    if RANK == 0:
        with open("/dev/shm/others", "wb") as file:
            try:
                while True:
                    file.write(bytes(2**16))
                    file.flush()
            except OSError as error:
                print("full", flush=True)
    MPI.COMM_WORLD.Barrier()
    kept = []
    for count in (3, 50_000, 3_000_000, 400_000, 50_000, 3):
        kept += [all_reduce(strategy, np.full(count, 1.0)) for _ in range(3)]
    assert all((x == 3).all() for x in [total, *kept])
    again = mpidist.MPIStrategy()
    assert (all_reduce(again, np.ones(100_000)) == 3).all()
    print("done", flush=True)
    """)
    # What MPI itself has there is not the question.
    env = {
        "OMPI_MCA_btl_sm_backing_directory": str(tmp_path),
        "OMPI_MCA_btl_vader_backing_directory": str(tmp_path),  # Open MPI 4
        "I_MPI_FABRICS": "ofi",
    }
    job = [find_mpirun(), "-n", "3", sys.executable, "-c", body]
    result = run_command([*own, *job], 100, env)
    assert sorted(result.stdout.split()) == ["done"] * 3 + ["full"], result
    assert result.returncode == 0, result


# --- security -------------------------------------------------------------------------

WATCH = """
import pickle
seen, watching = [], False
def watch(event, args):
    if watching and (event.startswith("socket.") or event == "pickle.find_class"):
        seen.append((event, str(args)[:200]))
    if event == "open" and "/.saved" in str(args[0]):
        modes_while_written.add(oct(os.stat(os.path.dirname(args[0])).st_mode & 0o777))
modes_while_written = set()
sys.addaudithook(watch)
def modes():
    "Return the modes of the files in /dev/shm that this process has open or mapped."
    found = set()
    for link in os.scandir("/proc/self/fd"):
        try:
            if os.readlink(link.path).startswith("/dev/shm/mpidist-"):
                info = os.stat(link.path)
                found.add((oct(info.st_mode & 0o777), info.st_uid, info.st_nlink))
        except OSError:
            pass
    return found
"""


def test_security(tmp_path):
    """No sockets; shared memory for its user alone; and checkpoints.

    Those are for their user alone until they are whole, and are never unpickled.
    """
    body = """
    os.umask(0)
    import mpi4py.MPI  # what MPI itself opens
    watching = True
    strategy = mpidist.MPIStrategy()
    with strategy.scope():
        v = mpidist.Variable(np.zeros(50_000))
    assert (all_reduce(strategy, np.ones(100_000)) == 3).all()
    def merge_fn(strategy):
        strategy.extended.update(v, lambda v: v.assign(np.arange(50_000.0)))
    strategy.run(lambda: context().merge_call(merge_fn))
    assert not [event for event, _ in seen if event.startswith("socket.")], seen
    found = modes()
    assert found == {("0o600", os.getuid(), 0)}, found  # and without a name

    os.umask(0o022)
    watching = False
    seen.clear()
    checkpoint = mpidist.Checkpoint(v=v, rng=np.random.default_rng(1))
    path = os.environ["FOLDER"] + "/saved"
    for format in ("npz", "safetensors"):
        checkpoint.save(path, format)
        if RANK == 0:
            assert modes_while_written == {"0o700"}, modes_while_written
            assert os.stat(path).st_mode & 0o777 == 0o755
            watching = True
            assert (mpidist.load_checkpoint(path)["v"] == np.arange(50_000.0)).all()
            watching = False
        checkpoint.restore(path)
    assert seen == [], seen
    strategy.close()
    print("done", flush=True)
    """
    result = run_job(WATCH + textwrap.dedent(body), FOLDER=str(tmp_path))
    assert (result.returncode, result.stdout.split()) == (0, ["done"] * 3), result


@pytest.mark.parametrize(("abort", "leaves"), [("0", False), ("0", True), ("1", True)])
def test_the_end_beside_a_begun_call_that_another_rank_does_not_make(abort, leaves):
    """It waits for the others only if they say that they leave; their code is kept."""
    result = run_job(
        f"""
        strategy = mpidist.MPIStrategy()
        if RANK == 1 and {leaves}:
            sys.exit(4)
        if RANK != 1:
            with mpidist.ReplicaContext(strategy, None):
                handle = context().all_reduce_async("SUM", np.ones(10))
        """,
        MPIDIST_ABORT=abort,
    )
    assert result.returncode == (4 if leaves else 0), result.stderr
    assert "Traceback" not in result.stderr
