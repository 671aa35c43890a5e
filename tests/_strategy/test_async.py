"""Calls that are begun now and end later: all_reduce_async and all_gather_async."""

import contextlib
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
from replicas import (
    assert_usable,
    context,
    everywhere,
    local,
    outcomes,
    raises_everywhere,
    sample,
)

import mpidist
from mpidist._base import nest
from mpidist._strategy.strategy import group_of

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]


def trees(rank):
    """Nests of all sizes: with the header, in pieces, of several dtypes."""
    return [
        3.5 + rank,
        sample(rank, 7, "float32"),
        sample(rank, 300_000, "float64"),
        {"a": [sample(rank, n, "float32") for n in (5, 40_000)], "b": rank},
        (np.arange(9) * rank, np.linspace(-1, rank, 1000).astype("float16")),
    ]


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX"])
def test_results_are_those_of_all_reduce(strategy, rank, op):
    def step():
        values = trees(rank) * 3
        handles = [context().all_reduce_async(op, x) for x in values]
        found = [handle.result() for handle in reversed(handles)][::-1]
        expected = [context().all_reduce(op, x) for x in values]
        assert all(handle.done() for handle in handles)
        return found, expected

    found, expected = local_of(strategy, step)
    for x, y in zip(found, expected, strict=True):
        assert type(x) is type(y)
        np.testing.assert_array_equal(x, y)


def local_of(strategy, step):
    kept = []
    strategy.run(lambda: kept.append(step()))
    return [nest.flatten(x)[0] for x in kept[0]]


