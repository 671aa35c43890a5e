"""Headers by MPI, which are polled at once.

**Rows.** Few ranks (`FEW`) that all have the native core send each other a row: a
header, and behind it a small payload, if there is one. The core fills the rows, waits
for them and compares them (``_native/py_rows.c``); `RowMessages` are what it starts and
tests.

The messages are persistent (`Send_init`, `Recv_init`), which takes half the time of new
ones. A receive has room for the longest row, and there are sends for each length. With
Open MPI on one node a row of 64 bytes to 1 KiB takes as long as an `Allreduce` of the
same size, with MPICH a third of that (2 ranks) or a half (3 ranks on 2 cores).

**The maximum.** Other ranks all-reduce (MAX) `WORDS` integers, without payload
(`Headers`); the number of messages then grows with the logarithm of the ranks.

In both cases only one header is in progress at a time: a rank that gives up on a header
never starts another.
"""

from __future__ import annotations

import operator
import os
import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from mpidist import _native
from mpidist._base.cache import Cache
from mpidist._base.memory import LINE, leak
from mpidist._base.types import HostArray
from mpidist._mpi.header_words import LATENESS, PATIENCE, WORDS
from mpidist._mpi.library import MpiComm, MpiRequest

FEW: Final = 8
"""The most ranks that send each other rows."""

# How often a rank tests whether all have published theirs, some 40 us, and how often it
# then yields its core, before the guard waits with a deadline. With more ranks than
# cores it yields at once. Rows come sooner: two ranks on one core, which they share
# without knowing it, took 42 us with 64 tests, 35 with 24 and 29 with 8 (MPICH, 4
# bytes); on cores of their own all took the same. See also ``_native/py_rows.c``.
_TESTS: Final = 64
_TESTS_OF_ROWS: Final = 24
_YIELDS: Final = 500
_TESTS_BETWEEN: Final = 4
_MOST_FORMS: Final = 4096

_ROW_TAG: Final = 9
# For the payloads of all ranks together. With twice as many, 8 ranks of two hosts on a
# slow network took up to five times as long as by the nodes' memory (64 KiB).
_ROOM_OF_ALL: Final = 256 * 1024
# Of two ranks each, which move no fewer bytes by any other way: up to 1 MiB they save a
# header's time.
_ROOM_OF_TWO: Final = 2**20
_MOST_LENGTHS: Final = 64

_unpack: Final = struct.Struct("5q").unpack
_pack_all: Final = struct.Struct(f"{WORDS}q").pack
_COMPARED: Final = 8 * LATENESS  # bytes, of what comes before it


_Calls: TypeAlias = tuple[
    tuple[Callable[[], object], ...], tuple[Callable[[], bool], ...]
]
"""What starts the messages of a row, and what tests each."""


