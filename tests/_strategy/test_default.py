"""The default strategy: one replica, outside every scope, and no MPI."""

import pickle

import numpy as np
import pytest
from launching import run_python

import mpidist


@pytest.fixture
def default():
    assert not mpidist.has_strategy()
    return mpidist.get_strategy()


def own(value):
    (result,) = mpidist.get_strategy().experimental_local_results(value)
    return result


def test_a_per_replica_of_one_is_an_array(default):
    """TensorFlow's default strategy returns the values themselves."""
    x, loss, text = default.run(lambda: (np.arange(3.0), 1.23456, "text"))
    for value in (x, loss):
        assert isinstance(value, mpidist.PerReplica)
        assert hash(value) is not None
    assert text == "text"
    assert loss == 1.23456  # more: tests/_values/test_array_like.py
    assert str(loss) == repr(loss) == "PerReplica(replica 0 of 1: 1.23456)"
    assert default.reduce("SUM", loss, axis=None) == 1.23456
    assert default.experimental_local_results(loss) == loss.values == (1.23456,)
    np.testing.assert_array_equal(own(default.run(np.square, args=(x,))), [0, 1, 4])
    w = mpidist.Variable(np.zeros(3))
    w.assign(x)
    mpidist.optimizers.SGD(1.0).apply_gradients([(x, w)])
    np.testing.assert_array_equal(w, np.zeros(3))
    (clipped,), norm = mpidist.optimizers.clip_by_global_norm([loss], 1.0)
    assert (clipped, norm) == (1.0, 1.23456)
    assert mpidist.Variable(x).shape == (3,)
    np.testing.assert_array_equal(default.extended.broadcast_to(x, w), np.arange(3.0))
    made = default.experimental_distribute_values_from_function(lambda c: "a text")
    assert own(made) == "a text"
    dataset = mpidist.data.Dataset.from_tensor_slices(np.arange(4.0)).batch(2)
    batches = [np.sum(b) for b in default.experimental_distribute_dataset(dataset)]
    assert batches == [1.0, 5.0]
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(x)


def test_all_reduce_returns_the_input(default):
    context = mpidist.get_replica_context()
    x = np.array([[1, 2], [3, 4]], np.int32)
    total, number = context.all_reduce("SUM", [x, 2.5])
    np.testing.assert_array_equal(total, x)
    assert total.dtype == np.int32
    assert not np.shares_memory(total, x)
    assert number == 2.5
    mean = context.all_reduce("MEAN", {"x": x})["x"]
    assert mean.dtype == np.float64
    np.testing.assert_array_equal(mean, x)
    for op in ("MIN", "MAX", "PROD"):
        np.testing.assert_array_equal(context.all_reduce(op, x), x)
    with pytest.raises(ValueError, match="'MAXIMUM' is not a valid ReduceOp"):
        context.all_reduce("MAXIMUM", x)
    with pytest.raises(TypeError, match="asarray"):
        context.all_reduce("SUM", "text")


def test_library_code_that_merges_works_without_a_strategy(default):
    """b.7: with one replica the sum of a plain value is that value.

    What an optimizer does in a replica context it can do outside every scope, where
    merge_fn gets its arguments as they are.
    """
    v = mpidist.Variable([1.0, 2.0])

    def merge_fn(strategy, grads_and_vars):
        reduced = strategy.extended.batch_reduce_to("SUM", grads_and_vars)
        for grad, (_, var) in zip(reduced, grads_and_vars, strict=True):
            strategy.extended.update(var, lambda v, g: v.assign_sub(g), args=(grad,))
        return strategy.extended.reduce_to("SUM", 5.0, v)

    context = mpidist.get_replica_context()
    result = context.merge_call(merge_fn, args=([(np.ones(2), v)],))
    assert result == 5.0
    np.testing.assert_array_equal(v, [0.0, 1.0])


def test_scope(default):
    """It changes nothing, as in TensorFlow."""
    context, scope = mpidist.get_replica_context(), default.scope()
    with scope as entered, scope:
        assert entered is default
        assert mpidist.get_strategy() is default
        assert not mpidist.has_strategy()
        assert not mpidist.in_cross_replica_context()
        assert mpidist.get_replica_context() is context
        v = mpidist.Variable(1.0)
        assert own(default.run(lambda: v + 1.0)) == 2.0
        v.assign(3.0)
    assert mpidist.get_replica_context() is not None
    assert float(v) == 3.0


PROGRAM = """
import sys
import numpy as np
slow = {"numpy.ma"} - {*sys.modules}  # NumPy 1 imports it
import mpidist

def check(where, *more):
    names = ["mpi4py", "mpi4py.MPI", "cupy", *slow, *more]
    loaded = [m for m in names if m in sys.modules]
    assert not loaded, f"{where} imported {loaded}"

# What is imported at its first use.
rooms = ("mpidist._checkpoints", "mpidist._timeline.files")
later = ("data", "elastic", "losses", "metrics", "optimizers", "summary", "testing")
check("import mpidist", *rooms, *(f"mpidist.{name}" for name in later))
assert {*later, *mpidist.__all__} <= {*dir(mpidist)}
assert mpidist.InputOptions is mpidist.data.InputOptions
assert mpidist.Checkpoint.__module__ == "mpidist"
handler = mpidist.experimental.PreemptionCheckpointHandler
assert handler.__module__ == "mpidist.experimental"
strategy = mpidist.get_strategy()
assert not mpidist.has_strategy()
context = mpidist.get_replica_context()
assert context.all_reduce("MEAN", {"a": 3, "b": [np.ones(2)]})["a"] == 3.0
assert context.all_reduce("MAX", np.longdouble(3)) == 3
assert context.all_gather(np.ones((2, 2)), axis=1).shape == (2, 2)
check("all_reduce and all_gather")
assert context.merge_call(lambda s, x: x + 1, args=(1,)) == 2
check("merge_call")
value = strategy.run(lambda x: np.full(3, x), args=(2.0,))
assert strategy.reduce("MEAN", value, axis=0) == 2.0
assert strategy.gather(value, axis=0).shape == (3,)
assert strategy.extended.broadcast_to(np.ones(2), value).shape == (2,)
strategy.experimental_distribute_values_from_function(lambda c: c)
check("run, reduce, gather")
with strategy.scope():
    v = mpidist.Variable(1.0, aggregation=mpidist.VariableAggregation.SUM)
v.assign_add(1.0)
strategy.run(lambda: v.assign_add(1.0))
strategy.extended.update(v, lambda v: v.assign_add(1.0))
assert float(v) == 4.0
check("variables")
mpidist.experimental_set_strategy(None)
strategy.communication_statistics()
check("the whole program")
print("done")
"""


def test_none_of_this_starts_mpi_or_loads_cupy():
    assert run_python("-c", PROGRAM) == "done\n"
