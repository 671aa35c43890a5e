"""The steps of saving and restoring objects, on all ranks.

Saving: find the items; agree that all ranks have the same; read their values (which is
collective for some: an ON_READ variable is aggregated, an iterator may communicate);
check that the copies of mirrored variables and of parameters are equal, and which
states are equal; then rank 0 writes to its path while the others wait for its result.

Restoring: find the items; agree; rank 0 reads everything, verifies it, and checks that
it matches the objects, while the others wait. It sends the arrays, and every rank has
them all, on its device, before anything changes, so that no rank can lack the memory
later. Then come the states, because a user's `restore` may raise (then the objects
restored before it get their old state back), and last the variables, by copies in
memory.

Errors on rank 0 are raised on all ranks, also with the guard off
(`CollectiveCall.on_rank_0`).
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist._agreement import mismatch
from mpidist._base import backend
from mpidist._base.errors import CollectiveError
from mpidist._base.types import Array, DType, HostArray, Shape
from mpidist._checkpoints import (
    background,
    contents,
    fitting,
    replace,
    snapshot,
    state_items,
    storage,
)
from mpidist._checkpoints.collective_call import CollectiveCall
from mpidist._checkpoints.contents import Item, VariableItem
from mpidist._checkpoints.generators import SavedState
from mpidist._checkpoints.state_items import StateItem, States
from mpidist._checkpoints.state_json import State
from mpidist._checkpoints.storage import CheckpointFiles, FileFormat
from mpidist._mpi import library
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.variable import policy_of, storage_of


class Saved(NamedTuple):
    """A checkpoint that has been written: its path, and the time in its manifest."""

    path: str
    saved_at_ns: int


class Found(NamedTuple):
    """What a checkpoint has for the items.

    Attributes:
        call: the call that restores it.
        items: the items, by name.
        variables: the names of the variables to restore.
        states: the states to restore.
        kinds: the dtypes and shapes of all arrays to send.
        arrays: the arrays; on rank 0 only.
    """

    call: CollectiveCall
    items: Mapping[str, Item]
    variables: list[str]
    states: dict[str, SavedState]
    kinds: dict[str, tuple[DType, Shape]]
    arrays: dict[str, HostArray]


_Answer = tuple[list[str], dict[str, SavedState], dict[str, tuple[DType, Shape]]]


class SavedObjects:
    """The objects of a `Checkpoint`.

    Args:
        objects: the objects, by name. Others may be added to ``by_name`` later.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.by_name: dict[str, Any] = dict(objects)
        items = contents.collect(self.by_name, early=True)
        contents.check(items)
        self._nearest = _group_of(items, "Checkpoint") or context.current().group

    def add(self, name: str, value: object) -> None:
        """Replace or add an object.

        Raises:
            TypeError, ValueError: if it cannot be saved; then nothing has changed.
        """
        objects = {**self.by_name, name: value}
        contents.check(contents.collect({name: value}, early=True))
        contents.collect(objects, early=True)
        self.by_name[name] = value

    @property
    def group(self) -> ReplicaGroup:
        """The ranks that save these objects together."""
        found = _group_of(contents.collect(self.by_name, early=True), "Checkpoint")
        return found or self._nearest

    def save(
        self,
        path: object,
        file_format: FileFormat,
        name: str,
        *,
        wait: bool = True,
        details: str = "",
        after: int = 0,
        before_writing: Callable[[], None] = lambda: None,
        afterwards: Callable[[], None] = lambda: None,
        ended: Callable[[Saved | None], None] = lambda saved: None,
    ) -> str:
        """Save all objects. Collective.

        Args:
            path: the path of the directory, as the user passed it.
            file_format: the format of the array file, as the user passed it.
            name: the name of the call.
            wait: whether to return when it is complete; otherwise, a thread of rank 0
                completes it, from a copy.
            details: other data that must be the same on all ranks.
            after: the time in the manifest must be later than this, in ns.
            before_writing: called on rank 0 before it writes.
            afterwards: called on rank 0 when the checkpoint is complete.
            ended: called on all ranks then, or, with None, when the save has failed.

        Returns:
            The path of rank 0.
        """
        details += "" if wait else ", wait=False"
        call, items, target = self._begin(name, path, details)
        written: background.Write[Saved] | None = None
        with call.guard.span(name):
            arrays, objects = snapshot.take(call, items)

            def states() -> States:
                states = snapshot.joined(arrays, objects, name)
                storage.check_format(states.arrays, file_format)
                return states if wait else snapshot.copied(states)

            def write(states: States) -> Saved:
                assert target is not None
                before_writing()
                saved_at = max(time.time_ns(), after + 1)
                replace.replace(
                    target,
                    lambda directory, number: storage.write_checkpoint(
                        directory, number, states, call.size, file_format, saved_at
                    ),
                )
                afterwards()
                return Saved(target, saved_at)

            def write_now() -> Saved:
                background.wait_for_threads()
                return write(states())

            def begin() -> str:
                nonlocal written
                assert target is not None
                written = background.Write(target, functools.partial(write, states()))
                return target

            if not wait:
                used = call.on_rank_0(begin)
                background.note(call.group, written, ended)
                return used
            saved = None
            try:
                saved = call.on_rank_0(write_now)
            finally:
                ended(saved)
            return saved.path

    def read(self, path: object, partial: bool, name: str) -> Found | None:
        """Read and verify a checkpoint on rank 0; nothing changes yet. Collective.

        Returns:
            What is in it; None if the path of rank 0 is None.
        """
        call, items, source = self._begin(
            name, path, f", partial={bool(partial)}", optional=True
        )
        alike = snapshot.generators_alike(call, items)
        arrays: dict[str, HostArray] = {}

        def read() -> _Answer | None:
            if source is None:
                return None
            files = CheckpointFiles(source)
            manifest = files.manifest
            saved = {
                state_name: SavedState(
                    values, manifest.replicas, alike.get(state_name, True)
                )
                for state_name, values in manifest.states.items()
            }
            found = fitting.fit(call, items, files, saved, bool(partial))
            files.verify_rest()
            variables = [x.name for x in found if isinstance(x, VariableItem)]
            states = [x.name for x in found if isinstance(x, StateItem)]
            for array in [*variables, *manifest.of_states(states)]:
                arrays[array] = files.read(array)
            kinds = {key: (x.dtype, x.shape) for key, x in arrays.items()}
            return variables, {key: saved[key] for key in states}, kinds

        with call.guard.span(name):
            answer = call.on_rank_0(read)
        if answer is None:
            return None
        by_name = {item.name: item for item in items}
        variables, states, kinds = answer
        return Found(call, by_name, variables, states, kinds, arrays)

    def put(self, found: Found) -> list[str]:
        """Restore the objects; return the names of the items. Collective."""
        call = found.call
        items = [found.items[name] for name in found.variables]
        variables = [item for item in items if isinstance(item, VariableItem)]
        arrays = call.together(lambda: _room_for(found), scope=False)
        with call.guard.payload():
            for x in arrays.values():
                if x.size:
                    call.comm.broadcast(backend.as_bytes(x), 0)

        def prepare() -> tuple[list[Array], list[tuple[StateItem, State]]]:
            values = [_prepared(item, arrays.pop(item.name)) for item in variables]
            return values, fitting.choose(call, found.items, found.states, arrays)

        values, states = call.together(prepare, scope=False)
        arrays.clear()

        def assign() -> None:  # without allocating
            for item, value in zip(variables, values, strict=True):
                storage_of(item.variable).apply("assign", value)

        guard = call.guard
        ready = mismatch.Call(f"{call.name}, when all ranks are ready")
        before: list[tuple[StateItem, State]] = []
        headers = sys.maxsize
        try:
            _put_states(call, states, before)
            headers = guard.published
            guard.agree_and_compare(ready, 0)
            assign()
        except BaseException as error:
            if guard.published > headers and not isinstance(error, CollectiveError):
                # The others see that header, and restore all, whatever comes to this.
                assign()
                raise guard.abandon(None, error) from None
            guard.interrupted(call.name, error)
            _put_back(call, before, error)
            raise
        return sorted([*found.states, *found.variables])

    def finish(self, name: str) -> None:
        """Wait for a save with ``wait=False``. Collective."""
        background.finish(self.call(name))

    def call(self, name: str) -> CollectiveCall:
        """Return a call by the ranks that save these objects together."""
        return self._find(name)[0]

    def _find(self, name: str) -> tuple[CollectiveCall, list[Item]]:
        """Find the items, which may have changed, and their strategy."""
        context.require_program_level(context.current().group, name)
        try:
            items = contents.collect(self.by_name)
            group = _group_of(items, name)
        except Exception as error:
            self._nearest.collectives.invalid(name, error)
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
        call, items = self._find(name)
        background.finish(call)
        target = call.attempt(lambda: as_path(path, name, optional))
        call.agree(f" of {{{', '.join(map(str, items))}}}{details}")
        return call, items, target


