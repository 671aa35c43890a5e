"""No silent hang: every difference between ranks ends in the same error on all."""

import time
import traceback
import types

import numpy as np
import pytest
from replicas import (
    after_the_others,
    assert_usable,
    context,
    everywhere,
    raises_everywhere,
    set_deadline,
    wait_for_reports,
)

import mpidist
from mpidist._base import threads
from mpidist._strategy.strategy import group_of

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.core, pytest.mark.replicas(2, 3)]


def outcome(strategy, fn):
    """Run a replica function; return what it raises on this rank, or None."""
    error = None
    try:
        strategy.run(fn)
    except (Exception, KeyboardInterrupt) as raised:
        error = raised
    return error


def on_all(strategy, error):
    """Return, on every rank, (type name, message) of each rank's error."""
    text = (type(error).__name__, str(error))
    return group_of(strategy).communicator.all_gather_objects(text)


def expect_mismatch(strategy, fn, *parts):
    start = time.monotonic()
    error = outcome(strategy, fn)
    assert time.monotonic() - start < 40  # not by the deadline
    texts = on_all(strategy, error)
    for name, message in texts:
        assert name == "CollectiveMismatchError"
        for part in parts:
            assert part in message, message
    # The same message on every rank, but for the rank that it begins with.
    assert len({message.split("] ", 1)[1] for _, message in texts}) == 1
    assert_usable(strategy)


def packs(limit):
    options = mpidist.experimental.CommunicationOptions(bytes_per_pack=limit)
    # Buckets that are cut elsewhere would be added to each other silently.
    return lambda: context().all_reduce("SUM", [np.ones(4), np.ones(4)], options)


def reduced(x, op="SUM"):
    return lambda: context().all_reduce(op, x)


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (
            *(reduced(np.ones((3, 4), "f4")), reduced(np.ones((4, 3), "f4"))),
            ["float32 (3, 4)", "float32 (4, 3)"],
        ),
        (
            *(reduced(np.ones(3, "f4")), reduced(np.ones(3))),
            ["float32 (3,)", "float64 (3,)"],
        ),
        (reduced(1.0), reduced(1.0, "MAX"), ["all_reduce MAX", "all_reduce SUM"]),
        (
            *(reduced({"a": 1.0, "b": 2.0}), reduced({"a": 1.0, "c": 2.0})),
            ["'b': float64", "'c': float64"],
        ),
        (packs(64), packs(32), ["bytes_per_pack=32", "bytes_per_pack=64"]),
        (
            lambda: context().all_gather(np.ones((2, 2)), axis=0),
            lambda: context().all_gather(np.ones((2, 2)), axis=1),
            ["axis=0", "axis=1"],
        ),
        (
            reduced(1.0),
            lambda: context().merge_call(lambda strategy, x: None, args=(1.0,)),
            ["all_reduce SUM", "merge_call"],
        ),
    ],
    ids=["shape", "dtype", "operation", "structure", "options", "axis", "verb"],
)
def test_another_call(strategy, rank, last, one, other, says):
    step = other if rank == last else one
    expect_mismatch(strategy, step, *says, f"rank {last}: ")
    error = outcome(strategy, step)
    assert str(error).startswith(f"[rank {rank}]")
    assert str(error).count("test_guard.py:") == 2  # where each side is


@pytest.mark.parametrize("who", ["first", "last"])
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("verb", ["all_reduce", "merge_call"])
def test_one_call_fewer_or_more(strategy, rank, last, who, more, verb):
    odd = 0 if who == "first" else last
    call = {
        "all_reduce": lambda: context().all_reduce("SUM", np.ones(2)),
        "merge_call": lambda: context().merge_call(lambda strategy: None),
    }[verb]

    def step():
        call()
        if (rank == odd) == more:
            call()

    at = verb if more else "the end"
    expect_mismatch(strategy, step, "the end of run(", f"rank {odd}: {at}", verb)


def test_ordered_dicts_in_another_order_are_the_same(strategy, rank, size):
    from collections import OrderedDict

    keys = ["a", "b"] if rank % 2 else ["b", "a"]
    value = OrderedDict((k, 1.0 if k == "a" else 10.0) for k in keys)

    def step():
        return context().all_reduce("SUM", value)

    result = strategy.experimental_local_results(strategy.run(step))[0]
    assert dict(result) == {"a": 1.0 * size, "b": 10.0 * size}


