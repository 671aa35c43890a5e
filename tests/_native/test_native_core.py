"""The native core by itself: its ranks are processes that map one file, without MPI."""

from __future__ import annotations

import multiprocessing
import os
import random
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from replicas import rarely

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

    def __init__(self, rank: int, size: int, fd: int, *, crowded: bool) -> None:
        self.rank, self.size = rank, size
        total, _ = core.total_bytes(size, AREA, ARENA)
        self.memory = core.Memory(fd, total)
        self.channel = core.Channel(
            self.memory, size, rank, AREA, ARENA, crowded, 0 if crowded else 2000
        )
        self.pool = core.Pool(self.memory, self.channel.arena(rank), ARENA)


def run(size: int, fn: Callable[[Rank], Any], *, crowded: bool = False) -> list[Any]:
    """Return what ``fn`` returns on each of ``size`` processes."""
    fd = os.memfd_create("mpidist-test")
    total, head = core.total_bytes(size, AREA, ARENA)
    os.ftruncate(fd, total)
    os.posix_fallocate(fd, 0, head)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def child(rank: int) -> None:
        try:
            queue.put((rank, fn(Rank(rank, size, fd, crowded=crowded))))
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


# More ranks by MPI: tests/_collectives.
WAYS = [(1, False), (2, False), (3, True), (20, True)]
LESS = [*WAYS[:3], rarely(20, True)]


@pytest.mark.parametrize(("size", "crowded"), WAYS)
def test_small_nests_travel_with_their_header(size: int, crowded: bool) -> None:
    def body(me: Rank) -> str:
        a = np.arange(10, dtype=np.float32) + me.rank
        b = np.full((3, 2), me.rank, np.int64)
        results = [np.empty_like(a), np.empty_like(b)]
        leaves = [("f4", "SUM", a.shape, 0), ("i8", "MAX", b.shape, 0)]
        reduce = core.Reduce(me.channel, leaves, AREA)
        for _ in range(200):
            assert reduce.eager([a, b], results, 77, 0) == core.OK
            a += 1
        total = size * np.arange(10.0) + sum(range(size)) + 199 * size
        np.testing.assert_array_equal(results[0], total)
        assert (results[1] == size - 1).all()
        return "ok"

    assert run(size, body, crowded=crowded) == ["ok"] * size


@pytest.mark.parametrize("mode", ["placed", "window", "based", "mixed"])
@pytest.mark.parametrize(("size", "crowded"), WAYS[:3])
def test_large_nests_go_in_pieces(size: int, crowded: bool, mode: str) -> None:
    def body(me: Rank) -> str:
        for nbytes in (64, 4096, AREA, 3 * AREA + 4, 40 * AREA):
            count = nbytes // 4
            first = np.random.default_rng(0).integers(0, 99, count).astype("f4")
            x, y = first + me.rank, np.arange(7, dtype=np.int32) + me.rank
            leaves = [("f4", "SUM", x.shape, size), ("i4", "MIN", y.shape, 0)]
            reduce = core.Reduce(me.channel, leaves, AREA)
            sources = [x, y]
            if mode == "based" or (mode == "mixed" and me.rank == 0):
                sources = views(me.pool.take(reduce.nbytes), reduce, count)
                sources[0][:], sources[1][:] = x, y
            for _ in range(3):
                offset, block = core.NOWHERE, np.empty(reduce.nbytes, np.uint8)
                if mode != "window" or me.rank != size - 1:
                    block = me.pool.take(reduce.nbytes)
                    offset = block.offset
                out = views(block, reduce, count)
                assert reduce.shared(sources, out, offset, 99, 0) == core.OK
                total = first.copy()
                for rank in range(1, size):
                    total += first + np.float32(rank)
                np.testing.assert_array_equal(out[0], total / np.float32(size))
                np.testing.assert_array_equal(out[1], np.arange(7))
                np.testing.assert_array_equal(sources[0], x)
                del block, out
            del sources
        assert me.pool.used == 0
        return "ok"

    assert run(size, body, crowded=crowded) == ["ok"] * size


def views(block: Any, reduce: Any, count: int) -> list[Any]:
    first, second = reduce.starts
    return [
        np.ndarray(count, np.float32, block, first),
        np.ndarray(7, np.int32, block, second),
    ]


