"""mpidist.testing: replicas as threads of one process, without MPI."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from launching import plain_environment, run_alone
from replicas import own

import mpidist
from mpidist import testing
from mpidist._strategy.strategy import group_of
from mpidist.testing import _run
from mpidist.testing._communicator import ThreadCommunicator
from mpidist.testing._world import Channel, World

ROOT = Path(mpidist.__file__).parent.parent
LONG = 600.0  # a deadline that no test waits for

# A replica may be stopped in a callback of Python's garbage collector, such as that of
# JAX, which another test has imported: Python then only reports the exception.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


def all_reduce(x, op="SUM"):
    return mpidist.get_replica_context().all_reduce(op, x)


def python(source, *, cwd=ROOT, check=True):
    """Run a program in a Python of its own."""
    base, env = os.environ, {"PYTHONPATH": str(ROOT)}
    done = run_alone("-c", textwrap.dedent(source), base=base, env=env, cwd=cwd)
    assert not check or done.returncode == 0, done.stderr
    return done


# --- programs -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_results_come_in_the_order_of_the_replicas(n):
    def program(a, *, b):
        strategy = mpidist.MPIStrategy()
        total = own(strategy, strategy.run(lambda: all_reduce(np.arange(3.0))))
        np.testing.assert_array_equal(total, np.arange(3.0) * n)
        return strategy.replica_id, strategy.num_replicas_in_sync, a, b

    assert testing.run(n, program, 1, b=2) == [(k, n, 1, 2) for k in range(n)]


def test_no_mpi_is_imported_and_the_hooks_of_processes_are_left_alone():
    done = python(
        """
        import contextlib
        import sys
        import mpidist

        def program():
            strategy = mpidist.MPIStrategy()
            return strategy.reduce("SUM", strategy.run(lambda: 1.0), axis=None)

        before = sys.excepthook, sys.exit
        assert mpidist.testing.run(3, program) == [3.0, 3.0, 3.0]
        assert before == (sys.excepthook, sys.exit)
        with contextlib.suppress(TypeError):  # nor for an error
            mpidist.testing.run(2, mpidist.MPIStrategy, device=1)
        print([name for name in sys.modules if name.startswith("mpi4py")])
        """
    )
    assert done.stdout == "[]\n", done.stderr


def test_optimizers_of_replicas_are_told_apart():
    """Each makes its own, at moments that differ; merge_fn names rank 0's to others."""

    def program():
        strategy = mpidist.MPIStrategy()
        time.sleep(random.Random(strategy.replica_id).random() / 20)
        optimizers = [mpidist.optimizers.SGD(0.5) for _ in range(3)]
        with strategy.scope():
            v = mpidist.Variable(np.zeros(2))

        def step():
            k = mpidist.get_replica_context().replica_id_in_sync_group
            return mpidist.get_replica_context().merge_call(
                lambda _, g: optimizers[1].apply_gradients([(g, v)]),
                (np.full(2, k + 1.0),),
            )

        for _ in range(2):
            strategy.run(step)
        return v.numpy().tolist(), [int(o.iterations) for o in optimizers[1:2]]

    assert testing.run(3, program) == [([-6.0, -6.0], [2])] * 3


def test_strategies_have_the_same_number_on_all_replicas():
    def program():
        made = [mpidist.MPIStrategy() for _ in range(3)]
        return [repr(strategy).split(":")[0] for strategy in made]

    names = [f"<mpidist.MPIStrategy #{k}" for k in (1, 2, 3)]
    assert testing.run(3, program) == [names] * 3
    assert testing.run(2, program) == [names] * 2


def test_no_two_strategies_have_one_identity():
    """Timelines tell them apart by it, also those that are gone."""
    world = World(1)
    made = (ThreadCommunicator(Channel(world, (0,)), 0, 0) for _ in range(99))
    assert len({one.identity for one in made}) == 99


