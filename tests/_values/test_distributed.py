"""PerReplica and Mirrored: what run gives, and what one can do with it."""

import collections
import contextlib
import copy
import pickle
import tracemalloc

import numpy as np
import pytest
from replicas import ON_READ, ON_WRITE, SUM, make, merge, mirrored_of, own

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]

Pair = collections.namedtuple("Pair", "first second")


# --- what run gives -------------------------------------------------------------------


def test_arrays_and_numbers_are_per_replica_also_on_one(strategy):
    arrays = np.ones(3), np.zeros((0, 2)), np.array(1.0), np.array([True, False])
    results = *arrays, np.float32(2.0), np.bool_(True), 1, 1.0, 1j, True, 0
    for value, result in zip(strategy.run(lambda: results), results, strict=True):
        assert type(value) is mpidist.PerReplica
        assert own(strategy, value) is value.values[0] is result


@pytest.mark.mpi(min_size=2)
def test_a_result_that_some_replicas_do_not_have(strategy, rank):
    """An array here and None there: no hang, and reducing it is an error on all."""
    value = strategy.run(lambda: None if rank == 1 else np.ones(2))
    with pytest.raises(TypeError):
        strategy.reduce("SUM", value, axis=None)
    assert strategy.reduce("SUM", strategy.run(lambda: 1), axis=None) > 1


# --- what goes in ---------------------------------------------------------------------


def test_per_replica_made_by_hand(strategy, rank, size):
    value = strategy.run(lambda: None)
    with strategy.scope():
        value = mpidist.PerReplica([np.full(i + 1, i) for i in range(size)])
    result = strategy.run(lambda x: x.sum(), args=(value,))
    assert own(strategy, result) == rank * (rank + 1)
    assert strategy.reduce("SUM", value, axis=0) == sum(
        i * (i + 1) for i in range(size)
    )
    gathered = strategy.gather(value, axis=0)
    np.testing.assert_array_equal(
        gathered, np.concatenate([np.full(i + 1, i) for i in range(size)])
    )


@pytest.mark.one_size
def test_kwargs_must_be_a_dict(strategy):
    for kwargs in ([("a", 1)], {1: 2}, "ab"):
        with pytest.raises(TypeError, match="kwargs"):
            strategy.run(lambda **kwargs: None, kwargs=kwargs)


# --- PerReplica -----------------------------------------------------------------------


ALTERNATIVES = ("strategy.reduce(", "experimental_local_results(", "strategy.run")
OPERATIONS = (
    *("bool(p)", "1 if p else 2", "p + 1", "1 + p", "p < 1", "p[0]", "float(p)"),
    *("len(p)", "np.asarray(p)", "np.ones(2) + p", "p @ np.ones(2)"),
)


@pytest.mark.parametrize("in_scope", [True, False])
def test_per_replica_operators_say_what_to_write(strategy, in_scope):
    """It is not silently this rank's component, in a scope or outside."""
    p = strategy.run(lambda: np.ones(2))
    with strategy.scope() if in_scope else contextlib.nullcontext():
        for operation in OPERATIONS:
            with pytest.raises(TypeError) as caught:
                eval(operation, {"p": p, "np": np})
            for alternative in ALTERNATIVES:
                assert alternative in str(caught.value)
        with pytest.raises(TypeError, match="no truth value"):
            bool(p)
        for function in (np.sum, np.negative):
            with pytest.raises(TypeError):
                function(p)
        with pytest.raises(AttributeError, match="PerReplica"):
            p.mean()
        assert not hasattr(p, "__cuda_array_interface__")


