"""Which replica the current thread is, if replicas are threads of one process.

Under MPI a replica is a process, and owns the state of modules. `mpidist.testing` runs
replicas as threads of one process. So state that belongs to one replica is a
`ReplicaLocal`, and `MPIStrategy` uses `current` to connect with the other replicas.

A thread that a replica starts is not a replica: it can call functions, but cannot make
a strategy.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from mpidist._base.environment import Environment

_T = TypeVar("_T")


class ThreadReplica(Protocol):
    """A replica that is a thread.

    Attributes:
        rank: its number.
        size: how many replicas there are.
        locals: the object of each `ReplicaLocal`, by its id; of any type.
    """

    rank: int
    size: int
    locals: dict[int, Any]

    def adapt(self, environment: Environment) -> Environment:
        """Return the settings for replicas that are threads."""

    def group_of_itself(self) -> Any:
        """Return a communicator of this thread alone, as MPI.COMM_SELF of a process."""

    def connect(self, comm: Any, waits: Any) -> Any:
        """Return a communicator over the replicas. Collective.

        Args:
            comm: the argument of `MPIStrategy`.
            waits: waits for the pending connection; a `CommunicatorWaits`.

        Raises:
            TypeError: if ``comm`` is a communicator of MPI.
        """


class _Here(threading.local):
    replica: ThreadReplica | None = None


_here = _Here()


def current() -> ThreadReplica | None:
    """Return the replica that this thread is; None if replicas are processes."""
    return _here.replica


@contextlib.contextmanager
def entered(replica: ThreadReplica) -> Iterator[None]:
    """Make this thread a replica within a ``with`` block."""
    before, _here.replica = _here.replica, replica
    try:
        yield
    finally:
        _here.replica = before


def start_thread(
    name: str, target: Callable[..., object], *args: object, daemon: bool = True
) -> threading.Thread:
    """Start a thread of mpidist.

    Args:
        name: what follows "mpidist " in its name.
        target: what it calls; an exception ends it, and may end the job.
        args: of ``target``.
        daemon: whether the process may end while it runs.
    """
    thread = threading.Thread(
        target=target, args=args, name=f"mpidist {name}", daemon=daemon
    )
    thread.start()
    return thread


class ReplicaLocal(Generic[_T]):
    """An object for each replica: for each process, or for each thread of a run.

    Args:
        make: makes the object of one replica.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._of_process = make()

    def get(self) -> _T:
        """Return the object of this replica."""
        replica = _here.replica
        if replica is None:
            return self._of_process
        kept = replica.locals
        if id(self) not in kept:
            kept[id(self)] = self._make()
        return kept[id(self)]
