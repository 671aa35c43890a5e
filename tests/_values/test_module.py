"""`Module`: variables are found among attributes, and saved by their names."""

import collections

import numpy as np
import pytest

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.replicas(2)]


class Dense(mpidist.Module):
    def __init__(self, n, name=None):
        super().__init__(name=name)
        self.w = mpidist.Variable(np.ones((n, n)), name="w")
        self.b = mpidist.Variable(np.zeros(n), name="b")
        self.n = n


class Model(mpidist.Module):
    def __init__(self):
        super().__init__()
        self.layers = [Dense(2), Dense(3, "last")]
        self.tied = self.layers[0].w
        self.more = {"x": (mpidist.Variable(0, trainable=False), None), 1: 2}
        self.owner = self


def test_variables_are_found_and_saved_by_attribute(strategy, folder):
    with strategy.scope():
        model = Model()
    assert (model.name, model.layers[1].name) == ("model", "last")
    dense, last = model.layers
    counter = model.more["x"][0]
    expected = [dense.b, dense.w, last.b, last.w, counter]
    assert [id(v) for v in model.variables] == [id(v) for v in expected]
    assert len(model.trainable_variables) == 4
    assert model.submodules == (dense, last)
    checkpoint = mpidist.Checkpoint(model=model)
    checkpoint.save(folder / "c")
    last.b.assign(np.ones(3))
    assert checkpoint.restore(folder / "c") == [
        "model/layers/0/b",
        "model/layers/0/w",
        "model/layers/1/b",
        "model/layers/1/w",
        "model/more/x/0",
    ]
    assert not last.b.numpy().any()
    for name, method in (("save_weights", "save"), ("load_weights", "restore")):
        with pytest.raises(AttributeError) as caught:
            getattr(model, name)
        assert f"mpidist.Checkpoint(model=module).{method}(path)" in str(caught.value)


def test_containers_that_are_anywhere(strategy):
    with strategy.scope():
        model = mpidist.Module()
        model.parts = collections.deque([mpidist.Variable(0, name="v")])
        model.parts.append(model.parts)
        assert [v.name for v in model.variables] == ["v"]
        model.keys = {1: mpidist.Variable(0), "1": mpidist.Variable(0)}
        with pytest.raises(ValueError, match="two of its variables are named 'keys/1'"):
            _ = model.variables


def test_variables_of_metrics_and_optimizers(strategy):
    with strategy.scope():
        model = mpidist.Module()
        model.loss = mpidist.metrics.Mean("m")
        model.optimizer = mpidist.optimizers.SGD(0.1)
        w = model.w = mpidist.Variable(np.ones(2), name="w")
        names = ["loss/m/total", "loss/m/count"]
        # One that has no variables yet is there for a checkpoint, which keeps its own.
        assert list(model.__checkpoint_objects__()) == [*names, "optimizer", "w"]
        assert len(model.variables) == 3
        model.optimizer.build([w])
        assert list(model.__checkpoint_objects__())[2] == "optimizer/sgd/iterations"
        assert model.trainable_variables == (w,)


def test_a_class_with_keras_method_call_can_be_called():
    class Plus:
        def __call__(self, x):
            return x + 1

    class Mixed(mpidist.Module, Plus):
        def call(self, x):
            raise NotImplementedError

    class Keras(mpidist.Module):
        def call(self, x, *, training=False):
            return x, training

    class Derived(Keras):
        def call(self, x):
            return -x

    assert not callable(mpidist.Module())
    assert (Mixed()(1), Keras()(1, training=True), Derived()(1)) == (2, (1, True), -1)
