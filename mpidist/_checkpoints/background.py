"""Saves that rank 0 completes in a thread, begun by ``Checkpoint.save(wait=False)``.

All ranks of a strategy note that it has one (`ReplicaGroup.unfinished`). The next save
or restore, `Checkpoint.wait` and `MPIStrategy.close` wait for it together, and all
raise what the thread has raised.

At the end of the program ranks may be at different places, so each waits by itself:
rank 0 for its thread, and the others, without a deadline, for the end of rank 0. An
error that was not raised until then ends the job like an uncaught exception.

A forked child does not have the thread: the save is that of its parent.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from mpidist._base import threads
from mpidist._checkpoints.collective_call import CollectiveCall
from mpidist._runtime import process_exit
from mpidist._runtime.group import ReplicaGroup

_T = TypeVar("_T")

_writes: Final[threads.ReplicaLocal[list[Write[Any]]]] = threads.ReplicaLocal(list)


class Write(Generic[_T]):
    """A thread of rank 0 that writes a checkpoint.

    Args:
        path: where to.
        write: writes it, and returns what all ranks get.
    """

    def __init__(self, path: str, write: Callable[[], _T]) -> None:
        self._path = path
        self._process = os.getpid()
        self._result: _T | None = None
        self._error: BaseException | None = None
        before = list(_writes.get())

        def run() -> None:
            try:
                _join(before)
                self._result = write()
            except BaseException as error:
                self._error = error

        # No daemon: Python waits for it before it ends.
        self.thread = threading.Thread(target=run, name="mpidist checkpoint")
        self.thread.start()
        _writes.get().append(self)
        process_exit.before_end(self.finish)

    def finish(self) -> _T | None:
        """Wait for the end of the thread, and return its result, or raise its error.

        In a forked child None.
        """
        if os.getpid() != self._process:
            return None
        self.thread.join()
        process_exit.not_before_end(self.finish)
        if self in _writes.get():
            _writes.get().remove(self)
        error, self._error = self._error, None
        if error is not None:
            error.add_note(f"raised by the save to {self._path!r} with `wait=False`")
            raise error
        return self._result


def wait_for_threads() -> None:
    """Wait until no thread of this process writes: two could write to one path."""
    _join(_writes.get())


def _join(writes: list[Write[Any]]) -> None:
    for write in writes:
        write.thread.join()


def note(
    group: ReplicaGroup, write: Write[_T] | None, ended: Callable[[_T | None], None]
) -> None:
    """Note on each rank that its strategy has a save that goes on.

    Args:
        group: the ranks.
        write: the thread; None on ranks other than 0.
        ended: called on all ranks with the result when they have waited for the save;
            with None if it has failed.
    """
    guard = weakref.ref(group.guard)

    def wait_for_rank_0() -> None:
        found = guard()
        if found is not None:
            found.timeout_seconds = 0.0

    def result() -> _T | None:
        assert write is not None
        return write.finish()

    def finish(name: str) -> None:
        call = CollectiveCall(group, name)
        call.agree(", waiting for the save before it")
        group.unfinished = None  # once: perhaps it is interrupted
        process_exit.not_before_end(wait_for_rank_0)
        saved: _T | None = None
        try:
            saved = call.on_rank_0(result)
        finally:
            ended(saved)

    group.unfinished = finish
    if write is None:
        process_exit.before_end(wait_for_rank_0)


def finish(call: CollectiveCall) -> None:
    """Wait for the save of a strategy that goes on, if there is one. Collective.

    Raises:
        Exception: what the save has raised; on all ranks.
    """
    if call.group.unfinished is not None:
        call.group.unfinished(call.name)
