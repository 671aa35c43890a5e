"""`mpidist.elastic.State`: what it takes, and commits put back on other replicas."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import elastic, testing
from mpidist._base.errors import PACKAGE
from mpidist._runtime import context
from mpidist.elastic import _commits
from mpidist.elastic._state import storage_of_state
from tests import replicas as on

ROWS = 23
BATCH = 5
SIZES = range(1, 5)


def _build(strategy):
    with_momentum = mpidist.optimizers.SGD(0.5, momentum=0.5)
    weights = mpidist.Variable(np.arange(3.0), name="weights")
    with_momentum.build([weights])
    seen = mpidist.Variable(
        np.zeros(ROWS, int), synchronization="ON_READ", aggregation="SUM"
    )
    rows = mpidist.data.Dataset.range(ROWS).shuffle(ROWS, seed=4).batch(BATCH)
    return {
        "weights": weights,
        "optimizer": with_momentum,
        "metrics": {"seen": seen},
        "batches": strategy.experimental_distribute_dataset(rows),
    }


def _count(strategy, state, batch):
    """Count the rows of a batch, each on the replica that has it."""
    seen = state.metrics["seen"]
    add = lambda x: seen.assign_add(np.bincount(x, minlength=ROWS))  # noqa: E731
    strategy.run(add, args=(batch,))


def _two_epochs(strategy, state, most):
    """Train for two epochs; return how often rows were seen. Or leave after a step."""
    for epoch in range(state.epoch, 2):
        for batch in state.batches:
            _count(strategy, state, batch)
            state.order = [*state.order, int(strategy.reduce("SUM", batch, axis=0))]
            state.commit()
            if len(state.order) == most:
                return None
        state.epoch = epoch + 1
        state.commit()
    with strategy.scope():
        return state.metrics["seen"].numpy()


def _program(directory, most):
    """Return what a job does that has trained so far, or goes on."""

    def program():
        state = elastic.State(_build, epoch=0, order=[], directory=directory, every=1)
        seen = elastic.run(lambda s, state: _two_epochs(s, state, most), state)
        return seen, state.order

    return program


def test_epochs_go_on_over_any_number_of_replicas(tmp_path):
    _, whole = testing.run(1, _program(tmp_path / "whole", 99))[0]
    cases = on.a_third([*itertools.product(SIZES, SIZES)])
    # In the middle of the first epoch, behind it, or in the second.
    for (before, after), steps in zip(cases, itertools.cycle((2, 5, 8)), strict=False):
        directory = tmp_path / f"{before}-{after}"
        testing.run(before, _program(directory, steps))
        for seen, order in testing.run(after, _program(directory, 99)):
            assert (seen == 2).all(), (before, after)
            assert order == whole, (before, after)


def _hold(state, vote=lambda: True):
    """Begin to use a state on a new strategy, without `run`; return both."""
    strategy = mpidist.MPIStrategy()
    storage = storage_of_state(state)
    storage.begin(strategy, vote)
    return strategy, storage


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (3, 2), (4, 3), (3, 3)])
@pytest.mark.parametrize("first_lost", [False, True])
def test_a_commit_in_memory_is_put_back(before, after, first_lost):
    states = {}

    def train():
        rank = testing.current_group().rank
        own = np.random.default_rng(rank)
        state = elastic.State(
            _build,
            common=np.random.default_rng(9),
            own=own,
            note=[],
            counts={"a": [collections.defaultdict(int)]},
        )
        states[rank] = state
        strategy, _ = _hold(state)
        loop = iter(state.batches)
        for batch in itertools.islice(loop, 3):
            _count(strategy, state, batch)
            state.weights.assign_add(np.ones(3))
            state.note.append("step")
            state.counts["a"][0]["step"] += 1
        state.common.random(7)
        state.own.random()
        state.commit()
        with strategy.scope():
            seen = state.metrics["seen"].numpy()
        expected = state.weights.numpy().copy(), seen, state.common.random()
        streams = state.own.random()
        # What comes after the commit is lost.
        state.weights.assign(np.zeros(3))
        _count(strategy, state, next(loop))
        state.note.append("not committed")
        return expected, streams

    expected, streams = zip(*testing.run(before, train), strict=True)
    # Those that are left, or all: with the first, or the last, replaced by a spare.
    left = list(range(before))
    if before > 1:
        left.pop(0 if first_lost else -1)
    places = left if after < before else list(range(before))
    has = [place in left for place in places]
    if not any(has):
        left, has = places, [True] * len(places)

    def go_on():
        rank = testing.current_group().rank
        if has[rank]:
            state = states[places[rank]]
        else:
            state = elastic.State(
                _build,
                common=np.random.default_rng(1),
                own=np.random.default_rng(2),
                note=["of a spare"],
                counts={"a": [collections.defaultdict(int)]},
            )
        strategy, storage = _hold(state)
        storage.put_back(1, has, places)
        state.commit()
        assert state.note == ["step"] * 3
        state.counts["a"][0]["new"] += 1
        assert state.counts == {"a": [{"step": 3, "new": 1}]}
        assert state.commits == 2
        weights = state.weights.numpy().copy()
        with strategy.scope():
            seen = state.metrics["seen"].numpy()
        result = weights, seen, state.common.random()
        rest = [on.own(strategy, batch) for batch in state.batches]
        return result, state.own.random(), rest

    rows = testing.run(len(places), go_on)
    for place, (result, own, _) in zip(places, rows, strict=True):
        for value, before_it in zip(result, expected[0], strict=True):
            np.testing.assert_array_equal(value, before_it)
        assert own == streams[place]  # a spare goes on with that of the lost one
    rest = np.concatenate([x for _, _, parts in rows for x in parts])
    seen = expected[0][1]
    assert sorted(rest) == [row for row in range(ROWS) if not seen[row]]


@pytest.mark.replicas(2)
def test_nothing_is_committed_if_one_replica_was_lost():
    state = elastic.State(_build, step=0)
    _, storage = _hold(state)
    state.commit()
    _, storage = _hold(state, lambda: False)
    storage.put_back(1, [True, True], [0, 1])
    state.step = 1
    state.weights.assign(np.ones(3))
    with pytest.raises(mpidist.ReplicaLostError, match="nothing is committed"):
        state.commit()
    _, storage = _hold(state)
    storage.put_back(1, [True, True], [0, 1])
    assert (state.step, state.commits) == (0, 1)
    np.testing.assert_array_equal(state.weights, np.arange(3.0))


@pytest.mark.replicas(2)
def test_variables_of_an_earlier_strategy_cannot_be_used():
    state = elastic.State(_build)
    strategy, storage = _hold(state)
    old = state.weights
    with strategy.scope():
        other = mpidist.Variable(1.0, name="other")
    storage.end("take it from `state`")
    _hold(state)
    for use in (
        lambda: old + 1,
        old.numpy,
        lambda: old.assign(np.zeros(3)),
        lambda: float(other),
        lambda: np.asarray(old),
        lambda: old.shape,
    ):
        with pytest.raises(RuntimeError, match="can no longer be used: take it from"):
            use()
    np.testing.assert_array_equal(state.weights, np.arange(3.0))


class _Private:
    """An object with a state that differs between the replicas, or cannot be read."""

    def __init__(self, raises: bool = False) -> None:
        self.number, self.raises = testing.current_group().rank, raises

    def state(self) -> int:
        if self.raises and self.number:
            raise OSError("no state here")
        return self.number

    def restore(self, state: int) -> None:
        self.number = state


@pytest.mark.replicas(3)
def test_what_may_not_differ_is_told_to_all_replicas():
    def refused(error, **objects):
        state = elastic.State(step=1, **objects)
        _hold(state)
        return state, on.raises_everywhere(error, state.commit)

    rank = testing.current_group().rank
    state, messages = refused(mpidist.CollectiveMismatchError, loss=float(rank))
    assert "'loss' is not the same on all replicas" in messages[0]
    assert "rank 1: 1.0" in messages[2]
    state.loss = 4.0
    state.commit()
    _, messages = refused(mpidist.CollectiveMismatchError, private=_Private())
    assert "'private' has another state on each replica" in messages[0]
    refused(OSError, private=_Private(raises=True))


def _agent():
    agent = mpidist.Module("agent")
    agent.weights = mpidist.Variable(np.zeros(3))
    agent.optimizer = mpidist.optimizers.SGD(0.1, momentum=0.9)
    return agent


@pytest.mark.parametrize(
    ("made", "kind", "message"),
    [
        (lambda s: [1], TypeError, "expected `build` to return a dict"),
        (lambda s: {"epoch": 1}, ValueError, "both have 'epoch'"),
        (lambda s: {"rate": 0.1}, TypeError, r"write `State\(build, rate=0.1"),
        (lambda s: {"commit": s}, ValueError, "'commit' cannot be the name"),
        (lambda s: {"sgd": mpidist.optimizers.SGD(0.1)}, RuntimeError, "build"),
        # Its slots were not committed, and so zero after a loss.
        (lambda s: {"agent": _agent()}, RuntimeError, r"optimizer\.build\(variables\)"),
        (
            lambda s: {
                "x": s.distribute_datasets_from_function(
                    lambda c: mpidist.data.Dataset.range(4).batch(2)
                )
            },
            ValueError,
            "'x' is an input of its own on each replica",
        ),
        (
            lambda s: {"x": [s.experimental_distribute_dataset(iter([np.ones(2)]))]},
            ValueError,
            "'x' is a list_iterator, which can be read only once",
        ),
        (
            lambda s: {
                "x": mpidist.Variable(
                    0.0, synchronization="ON_READ", aggregation="NONE"
                )
            },
            ValueError,
            "no single value",
        ),
        # The commit had one array for both.
        (
            lambda s: {"table/b": mpidist.Variable(0.0)},
            ValueError,
            "'table/b' and a tensor",
        ),
    ],
)
def test_what_build_may_not_make(made: Any, kind, message):
    state = elastic.State(made, epoch=0, table={"b": np.ones(3000)})
    with pytest.raises(kind, match=message):
        elastic.run(lambda strategy, state: None, state)


def test_what_a_state_does_not_take():
    with pytest.raises(TypeError, match="make them in the function `build`"):
        elastic.State(weights=mpidist.Variable(0.0))
    with pytest.raises(TypeError, match="cannot be saved"):
        elastic.State(thing=object())
    with pytest.raises(ValueError, match="'commit' cannot be the name"):
        elastic.State(commit=1)
    with pytest.raises(ValueError, match="`every` to be 1 or more, got 0"):
        elastic.State(every=0)
    with pytest.raises(TypeError, match=r"State: expected a path, .* got 3"):
        elastic.State(directory=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`build` to be a function"):
        elastic.State({"step": 0})  # type: ignore[arg-type]
    state = elastic.State(_build, step=0, rng=np.random.default_rng(1))
    with pytest.raises(AttributeError, match="'other' would not be kept"):
        state.other = 1
    with pytest.raises(AttributeError, match="cannot be replaced"):
        state.rng = np.random.default_rng(2)
    with pytest.raises(AttributeError, match="it has step, rng; what `build` makes"):
        _ = state.weights
    with pytest.raises(RuntimeError, match="the state is not in use"):
        state.commit()
    state.step += 1
    assert state.step == 1
    assert "step=1" in repr(state)


def test_ctrl_c_in_a_commit_leaves_no_frame_of_a_call(monkeypatch):
    source = "def interrupted(*args):\n enter()\n raise KeyboardInterrupt"
    names = {}
    # At a line of the package, as it may come.
    exec(compile(source, f"{PACKAGE}lines.py", "exec"), names)

    def enter():
        context.current().group.replica_frame.__enter__()

    def train(strategy, state):
        names["enter"] = enter
        with monkeypatch.context() as patch:
            patch.setattr(_commits, "take", names["interrupted"])
            with pytest.raises(KeyboardInterrupt):
                state.commit()
        return context.depth()

    assert testing.run(1, lambda: elastic.run(train, elastic.State())) == [0]


def test_the_strategy_after_the_end():
    run = lambda: elastic.run(lambda strategy, state: strategy, elastic.State())  # noqa: E731
    (strategy,) = testing.run(1, run)
    with pytest.raises(RuntimeError, match="make its calls in `train`"):
        strategy.run(int)


@pytest.mark.replicas(2)
def test_a_loop_that_was_left_is_at_its_end():
    state = elastic.State(_build)
    strategy, storage = _hold(state)
    for batch in state.batches:
        _count(strategy, state, batch)
        break
    assert len(state.batches) == 5
    assert bool(state.batches) is True
    state.commit()  # behind the loop: the next one begins an epoch
    first = _sums(strategy, state)
    strategy, storage = _hold(state)
    storage.put_back(1, [True, True], [0, 1])
    assert _sums(strategy, state) == first


def _sums(strategy, state):
    """Return the sum of each batch of an epoch."""
    return [int(strategy.reduce("SUM", x, axis=0)) for x in state.batches]


def test_a_make_strategy_that_returns_none():
    make: Any = lambda comm: None  # noqa: E731
    run = lambda: elastic.run(print, elastic.State(), make_strategy=make)  # noqa: E731
    with pytest.raises(TypeError, match=r"write `return MPIStrategy\(comm\)`"):
        testing.run(1, run)


def test_run_says_that_it_is_no_decorator():
    """Horovod's is: its programs write `@hvd.elastic.run`."""
    with pytest.raises(TypeError, match=r"write `mpidist.elastic.run\(train, state\)`"):

        @mpidist.elastic.run  # type: ignore[call-overload]
        def train(state):
            return None
