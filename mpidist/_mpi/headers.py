"""Headers by MPI, which are polled at once.

**Rows.** Few ranks (`FEW`) send each other a row: `WORDS` integers, and behind them a
small payload, if there is one. So a small reduction takes one exchange instead of a
header and then a payload: all ranks have the payloads of all, and each adds them up in
the order of the ranks.

The messages are persistent (`Send_init`, `Recv_init`), which takes half the time of new
ones. A receive has room for the longest row, and there are sends for each length. With
Open MPI on one node a row of 64 bytes to 1 KiB takes as long as an `Allreduce` of the
same size, with MPICH a third of that (2 ranks) or a half (3 ranks on 2 cores).

One buffer for each rank is enough: a rank that has all rows of a header starts the next
only when it has used them, and what others send for the next stays in MPI until then.
No rank can be two headers ahead.

**The maximum.** Many ranks all-reduce (MAX) the integers, without payload; the number
of messages then grows with the logarithm of the ranks.

In both cases only one header is in progress at a time: a rank that gives up on a header
never starts another.

Ranks whose headers agree have sent equally many bytes, since ranks that make the same
call have the same plan.
"""

from __future__ import annotations

import operator
import os
import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from mpidist._base.cache import Cache
from mpidist._base.memory import LINE, leak
from mpidist._base.types import HostArray
from mpidist._mpi.header_words import LATENESS, PATIENCE, WORDS
from mpidist._mpi.library import MpiComm, MpiRequest

FEW: Final = 8
"""The most ranks that send each other rows."""

# How often a rank tests whether all rows are there, some 40 us, and how often it then
# yields its core, before the guard waits with a deadline. With more ranks than cores it
# yields at once; so do ranks, after a moment, that share cores without knowing it, as
# jobs and containers do. Between two yields MPI needs some tests to make progress: of 1
# to 64, 4 were good with both MPIs.
_TESTS: Final = 64
_YIELDS: Final = 500
_TESTS_BETWEEN: Final = 4
_MOST_FORMS: Final = 4096

_ROW_TAG: Final = 9
_HEAD_BYTES: Final = 128  # of a row; a payload behind it is aligned
_ROOM_OF_ALL: Final = 128 * 1024  # for the payloads of all ranks together
_MOST_LENGTHS: Final = 64

_unpack: Final = struct.Struct("5q").unpack
_pack_all: Final = struct.Struct(f"{WORDS}q").pack
_COMPARED: Final = 8 * LATENESS  # bytes, of what comes before it


_Calls: TypeAlias = tuple[list[Callable[[], object]], list[Callable[[], bool]]]
"""What starts the messages of a row, and what tests each. A plain tuple: it is unpacked
for every header."""


class Prepared(NamedTuple):
    """An operation that can be started again and again.

    Attributes:
        start: starts it.
        test: returns whether it has completed.
        free: gives it back.
    """

    start: Callable[[], object]
    test: Callable[[], bool]
    free: Callable[[], None]


Prepare = Callable[[HostArray, HostArray], Prepared]
"""Prepares an all-reduce, from an array to send into one for the result."""


