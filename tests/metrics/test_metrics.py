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


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("Mean", [np.ones(100_000, "float16")], 1.0),
        ("Mean", [np.zeros((0, 3)), np.zeros(0)], 0.0),
        ("MeanAbsoluteError", [np.uint8([5]), np.uint8([3])], 2.0),
        ("MeanAbsoluteError", [np.uint8([3]), np.uint8([5])], 2.0),
        ("MeanSquaredError", [np.uint8([20]), np.uint8([0])], 400.0),
        ("MeanAbsoluteError", [np.array([True]), np.array([False])], 1.0),
    ],
)
def test_sums_and_differences_are_of_float64(strategy, kind, given, expected):
    metric = getattr(mpidist.metrics, kind)()
    metric.update_state(*given)
    assert metric.result() == expected


@pytest.mark.guests
@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_arrays_of_bfloat16(strategy, library):
    module = pytest.importorskip(library)
    ones = module.ones(1000, dtype=module.bfloat16)
    error = mpidist.metrics.MeanAbsoluteError()
    error.update_state(ones - 1, ones)
    assert (error.result(), float(error.total)) == (1.0, 1000.0)
    accuracy = mpidist.metrics.Accuracy()
    accuracy.update_state(np.ones((1000, 1), int), ones)
    assert accuracy.result() == 1.0


@pytest.mark.parametrize(
    "value", [None, "abc", {"a": 1}, 1j, [1, None], np.ma.masked_array([1.0], [True])]
)
def test_other_values_are_refused(strategy, value):
    mean = mpidist.metrics.Mean()
    with pytest.raises(TypeError, match=r"^Mean\.update_state: expected"):
        mean.update_state(value)


def test_shapes_are_equal_apart_from_axes_of_length_1(strategy):
    accuracy = mpidist.metrics.Accuracy()
    with pytest.raises(ValueError, match=r"^Accuracy\.update_state: .*\(3, 2\)"):
        accuracy.update_state(np.zeros((2, 3)), np.zeros((3, 2)))
    accuracy.update_state(np.zeros((1, 2, 3)), np.zeros((2, 1, 3)))
    assert float(accuracy.count) == 6.0


@pytest.mark.one_size
def test_an_error_on_one_rank_is_one_on_all(strategy):
    with strategy.scope():
        accuracy = mpidist.metrics.Accuracy()
    shape = (2, 3) if strategy.replica_id else (3, 2)
    for message in raises_everywhere(
        ValueError, lambda: accuracy.update_state(np.zeros(shape), np.zeros((3, 2)))
    ):
        assert "Accuracy.update_state" in message
