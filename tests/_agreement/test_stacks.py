"""Where a missing rank is: its Python stack, or what Linux says about its process."""

from __future__ import annotations

import re
import signal
import textwrap

import pytest
from launching import ROOT, run_python, run_ranks
from replicas import slow

from mpidist._agreement import stacks

pytestmark = pytest.mark.core

# The missing rank comes when the others have said where it is, not after some seconds.
PROLOGUE = """
import fcntl, logging, os, re, signal, sys, threading, time
from pathlib import Path
import numpy as np
from mpi4py import MPI
import mpidist
started = []


def begin(name):
    "Begin a part: what is said of where a rank is goes into a file of this name."
    global told, lock
    started.clear()
    told = Path(sys.argv[1], name)
    lock = open(f"{told}.lock", "w")
    if MPI.COMM_WORLD.rank == 0:
        fcntl.flock(lock, fcntl.LOCK_EX)
    MPI.COMM_WORLD.Barrier()  # by which rank 0 has it on all


class Listener(logging.Handler):
    def emit(self, record):
        text = record.getMessage()
        if "where rank" in text and started:  # not while the machine is just slow
            with told.open("a") as file:
                print(text, file=file)
            fcntl.flock(lock, fcntl.LOCK_UN)


logging.getLogger("mpidist").addHandler(Listener())
strategy = mpidist.MPIStrategy()
rank = strategy.replica_id


def meet():
    MPI.COMM_WORLD.Barrier()
    started.append(True)


def wait_until_told():
    # One system call: this line is found, and no other one.
    fcntl.flock(lock, fcntl.LOCK_SH)


def step():
    meet()
    if rank == 1:
        load_a_file()
    return mpidist.get_replica_context().all_reduce("SUM", 1.0)
"""


def run(text, folder, n):
    env = {"MPIDIST_STALL_SECONDS": "0.5"}
    done = run_ranks(n, ["-c", text, folder], timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    return done


def messages_of(body, folder, n=2):
    """Return what was said in each part of the program, once in each."""
    run(PROLOGUE + textwrap.dedent(body), folder, n)
    found = {}
    for path in folder.glob("*.lock"):
        text = path.with_suffix("").read_text()
        (found[path.stem],) = text.split("mpidist: where ")[1:]
    return found


def test_where_a_rank_is(tmp_path):
    body = """
    begin("waits")
    def load_a_file():
        wait_until_told()
    strategy.run(step)

    begin("has a thread")
    if rank == 1:
        threading.Thread(target=wait_until_told, daemon=True).start()
    strategy.run(step)

    begin("matches")  # for some seconds, with the GIL
    def load_a_file():
        while not told.exists():
            re.match("(a+)+$", "a" * 24 + "b")
    strategy.run(step)

    begin("is stopped")
    def load_a_file():
        os.kill(os.getpid(), signal.SIGSTOP)
    pids = strategy.gather(strategy.run(lambda: np.array([os.getpid()])), axis=0)
    if rank == 0:
        def resume(pid):
            while not told.exists():
                time.sleep(0.05)
            os.kill(pid, signal.SIGCONT)
        threading.Thread(target=resume, args=(int(pids[1]),)).start()
    strategy.run(step)
    """
    found = messages_of(body, tmp_path)
    assert len(found) == 4
    # The frames of the program.
    first, *frames = found["waits"].splitlines()
    assert first.startswith("rank 1 is (process ")
    assert first.endswith("):")
    names = [line.rpartition(" in ")[2] for line in frames if "<string>" in line]
    assert names == ["wait_until_told", "load_a_file", "step", "<module>"]
    assert not [line for line in frames if f'"{ROOT}/mpidist/' in line]
    # The main thread of several.
    assert found["has a thread"].count("in wait_until_told") == 1
    assert "in load_a_file" in found["has a thread"]
    assert "threading.py" not in found["has a thread"]
    # Code that does not come back to Python.
    assert "in load_a_file" in found["matches"]
    stopped = "its process is stopped (by SIGSTOP, or by a terminal)"
    assert found["is stopped"].strip().endswith(stopped)


@slow
def test_ranks_that_are_at_the_same_line_share_a_stack(tmp_path):
    """And the text has less than twenty lines, also with deep stacks."""
    body = """
    begin("deep")
    def deep(n):
        wait_until_told() if n == 0 else deep(n - 1)
    def step():
        meet()
        if rank:
            deep(30)
        return mpidist.get_replica_context().all_reduce("SUM", 1.0)
    strategy.run(step)
    """
    lines = messages_of(body, tmp_path, 6)["deep"].splitlines()
    assert re.match(r"ranks 1-4 are \(processes \d+, \d+, \d+, \d+ on ", lines[0])
    assert lines[1].endswith(" in wait_until_told")
    assert re.match(r"  \.\.\. and \d+ more", lines[-2])
    assert lines[-1] == "and 1 more ranks, not asked"
    assert len(lines) < 20


def test_a_program_that_uses_the_signal_keeps_it(tmp_path):
    body = """
    begin("part")
    def load_a_file():
        wait_until_told()
    strategy.run(step)
    print(caught, flush=True)
    """
    handler = """
    import signal, sys
    caught = []
    signal.signal(signal.SIGRTMIN + 13, lambda *args: caught.append(args))
    """
    done = run(textwrap.dedent(handler) + PROLOGUE + textwrap.dedent(body), tmp_path, 2)
    assert done.stdout.split() == ["[]", "[]"]
    assert "it does not answer" in (tmp_path / "part").read_text()


def test_a_process_without_a_handler_gets_no_signal():
    """It would end it: as if the rank had replaced itself by another program."""
    code = """
import json, os, subprocess, sys
from mpidist._agreement import stacks
other = subprocess.Popen(["sleep", "60"])
process = stacks.Process(machine="", pid=other.pid, file=3, host="")
assert stacks.ask(process) == ""
assert other.poll() is None
other.kill()
other.wait()
assert stacks.ask(process) == ""
"""
    run_python("-c", code)
    assert signal.SIGRTMIN + 13 <= signal.SIGRTMAX


DUMP = """\
Stack (most recent call first):
  File "/program/train.py", line 3 in step
  File "/program/train.py", line 9 in <module>
"""


def test_a_process_that_ends_while_it_writes_its_stack():
    """What is shown are whole lines, the innermost ones first."""
    lines = DUMP.splitlines()
    for length in range(len(DUMP) + 1):
        shown = stacks._frames_in(DUMP[:length])
        assert shown == "\n".join(lines[1 : DUMP[:length].count("\n")])
    assert stacks._frames_in(DUMP + DUMP) == stacks._frames_in(DUMP)
