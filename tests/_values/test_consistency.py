"""check_in_sync: proves copies equal, and finds and names those that are not."""

import ml_dtypes
import numpy as np
import posing
import pytest
from replicas import (
    NONE,
    ON_READ,
    SUM,
    assert_mirrored,
    context,
    make,
    merge,
    raises_everywhere,
)

import mpidist
from mpidist._values.variable import array_of

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]


def drift(variable, index, change):
    """Change this rank's copy behind mpidist's back."""
    array_of(variable)[index] = change(array_of(variable)[index])


def next_up(x):
    return np.nextafter(x, np.inf, dtype=x.dtype)


LEVELS = {
    "program": lambda strategy, call: call(),
    "scope": lambda strategy, call: in_scope(strategy, call),
    "replica": lambda strategy, call: strategy.run(call),
    "merge_fn": lambda strategy, call: merge(strategy, lambda s: call()),
}


def in_scope(strategy, call):
    with strategy.scope():
        call()


@pytest.mark.parametrize("level", LEVELS)
def test_a_single_bit_on_each_rank(strategy, rank, size, level):
    v = make(strategy, np.ones((3, 4), np.float32), name="weights")
    w = make(strategy, 2.0, name="bias")
    nest = {"layers": [v, (w,)]}

    def check():
        assert mpidist.check_in_sync(nest) is None

    LEVELS[level](strategy, check)
    for culprit in range(size if size > 1 else 0):
        if rank == culprit:
            drift(v, (1, 2), next_up)
        for message in raises_everywhere(
            mpidist.OutOfSyncError, lambda: LEVELS[level](strategy, check)
        ):
            assert "Variable 'weights'" in message
            assert "bias" not in message
            assert "weights[1, 2]" in message
            assert "1 of 12 elements" in message
            if size > 2:  # of two that differ nobody knows which one has drifted
                assert f"rank {culprit}: 1 of 12" in message
                assert f"'weights' on rank {culprit}, compared" in message
                assert "1.0000001192092896 instead of 1.0" in message
            assert "broadcast_to(variable.value(), variable)" in message
        # The cure that the message names; it makes the strategy usable as before.
        v.assign(strategy.extended.broadcast_to(v.value(), v))
        LEVELS[level](strategy, check)
        if culprit == 0:
            v.assign(np.ones((3, 4), np.float32))


@pytest.mark.mpi(min_size=2)
def test_bits_and_not_values_count(strategy, rank, size):
    payload = np.array([0x7FF8000000000001], np.uint64).view(np.float64)[0]
    for initial, other, shown in (
        (0.0, -0.0, "-0.0 instead of 0.0"),
        (np.nan, payload, "nan (0x7ff8000000000001) instead of nan (0x7ff8"),
        (np.complex64(1), np.complex64(complex(1, -0.0)), "(1-0j) instead of (1+0j)"),
        (True, False, "False instead of True"),
        (np.int8(5), np.int8(-5), "-5 instead of 5"),
        (ml_dtypes.bfloat16(1), ml_dtypes.bfloat16(2), "2.0 instead of 1.0"),
    ):
        v = make(strategy, initial, name="v")
        mpidist.check_in_sync(v)
        if rank == size - 1:
            drift(v, (), lambda _, other=other: other)
        raises_everywhere(
            mpidist.OutOfSyncError,
            lambda v=v: mpidist.check_in_sync([v]),
            shown,
            "the first at v:",
        )


def test_the_padding_of_long_doubles_is_no_drift(strategy, rank):
    v = make(strategy, np.ones(3, np.longdouble), aggregation=SUM)
    raw = array_of(v).view(np.uint8).reshape(3, -1)
    if np.finfo(np.longdouble).nmant == 63:
        raw[:, 10:] = rank + 1
    mpidist.check_in_sync(v)
    strategy.extended.update(v, lambda v: v.assign_add(np.ones(3, np.longdouble)))
    mpidist.check_in_sync(v)


@pytest.mark.mpi(min_size=2)
def test_many_variables(strategy, rank, size):
    variables = [make(strategy, np.zeros(3), name=f"v{i}") for i in range(60)]
    before = strategy.communication_statistics().calls
    mpidist.check_in_sync(variables)
    assert strategy.communication_statistics().calls == before  # one header
    if rank == size - 1:
        for i in range(10, 18):
            drift(variables[i], slice(1, 3), lambda x: x + 1)
    message = raises_everywhere(
        mpidist.OutOfSyncError, lambda: mpidist.check_in_sync(variables)
    )[0]
    assert "'v10'" in message
    assert "2 of 3 elements, the first at v10[1]" in message
    assert "'v14'" in message
    assert "'v15'" not in message
    assert "and 3 more\n" in message


