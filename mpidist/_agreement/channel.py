"""Where ranks exchange headers: through shared memory, or by messages.

A *channel* lets all ranks say what they are about to do, and tells each what all have
said. `Channel` is what the guard asks of one. The native core has one for the ranks of
one node (`mpidist._native.core.Channel`), and one for few ranks that share no memory
(`mpidist._native.core.Rows`); `MessageChannel` is for all others.

A header has a flag (this rank has failed), the fingerprint of the call, a *value* that
may differ, an integer of which all ranks learn the *largest*, how late its rank is, and
how long it would wait. `meet` returns

- `OK`: no flag is up, and all ranks make the same call;
- `AGAIN`: some rank was so late that another may have given up on it. Every rank gets
  this, and has to exchange its header once more: one that has given up does not, and
  its notice ends that second wait;
- `DIFFERENT`: a flag is up, or the calls differ;
- `LEFT`: a rank will not come any more; `who` is its number.

Why a rank that comes too late is always noticed: messages may complete the header of
the late rank although the others have given up (they have sent theirs already). So each
header carries how long ago its rank began its last one: no other can have waited for
longer than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from mpidist import _native
from mpidist._agreement.polling import poll, spins_for
from mpidist._mpi.communicator import Communicator, Request
from mpidist._mpi.header_words import (
    FINGERPRINT,
    FLAG,
    LARGEST,
    LATENESS,
    NOT_FINGERPRINT,
    NOT_VALUE,
    PATIENCE,
    VALUE,
    WORDS,
    pack,
)
from mpidist._mpi.headers import Headers

OK, AGAIN, DIFFERENT, LEFT = range(4)
NOWHERE: Final = -1

_UNLIMITED: Final = 2**61  # milliseconds


class LeftError(Exception):
    """Another rank has left in the middle of a payload.

    Attributes:
        rank: the one that left.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has left")
        self.rank = rank


Verdict = tuple[int, int, int, int, int]
"""What all ranks have said: whether a flag is up; whether the calls are the same, and
the values; whether all results are in arenas; the largest integer. A plain tuple, since
the core makes one for every header."""


class Channel(Protocol):
    """What the guard asks of a channel."""

    who: int
    pause: Callable[[float], None] | None
    """Called with the seconds waited, several times a second; may raise."""

    @property
    def verdict(self) -> Verdict:
        """What all ranks have said in the last header."""

    @property
    def headers(self) -> int:
        """How many headers this rank has published."""

    @property
    def lateness(self) -> float:
        """Seconds since this rank began its last header."""

    def meet(
        self,
        flag: int,
        fingerprint: int,
        value: int,
        largest: int,
        patience_ms: int,
        offset: int,
        /,
    ) -> int:
        """Exchange a header, and return a status. Collective.

        Args:
            flag: 1 if this rank has failed.
            fingerprint: of the call.
            value: an integer that may differ.
            largest: an integer of which all ranks learn the largest.
            patience_ms: how long this rank would wait; 0: forever.
            offset: of its results in its arena, for the core; or `NOWHERE`.
        """

    def start(
        self,
        flag: int,
        fingerprint: int,
        value: int,
        largest: int,
        patience_ms: int,
        offset: int,
        /,
    ) -> object:
        """Publish a header without waiting for those of the others."""

    def test(self) -> int | None:
        """Return the status of the header of `start`; None if some are missing."""

    def missing(self) -> list[int]:
        """Return the ranks that are known not to be there yet."""

    def leave(self) -> None:
        """Tell the ranks that wait for this one that it makes no more steps."""


def open_channel(comm: Communicator, shared: Channel | None) -> Channel | None:
    """Return where ranks exchange headers. Collective.

    Args:
        comm: the ranks.
        shared: the channel in the memory that all of them share, if there is one.

    Returns:
        None for one rank, which has nobody to agree with.
    """
    if comm.size == 1 or shared is not None:
        return shared
    headers = comm.open_headers()
    if isinstance(headers, Headers):
        return MessageChannel(headers, spins_for(comm.machine_size))
    headers.wait = _wait_for_rows
    comm.traffic.core = headers
    rows: Channel = headers
    return rows


def _wait_for_rows(rows: _native.Rows) -> None:
    """Wait until all rows of a header are there."""
    poll(rows, rows.pause or _ignore)


class MessageChannel:
    """A channel by an all-reduce of MPI for each header.

    Args:
        headers: of all ranks.
        spins: how often a rank that waits tests before it yields its core.
    """

    def __init__(self, headers: Headers, spins: int) -> None:
        self._headers = headers
        self._last = time.monotonic()
        self._request: Request | None = None
        self.who = -1
        self.pause: Callable[[float], None] | None = None
        self.verdict: Verdict = (0, 1, 1, 0, 0)
        self._spins = spins

    @property
    def headers(self) -> int:
        """How many headers this rank has published."""
        return self._headers.headers

    @property
    def lateness(self) -> float:
        """Seconds since this rank began its last header."""
        return time.monotonic() - self._last

    def meet(
        self,
        flag: int,
        fingerprint: int,
        value: int,
        largest: int,
        patience_ms: int,
        offset: int,
        /,
    ) -> int:
        """Exchange a header, and return a status. Collective."""
        if flag:
            self.start(flag, fingerprint, value, largest, patience_ms, offset)
            return self._complete()
        headers = self._headers
        data = pack(0, fingerprint, value, -(patience_ms or _UNLIMITED), largest)
        if headers.meet(data, self._take_lateness()):
            self.verdict = (0, 1, 1, 0, largest)
            return OK
        self._request = headers.pending_header()
        return self._complete()

    def start(
        self,
        flag: int,
        fingerprint: int,
        value: int,
        largest: int,
        patience_ms: int,
        offset: int,
        /,
    ) -> None:
        """Publish a header without waiting for those of the others."""
        words = [0] * WORDS
        words[FLAG] = flag
        words[LATENESS] = self._take_lateness()
        words[PATIENCE] = -(patience_ms or _UNLIMITED)
        words[FINGERPRINT], words[NOT_FINGERPRINT] = fingerprint, ~fingerprint
        words[VALUE], words[NOT_VALUE] = value, ~value
        words[LARGEST] = largest
        self._request = self._headers.start_header(words)

    def test(self) -> int | None:
        """Return the status of the header of `start`; None if some are missing."""
        request = self._request
        assert request is not None
        return self._judge(request) if request.Test() else None

    def missing(self) -> list[int]:
        """Return nobody: what comes from all at once says nothing about each."""
        return []

    def leave(self) -> None:
        """Do nothing: the ranks that wait learn of it by a notice."""

    def _take_lateness(self) -> int:
        """Return for how many ms another rank can have waited for this one."""
        now = time.monotonic()
        lateness, self._last = now - self._last, now
        return int(lateness * 1000)

    def _complete(self) -> int:
        """Wait for the header in progress, and return its status."""
        request = self._request
        assert request is not None
        try:
            poll(request, self.pause or _ignore, spins=self._spins)
        except BaseException:
            request.leak()
            raise
        return self._judge(request)

    def _judge(self, request: Request) -> int:
        words = request.result
        flag = int(words[FLAG]) & 1
        same = int(words[FINGERPRINT]) == ~int(words[NOT_FINGERPRINT])
        same_value = int(words[VALUE]) == ~int(words[NOT_VALUE])
        self.verdict = (flag, int(same), int(same_value), 0, int(words[LARGEST]))
        if 2 * words[LATENESS] >= -words[PATIENCE]:
            return AGAIN
        return OK if same and not flag else DIFFERENT


def _ignore(waited: float) -> None:
    """Do nothing while a rank waits: there is no guard."""
