"""Which processes are replicas, and how they agree: by MPI's fault tolerance.

Two communicators are remade whenever a process has died: one of all processes that
live, spares too, and one of the replicas. A *round* is the time between two such
events.

In a round the replicas decide by `agree`, which is uniform (all that live get the same
result) and also ends when processes die in it:

- a commit counts if all vote for it, and nothing is applied before; so does the end;
- a replica in which a call failed since another one died revokes, then votes 0. So each
  replica ends its round with one vote that has the result 0, wherever it was.

Then they *meet*: revoke the communicator of all, by which the spares are woken;
shrink it; tell each other which commit they have; make the communicator of the next
replicas; and agree that all this has worked. If not, a further process has died: again,
with those that are left. The protocol is that of the ULFM specification (section
"Communicator agreement"); anything that was applied before the agreement could be lost
on some replicas.

Nobody waits for a replica that has left with an exception of its own: it has told the
others so, by a communicator that is there for this alone (`Round.stop`).

A commit can count on a replica that dies before it tells anybody; its effect is then
lost with it. Should it count on some and not on others, which a uniform agreement
excludes, the older of the last two commits, which all have, is taken.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from mpidist._agreement.polling import poll
from mpidist._base.errors import CollectiveTimeoutError, format_ranks
from mpidist._base.types import record
from mpidist._mpi import library, survival
from mpidist._mpi.library import MpiComm, MpiRequest

_SPARE_SECONDS: Final = 0.02
HOW_TO_GO_ON: Final = (
    ". Start the job again; with State(directory=...) it goes on from the last "
    "checkpoint"
)


class Role(enum.IntEnum):
    """The state of a process at the end of the round before."""

    STARTING = enum.auto()  # it begins, or began with all others and nobody committed
    RUNNING = enum.auto()  # the replicas have commits; it is one, or a spare
    FINISHED = enum.auto()  # all replicas have


class Placement(NamedTuple):
    """The processes that are the replicas of a round.

    Attributes:
        places: for each replica the number, among those that made the commit, of the
            one that it is or replaces.
        ranks: for each replica its rank in the communicator of all.
        has: for each replica whether it has the commit.
        commit: the number of the commit; 0: they start from the beginning.
        spares: how many spares are left.
    """

    places: list[int]
    ranks: list[int]
    has: list[bool]
    commit: int
    spares: int


class Claim(NamedTuple):
    """A process's place among those that made a commit.

    Attributes:
        place: its number among those that made it; -1 if it does not have it.
        size: how many those were.
    """

    place: int
    size: int


class NobodyLeftError(RuntimeError):
    """All replicas that had a commit have died; the user gets it as it is."""


class FinishedError(Exception):
    """The replicas have finished: nobody is needed any more."""


def make_placement(
    roles: Sequence[Role], claims: Sequence[Claim], commit: int, wanted: int
) -> Placement:
    """Return who the next replicas are; the same on all processes.

    Args:
        roles: those of all processes that live.
        claims: what they have of the commit.
        commit: its number; 0 if nobody has one.
        wanted: how many replicas begin, if they are enough.

    Raises:
        FinishedError: if there is nothing left to do.
        NobodyLeftError: if nobody has the state.
    """
    if Role.FINISHED in roles:
        raise FinishedError
    taken = {claim.place: rank for rank, claim in enumerate(claims) if claim.place >= 0}
    has = set(taken)
    if not has and Role.STARTING not in roles:
        raise NobodyLeftError(
            f"elastic.run: all replicas that had the state have died{HOW_TO_GO_ON}"
        )
    size = max(claim.size for claim in claims) if has else wanted
    free = [rank for rank, claim in enumerate(claims) if claim.place < 0]
    empty = [place for place in range(size) if place not in taken]
    for place in empty[: len(free)]:
        taken[place] = free.pop(0)
    places = sorted(taken)
    return Placement(
        places,
        [taken[place] for place in places],
        [place in has for place in places],
        commit,
        len(free),
    )


@dataclasses.dataclass
class Round:
    """One round on one process.

    Attributes:
        all: the processes that live, spares too.
        stop: of these and others that have died; a replica that leaves revokes it, and
            nothing else. All rounds have the same: Open MPI 5.0.11 crashes if it learns
            of a death while it makes a communicator, so there are few.
        replicas: the replicas, for the votes and for the strategy; None on a spare.
            That of all, if these are the replicas in their order.
        placement: who they are.
        timeout: seconds that a vote waits for the others; 0: forever.
        over: whether it has ended, by a loss.
    """

    all: MpiComm
    stop: MpiComm
    replicas: MpiComm | None
    placement: Placement
    timeout: float
    over: bool = False

    def vote(self) -> bool:
        """Return whether all replicas live and have come here. Collective over them."""
        if not self.over and not survival.agree(self.replicas, 1, self._wait()):
            self.over = True
        return not self.over

    def give_up(self) -> None:
        """End the round, since a replica has died. Each replica that lives calls it."""
        if not self.over:
            self.over = True
            assert self.replicas is not None  # a spare does not give up
            self.replicas.Revoke()
            survival.agree(self.replicas, 0, self._wait())

    def _wait(self) -> Callable[[MpiRequest], None]:
        why = (
            "some replica lives, but has not taken part in a vote of the replicas for "
            "{:.3g} s: it is stopped, or hangs"
        )
        return functools.partial(_wait, self.stop, self.timeout, why)

    def leave(self) -> None:
        """Tell the others that this replica leaves, and raises. Not collective."""
        self.stop.Revoke()

    def wait_as_spare(self) -> bool:
        """Wait until this spare is needed; return False if the replicas have raised.

        It sleeps nearly all of the time.

        Raises:
            NobodyLeftError: if all replicas have died.
        """
        replicas = set(self.placement.ranks)
        while True:
            failed = survival.failed_ranks(self.all)
            if self.stop.Is_revoked():
                return False
            if self.all.Is_revoked():
                return True
            if replicas <= set(failed):
                raise NobodyLeftError(
                    "elastic.run: all replicas have died; this spare has no state to "
                    f"go on with{HOW_TO_GO_ON}"
                )
            time.sleep(_SPARE_SECONDS)


def lost(before: Round, current: Round) -> list[int]:
    """Return which replicas of one round have died before another. Not collective."""
    then, now = before.all.Get_group(), current.all.Get_group()
    dead = then.Difference(then, now)
    ranks = set(dead.Translate_ranks(None, then))
    for group in (then, now, dead):
        group.Free()
    return [k for k, rank in enumerate(before.placement.ranks) if rank in ranks]


def describe(placement: Placement, before: int, lost: list[int]) -> str:
    """Return what a user should know about a loss.

    Args:
        placement: who goes on.
        before: how many replicas there were.
        lost: which of them have died.
    """
    ranks = format_ranks(lost).replace("rank", "replica") if lost else "no replica"
    size = len(placement.places)
    count = "1 replica goes" if size == 1 else f"{size} replicas go"
    taken = ""
    if joined := size - (before - len(lost)):
        taken = f" {joined} of them from the spares, of which"
        taken += f" {placement.spares} are left,"
    elif lost:
        taken = " with no spare left,"
    start = (
        f"from commit {placement.commit}" if placement.commit else "from the beginning"
    )
    return f"lost {ranks}; {count} on,{taken} {start}"


@record
class Member:
    """What a process tells the others when they meet.

    Attributes:
        role: what it was.
        newest: the number of its newest commit; 0 if it has none.
        claim: returns what it has of a commit.
        wanted: how many replicas begin, if they are enough.
        settings: a number that must be the same on all processes.
    """

    role: Role
    newest: int
    claim: Callable[[int], Claim]
    wanted: int
    settings: int


def meet(before: Round | None, member: Member, timeout: float = 0.0) -> Round:
    """Find out who lives, and begin a round. Collective over them.

    Args:
        before: the round before; None: the first one, of all processes that the job
            has, of which some may have died already.
        member: this process.
        timeout: seconds to wait for the others, here and in the votes; 0: forever.

    Raises:
        FinishedError: if there is nothing left to do; on all processes.
        NobodyLeftError: if nobody has the state; on all of them.
        ValueError: if their settings differ; on all of them.
        CollectiveTimeoutError: if not all of them have come.
        RuntimeError: if one of them has left the run.
    """
    if before is None:
        comm, stop = library.mpi_module().COMM_WORLD, None
    else:
        comm, stop = before.all, before.stop
        comm.Revoke()
    why = (
        "not all living ranks of the job made this call within {:.3g} s; make it on "
        "every rank"
    )
    wait = functools.partial(_wait, stop, timeout, why)
    survival.agree(comm, 1, wait)  # shrinking would wait for all, and forever
    while True:
        comm = comm.Shrink()
        found: Round | Exception | None = None
        try:
            found = _begin(comm, stop, member, timeout)
        except (FinishedError, NobodyLeftError, ValueError) as error:
            found = error  # of all, once they have agreed that they are all
        except Exception as error:
            if (
                survival.losses_behind(error, functools.partial(survival.losses, comm))
                is None
            ):
                raise
            comm.Revoke()
        if survival.agree(comm, int(found is not None), wait) and found is not None:
            if isinstance(found, Exception):
                raise found
            return found


def _begin(
    comm: MpiComm, stop: MpiComm | None, member: Member, timeout: float
) -> Round:
    rows = _exchange(comm, [member.role, member.newest, member.settings])
    if len({settings for _, _, settings in rows}) > 1:
        raise ValueError(
            "elastic.run: `min_replicas` and `spares` must be the same on all ranks"
        )
    # The newest that all have who have one.
    commit = min((newest for _, newest, _ in rows if newest), default=0)
    claims = [Claim(*row) for row in _exchange(comm, list(member.claim(commit)))]
    placement = make_placement(
        [Role(row[0]) for row in rows], claims, commit, member.wanted
    )
    rank = comm.Get_rank()
    mine = placement.ranks.index(rank) if rank in placement.ranks else -1
    replicas = comm
    if placement.ranks != list(range(comm.Get_size())):  # spares, or in their places
        undefined = library.mpi_module().UNDEFINED
        replicas = comm.Split(0 if mine >= 0 else undefined, max(mine, 0))
    stop = comm.Dup() if stop is None else stop
    return Round(comm, stop, replicas if mine >= 0 else None, placement, timeout)


def _wait(stop: MpiComm | None, timeout: float, why: str, request: MpiRequest) -> None:
    """Wait for an agreement.

    Args:
        stop: revoked by a replica that leaves; None in the first round.
        timeout: seconds to wait for the others; 0: forever.
        why: what the error at the deadline says, with their number.
        request: that of the agreement.

    Raises:
        RuntimeError: if a replica has left the run: it will not take part.
        CollectiveTimeoutError: at the deadline.
    """

    def look(waited: float) -> None:
        if stop is not None and stop.Is_revoked():
            raise RuntimeError(
                "elastic.run: another replica has left it with an exception of its "
                "own, so this one cannot go on; let all of them leave, and start "
                "the job again"
            )
        if timeout and waited > timeout:
            raise CollectiveTimeoutError(f"elastic.run: {why.format(timeout)}")

    poll(request, look)


def _exchange(comm: MpiComm, numbers: list[int]) -> list[list[int]]:
    rows = np.empty((comm.Get_size(), len(numbers)), np.int64)
    comm.Allgather(np.array(numbers, np.int64), rows)
    return rows.tolist()