def test_another_variable(strategy, rank, last):
    mean = mpidist.VariableAggregation.MEAN
    with strategy.scope():
        a = mpidist.Variable(1.0, name="a", aggregation=mean)
        b = mpidist.Variable(2.0, name="b", aggregation=mean)
    expect_mismatch(
        strategy,
        lambda: (b if rank == last else a).assign(3.0),
        "Variable 'a'.assign",
        "Variable 'b'.assign",
    )
    assert (float(a), float(b)) == (1.0, 2.0)


def test_results_of_another_structure(strategy, rank, last):
    lists = "[*]", "[*, *]", "`return numpy.array(values)`"
    expect_mismatch(strategy, lambda: [1.0] if rank == last else [1.0, 2.0], *lists)


def test_run_on_some_ranks_and_reduce_on_others(strategy, rank, last):
    value = strategy.run(lambda: 1.0)
    error = None
    try:
        if rank == last:
            strategy.run(lambda: 1.0)
        else:
            strategy.reduce("SUM", value, axis=None)
    except Exception as raised:
        error = raised
    for name, message in on_all(strategy, error):
        assert name == "CollectiveMismatchError"
        assert "Strategy.reduce SUM" in message
        assert "the end of run(" in message
    assert_usable(strategy)


def test_long_nests_are_shortened_around_the_difference(strategy, rank, last):
    shape = (8, 1) if rank == last else (8,)
    tree = {f"layer{i:03}": np.ones(3) for i in range(200)}
    tree["layer150"] = np.ones(shape)
    error = outcome(strategy, lambda: context().all_reduce("SUM", tree))
    assert "'layer150': float64 (8,)" in str(error)
    assert "'layer150': float64 (8, 1)" in str(error)
    assert len(str(error)) < 1500
    assert_usable(strategy)


# --- a replica that raises --------------------------------------------------------


class LocalError(Exception):
    pass


class UnprintableError(Exception):
    def __str__(self):
        raise ValueError("no text")


class ExitsWhenPickledError(Exception):
    def __reduce__(self):
        raise SystemExit(3)


class ExitsWhenPrintedError(Exception):
    """Leaves the program when it is printed, once."""

    printed = False

    def __str__(self):
        if not self.printed:
            self.printed = True
            raise SystemExit(3)
        return "printed"


@pytest.mark.parametrize(
    "make",
    [
        lambda: LocalError(lambda: None),
        UnprintableError,
        ExitsWhenPickledError,
        ExitsWhenPrintedError,
    ],
    ids=["local", "unprintable", "exits when pickled", "exits when printed"],
)
def test_an_exception_that_can_not_be_pickled_or_printed(strategy, rank, last, make):
    error = make()

    def step():
        if rank == last:
            raise error
        context().all_reduce("SUM", 1.0)

    found = outcome(strategy, step)
    assert type(found) is (type(error) if rank == last else mpidist.ReplicaError)
    assert rank == last or type(error).__name__ in str(found)
    assert_usable(strategy)


@pytest.mark.parametrize("who", ["first", "last"])
@pytest.mark.parametrize("when", ["before", "between", "after", "alone"])
def test_a_replica_function_that_raises(strategy, rank, last, when, who):
    odd = 0 if who == "first" else last

    def fail_if(now):
        if rank == odd and now == when:
            raise ZeroDivisionError(f"on purpose, {when}")

    def step():
        fail_if("alone")
        if when != "alone":
            fail_if("before")
            context().all_reduce("SUM", 1.0)
            fail_if("between")
            context().merge_call(lambda strategy, x: x, args=(np.ones(3),))
            fail_if("after")
        return 1.0

    error = outcome(strategy, step)
    for r, (name, message) in enumerate(on_all(strategy, error)):
        if r == odd:
            assert (name, message) == ("ZeroDivisionError", f"on purpose, {when}")
        else:
            assert name == "ReplicaError"
            assert f"rank {odd} raised an exception" in message
            assert "in fail_if" in message  # the traceback of the other rank
            assert f"ZeroDivisionError: on purpose, {when}" in message
    assert_usable(strategy)


def test_all_replicas_raise(strategy, rank):
    def step():
        raise ValueError(f"rank {rank} says so")

    error = outcome(strategy, step)
    assert type(error) is ValueError
    assert str(error) == f"rank {rank} says so"
    assert_usable(strategy)


