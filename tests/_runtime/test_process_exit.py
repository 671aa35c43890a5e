"""How a job ends: exceptions outside `run`, sys.exit, and leaving early."""

import textwrap
import time

import pytest
from launching import ONLY_THE_FIRST, ONLY_WHO_FAILS, run_ranks
from replicas import rarely

pytestmark = pytest.mark.core

PROLOGUE = """
import os, sys, time
import numpy as np
import mpidist
strategy = mpidist.MPIStrategy()
rank = strategy.replica_id
size = strategy.num_replicas_in_sync
def step():
    return mpidist.get_replica_context().all_reduce("SUM", 1.0)
strategy.run(step)
if "DEADLINE" in os.environ:  # not to make it in, which takes long on a busy machine
    from mpidist._strategy.strategy import group_of
    group_of(strategy).guard.timeout_seconds = float(os.environ["DEADLINE"])
"""


def program(body):
    return PROLOGUE + textwrap.dedent(body)


def end_of(body, n=2, timeout=100, prologue=True, **env):
    """Run a program; return its exit code, stdout, stderr and seconds after start."""
    text = program(body) if prologue else textwrap.dedent(body)
    result = run_ranks(n, ["-c", text], timeout=timeout, env=env)
    return result.returncode, result.stdout, result.stderr


def count_tracebacks(stderr):
    return stderr.count("Traceback (most recent call last)")


UNCAUGHT = {
    "outside, the others wait": """
        if rank == 1:
            print("failing at", time.time(), flush=True)
            raise LookupError("no such key")
        strategy.run(step)
    """,
    "outside, the others sleep": """
        if rank == 1:
            print("failing at", time.time(), flush=True)
            raise LookupError("no such key")
        time.sleep(600)
    """,
    "in run": """
        def bad():
            if rank == 1:
                raise LookupError("no such key")
            return step()
        strategy.run(bad)
    """,
    "in merge_fn": """
        def merge_fn(strategy, x):
            raise LookupError("no such key")
        strategy.run(lambda: mpidist.get_replica_context().merge_call(merge_fn, (1,)))
    """,
    "in a thread": """
        import threading
        def train():
            strategy.run(step)
            if rank == 1:
                raise LookupError("no such key")
            strategy.run(step)
        thread = threading.Thread(target=train, name="training")
        thread.start()
        thread.join()
        if rank == 1:
            time.sleep(600)  # a main thread that goes on
    """,
}


@pytest.mark.parametrize("where", UNCAUGHT)
def test_an_uncaught_exception_ends_the_job_and_is_printed_once(where):
    body = textwrap.dedent(UNCAUGHT[where])
    n = 4 if "sleep" in where else 2
    code, out, err = end_of(f"{ONLY_WHO_FAILS}\n{body}", n)
    ended = time.time()
    assert code != 0
    who = f"rank {0 if 'merge_fn' in where else 1} raised an exception"
    thread = " in thread 'training'" if "thread" in where else ""
    assert f"mpidist: {who}{thread}, ending the job" in err
    assert err.count("LookupError: no such key") == 1
    assert count_tracebacks(err) == 1
    if "outside" in where:
        # At once, but for what a busy machine adds; those that wait do so for longer.
        assert ended - float(out.split("failing at ")[1].split()[0]) < 60


@pytest.mark.parametrize(
    ("who", "where"), [("one", "in run"), ("all", "outside"), rarely("one", "outside")]
)
def test_sys_exit(who, where):
    condition = "rank == 1" if who == "one" else "True"
    body = f"""
    def leave():
        if {condition}:
            sys.exit(3)
        return step()
    if {where == "in run"}:
        strategy.run(leave)
    else:
        leave()
        strategy.run(step)
    print("not reached", flush=True)
    """
    code, out, err = end_of(body)
    assert code == 3, err
    assert "not reached" not in out
    assert count_tracebacks(err) == 0
    assert err.count("rank 1 left the program by sys.exit(3)") == (who == "one")


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("", "MPI does not run, since `mpi4py.rc.initialize` is False"),
        ("MPI.Init(); MPI.Finalize()", "has called `MPI.Finalize()`"),
    ],
)
def test_mpi_does_not_run(before, message):
    body = f"""
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    {before}
    import mpidist
    try:
        mpidist.MPIStrategy()
    except RuntimeError as error:
        print(error)
    else:
        raise AssertionError
    MPI.Is_initialized() or MPI.Init()
    if not MPI.Is_finalized():
        print(mpidist.MPIStrategy().num_replicas_in_sync)
        MPI.Finalize()
    """
    code, out, err = end_of(body, prologue=False)
    assert code == 0, err
    assert out.count(message) == 2
    assert out.count("2\n") == (0 if before else 2)


