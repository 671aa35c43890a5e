"""A child that a rank has forked: what it may do, and what nobody else notices."""

import re
import textwrap

import pytest
from launching import FORKS, run_ranks

pytestmark = pytest.mark.core

PROLOGUE = """
import concurrent.futures, multiprocessing, os, sys, time, warnings
import numpy as np
import mpidist
from mpidist.data import Dataset
strategy = mpidist.MPIStrategy()
rank = strategy.replica_id
context = mpidist.get_replica_context
def all_reduce(x):
    return strategy.run(lambda: context().all_reduce("SUM", x))
(shared,) = strategy.experimental_local_results(all_reduce(np.ones(300_000)))
with strategy.scope():
    v = mpidist.Variable(np.zeros(3))

def status_of(function):
    "Run a function in a child, and return the child's exit code."
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        return function() or 0
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def in_child(function):
    "Run a function in a child; return what it returns, or the text of what it raises."
    with concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("fork")
    ) as pool:
        try:
            return pool.submit(function).result()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
"""

EPILOGUE = """
(total,) = strategy.experimental_local_results(all_reduce(1.0))
assert total == 3.0, total
assert (shared == 3).all()
v.assign(v + 1)
assert (v.numpy() == 1).all()
print("done", flush=True)
"""


# --- what children do: each a part of a job, after the other ones ---------------------

CALLS = """
def reads():
    return v.numpy().sum() + shared[:4].sum()
def computes():
    warnings.simplefilter("error")  # it is meant here
    alone = mpidist.get_strategy()
    total = alone.run(lambda: context().all_reduce("SUM", 2.0))
    return float(alone.experimental_local_results(total)[0])
def writes():
    shared[:] = 7
    return shared[-1]
def reduces_small():
    all_reduce(1.0)
def reduces_large():
    all_reduce(np.ones(300_000))
def runs():
    strategy.run(lambda: 3)
def merges():
    strategy.run(lambda: context().merge_call(lambda s: None))
def gathers():
    strategy.gather(strategy.run(lambda: np.ones(2)), axis=0)
def assigns():
    v.assign(np.ones(3))
def updates():
    strategy.extended.update(v, lambda v: v.assign(np.ones(3)))
def takes_buffers():
    strategy.buffers_like(np.ones(3))
def saves():
    mpidist.Checkpoint(v=v).save("nowhere")
def restores():
    mpidist.Checkpoint(v=v).restore("nowhere")
def makes_a_dataset():
    strategy.experimental_distribute_dataset(Dataset.from_tensor_slices(np.ones(6)).batch(3))
def makes_a_strategy():
    mpidist.MPIStrategy()
if rank != 2:
    assert in_child(reads) == 12
    assert in_child(writes) == 7
    assert in_child(computes) == 2.0
    for call in (reduces_small, reduces_large, runs, merges, gathers, assigns, updates,
                 takes_buffers, saves, restores, makes_a_dataset, makes_a_strategy):
        text = in_child(call)
        assert text.startswith("RuntimeError"), (call, text)
        assert "this process was forked by a rank" in text, (call, text)
        assert "`spawn`" in text and "Make collective calls in the parent" in text
"""


ENDS = """
me = os.getpid()
if rank == 1:
    def raises():
        raise LookupError("of the child")
    for function, code in [
        (lambda: sys.exit(5), 5), (lambda: sys.exit(), 0), (lambda: os._exit(6), 6),
        (lambda: sys.exit("a reason"), 1), (raises, 1),
    ]:
        found = status_of(function)
        assert found == code, (found, code)
    assert os.getpid() == me
# They end while their parent makes calls.
pids = []
for number in range(3):
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        os.read(read_end, 1)  # until the parent has closed its end
        sys.exit(number)
    all_reduce(1.0)
    os.close(write_end)
    os.close(read_end)
    all_reduce(1.0)
    pids.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
assert codes == [0, 1, 2], codes
"""

REACHES_THE_END = """
pid = os.fork() if rank == 0 else -1
if pid > 0:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
if pid == 0:
    import atexit
    atexit.register(print, "its own handlers run", file=sys.stderr)
    sys.exit(4)
"""

OF_A_REPLICA_FUNCTION = """
for where in ("run", "merge_fn", "update"):
    def forks():
        pid = os.fork()
        if pid == 0:
            try:
                calls()
            except RuntimeError as error:
                assert "this process was forked by a rank" in str(error)
                return
            os._exit(9)  # not reached
        children.append(pid)
    children, me = [], os.getpid()
    def replica_fn():
        forks() if rank == 1 else None
        return context().all_reduce("SUM", 1.0)
    def merge_fn(s, x):
        forks()
        return s.reduce("SUM", x, axis=None)
    def update_fn(v):
        forks() if rank == 1 else None
        v.assign_add(np.zeros(3))
    if where == "run":
        calls = lambda: context().all_reduce("SUM", 1.0)
        program = lambda: strategy.run(replica_fn)
    elif where == "merge_fn":
        calls = lambda: mpidist.get_strategy().extended.update(v, lambda v: None)
        program = lambda: strategy.run(lambda: context().merge_call(merge_fn, (1.0,)))
    else:
        calls = lambda: all_reduce(1.0)
        program = lambda: strategy.extended.update(v, update_fn)
    try:
        program()
    except RuntimeError:
        assert os.getpid() != me
        sys.exit(3)  # of the child, which has gone on as far as here
    for pid in children:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
"""

