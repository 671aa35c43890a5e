"""merge_call: rank 0 commands, the other ranks follow.

The protocol
------------
1. *Entry.* All ranks agree on the structure of the arguments (one header). Arrays and
   numbers become `PerReplica` handles; each rank keeps its component under the same
   key. Other objects are compared by a fingerprint that rides in the same header
   (`argument_equality`): equal ones stay as they are; if any differ, all ranks
   exchange the fingerprints, and those that differ become PerReplica of objects. The
   code of merge_fn is compared in the same way. Where it is the same, every rank looks
   which objects its merge_fn can reach: these have names (`object_names`).
2. *Commands.* Rank 0 runs merge_fn. Each cross-replica verb that it calls is one
   message to the followers: name and arguments, where what every rank has is named and
   not copied (`wire`). Then every rank runs the verb
   (`dispatch.execute`), which does its own agreement and moves its own data, and
   registers its results under the same keys. *Updates* are messages too, but rank 0
   does not wait for the others; they end together (`updates`).
3. *End.* The last message says what merge_fn returned or raised. Values that the
   ranks have are named by key, arrays that rank 0 made are broadcast from their
   buffers, PerReplica that rank 0 made are scattered, the rest is in the message.

When something fails
--------------------
- merge_fn raises: the last message carries the exception; all ranks raise.
- A verb fails: verbs fail on all ranks or on none (see `collectives`). Rank 0 raises
  inside merge_fn, which may catch it, so the followers keep quiet and wait for the
  next message. If merge_fn lets it through, they raise what they had, or rank 0's.
- An update fails on a follower: it waits at the join that ends the updates. Rank 0
  learns of it there, at the next message that is no update, or earlier: the join also
  comes when the messages since the last one fill the ring of the core, since a rank
  that waits there does not read them, and after a quarter of a second. Over MPI each
  update ends with a join, since messages are collective calls there.
- A follower can not even read a message (a function that is not importable there): it
  joins the verb's agreement with its error flag up.
- Rank 0 takes too long: the followers' wait for a message has the guard's deadline.

Memory: when rank 0 drops a handle, its key rides along with the next command, and the
followers drop theirs. At the end of the merge_call all are dropped.

Rejected: gathering the arguments on rank 0 (the one thing that this module avoids);
running merge_fn on every rank, as TensorFlow's multi-worker strategy does (side effects
happen N times, and code that looks at one replica's values diverges silently).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from mpidist import _native
from mpidist._agreement.mismatch import (
    ErrorKind,
    call_of,
    dump_exception,
    load_exception,
)
from mpidist._base import backend, nest
from mpidist._base.errors import CollectiveError, format_exception, on_rank
from mpidist._base.fingerprint import fingerprint_of_numbers
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._merge import object_names, wire
from mpidist._merge.argument_equality import likeness_of, print_of
from mpidist._merge.updates import Stretch, check_update, describe, wrap
from mpidist._runtime import context, dispatch
from mpidist._runtime.dispatch import OnRank0, check_arguments
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import Key
from mpidist._values.distributed import (
    DistributedValues,
    Mirrored,
    PerReplica,
    own_component,
)
from mpidist._values.synchronization import component_of
from mpidist._values.variable import Variable

_NO_ARGUMENTS: Final = nest.flatten(((), {}))[1]
_WITHOUT_ARGUMENTS: Final = call_of(f"merge_call {_NO_ARGUMENTS.render([])}")
_NUMBERS: Final = "biufc"  # kinds of dtypes
_RESERVE: Final = 256  # bytes of the ring, for a message that ends a stretch
_NO_NAMES: Final[dict[str, Any]] = {}
_WITH_FUNCTIONS: Final = {"update": "update", "call_for_each_replica": "run"}


class Coordinator:
    """Rank 0's side of one merge_call, while merge_fn runs.

    Args:
        group: of the merge_call.
        names: of what merge_fn can reach; None where nothing has a name.
    """

    def __init__(
        self, group: ReplicaGroup, names: object_names.Names | None = None
    ) -> None:
        self._group = group
        self._collectives = group.collectives
        self._registry = group.registry
        self._dropped: list[Key] = []
        self._fetched: list[weakref.ref[DistributedValues]] = []
        self._stretch = Stretch(group)
        self._writer = wire.Writer(group, self.key_of, names)
        # The others come to the next join by themselves. Also after an interrupt, when
        # `fail` ends the stretch.
        self._awaited = False

    def command(self, name: str, args: tuple[Any, ...]) -> Any:
        """Have all ranks run a verb; return rank 0's result.

        What a stretch of updates before it has raised on some rank is raised here, on
        all ranks, and the verb is not run.
        """
        if self._collectives.comm.size == 1:
            return self._execute(name, args)
        head, buffers = self._write(name, args)
        self._send("do", name, head, len(buffers))
        if self._stretch.open:
            self._join()
        if buffers:
            self._collectives.send_arrays(buffers, name)
        result = self._execute(name, args)
        self.watch(result)
        return result

    def update(
        self,
        var: Variable | None,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        grouped: bool,
    ) -> Any:
        """Have all ranks run an update; return rank 0's result.

        Rank 0 does not wait for the others, see `updates`.
        """
        check_arguments("update", args, kwargs)
        group = self._group
        writer = self._writer
        arguments = None if kwargs else writer.arguments(args)
        if arguments is None or not callable(fn):
            check_update(var, fn, nest.flatten((tuple(args), kwargs))[0])
        if self._collectives.comm.size == 1:
            return self._execute("update", (var, fn, args, kwargs, grouped))
        guard = self._collectives.guard
        stretch = self._stretch
        key = None if var is None else self.key_of(var)
        buffers: list[Any] = []
        function = None if arguments is None else writer.function(fn)
        if type(function) is not tuple:
            arguments = None
            function, buffers = self._write("update", (fn, tuple(args), kwargs))
        # Where messages are collective calls of MPI all ranks have to read them.
        last = not grouped or bool(buffers) or self._collectives.ring is None
        if stretch.open and buffers:
            self.settle()
        self._send("update", key, function, arguments, len(buffers), grouped, last)
        self._awaited = last
        number = self._registry.next_key()
        try:
            with guard.with_all_ranks():
                stretch.begin()
                if buffers:
                    self._collectives.send_arrays(buffers, "update")
                result = stretch.run(number, var, fn, args, kwargs, grouped)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.settle(error)
            raise
        if last:
            self._join()
        elif stretch.long:
            self.settle()
        if result is None or type(result) is Variable:
            return result
        result = wrap(group, result, number, grouped)
        self.watch(result)
        return result

    def _write(self, name: str, args: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        """Take the arguments of a verb apart; say which one can not be sent."""
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
                f"{call}: {culprit} which can not be sent to the other ranks: {why}. "
                "Make it on every rank, before `merge_call`, and let merge_fn close "
                "over it: then each rank uses its own; or make it in the function that "
                f"`{call}` runs"
            ) from error

    def _take_dropped(self) -> list[Key]:
        """Return the keys of what rank 0 has dropped and the others still keep."""
        dropped: list[Key] = []
        if not self._dropped and not self._registry.dropped:
            return dropped
        for waiting in (self._dropped, self._registry.dropped):
            if waiting:
                count = len(waiting)
                dropped += waiting[:count]
                del waiting[:count]  # in place: finalizers append to these lists
        return dropped

    def _send(self, kind: str, *body: Any) -> None:
        """Send a message; end a stretch before, where the others might not read it."""
        collectives = self._collectives
        guard, stretch = collectives.guard, self._stretch
        with guard.with_all_ranks():
            guard.check_late()
        dropped = self._take_dropped() if kind != "return" else []
        news = self._writer.take_news()
        data = wire.dump((stretch.joins, kind, dropped, news, *body))
        ring = collectives.ring
        if stretch.open and ring is not None:
            # Who waits at the join does not read: what is sent until then must fit.
            used = ring.moved - stretch.ring_start + _RESERVE
            core = _native.core
            long = len(data) >= core.MESSAGE_BYTES
            if long or used + len(data) > core.RING_BYTES:
                try:
                    self.settle()
                except BaseException:
                    self._dropped += dropped
                    self._writer.return_news(news)
                    raise
                data = wire.dump((stretch.joins, kind, dropped, news, *body))
        if stretch.open:
            collectives.send_bytes(data)
            guard.uncount()
        else:
            if ring is not None:
                stretch.ring_start = ring.moved
            collectives.send_bytes(data)

    def settle(self, error: BaseException | None = None) -> None:
        """End a stretch of updates on all ranks; raise what it has raised on any.

        Args:
            error: what rank 0's own function has raised, which it goes on raising.
        """
        if self._stretch.open:
            if not self._awaited:
                data = wire.dump((self._stretch.joins, "settle", (), ()))
                self._collectives.send_bytes(data)
                self._collectives.guard.uncount()
            self._join(error)

    def _join(self, error: BaseException | None = None) -> None:
        guard = self._collectives.guard
        with guard.with_all_ranks():
            found = self._stretch.end(error)
            self._awaited = False
        if found is not None and found is not error:
            raise found

    def _execute(self, name: str, args: tuple[Any, ...]) -> Any:
        frame = self._group.cross_frame
        with self._collectives.guard.with_all_ranks(), context.entered(frame):
            return dispatch.execute(self._group, name, args)

    def fetch(self, values: list[DistributedValues]) -> None:
        """Gather the components of these values to rank 0, where not known."""
        unknown = [v for v in values if v._all is None and not isinstance(v, Mirrored)]
        if unknown:
            columns = self.command("collect", (unknown,))
            for value, column in zip(unknown, columns, strict=True):
                value._all = tuple(column)
                self._fetched.append(weakref.ref(value))

    def finish(self, result: Any) -> list[Any]:
        """Send what merge_fn has returned; return the arrays that have to follow."""
        head = result
        buffers: list[Any] = []
        if type(result) not in wire.ATOMS:
            head, buffers = self._writer.write(result, named=False)
        self._send("return", head, len(buffers))
        if self._stretch.open:
            self._join()
        return buffers

    def fail(self, error: BaseException) -> None:
        """Tell the others what merge_fn has raised."""
        try:
            self.settle()
        except BaseException:
            # Of an update, which merge_fn has not heard of: what it raises counts.
            if self._collectives.guard.broken:
                raise
        if not self._collectives.guard.broken:
            data, trace = dump_exception(error), format_exception(error)
            message = (self._stretch.joins, "raise", (), (), data, trace)
            self._collectives.send_bytes(wire.dump(message))

    def close(self) -> None:
        """Forget what was gathered: the arrays may change until the next merge_call."""
        if self._stretch.open:
            self._stretch.leave()
        self._writer.close()
        for reference in self._fetched:
            if (value := reference()) is not None:
                value._all = None

    def watch(self, tree: Any) -> None:
        """Tell the followers when rank 0 drops one of these values."""
        for leaf in () if tree is None else nest.flatten(tree)[0]:
            if isinstance(leaf, DistributedValues):
                self._registry.watch(leaf, self._dropped)

    def watch_all(self, values: dict[Key, Any]) -> None:
        """As `watch`, for values by their keys."""
        for value in values.values():
            self._registry.watch(value, self._dropped)

    def key_of(self, value: Any) -> Key:
        """Return the key under which every rank has this value.

        A PerReplica that rank 0 made is scattered first.

        Raises:
            ValueError: for a value that the other ranks do not have.
        """
        key: Key = value._key
        if key is not None and self._registry.get(key) is value:
            return key
        if isinstance(value, DistributedValues) and value._all is not None:
            if isinstance(value, Mirrored):
                _check_mirrored(value)
            self.command("scatter", (OnRank0(value), isinstance(value, Mirrored)))
            self.watch(value)
            return value._key
        raise _NotThereError(
            f"merge_fn uses {value!r:.200}, which the other ranks do not have (any "
            "more): it belongs to a `merge_call` that has ended, or was made on rank "
            "0 alone. Pass it to `merge_call` as an argument"
        )


class _NotThereError(ValueError):
    """Rank 0 refers to a value that the others do not have."""


def _check_mirrored(value: Mirrored) -> None:
    """Raise for a Mirrored that merge_fn made of components that differ."""
    arrays = [backend.as_array(x, "Mirrored")[0] for x in value._all or ()]
    if len({backend.describe(x) + backend.summarize(x) for x in arrays}) > 1:
        raise ValueError(
            f"merge_fn made a Mirrored of components that differ: {value!r:.200}; "
            "write `mpidist.PerReplica(...)` for a value of each replica's own"
        )


# --- one merge_call, from all sides -------------------------------------------------


def merge_call(
    group: ReplicaGroup,
    merge_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run ``merge_fn`` on rank 0; return this replica's part of its result.

    Collective.
    """
    collectives = group.collectives
    arguments, held, names = _enter(group, merge_fn, args, kwargs)
    if collectives.comm.rank == 0:
        coordinator = Coordinator(group, names)
        if held:
            coordinator.watch_all(held)
            held.clear()  # merge_fn alone keeps its arguments
        return _lead(group, merge_fn, arguments, coordinator)
    del arguments
    return _follow(group, held, names)


