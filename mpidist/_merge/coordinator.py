"""Rank 0's side of a merge_call: it runs merge_fn, and commands the other ranks."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpidist._agreement.mismatch import describe_exception, dump_exception
from mpidist._base import backend, checksums, nest
from mpidist._base.errors import as_told
from mpidist._base.types import Array, Nest
from mpidist._merge import commands, object_names, object_parts
from mpidist._merge.updates import Update, UpdateBatch, run_update
from mpidist._runtime import context, dispatch
from mpidist._runtime.dispatch import OnRank0
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import (
    Key,
    Registered,
    component,
    gathered,
    home_of,
    key_of,
    set_gathered,
)
from mpidist._values.distributed import DistributedValues, Mirrored, own_component
from mpidist._values.variable import Variable, storage_of


class Coordinator:
    """Rank 0's side of one merge_call, while merge_fn runs.

    Args:
        group: the ranks.
        held: the values that merge_fn gets, by key.
        names: the names of what merge_fn can reach; None if nothing has a name.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        held: Mapping[Key, Registered],
        names: object_names.Names | None,
    ) -> None:
        self._group = group
        self._guard = group.guard
        self._several = group.collectives.comm.size > 1
        self._registry = group.registry
        self._dropped: list[Key] = []
        self._fetched: list[weakref.ref[DistributedValues]] = []
        self._batch: UpdateBatch | None = None  # if it is open
        self._writer = commands.Writer(group, self.key_of, names)
        for value in held.values():
            self._registry.watch(value, self._dropped)

    def lead(
        self,
        merge_fn: Callable[..., Nest],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> Nest:
        """Run merge_fn for all ranks; return rank 0's part of its result. Collective.

        Args:
            merge_fn: the function.
            args: its positional arguments after the strategy.
            kwargs: its keyword arguments.
        """
        group, guard = self._group, self._guard
        frame = context.Frame(group, context.Level.COORDINATOR, coordinator=self)
        arrays: list[Array] = []
        try:
            guard.set_alone(self._several)
            with frame:
                result = merge_fn(group.strategy, *args, **kwargs)
                del args, kwargs
                whole = None
                if type(result) not in object_parts.ATOMS:
                    leaves, whole = nest.flatten(result)
                    leaves = [*map(self._part_of, leaves)]
                    result = whole.unflatten(leaves)
                if self._several:
                    content, arrays = self._writer.write(result, named=False)
            if self._several:  # after what leaving the frame may raise
                guard.set_alone(False)
                self._send("return", content)
        except BaseException as error:
            guard.set_alone(False)
            if self._several:
                guard.breakdown.interrupted("merge_call", error)
                if not guard.broken:
                    self._send_error(error)
                    as_told(error, group.communicator.identity)
            raise
        finally:
            self._close()
        if arrays:
            group.collectives.send_arrays(arrays, "merge_call")
        return result if whole is None else whole.unflatten(map(own_component, leaves))

    def _send_error(self, error: BaseException) -> None:
        """Send the exception of merge_fn."""
        try:
            self._end_updates()
        except BaseException:
            # An update has raised, which merge_fn did not know: its exception counts.
            if self._guard.broken:
                raise
        if not self._guard.broken:
            pickled = dump_exception(error), describe_exception(error)
            self._post("raise", self._writer.write(pickled)[0])

    def _close(self) -> None:
        """Drop gathered components: the arrays may change until the next merge_call."""
        if self._batch is not None:
            self._batch.leave()
        del self._writer  # which refers to this
        for reference in self._fetched:
            if (value := reference()) is not None:
                set_gathered(value, None)

    def _part_of(self, leaf: Nest) -> Nest:
        """Return what is sent for a leaf of merge_fn's result, which rank 0 gets too.

        Of an array it is a copy, since the program may keep using it.
        """
        made_here = isinstance(leaf, DistributedValues) and not self._registry.has(leaf)
        if made_here and (isinstance(leaf, Mirrored) or not self._several):
            leaf = component(leaf)  # what differs is scattered
        return backend.copied(leaf)

    # --- operations ---------------------------------------------------------------

    def command(self, name: str, args: tuple[Any, ...]) -> Any:
        """Run an operation on all ranks; return rank 0's result.

        If a batch of updates before it has raised on some rank, this raises on all
        ranks, and the operation is not run.
        """
        if not self._several:
            return self._execute(dispatch.execute, name, args)
        try:
            content, arrays = self._writer.write_arguments(name, args)
            self._send(name, content)
            if arrays:
                self._together(self._group.collectives.send_arrays, arrays, name)
            result = self._execute(dispatch.execute, name, args)
            if result is not None:
                self.watch(result)
            return result
        except BaseException as error:
            self._interrupted(name, error)
            raise

    def fetch(
        self, values: list[DistributedValues | Variable]
    ) -> list[tuple[Nest, ...]]:
        """Gather the components of values, and copies of variables, to rank 0."""
        columns = []
        found = self.command("collect", (values,))
        for value, (own, *others) in zip(values, found, strict=True):
            # As of now, like the others; merge_fn may add them to it in place.
            column = (backend.copied(own), *others)
            if isinstance(value, DistributedValues):  # known from now on
                set_gathered(value, column)
                self._fetched.append(weakref.ref(value))
            else:
                column = tuple(map(backend.read_only, column))
            columns.append(column)
        return columns

    def key_of(self, value: Registered) -> Key:
        """Return the key under which every rank has this value.

        A PerReplica that rank 0 has created is scattered first.

        Raises:
            ValueError: if the other ranks do not have the value.
        """
        if self._registry.has(value):
            return key_of(value)
        if isinstance(value, DistributedValues) and gathered(value) is not None:
            if isinstance(value, Mirrored):
                _check_mirrored(value)
            self.command("scatter", (OnRank0(value), isinstance(value, Mirrored)))
            return key_of(value)
        why = (
            "belongs to a `merge_call` that has ended, or was made on rank 0 alone. "
            "Pass it to `merge_call` as an argument"
        )
        owner = self._group
        if isinstance(value, Variable):
            owner = storage_of(value).group
        elif isinstance(value, DistributedValues):
            owner = home_of(value).group
        if owner is not self._group:
            why = f"is of {owner}. Make it in the scope of {self._group}"
        raise commands.NotThereError(
            f"merge_fn uses {value!r:.200}, which the other ranks do not have: it {why}"
        )

    def watch(self, tree: Nest) -> None:
        """Tell the followers when rank 0 drops one of these values."""
        for leaf in nest.flatten(tree)[0]:
            if isinstance(leaf, DistributedValues):
                self._registry.watch(leaf, self._dropped)

    def _execute(self, function: Callable[..., Any], *args: Any) -> Any:
        with self._group.cross_frame:
            return self._together(function, self._group, *args)

    def _together(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that all ranks call."""
        before = self._guard.set_alone(False)
        try:
            return function(*args)
        finally:
            self._guard.set_alone(before)

    def _interrupted(self, call: str, error: BaseException) -> None:
        """Tell the others if an exception from outside has left a call in the middle.

        Otherwise merge_fn might catch it, and go on.
        """
        guard = self._guard
        guard.before_call = None
        guard.set_alone(False)
        guard.breakdown.interrupted(call, error)
        guard.set_alone(True)

    # --- updates ------------------------------------------------------------------

    def update(self, update: Update) -> Nest:
        """Run an update on all ranks; return rank 0's result.

        Rank 0 does not wait for the others (see `updates`), except before and after an
        update with values of each replica's own, and after an update with
        ``group=False``, one whose function communicates, and when the batch has become
        long.
        """
        own, grouped = update.check(), update.grouped
        if not self._several:
            return self._execute(run_update, update)
        try:
            content, arrays = self._writer.write_arguments("update", tuple(update))
            if own:
                self._end_updates()
            self._send("update", content)
            number = self._registry.next_key()
            result = self._run(number, update, own, arrays)
            batch = self._batch
            if own or not grouped or (batch and (batch.communicates or batch.long)):
                self._end_updates()
            if result is not None and type(result) is not Variable:
                result = self._registry.wrap_numbered(update.kind, result, number)
                self.watch(result)
            return result
        except BaseException as error:
            self._interrupted("update", error)
            raise

    def _run(self, number: int, update: Update, own: bool, arrays: list[Array]) -> Nest:
        """Run an update on this rank, as a part of the batch."""
        guard = self._guard
        guard.before_call = self._check_others
        batch = self._batch
        try:
            if batch is None:
                batch = UpdateBatch(self._group)
                self._batch = batch if batch.open else None
            if own:
                batch.keep()
            if arrays:
                self._together(self._group.collectives.send_arrays, arrays, "update")
            return batch.run(number, update)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._interrupted("update", error)
            if batch is not None and not guard.broken:
                batch.fail(error)
                self._end_updates(error)
            raise
        finally:
            guard.before_call = None
            guard.set_alone(True)

    def _check_others(self) -> None:
        """`Guard.before_call` in an update: let its function communicate.

        The others go on to the same call; a rank on which an update has failed goes to
        the join instead, and answers from there (`updates`).
        """
        self._guard.before_call = None
        self._guard.set_alone(False)
        if self._batch is not None:
            self._batch.communicates = True
        self._post("check")

    def _end_updates(self, error: BaseException | None = None) -> None:
        """End a batch of updates on all ranks; raise if it has raised on any rank.

        Args:
            error: the exception of rank 0's own function, which the caller re-raises.
        """
        if self._batch is not None:
            # After an update that communicates they go to the join without a command.
            if not (self._batch.communicates or self._guard.broken):
                self._post("join")
            self._join(self._batch, error)

    def _join(self, batch: UpdateBatch, error: BaseException | None = None) -> None:
        self._batch = None
        found = self._together(batch.end)
        if found is not None and found is not error:
            raise found

    # --- messages -----------------------------------------------------------------

    def _send(self, name: str, content: commands.Content) -> None:
        """Send a command; one that is no update ends the batch."""
        self._guard.check_late()
        self._post(name, content)
        if self._batch is not None and name != "update":
            self._join(self._batch)

    def _post(self, name: str, content: commands.Content = commands.NOTHING) -> None:
        dropped: list[Key] = []  # values that the others keep, and rank 0 does not
        if name not in ("return", "check"):
            self._registry.forget_dropped()
            for waiting in (self._dropped, self._registry.dropped):
                count = len(waiting)
                dropped += waiting[:count]
                del waiting[:count]  # in place: the registry appends to these lists
        self._group.collectives.resources.messages.send(
            pickle.dumps((name, dropped, content))
        )


def _check_mirrored(value: Mirrored) -> None:
    """Raise if merge_fn has created a Mirrored of components that differ."""
    arrays = [backend.as_array(x, "Mirrored")[0] for x in gathered(value) or ()]
    if len({*map(checksums.summarize, arrays)}) > 1:
        raise ValueError(
            f"merge_fn made a Mirrored of components that differ: {value!r:.200}; "
            "write `mpidist.PerReplica(...)` for a value of each replica's own"
        )
