"""Headers by collectives of MPI, started by the core; a test plays MPI.

Here are its errors, what is abandoned, and what does not fit. Payloads and data that
move are with a real MPI: tests/_mpi/test_buffers, tests/_collectives.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
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
_OTHER_CALL = 2  # of the flags, the first 4 bytes of a header
ELEMENT = HEAD + ROOM

_WORD = ctypes.c_ssize_t
_POINTER = ctypes.c_void_p
_START = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER)
_TEST = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.POINTER(ctypes.c_int), _POINTER)
_IALLREDUCE = ctypes.CFUNCTYPE(
    ctypes.c_int, _POINTER, _POINTER, ctypes.c_int, _WORD, _WORD, _WORD, _POINTER
)
_IALLGATHER = ctypes.CFUNCTYPE(
    ctypes.c_int, _POINTER, ctypes.c_int, _WORD, _POINTER, ctypes.c_int, _WORD, _WORD,
    _POINTER,
)  # fmt: skip
_OP = ctypes.CFUNCTYPE(None, _POINTER, _POINTER, ctypes.POINTER(ctypes.c_int), _POINTER)
_keys = itertools.count(10**9)

# Handles of MPI, as the test has them.
BYTE, ELEMENT_TYPE, MERGE = 7, 8, 9
ITEMSIZES = {21: 4, 22: 8}
COMM_OF_RANK_0 = 100


class MPIError(Exception):
    """What is raised of an error code of MPI."""


def aligned(nbytes: int) -> Any:
    memory = np.zeros(nbytes + HEAD, np.uint8)
    start = -memory.ctypes.data % HEAD
    return memory[start : start + nbytes]


@dataclasses.dataclass
class Collective:
    """One collective of all ranks: what was sent, and where results go."""

    combine: Callable[[list[bytes]], bytes]
    sent: dict[int, bytes] = dataclasses.field(default_factory=dict)
    targets: list[int] = dataclasses.field(default_factory=list)
    done: bool = False


class World:
    """Ranks in one process, and the functions of MPI that they call.

    Args:
        size: the number of ranks.
        merges: whether the headers are merged.
        persistent: whether MPI has persistent collectives.
        tests: of a `Between`.
    """

    def __init__(
        self,
        size: int,
        merges: bool = False,
        *,
        persistent: bool = True,
        tests: int = 4,
    ) -> None:
        self.size, self.merges = size, merges
        self.code = 0  # what MPI's functions return
        self.code_of_data = 0  # those that move data
        self.held: set[int] = set()  # ranks whose requests do not complete
        self.tests = 0
        self._lock = threading.Lock()
        self._collectives: list[Collective] = []
        self._begun = [0] * size  # by each rank
        self._numbers: dict[int, int] = {}  # of the collective of a request
        self._new_request = itertools.count(1000)
        self.functions = (
            _START(self._start),
            _TEST(self._test),
            _IALLREDUCE(self._iallreduce),
            _IALLGATHER(self._iallgather),
        )
        self._merge = _OP(core.merge_function())
        self.key = next(_keys)
        rows = 1 if merges else size
        self.sent = [aligned(ELEMENT) for _ in range(size)]
        self.received = [aligned(rows * ELEMENT) for _ in range(size)]
        self.requests = [_WORD(r + 1) for r in range(size)]
        self.persistent = persistent
        self.owner = object()
        self.ranks = [self.open(r, tests) for r in range(size)]

    def open(self, rank: int, tests: int = 4) -> Any:
        cell = self.requests[rank]
        return core.Between(
            self.sent[rank],
            self.received[rank],
            rank,
            self.size,
            (tests, 4),
            self.key,
            ctypes.addressof(cell) if self.persistent else 0,
            0,
            tuple(ctypes.cast(f, _POINTER).value or 0 for f in self.functions),
            (COMM_OF_RANK_0 + rank, BYTE, ELEMENT_TYPE, MERGE),
            ctypes.addressof,
            self._fail,
            self.owner,
        )

    @staticmethod
    def _fail(code: int) -> None:
        raise MPIError(code)

    # --- MPI's functions ----------------------------------------------------------

    def _start(self, request: int) -> int:
        if not self.code:
            self._send_header(_WORD.from_address(request).value - 1)
        return self.code

    def _send_header(self, rank: int) -> None:
        combine = self._merged if self.merges else b"".join
        target = self.received[rank].ctypes.data
        self._post(rank, self.sent[rank].tobytes(), target, combine, rank + 1)

    def _test(self, request: int, done: Any, status: int) -> int:
        value = _WORD.from_address(request).value
        with self._lock:
            self.tests += 1
            collective = self._collectives[self._numbers[value]]
            done[0] = int(collective.done and not self.held)
        return self.code

    def _iallreduce(
        self, send: int, receive: int, count: int, dtype: int, op: int, comm: int,
        request: int,
    ) -> int:  # fmt: skip
        if (dtype, op) == (ELEMENT_TYPE, MERGE):
            assert (self.merges, count) == (True, 1)
            return self._begin(comm, request)
        nbytes = count * ITEMSIZES[dtype]
        return self._move(comm, send, receive, nbytes, request)

    def _iallgather(
        self, send: int, count: int, byte: int, receive: int, _: int, byte_too: int,
        comm: int, request: int,
    ) -> int:  # fmt: skip
        if byte == ELEMENT_TYPE:
            assert (self.merges, count) == (False, 1)
            return self._begin(comm, request)
        return self._move(comm, send, receive, count, request)

    def _begin(self, comm: int, request: int) -> int:
        if not self.code:
            rank = comm - COMM_OF_RANK_0
            _WORD.from_address(request).value = rank + 1
            self._send_header(rank)
        return self.code

    def _move(
        self, comm: int, send: int, receive: int, nbytes: int, request: int
    ) -> int:
        if not self.code_of_data:
            rank = comm - COMM_OF_RANK_0
            self._post_data(rank, send, receive, nbytes, b"".join, request)
        return self.code_of_data

    def _post_data(
        self, rank: int, send: int, receive: int, nbytes: int, combine: Any, where: int
    ) -> None:
        value = next(self._new_request)
        _WORD.from_address(where).value = value
        self._post(rank, ctypes.string_at(send, nbytes), receive, combine, value)

    def _post(
        self, rank: int, data: bytes, target: int, combine: Any, request: int
    ) -> None:
        with self._lock:
            number = self._begun[rank]
            self._begun[rank] += 1
            if number == len(self._collectives):
                self._collectives.append(Collective(combine))
            collective = self._collectives[number]
            self._numbers[request] = number
            collective.sent[rank] = data
            collective.targets.append(target)
            if len(collective.sent) < self.size:
                return
            result = combine([collective.sent[r] for r in range(self.size)])
            for address in collective.targets:
                ctypes.memmove(address, result, len(result))
            collective.done = True

    def _merged(self, elements: list[bytes]) -> bytes:
        """Merge as MPI does: the lower ranks are on the left."""
        total = ctypes.create_string_buffer(elements[0], ELEMENT)
        for element in elements[1:]:
            following = ctypes.create_string_buffer(element, ELEMENT)
            self._merge(
                ctypes.addressof(total),
                ctypes.addressof(following),
                ctypes.c_int(1),
                None,
            )
            total = following
        return total.raw


both_ways = pytest.mark.parametrize("merges", [False, True], ids=["rows", "merged"])


def header(fingerprint: int, **words: int) -> tuple[int, ...]:
    flag, value = words.get("flag", 0), words.get("value", 0)
    largest, timeout = words.get("largest", 0), words.get("timeout", 0)
    return (flag, fingerprint, value, largest, timeout, core.NOWHERE)


def meet(world: World, *headers: tuple[int, ...]) -> list[Any]:
    """Exchange the headers of all ranks; return each rank's status."""
    for rank, words in zip(world.ranks, headers, strict=True):
        rank.start(*words)
    return [rank.test() for rank in world.ranks]


