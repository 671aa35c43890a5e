"""Making, closing and mixing strategies."""

import copy
import logging
import pickle

import numpy as np
import pytest
from replicas import Traffic, all_reduce, split

import mpidist
from mpidist._collectives import transport_choice
from mpidist.experimental import CommunicationOptions

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]


def total(strategy, value):
    return all_reduce(strategy, "SUM", value)


@pytest.mark.processes
def test_two_strategies_do_not_disturb_each_other(strategy, new_strategy, rank, size):
    from mpi4py import MPI

    other = new_strategy()
    # User traffic on COMM_WORLD, pending while both strategies communicate.
    sent, received = np.ones(1), np.zeros(1)
    request = MPI.COMM_WORLD.Iallreduce(sent, received)
    for i in range(5):
        assert total(strategy, float(i)) == i * size
        assert total(other, np.full(3, rank)).tolist() == [sum(range(size))] * 3
    request.Wait()
    assert received[0] == size


def test_an_error_in_one_strategy_leaves_the_other_alone(strategy, new_strategy, size):
    other = new_strategy()

    def bad():
        raise KeyError("bad")

    with pytest.raises(KeyError):
        other.run(bad)
    assert total(strategy, 1.0) == size
    assert total(other, 1.0) == size


def test_groups_of_ranks(strategy, rank, size):
    comm = split(rank % 2)
    half = mpidist.MPIStrategy(comm)
    members = [r for r in range(size) if r % 2 == rank % 2]
    assert half.num_replicas_in_sync == len(members)
    assert half.replica_id == members.index(rank)
    assert total(half, float(rank)) == sum(members)
    with half.scope():
        v = mpidist.Variable(float(rank))
    assert float(v) == members[0]
    half.close()
    assert total(strategy, 1.0) == size


@pytest.mark.processes
@pytest.mark.mpi(min_size=2)
def test_a_strategy_on_some_of_the_ranks(strategy, rank, size):
    from mpi4py import MPI

    color = 0 if rank < size - 1 else MPI.UNDEFINED
    comm = MPI.COMM_WORLD.Split(color)
    if comm == MPI.COMM_NULL:
        with pytest.raises(ValueError, match="COMM_NULL"):
            mpidist.MPIStrategy(comm)
    else:
        most = mpidist.MPIStrategy(comm)
        assert total(most, 1.0) == size - 1
        most.close()
    assert total(strategy, 1.0) == size


def test_reversed_ranks(strategy, rank, size):
    """The replicas are numbered by the communicator that was given."""
    backwards = mpidist.MPIStrategy(split(0, key=-rank))
    assert backwards.replica_id == size - 1 - rank
    order = backwards.gather(backwards.run(lambda: np.array([rank])), axis=0)
    assert order.tolist() == list(range(size))[::-1]
    backwards.close()


def test_closed_strategies(strategy, size):
    closed = mpidist.MPIStrategy()
    with closed.scope():
        v = mpidist.Variable([1.0, 2.0])
    closed.close()
    closed.close()
    with pytest.raises(RuntimeError, match="this strategy was closed"):
        closed.run(lambda: 1.0)
    np.testing.assert_array_equal(v, [1.0, 2.0])


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"comm": "world"}, TypeError, "expected `comm` to be an? `m"),
        ({"communication_options": 3}, TypeError, "communication_options"),
    ],
)
@pytest.mark.one_size
def test_bad_arguments(strategy, arguments, kind, text):
    with pytest.raises(kind, match=text):
        mpidist.MPIStrategy(**arguments)
    assert total(strategy, 1.0) == strategy.num_replicas_in_sync


@pytest.mark.one_size
@pytest.mark.processes
def test_nccl_without_gpus_has_no_effect(new_strategy, strategy, rank, size, caplog):
    options = CommunicationOptions(implementation="NCCL")
    transport_choice._told.clear()
    with caplog.at_level(logging.WARNING):
        one = new_strategy(implementation="NCCL", device="cpu")
        assert total(one, 1.0) == size
        all_reduce(strategy, "SUM", 1.0, options)
    warned = [x for x in caplog.messages if "NCCL` has no effect" in x]
    assert len(warned) == (rank == 0)


@pytest.mark.mpi(min_size=2)
def test_bad_arguments_on_one_rank(strategy, rank, size):
    with pytest.raises(ValueError, match="expected `device`") as caught:
        mpidist.MPIStrategy(device="tpu" if rank == size - 1 else "cpu")
    if rank != size - 1:
        assert f"because rank {size - 1} raised it" in caught.value.__notes__[0]


def test_what_a_strategy_says_of_itself(strategy, rank, size):
    assert f"replica {rank} of {size}, on /rank:{rank}/device:" in repr(strategy)
    assert "1 replica" in repr(mpidist.get_strategy())
    for one in (strategy, mpidist.get_strategy()):
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be pickled or copied"):
                attempt(one)


def test_statistics(new_strategy, size):
    strategy = new_strategy()
    before, traffic = strategy.communication_statistics(), Traffic(strategy)
    total(strategy, np.ones(1000, np.float32))
    assert (traffic.calls["Allreduce"], traffic.bytes["Allreduce"]) == (1, 4000)
    assert strategy.communication_statistics().seconds > before.seconds


def test_options_of_one_call(new_strategy, size):
    # Through shared memory all leaves go as one stream, whatever `bytes_per_pack` is,
    # and small nests, of two ranks up to 1 MiB, behind their header.
    strategy = new_strategy(bytes_per_pack=1_000_000, implementation="DIRECT")
    leaves = [np.ones(200_000, np.float32)] * 4

    def calls_with(options):
        traffic = Traffic(strategy)
        all_reduce(strategy, "SUM", leaves, options)
        return traffic.calls["Allreduce"]

    assert calls_with(None) == 4
    assert calls_with(CommunicationOptions(bytes_per_pack=1_600_000)) == 2
    assert calls_with(mpidist.experimental.CollectiveHints(bytes_per_pack=10**7)) == 1