def test_a_replica_that_swallows_the_error_of_another(strategy, rank, last):
    """The others go on and call again: they are told again, until all are out."""
    seen = []

    def step():
        if rank == last:
            raise KeyError("gone")
        for _ in range(3):
            try:
                context().all_reduce("SUM", 1.0)
            except mpidist.ReplicaError as error:
                seen.append(error)

    error = outcome(strategy, step)
    if rank == last:
        assert isinstance(error, KeyError)
    else:
        # Each of the three calls met the rank that had gone, and said so; with
        # several others the second meets them as well.
        assert len(seen) == 3
    names = [name for name, _ in on_all(strategy, error)]
    assert names == ["ReplicaError"] * last + ["KeyError"]
    assert_usable(strategy)


# --- on the coordinator -----------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "others"),
    [
        (LookupError("on the coordinator"), LookupError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (ExitsWhenPickledError(), mpidist.CollectiveError),
    ],
)
def test_merge_fn_that_raises(strategy, rank, error, others):
    def merge_fn(strategy, x):
        raise error

    found = outcome(strategy, lambda: context().merge_call(merge_fn, args=(1.0,)))
    assert type(found) is (others if rank else type(error))
    if rank and others is LookupError:
        assert str(found) == "on the coordinator"
        assert "merge_fn raised this on rank 0" in found.__notes__[0]
        text = "".join(traceback.format_exception(found))
        assert "in merge_fn" in text  # rank 0's traceback, as the cause
    assert_usable(strategy)


# --- bad input, on one rank ---------------------------------------------------------


BAD_LEAVES = (
    (np.array([object()]), TypeError, "dtype object"),
    ("text", TypeError, "'text'"),
    (None, TypeError, "got None"),
    (types.SimpleNamespace(toarray=None), TypeError, "`x.toarray()`"),  # as scipy's
    (np.array(["a"]), TypeError, "dtype <U1"),
    (2**70, OverflowError, "64 bits"),
    (np.ma.masked_array([1.0], [True]), TypeError, "mask"),
)


@pytest.mark.parametrize("on_every_rank", [True, False])
def test_bad_leaves(strategy, rank, last, on_every_rank):
    for bad, kind, part in BAD_LEAVES:
        x = bad if rank == last or on_every_rank else 1.0
        error = outcome(strategy, lambda x=x: context().all_reduce("SUM", x))
        assert type(error) is kind
        assert part in str(error)
        assert "all_reduce" in str(error)
        if rank != last and not on_every_rank:
            assert f"because rank {last} raised it" in error.__notes__[0]
    assert_usable(strategy)


# --- the deadline -------------------------------------------------------------------


@pytest.mark.one_size
@pytest.mark.processes  # what the process has said
def test_a_rank_that_sleeps(new_strategy, rank, size, caplog, monkeypatch):
    monkeypatch.setenv("MPIDIST_STALL_SECONDS", "0.4")
    strategy = new_strategy()
    sleeper = size - 1
    # Long enough for the others to come in time, and say so, on a busy machine.
    short = mpidist.experimental.CommunicationOptions(timeout_seconds=3)

    def step():
        context().all_reduce("SUM", 1.0)
        everywhere(None)
        if rank == sleeper:
            time.sleep(3.5)  # without a look at the messages of the others
        with after_the_others(rank == sleeper):
            context().all_reduce("SUM", np.ones(14)[::2], short)  # not contiguous

    start = time.monotonic()
    error = outcome(strategy, step)
    assert isinstance(error, mpidist.CollectiveTimeoutError)
    assert time.monotonic() - start < 40  # not by the deadline of the strategy
    message = str(error)
    assert f"rank {sleeper} did not reach call" in message
    assert "all_reduce SUM float64 (7,)" in message  # what the others wait in
    assert "all_reduce SUM float64 ()" in message  # what the missing one called last
    assert "cannot be used any more" in message
    with pytest.raises(mpidist.CollectiveTimeoutError, match="did not reach"):
        strategy.run(lambda: 1.0)
    wait_for_reports()
    # On a busy machine others may be reported as well: for the first call, and by who
    # waits before rank 0 does.
    who = "" if rank == 0 else f"rank {sleeper} "
    told = [x for x in caplog.records if f"{who}did not reach" in x.getMessage()]
    told = [x for x in told if "float64 (7,)" in x.getMessage()]
    assert [(x.name, x.levelname) for x in told] == [("mpidist", "WARNING")][rank:]


@pytest.mark.one_size
@pytest.mark.parametrize("then", ["reduces", "returns"])
def test_a_merge_fn_that_sleeps(new_strategy, rank, then):
    strategy = new_strategy()
    set_deadline(strategy, 2.0)

    def merge_fn(strategy, x):
        everywhere(None)  # sleeps until the others have given up
        if then == "reduces":
            return strategy.reduce("SUM", x, axis=None)
        return "x" * 5000  # larger than one message

    def step():
        try:
            context().merge_call(merge_fn, args=(1.0,))
        finally:
            if rank:
                everywhere(None)

    error = outcome(strategy, step)
    assert isinstance(error, mpidist.CollectiveTimeoutError)
    assert "rank 0 did not reach" in str(error)
    assert "merge_fn" in str(error)


