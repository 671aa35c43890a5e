"""What callers of the native core rely on: ranks are processes that map one file.

Its ways of moving data, and its waits, are in tests/_native/stress.c under sanitizers,
and below the calls of tests/_collectives with MPI.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpidist._native import core

pytestmark = [
    pytest.mark.skipif(core is None, reason="the native core is not built"),
    # Of the thread of pytest-timeout, in the children of these tests.
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]

AREA = 64 * 1024
ARENA = 32 * 2**20


class Rank:
    """One process's view of the memory."""

    def __init__(self, rank: int, size: int, fd: int) -> None:
        self.rank, self.size = rank, size
        total, head = core.total_bytes(size, AREA, ARENA)
        self.memory = core.Memory(fd, total)
        self.channel = core.Channel(self.memory, size, rank, AREA, ARENA, False, 2000)
        self.pool = core.Pool(self.memory, head + rank * ARENA, ARENA)


def run(size: int, fn: Callable[[Rank], Any]) -> list[Any]:
    """Return what ``fn`` returns on each of ``size`` processes."""
    fd = os.memfd_create("mpidist-test")
    total, head = core.total_bytes(size, AREA, ARENA)
    os.ftruncate(fd, total)
    os.posix_fallocate(fd, 0, head)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def child(rank: int) -> None:
        try:
            queue.put((rank, fn(Rank(rank, size, fd))))
        except BaseException:
            queue.put((rank, traceback.format_exc()))

    processes = [context.Process(target=child, args=(r,)) for r in range(size)]
    for process in processes:
        process.start()
    results = dict(queue.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    os.close(fd)
    return [results[rank] for rank in range(size)]


def test_a_gather_that_waits_is_not_changed_by_another_call() -> None:
    """Such as that of another thread, or of a signal handler: it has other lengths."""
    tried = multiprocessing.get_context("fork").Event()
    rows = core.EAGER_BYTES

    def body(me: Rank) -> str:
        gather = core.Gather(me.channel, [(1, 1)])
        x = np.full(rows, me.rank, np.uint8)
        slot = me.pool.take(3 * rows)
        result = np.ndarray(3 * rows, np.uint8, slot)
        result[:] = 77
        refused: list[object] = []

        def pause(seconds: float) -> None:
            y = np.full(2 * rows, 99, np.uint8)
            for call in (
                lambda: gather.fits((2 * rows,)),
                lambda: gather.meet([y], (2 * rows,), 3, 0, slot.offset, None),
                lambda: gather.spread([x]),
            ):
                with pytest.raises(RuntimeError, match="in a collective call of this"):
                    call()
                refused.append(call)
            tried.set()

        if me.rank == 0:
            me.channel.pause = pause
        else:
            assert tried.wait(60)
        assert gather.meet([x], (rows,), 3, 0, slot.offset, None) == core.OK
        assert len(refused) >= 3 or me.rank
        np.testing.assert_array_equal(result, np.repeat([0, 1, 77], rows))
        return "ok"

    assert run(2, body) == ["ok"] * 2


def test_arrays_that_are_not_as_expected_are_refused_unsent() -> None:
    def body(me: Rank) -> str:
        leaf = ("f8", "SUM", (3,), 0)
        reductions = [core.Reduce(me.channel, [leaf], size) for size in (0, AREA)]
        out = np.zeros(3)
        raw = np.zeros(25, np.uint8)[1:].view(np.float64)
        others = np.ones(3, "f4"), np.ones(3, "i8"), np.ones((3, 1)), np.ones(4)
        for x in (np.ones(6)[::2], raw, *others):
            for reduce in reductions:
                assert reduce.run(x, out, -1, 5, 0) is None
        assert me.channel.headers == 0
        return "ok"

    assert run(1, body) == ["ok"]


class Plan:
    """Notes how calls ended that `ArrayCall` does not end itself."""

    def __init__(self) -> None:
        self.ended: list[object] = []

    def concluded(self, status: int, x: Any, result: Any) -> str:
        self.ended.append(status)
        return "concluded"

    def interrupted(self, error: BaseException) -> None:
        self.ended.append(error)
        raise KeyError("from the plan") from error


def all_reduce_of(me: Rank, shape: tuple[int, ...]) -> tuple[Any, Any, Plan]:
    """Return an `ArrayCall` with one plan, its state, and the plan."""
    state, plan = core.CallState(), Plan()
    state.call = state.previous_call = "earlier"
    state.timeout, state.timeout_seconds = 1.0, 7.0
    reduce = core.Reduce(me.channel, [("f4", "SUM", shape, 0)], AREA, 99, 60_000)
    entry = core.ArrayCall(state, lambda *args, **names: ("other", args, names), 1)
    entry.keep("SUM", np.empty(shape, np.float32), reduce, "this", plan)
    return entry, state, plan


def test_a_small_array_is_reduced_without_python() -> None:
    def body(me: Rank) -> str:
        entry, state, plan = all_reduce_of(me, (2, 3))
        x = np.full((2, 3), me.rank + 1, np.float32)
        for options in ((), (None,)):
            found = entry("SUM", x, *options)
            assert found.tolist() == [[3] * 3] * 2
            assert found.dtype == np.float32
        assert (state.sequence, state.call) == (2, "this")
        assert state.previous_call == "this"
        assert (state.timeout, plan.ended, me.channel.headers) == (7.0, [], 2)
        return "ok"

    assert run(2, body) == ["ok", "ok"]


def test_other_calls_are_for_python() -> None:
    def body(me: Rank) -> str:
        entry, state, _ = all_reduce_of(me, (2, 3))
        x = np.zeros((2, 3), np.float32)
        read_only = x.copy()
        read_only.flags.writeable = False
        assert entry("SUM", read_only).shape == (2, 3)
        raw = np.zeros(28, np.uint8)[1:25].view(np.float32).reshape(2, 3)
        others = (
            x.astype(np.float64),
            x.astype(">f4"),
            x.reshape(3, 2),
            x.reshape(6),
            x.reshape(1, 1, 2, 3, 1),
            np.asfortranarray(x),
            np.zeros((2, 6), np.float32)[:, ::2],
            raw,
            x.view(np.recarray),
            x.tolist(),
            1.0,
        )
        for other in others:
            kind, (op, same), names = entry("SUM", other)
            assert (kind, op, names) == ("other", "SUM", {})
            assert same is other
        assert entry("MAX", x)[0] == "other"
        assert entry("SUM", x, "options") == ("other", ("SUM", x, "options"), {})
        assert entry("SUM", x, call="call")[2] == {"call": "call"}
        assert entry()[1] == ()
        state.blocked = True
        assert entry("SUM", x)[0] == "other"
        state.blocked = False
        assert entry("SUM", x).shape == (2, 3)
        entry.forget()
        assert entry("SUM", x)[0] == "other"
        assert (state.sequence, me.channel.headers) == (2, 2)
        return "ok"

    assert run(1, body) == ["ok"]


def test_a_small_array_is_gathered_without_python() -> None:
    def body(me: Rank) -> str:
        state, plan = core.CallState(), Plan()
        state.call = state.timeout = state.timeout_seconds = 1
        other = "other"
        entry = core.ArrayCall(state, lambda *args: other, 0)
        assert entry(np.zeros(3), 0) == other
        gather = core.Gather(me.channel, [(2, 24)], 7, 60_000)
        for length in (0, 1, 2, 3):  # of rank 0, with more on each rank after it
            n = length + me.rank
            x = np.full((2, n, 3), 10.0 * me.rank + length)
            entry.keep(1, x, gather, "this", plan, 1)
            found = entry(x, 1)
            parts = [np.full((2, length + r, 3), 10.0 * r + length) for r in (0, 1)]
            np.testing.assert_array_equal(found, np.concatenate(parts, axis=1))
            assert entry(x, 0) == entry(x.T, 1) == other
        many = core.EAGER_BYTES // 48 + 1
        x = np.zeros((2, many if me.rank else 1, 3))
        entry.keep(1, x, gather, "this", plan, 1)
        assert entry(x, 1) == "concluded"
        assert (plan.ended, me.channel.verdict[4]) == ([core.OK], 1)
        assert state.sequence == 4
        assert me.channel.gathers == 4  # of the last no data has moved
        assert me.channel.gathered == 48 * sum(n + me.rank for n in range(4))
        for wrong in ((np.zeros(3), 1), (np.zeros((2, 2)), -1)):
            with pytest.raises(ValueError, match="keep: not a plan of such an array"):
                entry.keep(1, wrong[0], gather, "this", plan, wrong[1])
        return "ok"

    assert run(2, body) == ["ok", "ok"]


def test_its_table_holds_the_latest_of_many_plans() -> None:
    def body(me: Rank) -> str:
        entry, _, plan = all_reduce_of(me, (1,))
        for n in range(2000):
            reduce = core.Reduce(me.channel, [("f4", "SUM", (n,), 0)], AREA, n, 60_000)
            entry.keep("SUM", np.empty(n, np.float32), reduce, f"call {n}", plan)
            assert entry("SUM", np.ones(n, np.float32)).shape == (n,)
        found = [entry("SUM", np.ones(n, np.float32)) for n in range(2000)]
        kept = [x for x in found if isinstance(x, np.ndarray)]
        assert 128 <= len(kept) <= 256
        return "ok"

    assert run(1, body) == ["ok"]


def test_a_plan_gets_what_a_wait_has_raised() -> None:
    def body(me: Rank) -> str:
        entry, state, plan = all_reduce_of(me, (4,))
        if me.rank:
            return "ok"

        def pause(seconds: float) -> None:
            raise TimeoutError(f"{seconds > 0}")

        me.channel.pause = pause
        with pytest.raises(KeyError, match="from the plan") as found:
            entry("SUM", np.ones(4, np.float32))
        assert plan.ended == [found.value.__cause__]
        assert isinstance(plan.ended[0], TimeoutError)
        assert state.sequence == 0
        return "ok"

    assert run(2, body) == ["ok", "ok"]


def test_pool_gives_memory_out_again_and_joins_it() -> None:
    memory = core.Memory(-1, 2**20)
    pool = core.Pool(memory, 0, 2**20)
    blocks = [pool.take(10_000) for _ in range(20)]
    assert len({block.offset for block in blocks}) == 20
    arrays = [np.frombuffer(block, np.uint8) for block in blocks]
    for number, array in enumerate(arrays):
        array[:] = number
    assert all((array == k).all() for k, array in enumerate(arrays))
    offset = blocks[3].offset
    del blocks[3], arrays[3], array
    assert pool.take(9_000).offset == offset
    del blocks, arrays
    assert pool.used == 0
    assert pool.take(2**20 - 4096) is not None
    assert pool.take(2**21) is None


def test_pool_keeps_every_hole() -> None:
    pool = core.Pool(core.Memory(-1, 2**20), 0, 2**20)
    blocks = [pool.take(4000) for _ in range(100)]
    del blocks[::2]
    del blocks
    assert pool.used == 0
    assert pool.take(2**20 - 4096) is not None


def test_no_room_is_none(tmp_path: Any) -> None:
    with open(tmp_path / "memory", "wb+") as file:
        file.truncate(2**40)
        memory = core.Memory(file.fileno(), 2**40)
        pool = core.Pool(memory, 0, 2**40)
        assert pool.take(2**20) is not None