def test_a_rank_that_leaves_without_a_word_ends_the_job():
    """The launcher sees it. Its code is not promised: docs/guide/launching.md."""
    body = """
    if rank == 1:
        os._exit(3)
    strategy.run(step)
    print("not reached", flush=True)
    """
    code, out, _ = end_of(body)
    assert code != 0
    assert "not reached" not in out


def test_a_rank_that_ends_while_the_others_wait_for_it():
    body = """
    if rank != 1:
        strategy.run(step)
    """
    code, _, err = end_of(body)
    assert code != 0
    assert "its program has ended" in err
    assert "rank 1: nothing more" in err
    assert count_tracebacks(err) == 1


@pytest.mark.parametrize("how", [rarely("sleeps"), "is stopped"])
def test_a_rank_that_does_not_come_to_its_end(how):
    """The end of the program is a wait as any other: a line, a deadline, an error."""
    late = "time.sleep(600)"
    if how == "is stopped":
        late = "os.kill(os.getpid(), 19); time.sleep(600)"  # the launcher wakes it
    body = f"""
    if rank == 1:
        {late}
    """
    settings = {"DEADLINE": "2", "MPIDIST_STALL_SECONDS": "0.5"}
    code, _, err = end_of(body, **settings)
    assert code != 0
    line, error = (x for x in err.splitlines() if "rank 1 did not reach call" in x)
    assert line.startswith("mpidist: rank")
    assert "waited at the end of the program" in line
    assert "all_reduce" in line or "the end of run" in line  # its last call
    assert "where rank 1 is" in err
    assert error.startswith("mpidist.CollectiveTimeoutError: [rank ")
    assert "within 2 s" in error
    assert count_tracebacks(err) == 0


def test_the_deadline_at_the_end_if_it_ends_the_job_anyway():
    body = f"{ONLY_THE_FIRST}\ntime.sleep(600 * (rank == 1))"
    settings = {"DEADLINE": "1", "MPIDIST_TIMEOUT_ABORT": "1"}
    code, _, err = end_of(body, **settings)
    assert code != 0
    assert err.count("CollectiveTimeoutError: [rank") == 1


def test_groups_with_strategies_of_their_own_end_well_and_one_rank_later():
    body = """
    from mpi4py import MPI
    half = mpidist.MPIStrategy(MPI.COMM_WORLD.Split(rank % 2))
    other = mpidist.MPIStrategy()
    total = half.experimental_local_results(half.run(step))[0]
    both = other.experimental_local_results(other.run(step))[0]
    if rank == 1:
        time.sleep(2)
    print(f"{total:g} of {both:g}", flush=True)
    """
    code, out, err = end_of(body, 4)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["2 of 4"] * 4


def test_abort_can_be_left_to_the_user():
    body = """
    try:
        raise LookupError("mine")
    finally:
        print(sys.excepthook is sys.__excepthook__, flush=True)
        from mpi4py import MPI
        MPI.COMM_WORLD.Barrier()  # mpirun ends the others when one leaves like this
        os._exit(0)
    """
    _, out, err = end_of(body, MPIDIST_ABORT="0")
    assert out.split() == ["True", "True"]
    assert "mpidist" not in err


def test_a_time_out_can_end_a_program_that_would_catch_it():
    body = """
    while True:
        try:
            if rank == 1:
                time.sleep(600)
            strategy.run(step)
        except mpidist.CollectiveTimeoutError:
            print("caught", flush=True)
    """
    settings = {"DEADLINE": "1", "MPIDIST_TIMEOUT_ABORT": "1"}
    code, out, err = end_of(body, **settings)
    assert code != 0
    assert out == ""
    assert "mpidist: rank 0 raised an exception, ending the job:" in err
    assert "CollectiveTimeoutError: [rank 0] rank 1 did not reach call" in err


