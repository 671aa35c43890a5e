"""Sections: parts of the program that every rank enters, and whose end is a header.

A rank at the end of a section answers the headers of ranks that are still inside it: so
if ranks make different calls in a section, all get to its end, and can continue. The
end of the program works like that, too: each rank waits there for the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from mpidist._agreement.breakdown import State
from mpidist._agreement.channel import AGAIN, NOWHERE, OK
from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call, ErrorKind, fingerprint
from mpidist._agreement.notices import AT_END
from mpidist._agreement.polling import LOOK_SECONDS
from mpidist._base.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ReplicaLostError,
    told_by,
)
from mpidist._timeline.observer import NOTHING, Span

_R = TypeVar("_R")


class SectionResult:
    """How a section ended on one rank: its exception, and what its result is.

    Attributes:
        error: what the section has raised on this rank; None: nothing.
        kind: of the error (`mismatch.Report`). The body sets it beforehand, for what it
            may raise from then on.
        fingerprint: of the result.
        span: of the section, if it is observed.
    """

    error: BaseException | None = None
    span: Span | None = None
    kind: ErrorKind = "invalid"
    fingerprint = 0
    _result = ("", 0)

    def set_result(self, text: str, number: int = 0) -> None:
        """Set what ranks compare of the result, which must be the same on all.

        Args:
            text: a description, also for the message if the ranks differ.
            number: a fingerprint of what the text does not show.
        """
        self._result = text, number
        self.fingerprint = fingerprint(text) ^ number

    def describe(self) -> str:
        """Return the text of the result."""
        text, number = self._result
        return f"{text} [#{number}]" if number else text


def run_section(guard: Guard, call: Call, body: Callable[[SectionResult], _R]) -> _R:
    """Run ``body`` on every rank, and wait until it has ended on all. Collective.

    If it raises on one rank, all ranks raise.

    Args:
        guard: of the ranks.
        call: the end of the section.
        body: gets the `SectionResult`, in which it sets ``kind`` and the result.
    """
    section, observers = SectionResult(), guard.observers
    result: Any = None
    number = guard.sequence + 1
    observed = NOTHING if observers is None else observers.section(call.text, number)
    with observed as section.span:
        guard.enter_section()
        try:
            try:
                result = body(section)
                if guard.blocked:
                    guard.settle()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                section.error = error
                if isinstance(error, CollectiveError):
                    section.kind = "agreed"
                elif not isinstance(error, Exception):  # sys.exit: of this rank alone
                    section.kind = "raised"
            found = join(guard, call, section)
        except BaseException as raised:
            # Such as Ctrl-C: ranks in the section learn that this one does not come.
            in_merge_fn = guard.breakdown.state is State.ALONE
            if told_by(raised) is None and not in_merge_fn:
                raise guard.abandon(call, raised) from raised.__cause__
            raise
        finally:
            guard.leave_section()
    if found is not None:
        raise found
    return result


def join(guard: Guard, call: Call, section: SectionResult) -> BaseException | None:
    """Wait until every rank has come to the end of a section; return what to raise.

    A rank at the end answers the headers of ranks that are still inside, tells them how
    the section ended here, and waits until all are at the end. The results must then be
    the same on all ranks. If some rank never entered the section, all raise.

    Args:
        guard: of the ranks.
        call: the end of the section.
        section: how it ended on this rank.
    """
    if guard.observers is None:
        return _join(guard, call, section)
    with guard.observed(call, section.span) as span:
        found = _join(guard, call, section)
        if span is not None and found is not None:
            span.raised = type(found).__name__
    return found


def _join(guard: Guard, call: Call, section: SectionResult) -> BaseException | None:
    error, kind = section.error, section.kind
    if error is not None:
        guard.breakdown.interrupted(call.text, error)
    if guard.async_calls is not None:
        error = guard.async_calls.drain(error)
    if guard.blocked:
        if guard.broken:
            guard.breakdown.repeat_notice()
            return error or guard.breakdown.error()
        if guard.deserted is not None:
            return error or guard.deserted
    if not guard.enabled:
        guard.sequence += 1
        return error
    try:
        number = section.fingerprint
        while not guard.exchange(call, error, number):
            found, joined = guard.reports.exchange(call, error, kind, joining=True)
            if error is None:
                error, kind = found, "agreed"
            # At the ends of different sections there is nothing more to wait for.
            if joined or guard.deserted is not None:
                return error
    except CollectiveTimeoutError as timeout:
        raise timeout from error  # which would be lost otherwise
    if not guard.channel.verdict[2]:
        return guard.reports.exchange(Call(f"{call.text} -> {section.describe()}"))[0]
    return error


def leave_program(guard: Guard, call: Call, code: object) -> Iterator[None]:
    """At the end of this program: wait for the ends of the others.

    Yields while it waits, so that the caller can wait for several guards. A rank that
    is still in a collective learns that this one has left.

    Args:
        guard: of the ranks.
        call: what messages say that this rank does.
        code: the argument of `sys.exit`; None: it has reached its end.

    Raises:
        CollectiveTimeoutError: at the deadline. If another rank has given up on some
            rank, that one raises, and this one returns.
    """
    try:
        with NOTHING if guard.broken else guard.observed(call):
            yield from _meet(guard, call, SystemExit(code))
    except CollectiveTimeoutError:
        if guard.breakdown.state is not State.TOLD:
            raise
    except Exception as error:
        if not isinstance(guard.breakdown.failed(error), ReplicaLostError):
            raise


def _meet(guard: Guard, call: Call, gone: SystemExit) -> Iterator[None]:
    """Exchange headers until all ranks are at their ends."""
    channel = guard.channel
    guard.begin(call)
    while not guard.broken:
        channel.start(0, call.fingerprint, 0, 0, guard.timeout_ms, NOWHERE)
        start = next_look = time.monotonic()
        while (status := channel.test()) is None:
            yield
            now = time.monotonic()
            if now >= next_look:
                next_look = now + LOOK_SECONDS
                guard.waits.look(AT_END, now - start)
        if status == AGAIN:
            continue
        guard.sequence += 1
        if status == OK:
            return
        guard.reports.exchange(call, gone, "exit")
