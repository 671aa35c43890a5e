"""Metrics: sums over all replicas, and what they compare."""

import numpy as np
import pytest
from replicas import from_replicas, local, raises_everywhere, this_replica

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.replicas(2)]


@pytest.mark.one_size
def test_metrics_are_over_all_replicas(strategy, folder):
    with strategy.scope():
        mean = mpidist.metrics.Mean(name="loss")
        accuracy = mpidist.metrics.SparseCategoricalAccuracy()

    def step():
        i = this_replica()
        mean.update_state(np.arange(2.0 + i))  # 0, 1 and 0, 1, 2
        scores = np.array([[1.0, 0.0], [i, 1.0 - i]])
        accuracy.update_state([[0], [1]], scores)
        return mean([5.0], sample_weight=[2.0])

    expected = 24.0 / 9
    assert local(strategy, step) == expected
    assert mean.result() == expected
    assert accuracy.result() == 0.75
    checkpoint = mpidist.Checkpoint(mean=mean)
    checkpoint.save(folder / "c")
    mean.reset_states()
    assert mean.result() == 0.0
    checkpoint.restore(folder / "c")
    assert mean.result() == expected
    mean.reset_state()
    mean.update_state(4.0)  # in cross-replica context, where it is the same: once
    assert (mean.result(), float(mean.count)) == (4.0, 1.0)
    for message in raises_everywhere(
        TypeError, lambda: mean.update_state(from_replicas(strategy, lambda i: i))
    ):
        assert "strategy.run" in message


@pytest.mark.parametrize(
    ("kind", "true", "pred", "weight", "expected"),
    [
        ("Accuracy", [1, 2, 3], [1, 0, 3], None, 2 / 3),
        ("CategoricalAccuracy", [[0, 1], [1, 0]], [[0.2, 0.8], [0.4, 0.6]], None, 0.5),
        ("BinaryAccuracy", [1, 0, 1], [[0.6], [0.6], [0.9]], None, 2 / 3),
        ("BinaryAccuracy", [1, 0], [0.6, 0.6], [1.0, 3.0], 0.25),
        ("MeanSquaredError", [[0.0, 1.0]], [[2.0, 2.0]], None, 2.5),
        ("MeanSquaredError", [[0.0], [1.0]], [[2.0], [2.0]], [1.0, 0.0], 4.0),
        ("MeanAbsoluteError", [0.0, 1.0], [[2.0], [2.0]], None, 1.5),
        ("MeanAbsoluteError", [0.0, 1.0], [2.0, 2.0], 0.5, 1.5),
        ("SparseCategoricalAccuracy", [1, 0], [[0.0, 1], [0, 1]], None, 0.5),
    ],
)
def test_each_metric(strategy, kind, true, pred, weight, expected):
    metric = getattr(mpidist.metrics, kind)()
    metric.update_state(true, np.array(pred), weight)
    assert metric.result() == pytest.approx(expected)
    with pytest.raises(ValueError, match="y_true"):
        metric.update_state([1, 2, 3, 4, 5], np.array(pred))
    with pytest.raises(ValueError, match="sample_weight"):
        metric.update_state(true, np.array(pred), np.ones(7))


def test_a_metric_of_no_scope_is_of_one_process(strategy):
    mean = mpidist.metrics.Mean("loss")
    mean.update_state([1.0, 3.0])
    assert mean.result() == 2.0
    for message in raises_everywhere(
        RuntimeError, lambda: strategy.run(mean.update_state, args=(1.0,))
    ):
        assert "'loss' was not made in the scope of" in message
        assert "`with strategy.scope():`" in message
    assert mean.result() == 2.0
