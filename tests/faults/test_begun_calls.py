"""Faults while calls are begun, or made by two threads.

No rank hangs, or is told only at its deadline.
"""

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest
from faults.test_jobs import run_job
from launching import FORKS, ONLY_THE_FIRST
from replicas import all_reduce, context, everywhere, outcomes, rarely, set_deadline

import mpidist
import mpidist.testing

pytestmark = pytest.mark.core

X = np.ones(4)


@pytest.mark.mpi(min_size=2)
@pytest.mark.replicas(2, 3)
def test_a_rank_that_does_not_come(new_strategy, rank, size):
    """All that wait give up at the deadline, and name the rank."""
    strategy = new_strategy()
    strategy.run(lambda: context().all_reduce("SUM", np.ones(1000)))
    set_deadline(strategy, 1.0)

    def step():
        everywhere(None)  # those that wait begin together, on a busy machine too
        if rank == size - 1:
            everywhere(None)  # until the others have given up
            return
        handle = context().all_reduce_async("SUM", np.ones(1000))
        try:
            handle.result()
        finally:
            everywhere(None)

    rows = outcomes(lambda: strategy.run(step))
    assert {row.name for row in rows} == {"CollectiveTimeoutError"}
    assert all(f"rank {size - 1}" in row.message for row in rows)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("on_all", [True, False])
def test_a_thread_that_the_system_refuses(
    new_strategy, monkeypatch, rank, size, on_all
):
    """The call raises on all ranks; the next one asks for the thread again."""
    strategy = new_strategy()
    start, refused = threading.Thread.start, []

    def refuse(thread):
        if thread.name == "mpidist communication" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    if on_all or rank == size - 1:
        monkeypatch.setattr(threading.Thread, "start", refuse)

    def step():
        with pytest.raises(RuntimeError, match="can't start new thread"):
            context().all_reduce_async("SUM", np.ones(3)).result()
        return context().all_reduce_async("SUM", np.ones(3)).result()

    (found,) = strategy.experimental_local_results(strategy.run(step))
    np.testing.assert_array_equal(found, np.full(3, size))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("where", ["result", "call", "program"])
def test_ctrl_c(new_strategy, same_folder, rank, where):
    """Wherever the program is, while its thread waits for a rank that does not come."""
    strategy = new_strategy()
    told = same_folder / "told"
    start = time.monotonic()

    def step():
        if rank == 0:  # which is told where it comes next
            while not told.exists():
                time.sleep(0.01)
            context().all_reduce("SUM", np.ones(1000))
            return
        handle = context().all_reduce_async("SUM", np.ones(1000))
        if rank == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        if where == "program" and rank == 1:
            time.sleep(50)
        if where == "call":
            context().all_reduce("SUM", 1.0)
        handle.result()

    def run():
        try:
            strategy.run(step)
        finally:
            if rank == 1:
                told.touch()

    rows = outcomes(run)
    assert rows.pop(1).name == "KeyboardInterrupt"
    assert {row.name for row in rows} == {"CollectiveTimeoutError"}
    for row in rows:
        assert "rank 1 was interrupted by KeyboardInterrupt " in row.message
    assert time.monotonic() - start < 40  # not by the deadline


# Where the program of rank 1 ends, while the others have begun calls with it.
ENDS = {
    "by its end": ("pass", "do not make the same call"),
    "by sys.exit": ("sys.exit(3)", "rank 1 left the program by sys.exit(3)"),
    "by an exception": ("1 / 0", "ZeroDivisionError"),
}


@pytest.mark.parametrize(
    "how", ["by its end", rarely("by sys.exit"), rarely("by an exception")]
)
def test_a_program_that_ends(how):
    code, text = ENDS[how]
    result = run_job(f"""
    strategy = mpidist.MPIStrategy()
    ctx = mpidist.ReplicaContext(strategy, None)
    if RANK == 1:
        {code}
    else:
        with ctx:
            handle = ctx.all_reduce_async("SUM", np.ones(100_000))
            time.sleep(0.5)
            handle.result()
        print("not reached", flush=True)
    """)
    assert result.returncode != 0, result
    assert text in result.stderr
    assert "not reached" not in result.stdout


@pytest.mark.parametrize("by", ["pass", rarely("sys.exit(0)")])
def test_a_call_that_failed_when_nobody_asks(by):
    """It ends the job like an uncaught exception, with its traceback."""
    result = run_job(f"""
    {ONLY_THE_FIRST}
    strategy = mpidist.MPIStrategy()
    with mpidist.ReplicaContext(strategy, None) as ctx:
        good = ctx.all_reduce_async("SUM", np.ones(100_000))
        bad = ctx.all_reduce_async("NO SUCH", np.ones(100_000))
    {by}
    """)
    assert result.returncode == 1, result
    assert "raised an exception, ending the job" in result.stderr
    assert result.stderr.count("ValueError: ") == 1
    assert "NO SUCH" in result.stderr


