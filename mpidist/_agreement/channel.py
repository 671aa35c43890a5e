"""Where ranks exchange headers: through shared memory, or by messages.

A *channel* lets all ranks say what they are about to do, and tells each what all have
said. `Channel` is what the guard asks of one. The native core has one for the ranks of
one node (`mpidist._native.core.Channel`); `MessageChannel` is the same by the requests
of a communicator, for ranks that share no memory.

A header has a flag (this rank has failed), the fingerprint of the call, a number that
may differ (*soft*), one of which all learn the largest (*most*), how late its rank is,
and how long it would wait. `meet` returns

- `OK`: no flag is up, and all ranks make the same call;
- `AGAIN`: some rank was so late that another may have given up on it. Every rank gets
  this, and has to exchange its header once more: one that has given up does not, and
  its notice ends that second wait;
- `DIFFERENT`: a flag is up, or the calls differ;
- `LEFT`: a rank will not come any more; `who` is its number.

Why a rank that comes too late cannot slip through: messages may complete the header of
the late rank although the others have given up (their share of it was sent already). So
each header carries how long ago its rank began its last one: no other can have waited
for longer than that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from mpidist._mpi.communicator import is_crowded
from mpidist._mpi.header_words import (
    FINGERPRINT,
    FLAG,
    LATENESS,
    MOST,
    NOT_FINGERPRINT,
    NOT_SOFT,
    PATIENCE,
    SOFT,
    WORDS,
    pack,
)

OK, AGAIN, DIFFERENT, LEFT = range(4)
NOWHERE: Final = -1

_FOR_EVER: Final = 2**61  # milliseconds
# Waiting: look without pause, then give the core away between looks, then sleep.
_LOOKS: Final = 200
_YIELD_SECONDS: Final = 0.02
_SHORT_SLEEP: Final = 0.0002
_LONG_SLEEP: Final = 0.002
_SLICE: Final = 0.05


class LeftError(Exception):
    """Another rank has left in the middle of a payload.

    Attributes:
        rank: which.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has left")
        self.rank = rank


Verdict = tuple[int, int, int, int, int]
"""A flag is up; the calls are the same; soft is; all have a place; the largest most."""


class Channel(Protocol):
    """What the guard asks of a channel."""

    who: int
    pause: Callable[[float], None] | None
    """Called with the seconds waited, several times a second; may raise."""

    @property
    def verdict(self) -> Verdict:
        """What all ranks make of the last header."""

    @property
    def lateness(self) -> float:
        """Seconds since this rank began its last header."""

    def meet(
        self,
        flag: int,
        fingerprint: int,
        soft: int,
        most: int,
        patience_ms: int,
        place: int,
        /,
    ) -> int:
        """Exchange a header, and return a status. Collective.

        Args:
            flag: 1 where this rank has failed.
            fingerprint: of the call.
            soft: a number that may differ.
            most: a number of which all learn the largest.
            patience_ms: how long this rank would wait; 0: forever.
            place: where its results are, for the core.
        """

    def start(
        self,
        flag: int,
        fingerprint: int,
        soft: int,
        most: int,
        patience_ms: int,
        place: int,
        /,
    ) -> object:
        """Publish a header without waiting for those of the others."""

    def test(self) -> int | None:
        """Return the status of the header of `start`; None if some are missing."""

    def missing(self) -> list[int]:
        """Return the ranks that are known not to be there yet."""

    def leave(self) -> None:
        """Tell those who wait for this rank that it makes no more steps."""


