"""The warning for reductions outside of every scope."""

import warnings

import numpy as np
import pytest
from replicas import local

import mpidist

pytestmark = pytest.mark.mpi


def outside():
    return mpidist.get_replica_context().all_reduce("SUM", 2.0)


def found_in(call):
    """Return the warnings of a call, as text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("op", ["SUM", np.add])
def test_it_is_given_once_and_only_on_several_ranks(new_strategy, op, rank, size):
    found_in(outside)  # those of earlier strategies
    new_strategy()

    def call():
        assert mpidist.get_replica_context().all_reduce(op, 2.0) == 2.0

    texts = found_in(call)
    assert len(texts) == (size > 1)
    for text in texts:
        assert text.startswith(f"[rank {rank}] all_reduce: ")
        assert f"one of all {size} replicas" in text
        assert "`strategy.run(fn)`" in text
    assert not found_in(call)


def test_none_where_it_is_meant(new_strategy, size):
    found_in(outside)
    new = new_strategy()

    def calls():
        assert local(new, outside) == 2.0 * size
        v = mpidist.Variable(1.0, aggregation="SUM")
        v.assign(2.0)
        mpidist.optimizers.SGD(0.1).apply_gradients([(1.0, v)])
        mpidist.get_replica_context().all_gather(np.ones(2), axis=0)
        assert mpidist.get_strategy().reduce("SUM", 2.0, axis=None) == 2.0

    assert not found_in(calls)
    new.close()
    assert not found_in(outside)