def test_a_call_that_failed_at_the_end_of_replicas_as_threads():
    def replica():
        strategy = mpidist.MPIStrategy()
        with mpidist.ReplicaContext(strategy, None) as ctx:
            ctx.all_reduce_async("NO SUCH", 1.0)

    with pytest.raises(ValueError, match="NO SUCH"):
        mpidist.testing.run(3, replica)


def test_a_forked_child_and_calls_that_nobody_asks():
    """The child has no such thread, and does not wait for one; nor does the end."""
    result = run_job(
        """
    strategy = mpidist.MPIStrategy()
    with mpidist.ReplicaContext(strategy, None) as ctx:
        done = ctx.all_reduce_async("SUM", 1.0)
        assert done.result() == 3
        if RANK == 0:
            time.sleep(1)
        handle = ctx.all_reduce_async("SUM", 1.0)
        if RANK == 1:
            pid = os.fork()
            if pid == 0:
                assert done.result() == 3
                try:
                    handle.result()
                except RuntimeError as error:
                    assert "forked" in str(error)
                    os._exit(5)
                os._exit(6)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        assert handle.result() == 3
        handles = [ctx.all_reduce_async("SUM", np.ones(100_000)) for _ in range(3)]
    print("done", flush=True)
    """,
        **FORKS,
    )
    assert result.stdout.split() == ["done"] * 3, result
    assert (result.returncode, result.stderr) == (0, "")


# --- two threads of each rank ---------------------------------------------------------


def _in_a_replica_function(strategy, inside, leave):
    strategy.run(lambda: inside.set() or leave.wait(60))


def _in_with(strategy, inside, leave):
    with strategy._group.replica_frame.replica_context:
        inside.set()
        leave.wait(60)


def _moving(strategy, inside, leave):
    """As in the middle of data or reports, which are moved by Python."""
    guard = strategy._group.guard
    with guard.payload():
        inside.set()
        leave.wait(60)


def _reduces(strategy):
    all_reduce(strategy, "SUM", X)


def _gathers(strategy):
    strategy.run(lambda: context().all_gather(X, axis=0))


def _enters(strategy):
    with strategy._group.replica_frame.replica_context:
        pass


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("first", "second", "where", "call"),
    [
        (_in_a_replica_function, _reduces, "in a replica function", "run(all_reduce."),
        (_in_with, _enters, "in a `with` block of the same replica context", "Replica"),
        (_moving, _reduces, "at the end of run(all_reduce.", "all_reduce SUM float64"),
        (_moving, _gathers, "at the end of run(all_reduce.", "all_gather axis=0"),
    ],
)
@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.usefixtures("by_nodes")
def test_calls_of_two_threads(
    new_strategy, monkeypatch, first, second, where, call, nodes
):
    """Ranks may order them differently, and would mix their data."""
    monkeypatch.setenv("MPIDIST_SIMULATED_NODES", nodes)
    strategy = new_strategy()
    for op in ("SUM", "MAX"):  # later ones are made by the core, without Python
        all_reduce(strategy, op, X)
    inside, leave = threading.Event(), threading.Event()

    def body():
        with contextlib.suppress(mpidist.CollectiveTimeoutError):
            first(strategy, inside, leave)

    thread = threading.Thread(target=body)
    thread.start()
    assert inside.wait(60)
    rows = outcomes(lambda: second(strategy))
    leave.set()
    thread.join()
    rows += outcomes(lambda: all_reduce(strategy, "SUM", X))
    assert {row.name for row in rows} == {"RuntimeError", "CollectiveTimeoutError"}
    for row in rows:
        assert f" is {where}" in row.message
        assert f", and thread 'MainThread' calls {call}" in row.message
        assert "make the calls of a strategy from one thread" in row.message


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.parametrize("second", [_reduces, _gathers])
@pytest.mark.usefixtures("by_nodes")
def test_a_call_while_another_thread_waits(
    new_strategy, monkeypatch, rank, nodes, second
):
    monkeypatch.setenv("MPIDIST_SIMULATED_NODES", nodes)
    strategy = new_strategy()
    values = strategy.run(lambda: X)

    def wait():
        with contextlib.suppress(mpidist.CollectiveTimeoutError):
            strategy.reduce("MAX", values, axis=None)

    def call():
        if rank:
            everywhere(None)
            strategy.reduce("MAX", values, axis=None)
            return
        thread = threading.Thread(target=wait)
        thread.start()
        while not strategy._group.guard.channel.busy:
            time.sleep(0.001)
        try:
            second(strategy)
        finally:
            everywhere(None)
            thread.join()

    rows = outcomes(call)
    assert rows[0].name == "RuntimeError"
    # In memory the others may have what they need of the call that rank 0 was in.
    assert {row.name for row in rows[1:]} <= {"NoneType", "CollectiveTimeoutError"}
    for row in [rows[0], *outcomes(lambda: all_reduce(strategy, "SUM", X))]:
        assert "another thread of rank 0, or what a signal has" in row.message
        assert "is in Strategy.reduce MAX float64 (4,), and thread" in row.message
        assert "make the calls of a strategy from one thread" in row.message