class RowMessages:
    """The messages of rows between each pair of ranks. Making them is not collective.

    Args:
        comm: an mpi4py intra-communicator.
    """

    def __init__(self, comm: MpiComm) -> None:
        self._comm = comm
        self._rank = comm.Get_rank()
        self._size = size = comm.Get_size()
        room = _ROOM_OF_TWO if size == 2 else _ROOM_OF_ALL // size // LINE * LINE
        # Of each rank a header, which takes a line, and a payload.
        self._rows = np.zeros((size, LINE + room), np.uint8)
        self._others = [(self._rank + k) % size for k in range(1, size)]
        self._receives = [
            comm.Recv_init(self._rows[k], k, _ROW_TAG) for k in self._others
        ]
        # By the length of a payload.
        self._sends: dict[int, list[MpiRequest]] = {}
        self._calls: dict[int, _Calls] = {}
        self._prepare(0)

    def open(self, *, crowded: bool) -> _native.Rows:
        """Return what fills rows, and starts and tests their messages.

        Args:
            crowded: whether there are more ranks than cores.
        """
        tests = _TESTS_BETWEEN if crowded else _TESTS_OF_ROWS
        return _native.core.Rows(
            self._rows, self._rank, self._size, tests, self._calls, self._prepare
        )

    def free(self) -> None:
        """Free the messages. None is in progress."""
        for requests in (self._receives, *self._sends.values()):
            for request in requests:
                request.Free()
        self._receives = []
        self._sends.clear()
        self._calls.clear()

    def _prepare(self, nbytes: int) -> _Calls:
        """Make the messages of rows with payloads of this length. None is started."""
        if len(self._sends) > _MOST_LENGTHS:
            dropped, self._sends = self._sends, {}
            self._calls.clear()
            for sends in dropped.values():
                for send in sends:
                    send.Free()
        row = self._rows[self._rank][: LINE + nbytes]
        sends = [self._comm.Send_init(row, k, _ROW_TAG) for k in self._others]
        requests = [*self._receives, *sends]
        calls = tuple(r.Start for r in requests), tuple(r.Test for r in requests)
        self._sends[nbytes], self._calls[nbytes] = sends, calls
        return calls


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
    """The headers of a communicator, by one all-reduce each.

    Its buffers are kept from header to header, as is the operation if MPI has
    persistent ones (MPI 4).

    Args:
        prepare: prepares the all-reduce, with the largest of each integer as result.
        crowded: whether there are more ranks than cores.
    """

    def __init__(self, prepare: Prepare, *, crowded: bool) -> None:
        send, receive = np.zeros(WORDS, np.int64), np.zeros(WORDS, np.int64)
        self._sent = send.data
        self._sent_bytes = self._sent.cast("B")
        self._received = receive.data
        self._compared = self._received.cast("B")[:_COMPARED]
        self._prepared = prepare(send, receive)
        self._starts: Iterator[object] = iter(())  # what is left of a start
        self._tests = _TESTS_BETWEEN if crowded else _TESTS
        self._forms: Cache[bytes, bytes] = Cache(_MOST_FORMS)
        self.headers: int = 0  # that were published; the same number on all ranks

    def meet(self, data: bytes, lateness: int) -> bool | None:
        """Publish a header; return whether all ranks have published the same one.

        Args:
            data: this rank's words, from `header_words.pack`, without a flag.
            lateness: in milliseconds.

        Returns:
            Whether all are the same, and none is late; None if some are not there yet.
            In that case, and if they differ, `pending_header` has more.
        """
        form = self._forms.get(data) or self._form(data)
        number = self.headers + 1
        self._fill(form, lateness)
        try:
            self.headers = number
            self._start()
            test = self._prepared.test
            for _ in range(self._tests):
                if test():
                    return self._agrees(form)
            for _ in range(_YIELDS):
                os.sched_yield()
                for _ in range(_TESTS_BETWEEN):
                    if test():
                        return self._agrees(form)
        except BaseException:
            if self.headers == number:
                self._start()  # if it was not: what is counted is sent
            self.leak()
            raise
        return None

    def pending_header(self) -> HeaderByMPI:
        """Return the header that this rank published last."""
        return HeaderByMPI(self)

    def start_header(self, words: list[int]) -> HeaderByMPI:
        """Publish this rank's words; the request has the largest of all ranks."""
        self._fill(_pack_all(*words), words[LATENESS])
        self.headers += 1
        self._start()
        return HeaderByMPI(self)

    def test(self) -> bool:
        """Return whether the header that was published last has completed."""
        return any(self._prepared.test() for _ in range(_TESTS_BETWEEN))

    def result(self) -> list[int]:
        """Return the largest words of the header that has completed last."""
        return self._received.tolist()

    def leak(self) -> None:
        """Leak the buffers: the header is abandoned, and MPI may still use them."""
        leak(self)

    def free(self) -> None:
        """Free what was prepared. No header is in progress."""
        self._prepared.free()

    def _fill(self, form: bytes, lateness: int) -> None:
        """Set this rank's words, and its lateness in place of theirs."""
        self._sent_bytes[:] = form
        self._sent[LATENESS] = lateness
        self._starts = map(operator.call, (self._prepared.start,))

    def _start(self) -> None:
        """Start the operation, if that was not done since `_fill`."""
        for _ in self._starts:
            pass

    def _agrees(self, form: bytes) -> bool:
        """Return whether all ranks sent this form, and no rank is late."""
        words = self._received
        return (
            self._compared.tobytes() == form[:_COMPARED]
            and 2 * words[LATENESS] < -words[PATIENCE]
        )

    def _form(self, data: bytes) -> bytes:
        """Return the words of `pack` as they are sent."""
        flag, text, soft, patience, most = _unpack(data)
        form = _pack_all(flag, text, ~text, soft, ~soft, 0, patience, most)
        self._forms[data] = form
        return form


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
