"""Channels, over which ranks exchange headers.

A *channel* lets all ranks say what they are about to do, and tells each what all have
said. `Channel` is the interface of all. There is one for each medium: the memory
of a node (``core.Channel``), MPI between nodes (``core.Between``), both in the native
core; `ExchangeChannel` for MPI without the core, and for replicas that are threads; and
`SelfChannel` for one rank.

A header has a flag (this rank has failed), the fingerprint of the call, a *value* that
may differ, an integer of which all ranks learn the *largest*, how late its rank is, and
how long it would wait. `meet` returns

- `OK`: no flag is up, and all ranks make the same call;
- `AGAIN`: some rank was so late that another may have given up on it. Every rank gets
  this, and has to exchange its header once more: one that has given up does not, and
  its notice ends that second wait;
- `DIFFERENT`: a flag is up, or the calls differ;
- `LEFT`: a rank will not come any more; ``who`` is its number.

Why a rank that comes too late is always noticed: MPI may complete the header of the
late rank although the others have given up (they have sent theirs already). So each
header carries how long ago its rank began its last one: no other can have waited for
longer than that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

from mpidist import _native
from mpidist._agreement.polling import YIELD_SECONDS, YIELD_SECONDS_FOR_DATA, poll
from mpidist._base.memory import leak
from mpidist._mpi.communicator import Communicator
from mpidist._mpi.requests import Begun, Request, StartHeader

OK, AGAIN, DIFFERENT, LEFT = range(4)
NOWHERE: Final = -1

_UNLIMITED: Final = 2**61  # milliseconds
_BUSY: Final = (  # as the core says it
    "another thread of this rank, or what a signal has interrupted, is in a collective "
    "call of this strategy; make the calls of a strategy from one thread, one after "
    "the other"
)
_FLAG, _FINGERPRINT, _VALUE, _LARGEST, _TIMEOUT, _LATENESS = range(6)


class LeftError(Exception):
    """Another rank has left in the middle of a payload.

    Attributes:
        rank: the one that left.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has left")
        self.rank = rank


Verdict: TypeAlias = tuple[int, int, int, int, int]
"""What the headers of all ranks say together: whether a flag is up; whether the calls
are the same; whether the values are; whether all results are in arenas; the largest
integer. A plain tuple, since the core makes one for every header."""


class Channel(Protocol):
    """The interface that the guard uses to exchange headers with the other ranks.

    Attributes:
        who: the rank that has left, as the core says it.
        pause: called with the seconds waited, several times a second; may raise.
        moves: whether this rank waits for the data that follows a header.
        verdict: what the last headers of all ranks say together.
    """

    who: int = -1
    pause: Callable[[float], None] | None = None
    moves: bool = False
    verdict: Verdict = (0, 1, 1, 0, 0)

    @property
    def busy(self) -> bool | int:
        """Whether this rank is exchanging a header, or the core moves its data."""

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
        timeout_ms: int,
        offset: int,
        /,
    ) -> int:
        """Exchange a header, and return a status. Collective.

        Args:
            flag: 1 if this rank has failed.
            fingerprint: of the call.
            value: an integer that may differ.
            largest: an integer of which all ranks learn the largest.
            timeout_ms: how long this rank would wait; 0: forever.
            offset: of its results in its arena, for the core; or `NOWHERE`.
        """

    @property
    def start(self) -> Callable[[int, int, int, int, int, int], object]:
        """Publishes a header, as `meet`, without waiting for those of the others."""

    def test(self) -> int | None:
        """Return the status of the header of `start`; None if some are missing."""

    def missing(self) -> list[int]:
        """Return the ranks that are known not to be there yet.

        None where a collective of MPI carries the header, which does not tell.
        """
        return []

    def leave(self) -> None:
        """Tell the ranks that wait for this one that it makes no more steps.

        Without the core they learn of it by a notice.
        """
        return


