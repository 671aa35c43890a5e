"""Ctrl-C and SIGTERM: `finally` blocks run, one line from the job, its exit code."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from launching import (
    LAUNCHER_FAULT,
    find_mpirun,
    mpi_vendor,
    rank_environment,
    run_alone,
)

pytestmark = pytest.mark.core

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import mpidist
folder = Path(sys.argv[1])
strategy = mpidist.MPIStrategy()
rank = strategy.replica_id
def step():
    return mpidist.get_replica_context().all_reduce("SUM", 1.0)
strategy.run(step)
(folder / f"pid{rank}").write_text(str(os.getpid()))
try:
    (folder / f"ready{rank}").touch()
    if rank == 0:
        time.sleep(600)
    if rank == 2:
        while True:
            sum(range(1000))
    strategy.run(step)
finally:
    with (folder / f"finally{rank}").open("w") as file:
        file.write(type(sys.exc_info()[1]).__name__)
"""


class Job:
    """Three ranks, each in its `try` block; they wait, sleep and compute."""

    def __init__(self, folder, how, n=3):
        folder.mkdir()
        self.folder = folder
        (folder / "program.py").write_text(PROGRAM)
        launcher = [find_mpirun(), "-n", str(n), sys.executable]
        if how == "mpidist run":
            launcher = [sys.executable, "-m", "mpidist", "run", "-n", str(n)]
        with (folder / "stderr").open("w") as err:
            self.process = subprocess.Popen(
                [*launcher, str(folder / "program.py"), str(folder)],
                env=rank_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while len(list(folder.glob("ready*"))) < n:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def text(self):
        return (self.folder / "stderr").read_text()

    def pids(self):
        return [int(p.read_text()) for p in sorted(self.folder.glob("pid*"))]

    def finallies(self):
        return sorted(p.name for p in self.folder.glob("finally*") if p.read_text())

    def wait(self):
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
        deadline = time.monotonic() + 30
        while alive := [p for p in self.pids() if os.path.exists(f"/proc/{p}/exe")]:
            assert time.monotonic() < deadline, f"processes are left: {alive}"
            time.sleep(0.02)


def start(folder, how):
    try:
        return Job(folder, how)
    except AssertionError as error:
        if LAUNCHER_FAULT not in str(error):
            raise
        return Job(folder.with_name("again"), how)


def lines_of(text):
    return [line for line in text.splitlines() if line.startswith("mpidist: ")]


SENDS = {
    "Ctrl-C": ("mpirun", lambda job: os.killpg(job.process.pid, signal.SIGINT)),
    "SIGTERM": ("mpirun", lambda job: os.kill(job.process.pid, signal.SIGTERM)),
    "mpidist run": (
        "mpidist run",
        lambda job: os.kill(job.process.pid, signal.SIGINT),
    ),
}


@pytest.mark.parametrize("what", SENDS)
def test_the_job_ends_with_one_line_and_all_finally_blocks(what, tmp_path):
    launcher, send = SENDS[what]
    open_mpi = mpi_vendor()[0] == "Open MPI"
    # Open MPI's mpirun sends SIGKILL 0.25 s after SIGTERM, also to a rank that has not
    # had a core since.
    for attempt in range(3 if open_mpi else 1):
        job = start(tmp_path / f"{attempt}", launcher)
        send(job)
        job.wait()
        err = job.text()
        assert "Traceback" not in err, err
        if len(lines_of(err)) == 1 and len(job.finallies()) == 3:
            break
    assert job.finallies() == ["finally0", "finally1", "finally2"], err
    is_term = open_mpi or what == "SIGTERM"
    text = "ended by SIGTERM" if is_term else "interrupted"
    assert lines_of(err) == [f"mpidist: rank 0: {text}"], err
    expected = 1 if open_mpi else 128 + (15 if is_term else 2)
    assert job.process.returncode == expected, err


def test_a_signal_to_one_rank_ends_all(tmp_path):
    job = start(tmp_path / "job", "mpirun")
    os.kill(job.pids()[1], signal.SIGTERM)
    job.wait()
    err = job.text()
    assert "Traceback" not in err
    assert lines_of(err) == ["mpidist: rank 1: ended by SIGTERM"], err
    assert job.process.returncode == 143
    assert "finally1" in job.finallies()


# --- one process ----------------------------------------------------------------------

PROLOGUE = """
import os, signal, sys
import mpidist
"""


def end_of(body):
    """Run a program of one process; return its exit code, stdout and stderr."""
    done = run_alone("-c", PROLOGUE + textwrap.dedent(body))
    return done.returncode, done.stdout.split(), done.stderr


def test_a_second_signal_does_not_interrupt_what_the_first_has_begun():
    body = """
    import atexit
    atexit.register(print, "atexit")
    strategy = mpidist.MPIStrategy()
    for number in range(2):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt as error:
            os.kill(os.getpid(), signal.SIGTERM)
            print("cleaned", number, error)
    os.kill(os.getpid(), signal.SIGTERM)
    """
    code, out, err = end_of(body)
    assert out == ["cleaned", "0", "SIGTERM", "cleaned", "1", "SIGTERM", "atexit"]
    assert (code, err) == (143, "mpidist: ended by SIGTERM\n")


def test_a_signal_while_python_waits_for_threads_prints_no_traceback():
    body = """
    import threading, time
    strategy = mpidist.MPIStrategy()
    def kill():
        while threading.main_thread().is_alive():
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    threading.Thread(target=kill).start()
    """
    code, _, err = end_of(body)
    assert (code, err) == (-signal.SIGTERM, "")


def test_handlers_of_the_program_stay():
    body = """
    def mine(number, frame):
        print("mine")
    signal.signal(signal.SIGTERM, mine)
    mpidist.MPIStrategy().close()
    strategy = mpidist.MPIStrategy()
    os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    other = mpidist.MPIStrategy()  # the hooks are there already
    print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    """
    assert end_of(body) == (0, ["mine", "True"], "")


def test_a_forked_child_ends_as_before():
    body = """
    import multiprocessing, time
    strategy = mpidist.MPIStrategy()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join()
    print(child.exitcode)
    """
    code, out, err = end_of(body)
    assert (code, out) == (0, ["-15"]), err
    assert "Terminated" not in err
