"""`shard_state=True`: each rank keeps and updates its part of the state (ZeRO-1)."""

from __future__ import annotations

import copy

import ml_dtypes
import numpy as np
import pytest
from replicas import (
    assert_equal_copies,
    core_on_ranks,
    group_of,
    merge,
    own,
    raises_everywhere,
    this_replica,
)

import mpidist
from mpidist import testing
from mpidist.optimizers import SGD, Adagrad, Adam, AdamW, RMSprop

SHAPES = [(7, 5), (), (3,), (0, 4), (40_001,)]
MAKERS = {
    "sgd": lambda **kw: SGD(0.1, momentum=0.5, nesterov=True, clipnorm=1.0, **kw),
    "adam": lambda **kw: Adam(0.1, global_clipnorm=2.0, **kw),
    "adamw": lambda **kw: AdamW(0.1, weight_decay=0.1, **kw),
    "rmsprop": lambda **kw: RMSprop(0.1, momentum=0.5, centered=True, **kw),
    "adagrad": lambda **kw: Adagrad(0.1, clipnorm=1.0, **kw),
    "no slots": lambda **kw: SGD(0.1, clipvalue=0.5, **kw),
}


def make_variables(dtypes=(np.float32, np.float64, ml_dtypes.bfloat16)):
    rng = np.random.default_rng(3)
    return [
        mpidist.Variable(rng.normal(size=shape).astype(dtype), name=f"v{i}")
        for i, (shape, dtype) in enumerate(
            (shape, dtype) for dtype in dtypes for shape in SHAPES
        )
    ]


def gradients_of(variables, step, replica):
    """Return whole numbers, so that their sums are exact; None for one of them."""
    rng = np.random.default_rng([step, replica])
    rows = [rng.integers(-3, 4, v.shape).astype(v.dtype) for v in variables]
    return [None if i == step % 4 else row for i, row in enumerate(rows)]


def train(strategy, variables, optimizer, steps, in_merge=False):
    def apply(rows):
        optimizer.apply_gradients(zip(rows, variables, strict=True))

    def replica(step):
        rows = gradients_of(variables, step, this_replica())
        if in_merge:
            context = mpidist.get_replica_context()
            context.merge_call(lambda _, rows: apply(rows), (rows,))
        else:
            apply(rows)

    for step in steps:
        strategy.run(replica, (step,))