@pytest.mark.one_size
def test_an_exception_while_another_rank_does_not_come(new_strategy, rank, last):
    """The rank that waits at the end of `run` says what it has raised."""
    strategy = new_strategy()
    set_deadline(strategy, 1.0)

    def step():
        if rank == last:
            raise LookupError("lost")
        everywhere(None)  # a call of the program's own

    error = outcome(strategy, step)
    if rank == last:
        everywhere(None)
    assert isinstance(error, mpidist.CollectiveTimeoutError)
    assert ", after LookupError: lost  (at test_guard.py:" in str(error)


@pytest.mark.one_size
def test_slow_but_in_time(new_strategy, rank, size, monkeypatch):
    """Late ranks are marked and confirmed, and go on."""
    monkeypatch.setenv("MPIDIST_STALL_SECONDS", "0.2")
    strategy = new_strategy(timeout_seconds=20)

    def step():
        total = 0.0
        for i in range(3):
            time.sleep(0.5 if rank == i % size else 0.0)
            total += context().all_reduce("SUM", 1.0)
        return total

    (result,) = strategy.experimental_local_results(strategy.run(step))
    assert result == 3.0 * size


def test_a_slow_close(new_strategy, rank, last, monkeypatch):
    """A rank that is late in the middle of `close` is waited for."""
    strategy = new_strategy()
    communicator = group_of(strategy).communicator
    if rank == last:
        release = communicator.release_unused

        def release_later():
            time.sleep(0.3)  # several looks of the others
            release()

        monkeypatch.setattr(communicator, "release_unused", release_later)
    strategy.close()
    assert_usable(new_strategy())


@pytest.mark.mpi(min_size=2)
def test_an_exception_in_close_is_told(new_strategy, rank, last, monkeypatch):
    """The others wait for this rank to free what they share."""
    if threads.current() is not None:
        pytest.skip("replicas that are threads free nothing together")
    strategy = new_strategy(timeout_seconds=60)
    if rank == last:

        def interrupt():
            raise KeyboardInterrupt

        monkeypatch.setattr(
            group_of(strategy).communicator, "release_unused", interrupt
        )
    error = KeyboardInterrupt if rank == last else mpidist.CollectiveTimeoutError
    start = time.monotonic()
    with pytest.raises(error):
        strategy.close()
    assert time.monotonic() - start < 30


@pytest.mark.mpi(min_size=2)
def test_an_error_of_a_strategy_of_some_ranks_is_told_to_all(strategy, rank):
    """The others would be one call behind: their step met the next one of these."""
    if threads.current() is not None:
        pytest.skip("replicas that are threads are of one strategy")
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(rank < 2)
    pair = mpidist.MPIStrategy(part)
    with strategy.scope():
        v = mpidist.Variable(np.zeros(2))
    with pair.scope():
        inner = mpidist.Variable(0.0)

    def gradients():
        if rank < 2:
            inner.assign(rank)
        yield np.ones(2), v

    optimizer = mpidist.optimizers.SGD(0.5)
    optimizer.build([v])
    raises_everywhere(
        mpidist.CollectiveMismatchError, lambda: optimizer.apply_gradients(gradients())
    )
    assert optimizer.apply_gradients([(np.ones(2), v)]) == 1
    pair.close()
    part.Free()


def test_a_time_out_of_another_strategy_is_told_to_all(strategy, rank, last):
    """It was taken for one of this strategy, which all ranks raise."""
    with strategy.scope():
        v = mpidist.Variable(np.zeros(2))

    def gradients():
        if rank == last:
            raise mpidist.CollectiveTimeoutError("of a strategy of this rank alone")
        yield np.ones(2), v

    optimizer = mpidist.optimizers.SGD(0.5)
    optimizer.build([v])
    raises_everywhere(
        mpidist.CollectiveTimeoutError,
        lambda: optimizer.apply_gradients(gradients()),
        "of a strategy of this rank alone",
    )
    assert optimizer.apply_gradients([(np.ones(2), v)]) == 1


def test_options_differ_between_ranks(rank, last):
    options = mpidist.experimental.CommunicationOptions(
        timeout_seconds=30, bytes_per_pack=1000 if rank == last else 2000
    )
    with pytest.raises(mpidist.CollectiveMismatchError, match="1000 bytes_per_pack"):
        mpidist.MPIStrategy(communication_options=options)


