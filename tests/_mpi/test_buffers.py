"""MPI's collectives of buffers, and of headers; and what happens when one fails."""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from replicas import (
    DIRECT,
    a_third,
    all_reduce,
    context,
    core_by_mpi,
    everywhere,
    make,
    merge,
    needs_core,
    raises_everywhere,
)

from mpidist import _native
from mpidist._agreement.channel import OK, ExchangeChannel, SelfChannel
from mpidist._agreement.communicator_waits import CommunicatorWaits
from mpidist._base import machine
from mpidist._base.reduce_op import COMBINE
from mpidist._mpi import between, communicator
from mpidist._mpi.allreduce_algorithm import NEVER, Algorithm
from mpidist._mpi.buffers import BufferCollectives, BufferReduction
from mpidist._strategy.strategy import group_of

mpi = pytest.mark.mpi
core = pytest.mark.core


class Polls:
    """Waits for collectives of a test, without a deadline."""

    def wait_data(self, transfer: Any) -> None:
        while not transfer.Test():
            os.sched_yield()

    def block(self, call: Callable[[], object]) -> None:
        call()

    def failed(self, error: BaseException) -> BaseException:
        return error


@pytest.fixture(scope="module")
def comm() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()


ALGORITHMS = {
    "of the library": None,
    "one": Algorithm(False, 1, 2**20, NEVER),
    "pieces": Algorithm(False, 4, 1000, NEVER),
    "exchanged": Algorithm(False, 1, 2**20, 0),
    "exchanged pieces": Algorithm(False, 3, 1000, 0),
}


@pytest.fixture(params=ALGORITHMS)
def whole(request: pytest.FixtureRequest, comm: Any) -> BufferCollectives:
    return BufferCollectives(comm, Polls(), [].append, ALGORITHMS[request.param])


@pytest.fixture(params=[False, True], ids=["whole", "cut"])
def buffers(
    request: pytest.FixtureRequest, whole: BufferCollectives
) -> BufferCollectives:
    """By each algorithm; also with buffers in many pieces."""
    if request.param:
        whole.most_bytes = 2**14
    return whole


def parts_of(size: int, count: int, dtype: str) -> list[Any]:
    rng = np.random.default_rng(count)
    return [(rng.normal(size=count) * 100).astype(dtype) for _ in range(size)]


def combined(parts: list[Any], op: str) -> Any:
    total = parts[0].copy()
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            COMBINE[op](total, part, out=total)
    return total


COUNTS = [0, 1, 3, 700, 20_001]
# Those that travel; see `dtype_table`.
DTYPES = ["float64", "float32", "int32", "uint64", "complex128"]


@core_by_mpi
@pytest.mark.parametrize("op", a_third([*COMBINE]))
def test_reductions(buffers, op):
    rank, size = buffers.rank, buffers.size
    for count, dtype in itertools.product(COUNTS, DTYPES):
        if dtype in ("complex128", "uint64") and op in ("MIN", "MAX"):
            continue  # not asked for; see `dtype_table`
        parts = parts_of(size, count, dtype)
        want = combined(parts, op)
        out = np.empty(count, dtype)
        mine = parts[rank].copy()
        buffers.allreduce([BufferReduction(mine, out, op)])
        np.testing.assert_array_equal(mine, parts[rank])
        buffers.allreduce([BufferReduction(None, mine, op)])
        np.testing.assert_array_equal(out, mine)
        if np.dtype(dtype).kind in "iu":  # sums of floats are in MPI's order
            np.testing.assert_array_equal(out, want)
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-3)
        assert len(set(everywhere(out.tobytes()))) == 1
        for root in {0, size - 1}:
            mine = parts[rank].copy()
            buffers.reduce(mine, op, root)
            if rank != root:
                want = parts[rank]
            np.testing.assert_allclose(mine, want, rtol=1e-4, atol=1e-3)
            want = combined(parts, op)


