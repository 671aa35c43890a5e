"""MPIDIST_TRACE: a line for each collective call, and nothing without it."""

import logging
import re
import sys
import textwrap
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from launching import run_ranks
from replicas import (
    SUM,
    after_the_others,
    context,
    everywhere,
    make,
    own,
    wait_for_reports,
)

import mpidist
from mpidist._agreement.guard import Guard
from mpidist._base import threads
from mpidist._collectives.collectives import Collectives
from mpidist._collectives.observed import ObservedPlan
from mpidist._mpi.traffic import Traffic
from mpidist._strategy.strategy import group_of
from mpidist._timeline.observer import Observers
from mpidist._timeline.trace import Lines
from mpidist.testing import each_replica

on_replicas = [pytest.mark.mpi, pytest.mark.replicas(1, 2, 3)]

LINE = re.compile(
    r"rank=(?P<rank>\d+)/(?P<size>\d+) (?:strategy=(?P<strategy>\d+) )?"
    r"call=(?P<call>\d+) (?P<event>begin|waits|end) bytes=(?P<bytes>\d+) "
    r"route=(?P<route>[a-z+]+) (?:mpi=(?P<mpi>\S+) )?"
    r"(?:seconds=(?P<seconds>\d+\.\d{6}) )?"
    r"(?:waited=(?P<waited>\d+\.\d{6}) )?(?:raised=(?P<raised>\w+) )?(?P<text>.*)"
)


def parse(text):
    found = LINE.fullmatch(text)
    assert found is not None, text
    return found.groupdict()


