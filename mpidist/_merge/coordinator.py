"""Rank 0's side of a merge_call: it runs merge_fn, and commands the other ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from mpidist import _native
from mpidist._agreement.mismatch import describe_exception, dump_exception
from mpidist._base import backend, checksums, nest
from mpidist._base.errors import as_told
from mpidist._base.types import Array, Nest
from mpidist._merge import object_names, wire
from mpidist._merge.updates import UpdateBatch, check_update, has_own_arguments, wrap
from mpidist._runtime import context, dispatch
from mpidist._runtime.dispatch import OnRank0, check_arguments
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import (
    Key,
    Registered,
    component,
    gathered,
    key_of,
    set_gathered,
)
from mpidist._values.distributed import DistributedValues, Mirrored, own_component
from mpidist._values.variable import Variable

Arguments: TypeAlias = tuple[Sequence[Nest], Mapping[str, Nest]]
"""The positional and the keyword arguments of a function."""

_RESERVE: Final = 256  # bytes of the ring, for a message that ends a batch
_WITH_FUNCTIONS: Final = {"update": "update", "call_for_each_replica": "run"}


class Coordinator:
    """Rank 0's side of one merge_call, while merge_fn runs.

    Args:
        group: the ranks.
        names: the names of what merge_fn can reach; None if nothing has a name.
    """

    def __init__(
        self, group: ReplicaGroup, names: object_names.Names | None = None
    ) -> None:
        self._group = group
        self._collectives = group.collectives
        self._messages = group.collectives.messages
        self._registry = group.registry
        self._dropped: list[Key] = []
        self._fetched: list[weakref.ref[DistributedValues]] = []
        self._batch = UpdateBatch(group)
        self._writer = wire.Writer(group, self.key_of, names)
        # Whether the others come to the next join without a message; also after an
        # interrupt, when `fail` ends the batch.
        self._awaited = False

    def command(self, name: str, args: tuple[Any, ...]) -> Any:
        """Run an operation on all ranks; return rank 0's result.

        If a batch of updates before it has raised on some rank, this raises on all
        ranks, and the operation is not run.
        """
        if self._collectives.comm.size == 1:
            return self._execute(name, args)
        plain, buffers = self._write(name, args)
        self._send("do", name, plain, len(buffers))
        if self._batch.open:
            self._join()
        if buffers:
            self._collectives.send_arrays(buffers, name)
        result = self._execute(name, args)
        self.watch(result)
        return result

    def update(
        self,
        var: Variable | None,
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
        grouped: bool,
    ) -> Nest:
        """Run an update on all ranks; return rank 0's result.

        Rank 0 does not wait for the others, see `updates`.
        """
        check_arguments("update", args, kwargs)
        group = self._group
        writer = self._writer
        arguments = None if kwargs else writer.arguments(args)
        keep = False
        if arguments is None or not callable(fn):
            leaves = nest.flatten((tuple(args), kwargs))[0]
            check_update(var, fn, leaves)
            keep = has_own_arguments(leaves)
        if self._collectives.comm.size == 1:
            return self._execute("update", (var, fn, args, kwargs, grouped))
        guard = self._collectives.guard
        batch = self._batch
        key = None if var is None else self.key_of(var)
        buffers: list[Array] = []
        function = None if arguments is None else writer.function(fn)
        if type(function) is not tuple:
            arguments = None
            function, buffers = self._write("update", (fn, tuple(args), kwargs))
        # If messages are collective calls of MPI, all ranks have to read each of them.
        last = not grouped or keep or bool(buffers) or self._messages.ring is None
        if batch.open and (buffers or keep):
            self.end_updates()
        fields = (key, function, arguments, len(buffers), grouped, keep, last)
        self._send("update", *fields)
        self._awaited = last
        number = self._registry.next_key()
        try:
            with guard.with_all_ranks():
                batch.begin()
                if keep:
                    batch.keep()
                if buffers:
                    self._collectives.send_arrays(buffers, "update")
                result = batch.run(number, var, fn, args, kwargs, grouped)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.end_updates(error)
            raise
        if last:
            self._join()
        elif batch.long:
            self.end_updates()
        if result is None or type(result) is Variable:
            return result
        result = wrap(group, result, number, grouped)
        self.watch(result)
        return result

    def _write(
        self, name: str, args: tuple[Any, ...]
    ) -> tuple[wire.Plain, list[Array]]:
        """Convert the arguments of an operation; name one that cannot be sent."""
        try:
            return self._writer.write(args)
        except _NotThereError:
            raise
        except Exception as error:
            if name not in _WITH_FUNCTIONS or self._collectives.guard.broken:
                raise
            call = _WITH_FUNCTIONS[name]
            culprit = self._writer.culprit(*args[-3:])
            if not culprit:
                raise
            why = str(error).rstrip(".")
            raise TypeError(
                f"{call}: {culprit} which cannot be sent to the other ranks: {why}. "
                "Make it on every rank, before `merge_call`, and let merge_fn close "
                "over it: then each rank uses its own; or make it in the function that "
                f"`{call}` runs"
            ) from error

    def _take_dropped(self) -> list[Key]:
        """Return the keys of values that rank 0 has dropped and the others keep."""
        dropped: list[Key] = []
        if not self._dropped and not self._registry.dropped:
            return dropped
        for waiting in (self._dropped, self._registry.dropped):
            if waiting:
                count = len(waiting)
                dropped += waiting[:count]
                del waiting[:count]  # in place: finalizers append to these lists
        return dropped

    def _send(self, kind: wire.Kind, *body: wire.Plain) -> None:
        """Send a message; first end the batch if the others might not read it."""
        messages, guard, batch = self._messages, self._collectives.guard, self._batch
        with guard.with_all_ranks():
            guard.check_late()
        dropped = self._take_dropped() if kind != "return" else []
        news = self._writer.take_news()
        data = wire.dump(batch.joins, kind, *body, dropped=dropped, news=news)
        ring = messages.ring
        if batch.open and ring is not None:
            # A rank at the join does not read: all messages until then must fit.
            used = ring.moved - batch.ring_start + _RESERVE
            core = _native.core
            long = len(data) >= core.MESSAGE_BYTES
            if long or used + len(data) > core.RING_BYTES:
                try:
                    self.end_updates()
                except BaseException:
                    self._dropped += dropped
                    self._writer.return_news(news)
                    raise
                data = wire.dump(batch.joins, kind, *body, dropped=dropped, news=news)
        if batch.open:
            messages.send(data)
            guard.uncount()
        else:
            if ring is not None:
                batch.ring_start = ring.moved
            messages.send(data)

    def end_updates(self, error: BaseException | None = None) -> None:
        """End a batch of updates on all ranks; raise if it has raised on any rank.

        Args:
            error: the exception of rank 0's own function, which the caller re-raises.
        """
        if self._batch.open:
            if not self._awaited:
                data = wire.dump(self._batch.joins, "join")
                self._messages.send(data)
                self._collectives.guard.uncount()
            self._join(error)

    def _join(self, error: BaseException | None = None) -> None:
        guard = self._collectives.guard
        with guard.with_all_ranks():
            found = self._batch.end(error)
            self._awaited = False
        if found is not None and found is not error:
            raise found

    def _execute(self, name: str, args: tuple[Any, ...]) -> Any:
        frame = self._group.cross_frame
        with self._collectives.guard.with_all_ranks(), context.entered(frame):
            return dispatch.execute(self._group, name, args)

    def fetch(self, values: list[DistributedValues]) -> None:
        """Gather the unknown components of these values to rank 0."""
        unknown = [
            v for v in values if gathered(v) is None and not isinstance(v, Mirrored)
        ]
        if unknown:
            columns = self.command("collect", (unknown,))
            for value, column in zip(unknown, columns, strict=True):
                set_gathered(value, tuple(column))
                self._fetched.append(weakref.ref(value))

    def finish(self, result: Nest) -> list[Array]:
        """Send the result of merge_fn; return the arrays that have to follow."""
        plain = result
        buffers: list[Array] = []
        if type(result) not in wire.ATOMS:
            plain, buffers = self._writer.write(result, named=False)
        self._send("return", plain, len(buffers))
        if self._batch.open:
            self._join()
        return buffers

    def fail(self, error: BaseException) -> None:
        """Send the exception of merge_fn."""
        try:
            self.end_updates()
        except BaseException:
            # An update has raised, which merge_fn did not know: its exception counts.
            if self._collectives.guard.broken:
                raise
        if not self._collectives.guard.broken:
            data, trace = dump_exception(error), describe_exception(error)
            message = wire.dump(self._batch.joins, "raise", data, trace)
            self._messages.send(message)

    def close(self) -> None:
        """Drop gathered components: the arrays may change until the next merge_call."""
        if self._batch.open:
            self._batch.leave()
        self._writer.close()
        for reference in self._fetched:
            if (value := reference()) is not None:
                set_gathered(value, None)

    def watch(self, tree: Nest) -> None:
        """Tell the followers when rank 0 drops one of these values."""
        for leaf in () if tree is None else nest.flatten(tree)[0]:
            if isinstance(leaf, DistributedValues):
                self._registry.watch(leaf, self._dropped)

    def watch_all(self, values: dict[Key, Registered]) -> None:
        """Watch values by their keys."""
        for value in values.values():
            self._registry.watch(value, self._dropped)

    def key_of(self, value: Registered) -> Key:
        """Return the key under which every rank has this value.

        A PerReplica that rank 0 has created is scattered first.

        Raises:
            ValueError: if the other ranks do not have the value.
        """
        key = key_of(value)
        if key is not None and self._registry.get(key) is value:
            return key
        if isinstance(value, DistributedValues) and gathered(value) is not None:
            if isinstance(value, Mirrored):
                _check_mirrored(value)
            self.command("scatter", (OnRank0(value), isinstance(value, Mirrored)))
            self.watch(value)
            return key_of(value)
        raise _NotThereError(
            f"merge_fn uses {value!r:.200}, which the other ranks do not have: it "
            "belongs to a `merge_call` that has ended, or was made on rank 0 alone. "
            "Pass it to `merge_call` as an argument"
        )


class _NotThereError(ValueError):
    """Rank 0 refers to a value that the others do not have."""


def _check_mirrored(value: Mirrored) -> None:
    """Raise if merge_fn has created a Mirrored of components that differ."""
    arrays = [backend.as_array(x, "Mirrored")[0] for x in gathered(value) or ()]
    if len({backend.describe(x) + checksums.summarize(x) for x in arrays}) > 1:
        raise ValueError(
            f"merge_fn made a Mirrored of components that differ: {value!r:.200}; "
            "write `mpidist.PerReplica(...)` for a value of each replica's own"
        )


def lead(
    group: ReplicaGroup,
    merge_fn: Callable[..., Nest],
    arguments: list[Arguments],
    coordinator: Coordinator,
) -> Nest:
    """Run merge_fn for all ranks; return rank 0's part of its result. Collective.

    Args:
        group: the ranks.
        merge_fn: the function.
        arguments: its arguments, in a list that this empties.
        coordinator: commands the others.
    """
    collectives = group.collectives
    args, kwargs = arguments.pop()
    frame = context.Frame(group, context.Level.COORDINATOR, coordinator=coordinator)
    several = collectives.comm.size > 1
    try:
        with context.entered(frame):
            with collectives.guard.in_merge_fn():
                result = merge_fn(group.strategy, *args, **kwargs)
            del args, kwargs
            if type(result) in wire.ATOMS:
                if several:
                    coordinator.finish(result)
                return result
            leaves, structure = nest.flatten(result)
            parts = [_part_of(leaf, group) for leaf in leaves]
            if several:
                buffers = coordinator.finish(structure.unflatten(parts))
    except BaseException as error:
        if several:
            collectives.guard.set_alone(False)  # an exception in `with` may leave it on
            collectives.guard.interrupted("merge_call", error)
            if not collectives.guard.broken:
                coordinator.fail(error)
                as_told(error)
        raise
    finally:
        coordinator.close()
    if several and buffers:
        collectives.send_arrays(buffers, "merge_call")
    return structure.unflatten([_own_result(leaf) for leaf in leaves])


def _own_result(leaf: Nest) -> Nest:
    """Return rank 0's part: a copy of an array, since the program may keep using it."""
    if backend.is_array(leaf):
        return backend.copied(leaf, "merge_call")
    return own_component(leaf)


def _part_of(leaf: Nest, group: ReplicaGroup) -> Nest:
    """Return a leaf of merge_fn's result in the form in which it is sent."""
    if isinstance(leaf, Mirrored) and (
        (key := key_of(leaf)) is None or group.registry.get(key) is not leaf
    ):
        return component(leaf)
    return leaf
