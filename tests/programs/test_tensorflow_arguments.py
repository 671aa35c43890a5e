"""Arguments of TensorFlow's functions: as there, or an error with the line to write."""

import numpy as np
import pytest
from replicas import from_replicas, raises_everywhere

import mpidist
from mpidist.optimizers import SGD, clip_by_global_norm

pytestmark = [pytest.mark.mpi, pytest.mark.replicas(2)]


@pytest.fixture
def v(strategy):
    with strategy.scope():
        return mpidist.Variable(np.zeros(3), name="v")


@pytest.mark.one_size
def test_the_number_of_gpus_is_that_of_the_ranks(strategy):
    for n, line in ((3, "mpirun -n 3"), (0, "mpirun -n 1")):
        for message in raises_everywhere(
            ValueError, lambda n=n: mpidist.MirroredStrategy(num_gpus=n)
        ):
            assert line in message
    for arguments in ({"devices": ["CPU"] * 2}, {"cross_device_ops": 1}):
        raises_everywhere(
            TypeError,
            lambda kwargs=arguments: mpidist.MirroredStrategy(num_gpus=True, **kwargs),
        )


def test_unwrap_is_the_local_results_of_a_subclass_too(strategy):
    class Own(mpidist.MPIStrategy):
        def experimental_local_results(self, value):
            return "own", value

    own = Own()
    assert own.unwrap(3) == ("own", 3)
    own.close()


@pytest.mark.one_size
def test_the_axes_of_reduce_can_be_a_list(strategy):
    value = from_replicas(strategy, lambda i: np.full((2, 3), i + 1.0))
    np.testing.assert_array_equal(strategy.reduce("SUM", value, axis=[0]), [6.0] * 3)
    assert strategy.reduce("SUM", value, axis=[0, 1]) == 18.0
    raises_everywhere(TypeError, lambda: strategy.reduce("SUM", value, axis=["0"]))


def test_a_shape_that_may_change_is_refused(strategy):
    with strategy.scope():
        mpidist.Variable(0.0, validate_shape=True)
        for message in raises_everywhere(
            TypeError,
            lambda: mpidist.Variable(0.0, shape=None, validate_shape=False),
        ):
            assert "its shape is fixed: write `mpidist.Variable(value)`" in message


@pytest.mark.parametrize("aggregation", ["NONE", "SUM"])
def test_the_global_step_is_counted(strategy, v, size, aggregation):
    with strategy.scope():
        step = mpidist.Variable(0, aggregation=aggregation)
    optimizer = SGD(0.5)

    def replica():
        optimizer.apply_gradients([(np.ones(3), v)], global_step=step)

    strategy.run(replica)
    with strategy.scope():
        optimizer.apply_gradients([(np.ones(3), v)], global_step=step)
    assert int(step) == int(optimizer.iterations) == 2
    np.testing.assert_array_equal(v, [-0.5 * size - 0.5] * 3)
    for wrong, what in ((3, "`global_step` to be"), (True, "`global_step` to be")):
        for message in raises_everywhere(
            TypeError,
            lambda x=wrong: optimizer.apply_gradients([(v, v)], global_step=x),
        ):
            assert what in message
    # The second argument of TensorFlow 1; it is the name in Keras.
    for message in raises_everywhere(
        TypeError, lambda: optimizer.apply_gradients([(np.ones(3), v)], step)
    ):
        assert "write `global_step=step`" in message
    for message in raises_everywhere(
        TypeError, lambda: optimizer.apply_gradients([np.ones(3)], [v])
    ):
        assert "`zip(g, v)`" in message
    assert int(step) == int(optimizer.iterations) == 2


def test_learning_rates_without_the_step_and_of_variables(strategy, v):
    rates = iter([1.0, 0.5])
    optimizer = SGD(lambda: 1.0)
    with strategy.scope():
        optimizer.apply_gradients([(np.ones(3), v)])
        optimizer.learning_rate = lambda: next(rates)
        optimizer.apply_gradients([(np.ones(3), v)])
        optimizer.learning_rate = lambda step, factor=10.0: factor * step
        assert float(optimizer.learning_rate) == 20.0
        optimizer.learning_rate = lambda rate=0.5: rate
        assert float(optimizer.learning_rate) == 0.5
        rate = mpidist.Variable(0.25, name="rate")
    np.testing.assert_array_equal(v, [-2.0] * 3)
    warm = mpidist.optimizers.linear_warmup(lambda: 8.0, 4)
    assert [warm(step) for step in (0, 1, 9)] == [2.0, 4.0, 8.0]
    for message in raises_everywhere(TypeError, lambda: SGD(rate)):
        assert "'rate'" in message
        assert "`learning_rate=lambda step: float(variable)`" in message
    optimizer.learning_rate.assign(rate)  # a copy, as in TensorFlow
    rate.assign(3.0)
    assert float(optimizer.learning_rate) == 0.25


def test_a_global_norm_that_is_known(strategy):
    (clipped,), norm = clip_by_global_norm([np.ones(4)], 1.0, np.float32(4.0))
    assert norm == 4.0
    np.testing.assert_array_equal(clipped, np.full(4, 0.25))
    for wrong in ("x", True, np.ones(2)):
        with pytest.raises(TypeError, match=r"clip_by_global_norm: .*use_norm"):
            clip_by_global_norm([np.ones(4)], 1.0, use_norm=wrong)