def test_variables_of_several_replicas_are_told_apart_in_a_set():
    """Their keys, by which ranks have one order, are the same in each replica."""

    def program():
        with mpidist.MPIStrategy().scope():
            return [mpidist.Variable(np.ones(shape)) for shape in [(), 3]]

    made = [v for _ in range(2) for own in testing.run(2, program) for v in own]
    assert len({*made}) == len(made) == 8
    assert {v: k for k, v in enumerate(made)}[made[5]] == 5


def test_a_closed_strategy_is_not_waited_for():
    def program():
        with_close = mpidist.MPIStrategy()
        with_close.close()
        with pytest.raises(RuntimeError, match="was closed"):
            with_close.run(lambda: all_reduce(1.0))
        if mpidist.testing.current_group().rank == 0:
            time.sleep(0.05)

    testing.run(2, program)


@pytest.mark.parametrize("implementation", ["AUTO", "SHARED", "DIRECT", "STAGED"])
def test_options_of_mpi_strategies(implementation):
    def program():
        options = mpidist.experimental.CommunicationOptions(
            implementation=implementation, bytes_per_pack=100, timeout_seconds=50
        )
        strategy = mpidist.MPIStrategy(communication_options=options)
        assert group_of(strategy).guard.timeout_seconds == 50
        return own(strategy, strategy.run(lambda: all_reduce([1.0, np.ones(99)])[0]))

    assert testing.run(2, program) == [2.0, 2.0]


def test_a_program_ends_by_the_signal_of_its_watcher(tmp_path):
    def program():
        strategy = mpidist.MPIStrategy()
        with strategy.scope():
            step = mpidist.Variable(0, aggregation=mpidist.VariableAggregation.SUM)
        config = mpidist.experimental.TerminationConfig(
            termination_watcher_fn=lambda: (
                strategy.replica_id == 1 and int(step.numpy()) == 3
            ),
            exit_fn=lambda: None,
        )
        handler = mpidist.experimental.PreemptionCheckpointHandler(
            None, mpidist.Checkpoint(step=step), tmp_path / "c", config
        )
        for _ in range(3):
            handler.run(lambda: step.assign_add(1))
        handler.save_checkpoint_if_preempted()

    before = signal.getsignal(signal.SIGTERM)
    testing.run(2, program)
    assert signal.getsignal(signal.SIGTERM) is before
    assert os.listdir(tmp_path / "c")


def test_threads_have_contexts_of_their_own():
    def program():
        assert not mpidist.has_strategy()
        strategy = mpidist.MPIStrategy()
        with strategy.scope():
            testing.current_group().barrier()
            assert mpidist.get_strategy() is strategy
            testing.current_group().barrier()
        assert not mpidist.has_strategy()
        mpidist.experimental_set_strategy(strategy)

    testing.run(3, program)
    assert not mpidist.has_strategy()


def test_the_settings_of_the_caller_hold():
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        testing.run(2, lambda: np.ones(1) / np.zeros(1))


# --- how a run ends -------------------------------------------------------------------


def test_a_replica_that_raises_ends_the_run():
    """The others, which wait without a deadline to speak of, are told at once."""
    told = []
    ready = threading.Barrier(3)

    def program():
        strategy = mpidist.MPIStrategy()
        ready.wait(60)
        if strategy.replica_id == 1:
            time.sleep(0.2)  # a replica that is not yet in a call is stopped
            raise KeyError("mine")
        try:
            strategy.run(lambda: all_reduce(1.0))
        except mpidist.ReplicaError as error:
            told.append(str(error))
            raise

    with pytest.raises(KeyError, match="mine") as caught:
        testing.run(3, program, timeout_seconds=LONG)
    assert caught.value.__notes__ == [
        "raised on replica 1 of 3 (mpidist.testing.run)",
    ]
    assert len(told) == 2
    assert all("replica 1 has failed: KeyError: 'mine'" in text for text in told)


def reduce_for_ever(group, pair):
    while True:
        pair.run(lambda: all_reduce(1.0))


def swallow(group, pair):
    while True:
        with contextlib.suppress(Exception):
            pair.run(lambda: all_reduce(1.0))
        time.sleep(0.001)


