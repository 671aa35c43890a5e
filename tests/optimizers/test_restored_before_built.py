"""A checkpoint that is restored before the optimizer has made its variables."""

import contextlib

import numpy as np
import pytest
from replicas import own, raises_everywhere, this_replica

import mpidist
from mpidist.optimizers import Adam

pytestmark = [pytest.mark.mpi, pytest.mark.replicas(2, 3)]


def parts(strategy, shape=(5,), **kwargs):
    with strategy.scope():
        v = mpidist.Variable(np.zeros(shape), name="v")
        w = mpidist.Variable(np.float32(0), name="w")
    optimizer = Adam(0.1, **kwargs)
    checkpoint = mpidist.Checkpoint(optimizer=optimizer, weights=[v, w])
    return checkpoint, optimizer, v, w


def same(found, expected):
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def step(strategy, optimizer, v, w):
    def replica():
        rows = [np.full(v.shape, 1.0 + this_replica()), np.float32(this_replica())]
        optimizer.apply_gradients(zip(rows, [v, w], strict=True))

    strategy.run(replica)
    return v.numpy(), w.numpy()


def saved(strategy, path, steps=1, **kwargs):
    """Save after some steps, and return what one more gives."""
    checkpoint, *rest = parts(strategy, **kwargs)
    for _ in range(steps):
        step(strategy, *rest)
    checkpoint.save(path)
    return step(strategy, *rest)


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("built_by", ["step", "build", "replica", "merge_call"])
def test_it_goes_on_as_if_it_had_been_built(strategy, folder, shard, built_by):
    expected = saved(strategy, folder / "c", steps=3)
    checkpoint, optimizer, v, w = parts(strategy, shard_state=shard)
    status = checkpoint.restore(folder / "c")
    rate = "optimizer/adam/learning_rate"
    assert list(status) == [rate, "weights/0", "weights/1"]
    status.assert_existing_objects_matched()
    with pytest.raises(AssertionError, match=r"'optimizer' .*optimizer\.build"):
        status.assert_consumed()
    if built_by == "build":
        optimizer.build([v, w])
        assert int(optimizer.iterations) == 3
    elif built_by == "replica":
        strategy.run(lambda: optimizer.build([v, w]))
    elif built_by == "merge_call":
        strategy.run(
            lambda: mpidist.get_replica_context().merge_call(
                lambda _: optimizer.build([v, w]) and None
            )
        )
    same(step(strategy, optimizer, v, w), expected)
    assert int(optimizer.iterations) == 4
    assert status.assert_consumed() is status  # by now, as in TensorFlow
    mpidist.check_in_sync([v, w])


@pytest.mark.parametrize("read", ["before", "after", "in a replica"])
def test_iterations_are_there_before_the_first_step(strategy, folder, read):
    """As in Keras, where the constructor makes them."""
    expected = saved(strategy, folder / "c", steps=3)
    with strategy.scope():
        checkpoint, optimizer, v, w = parts(strategy)
    if read == "before":
        assert int(optimizer.iterations) == 0
    checkpoint.restore(folder / "c")
    if read == "in a replica":
        strategy.run(lambda: int(optimizer.iterations))
    iterations = optimizer.iterations
    assert int(iterations) == 3
    same(step(strategy, optimizer, v, w), expected)
    assert optimizer.iterations is iterations
    assert int(iterations) == 4
    mpidist.check_in_sync(optimizer.variables)


def test_what_is_assigned_after_a_restore_stays(strategy, folder):
    saved(strategy, folder / "c")
    with strategy.scope():
        checkpoint, optimizer, v, w = parts(strategy)
    checkpoint.restore(folder / "c")
    optimizer.learning_rate = lambda step: 0.1 + step
    assert float(optimizer.learning_rate) == 1.1  # of the restored step
    optimizer.iterations.assign(7)
    assert float(optimizer.learning_rate) == 7.1
    step(strategy, optimizer, v, w)
    assert int(optimizer.iterations) == 8


