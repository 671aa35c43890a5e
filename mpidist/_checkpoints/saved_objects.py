"""The steps of saving and restoring objects, on all ranks.

Saving: find the items; agree that all ranks have the same; read their values (which is
collective for some: an ON_READ variable is aggregated, an iterator may communicate);
check that the copies of mirrored variables and of parameters are equal, and which
states are equal; then rank 0 writes to its path while the others wait for its result,
or, with ``wait=False``, for a copy, which a thread of it writes.

Restoring: find the items; agree; rank 0 reads everything, verifies it, and checks that
it matches the objects, while the others wait. The rest is in `restoring`.

Errors on rank 0 are raised on all ranks, also with the guard off
(`CollectiveCall.on_rank_0`).
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from mpidist._base.expect import as_path
from mpidist._base.state_json import Packed, Stored, own_copy
from mpidist._checkpoints import contents, exchange, replace, storage
from mpidist._checkpoints.collective_call import CollectiveCall, Write, wait_for_threads
from mpidist._checkpoints.exchange import Values
from mpidist._checkpoints.items import Item, LaterItem, StateItem, VariableItem
from mpidist._checkpoints.restore import Restore, warn_of
from mpidist._mpi import library
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup


class SavedObjects:
    """The objects of a `Checkpoint`, by name."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.by_name: dict[str, Any] = dict(objects)
        self._told: list[Callable[[bool], None]] = []
        items = contents.checked(self.by_name)
        self._nearest = (
            contents.group_of(items, "Checkpoint") or context.current().group
        )

    def add(self, name: str, value: object) -> None:
        """Replace or add an object.

        Raises:
            TypeError, ValueError: if it cannot be saved; then nothing has changed.
        """
        objects = {**self.by_name, name: value}
        contents.checked({name: value})
        contents.collect(objects, "skip")
        told = [*self._told]
        for tell in told:
            tell(False)
        self.by_name[name] = value
        for tell in told:
            tell(True)

    def __when_attached__(self, call: Callable[[bool], None]) -> None:
        """Call a function before and after each assignment, as a module does."""
        if call not in self._told:
            self._told = [call, *filter(None, self._told)]

    @property
    def group(self) -> ReplicaGroup:
        """The ranks that save these objects together."""
        found = contents.group_of(contents.collect(self.by_name, "skip"), "Checkpoint")
        return found or self._nearest

    def save(
        self,
        path: object,
        file_format: storage.FileFormat,
        name: str,
        *,
        wait: bool = True,
        details: str = "",
        around: Callable[[Callable[[int], int]], int] = lambda write: write(0),
        ended: Callable[[int | None], None] = lambda saved_at_ns: None,
    ) -> str:
        """Save all objects. Collective.

        Args:
            path: the path of the directory, as the user passed it.
            file_format: the format of the array file, as the user passed it.
            name: the name of the call.
            wait: whether to return when it is complete; otherwise, a thread of rank 0
                completes it, from a copy.
            details: other data that must be the same on all ranks.
            around: called on rank 0 to write: ``write(after)`` writes the checkpoint
                with a time later than ``after``, and returns that time, in ns.
            ended: called on all ranks with the time in the manifest when it is
                complete, or with None when the save has failed.

        Returns:
            The path of rank 0.
        """
        details += "" if wait else ", wait=False"
        call, items, target = self._begin(name, path, details)
        warn_of(self.by_name)
        thread: Write | None = None

        def write(place: str, arrays: Mapping[str, Stored], after: int) -> int:
            saved_at = max(time.time_ns(), after + 1)
            replace.replace(
                place,
                lambda directory, number: storage.write_checkpoint(
                    directory, number, arrays, states, call.size, file_format, saved_at
                ),
            )
            return saved_at

        def write_at(place: str, arrays: Mapping[str, Stored]) -> int:
            try:
                return around(functools.partial(write, place, arrays))
            except BaseException as error:  # that of a full disk has no path
                error.add_note(f"raised by {name} to {str(target)!r}{details}")
                raise

        def write_on_rank_0() -> tuple[str, int | None]:
            nonlocal thread
            arrays = variables | tensors
            storage.check_format(arrays, file_format)
            place = os.path.realpath(str(target))  # from here: a thread may be late
            if wait:
                wait_for_threads()
                return str(target), write_at(place, arrays)
            copies = {array: own_copy(x) for array, x in arrays.items()}
            thread = Write(functools.partial(write_at, place, copies))
            return str(target), None

        with call.guard.span(name):
            variables, tensors, states = _values(call, items)
            saved_at = None
            try:
                used, saved_at = call.on_rank_0(write_on_rank_0)
            finally:
                if wait:
                    ended(saved_at)
        if not wait:
            call.note_save(thread, ended)
        return used

    def read(
        self, path: object, partial: bool, name: str
    ) -> Callable[[], tuple[list[str], Restore]] | None:
        """Read and verify a checkpoint on rank 0; nothing changes yet. Collective.

        Returns:
            A function that restores the objects, and returns the names of the items,
            and what was left; collective. None if the path of rank 0 is None.
        """
        details = f", partial={bool(partial)}"
        call, items, source = self._begin(name, path, details, optional=True)
        root = weakref.ref(self)
        rest = Restore(self.by_name, call.group, str(path), bool(partial), root)
        put = rest.read(call, items, source)
        return None if put is None else lambda: (put(), rest)

    def call(self, name: str) -> CollectiveCall:
        """Return a call by the ranks that save these objects together."""
        return self._find(name, "skip")[0]

    def _find(
        self, name: str, unmade: contents.Unmade
    ) -> tuple[CollectiveCall, list[Item]]:
        """Find the items, which may have changed, and their strategy."""
        context.require_program_level(context.current().group, name)
        with self._nearest.guard.checking(name):
            items = contents.collect(self.by_name, unmade)
            group = contents.group_of(items, name)
        if group is None:
            group = context.current().group
            if not group.is_mpi:  # that of the scope in which it was made
                group = self._nearest
            # Each process restores plain variables by itself.
            saves = name != "Checkpoint.restore"
            if saves and not group.is_mpi and library.world_size() > 1:
                raise RuntimeError(
                    f"{name}: none of its variables belongs to an MPIStrategy, so it "
                    "is not clear which ranks save together; write "
                    "`with strategy.scope():` around it"
                )
        return CollectiveCall(group, name), items

    def _begin(
        self, name: str, path: object, details: str, optional: bool = False
    ) -> tuple[CollectiveCall, list[Item], str | None]:
        """Find the items; check that all ranks have the same."""
        call, items = self._find(name, "later")
        call.wait_for_save()
        target = None
        if not (optional and path is None):
            target = call.attempt(lambda: as_path(name, path))
        call.agree(f" of {{{', '.join(map(str, items))}}}{details}")
        return call, items, target


def _values(
    call: CollectiveCall, items: list[Item]
) -> tuple[dict[str, Stored], dict[str, Stored], Values]:
    """Return the arrays of variables, those of states, and the states. Collective.

    Raises:
        CollectiveMismatchError: if the copies of a variable or parameter differ.
        ValueError: if a variable has no single value.
    """
    variables = [item for item in items if isinstance(item, VariableItem)]
    objects = [item for item in items if isinstance(item, StateItem)]

    def read() -> tuple[dict[str, Stored], dict[str, Packed]]:
        for item in variables:  # alike on all replicas, which have compared the items
            item.check()
        arrays = {item.name: item.variable.value() for item in variables}
        for later in items:
            if isinstance(later, LaterItem):
                kept = later.owner.__saved_unbuilt__()
                arrays |= {f"{later.name}/{own}": x for own, x in kept.items()}
        return arrays, {item.name: item.pack() for item in objects}

    arrays, packed = call.together(read)
    states, tensors = exchange.exchange(call, objects, packed, arrays, arrays)
    return arrays, tensors, states
