"""After an error that leaves a strategy usable, calls of every kind are as before."""

from __future__ import annotations

import numpy as np
import pytest
from faults.every_line import results_of_all
from replicas import assert_usable, context, make, outcomes

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.core]


def differ(strategy, is_last, folder):
    strategy.run(lambda: context().all_reduce("SUM", np.ones(3 + is_last)))


def raise_in_replica(strategy, is_last, folder):
    def step():
        if is_last:
            raise ZeroDivisionError
        return context().all_reduce("SUM", 1.0)

    strategy.run(step)


def raise_in_merge_fn(strategy, is_last, folder):
    def merge_fn(strategy, x):
        strategy.reduce("SUM", x, axis=None)
        raise KeyboardInterrupt

    strategy.run(lambda: context().merge_call(merge_fn, args=(np.ones(3),)))


def raise_in_update(strategy, is_last, folder):
    v = make(strategy, np.zeros(3))

    def update(v):
        v.assign(np.ones(3))
        if is_last:
            raise ZeroDivisionError

    merged = lambda strategy: strategy.extended.update(v, update)  # noqa: E731
    strategy.run(lambda: context().merge_call(merged))


def pass_a_bad_argument(strategy, is_last, folder):
    strategy.run(lambda: context().all_gather("text" if is_last else np.ones(2), 0))


def have_no_memory(strategy, is_last, folder):
    def build(context):
        if is_last:
            raise MemoryError
        return np.ones(3)

    strategy.experimental_distribute_values_from_function(build)


def read_a_missing_checkpoint(strategy, is_last, folder):
    mpidist.Checkpoint(v=make(strategy, 0.0)).restore(f"{folder}/missing")


FAULTS = [
    differ,
    raise_in_replica,
    raise_in_merge_fn,
    raise_in_update,
    pass_a_bad_argument,
    have_no_memory,
    read_a_missing_checkpoint,
]


def test_calls_of_every_kind_are_right_after_each_error(
    strategy, new_strategy, rank, size, same_folder
):
    folder = str(same_folder)
    expected = results_of_all(new_strategy(), folder)
    for fault in FAULTS:
        is_last = rank == size - 1
        rows = outcomes(lambda fault=fault, last=is_last: fault(strategy, last, folder))
        assert size == 1 or all(row.name != "NoneType" for row in rows), rows
        assert results_of_all(strategy, folder) == expected, fault.__name__
    assert_usable(strategy)
