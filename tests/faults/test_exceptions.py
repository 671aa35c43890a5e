"""Exceptions of unusual kinds, at unusual places: the other ranks learn of each soon.

The strategies have a deadline that is longer than the limit of a test, so a rank that
is told only at the deadline fails.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import re
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from faults.every_line import Injection
from replicas import (
    a_third,
    assert_mirrored,
    assert_usable,
    context,
    everywhere,
    make,
    outcomes,
    set_deadline,
)

import mpidist
from mpidist._agreement import notices
from mpidist._base import checksums
from mpidist._strategy.strategy import group_of
from mpidist._values import storage, variable

pytestmark = [pytest.mark.mpi, pytest.mark.core]


def raise_on_one(strategy, rank, error):
    """Run a step in which one rank raises."""

    def step():
        if context().replica_id_in_sync_group == rank:
            raise error
        return context().all_reduce("SUM", 1.0)

    strategy.run(step)


def raise_on(strategy, rank, error):
    """Run a step in which one rank raises; return the outcomes."""
    return outcomes(lambda: raise_on_one(strategy, rank, error))


@pytest.mark.parametrize(
    ("code", "said"),
    [(0, "sys.exit(0)"), (None, "sys.exit()"), (False, "sys.exit(False)")],
)
def test_sys_exit_without_a_code_on_one_rank(strategy, last, code, said):
    """The job may not end as if all ranks had done their work."""
    rows = raise_on(strategy, last, SystemExit(code))
    assert rows[last].name == "SystemExit"
    for row in rows[:last]:
        assert row.name == "CollectiveMismatchError", row
        assert re.search(
            rf"  rank {last}: {re.escape(said)}  \(at test_exceptions.py:\d+ in step\)",
            row.message,
        ), row
    assert_usable(strategy)


def test_what_python_takes_for_an_error_is_one(strategy, last):
    rows = raise_on(strategy, last, SystemExit(""))
    assert {row.name for row in rows} == {"SystemExit"}
    assert_usable(strategy)


def test_an_exit_code_that_can_not_be_printed(strategy, last):
    class Code:
        def __repr__(self):
            raise ValueError("no text")

    error = None
    try:
        raise_on_one(strategy, last, SystemExit(Code()))
    except BaseException as raised:
        error = raised
    assert {*everywhere(type(error).__name__)} == {"SystemExit"}
    if strategy.replica_id != last:
        assert error.code == "Code"
    assert_usable(strategy)


@pytest.mark.parametrize("where", ["replica", "merge_fn"])
def test_an_exception_with_much_text(strategy, rank, last, where):
    text = "begin" + 20_000_000 * "x" + "end"
    lengths = []

    def merge_fn(strategy):
        raise ValueError(text)

    def step():
        if where == "replica" and rank == last:
            raise ValueError(text)
        return context().merge_call(merge_fn)

    try:
        strategy.run(step)
    except (ValueError, mpidist.CollectiveError) as error:
        lengths = everywhere(len(str(error)))
    origin = last if where == "replica" else 0
    assert lengths.pop(origin) == len(text)
    assert all(1000 < length < 1_000_000 for length in lengths), lengths
    assert_usable(strategy)


def interrupts(strategy, rank, who, where):
    """Make one rank raise KeyboardInterrupt somewhere; return the outcomes."""
    v = make(strategy, 0.0)

    def update(v):
        if rank == who:
            raise KeyboardInterrupt
        v.assign(1.0)

    if where == "run":
        return raise_on(strategy, who, KeyboardInterrupt())
    return outcomes(lambda: strategy.extended.update(v, update))


@pytest.mark.parametrize("where", ["run", "update"])
def test_ctrl_c_that_the_program_catches(new_strategy, rank, size, last, where):
    strategy = new_strategy()
    rows = interrupts(strategy, rank, last, where)
    assert rows[last].name == "KeyboardInterrupt"
    if size == 1:
        assert_usable(strategy)
        return
    others = rows[:-1] + outcomes(lambda: strategy.run(lambda: None))
    assert {row.name for row in others} == {"CollectiveTimeoutError"}
    place = "at the end of run(" if where == "run" else "in "
    for row in others:
        assert f"was interrupted by KeyboardInterrupt {place}" in row.message
        assert f"] rank {last} was interrupted" in row.message


def test_a_rank_that_gives_up_after_its_part_of_a_call_does_not_end_it(
    new_strategy, size, rank, last
):
    """What the others wait for may be there already: it is tested once more."""
    strategy = new_strategy()
    if size == 1:
        return
    guard = group_of(strategy).guard
    if rank == last:
        guard.abandon(None, RuntimeError("two threads"))
    else:
        while not guard.broken:
            guard.waits.look("a wait", 0.1)
        with pytest.raises(mpidist.CollectiveTimeoutError, match="was interrupted by"):
            guard.waits.look("a wait", 0.2)
    rows = outcomes(lambda: strategy.run(lambda: None))
    assert {row.name for row in rows} == {"CollectiveTimeoutError"}
    assert ": two threads; " in rows[last].message


def with_frames_left(number, call):
    """Call with so few frames left that something in it may raise RecursionError."""
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back

    def descend(levels):
        return descend(levels - 1) if levels > 0 else call()

    return descend(sys.getrecursionlimit() - depth - number)


@pytest.mark.parametrize(
    ("verb", "left"),
    a_third(
        [
            (verb, left)
            for verb in ("all_reduce", "large", "merge_call", "all_gather")
            for left in (11, 12, 13, 14, 18)
        ]
    ),
)
def test_a_recursion_error_inside_a_call(
    new_strategy, rank, size, last, verb, left, monkeypatch
):
    # Destructors have no frames either; the hook of pytest fails then.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    strategy = new_strategy()
    call = {
        "all_reduce": lambda: context().all_reduce("SUM", np.ones(3)),
        "large": lambda: context().all_reduce("SUM", np.ones(100_000)),
        "merge_call": lambda: context().merge_call(lambda strategy: 1),
        "all_gather": lambda: context().all_gather(np.ones(3), axis=0),
    }[verb]

    def step():
        return with_frames_left(left, call) if rank == last else call()

    rows = outcomes(lambda: strategy.run(step))
    if size > 1 and rows[0].name != "NoneType":  # with enough frames it works
        told = {"CollectiveTimeoutError", "ReplicaError", "RecursionError"}
        assert {row.name for row in rows} <= told
        assert not any("did not" in row.message for row in rows), rows
    gc.collect()  # files that it left open warn here


@pytest.mark.parametrize("left", a_third(range(8, 18)))
def test_a_recursion_error_that_leaves_no_frame_to_say_so(
    new_strategy, rank, size, last, left, monkeypatch
):
    # The core waits, and cannot call Python; neither can it tell the plan.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    strategy = new_strategy()
    x = np.ones(3)
    raised = []

    def step():
        call = context().all_reduce
        for _ in range(3):  # from the second on without Python
            call("SUM", x)
        if rank == last:
            try:
                with_frames_left(left, lambda: call("SUM", x))
            except RecursionError:
                raised.append(left)
        else:
            time.sleep(0.3)
            call("SUM", x)
        return call("SUM", x)

    rows = outcomes(lambda: strategy.run(step))
    # Where nothing was sent yet, the ranks make other calls; otherwise it is broken.
    went_well = size == 1 or not any(everywhere(bool(raised)))
    assert all((row.name == "NoneType") == went_well for row in rows), rows
    gc.collect()  # files that it left open warn here


@pytest.mark.mpi(min_size=2)
def test_a_notice_that_cannot_be_pickled_for_want_of_frames_is_posted_later(
    new_strategy, last, monkeypatch
):
    """The others are told, and the rank raises what it raised, not pickle's error."""
    strategy = new_strategy()
    refused = []

    def dumps(notice):
        if not refused:
            refused.append(notice)
            raise pickle.PicklingError
        return pickle.dumps(notice)

    own = SimpleNamespace(dumps=dumps, loads=pickle.loads)
    with mpidist.ReplicaContext(strategy, None) as replica, monkeypatch.context() as m:
        injection: Any = contextlib.nullcontext()
        if strategy.replica_id == last:
            m.setattr(notices, "pickle", own)
            injection = Injection(2, RecursionError("injected"))
        with injection:
            rows = outcomes(lambda: replica.all_reduce("SUM", np.ones(3)))
    assert rows[last].name == "RecursionError", rows
    assert {row.name for row in rows[:-1]} == {"CollectiveTimeoutError"}, rows
    assert everywhere(len(refused))[last] == 1