def test_gathers_and_functions(strategy, rank, size):
    def step():
        ctx = context()
        rows = ctx.all_gather_async(np.full((rank + 1, 2), rank), 0)
        total = ctx.all_reduce_async(np.logaddexp, np.full(3, 1.0))
        assert repr(total) == (
            "<mpidist.experimental.CollectiveHandle: all_reduce_async, ended>"
        )
        assert rows.done()  # a function is called here, after what was begun
        return rows.result(), total.result()

    rows, total = local(strategy, step)
    assert rows[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    np.testing.assert_allclose(total, 1 + np.log(size))


def test_gathers_wait_for_those_begun(strategy, rank, size):
    """They ask the core about their lengths before they meet the others."""
    x = np.ones(1_000_000)

    def step():
        handles = [context().all_reduce_async("SUM", x) for _ in range(3)]
        if rank == 0:
            time.sleep(0.002)  # the thread is in the core by then
        rows = context().all_gather(np.full((rank + 1, 2), rank), 0)
        assert all((handle.result() == size).all() for handle in handles)
        return rows

    for _ in range(2):
        rows = local(strategy, step)
        assert rows[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]


@pytest.fixture
def threads_alternate():
    """Of the process, so not set by each replica."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_alternate")
def test_both_threads_make_the_first_call_of_a_kind(strategy, size):
    """The cache of plans never shows the list of a kind without a plan."""
    kinds = [
        mpidist.experimental.CommunicationOptions(bytes_per_pack=1024 + k)
        for k in range(200)
    ]

    def step():
        for options in kinds:
            handle = context().all_reduce_async("SUM", 1.0, options)
            assert context().all_reduce("SUM", 2.0, options) == 2 * size
            assert handle.result() == size

    strategy.run(step)


def test_other_calls_wait_for_those_begun(strategy, size):
    def merge_fn(strategy, x):
        return strategy.reduce("SUM", x, axis=None)

    def step():
        ctx = context()
        one = ctx.all_reduce_async("SUM", np.ones(100_000))
        assert ctx.all_reduce("SUM", 1) == size
        assert one.done()
        two = ctx.all_reduce_async("SUM", np.ones(100_000))
        assert ctx.merge_call(merge_fn, args=(1,)) == size
        assert two.done()
        return one, two, ctx.all_reduce_async("SUM", 2.0)

    handles = strategy.run(step)
    assert all(handle.done() for handle in handles)  # the end of run waits, too
    one, two, three = [handle.result() for handle in handles]
    assert one.sum() == two.sum() == 100_000 * size
    assert three == 2 * size
    assert handles[2].result() == 2 * size  # a second time
    assert_usable(strategy)


def test_outside_of_a_replica_context(strategy):
    ctx = mpidist.ReplicaContext(strategy, None)
    with pytest.raises(RuntimeError, match=r"strategy\.run|Need to be inside"):
        ctx.all_reduce_async("SUM", 1.0)
    with strategy.scope(), pytest.raises(RuntimeError, match=r"strategy\.gather"):
        ctx.all_gather_async(np.ones(1), 0)
    assert_usable(strategy)


@pytest.mark.replicas(1)  # threads of one process share it, and what has failed in it
@pytest.mark.filterwarnings("ignore:.*outside of every scope")
def test_the_default_strategy():
    ctx = mpidist.get_replica_context()
    handle = ctx.all_reduce_async("SUM", np.arange(3))
    assert handle.done()
    assert handle.result().tolist() == [0, 1, 2]
    assert ctx.all_gather_async(np.ones(2), 0).result().tolist() == [1, 1]
    with pytest.raises(ValueError, match="LAST"):
        ctx.all_reduce_async("LAST", 1.0).result()
    assert ctx.all_reduce("SUM", 2.0) == 2.0


@pytest.mark.replicas(1)
@pytest.mark.filterwarnings("ignore:.*outside of every scope")
def test_threads_share_a_strategy_of_one_replica():
    strategy = mpidist.get_strategy()
    guard, results = group_of(strategy).guard, []

    def work():
        x = mpidist.get_replica_context().all_reduce("SUM", np.ones(3))
        results.append(x.sum() + strategy.run(lambda: 1.0))

    def in_another_thread():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    with guard.payload():  # while data move by Python
        in_another_thread()
    strategy.run(in_another_thread)
    assert [float(strategy.experimental_local_results(x)[0]) for x in results] == [4, 4]
    assert not guard.broken


def test_what_was_passed_lives_until_the_call_has_ended(strategy):
    """Not until the next call is made."""

    def step():
        x = np.ones(100_000)
        found = weakref.ref(x)
        handle = context().all_reduce_async("SUM", x)
        handle.result()
        del x, handle
        end = time.monotonic() + 60
        while found() is not None and time.monotonic() < end:
            time.sleep(0.001)  # the thread may still be about to forget it
        return found() is None

    assert local(strategy, step)


# --- what they raise ------------------------------------------------------------------


@pytest.mark.parametrize("where", ["result", "later", "call", "merge_call", "end"])
def test_where_an_error_is_raised(strategy, where):
    def step():
        ctx = context()
        bad = ctx.all_reduce_async("NO SUCH", 1.0)
        later = ctx.all_reduce_async("SUM", 1.0)  # is not made
        if where == "result":
            bad.result()
        elif where == "later":
            later.result()
        elif where == "call":
            ctx.all_reduce("SUM", 1.0)
        elif where == "merge_call":
            ctx.merge_call(lambda strategy: None)
        return bad, later

    raises_everywhere(ValueError, lambda: strategy.run(step), "NO SUCH")
    assert_usable(strategy)


def test_a_program_goes_on_after_an_error(strategy, rank, size):
    def step():
        ctx = context()
        bad = ctx.all_reduce_async("SUM", np.ones(3 + rank))
        later = ctx.all_reduce_async("SUM", 1.0)
        kind = mpidist.CollectiveMismatchError if size > 1 else ()
        with pytest.raises(kind) if size > 1 else warnings.catch_warnings():
            bad.result()
        with pytest.raises(kind) if size > 1 else warnings.catch_warnings():
            later.result()
        new = ctx.all_reduce_async("NO SUCH", 1.0)
        while not new.done():
            time.sleep(0.001)
        with contextlib.suppress(mpidist.CollectiveMismatchError):
            bad.result()  # an old error, which says nothing about the new one
        with pytest.raises(ValueError, match="NO SUCH"):
            ctx.all_reduce("SUM", 1.0)
        return ctx.all_reduce_async("SUM", 1.0).result()

    assert local(strategy, step) == size
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("asked", [False, True])
def test_calls_that_differ(strategy, rank, asked):
    """The message says where each rank has begun its call."""

    def step():
        if rank == 0:
            handle = context().all_reduce_async("SUM", 1.0)
        else:
            handle = context().all_gather_async(np.ones(2), 0)
        if asked:
            handle.result()
        return handle

    error = mpidist.CollectiveMismatchError
    raises_everywhere(
        error,
        lambda: strategy.run(step),
        "rank 0: all_reduce SUM float64 ()  (at test_async.py:",
        "all_gather axis=0",
    )
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_begins_fewer(strategy, rank):
    def step():
        calls = [context().all_reduce_async("SUM", 1.0) for _ in range(3 - (rank == 0))]
        return [call.result() for call in calls]

    raises_everywhere(mpidist.CollectiveMismatchError, lambda: strategy.run(step))
    assert_usable(strategy)


@pytest.mark.parametrize("begun", [0, 1, 2])
def test_an_exception_on_one_rank_with_calls_begun(strategy, rank, size, begun):
    """However many it has begun: its own exception, and it is told to the others."""

    def step():
        calls = []
        for number in range(3):
            if rank == size - 1 and number == begun:
                raise ZeroDivisionError
            calls.append(context().all_reduce_async("SUM", np.ones(1000)))
        return [call.result() for call in calls]

    rows = outcomes(lambda: strategy.run(step))
    assert rows.pop().name == "ZeroDivisionError"
    assert {row.name for row in rows} <= {"ReplicaError"}
    assert_usable(strategy)


def test_a_handle_that_is_dropped_warns_once(new_strategy):
    strategy = new_strategy()

    def step():
        context().all_reduce_async("SUM", 1.0)
        context().all_reduce_async("SUM", 2.0)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        strategy.run(step)
        strategy.run(step)
    # What other tests have left open is told when it is collected, perhaps now.
    found = [w for w in found if not issubclass(w.category, ResourceWarning)]
    # Warnings are of the process: of all replicas, where they are threads.
    assert {(w.category, w.filename) for w in found} <= {(RuntimeWarning, __file__)}
    assert all("without `result()`" in str(w.message) for w in found)
    assert sum(everywhere(len(found))) >= 1
    assert group_of(strategy).guard.async_calls.has_warned
    assert_usable(strategy)


@pytest.mark.parametrize(
    "change",
    [
        None,
        lambda x: x[0].fill(1),
        lambda x: x.__setitem__(1, 2.0),
        lambda x: x.append(3.0),
    ],
    ids=["nothing", "an array", "a number", "the length of a list"],
)
def test_a_change_before_the_result_is_found(strategy, monkeypatch, change):
    monkeypatch.setenv("MPIDIST_DEBUG", "1")

    def step():
        value = [np.zeros(10), 1.0]
        handle = context().all_reduce_async("SUM", value)
        while not handle.done():  # else the thread may see what has changed
            time.sleep(0.001)
        if change:
            change(value)
        with contextlib.suppress(RuntimeError):
            handle.result()
        return handle.result()

    if change:
        error = raises_everywhere(RuntimeError, lambda: strategy.run(step))
        assert "has changed since" in error[0]
    else:
        strategy.run(step)
    assert_usable(strategy)


def test_a_closed_strategy(new_strategy, size):
    strategy = new_strategy()
    with mpidist.ReplicaContext(strategy, None) as ctx:
        handle = ctx.all_reduce_async("SUM", 1.0)
    strategy.close()
    assert handle.result() == size
    with pytest.raises(RuntimeError, match="closed"), ctx:
        ctx.all_reduce_async("SUM", 1.0).result()
