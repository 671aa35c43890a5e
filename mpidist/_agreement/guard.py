"""The guard: a small agreement of all ranks before any data moves.

Before its payload every collective exchanges one *header* over all ranks: an error
flag, a fingerprint of the call, a value that may differ, and how late the rank is
(`channel`). On one node the header travels through shared memory, and small payloads
with it.

What a header can find:

- *All agree*: the payload follows.
- *A flag is up*: a rank raised. All ranks exchange reports (a byte string each),
  and every rank raises: the failed one its own exception, the others one that
  holds its traceback.
- *Fingerprints differ*: the ranks exchange reports as well, and all raise the same
  `CollectiveMismatchError` with both sides.
- *It does not complete*: a rank is missing (`waiting`).

Every rank's last completed header is the same, which is why the message can say
what a missing rank called last without having heard from it.

A *section* is a part of the program that every rank enters, and ends by `join`. Ranks
that differ inside it meet at its end, and can then continue.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from mpidist._agreement.begun import BegunCalls, CollectiveHandle
from mpidist._agreement.channel import (
    AGAIN,
    DIFFERENT,
    LEFT,
    NOWHERE,
    OK,
    Channel,
    LeftError,
    SelfChannel,
)
from mpidist._agreement.mismatch import Call, ErrorKind, Key, Report, judge
from mpidist._agreement.notices import AT_END
from mpidist._agreement.polling import LOOK_SECONDS
from mpidist._agreement.waiting import Waiting
from mpidist._base import reporting
from mpidist._base.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ReplicaLostError,
    as_told,
    format_exception,
    is_interruption,
    on_rank,
    was_told,
)
from mpidist._mpi.communicator import AnyCommunicator
from mpidist._timeline.observer import NOTHING, Calls, Span, observed

_NO_FLOOR: Final = sys.maxsize

_ALONE: Final = (0, 1, 1, 0, 0)

_R = TypeVar("_R")
_Context: TypeAlias = contextlib.AbstractContextManager[Any]


class Writes(Protocol):
    """What an update has written to this rank's copies of variables."""

    def undo(self) -> list[Key]:
        """Undo the writes if the values before are kept; return the variables' keys."""


class SectionResult:
    """What a rank says at the end of a section: whose errors, and what the result is.

    Attributes:
        kind: of an exception that the section raises on this rank.
        text: the result, or a function that returns it, for messages.
        fingerprint: of the result.
    """

    kind: ErrorKind = "invalid"
    text: str | Callable[[], str] = ""
    fingerprint = 0

    def set_result(self, text: str | Callable[[], str], fingerprint: int) -> None:
        """Say what the result is, which must be the same on all ranks.

        Args:
            text: the result, or a function that returns it, for the message if the
                ranks differ.
            fingerprint: 62 bits that differ if the result does.
        """
        self.text, self.fingerprint = text, fingerprint


# How the methods of a guard are observed (`observer`).


def _name(calls: Calls, guard: Guard, call: Call, *_: object, **__: object) -> _Context:
    calls.name(call.text, guard.sequence + 1)
    return NOTHING


def _header(
    calls: Calls, guard: Guard, call: Call, *_: object, **__: object
) -> _Context:
    return calls.header(call.text, guard.sequence + 1)


def _header_if_enabled(
    calls: Calls, guard: Guard, call: Call, *_: object, **__: object
) -> _Context:
    return (_header if guard.enabled else _name)(calls, guard, call)


def _report(
    calls: Calls, guard: Guard, call: Call, error: BaseException, *_: object
) -> _Context:
    """An error that all ranks have is raised without a header."""
    if isinstance(error, CollectiveError):
        return NOTHING
    return _header(calls, guard, call)


def _join(calls: Calls, guard: Guard, call: Call, *_: object, **__: object) -> _Context:
    return calls.header(call.text, guard.sequence + 1, call)


def _section(
    calls: Calls, guard: Guard, call: Call, *_: object, **__: object
) -> _Context:
    return calls.section(call, call.text, guard.sequence + 1)


def _last_header(
    calls: Calls, guard: Guard, call: Call, *_: object, **__: object
) -> _Context:
    return NOTHING if guard.broken else _header(calls, guard, call)


def _ends_with(span: Span | None, error: BaseException | None) -> None:
    if span is not None:
        span.raised = "" if error is None else type(error).__name__


