"""Headers as messages, by the core itself; the messages are those of a test."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpidist._native import core

pytestmark = pytest.mark.skipif(core is None, reason="the native core is not built")

HEAD, ROOM = 64, 128


class Net:
    """Rows of several ranks in one process, and what is on its way between them."""

    def __init__(self, size: int, tests: int = 4) -> None:
        self.rows = [np.zeros((size, HEAD + ROOM), np.uint8) for _ in range(size)]
        self.inbox: dict[tuple[int, int], list[bytes]] = {}
        self.prepared: list[list[int]] = [[] for _ in range(size)]
        self.ranks = [self._open(r, size, tests) for r in range(size)]

    def _open(self, rank: int, size: int, tests: int) -> Any:
        others = [k for k in range(size) if k != rank]
        mine = self.rows[rank]
        calls: dict[int, Any] = {}

        def prepare(nbytes: int) -> Any:
            self.prepared[rank].append(nbytes)

            def send(other: int) -> None:
                data = mine[rank, : HEAD + nbytes].tobytes()
                self.inbox.setdefault((rank, other), []).append(data)

            def receive(other: int) -> bool:
                sent = self.inbox.get((other, rank))
                if not sent:
                    return False
                data = sent.pop(0)
                mine[other, : len(data)] = np.frombuffer(data, np.uint8)
                return True

            starts = tuple((lambda k=k: send(k)) for k in others)
            calls[nbytes] = starts, tuple((lambda k=k: receive(k)) for k in others)
            return calls[nbytes]

        return core.Rows(mine, rank, size, tests, calls, prepare)


def header(fingerprint: int, **words: int) -> tuple[int, ...]:
    flag, value = words.get("flag", 0), words.get("value", 0)
    largest, patience = words.get("largest", 0), words.get("patience", 0)
    return (flag, fingerprint, value, largest, patience, core.NOWHERE)


def meet(net: Net, *headers: tuple[int, ...]) -> list[Any]:
    """Exchange the headers of all ranks; return each rank's status."""
    for rank, words in zip(net.ranks, headers, strict=True):
        rank.start(*words)
    return [rank.test() for rank in net.ranks]


def test_what_headers_say() -> None:
    net = Net(3)
    same = header(7)
    assert meet(net, same, same, same) == [core.OK] * 3
    assert net.ranks[1].verdict == (0, 1, 1, 0, 0)
    last = header(7, value=3, largest=9)
    assert meet(net, same, same, last) == [core.OK] * 3
    assert {rank.verdict for rank in net.ranks} == {(0, 1, 0, 0, 9)}
    assert meet(net, same, header(8), same) == [core.DIFFERENT] * 3
    assert meet(net, same, same, header(7, flag=1)) == [core.DIFFERENT] * 3
    assert {rank.verdict for rank in net.ranks} == {(1, 1, 1, 0, 0)}
    assert [rank.headers for rank in net.ranks] == [4, 4, 4]
    assert net.prepared == [[0]] * 3
    assert (net.ranks[0].missing(), net.ranks[0].who) == ([], -1)


def test_a_late_rank_is_noticed_by_all() -> None:
    net = Net(2)
    time.sleep(0.03)
    patient = header(7, patience=20)
    assert meet(net, header(7), patient) == [core.AGAIN] * 2
    assert meet(net, header(7, patience=60_000), header(7)) == [core.OK] * 2
    assert net.ranks[0].lateness < 60


def test_a_header_that_is_not_complete() -> None:
    net = Net(2)
    net.ranks[0].start(*header(7))
    assert net.ranks[0].test() is None
    assert net.ranks[0].Test() is False
    with pytest.raises(RuntimeError, match="abandoned"):
        net.ranks[0].start(*header(7))
    net.ranks[1].start(*header(7))
    assert net.ranks[0].Test() is True
    assert net.ranks[0].test() == core.OK


