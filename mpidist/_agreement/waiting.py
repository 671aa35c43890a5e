"""How a rank waits for the others: with a deadline, and without hanging forever.

Every wait comes back to `Waits.look` several times a second. After a while a rank that
waits posts a notice (`notices`), and the others that wait do so at once: each knows
then which ranks are missing, and one tells the user. At the deadline a rank posts its
last notice and raises `CollectiveTimeoutError`; so do the ranks that read it
(`breakdown`). Waits for data are no different: a rank may be stopped, killed or cut off
in the middle of a payload.

Rejected: a watchdog thread (it would call MPI from two threads at once), but in calls
that block; a barrier with a time-out (it finds no mismatch); remote memory access for
the notices (with several networks it makes progress only while its target calls MPI).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Final, TypeVar

from mpidist._agreement.breakdown import Breakdown, State
from mpidist._agreement.call_state import CallState
from mpidist._agreement.channel import Channel
from mpidist._agreement.notices import Wait
from mpidist._agreement.polling import YIELD_SECONDS_FOR_DATA, poll
from mpidist._agreement.stacks import Stacks
from mpidist._agreement.watchdog import Watchdog
from mpidist._base import reporting
from mpidist._base.errors import CollectiveTimeoutError, on_rank
from mpidist._mpi import library
from mpidist._mpi.any_communicator import AnyCommunicator
from mpidist._mpi.requests import Request, Transfer
from mpidist._timeline.observer import NOTHING

_T = TypeVar("_T")
_MOST_LINES: Final = 20  # of a report


@dataclasses.dataclass
class _Current:
    """The current wait of a rank, and what `Waits.look` has done in it.

    Attributes:
        place: what the rank waits for, and the number of its last header.
        waited: for how many seconds it has waited.
        came_late: whether others waited before, so that their waits are longer than
            what this rank reports; None before the first look.
        observed: whether the observers know of the wait.
        posted: whether this rank's notice says that it is behind; None: it has none.
        reported: whether the user may have been warned.
    """

    place: tuple[str, int]
    waited: float = 0.0
    came_late: bool | None = None
    observed: bool = False
    posted: bool | None = None
    reported: bool = False


class Waits:
    """One rank's waits for the others of a communicator.

    Args:
        comm: the ranks.
        call_state: the call that this rank is in.
        breakdown: what happens at the deadline.
        stall_seconds: after which the missing ranks are reported.

    Attributes:
        watchdog: waits in calls of MPI that block.
    """

    def __init__(
        self,
        comm: AnyCommunicator,
        call_state: CallState,
        breakdown: Breakdown,
        stall_seconds: float,
    ) -> None:
        self._comm = comm
        self._call_state = call_state
        self._breakdown = breakdown
        self._stall = stall_seconds
        self._stacks: Stacks | None = None
        self.watchdog: Watchdog = Watchdog(comm)
        self._current = _Current(("", 0))
        # The ranks whose data has not come; None while this rank waits for no data.
        self._awaited: Callable[[], list[int]] | None = None

    # --- waits --------------------------------------------------------------------

    def wait(self, request: Request, what: str, timeout: float | None = None) -> None:
        """Wait for a request.

        Raises:
            CollectiveTimeoutError: on every waiting rank, after ``timeout`` seconds
                (None: the strategy's; 0: never).
        """
        state = self._call_state
        state.timeout = state.timeout_seconds if timeout is None else timeout
        observed: contextlib.AbstractContextManager[object] = NOTHING
        if state.observers is not None:
            observed = state.observers.call(0, "mpi", what, state.sequence + 1)
        try:
            with observed:
                poll(request, lambda waited: self.look(what, waited))
        except BaseException as error:
            request.leak()
            raise self._breakdown.abandon(what, error) from error.__cause__

    def wait_data(self, transfer: Transfer) -> None:
        """Wait for collectives of MPI that move the data of the last call.

        The caller leaks their buffers if this raises.

        Raises:
            CollectiveTimeoutError: on every waiting rank, after the strategy's
                `timeout_seconds`.
        """

        def wait() -> None:
            poll(
                transfer,
                lambda waited: self.look(self._data(), waited),
                yield_seconds=YIELD_SECONDS_FOR_DATA,
            )

        self.wait_step(wait, list)  # MPI does not say whose data is missing

    def wait_step(self, wait: Callable[[], _T], missing: Callable[[], list[int]]) -> _T:
        """Wait for a step of the data of the last call.

        Args:
            wait: waits; such as that of a channel that was given to `watch`, for the
                memory of one node. What it returns is returned.
            missing: returns the ranks that have not made the step.

        Raises:
            CollectiveTimeoutError: at the deadline, or if another rank has given up.
        """
        self._call_state.timeout = self._call_state.timeout_seconds
        self._awaited = missing
        try:
            return wait()
        except BaseException as error:
            text = self._call_state.call.text
            raise self._breakdown.abandon(text, error) from error.__cause__
        finally:
            self._awaited = None

    def block(self, call: Callable[[], object]) -> None:
        """Make a call of MPI that blocks, for the data of the last call.

        No exception can end it, so a watchdog waits in its place.
        """
        may_look = library.thread_level() == "MULTIPLE"
        look = self.look if may_look else self._look_alone
        with self.watchdog.watch(functools.partial(look, self._data())):
            self.wait_step(call, list)

    def _look_alone(self, what: str, waited: float) -> None:
        """Do as `look`, but without MPI, which another thread is in."""
        before, self._current = self._current, _Current(("", 0), waited)
        text = (
            f"{what}: this rank has been in a call of MPI that blocks for "
            f"{waited:.3g} s; some rank did not make it, or was stopped in it. It is "
            "not known which, as MPI is without MPI_THREAD_MULTIPLE"
        )
        error = CollectiveTimeoutError(on_rank(self._comm.rank, text))
        if waited >= self._stall > before.waited:
            reporting.warn(f"mpidist: {error}")
        if 0 < self._call_state.timeout <= waited:
            self._breakdown.set(State.GAVE_UP, text)
            raise self._breakdown.timed_out(error)

    def _data(self) -> str:
        return f"the data of {self._call_state.call.text}"

    def watch(self, channel: Channel, *, is_for_data: bool = False) -> None:
        """Have every wait in a channel check deadline and notices (`look`).

        Args:
            channel: the one of the headers and the data behind them; or, with several
                nodes, the one of a node, which moves data only.
            is_for_data: whether it is the latter.
        """
        # Weakly: the garbage collector does not see through a channel of the core.
        reference = weakref.ref(self)

        def pause(waited: float) -> None:
            this = reference()
            if this is not None:
                moves = is_for_data or this._call_state.channel.moves
                this.look(this._data() if moves else this._call_state.call.text, waited)

        channel.pause = pause

    # --- the deadline -------------------------------------------------------------

    def look(self, what: str, waited: float) -> None:
        """In the middle of a wait: read notices, post one, warn the user, or give up.

        A rank that has given up may have done its part of this call before. So its
        notice does not end the wait at once, but at the next look: until then the call
        is tested once more, and may have completed.

        Args:
            what: what this rank waits for.
            waited: for how many seconds.

        Raises:
            CollectiveTimeoutError: at the deadline, or if another rank has given up.
            ReplicaLostError: if a rank is lost.
        """
        state, breakdown = self._call_state, self._breakdown
        place, current = (what, state.sequence), self._current
        if waited < current.waited or place != current.place:
            current = self._current = _Current(place)
        current.waited = waited
        if not current.observed and waited >= self._stall:
            current.observed = True
            if state.observers is not None:
                state.observers.waits(what, waited, state.sequence + 1)
        if state.async_calls is not None:
            state.async_calls.look()
        timeout = state.timeout
        breakdown.check_lives(what)
        if breakdown.state is State.TOLD:
            raise breakdown.error()
        if breakdown.read_notices():
            return
        self._tell(what, current, timeout)
        if timeout and waited >= timeout:
            wait = self._describe(what)
            raise breakdown.give_up_on(wait, self._why(wait, timeout))

    def _tell(self, what: str, current: _Current, timeout: float) -> None:
        """If this wait is long, or others wait, post a notice, and warn the user."""
        notices, waited = self._breakdown.notices, current.waited
        notices.is_for_data = (
            self._awaited is not None or self._call_state.channel.moves
        )
        longest = notices.longest_wait(what)
        if current.came_late is None:
            current.came_late = longest > 0
        post_after = min(self._stall, timeout / 2) if timeout else self._stall
        if waited < post_after and not notices.others_wait():
            return
        wait = self._describe(what)
        if current.posted is not notices.is_behind:
            notices.post(wait, waited=waited)
            current.posted = notices.is_behind
        longest = waited if current.came_late else max(waited, longest)
        if not current.reported and longest >= self._stall:
            current.reported = notices.are_quiet()
            if current.reported:
                self._report(wait, longest)

    def _report(self, wait: Wait, waited: float) -> None:
        """Warn the user: which ranks are missing, and their stacks."""
        notices = self._breakdown.notices
        text = notices.describe(wait, waited)
        waiting, missing = notices.waiting_and_missing(wait)
        if missing and waiting[:1] == [self._comm.rank]:  # the first one that waits
            reporting.warn(f"mpidist: {text}")
        if self._stacks is not None:
            left = _MOST_LINES - text.count("\n") - 1
            if where := self._stacks.report(waiting, missing, left):
                reporting.warn(f"mpidist: {where}")

    def ask_missing_ranks(self, stacks: Stacks) -> None:
        """From now on look whether other ranks live, and report where they hang."""
        self._stacks = stacks
        self._breakdown.lives.watch(stacks.processes)

    def _describe(self, what: str) -> Wait:
        state = self._call_state
        # MPI does not say whose data is missing.
        awaited = [] if state.channel.moves else self._awaited and self._awaited()
        before, missing = state.previous_call.text, state.channel.missing()
        return Wait(what, before, missing, awaited)

    def _why(self, wait: Wait, timeout: float) -> str:
        why = (
            f"{self._breakdown.notices.describe(wait, timeout)}. This strategy cannot "
            "be used any more; variables and arrays are as before the call. "
        )
        if wait.awaited is None:
            return (
                f"{why}Make all ranks make the same calls; if the rank was only slow, "
                "raise `timeout_seconds` in CommunicationOptions"
            )
        return (
            f"{why}The rank was stopped or has died, or the network between the hosts "
            "does not carry its data; if it was only slow, raise `timeout_seconds` in "
            "CommunicationOptions"
        )
