"""What happens when a rank cannot go on: the others learn of it, and all raise.

A rank gives up at its deadline, after an exception in the middle of a call, or because
another one has. Its strategy is then *broken*: another rank may still come to the call,
and its header may still complete. The others learn of it by a notice (`notices`), and
those that move data in shared memory by a mark in that memory.

A rank may also be *lost*: its process has died, and the job goes on (`lives`). The rank
that finds out revokes the communicator, which ends the MPI calls of the others, and
marks the shared memory; all raise `ReplicaLostError`.
"""

from __future__ import annotations

import enum
import pickle
import time
from collections.abc import Callable, Iterator
from threading import current_thread, get_ident
from typing import Final

from mpidist._agreement.call_state import CallState
from mpidist._agreement.channel import LeftError
from mpidist._agreement.lives import Lives
from mpidist._agreement.mismatch import Call
from mpidist._agreement.notices import COLLECT_SECONDS, End, Notices, Wait, at_ends
from mpidist._agreement.polling import SHORT_SLEEP
from mpidist._base.errors import (
    CollectiveTimeoutError,
    ReplicaLostError,
    format_ranks,
    is_interruption,
    on_rank,
    told_by,
)
from mpidist._mpi import survival
from mpidist._mpi.any_communicator import AnyCommunicator

_UNUSABLE: Final = "this strategy cannot be used any more"
_ALONE: Final = (
    "merge_fn runs on this rank alone, so it cannot take part in a collective call of "
    "the replicas, nor can a thread that it starts, and it cannot close the strategy; "
    "call the methods of the `strategy` that it got"
)


class State(enum.Enum):
    """Whether a rank can make calls of its strategy. Only the first two can change."""

    USABLE = "it can"
    ALONE = "not now: merge_fn runs on this rank alone"
    GAVE_UP = "this rank has given up"
    TOLD = "another rank has given up, and has told this one"
    LOST = "the process of a rank has died"
    CLOSED = "the strategy was closed"


class Payload:
    """A context for the part of a call in which data moves.

    An exception that leaves the block breaks the call off on all ranks. It is a class,
    since a generator would take three times as long.

    Args:
        breakdown: its `abandon` breaks the call off.
        state: the call, to which other threads may make none meanwhile.
        what: the text of the call.
    """

    __slots__ = ("_before", "_breakdown", "_state", "_what")

    def __init__(self, breakdown: Breakdown, state: CallState, what: str) -> None:
        self._breakdown = breakdown
        self._state = state
        self._what = what

    def __enter__(self) -> None:
        self._before = self._state.mover
        self._state.mover = get_ident()

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self._state.mover = self._before
        if error is not None:
            found = self._breakdown.abandon(self._what, error)
            if found is not error:
                raise found from None


class Checking:
    """A context for what a rank does alone before a call; a class, as `Payload`.

    Args:
        fail: tells all ranks of an exception (`Guard.fail`); returns what to raise.
        call: the call; or only its name, while its arguments are checked.
    """

    __slots__ = ("_call", "_fail")

    def __init__(
        self, fail: Callable[[Call, BaseException], BaseException], call: str | Call
    ) -> None:
        self._fail = fail
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            call = self._call
            if isinstance(call, str):
                call = Call(f"{call} with invalid arguments")
            found = self._fail(call, error)
            if found is not error:
                raise found


