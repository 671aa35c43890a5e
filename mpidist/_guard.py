"""The guard: a small agreement of all ranks before any data moves.

Before its payload every collective exchanges one *header* over all ranks: an
error flag, a fingerprint of the call, a hash of what may differ, and a mark for
ranks that come late. The header is one non-blocking all-reduce (MAX) of a few
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
So a rank that comes late (measured from its last header) reads its notices first. Had
the others not given up then, its header carries the mark, and every rank that completes
a marked header confirms by a second one before it goes on; one that has given up
does not, and its notice ends that second wait.

Every rank's last completed header is the same, which is why the message can say
what a missing rank called last without having heard from it.

Rejected: a watchdog thread (it would call MPI from two threads at once), a barrier
with time-out (finds no mismatch), remote memory access for the notices (on several
fabrics it moves only while its target calls MPI).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pickle
import sys
import time
from collections.abc import Iterator
from typing import Any, Final, Literal

import numpy as np

from mpidist._comm import AnyCommunicator, Request
from mpidist._errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    RemoteTraceback,
    ReplicaError,
    format_exception,
    format_ranks,
    on_rank,
)

_PACKAGE: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep
_FLAG, _PRINT, _NOT_PRINT, _SOFT, _NOT_SOFT, _LATE, _WORDS = range(7)

# Waiting: poll without pause, then give the core away between polls, then sleep.
_SPINS: Final = 200
_YIELD_SECONDS: Final = 0.02
_SHORT_SLEEP: Final = 0.0002
_LONG_SLEEP: Final = 0.002
_NOTICE_INTERVAL: Final = 0.05
# How long a rank waits for the notices of others before it names who is missing.
_SETTLE_SECONDS: Final = 0.25

_LONGEST_CALL: Final = 360
_NO_FLOOR: Final = sys.maxsize
ErrorKind = Literal["none", "raised", "invalid", "agreed", "exit"]


def fingerprint(text: str) -> int:
    """Return a 62-bit hash that is the same in every process."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class Call:
    """What a rank is about to do, as text and as a number to compare."""

    __slots__ = ("fingerprint", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.fingerprint = fingerprint(text)


@dataclasses.dataclass
class Report:
    """What one rank tells the others when a header shows a difference."""

    rank: int
    call: str
    site: str
    kind: ErrorKind = "none"
    trace: str = ""
    summary: str = ""
    pickled_error: bytes = b""
    exits: bool = False
    exit_code: int | str | None = None
    depth: int = 0

    @classmethod
    def of(
        cls, rank: int, call: Call, error: BaseException | None, kind: ErrorKind
    ) -> Report:
        """Describe where this rank is, and its exception if it has one."""
        report = cls(rank, call.text, _call_site())
        if error is not None:
            report.kind = kind
            report.trace = format_exception(error)
            report.summary = f"{type(error).__qualname__}: {error}"
            report.pickled_error = dump_exception(error)
            if isinstance(error, SystemExit):
                code = error.code
                report.exits = True
                report.exit_code = code if code is None else _plain_code(code)
        return report

    def load_error(self) -> BaseException | None:
        """Return the exception where it can be rebuilt on this rank, else None."""
        return load_exception(self.pickled_error, self.trace)


@dataclasses.dataclass
class _Notice:
    rank: int
    sequence: int
    call: str
    gave_up: str = ""


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
        self._last_call = "making the strategy"
        self._last_time = time.monotonic()
        self._send = np.zeros(_WORDS, np.int64)
        self._receive = np.zeros(_WORDS, np.int64)
        # With more ranks than cores a spinning rank takes the core from the one that
        # it waits for. Launchers bind ranks to cores, so affinity does not tell.
        crowded = comm.local_size > (os.cpu_count() or 1)
        self._spins = 0 if crowded else _SPINS
        self._sent: list[Request] = []
        self._notices: dict[int, _Notice] = {}

    # --- the header -----------------------------------------------------------

    def agree(self, call: Call, timeout: float | None = None) -> None:
        """Return when all ranks make this call; raise on all ranks otherwise.

        Collective.

        Args:
            call: what this rank is about to do.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        if not self.enabled:
            return
        if self._exchange(call, 0, 0, timeout):
            return
        raise self._difference(call, None, "none")

    def agree_softly(self, call: Call, soft: int) -> bool:
        """As `agree`, and return whether ``soft`` is the same on all ranks.

        Works with the guard off as well: what it returns is needed.
        """
        if self._exchange(call, 0, soft, None):
            received = self._receive
            return int(received[_SOFT]) == ~int(received[_NOT_SOFT])
        raise self._difference(call, None, "none")

    def fail(self, call: Call, error: BaseException, kind: ErrorKind) -> BaseException:
        """Tell all ranks that this one can not go on; return what to raise.

        Collective in effect: the header of the other ranks' next call meets this one.
        """
        if not self.enabled or self.broken:
            return error
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
        result: str = "",
    ) -> BaseException | None:
        """Wait until every rank has come to this call; return what to raise.

        The end of a `section`: a rank that is here first meets the headers of ranks
        that are still inside it, tells them what happened to it, and waits on, until
        all are here. ``result`` must then be the same on all. If it turns out that
        some rank never entered the section, there is nothing to wait for.
        """
        if self.broken:
            return error or CollectiveTimeoutError(
                on_rank(self._comm.rank, self.broken)
            )
        if not self.enabled:
            return error
        soft = fingerprint(result) if result else 0
        if self._floor < self._depth:
            return error or self._given_up
        while not self._exchange(call, 0 if error is None else 1, soft, None):
            together = self._same(_PRINT)
            found = self._difference(call, error, kind)
            if error is None:
                error, kind = found, "agreed"
            if together or self._floor < self._depth:
                return error
        if not self._same(_SOFT):
            return self._difference(Call(f"{call.text} -> {result}"), None, "none")
        return error

    @contextlib.contextmanager
    def section(self) -> Iterator[None]:
        """A stretch of the program that every rank enters, and leaves by `join`."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth <= self._floor:
                self._floor, self._given_up = _NO_FLOOR, None

    def leave(self, call: Call, code: Any) -> Iterator[None]:
        """Wait, at the end of the program, for the end of the others' programs.

        Yields while it waits, so that the caller can wait for several guards. A rank
        that is still in a collective learns that this one has gone.
        """
        gone = SystemExit(code)
        while not self.broken:
            self._send[:] = 0
            self._send[_PRINT], self._send[_NOT_PRINT] = (
                call.fingerprint,
                ~call.fingerprint,
            )
            self._send[_NOT_SOFT] = ~0
            while True:
                request = self._comm.start_all_max(self._send, self._receive)
                while not request.Test():
                    yield
                    try:
                        self._read_notices()
                    except CollectiveTimeoutError:
                        self._sent.append(request)
                        return
                if not self._receive[_LATE]:
                    break
            self.sequence += 1
            if not self._receive[_FLAG] and self._same(_PRINT):
                return
            self._difference(call, gone, "exit")

    def _exchange(
        self, call: Call, flag: int, soft: int, timeout: float | None
    ) -> bool:
        """Return whether no flag is up and all fingerprints are the same."""
        if self.broken:
            raise CollectiveTimeoutError(on_rank(self._comm.rank, self.broken))
        if self._comm.size == 1:
            self.sequence += 1
            self._receive[_NOT_PRINT] = self._receive[_NOT_SOFT] = ~0
            return not flag
        with self._comm.traffic.timed():
            return self._compare(call, flag, soft, timeout)

    def _compare(self, call: Call, flag: int, soft: int, timeout: float | None) -> bool:
        timeout = self.timeout_seconds if timeout is None else timeout
        send = self._send
        now = time.monotonic()
        late = self._is_late(now, timeout)
        if late:
            self._read_notices()
        send[_FLAG] = flag
        send[_PRINT] = call.fingerprint
        send[_NOT_PRINT] = ~call.fingerprint
        send[_SOFT] = soft
        send[_NOT_SOFT] = ~soft
        send[_LATE] = late
        self._run_header(call, timeout)
        while self._receive[_LATE]:
            # The confirming round: everybody is known to be on the way.
            send[_LATE] = 0
            self._run_header(call, max(timeout, 30.0) if timeout else 0.0)
        self.sequence += 1
        self._last_call = call.text
        self._last_time = time.monotonic()
        return not self._receive[_FLAG] and self._same(_PRINT)

    def _run_header(self, call: Call, timeout: float) -> None:
        request = self._comm.start_all_max(self._send, self._receive)
        for _ in range(self._spins):
            if request.Test():
                return
        self.wait(request, call.text, timeout)

    def _same(self, word: int) -> bool:
        return int(self._receive[word]) == ~int(self._receive[word + 1])

    # --- what went wrong ------------------------------------------------------

    def _difference(
        self, call: Call, error: BaseException | None, kind: ErrorKind
    ) -> BaseException:
        """Exchange reports and return the exception that this rank raises."""
        report = Report.of(self._comm.rank, call, error, kind)
        report.depth = self._depth
        data = self._comm.all_gather_objects(pickle.dumps(report))
        reports: list[Report] = [pickle.loads(item) for item in data]
        found = judge(self._comm.rank, reports) if error is None else error
        floor = min(report.depth for report in reports)
        if floor < self._depth:
            self._floor, self._given_up = min(floor, self._floor), found
        return found

    # --- waiting --------------------------------------------------------------

    def wait(self, request: Request, what: str, timeout: float | None = None) -> None:
        """Poll a pending operation until it completes.

        Raises:
            CollectiveTimeoutError: after ``timeout`` seconds (None: the strategy's;
                0: never), on every waiting rank.
        """
        try:
            self._poll(request, what, timeout)
        except BaseException as error:
            # MPI goes on writing to the buffers of what it has not completed.
            self._sent.append(request)
            self._send = np.zeros(_WORDS, np.int64)
            self._receive = np.zeros(_WORDS, np.int64)
            if not self.broken:
                self.broken = (
                    f"a wait in {what} was interrupted by {type(error).__name__}; this "
                    "strategy can not be used any more"
                )
            raise

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
        if self.broken:
            raise CollectiveTimeoutError(on_rank(self._comm.rank, self.broken))
        if self._is_late(time.monotonic(), self.timeout_seconds):
            self._read_notices()

    def _is_late(self, now: float, timeout: float) -> bool:
        limit = min(self._stall, timeout / 2) if timeout else self._stall
        return now - self._last_time > limit

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
            if notice.sequence != self.sequence:
                continue  # of a wait that is over
            self._notices[notice.rank] = notice
            if notice.gave_up:
                self.broken = notice.gave_up
                raise CollectiveTimeoutError(on_rank(self._comm.rank, notice.gave_up))

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


def _plain_code(code: object) -> int | str:
    return code if isinstance(code, int) else str(code)


def poll(request: Request, what: str, timeout: float) -> None:
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


def judge(rank: int, reports: list[Report]) -> BaseException:
    """Return the exception that a rank which did not fail itself raises.

    Args:
        rank: this rank.
        reports: one of each rank.
    """
    by_kind: dict[str, list[Report]] = {}
    for report in reports:
        by_kind.setdefault(report.kind, []).append(report)
    if left := by_kind.get("exit"):
        return _judge_exit(rank, reports, left)
    if invalid := by_kind.get("invalid"):
        return _repeat(rank, invalid[0])
    if raised := by_kind.get("raised"):
        for report in raised:
            if report.exits:
                return SystemExit(report.exit_code)
        return _replica_error(rank, raised)
    if agreed := by_kind.get("agreed"):
        return _replica_error(rank, agreed)
    return CollectiveMismatchError(on_rank(rank, _describe_mismatch(reports)))


def _judge_exit(rank: int, reports: list[Report], left: list[Report]) -> BaseException:
    for report in left:
        if report.exit_code:
            print(
                f"mpidist: rank {rank}: rank {report.rank} left the program by "
                f"sys.exit({report.exit_code!r}); this rank leaves too",
                file=sys.stderr,
            )
            return SystemExit(report.exit_code)
    return CollectiveMismatchError(on_rank(rank, _describe_mismatch(reports)))


def _repeat(rank: int, report: Report) -> BaseException:
    """Return the error that another rank found in its arguments, for this rank."""
    error = report.load_error()
    if error is None:
        return _replica_error(rank, [report])
    error.add_note(f"[rank {rank}] raised here because rank {report.rank} raised it")
    return error


def _replica_error(rank: int, failed: list[Report]) -> ReplicaError:
    ranks = [report.rank for report in failed]
    traces = "\n".join(
        f"--- rank {report.rank} ---\n{report.trace}" for report in failed[:3]
    )
    more = "" if len(failed) <= 3 else f"\n... and {len(failed) - 3} more ranks"
    return ReplicaError(
        on_rank(rank, f"{format_ranks(ranks)} raised an exception:\n{traces}{more}")
    )


def _describe_mismatch(reports: list[Report]) -> str:
    groups: dict[tuple[str, str], list[int]] = {}
    for report in reports:
        groups.setdefault((report.call, report.site), []).append(report.rank)
    lines = ["the ranks do not make the same call:"]
    calls = _shorten([call for call, _ in groups])
    for call, ((_, site), ranks) in zip(calls, groups.items(), strict=True):
        lines.append(f"  {format_ranks(ranks)}: {call}{site}")
    lines.append(
        "Every rank must make the same calls in the same order, with the same "
        "operation, dtypes, shapes and structure."
    )
    return "\n".join(lines)


def _shorten(calls: list[str]) -> list[str]:
    """Cut long texts down to their beginning and the place where they differ."""
    if max(map(len, calls)) <= _LONGEST_CALL:
        return calls
    first, last = min(calls), max(calls)
    same = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
        len(first),
    )
    start = max(_LONGEST_CALL // 3, same - _LONGEST_CALL // 3)
    stop = same + _LONGEST_CALL // 3
    return [
        call[: _LONGEST_CALL // 3]
        + (" ... " if start > _LONGEST_CALL // 3 else "")
        + call[start:stop]
        + (" ..." if stop < len(call) else "")
        for call in calls
    ]


def dump_exception(error: BaseException) -> bytes:
    """Pickle an exception; return b"" where it does not survive that."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # some exceptions pickle, but do not come back
    except Exception:
        return b""
    return data


def load_exception(data: bytes, trace: str) -> BaseException | None:
    """Rebuild an exception of another rank, with that rank's traceback as cause."""
    if not data:
        return None
    try:
        error = pickle.loads(data)
    except Exception:  # its class is not known here
        return None
    if not isinstance(error, BaseException):
        return None
    error.__cause__ = RemoteTraceback(trace)
    return error


def _call_site() -> str:
    """Return where the user's code made the call, as `` (at file.py:12 in fn)``."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not os.path.abspath(code.co_filename).startswith(_PACKAGE):
            name = os.path.basename(code.co_filename)
            return f"  (at {name}:{frame.f_lineno} in {code.co_name})"
        frame = frame.f_back
    return ""