@pytest.mark.parametrize(
    "wait",
    [
        lambda group, pair: mpidist.MPIStrategy(),
        lambda group, pair: group.barrier(),
        lambda group, pair: group.all_gather(1),
        lambda group, pair: group.broadcast(1, root=1),
        lambda group, pair: group.split(0),
        reduce_for_ever,
        swallow,
    ],
)
def test_whatever_others_do_they_end_when_one_raises(wait):
    def program():
        group = testing.current_group()
        pair = mpidist.MPIStrategy(comm=group.split(group.rank // 2))
        if group.rank == 1:
            raise KeyError("mine")
        wait(group, pair)

    with pytest.raises(KeyError, match="mine") as caught:
        testing.run(4, program, timeout_seconds=LONG)
    assert len(caught.value.__notes__) == 1


def test_the_lowest_of_several_is_raised_and_the_others_noted():
    def program():
        group = testing.current_group()
        group.barrier()
        if group.rank == 0:
            for _ in range(600):
                time.sleep(0.1)  # ended meanwhile, between two lines
            raise AssertionError("never")
        raise (OSError("a") if group.rank == 1 else KeyError("b"))

    with pytest.raises(OSError, match="a") as caught:
        testing.run(3, program)
    assert caught.value.__notes__ == [
        "raised on replica 1 of 3 (mpidist.testing.run)",
        "replica 2 raised KeyError: 'b'",
    ]


def test_what_all_raise_is_raised_once():
    def program():
        strategy = mpidist.MPIStrategy()
        k = strategy.replica_id
        strategy.run(lambda: all_reduce(np.ones(3 + (k == 1))))

    with pytest.raises(mpidist.CollectiveMismatchError) as caught:
        testing.run(3, program, timeout_seconds=LONG)
    assert "ranks 0, 2: all_reduce SUM float64 (3,)" in str(caught.value)
    assert "rank 1: all_reduce SUM float64 (4,)" in str(caught.value)
    assert caught.value.__notes__ == [
        "raised on replicas 0, 1, 2 of 3 (mpidist.testing.run)"
    ]


def test_what_one_raises_in_run_is_its_own():
    def program():
        strategy = mpidist.MPIStrategy()

        def fn():
            if strategy.replica_id == 2:
                raise ZeroDivisionError("mine")
            return all_reduce(1.0)

        strategy.run(fn)

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        testing.run(3, program)
    assert caught.value.__notes__ == ["raised on replica 2 of 3 (mpidist.testing.run)"]


@pytest.mark.parametrize("others", ["reduce", "make a strategy", "make two", "meet"])
def test_a_replica_that_returns_early(others):
    def program():
        group = testing.current_group()
        strategy = None
        if others in (
            "reduce",
            "make two",
        ):  # with it, rank 1 waits for them at its end
            strategy = mpidist.MPIStrategy(
                communication_options=mpidist.experimental.CommunicationOptions(
                    timeout_seconds=30
                )
            )
        if group.rank == 1:
            return
        if others == "reduce" and strategy is not None:
            strategy.run(lambda: all_reduce(1.0))
        elif others == "meet":
            group.barrier()
        mpidist.MPIStrategy()

    text = "rank 1 will not come"
    if others == "reduce":
        text = "rank 1: nothing more: its program has ended\n"
    with pytest.raises(mpidist.CollectiveMismatchError, match=text):
        testing.run(3, program, timeout_seconds=LONG)


@pytest.mark.parametrize("of", ["a group", "a strategy without the guard"])
def test_different_calls(of):
    def program():
        group = testing.current_group()
        if of == "a group":
            group.barrier() if group.rank else group.all_gather(1)
            return
        options = mpidist.experimental.CommunicationOptions(guard=False)
        strategy = mpidist.MPIStrategy(communication_options=options)
        strategy.run(lambda: all_reduce(np.ones(3 + group.rank)))

    with pytest.raises(mpidist.CollectiveMismatchError, match="different calls"):
        testing.run(2, program, timeout_seconds=LONG)


def test_a_deadline_names_who_is_missing():
    def program():
        strategy = mpidist.MPIStrategy()
        if strategy.replica_id == 1:
            while True:  # ended by a `ReplicaStopped`
                time.sleep(0.01)
        strategy.run(lambda: all_reduce(1.0))

    with pytest.raises(mpidist.CollectiveTimeoutError) as caught:
        testing.run(3, program, timeout_seconds=3)
    message = str(caught.value)
    assert (
        "rank 1 did not reach call 2 within 3 s: ranks 0, 2 waited in all_reduce"
        in message
    )
    # Not the strategy's options, which nobody has to read here.
    assert "Its last call with the others was call 1: MPIStrategy(...). T" in message
    assert "did not end" not in "".join(caught.value.__notes__)


def test_a_thread_that_can_not_be_ended_is_left_behind(monkeypatch):
    monkeypatch.setattr(_run, "_STOP_SECONDS", 0.3)
    monkeypatch.setattr(_run, "_LEAVE_SECONDS", 0.3)
    free, gone = threading.Barrier(2), threading.Event()

    def program():
        if testing.current_group().rank == 0:
            while not free.n_waiting:
                time.sleep(0.001)
            raise KeyError("mine")
        try:
            free.wait()  # Python raises nothing in a thread that is in a lock
        finally:
            gone.set()

    with pytest.raises(KeyError, match="mine") as caught:
        testing.run(2, program)
    (note,) = caught.value.__notes__[1:]
    assert note.startswith("replica 1 did not end, and is left behind at threading.py:")
    free.wait(60)
    assert gone.wait(60)


@pytest.mark.parametrize("code", [None, 0, 3])
def test_sys_exit(code):
    """Of all replicas it is an end; with a code it is raised, also of one."""

    def program():
        strategy = mpidist.MPIStrategy()
        if not code or strategy.replica_id == 1:
            sys.exit(code)
        strategy.run(lambda: all_reduce(1.0))

    if not code:
        assert testing.run(2, program) == [None, None]
        return
    with pytest.raises(SystemExit) as caught:
        testing.run(3, program, timeout_seconds=LONG)
    assert caught.value.code == code


@pytest.mark.parametrize("busy", [False, True])
def test_ctrl_c_ends_all(busy):
    ended = []

    def spin():
        # Not inside the `try`: Python 3.13 leaves the jump of a `while` out of what the
        # `try` covers, and an exception that arrives there passes by (gh-130279).
        while busy:
            pass

    def program():
        strategy = mpidist.MPIStrategy()
        try:
            testing.current_group().barrier()  # all are in this block
            if strategy.replica_id == 0:
                main = threading.main_thread().ident
                signal.pthread_kill(main, signal.SIGINT)
                spin()
            strategy.run(lambda: all_reduce(1.0))
            while True:
                strategy.run(lambda: all_reduce(1.0))
        finally:
            ended.append(strategy.replica_id)

    with pytest.raises(KeyboardInterrupt):
        testing.run(3, program, timeout_seconds=LONG)
    assert sorted(ended) == [0, 1, 2]


# --- groups ---------------------------------------------------------------------------


def test_strategies_over_groups():
    def program():
        group = testing.current_group()
        pair = group.split(group.rank % 2)
        some = mpidist.MPIStrategy(comm=pair)
        whole = mpidist.MPIStrategy(comm=group)
        x = float(group.rank)
        here = own(some, some.run(lambda: all_reduce(x)))
        there = own(whole, whole.run(lambda: all_reduce(x)))
        return pair.rank, pair.size, some.replica_id, here, there

    assert testing.run(5, program) == [
        (0, 3, 0, 6.0, 10.0),
        (0, 2, 0, 4.0, 10.0),
        (1, 3, 1, 6.0, 10.0),
        (1, 2, 1, 4.0, 10.0),
        (2, 3, 2, 6.0, 10.0),
    ]


def test_split_orders_by_key_and_leaves_some_out():
    def program():
        group = testing.current_group()
        part = group.split(None if group.rank == 1 else 7, key=-group.rank)
        if part is None:
            return None
        return part.rank, part.all_gather(group.rank), part.broadcast(group.rank, 1)

    assert testing.run(4, program) == [
        (2, [3, 2, 0], 2),
        None,
        (1, [3, 2, 0], 2),
        (0, [3, 2, 0], 2),
    ]


@pytest.mark.parametrize("comm", ["world", 3])
def test_other_communicators_are_refused(comm):
    with pytest.raises(TypeError, match=r"ThreadGroup.* threads, between which MPI"):
        testing.run(2, lambda: mpidist.MPIStrategy(comm=comm))


def test_a_run_in_a_run():
    def inner():
        strategy = mpidist.MPIStrategy()
        return own(strategy, strategy.run(lambda: all_reduce(1)))

    def program():
        found = testing.run(2, inner)
        strategy = mpidist.MPIStrategy()
        return found, own(strategy, strategy.run(lambda: all_reduce(1)))

    assert testing.run(3, program) == [([2, 2], 3)] * 3


def test_outside_of_a_run():
    with pytest.raises(RuntimeError, match="expected to be called by the function"):
        testing.current_group()

    def program():
        errors = []

        def other():
            try:
                testing.current_group()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return len(errors)

    assert testing.run(2, program) == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((2.0, print, 5), TypeError, "`num_replicas` to be an int, got 2.0"),
        ((True, print, 5), TypeError, "`num_replicas` to be an int, got True"),
        ((0, print, 5), ValueError, "`num_replicas` to be 1 or more, got 0"),
        ((2, 3, 5), TypeError, "`fn` to be callable, got 3"),
        ((2, print, -1), ValueError, "`timeout_seconds` to be a number of seconds"),
    ],
)
def test_arguments(arguments, kind, message):
    *positional, seconds = arguments
    with pytest.raises(kind, match=message):
        testing.run(*positional, timeout_seconds=seconds)


