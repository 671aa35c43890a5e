"""The call that a rank is in, which the parts of a guard share.

With the native core the base class is a type of the core, whose `ArrayCall` reads and
sets the attributes without Python: a small all-reduce of an array takes 0.6 us, to
which Python's attributes would add 0.1.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mpidist import _native
from mpidist._agreement.begun import BegunCalls
from mpidist._agreement.channel import Channel
from mpidist._agreement.mismatch import Call
from mpidist._timeline.observer import NOTHING, Calls, Span

if TYPE_CHECKING or _native.core is None:

    class CallState:
        """The call that a rank is in.

        Attributes:
            timeout_seconds: how long a call that names no others waits; 0: forever.
            sequence: the number of headers that have completed; the same on all ranks.
            blocked: whether a call may not begin before it has been checked.
            _cut_off: whether an exception came in the middle of a call of the core.
        """

        _call: Call  # the call that this rank is in, or made last
        _previous_call: Call  # the one before
        _timeout: float  # how long this rank waits for the others in it
        timeout_seconds: float
        sequence: int
        blocked: bool
        _cut_off: bool = False

else:
    CallState = _native.core.CallState


class SectionStack:
    """The sections that a rank is in, outermost first; see `sections`.

    A section that some rank turns out not to be in is *deserted*: its calls raise.

    Attributes:
        error: what the calls of the innermost section raise; None: it is not deserted.
    """

    def __init__(self) -> None:
        # Of each section: what its calls raise, because it is deserted; or None.
        self._errors: list[BaseException | None] = []
        self.error: BaseException | None = None

    @property
    def depth(self) -> int:
        """How many sections this rank is in."""
        return len(self._errors)

    def enter(self) -> None:
        """Enter a section; inside a deserted one it is deserted as well."""
        self._errors.append(self.error)

    def leave(self) -> bool:
        """Leave the innermost section; return whether it was deserted."""
        deserted = self._errors.pop() is not None
        self.error = self._errors[-1] if self._errors else None
        return deserted

    def desert(self, depth: int, error: BaseException) -> None:
        """Note that some rank is in ``depth`` sections only.

        Args:
            depth: the fewest sections that a rank is in.
            error: what the calls of the others raise.
        """
        for level in range(depth, self.depth):
            self._errors[level] = self.error = error


class SharedState(CallState):
    """The call that a rank is in, for the parts of its guard.

    Args:
        channel: where the ranks exchange headers.
        timeout_seconds: how long a rank waits for the others; 0: forever.

    Attributes:
        sections: that the rank is in.
        begun: the calls that were begun and end later; None: there were none.
        calls: tell the observers of the strategy's calls; None: it has none.
    """

    # Of the base class; without these lines pyright calls their types ambiguous.
    timeout_seconds: float
    sequence: int
    blocked: bool

    def __init__(self, channel: Channel, timeout_seconds: float) -> None:
        self.channel: Channel = channel
        self.timeout_seconds = timeout_seconds
        self.sequence = 0
        self.blocked = False
        self.sections: SectionStack = SectionStack()
        self.begun: BegunCalls | None = None
        self.calls: Calls | None = None
        self._call = self._previous_call = Call("making the strategy")
        self._timeout = timeout_seconds

    @property
    def call(self) -> Call:
        """The call that this rank is in, or made last."""
        return self._call

    @property
    def previous_call(self) -> Call:
        """The call before."""
        return self._previous_call

    @property
    def timeout(self) -> float:
        """How long this rank waits for the others, in seconds; 0: forever."""
        return self._timeout

    @property
    def patience_ms(self) -> int:
        """How long calls wait that name no other time, in milliseconds; 0: forever."""
        return int(self.timeout_seconds * 1000)

    def set_timeout(self, timeout: float | None) -> int:
        """Set for how long this rank waits; return it in milliseconds.

        Args:
            timeout: in seconds; None: the strategy's; 0: forever.
        """
        self._timeout = self.timeout_seconds if timeout is None else timeout
        return int(self._timeout * 1000)

    def settle(self) -> None:
        """Wait for the calls that were begun, before another one is made.

        Raises:
            BaseException: what one of them raised, if nobody asked its handle.
        """
        if self.begun is not None and self.begun.unsettled:
            self.begun.settle()

    def raise_failure(self) -> None:
        """Raise what a call that was begun has raised until now, without waiting."""
        if self.begun is not None and self.begun.failure is not None:
            raise self.begun.failure

    def observed(
        self, call: Call, section: Span | None = None
    ) -> AbstractContextManager[Span | None]:
        """Return a context in which the observers of this strategy see a header.

        Args:
            call: of the header.
            section: that ends with it; None: none does.
        """
        if self.calls is None:
            return NOTHING
        return self.calls.header(call.text, self.sequence + 1, section)
