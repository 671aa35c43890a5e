"""`Module`: variables are found among attributes, and saved by their names."""

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