def in_threads(net: Net, body: Callable[[int], Any]) -> list[Any]:
    """Return what ``body`` returns for each rank, each in a thread."""
    found: list[Any] = [None] * len(net.ranks)

    def run(rank: int) -> None:
        found[rank] = body(rank)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(len(net.ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


LEAVES = [
    ("f4", "SUM", (3,), 0),
    ("bf2", "MAX", (1,), 0),
    ("f2", "SUM", (2, 2), 3),
    ("i8", "PROD", (), 0),
]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_nest_travels_with_its_header(size: int) -> None:
    net = Net(size)

    def body(rank: int) -> tuple[bytes, ...]:
        arrays = [
            np.arange(3, dtype=np.float32) + np.float32(0.1) * rank,
            np.array([rank + 1], np.uint16),
            np.full((2, 2), 2048 + 2 * rank, np.float16),
            np.array(rank + 2),
        ]
        reduce = core.RowReduce(net.ranks[rank], LEAVES, 5, 0)
        for _ in range(20):
            results = [np.empty_like(x) for x in arrays]
            assert reduce.eager(arrays, results) == core.OK
        assert reduce.eager(arrays[:1], results) is None
        assert reduce.eager([*arrays[:3], np.ones(1)], results) is None
        return tuple(x.tobytes() for x in results)

    found = in_threads(net, body)
    assert {*found} == {found[0]}
    first = np.zeros(3, np.float32)
    for rank in range(size):
        first = first + (np.arange(3, dtype=np.float32) + np.float32(0.1) * rank)
    np.testing.assert_array_equal(np.frombuffer(found[0][0], np.float32), first)
    total = sum(2048 + 2 * rank for rank in range(size)) / 3
    assert set(np.frombuffer(found[0][2], np.float16)) == {np.float16(total)}
    assert np.frombuffer(found[0][3], int) == [np.prod(np.arange(size) + 2)]
    for rank in net.ranks:
        assert (rank.reductions, rank.reduced) == (20, 20 * (12 + 2 + 8 + 8))
        assert (rank.gathers, rank.gathered) == (0, 0)
        assert rank.seconds > 0
    assert net.prepared == [[64]] * size  # each leaf at a multiple of 16


def test_a_small_array_is_reduced_without_python() -> None:
    net = Net(2)

    ended: list[object] = []

    class Plan:
        def concluded(self, status: int, x: Any, result: Any) -> Any:
            ended.append(status)
            return result

        def interrupted(self, error: BaseException) -> None:
            ended.append(error)
            raise KeyError("from the plan") from error

    def body(rank: int) -> Any:
        state = core.CallState()
        x = np.full(2, rank + 1.0)
        entry = core.ArrayCall(state, lambda *_: "other", 1)
        reduce = core.RowReduce(net.ranks[rank], [("f8", "SUM", (2,), 0)], 99, 0)
        entry.keep("SUM", x, reduce, "this", Plan())
        found = [entry("SUM", x).tolist() for _ in range(3)]
        other = core.RowReduce(net.ranks[rank], [("f8", "SUM", (2,), 0)], rank, 0)
        entry.keep("SUM", x, other, "this", Plan())
        entry("SUM", x)
        return found, state.sequence

    assert in_threads(net, body) == [([[3, 3]] * 3, 3)] * 2
    assert ended == [core.DIFFERENT] * 2


def test_what_does_not_fit_is_refused() -> None:
    rows = Net(2).ranks[0]
    assert rows.room == ROOM
    with pytest.raises(ValueError, match="do not fit a row"):
        core.RowReduce(rows, [("f8", "SUM", (ROOM // 8 + 1,), 0)])
    with pytest.raises(ValueError, match="no kernel"):
        core.RowReduce(rows, [("c8", "MIN", (1,), 0)])
    again = core.RowReduce(rows, [("f8", "SUM", (1,), 0)])
    with pytest.raises(RuntimeError, match="already"):
        again.__init__(rows, [("f8", "SUM", (1,), 0)])
    with pytest.raises(RuntimeError, match="already"):
        rows.__init__(np.zeros(256, np.uint8), 0, 1, 4, {}, print)
    for size, rank, nbytes in [(0, 0, 256), (2, 2, 256), (2, -1, 256), (2, 0, 64)]:
        with pytest.raises(ValueError, match="memory"):
            core.Rows(np.zeros(nbytes, np.uint8), rank, size, 4, {}, print)
    empty = core.Rows.__new__(core.Rows)
    with pytest.raises(RuntimeError, match="not open"):
        empty.meet(*header(1))
    bare = core.RowReduce.__new__(core.RowReduce)
    with pytest.raises((RuntimeError, ValueError)):
        bare.eager([], [], 1, 1)


def test_an_exception_of_one_message_starts_the_others() -> None:
    started: list[int] = []

    def start(k: int) -> None:
        started.append(k)
        if k != 1:
            raise OSError(k)

    calls = tuple((lambda k=k: start(k)) for k in range(3)), ()
    rows = core.Rows(np.zeros((1, 192), np.uint8), 0, 1, 4, {0: calls}, None)
    with pytest.raises(OSError, match="0"):
        rows.meet(*header(1))
    assert (started, rows.headers) == ([0, 1, 2], 1)
    with pytest.raises(RuntimeError, match="abandoned"):
        rows.meet(*header(1))


def test_nothing_is_counted_if_messages_cannot_be_made() -> None:
    def prepare(nbytes: int) -> None:
        raise MemoryError(nbytes)

    rows = core.Rows(np.zeros((1, 192), np.uint8), 0, 1, 4, {}, prepare)
    for _ in range(2):
        with pytest.raises(MemoryError):
            rows.meet(*header(1))
    assert rows.headers == 0
    rows = core.Rows(np.zeros((1, 192), np.uint8), 0, 1, 4, {}, lambda _: ([], ()))
    with pytest.raises(TypeError):
        rows.meet(*header(1))


def never(log: list[str]) -> Any:
    """Return rows that never come, and what holds their memory."""
    memory = np.zeros((1, 192), np.uint8)

    def test() -> bool:
        log.append("test")
        return False

    return core.Rows(memory, 0, 1, 4, {0: ((), (test,))}, None), memory


def test_what_is_abandoned_is_not_freed() -> None:
    log: list[str] = []
    rows, memory = never(log)

    def give_up(rows: Any) -> None:
        with pytest.raises(RuntimeError, match="one thread"):
            rows.meet(*header(1))
        reduce = core.RowReduce(rows, [("f8", "SUM", (), 0)])
        with pytest.raises(RuntimeError, match="one thread"):
            reduce.eager(np.ones(()), np.ones(()))
        raise KeyboardInterrupt

    rows.wait = give_up
    before = sys.getrefcount(memory)
    with pytest.raises(KeyboardInterrupt):
        rows.meet(*header(1))
    assert len(log) > 4
    del rows
    assert sys.getrefcount(memory) == before


def test_what_is_complete_is_freed() -> None:
    calls = {0: ((), (lambda: True,))}
    memory = np.zeros((1, 192), np.uint8)
    before = sys.getrefcount(memory), sys.getrefcount(calls)
    rows = core.Rows(memory, 0, 1, 4, calls, None)
    rows.wait = rows.pause = print
    assert rows.meet(*header(1)) == core.OK
    del rows
    assert (sys.getrefcount(memory), sys.getrefcount(calls)) == before


def test_a_wait_that_does_not_wait() -> None:
    rows, _ = never([])
    rows.wait = lambda _: None
    with pytest.raises(RuntimeError, match="has not waited"):
        rows.meet(*header(1))


def test_a_signal_ends_a_wait_without_python() -> None:
    rows, _ = never([])

    def handler(*_: object) -> None:
        raise InterruptedError("the signal")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptedError, match="the signal"):
            rows.meet(*header(1))
    finally:
        signal.signal(signal.SIGALRM, before)