@both_ways
@pytest.mark.parametrize("persistent", [True, False])
def test_what_headers_say(merges: bool, persistent: bool) -> None:
    world = World(3, merges, persistent=persistent)
    same = header(7)
    assert meet(world, same, same, same) == [core.OK] * 3
    assert world.ranks[1].verdict == (0, 1, 1, 0, 0)
    last = header(7, value=3, largest=9)
    assert meet(world, same, same, last) == [core.OK] * 3
    assert {rank.verdict for rank in world.ranks} == {(0, 1, 0, 0, 9)}
    for odd in range(3):
        calls = [header(8 if k == odd else 7) for k in range(3)]
        assert meet(world, *calls) == [core.DIFFERENT] * 3
        assert {rank.verdict for rank in world.ranks} == {(0, 0, 1, 0, 0)}
    assert meet(world, same, same, header(7, flag=1)) == [core.DIFFERENT] * 3
    assert {rank.verdict for rank in world.ranks} == {(1, 1, 1, 0, 0)}
    assert [rank.headers for rank in world.ranks] == [6, 6, 6]
    one = world.ranks[0]
    assert (one.missing(), one.leave()) == ([], None)
    assert (one.merges, one.room, one.active, one.moves) == (merges, ROOM, False, False)


@both_ways
def test_a_late_rank_is_noticed_by_all(merges: bool) -> None:
    world = World(2, merges)
    time.sleep(0.03)
    patient = header(7, timeout=20)
    assert meet(world, header(7), patient) == [core.AGAIN] * 2
    assert meet(world, header(7, timeout=60_000), header(7)) == [core.OK] * 2
    assert world.ranks[0].lateness < 60


