"""Calls that all ranks make, and of which rank 0 does a part: writes, or reads, files.

The others wait for it (`CollectiveCall.on_rank_0`), or go on, while a thread of rank 0
writes: `Checkpoint.save(wait=False)`. Then all ranks of the strategy note that it has
such a save (`ReplicaGroup.unfinished`). The next save or restore, `Checkpoint.wait` and
`MPIStrategy.close` wait for it together, and all raise what the thread has raised.

At the end of the program ranks may be at different places, so each waits by itself:
rank 0 for its thread, and the others, without a deadline, for the end of rank 0. An
error that was not raised until then ends the job like an uncaught exception.

A forked child does not have the thread: the save is that of its parent.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Final, TypeVar

from mpidist._agreement import mismatch
from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call
from mpidist._agreement.sections import SectionResult, run_section
from mpidist._base import threads
from mpidist._base.errors import CheckpointError, as_told
from mpidist._mpi.any_communicator import AnyCommunicator
from mpidist._runtime import context, process_exit
from mpidist._runtime.group import ReplicaGroup

_R = TypeVar("_R")


class CollectiveCall:
    """A call that all ranks of a strategy make; rank 0 does a part alone."""

    def __init__(self, group: ReplicaGroup, name: str) -> None:
        context.require_program_level(group, name)
        self.group = group
        self.name = name
        self.comm: AnyCommunicator = group.communicator
        self.guard: Guard = group.guard
        self.rank: int = group.replica_id
        self.size: int = group.num_replicas

    def attempt(self, work: Callable[[], _R]) -> _R:
        """Run code that may fail on this rank; if it does, all ranks raise it."""
        with self.guard.checking(self.name):
            return work()

    def agree(self, text: str) -> None:
        """Check that all ranks do the same. Collective."""
        self.guard.agree(Call(f"{self.name}{text}"))

    def together(self, work: Callable[[], _R]) -> _R:
        """Run code that may raise on some ranks, and may be collective. Collective.

        In the scope of the strategy. All ranks wait until all have finished; if one
        raised, all raise.
        """

        def body(_: SectionResult) -> _R:
            with self.scope():
                return work()

        return run_section(self.guard, Call(f"{self.name}, taking part"), body)

    def on_rank_0(self, work: Callable[[], _R]) -> _R:
        """Return the result of ``work`` on rank 0 on all ranks, or raise its exception.

        Collective. The other ranks wait without a deadline, since disks are slow.
        The data sent is pickled; it comes from this program, not from a file.
        """
        messages = self.group.collectives.resources.messages
        if self.rank == 0:
            try:
                result = work()
                data = pickle.dumps((result, None))
            except KeyboardInterrupt as error:  # often in a frame of a library
                raise self.guard.abandon(Call(self.name), error) from None
            except BaseException as error:  # sys.exit() too: the others wait
                trace = mismatch.describe_exception(error)
                messages.send(
                    pickle.dumps((None, (mismatch.dump_exception(error), trace)))
                )
                as_told(error, self.comm.identity)
                raise
            messages.send(data)
            return result
        what = f"the end of {self.name}, for which rank 0 uses the disk"
        # Without a deadline: writing takes as long as the file system does.
        result, raised = pickle.loads(messages.receive(what, timeout=0.0))
        if raised is None:
            return result
        failure = mismatch.load_exception(*raised)
        if failure is None:
            failure = CheckpointError(raised[1].strip().rpartition("\n")[2])
        failure.add_note(f"[rank {self.rank}] raised here because rank 0 raised it")
        raise as_told(failure, self.comm.identity)

    def wait_for_save(self) -> None:
        """Wait for the save of the strategy that goes on, if there is one. Collective.

        Raises:
            Exception: what the save has raised; on all ranks.
        """
        if self.group.unfinished is not None:
            self.group.unfinished(self.name)

    def note_save(
        self, write: Write | None, ended: Callable[[int | None], None]
    ) -> None:
        """Note on each rank that its strategy has a save that goes on.

        Args:
            write: the thread; None on ranks other than 0.
            ended: called on all ranks with the result when they have waited for the
                save; with None if it has failed.
        """
        group, guard = self.group, weakref.ref(self.guard)

        def wait_for_rank_0() -> None:
            found = guard()
            if found is not None:
                found.timeout_seconds = 0.0

        def finish(name: str) -> None:
            call = CollectiveCall(group, name)
            call.agree(", waiting for the save before it")
            group.unfinished = None  # once: perhaps it is interrupted
            process_exit.not_before_end(wait_for_rank_0)
            saved: int | None = None
            try:
                saved = call.on_rank_0(
                    lambda: None if write is None else write.finish()
                )
            finally:
                ended(saved)

        group.unfinished = finish
        if write is None:
            process_exit.before_end(wait_for_rank_0)

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Return the scope of the strategy, unless it is the default one."""
        if self.group.is_mpi:
            return self.group.cross_frame
        return contextlib.nullcontext()


# --- saves that a thread of rank 0 completes ------------------------------------------

# The thread of the last save: it ends after those before it.
_last: Final[threads.ReplicaLocal[list[threading.Thread]]] = threads.ReplicaLocal(list)


class Write:
    """A thread of rank 0 that writes a checkpoint: it calls ``write``."""

    def __init__(self, write: Callable[[], int]) -> None:
        self._process = os.getpid()
        self._written: Future[int] = Future()
        before = list(_last.get())

        def run() -> None:
            try:
                for thread in before:
                    thread.join()
                self._written.set_result(write())
            except BaseException as error:
                self._written.set_exception(error)

        # No daemon: Python waits for it before it ends.
        self.thread: Thread = threads.start_thread("checkpoint", run, daemon=False)
        _last.get()[:] = [self.thread]
        process_exit.before_end(self.finish)

    def finish(self) -> int | None:
        """Wait for the end of the thread, and return its result, or raise its error.

        In a forked child None.
        """
        if os.getpid() != self._process:
            return None
        self.thread.join()
        process_exit.not_before_end(self.finish)
        return self._written.result()


def wait_for_threads() -> None:
    """Wait until no thread of this process writes: two could write to one path."""
    for thread in _last.get():
        thread.join()