def test_a_time_out_that_is_caught_lets_the_program_end():
    body = """
    from mpi4py import MPI
    if rank == 1:
        MPI.COMM_WORLD.Barrier()  # until the others have given up
    try:
        strategy.run(step)
    except mpidist.CollectiveTimeoutError as error:
        print("caught", flush=True)
    if rank != 1:
        MPI.COMM_WORLD.Barrier()
    """
    code, out, err = end_of(body, DEADLINE="1")
    assert code == 0, err
    assert out.split() == ["caught"] * 2


# --- threads --------------------------------------------------------------------------


def test_a_program_that_ends_while_a_thread_is_in_a_call_ends_the_job():
    """Python would end the thread: the others would wait until the deadline."""
    body = """
    import logging, threading
    waits = threading.Event()
    class Reports(logging.Handler):
        def emit(self, record):
            waits.set()
    if rank == 0:
        time.sleep(600)
    logging.getLogger("mpidist").addHandler(Reports())
    threading.Thread(target=strategy.run, args=(step,), daemon=True).start()
    waits.wait()
    """
    code, _, err = end_of(body, MPIDIST_STALL_SECONDS="1")
    assert code != 0
    assert "mpidist: rank 1 raised an exception at the end of its program" in err
    assert err.count("RuntimeError: another thread of rank 1, or what") == 1
    assert count_tracebacks(err) == 0


def test_a_program_does_not_end_before_its_thread_has_ended_the_job():
    """Python would end the thread while it waits for its turn to say why."""
    body = """
    import threading
    if rank == 1:
        from mpidist._runtime import termination
        begun = threading.Event()
        termination.ignore = begun.set  # what ends the job begins with it
        threading.Thread(target=strategy.run, args=(step,), daemon=True).start()
        begun.wait()
    """
    code, _, err = end_of(body)
    assert code != 0
    assert "mpidist: rank 1 raised an exception in thread" in err
    assert "its program has ended" in err


def test_a_program_does_not_end_while_its_thread_may_be_about_to_end_the_job():
    body = """
    import atexit, threading
    if rank == 1:
        from mpidist._runtime import job_end
        raised, left, wait = threading.Event(), threading.Event(), job_end.wait_for
        def run():
            try:
                strategy.run(step)
            finally:
                raised.set()
                left.wait()
        def wait_and_tell(waits):
            wait(waits)
            left.set()
        job_end.wait_for = wait_and_tell
        threading.Thread(target=run, daemon=True).start()
        raised.wait()
    """
    code, _, err = end_of(body)
    assert code != 0
    assert "mpidist: rank 1 raised an exception in thread" in err


def test_threads_that_do_not_use_it_end_alone():
    body = """
    import threading
    def draw(leaves):
        mpidist.Variable(1.0).assign(2.0)  # of this process only
        if leaves:
            sys.exit(5)
        raise LookupError("no progress bar")
    for leaves in (False, False, True, True):
        thread = threading.Thread(target=draw, args=(leaves,))
        thread.start()
        thread.join()
    strategy.run(step)
    print("done", flush=True)
    """
    code, out, err = end_of(body)
    assert (code, out.split()) == (0, ["done"] * 2)
    assert "ending the job" not in err
    assert err.count("LookupError: no progress bar") == 4


def test_the_exit_code_of_a_thread_is_not_that_of_the_program():
    body = """
    import threading
    thread = threading.Thread(target=lambda: sys.exit(5))
    thread.start()
    thread.join()
    if rank != 1:
        strategy.run(step)
    """
    code, _, err = end_of(body)
    assert code not in (0, 5)
    assert "its program has ended" in err


# --- the hooks ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end", [rarely(""), "sys.exit(3)", rarely("raise bdb.BdbQuit")]
)
def test_a_hook_of_the_users_own_shows_the_exception(end):
    """It is not reported itself if it ends by an exception that is there for that."""
    body = f"""
    import bdb, os, sys, time
    def mine(kind, error, trace):
        print(f"mine: {{error}}", file=sys.stderr, flush=True)
        {end}
    sys.excepthook = mine
    import mpidist
    strategy = mpidist.MPIStrategy()
    if strategy.replica_id == 1:
        raise LookupError("no such key")
    time.sleep(600)
    """
    code, _, err = end_of(body, prologue=False)
    assert code != 0
    assert err.count("mine: no such key") == 1
    assert err.count("no such key") == 1
    assert "mpidist: rank 1 raised an exception, ending the job" in err
    assert count_tracebacks(err) == 0


