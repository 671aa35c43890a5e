"""Calls that are begun now and end later; see `mpidist._agreement.begun`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpidist._agreement.begun import BegunCalls, CollectiveHandle
from mpidist._base import threads
from mpidist._mpi import library
from mpidist._runtime import job_end, process_exit
from mpidist._runtime.group import ReplicaGroup

_T = TypeVar("_T")


def has_thread(group: ReplicaGroup) -> bool:
    """Return whether calls that are begun are made by a thread of their own.

    The others are made before `begin` returns: of one replica; of arrays on a GPU,
    which is a state of the thread that uses it; by the user's `CrossDeviceOps`; and
    where MPI may be called by one thread at a time. It may differ between ranks.
    """
    return (
        group.num_replicas > 1
        and group.device.kind == "cpu"
        and group.custom_ops is None
        and (threads.current() is not None or library.thread_level() == "MULTIPLE")
    )


def begin(
    group: ReplicaGroup,
    name: str,
    make: Callable[[], _T],
    *,
    at_once: bool = False,
    warns: bool = True,
    check: Callable[[], None] | None = None,
) -> CollectiveHandle[_T]:
    """Begin a call of all ranks, and return at once. Collective.

    Args:
        group: the ranks.
        name: of the call.
        make: makes it.
        at_once: whether this thread makes it before it returns.
        warns: whether a handle that is dropped without `result` warns.
        check: called by `result`; it may raise.

    Raises:
        RuntimeError: if the strategy was closed.
    """
    guard = group.guard
    if guard.closed:
        raise guard.breakdown.error()
    at_once = at_once or not has_thread(group)
    handle = CollectiveHandle(guard, name, make, warns, check)
    if guard.begun is None:
        guard.begun = BegunCalls(guard)
        # Where this process does not wait for the ends of the others, a call may be
        # under way that they never make.
        waits = guard in job_end.guards.get()
        process_exit.before_end(guard.settle if waits else guard.raise_failure)
    guard.begun.begin(handle, at_once=at_once)
    return handle
