"""`CollectiveCall`: all ranks of a strategy make it, and rank 0 does a part alone."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import TypeVar

from mpidist._agreement import mismatch
from mpidist._agreement.mismatch import Call
from mpidist._agreement.sections import SectionResult, run_section
from mpidist._base.errors import CheckpointError, as_told
from mpidist._collectives.collectives import Collectives
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup

_R = TypeVar("_R")


class CollectiveCall:
    """A call that all ranks of a strategy make; rank 0 does a part alone."""

    def __init__(self, group: ReplicaGroup, name: str) -> None:
        context.require_program_level(group, name)
        self.group = group
        self.name = name
        self.collectives: Collectives = group.collectives
        self.comm = self.collectives.comm
        self.guard = self.collectives.guard
        self.rank: int = self.comm.rank
        self.size: int = self.comm.size

    def attempt(self, work: Callable[[], _R]) -> _R:
        """Run code that may fail on this rank; if it does, all ranks raise it."""
        with self.guard.checking(self.name):
            return work()

    def agree(self, text: str) -> None:
        """Check that all ranks do the same. Collective."""
        self.guard.agree(Call(f"{self.name}{text}"))

    def together(self, work: Callable[[], _R], *, scope: bool = True) -> _R:
        """Run code that may raise on some ranks, and may be collective. Collective.

        All ranks wait until all have finished; if one raised, all raise.

        Args:
            work: the function to call.
            scope: whether to call it in the scope of the strategy.
        """

        def body(_: SectionResult) -> _R:
            with self.scope() if scope else contextlib.nullcontext():
                return work()

        return run_section(self.guard, Call(f"{self.name}, taking part"), body)

    def on_rank_0(self, work: Callable[[], _R]) -> _R:
        """Return the result of ``work`` on rank 0 on all ranks, or raise its exception.

        Collective. The other ranks wait without a deadline, since disks are slow.
        The data sent is pickled; it comes from this program, not from a file.
        """
        messages = self.collectives.resources.messages
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
                as_told(error)
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
        raise as_told(failure)

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Return the scope of the strategy, unless it is the default one."""
        if self.group.is_mpi:
            return context.entered(self.group.cross_frame)
        return contextlib.nullcontext()
