"""Which replica the current thread is, where replicas are threads of one process.

Under MPI a replica is a process, and what modules keep belongs to it. `mpidist.testing`
runs replicas as threads of one process. So what a module keeps for a replica, and for
nobody else, is a `ReplicaLocal`; and `MPIStrategy` asks `current` how it is connected
with the other replicas.

A thread that a replica starts is not the replica: it can call functions, but make no
strategy.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from mpidist._base.options import Environment

_T = TypeVar("_T")


class ThreadReplica(Protocol):
    """A replica that is a thread.

    Attributes:
        size: how many replicas there are.
        locals: what each `ReplicaLocal` keeps for this replica.
    """

    size: int
    locals: dict[int, Any]

    def adapt(self, environment: Environment) -> Environment:
        """Return what the environment says to replicas that are threads."""

    def connect(self, comm: Any, deadline: Any) -> Any:
        """Return a communicator over the replicas. Collective.

        Args:
            comm: what `MPIStrategy` was given.
            deadline: waits for the pending connection; a `waiting.Deadline`.

        Raises:
            TypeError: for a ``comm`` of MPI.
        """


class _Here(threading.local):
    replica: ThreadReplica | None = None


_here = _Here()


def current() -> ThreadReplica | None:
    """Return the replica that this thread is; None where replicas are processes."""
    return _here.replica


@contextlib.contextmanager
def entered(replica: ThreadReplica) -> Iterator[None]:
    """Make this thread a replica, for the length of a ``with`` block."""
    before, _here.replica = _here.replica, replica
    try:
        yield
    finally:
        _here.replica = before


class ReplicaLocal(Generic[_T]):
    """An object of which each replica has one: each process, or each thread of a run.

    Args:
        make: makes one.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._of_process = make()

    def get(self) -> _T:
        """Return the one of this replica."""
        replica = _here.replica
        if replica is None:
            return self._of_process
        kept = replica.locals
        if id(self) not in kept:
            kept[id(self)] = self._make()
        found: _T = kept[id(self)]
        return found
