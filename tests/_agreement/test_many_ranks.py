"""What users read of jobs with many ranks: ranges of ranks, and not too many lines."""

import contextlib
import time

import numpy as np
import pytest
from replicas import rarely, wait_for_reports

import mpidist
from mpidist import testing
from mpidist._agreement import notices as notices_module
from mpidist._strategy.strategy import group_of

SIZE = 64


def outcomes(step, seconds=100):
    """Run a replica function on all ranks; return the message of each rank's error."""
    options = mpidist.experimental.CommunicationOptions(timeout_seconds=seconds)

    def program():
        strategy = mpidist.MPIStrategy(communication_options=options)
        try:
            strategy.run(lambda: step(strategy.replica_id))
        except mpidist.CollectiveTimeoutError as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return testing.run(SIZE, program, timeout_seconds=120)


def reduce(shape):
    return mpidist.get_replica_context().all_reduce("SUM", np.ones(shape))


def test_a_mismatch_names_groups_of_ranks():
    texts = outcomes(lambda rank: reduce(3 if rank < 40 else 2 + rank % 2))
    for text in texts:
        lines = text.splitlines()
        assert lines[1].startswith("  ranks 0-39, 41, 43,")
        assert lines[2].startswith("  ranks 40, 42, 44,")
        assert len(lines) == 4


@pytest.mark.parametrize("kind", ["all differ", "most agree"])
def test_a_mismatch_of_many_calls(kind):
    few = 20
    step = {
        "all differ": lambda rank: reduce(rank),
        "most agree": lambda rank: reduce(rank if rank < few else 99),
    }[kind]
    for text in outcomes(step):
        lines = text.splitlines()
        assert len(lines) <= 20
        if kind == "all differ":
            assert lines[1].startswith("  rank 0: all_reduce SUM float64 (0,)")
            assert lines[13] == "  ranks 12-63: 52 other calls"
        else:
            assert lines[1].startswith("  ranks 20-63: all_reduce SUM float64 (99,)")
            assert lines[13] == "  ranks 11-19: 9 other calls"


def test_the_same_exception_on_many_ranks_is_shown_once():
    def step(rank):
        if rank > 1:
            raise LookupError("no such file")
        return reduce(1)

    for text in outcomes(step)[:2]:
        assert "ranks 2-63 raised an exception:\n--- ranks 2-63 ---\n" in text
        assert text.count("LookupError: no such file") == 1


@pytest.mark.parametrize("kind", [rarely("one call"), "other calls"])
def test_the_stall_report_and_the_deadline(kind, monkeypatch, caplog):
    monkeypatch.setenv("MPIDIST_STALL_SECONDS", "2")

    def step(rank):
        group = testing.current_group()
        group.all_gather(b"")
        if rank == 50:
            group.all_gather(b"")  # until the others have given up
        try:
            return reduce(1 if kind == "one call" else rank)
        finally:
            if rank != 50:
                group.all_gather(b"")

    first, *_ = outcomes(step, seconds=8)
    wait_for_reports()
    reports = [one.getMessage() for one in caplog.records if one.name == "mpidist"]
    assert reports  # on a busy machine some ranks may not wait yet
    assert max(len(text.splitlines()) for text in [*reports, first]) <= 20
    assert "rank 50 did not reach call 2 within 8 s:" in first
    if kind == "one call":
        assert "ranks 0-49, 51-63 waited in all_reduce SUM float64 (1,)" in first
    else:
        assert "\n  rank 0 waited in all_reduce SUM float64 (0,)\n" in first
        assert "\n  ranks 8-49, 51-63 waited in 55 other calls\n" in first


@pytest.mark.parametrize("elements", [1, 2])
def test_ranks_that_wait_for_a_shorter_time_are_not_missing(caplog, elements):
    """As where many ranks share a core, and come one after the other."""
    waits = {}

    def program():
        strategy = mpidist.MPIStrategy()
        rank, group = strategy.replica_id, testing.current_group()
        waits[rank] = mine = group_of(strategy).guard.waits
        mine._stall = 0.2 if rank == 0 else 1000.0
        mine._current.posted = rank == 1  # in an earlier wait, a short one
        group.all_gather(b"")
        end = time.monotonic() + 60
        while rank == 0 and "all_reduce" not in waits[1]._current.place[0]:
            assert time.monotonic() < end
            time.sleep(0.01)
        while rank == 2 and not caplog.records and time.monotonic() < end:
            time.sleep(0.01)
        is_same = elements == 1
        error = mpidist.CollectiveMismatchError
        with contextlib.nullcontext() if is_same else pytest.raises(error):
            strategy.run(lambda: reduce(elements if rank == 1 else 1))

    testing.run(3, program, timeout_seconds=120)
    (report,) = (one.getMessage() for one in caplog.records if one.name == "mpidist")
    assert report.startswith("mpidist: rank 2 did not reach call ")
    both = "ranks 0-1 waited in all_reduce SUM float64 (1,)"
    own = "rank 0 waited in all_reduce SUM float64 (1,); rank 1 waited in all_reduce "
    assert f": {both if elements == 1 else own}" in report


def test_a_report_waits_for_as_long_as_the_notices_took(monkeypatch):
    """Of ranks that share cores, the last may be late by as much as the others."""
    monkeypatch.setattr(notices_module, "_MOST_QUIET_SECONDS", 1e9)

    def program():
        guard = group_of(mpidist.MPIStrategy()).guard
        notices = guard.breakdown.notices
        first = time.monotonic() - 3000
        for last, quiet in ((first + 2000, False), (first + 1000, True)):
            for rank, came in enumerate((first, last)):
                one = notices_module.Notice(rank, guard.sequence, "step", came=came)
                notices._latest[rank] = one
            assert notices.are_quiet() is quiet
        one.awaited = ()  # rank 1 waited for data, which it may have got since
        wait = notices_module.Wait("step")
        assert notices.waiting_and_missing(wait) == ([0], [1, 2])
        notices.is_for_data = True
        assert notices.waiting_and_missing(wait) == ([0, 1], [2])
        # It is in a later call: MPI holds this rank back; or is held back itself.
        number = guard.sequence
        for one.awaited, one.sequence, one.behind, missing in (
            (None, number + 1, False, [2]),
            ((), number + 2, False, [2]),  # in the data of that call
            (None, number - 1, True, [2]),
            (None, number - 1, False, [1, 2]),
        ):
            assert notices.is_behind is (one.sequence > number)
            assert notices.waiting_and_missing(wait) == ([0], missing)
            call = number + 2 if one.sequence > number else number
            text = f"rank 1 waited in step (call {call})"
            assert (text in notices.describe(wait, 1.0)) is (1 not in missing)
        # All have told where they wait: what was behind has gone on, but not to here.
        notices._latest[2] = notices_module.Notice(2, number, "step")
        one.behind = True
        assert notices.waiting_and_missing(wait) == ([0, 2], [1])
        one.sequence = number + 1
        assert notices.waiting_and_missing(wait) == ([0, 2], [])

    testing.run(3, program)


def test_more_replicas_than_the_dtype_of_rows_can_count():
    def program():
        strategy = mpidist.MPIStrategy()
        rows = mpidist.IndexedSlices(np.ones(1, np.int8), [0])
        mean = strategy.reduce("MEAN", strategy.run(lambda: rows), axis=None)
        return float(mean.values.sum())

    np.testing.assert_allclose(testing.run(130, program), 1.0)