@pytest.mark.parametrize("what", ["checksum", "variable", "restore"])
def test_a_memory_error_where_the_ranks_no_longer_wait_for_each_other(
    new_strategy, rank, size, last, what, same_folder, monkeypatch
):
    if what == "checksum" and size == 1:
        pytest.skip("one rank compares no copies")
    strategy = new_strategy()
    values = np.arange(4.0)
    v = make(strategy, values)
    checkpoint = mpidist.Checkpoint(v=v)
    path = str(same_folder / "saved")
    checkpoint.save(path)
    if what == "restore":
        v.assign(np.zeros(4))
    set_deadline(strategy, 50.0)

    def no_memory(*args, **kwargs):
        raise MemoryError("injected")

    place = {
        "checksum": (checksums, "summarize"),
        "variable": (variable, "VariableStorage"),
        "restore": (storage.VariableStorage, "prepare"),
    }[what]
    call = {
        "checksum": lambda: checkpoint.save(path),
        "variable": lambda: make(strategy, np.ones(1000)),
        "restore": lambda: checkpoint.restore(path),
    }[what]
    with monkeypatch.context() as patch:
        if rank == last:
            patch.setattr(*place, no_memory)
        rows = outcomes(call)
    assert rows[last].name == "MemoryError"
    if what != "variable":
        assert {row.name for row in rows} == {"MemoryError"}
        assert_mirrored(strategy, v, np.zeros(4) if what == "restore" else values)
        assert_usable(strategy)
    elif size > 1:
        # The others have gone on: they learn of it at the next call.
        rows = outcomes(lambda: strategy.run(lambda: None))
        assert {row.name for row in rows} == {"CollectiveTimeoutError"}
        for row in rows:
            assert f"rank {last} was interrupted by MemoryError in " in row.message
