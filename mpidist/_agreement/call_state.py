"""The call that a rank is in, which the parts of a guard share.

With the native core the base class is a type of the core, whose `ArrayCall` reads and
sets its attributes without Python: a small all-reduce of an array takes 0.6 us, to
which Python's attributes would add 0.1.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mpidist import _native
from mpidist._agreement.async_calls import AsyncCalls
from mpidist._agreement.channel import Channel
from mpidist._agreement.mismatch import Call
from mpidist._timeline.observer import NOTHING, Observers, Span

if TYPE_CHECKING or _native.core is None:
    _CoreCallState = object
else:
    _CoreCallState = _native.core.CallState


class CallState(_CoreCallState):
    """The call that a rank is in, for the parts of its guard.

    Args:
        channel: where the ranks exchange headers.
        timeout_seconds: how long a rank waits for the others; 0: forever.

    Attributes:
        call: the call that the rank is in, or made last.
        previous_call: the one before.
        timeout: how long this rank waits for the others in it, in seconds; 0: forever.
        timeout_seconds: the same, for calls without a time-out of their own.
        sequence: the number of headers that have completed, or would have with the
            guard on; the same on all ranks.
        blocked: whether `Guard` has to check, before a call begins, that it may.
        cut_off: whether an exception came in the middle of a call of the core.
        mover: the thread that moves data, or reports, by Python; 0: none does.
        sections: one entry for each open section, outermost first: the exception that
            calls in it raise, once some rank is known not to be in it; None until then.
        deserted: the entry of the innermost section.
        async_calls: those that were begun; None: there were none.
        observers: tells those of this strategy of each call; None: there are none.
    """

    def __init__(self, channel: Channel, timeout_seconds: float) -> None:
        # The first eight are those of the type of the core.
        self.call: Call = Call("making the strategy")
        self.previous_call: Call = self.call
        self.timeout: float = timeout_seconds
        self.timeout_seconds: float = timeout_seconds
        self.sequence: int = 0
        self.blocked: bool = False
        self.cut_off: bool = False
        self.mover: int = 0
        self.channel: Channel = channel
        self.sections: list[BaseException | None] = []
        self.deserted: BaseException | None = None
        self.async_calls: AsyncCalls | None = None
        self.observers: Observers | None = None

    @property
    def timeout_ms(self) -> int:
        """The default time-out of calls in milliseconds; 0: they wait forever."""
        return int(self.timeout_seconds * 1000)

    def settle(self) -> None:
        """Wait for the asynchronous calls, before another call is made.

        Raises:
            BaseException: what one of them raised, if its handle has not raised it.
        """
        if self.async_calls is not None and self.async_calls.unsettled:
            self.async_calls.settle()

    def raise_failure(self) -> None:
        """Raise what an asynchronous call has raised so far, without waiting."""
        if self.async_calls is not None and self.async_calls.failure is not None:
            raise self.async_calls.failure

    def observed(
        self, call: Call, section: Span | None = None
    ) -> AbstractContextManager[Span | None]:
        """Return a context in which the observers of this strategy see a header.

        Args:
            call: the call of the header.
            section: the section that ends with it; None: none does.
        """
        if self.observers is None:
            return NOTHING
        return self.observers.header(call.text, self.sequence + 1, section)
