"""`CollectiveCall`: all ranks of a strategy make it, and rank 0 does a part alone."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import TypeVar

from mpidist._agreement import mismatch
from mpidist._agreement.guard import SectionResult
from mpidist._agreement.mismatch import Call
from mpidist._base.errors import CheckpointError, as_told
from mpidist._base.types import Array
from mpidist._checkpoints.contents import VariableItem
from mpidist._engine.collectives import Collectives
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.variable import storage_of

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
        try:
            return work()
        except Exception as error:
            self.collectives.invalid(self.name, error)

    def agree(self, text: str) -> None:
        """Check that all ranks do the same. Collective."""
        self.guard.agree(Call(f"{self.name}{text}"))

    def same(self, numbers: list[int]) -> list[list[int]] | None:
        """Return None if all ranks have the same numbers, else those of each rank.

        Collective. All ranks pass equally many numbers.
        """
        fingerprint = mismatch.fingerprint(",".join(map(str, numbers)))
        if self.guard.agree_and_compare(Call(f"{self.name}, comparing"), fingerprint):
            return None
        return self.comm.all_gather_integers(numbers)

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

        return self.guard.run_section(Call(f"{self.name}, taking part"), body)

    def on_rank_0(self, work: Callable[[], _R]) -> _R:
        """Return the result of ``work`` on rank 0 on all ranks, or raise its exception.

        Collective. The other ranks wait without a deadline, since disks are slow.
        The data sent is pickled; it comes from this program, not from a file.
        """
        if self.rank == 0:
            try:
                result = work()
                data = pickle.dumps((True, result, ""))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # sys.exit() too: the others wait
                trace = mismatch.describe_exception(error)
                dumped = mismatch.dump_exception(error)
                text = trace.strip().rpartition("\n")[2]
                data = pickle.dumps((False, (dumped, text), trace))
                self.collectives.messages.send(data)
                as_told(error)
                raise
            self.collectives.messages.send(data)
            return result
        what = f"the end of {self.name}, for which rank 0 uses the disk"
        # Without a deadline: writing takes as long as the file system does.
        data = self.collectives.messages.receive(what, timeout=0.0)
        good, content, trace = pickle.loads(data)
        if good:
            return content  # type: ignore[no-any-return]
        dumped, text = content
        failure = mismatch.load_exception(dumped, trace) or CheckpointError(text)
        failure.add_note(f"[rank {self.rank}] raised here because rank 0 raised it")
        raise as_told(failure)

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Return the scope of the strategy, unless it is the default one."""
        if self.group.is_mpi:
            return context.entered(self.group.cross_frame)
        return contextlib.nullcontext()

    def assign(self, item: VariableItem, value: Array) -> None:
        """Assign a value that all ranks have; collective for ON_READ variables."""
        variable = item.variable
        if item.on_read:
            with self.scope():
                variable.assign(value)
            return
        frame = context.Frame(storage_of(variable).group, context.Level.UPDATE)
        with context.entered(frame):  # only this copy, like the function of an update
            variable.assign(value)