@pytest.mark.parametrize(("size", "crowded"), WAYS[1:])
def test_messages_come_in_order(size: int, crowded: bool) -> None:
    def body(me: Rank) -> str:
        numbers = random.Random(1)
        for number in range(1000):
            data = bytes([number % 256]) * numbers.randrange(core.MESSAGE_BYTES)
            if me.rank == 0:
                assert me.channel.post(data) == core.OK
            else:
                assert me.channel.take() == data
        return "ok"

    assert run(size, body, crowded=crowded) == ["ok"] * size


@pytest.mark.parametrize(("size", "crowded"), LESS)
def test_gather_of_equal_and_of_other_lengths(size: int, crowded: bool) -> None:
    def rows(rank: int, length: int) -> Any:
        values = np.arange(2 * length * 3, dtype=np.int16).reshape(2, length, 3)
        return values + 100 * rank

    def body(me: Rank) -> str:
        for lengths in ([3] * size, list(range(size))):
            gather = core.Gather(me.channel, [(2, 6)])
            own = rows(me.rank, lengths[me.rank])
            assert (
                gather.meet([own], own.shape[1:2], 3, 0, core.NOWHERE, None) == core.OK
            )
            assert [row[0] for row in gather.lengths()] == lengths
            out = np.empty((2, sum(lengths), 3), np.int16)
            gather.get([out])
            every = [rows(r, n) for r, n in enumerate(lengths)]
            np.testing.assert_array_equal(out, np.concatenate(every, 1))
        data = np.full(5 * AREA + 3, me.rank, np.uint8)
        assert me.channel.broadcast(data, size - 1) == core.OK
        assert (data == size - 1).all()
        return "ok"

    assert run(size, body, crowded=crowded) == ["ok"] * size


@pytest.mark.parametrize(("size", "crowded"), LESS)
def test_large_arrays_are_written_to_the_results_of_all(
    size: int, crowded: bool
) -> None:
    """As if lengths were equal; where they are not, after another header."""
    rows = core.EAGER_BYTES // 24 + 1

    def body(me: Rank) -> str:
        gather = core.Gather(me.channel, [(2, 12), (1, 8)])
        for lengths in ([rows] * size, [rows + r for r in range(size)]):
            mine = lengths[me.rank], me.rank * (lengths[0] != lengths[-1])
            arrays = [
                np.full((2, mine[0], 3), me.rank, np.float32),
                np.full(mine[1], me.rank, np.int64),
            ]
            assert not gather.fits(mine)
            slot = me.pool.take(gather.layout(tuple(n * size for n in mine))[-1])
            at = slot.offset
            assert gather.meet([x.T for x in arrays], mine, 3, 0, at, None) is None
            assert gather.meet(arrays, mine, 3, 0, at, None) == core.OK
            assert gather.totals() is None
            totals = tuple(map(sum, zip(*gather.lengths(), strict=True)))
            assert totals[0] == sum(lengths)
            starts = gather.layout(totals)
            if me.channel.verdict[2] == 0:
                slot = me.pool.take(starts[-1])
                assert me.channel.meet(0, 4, 0, 0, 0, slot.offset) == core.OK
                assert gather.spread(arrays) == core.OK
            x = np.ndarray((2, totals[0], 3), np.float32, slot, starts[0])
            for row in x:
                np.testing.assert_array_equal(
                    row[:, 1], np.repeat(range(size), lengths)
                )
            y = np.ndarray(totals[1], np.int64, slot, starts[1])
            counts = [k * (lengths[0] != lengths[-1]) for k in range(size)]
            np.testing.assert_array_equal(y, np.repeat(range(size), counts))
            with pytest.raises(TypeError, match=r"leaf 1 has .* bytes, expected"):
                gather.meet([arrays[0], np.ones(99)], mine, 3, 0, at, None)
        return "ok"

    assert run(size, body, crowded=crowded) == ["ok"] * size


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
                lambda: gather.layout((4 * rows,)),
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
        assert len(refused) >= 4 or me.rank
        np.testing.assert_array_equal(result, np.repeat([0, 1, 77], rows))
        return "ok"

    assert run(2, body) == ["ok"] * 2


