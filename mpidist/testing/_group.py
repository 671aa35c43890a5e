"""Groups of thread replicas: `MPIStrategy` accepts one in place of a comm."""

from __future__ import annotations

from typing import TypeVar

from mpidist._agreement.communicator_waits import CommunicatorWaits
from mpidist.testing._communicator import ThreadCommunicator
from mpidist.testing._world import Channel

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
        return self._comm.call(f"ThreadGroup.broadcast from {root}", x, root=root)

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
            dealt: _Dealt = {}
            for one in {color for color, _ in parts if color is not None}:
                ranks = [rank for rank, (color, _) in enumerate(parts) if color == one]
                ranks.sort(key=lambda rank: parts[rank][1])  # else in their order
                places = tuple(members[rank] for rank in ranks)
                dealt[one] = ranks, Channel(world, places, of_program=True)
            return dealt

        dealt: _Dealt = self._comm.call("ThreadGroup.split", (color, key), deal)
        if color is None:
            return None
        ranks, channel = dealt[color]
        return ThreadGroup(channel, ranks.index(self.rank), self._place)


def connect(group: ThreadGroup, waits: CommunicatorWaits) -> ThreadCommunicator:
    """Return a new communicator over a group, for a strategy. Collective."""
    channel, comm = group._channel, group._comm
    made = comm.start(
        "MPIStrategy(...)", None, lambda _: Channel(channel.world, channel.members)
    )
    made.wait_for(_WAIT_SECONDS)
    waits.wait(made, "MPIStrategy(...)")
    return ThreadCommunicator(made.result, group.rank, group._place, waits.seconds)
