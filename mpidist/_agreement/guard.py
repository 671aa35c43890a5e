"""The guard: a small agreement of all ranks before any data moves.

Before its payload every collective exchanges one *header* over all ranks: an error
flag, a fingerprint of the call, a number that may differ, and how late the rank is
(`channel`). On one node the header travels through shared memory, and small payloads
with it.

What a header can find:

- *All agree*: the payload follows. It is polled as well (`wait_data`): a rank may be
  stopped, killed or cut off in the middle of it.
- *A flag is up*: a rank raised. All ranks exchange reports (a byte string each),
  and every rank raises: the failed one its own exception, the others one that
  holds its traceback.
- *Fingerprints differ*: the ranks exchange reports as well, and all raise the same
  `CollectiveMismatchError` with both sides.
- *It does not complete*: a rank is missing. Every wait comes back to `_look`
  several times a second. A rank that has waited for long posts a notice to all others
  (who it is, what it waits for), so that each waiting rank knows which are missing.
  At the deadline it posts a last notice and raises `CollectiveTimeoutError`. So do
  waits inside a payload.

Every rank's last completed header is the same, which is why the message can say
what a missing rank called last without having heard from it.

Rejected: a watchdog thread (it would call MPI from two threads at once), a barrier
with time-out (finds no mismatch), remote memory access for the notices (on several
fabrics it moves only while its target calls MPI).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from mpidist._agreement.channel import (
    AGAIN,
    DIFFERENT,
    LEFT,
    NOWHERE,
    OK,
    Channel,
    LeftError,
)
from mpidist._agreement.mismatch import Call, ErrorKind, Report, judge
from mpidist._base.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    format_ranks,
    on_rank,
)
from mpidist._mpi.communicator import AnyCommunicator, Request, is_crowded
from mpidist._mpi.messages import Transfers

# Waiting for requests: poll without pause, then give the core away between polls, then
# sleep.
_SPINS: Final = 200
_YIELD_SECONDS: Final = 0.02
_SHORT_SLEEP: Final = 0.0002
_LONG_SLEEP: Final = 0.002
_NOTICE_INTERVAL: Final = 0.05
# Waiting for data, a rank tests for this long without sleeping: MPI moves it only then.
_BUSY_SECONDS: Final = 2.0
# How long a rank waits for the notices of others before it names who is missing.
_SETTLE_SECONDS: Final = 0.25

# How long ranks wait, at least, for a header that is exchanged once more because some
# rank was late: all are known to be on the way.
_CONFIRM_SECONDS: Final = 30.0

# How long a rank that has given up waits at its end for those that may be saving, for
# those that did not come to a call, and for those that stopped in the middle of one.
_END_SECONDS: Final = 60.0
_LATE_END_SECONDS: Final = 15.0
_LOST_END_SECONDS: Final = 2.0
_QUIET_SECONDS: Final = 0.5

_NO_FLOOR: Final = sys.maxsize

_ALONE: Final = (0, 1, 1, 0, 0)

_logger: Final = logging.getLogger("mpidist")

_R = TypeVar("_R")


@dataclasses.dataclass
class _Notice:
    rank: int
    sequence: int
    call: str
    gave_up: str = ""
    awaited: tuple[int, ...] = ()  # the ranks whose data has not come
    missing: tuple[int, ...] = ()  # those that were given up
    lost: tuple[int, ...] = ()  # those of them that will not come any more
    ends: bool = False  # the process is at its end


class _Step:
    """A step of the ranks of a node, that this rank waits for; as `Transfers`."""

    completed = 0

    def __init__(self, missing: Callable[[], list[int]]) -> None:
        self._missing = missing

    @property
    def awaited(self) -> list[int]:
        """The ranks that have not made it."""
        return self._missing()


class Part:
    """What a rank says at the end of a section: whose errors, and what came out."""

    kind: ErrorKind = "invalid"
    text: str | Callable[[], str] = ""
    fingerprint = 0

    def set_result(self, text: str | Callable[[], str], number: int) -> None:
        """Say what came out, which must be the same on all ranks.

        Args:
            text: it, or a function that gives it, for the message where it differs.
            number: 62 bits that differ where it does.
        """
        self.text, self.fingerprint = text, number


class _Leading:
    """Changes whether merge_fn leads, for the length of a ``with`` block."""

    __slots__ = ("_before", "_guard", "_leading")

    def __init__(self, guard: Guard, leading: bool) -> None:
        self._guard = guard
        self._leading = leading

    def __enter__(self) -> None:
        self._before = self._guard.lead(self._leading)

    def __exit__(self, *error: object) -> None:
        self._guard.lead(self._before)


class Guard:
    """Agreement, propagation of errors and deadline for one communicator."""

    def __init__(
        self,
        comm: AnyCommunicator,
        channel: Channel | None,
        *,
        timeout_seconds: float,
        stall_seconds: float,
        enabled: bool = True,
    ) -> None:
        """Watch over the calls of the ranks of ``comm``.

        Args:
            comm: the ranks.
            channel: where they exchange headers; None for one rank.
            timeout_seconds: how long a rank waits for the others; 0: forever.
            stall_seconds: after which the missing ranks are named on stderr.
            enabled: whether calls are compared.
        """
        self._comm = comm
        self.channel = channel
        if channel is not None:
            self._watch(channel, lambda guard: guard._call.text)
        self.timeout_seconds = timeout_seconds
        self._stall = stall_seconds
        self.enabled: bool = enabled
        self.sequence: int = 0
        # Whether a call needs a look at the next three before it may begin.
        self.blocked: bool = False
        self._broken = ""
        self._leading = False
        # Sections that this rank is in: parts of the program that end with a `join`.
        # Those above the floor are given up, because some rank is not in them.
        self.patience_ms: int = int(timeout_seconds * 1000)
        self._depth = 0
        self._floor = _NO_FLOOR
        self._given_up: BaseException | None = None
        self._together = False
        # What the update that runs here has written to this rank's copies, and how all
        # ranks make copies equal again (given keys) where an update has failed.
        self._written: list[Any] = []
        self._repair: Callable[[list[Any]], None] | None = None
        self.closed: bool = False
        # The call that this rank is in, or made last; the one before; and how long it
        # waits for the others in it.
        self._call = self._before = Call("making the strategy")
        self._timeout = timeout_seconds
        self._waited = 0.0
        self._published = self._warned = False
        self._verdict = _ALONE
        crowded = is_crowded(comm.machine_size)
        self._spins = 0 if crowded else _SPINS
        self._sent: list[Request] = []
        self._notices: dict[int, _Notice] = {}
        self._data: Transfers | _Step | None = None  # that this rank waits for
        # Of a guard that has given up: the ranks that did not come, those of them that
        # stopped in the middle of their data, to which no message is sent any more, and
        # the ranks that are at the end of their programs.
        self._missing: tuple[int, ...] = ()
        self._lost: tuple[int, ...] = ()
        self._ended: set[int] = set()
        seconds = max(timeout_seconds, _CONFIRM_SECONDS) if timeout_seconds else 0.0
        comm.supervise(self, seconds)

    @property
    def broken(self) -> str:
        """Why the strategy cannot be used any more; "" while it can."""
        return self._broken

    @broken.setter
    def broken(self, why: str) -> None:
        self._broken = why
        self._look_at_blocks()

    def compare_calls(self, enabled: bool) -> None:
        """Turn the comparison of calls on or off: as on all other ranks."""
        self.enabled = enabled

    def in_merge_fn(self) -> _Leading:
        """Return a context manager: merge_fn runs here, and the others wait for it.

        Other collective calls of this rank are errors then, since the others would not
        come to them.
        """
        return _Leading(self, self._comm.size > 1)

    def with_all_ranks(self) -> _Leading:
        """Return a context manager: merge_fn makes a call that all ranks make."""
        return _Leading(self, False)

    def lead(self, leading: bool) -> bool:
        """Say whether merge_fn runs here; return what was so before."""
        before = self._leading
        if before is not leading:
            self._leading = leading
            self.blocked = leading or bool(self._broken) or self._floor < self._depth
        return before

    def count(self) -> None:
        """Count a header, or a message of rank 0, that did not go through `agree`."""
        self.sequence += 1

    def uncount(self) -> None:
        """Take back the count of a message that some rank may not read."""
        self.sequence -= 1

    def repair_with(self, repair: Callable[[list[Any]], None]) -> None:
        """Have a function of keys make copies equal where an update has failed."""
        self._repair = repair

    def record(self, written: list[Any]) -> list[Any]:
        """Have an update append to a list which variables it writes on this rank.

        Where the ranks then differ, these are made equal again (`repair_with`).

        Returns:
            The list that was in use before.
        """
        before, self._written = self._written, written
        return before

    def _look_at_blocks(self) -> None:
        self.blocked = bool(self._broken or self._leading or self._floor < self._depth)

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
        if not self._exchange(call, 0, 0, timeout):
            raise self._difference(call, None, "none")

    def begin(self, call: Call) -> None:
        """Say which call begins, where nothing is `blocked`; see `enter`."""
        self._before, self._call = self._call, call
        self._timeout = self.timeout_seconds

    def enter(self, call: Call, timeout: float | None = None) -> int:
        """Begin a call whose header the caller exchanges itself, with a payload.

        Args:
            call: what this rank is about to do.
            timeout: seconds to wait for the others; None: the strategy's.

        Returns:
            For how many milliseconds this rank waits for the others; 0: forever.
        """
        if self.blocked:
            self.require_section()
            self._require_usable()
        self._before, self._call = self._call, call
        if timeout is None:
            self._timeout = self.timeout_seconds
            return self.patience_ms
        self._timeout = timeout
        return int(timeout * 1000)

    def enter_wait(self, call: Call, timeout: float | None) -> None:
        """Say what this rank waits for, for the messages of the deadline.

        Args:
            call: what it is.
            timeout: seconds to wait; None: the strategy's; 0: forever.
        """
        self._before, self._call = self._call, call
        self._timeout = self.timeout_seconds if timeout is None else timeout

    def agree_place(self, call: Call, place: int, timeout: float | None = None) -> bool:
        """As `agree`, on a channel of the core; return whether all have a place.

        Args:
            call: what this rank is about to do.
            place: where in this rank's arena its results are, or `NOWHERE`.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        channel, patience = self.channel, self.enter(call, timeout)
        assert channel is not None

        def exchange(ms: int) -> int:
            return channel.meet(0, call.fingerprint, 0, 0, ms, place)

        try:
            status = exchange(patience)
        except BaseException as error:
            raise self.leave_payload(call, error) from None
        self.conclude(status, exchange)
        return bool(channel.verdict[3])

    def conclude(self, status: int | None, exchange: Callable[[int], int]) -> None:
        """Deal with the status of a header exchanged after `enter`. Collective.

        Args:
            status: of the header.
            exchange: exchanges it once more, where some rank was late; gets the
                milliseconds that this rank waits for the others.

        Raises:
            BaseException: whatever the ranks agree on, where their calls differ.
        """
        call = self._call
        if status == AGAIN:
            status = self._confirm(exchange)
        if status == LEFT:
            raise self.leave_payload(call, self._left())
        self.sequence += 1
        if status == DIFFERENT:
            raise self._difference(call, None, "none")

    def _confirm(self, exchange: Callable[[int], int]) -> int:
        """Exchange a header once more: everybody is known to be on the way."""
        if self._timeout:
            self._timeout = max(self._timeout, _CONFIRM_SECONDS)
        status = AGAIN
        while status == AGAIN:
            self._read_notices()
            try:
                status = exchange(int(self._timeout * 1000))
            except BaseException as error:
                raise self.leave_payload(self._call, error) from None
        return status

    def _left(self) -> LeftError:
        assert self.channel is not None
        return LeftError(self.channel.who)

    def agree_softly(self, call: Call, soft: int, timeout: float | None = None) -> bool:
        """As `agree`, and return whether ``soft`` is the same on all ranks.

        Works with the guard off as well: what it returns is needed.
        """
        self.require_section()
        if self._exchange(call, 0, soft, timeout):
            return self.same_soft
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
        if self._exchange(call, 0, number, None, number):
            return self._verdict[4], self.same_soft
        raise self._difference(call, None, "none")

    @property
    def same_soft(self) -> bool:
        """Whether the soft numbers of the last header were the same on all ranks."""
        return bool(self._verdict[2])

    def require_section(self) -> None:
        """Raise where some rank is not in the innermost section that this one is in."""
        if self.deserted and self._given_up is not None:
            raise self._given_up

    def fail(self, call: Call, error: BaseException, kind: ErrorKind) -> BaseException:
        """Tell all ranks that this one cannot go on; return what to raise.

        Collective in effect: the header of the other ranks' next call meets this one.
        """
        if not self.enabled or self.broken or self._leading or self.deserted:
            return error
        if isinstance(error, CollectiveError):
            return error  # all ranks have it already
        self._exchange(call, 1, 0, None)
        return self._difference(call, error, kind)

    def close(self) -> None:
        """Have every later call raise: the strategy is closed. Not collective."""
        self.closed = True
        self.broken = "this strategy was closed; make a new one"
        self.channel = None  # and with it the memory that the ranks share

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

        The end of a section: a rank that is here first meets the headers of ranks
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
        if not self.same_soft:
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

    def enter_section(self) -> None:
        """Enter a part of the program that every rank enters, and ends by `join`."""
        self._depth += 1
        if self._floor is not _NO_FLOOR:
            self._look_at_blocks()

    def leave_section(self) -> None:
        """Leave the innermost section."""
        self._depth -= 1
        if self._floor is not _NO_FLOOR:
            if self._depth <= self._floor:
                self._floor, self._given_up = _NO_FLOOR, None
            self._look_at_blocks()

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
        self.enter_section()
        try:
            try:
                result = body(part)
            except KeyboardInterrupt:
                raise
            except BaseException as raised:
                error = raised
                if isinstance(error, CollectiveError):
                    part.kind = "agreed"
            error = self.join(call, error, part.kind, part.text, part.fingerprint)
        finally:
            self.leave_section()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def leave(self, call: Call, code: Any) -> Iterator[None]:
        """Wait, at the end of the program, for the end of the others' programs.

        Yields while it waits, so that the caller can wait for several guards. A rank
        that is still in a collective learns that this one has gone.
        """
        gone = SystemExit(code)
        channel = self.channel
        while not self.broken and channel is not None:
            status = AGAIN
            while status == AGAIN:
                channel.start(0, call.fingerprint, 0, 0, 0, NOWHERE)
                while (answer := channel.test()) is None:
                    yield
                    try:
                        self._read_notices()
                    except CollectiveTimeoutError:
                        return
                status = answer
            self.sequence += 1
            if status == OK:
                return
            self._verdict = channel.verdict
            self._difference(call, gone, "exit")

    def end(self) -> Iterator[None]:
        """Wait, after giving up, at the end of the program, for those of the others.

        Yields while it waits. Those that still run may be saving something, and
        launchers end them when this process ends without `MPI_Finalize`; those that
        were missing are waited for only for a moment.
        """
        comm = self._comm
        others = set(range(comm.size)) - {comm.rank}
        self._post_notice("the end of its program", ends=True)
        end = time.monotonic() + _END_SECONDS
        present: set[int] | None = others - set(self._missing)
        while others - self._ended and time.monotonic() < end:
            if present is not None and present <= self._ended:
                present = None
                seconds = _LOST_END_SECONDS if self._lost else _LATE_END_SECONDS
                end = time.monotonic() + seconds
            yield
            with contextlib.suppress(CollectiveTimeoutError):
                self._read_notices()
        # Open MPI ends a process that finds the connection to another one closed: so
        # nobody calls it any more when the first process ends.
        end = time.monotonic() + _QUIET_SECONDS * bool(others - self._ended)
        while time.monotonic() < end:
            yield

    @property
    def has_lost(self) -> bool:
        """Whether it gave up, and some rank has not come to its end since."""
        ended = len(self._ended) == self._comm.size - 1
        return bool(self.broken) and not self.closed and not ended

    def _exchange(
        self, call: Call, flag: int, soft: int, timeout: float | None, most: int = 0
    ) -> bool:
        """Return whether no flag is up and all fingerprints are the same."""
        self._require_usable()
        channel = self.channel
        if channel is None:
            self.sequence += 1
            self._verdict = (flag, 1, 1, 0, most)
            return not flag
        meet, number = channel.meet, call.fingerprint
        self._before, self._call = self._call, call
        self._timeout = self.timeout_seconds if timeout is None else timeout
        try:
            status = meet(flag, number, soft, most, int(self._timeout * 1000), NOWHERE)
        except BaseException as error:
            self._interrupt(call.text, error)
            raise
        if status == AGAIN:
            status = self._confirm(
                lambda ms: meet(flag, number, soft, most, ms, NOWHERE)
            )
        if status == LEFT:
            raise self.leave_payload(call, self._left())
        self.sequence += 1
        self._verdict = channel.verdict
        return status == OK

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
        report.written = sorted({variable._key for variable in self._written})
        self._written = []
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
            self._look_at_blocks()
        # All ranks are here now, whatever each was about to do: the only moment at
        # which an update that some of them did not make can be undone.
        written = sorted({key for report in reports for key in report.written})
        if written and self._repair is not None:
            self._repair(written)
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
            if not hasattr(request, "wait"):
                for _ in range(self._spins):
                    if request.Test():
                        return
            self._poll(request, what, timeout)
        except BaseException as error:
            request.leak()
            self._interrupt(what, error)
            raise

    def wait_data(self, transfers: Transfers) -> None:
        """Poll the messages of the last call until they have completed.

        Raises:
            CollectiveTimeoutError: where none of them has completed for the strategy's
                `timeout_seconds`, on every waiting rank.
        """
        try:
            if not transfers.spin(10 * self._spins):
                self._data = transfers
                self._poll(transfers, f"the data of {self._call.text}", None)
        except BaseException as error:
            transfers.leak()
            self._interrupt(self._call.text, error)
            raise
        finally:
            self._data = None

    def wait_step(
        self, wait: Callable[[], int], missing: Callable[[], list[int]]
    ) -> int:
        """Wait for a step of the data of the last call, in the memory of one node.

        Args:
            wait: of a channel that is given to `watch_steps`; returns its status.
            missing: returns the ranks that have not made the step.

        Raises:
            CollectiveTimeoutError: at the deadline, or if another rank has given up.
        """
        self._timeout = self.timeout_seconds
        self._data = _Step(missing)
        try:
            return wait()
        except BaseException as error:
            self._interrupt(self._call.text, error)
            raise
        finally:
            self._data = None

    def watch_steps(self, channel: Channel) -> None:
        """Have this guard look at clocks and notices while a rank waits in a channel.

        Args:
            channel: of the ranks of one node, of several.
        """
        self._watch(channel, lambda guard: f"the data of {guard._call.text}")

    def _watch(self, channel: Channel, what: Callable[[Guard], str]) -> None:
        # Weakly: the garbage collector does not see through a channel of the core.
        this = weakref.ref(self)

        def pause(waited: float) -> None:
            guard = this()
            if guard is not None:
                guard._look(what(guard), waited)

        channel.pause = pause

    def _interrupt(self, what: str, error: BaseException) -> None:
        """Give up after an exception that came from outside, such as a signal's."""
        if not self.broken:
            self.broken = (
                f"rank {self._comm.rank} was interrupted by {type(error).__name__} in "
                f"{what}; this strategy cannot be used any more"
            )
            self._post_notice(what, self.broken)
            if self.channel is not None:
                self.channel.leave()

    def interrupted(self, error: BaseException) -> BaseException:
        """Give up the data of the last call; see `leave_payload`."""
        return self.leave_payload(self._call, error)

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
                    f"rank {error.rank} has left {call.text} before its end; this "
                    "strategy cannot be used any more"
                )
                self._post_notice(call.text, self.broken)
                error = self._broken_error()
        self._interrupt(call.text, error)
        if self.channel is not None:
            self.channel.leave()
        return error

    def _poll(self, request: Request, what: str, timeout: float | None) -> None:
        self._timeout = self.timeout_seconds if timeout is None else timeout
        start = time.monotonic()
        next_look = start + _NOTICE_INTERVAL
        wait = getattr(request, "wait", None)
        # The deadline of data counts from the last message of it that has completed.
        data, completed = self._data, 0
        busy = _YIELD_SECONDS if data is None else _BUSY_SECONDS
        while not request.Test():
            now = time.monotonic()
            waited = now - start
            if now >= next_look:
                next_look = now + _NOTICE_INTERVAL
                if data is not None and data.completed > completed:
                    completed, start, waited = data.completed, now, 0.0
                self._look(what, waited)
            if wait is not None:
                wait(_NOTICE_INTERVAL)
            elif waited < busy:
                os.sched_yield()
            else:
                time.sleep(_SHORT_SLEEP if waited < 1.0 else _LONG_SLEEP)

    def _look(self, what: str, waited: float) -> None:
        """In the middle of a wait: read what others say; tell them and the user.

        Raises:
            CollectiveTimeoutError: at the deadline, or if another rank has given up.
        """
        if waited < self._waited:  # another wait than last time
            self._published = self._warned = False
        self._waited = waited
        timeout = self._timeout
        publish = min(self._stall, timeout / 2) if timeout else self._stall
        self._read_notices()
        if waited < publish:
            return
        if not self._published:
            self._post_notice(what)
            self._published = True
        if not self._warned and waited >= self._stall + _SETTLE_SECONDS:
            self._warned = True
            self._report_stall(what, waited)
        if timeout and waited >= timeout:
            raise self._give_up(what, timeout)

    def check_late(self) -> None:
        """Raise if the others have given up on this rank while it was away."""
        self._require_usable()
        channel, timeout = self.channel, self.timeout_seconds
        if timeout and channel is not None and channel.lateness * 2 > timeout:
            self._read_notices()

    def _require_usable(self) -> None:
        if self.broken:
            raise self._broken_error()
        if self._leading:
            raise RuntimeError(
                on_rank(
                    self._comm.rank,
                    "merge_fn runs on this rank alone, so it cannot take part in a "
                    "collective call of the replicas, nor can a thread that it starts, "
                    "and it cannot close the strategy; call the methods of the "
                    "`strategy` that it got",
                )
            )

    def _broken_error(self) -> RuntimeError:
        text = on_rank(self._comm.rank, self.broken)
        return RuntimeError(text) if self.closed else CollectiveTimeoutError(text)

    def _post_notice(self, what: str, gave_up: str = "", *, ends: bool = False) -> None:
        notice = _Notice(self._comm.rank, self.sequence, what, gave_up, ends=ends)
        notice.missing, notice.lost = self._missing, self._lost
        if self._data is not None:
            notice.awaited = tuple(self._data.awaited)
        self._notices[self._comm.rank] = notice
        data = pickle.dumps(notice)
        self._sent = [request for request in self._sent if not request.Test()]
        for rank in range(self._comm.size):
            if rank != self._comm.rank and rank not in self._lost:
                self._sent.append(self._comm.post_notice(data, rank))

    def _read_notices(self) -> None:
        while (data := self._comm.read_notice()) is not None:
            notice: _Notice = pickle.loads(data)
            if notice.ends:
                self._ended.add(notice.rank)
                continue
            if notice.gave_up:  # for good, also where this rank has got further
                self.broken, self._missing = notice.gave_up, notice.missing
                self._lost = notice.lost
                raise CollectiveTimeoutError(on_rank(self._comm.rank, notice.gave_up))
            if notice.sequence < self.sequence:
                continue  # of a wait that is over
            self._notices[notice.rank] = notice

    def _waiting_and_missing(self) -> tuple[list[int], list[int]]:
        """Return the ranks that wait as this one does, and those that do not."""
        waiting = [
            rank
            for rank, notice in sorted(self._notices.items())
            if notice.sequence == self.sequence
        ]
        # The channel knows who has not made the last step, if that is what is missing.
        missing = self.channel.missing() if self.channel is not None else []
        if not missing:
            missing = [r for r in range(self._comm.size) if r not in waiting]
        awaited = [set(self._notices[rank].awaited) for rank in waiting]
        if awaited and all(awaited):  # all wait for data, and know whose
            missing = sorted(set().union(*awaited) - set(waiting)) or missing
        return [r for r in waiting if r not in missing], missing

    def _report_stall(self, what: str, waited: float) -> None:
        waiting, missing = self._waiting_and_missing()
        if not missing or not waiting or waiting[0] != self._comm.rank:
            return
        _logger.warning("mpidist: %s", self._describe_wait(what, waited))

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
        if self._data is not None:
            return (
                f"{format_ranks(missing)} did not go on in call {self.sequence} within "
                f"{waited:.3g} s: {where or what}"
            )
        return (
            f"{format_ranks(missing)} did not come to call {self.sequence + 1} within "
            f"{waited:.3g} s: {where or what}. The last call that "
            f"{format_ranks(missing)} made with the others was call {self.sequence}: "
            f"{self._before.text}"
        )

    def _give_up(self, what: str, timeout: float) -> CollectiveTimeoutError:
        facts = (
            f"{self._describe_wait(what, timeout)}. This strategy cannot be used any "
            "more, since the missing rank may still be on its way; variables and "
            "arrays are as they were before the call. "
        )
        if self._data is None:
            facts += (
                "Make the ranks call the same things, or raise `timeout_seconds` in "
                "CommunicationOptions if the rank was only slow"
            )
        else:
            facts += (
                "The rank was stopped or has died, or the network between the hosts "
                "does not carry its data; raise `timeout_seconds` in "
                "CommunicationOptions if it was only slow"
            )
        self._tell_all_but_lost(what, facts)
        self.broken = facts
        return CollectiveTimeoutError(on_rank(self._comm.rank, facts))

    def _tell_all_but_lost(self, what: str, facts: str) -> None:
        """Post the last notice: this rank gives up.

        A rank that did not come to a call may still do so, and has to know; one that
        has stopped in the middle of its data is lost, and MPI may fail on messages to
        it.
        """
        self._missing = tuple(self._waiting_and_missing()[1])
        if self._data is not None:
            self._lost = self._missing
        self._post_notice(what, facts)


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