@core_by_mpi
def test_reductions_of_several_buffers_at_once(buffers):
    rank, size = buffers.rank, buffers.size
    wanted, reductions, concluded = [], [], []
    rows = itertools.product(COUNTS, ["float32", "int32", "float64"], ["SUM", "MAX"])
    for number, (count, dtype, op) in enumerate(rows):
        parts = parts_of(size, count, dtype)
        out = parts[rank].copy()
        send = None if number % 3 else parts[rank]
        concluded.append([])
        wanted.append(combined(parts, op))

        def conclude(part, kept=concluded[-1], out=out):
            kept.append((part, out[part].copy()))

        reductions.append(BufferReduction(send, out, op, conclude))
    buffers.allreduce(reductions)
    for want, (_, out, *_), parts in zip(wanted, reductions, concluded, strict=True):
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-3)
        # Each part once, in order, when it had its result.
        assert [part.start for part, _ in parts[1:]] == [p.stop for p, _ in parts[:-1]]
        assert (parts[0][0].start, parts[-1][0].stop >= out.size) == (0, True)
        np.testing.assert_array_equal(np.concatenate([x for _, x in parts]), out)


class Raises(Polls):
    """Raises when the n-th wait has ended; other transfers are in progress then."""

    def __init__(self, number: int) -> None:
        self.left = number

    def wait_data(self, transfer: Any) -> None:
        super().wait_data(transfer)
        self.left -= 1
        if not self.left:
            raise InjectedError


@core_by_mpi
@pytest.mark.parametrize("algorithm", ["pieces", "exchanged pieces"])
def test_a_wait_that_raises_leaks_the_memory_of_all_transfers(comm, algorithm):
    if comm.Get_size() == 1:
        pytest.skip("one rank starts no transfers")
    for number in range(1, 7):
        buffers = BufferCollectives(
            comm, Raises(number), [].append, ALGORITHMS[algorithm]
        )
        send, out = np.ones(2000), np.empty(2000)
        kept = [weakref.ref(send), weakref.ref(out)]
        with pytest.raises(InjectedError):
            buffers.allreduce([BufferReduction(send, out, "SUM")])
        del send, out, buffers
        comm.Barrier()  # what is left completes
        assert all(reference() is not None for reference in kept)


@core_by_mpi
@pytest.mark.parametrize("most", [2**31 - 2**20, 512])
@pytest.mark.parametrize("dtype", ["float32", "uint8", "complex128"])
def test_copies(comm, most, dtype):
    buffers = BufferCollectives(comm, Polls(), [].append)
    buffers.most_bytes = most
    rank, size = buffers.rank, buffers.size
    for count in [0, 1, 3, 700]:
        parts = parts_of(size, count, dtype)
        for root in range(size):
            mine = parts[rank].copy()
            buffers.broadcast(mine, root)
            np.testing.assert_array_equal(mine, parts[root])
        for step in (0, 2):
            counts = [count + step * k for k in range(size)]
            parts = [
                (np.arange(n) % 100 + k).astype(dtype) for k, n in enumerate(counts)
            ]
            every = np.concatenate(parts)
            out = np.empty(sum(counts), dtype)
            buffers.all_gather(parts[rank], out, counts)
            np.testing.assert_array_equal(out, every)
            for root in {0, size - 1}:
                is_root = rank == root
                out = np.zeros(sum(counts), dtype)
                buffers.gather(parts[rank], out if is_root else None, counts, root)
                np.testing.assert_array_equal(out, every * is_root)
                mine = np.empty(counts[rank], dtype)
                buffers.scatter(every if is_root else None, mine, counts, root)
                np.testing.assert_array_equal(mine, parts[rank])
        square = np.full((size, count + 1), rank, dtype)
        out = np.empty_like(square)
        buffers.exchange(square, out)
        np.testing.assert_array_equal(out, np.arange(size)[:, None] + 0 * square.real)


# --- headers --------------------------------------------------------------------------


