"""Communicators and shared memory are given back: closed, collected, or in groups."""

import gc
import pathlib
import weakref

import numpy as np
import pytest
from replicas import (
    SHARED,
    context,
    core_by_mpi,
    everywhere,
    next_communicator,
    own,
)

import mpidist
from mpidist import _native
from mpidist._mpi import collective_release, duplication
from mpidist._mpi.collective_release import CollectiveResource
from mpidist._strategy.strategy import group_of

mpi = pytest.mark.mpi
core = pytest.mark.core


# --- the protocol, in one process ---------------------------------------------------


@pytest.fixture
def held(monkeypatch):
    resources = {}
    monkeypatch.setattr(collective_release, "resources", resources)
    return resources


def release_with(*others):
    """Release, with ranks that send these keys (each with its number of ranks)."""
    rounds = []

    def gather(mine):
        rounds.append(mine)
        return [mine, *others] if len(rounds) == 1 else [mine]

    collective_release.release_unused(gather)
    return rounds


def test_what_all_its_ranks_have_dropped_goes_in_the_order_of_keys(held):
    freed = []
    for key, ranks in (("c", 2), ("a", 2), ("b", 3), ("d", 1)):
        CollectiveResource(key, ranks, lambda: False, lambda key=key: freed.append(key))
    CollectiveResource("e", 2, lambda: True, lambda: freed.append("e"))
    release_with([("a", 2), ("b", 3), ("e", 2)], [("c", 2)])
    # b lacks a rank, e is in use here.
    assert freed == ["a", "c", "d"]
    assert sorted(held) == ["b", "e"]


def test_what_is_free_because_another_went_goes_in_the_same_release(held):
    freed = []
    CollectiveResource("comm", 1, lambda: False, lambda: freed.append("comm"))
    CollectiveResource(
        "a window", 1, lambda: "comm" not in freed, lambda: freed.append("window")
    )
    rounds = release_with()
    assert freed == ["comm", "window"]
    assert rounds == [[("comm", 1)], [("a window", 1)], []]
    assert not held


def test_a_rank_without_a_resource_sees_others_free_it(held):
    # It goes round once more with them.
    assert release_with([("theirs", 1)]) == [[], []]


# --- under MPI ------------------------------------------------------------------------


def segments():
    """Return how many files of nodes are mapped into this process."""
    maps = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8")
    return sum("/dev/shm/mpidist-" in line for line in maps.splitlines())


def release_unused(strategy):
    gc.collect()
    group_of(strategy).communicator.release_unused()


def maps_memory(strategy):
    """Whether ranks share memory: of one node, or each node its own."""
    comm = group_of(strategy).communicator
    return comm.num_nodes < comm.size


def needs_one_node(strategy):
    if group_of(strategy).communicator.num_nodes > 1:
        pytest.skip("ranks of several nodes have buffers of their own")


def options(implementation=SHARED):
    if not _native.available():
        pytest.skip("the native core is not built")
    return mpidist.experimental.CommunicationOptions(
        implementation=implementation, timeout_seconds=60
    )


@core_by_mpi
def test_a_closed_strategy_gives_all_back(strategy, size):
    release_unused(strategy)
    count, mapped, handles = collective_release.count(), segments(), []
    for _ in range(6):
        one = mpidist.MPIStrategy(communication_options=options())
        assert collective_release.count() == count + 1
        assert segments() == mapped + maps_memory(one)
        one.close()
        assert (collective_release.count(), segments()) == (count, mapped)
        handles.append(next_communicator())
    assert len({*handles[2:]}) == 1, handles


@core_by_mpi
def test_strategies_that_are_dropped_leak_nothing(strategy, rank, size):
    release_unused(strategy)
    count, mapped = collective_release.count(), segments()
    most = 0
    for number in range(12):
        one = mpidist.MPIStrategy(communication_options=options())
        with one.scope():
            variable = mpidist.Variable(np.zeros(3), name="v")
        total = own(one, one.run(lambda: context().all_reduce("SUM", np.ones(3))))
        variable.assign(total)
        if (number + 2 * rank) % 6 == 0:
            gc.collect()  # at other moments on other ranks
        most = max(most, collective_release.count())
    assert most <= count + 12
    reference = weakref.ref(one)
    del one, variable
    release_unused(strategy)
    assert reference() is None
    assert (collective_release.count(), segments()) == (count, mapped)


@core_by_mpi
def test_groups_of_ranks(strategy, rank, size):
    from mpi4py import MPI

    release_unused(strategy)
    count = collective_release.count()
    halves = MPI.COMM_WORLD.Split(rank % 2)
    pairs = MPI.COMM_WORLD.Split(rank // 2)
    ones = [
        mpidist.MPIStrategy(comm, communication_options=options())
        for comm in (halves, pairs, None)
    ]
    if rank % 2:
        ones.reverse()  # collected in another order
    while ones:
        ones.pop()
        gc.collect()
    if rank == 0:  # keeps one of its groups, which may not go on the others either
        kept = mpidist.MPIStrategy(MPI.COMM_SELF)
    release_unused(strategy)
    assert collective_release.count() == count + (rank == 0)
    if rank == 0:
        kept.close()
    halves.Free()
    pairs.Free()


@core_by_mpi
def test_what_one_rank_still_uses_stays_on_all(strategy, rank, size):
    release_unused(strategy)
    count = collective_release.count()
    one = mpidist.MPIStrategy(communication_options=options())
    made = collective_release.count()
    if rank:
        del one
    release_unused(strategy)
    assert collective_release.count() == made
    if rank == 0:
        del one
    release_unused(strategy)
    assert collective_release.count() == count


@mpi
def test_mpi_has_no_communicator_left(strategy):
    """As after some 2,000 strategies of MPICH that gave up."""
    from mpi4py import MPI

    def wait(request, what):
        request.Wait()
        raise MPI.Exception(MPI.ERR_OTHER)

    comm = MPI.COMM_WORLD.Dup()
    with pytest.raises(
        RuntimeError, match=r"not freed.* `strategy.close\(\)`"
    ) as caught:
        duplication.duplicate(comm, wait)
    assert isinstance(caught.value.__cause__, MPI.Exception)


@mpi
def test_one_that_could_not_be_made_is_given_back(strategy):
    release_unused(strategy)
    count = collective_release.count()
    with pytest.raises(ValueError, match="expected `device`"):
        mpidist.MPIStrategy(device="tpu")
    release_unused(strategy)
    assert collective_release.count() == count


@core_by_mpi
def test_buffers_keep_their_memory_after_the_strategy(strategy, rank, size):
    needs_one_node(strategy)
    release_unused(strategy)
    count, mapped = collective_release.count(), segments()
    one = mpidist.MPIStrategy(communication_options=options())
    buffers = one.buffers_like({"a": np.zeros(5000), "b": np.zeros((3, 4), "f4")})
    buffers["a"][:] = rank
    view = buffers["a"].reshape(50, 100)[10:]
    one.close()
    with pytest.raises(RuntimeError, match="closed"):
        one.run(lambda x=view: context().all_reduce("SUM", x))
    del one, buffers
    release_unused(strategy)
    assert segments() > mapped or size == 1 or not _native.available()
    assert (view == rank).all()
    everywhere(None)  # nobody writes over what another still looks at
    del view
    release_unused(strategy)
    assert (collective_release.count(), segments()) == (count, mapped)
