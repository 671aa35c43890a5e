"""compute_average_loss and global_batch_size."""

import ml_dtypes
import numpy as np
import pytest
from replicas import (
    core_on_ranks,
    from_replicas,
    on_ranks,
    own,
)

import mpidist


def test_average_loss_of_one_replica():
    loss = np.array([1, 2, 6], np.float32)
    mean = mpidist.compute_average_loss(loss)
    assert mean == 3
    assert mean.dtype == np.float32
    assert mpidist.compute_average_loss(loss, global_batch_size=np.int64(6)) == 1.5
    weighted = mpidist.compute_average_loss(loss, sample_weight=np.array([0, 3, 1.0]))
    assert weighted == 4
    assert weighted.dtype == np.float32
    assert mpidist.compute_average_loss(loss, 2.0).dtype == np.float32
    half = mpidist.compute_average_loss(loss.astype(ml_dtypes.bfloat16), np.ones(3))
    assert half.dtype == ml_dtypes.bfloat16
    assert mpidist.compute_average_loss(np.array([1, 2])) == 1.5
    assert mpidist.compute_average_loss([1.0, 2.0], [1.0, 3.0]) == 3.5
    assert mpidist.compute_average_loss((4, 5), global_batch_size=np.array(3)) == 3
    assert mpidist.compute_average_loss([np.nan, 2.0], global_batch_size=0) == 0
    assert mpidist.scale_regularization_loss([1.0, 2.0]) == 3
    per_pixel = np.ones((2, 5, 3))
    assert mpidist.compute_average_loss(per_pixel) == 15
    assert mpidist.compute_average_loss(per_pixel, np.array([1, 0.0])) == 7.5
    assert mpidist.compute_average_loss(np.ones((0, 3), np.float16)) == 0
    big = np.full(3, 60_000, np.float16)  # whose sum is beyond float16
    assert mpidist.compute_average_loss(big) == 60_000
    small = np.array([200, 200], np.uint8)  # as are products of int8 and uint8
    for weight in (2, [2, 2], np.array([2, 2], np.uint8)):
        assert mpidist.compute_average_loss(small, weight) == 400
    for weight in (0.5, np.float64(0.5), np.array(0.5)):
        half = mpidist.compute_average_loss(np.ones(2, np.float32), weight)
        assert (half, half.dtype) == (0.5, np.float32)
    assert mpidist.global_batch_size({"x": loss, "y": [per_pixel[:1, 0].T]}) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((np.float64(3),), ValueError, "one loss per example"),
        ((["x"],), TypeError, "expected"),
        ((np.ones(2), None, np.array([2])), TypeError, "to be an int"),
        ((np.ones(2), None, np.array(True)), TypeError, "to be an int"),
        ((np.ones(2), np.ones(3)), ValueError, r"`sample_weight` of .* float64 \(3,\)"),
        ((np.ones(2), None, -1), ValueError, "0 or more"),
        ((np.ones(2), None, 2.0), TypeError, "to be an int"),
    ],
)
def test_average_loss_of_wrong_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        mpidist.compute_average_loss(*arguments)


@pytest.mark.parametrize(
    ("batch", "error", "match"),
    [
        ({"x": np.ones(2), "y": np.ones((3, 2))}, ValueError, r"\(2,\) and .*\(3, 2\)"),
        (np.float64(1), TypeError, "has no rows"),
        ((), ValueError, "at least one array"),
        ("x", TypeError, "expected"),
    ],
)
def test_batch_size_of_wrong_arguments(batch, error, match):
    with pytest.raises(error, match=match):
        mpidist.global_batch_size(batch)


@core_on_ranks
def test_the_batch_size_of_a_step(strategy, rank, size):
    # 5, 0, 5, 10 ... rows
    rows = 5 if rank == 0 else 5 * (rank - 1)
    total = 5 + 5 * sum(range(size - 1))
    batch = from_replicas(
        strategy, lambda _: {"x": np.ones((rows, 2)), "y": np.arange(rows)}
    )

    def step(batch):
        inside = mpidist.global_batch_size(batch)

        def merge_fn(strategy, batch):
            return mpidist.global_batch_size(batch)

        context = mpidist.get_replica_context()
        return inside, context.merge_call(merge_fn, args=(batch,))

    for found in strategy.run(step, args=(batch,)):
        assert own(strategy, found) == total
    with strategy.scope():
        found = mpidist.global_batch_size(batch)
        assert found == total
        assert type(found) is int
        with pytest.raises(TypeError, match="expected a PerReplica"):
            mpidist.global_batch_size(np.ones(3))
        with pytest.raises(RuntimeError, match="the losses are those of one replica"):
            mpidist.compute_average_loss(np.ones(3))
    with pytest.raises(RuntimeError, match="belongs to another strategy"):
        mpidist.global_batch_size(batch)


@core_on_ranks
def test_shares_of_the_loss_add_up(strategy, rank, size):
    losses = np.arange(7, dtype=np.float32)
    weights = np.linspace(0, 2, 7)
    mine = slice(rank, None, size)

    def step():
        return (
            mpidist.compute_average_loss(losses[mine]),
            mpidist.compute_average_loss(losses[mine], weights[mine]),
            mpidist.compute_average_loss(losses[mine], global_batch_size=7),
            mpidist.compute_average_loss(losses[:0]),
        )

    mean, weighted, given, nothing = strategy.reduce("SUM", strategy.run(step), None)
    assert mean == pytest.approx(3)
    assert given == pytest.approx(3)
    assert weighted == pytest.approx((losses * weights).sum() / 7)
    assert nothing == 0

    def uneven():  # all rows on the first replica
        return mpidist.compute_average_loss(losses if rank == 0 else losses[:0])

    assert strategy.reduce("SUM", strategy.run(uneven), None) == pytest.approx(3)


@on_ranks
def test_a_wrong_batch_on_one_rank_is_raised_on_all(strategy, rank, size):
    def step():
        wrong = rank == size - 1
        return mpidist.global_batch_size(np.float64(1) if wrong else np.ones(3))

    with pytest.raises(TypeError, match="has no rows"):
        strategy.run(step)
