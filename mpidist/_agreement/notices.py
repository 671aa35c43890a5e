"""Notices: what ranks tell each other while they wait.

A rank that waits for long posts a *notice* to all others: who it is, and what it waits
for. The others that wait then post theirs. So every waiting rank knows which ranks wait
for the same, and which are missing: `describe` makes the text that users see. A rank
that gives up posts a last notice, by which the other waiting ranks give up as well. A
rank that has given up also posts one when its program ends.

Notices are small messages that their receiver need not expect. They are read only by
ranks that wait, or that have been away for long.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

from mpidist._agreement.call_state import CallState
from mpidist._agreement.mismatch import describe_groups
from mpidist._base.errors import format_ranks
from mpidist._mpi.any_communicator import AnyCommunicator
from mpidist._mpi.requests import Request

# How long a rank that has given up waits at its end: for ranks that may be saving, for
# those that did not come to a call, and for those that stopped in the middle of one.
_END_SECONDS: Final = 60.0
_LATE_END_SECONDS: Final = 15.0
_LOST_END_SECONDS: Final = 2.0
_QUIET_SECONDS: Final = 0.5
_DELIVERY_SECONDS: Final = 10.0
COLLECT_SECONDS: Final = 0.25
"""How long no notice has come when one of up to eight ranks says who is missing."""
_MOST_COLLECT_SECONDS: Final = 2.0
_MOST_QUIET_SECONDS: Final = 15.0  # where the notices came late, one by one

# Groups of waiting ranks in a message, and those that share a line.
_MOST_GROUPS: Final = 8
_ON_ONE_LINE: Final = 2

AT_END: Final = "the end of the program"
"""What a rank waits for at its end."""

End: TypeAlias = Literal["", "ends", "interrupted", "told"]
"""How far a process is in ending: "" it is not; "ends"; "interrupted": it ends because
of a signal; "told": it ends, and has told the user why."""


@dataclasses.dataclass
class Notice:
    """What one rank tells the others.

    Attributes:
        rank: the sender.
        sequence: the number of its last header.
        call: what it waits for.
        gave_up: why it has given up; "": it has not.
        awaited: the ranks whose data it waits for; None if it waits for no data.
        missing: the ranks that it has given up on.
        lost: those of them that will never come.
        end: how far its process is in ending.
        waited: for how many seconds it has waited.
        behind: whether it knew of a rank that waits after a later header.
        came: when this rank got the notice.
    """

    rank: int
    sequence: int
    call: str
    gave_up: str = ""
    awaited: tuple[int, ...] | None = None
    missing: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    end: End = ""
    waited: float = 0.0
    behind: bool = False
    came: float = 0.0


@dataclasses.dataclass
class Wait:
    """A wait of this rank, as its messages describe it.

    Attributes:
        what: what it waits for.
        before: the call of its last header.
        missing: the ranks that the channel knows not to be there.
        awaited: the ranks whose data has not come; None if it waits for no data.
    """

    what: str
    before: str = ""
    missing: list[int] = dataclasses.field(default_factory=list)
    awaited: list[int] | None = None


def at_ends(text: str) -> str:
    """Return a text in which a rank is not "in", but "at the end of" something."""
    return text.replace(" in the end of ", " at the end of ")


class Notices:
    """The notices of one rank: those that it posts, and those of the others.

    Args:
        comm: the ranks.
        call_state: its ``sequence`` is the number of this rank's last header.

    Attributes:
        is_for_data: whether this rank waits for data now, not for the next header.
        missing: the ranks that this one, or who told it, has given up on.
        lost: those of them that stopped in the middle of their data. No message is sent
            to them any more, since MPI may fail on it.
    """

    def __init__(self, comm: AnyCommunicator, call_state: CallState) -> None:
        self._comm = comm
        self._call_state = call_state
        self._sent: list[Request] = []
        self._latest: dict[int, Notice] = {}
        self._ends: dict[int, End] = {}
        seconds = COLLECT_SECONDS * max(1.0, comm.size / 8)
        self._collect_seconds: float = min(seconds, _MOST_COLLECT_SECONDS)
        self.is_for_data: bool = False
        self.missing: tuple[int, ...] = ()
        self.lost: tuple[int, ...] = ()

    def post(
        self, wait: Wait, gave_up: str = "", *, end: End = "", waited: float = 0.0
    ) -> None:
        """Post a notice to all ranks that are not lost."""
        me, number = self._comm.rank, self._call_state.sequence
        notice = Notice(me, number, wait.what, gave_up, end=end, waited=waited)
        notice.missing, notice.lost = self.missing, self.lost
        notice.awaited = None if wait.awaited is None else tuple(wait.awaited)
        notice.behind = self.is_behind
        notice.came = time.monotonic()
        self._latest[me] = notice
        data = pickle.dumps(notice)
        self._drop_sent()
        for rank in range(self._comm.size):
            if rank != me and rank not in self.lost:
                self._sent.append(self._comm.start_send(data, rank))

    def _drop_sent(self) -> None:
        self._sent = [request for request in self._sent if not request.Test()]

    def read(self) -> str:
        """Read what has come; return why another rank has given up, or ""."""
        while (data := self._comm.receive_any()) is not None:
            notice: Notice = pickle.loads(data)
            if notice.end:
                self._ends[notice.rank] = notice.end
            elif notice.gave_up:  # for good, also if this rank has got further
                self.missing, self.lost = notice.missing, notice.lost
                return notice.gave_up
            elif notice.behind or notice.sequence >= self._call_state.sequence:
                # Else its wait is over.
                notice.came = time.monotonic()
                self._latest[notice.rank] = notice
        return ""

    # --- what is known of the others ----------------------------------------------

    def _of_waiting(self) -> list[Notice]:
        """Return the notices of ranks that wait after the same header, by rank.

        Not those for the data of that header, if this rank waits for the next one: who
        has its data since says nothing of it.
        """
        latest, number = sorted(self._latest.items()), self._call_state.sequence
        same = [notice for _, notice in latest if notice.sequence == number]
        return [x for x in same if x.awaited is None or self.is_for_data]

    @property
    def is_behind(self) -> bool:
        """Whether another rank waits after a later header, which MPI holds back here.

        That rank does not know that this one still waits, before it is told again.
        """
        number = self._call_state.sequence
        return any(notice.sequence > number for notice in self._latest.values())

    def longest_wait(self, what: str) -> float:
        """Return the longest wait of another rank for the same; 0.0: none is known."""
        now, me = time.monotonic(), self._comm.rank
        same = [notice for notice in self._of_waiting() if notice.call == what]
        waits = [
            now - notice.came + notice.waited for notice in same if notice.rank != me
        ]
        return max(waits, default=0.0)

    def others_wait(self) -> bool:
        """Whether another rank waits after the same header, in whatever call."""
        return any(x.rank != self._comm.rank for x in self._of_waiting())

    def are_quiet(self) -> bool:
        """Whether no notice has come for long enough that no more are expected.

        That is as long as those of the same wait took to come, from the first to the
        last: ranks that share cores post late, one by one.
        """
        came = [notice.came for notice in self._of_waiting()]
        first, last = min(came, default=0.0), max(came, default=0.0)
        quiet = max(self._collect_seconds, min(last - first, _MOST_QUIET_SECONDS))
        return time.monotonic() - last >= quiet

    def waiting_and_missing(self, wait: Wait) -> tuple[list[int], list[int]]:
        """Return the ranks that wait for the same as this one, and the missing ones."""
        notices = self._of_waiting()
        waiting = [notice.rank for notice in notices]
        # The channel knows who has not made the last step, if that is what is missing.
        elsewhere = self._elsewhere()
        silent = {*range(self._comm.size)}.difference(waiting, elsewhere)
        # If none is silent, one that was behind has gone on since, but not to here.
        number = self._call_state.sequence
        behind = [x for x in elsewhere if self._latest[x].sequence < number]
        missing = wait.missing or sorted(silent) or behind
        awaited = [set(notice.awaited or ()) for notice in notices]
        if awaited and all(awaited):  # all wait for data, and know whose
            missing = sorted(set().union(*awaited) - set(waiting)) or missing
        return [rank for rank in waiting if rank not in missing], missing

    def _elsewhere(self) -> list[int]:
        """Return the ranks that wait after another header."""
        number = self._call_state.sequence
        return [
            rank
            for rank, notice in sorted(self._latest.items())
            if notice.sequence > number
            or (notice.behind and notice.sequence == number - 1)
        ]

    def describe(self, wait: Wait, waited: float) -> str:
        """Return who waits for whom, for messages."""
        waiting, missing = self.waiting_and_missing(wait)
        number = self._call_state.sequence
        calls: dict[tuple[str, str], list[int]] = {}
        for rank in [*waiting, *self._elsewhere()]:
            notice = self._latest[rank]
            where = f" (call {notice.sequence + (notice.awaited is None)})"
            call = notice.call + (where if rank not in waiting else "")
            calls.setdefault((call, ""), []).append(rank)
        lines = describe_groups(calls, " waited in ", _MOST_GROUPS)
        lines = [at_ends(line) for line in lines]
        waits, end = "; ".join(lines), ". "
        if len(lines) > _ON_ONE_LINE:
            waits, end = "".join(f"\n  {line}" for line in lines), "\n"
        if not missing:
            return f"all ranks wait in different calls for {waited:.3g} s: {waits}"
        if wait.awaited is not None:
            return (
                f"{format_ranks(missing)} made no progress in call {number} "
                f"within {waited:.3g} s: {waits or wait.what}"
            )
        return (
            f"{format_ranks(missing)} did not reach call {number + 1} within "
            f"{waited:.3g} s: {waits or wait.what}{end}"
            f"{'Its' if len(missing) == 1 else 'Their'} last call with the others was "
            f"call {number}: {wait.before}"
        )

    # --- the end of the program ---------------------------------------------------

    @property
    def all_ended(self) -> bool:
        """Whether all other ranks have come to the ends of their programs."""
        return len(self._ends) == self._comm.size - 1

    @property
    def interrupted(self) -> list[int]:
        """The other ranks that end because of a signal."""
        return [rank for rank, end in self._ends.items() if end == "interrupted"]

    @property
    def is_told(self) -> bool:
        """Whether another rank has told the user why the job ends."""
        return "told" in self._ends.values()

    @property
    def tells_user(self) -> bool:
        """Whether this rank is the one, of those interrupted, that tells the user."""
        rank = self._comm.rank
        return not self.is_told and rank == min([rank, *self.interrupted])

    def post_end(self, end: End) -> None:
        """Tell the others how far this process is in ending."""
        self.post(Wait(AT_END), end=end)

    def wait_for_ends(self, timeout: float | None, end: End) -> Iterator[None]:
        """After giving up, at the end of this program: wait for the ends of the others.

        Yields while it waits. Ranks that still run may be saving something, and
        launchers end them when this process ends without `MPI_Finalize`. Ranks that
        were missing are waited for only for a moment.

        Args:
            timeout: seconds to wait for all others; None: as said above.
            end: what this rank tells the others.
        """
        others = set(range(self._comm.size)) - {self._comm.rank}
        self.post_end(end)
        limit = time.monotonic() + (_END_SECONDS if timeout is None else timeout)
        present = others - set(self.missing) if timeout is None else None
        while others - set(self._ends) and time.monotonic() < limit:
            if present is not None and present <= set(self._ends):
                present = None
                seconds = _LOST_END_SECONDS if self.lost else _LATE_END_SECONDS
                limit = time.monotonic() + seconds
            yield
            self.read()
        if self.all_ended:
            yield from self._wait_until_sent()
            return
        # Open MPI ends a process that finds its connection to another one closed: so
        # nobody calls it any more when the first process ends.
        limit = time.monotonic() + _QUIET_SECONDS
        while time.monotonic() < limit:
            yield

    def _wait_until_sent(self) -> Iterator[None]:
        """Wait until MPI has sent all notices, but not for long; before MPI_Finalize.

        MPICH sends a message only while it is called, and its MPI_Finalize first waits
        for the others, which may wait for the message.
        """
        limit = time.monotonic() + _DELIVERY_SECONDS
        self._drop_sent()
        while self._sent and time.monotonic() < limit:
            yield
            self._drop_sent()
