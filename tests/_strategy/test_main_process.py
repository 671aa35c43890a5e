"""What rank 0 does for all, seeds, and calls that lack an argument."""

import io
import random

import numpy as np
import pytest
from replicas import assert_usable, everywhere, make, own, raises_everywhere

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.replicas(2, 3)]


def test_rank_0_prints_at_every_level_and_shows_it_at_once(strategy, rank):
    class Stream(io.StringIO):
        flushed = 0

        def flush(self):
            self.flushed += 1

    stream = Stream()

    def step():
        strategy.print("replica", file=stream)
        mpidist.get_replica_context().merge_call(
            lambda s: s.print("merge_fn", file=stream)
        )

    strategy.print("loss", 1.5, sep=": ", end=".\n", file=stream)
    strategy.run(step)
    lines = "" if rank else "loss: 1.5.\nreplica\nmerge_fn\n"
    assert (stream.getvalue(), stream.flushed) == (lines, 0 if rank else 3)
    assert strategy.is_main_process == (rank == 0)
    assert mpidist.get_strategy().is_main_process


@pytest.mark.processes  # the global generators are those of the process
def test_seeds_differ_by_rank_and_are_repeated(strategy, rank, size):
    shuffles = []

    def draw(**kwargs):
        generator = mpidist.seed_all(5, **kwargs)
        numbers = random.random(), np.random.random(), generator.random()  # noqa: NPY002
        shuffles.append(mpidist.data.Dataset.range(9).shuffle(9))
        return everywhere(numbers)

    rows = draw(strategy=strategy)
    assert len({x for row in rows for x in row}) == 3 * size
    assert draw(strategy=strategy) == rows
    same = draw(per_rank=False)
    assert same == [same[0]] * size
    with strategy.scope():
        assert draw() == rows
    orders = everywhere([str(list(dataset)) for dataset in shuffles])
    assert len({order for rank in orders for order in rank}) == 1


def test_generators_of_ranks_are_independent(strategy, rank, size):
    mine = mpidist.seed_all(np.int64(5), strategy=strategy).integers(2**40, size=4)
    rows = everywhere(mine.tolist())
    assert len({x for row in rows for x in row}) == 4 * size
    with strategy.scope():
        again = mpidist.seed_all(5).integers(2**40, size=4)
    np.testing.assert_array_equal(again, mine)
    for error, seed in ((TypeError, "1"), (TypeError, True), (ValueError, -1)):
        with pytest.raises(error, match="seed_all: expected `seed`"):
            mpidist.seed_all(seed)


def test_reduce_without_an_axis(strategy, rank, size):
    losses = strategy.run(lambda: 1.0)
    raises_everywhere(
        TypeError, lambda: strategy.reduce("SUM", losses), "write `axis=None`"
    )
    raises_everywhere(
        ValueError,
        lambda: strategy.reduce("SUM", losses, axis=0),
        "expected axis=None for float64 (), got axis=0; each replica has a number",
    )
    raises_everywhere(
        ValueError,
        lambda: strategy.reduce("SUM", float(rank), axis=None),
        '`strategy.reduce("SUM", strategy.run(lambda: x), axis=None)`',
    )
    if size > 1:
        raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda: strategy.reduce("MEAN", float(rank), axis=None),
            "write `strategy.run(lambda: value)` in its place",
        )
    mean = strategy.reduce("MEAN", strategy.run(lambda: float(rank)), axis=None)
    assert mean == (size - 1) / 2
    assert_usable(strategy)


def test_gather_refuses_slices_as_all_gather_does(strategy, rank):
    rows = mpidist.IndexedSlices([1.0], [rank])
    value = strategy.run(lambda: rows)
    for attempt in (
        lambda: strategy.gather(rows, axis=0),
        lambda: strategy.gather(value, axis=0),
        lambda: strategy.run(
            lambda: mpidist.get_replica_context().all_gather(rows, axis=0)
        ),
    ):
        text = "gather its `values` and `indices`"
        raises_everywhere(NotImplementedError, attempt, text)


def test_gradients_by_names_of_keras(strategy, rank, size):
    v = make(strategy, np.zeros(2))
    optimizer = mpidist.optimizers.SGD(1.0)

    def step(**kwargs):
        optimizer.apply_gradients([(np.ones(2), v)], name="apply", **kwargs)

    strategy.run(step)
    assert own(strategy, v).tolist() == [-size] * 2
    strategy.run(step, kwargs={"experimental_aggregate_gradients": False})
    assert own(strategy, v).tolist() == [-size - 1] * 2
