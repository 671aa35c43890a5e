"""Timelines of real strategies: what is in the file, and what stays after a failure."""

from __future__ import annotations

import os
import textwrap
import time

import numpy as np
import pytest
from launching import FORKS, run_ranks
from replicas import everywhere, raises_everywhere

import mpidist
from mpidist._timeline import files
from mpidist._timeline.files import find_parts

on_replicas = [pytest.mark.mpi, pytest.mark.replicas(1, 2, 3), pytest.mark.core]


TEXT = "all_reduce SUM float64 (10,)"


def merged(path):
    """Return the timeline, on all ranks, when rank 0 has written it."""
    everywhere(None)
    return files.read(path)


def reductions_in(timeline):
    return [span for span in timeline.spans if span.text == TEXT]


def all_reduce():
    return mpidist.get_replica_context().all_reduce("SUM", np.ones(10))


def come_late(folder, others):
    """Return a second after the others have said that they are there."""
    while len(list(folder.glob("* is there"))) < others:
        time.sleep(0.01)
    time.sleep(1)  # in which they come to the call


class TestRecording:
    pytestmark = on_replicas

    def test_a_file_for_all_ranks(self, new_strategy, folder, size):
        """Compressed, by its name; results are those without it."""
        path = folder / "run.json.gz"
        with mpidist.timeline(path):
            strategy = new_strategy()
            with strategy.scope():
                v = mpidist.Variable(np.zeros(10))
            rows = mpidist.data.Dataset.from_tensor_slices(np.arange(12.0)).batch(6)

            def step(x):
                def add(strategy, x):
                    total = strategy.extended.reduce_to("SUM", x, v)
                    strategy.extended.update(v, mpidist.Variable.assign_add, (total,))

                mpidist.get_replica_context().merge_call(add, (x,))
                return all_reduce()

            for _ in strategy.experimental_distribute_dataset(rows):
                total = strategy.run(step, args=(np.ones(10),))
            mpidist.Checkpoint(v=v).save(folder / "saved")
        (total,) = strategy.experimental_local_results(total)
        np.testing.assert_array_equal(total, np.full(10, float(size)))
        np.testing.assert_array_equal(v.numpy(), 2 * total)
        found = merged(path)
        assert path.read_bytes()[:2] == b"\x1f\x8b"
        assert not find_parts(path)
        assert sorted(found.hosts) == list(range(size))
        for process in range(size):
            own = [span for span in found.spans if span.rank == process]
            sections = [s.text for s in own if s.kind == "section"]
            assert sum(text.startswith("run(") for text in sections) == 2
            assert sum(text.startswith("merge_call(") for text in sections) == 2
            assert sections.count("reading input") == 3
            assert sections.count("Checkpoint.save") == 1
            reduced = [s for s in own if s.text == TEXT]
            assert [s.nbytes for s in reduced] == [80, 80]
            run = next(s for s in own if s.text.startswith("run("))
            assert run.start <= reduced[0].start <= reduced[0].end <= run.end

    def test_who_was_waited_for(self, new_strategy, folder, rank, size):
        late = size - 1
        with mpidist.timeline(folder / "run.json"):
            strategy = new_strategy()

            def step():
                if rank != late:
                    (folder / f"{rank} is there").touch()
                else:
                    come_late(folder, late)
                return all_reduce()

            strategy.run(step)
        calls = reductions_in(merged(folder / "run.json"))
        assert len(calls) == size
        for span in calls:
            if span.rank == late:
                assert (span.waited, span.waited_for) == (0.0, -1)
            else:
                assert span.waited_for == late
                assert 0.0 < span.waited <= span.seconds

    def test_calls_that_were_begun(self, new_strategy, folder, rank, size):
        with mpidist.timeline(folder / "run.json"):
            strategy = new_strategy()

            def step():
                if rank == size - 1:
                    come_late(folder, size - 1)
                x = np.ones(100_000)
                handle = mpidist.get_replica_context().all_reduce_async("SUM", x)
                (folder / f"{rank} is there").touch()
                handle.result()
                return all_reduce()

            strategy.run(step)
        found = merged(folder / "run.json")
        if size > 1:
            calls = [s for s in found.spans if s.text.startswith("all_reduce")]
            assert [s.nbytes for s in calls if s.begun] == [800_000] * size
            assert [s.nbytes for s in calls if not s.begun] == [80] * size
            waits = [s for s in found.spans if s.kind == "waits for begun"]
            assert max(s.seconds for s in waits) > 0.1

    @pytest.mark.parametrize(
        ("place", "kind", "text"),
        [
            ("missing/run.json", FileNotFoundError, "missing/run.json.rank"),
            ("a pipe", OSError, "expected a file, or a path where none is"),
        ],
    )
    def test_a_place_that_cannot_be_written_is_told_to_all(
        self, new_strategy, folder, rank, size, strategy, place, kind, text
    ):
        path = folder / ("run.json" if rank < size - 1 else place)
        if place == "a pipe" and rank == size - 1:
            os.mkfifo(path)  # to open one blocks until somebody reads it

        def record():
            with mpidist.timeline(path):
                new_strategy()

        for message in raises_everywhere(kind, record):
            assert text in message
            assert place in message

    def test_an_exception_in_the_block_leaves_the_parts(
        self, new_strategy, folder, rank, size
    ):
        path = folder / "run.json"

        def divide():
            with mpidist.timeline(path):
                new_strategy().run(all_reduce)
                _ = 1 / 0

        raises_everywhere(ZeroDivisionError, divide)
        everywhere(None)
        if rank == 0:
            assert not path.exists()
            assert len(find_parts(path)) == size
            assert sorted(files.load(path).hosts) == list(range(size))
        everywhere(None)