def as_path(path: object, call: str, optional: bool = False) -> str | None:
    """Return a path as str, or None if that is allowed; that of rank 0 is used.

    Raises:
        TypeError: for anything else.
    """
    if path is None and optional:
        return None
    if isinstance(path, (str, os.PathLike)) and os.fspath(path):
        return os.fsdecode(path)
    raise TypeError(f"{call}: expected a path, a str or `os.PathLike`, got {path!r}")


def _group_of(items: list[Item], name: str) -> ReplicaGroup | None:
    """Return the strategy of the variables; None if all are plain variables."""
    found: dict[int, ReplicaGroup] = {}
    for item in items:
        if isinstance(item, VariableItem):
            group = storage_of(item.variable).group
            if group.is_mpi:
                found[id(group)] = group
    if len(found) > 1:
        raise ValueError(
            f"{name}: its variables belong to {len(found)} strategies; make a "
            "Checkpoint for each"
        )
    return next(iter(found.values()), None)


def _put_states(
    call: CollectiveCall,
    states: Sequence[tuple[StateItem, State]],
    before: list[tuple[StateItem, State]],
) -> None:
    """Set all states, and add to ``before`` what they were. Collective."""
    for item, state in states:
        before.append(
            (item, call.together(functools.partial(state_items.copied_state, item)))
        )
        call.together(functools.partial(item.set, state))


def _put_back(
    call: CollectiveCall,
    before: list[tuple[StateItem, State]],
    error: BaseException,
) -> None:
    """Set states back to what they were. Collective, if ranks can still meet."""
    for item, old in reversed(before):
        put = functools.partial(item.set, old)
        try:
            if call.guard.broken:
                put()
            else:
                call.together(put)
        except Exception as again:
            error.add_note(
                f"{item.name!r} did not take its old state back either: {again}"
            )


def _room_for(found: Found) -> dict[str, HostArray]:
    """Return the arrays, taken from those of rank 0; on others room for them."""
    if found.arrays:
        arrays = dict(found.arrays)
        found.arrays.clear()
        return arrays
    return {name: np.empty(x[1], x[0]) for name, x in found.kinds.items()}


def _prepared(item: VariableItem, x: HostArray) -> Array:
    """Return what a variable's copy here is to be, on its device."""
    storage_here = storage_of(item.variable)
    value: Array = policy_of(item.variable).own_part(
        storage_here, storage_here.prepare("assign", x)
    )
    return value