@pytest.mark.mpi(min_size=2)
def test_with_the_guard_off(new_strategy, rank, size):
    """It is asked for, so it communicates."""
    strategy = new_strategy(guard=False)
    v = make(strategy, [1.0, 2.0], aggregation=NONE, name="v")
    mpidist.check_in_sync(v)
    if rank == size - 1:
        drift(v, 1, next_up)
    for level in ("program", "replica"):
        raises_everywhere(
            mpidist.OutOfSyncError,
            lambda level=level: LEVELS[level](
                strategy, lambda: mpidist.check_in_sync(v)
            ),
        )
    v.assign([3.0, 4.0])
    mpidist.check_in_sync(v)


def test_what_it_is_not_for(strategy, rank, size):
    v = make(strategy, 1.0)
    on_read = make(strategy, 1.0, synchronization=ON_READ, name="metric")
    for nothing in ([], {}, ()):
        mpidist.check_in_sync(nothing)
    for bad, kind, part in (
        (on_read, ValueError, "ON_READ"),
        ([v, on_read], ValueError, "'metric'"),
        ([v, 1.0], TypeError, "expected a `mpidist.Variable`"),
        (1.0, TypeError, "expected a `mpidist.Variable`"),
        ([v, mpidist.Variable(1.0)], RuntimeError, "Mixing different Strategy"),
    ):
        for level in LEVELS.values():
            raises_everywhere(
                kind,
                lambda level=level, bad=bad: level(
                    strategy, lambda: mpidist.check_in_sync(bad)
                ),
                part,
            )
    mpidist.check_in_sync(mpidist.Variable(1.0))  # of one copy, outside every scope


@pytest.mark.mpi(min_size=2)
def test_on_one_rank_other_variables_or_none(strategy, rank, size):
    v, w = make(strategy, 1.0, name="v"), make(strategy, 1.0, name="w")
    for other in ([v, w], w):
        raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda other=other: mpidist.check_in_sync(other if rank == 1 else v),
        )
    messages = raises_everywhere(
        TypeError, lambda: mpidist.check_in_sync([v, "text"] if rank == 1 else v)
    )
    assert "'text'" in messages[0]
    assert_mirrored(strategy, v, 1.0)


def test_shapes(strategy):
    variables = [
        make(strategy, x)
        for x in (np.zeros((0, 3)), np.float64(1), np.zeros((2, 3, 4), np.int16))
    ]
    mpidist.check_in_sync(variables)
    strategy.run(lambda: (mpidist.check_in_sync(variables), context())[:0])


@pytest.mark.processes  # CuPy's stand-in is one for the process
def test_on_a_device(monkeypatch, new_strategy):
    posing.install(monkeypatch)
    strategy = new_strategy(device="gpu")
    rank, size = strategy.replica_id, strategy.num_replicas_in_sync
    v = make(strategy, np.ones((3, 4), np.float32), name="v")
    mpidist.check_in_sync(v)
    if size > 1:
        if rank == size - 1:
            v.value()[2, 3] = np.float32(7)  # a CuPy array cannot be read-only
        message = raises_everywhere(
            mpidist.OutOfSyncError, lambda: mpidist.check_in_sync(v)
        )[0]
        assert "v[2, 3]: 7.0 instead of 1.0" in message


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("others", ["run", "values", "reduce", "gather in run", "next"])
@pytest.mark.parametrize("odd", ["first", "last"])
def test_an_update_that_some_ranks_do_not_make_is_undone(
    new_strategy, rank, size, odd, others
):
    strategy = new_strategy(timeout_seconds=20)
    variable = make(strategy, np.ones(3))
    ones = strategy.run(lambda: np.ones(3))
    rows = iter(strategy.experimental_distribute_dataset([np.ones(4)]))
    do = {
        "run": lambda: strategy.run(lambda: 1),
        "values": lambda: strategy.experimental_distribute_values_from_function(
            lambda context: 1
        ),
        "reduce": lambda: strategy.reduce("SUM", ones, axis=None),
        "gather in run": lambda: strategy.run(
            lambda: context().all_gather(np.ones(3), 0)
        ),
        "next": lambda: next(rows),
    }[others]

    def update():
        strategy.extended.update(variable, lambda v: v.assign_add(np.ones(3)))

    mine = rank == (0 if odd == "first" else size - 1)
    with pytest.raises(mpidist.CollectiveError):
        (update if mine else do)()
    mpidist.check_in_sync(variable)
    variable.assign_add(np.ones(3))
    mpidist.check_in_sync(variable)