class Breakdown:
    """Whether calls of a strategy can still be made; and if not, why.

    Args:
        comm: the ranks.
        call_state: the call that this rank is in.

    Attributes:
        state: whether calls can be made.
        why: the reason why none can be made any more; "" if they can.
        notices: what waiting ranks tell each other.
        lives: which ranks are alive.
        when_timed_out: called with each `CollectiveTimeoutError` that this rank is
            about to raise, also if another rank has given up; None: nothing is called.
    """

    when_timed_out: Callable[[CollectiveTimeoutError], None] | None = None

    def __init__(self, comm: AnyCommunicator, call_state: CallState) -> None:
        self._comm = comm
        self._call_state = call_state
        self.state: State = State.USABLE
        self.why: str = ""
        self.notices: Notices = Notices(comm, call_state)
        self.lives: Lives = Lives(comm)
        self._lost: tuple[int, ...] = ()
        self._untold = ""  # the call that this rank has left, until the others know

    def set(self, state: State, why: str) -> None:
        """Enter a state in which no call can be made any more."""
        self.state, self.why = state, why
        self._call_state.blocked = True

    def error(self) -> RuntimeError:
        """Return what calls raise while the strategy cannot be used."""
        text = on_rank(self._comm.rank, self.why or _ALONE)
        if self.state in (State.CLOSED, State.ALONE):
            return RuntimeError(text)
        if self.state is State.LOST:
            return ReplicaLostError(text, self._lost, self._call_state.call.text)
        return self.timed_out(CollectiveTimeoutError(text))

    def timed_out(self, error: CollectiveTimeoutError) -> CollectiveTimeoutError:
        """Call `when_timed_out` for an error that is about to be raised; return it."""
        if self.when_timed_out is not None:
            self.when_timed_out(error)
        return error

    # --- giving up ----------------------------------------------------------------

    def abandon(self, what: str, error: BaseException) -> BaseException:
        """Give up after an exception in the middle of a call; return what to raise.

        Args:
            what: the call that this rank was in.
            error: the exception: usually a signal's; `LeftError` if another rank has
                left; or MPI's, because one is lost.
        """
        if isinstance(error, LeftError):
            return self._learn(what, error)
        state = self._call_state
        if state.async_calls is not None and state.async_calls.unsettled:
            state.async_calls.stop(error)
        if self._comm.outlives_ranks and not isinstance(error, RecursionError):
            error = self.failed(error)
        if not self.why and self._comm.size > 1:
            # Without a call: after a RecursionError there may be no frame for one.
            text = f": {error}" if type(error) is RuntimeError else ""
            why = (
                f"rank {self._comm.rank} was interrupted by {type(error).__name__} in "
                f"{what}{text}; {_UNUSABLE}"
            )
            self.state, self.why = State.GAVE_UP, at_ends(why)
            state.blocked = True
            self._untold = what
            self.repeat_notice()
            state.channel.leave()
        return error

    def interrupted(self, what: str, error: BaseException) -> bool:
        """Tell the others if a signal's exception, or the like, has left a call.

        It can come at any line, so it is not known how much of the call is done, and
        the strategy is unusable from then on. To be called in the outermost ``except``
        of everything that ranks do together (`mpidist._runtime.interruptions`).

        Returns:
            Whether ``error`` is such an exception.
        """
        alone = self.state is State.ALONE
        if alone or told_by(error) is not None or not is_interruption(error):
            return False
        self.abandon(what, error)
        self.repeat_notice()
        return True

    def two_threads(self, where: str, call: Call) -> BaseException:
        """Break off a call in one thread while another is in one; return what to raise.

        Ranks may order the calls of threads differently, and mix their data.
        """
        text = (
            f"another thread of rank {self._comm.rank}{where}, and thread "
            f"{current_thread().name!r} calls {call.text}; make the calls of a "
            "strategy from one thread, one after the other"
        )
        return self.abandon(call.text, RuntimeError(at_ends(text)))

    def repeat_notice(self) -> None:
        """Tell the others that this rank has left, if an earlier attempt failed.

        It fails where the stack is full; some frames farther up it works. pickle turns
        a RecursionError into an error of its own.
        """
        if self._untold:
            try:
                self.notices.post(Wait(self._untold), self.why)
            except (RecursionError, pickle.PicklingError):
                return
            self._untold = ""

    def give_up_on(self, wait: Wait, why: str) -> CollectiveTimeoutError:
        """Give up at the deadline, and tell the others; return what to raise.

        A rank that did not come to a call may still do so, and has to know. One that
        has stopped in the middle of its data is lost.

        Args:
            wait: the wait that has timed out.
            why: the reason, and what the user can do.
        """
        notices = self.notices
        notices.missing = tuple(notices.waiting_and_missing(wait)[1])
        if wait.awaited is not None:
            notices.lost = notices.missing
        notices.post(wait, why)
        self.set(State.GAVE_UP, why)
        error = CollectiveTimeoutError(on_rank(self._comm.rank, why))
        return self.timed_out(error)

    def read_notices(self) -> bool:
        """Return whether another rank has told this one that it has given up."""
        why = self.notices.read()
        if why:
            self.set(State.TOLD, why)
        return bool(why)

    def _learn(self, what: str, left: LeftError) -> BaseException:
        """Wait for the notice of the rank that has left; return what to raise."""
        seconds = COLLECT_SECONDS
        if self._comm.outlives_ranks:
            seconds = survival.LEARN_SECONDS
        end = time.monotonic() + seconds
        while not self.why and time.monotonic() < end:
            try:
                self.check_lives(what)
                if not self.read_notices():
                    time.sleep(SHORT_SLEEP)
            except Exception as error:
                return self.abandon(what, error)
        if not self.why:
            why = f"rank {left.rank} has left {what} before its end; {_UNUSABLE}"
            self.set(State.GAVE_UP, why)
            self._untold = what
            self.repeat_notice()
        self._call_state.channel.leave()
        return self.error()

    # --- ranks that die -----------------------------------------------------------

    def check_lives(self, what: str) -> None:
        """Raise if a rank is lost.

        Args:
            what: the call that this rank is in.

        Raises:
            ReplicaLostError: if one is.
        """
        losses = self.lives.losses()
        if losses is not None:
            raise self._lose(what, losses)

    def _lose(self, what: str, replicas: tuple[int, ...]) -> RuntimeError:
        """Give up since ranks are lost; tell the others; return what to raise."""
        self._lost = self.notices.missing = self.notices.lost = replicas
        who = format_ranks(replicas) if replicas else "some rank"
        self.set(
            State.LOST,
            f"the process of {who} has died; this rank was in {what}. This strategy "
            "cannot be used any more. To go on without it, run the training by "
            "`mpidist.elastic.run`; or close the strategy, call `Revoke` and `Shrink` "
            "of its communicator, and make another `MPIStrategy` on the result",
        )
        self._comm.revoke()
        self._call_state.channel.leave()
        return self.error()

    def failed(self, error: BaseException) -> BaseException:
        """Return what to raise in place of an exception of MPI.

        It is the exception itself if it does not come from a rank that is lost.
        """
        losses = survival.losses_behind(error, self.lives.losses)
        if losses is None:
            return error
        return (
            self.error() if self.why else self._lose(self._call_state.call.text, losses)
        )

    # --- the end of the program ---------------------------------------------------

    @property
    def gave_up(self) -> bool:
        """Whether the others have to be told when this process ends."""
        if self.state is State.LOST:  # MPI sends no notice if the job goes on
            return not self._comm.outlives_ranks
        return self.state in (State.GAVE_UP, State.TOLD)

    @property
    def misses_ranks(self) -> bool:
        """Whether this rank gave up, and some other rank has not ended since."""
        return self.gave_up and not self.notices.all_ended

    def wait_for_ends(
        self, timeout: float | None = None, end: End = "ends"
    ) -> Iterator[None]:
        """After giving up, at the end of this program: wait for the ends of the others.

        Yields while it waits.

        Args:
            timeout: seconds to wait; None: as long as they may need.
            end: what this rank tells the others.
        """
        if self.state is State.LOST and self._comm.outlives_ranks:
            return iter(())
        return self.notices.wait_for_ends(timeout, end)