class Listener(logging.Handler):
    """Keeps what the trace says; replicas that are threads say it to each other's."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        assert record.levelno == logging.INFO
        self.lines.append(record.getMessage())

    def take(self, rank):
        """Return the lines of this rank, and forget all."""
        wait_for_reports()
        lines = [parse(line) for line in self.lines]
        self.lines = []
        return [line for line in lines if int(line["rank"]) == rank]


@each_replica
@pytest.fixture
def listener():
    logger, handler = logging.getLogger("mpidist.trace"), Listener()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture
def traced(strategy, new_strategy, listener, monkeypatch):
    """A strategy with a trace, whose first lines have been taken.

    That of the fixture `strategy` is made before, and has none.
    """
    monkeypatch.setenv("MPIDIST_TRACE", "1")
    strategy = new_strategy()
    everywhere(None)
    listener.take(strategy.replica_id)
    return strategy


def shown(lines):
    return [(line["text"], line["route"], int(line["bytes"])) for line in lines]


# --- what lines say -------------------------------------------------------------------


class TestLines:
    pytestmark = on_replicas

    def test_the_functions_of_mpi(
        self, new_strategy, listener, rank, size, monkeypatch
    ):
        monkeypatch.setenv("MPIDIST_TRACE", "1")
        monkeypatch.setenv("MPIDIST_SIMULATED_NODES", str(size))
        strategy = new_strategy()
        everywhere(None)
        listener.take(rank)
        before = Counter(strategy.communication_statistics().mpi_calls)
        strategy.run(lambda: context().all_reduce("SUM", np.ones(200_000)))
        made = Counter(strategy.communication_statistics().mpi_calls) - before
        said = Counter()
        for line in listener.take(rank):
            for text in line["mpi"].split(",") if line["mpi"] else ():
                count, _, name = text.rpartition("*")
                said[name] += int(count or 1)
        assert said == Counter({k.split()[0]: n for k, n in made.items()})
        assert bool(said) == (size > 1 and threads.current() is None)

    def test_each_call_has_one(self, traced, listener, rank, size):
        variable = make(traced, np.zeros(3), name="w", aggregation=SUM)
        listener.take(rank)

        def step():
            context().all_reduce("SUM", np.ones(10))
            context().all_reduce("SUM", np.ones(10))
            context().all_reduce("SUM", np.ones(200_000))
            context().all_reduce("MEAN", {"a": 1.0, "b": [np.ones((2, 3)), 7]})
            context().all_gather(np.ones((rank + 1, 2)), 0)
            variable.assign_add(np.ones(3))

        traced.run(step)
        lines = listener.take(rank)
        assert {line["event"] for line in lines} == {"end"}
        assert {line["size"] for line in lines} == {str(size)}
        plans = group_of(traced).collectives.cache.plans()
        planned = {
            plan.call.text: plan.observed.route
            for plan in plans
            if isinstance(plan, ObservedPlan)
        }
        nest = "{'a': float64 (), 'b': [float64 (2, 3), int64 ()]}"
        assert [(line["text"], int(line["bytes"])) for line in lines] == [
            ("all_reduce SUM float64 (10,)", 80),
            ("all_reduce SUM float64 (10,)", 80),
            ("all_reduce SUM float64 (200000,)", 1_600_000),
            (f"all_reduce MEAN {nest}", 64),
            ("all_gather axis=0 float64 (*, 2)", 16 * (rank + 1)),
            ("Variable 'w'.assign_add [#1] SUM float64 (3,)", 24),
            (f"the end of run({step.__qualname__})", 0),
        ]
        assert all(line["route"] == planned[line["text"]] for line in lines[:4])
        assert lines[-1]["route"] == "section"
        whole, waited = float(lines[-1]["seconds"]), float(lines[-1]["waited"])
        inside = sum(float(line["seconds"]) for line in lines[:-1])
        assert whole >= inside + waited
        numbers = everywhere([line["call"] for line in lines])
        assert all(row == numbers[0] for row in numbers)

    def test_verbs_of_the_program(self, traced, listener, rank, size):
        values = traced.experimental_distribute_values_from_function(
            lambda value: np.ones(4)
        )
        traced.reduce("SUM", values, axis=None)
        traced.gather(values, axis=0)
        variable = make(traced, np.zeros(3), name="w")
        traced.extended.update(variable, lambda v, x: v.assign(x), args=(np.ones(3),))
        lines = listener.take(rank)
        texts = [line["text"] for line in lines]
        assert texts[:3] == [
            "experimental_distribute_values_from_function",
            "Strategy.reduce SUM float64 (4,)",
            "Strategy.gather axis=0 float64 (*,)",
        ]
        assert texts[3].startswith("Variable 'w' (")
        if size > 1:  # else nobody has to be waited for
            assert texts[4].startswith("update of Variable 'w' [#")
        assert [int(line["bytes"]) for line in lines[:4]] == [0, 32, 32, 24]

    def test_merge_call_and_its_commands(self, traced, listener, rank, size):
        """What rank 0 gets or gives moves by MPI."""

        def give(strategy, x):
            strategy.experimental_local_results(x)
            return strategy.experimental_distribute_values_from_function(
                lambda value: np.ones(2)
            )

        def merge_fn(strategy, x):
            return strategy.extended.reduce_to("SUM", x, x)

        traced.run(lambda: context().merge_call(merge_fn, args=(np.ones(4),)))
        texts = [line["text"] for line in listener.take(rank)]
        message = "merge_call, waiting for merge_fn on rank 0"
        if rank == 0:
            message = "a message to all ranks"
        messages = [message] if size > 1 else []
        assert texts[:-1] == [
            "merge_call ((component,), {})",
            *messages,
            "reduce_to SUM [float64 (4,)]",
            *messages,
            f"the end of merge_call({merge_fn.__qualname__})",
        ]
        traced.run(lambda: context().merge_call(give, args=(np.ones(4),)))
        routes = {text: route for text, route, _ in shown(listener.take(rank))}
        if size > 1:
            assert routes["experimental_local_results of 1 values"] == "mpi"
            assert routes["scatter a PerReplica of the coordinator"] == "mpi"

    def test_the_plan_of_an_optimizer(self, traced, listener, rank, size):
        variable = make(traced, np.zeros(3), name="w", aggregation=SUM)
        with traced.scope():
            optimizer = mpidist.optimizers.SGD(0.1)
        traced.run(lambda: optimizer.apply_gradients([(np.ones(3), variable)]))
        lines = [x for x in listener.take(rank) if "apply_gradients" in x["text"]]
        if size > 1:
            assert lines[-1]["text"].startswith("apply_gradients of SGD")
            assert lines[-1]["text"].endswith("SUM [float64 (3,)] for #1")
            assert int(lines[-1]["bytes"]) == 24
        np.testing.assert_allclose(variable.numpy(), -0.1 * size)

    def test_what_raises(self, traced, listener, rank):
        def step():
            context().all_reduce("SUM", "text")

        with pytest.raises(TypeError):
            traced.run(step)
        lines = listener.take(rank)
        assert [(line["text"], line["raised"]) for line in lines] == [
            ("all_reduce with invalid arguments", "TypeError"),
            (f"the end of run({step.__qualname__})", "TypeError"),
        ]

    def test_begins(self, new_strategy, listener, rank, monkeypatch):
        monkeypatch.setenv("MPIDIST_TRACE", "2")
        strategy = new_strategy()
        everywhere(None)
        listener.take(rank)

        def step():
            context().all_reduce("SUM", np.ones(10))
            context().all_gather(np.ones(2), 0)

        strategy.run(step)
        lines = listener.take(rank)
        reduced = "all_reduce SUM float64 (10,)"
        gathered = "all_gather axis=0 float64 (*,)"
        assert [(line["event"], line["text"]) for line in lines] == [
            ("begin", f"run({step.__qualname__})"),
            ("begin", reduced),
            ("end", reduced),
            ("begin", gathered),
            ("end", gathered),
            ("begin", f"the end of run({step.__qualname__})"),
            ("end", f"the end of run({step.__qualname__})"),
        ]
        for begin, end in zip(lines[1::2], lines[2::2], strict=True):
            assert begin["seconds"] is None
            assert begin["call"] == end["call"]
            assert begin["route"] == end["route"]

    @pytest.mark.parametrize("level", ["1", "2"])
    def test_results_are_those_without_it(
        self, new_strategy, listener, rank, size, monkeypatch, level
    ):
        x = {
            "a": np.arange(1000.0)[::2] * (rank + 1) / 3,
            "b": np.full((300, 300), rank, np.int32),
        }

        def step():
            ctx = context()
            sums = [ctx.all_reduce("SUM", x) for _ in range(2)]
            sums += [ctx.all_reduce("SUM", x["a"]), ctx.all_reduce("MEAN", rank + 1)]
            return [*sums, ctx.all_gather(x["a"][: rank + 2], 0)]

        plain = new_strategy()
        assert type(group_of(plain).guard) is Guard
        assert type(group_of(plain).collectives) is Collectives
        expected = own(plain, plain.run(step))
        everywhere(None)
        assert listener.take(rank) == []
        monkeypatch.setenv("MPIDIST_TRACE", level)
        everywhere(None)
        traced = new_strategy()
        found = own(traced, traced.run(step))
        np.testing.assert_equal(found, expected)
        assert listener.take(rank) != []

    def test_calls_that_the_guard_does_not_check(
        self, new_strategy, listener, rank, monkeypatch
    ):
        monkeypatch.setenv("MPIDIST_TRACE", "1")
        strategy = new_strategy(guard=False)
        everywhere(None)
        listener.take(rank)
        for _ in range(2):
            strategy.run(lambda: context().all_reduce("SUM", np.ones(10)))
        lines = listener.take(rank)
        texts = [text for text, _, _ in shown(lines)]
        assert texts[::2] == ["all_reduce SUM float64 (10,)"] * 2
        assert texts[1].startswith("the end of run(")
        assert len({line["call"] for line in lines}) == 4


# --- a rank that does not come --------------------------------------------------------


@pytest.mark.one_size
@pytest.mark.mpi(min_size=2)
@pytest.mark.replicas(2)
def test_a_long_wait_has_a_line(new_strategy, listener, rank, size, monkeypatch):
    monkeypatch.setenv("MPIDIST_TRACE", "1")
    monkeypatch.setenv("MPIDIST_STALL_SECONDS", "0.2")
    strategy = new_strategy()
    short = mpidist.experimental.CommunicationOptions(timeout_seconds=3)
    everywhere(None)
    listener.take(rank)

    def step():
        with after_the_others(rank == size - 1):
            context().all_reduce("SUM", np.ones(7), short)

    with pytest.raises(mpidist.CollectiveTimeoutError):
        strategy.run(step)
    lines = listener.take(rank)
    call = [x for x in lines if x["text"] == "all_reduce SUM float64 (7,)"]
    assert call[-1]["raised"] == "CollectiveTimeoutError"
    if rank < size - 1:
        waits, end = call
        assert (waits["event"], end["event"]) == ("waits", "end")
        assert waits["call"] == end["call"]
        assert float(waits["seconds"]) >= 0.2
        assert int(waits["bytes"]) == 56


# --- where lines go -----------------------------------------------------------------


PROGRAM = """
import numpy as np
import mpidist