def open_channel(comm: Communicator, shared: Channel | None) -> Channel:
    """Return where ranks exchange headers. Collective.

    Args:
        comm: the ranks.
        shared: the channel in the memory that all of them share, if there is one.
    """
    if shared is not None:
        return shared
    if comm.size == 1:
        return SelfChannel()
    headers: Any = comm.open_headers()
    between = between_of(headers)
    if between is None:
        return ExchangeChannel(headers)
    between.wait = _wait_for_header
    comm.traffic.core = between
    return between


def between_of(channel: object) -> _native.Between | None:
    """Return a channel if it is the core's between nodes, which may carry data."""
    core = _native.core
    return channel if core is not None and type(channel) is core.Between else None


def _wait_for_header(between: _native.Between) -> None:
    """Wait until a header of all ranks is there, or the data behind it."""
    seconds = YIELD_SECONDS_FOR_DATA if between.moves else YIELD_SECONDS
    poll(between, between.pause or _ignore, yield_seconds=seconds)


class SelfChannel(Channel):
    """The channel of one rank, which agrees with itself."""

    busy = False
    headers = 0
    lateness = 0.0

    def meet(self, flag: int, *header: int) -> int:
        """Return whether this rank has failed."""
        self.headers += 1
        self.verdict = (flag, 1, 1, 0, header[_LARGEST - 1])
        return DIFFERENT if flag else OK

    start = meet

    def test(self) -> int | None:
        """Return the status of the header of `start`."""
        return DIFFERENT if self.verdict[0] else OK


class ExchangeChannel(Channel):
    """A channel that gathers each header as integers, by MPI or between threads.

    Args:
        start: starts to send integers of each rank to all.
    """

    def __init__(self, start: StartHeader) -> None:
        self._start = start
        self._last = time.monotonic()
        self._begun: Begun = deque([(0, None)], maxlen=1)
        self._request: Request | None = None
        self._idle = threading.Lock()  # held while a header is on the way

    @property
    def busy(self) -> bool:
        """Whether this rank is exchanging a header."""
        return self._idle.locked()

    @property
    def headers(self) -> int:
        """How many headers this rank has published."""
        return self._begun[-1][0]

    @property
    def lateness(self) -> float:
        """Seconds since this rank began its last header."""
        return time.monotonic() - self._last

    def meet(self, *header: int) -> int:
        """Exchange a header, and return a status. Collective."""
        try:
            request = self.start(*header)
            poll(request, self.pause or _ignore)
        except BaseException:
            leak(self._begun)  # MPI may still use what the header does
            raise
        return self._judge(request.result)

    def start(self, *header: int) -> Request:
        """Publish a header without waiting for those of the others.

        Raises:
            RuntimeError: if this rank has not got those of the last one.
        """
        if not self._idle.acquire(blocking=False):
            raise RuntimeError(_BUSY)
        *said, timeout_ms, _ = header  # there is no arena, so no offset
        # For how long another rank can have waited for this one.
        lateness = int(1000 * self.lateness)
        self._last = time.monotonic()
        words = (*said, timeout_ms or _UNLIMITED, lateness)
        request = self._start(words, self._begun)
        self._request = request
        return request

    def test(self) -> int | None:
        """Return the status of the header of `start`; None if some are missing."""
        request = self._request
        assert request is not None
        return self._judge(request.result) if request.Test() else None

    def _judge(self, rows: list[Sequence[int]]) -> int:
        """Return the status of the headers of all ranks."""
        self._idle.release()
        columns: list[tuple[Any, ...]] = list(zip(*rows, strict=True))
        flag = max(columns[_FLAG])
        same = int(len(set(columns[_FINGERPRINT])) == 1)
        same_value = int(len(set(columns[_VALUE])) == 1)
        self.verdict = (flag, same, same_value, 0, max(columns[_LARGEST]))
        if 2 * max(columns[_LATENESS]) >= min(columns[_TIMEOUT]):
            return AGAIN
        return OK if same and not flag else DIFFERENT


def _ignore(waited: float) -> None:
    """Do nothing during a wait: no guard watches the channel yet."""