class Headers:
    """The headers of a communicator.

    Args:
        exchange: `Rows` or `Maximum`, of all its ranks.
        crowded: whether there are more ranks than cores.
    """

    def __init__(self, exchange: Rows | Maximum, *, crowded: bool) -> None:
        self._exchange = exchange
        self._tests = _TESTS_BETWEEN if crowded else _TESTS
        self._forms: Cache[bytes, bytes] = Cache(_MOST_FORMS)
        self.headers: int = 0  # that were published; the same number on all ranks
        self.room: int = exchange.room
        """The most bytes of a payload that travels with a header."""

    def meet(self, data: bytes, lateness: int, nbytes: int = 0) -> bool | None:
        """Publish a header; return whether all ranks have published the same one.

        Args:
            data: this rank's words, from `header_words.pack`, without a flag.
            lateness: in milliseconds.
            nbytes: of the payload that travels with it, at most `room`; it is in this
                rank's `payload_rows` already.

        Returns:
            Whether all are the same, and none is late; None if some are not there yet.
            In that case, and if they differ, `pending_header` has more.
        """
        form = self._forms.get(data) or self._form(data)
        exchange, number = self._exchange, self.headers + 1
        exchange.fill(form, lateness, nbytes)
        try:
            self.headers = number
            exchange.start()
            test = exchange.test
            for _ in range(self._tests):
                if test():
                    return exchange.agrees(form)
            for _ in range(_YIELDS):
                os.sched_yield()
                for _ in range(_TESTS_BETWEEN):
                    if test():
                        return exchange.agrees(form)
        except BaseException:
            if self.headers == number:
                exchange.start()  # the rest of it: what is counted is sent
            self.leak()
            raise
        return None

    @property
    def payload_rows(self) -> HostArray:
        """Memory of `room` bytes (uint8) for each rank, the same for all headers.

        This rank's is for the payload of its next header; those of the others have the
        payloads of the last one. Both may be read until the next.
        """
        return self._exchange.payload_rows

    def pending_header(self) -> HeaderByMPI:
        """Return the header that this rank published last."""
        return HeaderByMPI(self)

    def start_header(self, words: list[int]) -> HeaderByMPI:
        """Publish this rank's words; the request has the largest of all ranks."""
        self._exchange.fill(_pack_all(*words), words[LATENESS], 0)
        self.headers += 1
        self._exchange.start()
        return HeaderByMPI(self)

    def test(self) -> bool:
        """Return whether the header that was published last has completed."""
        return any(self._exchange.test() for _ in range(_TESTS_BETWEEN))

    def result(self) -> list[int]:
        """Return the largest words of the header that has completed last."""
        return self._exchange.largest()

    def leak(self) -> None:
        """Leak the buffers: the header is abandoned, and MPI may still use them."""
        leak(self)

    def free(self) -> None:
        """Free what was prepared. No header is in progress."""
        self._exchange.free()

    def _form(self, data: bytes) -> bytes:
        """Return the words of `pack` as they are sent."""
        flag, text, soft, patience, most = _unpack(data)
        form = _pack_all(flag, text, ~text, soft, ~soft, 0, patience, most)
        self._forms[data] = form
        return form


class Exchange:
    """An exchange that is prepared, and then started.

    Attributes:
        starts: what is left of its start: each step starts one message.
    """

    def __init__(self) -> None:
        self.starts: Iterator[object] = iter(())

    def start(self) -> None:
        """Start it. Again after an exception of a signal: it starts the rest."""
        for _ in self.starts:
            pass