class MessageChannel:
    """A channel by the requests of a communicator.

    Args:
        comm: has ``start_header(words)``, and where headers have a faster way
            ``meeting``.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._last = time.monotonic()
        self._request: Any = None
        self.who = -1
        self.pause: Callable[[float], None] | None = None
        self.verdict: Verdict = (0, 1, 1, 0, 0)
        crowded = is_crowded(comm.machine_size)
        self._looks = 0 if crowded else _LOOKS

    @property
    def lateness(self) -> float:
        """Seconds since this rank began its last header."""
        return time.monotonic() - self._last

    def meet(
        self,
        flag: int,
        fingerprint: int,
        soft: int,
        most: int,
        patience_ms: int,
        place: int,
        /,
    ) -> int:
        """Exchange a header, and return a status. Collective."""
        meeting = self._comm.meeting
        if flag or meeting is None:
            self.start(flag, fingerprint, soft, most, patience_ms, place)
        else:
            data = pack(0, fingerprint, soft, -(patience_ms or _FOR_EVER), most)
            if meeting.meet(data, self._take_lateness()):
                self.verdict = (0, 1, 1, 0, most)
                return OK
            self._request = meeting.pending_header()
        return self._complete()

    @property
    def room(self) -> int:
        """The most bytes of a payload that travels with a header."""
        meeting = self._comm.meeting
        return 0 if meeting is None else int(meeting.room)

    def meet_with(self, fingerprint: int, patience_ms: int, nbytes: int) -> int:
        """Exchange a header and a payload, and return a status. Collective.

        Args:
            fingerprint: of the call.
            patience_ms: how long this rank would wait; 0: forever.
            nbytes: of the payload, which is in this rank's `payload_rows`: at most
                `room`, and as many as on all other ranks.
        """
        meeting = self._comm.meeting
        data = pack(0, fingerprint, 0, -(patience_ms or _FOR_EVER), 0)
        if meeting.meet(data, self._take_lateness(), nbytes):
            return OK
        self._request = meeting.pending_header()
        return self._complete()

    @property
    def payload_rows(self) -> Any:
        """For each rank memory for what travels with headers; see `Headers`."""
        return self._comm.meeting.payload_rows

    def start(
        self,
        flag: int,
        fingerprint: int,
        soft: int,
        most: int,
        patience_ms: int,
        place: int,
        /,
    ) -> None:
        """Publish a header without waiting for those of the others."""
        words = [0] * WORDS
        words[FLAG] = flag
        words[LATENESS] = self._take_lateness()
        words[PATIENCE] = -(patience_ms or _FOR_EVER)
        words[FINGERPRINT], words[NOT_FINGERPRINT] = fingerprint, ~fingerprint
        words[SOFT], words[NOT_SOFT] = soft, ~soft
        words[MOST] = most
        self._request = self._comm.start_header(words)

    def test(self) -> int | None:
        """Return the status of the header of `start`; None if some are missing."""
        return self._judge() if self._request.Test() else None

    def missing(self) -> list[int]:
        """Return nobody: the sum of all says nothing of each."""
        return []

    def leave(self) -> None:
        """Do nothing: those who wait learn of it by a notice."""

    def _take_lateness(self) -> int:
        """Return for how many ms another rank can have waited for this one."""
        now = time.monotonic()
        lateness, self._last = now - self._last, now
        return int(lateness * 1000)

    def _complete(self) -> int:
        """Wait for the header under way, and return its status."""
        try:
            self._wait()
        except BaseException:
            self._request.leak()
            raise
        return self._judge()

    def _wait(self) -> None:
        request = self._request
        for _ in range(self._looks):
            if request.Test():
                return
        start = time.monotonic()
        next_pause = start + _SLICE
        wait = getattr(request, "wait", None)
        while not request.Test():
            now = time.monotonic()
            if now >= next_pause:
                next_pause = now + _SLICE
                if self.pause is not None:
                    self.pause(now - start)
            if wait is not None:
                wait(_SLICE)
            elif now - start < _YIELD_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_SHORT_SLEEP if now - start < 1.0 else _LONG_SLEEP)

    def _judge(self) -> int:
        words = self._request.result
        flag = int(words[FLAG]) & 1
        same = int(words[FINGERPRINT]) == ~int(words[NOT_FINGERPRINT])
        soft = int(words[SOFT]) == ~int(words[NOT_SOFT])
        self.verdict = (flag, int(same), int(soft), 0, int(words[MOST]))
        if 2 * words[LATENESS] >= -words[PATIENCE]:
            return AGAIN
        return OK if same and not flag else DIFFERENT