@pytest.mark.parametrize("is_built", [False, True])
def test_an_assigned_learning_rate_is_restored(strategy, folder, is_built):
    """As in Keras and torch; what the constructor was given is not."""
    checkpoint, optimizer, *weights = parts(strategy)
    step(strategy, optimizer, *weights)
    checkpoint.save(folder / "first")
    optimizer.learning_rate.assign(0.25)
    checkpoint.save(folder / "assigned")
    expected = step(strategy, optimizer, *weights)
    checkpoint.restore(folder / "first")
    assert optimizer.learning_rate == 0.1
    optimizer.learning_rate = lambda step: 0.75
    checkpoint.save(folder / "function")

    checkpoint, optimizer, *weights = parts(strategy)
    if is_built:
        optimizer.build(weights)
    status = checkpoint.restore(folder / "assigned")
    assert optimizer.learning_rate == 0.25
    same(step(strategy, optimizer, *weights), expected)
    status.assert_consumed()
    checkpoint.restore(folder / "function")
    assert optimizer.learning_rate == 0.25
    checkpoint.restore(folder / "first")
    assert optimizer.learning_rate == 0.1


def test_each_rank_gets_its_learning_rate_back(strategy, folder, rank):
    checkpoint, optimizer, *_ = parts(strategy)
    optimizer.learning_rate = 0.1 + rank
    checkpoint.save(folder / "c")
    checkpoint, optimizer, *_ = parts(strategy)
    checkpoint.restore(folder / "c")
    assert optimizer.learning_rate == 0.1 + rank


def test_the_rate_of_the_constructor_assigned_again_is_saved(strategy, folder):
    rate = 0.5
    optimizer, other = Adam(rate), Adam(0.25)
    optimizer.learning_rate = rate
    with strategy.scope():
        mpidist.Checkpoint(optimizer=optimizer).save(folder / "c")
        mpidist.Checkpoint(optimizer=other).restore(folder / "c")
    assert other.learning_rate == rate


@pytest.mark.mpi(min_size=2)
def test_one_rank_reads_iterations_before_the_others(strategy, rank):
    with strategy.scope():
        _, optimizer, v, w = parts(strategy)

    notes = []

    def alone():
        try:
            optimizer.build([v, w]) if rank else optimizer.iterations
        except mpidist.CollectiveMismatchError as error:
            notes.extend(getattr(error, "__notes__", []))
            raise

    for message in raises_everywhere(mpidist.CollectiveMismatchError, alone):
        assert "'adam/iterations'" in message
    assert any("on all of them" in note for note in notes) == (rank == 0)


def test_what_does_not_match_is_an_error_when_it_is_built(strategy, folder):
    saved(strategy, folder / "c")
    checkpoint, optimizer, v, w = parts(strategy)
    checkpoint.restore(folder / "c")
    for message in raises_everywhere(
        mpidist.CheckpointError, lambda: optimizer.build([v])
    ):
        assert "'adam/momentum/w': expected nothing, got float32 ()" in message
        assert f"the checkpoint {str(folder / 'c')!r}, restored before, does" in message
    optimizer.build([v, w])  # of the same checkpoint
    assert int(optimizer.iterations) == 1

    _, optimizer, v, w = parts(strategy, shape=(6,))
    other = mpidist.Checkpoint(optimizer=optimizer)
    other.restore(folder / "c", partial=True)
    for message in raises_everywhere(
        mpidist.CheckpointError, lambda: step(strategy, optimizer, v, w)
    ):
        assert "expected float64 (6,), got float64 (5,)" in message
    assert own(strategy, v).shape == (6,)