def said_on(comm: Any, kind: str) -> list[dict[str, Any]]:
    """Return what ranks say of themselves, of which one may have an older MPI."""
    mine = between.rank_info()
    mine["persistent"] &= kind == "new" or comm.Get_rank() > 0
    return list(comm.allgather(mine))


class Older:
    """An mpi4py communicator of an MPI without persistent collectives."""

    def __init__(self, comm: Any, raises: bool = False) -> None:
        self._comm, self._raises = comm, raises

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_init"):
            return getattr(self._comm, name)
        if not self._raises:
            raise AttributeError(name)

        def refuses(*_: Any) -> Any:
            raise NotImplementedError(name)

        return refuses


@core_by_mpi
@pytest.mark.parametrize(
    ("raises", "vendor"),
    [
        (False, ("MPI", (3, 0, 0))),
        (True, ("MPI", (3, 0, 0))),
        (None, ("MPICH", (4, 0, 2))),  # whose gather the elements of their first time
        (None, ("Intel MPI", (2021, 18, 1))),
    ],
)
def test_persistent_collectives_that_are_not_used(raises, vendor, monkeypatch):
    from mpi4py import MPI

    comm = MPI.COMM_SELF if raises is None else Older(MPI.COMM_SELF, raises)
    older = SimpleNamespace(COMM_SELF=comm, get_vendor=lambda: vendor)
    monkeypatch.setattr(between, "mpi_module", lambda: older)
    assert not between._has_persistent.__wrapped__()


@core_by_mpi
@needs_core
@pytest.mark.parametrize("few", [8, 0], ids=["rows", "merged"])
@pytest.mark.parametrize("kind", ["new", "old"])
def test_headers_bring_the_payloads_of_all(comm, few, kind, monkeypatch):
    monkeypatch.setattr(between, "FEW", few)
    rank, size = comm.Get_rank(), comm.Get_size()
    headers = between.CoreHeaders(comm, said_on(comm, kind), crowded=True)
    channel = headers.channel
    name = "allreduce" if few == 0 else "allgather"
    if kind == "new" and between._has_persistent():
        name = f"Start of {name.capitalize()}_init"
    else:
        name = f"I{name}"
    assert channel.room == between.ROOM
    want = sum(range(1, size + 1))
    for count in [1, 100, channel.room, 0, 7, *range(16, channel.room, 16)]:
        leaf = ("u1", "SUM", (count,), 0)
        reduce = _native.core.Reduce(channel, [leaf], 0, 5)
        found = np.empty(count, np.uint8)
        mine = np.full(count, rank + 1, np.uint8)
        assert reduce.run(mine, found) == _native.core.OK
        assert set(found.tolist()) == ({want} if count else set())
    assert channel.meet(0, rank, rank, rank, 0, -1) == (
        _native.core.DIFFERENT if size > 1 else _native.core.OK
    )
    assert channel.verdict == (0, int(size == 1), int(size == 1), 0, size - 1)
    assert headers.calls()[name] == channel.headers > 0
    headers.free()


@core_by_mpi
def test_headers_without_the_core(comm, monkeypatch):
    monkeypatch.setattr(_native, "core", None)
    rank, size = comm.Get_rank(), comm.Get_size()
    ranks = communicator.Communicator(comm, CommunicatorWaits(20))
    start, begun = ranks.open_headers(), deque([(0, None)], maxlen=1)
    before = ranks.traffic.total_mpi().get("Iallgather", 0)  # to free what is unused
    for turn in range(20):
        request = start((rank, turn, -turn, 2**62 + rank, -(2**62), 7), begun)
        while not request.Test():
            os.sched_yield()
        assert request.result == [
            [k, turn, -turn, 2**62 + k, -(2**62), 7] for k in range(size)
        ]
    channel = ExchangeChannel(start)
    for turn in range(20):
        assert channel.meet(0, 7, turn, rank, 0, -1) == OK
        assert channel.verdict == (0, 1, 1, 0, size - 1)
    assert ranks.traffic.total_mpi()["Iallgather"] == before + 40
    assert (begun[0][0], channel.headers) == (20, 20)
    channel.start(0, 7, 0, 0, 0, -1)
    with pytest.raises(RuntimeError, match="make the calls of a strategy from one"):
        channel.meet(0, 7, 0, 0, 0, -1)  # as from another thread
    while channel.test() is None:
        os.sched_yield()
    assert channel.meet(0, 7, 0, 0, 0, -1) == OK
    ranks.drop()