@both_ways
def test_a_header_that_is_not_complete(merges: bool) -> None:
    world = World(2, merges)
    first, second = world.ranks
    first.start(*header(7))
    assert first.test() is None
    assert first.Test() is False
    assert first.active
    with pytest.raises(RuntimeError, match="abandoned"):
        first.start(*header(7))
    second.start(*header(7))
    assert first.Test() is True
    assert first.test() == second.test() == core.OK


def test_a_request_of_python_is_waited_for_a_while() -> None:
    world = World(2)
    one = world.ranks[0]
    send, target, request = aligned(8), aligned(16), _WORD()

    def start(rank: int, where: Any) -> None:
        world._post_data(
            rank,
            send.ctypes.data,
            target.ctypes.data,
            8,
            b"".join,
            ctypes.addressof(where),
        )

    start(0, request)
    assert one.complete(request) is False
    assert 10 < world.tests < 1000
    before = world.tests
    one.sleeper = threading.get_ident()  # which leaves its core to others
    assert one.complete(request) is False
    assert 0 < world.tests - before < 10
    start(1, _WORD())
    assert one.complete(request) is True
    world.code = 13
    with pytest.raises(MPIError, match="13"):
        one.complete(request)


def test_what_does_not_fit_is_refused() -> None:
    world = World(2)
    between = world.ranks[0]
    assert between.room == ROOM
    with pytest.raises(ValueError, match="144 bytes, room for 128"):
        core.Reduce(between, [("f8", "SUM", (ROOM // 8 + 1,), 0)], 0)
    with pytest.raises(ValueError, match="no kernel"):
        core.Reduce(between, [("c8", "MIN", (1,), 0)], 0)
    with pytest.raises(ValueError, match="handles for each leaf"):
        core.Reduce(
            *(between, [("f8", "SUM", (1,), 0)], 0, 0, 0, True),
            *((False, 1, 1), [(22, 31)] * 2),
        )
    with pytest.raises(TypeError):
        core.Reduce(object(), [], 0)
    small = core.Reduce(between, [("f8", "SUM", (1,), 0)], 0)
    with pytest.raises(RuntimeError, match="share no memory"):
        small.start(np.ones(1), np.ones(1))
    with pytest.raises(ValueError, match="no piece 0"):
        small.copy_in(0)
    with pytest.raises(ValueError, match="no room"):
        core.Gather(between, [(1, 1)] * (ROOM // 8 + 1))
    with pytest.raises(ValueError, match="no room"):
        core.Gather(World(2, merges=True).ranks[0], [(1, 1)] * (ROOM // 16 + 1))
    with pytest.raises(TypeError, match="result 0 has 8 bytes"):
        core.Gather(between, [(1, 8)]).meet(
            [np.ones(ROOM)], (ROOM,), 3, 0, core.NOWHERE, np.zeros(1)
        )
    with pytest.raises(RuntimeError, match="no arena"):
        core.Gather(between, [(1, 1)]).spread([np.ones(1, np.uint8)])


@pytest.mark.parametrize(
    "kind", ["Memory", "Pool", "Channel", "Between", "Reduce", "Gather", "ArrayCall"]
)
def test_no_object_is_half_made(kind: str) -> None:
    with pytest.raises(TypeError):
        getattr(core, kind).__new__(getattr(core, kind))


def rest_of(world: World) -> tuple[Any, ...]:
    functions = tuple(ctypes.cast(f, _POINTER).value or 0 for f in world.functions)
    return ((4, 4), 1, 1, 0, functions, (1, 1, 1, 0), print, print, world)


def test_memory_that_is_not_one_of_elements_is_refused() -> None:
    world = World(2)
    more = rest_of(world)
    one, two = aligned(ELEMENT), aligned(2 * ELEMENT)
    for sent, received, rank, size in [
        (one, two, 2, 2),
        (one, two, -1, 2),
        (one, one, 0, 0),
        (one, two, 0, 3),
        (one, aligned(ELEMENT + HEAD), 0, 2),
        (aligned(HEAD // 2), aligned(HEAD), 0, 2),
        (aligned(ELEMENT + 1), aligned(2 * ELEMENT + 2), 0, 2),
        (aligned(ELEMENT + 8)[8:], two, 0, 2),
        (one, aligned(2 * ELEMENT + 8)[8:], 0, 2),
    ]:
        before = sys.getrefcount(sent), sys.getrefcount(received)
        with pytest.raises(ValueError, match="memory"):
            core.Between(sent, received, rank, size, *more)
        assert (sys.getrefcount(sent), sys.getrefcount(received)) == before
    frozen = aligned(ELEMENT)
    frozen.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        core.Between(frozen, two, 0, 2, *more)


# --- errors of MPI --------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("persistent", [True, False])
def test_a_header_that_mpi_does_not_start(merges: bool, persistent: bool) -> None:
    world = World(2, merges, persistent=persistent)
    world.code = 13
    for _ in range(2):
        with pytest.raises(MPIError, match="13"):
            world.ranks[0].meet(*header(1))
    assert (world.ranks[0].headers, world.ranks[0].active) == (0, False)
    world.code = 0
    assert meet(world, header(1), header(1)) == [core.OK] * 2


def test_an_error_of_a_test_is_raised() -> None:
    world = World(2)
    world.ranks[0].start(*header(1))
    world.code = 14
    for call in (world.ranks[0].test, world.ranks[0].Test):
        with pytest.raises(MPIError, match="14"):
            call()
    with pytest.raises(RuntimeError, match="abandoned"):
        world.ranks[0].meet(*header(1))
    world.code = 0
    world.ranks[1].start(*header(1))
    assert world.ranks[0].test() == core.OK


# --- what is abandoned ----------------------------------------------------------------


@both_ways
def test_what_is_abandoned_is_not_freed(merges: bool) -> None:
    world = World(2, merges)
    rank = world.ranks.pop(0)
    memory = world.sent[0]

    def give_up(between: Any) -> None:
        with pytest.raises(RuntimeError, match="one thread"):
            between.meet(*header(1))
        leaf = ("f8", "SUM", (), 0)
        reduce = core.Reduce(between, [leaf], 0)
        with pytest.raises(RuntimeError, match="one thread"):
            reduce.run(np.ones(()), np.ones(()))
        raise KeyboardInterrupt

    rank.wait = give_up
    before = sys.getrefcount(memory), sys.getrefcount(world.owner)
    with pytest.raises(KeyboardInterrupt):
        rank.meet(*header(1))
    assert world.tests > 4
    del rank
    assert (sys.getrefcount(memory), sys.getrefcount(world.owner)) == before


def test_what_is_complete_is_freed() -> None:
    world = World(1)
    world.ranks.clear()
    before = sys.getrefcount(world.sent[0]), sys.getrefcount(world.owner)
    between = world.open(0)
    assert sys.getrefcount(world.owner) > before[1]
    between.wait = between.pause = print
    assert between.meet(*header(1)) == core.OK
    del between
    assert (sys.getrefcount(world.sent[0]), sys.getrefcount(world.owner)) == before


def count_tests(sleeper: int) -> int:
    world = World(2)
    rank = world.ranks[0]

    def wait(_: object) -> None:
        raise Interrupted

    rank.wait, rank.sleeper = wait, sleeper
    with pytest.raises(Interrupted):
        rank.meet(*header(1))
    return world.tests


def test_a_thread_that_leaves_its_core_waits_in_python_at_once() -> None:
    assert count_tests(threading.get_ident() + 1) > 500
    assert 0 < count_tests(threading.get_ident()) < 10


def test_a_wait_that_does_not_wait() -> None:
    world = World(2)
    rank = world.ranks[0]
    rank.wait = lambda _: None
    with pytest.raises(RuntimeError, match="has not waited"):
        rank.meet(*header(1))


class Interrupted(Exception):  # noqa: N818 - as a signal's handler raises it
    pass


def interrupted_by_a_signal(
    call: Callable[[], object], waits: Callable[[], bool]
) -> None:
    """Have a signal raise in a call, once it waits."""

    def handler(_: object, frame: Any) -> None:
        again = not waits()
        while frame is not None:  # ctypes swallows exceptions
            again = again or frame.f_code is World._test.__code__
            frame = frame.f_back
        if not again:
            raise Interrupted
        signal.setitimer(signal.ITIMER_REAL, 0.0007)

    def begin() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        call()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(Interrupted):
            begin()
    finally:
        signal.signal(signal.SIGALRM, before)


@both_ways
def test_a_signal_ends_a_wait_without_python(merges: bool) -> None:
    world = World(2, merges)
    rank = world.ranks[0]
    interrupted_by_a_signal(lambda: rank.meet(*header(1)), lambda: rank.active)
    assert rank.active


# --- data behind a header -------------------------------------------------------------


def test_too_many_kinds_of_leaves_raise() -> None:
    world = World(1)
    leaves = [("f4" if k % 2 else "f8", "SUM", (16,), 0) for k in range(70)]
    handles = [(21 + (k + 1) % 2, 31) for k in range(70)]
    arrays = [np.ones(16, name) for name, *_ in leaves]
    reduce = core.Reduce(
        world.ranks[0], leaves, 0, 3, 0, True, (False, 4, 2**20), handles
    )
    with pytest.raises(RuntimeError, match="too many kinds"):
        reduce.run(arrays, [np.empty_like(x) for x in arrays])


@pytest.mark.parametrize("gathers", [False, True])
def test_an_error_of_mpi_while_data_move(gathers: bool) -> None:
    world = World(1)
    rank = world.ranks[0]
    leaf, way = ("f8", "SUM", (100,), 0), (gathers, 4, 100)
    reduce = core.Reduce(rank, [leaf], 0, 3, 0, True, way, [(22, 31)])
    x, out = np.ones(100), np.zeros(100)
    assert reduce.run(x, out) == core.OK
    world.code_of_data = 15
    with pytest.raises(MPIError, match="15"):
        reduce.run(x, out)
    with pytest.raises(RuntimeError, match="abandoned"):
        rank.meet(*header(1))


def test_a_signal_while_data_move_keeps_their_memory() -> None:
    world = World(2)
    first, second = world.ranks
    leaf, way = ("f8", "SUM", (100,), 0), (False, 4, 100)
    reduce = core.Reduce(first, [leaf], 0, 3, 0, True, way, [(22, 31)])
    second.start(*header(3))  # and it never sends its data
    x, out = np.ones(100), np.full(100, 5.0)
    call = functools.partial(reduce.run, x, out)
    interrupted_by_a_signal(call, lambda: world.ranks[0].moves)
    assert (bool(first.active), first.moves, first.reductions) == (True, 1, 0)
    assert (out == 5).all()
    with pytest.raises(RuntimeError, match="abandoned"):
        first.meet(*header(1))
    before = sys.getrefcount(world.owner)
    world.ranks.remove(first)
    del first, reduce
    after = sys.getrefcount(world.owner)
    assert after == before


# --- the merge op ---------------------------------------------------------------------


def merge(lower: Any, upper: Any, count: int = 1) -> Any:
    """Return what the op makes of two elements, of which the first is on the left."""
    left, right = lower.copy(), upper.copy()
    _OP(core.merge_function())(
        left.ctypes.data, right.ctypes.data, ctypes.c_int(count), None
    )
    np.testing.assert_array_equal(left, lower)
    return right


def elements_of(world: World, *arrays: Any) -> list[Any]:
    """Publish a header with each array; return what the ranks have sent."""
    world.held = {0}
    for rank, x in zip(world.ranks, arrays, strict=True):
        rank.wait = lambda _: None
        leaf = [(kind_of(x), "SUM", x.shape, 0)]
        with pytest.raises(RuntimeError, match="has not waited"):
            core.Reduce(rank, leaf, 0, 7).run(x, np.empty_like(x))
    return [sent.copy() for sent in world.sent]


def kind_of(x: Any) -> str:
    return f"{x.dtype.kind}{x.dtype.itemsize}"


FLAG, FINGERPRINT, VALUE = slice(0, 4), slice(8, 16), slice(16, 24)
KEY = slice(48, 56)


@pytest.mark.parametrize(
    ("where", "adds"), [(FLAG, False), (FINGERPRINT, False), (VALUE, True)]
)
@pytest.mark.parametrize("of_lower", [False, True])
def test_the_op_adds_nothing_to_calls_that_differ(
    where: slice, adds: bool, of_lower: bool
) -> None:
    world = World(2, merges=True)
    lower, upper = elements_of(world, np.array([1.0]), np.array([10.0]))
    changed = lower if of_lower else upper
    changed[where][0] ^= 1
    total = merge(lower, upper)
    payload = total[HEAD : HEAD + 8].view("f8").tolist()
    assert payload == ([11] if adds else [10])


@pytest.mark.parametrize("count", [1, 2])
def test_the_op_says_that_elements_of_nobody_differ(count: int) -> None:
    """A key that no channel has, or a number of elements that none sends."""
    world = World(2, merges=True)
    lower, upper = elements_of(world, np.array([1.0]), np.array([10.0]))
    if count == 1:
        upper[KEY].view("i8")[0] = -5
    total = merge(lower, upper, count)
    assert total[HEAD : HEAD + 8].view("f8").tolist() == [10]
    assert (upper[:4].view("i4")[0], total[:4].view("i4")[0]) == (0, _OTHER_CALL)


def test_the_operation_runs_while_others_are_made_and_dropped() -> None:
    """MPI calls it in a thread that does not hold Python's lock."""
    world = World(2, merges=True)
    for rank in world.ranks:
        rank.start(*header(7))
    merge = _OP(core.merge_function())
    count, ended, wrong = ctypes.c_int(1), threading.Event(), []

    def make_and_drop() -> None:
        while not ended.is_set():
            others = [World(2, merges=True) for _ in range(20)]
            del others

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=make_and_drop)
    thread.start()
    try:
        end = time.monotonic() + 1
        while time.monotonic() < end and not wrong:
            row, total = (sent.copy() for sent in world.sent)
            merge(row.ctypes.data, total.ctypes.data, ctypes.byref(count), None)
            flags = total[:4].view("i4")[0]
            if flags & _OTHER_CALL:
                wrong.append(int(flags))
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)
    assert not wrong


# --- data that go with the header, on a guess -----------------------------------------


def reductions(world: World, fingerprint: int, length: int) -> list[Any]:
    """Return for each rank an all-reduce that gathers, and has no room."""
    return [
        core.Reduce(
            *(rank, [("f4", "SUM", (length,), 0)], 0, fingerprint, 0, True),
            *((True, 1, 2**20), [(21, 31)]),
        )
        for rank in world.ranks
    ]


def reduce_on_all(world: World, plans: list[Any], *call: int) -> None:
    """Reduce on all ranks, each of which waits in its thread; compare the sums.

    Args:
        world: the ranks.
        plans: of each.
        call: more arguments of `Reduce.run`, if they are not the usual ones.
    """
    length = plans[0].nbytes // 4
    results = [np.zeros(length, np.float32) for _ in plans]
    in_threads(
        [
            functools.partial(
                plan.run, np.full(length, k + 1.0, np.float32), result, *call
            )
            for k, (plan, result) in enumerate(zip(plans, results, strict=True))
        ]
    )
    assert all((x == sum(range(1, len(plans) + 1))).all() for x in results)


def in_threads(calls: list[Callable[[], Any]]) -> None:
    statuses: list[Any] = [None] * len(calls)

    def run(k: int) -> None:
        statuses[k] = calls[k]()

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert statuses == [core.OK] * len(calls)


@both_ways
def test_the_data_of_a_call_that_is_expected_go_with_its_header(merges: bool) -> None:
    world = World(2, merges)
    one, other = reductions(world, 1, 64), reductions(world, 2, 96)

    def started(fingerprint: int) -> int:
        """Return how many data went with the header of another call."""
        begun = world.ranks[0].iallgathers
        same = header(fingerprint)
        assert meet(world, same, same) == [core.OK] * 2
        return int(world.ranks[0].iallgathers - begun)

    def repeat(times: int, plans: list[Any]) -> None:
        for _ in range(times):
            assert started(9) == 0
            reduce_on_all(world, plans)

    repeat(3, one)  # after the third, `one` is expected behind itself and 9
    assert started(9) == 0
    assert started(9) == 1  # a wrong guess, which is not made again
    reduce_on_all(world, one)
    assert started(9) == 0
    assert started(9) == 0
    repeat(6, one)
    begun = world.ranks[0].iallgathers
    repeat(1, other)
    assert [rank.iallgathers - begun for rank in world.ranks] == [2, 2]  # a wrong one
    repeat(5, other)
    assert [rank.iallgathers - begun for rank in world.ranks] == [7, 7]
    assert started(9) == 0
    assert started(7) == 1
    assert (world.ranks[0].active, world.ranks[0].moves) == (0, 0)


def test_a_guess_is_dropped_if_calls_differ() -> None:
    world = World(2)
    plans = reductions(world, 1, 64)
    for _ in range(5):
        reduce_on_all(world, plans)
    begun = world.ranks[0].iallgathers
    assert meet(world, header(1), header(3)) == [core.DIFFERENT] * 2
    assert world.ranks[0].iallgathers == begun + 1  # both took part, for nothing
    for _ in range(2):
        assert meet(world, header(1), header(1)) == [core.OK] * 2
    assert world.ranks[0].iallgathers == begun + 1  # nothing is known behind an error
    assert meet(world, header(1, flag=1), header(1)) == [core.DIFFERENT] * 2
    assert world.ranks[0].iallgathers == begun + 2
    reduce_on_all(world, plans)


def test_calls_of_one_kind_have_fingerprints_of_their_own() -> None:
    """As those of an optimizer, which name its step."""
    world = World(2)
    plans = reductions(world, 1, 64)
    for step in range(100, 106):
        reduce_on_all(world, plans, core.NOWHERE, step, 0)
    begun = world.ranks[0].iallgathers
    assert meet(world, header(1, flag=1), header(1)) == [core.DIFFERENT] * 2
    assert world.ranks[0].iallgathers == begun + 1


def test_an_error_of_mpi_while_it_starts_data_with_a_header() -> None:
    world = World(2)
    plans = reductions(world, 1, 64)
    for _ in range(5):
        reduce_on_all(world, plans)
    world.code_of_data = 15
    with pytest.raises(MPIError, match="15"):
        world.ranks[0].meet(*header(1))
    assert world.ranks[0].active
    with pytest.raises(RuntimeError, match="abandoned"):
        world.ranks[0].start(*header(1))


def test_plans_that_another_thread_makes_during_calls_need_more_memory() -> None:
    """The leaves of the call may be packed already."""
    world = World(2)

    def nests(factor: int) -> list[Any]:
        leaves = [("f4", "SUM", (n * factor,), 0) for n in (64, 32)]
        algorithm = (True, 1, 2**20), [(21, 31)] * 2
        return [
            core.Reduce(rank, leaves, 0, factor, 0, True, *algorithm)
            for rank in world.ranks
        ]

    plans = nests(1)
    sources = [np.full(64, 1.5, np.float32), np.full(32, 2.5, np.float32)]
    for factor in range(2, 9):

        def wait(between: Any, factor: int = factor) -> None:
            world.held.clear()
            while not between.Test():
                time.sleep(0.001)
            nests(factor)

        for rank in world.ranks:
            rank.wait = wait
        world.held.add(0)
        results = [[np.zeros_like(x) for x in sources] for _ in plans]
        in_threads(
            [
                functools.partial(plan.run, sources, result)
                for plan, result in zip(plans, results, strict=True)
            ]
        )
        for first, second in results:
            assert (first == 3).all()
            assert (second == 5).all()