strategy = mpidist.MPIStrategy()
strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", np.ones(10)))
"""


def lines_of(program, n=2, **env):
    source = textwrap.dedent(program)
    done = run_ranks(n, ["-c", source], timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_lines_go_to_stderr():
    lines = lines_of(PROGRAM, 3, MPIDIST_TRACE="1", PYTHONUNBUFFERED="1")
    reduced = []
    for line in lines:
        name, clock, rest = line.split(" ", 2)
        assert name == "mpidist.trace"
        assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}", clock)
        found = parse(rest)
        assert int(found["size"]) == 3
        if found["text"] == "all_reduce SUM float64 (10,)":
            reduced.append(int(found["rank"]))
    assert sorted(reduced) == [0, 1, 2]


def test_handlers_of_the_user_get_them_until_they_are_turned_off():
    program = f"""
import logging, sys
logging.basicConfig(stream=sys.stderr, format="mine %(name)s %(message)s")
{PROGRAM}
logging.getLogger("mpidist.trace").setLevel("ERROR")
for one in (strategy, mpidist.MPIStrategy()):
    one.run(lambda: mpidist.get_replica_context().all_reduce("SUM", np.ones(11)))
"""
    lines = lines_of(program, MPIDIST_TRACE="1")
    assert sum(line.endswith("all_reduce SUM float64 (10,)") for line in lines) == 2
    for line in lines:
        assert line.startswith("mine mpidist.trace rank=")
        assert "(11,)" not in line


# --- the lines by themselves ----------------------------------------------------------


@pytest.fixture
def trace():
    return Observers([Lines(0, 1, 1, begins=False, traffic=Traffic())], 1)


def test_what_a_call_does_inside_is_part_of_it(trace, listener):
    """But not the calls of a section in it."""
    with trace.call(8, "mpi"):
        trace.name("outer", 1)
        with trace.call(4, "shared"):
            trace.name("part", 2)
        with trace.section("section", 2), trace.call(4, "shared"):
            trace.name("inner", 2)
    assert shown(listener.take(0)) == [("inner", "shared", 4), ("outer", "mpi", 8)]


def test_a_call_that_never_meets_the_others_has_none(trace, listener):
    with pytest.raises(ZeroDivisionError), trace.call(8, "mpi"):
        raise ZeroDivisionError
    assert listener.take(0) == []


def test_a_line_is_one_write(trace, monkeypatch):
    """Also of a long text, or one of several lines, which is cut."""
    writes = []
    stream = SimpleNamespace(write=writes.append, flush=lambda: writes.append("flush"))
    monkeypatch.setattr(logging.getLogger("mpidist.trace"), "propagate", False)
    monkeypatch.setattr(sys, "stderr", stream)  # pytest listens further up
    with trace.call(8, "mpi"):
        trace.name("a\nb " + 10_000 * "x", 1)
    line, flushed = writes
    assert re.search(r" a b x+ \.\.\.\n$", line)
    assert len(line) < 2000
    assert flushed == "flush"
