"""Messages: the collectives that are made of them, and what happens when one fails."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import pytest
from replicas import all_reduce, context, everywhere, make, merge, raises_everywhere

import mpidist
from mpidist import _native
from mpidist._agreement.channel import MessageChannel
from mpidist._agreement.deadline import Deadline
from mpidist._base import machine
from mpidist._mpi import communicator
from mpidist._mpi.headers import RowMessages
from mpidist._mpi.messages import COMBINE, Messages
from mpidist._strategy.strategy import group_of

DIRECT = mpidist.experimental.CommunicationImplementation.DIRECT
SHARED = mpidist.experimental.CommunicationImplementation.SHARED

mpi = pytest.mark.mpi
core = pytest.mark.core


def poll(transfers: Any) -> None:
    while not transfers.Test():
        os.sched_yield()


@pytest.fixture(scope="module")
def comm() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()


@pytest.fixture(params=["few", "many", "cut"])
def messages(request, comm) -> Messages:
    """As for few ranks, as for many, and with buffers in many pieces."""
    messages = Messages(comm, poll)
    if request.param == "many":
        messages.few = 1
        messages.whole_bytes_of_two = 0
    elif request.param == "cut":
        messages.piece_bytes = 4096
        messages.message_bytes = 1000
        messages.whole_bytes_of_two = messages.whole_bytes = messages.tree_bytes = 100
    return messages


def parts_of(size: int, count: int, dtype: str) -> list[Any]:
    rng = np.random.default_rng(count)
    return [(rng.normal(size=count) * 100).astype(dtype) for _ in range(size)]


def combined(parts: list[Any], op: str) -> Any:
    total = parts[0].copy()
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            COMBINE[op](total, part, out=total)
    return total


COUNTS = [0, 1, 3, 700, 5_000, 70_001]


@mpi
@core
@pytest.mark.parametrize("op", ["SUM", "PROD", "MIN", "MAX"])
def test_reductions(messages, op):
    rank, size = messages.rank, messages.size
    for count, dtype in itertools.product(COUNTS, ["float64", "int8"]):
        parts = parts_of(size, count, dtype)
        want = combined(parts, op)
        out = np.empty(count, dtype)
        messages.allreduce(parts[rank], out, op)
        in_place = parts[rank].copy()
        messages.allreduce(None, in_place, op)
        np.testing.assert_array_equal(out, in_place)
        if dtype == "int8":  # sums of floats of many ranks are those of a tree
            np.testing.assert_array_equal(out, want)
        np.testing.assert_allclose(out, want)
        assert len(set(everywhere(out.tobytes()))) == 1
        for root in {0, size - 1}:
            mine = parts[rank].copy()
            messages.reduce(mine, op, root)
            np.testing.assert_array_equal(mine, want if rank == root else parts[rank])


@mpi
@core
def test_copies(messages):
    rank, size = messages.rank, messages.size
    for count in COUNTS:
        parts = parts_of(size, count, "float32")
        for root in range(size):
            mine = parts[rank].copy()
            messages.broadcast(mine, root)
            np.testing.assert_array_equal(mine, parts[root])
        counts = [count + 2 * k for k in range(size)]
        parts = [np.full(n, k, np.float32) for k, n in enumerate(counts)]
        every = np.concatenate(parts)
        out = np.empty(sum(counts), np.float32)
        messages.all_gather(parts[rank], out, counts)
        np.testing.assert_array_equal(out, every)
        for root in {0, size - 1}:
            is_root = rank == root
            out = np.zeros(sum(counts), np.float32)
            messages.gather(parts[rank], out if is_root else None, counts, root)
            np.testing.assert_array_equal(out, every * is_root)
            mine = np.empty(counts[rank], np.float32)
            messages.scatter(every if is_root else None, mine, counts, root)
            np.testing.assert_array_equal(mine, parts[rank])
        square = np.full((size, count + 1), rank, np.float32)
        out = np.empty_like(square)
        messages.exchange(square, out)
        np.testing.assert_array_equal(out[:, 0], np.arange(size))


# --- headers with payloads ----------------------------------------------------------


@mpi
@core
@pytest.mark.skipif(not _native.available(), reason="the native core is not built")
def test_rows_bring_the_payloads_of_all(comm):
    messages = RowMessages(comm)
    rows = messages.open(crowded=True)
    rank, size = comm.Get_rank(), comm.Get_size()
    want = sum(range(1, size + 1))
    for count in [1, 100, rows.room, 0, 7, *range(16, 90 * 16, 16)]:
        leaf = ("u1", "SUM", (count,), 0)
        reduce = _native.core.RowReduce(rows, [leaf], 5, 0)
        found = np.empty(count, np.uint8)
        mine = np.full(count, rank + 1, np.uint8)
        assert reduce.eager(mine, found) == _native.core.OK
        assert set(found.tolist()) == ({want} if count else set())
    assert rows.meet(0, rank, rank, rank, 0, -1) == (
        _native.core.DIFFERENT if size > 1 else _native.core.OK
    )
    assert rows.verdict == (0, int(size == 1), int(size == 1), 0, size - 1)
    messages.free()


@mpi
@core
def test_payloads_of_ranks_whose_arrays_lie_otherwise(new_strategy, rank, size):
    """What the memory of an array is like decides nothing."""
    strategy = new_strategy(implementation=DIRECT)
    x = np.arange(10.0) + rank
    expected = sum(np.arange(10.0) + k for k in range(size))
    for _ in range(3):
        found = all_reduce(strategy, "SUM", x)
        np.testing.assert_array_equal(found, expected)
    strided = np.repeat(x, 2)[::2] if rank == 0 else x
    for _ in range(3):
        found = all_reduce(strategy, "SUM", strided)
        np.testing.assert_array_equal(found, expected)


@mpi
@core
def test_many_ranks_take_the_maximum(new_strategy, rank, monkeypatch):
    monkeypatch.setattr(communicator, "FEW", 0)
    strategy = new_strategy(implementation=DIRECT)
    channel = group_of(strategy).guard.channel
    assert channel is None or isinstance(channel, MessageChannel)
    for _ in range(3):
        found = all_reduce(strategy, "MAX", float(rank))
        assert found == max(everywhere(rank))


# --- integers -------------------------------------------------------------------------


@mpi
@core
@pytest.mark.parametrize("op", ["SUM", "PROD"])
@pytest.mark.parametrize("implementation", [DIRECT, SHARED])
@pytest.mark.parametrize(
    "dtype",
    ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"],
)
def test_integers_wrap_as_in_numpy(new_strategy, rank, size, dtype, op, implementation):
    """Open MPI saturates sums of 8 and 16 bits, in most elements."""
    strategy = new_strategy(implementation=implementation)
    limits = np.iinfo(dtype)
    for count in (1, 20, 3_000, 100_000):
        parts = []
        for k in range(size):
            edge = [limits.max - k, limits.min + k, limits.max // 2 + k, 3]
            parts.append(np.resize(np.array(edge, dtype), count))
        want = combined(parts, op)
        mine = parts[rank]
        for _ in range(2):  # the second time by the plan
            found = all_reduce(strategy, op, mine)
            assert found.dtype == want.dtype
            np.testing.assert_array_equal(found, want)


# --- no memory on one rank ---------------------------------------------------------

COUNT = 123_457


def no_memory(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    empty = np.empty

    def fails(shape: Any, dtype: Any = float, **more: Any) -> Any:
        if np.prod(shape) * np.dtype(dtype).itemsize >= least:
            raise MemoryError("injected")
        return empty(shape, dtype, **more)

    monkeypatch.setattr(np, "empty", fails)


def fetch(strategy: Any, value: Any) -> Any:
    return len(strategy.experimental_local_results(value))


def spread(strategy: Any) -> Any:
    values = [np.full(COUNT, float(k)) for k in range(strategy.num_replicas_in_sync)]
    return strategy.experimental_distribute_values_from_function(
        lambda c: values[c.replica_id_in_sync_group]
    )


@mpi
@core
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    "what", ["variable", "broadcast_to", "result", "collect", "scatter", "message"]
)
def test_no_memory_on_one_rank_is_raised_on_all(
    new_strategy, rank, size, what, who, monkeypatch
):
    if size == 1:
        pytest.skip("one rank receives nothing")
    strategy = new_strategy(implementation=DIRECT)
    big = np.ones(COUNT)
    least = big.nbytes

    def call() -> None:
        if what == "variable":
            make(strategy, lambda: np.full(COUNT, 2.0))
        elif what == "broadcast_to":
            merge(strategy, lambda s: s.extended.broadcast_to(big, big))
        elif what == "result":
            merge(strategy, lambda s: np.full(COUNT, 2.0))
        elif what == "message":
            merge(strategy, lambda s: b"x" * 3_000_000)
        elif what == "collect":
            strategy.run(lambda: context().merge_call(fetch, (big,)))
        else:
            merge(strategy, spread)

    if what == "message":
        least = 3_000_000
    # Whom memory can fail: those who receive, or the one that collects.
    fails_there = who == 0 if what == "collect" else who != 0
    with monkeypatch.context() as patch:
        if rank == who:
            no_memory(patch, least)
        if fails_there:
            messages = raises_everywhere(MemoryError, call)
            assert all("injected" in message for message in messages)
    assert all_reduce(strategy, "SUM", 1.0) == size
    call()
    assert all_reduce(strategy, "SUM", 1.0) == size


# --- set-up that fails on one rank --------------------------------------------------


class InjectedError(Exception):
    pass


def fail_after(owner: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    """Have a call fail on this rank, after its part in what is collective."""
    original = getattr(owner, name)

    def fails(*args: Any, **more: Any) -> Any:
        original(*args, **more)
        raise InjectedError(name)

    patch.setattr(owner, name, fails)


class Through:
    """An mpi4py communicator, one of whose methods fails."""

    def __init__(self, comm: Any, name: str) -> None:
        self._comm, self._name = comm, name

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if name != self._name:
            return found

        def fails(*args: Any) -> Any:
            found(*args)
            raise InjectedError(name)

        return fails


_OWNERS = {"node_id": machine, "urandom": os}


@mpi
@core
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("step", ["node_id", "Recv_init", "urandom", "peers"])
def test_a_set_up_that_fails_on_one_rank_fails_on_all(size, rank, step, last, comm):
    if size == 1:
        pytest.skip("one rank is all ranks")

    deadline = Deadline(20)
    hit = rank == (size - 1 if last else 0)

    def make_one() -> None:
        with pytest.MonkeyPatch.context() as patch:
            if hit and step in _OWNERS:
                fail_after(_OWNERS[step], step, patch)
            elif hit and step != "peers":
                duplicate = comm.Idup

                class Base(type(comm)):
                    def Idup(self) -> Any:  # noqa: N802 - mpi4py's name
                        made, request = duplicate()
                        return Through(made, step), request

                communicator.Communicator(Base(comm), deadline, size).open_headers()
                return
            made = communicator.Communicator(comm, deadline, size)
            made.open_headers()
            if hit:
                fail_after(Messages, "__init__", patch)
            made.find_peers()

    error: Exception | None = None
    try:
        make_one()
    except Exception as raised:
        error = raised
    kinds = everywhere(type(error).__name__)
    victim = size - 1 if last else 0
    assert kinds == [
        "InjectedError" if k == victim else "RuntimeError" for k in range(size)
    ]
    if not hit:
        assert f"failed on rank {victim}: InjectedError" in str(error)
    # What is between the ranks is as it was.
    assert communicator.Communicator(comm, deadline).all_min(1 + rank) == 1