@pytest.mark.one_size
def test_per_replica_is_compared_with_objects_only(strategy, size):
    """`if losses == 2:` would be False without a word, as in TensorFlow."""
    p = strategy.run(lambda: 2.0)
    v = make(strategy, 2.0)
    mirrored = strategy.extended.broadcast_to(np.ones(2), v)
    if size > 1:
        for attempt in (
            lambda: p == v,
            lambda: v == p,
            lambda: mirrored != p,
            lambda: p == True,  # noqa: E712
            lambda: p == 2,
            lambda: p != 2.0,
            lambda: np.ones(2) == p,
            lambda: p in [1, 2],
        ):
            with pytest.raises(TypeError, match=r"write `strategy\.reduce"):
                attempt()
    assert p == p and p != "a" and p != None and p in [None, p]  # noqa: E711, PT018
    assert p in [p, v]


def test_per_replica_can_be_a_key(strategy):
    one, two = strategy.run(lambda: (1.0, 1.0))
    assert {one: "a", two: "b"}[one] == "a"
    assert one != two


def test_per_replica_repr(strategy, rank, size):
    """It shows what is here: all components, where merge_fn has looked at them."""

    def merge_fn(distribution, x):
        before = repr(x)
        distribution.experimental_local_results(x)
        return [before, repr(x)]

    value = strategy.run(lambda: np.arange(2) + rank)
    own_text = f"PerReplica(replica {rank} of {size}: {np.arange(2) + rank!r})"
    assert repr(value) == own_text
    with strategy.scope():
        made = mpidist.PerReplica([*range(size)])
    rows = ",\n".join(f"  {i}: {i}" for i in range(size))
    assert repr(made) == str(made) == f"PerReplica:{{\n{rows}\n}}"
    before, after = merge(strategy, merge_fn, rank)
    if size > 1:
        assert before == f"PerReplica(replica 0 of {size}: 0)"
    assert after == repr(made)


def test_the_text_of_a_per_replica_says_what_to_write(strategy, rank, size):
    value = strategy.run(lambda: 1.5 + rank)
    text = f"PerReplica(replica {rank} of {size}: {1.5 + rank})"
    assert str(value) == f"{value}" == "%s" % value  # noqa: UP031
    assert str(value).startswith(f"{text}; ")
    assert 'strategy.reduce("MEAN", value, axis=None)' in str(value)
    assert f"{[value]}" == f"[{text}]"
    for attempt in (
        lambda: f"{value:.3f}",
        lambda: round(value, 3),
        lambda: divmod(value, 2),
        lambda: complex(value),
    ):
        with pytest.raises(
            TypeError, match=r"strategy\.reduce\(op, value, axis=None\)"
        ):
            attempt()
    # From Python 3.15 on, % replaces the message of __float__ by its own.
    with pytest.raises(TypeError, match=r"strategy\.reduce\(op|real number, not"):
        "%.3f" % value  # noqa: UP031
    with pytest.raises(AttributeError, match=r"strategy\.reduce\(\"SUM\", value"):
        value.numpy()
    m = mirrored_of(strategy, 1.25)
    assert (f"{m:.1f}", round(m, 1), round(m)) == ("1.2", 1.2, 1)


@pytest.mark.one_size
@pytest.mark.parametrize("attempt", [pickle.dumps, copy.copy, copy.deepcopy])
def test_distributed_values_are_not_pickled(strategy, attempt):
    per_replica = strategy.run(lambda: np.ones(2))
    mirrored = mirrored_of(strategy, np.ones(2))
    for value in (per_replica, mirrored):
        with pytest.raises(TypeError, match="cannot be pickled") as caught:
            attempt(value)
        assert "experimental_local_results(value)[0]" in str(caught.value)


# --- DistributedValues made by hand ---------------------------------------------------


