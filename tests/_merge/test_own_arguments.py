"""Updates whose function gets a value of each replica's own: PerReplica arguments.

Optimizers of Keras are written so: gradients that are equal everywhere, since the
replicas have all-reduced them, go through `merge_call` as a PerReplica.
"""

import numpy as np
import pytest
from replicas import (
    ON_READ,
    SUM,
    assert_mirrored,
    assert_usable,
    context,
    local,
    make,
    raises_everywhere,
    this_replica,
)

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]


@pytest.fixture(params=["SHARED", "DIRECT"])
def strategy(request, new_strategy):
    return new_strategy(implementation=request.param)


def set_to(variable, value):
    variable.assign(value)


def merge_own(strategy, merge_fn, value):
    """As `merge`, with what ``value()`` is on each replica."""
    return local(strategy, lambda: context().merge_call(merge_fn, (value(),)))


# --- the pattern of Keras -------------------------------------------------------------


@pytest.mark.parametrize("grouped", [True, False])
def test_gradients_that_were_reduced_before(strategy, size, grouped):
    w, b = make(strategy, np.ones((2, 2))), make(strategy, 4.0)

    def descend(variable, gradient, rate):
        variable.assign_sub(rate * gradient)

    def apply(distribution, gradients):
        for variable, gradient in zip((w, b), gradients, strict=True):
            distribution.extended.update(
                variable,
                descend,
                args=(gradient,),
                kwargs={"rate": 0.5},
                group=grouped,
            )

    def step():
        context = mpidist.get_replica_context()
        local = float(context.replica_id_in_sync_group)
        gradients = context.all_reduce("SUM", [np.full((2, 2), local), local])
        context.merge_call(apply, args=(gradients,))

    strategy.run(step)
    total = size * (size - 1) / 2
    assert_mirrored(strategy, w, np.full((2, 2), 1.0 - total / 2))
    assert_mirrored(strategy, b, 4.0 - total / 2)


def test_nests_and_slices_of_each_replica(strategy, size):
    v = make(strategy, np.zeros((3, 2)))

    def change(variable, nest, rows):
        variable.assign_add(nest["a"][0] * np.ones((3, 2)))
        variable.scatter_add(rows)

    def apply(distribution, nest, rows):
        distribution.extended.update(v, change, args=(nest, rows))

    def step():
        context = mpidist.get_replica_context()
        rows = mpidist.IndexedSlices(np.ones((1, 2)), np.array([1]))
        context.merge_call(apply, args=({"a": [2.0]}, rows))

    strategy.run(step)
    assert_mirrored(strategy, v, np.array([[2.0] * 2, [3.0] * 2, [2.0] * 2]))


# --- copies that would come apart -----------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("elements", [2, 20_000, 400_000])
def test_copies_that_would_come_apart_are_left_as_they_were(strategy, elements):
    before = np.arange(float(elements))
    v = make(strategy, before)

    def apply(distribution, value):
        distribution.extended.update(v, set_to, args=(value,))

    def everywhere_different():
        return np.full(elements, float(this_replica()))

    raises_everywhere(
        mpidist.CollectiveMismatchError,
        lambda: merge_own(strategy, apply, everywhere_different),
        "must be the same on all replicas",
        "(args[0] not reduced: pass `",
    )
    assert_mirrored(strategy, v, before)
    assert_usable(strategy)


def test_at_program_level(strategy, rank, size):
    v = make(strategy, 3.0)
    equal = strategy.run(lambda: np.float64(8.0))
    result = strategy.extended.update(v, lambda v, x: v.assign(x) * 2, args=(equal,))
    assert float(result.value()) == 16.0
    assert_mirrored(strategy, v, 8.0)
    if size > 1:
        own_value = strategy.run(lambda: np.float64(this_replica()))
        raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda: strategy.extended.update(v, set_to, args=(own_value,)),
        )
        assert_mirrored(strategy, v, 8.0)
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_updates_before_it_stay(strategy):
    v, w = make(strategy, 0.0), make(strategy, 0.0)

    def apply(distribution, value):
        update = distribution.extended.update
        update(v, lambda v: v.assign_add(5.0))
        update(w, lambda w: w.assign_add(6.0))
        try:
            update(v, set_to, args=(value,))
        except mpidist.CollectiveMismatchError:
            update(w, lambda w: w.assign_add(1.0))
            return "differs"
        return "equal"

    found = merge_own(strategy, apply, lambda: np.float64(this_replica()))
    assert found == "differs"
    assert_mirrored(strategy, v, 5.0)
    assert_mirrored(strategy, w, 7.0)


def test_a_variable_that_is_combined_on_read_may_differ(strategy, rank, size):
    v = make(strategy, 0.0, synchronization=ON_READ, aggregation=SUM)

    def apply(distribution, value):
        distribution.extended.update(v, set_to, args=(value,))

    merge_own(strategy, apply, lambda: np.float64(this_replica() + 1))
    assert float(v.numpy()) == size * (size + 1) / 2


# --- in a replica function ------------------------------------------------------------


def test_in_a_replica_function(strategy, size):
    v = make(strategy, np.zeros(2))

    def step():
        context = mpidist.get_replica_context()
        total = context.all_reduce("SUM", np.ones(2))
        extended = strategy.extended
        result = extended.update(v, lambda v, x: v.assign_add(x) + 0.0, args=(total,))
        np.testing.assert_array_equal(result, np.full(2, size))
        (last,) = extended.update(v, lambda v: v[0] + 1, group=False)
        assert last == size + 1

    strategy.run(step)
    assert_mirrored(strategy, v, np.full(2, size))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("others", ["another value", "nothing"])
def test_a_replica_function_that_would_make_copies_differ(strategy, rank, others):
    v = make(strategy, np.zeros(2))

    def step():
        if others == "another value" or rank:
            value = np.full(2, float(rank))
            strategy.extended.update(v, set_to, args=(value,))

    hint = "get_replica_context().all_reduce(op, value)`"
    parts = [hint] if others == "another value" else []
    error = mpidist.CollectiveMismatchError
    raises_everywhere(error, lambda: strategy.run(step), *parts)
    assert_mirrored(strategy, v, np.zeros(2))
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_where_only_one_replica_passes_its_own(strategy, rank, size):
    """The others did not keep what they overwrote: then rank 0's copies count."""
    v = make(strategy, np.zeros(4))
    value = strategy.run(lambda: np.ones(4))
    for odd in (0, size - 1):
        given = value if rank == odd else np.ones(4)
        raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda x=given: strategy.extended.update(v, set_to, args=(x,)),
        )
        mpidist.check_in_sync(v)
    assert_usable(strategy)
