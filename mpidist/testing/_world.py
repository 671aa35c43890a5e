"""What replicas that are threads share: calls in which their parts come together.

A `Channel` is what a communicator is for processes. Its calls are numbered by each
member for itself, in the order in which it makes them, and calls of one number are one
`Round`: each member *posts* its part and goes on, and whoever posts last combines all
parts. So every call is non-blocking, as with MPI, and one that blocks is a wait behind
it. Parts are copies: who has posted may change its arrays.

All members of a `World`, which is one run, wait on one condition. So a run can be
ended: each wait of each member then raises. It also raises where a part that is
waited for will never come, since its member has ended.

Rejected: queues between pairs of threads (each call would need its own protocol);
barriers (a member that leaves breaks them for good, and none has a deadline that tells
who is missing); polling (a thread that looks takes the interpreter from the one that it
waits for).
"""

from __future__ import annotations

import collections
import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from mpidist._base.errors import (
    CollectiveMismatchError,
    ReplicaError,
    format_ranks,
    on_rank,
)

Combine = Callable[[list[Any]], Any]

_SLICE_SECONDS: Final = 0.5


class RunStoppedError(ReplicaError):
    """The run was stopped while this replica waited, since another one has failed."""


class World:
    """One run: its condition, and who has ended.

    Attributes:
        size: the number of replicas.
        condition: held while anything here is changed; told of every change.
        returned: replicas whose function has returned, and who may still wait for
            the others.
        ended: replicas that take part in nothing any more.
        stopped: why the run was ended; "" while it goes on.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.condition: threading.Condition = threading.Condition()
        self.returned: set[int] = set()
        self.ended: set[int] = set()
        self.stopped: str = ""

    def stop(self, why: str) -> None:
        """End the run: every wait raises from now on. The first reason counts."""
        with self.condition:
            self.stopped = self.stopped or why
            self.condition.notify_all()

    def wait_until(
        self, predicate: Callable[[], bool], seconds: float = math.inf
    ) -> bool:
        """Wait for changes here until something holds; return whether it does.

        In slices: a signal that comes just before the main thread waits in a lock is
        seen only when it wakes up.
        """
        end = time.monotonic() + seconds
        with self.condition:
            while not predicate() and (left := end - time.monotonic()) > 0:
                self.condition.wait(min(left, _SLICE_SECONDS))
            return predicate()

    def release(self) -> None:
        """Let the lock go, which an exception from outside may have left locked.

        Python raises `ReplicaStopped` anywhere, also between taking a lock and the
        beginning of the ``with`` block.
        """
        with contextlib.suppress(RuntimeError):  # it is not this thread's
            while True:
                self.condition.release()

    def note(self, replicas: set[int], replica: int) -> None:
        """Add a replica to those that have returned, or ended."""
        with self.condition:
            replicas.add(replica)
            self.condition.notify_all()


class Round:
    """One call of all members of a channel."""

    __slots__ = ("done", "error", "kind", "missing", "parts", "result")

    def __init__(self, kind: str, size: int) -> None:
        self.kind: str = kind
        self.parts: list[Any] = [None] * size
        self.missing: set[int] = set(range(size))
        self.result: Any = None
        self.error: str = ""
        self.done: bool = False


class Channel:
    """The calls of some replicas.

    Args:
        world: the run.
        members: their numbers among all replicas, in the order of their ranks here.
        of_program: whether its calls are those of the program itself, so that a member
            whose function has returned makes no more of them.
    """

    def __init__(
        self, world: World, members: tuple[int, ...], *, of_program: bool = False
    ) -> None:
        self.world = world
        self.members = members
        self.size: int = len(members)
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
        part: Any,
        combine: Combine | None = None,
        root: int | None = None,
    ) -> Round:
        """Give this member's part of a call; return the call.

        Args:
            rank: the member.
            number: of the call.
            kind: what it is; all members must say the same.
            part: a copy, or what nobody changes.
            combine: given all parts, returns the result. Run by the last member alone.
            root: the one whose part is the result, whatever the others do; None: the
                result is what ``combine`` returns.

        Raises:
            RunStoppedError: where another replica has failed.
        """
        self._require_running(rank)
        condition = self.world.condition
        with condition:
            found = self._rounds.get(number)
            if found is None:
                found = self._rounds[number] = Round(kind, self.size)
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
            if found.done or root is not None:
                if rank == root and not found.done:
                    found.result, found.done = part, True
                    condition.notify_all()
                return found
            if not last:
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
            RunStoppedError: where another replica has failed.
            CollectiveMismatchError: where a member that is missing will not come; or if
                members have made different calls.
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


class Pending:
    """A call that a member has posted its part of, until it has its result."""

    __slots__ = ("_channel", "_rank", "_read", "_round")

    def __init__(
        self,
        channel: Channel,
        rank: int,
        one: Round,
        read: Callable[[Any], Any] | None = None,
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._round = one
        self._read = read

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Return whether it has its result; raise where it never will."""
        return self._channel.has_ended(self._round, self._rank)

    def wait(self, seconds: float) -> bool:
        """Wait for at most so long, then do as `Test`."""
        if not self.Test():
            condition = self._channel.world.condition
            with condition:
                condition.wait_for(self.Test, seconds)
        return self.Test()

    def leak(self) -> None:
        """Do nothing: who posts last writes to no member's arrays."""

    @property
    def missing(self) -> list[int]:
        """The members that have not posted their parts."""
        return sorted(self._round.missing)

    @property
    def result(self) -> Any:
        """What it gives this member, once it has its result."""
        result = self._round.result
        return result if self._read is None else self._read(result)
