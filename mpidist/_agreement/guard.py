"""The guard: a small agreement of all ranks before any data counts.

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

There are two ways to break off: before anything of a call has moved `Guard.fail` (all
ranks raise, and go on), after that `Guard.abandon` or `Guard.payload` (`breakdown`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Final, TypeVar

from mpidist._agreement.async_calls import AsyncCalls
from mpidist._agreement.breakdown import Breakdown, Checking, Payload, State
from mpidist._agreement.call_state import CallState
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
from mpidist._agreement.mismatch import Call, ErrorKind, summarize_exception
from mpidist._agreement.reports import Reports
from mpidist._agreement.waiting import Waits
from mpidist._base.errors import CollectiveError, told_by
from mpidist._base.fingerprint import fingerprint_of
from mpidist._mpi.any_communicator import AnyCommunicator
from mpidist._timeline.observer import NOTHING

_T = TypeVar("_T")
_UNSETTLED: Final = (AGAIN, LEFT)


class Guard(CallState):
    """Agreement, propagation of errors and deadline for one communicator.

    Args:
        comm: the ranks.
        channel: where they exchange headers; None: a `SelfChannel`, for one rank.
        timeout_seconds: how long a rank waits for the others; 0: forever.
        stall_seconds: after which the missing ranks are reported.
        enabled: whether calls are compared.

    Attributes:
        checks: whether calls are compared with those of other ranks.
        breakdown: whether calls can still be made, and what happens when they cannot.
        waits: of this rank for the others.
        reports: of the ranks, if their calls differ.
        before_call: called before a collective call while this rank is alone
            (`set_alone`), to make it legal; None: such a call is an error.
        checking: ``checking(call)`` is a context for checks before a call: all ranks
            raise what it raises.
    """

    # Of the base class; without these lines pyright calls their types ambiguous.
    call: Call
    previous_call: Call
    timeout: float
    async_calls: AsyncCalls | None
    channel: Channel
    blocked: bool
    sequence: int
    mover: int
    deserted: BaseException | None

    def __init__(
        self,
        comm: AnyCommunicator,
        channel: Channel | None,
        *,
        timeout_seconds: float,
        stall_seconds: float,
        enabled: bool = True,
    ) -> None:
        super().__init__(channel or SelfChannel(), timeout_seconds)
        self._comm = comm
        self.enable(enabled)
        self.breakdown: Breakdown = Breakdown(comm, self)
        self.waits: Waits = Waits(comm, self, self.breakdown, stall_seconds)
        self.waits.watch(self.channel)
        self.reports: Reports = Reports(comm, self, self.breakdown)
        self.before_call: Callable[[], None] | None = None
        self.checking: Callable[[str | Call], Checking] = partial(Checking, self.fail)

    def enable(self, enabled: bool) -> None:
        """Set whether calls are compared."""
        self.enabled: bool = enabled
        self.checks: bool = enabled and self._comm.size > 1

    @property
    def broken(self) -> str:
        """Why the strategy cannot be used any more; "" while it can."""
        return self.breakdown.why

    @property
    def closed(self) -> bool:
        """Whether the strategy was closed."""
        return self.breakdown.state is State.CLOSED

    def close(self, why: str = "this strategy was closed; make a new one") -> None:
        """Make every later call raise, and say why. Not collective."""
        self.breakdown.set(State.CLOSED, why)
        if self.async_calls is not None:
            self.async_calls.end()
            self.async_calls = None
        self.channel = SelfChannel()  # without the memory that the ranks share
        self.waits.watchdog.close()

    def set_alone(self, alone: bool) -> bool:
        """Set whether merge_fn runs on this rank alone; return the value before.

        While it does, a collective call of this rank is an error, since the other ranks
        would not make it, unless `before_call` makes it legal.
        """
        breakdown = self.breakdown
        before = breakdown.state is State.ALONE
        if before is not alone and not breakdown.why:
            breakdown.state = State.ALONE if alone else State.USABLE
            self.update_blocked()
        return before

    def update_blocked(self) -> None:
        """Set `blocked`: whether something may keep the next call from being made."""
        self.blocked = (
            self.breakdown.state is not State.USABLE
            or self.deserted is not None
            or self.cut_off
            or (self.async_calls is not None and self.async_calls.unsettled)
        )

    def agree(self, call: Call, timeout: float | None = None) -> None:
        """Return if all ranks make this call; raise on all ranks otherwise.

        Collective.

        Args:
            call: what this rank is about to do.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        if self.enabled:
            self.agree_on(call, timeout=timeout)
        else:  # counted, as messages and timelines have the numbers of calls
            self.enter(call, timeout)
            self.sequence += 1

    def agree_on(
        self,
        call: Call,
        value: int = 0,
        largest: int = 0,
        *,
        offset: int = NOWHERE,
        timeout: float | None = None,
    ) -> bool:
        """Do as `agree`, even with the guard off; return whether all values are equal.

        Args:
            call: what this rank is about to do.
            value: may differ.
            largest: 0 or more; see `largest`.
            offset: of this rank's results in its arena; see `in_arenas`.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        with NOTHING if self.observers is None else self.observed(call):
            if not self.exchange(call, None, value, largest, offset, timeout):
                raise self.reports.exchange(call)[0]
        return bool(self.channel.verdict[2])

    def values_of_all(self, call: Call, own: _T) -> list[_T]:
        """Return the values of all ranks, on all of them. Collective.

        One header, as by `agree_on`, if they are the same; else all are gathered.

        Args:
            call: what this rank is about to do.
            own: the value of this rank, as for `fingerprint_of`.
        """
        if self.agree_on(call, fingerprint_of(own)):
            return [own] * self._comm.size
        return self._comm.all_gather_objects(own)

    @property
    def largest(self) -> int:
        """The largest of the integers ``largest`` in the last `agree_on`."""
        return self.channel.verdict[4]

    @property
    def in_arenas(self) -> bool:
        """Whether all ranks gave an ``offset`` in an arena to the last `agree_on`."""
        return bool(self.channel.verdict[3])

    def begin(self, call: Call, timeout: float | None = None) -> int:
        """Note which call this rank is in; return its time-out.

        Returns:
            How many milliseconds this rank waits for the others; 0: forever.

        Raises:
            RuntimeError: if another thread is in a call.
        """
        busy = self.channel.busy or (self.mover and self.mover != get_ident())
        # Threads may share a strategy of one replica, which has no order of calls. What
        # has left a call that was broken off may still hold the channel.
        if busy and not self.broken and self._comm.size > 1:
            where = f", or what a signal has interrupted, is in {self.call.text}"
            raise self.breakdown.two_threads(where, call)
        self.previous_call, self.call = self.call, call
        self.timeout = self.timeout_seconds if timeout is None else timeout
        return int(self.timeout * 1000)

    def enter(self, call: Call, timeout: float | None = None) -> int:
        """Begin a call whose header the caller exchanges; return its time-out in ms."""
        if self.blocked:
            self._require_usable()
        if self.observers is not None:
            self.observers.name(call.text, self.sequence + 1)
        return self.begin(call, timeout)

    def conclude(self, status: int | None, exchange: Callable[[int], int]) -> None:
        """Act on the status of a header that was exchanged after `enter`. Collective.

        Args:
            status: of the header.
            exchange: exchanges the header once more, if some rank was late; gets the
                time-out in milliseconds, and returns the status.

        Raises:
            BaseException: what the reports of all ranks show, if their calls differ.
        """
        if status in _UNSETTLED:
            status = self._settle_header(status, exchange)
        self.sequence += 1
        if status == DIFFERENT:
            raise self.reports.exchange(self.call)[0]

    def exchange(
        self,
        call: Call,
        error: BaseException | None = None,
        value: int = 0,
        largest: int = 0,
        offset: int = NOWHERE,
        timeout: float | None = None,
    ) -> bool:
        """Exchange a header; return whether no flag is up and all calls are the same.

        Collective.

        Args:
            call: what this rank is about to do.
            error: why this rank has failed, which raises its flag.
            value: may differ; ``channel.verdict`` says whether it does.
            largest: an integer of which all ranks learn the largest.
            offset: of results in the arena of this rank.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        if self.blocked:
            self._require_usable()
        flag = 0
        if error is not None:  # as messages say, if another rank does not come
            flag, call = 1, Call(f"{call.text}, after {summarize_exception(error)}")
        ms = self.begin(call, timeout)
        meet, number = self.channel.meet, call.fingerprint
        try:
            status: int | None = meet(flag, number, value, largest, ms, offset)
        except BaseException as raised:
            raise self.abandon(call, raised) from raised.__cause__
        if status in _UNSETTLED:
            again = lambda ms: meet(flag, number, value, largest, ms, offset)  # noqa: E731
            status = self._settle_header(status, again)
        self.sequence += 1
        return status == OK

    def _settle_header(
        self, status: int | None, exchange: Callable[[int], int]
    ) -> int | None:
        """Return the status of a header, exchanged again while some rank was late."""
        with self.payload():
            while status == AGAIN:  # all ranks are known to be on the way
                if self.breakdown.read_notices():
                    raise self.breakdown.error()
                status = exchange(int(self.timeout * 1000))
            if status == LEFT:
                raise LeftError(self.channel.who)
        return status

    def _require_usable(self) -> None:
        """Raise if this rank cannot make a collective call now."""
        self.settle()
        breakdown = self.breakdown
        if self.cut_off and not breakdown.why:  # no frame was left for `abandon`
            self.abandon(None, RecursionError())
        if breakdown.why:
            raise breakdown.error()
        if self.deserted is not None:
            raise self.deserted
        if breakdown.state is State.ALONE and self.before_call is not None:
            self.before_call()
        if breakdown.state is State.ALONE:
            raise breakdown.error()

    def check_late(self) -> None:
        """Raise if the others have given up on this rank while it was away."""
        breakdown = self.breakdown
        if breakdown.why or self.cut_off:
            self.set_alone(False)
            self._require_usable()
        timeout = self.timeout_seconds
        late = timeout and self.channel.lateness * 2 > timeout
        if late and breakdown.read_notices():
            raise breakdown.error()

    def payload(self, call: Call | None = None) -> Payload:
        """Return a context for moving data: an exception breaks the call off.

        Args:
            call: the call that moves data; None: the last call.
        """
        return Payload(self.breakdown, self, (call or self.call).text)

    def abandon(self, call: Call | None, error: BaseException) -> BaseException:
        """Break off a call in the middle of its data; return what to raise.

        The others, which would wait for this rank forever, raise too.

        Args:
            call: the call; None: the last one.
            error: what this rank raised in it: usually a signal's, or `LeftError`.
        """
        return self.breakdown.abandon((call or self.call).text, error)

    def fail(
        self, call: Call, error: BaseException, kind: ErrorKind = "invalid"
    ) -> BaseException:
        """Have all ranks raise, before anything of a call has moved.

        Collective in effect: the header of the other ranks' next call meets this one.
        The strategy can be used on.

        Args:
            call: what this rank cannot do, because of ``error``.
            error: why.
            kind: "raised" if the others raise a `ReplicaError`; "invalid": the same.

        Returns:
            What to raise.
        """
        usable = self.breakdown.state is State.USABLE
        # Those of other strategies may be known to fewer ranks.
        by_all = isinstance(error, CollectiveError)
        by_all = by_all and told_by(error) == self._comm.identity
        if by_all or not (self.enabled and usable and self.deserted is None):
            return error
        with self.observed(call) as span:
            self.exchange(call, error)
            found, _ = self.reports.exchange(call, error, kind)
            if span is not None:
                span.raised = type(found).__name__
        return found

    def span(self, text: str) -> contextlib.AbstractContextManager[None]:
        """Return a context for work of this rank, which timelines show as ``text``."""
        if self.observers is None:
            return NOTHING
        return self.observers.work(text, self.sequence + 1)

    def enter_section(self) -> None:
        """Enter a section."""
        self.settle()
        self.sections.append(self.deserted)

    def leave_section(self) -> None:
        """Leave the innermost section."""
        if self.sections.pop() is not None:
            self.deserted = self.sections[-1] if self.sections else None
            self.update_blocked()
