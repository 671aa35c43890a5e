"""Checkpoints of pytrees of JAX and states of optax."""

from __future__ import annotations

import importlib

import pytest
from replicas import ON_TWO, raises_everywhere

import mpidist

pytestmark = [pytest.mark.guests, *ON_TWO]


def make_params(jax, value):
    full = jax.numpy.full
    return {
        "layers": [{"w": full((2, 3), value), "b": full(3, value, "bfloat16")}],
        "scale": value,
        "flag": value > 0,
        "count": full((), 7),
    }


def test_pytrees_come_back_with_their_structure(strategy, folder, jax, rank):
    key = jax.random.key(rank)
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(params=make_params(jax, 1.0), key=key)
        checkpoint.params = make_params(jax, 2.5)
        checkpoint.save(folder / "a")
        checkpoint.params = make_params(jax, 0.0)
        checkpoint.key = jax.random.key(9)
        assert checkpoint.restore(folder / "a") == ["key", "params"]
    expected = make_params(jax, 2.5)
    assert jax.tree.structure(checkpoint.params) == jax.tree.structure(expected)
    for x, y in zip(*map(jax.tree.leaves, (checkpoint.params, expected)), strict=True):
        assert type(x) is type(y)
        assert (jax.numpy.shape(x), jax.numpy.result_type(x)) == (
            jax.numpy.shape(y),
            jax.numpy.result_type(y),
        )
        assert jax.numpy.all(x == y)
    assert isinstance(checkpoint.params["layers"][0]["w"], jax.Array)
    # Keys may differ between the ranks; each gets its own again.
    assert jax.random.uniform(checkpoint.key) == jax.random.uniform(key)
    if rank == 0:
        reader = mpidist.load_checkpoint(folder / "a")
        assert reader["params/layers/0/b"].dtype.name == "bfloat16"


def test_optax_goes_on_as_if_nothing_had_happened(strategy, folder, jax):
    optax = pytest.importorskip("optax")
    transform = optax.chain(optax.clip(1.0), optax.adam(0.1))
    gradient = jax.grad(lambda p: sum(jax.numpy.sum(x**2) for x in p))

    def steps(params, state, count):
        for _ in range(count):
            updates, state = transform.update(gradient(params), state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    start = (jax.numpy.ones(3), jax.numpy.full(2, 4.0))
    params, state = steps(start, transform.init(start), 3)
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(params=params, state=state)
        manager = mpidist.CheckpointManager(checkpoint, folder)
        manager.save()
        expected = steps(params, state, 2)
        again = mpidist.Checkpoint(params=start, state=transform.init(start))
        mpidist.CheckpointManager(again, folder).restore_or_initialize()
    assert type(again.state) is type(state)
    assert repr(steps(again.params, again.state, 2)) == repr(expected)


def test_a_pytree_of_another_shape_or_that_differs(strategy, folder, jax, rank):
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(p={"w": jax.numpy.ones(3)})
        checkpoint.save(folder / "a")
        other = mpidist.Checkpoint(p={"w": jax.numpy.ones(3 + rank)})
        for message in raises_everywhere(
            mpidist.CheckpointError, lambda: other.restore(folder / "a")
        ):
            assert "'p/w': expected float32 (4,), got float32 (3,)" in message
        checkpoint.p = {"w": jax.numpy.full(3, float(rank))}
        for message in raises_everywhere(
            mpidist.CollectiveMismatchError, lambda: checkpoint.save(folder / "a")
        ):
            assert "'p/w' are not equal" in message
            assert "random key of each rank's own make by `jax.random.key(" in message


def test_what_is_refused_when_the_checkpoint_is_made(jax, strategy):
    with strategy.scope():
        v = mpidist.Variable(1.0)
    with pytest.raises(TypeError, match=r"by a name of its own: `Checkpoint\(x=pytree"):
        mpidist.Checkpoint(x={"w": jax.numpy.ones(2), "v": v})
    importlib.import_module("mpidist.jax")  # variables are pytrees then
    checkpoint = mpidist.Checkpoint(x={"v": v})
    assert "1 variables" in repr(checkpoint)


def test_leaves_whose_paths_are_the_same_text(strategy, folder, jax):
    """One of them was not saved, and the checkpoint could not be restored."""
    full = jax.numpy.full
    with strategy.scope():
        tree = {"a": {"b": full(2, 1.0)}, "a/b": full(2, 2.0)}
        checkpoint = mpidist.Checkpoint(tree=tree)
        checkpoint.save(folder / "a")
        checkpoint.tree = jax.tree.map(jax.numpy.zeros_like, tree)
        checkpoint.restore(folder / "a")
    assert [float(x[0]) for x in jax.tree.leaves(checkpoint.tree)] == [1, 2]
