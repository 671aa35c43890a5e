"""The other ranks' side of a merge_call: they run what rank 0 commands."""

from __future__ import annotations

from typing import Final

from mpidist._agreement.mismatch import ErrorKind, load_exception
from mpidist._base import nest
from mpidist._base.errors import CollectiveError, as_told, on_rank
from mpidist._base.types import Array, Nest
from mpidist._merge import commands, object_names
from mpidist._merge.updates import (
    UpdateBatch,
    check_update,
    describe,
    leaves_of,
    wrap,
)
from mpidist._runtime import context, dispatch
from mpidist._runtime.dispatch import OnRank0
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import Key, Registered, key_of
from mpidist._values.distributed import DistributedValues, own_component
from mpidist._values.variable import Variable

_WAITS: Final = "merge_call, waiting for merge_fn on rank 0"


def follow(
    group: ReplicaGroup, held: dict[Key, Registered], names: object_names.Names | None
) -> Nest:
    """Run rank 0's commands until merge_fn has ended; return this replica's part."""
    follower = Follower(group, held, names)
    try:
        return follower.follow()
    finally:
        # Again, since an exception from outside may come to the line that does so.
        group.guard.before_call = None
        group.guard.set_alone(False)
        follower.batch.leave()


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
        self.batch = UpdateBatch(group)
        self._waiting: list[bytes] = []  # read too early, by `_expect_check`

    def follow(self) -> Nest:
        """Run commands until merge_fn has ended; return this replica's part."""
        held, kept = self._held, self._registry.kept
        while True:
            try:
                data = self._waiting.pop() if self._waiting else self._receive()
            except MemoryError as error:  # rank 0 has raised it too, and decides
                self._failed(error)
                continue
            name, dropped, content = commands.read_command(data)
            if name == "update":
                self._update(content)
                if self.batch.communicates:
                    self._ends_batch()
            elif self._ends_batch():
                if name == "return":
                    return self._finish(content)
                if name not in ("join", "check", "raise"):
                    self._failed(self._obey(name, content))
            if name == "raise":
                pickled, trace = self._reader.read(content, [])
                rank = self._collectives.comm.rank
                raise as_told(remote_error(rank, pickled, trace, self._failure))
            for key in dropped:
                held.pop(key, None)
                kept.pop(key, None)

    def _receive(self) -> bytes:
        return self._collectives.messages.receive(_WAITS)

    def _expect_check(self) -> None:
        """Before the function of an update communicates: read that rank 0's does too.

        Raises:
            RuntimeError: if it does not.
        """
        guard = self._collectives.guard
        data = self._waiting.pop() if self._waiting else self._receive()
        name, *_ = commands.read_command(data)
        if name != "check":
            self._waiting.append(data)
            raise RuntimeError(
                "a function of `update` communicates on this rank, and not on rank 0; "
                "it has to make the same calls on all ranks"
            )
        guard.before_call = None
        guard.set_alone(False)
        self.batch.communicates = True

    def _ends_batch(self) -> bool:
        """Go to the join if a batch is open; return whether no update has raised."""
        if not self.batch.open:
            return True
        self._failure = self.batch.end()
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
        group, batch, guard = self._group, self.batch, self._group.guard
        batch.begin()
        kind: ErrorKind = "invalid"
        what = "an update"
        try:
            arrays = self._receive_arrays(content)
            if batch.failed:
                return
            self._failed(None)
            # Unpickling may run the user's code.
            with context.entered(group.cross_frame):
                operation = self._reader.read(content, arrays)
            var, fn, args, kwargs, grouped = operation
            what, kind = describe(var, fn), "raised"
            if check_update(var, fn, leaves_of(args, kwargs)):
                batch.keep()
            guard.before_call = self._expect_check
            guard.set_alone(True)
            result = batch.run(number, *operation)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            guard.set_alone(False)
            guard.interrupted("an update", error)
            if guard.broken:
                raise
            if not isinstance(error, CollectiveError):
                rank = self._collectives.comm.rank
                error.add_note(on_rank(rank, f"raised in {what}, called by merge_fn"))
            if batch.open:
                batch.fail(error, kind, what)
            else:  # without the guard
                self._failed(error)
            return
        finally:
            guard.before_call = None
            guard.set_alone(False)
        if result is not None and type(result) is not Variable:
            self._hold(wrap(group, result, number, grouped))

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
            with context.entered(group.cross_frame):
                try:
                    args = self._reader.read(content, arrays)
                except Exception as error:
                    collectives.invalid(f"the coordinator's {name}", error)
                result = dispatch.execute(group, name, args)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            collectives.guard.interrupted(name, error)
            if collectives.guard.broken:
                raise
            return error
        self._hold(result)
        for value in args:
            if isinstance(value, OnRank0) and isinstance(
                value.value, DistributedValues
            ):
                self._held[key_of(value.value)] = value.value
        return None

    def _hold(self, result: Nest) -> None:
        """Keep the values of a result, because rank 0 may refer to them."""
        for leaf in nest.flatten(result)[0]:
            if isinstance(leaf, DistributedValues):
                self._held[key_of(leaf)] = leaf
            elif isinstance(leaf, Variable):
                # Rank 0 may keep it for later merge_calls, like slots of an optimizer.
                self._registry.kept[key_of(leaf)] = leaf


def remote_error(
    rank: int, data: bytes, trace: str, failure: BaseException | None
) -> BaseException:
    """Return the exception of a follower if merge_fn has raised on rank 0."""
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
