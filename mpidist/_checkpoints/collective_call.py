"""`CollectiveCall`: all ranks of a strategy make it, and rank 0 does a part alone."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping
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

    def differing(self, numbers: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Return what is not the same on all ranks, with the numbers of each rank.

        Collective: one header if all is the same. All ranks pass the same names.
        """
        own = [*numbers.values()]
        fingerprint = mismatch.fingerprint(",".join(map(str, own)))
        if self.guard.agree_and_compare(Call(f"{self.name}, comparing"), fingerprint):
            return {}
        columns = zip(*self.comm.all_gather_integers(own), strict=True)
        return {
            name: column
            for name, column in zip(numbers, columns, strict=True)
            if len(set(column)) > 1
        }

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
        if self.rank == 0:
            try:
                result = work()
                data = pickle.dumps((True, result, ""))
            except KeyboardInterrupt as error:  # often in a frame of a library
                raise self.guard.abandon(Call(self.name), error) from None
            except BaseException as error:  # sys.exit() too: the others wait
                trace = mismatch.describe_exception(error)
                dumped = mismatch.dump_exception(error)
                text = trace.strip().rpartition("\n")[2]
                data = pickle.dumps((False, (dumped, text), trace))
                self.collectives.resources.messages.send(data)
                as_told(error)
                raise
            self.collectives.resources.messages.send(data)
            return result
        what = f"the end of {self.name}, for which rank 0 uses the disk"
        # Without a deadline: writing takes as long as the file system does.
        data = self.collectives.resources.messages.receive(what, timeout=0.0)
        good, content, trace = pickle.loads(data)
        if good:
            return content
        dumped, text = content
        failure = mismatch.load_exception(dumped, trace) or CheckpointError(text)
        failure.add_note(f"[rank {self.rank}] raised here because rank 0 raised it")
        raise as_told(failure)

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Return the scope of the strategy, unless it is the default one."""
        if self.group.is_mpi:
            return context.entered(self.group.cross_frame)
        return contextlib.nullcontext()