def test_a_checkpoint_without_the_optimizer_is_refused_unless_partial(strategy, folder):
    _, optimizer, v, w = parts(strategy)
    mpidist.Checkpoint(weights=[v, w]).save(folder / "c")
    checkpoint = mpidist.Checkpoint(optimizer=optimizer, weights=[v, w])
    for message in raises_everywhere(
        mpidist.CheckpointError, lambda: checkpoint.restore(folder / "c")
    ):
        assert "missing in the checkpoint: 'optimizer'" in message
    checkpoint.restore(folder / "c", partial=True)
    step(strategy, optimizer, v, w)
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize("scope", [True, False])
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("built", [False, True])
def test_it_is_saved_before_it_is_built(strategy, folder, scope, shard, built):
    """As in TensorFlow: its iterations, and restored it begins anew with them."""
    with strategy.scope() if scope else contextlib.nullcontext():
        checkpoint, optimizer, v, w = parts(strategy, shard_state=shard)
    if scope:
        optimizer.iterations.assign(5)
    checkpoint.save(folder / "c")
    saved = mpidist.load_checkpoint(folder / "c")
    assert set(saved) == {"optimizer/adam/iterations", "weights/0", "weights/1"}

    again, other, *rest = parts(strategy, shard_state=shard)
    if built:
        step(strategy, other, *rest)
    status = again.restore(folder / "c")
    status.assert_consumed().assert_existing_objects_matched()
    expected = step(strategy, optimizer, v, w)
    same(step(strategy, other, *rest), expected)
    assert int(other.iterations) == (6 if scope else 1)
    mpidist.check_in_sync(rest)


@pytest.mark.parametrize("shard", [False, True])
def test_what_waits_to_be_restored_is_saved(strategy, folder, shard):
    """TensorFlow loses it: a finished run that is started again, and saves."""
    expected = saved(strategy, folder / "c", shard_state=shard)
    for wait in (True, False):
        with strategy.scope():
            checkpoint, optimizer, *rest = parts(strategy, shard_state=shard)
        checkpoint.restore(folder / "c")
        if not wait:
            assert int(optimizer.iterations) == 1
        checkpoint.save(folder / "c", wait=wait)
    checkpoint, *rest = parts(strategy)
    checkpoint.restore(folder / "c")
    same(step(strategy, *rest), expected)


def test_an_optimizer_in_a_module_is_restored_later_too(strategy, folder):
    def make():
        module = mpidist.Module("agent")
        _, module.optimizer, module.v, module.w = parts(strategy)
        return module, mpidist.Checkpoint(agent=module)

    agent, checkpoint = make()
    checkpoint.save(folder / "before")  # of the optimizer the iterations only
    count = "agent/optimizer/adam/iterations"
    saved = set(mpidist.load_checkpoint(folder / "before"))
    assert saved == {count, "agent/v", "agent/w"}
    step(strategy, agent.optimizer, agent.v, agent.w)
    agent.optimizer.learning_rate = 0.25
    checkpoint.save(folder / "after")
    expected = step(strategy, agent.optimizer, agent.v, agent.w)

    agent, checkpoint = make()
    assert len(agent.variables) == 2
    for _ in ("before it is built", "afterwards"):
        agent.optimizer.learning_rate = 0.5
        status = checkpoint.restore(folder / "after")
        assert "agent/optimizer/adam/learning_rate" in status
        assert agent.optimizer.learning_rate == 0.25
        same(step(strategy, agent.optimizer, agent.v, agent.w), expected)
        assert int(agent.optimizer.iterations) == 2


def test_a_built_optimizer_in_a_module_begins_anew(strategy, folder):
    """As one that a checkpoint names itself: its slots become zero."""

    def make():
        module = mpidist.Module()
        _, optimizer, module.v, module.w = parts(strategy)
        module.parts = {"first": [optimizer], "slots": []}
        return module, optimizer, mpidist.Checkpoint(agent=module)

    agent, optimizer, checkpoint = make()
    with strategy.scope():
        checkpoint.save(folder / "c")
    expected = step(strategy, optimizer, agent.v, agent.w)
    agent.parts["slots"] += optimizer.variables  # found already, by other names
    checkpoint.restore(folder / "c").assert_consumed()
    assert int(optimizer.iterations) == 0
    same(step(strategy, optimizer, agent.v, agent.w), expected)
    assert len(agent.variables) == 2 + len(optimizer.variables)
