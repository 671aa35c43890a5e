"""The other ranks' side of a merge_call: they run what rank 0 commands."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Final, TypeAlias

from mpidist._agreement.mismatch import ErrorKind, load_exception
from mpidist._base import nest
from mpidist._base.errors import CollectiveError, as_told, on_rank
from mpidist._base.types import Array, Nest
from mpidist._merge import commands, object_names
from mpidist._merge.updates import Update, UpdateBatch
from mpidist._runtime import dispatch
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import Key, Registered, key_of
from mpidist._values.distributed import DistributedValues, own_component
from mpidist._values.variable import Variable

_Command: TypeAlias = tuple[str, Sequence[Key], commands.Content]
"""Its name, the keys of values that rank 0 has dropped, and what it is about."""

_WAITS: Final = "merge_call, waiting for merge_fn on rank 0"


class Follower:
    """The side of another rank of one merge_call.

    Args:
        group: the ranks.
        held: the values by key that this rank keeps until rank 0 has dropped them.
        names: the names of what this rank's merge_fn can reach; None if it has none.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        held: dict[Key, Registered],
        names: object_names.Names | None,
    ) -> None:
        self._group = group
        self._collectives = group.collectives
        self._registry = group.registry
        self._reader = commands.Reader(group, names)
        self._held = held
        # The exception of the last command on this rank. Rank 0 has raised it too.
        self._failure: BaseException | None = None
        self._batch: UpdateBatch | None = None  # if it is open
        self._early: _Command | None = None  # read by `_expect_check`

    def follow(self) -> Nest:
        """Run commands until merge_fn has ended; return this replica's part."""
        try:
            while True:
                try:
                    name, dropped, content = self._receive()
                except MemoryError as error:  # rank 0 has raised it too, and decides
                    self._failed(error)
                    continue
                if name == "update":
                    self._update(content)
                else:
                    succeeded = self._end_batch()
                    if name == "raise":
                        raised = self._error_of(*self._reader.read(content, []))
                        raise as_told(raised, self._collectives.comm.identity)
                    if succeeded and name == "return":
                        return self._finish(content)
                    if succeeded and name not in ("join", "check"):
                        self._failed(self._obey(name, content))
                for key in dropped:
                    self._held.pop(key, None)
                    self._registry.kept.pop(key, None)
        finally:
            # Again, since an exception from outside may come to the line that does so.
            self._together()
            if self._batch is not None:
                self._batch.leave()

    def _receive(self) -> _Command:
        """Return the next command."""
        command, self._early = self._early, None
        if command is None:
            command = pickle.loads(self._collectives.resources.messages.receive(_WAITS))
        return command

    def _expect_check(self) -> None:
        """`Guard.before_call` in an update: read that rank 0's function communicates.

        Raises:
            RuntimeError: if it does not.
        """
        command = self._receive()
        if command[0] != "check":
            self._early = command
            raise RuntimeError(
                "a function of `update` communicates on this rank, and not on rank 0; "
                "it has to make the same calls on all ranks"
            )
        self._together()
        if self._batch is not None:
            self._batch.communicates = True

    def _together(self) -> None:
        """Let this rank make collective calls again, after an update."""
        self._group.guard.before_call = None
        self._group.guard.set_alone(False)

    def _end_batch(self) -> bool:
        """Go to the join if a batch is open; return whether no update has raised."""
        batch, self._batch = self._batch, None
        if batch is None:
            return True
        self._failure = batch.end()
        return self._failure is None

    def _receive_arrays(self, content: commands.Content) -> list[Array]:
        return self._collectives.receive_arrays() if content[2] else []

    def _finish(self, content: commands.Content) -> Nest:
        """Return this replica's part of the result of merge_fn."""
        arrays = self._receive_arrays(content)
        if self._failure is not None and not self._collectives.guard.enabled:
            raise self._failure  # no other rank knows of it
        result = self._reader.read(content, arrays)
        return nest.map_structure(own_component, result)

    def _update(self, content: commands.Content) -> None:
        """Run an update, or discard it if one before it has failed in this batch."""
        number = self._registry.next_key()
        group, guard = self._group, self._group.guard
        batch = self._batch or UpdateBatch(group)
        self._batch = batch if batch.open else None
        kind: ErrorKind = "invalid"
        update: Update | None = None
        try:
            arrays = self._receive_arrays(content)
            if batch.failed:
                return
            self._failed(None)
            # Unpickling may run the user's code.
            with group.cross_frame:
                update = Update(*self._reader.read(content, arrays))
            kind = "raised"
            if update.check():
                batch.keep()
            guard.before_call = self._expect_check
            guard.set_alone(True)
            result = batch.run(number, update)
            result = self._registry.wrap_numbered(update.kind, result, number)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            guard.set_alone(False)
            guard.breakdown.interrupted("an update", error)
            if guard.broken:
                raise
            what = "an update" if update is None else update.describe()
            if not isinstance(error, CollectiveError):
                rank = self._collectives.comm.rank
                error.add_note(on_rank(rank, f"raised in {what}, called by merge_fn"))
            if batch.open:
                batch.fail(error, kind, what)
            else:  # without the guard
                self._failed(error)
        else:
            if type(result) is not Variable:
                self._hold(result)
        finally:
            self._together()
        if batch.communicates:
            self._end_batch()

    def _failed(self, error: BaseException | None) -> None:
        """Store the exception of the last command on this rank."""
        # With the guard off, keep the first one: rank 0 does not know, and goes on.
        if self._failure is None or self._collectives.guard.enabled:
            self._failure = error

    def _obey(self, name: str, content: commands.Content) -> BaseException | None:
        """Run one command; return its exception.

        Rank 0 has raised it too, and decides what happens.
        """
        group, collectives = self._group, self._collectives
        try:
            arrays = self._receive_arrays(content)
            with group.cross_frame:
                with collectives.guard.checking(f"the coordinator's {name}"):
                    args = self._reader.read(content, arrays)
                result = dispatch.execute(group, name, args)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            collectives.guard.breakdown.interrupted(name, error)
            if collectives.guard.broken:
                raise
            return error
        self._hold(result)
        return None

    def _hold(self, result: Nest) -> None:
        """Keep the values of a result, because rank 0 may refer to them."""
        for leaf in nest.flatten(result)[0]:
            if isinstance(leaf, DistributedValues):
                self._held[key_of(leaf)] = leaf
            elif isinstance(leaf, Variable):
                # Rank 0 may keep it for later merge_calls, like slots of an optimizer.
                self._registry.kept[key_of(leaf)] = leaf

    def _error_of(self, data: bytes, trace: str) -> BaseException:
        """Return the exception of this rank if merge_fn has raised one on rank 0."""
        rank, failure = self._collectives.comm.rank, self._failure
        error = load_exception(data, trace)
        own = failure is not None and not isinstance(failure, CollectiveError)
        if own and isinstance(error, CollectiveError) and failure is not None:
            return failure  # this rank's own function has failed
        if error is None:
            last = trace.strip().splitlines()[-1] if trace.strip() else "unknown"
            return CollectiveError(
                f"[rank {rank}] merge_fn raised on rank 0: {last}\n{trace}"
            )
        error.add_note(f"[rank {rank}] merge_fn raised this on rank 0, as shown above")
        return error
