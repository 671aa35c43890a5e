"""What an elastic training costs while no rank dies: the commits of its steps."""

import itertools
from typing import Any

import numpy as np

import mpidist
from mpidist import elastic
from mpidist._cli.measuring import Bench, Row

LAYERS = (784, 256, 10)
ROWS = 128  # of each replica
SLOWER = 3.0  # a step is measured this many times as long as an array
COMMITTED = (4 * 2**10, 4 * 2**20)  # bytes


def commits(bench: Bench) -> None:
    """Make a step of a training with a commit, against one without. Collective.

    Then commits alone, against copies of the same arrays.
    """

    def train(strategy: mpidist.Strategy, state: Any) -> None:
        def descend() -> None:
            state.optimizer.apply_gradients(gradients(state.weights))

        def step() -> None:
            strategy.run(descend)

        def committed_step() -> None:
            strategy.run(descend)
            state.commit()

        before = state.commits
        committed_step()
        work = "training step, with a commit"
        bench.check(work, before + 1, mpidist=lambda: state.commits)
        kept = [*state.weights, *state.optimizer.variables]
        nbytes = sum(variable.numpy().nbytes for variable in kept)
        times = bench.measure([step, committed_step], times=SLOWER)
        bench.add(Row("elastic", work, nbytes, *times))

    def build(strategy: mpidist.Strategy) -> dict[str, Any]:
        rng = np.random.default_rng(1)
        weights = [
            mpidist.Variable(rng.normal(size=shape, scale=0.05).astype(np.float32))
            for shape in itertools.pairwise(LAYERS)
        ]
        optimizer = mpidist.optimizers.SGD(1e-3, momentum=0.9)
        optimizer.build(weights)
        return {"weights": weights, "optimizer": optimizer}

    elastic.run(train, elastic.State(build, step=0))
    for nbytes in COMMITTED:
        commit(bench, nbytes)


def gradients(weights: list[Any]) -> list[Any]:
    """Return the gradients of a network with a hidden layer, and its weights."""
    first, last = (w.value() for w in weights)
    rows = np.ones((ROWS, LAYERS[0]), np.float32)
    hidden = np.maximum(rows @ first, 0)
    error = (hidden @ last - 1) / ROWS
    back = (error @ last.T) * (hidden > 0)
    return list(zip([rows.T @ back, hidden.T @ error], weights, strict=True))


def commit(bench: Bench, nbytes: int) -> None:
    arrays = [np.zeros(nbytes // 16, np.float32) for _ in range(4)]
    copies = [np.empty_like(x) for x in arrays]

    def copy() -> None:
        for out, x in zip(copies, arrays, strict=True):
            np.copyto(out, x)

    def train(strategy: mpidist.Strategy, state: Any) -> None:
        bench.add(Row("commit", "commit", nbytes, *bench.measure([copy, state.commit])))

    def build(strategy: mpidist.Strategy) -> dict[str, Any]:
        return {"variables": [mpidist.Variable(x) for x in arrays]}

    elastic.run(train, elastic.State(build, step=0))