@pytest.mark.parametrize(
    "kind", [mpidist.DistributedValues, mpidist.PerReplica, mpidist.Mirrored]
)
def test_constructor_errors(strategy, size, kind):
    with strategy.scope():
        for values in (1.0, "ab", np.ones(size), {0: 1.0}, None):
            with pytest.raises(TypeError, match="expected a list or tuple") as caught:
                kind(values)
            assert kind.__name__ in str(caught.value)
        for number in (size + 1, size - 1, 0):
            with pytest.raises(ValueError, match=f"{size} replicas") as caught:
                kind([1.0] * number)
            assert f"got {number}; `values` of a PerReplica has" in str(caught.value)
        value = kind((1.0,) * size)
        assert own(strategy, strategy.run(lambda x: 2 * x, args=(value,))) == 2.0
    # Outside the scope one replica is in force.
    assert kind([2.0]).values == (2.0,)


# --- Mirrored -------------------------------------------------------------------------


def test_mirrored_values_and_repr(strategy, size):
    m = mirrored_of(strategy, 4.0)
    assert m.values == (4.0,)
    assert strategy.experimental_local_results(m) == (4.0,)
    assert repr(m) == f"Mirrored(on {size} replicas: 4.0)"

    def merge_fn(distribution, x):
        mirrored = distribution.extended.reduce_to("MEAN", x, x)
        assert mirrored.values == (4.0,) * size
        return [*distribution.experimental_local_results([mirrored, m])]

    result = merge(strategy, merge_fn, 4.0)
    assert own(strategy, result) == [[4.0, 4.0]] * size


def test_a_replica_can_not_change_its_copy_of_a_mirrored_argument(strategy, rank):
    """Else `assign(mirrored)`, which trusts it, would make the variable differ."""
    m = mirrored_of(strategy, np.ones(2))

    def step(x):
        x += rank

    with pytest.raises(ValueError, match="read-only"):
        strategy.run(step, args=(m,))
    np.testing.assert_array_equal(m, [1.0, 1.0])


def test_whose_components_values_shows(strategy, rank, size):
    """In merge_fn those of all; elsewhere this replica's, and what was made here."""
    v, metric = (
        make(strategy, np.zeros(300_000), synchronization=one, aggregation=SUM)
        for one in (ON_WRITE, ON_READ)
    )
    plain = mpidist.Variable(1.0, synchronization=ON_READ)  # of this rank alone
    default = mpidist.get_strategy()
    alone = default.experimental_distribute_values_from_function(lambda _: 1.0)
    with strategy.scope():
        by_hand = mpidist.PerReplica([*range(size)])
    kept = []

    def merge_fn(distribution, x):
        kept.append(mpidist.PerReplica([*range(size)]))
        distribution.reduce("SUM", kept[0], axis=None)  # now all ranks have it
        assert not any(copy.flags.writeable for copy in metric.values)
        return [len(one.values) for one in (x, kept[0], v, metric, plain, alone)]

    numbers = merge(strategy, merge_fn, 1.0)
    assert [own(strategy, n) for n in numbers] == [size] * 4 + [1] * 2
    assert [len(one.values) for one in (v, metric, plain)] == [1] * 3
    assert by_hand.values == tuple(range(size))
    assert [one.values for one in kept] == [(0,)][: len(kept)]


@pytest.mark.mpi(min_size=2)
@pytest.mark.processes  # threads share their memory
def test_large_components_are_copied_once(strategy, rank, size):
    """Rank 0 receives each into the memory where it stays, and copies its own.

    The others copy nothing.
    """
    mebibyte = 2**20
    other = np.full(mebibyte + 1, 1, np.uint8) if rank == 1 else np.full(mebibyte, 2.0)
    x = {"a": np.full(mebibyte, float(rank)), "b": other}

    def merge_fn(distribution, x):
        rows = distribution.experimental_local_results(x)
        for i, row in enumerate(rows):
            assert row["a"][-1] == i
            assert row["b"][-1] == (1 if i == 1 else 2)
        assert len(rows) == size

    tracemalloc.start()
    merge(strategy, merge_fn, x)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    gathered = size * 16 * mebibyte if rank == 0 else 0
    # And one more where the numbers of rank 2 would not be aligned after rank 1's.
    assert peak < gathered + 9 * mebibyte
