"""Reports to the user block no wait, whatever happens to them."""

import re
import textwrap

import pytest
from launching import run_ranks

pytestmark = pytest.mark.core

# Rank 0 has a standard error that nobody reads.
PROLOGUE = """
import fcntl, logging, os, sys, time
from pathlib import Path
import numpy as np
import mpidist
strategy = mpidist.MPIStrategy()
rank = strategy.replica_id
def step():
    return mpidist.get_replica_context().all_reduce("SUM", np.ones(3))
def total():
    return strategy.experimental_local_results(strategy.run(step))[0][0]
def fill_stderr():
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, bytes(1024))
    except BlockingIOError:
        pass
    os.set_blocking(write, True)
    os.dup2(write, 2)
def wait_for_report(name):
    "Wait until a handler on another rank has got one, not for some seconds."
    while not Path(os.environ["FOLDER"], name).exists():
        time.sleep(0.05)
def set_deadline(seconds):
    "Not to make it in, which takes long on a busy machine."
    from mpidist._strategy.strategy import group_of
    group_of(strategy).guard.timeout_seconds = seconds
assert total() == 3
"""
FILL = "if rank == 0: fill_stderr()"


def run_job(body, timeout=100, **env):
    text = PROLOGUE + textwrap.dedent(body)
    settings = {"MPIDIST_STALL_SECONDS": "0.5", **env}
    return run_ranks(3, ["-c", text], timeout=timeout, env=settings)


def test_lines_that_nobody_reads():
    """Of a wait, of a trace, and of the deadline of a call: the program goes on."""
    body = f"""
    {FILL}
    from mpi4py import MPI
    if rank == 1:
        time.sleep(1.5)
    for _ in range(20):
        assert total() == 3
    print("late", flush=True)
    set_deadline(1)
    if rank == 1:
        MPI.COMM_WORLD.Barrier()  # until the others have given up
    try:
        total()
    except mpidist.CollectiveTimeoutError:
        print("told", flush=True)
    if rank != 1:
        MPI.COMM_WORLD.Barrier()
    """
    result = run_job(body, MPIDIST_TRACE="2")
    assert sorted(result.stdout.split()) == ["late"] * 3 + ["told"] * 3, result
    assert result.returncode == 0, result


@pytest.mark.parametrize(("abort", "at"), [("0", "a call"), ("1", "the end")])
def test_the_deadline_ends_the_job_if_nobody_reads_stderr(abort, at):
    body = f"""
    {FILL}
    set_deadline(1)
    if rank == 1:
        time.sleep(600)
    if {at == "a call"}:
        total()
    """
    result = run_job(body, MPIDIST_TIMEOUT_ABORT=abort)
    assert result.returncode != 0, result
    # Rank 0, whose turn is before, leaves it to one that is read.
    assert "CollectiveTimeoutError: [rank 2] rank 1 did not " in result.stderr, result


def test_an_exception_ends_the_job_if_nobody_reads_stderr():
    body = f"""
    {FILL}
    if rank == 0:
        raise LookupError("unread")
    total()
    """
    assert run_job(body).returncode != 0


def test_logging_handlers_that_do_not_only_write(tmp_path):
    """In the middle of a wait: the call that waits returns what it should.

    One makes collective calls, while its rank is in the middle of one and the others do
    not make these; one raises; and one does not come back.
    """
    body = """
    with strategy.scope():
        v = mpidist.Variable(1.0)
    ctx = mpidist.ReplicaContext(strategy, None)
    calls = {
        "run": total,
        "all_reduce": step,
        "assign": lambda: v.assign(2.0),
        "scope": lambda: strategy.scope().__enter__(),
        "context": lambda: ctx.__enter__(),
    }
    logger = logging.getLogger("mpidist")
    def report(name):
        Path(os.environ["FOLDER"], name).touch()
    class Calls(logging.Handler):
        def emit(self, record):
            for name, call in calls.items():
                try:
                    print(name, "returned", call(), flush=True)
                except RuntimeError as error:
                    assert ("writes a report" in str(error)) == (name != "all_reduce")
                    print(name, flush=True)
            if "where rank" in record.getMessage():  # the last line of a report
                report("calls")
    class Raises(logging.Handler):
        def emit(self, record):
            report("raises")
            raise LookupError("of the handler")
    class Sleeps(logging.Handler):
        def emit(self, record):
            report("sleeps")
            time.sleep(600)

    for name, handler in ("calls", Calls()), ("raises", Raises()), ("sleeps", Sleeps()):
        if rank == 0 or name != "calls":
            logger.addHandler(handler)
        if rank == 1:
            wait_for_report(name)
        assert total() == 3
        logger.removeHandler(handler)
        assert (total(), float(v)) == (3, 1)
    print("done", flush=True)
    """
    result = run_job(body, FOLDER=str(tmp_path))
    assert result.returncode == 0, result
    said = result.stdout.split()
    assert said.count("done") == 3, result
    once, names = said[:-3], ["run", "all_reduce", "assign", "scope", "context"]
    assert len(once) >= len(names)
    assert once == names * (len(once) // len(names)), result
    # Nothing is lost: neither what the handler raises nor the report.
    # On a busy machine the report may be there before rank 2, or rank 0, waits.
    assert re.search(r"ranks? (0-)?1(-2)? did not reach call", result.stderr)
    assert "Traceback" in result.stderr
    assert "LookupError: of the handler" in result.stderr