@core_by_mpi
def test_a_signal_does_not_come_between_a_header_and_its_count(monkeypatch):
    """Whatever instruction an exception comes at: a restore relies on the count."""
    from mpi4py import MPI

    monkeypatch.setattr(_native, "core", None)
    ranks = communicator.Communicator(MPI.COMM_SELF, CommunicatorWaits(20))
    real, started = ranks._comm, []
    count = SimpleNamespace(
        Iallgather=lambda *x: started.append(0) or real.Iallgather(*x)
    )
    monkeypatch.setattr(ranks, "_comm", count)
    codes = {
        ExchangeChannel.start.__code__,
        communicator.Communicator._start_header.__code__,
    }

    def run_until(last: int) -> bool:
        number, channel = 0, ExchangeChannel(ranks.open_headers())
        started.clear()

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal number
            frame.f_trace_opcodes = frame.f_code in codes
            number += event == "opcode"
            if number == last:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            channel.meet(0, 7, 0, 0, 0, -1)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert channel.headers == len(started)
        return number < last

    instructions = next(filter(run_until, itertools.count(1)))
    assert instructions > 50
    monkeypatch.undo()
    ranks.drop()


@core_by_mpi
def test_many_ranks_let_mpi_merge_their_headers(new_strategy, rank, size, monkeypatch):
    monkeypatch.setattr(between, "FEW", 0)
    strategy = new_strategy(implementation=DIRECT)
    channel = group_of(strategy).guard.channel
    if size == 1:
        assert isinstance(channel, SelfChannel)
    elif _native.available():
        assert channel.merges
    for _ in range(3):
        found = all_reduce(strategy, "MAX", float(rank))
        assert found == max(everywhere(rank))
        mean = all_reduce(strategy, "MEAN", np.arange(4.0) + rank)
        np.testing.assert_array_equal(mean, np.arange(4.0) + (size - 1) / 2)


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


@pytest.mark.mpi(min_size=2)
@core
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    "what", ["variable", "broadcast_to", "result", "collect", "scatter", "message"]
)
def test_no_memory_on_one_rank_is_raised_on_all(
    new_strategy, rank, size, what, who, monkeypatch
):
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


_OWNERS = {"node_id": machine, "urandom": os}


@pytest.mark.mpi(min_size=2)
@core
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("step", ["node_id", "urandom", "peers"])
def test_a_set_up_that_fails_on_one_rank_fails_on_all(size, rank, step, last, comm):

    waits = CommunicatorWaits(20)
    hit = rank == (size - 1 if last else 0)

    def make_one() -> None:
        with pytest.MonkeyPatch.context() as patch:
            if hit and step in _OWNERS:
                fail_after(_OWNERS[step], step, patch)
            made = communicator.Communicator(comm, waits, size)
            made.open_headers()
            if hit:
                fail_after(BufferCollectives, "__init__", patch)
            made.connect_peers()

    error: Exception | None = None
    try:
        make_one()
    except Exception as raised:
        error = raised
    victim = size - 1 if last else 0
    kinds = everywhere(type(error).__name__)
    if step == "peers":
        assert kinds == [
            "InjectedError" if k == victim else "RuntimeError" for k in range(size)
        ]
        told = f"failed on rank {victim}: InjectedError"
    else:
        assert kinds == ["ValueError"] * size
        told = f"rank {victim} cannot take part: InjectedError: {step}"
    if not hit or step != "peers":
        assert told in str(error)
    # What is between the ranks is as it was.
    later = communicator.Communicator(comm, waits)
    assert later.all_gather_integers([rank]) == [[r] for r in range(size)]