# --- pytest ---------------------------------------------------------------------------


def test_the_fixture(replicas):
    assert replicas(3, lambda: testing.current_group().rank) == [0, 1, 2]


@testing.each_replica
@pytest.fixture
def here():
    group = testing.current_group()
    yield group
    group.barrier()  # taken down on each replica


@pytest.fixture
def doubled(here):
    return 2 * here.rank


@pytest.fixture(params=["a", "b"])
def named(request, here):
    return f"{request.param}{here.rank}"


@pytest.mark.replicas(1, 3)
@pytest.mark.parametrize("x", [5, 6])
def test_a_test_is_a_program(x, here, doubled, named, tmp_path, number_of_replicas):
    ranks = range(number_of_replicas)
    assert here.size == number_of_replicas
    assert doubled == 2 * here.rank
    assert here.all_gather((x, tmp_path)) == [(x, tmp_path)] * here.size
    assert here.all_gather(named) == [f"{named[0]}{rank}" for rank in ranks]


class TestInAClass:
    @testing.each_replica
    @pytest.fixture
    def mine(self):
        return type(self).__name__, testing.current_group().rank

    @pytest.mark.replicas(2)
    def test_a_method_is_a_program(self, mine, here):
        assert mine == ("TestInAClass", here.rank)


MARKS = """
import pytest
from mpidist import testing

@pytest.mark.replicas(2)
def test_fails_on_1():
    assert testing.current_group().rank == 0

@pytest.mark.replicas(1, 2)
def test_is_skipped():
    pytest.skip("not here")

@pytest.mark.mpi(min_size=2)
@pytest.mark.replicas(1, 2)
def test_of_both():
    assert testing.current_group().size == 2

@pytest.mark.mpi
def test_of_mpi():
    raise AssertionError

@pytest.mark.mpi
@pytest.mark.processes
@pytest.mark.replicas(2)
def test_of_processes():
    raise AssertionError
"""

