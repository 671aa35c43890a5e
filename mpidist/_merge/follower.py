"""The other ranks' side of a merge_call: they run what rank 0 commands."""

from __future__ import annotations

from typing import Any, Final

from mpidist._agreement.mismatch import ErrorKind, load_exception
from mpidist._base import nest
from mpidist._base.errors import CollectiveError, as_told, on_rank
from mpidist._base.types import Array, Nest
from mpidist._merge import object_names, wire
from mpidist._merge.updates import UpdateBatch, describe, wrap
from mpidist._runtime import context, dispatch
from mpidist._runtime.dispatch import OnRank0
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import Key, Registered, key_of
from mpidist._values.distributed import DistributedValues, own_component
from mpidist._values.variable import Variable

_NO_KEYWORDS: Final[dict[str, Any]] = {}


def follow(
    group: ReplicaGroup, held: dict[Key, Registered], names: object_names.Names | None
) -> Nest:
    """Run rank 0's commands until merge_fn has ended; return this replica's part."""
    follower = Follower(group, held, names)
    try:
        return follower.follow()
    finally:
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
        self._reader = wire.Reader(group, names)
        self._held = held
        # The exception of the last command on this rank. Rank 0 has raised it too.
        self._failure: BaseException | None = None
        self.batch = UpdateBatch(group)

    def follow(self) -> Nest:
        """Run commands until merge_fn has ended; return this replica's part."""
        collectives, batch = self._collectives, self.batch
        guard, messages = collectives.guard, collectives.messages
        held, kept = self._held, self._registry.kept
        while True:
            try:
                data = messages.receive(
                    "merge_call, waiting for merge_fn on rank 0", timeout=None
                )
            except MemoryError as error:  # rank 0 has raised it too, and decides
                self._failed(error)
                continue
            joins, kind, dropped, news, *body = wire.load(data)
            if news:
                self._reader.receive_news(news)
            # Sent before a join that this rank has passed already: it does not count.
            stale = joins < batch.joins
            if stale or batch.open:
                guard.uncount()
            if kind == "update":
                self._update(stale, *body)
            elif not stale:
                failed = False
                if batch.open:
                    self._failure = batch.end()
                    failed = self._failure is not None
                if kind == "do" and not failed:
                    self._failed(self._obey(*body))
                elif kind == "return" and not failed:
                    return self._finish(*body)
                elif kind == "raise":
                    pickled, trace = body
                    rank = collectives.comm.rank
                    failure = remote_error(rank, pickled, trace, self._failure)
                    raise as_told(failure)
            for key in dropped:
                held.pop(key, None)
                kept.pop(key, None)

    def _finish(self, result: wire.Plain, num_arrays: int) -> Nest:
        """Return this replica's part of the result of merge_fn."""
        arrays = self._collectives.receive_arrays() if num_arrays else []
        if self._failure is not None and not self._collectives.guard.enabled:
            raise self._failure  # no other rank knows of it
        if type(result) is not tuple:
            return result
        return nest.map_structure(own_component, self._reader.read(result, arrays))

    def _update(
        self,
        stale: bool,
        key: Key | None,
        function: wire.Plain,
        arguments: list[tuple[bool, wire.Plain]] | None,
        num_arrays: int,
        grouped: bool,
        keep: bool,
        last: bool,
    ) -> None:
        """Run an update, or discard it if it is stale; count its result in both cases.

        After ``stale`` come the fields of the message, in its order (see `wire`).
        """
        number = self._registry.next_key()
        if stale:
            return
        group, batch = self._group, self.batch
        batch.begin()
        if keep:
            batch.keep()
        var = fn = None
        kind: ErrorKind = "invalid"
        self._failed(None)
        try:
            arrays = self._collectives.receive_arrays() if num_arrays else []
            var = None if key is None else wire.value_of(key, group)
            if arguments is None:
                fn, args, kwargs = self._read(function, arrays)
            else:
                fn, kwargs = self._read(function, arrays), _NO_KEYWORDS
                args = self._reader.arguments(arguments)
            kind = "raised"
            result = batch.run(number, var, fn, args, kwargs, grouped)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._collectives.guard.interrupted("an update", error)
            if self._collectives.guard.broken:
                raise
            what = "an update" if kind == "invalid" else describe(var, fn)
            if isinstance(error, CollectiveError):
                kind = "agreed"
            else:
                rank = self._collectives.comm.rank
                error.add_note(on_rank(rank, f"raised in {what}, called by merge_fn"))
            self._failed(batch.end(error, kind, what))
            return
        if result is not None and type(result) is not Variable:
            self._hold(wrap(group, result, number, grouped))
        if last and batch.open:
            self._failed(batch.end())

    def _read(self, function: wire.Plain, arrays: list[Array]) -> Any:
        if function[0] == "fn":
            return self._reader.read(function, arrays)
        # Unpickling may run the user's code.
        with context.entered(self._group.cross_frame):
            return self._reader.read(function, arrays)

    def _failed(self, error: BaseException | None) -> None:
        """Store the exception of the last command on this rank."""
        # With the guard off, keep the first one: rank 0 does not know, and goes on.
        if self._failure is None or self._collectives.guard.enabled:
            self._failure = error

    def _obey(
        self, name: str, arguments: wire.Plain, num_arrays: int
    ) -> BaseException | None:
        """Run one command; return its exception.

        Rank 0 has raised it too, and decides what happens.
        """
        group, collectives = self._group, self._collectives
        try:
            arrays = collectives.receive_arrays() if num_arrays else []
            with context.entered(group.cross_frame):
                try:
                    args = self._reader.read(arguments, arrays)
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