class Guard(Waiting):
    """Agreement, propagation of errors and deadline for one communicator.

    Attributes:
        failures: how often ranks have differed; it changes on all ranks, or on none.
    """

    # Of the base class; without these lines pyright calls their types ambiguous.
    channel: Channel
    blocked: bool
    sequence: int

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
            channel: where they exchange headers; None: a `SelfChannel`, for one rank.
            timeout_seconds: how long a rank waits for the others; 0: forever.
            stall_seconds: after which the missing ranks are reported.
            enabled: whether calls are compared.
        """
        super().__init__(
            comm, channel, timeout_seconds=timeout_seconds, stall_seconds=stall_seconds
        )
        self.enabled: bool = enabled
        self.failures: int = 0
        self._alone = False
        # Called before a call of this rank while it is alone; it makes the call legal.
        self.before_call: Callable[[], None] | None = None
        # Sections that this rank is in. Those above the floor are given up, because
        # some rank is not in them.
        self._depth = 0
        self._floor = _NO_FLOOR
        self._given_up: BaseException | None = None
        self._all_joined = False
        # What the current update has written to this rank's copies, and how all ranks
        # make copies (given by their keys) equal again if an update has failed.
        self._writes: Writes | None = None
        self._repair: Callable[[Sequence[Key]], None] | None = None
        self._verdict = _ALONE

    # --- settings -----------------------------------------------------------------

    def compare_calls(self, enabled: bool) -> None:
        """Turn the comparison of calls on or off: as on all other ranks."""
        self.enabled = enabled

    @property
    def checks(self) -> bool:
        """Whether calls are compared with those of other ranks."""
        return self.enabled and self._comm.size > 1

    def close(self, why: str = "this strategy was closed; make a new one") -> None:
        """Make every later call raise: the strategy is closed. Not collective.

        Args:
            why: and what to do instead.
        """
        self.closed = True
        self.unsettled = False
        self.broken = why
        if self.begun is not None:
            self.begun.end()
            self.begun = None
        self.channel = SelfChannel()  # without the memory that the ranks share
        self._watchdog.close()

    def set_alone(self, alone: bool) -> bool:
        """Say whether merge_fn runs on this rank alone; return what it was before.

        While it does, collective calls of this rank are errors, since the other ranks
        would not make them; or `before_call` is called first.
        """
        before = self._alone
        if before is not alone:
            self._alone = alone
            self._update_blocked()
        return before

    def _update_blocked(self) -> None:
        self.blocked = bool(
            self._broken or self._alone or self.unsettled or self._floor < self._depth
        )

    # --- calls that were begun ----------------------------------------------------

    def begin_later(
        self,
        name: str,
        make: Callable[[], _R],
        *,
        at_once: bool,
        warns: bool,
        check: Callable[[], None] | None,
    ) -> CollectiveHandle[_R]:
        """Begin a call, and return at once; see `begun`. Collective.

        Args:
            name: of the call.
            make: makes it.
            at_once: whether this thread makes it before it returns.
            warns: whether a handle that is dropped warns.
            check: called by `result`; it may raise.
        """
        handle = CollectiveHandle(self, name, make, warns, check)
        if self.begun is None:
            self.begun = BegunCalls(self)
        self.begun.begin(handle, at_once=at_once)
        return handle

    def note_unsettled(self, unsettled: bool) -> None:
        """Note whether calls may not have ended that this rank has begun."""
        if self.unsettled is not unsettled:
            self.unsettled = unsettled
            self._update_blocked()

    def settle(self) -> None:
        """Wait for the calls that were begun, before another one is made.

        Raises:
            BaseException: what one of them raised, if nobody asked its handle.
        """
        if self.unsettled and self.begun is not None:
            self.begun.settle()

    def count(self) -> None:
        """Count a header, or a message of rank 0, that did not go through `agree`."""
        self.sequence += 1

    # --- the header ---------------------------------------------------------------

    @observed(_header_if_enabled)
    def agree(self, call: Call, timeout: float | None = None) -> None:
        """Return if all ranks make this call; raise on all ranks otherwise.

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
            raise self._difference(call)

    @observed(_name)
    def begin(self, call: Call) -> None:
        """Say which call begins, if nothing is `blocked`; see `enter`."""
        self._previous_call, self._call = self._call, call
        self._timeout = self.timeout_seconds

    @observed(_name)
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
        self._previous_call, self._call = self._call, call
        if timeout is None:
            self._timeout = self.timeout_seconds
            return self.patience_ms
        self._timeout = timeout
        return int(timeout * 1000)

    def enter_message(self, call: Call, timeout: float | None) -> None:
        """Count a message of rank 0, and say what this rank waits for.

        Args:
            call: what it is, for the messages of the deadline.
            timeout: seconds to wait; None: the strategy's; 0: forever.
        """
        self.sequence += 1
        self._previous_call, self._call = self._call, call
        self._timeout = self.timeout_seconds if timeout is None else timeout

    def agree_offset(
        self, call: Call, offset: int, timeout: float | None = None
    ) -> bool:
        """As `agree`, by the core; return whether all ranks have results in arenas.

        Args:
            call: what this rank is about to do.
            offset: of its results in the arena of this rank, or `NOWHERE`.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        channel, patience = self.channel, self.enter(call, timeout)

        def exchange(ms: int) -> int:
            return channel.meet(0, call.fingerprint, 0, 0, ms, offset)

        try:
            status = exchange(patience)
        except BaseException as error:
            raise self.abandon(call, error) from None
        self.conclude(status, exchange)
        return bool(channel.verdict[3])

    def conclude(self, status: int | None, exchange: Callable[[int], int]) -> None:
        """Deal with the status of a header exchanged after `enter`. Collective.

        Args:
            status: of the header.
            exchange: exchanges it once more, if some rank was late; gets the
                milliseconds that this rank waits for the others.

        Raises:
            BaseException: what the reports of all ranks show, if their calls differ.
        """
        call = self._call
        if status == AGAIN:
            status = self._confirm(exchange)
        if status == LEFT:
            raise self.abandon(call, self._left())
        self.sequence += 1
        if status == DIFFERENT:
            raise self._difference(call)

    def _confirm(self, exchange: Callable[[int], int]) -> int:
        """Exchange a header once more: all ranks are known to be on the way."""
        status = AGAIN
        while status == AGAIN:
            self._read_notices()
            try:
                status = exchange(int(self._timeout * 1000))
            except BaseException as error:
                raise self.abandon(self._call, error) from None
        return status

    def _left(self) -> LeftError:
        return LeftError(self.channel.who)

    @observed(_header)
    def agree_and_compare(
        self, call: Call, value: int, timeout: float | None = None
    ) -> bool:
        """As `agree`; return whether ``value`` is the same on all ranks.

        Also with the guard off, since the caller needs what it returns.
        """
        self.require_section()
        if self._exchange(call, 0, value, timeout):
            return self.same_value
        raise self._difference(call)

    @observed(_header)
    def agree_on_largest(self, call: Call, value: int) -> tuple[int, bool]:
        """As `agree`; return the largest ``value``, and whether all are the same.

        Also with the guard off, since the caller needs what it returns.

        Args:
            call: what this rank is about to do.
            value: an integer, 0 or more.
        """
        self.require_section()
        if self._exchange(call, 0, value, None, value):
            return self._verdict[4], self.same_value
        raise self._difference(call)

    @property
    def published(self) -> int:
        """How many headers this rank has published; the last may not have completed."""
        return self.channel.headers

    @property
    def same_value(self) -> bool:
        """Whether the values of the last header were the same on all ranks."""
        return bool(self._verdict[2])

    def _exchange(
        self, call: Call, flag: int, value: int, timeout: float | None, largest: int = 0
    ) -> bool:
        """Return whether no flag is up and all fingerprints are the same."""
        self._require_usable()
        channel = self.channel
        meet, number = channel.meet, call.fingerprint
        self._previous_call, self._call = self._call, call
        self._timeout = self.timeout_seconds if timeout is None else timeout
        try:
            ms = int(self._timeout * 1000)
            status = meet(flag, number, value, largest, ms, NOWHERE)
        except BaseException as error:
            raise self._break_off(call.text, error) from error.__cause__
        if status == AGAIN:
            status = self._confirm(
                lambda ms: meet(flag, number, value, largest, ms, NOWHERE)
            )
        if status == LEFT:
            raise self.abandon(call, self._left())
        self.sequence += 1
        self._verdict = channel.verdict
        return status == OK

    def _require_usable(self) -> None:
        if self.unsettled:
            self.settle()
        if self._cut_off and not self._broken:
            # There was no frame left for `leave_payload`.
            self._break_off(self._call.text, RecursionError())
        if self._broken:
            raise self._broken_error()
        if self._alone and self.before_call is not None:
            self.before_call()
        if self._alone:
            raise RuntimeError(
                on_rank(
                    self._comm.rank,
                    "merge_fn runs on this rank alone, so it cannot take part in a "
                    "collective call of the replicas, nor can a thread that it starts, "
                    "and it cannot close the strategy; call the methods of the "
                    "`strategy` that it got",
                )
            )

    def check_late(self) -> None:
        """Raise if the others have given up on this rank while it was away."""
        if self._broken or self._cut_off:
            self.set_alone(False)
            self._require_usable()
        channel, timeout = self.channel, self.timeout_seconds
        if timeout and channel.lateness * 2 > timeout:
            self._read_notices()

    # --- what went wrong ----------------------------------------------------------

    @observed(_report, _ends_with)
    def fail(
        self, call: Call, error: BaseException, kind: ErrorKind = "invalid"
    ) -> BaseException:
        """Have all ranks raise, before anything of a call has moved.

        Collective in effect: the header of the other ranks' next call meets this one.
        The strategy can be used on.

        Args:
            call: what this rank cannot do.
            error: why.
            kind: "raised" if the others raise a `ReplicaError`; "invalid": the same.

        Returns:
            What to raise.
        """
        if not self.enabled or self._broken or self._alone or self.deserted:
            return error
        if isinstance(error, CollectiveError):
            return error  # all ranks have it already
        self._exchange(call, 1, 0, None)
        return self._difference(call, error, kind)

    def _difference(
        self,
        call: Call,
        error: BaseException | None = None,
        kind: ErrorKind = "none",
        *,
        joining: bool = False,
    ) -> BaseException:
        """Exchange reports, and return the exception that this rank raises."""
        try:
            return self._exchange_reports(call, error, kind, joining)
        except BaseException as raised:
            raise self._break_off(call.text, raised) from raised.__cause__

    def _exchange_reports(
        self,
        call: Call,
        error: BaseException | None,
        kind: ErrorKind,
        joining: bool,
    ) -> BaseException:
        self.failures += 1
        report = Report.of(self._comm.rank, call, error, kind)
        report.depth, report.joining = self._depth, joining
        if self._writes is not None:
            report.written = self._writes.undo()
            self._writes = None
        data = self._comm.all_gather_objects(pickle.dumps(report))
        reports: list[Report] = [pickle.loads(item) for item in data]
        found = judge(self._comm.rank, reports) if error is None else error
        as_told(found)
        floor = min(report.depth for report in reports)
        # At the ends of different sections there is nothing more to wait for.
        self._all_joined = all(
            report.joining and report.depth == self._depth for report in reports
        )
        if floor < self._depth:
            self._floor, self._given_up = min(floor, self._floor), found
            self._update_blocked()
        # All ranks are here now, whatever each was about to do: the only moment at
        # which an update that some of them did not make can be undone.
        written = sorted({key for report in reports for key in report.written})
        if written and self._repair is not None:
            self._repair(written)
        return found

    def interrupted(self, what: str, error: BaseException) -> bool:
        """Tell the others if an exception came to this rank from outside, in a call.

        At any line, so it is not known how much of the call is done: the strategy is
        then unusable. To be called where exceptions leave what ranks do together.

        Args:
            what: the call.
            error: the exception that leaves it.

        Returns:
            Whether it is such an exception.
        """
        if self._alone or was_told(error) or not is_interruption(error):
            return False
        self._break_off(what, error)
        self.repeat_notice()
        return True

    def repair_with(self, repair: Callable[[Sequence[Key]], None]) -> None:
        """Set the function that makes copies equal again after a failed update.

        Args:
            repair: gets the keys of the variables. Collective.
        """
        self._repair = repair

    def record(self, writes: Writes | None) -> Writes | None:
        """Set what the current update writes.

        If the ranks then differ, the variables are made equal again (`repair_with`).

        Returns:
            What was in use before.
        """
        before, self._writes = self._writes, writes
        return before

    # --- sections -----------------------------------------------------------------

    def span(self, text: str) -> contextlib.AbstractContextManager[None]:
        """Return a context for work of this rank that a timeline shows.

        Args:
            text: what it is.
        """
        if self.calls is None:
            return NOTHING
        return self.calls.work(text, self.sequence + 1)

    @property
    def depth(self) -> int:
        """How many sections this rank is in."""
        return self._depth

    @property
    def deserted(self) -> bool:
        """Whether some rank is not in the innermost section that this one is in."""
        return self._floor < self._depth

    def require_section(self) -> None:
        """Raise if some rank is not in the innermost section that this one is in."""
        if self.unsettled:
            self.settle()
        if self.deserted and self._given_up is not None:
            raise self._given_up

    def enter_section(self) -> None:
        """Enter a section."""
        self.settle()
        self._depth += 1
        if self._floor is not _NO_FLOOR:
            self._update_blocked()

    def leave_section(self) -> None:
        """Leave the innermost section."""
        self._depth -= 1
        if self._floor is not _NO_FLOOR:
            if self._depth <= self._floor:
                self._floor, self._given_up = _NO_FLOOR, None
            self._update_blocked()

    @observed(_join, _ends_with)
    def join(
        self,
        call: Call,
        error: BaseException | None,
        kind: ErrorKind = "raised",
        result: str | Callable[[], str] = "",
        fingerprint: int = 0,
    ) -> BaseException | None:
        """Wait until every rank has come to this call; return what to raise.

        The end of a section: a rank that is here first meets the headers of ranks that
        are still inside it, tells them what happened to it, and continues to wait until
        all are here. The results must then be the same on all ranks. If some rank never
        entered the section, there is nothing to wait for.

        Args:
            call: the end of the section.
            error: what this rank raised in it.
            kind: of that error.
            result: of the section, or a function that returns it, for messages.
            fingerprint: of the result.
        """
        if error is not None:
            self.interrupted(call.text, error)
        if self.begun is not None:
            if error is not None:
                self.begun.excuse()
            failure = self.begun.drain()
            error = error or failure
        if self._broken:
            self.repeat_notice()
            return error or self._broken_error()
        if not self.enabled:
            return error
        if self.deserted:
            return error or self._given_up
        while not self._exchange_chained(call, error, fingerprint):
            found = self._difference(call, error, kind, joining=True)
            if error is None:
                error, kind = found, "agreed"
            if self._all_joined or self.deserted:
                return error
        if not self.same_value:
            text = result if isinstance(result, str) else result()
            return self._difference(Call(f"{call.text} -> {text}"))
        return error

    def _exchange_chained(
        self, call: Call, error: BaseException | None, value: int
    ) -> bool:
        try:
            return self._exchange(call, 0 if error is None else 1, value, None)
        except CollectiveTimeoutError as timeout:
            raise timeout from error  # which would be lost otherwise

    @observed(_section)
    def run_section(self, call: Call, body: Callable[[SectionResult], _R]) -> _R:
        """Run ``body`` on every rank, and wait until it has ended on all. Collective.

        If it raises on one rank, all ranks raise.

        Args:
            call: the end of the section.
            body: gets a `SectionResult`, to say whose errors its own are, and what the
                result is.
        """
        section = SectionResult()
        error: BaseException | None = None
        result: Any = None
        self.enter_section()
        try:
            try:
                result = body(section)
                self.settle()
            except KeyboardInterrupt:
                raise
            except BaseException as raised:
                error = raised
                if isinstance(error, CollectiveError):
                    section.kind = "agreed"
            error = self.join(
                call, error, section.kind, section.text, section.fingerprint
            )
        except BaseException as raised:
            # Such as Ctrl-C: those who are in the section learn that this rank is not
            # coming.
            if not (was_told(raised) or self._alone):  # alone: in merge_fn
                raise self._break_off(call.text, raised) from raised.__cause__
            raise
        finally:
            self.leave_section()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    # --- the end of the program ---------------------------------------------------

    @observed(_last_header)
    def leave(self, call: Call, code: object) -> Iterator[None]:
        """Wait, at the end of the program, for the end of the others' programs.

        Yields while it waits, so that the caller can wait for several guards. A rank
        that is still in a collective learns that this one has gone.

        Args:
            call: what this rank says that it does.
            code: the argument of `sys.exit`; None: it has reached its end.

        Raises:
            CollectiveTimeoutError: at the deadline. If another rank has given up on
                some rank, that one raises, and this one returns.
        """
        try:
            yield from self._leave_with_others(call, SystemExit(code))
        except CollectiveTimeoutError:
            if not self._was_told:
                raise
        except Exception as error:
            if not isinstance(self.failed(error), ReplicaLostError):
                raise

    def _leave_with_others(self, call: Call, gone: SystemExit) -> Iterator[None]:
        failure = None if self.begun is None else self.begun.drain()
        if failure is not None:
            reporting.say(
                on_rank(
                    self._comm.rank,
                    "at the end of the program: nobody asked the handle of a call that "
                    f"was begun and failed:\n{format_exception(failure)}",
                )
            )
        channel = self.channel
        self.begin(call)
        while not self._broken:
            status = AGAIN
            while status == AGAIN:
                channel.start(0, call.fingerprint, 0, 0, self.patience_ms, NOWHERE)
                start = next_look = time.monotonic()
                while (answer := channel.test()) is None:
                    yield
                    now = time.monotonic()
                    if now >= next_look:
                        next_look = now + LOOK_SECONDS
                        self.look(AT_END, now - start)
                status = answer
            self.sequence += 1
            if status == OK:
                return
            self._verdict = channel.verdict
            self._difference(call, gone, "exit")
