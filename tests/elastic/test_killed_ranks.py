"""Trainings of which ranks are killed go on, and end as one that ran alone."""

from __future__ import annotations

import functools
import json
import re
import sys

import pytest

from tests import launching
from tests.elastic import random_kills
from tests.elastic.random_kills import PROGRAM, Ended
from tests.replicas import fuzz_seeds, rarely, slow

SECONDS = 100

survives = pytest.mark.usefixtures("an_mpi_that_outlives_ranks")


@pytest.fixture(scope="module")
def an_mpi_that_outlives_ranks() -> None:
    if not launching.outlives_ranks():
        pytest.skip("this MPI ends a job when a rank dies")


def train(ranks: int, options: tuple[str, ...] = launching.ULFM, **settings) -> Ended:
    job = random_kills.train(ranks, settings, options, SECONDS)
    if random_kills.CRASH in job.errors:  # once more, with luck
        job = random_kills.train(ranks, settings, options, SECONDS)
    return job


def check(job: Ended, *, ranks: int, killed: list[int], size: int, spares: int = 0):
    """Check that all others have finished with the right result."""
    assert job.code == 0, job
    assert job.killed == killed, job
    assert len(job.finished) == size, job
    assert sum("spare" in row for row in job.rows) == spares, job
    assert ranks == size + spares + len(killed)
    assert all(row["right"] and row["size"] == size for row in job.finished), job
    assert sorted(row["replica"] for row in job.finished) == list(range(size))


@survives
@pytest.mark.parametrize("after", [rarely(False), True])
def test_killed_in_a_commit(after):
    # Rank 0 in its second commit, rank 2 while they go back to it, or soon after.
    job = train(4, kill_in_vote={"0": 5, "2": 8}, after_vote=after)
    check(job, ranks=4, killed=[0, 2], size=2)
    assert "lost replica 0; 3 replicas go on" in job.errors


@slow
@survives
@pytest.mark.parametrize("seed", fuzz_seeds(3))
def test_killed_at_random(seed):
    ranks, settings = random_kills.draw(seed)
    job = train(ranks, **settings)
    assert not random_kills.problem_of(job, ranks), job


@functools.cache  # two tests look at it
def without_fault_tolerance() -> Ended:
    return train(2, options=())


@survives
def test_a_spare_goes_on_as_the_replica_it_replaces():
    whole = without_fault_tolerance()
    job = train(3, spares=1, kill_in_vote={"0": 9})
    check(job, ranks=3, killed=[0], size=2)
    assert "2 replicas go on, 1 of them from the spares" in job.errors
    # As if nobody had died: generators that only the dead one had, too.
    drawn = [{r["replica"]: r["own"] for r in x.finished} for x in (whole, job)]
    assert drawn[0] == drawn[1]


@survives
def test_a_spare_that_was_killed_is_not_missed():
    job = train(3, spares=1, kill_as_spare=2)
    check(job, ranks=3, killed=[2], size=2)


@survives
def test_too_few_replicas_are_an_error_on_each():
    job = train(3, min_replicas=3, kill_in_vote={"1": 6})
    assert job.code != 0
    errors = {row["rank"]: row["error"] for row in job.rows if "error" in row}
    assert sorted(errors) == [0, 2]
    for text in errors.values():
        assert "2 replicas are left, fewer than min_replicas=3. Start" in text


@survives
def test_objects_of_an_earlier_strategy_end_the_run():
    job = train(3, kill_in_vote={"1": 6}, keeps_objects=True)
    errors = {row["rank"]: row["error"] for row in job.rows if "error" in row}
    assert sorted(errors) == [0, 2]
    for text in errors.values():
        assert "Variable 'mixed' can no longer be used" in text
        assert "take it from `state`" in text


@pytest.mark.core
def test_without_fault_tolerance_it_is_an_ordinary_run():
    job = without_fault_tolerance()
    assert job.code == 0, job
    assert [row["right"] for row in job.finished] == [True, True]
    assert job.errors.count("this MPI ends the job when a rank dies") == 1


@pytest.mark.core
@pytest.mark.parametrize("killed", [rarely(False), True])
def test_a_job_that_failed_is_started_again_from_its_checkpoint(tmp_path, killed):
    settings = {"directory": str(tmp_path / "run"), "leave_after": 7}
    settings["leave_killed"] = killed
    command = [sys.executable, "-m", "mpidist", "run", "--restarts", "2", "-n", "2"]
    done = launching.run_command([*command, PROGRAM, json.dumps(settings)], SECONDS)
    assert done.returncode == 0, done.stderr
    assert "starting it again, 1 of 2" in done.stderr
    assert "starting it again, 2 of 2" not in done.stderr
    assert done.stdout.count('"right": true') == 2


@survives
def test_a_job_whose_ranks_were_all_killed_has_failed(tmp_path):
    settings = {"kill_in_vote": {"0": 5, "1": 5}}
    command = [sys.executable, "-m", "mpidist", "run", "--elastic", "-n", "2"]
    done = launching.run_command([*command, PROGRAM, json.dumps(settings)], SECONDS)
    assert done.stdout.count("killed") == 2, done
    assert done.returncode == 137, done
    assert "no rank has come to the end of its program" in done.stderr
    trained = tmp_path / "trained.py"  # a program that finds nothing to do
    trained.write_text("import mpidist")
    done = launching.run_command([*command, str(trained)], SECONDS)
    assert done.returncode == 0, done


def end(how, *folder, options=launching.ULFM):
    program = PROGRAM.with_name("ending_training.py")
    return launching.run_ranks(
        3, [program, how, *folder], timeout=SECONDS, options=options
    )


@survives
@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("again", 1, "`train` fails as if a replica had died, but none has"),
        rarely("exit", 3, ""),
        ("saving", 0, "from commit 8"),
    ],
)
def test_how_a_program_ends_after_a_loss(how, code, text, tmp_path):
    done = end(how, tmp_path)
    assert done.returncode == code, done.stderr
    assert text in done.stderr


@pytest.mark.parametrize("options", [rarely(()), launching.ULFM])
def test_a_replica_that_leaves_by_an_exception_tells_the_others(options):
    if options and not launching.outlives_ranks():
        pytest.skip("this MPI ends a job when a rank dies")
    done = end("left", options=options)
    assert done.returncode == 0, done
    assert done.stdout.count("ReplicaError: ") == 2, done
    assert done.stdout.count("KeyError: 'of replica 2 alone'") >= 1, done


@survives
@pytest.mark.parametrize("how", ["interrupt", rarely("later")])
def test_nobody_waits_for_a_replica_that_leaves_after_a_loss(how, tmp_path):
    done = end(how, tmp_path)
    assert re.search("^KeyboardInterrupt: ", done.stdout, re.M), done
    assert "RuntimeError: elastic.run: another replica has left it" in done.stdout
