"""A guard that tells the trace which call it is in; see `trace`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from mpidist._agreement.channel import Channel
from mpidist._agreement.guard import Guard, SectionResult
from mpidist._agreement.mismatch import Call, ErrorKind
from mpidist._agreement.trace import NO_ROUTE, SECTION, Record, Trace, TraceOptions
from mpidist._base.errors import CollectiveError
from mpidist._mpi.communicator import AnyCommunicator, Request

_R = TypeVar("_R")


class TracedGuard(Guard):
    """A guard whose calls are traced.

    Attributes:
        trace: of them.
    """

    traced = True

    def __init__(
        self,
        comm: AnyCommunicator,
        channel: Channel | None,
        *,
        timeout_seconds: float,
        stall_seconds: float,
        options: TraceOptions,
    ) -> None:
        """As `Guard`.

        Args:
            comm: the ranks.
            channel: where they exchange headers; None for one rank.
            timeout_seconds: how long a rank waits for the others; 0: forever.
            stall_seconds: after which the missing ranks are reported.
            options: where the trace goes.
        """
        self.trace = Trace(
            comm.rank, comm.size, comm.identity, options, stall_seconds=stall_seconds
        )
        super().__init__(
            comm, channel, timeout_seconds=timeout_seconds, stall_seconds=stall_seconds
        )

    @contextlib.contextmanager
    def _header(self, call: Call, route: str = NO_ROUTE) -> Iterator[Record]:
        """Name the call in progress; if there is none, the header is one."""
        with self.trace.call(0, route) as record:
            self._name(call)
            yield record

    def _name(self, call: Call) -> None:
        self.trace.name(call.text, self.sequence + 1)

    def agree(self, call: Call, timeout: float | None = None) -> None:
        """As that of `Guard`."""
        if self.enabled:
            with self._header(call):
                super().agree(call, timeout)
        else:  # no header: only the name, if it is part of a call
            self._name(call)
            super().agree(call, timeout)

    def agree_and_compare(
        self, call: Call, value: int, timeout: float | None = None
    ) -> bool:
        """As that of `Guard`."""
        with self._header(call):
            return super().agree_and_compare(call, value, timeout)

    def agree_on_largest(self, call: Call, value: int) -> tuple[int, bool]:
        """As that of `Guard`."""
        with self._header(call):
            return super().agree_on_largest(call, value)

    def begin(self, call: Call) -> None:
        """As that of `Guard`."""
        self._name(call)
        super().begin(call)

    def enter(self, call: Call, timeout: float | None = None) -> int:
        """As that of `Guard`."""
        self._name(call)
        return super().enter(call, timeout)

    def fail(self, call: Call, error: BaseException, kind: ErrorKind) -> BaseException:
        """As that of `Guard`."""
        if isinstance(error, CollectiveError):
            return super().fail(call, error, kind)  # without a header
        with self._header(call) as record:
            found = super().fail(call, error, kind)
            record.ends_with(found)
        return found

    def join(
        self,
        call: Call,
        error: BaseException | None,
        kind: ErrorKind = "raised",
        result: str | Callable[[], str] = "",
        fingerprint: int = 0,
    ) -> BaseException | None:
        """As that of `Guard`."""
        section = self.trace.ends(call)
        with self._header(call, NO_ROUTE if section is None else SECTION) as record:
            record.section = section
            found = super().join(call, error, kind, result, fingerprint)
            record.ends_with(found)
        return found

    def run_section(self, call: Call, body: Callable[[SectionResult], _R]) -> _R:
        """As that of `Guard`; the line of its join is that of all of it."""
        with self.trace.section(call, call.text, self.sequence + 1):
            return super().run_section(call, body)

    def whole(self, text: str) -> contextlib.AbstractContextManager[None]:
        """Trace a block that has calls inside."""
        return self.trace.whole(text, lambda: self.sequence)

    def span(self, text: str) -> contextlib.AbstractContextManager[None]:
        """As that of `Guard`."""
        return self.trace.span(text, self.sequence + 1)

    def leave(self, call: Call, code: object) -> Iterator[None]:
        """As that of `Guard`."""
        if self.broken:
            return
        with self._header(call):
            yield from super().leave(call, code)

    def wait(self, request: Request, what: str, timeout: float | None = None) -> None:
        """As that of `Guard`."""
        with self.trace.call(0, "mpi", what, self.sequence + 1):
            super().wait(request, what, timeout)

    def look(self, what: str, waited: float) -> None:
        self.trace.look(what, waited, self.sequence + 1)
        super().look(what, waited)