FOLDERS = """
import os
import time
import pytest
from mpidist import testing

make = os.mkdir

@testing.each_replica
@pytest.fixture
def folder(tmp_path_factory):
    testing.current_group().barrier()
    return tmp_path_factory.mktemp("mine")

@pytest.fixture
def slow_disk(monkeypatch):
    def later(*args, **kwargs):
        time.sleep(0.1)
        make(*args, **kwargs)

    monkeypatch.setattr(os, "mkdir", later)

@pytest.mark.replicas(3)
def test_folders(slow_disk, folder):
    assert len(set(testing.current_group().all_gather(folder))) == 3
"""

FIXTURES = """
import time
import pytest
import mpidist
from mpidist import testing

ended = []

@testing.each_replica
@pytest.fixture
def mine():
    rank = testing.current_group().rank
    yield rank
    ended.append(rank)

@testing.each_replica
@pytest.fixture
def strategy(mine):
    one = mpidist.MPIStrategy()
    yield one
    one.close()

@testing.each_replica
@pytest.fixture
def bad(mine):
    yield
    raise OSError("no folder")

@pytest.mark.replicas(3)
def test_fails(strategy, mine):
    if mine == 1:
        raise ValueError("wrong")
    strategy.run(lambda: None)

def test_all_were():
    assert sorted(ended) == [0, 1, 2]
    ended.clear()

@pytest.mark.replicas(2)
def test_skips(strategy):
    pytest.skip("not here")

def test_all_were_again():
    assert sorted(ended) == [0, 1]

@pytest.mark.replicas(1)
def test_both(bad):
    raise ValueError("wrong")
"""