def test_the_guard_is_not_switched_for_one_call(new_strategy):
    strategy = new_strategy(guard=False)
    options = mpidist.experimental.CommunicationOptions(guard=True)
    with pytest.raises(ValueError, match="`guard` cannot be changed for one call"):
        strategy.run(lambda: context().all_reduce("SUM", 1.0, options))


# --- found by review ------------------------------------------------------------------


def test_another_function(strategy, rank, last):
    """All ranks are at the end of a run, but of another one."""

    def one():
        return 1.0

    def other():
        return 1.0

    expect_mismatch(
        strategy, other if rank == last else one, "end of run", "one)", "other)"
    )


def test_update_of_another_variable_of_the_same_name(strategy, rank, last):
    with strategy.scope():
        a, b = mpidist.Variable(np.zeros(2)), mpidist.Variable(np.zeros(2))
    mine = b if rank == last else a
    for call in (
        lambda: strategy.extended.update(mine, lambda v: v.assign_add(np.ones(2))),
        lambda: mine.assign(np.ones(2)),
    ):
        with pytest.raises(mpidist.CollectiveMismatchError, match="Variable"):
            call()
    copies = strategy.gather(
        strategy.run(lambda: np.stack([a.numpy(), b.numpy()])[None]), axis=0
    )
    assert (copies == copies[0]).all()
    assert_usable(strategy)


@pytest.mark.parametrize("what", ["late", "raises", "skips"])
def test_deadlines_that_differ_between_ranks(new_strategy, rank, last, what):
    """A rank that comes late by the others' deadline, not by its own, is told."""
    strategy = new_strategy()
    short = mpidist.experimental.CommunicationOptions(timeout_seconds=1)

    def step():
        with after_the_others(rank == last):
            if rank != last:
                return context().all_reduce("SUM", 1.0, short)
        if what == "raises":
            raise KeyError("too late")
        if what == "late":
            return context().all_reduce("SUM", 1.0)
        return 1.0

    start = time.monotonic()
    error = outcome(strategy, step)
    assert isinstance(error, mpidist.CollectiveTimeoutError)
    assert time.monotonic() - start < 40  # not by the deadline of the strategy
    if what == "raises" and rank == last:
        assert isinstance(error.__cause__, KeyError)


def test_merge_fn_that_acts_as_a_replica(strategy, rank):
    def merge_fn(strategy):
        with mpidist.ReplicaContext(strategy, None) as ctx:
            return ctx.all_reduce("SUM", 1.0)

    with pytest.raises(RuntimeError, match="merge_fn runs on this rank alone"):
        strategy.run(lambda: context().merge_call(merge_fn))
    assert_usable(strategy)


def test_an_initial_value_that_communicates(strategy, rank):
    value = strategy.run(lambda: 1.0)
    with (
        pytest.raises(mpidist.CollectiveMismatchError, match="Variable"),
        strategy.scope(),
    ):
        mpidist.Variable(lambda: strategy.reduce("SUM", value, axis=None))
    assert_usable(strategy)


@pytest.mark.parametrize("verb", ["reduce", "gather", "reduce_to"])
def test_plain_values_that_differ(strategy, rank, verb):
    """They come from each rank's own code, and would make the ranks differ."""
    x = np.full(3, float(rank))
    call = {
        "reduce": lambda: strategy.reduce("MEAN", x, axis=None),
        "gather": lambda: strategy.gather(x, axis=0),
        "reduce_to": lambda: strategy.extended.reduce_to("MEAN", x, x),
    }[verb]
    with pytest.raises(mpidist.CollectiveMismatchError, match="comes from"):
        call()
    assert_usable(strategy)


def test_values_of_another_strategy(strategy, new_strategy, rank):
    value = new_strategy().run(lambda: np.ones(2))
    for call in (
        lambda: strategy.reduce("SUM", value, axis=None),
        lambda: strategy.gather(value, axis=0),
        lambda: strategy.extended.reduce_to("SUM", value, value),
        lambda: strategy.run(lambda x: x, args=(value,)),
    ):
        with pytest.raises(RuntimeError, match="Mixing different Strategy objects"):
            call()
    assert_usable(strategy)


def test_generators_are_refused(strategy):
    def step():
        yield context().all_reduce("SUM", 1.0)

    with pytest.raises(TypeError, match="generator or async function"):
        strategy.run(step)
    assert_usable(strategy)
