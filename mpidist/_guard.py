"""The guard: a small agreement of all ranks before any data moves.

Before its payload every collective exchanges one *header* over all ranks: an
error flag, a fingerprint of the call, a hash of what may differ, and how late the
rank is. The header is one non-blocking all-reduce (MAX) of a few
integers, so its size does not grow with the number of ranks: the maximum of a
number and of its complement are complements exactly when all ranks sent the same.

What a header can find:

- *All agree*: the payload follows, and may block at full speed.
- *A flag is up*: a rank raised. All ranks exchange reports (a byte string each),
  and every rank raises: the failed one its own exception, the others one that
  holds its traceback.
- *Fingerprints differ*: the ranks exchange reports as well, and all raise the same
  `CollectiveMismatchError` with both sides.
- *It does not complete*: a rank is missing. Non-blocking, it is polled with a
  deadline. A rank that has waited for long posts a notice to all others
  (who it is, what it waits for), so that each waiting rank knows which are missing.
  At the deadline it posts a last notice and raises `CollectiveTimeoutError`.

Why a rank that comes too late can not slip through: MPI may complete the header of
the late rank although the others have given up (their share of it was already sent).
So each header carries how late its rank is (since it began its last header) and how
long it would wait. If the largest lateness of all is near the smallest deadline, every
rank that completes the header confirms by a second one before it goes on; one that has
given up does not, and its notice ends that second wait.

Every rank's last completed header is the same, which is why the message can say
what a missing rank called last without having heard from it.

Rejected: a watchdog thread (it would call MPI from two threads at once), a barrier
with time-out (finds no mismatch), remote memory access for the notices (on several
fabrics it moves only while its target calls MPI).
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from mpidist._board import (
    FLAG,
    LATENESS,
    MOST,
    NOT_PRINT,
    NOT_SOFT,
    OVERDUE,
    PATIENCE,
    PRINT,
    SOFT,
    WORDS,
    LeftError,
    pack,
)
from mpidist._comm import AnyCommunicator, Request
from mpidist._errors import (
    CollectiveError,
    CollectiveTimeoutError,
    format_ranks,
    on_rank,
)
from mpidist._reports import Call, ErrorKind, Report, judge

_FOR_EVER: Final = 2**61  # milliseconds

# Waiting: poll without pause, then give the core away between polls, then sleep.
_SPINS: Final = 200
_YIELD_SECONDS: Final = 0.02
_SHORT_SLEEP: Final = 0.0002
_LONG_SLEEP: Final = 0.002
_NOTICE_INTERVAL: Final = 0.05
# How long a rank waits for the notices of others before it names who is missing.
_SETTLE_SECONDS: Final = 0.25

# How long a rank waits, at least, for another that is in the same payload: it may have
# been stopped, or wait for memory.
_LEAST_PATIENCE: Final = 30.0

_NO_FLOOR: Final = sys.maxsize

_R = TypeVar("_R")


@dataclasses.dataclass
class _Notice:
    rank: int
    sequence: int
    call: str
    gave_up: str = ""


class Part:
    """What a rank says at the end of a section: whose errors, and what came out."""

    kind: ErrorKind = "invalid"
    text: str | Callable[[], str] = ""
    print = 0

    def came_out(self, text: str | Callable[[], str], number: int) -> None:
        """Say what came out, which must be the same on all ranks.

        Args:
            text: it, or a function that gives it, for the message where it differs.
            number: 62 bits that differ where it does.
        """
        self.text, self.print = text, number


class Guard:
    """Agreement, propagation of errors and deadline for one communicator."""

    def __init__(
        self,
        comm: AnyCommunicator,
        *,
        timeout_seconds: float,
        stall_seconds: float,
        enabled: bool = True,
    ) -> None:
        self._comm = comm
        self.timeout_seconds = timeout_seconds
        self._stall = stall_seconds
        self.enabled = enabled
        self.sequence = 0
        self.broken = ""
        # Sections that this rank is in: stretches that end with a `join`. Those above
        # the floor are given up, because some rank is not in them.
        self._depth = 0
        self._floor = _NO_FLOOR
        self._given_up: BaseException | None = None
        self._together = False
        # What the update that runs here has written to this rank's copies, and how all
        # ranks make copies equal again (given keys) where an update has failed.
        self.written: list[Any] = []
        self.repair: Callable[[list[Any]], None] | None = None
        # merge_fn runs here, and the other ranks wait for its commands.
        self.leading = False
        self.closed = False
        self._last_call = "making the strategy"
        self._last_time = time.monotonic()
        self._send = [0] * WORDS
        self._receive = [0] * WORDS
        self._equal = False  # the last header was the same on all ranks, word by word
        # With more ranks than cores a spinning rank takes the core from the one that
        # it waits for. Launchers bind ranks to cores, so affinity does not tell.
        crowded = comm.machine_size > (os.cpu_count() or 1)
        self._spins = 0 if crowded else _SPINS
        self._sent: list[Request] = []
        self._notices: dict[int, _Notice] = {}
        comm.look = self._read_notices
        if timeout_seconds:
            comm.patience = max(timeout_seconds, _LEAST_PATIENCE)

    # --- the header -----------------------------------------------------------

    def agree(self, call: Call, timeout: float | None = None) -> None:
        """Return when all ranks make this call; raise on all ranks otherwise.

        Collective.

        Args:
            call: what this rank is about to do.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        if not self.enabled:
            self._require_usable()
            return
        self.require_section()
        if self._exchange(call, 0, 0, timeout):
            return
        raise self._difference(call, None, "none")

    def pack(self, call: Call, mark: int) -> bytes:
        """Return the header of a call with a mark, for `agree_packed`."""
        patience = -_FOR_EVER
        if self.timeout_seconds:
            patience = -int(self.timeout_seconds * 1000)
        return pack(0, call.fingerprint, mark, patience, 0)

    def agree_packed(self, call: Call, data: bytes, mark: int) -> bool:
        """As `agree_softly`, for a header that was packed before. Collective.

        For guards that are on, of more than one rank; with a board also those off.

        Returns:
            As `agree_softly`; False also where the ranks have met more than once.
        """
        if self._floor < self._depth or self.broken or self.leading:
            self.require_section()
            self._require_usable()
        timeout = self.timeout_seconds
        lateness = self._lateness(timeout)
        board = self._comm.meeting
        assert board is not None
        if not timeout or 4 * lateness < int(timeout * 1000):
            try:
                same = board.meet(data, lateness)
            except BaseException as error:
                self._interrupt(call.text, error)
                raise
            if same:
                self.sequence += 1
                self._last_call = call.text
                return True
            number = board.headers
            if self._settle(board.pending_header(), call, 0, mark, timeout):
                return self._same(SOFT) and board.headers == number
        else:
            number = board.headers + 1
            if self._publish(call, 0, mark, timeout, lateness):
                return self._same(SOFT) and board.headers == number
        raise self._difference(call, None, "none")

    def agree_softly(self, call: Call, soft: int, timeout: float | None = None) -> bool:
        """As `agree`, and return whether ``soft`` is the same on all ranks.

        Works with the guard off as well: what it returns is needed.
        """
        self.require_section()
        if self._exchange(call, 0, soft, timeout):
            return self._same(SOFT)
        raise self._difference(call, None, "none")

    def agree_most(self, call: Call, number: int) -> tuple[int, bool]:
        """As `agree`, and return the largest ``number``, and whether all are the same.

        They ride in the header. Works with the guard off as well: what it returns is
        needed.

        Args:
            call: what this rank is about to do.
            number: an integer, 0 or more.
        """
        self.require_section()
        self._send[MOST] = number
        try:
            if self._comm.size == 1:
                self._exchange(call, 0, 0, None)
                return number, True
            if self._exchange(call, 0, number, None):
                if self._equal:
                    return number, True
                return int(self._receive[MOST]), self._same(SOFT)
        finally:
            self._send[MOST] = 0
        raise self._difference(call, None, "none")

    def require_section(self) -> None:
        """Raise where some rank is not in the innermost section that this one is in."""
        if self.deserted and self._given_up is not None:
            raise self._given_up

    def fail(self, call: Call, error: BaseException, kind: ErrorKind) -> BaseException:
        """Tell all ranks that this one can not go on; return what to raise.

        Collective in effect: the header of the other ranks' next call meets this one.
        """
        if not self.enabled or self.broken or self.leading or self.deserted:
            return error
        if isinstance(error, CollectiveError):
            return error  # all ranks have it already
        self._exchange(call, 1, 0, None)
        return self._difference(call, error, kind)

    @property
    def checks(self) -> bool:
        """Whether calls are compared with those of other ranks."""
        return self.enabled and self._comm.size > 1

    def join(
        self,
        call: Call,
        error: BaseException | None,
        kind: ErrorKind = "raised",
        result: str | Callable[[], str] = "",
        number: int = 0,
    ) -> BaseException | None:
        """Wait until every rank has come to this call; return what to raise.

        The end of a `section`: a rank that is here first meets the headers of ranks
        that are still inside it, tells them what happened to it, and waits on, until
        all are here. ``number`` must then be the same on all, and ``result`` says what
        it stands for. If it turns out that some rank never entered the section, there
        is nothing to wait for.
        """
        if self.broken:
            return error or self._broken_error()
        if not self.enabled:
            return error
        if self.deserted:
            return error or self._given_up
        while not self._exchange_chained(call, error, number):
            found = self._difference(call, error, kind, joining=True)
            if error is None:
                error, kind = found, "agreed"
            if self._together or self.deserted:
                return error
        if not self._same(SOFT):
            text = result if isinstance(result, str) else result()
            return self._difference(Call(f"{call.text} -> {text}"), None, "none")
        return error

    def _exchange_chained(
        self, call: Call, error: BaseException | None, soft: int
    ) -> bool:
        try:
            return self._exchange(call, 0 if error is None else 1, soft, None)
        except CollectiveTimeoutError as timeout:
            raise timeout from error  # which would be lost otherwise

    @property
    def deserted(self) -> bool:
        """Whether some rank is not in the innermost section that this one is in."""
        return self._floor < self._depth

    def section(self) -> Guard:
        """A stretch of the program that every rank enters, and leaves by `join`."""
        return self

    def __enter__(self) -> None:
        """Enter a `section`."""
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        """Leave a `section`."""
        self._depth -= 1
        if self._depth <= self._floor:
            self._floor, self._given_up = _NO_FLOOR, None

    def run_section(self, call: Call, body: Callable[[Part], _R]) -> _R:
        """Run ``body`` on every rank, and wait until it has ended on all. Collective.

        What it raises on one rank is raised on all.

        Args:
            call: what all ranks are at the end of.
            body: gets a `Part`, where it says whose errors its own are, and what came
                out.
        """
        part = Part()
        error: BaseException | None = None
        result: Any = None
        with self.section():
            try:
                result = body(part)
            except KeyboardInterrupt:
                raise
            except BaseException as raised:
                error = raised
                if isinstance(error, CollectiveError):
                    part.kind = "agreed"
            error = self.join(call, error, part.kind, part.text, part.print)
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def leave(self, call: Call, code: Any) -> Iterator[None]:
        """Wait, at the end of the program, for the end of the others' programs.

        Yields while it waits, so that the caller can wait for several guards. A rank
        that is still in a collective learns that this one has gone.
        """
        gone = SystemExit(code)
        while not self.broken:
            try:
                self._read_notices()
            except CollectiveTimeoutError:
                return
            self._send = [0] * WORDS
            self._send[PATIENCE] = -_FOR_EVER
            self._send[PRINT], self._send[NOT_PRINT] = (
                call.fingerprint,
                ~call.fingerprint,
            )
            self._send[NOT_SOFT] = ~0
            while True:
                request = self._comm.start_header(self._send)
                while not request.Test():
                    yield
                    try:
                        self._read_notices()
                    except CollectiveTimeoutError:
                        request.leak()
                        return
                self._receive, self._equal = request.result, False
                if not self._was_late():
                    break
            self.sequence += 1
            if not self._receive[FLAG] and self._same(PRINT):
                return
            self._difference(call, gone, "exit")

    def _exchange(
        self, call: Call, flag: int, soft: int, timeout: float | None
    ) -> bool:
        """Return whether no flag is up and all fingerprints are the same."""
        self._require_usable()
        if self._comm.size == 1:
            self.sequence += 1
            self._receive[NOT_PRINT] = self._receive[NOT_SOFT] = ~0
            return not flag
        with self._comm.traffic.timed():
            return self._compare(call, flag, soft, timeout)

    def _compare(self, call: Call, flag: int, soft: int, timeout: float | None) -> bool:
        timeout = self.timeout_seconds if timeout is None else timeout
        return self._publish(call, flag, soft, timeout, self._lateness(timeout))

    def _publish(
        self, call: Call, flag: int, soft: int, timeout: float, lateness: int
    ) -> bool:
        send = self._send
        patience = -int(timeout * 1000) if timeout else -_FOR_EVER
        board = self._comm.meeting
        if board is not None and not flag:
            late = OVERDUE if 4 * lateness >= -patience else 0
            data = pack(late, call.fingerprint, soft, patience, send[MOST])
            try:
                same = board.meet(data, lateness)
            except BaseException as error:
                self._interrupt(call.text, error)
                raise
            if same and not late:
                self._equal = True
                self.sequence += 1
                self._last_call = call.text
                return True
            return self._settle(board.pending_header(), call, flag, soft, timeout)
        self._fill(call, flag, soft, timeout, lateness)
        return self._settle(self._comm.start_header(send), call, flag, soft, timeout)

    def _settle(
        self, request: Request, call: Call, flag: int, soft: int, timeout: float
    ) -> bool:
        """Wait for a header; return whether no flag is up and all make this call."""
        self._wait_header(request, call, timeout)
        while self._was_late():
            # The confirming round: everybody is known to be on the way.
            self._fill(call, flag, soft, timeout, 0)
            request = self._comm.start_header(self._send)
            self._wait_header(request, call, max(timeout, 30.0) if timeout else 0.0)
        self.sequence += 1
        self._last_call = call.text
        return not self._receive[FLAG] and self._same(PRINT)

    def _lateness(self, timeout: float) -> int:
        """Return for how many milliseconds another rank can have waited for this one.

        Nobody can have waited for this header for longer than since this rank began
        the one before.
        """
        now = time.monotonic()
        lateness = now - self._last_time
        self._last_time = now
        if timeout and lateness * 2 > timeout:
            self._read_notices()
        return int(lateness * 1000)

    def _fill(
        self, call: Call, flag: int, soft: int, timeout: float, lateness: int
    ) -> None:
        send = self._send
        send[LATENESS] = lateness
        send[PATIENCE] = -int(timeout * 1000) if timeout else -_FOR_EVER
        send[FLAG] = flag
        send[PRINT] = call.fingerprint
        send[NOT_PRINT] = ~call.fingerprint
        send[SOFT] = soft
        send[NOT_SOFT] = ~soft

    def _wait_header(self, request: Request, call: Call, timeout: float) -> None:
        self.wait(request, call.text, timeout)
        self._receive = request.result
        self._equal = False

    def _was_late(self) -> bool:
        """Whether some rank came so late that another may have given up on it.

        The largest lateness and the smallest deadline of all ranks, so that all of
        them decide alike.
        """
        received = self._receive
        return bool(2 * received[LATENESS] >= -received[PATIENCE])

    def _same(self, word: int) -> bool:
        """Whether a word of the last header is the same on all ranks."""
        received = self._receive
        return self._equal or int(received[word]) == ~int(received[word + 1])

    # --- what went wrong ------------------------------------------------------

    def _difference(
        self,
        call: Call,
        error: BaseException | None,
        kind: ErrorKind,
        *,
        joining: bool = False,
    ) -> BaseException:
        """Exchange reports and return the exception that this rank raises."""
        report = Report.of(self._comm.rank, call, error, kind)
        report.depth, report.joining = self._depth, joining
        report.written = sorted({variable._key for variable in self.written})
        self.written = []
        data = self._exchange_bytes(pickle.dumps(report), call.text)
        reports: list[Report] = [pickle.loads(item) for item in data]
        found = judge(self._comm.rank, reports) if error is None else error
        floor = min(report.depth for report in reports)
        # At the ends of different sections there is nothing more to wait for.
        self._together = all(
            report.joining and report.depth == self._depth for report in reports
        )
        if floor < self._depth:
            self._floor, self._given_up = min(floor, self._floor), found
        # All ranks are here now, whatever each was about to do: the only moment at
        # which an update that some of them did not make can be undone.
        written = sorted({key for report in reports for key in report.written})
        if written and self.repair is not None:
            self.repair(written)
        return found

    def _exchange_bytes(self, data: bytes, what: str) -> list[bytes]:
        """Return the bytes of each rank. Collective.

        Polled, since a rank may be interrupted between its header and this.
        """
        sizes = self._comm.start_gather_sizes(len(data))
        self.wait(sizes, what)
        everything = self._comm.start_gather_bytes(data, sizes.result)
        self.wait(everything, what)
        found: list[bytes] = everything.result
        return found

    # --- waiting --------------------------------------------------------------

    def wait(self, request: Request, what: str, timeout: float | None = None) -> None:
        """Poll a pending operation until it completes.

        Raises:
            CollectiveTimeoutError: after ``timeout`` seconds (None: the strategy's;
                0: never), on every waiting rank.
        """
        try:
            for _ in range(self._spins):
                if request.Test():
                    return
            self._poll(request, what, timeout)
        except BaseException as error:
            request.leak()
            self._interrupt(what, error)
            raise

    def _interrupt(self, what: str, error: BaseException) -> None:
        """Give up after an exception that came from outside, such as a signal's."""
        if not self.broken:
            self.broken = (
                f"rank {self._comm.rank} was interrupted by {type(error).__name__} in "
                f"{what}; this strategy can not be used any more"
            )
            self._post_notice(what, self.broken)
            if self._comm.board is not None:
                self._comm.board.leave()

    def leave_payload(self, call: Call, error: BaseException) -> BaseException:
        """Give up what all ranks are in the middle of; return what to raise.

        The others would wait for this rank without end. All that move data step by
        step in shared memory learn of it there, the others by a notice.

        Args:
            call: what it is.
            error: what this rank raised there: a signal's, as a rule, or `LeftError`.
        """
        if self.broken:
            return error
        if isinstance(error, LeftError):
            end = time.monotonic() + _SETTLE_SECONDS
            while time.monotonic() < end:
                try:
                    self._read_notices()
                except CollectiveTimeoutError as told:
                    error = told
                    break
                time.sleep(_SHORT_SLEEP)
            else:
                self.broken = (
                    f"rank {error.rank} {error.why} {call.text} before its end; this "
                    "strategy can not be used any more"
                )
                self._post_notice(call.text, self.broken)
                error = self._broken_error()
        self._interrupt(call.text, error)
        if self._comm.board is not None:
            self._comm.board.leave()
        return error

    def _poll(self, request: Request, what: str, timeout: float | None) -> None:
        timeout = self.timeout_seconds if timeout is None else timeout
        start = time.monotonic()
        publish = self._stall
        if timeout:
            publish = min(publish, timeout / 2)
        published = warned = False
        next_look = start + _NOTICE_INTERVAL
        while not request.Test():
            now = time.monotonic()
            waited = now - start
            if waited < _YIELD_SECONDS:
                os.sched_yield()
                continue
            time.sleep(_SHORT_SLEEP if waited < 1.0 else _LONG_SLEEP)
            if now < next_look:
                continue
            next_look = now + _NOTICE_INTERVAL
            self._read_notices()
            if waited < publish:
                continue
            if not published:
                self._post_notice(what)
                published = True
            if not warned and waited >= self._stall + _SETTLE_SECONDS:
                warned = True
                self._report_stall(what, waited)
            if timeout and waited >= timeout:
                raise self._give_up(what, timeout)

    def check_late(self) -> None:
        """Raise if the others have given up on this rank while it was away."""
        self._require_usable()
        lateness = time.monotonic() - self._last_time
        if self.timeout_seconds and lateness * 2 > self.timeout_seconds:
            self._read_notices()

    def _require_usable(self) -> None:
        if self.broken:
            raise self._broken_error()
        if self.leading:
            raise RuntimeError(
                on_rank(
                    self._comm.rank,
                    "merge_fn runs on this rank alone, so it can not take part in a "
                    "collective call of the replicas, nor can a thread that it starts, "
                    "and it can not close the strategy; call the methods of the "
                    "`strategy` that it got",
                )
            )

    def _broken_error(self) -> RuntimeError:
        text = on_rank(self._comm.rank, self.broken)
        return RuntimeError(text) if self.closed else CollectiveTimeoutError(text)

    def _post_notice(self, what: str, gave_up: str = "") -> None:
        notice = _Notice(self._comm.rank, self.sequence, what, gave_up)
        self._notices[self._comm.rank] = notice
        data = pickle.dumps(notice)
        self._sent = [request for request in self._sent if not request.Test()]
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._sent.append(self._comm.post_notice(data, rank))

    def _read_notices(self) -> None:
        while (data := self._comm.read_notice()) is not None:
            notice: _Notice = pickle.loads(data)
            if notice.gave_up:  # for good, also where this rank has got further
                self.broken = notice.gave_up
                raise CollectiveTimeoutError(on_rank(self._comm.rank, notice.gave_up))
            if notice.sequence < self.sequence:
                continue  # of a wait that is over
            self._notices[notice.rank] = notice

    def _waiting_and_missing(self) -> tuple[list[int], list[int]]:
        waiting = [
            rank
            for rank, notice in sorted(self._notices.items())
            if notice.sequence == self.sequence
        ]
        missing = [r for r in range(self._comm.size) if r not in waiting]
        return waiting, missing

    def _report_stall(self, what: str, waited: float) -> None:
        waiting, missing = self._waiting_and_missing()
        if not missing or not waiting or waiting[0] != self._comm.rank:
            return
        print(f"mpidist: {self._describe_wait(what, waited)}", file=sys.stderr)
        sys.stderr.flush()

    def _describe_wait(self, what: str, waited: float) -> str:
        waiting, missing = self._waiting_and_missing()
        calls: dict[str, list[int]] = {}
        for rank in waiting:
            calls.setdefault(self._notices[rank].call, []).append(rank)
        where = "; ".join(
            f"{format_ranks(ranks)} waited in {call}" for call, ranks in calls.items()
        )
        if not missing:
            return f"all ranks wait, for different things, for {waited:.3g} s: {where}"
        return (
            f"{format_ranks(missing)} did not come to call {self.sequence + 1} within "
            f"{waited:.3g} s: {where or what}. The last call that "
            f"{format_ranks(missing)} made with the others was call {self.sequence}: "
            f"{self._last_call}"
        )

    def _give_up(self, what: str, timeout: float) -> CollectiveTimeoutError:
        facts = (
            f"{self._describe_wait(what, timeout)}. This strategy can not be used any "
            "more, since the missing rank may still be on its way; variables and "
            "arrays are as they were before the call. Make the ranks call the same "
            "things, or raise `timeout_seconds` in CommunicationOptions if the rank "
            "was only slow"
        )
        self._post_notice(what, facts)
        self.broken = facts
        return CollectiveTimeoutError(on_rank(self._comm.rank, facts))


def poll(request: Any, what: str, timeout: float) -> None:
    """Wait for an operation of a communicator that has no guard yet.

    Raises:
        CollectiveTimeoutError: after ``timeout`` seconds (0: never).
    """
    start = time.monotonic()
    while not request.Test():
        waited = time.monotonic() - start
        if timeout and waited > timeout:
            raise CollectiveTimeoutError(
                f"{what}: not all ranks of the communicator made this call within "
                f"{timeout:.3g} s; make the strategy on every rank of `comm`"
            )
        time.sleep(0 if waited < _YIELD_SECONDS else _SHORT_SLEEP)