WORKERS = """
def double(x):
    return 2 * x
with multiprocessing.get_context("fork").Pool(2) as pool:
    numbers = Dataset.from_tensor_slices(np.arange(12))
    doubles = numbers.map(lambda x: np.int64(pool.apply(double, (int(x),))))
    ahead = doubles.batch(6).prefetch(1)
    got = []
    for batch in strategy.experimental_distribute_dataset(ahead):
        (part,) = strategy.experimental_local_results(batch)
        got += part.tolist()
        all_reduce(1.0)
rows = [list(range(12))[b + 2 * rank : b + 2 * rank + 2] for b in (0, 6)]
assert got == [2 * x for row in rows for x in row], got
"""

# While a thread of the parent reads ahead: the last part.
READ_AHEAD = """
rows = iter(Dataset.from_tensor_slices(np.arange(100)).prefetch(2))
assert next(rows) == 0
def goes_on():
    return [int(next(rows)) for _ in range(50)]
text = in_child(goes_on)
assert "RuntimeError: this process was forked while a thread of its parent" in text
def begins():
    return [int(x) for x in Dataset.from_tensor_slices(np.arange(5)).prefetch(2)]
assert in_child(begins) == [0, 1, 2, 3, 4]
assert next(rows) == 1
"""

PARTS = (CALLS, ENDS, REACHES_THE_END, OF_A_REPLICA_FUNCTION, WORKERS, READ_AHEAD)


@pytest.mark.parametrize(
    ("parts", "env"),
    [
        (PARTS, {}),
        ((CALLS, ENDS), {"MPIDIST_IMPLEMENTATION": "direct", "MPIDIST_ABORT": "0"}),
    ],
    ids=["all", "direct, without abort"],
)
def test_what_children_do_is_their_own(parts, env):
    text = "".join((PROLOGUE, *parts, EPILOGUE))
    result = run_ranks(3, ["-c", text], timeout=100, env=FORKS | env)
    err = result.stderr
    assert (result.returncode, result.stdout.split()) == (0, ["done"] * 3), err
    assert err.count("LookupError: of the child") == 1
    assert err.count("a reason") == 1
    assert err.count("its own handlers run") == (REACHES_THE_END in parts)
    assert "ending the job" not in err


def test_a_process_that_a_rank_starts_is_no_rank(tmp_path):
    """It has the variables of the launcher, and MPI would take it for the rank."""
    program = tmp_path / "mpi_starts.py"  # no launcher, although it begins like one
    program.write_text(
        textwrap.dedent(
            """
            import multiprocessing, os, subprocess, sys
            if len(sys.argv) > 1:  # a program between mpirun and a rank
                import mpi4py
                mpi4py.rc.initialize = False
                from mpi4py import MPI
                command = [sys.executable, __file__]
                sys.exit(subprocess.call(command, close_fds=False))
            import mpidist

            def try_it():
                try:
                    print("made", mpidist.MPIStrategy())
                except RuntimeError as error:
                    print(f"refused by {os.environ['OF']}: {error}", flush=True)

            if __name__ == "__main__":
                strategy = mpidist.MPIStrategy()
                os.environ["OF"] = str(os.getpid())
                for method in ("spawn", "forkserver"):
                    child = multiprocessing.get_context(method).Process(target=try_it)
                    child.start()
                    child.join()
                code = "import mpi_starts; mpi_starts.try_it()"
                command = f'"{sys.executable}" -c "{code}"; exit $?'
                env = dict(os.environ, PYTHONPATH=os.path.dirname(__file__))
                subprocess.run(command, shell=True, check=True, env=env)
                step = lambda: mpidist.get_replica_context().all_reduce("SUM", 1.0)
                print(strategy.reduce("MEAN", strategy.run(step), axis=None))
            """
        )
    )
    done = run_ranks(2, [program, "inner"], timeout=100)
    assert done.returncode == 0, done.stderr
    assert "made" not in done.stdout
    assert done.stdout.count("2.0\n") == 2
    refused = re.findall(r"refused by (\d+): .* \(process (\d+)\)", done.stdout)
    assert len(refused) == 6
    assert all(parent == named for parent, named in refused)