WRONG = ("replicas", "replicas(0)", "replicas(n=2)", "replicas([2, 3])")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return what pytest prints of these files of tests, with the plugin alone.

    Returns:
        Its output, and the outcome of each test by its name.
    """
    path = tmp_path_factory.mktemp("tests")
    # The first: pytest makes its own folder, at the same moment on all replicas.
    sources = {"a_folders": FOLDERS, "marks": MARKS, "fixtures": FIXTURES}
    for k, mark in enumerate(WRONG):
        test = f"@pytest.mark.{mark}\ndef test_it():\n    pass\n"
        sources[f"wrong_{k}"] = f"import pytest\n\n{test}"
    for name, source in sources.items():
        (path / f"test_{name}.py").write_text(source)
    options = [f"--basetemp={path / 'folders'}", "-p", "pytest_mpidist", "-q", "-rA"]
    options += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    # On CI pytest has whole messages in its summary; here it is the same everywhere.
    env = {**plain_environment(), "PYTHONPATH": str(ROOT)}
    command = ["-m", "pytest", *options, "-c", os.devnull, "--rootdir", "."]
    done = run_alone(*command, base=env, cwd=path)
    found = re.findall(r"^([A-Z]+) test_\w+\.py::(\S+)", done.stdout, re.M)
    return done.stdout, {name: outcome for outcome, name in found}


def test_what_pytest_reports(reports):
    out, outcomes = reports
    assert outcomes["test_of_both[2replicas]"] == "PASSED"
    assert outcomes["test_fails_on_1[2replicas]"] == "FAILED"
    assert not {"test_of_mpi", "test_of_processes"} & set(outcomes)  # skipped
    assert "raised on replica 1 of 2 (mpidist.testing.run)" in out
    assert "assert 1 == 0" in out
    assert "3 failed, 4 passed, 5 skipped, 4 errors" in out, out


def test_wrong_marks(reports):
    assert reports[0].count("expected `@pytest.mark.replicas(1, 2, 3)`") == len(WRONG)


def test_fixtures_of_replicas_make_folders(reports):
    """The first ones of a run, at the same moment: pytest then makes its own."""
    assert reports[1]["test_folders[3replicas]"] == "PASSED"


def test_fixtures_of_a_failed_test_are_taken_down(reports):
    """On each replica; without waiting for the others, which are stopped."""
    out, outcomes = reports
    assert outcomes["test_all_were"] == outcomes["test_all_were_again"] == "PASSED"
    assert outcomes["test_fails[3replicas]"] == "FAILED"
    assert "ValueError: wrong" in out
    assert "raised on replica 1 of 3" in out
    assert "a fixture then raised OSError: no folder" in out
    assert "RunStoppedError" not in out


def test_pytest_starts_without_mpidist():
    done = python(
        """
        import json, sys
        import pytest_mpidist
        names = "mpidist", "numpy", "mpi4py"
        print(json.dumps([name for name in names if name in sys.modules]))
        """
    )
    assert json.loads(done.stdout) == []
