"""Headers by MPI, looked at without delay: what a `Board` does in shared memory.

A header is one non-blocking all-reduce (MAX) of `WORDS` integers. Its buffers are kept
from header to header, as is the operation where MPI has persistent ones (MPI 4), which
takes half of the time; and what does not change from call to call is written as bytes
that were made once. Only one is under way at a time: a rank that gives up on a header
never begins another.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from mpidist._board import LATENESS, OVERDUE, PATIENCE, WORDS

# How often a rank looks whether all are there, and how often it then gives its core
# away, before the guard waits with a deadline. With more ranks than cores it does so at
# once; between two times MPI needs some looks to see what has come: of 1 to 64, 4 did
# well with both MPIs.
_TESTS: Final = 2000
_YIELDS: Final = 30
_TESTS_BETWEEN: Final = 4
_MOST_FORMS: Final = 4096

_unpack: Final = struct.Struct("5q").unpack
_pack_all: Final = struct.Struct(f"{WORDS}q").pack
_COMPARED: Final = 8 * LATENESS  # bytes, of what comes before it


class Headers:
    """The headers of a communicator.

    Args:
        begin: given the array to send and the one for the result, prepares the
            all-reduce, and returns a function that starts it, one that says whether it
            has completed, and one that gives back what was prepared.
        crowded: whether there are more ranks than cores.
    """

    def __init__(
        self,
        begin: Callable[
            [Any, Any],
            tuple[Callable[[], Any], Callable[[], bool], Callable[[], None]],
        ],
        *,
        crowded: bool,
    ) -> None:
        send, receive = np.zeros(WORDS, np.int64), np.zeros(WORDS, np.int64)
        self._sent = send.data
        self._sent_bytes = self._sent.cast("B")
        self._received = receive.data
        self._compared = self._received.cast("B")[:_COMPARED]
        self._start, self._test, self._free = begin(send, receive)
        self._tests = _TESTS_BETWEEN if crowded else _TESTS
        self._forms: dict[bytes, bytes] = {}
        self.headers = 0  # that were published; the same number on all ranks

    def meet(self, data: bytes, lateness: int) -> bool | None:
        """Publish a header, and return whether all ranks have published the same.

        Args:
            data: this rank's words, from `mpidist._board.pack`, with no flag up.
            lateness: in milliseconds.

        Returns:
            Whether all are the same, and none is late; None if some are not there yet.
            Then, and where they differ, `pending_header` has more.
        """
        form = self._forms.get(data) or self._form(data)
        self._sent_bytes[:] = form
        self._sent[LATENESS] = lateness
        self.headers += 1
        try:
            self._start()
            test = self._test
            for _ in range(self._tests):
                if test():
                    return self._all_sent(form)
            for _ in range(_YIELDS):
                os.sched_yield()
                for _ in range(_TESTS_BETWEEN):
                    if test():
                        return self._all_sent(form)
        except BaseException:
            self.leak()
            raise
        return None

    def pending_header(self) -> HeaderByMPI:
        """Return the header that this rank published last."""
        return HeaderByMPI(self)

    def start_header(self, words: list[int]) -> HeaderByMPI:
        """Publish this rank's words; the request has the largest of all ranks."""
        self._sent_bytes[:] = _pack_all(*words)
        self.headers += 1
        self._start()
        return HeaderByMPI(self)

    def leave(self) -> None:
        """Do nothing: those who wait learn of it by a notice."""

    def test(self) -> bool:
        """Return whether the header that was published last has completed."""
        return any(self._test() for _ in range(_TESTS_BETWEEN))

    def result(self) -> list[int]:
        """Return the largest words of the header that has completed last."""
        return self._received.tolist()

    def leak(self) -> None:
        """Keep the buffers for ever: what is under way will not be waited for."""
        # MPI may write to them until it has ended, which is after Python has.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def free(self) -> None:
        """Give back what was prepared. No header is under way."""
        self._free()

    def _all_sent(self, form: bytes) -> bool:
        words = self._received
        return (
            self._compared.tobytes() == form[:_COMPARED]
            and 2 * words[LATENESS] < -words[PATIENCE]
        )

    def _form(self, data: bytes) -> bytes:
        """Return the words of `pack` in the form that goes over MPI."""
        flag, text, soft, patience, most = _unpack(data)
        # Over MPI all ranks see how late each is.
        flag &= ~OVERDUE
        form = _pack_all(flag, text, ~text, soft, ~soft, 0, patience, most)
        if len(self._forms) >= _MOST_FORMS:
            self._forms.clear()
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
        """Keep its buffers for ever: it will not be waited for any more."""
        self._headers.leak()