@pytest.mark.parametrize(("size", "crowded"), WAYS[1:])
def test_a_call_that_differs_is_a_value_on_all_ranks(size: int, crowded: bool) -> None:
    def body(me: Rank) -> str:
        last = me.rank == size - 1
        x, out = np.ones(3), np.zeros(3)
        reduce = core.Reduce(me.channel, [("f8", "SUM", (3,), 0)], AREA)
        assert reduce.eager(x, out, 5 + last, 0) == core.DIFFERENT
        assert (out == 0).all()
        assert me.channel.verdict[:2] == (0, 0)
        assert me.channel.meet(int(last), 5, 0, 0, 0, -1) == core.DIFFERENT
        assert me.channel.verdict[:2] == (1, 1)
        assert me.channel.meet(0, 5, int(last), me.rank, 0, -1) == core.OK
        assert me.channel.verdict == (0, 1, 0, 0, size - 1)
        assert reduce.eager(x, out, 5, 0) == core.OK
        assert (out == size).all()
        return "ok"

    assert run(size, body, crowded=crowded) == ["ok"] * size


@pytest.mark.parametrize(("size", "crowded"), LESS[1:])
def test_who_waits_for_a_rank_that_leaves_is_told(size: int, crowded: bool) -> None:
    def body(me: Rank) -> str:
        reduce = core.Reduce(me.channel, [("f8", "SUM", (3,), 0)], AREA)
        if me.rank == size - 1:
            me.channel.leave()
            return "ok"
        status = reduce.eager(np.ones(3), np.zeros(3), 5, 0)
        assert (status, me.channel.who) == (core.LEFT, size - 1)
        return "ok"

    assert run(size, body, crowded=crowded) == ["ok"] * size


def test_pause_may_end_a_wait() -> None:
    def body(me: Rank) -> str:
        if me.rank == 1:
            return "ok"
        waited: list[float] = []

        def pause(seconds: float) -> None:
            waited.append(seconds)
            if len(waited) == 3:
                raise TimeoutError(f"missing: {me.channel.missing()}")

        me.channel.pause = pause
        with pytest.raises(TimeoutError, match=r"missing: \[1\]"):
            me.channel.meet(0, 1, 0, 0, 0, -1)
        assert waited == sorted(waited)
        return "ok"

    assert run(2, body) == ["ok"] * 2


def test_a_late_rank_makes_all_meet_again() -> None:
    waited = multiprocessing.get_context("fork").Event()

    def pause(seconds: float) -> None:
        if seconds > 0.1:  # its time-out
            waited.set()

    def body(me: Rank) -> str:
        assert me.channel.meet(0, 1, 0, 0, 0, -1) == core.OK
        if me.rank == 1:
            me.channel.pause = pause
        else:
            assert waited.wait(60)
        assert me.channel.meet(0, 1, 0, 0, 100, -1) == core.AGAIN
        assert me.channel.meet(0, 1, 0, 0, 100_000, -1) == core.OK
        return "ok"

    assert run(2, body) == ["ok"] * 2


def test_arrays_that_are_not_as_expected_are_refused_unsent() -> None:
    def body(me: Rank) -> str:
        reduce = core.Reduce(me.channel, [("f8", "SUM", (3,), 0)], AREA)
        out = np.zeros(3)
        raw = np.zeros(25, np.uint8)[1:].view(np.float64)
        others = np.ones(3, "f4"), np.ones(3, "i8"), np.ones((3, 1)), np.ones(4)
        for x in (np.ones(6)[::2], raw, *others):
            assert reduce.eager(x, out, 5, 0) is None
            assert reduce.shared(x, out, -1, 5, 0) is None
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
        assert (plan.ended, gather.totals()) == ([core.OK], None)
        assert (state.sequence, me.channel.gathers) == (4, 5)
        sizes = sum(length + me.rank for length in range(4)) + x.shape[1]
        assert me.channel.gathered == 48 * sizes
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


def test_a_plan_ends_calls_that_did_not_simply_end() -> None:
    def body(me: Rank) -> str:
        entry, state, plan = all_reduce_of(me, (4,))
        x = np.ones(4, np.float32)
        if me.rank:  # another call than the other rank's, then none
            me.channel.meet(0, 5, 0, 0, 1000, -1)
            me.channel.leave()
            return "ok"
        assert entry("SUM", x) == "concluded"
        assert plan.ended == [core.DIFFERENT]
        assert state.sequence == 0
        assert entry("SUM", x) == "concluded"
        assert plan.ended[1:] == [core.LEFT]
        return "ok"

    assert run(2, body) == ["ok", "ok"]


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
