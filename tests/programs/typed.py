"""The types that results have for mypy and pyright: a program that also runs.

``assert_type`` fails when the types are checked (tests/project/test_types.py).
"""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import mpidist

Floats = npt.NDArray[np.float64]

strategy = mpidist.MPIStrategy()
on_read: dict[str, Any] = {"synchronization": "ON_READ", "aggregation": "SUM"}
with strategy.scope() as entered:
    assert_type(entered, mpidist.Strategy)
    weights = mpidist.Variable(np.zeros(3), aggregation="SUM")
    metric = mpidist.Variable(0, **on_read)


def loss() -> float:
    return 1.5


def array() -> Floats:
    return np.ones(3)


def pair() -> tuple[float, Floats]:
    return loss(), array()


def named() -> dict[str, float]:
    return {"loss": loss()}


def nothing() -> None:
    metric.assign_add(1)


def no_types() -> Any:
    return pair()


def largest(s: mpidist.Strategy, x: mpidist.PerReplica[float]) -> float:
    assert_type(x.values, tuple[float, ...])
    return max(s.experimental_local_results(x))


def own_again(
    s: mpidist.Strategy, x: mpidist.PerReplica[float]
) -> mpidist.PerReplica[float]:
    return x


def update(s: mpidist.Strategy, x: mpidist.PerReplica[Floats]) -> None:
    total = s.extended.reduce_to("SUM", x, weights)
    assert_type(total, mpidist.Mirrored)
    weights.assign(total).numpy()


def replica() -> float:
    context: mpidist.ReplicaContext = mpidist.get_replica_context()
    assert_type(context.all_reduce("SUM", loss()), float)
    assert_type(context.all_reduce("SUM", array()), Floats)
    assert_type(context.all_reduce(np.add, {"x": array()}), dict[str, Floats])
    assert_type(context.all_reduce("MEAN", 3), Any)  # a float
    assert_type(context.all_reduce("MAX", weights), Any)
    assert_type(context.all_gather(array(), axis=0), Floats)
    assert_type(context.merge_call(largest, args=(loss(),)), float)
    assert_type(context.merge_call(own_again, args=(loss(),)), float)
    context.merge_call(update, args=(array(),))
    return loss()


def trained(strategy: mpidist.MPIStrategy, state: mpidist.elastic.State) -> float:
    return loss()


def elastic(state: mpidist.elastic.State) -> None:
    assert_type(mpidist.elastic.run(trained, state), float)
    assert_type(mpidist.elastic.run(trained, state, spares=1), float | None)


losses = strategy.run(replica)
assert_type(losses, mpidist.PerReplica[float])
assert_type(strategy.run(array), mpidist.PerReplica[Floats])
assert_type(
    strategy.run(pair), tuple[mpidist.PerReplica[float], mpidist.PerReplica[Floats]]
)
assert_type(strategy.run(named), dict[str, mpidist.PerReplica[float]])
assert_type(strategy.run(no_types), Any)
strategy.run(nothing)
first, second = strategy.run(no_types)
first, second = strategy.run(lambda: no_types())
assert_type(strategy.reduce("MEAN", losses, axis=None), float)
assert_type(strategy.reduce("SUM", strategy.run(array), axis=None), Floats)
assert_type(strategy.reduce("SUM", strategy.run(array), axis=0), Any)
assert_type(strategy.gather(strategy.run(array), axis=0), Floats)
assert_type(strategy.experimental_local_results(losses), tuple[float, ...])
mpidist.optimizers.SGD(lambda: 0.1).learning_rate = lambda step: 0.1 / (1 + step)
rows = mpidist.IndexedSlices(values=np.ones((2, 3)), indices=np.arange(2))
strategy.print(strategy.cluster_resolver.nodes)
strategy.print(f"{strategy.reduce('MEAN', losses, axis=None):.1f}")
