"""Where a missing rank is: its Python stack, or what Linux says about its process."""

from __future__ import annotations

import re
import signal
import textwrap

import pytest
from launching import ROOT, run_python, run_ranks

from mpidist._agreement import stacks

pytestmark = pytest.mark.core

# The missing rank comes when the others have said where it is, not after some seconds.
PROLOGUE = """
import fcntl, logging, os, re, signal, sys, threading, time
from pathlib import Path
from mpi4py import MPI
import mpidist
told = Path(sys.argv[1])
lock = open(f"{told}.lock", "w")


class Listener(logging.Handler):
    def emit(self, record):
        text = record.getMessage()
        if "where rank" in text and started:  # not while the machine is just slow
            print(text, file=sys.stderr, flush=True)
            told.touch()
            fcntl.flock(lock, fcntl.LOCK_UN)


started = []
logging.getLogger("mpidist").addHandler(Listener())
if MPI.COMM_WORLD.rank == 0:
    fcntl.flock(lock, fcntl.LOCK_EX)
strategy = mpidist.MPIStrategy()  # by which rank 0 has it on all
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


def message_of(body, folder, n=2, **env):
    text = PROLOGUE + textwrap.dedent(body)
    env = {"MPIDIST_STALL_SECONDS": "0.5", **env}
    done = run_ranks(n, ["-c", text, folder / "told"], timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    (found,) = done.stderr.split("mpidist: where ")[1:]
    return found.split("\nmpidist: ")[0]


@pytest.mark.parametrize("n", [2, 3])
def test_the_frames_of_the_program(tmp_path, n):
    body = """
    def load_a_file():
        wait_until_told()
    strategy.run(step)
    """
    first, *frames = message_of(body, tmp_path, n).splitlines()
    assert first.startswith("rank 1 is (process ")
    assert first.endswith("):")
    names = [line.rpartition(" in ")[2] for line in frames if "<string>" in line]
    assert names == ["wait_until_told", "load_a_file", "step", "<module>"]
    assert not [line for line in frames if f'"{ROOT}/mpidist/' in line]


def test_ranks_that_are_at_the_same_line_share_a_stack(tmp_path):
    """And the text has less than twenty lines, also with deep stacks."""
    body = """
    def deep(n):
        wait_until_told() if n == 0 else deep(n - 1)
    def step():
        meet()
        if rank:
            deep(30)
        return mpidist.get_replica_context().all_reduce("SUM", 1.0)
    strategy.run(step)
    """
    lines = message_of(body, tmp_path, 6).splitlines()
    assert re.match(r"ranks 1-4 are \(processes \d+, \d+, \d+, \d+ on ", lines[0])
    assert lines[1].endswith(" in wait_until_told")
    assert re.match(r"  \.\.\. and \d+ more", lines[-2])
    assert lines[-1] == "and 1 more ranks, not asked"
    assert len(lines) < 20


def test_the_main_thread_of_several(tmp_path):
    body = """
    def load_a_file():
        wait_until_told()
    if rank == 1:
        threading.Thread(target=wait_until_told, daemon=True).start()
    strategy.run(step)
    """
    message = message_of(body, tmp_path)
    assert message.count("in wait_until_told") == 1
    assert "in load_a_file" in message
    assert "threading.py" not in message


def test_code_that_does_not_come_back_to_python(tmp_path):
    # The match takes some seconds, and holds the GIL all the while.
    body = """
    def load_a_file():
        while not told.exists():
            re.match("(a+)+$", "a" * 24 + "b")
    strategy.run(step)
    """
    assert "in load_a_file" in message_of(body, tmp_path)


def test_a_process_that_is_stopped(tmp_path):
    body = """
    def load_a_file():
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0:
        def resume(pid):
            while not told.exists():
                time.sleep(0.05)
            os.kill(pid, signal.SIGCONT)
        pid = int(strategy.gather(os_pids, axis=0)[1])
        threading.Thread(target=resume, args=(pid,)).start()
    else:
        strategy.gather(os_pids, axis=0)
    strategy.run(step)
    """
    pids = """
    import numpy as np
    os_pids = strategy.run(lambda: np.array([os.getpid()]))
    """
    message = message_of(textwrap.dedent(pids) + textwrap.dedent(body), tmp_path)
    assert message.strip().endswith(
        "its process is stopped (by SIGSTOP, or by a terminal)"
    )


def test_a_program_that_uses_the_signal_keeps_it(tmp_path):
    body = """
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
    text = textwrap.dedent(handler) + PROLOGUE + textwrap.dedent(body)
    env = {"MPIDIST_STALL_SECONDS": "0.5"}
    done = run_ranks(2, ["-c", text, tmp_path / "told"], timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", "[]"]
    assert "it does not answer" in done.stderr


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
Thread 0x00007f01 (most recent call first):
  File "/program/worker.py", line 7 in load

Current thread 0x00007f00 (most recent call first):
  File "/program/train.py", line 3 in step
  File "/program/train.py", line 9 in <module>
"""


def test_a_process_that_ends_while_it_writes_its_stack():
    """What is shown is of the main thread, whole lines, the innermost ones first."""
    main = DUMP.splitlines(keepends=True)[-2:]
    begin = DUMP.index(main[0])
    for length in range(len(DUMP) + 1):
        whole_lines = DUMP[begin:length].count("\n") if length > begin else 0
        shown = stacks._frames_of(0x7F00, DUMP[:length])
        assert shown == "".join(main[:whole_lines]).rstrip()
    assert stacks._frames_of(0x7F02, DUMP) == ""
