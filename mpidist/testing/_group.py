"""Groups of thread replicas: `MPIStrategy` accepts one in place of a comm."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from mpidist._agreement.deadline import Deadline
from mpidist._base import threads
from mpidist._base.environment import Environment
from mpidist._base.errors import on_rank
from mpidist._base.options import CommunicationImplementation
from mpidist.testing._communicator import ThreadCommunicator
from mpidist.testing._world import Channel, World

_WAIT_SECONDS = 0.1
_T = TypeVar("_T")
_Dealt = dict[int, tuple[list[int], Channel]]  # by color: the ranks, and theirs


class ThreadGroup:
    """A group of replicas of a `run`, as seen by one of them.

    `current_group` returns the group of all replicas. ``MPIStrategy(comm=group)``
    creates a strategy over a group, and ``MPIStrategy()`` one over all replicas.

    Its methods are for tests: they do not use the code under test. Objects are passed
    without copying.

    Attributes:
        rank: the number of this replica in the group.
        size: the number of replicas in the group.
    """

    def __init__(self, channel: Channel, rank: int, place: int) -> None:
        self._channel = channel
        self._comm = ThreadCommunicator(channel, rank, place)
        self._place = place
        self.rank = rank
        self.size: int = channel.size

    def __repr__(self) -> str:
        return f"<mpidist.testing.ThreadGroup: replica {self.rank} of {self.size}>"

    def all_gather(self, x: _T) -> list[_T]:
        """Return the object of each replica, in replica order. Collective."""
        return list(self._comm.call("ThreadGroup.all_gather", x))

    def broadcast(self, x: _T, root: int = 0) -> _T:
        """Return the object of one replica on each of them. Collective."""
        result: _T = self._comm.call(f"ThreadGroup.broadcast from {root}", x, root=root)
        return result

    def barrier(self) -> None:
        """Wait until each replica has called this. Collective."""
        self._comm.call("ThreadGroup.barrier", None)

    def split(self, color: int | None, key: int = 0) -> ThreadGroup | None:
        """Return the group of the replicas with the same color. Collective.

        Args:
            color: an integer; None: this replica is in no group.
            key: replicas in a group are ordered by it, and with equal keys by their
                rank in the original group.

        Returns:
            The group; None if there is no color.
        """
        members, world = self._channel.members, self._channel.world

        def deal(parts: list[tuple[int | None, int]]) -> _Dealt:
            groups: dict[int, list[int]] = {}
            for rank, (its_color, _) in enumerate(parts):
                if its_color is not None:
                    groups.setdefault(its_color, []).append(rank)
            dealt = {}
            for its_color, ranks in groups.items():
                ranks.sort(key=lambda rank: (parts[rank][1], rank))
                places = tuple(members[rank] for rank in ranks)
                channel = Channel(world, places, of_program=True)
                dealt[its_color] = (ranks, channel)
            return dealt

        dealt = self._comm.start("ThreadGroup.split", (color, key), deal)
        while not dealt.wait_for(_WAIT_SECONDS):
            pass
        if color is None:
            return None
        ranks, channel = dealt.result[color]
        return ThreadGroup(channel, ranks.index(self.rank), self._place)

    def _connect(self, deadline: Deadline) -> ThreadCommunicator:
        """Return a new communicator over the group. Collective."""
        members, world = self._channel.members, self._channel.world
        made = self._comm.start(
            "MPIStrategy(...)", None, lambda _: Channel(world, members)
        )
        made.wait_for(_WAIT_SECONDS)
        deadline.wait(made, "MPIStrategy(...)")
        return ThreadCommunicator(made.result, self.rank, self._place, deadline.seconds)


class Replica(threads.ThreadReplica):
    """One replica of a run.

    Args:
        world: the run.
        channel: the channel of the group of all replicas.
        number: the number of this replica.
        timeout_seconds: the deadline of strategies that do not set one; None: that of
            the environment.
    """

    def __init__(
        self,
        world: World,
        channel: Channel,
        number: int,
        timeout_seconds: float | None,
    ) -> None:
        self.world = world
        self.rank = number
        self.size = world.size
        self.locals = {}
        self.group = ThreadGroup(channel, number, number)
        self._timeout = timeout_seconds

    def adapt(self, environment: Environment) -> Environment:
        """Return the environment's settings for thread replicas.

        GPU arrays are passed directly: `ThreadCommunicator` accepts them.
        """
        kind = environment.implementation
        timeout = self._timeout
        return dataclasses.replace(
            environment,
            abort=True,  # the other replicas are notified when this one ends
            cuda_aware=True,
            timeline="",  # the program has not ended when a run ends
            implementation=(
                CommunicationImplementation.DIRECT
                if kind is CommunicationImplementation.AUTO
                else kind
            ),
            simulated_nodes=1,
            timeout_seconds=(
                environment.timeout_seconds if timeout is None else timeout
            ),
        )

    def connect(self, comm: object, deadline: Deadline) -> ThreadCommunicator:
        """Return a communicator over the replicas of a group. Collective.

        Raises:
            TypeError: if ``comm`` is not a `ThreadGroup` or None.
        """
        group = self.group if comm is None else comm
        if not isinstance(group, ThreadGroup):
            raise TypeError(
                on_rank(
                    self.group.rank,
                    "MPIStrategy: expected `comm` to be a `mpidist.testing.ThreadGroup`"
                    f" or None, got {comm!r:.80} of type {type(comm).__name__}; "
                    "replicas of `mpidist.testing.run` are threads, between which MPI "
                    "does not work: write `MPIStrategy()` for all of them, or "
                    "`mpidist.testing.current_group().split(color)` for some",
                )
            )
        return group._connect(deadline)


def current_group() -> ThreadGroup:
    """Return the group of all replicas of the `run` that this thread belongs to.

    Not collective.

    Raises:
        RuntimeError: if called outside a function run by `run`.
    """
    replica = threads.current()
    if not isinstance(replica, Replica):
        raise RuntimeError(
            "mpidist.testing.current_group: expected to be called by the function that "
            "`mpidist.testing.run` runs, in the thread of a replica"
        )
    return replica.group