_Entered = tuple[list[Any], dict[Key, Any], object_names.Names | None]


def _enter(
    group: ReplicaGroup,
    merge_fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Entered:
    """Agree on the arguments.

    Returns:
        The arguments as merge_fn sees them, the handles among them, and the names of
        what merge_fn can reach.
    """
    collectives = group.collectives
    registry = group.registry
    if not (args or kwargs) and callable(merge_fn):
        alike = collectives.guard.agree_softly(_WITHOUT_ARGUMENTS, print_of(merge_fn))
        registry.next_key()
        names = _names_of(group, merge_fn, []) if alike else None
        return [((), {})], {}, names
    try:
        if not callable(merge_fn):
            raise TypeError(
                f"merge_call: expected `merge_fn` to be a function, got {merge_fn!r}"
            )
        leaves, structure = nest.flatten((args, kwargs))
        kinds = [
            "component"
            if type(leaf) is np.ndarray and leaf.dtype.kind in _NUMBERS
            else _kind_of(leaf, group)
            for leaf in leaves
        ]
        prints = [print_of(merge_fn)]
        objects = [i for i, kind in enumerate(kinds) if kind == "object"]
        if objects:
            known = group.public_objects
            prints += [
                likeness_of(leaves[i], _argument(args, kwargs, i), known)
                for i in objects
            ]
    except Exception as error:
        collectives.invalid("merge_call", error)
    combined = fingerprint_of_numbers(prints) if objects else prints[0]
    call = call_of(f"merge_call {structure.render(kinds)}")
    alike = collectives.guard.agree_softly(call, combined)
    different: set[int] = set()
    if not alike and objects:
        rows = collectives.comm.all_gather_integers(prints)
        same = [len({*column}) == 1 for column in zip(*rows, strict=True)]
        alike = same[0]
        different = {i for i, one in zip(objects, same[1:], strict=True) if not one}
    number = registry.next_key()
    held: dict[Key, Any] = {}
    seen = []
    given = []
    for index, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
        if kind == "component" or index in different:
            key = (number, index)
            leaf = registry.wrap(PerReplica, own_component(leaf), key)
            held[key] = leaf
        elif kind == "object" and type(leaf) not in wire.ATOMS:
            given.append((index, leaf))
        seen.append(leaf)
    names = _names_of(group, merge_fn, given) if alike else None
    # In a list, so that who takes them out is the only one to keep them.
    return [structure.unflatten(seen)], held, names


def _names_of(
    group: ReplicaGroup, merge_fn: Any, given: list[tuple[int, Any]]
) -> object_names.Names | None:
    """Return the names of what merge_fn can reach, and of arguments that are alike."""
    if group.collectives.comm.size == 1:
        return None
    if not (given or object_names.may_reach(merge_fn)):
        return None
    roots = [("merge_fn", merge_fn)]
    roots += [(f"argument {index} of merge_call", leaf) for index, leaf in given]
    known = group.public_objects
    return object_names.Names(roots, object_names.home_of(merge_fn), known)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> str:
    """Return which argument the leaf with this number is of, for messages."""
    named = [(f"args[{i}]", x) for i, x in enumerate(args)]
    named += [(f"kwargs[{key!r}]", kwargs[key]) for key in sorted(kwargs)]
    for name, part in named:
        leaves = nest.flatten(part)[0]
        if number < len(leaves):
            return name if len(leaves) == 1 else f"{name}, leaf {number}"
        number -= len(leaves)
    return "of merge_call"


def _kind_of(leaf: Any, group: ReplicaGroup) -> str:
    """Return what becomes of an argument; the same text on all ranks, or a mismatch."""
    if isinstance(leaf, Variable):
        if leaf._group is not group:
            raise ValueError(
                f"merge_call: {leaf!r} belongs to {leaf._group}, not to {group}"
            )
        return f"Variable {leaf.name!r} #{leaf._key}"
    if isinstance(leaf, (DistributedValues, IndexedSlices)):
        return "component"
    if backend.is_array(leaf) or backend.is_number(leaf):
        backend.as_array(leaf, "merge_call")
        return "component"
    return "object"


def _lead(
    group: ReplicaGroup,
    merge_fn: Callable[..., Any],
    arguments: list[Any],
    coordinator: Coordinator,
) -> Any:
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
            parts = [_part_of(leaf, coordinator) for leaf in leaves]
            if several:
                buffers = coordinator.finish(structure.unflatten(parts))
    except BaseException as error:
        if several and not collectives.guard.broken:
            coordinator.fail(error)
        raise
    finally:
        coordinator.close()
    if several and buffers:
        collectives.send_arrays(buffers, "merge_call")
    return structure.unflatten([_own_result(leaf) for leaf in leaves])


def _own_result(leaf: Any) -> Any:
    """Return rank 0's part: of an array a copy, since merge_fn may go on using it."""
    return leaf.copy() if backend.is_array(leaf) else own_component(leaf)


def _part_of(leaf: Any, coordinator: Coordinator) -> Any:
    """Return a leaf of merge_fn's result in the form in which it travels."""
    if isinstance(leaf, Mirrored) and (
        leaf._key is None or coordinator._registry.get(leaf._key) is not leaf
    ):
        return leaf._own
    return leaf


def _follow(
    group: ReplicaGroup, held: dict[Key, Any], names: object_names.Names | None
) -> Any:
    """Run what rank 0 commands until it says that merge_fn has ended."""
    follower = _Follower(group, held, names)
    try:
        return follower.follow()
    finally:
        follower.stretch.leave()


class _Follower:
    """Another rank's side of one merge_call."""

    def __init__(
        self,
        group: ReplicaGroup,
        held: dict[Key, Any],
        names: object_names.Names | None,
    ) -> None:
        self._group = group
        self._collectives = group.collectives
        self._registry = group.registry
        self._reader = wire.Reader(group, names)
        self._held = held
        # What the last command has raised here. Rank 0 has raised it too.
        self._failure: BaseException | None = None
        self.stretch = Stretch(group)

    def follow(self) -> Any:
        collectives, stretch = self._collectives, self.stretch
        guard = collectives.guard
        held, kept = self._held, self._registry.kept
        while True:
            try:
                data = collectives.receive_bytes(
                    "merge_call, waiting for merge_fn on rank 0", timeout=None
                )
            except MemoryError as error:  # rank 0 has raised it too, and decides
                self._failed(error)
                continue
            joins, kind, dropped, news, *body = wire.load(data)
            if news:
                self._reader.receive_news(news)
            # From before a join to which this rank came early: rank 0 has dropped it.
            stale = joins < stretch.joins
            if stale or stretch.open:
                guard.uncount()
            if kind == "update":
                self._update(stale, *body)
            elif not stale:
                failed = False
                if stretch.open:
                    self._failure = stretch.end()
                    failed = self._failure is not None
                if kind == "do" and not failed:
                    self._failed(self._obey(*body))
                elif kind == "return" and not failed:
                    return self._finish(*body)
                elif kind == "raise":
                    pickled, trace = body
                    rank = collectives.comm.rank
                    raise remote_error(rank, pickled, trace, self._failure)
            for key in dropped:
                held.pop(key, None)
                kept.pop(key, None)

    def _finish(self, head: Any, num_arrays: int) -> Any:
        """Return this replica's part of what merge_fn has returned."""
        arrays = self._collectives.receive_arrays() if num_arrays else []
        if self._failure is not None and not self._collectives.guard.enabled:
            raise self._failure  # nobody else knows
        if type(head) is not tuple:
            return head
        result = self._reader.read(head, arrays)
        return nest.map_structure(own_component, result)

    def _update(
        self,
        stale: bool,
        key: Key | None,
        function: Any,
        arguments: Any,
        num_arrays: int,
        grouped: bool,
        last: bool,
    ) -> None:
        """Run an update, or drop it: its result is counted in both cases."""
        number = self._registry.next_key()
        if stale:
            return
        group, stretch = self._group, self.stretch
        stretch.begin()
        var = fn = None
        kind: ErrorKind = "invalid"
        self._failed(None)
        try:
            arrays = self._collectives.receive_arrays() if num_arrays else []
            var = None if key is None else wire.value_of(key, group)
            if arguments is None:
                fn, args, kwargs = self._read(function, arrays)
            else:
                fn, kwargs = self._read(function, arrays), _NO_NAMES
                args = self._reader.arguments(arguments)
            kind = "raised"
            result = stretch.run(number, var, fn, args, kwargs, grouped)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if self._collectives.guard.broken:
                raise
            what = "an update" if kind == "invalid" else describe(var, fn)
            if isinstance(error, CollectiveError):
                kind = "agreed"
            else:
                rank = self._collectives.comm.rank
                error.add_note(on_rank(rank, f"raised in {what}, called by merge_fn"))
            self._failed(stretch.end(error, kind, what))
            return
        if result is not None and type(result) is not Variable:
            self._hold(wrap(group, result, number, grouped))
        if last and stretch.open:
            self._failed(stretch.end())

    def _read(self, head: Any, arrays: list[Any]) -> Any:
        if head[0] == "fn":
            return self._reader.read(head, arrays)
        # What is unpickled may be the user's code.
        with context.entered(self._group.cross_frame):
            return self._reader.read(head, arrays)

    def _failed(self, error: BaseException | None) -> None:
        """Note what the last command has raised here."""
        # With the guard off the first one: rank 0 goes on, and does not know.
        if self._failure is None or self._collectives.guard.enabled:
            self._failure = error

    def _obey(self, name: str, head: Any, num_arrays: int) -> BaseException | None:
        """Run one command. What it raises, rank 0 has raised too, and decides about."""
        group, collectives = self._group, self._collectives
        try:
            arrays = collectives.receive_arrays() if num_arrays else []
            with context.entered(group.cross_frame):
                try:
                    args = self._reader.read(head, arrays)
                except Exception as error:
                    collectives.invalid(f"the coordinator's {name}", error)
                result = dispatch.execute(group, name, args)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if collectives.guard.broken:
                raise
            return error
        self._hold(result)
        for value in args:
            if isinstance(value, OnRank0) and isinstance(
                value.value, DistributedValues
            ):
                self._held[value.value._key] = value.value
        return None

    def _hold(self, result: Any) -> None:
        """Keep the values of a result, to which rank 0 may refer."""
        for leaf in nest.flatten(result)[0]:
            if isinstance(leaf, DistributedValues):
                self._held[leaf._key] = leaf
            elif isinstance(leaf, Variable):
                # Rank 0 may keep it for later merge_calls, as an optimizer its slots.
                self._registry.kept[leaf._key] = leaf


def remote_error(
    rank: int, data: bytes, trace: str, failure: BaseException | None
) -> BaseException:
    """Return what a follower raises when merge_fn has raised on rank 0."""
    error = load_exception(data, trace)
    own = failure is not None and not isinstance(failure, CollectiveError)
    if own and isinstance(error, CollectiveError) and failure is not None:
        return failure  # it was this rank's own function that failed
    if error is None:
        last = trace.strip().splitlines()[-1] if trace.strip() else "unknown"
        return CollectiveError(
            f"[rank {rank}] merge_fn raised on rank 0: {last}\n{trace}"
        )
    error.add_note(f"[rank {rank}] merge_fn raised this on rank 0, as shown above")
    return error


# --- the verbs that only the coordinator needs ----------------------------------------


@dispatch.verb("collect")
def _collect(group: ReplicaGroup, values: list[DistributedValues]) -> Any:
    """Return the components of values: on rank 0, a column for each value."""
    collectives = group.collectives
    own = [component_of(value) for value in values]
    rows = collectives.collect(own, "experimental_local_results")
    return [list(column) for column in zip(*rows, strict=True)]


@dispatch.verb("scatter")
def _scatter(group: ReplicaGroup, marked: OnRank0, mirrored: bool) -> None:
    """Give each rank its component of a value that rank 0 made."""
    collectives = group.collectives
    registry = group.registry
    value = marked.value
    rows = None if value is None else [[component] for component in value._all]
    (own,) = collectives.scatter(rows, "scatter a PerReplica of the coordinator")
    key = (registry.next_key(), 0)
    if value is None:
        marked.value = registry.wrap(Mirrored if mirrored else PerReplica, own, key)
    else:
        registry.add(key, value)