@pytest.mark.mpi
def test_strategies_of_before_are_not_recorded(strategy, folder):
    message = "no MPIStrategy was made in the block"
    with pytest.warns(RuntimeWarning, match=message), mpidist.timeline(folder / "run"):
        strategy.run(all_reduce)
    everywhere(None)
    assert not list(folder.iterdir())


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("together", [True, False])
def test_strategies_of_groups_are_told_apart(
    new_strategy, folder, rank, size, together
):
    from mpi4py import MPI

    half = MPI.COMM_WORLD.Split(rank % 2)
    with mpidist.timeline(folder / "run.json"):
        new_strategy(comm=half).run(all_reduce)
        if together:
            new_strategy().run(all_reduce)
        MPI.COMM_WORLD.Barrier()  # rank 0 waits for parts that are there, when it ends
    half.Free()
    calls = reductions_in(merged(folder / "run.json"))
    members = {}
    for span in calls:
        members.setdefault(span.strategy, set()).add(span.rank)
    ranks = range(size)
    groups = sorted(map(sorted, members.values()))
    expected = [[*ranks[::2]], [*ranks[1::2]], *([[*ranks]] * together)]
    assert groups == sorted(expected)
    assert len(calls) == (1 + together) * size
    assert all(x.waited_for in {-1, *members[x.strategy]} for x in calls)


# --- programs -------------------------------------------------------------------------

PROGRAM = """
import os, resource, sys, time
import numpy as np
import mpidist
strategy = mpidist.MPIStrategy()
def step():
    return mpidist.get_replica_context().all_reduce("SUM", np.ones(10))
for _ in range(5):
    strategy.run(step)
"""


def run(path, n, end, **env):
    """Run the program with this end on n ranks, recorded by the variable."""
    env = {"MPIDIST_TIMELINE": str(path), **env}
    source = PROGRAM + textwrap.dedent(end)
    return run_ranks(n, ["-c", source], timeout=100, env=env, cwd=path.parent)


@pytest.mark.core
def test_a_program_is_recorded_by_a_variable(tmp_path):
    """And a child that it forks writes nothing."""
    end = """
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    strategy.close()
    """
    done = run(tmp_path / "run.json", 3, end, **FORKS)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(tmp_path) == ["run.json"]
    calls = [span.rank for span in reductions_in(files.read(tmp_path / "run.json"))]
    assert sorted(calls) == sorted(5 * list(range(3)))


def test_a_full_disk_is_named_and_the_program_goes_on(tmp_path):
    end = """
    if strategy.replica_id == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    for _ in range(100):
        strategy.run(step)
    """
    path = tmp_path / "run.json"
    done = run(path, 2, end)
    assert done.returncode == 0, done.stderr
    assert f"rank 1 cannot write {path}.rank1: File too large" in done.stderr
    assert "; the recording of rank 1 ended early" in done.stderr
    assert files.read_parts(path)[0].complete


@pytest.mark.core
def test_a_program_that_ends_by_an_exception_leaves_what_it_has_done(tmp_path):
    path = tmp_path / "run.json"
    end = "if strategy.replica_id == 1: raise LookupError\nstrategy.run(step)"
    assert run(path, 2, end).returncode != 0
    assert not path.exists()
    # A second after the last event at most is lost: here perhaps all, but the header.
    assert sorted(files.load(path).hosts) == [0, 1]
    assert path.exists()


@pytest.mark.core
def test_strategies_of_some_ranks_do_not_disturb_the_end(tmp_path):
    body = """
    import mpidist
    from mpi4py import MPI
    with mpidist.timeline("run.json"):
        strategy = mpidist.MPIStrategy()
        if strategy.replica_id == 0:
            alone = mpidist.MPIStrategy(MPI.COMM_SELF)
        strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", 1.0))
    """
    done = run_ranks(2, ["-c", textwrap.dedent(body)], timeout=100, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(files.read(tmp_path / "run.json").hosts) == [0, 1]
