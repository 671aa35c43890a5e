"""Begins an asynchronous call; `mpidist._agreement.async_calls` has the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpidist._agreement.async_calls import AsyncCalls, CollectiveHandle
from mpidist._base import threads
from mpidist._mpi import library
from mpidist._runtime import job_end, process_exit
from mpidist._runtime.group import ReplicaGroup

_T = TypeVar("_T")


def _has_thread(group: ReplicaGroup) -> bool:
    """Return whether a thread makes the asynchronous calls; ranks may differ in it.

    Otherwise `begin_async` makes them: with one replica; with arrays on a GPU, as each
    thread has its own current GPU; with the user's `CrossDeviceOps`; and if MPI allows
    calls by one thread only.
    """
    return (
        group.num_replicas > 1
        and group.device.kind == "cpu"
        and group.custom_ops is None
        and (threads.current() is not None or library.thread_level() == "MULTIPLE")
    )


def begin_async(
    group: ReplicaGroup,
    name: str,
    make: Callable[[], _T],
    *,
    at_once: bool = False,
    warns: bool = True,
    check: Callable[[], None] | None = None,
) -> CollectiveHandle[_T]:
    """Begin an asynchronous call, and return its handle. Collective.

    Args:
        group: the ranks.
        name: of the call.
        make: makes the call, and returns its result.
        at_once: whether to make the call here, before this function returns.
        warns: whether a handle that is dropped without `result` warns.
        check: called by `result`, until it does not raise. None: nothing is.

    Raises:
        RuntimeError: if the strategy was closed.
    """
    guard = group.guard
    if guard.closed:
        raise guard.breakdown.error()
    at_once = at_once or not _has_thread(group)
    handle = CollectiveHandle(guard, name, make, warns, check)
    if guard.async_calls is None:
        guard.async_calls = AsyncCalls(guard)
        # Where this process does not wait for the ends of the others, a call may be
        # under way that they never make.
        waits = guard in job_end.guards.get()
        process_exit.before_end(guard.settle if waits else guard.raise_failure)
    guard.async_calls.begin(handle, at_once=at_once)
    return handle