BROKEN_STREAMS = {
    "stdout was closed": "sys.stdout.close()",
    "stdout cannot be flushed": "sys.stdout = type('Log', (), {'write': print})()",
    "a log that was closed": "sys.stderr = open(os.devnull, 'w'); sys.stderr.close()",
    "no stderr": "sys.stderr = None",
    "in memory": "import io; sys.stderr = io.StringIO()",  # as torch.distributed's hook
    "a hook that raises": "sys.excepthook = lambda *_: 1 / 0",
}


@pytest.mark.parametrize(
    "how",
    [
        x if x in ("no stderr", "in memory", "a hook that raises") else rarely(x)
        for x in BROKEN_STREAMS
    ],
)
def test_an_exception_is_shown_also_if_the_program_broke_its_streams(how):
    body = f"""
    import os, sys, time
    {BROKEN_STREAMS[how]}
    import mpidist
    strategy = mpidist.MPIStrategy()
    if strategy.replica_id == 1:
        raise LookupError("no such key")
    time.sleep(600)
    """
    code, _, err = end_of(body, prologue=False)
    assert code != 0
    assert "mpidist: rank 1 raised an exception, ending the job" in err
    assert err.count("LookupError: no such key") == 1
    assert ("ZeroDivisionError" in err) == ("hook" in how)


# What Python keeps for the whole process, and a library should leave alone.
STATE = """
import os, signal, sys, threading, warnings
def state():
    handlers = {n: signal.getsignal(n) for n in signal.valid_signals()}
    return {
        "hooks": (sys.excepthook, sys.exit, threading.excepthook, sys.unraisablehook),
        "filters": list(warnings.filters),
        "signals": handlers,
        "environment": dict(os.environ),
        "switch interval": sys.getswitchinterval(),
        "path": list(sys.path),
    }
import numpy, mpi4py.MPI  # what these change is not ours
before = state()
def changed():
    now = state()
    return sorted(k for k in before if now[k] != before[k])
"""


def test_what_import_and_strategies_change_of_the_process():
    """The hooks, while there is a strategy; not those that the user has put over."""
    body = """
    import mpidist
    original = sys.exit
    print("imported", changed(), flush=True)
    a = mpidist.MPIStrategy()
    print("made", changed(), flush=True)
    b = mpidist.MPIStrategy()
    a.run(lambda: mpidist.get_replica_context().all_reduce("SUM", numpy.ones(9)))
    a.close()
    print("one left", changed(), flush=True)
    b.close()
    print("closed", changed(), flush=True)
    mpidist.MPIStrategy().close()
    print("again", changed(), flush=True)
    os.environ["MPIDIST_ABORT"] = "0"
    a = mpidist.MPIStrategy()
    del os.environ["MPIDIST_ABORT"]
    print("without abort", changed(), flush=True)
    a.close()

    a, ours = mpidist.MPIStrategy(), sys.excepthook
    def over(*args):
        print("over", flush=True)
        ours(*args)
    sys.excepthook = over
    a.close()
    print("stays", sys.excepthook is over, sys.exit is original, flush=True)
    if mpi4py.MPI.COMM_WORLD.rank == 0:
        sys.excepthook(LookupError, LookupError("shown"), None)
    mpidist.MPIStrategy().close()
    print("stays again", sys.excepthook is over, flush=True)
    """
    code, out, err = end_of(STATE + textwrap.dedent(body), prologue=False)
    assert (code, err) == (0, "LookupError: shown\n")
    made = ("made", "one left")
    others = ("imported", "closed", "again", "without abort")
    lines = [f"{when} {['hooks', 'signals']}" for when in made]
    lines += [f"{when} []" for when in others]
    lines += ["stays True True", "stays again True"]
    assert sorted(out.splitlines()) == sorted([*lines * 2, "over"])


def test_a_strategy_that_can_not_be_made_keeps_its_error_for_one_rank():
    body = f"""
    import mpidist
    {ONLY_THE_FIRST}
    mpidist.MPIStrategy(device="tpu")
    """
    code, _, err = end_of(body, 3, prologue=False)
    assert code != 0
    assert "mpidist: rank 0 raised an exception, ending the job" in err
    assert count_tracebacks(err) == 1
