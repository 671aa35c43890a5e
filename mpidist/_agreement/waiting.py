"""How a rank waits for the others: with a deadline, and without hanging forever.

Every wait comes back to `Waiting.look` several times a second. After a while a rank
that waits posts a notice (`notices`), so that each waiting rank knows which are
missing, and one of them tells the user. At the deadline a rank posts its last notice
and raises `CollectiveTimeoutError`; so do the ranks that read it. The strategy is then
*broken*: the missing rank may still come, and its header may still complete.

Waits for data are no different: a rank may be stopped, killed or cut off in the middle
of a payload. A rank that leaves a payload, for example by Ctrl-C, tells the others.

A rank may also be *lost*: its process has died, and the job goes on (`lives`). Each
look finds that. The rank that does tells the others by MPI, which ends their calls, and
in the shared memory, and all raise `ReplicaLostError`.

Rejected: a watchdog thread (it would call MPI from two threads at once); a barrier with
a time-out (it finds no mismatch); remote memory access for the notices (with several
networks it makes progress only while its target calls MPI).
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final

from mpidist._agreement.begun import BegunCalls
from mpidist._agreement.call_state import CallState
from mpidist._agreement.channel import Channel, LeftError, SelfChannel
from mpidist._agreement.lives import Lives
from mpidist._agreement.mismatch import Call
from mpidist._agreement.notices import End, Notices, Wait
from mpidist._agreement.polling import (
    SHORT_SLEEP,
    YIELD_SECONDS_FOR_DATA,
    poll,
    spins_for,
)
from mpidist._agreement.stacks import Stacks
from mpidist._agreement.watchdog import Watchdog
from mpidist._base import reporting
from mpidist._base.errors import (
    CollectiveTimeoutError,
    ReplicaLostError,
    format_ranks,
    on_rank,
)
from mpidist._mpi import survival
from mpidist._mpi.buffers import Transfer
from mpidist._mpi.communicator import AnyCommunicator, Request
from mpidist._timeline.observer import Calls, observed

# How long a rank waits for the notices of others before it says who is missing.
_COLLECT_SECONDS: Final = 0.25
_MOST_LINES: Final = 20  # of a report

_logger: Final = logging.getLogger("mpidist")


def _wait(
    calls: Calls, waiting: Waiting, request: Request, what: str, *_: object
) -> contextlib.AbstractContextManager[Any]:
    """How waits are observed."""
    return calls.call(0, "mpi", what, waiting.sequence + 1)


class Payload:
    """The context of what all ranks are in the middle of; see `Waiting.payload`."""

    __slots__ = ("_call", "_waiting")

    def __init__(self, waiting: Waiting, call: Call | None) -> None:
        self._waiting = waiting
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        found = self._waiting.abandon(self._call, error)
        if found is not error:
            raise found from None


class Waiting(CallState):
    """One rank's waits for the others of a communicator.

    Args:
        comm: the ranks.
        channel: where they exchange headers; None: a `SelfChannel`, for one rank.
        timeout_seconds: how long a rank waits for the others; 0: forever.
        stall_seconds: after which the missing ranks are reported.

    Attributes:
        closed: whether the strategy was closed.
        when_timed_out: called at the deadline with the error that is about to be
            raised, here or on a rank that told this one; None: nothing is.
        calls: tell the observers of the strategy's calls; None: it has none.
    """

    # Of the base class; without these lines pyright calls their types ambiguous.
    timeout_seconds: float
    sequence: int
    blocked: bool

    when_timed_out: Callable[[CollectiveTimeoutError], None] | None = None
    calls: Calls | None = None

    def __init__(
        self,
        comm: AnyCommunicator,
        channel: Channel | None,
        *,
        timeout_seconds: float,
        stall_seconds: float,
    ) -> None:
        self._comm = comm
        self.channel: Channel = channel or SelfChannel()
        self.timeout_seconds = timeout_seconds
        self.patience_ms: int = int(timeout_seconds * 1000)
        self._stall = stall_seconds
        self.sequence = 0
        self.blocked = False
        self.closed: bool = False
        # Whether calls may not have ended that this rank has begun.
        self.unsettled: bool = False
        self.begun: BegunCalls | None = None
        self._broken = ""
        self._untold = ""  # what this rank has left, until the others know
        self._was_told = False  # that a rank has given up, in the middle of a wait
        self._call = self._previous_call = Call("making the strategy")
        self._timeout = timeout_seconds
        # Of the wait that is looked at: its length, and what was done about it.
        self._waited = 0.0
        self._posted = self._reported = False
        self._watchdog = Watchdog(comm, stall_seconds)
        self._notices = Notices(comm)
        self._lives = Lives(comm)
        self._lost: tuple[int, ...] | None = None  # once some rank is
        self._stacks: Stacks | None = None
        self._spins = spins_for(comm.machine_size)
        # The ranks whose data has not come; None while this rank waits for no data.
        self._awaited: Callable[[], list[int]] | None = None
        self._watch(self.channel, Waiting._what_is_awaited)

    # --- waits --------------------------------------------------------------------

    @observed(_wait)
    def wait(self, request: Request, what: str, timeout: float | None = None) -> None:
        """Wait for a request.

        Raises:
            CollectiveTimeoutError: on every waiting rank, after ``timeout`` seconds
                (None: the strategy's; 0: never).
        """
        self._timeout = self.timeout_seconds if timeout is None else timeout
        try:
            poll(request, lambda waited: self.look(what, waited), spins=self._spins)
        except BaseException as error:
            request.leak()
            raise self._break_off(what, error) from error.__cause__

    def wait_data(self, transfer: Transfer) -> None:
        """Wait for collectives of MPI that move the data of the last call.

        Raises:
            CollectiveTimeoutError: on every waiting rank, after the strategy's
                `timeout_seconds`.
        """
        self._timeout = self.timeout_seconds
        self._awaited = list  # MPI does not say whose data is missing
        try:
            poll(
                transfer,
                lambda waited: self.look(f"the data of {self._call.text}", waited),
                spins=self._spins,
                yield_seconds=YIELD_SECONDS_FOR_DATA,
            )
        except BaseException as error:
            transfer.leak()
            raise self._break_off(self._call.text, error) from error.__cause__
        finally:
            self._awaited = None

    def block(self, call: Callable[[], object]) -> None:
        """Make a call of MPI that blocks, for the data of the last call.

        A watchdog tells the user if it takes long, and at the deadline ends the job:
        no exception can end the call.
        """
        try:
            with self._watchdog.watch(self._call.text, self.timeout_seconds):
                call()
        except BaseException as error:
            if self._watchdog.expired is not None:
                self.broken = str(self._watchdog.expired)
                raise self._timed_out(self._watchdog.expired) from None
            raise self._break_off(self._call.text, error) from error.__cause__

    def wait_step(
        self, wait: Callable[[], int], missing: Callable[[], list[int]]
    ) -> int:
        """Wait for a step of the data of the last call, in the memory of one node.

        Args:
            wait: of a channel that was given to `watch_steps`; returns its status.
            missing: returns the ranks that have not made the step.

        Raises:
            CollectiveTimeoutError: at the deadline, or if another rank has given up.
        """
        self._timeout = self.timeout_seconds
        self._awaited = missing
        try:
            return wait()
        except BaseException as error:
            raise self._break_off(self._call.text, error) from error.__cause__
        finally:
            self._awaited = None

    def _what_is_awaited(self) -> str:
        """Return what this rank waits for in its channel, for messages."""
        text = self._call.text
        return f"the data of {text}" if self.channel.moves else text

    def watch_steps(self, channel: Channel) -> None:
        """Check deadline and notices while a rank waits in a channel.

        Args:
            channel: of the ranks of one node, of several.
        """
        self._watch(channel, lambda this: f"the data of {this._call.text}")

    def _watch(self, channel: Channel, what: Callable[[Waiting], str]) -> None:
        # Weakly: the garbage collector does not see through a channel of the core.
        reference = weakref.ref(self)

        def pause(waited: float) -> None:
            this = reference()
            if this is not None:
                this.look(what(this), waited)

        channel.pause = pause

    # --- the deadline -------------------------------------------------------------

    def look(self, what: str, waited: float) -> None:
        """In the middle of a wait: read what others say; tell them, and the user.

        A rank that has given up may have done its part of this call before it did. So
        its notice ends the wait at the next look: until then it is tested once more.

        Args:
            what: this rank waits for.
            waited: for so many seconds until now.

        Raises:
            CollectiveTimeoutError: at the deadline, or if another rank has given up.
            ReplicaLostError: if a rank is lost.
        """
        if self.calls is not None:
            self.calls.look(what, waited, self.sequence + 1)
        if waited < self._waited:  # another wait than last time
            self._posted = self._reported = False
        self._waited = waited
        if self.begun is not None:
            self.begun.look()
        timeout = self._timeout
        post_after = min(self._stall, timeout / 2) if timeout else self._stall
        self._check_lives(what)
        if self._was_told:
            raise self._broken_error()
        if why := self._notices.read(self.sequence):
            self.broken = why
            self._was_told = True
            return
        if waited < post_after:
            return
        wait = self._describe(what)
        if not self._posted:
            self._notices.post(wait)
            self._posted = True
        if not self._reported and waited >= self._stall + _COLLECT_SECONDS:
            self._reported = True
            self._report(wait, waited)
        if timeout and waited >= timeout:
            raise self._timed_out(self._give_up(wait, timeout))

    def _report(self, wait: Wait, waited: float) -> None:
        """Tell the user which ranks are missing, and where they are."""
        text = self._notices.describe(wait, waited)
        if self._notices.is_first_to_report(wait):
            reporting.log(_logger, logging.WARNING, "mpidist: %s", text)
        if self._stacks is not None:
            waiting, missing = self._notices.waiting_and_missing(wait)
            left = _MOST_LINES - text.count("\n") - 1
            if text := self._stacks.report(waiting, missing, left):
                reporting.log(_logger, logging.WARNING, "mpidist: %s", text)

    def ask_missing_ranks(self, stacks: Stacks) -> None:
        """Look whether the other ranks live, and where those are that are missing."""
        self._stacks = stacks
        self._lives.watch(stacks.processes)

    def _describe(self, what: str) -> Wait:
        missing = self.channel.missing()
        awaited = None if self._awaited is None else self._awaited()
        if self.channel.moves:
            awaited = []  # MPI does not say whose data is missing
        return Wait(what, self.sequence, self._previous_call.text, missing, awaited)

    def _give_up(self, wait: Wait, timeout: float) -> CollectiveTimeoutError:
        why = (
            f"{self._notices.describe(wait, timeout)}. This strategy cannot be used "
            "any more, because the missing rank may still arrive; variables and arrays "
            "are as they were before the call. "
        )
        if wait.awaited is None:
            why += (
                "Make the ranks call the same things, or raise `timeout_seconds` in "
                "CommunicationOptions if the rank was only slow"
            )
        else:
            why += (
                "The rank was stopped or has died, or the network between the hosts "
                "does not carry its data; raise `timeout_seconds` in "
                "CommunicationOptions if it was only slow"
            )
        self._notices.post_last(wait, why)
        self.broken = why
        return CollectiveTimeoutError(on_rank(self._comm.rank, why))

    def _read_notices(self) -> None:
        """Read what the other ranks have posted.

        Raises:
            CollectiveTimeoutError: if one of them has given up.
        """
        if why := self._notices.read(self.sequence):
            self.broken = why
            raise self._broken_error()

    def _timed_out(self, error: CollectiveTimeoutError) -> CollectiveTimeoutError:
        if self.when_timed_out is not None:
            self.when_timed_out(error)
        return error

    # --- a call that cannot go on -------------------------------------------------

    @property
    def broken(self) -> str:
        """Why the strategy cannot be used any more; "" while it can."""
        return self._broken

    @broken.setter
    def broken(self, why: str) -> None:
        self._broken = why
        self._update_blocked()

    def _update_blocked(self) -> None:
        self.blocked = bool(self._broken or self.unsettled)

    def _broken_error(self) -> RuntimeError:
        text = on_rank(self._comm.rank, self._broken)
        if self.closed:
            return RuntimeError(text)
        if self._lost is not None:
            return ReplicaLostError(text, self._lost, self._call.text)
        return self._timed_out(CollectiveTimeoutError(text))

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this rank makes no calls any more."""
        self._break_off("the program", error)

    def _break_off(self, what: str, error: BaseException) -> BaseException:
        """Give up after an exception that came from outside, such as a signal's.

        Returns:
            What to raise: the exception, or if MPI raised it because a rank is lost, a
            `ReplicaLostError`.
        """
        if self.unsettled and self.begun is not None:
            self.begun.stop(error)
        if self._comm.outlives_ranks and not isinstance(error, RecursionError):
            error = self.failed(error)
        if not self._broken and self._comm.size > 1:
            # Without a call: after a RecursionError there may be no frame for one.
            self._broken = (
                f"rank {self._comm.rank} was interrupted by {type(error).__name__} in "
                f"{what}; this strategy cannot be used any more"
            )
            self.blocked = True
            self._untold = what
            self.repeat_notice()
            self.channel.leave()
        return error

    def _leave(self, what: str, why: str) -> None:
        self.broken = why
        self._untold = what
        self.repeat_notice()

    def repeat_notice(self) -> None:
        """Tell the others that this rank has left, if that has failed before.

        For example by a RecursionError, which is over some frames farther up.
        """
        if self._untold:
            self._notices.post(self._describe(self._untold), self._broken)
            self._untold = ""

    def payload(self, call: Call | None = None) -> Payload:
        """Return a context for what all ranks are in the middle of.

        An exception that leaves the block breaks it off (`abandon`).

        Args:
            call: what it is; None: the last call.
        """
        return Payload(self, call)

    def abandon(self, call: Call | None, error: BaseException) -> BaseException:
        """Break off what all ranks are in the middle of; return what to raise.

        The others would wait for this rank forever. Those that move data step by step
        in shared memory learn of it there, the others by a notice. The strategy cannot
        be used any more.

        Args:
            call: what it is; None: the last call.
            error: what this rank raised in it: usually a signal's, or `LeftError`.
        """
        call = call or self._call
        if isinstance(error, LeftError):
            error = self._learn_why(call, error)
        elif self._broken:
            return error
        error = self._break_off(call.text, error)
        self.channel.leave()
        return error

    def leave_call(self, error: BaseException) -> BaseException:
        """As `abandon` of the last call, which takes its place."""
        return self.abandon(None, error)

    def leave_payload(self, call: Call, error: BaseException) -> BaseException:
        """As `abandon`, which takes its place."""
        return self.abandon(call, error)

    def _learn_why(self, call: Call, error: LeftError) -> BaseException:
        """Wait for the notice of the rank that has left; return what to raise."""
        if self._broken:
            return self._broken_error()
        seconds = _COLLECT_SECONDS
        if self._comm.outlives_ranks:
            seconds = survival.LEARN_SECONDS
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                self._check_lives(call.text)
                self._read_notices()
            except Exception as told:
                return self.failed(told)
            time.sleep(SHORT_SLEEP)
        self._leave(
            call.text,
            f"rank {error.rank} has left {call.text} before its end; this strategy "
            "cannot be used any more",
        )
        return self._broken_error()

    # --- ranks that die -----------------------------------------------------------

    def end_job_with(self, end: Callable[[CollectiveTimeoutError], None]) -> None:
        """Set what ends the job if a call of MPI that blocks comes to its deadline."""
        self._watchdog.end = end

    @property
    def has_lost_ranks(self) -> bool:
        """Whether it is unusable because ranks have died, and not yet closed."""
        return self._lost is not None and not self.closed

    def _check_lives(self, what: str) -> None:
        """Raise if a rank is lost."""
        losses = self._lives.losses()
        if losses is not None:
            raise self._lose(what, losses)

    def _lose(self, what: str, replicas: tuple[int, ...]) -> RuntimeError:
        """Give up since ranks are lost; tell the others; return what to raise."""
        self._lost = replicas
        self._notices.missing = self._notices.lost = replicas
        who = format_ranks(replicas) if replicas else "some rank"
        self.broken = (
            f"the process of {who} has died; this rank was in {what}. This strategy "
            "cannot be used any more. To go on without it, run the training by "
            "`mpidist.elastic.run`; or close the strategy, call `Revoke` and `Shrink` "
            "of its communicator, and make another `MPIStrategy` on the result"
        )
        self._comm.revoke()
        self.channel.leave()
        return self._broken_error()

    def failed(self, error: BaseException) -> BaseException:
        """Return what to raise in place of an exception of MPI.

        It is the exception itself if it does not come from a rank that is lost.
        """
        losses = survival.losses_behind(error, self._lives.losses)
        if losses is None:
            return error
        return (
            self._broken_error()
            if self._broken
            else self._lose(self._call.text, losses)
        )

    # --- the end of the program ---------------------------------------------------

    @property
    def gave_up(self) -> bool:
        """Whether it is to tell the others when this process comes to its end."""
        return (
            bool(self._broken)
            and not self.closed
            and not (self._lost is not None and self._comm.outlives_ranks)
        )

    @property
    def has_lost(self) -> bool:
        """Whether it gave up, and some rank has not come to its end since."""
        return self.gave_up and not self._notices.all_ended

    def end(self, patience: float | None = None, end: End = "ends") -> Iterator[None]:
        """Wait, after giving up, at the end of the program, for those of the others.

        Yields while it waits.

        Args:
            patience: seconds to wait; None: as long as they may need.
            end: what this rank tells the others.
        """
        if self._lost is not None and self._comm.outlives_ranks:
            return iter(())  # MPI sends no notice any more, and the job goes on
        return self._notices.wait_for_ends(self.sequence, patience, end)

    @property
    def notices(self) -> Notices:
        """What the ranks tell each other, such as how far they are with their ends."""
        return self._notices
