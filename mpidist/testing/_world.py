"""The state that thread replicas share: calls that combine their parts.

A `Channel` corresponds to a communicator between processes. Each member numbers its own
calls, in the order in which it makes them, and calls with the same number form one
`Round`: each member *posts* its part and continues, and the last one to post combines
all parts. So every call is non-blocking, as with MPI, and a blocking call is one
followed by a wait. Parts are copies: after posting, a member may change its arrays.

All members of a `World`, which is one run, wait on one condition. So a run can be
ended: each wait of each member then raises. A wait also raises if a part will never
come, because its member has ended.

Rejected: queues between pairs of threads (each call would need its own protocol);
barriers (a member that leaves breaks them permanently, and they have no deadline that
reports who is missing); polling (a polling thread takes the interpreter from the thread
that it waits for).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from mpidist._base.errors import (
    CollectiveMismatchError,
    ReplicaError,
    format_ranks,
    on_rank,
)

Part: TypeAlias = Any
"""What a replica puts into a call, or gets out of it: an object of any type."""
Combine = Callable[[list[Part]], Part]

_SLICE_SECONDS: Final = 0.5


class RunStoppedError(ReplicaError):
    """The run was stopped while this replica waited, since another one has failed."""


class World:
    """One run: its condition, and the replicas that have ended.

    Attributes:
        size: the number of replicas.
        condition: held while anything here is changed; notified of every change.
        returned: replicas whose function has returned, but which may still wait for the
            others.
        ended: replicas that no longer take part in anything.
        stopped: why the run was ended; "" while it is running.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.condition: threading.Condition = threading.Condition()
        self.returned: set[int] = set()
        self.ended: set[int] = set()
        self.stopped: str = ""

    def stop(self, why: str) -> None:
        """End the run: every wait raises from now on. The first reason is kept."""
        with self.condition:
            self.stopped = self.stopped or why
            self.condition.notify_all()

    def wait_until(
        self, predicate: Callable[[], bool], seconds: float = math.inf
    ) -> bool:
        """Wait until a condition holds, for a limited time; return whether it does.

        The wait is divided into slices: a signal that arrives just before the main
        thread waits for a lock is handled only when it wakes up.
        """
        end = time.monotonic() + seconds
        with self.condition:
            while not predicate() and (left := end - time.monotonic()) > 0:
                self.condition.wait(min(left, _SLICE_SECONDS))
            return predicate()

    def release(self) -> None:
        """Release the lock if an asynchronous exception has left it locked.

        Python may raise `ReplicaStopped` anywhere, even between acquiring a lock and
        the start of the ``with`` block.
        """
        with contextlib.suppress(RuntimeError):  # another thread holds it, or none
            while True:
                self.condition.release()

    def add_to(self, replicas: set[int], replica: int) -> None:
        """Add a replica to those that have returned, or ended."""
        with self.condition:
            replicas.add(replica)
            self.condition.notify_all()


@dataclasses.dataclass(slots=True, eq=False)
class Round:
    """One call of all members of a channel."""

    kind: str
    parts: list[Part]
    missing: set[int]
    result: Part = None
    error: str = ""
    done: bool = False


class Channel:
    """The calls of some replicas.

    Args:
        world: the run.
        members: their numbers among all replicas, in the order of their ranks here.
        of_program: whether its calls are made by the program itself, so that a member
            whose function has returned makes no more calls.
    """

    def __init__(
        self, world: World, members: tuple[int, ...], *, of_program: bool = False
    ) -> None:
        self.world = world
        self.members = members
        self.size: int = len(members)
        self.identity: str = os.urandom(8).hex()  # no other channel ever has it
        self._gone = world.returned if of_program else world.ended
        self._rounds: dict[int, Round] = {}
        self.notices: list[collections.deque[bytes]] = [
            collections.deque() for _ in members
        ]

    def post(
        self,
        rank: int,
        number: int,
        kind: str,
        part: Part,
        combine: Combine | None = None,
        root: int | None = None,
    ) -> Round:
        """Post this member's part of a call; return the call.

        Args:
            rank: the rank of the member.
            number: the number of the call.
            kind: the kind of call; it must be the same for all members.
            part: a copy, or an object that does not change.
            combine: a function of all parts that returns the result. Only the last
                member runs it.
            root: the rank whose part is the result, whatever the others do; None: the
                result is that of ``combine``.

        Raises:
            RunStoppedError: if another replica has failed.
        """
        self._require_running(rank)
        condition = self.world.condition
        with condition:
            new = Round(kind, [None] * self.size, set(range(self.size)))
            found = self._rounds.setdefault(number, new)
            if found.kind != kind:
                found.error = (
                    f"replicas make different calls at once: {found.kind} and {kind}"
                )
                found.done = True
                condition.notify_all()
            found.parts[rank] = part
            found.missing.discard(rank)
            last = not found.missing
            if last:
                del self._rounds[number]
            if rank == root and not found.done:
                found.result, found.done = part, True
                condition.notify_all()
            if found.done or root is not None or not last:
                return found
        error, result = "", None
        try:
            result = found.parts if combine is None else combine(found.parts)
        except Exception as raised:  # arrays of different sizes, without the guard
            error = f"{kind} failed: {type(raised).__name__}: {raised}"
        with condition:
            found.result, found.error, found.done = result, error, True
            condition.notify_all()
        return found

    def _require_running(self, rank: int) -> None:
        if self.world.stopped:
            raise RunStoppedError(on_rank(rank, self.world.stopped))

    def has_ended(self, one: Round, rank: int) -> bool:
        """Whether a call has its result.

        Raises:
            RunStoppedError: if another replica has failed.
            CollectiveMismatchError: if a missing member will never post, or members
                made different calls.
        """
        if one.done:
            if one.error:
                raise CollectiveMismatchError(on_rank(rank, one.error))
            return True
        self._require_running(rank)
        gone = [r for r in list(one.missing) if self.members[r] in self._gone]
        if gone and not one.done:
            raise CollectiveMismatchError(
                on_rank(
                    rank,
                    f"{one.kind}: {format_ranks(gone)} will not come, since the "
                    "function that `mpidist.testing.run` runs has returned there. "
                    "Every replica must make the same calls in the same order",
                )
            )
        return False


@dataclasses.dataclass(slots=True, eq=False)
class Pending:
    """A call to which a member has posted its part, until the result is there."""

    _channel: Channel
    _rank: int
    _round: Round

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Return whether the result is there; raise if it never will be."""
        return self._channel.has_ended(self._round, self._rank)

    def wait_for(self, seconds: float) -> bool:
        """Wait for at most ``seconds``, then do the same as `Test`."""
        if not self.Test():
            condition = self._channel.world.condition
            with condition:
                condition.wait_for(self.Test, seconds)
        return self.Test()

    def leak(self) -> None:
        """Do nothing: the last member to post does not write to members' arrays."""

    @property
    def missing(self) -> list[int]:
        """The members that have not posted their parts."""
        return sorted(self._round.missing)

    @property
    def result(self) -> Part:
        """The result for this member, once it is there."""
        return self._round.result