class Rows(Exchange):
    """An exchange of rows between each pair of ranks: a header, and a payload.

    Making it is not collective.

    Args:
        comm: an mpi4py intra-communicator.
    """

    def __init__(self, comm: MpiComm) -> None:
        super().__init__()
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.room: int = _ROOM_OF_ALL // max(2, self.size) // LINE * LINE
        # For each rank a head and a payload.
        self._rows = np.zeros((self.size, _HEAD_BYTES + self.room), np.uint8)
        self.payload_rows: HostArray = self._rows[:, _HEAD_BYTES:]
        self._words = [memoryview(row).cast("B").cast("q") for row in self._rows]
        self._mine = self._words[self.rank]
        self._head = memoryview(self._rows[self.rank]).cast("B")[: 8 * WORDS]
        self._others = [(self.rank + k) % self.size for k in range(1, self.size)]
        self._receives = [
            comm.Recv_init(self._rows[k], k, _ROW_TAG) for k in self._others
        ]
        # By the length of a payload.
        self._sends: dict[int, list[MpiRequest]] = {}
        self._calls: dict[int, _Calls] = {}
        self._tests: list[Callable[[], bool]] = []
        self._next = 0
        self._heads = [
            memoryview(self._rows[k]).cast("B")[:_COMPARED] for k in self._others
        ]
        self._prepare(0)

    def fill(self, form: bytes, lateness: int, nbytes: int) -> None:
        """Fill this rank's row, for the next `start`.

        Args:
            form: `WORDS` integers.
            lateness: replaces theirs.
            nbytes: of the payload, which is in this rank's row already.
        """
        self._head[:] = form
        self._mine[LATENESS] = lateness
        starts, self._tests = self._calls.get(nbytes) or self._prepare(nbytes)
        self._next = 0
        self.starts = map(operator.call, starts)

    def _prepare(self, nbytes: int) -> _Calls:
        """Make the messages of rows with payloads of this length."""
        if len(self._sends) > _MOST_LENGTHS:
            for sends in self._sends.values():
                for send in sends:
                    send.Free()
            self._sends.clear()
            self._calls.clear()
        row = self._rows[self.rank][: _HEAD_BYTES + nbytes]
        sends = [self._comm.Send_init(row, k, _ROW_TAG) for k in self._others]
        requests = [*self._receives, *sends]
        calls = [r.Start for r in requests], [r.Test for r in requests]
        self._sends[nbytes], self._calls[nbytes] = sends, calls
        return calls

    def test(self) -> bool:
        """Return whether all rows were received, and this rank's was sent."""
        tests, number = self._tests, self._next
        while number < len(tests) and tests[number]():
            number += 1
        self._next = number
        return number == len(tests)

    def agrees(self, form: bytes) -> bool:
        """Return whether all rows begin like this form, and no rank is late."""
        compared = form[:_COMPARED]
        for head in self._heads:
            if head != compared:
                return False
        mine = self._mine
        latest, patience = mine[LATENESS], mine[PATIENCE]
        for words in self._words:
            if words[LATENESS] > latest:
                latest = words[LATENESS]
            if words[PATIENCE] > patience:
                patience = words[PATIENCE]
        return bool(2 * latest < -patience)

    def largest(self) -> list[int]:
        """Return the largest of each word of all rows."""
        words = self._rows[:, : 8 * WORDS].view(np.int64)
        return [int(x) for x in words.max(axis=0)]

    def free(self) -> None:
        """Free the messages. None is in progress."""
        for requests in (self._receives, *self._sends.values()):
            for request in requests:
                request.Free()
        self._receives = []
        self._sends.clear()
        self._calls.clear()


class Maximum(Exchange):
    """The largest words of all ranks, by one all-reduce without payload.

    Its buffers are kept from header to header, as is the operation if MPI has
    persistent ones (MPI 4).

    Args:
        prepare: prepares the all-reduce.
    """

    room = 0
    payload_rows: HostArray = np.empty((0, 0), np.uint8)
    test: Callable[[], bool]
    free: Callable[[], None]

    def __init__(self, prepare: Prepare) -> None:
        super().__init__()
        send, receive = np.zeros(WORDS, np.int64), np.zeros(WORDS, np.int64)
        self._sent = send.data
        self._sent_bytes = self._sent.cast("B")
        self._received = receive.data
        self._compared = self._received.cast("B")[:_COMPARED]
        self._start, self.test, self.free = prepare(send, receive)

    def fill(self, form: bytes, lateness: int, nbytes: int) -> None:
        """Set this rank's words; see `Rows`."""
        self._sent_bytes[:] = form
        self._sent[LATENESS] = lateness
        self.starts = map(operator.call, (self._start,))

    def agrees(self, form: bytes) -> bool:
        """Return whether all ranks sent this form, and no rank is late."""
        words = self._received
        return (
            self._compared.tobytes() == form[:_COMPARED]
            and 2 * words[LATENESS] < -words[PATIENCE]
        )

    def largest(self) -> list[int]:
        """Return the largest of each word of all ranks."""
        return self._received.tolist()


class HeaderByMPI:
    """A header that has been published, until all ranks have published theirs."""

    __slots__ = ("Test", "_headers")

    def __init__(self, headers: Headers) -> None:
        self.Test: Callable[[], bool] = headers.test
        self._headers = headers

    @property
    def result(self) -> list[int]:
        """The largest words of all ranks, once it has completed."""
        return self._headers.result()

    def leak(self) -> None:
        """Leak its buffers: it is abandoned, and MPI may still use them."""
        self._headers.leak()