@core_on_ranks
@pytest.mark.parametrize("kind", MAKERS)
def test_the_results_are_those_of_the_whole_state(strategy, size, rank, kind):
    with strategy.scope():
        plain, sharded = make_variables(), make_variables()
        whole, divided = MAKERS[kind](), MAKERS[kind](shard_state=True)
    train(strategy, plain, whole, range(4))
    train(strategy, sharded, divided, range(2))
    train(strategy, sharded, divided, range(2, 3), in_merge=True)
    train(strategy, sharded, divided, range(3, 4))
    assert_equal_copies(strategy, sharded)
    for a, b in zip(plain, sharded, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert [v.name for v in whole.variables] == [v.name for v in divided.variables]
    with strategy.scope():
        for a, b in zip(whole.variables, divided.variables, strict=True):
            assert (a.shape, a.dtype, a.size) == (b.shape, b.dtype, b.size)
            np.testing.assert_array_equal(a.numpy(), b.numpy())
    kept, all_ = (
        sum(v.nbytes for v in optimizer.variables[1:]) for optimizer in (divided, whole)
    )
    assert abs(kept - all_ / size) <= 8 * 3 * 3  # an element of a slot and a dtype


@core_on_ranks
def test_a_slot_is_the_part_in_a_replica_and_the_whole_elsewhere(strategy, rank, size):
    with strategy.scope():
        w = mpidist.Variable(np.zeros(5), name="w")
        optimizer = SGD(1.0, momentum=0.5, shard_state=True)
    g = np.arange(5.0) / size
    strategy.run(lambda: optimizer.apply_gradients([(g, w)]))
    slot = optimizer.variables[1]
    part = np.arange(5.0)[5 * rank // size : 5 * (rank + 1) // size]
    parts = strategy.run(lambda: slot.numpy())
    if size > 1:
        np.testing.assert_allclose(own(strategy, parts), part)
    with strategy.scope():
        slot.assign(np.full(5, 2.0))
        slot.assign_add(np.arange(5.0))
        again = copy.deepcopy(slot)
        for x in (slot, again):
            np.testing.assert_array_equal(x.numpy(), np.arange(5.0) + 2)
        with pytest.raises(ValueError, match=r"expected a value of shape \(5,\)"):
            slot.assign(np.zeros(4))
    seen = merge(strategy, lambda strategy: [slot.numpy()[-1], slot.shape])
    assert own(strategy, seen) == [6.0, (5,)]


@pytest.mark.mpi(min_size=2)
@core_on_ranks
def test_ranks_that_disagree_are_told(strategy, rank):
    with strategy.scope():
        w = mpidist.Variable(np.zeros(5), name="w")
        optimizer = Adam(1.0, shard_state=rank == 0)
    for message in raises_everywhere(
        mpidist.CollectiveMismatchError, lambda: optimizer.build([w])
    ):
        assert "shard_state=True" in message


def sharded_sgd(strategy, size):
    """Return a variable of which all ranks have parts of one length, and its slot."""
    with strategy.scope():
        w = mpidist.Variable(np.zeros(2 * size), name="w")
        optimizer = SGD(1.0, momentum=0.5, shard_state=True)
    g = np.arange(2.0 * size) / size

    def step():
        optimizer.apply_gradients([(g, w)])

    strategy.run(step)
    return w, optimizer.variables[1], step


@pytest.mark.mpi(min_size=2)
@core_on_ranks
def test_the_parts_of_a_slot_are_not_combined(strategy, rank, size):
    """They would be as if they were copies, if they are equally long."""
    _, slot, _ = sharded_sgd(strategy, size)
    extended = strategy.extended
    calls = {
        "reduce": lambda: strategy.reduce("SUM", slot, axis=None),
        "reduce over an axis": lambda: strategy.reduce("SUM", slot, axis=0),
        "reduce by a function": lambda: strategy.reduce(np.maximum, slot, axis=None),
        "reduce_to": lambda: extended.reduce_to("MEAN", slot, slot),
        "batch_reduce_to": lambda: extended.batch_reduce_to("SUM", [(slot, slot)]),
        "gather": lambda: strategy.gather(slot, axis=0),
        "all_reduce": lambda: strategy.run(
            lambda: mpidist.get_replica_context().all_reduce("SUM", {"x": slot})
        ),
        "merge": lambda: merge(strategy, lambda s: s.reduce("SUM", slot, axis=None)),
        "CrossDeviceOps": lambda: mpidist.ReductionToOneDevice().reduce(
            "SUM", slot, slot
        ),
    }
    for name, call in calls.items():
        for message in raises_everywhere(ValueError, call):
            assert "divided among the ranks" in message, name
            assert "read it: `variable.value()`" in message, name
    whole = np.arange(2.0 * size)
    with strategy.scope():
        np.testing.assert_allclose(slot.numpy(), whole)
    parts = merge(strategy, lambda s: s.experimental_local_results(slot))
    np.testing.assert_allclose(np.concatenate(own(strategy, parts)), whole)


@core_on_ranks
def test_an_update_writes_the_whole_of_a_slot(strategy, rank, size):
    _, slot, _ = sharded_sgd(strategy, size)
    start = np.arange(2.0 * size)

    def fn(x, value):
        x.assign_add(value)
        return x.numpy().shape

    strategy.extended.update(slot, fn, args=(np.ones(2 * size),))
    with strategy.scope():
        value = slot.value()
        np.testing.assert_allclose(value, start + 1)
        assert not value.flags.writeable
        strategy.extended.update(slot, lambda x: x.assign(start))
        np.testing.assert_array_equal(slot.numpy(), start)


@pytest.mark.mpi(min_size=2)
@core_on_ranks
def test_a_slot_takes_no_value_of_each_replica(strategy, rank, size):
    _, slot, _ = sharded_sgd(strategy, size)
    rows = strategy.run(lambda: np.ones(2))
    for message in raises_everywhere(
        TypeError, lambda: strategy.run(lambda: slot.assign(rows))
    ):
        assert "expected the whole, the same on all ranks" in message


@pytest.mark.mpi(min_size=2)
@core_on_ranks
def test_no_memory_to_share_the_parts(new_strategy, rank, size, monkeypatch):
    """Copies of the weights differ then, so nobody may go on with them."""
    strategy = new_strategy()
    _, _, step = sharded_sgd(strategy, size)
    collectives = group_of(strategy).collectives
    all_gather = collectives.all_gather

    def without_memory(own, axis, options, call):
        if rank == size - 1:
            collectives.invalid(call, MemoryError("no memory here"))
        return all_gather(own, axis, options, call)

    with monkeypatch.context() as patch:
        patch.setattr(collectives, "all_gather", without_memory)
        for message in raises_everywhere(MemoryError, lambda: strategy.run(step)):
            assert "no memory here" in message
    for message in raises_everywhere(
        mpidist.CollectiveTimeoutError, lambda: strategy.run(step)
    ):
        assert "MemoryError" in message


@pytest.mark.parametrize("saved", [False, True])
def test_a_checkpoint_fits_any_number_of_ranks_sharded_or_not(tmp_path, saved):
    """And so does the one of an optimizer that is not sharded."""

    def run(shard, steps, restore=None, save=None):
        def body():
            strategy = mpidist.MPIStrategy()
            with strategy.scope():
                v = make_variables((np.float32,))
                optimizer = Adam(0.1, shard_state=shard)
                optimizer.build(v)
                checkpoint = mpidist.Checkpoint(v=v, optimizer=optimizer)
                if restore:
                    checkpoint.restore(restore)
                for step in steps:
                    # The same sum on any number of ranks.
                    rows = gradients_of(v, step, 0)
                    if strategy.replica_id:
                        rows = [None if x is None else 0 * x for x in rows]
                    strategy.run(
                        lambda: optimizer.apply_gradients(zip(rows, v, strict=True))  # noqa: B023
                    )
                if save:
                    checkpoint.save(save)
                return [x.numpy() for x in [*v, *optimizer.variables]]

        return body

    expected = testing.run(2, run(False, range(5)))[0]
    path = tmp_path / "saved"
    testing.run(2, run(saved, range(2), save=path))
    testing.run(3, run(True, range(2, 4), restore=path, save=path))
    for shard, ranks in ((True, 2), (False, 1), (True, 1)):
        rest = testing.run(ranks, run(shard, range(4, 5), restore=path))
        for x, y in zip(expected, rest[0], strict=True):
            np.testing.assert_array_equal(x, y)
