"""The steps of saving and restoring objects, on all ranks.

Saving: find the items; agree that all ranks have the same, and save them to the same
path; read their values (which is collective for some: an ON_READ variable is
aggregated, an iterator may communicate); check that the copies of mirrored variables
are equal, and which states are equal; then rank 0 writes while the others wait for its
result.

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

import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from mpidist._agreement import mismatch
from mpidist._base import backend, checksums
from mpidist._base.errors import (
    CheckpointError,
    CollectiveError,
    CollectiveMismatchError,
    damaged_checkpoint,
    format_ranks,
    on_rank,
)
from mpidist._base.types import Array, HostArray
from mpidist._checkpoints import contents, replace, storage
from mpidist._checkpoints.collective_call import CollectiveCall
from mpidist._checkpoints.contents import Item, SavedState, StateItem, VariableItem
from mpidist._checkpoints.state_json import Json, State
from mpidist._checkpoints.storage import CheckpointFiles, FileFormat, Snapshot
from mpidist._mpi import library
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.variable import policy_of, storage_of

_MOST_NAMES: Final = 20  # in a message


class Saved(NamedTuple):
    """A checkpoint that has been written: its path, and the time in its manifest."""

    path: str
    saved_at_ns: int


@dataclasses.dataclass(frozen=True)
class Found:
    """What a checkpoint has for the items.

    Attributes:
        call: the call that restores it.
        items: the items, by name.
        variables: the names of the variables to restore.
        states: the states to restore.
        arrays: the values of the variables; on rank 0 only.
    """

    call: CollectiveCall
    items: Mapping[str, Item]
    variables: list[str]
    states: dict[str, SavedState]
    arrays: dict[str, HostArray]


class SavedObjects:
    """The objects of a `Checkpoint`.

    Args:
        objects: the objects, by name. Others may be added to ``by_name`` later.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.by_name = dict(objects)
        items = contents.collect(self.by_name, early=True)
        self._nearest = _group_of(items, "Checkpoint") or context.current().group

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
        details: str = "",
        after: int = 0,
        before_writing: Callable[[], None] = lambda: None,
        afterwards: Callable[[], None] = lambda: None,
    ) -> Saved:
        """Save all objects. Collective.

        Args:
            path: the path of the directory, as the user passed it.
            file_format: the format of the array file, as the user passed it.
            name: the name of the call.
            details: other data that must be the same on all ranks.
            after: the time in the manifest must be later than this, in ns.
            before_writing: called on rank 0 before it writes.
            afterwards: called on rank 0 when the checkpoint is complete.
        """
        call, items, target = self._begin(name, path, details)
        with call.guard.span(name):
            call.attempt(lambda: _check_variables(items))
            snapshot = _take(call, items)

            def write() -> Saved:
                storage.check_format(snapshot.arrays, file_format)
                before_writing()
                saved_at = max(time.time_ns(), after + 1)
                replace.replace(
                    target,
                    lambda directory, number: storage.write_checkpoint(
                        directory, number, snapshot, file_format, saved_at
                    ),
                )
                afterwards()
                return Saved(target, saved_at)

            return call.on_rank_0(write)

    def read(self, path: object, partial: bool, name: str) -> Found:
        """Read and verify a checkpoint on rank 0; nothing changes yet. Collective."""
        call, items, source = self._begin(name, path, f", partial={bool(partial)}")
        alike = _alike_now(call, items)
        arrays: dict[str, HostArray] = {}

        def read() -> tuple[list[str], dict[str, SavedState]]:
            files = CheckpointFiles(source)
            replicas = files.manifest.replicas
            saved = {
                state_name: SavedState(values, replicas, alike.get(state_name, True))
                for state_name, values in files.manifest.states.items()
            }
            fitting = _fit(call, items, files, saved, bool(partial))
            files.verify_rest()
            for item in fitting:
                if isinstance(item, VariableItem):
                    arrays[item.name] = files.read(item.name, item.variable.dtype)
            states = [item.name for item in fitting if isinstance(item, StateItem)]
            return [*arrays], {state_name: saved[state_name] for state_name in states}

        with call.guard.span(name):
            variables, states = call.on_rank_0(read)
        by_name = {item.name: item for item in items}
        return Found(call, by_name, variables, states, arrays)

    def put(self, found: Found) -> list[str]:
        """Restore the objects; return the names of the items. Collective."""
        call = found.call
        items = [found.items[name] for name in found.variables]
        variables = [item for item in items if isinstance(item, VariableItem)]
        arrays = call.together(lambda: _room_for(variables, found.arrays), scope=False)
        try:
            for x in arrays:
                if x.size:
                    call.comm.broadcast(backend.as_bytes(x), 0)
        except BaseException as error:
            raise call.guard.leave_call(error) from None
        values = call.together(lambda: _prepared(variables, arrays), scope=False)
        arrays.clear()

        def assign() -> None:  # without allocating
            for item, value in zip(variables, values, strict=True):
                storage_of(item.variable).apply("assign", value)

        guard = call.guard
        ready = mismatch.Call(f"{call.name}, when all ranks are ready")
        before: list[tuple[StateItem, State]] = []
        headers = sys.maxsize
        try:
            _put_states(call, found.states, found.items, before)
            headers = guard.published
            guard.agree_and_compare(ready, 0)
            assign()
        except BaseException as error:
            if guard.published > headers and not isinstance(error, CollectiveError):
                # The others see that header, and restore all, whatever comes to this.
                assign()
                raise guard.leave_call(error) from None
            guard.interrupted(call.name, error)
            _put_back(call, before, error)
            raise
        return sorted([*found.states, *found.variables])

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
        self, name: str, path: object, details: str
    ) -> tuple[CollectiveCall, list[Item], str]:
        """Find the items; check that all ranks have the same, and the same path."""
        call, items = self._find(name)

        def check() -> str:
            if isinstance(path, (str, os.PathLike)) and os.fspath(path):
                return os.fsdecode(path)
            raise TypeError(
                f"{name}: expected a path, a str or `os.PathLike`, got {path!r}"
            )

        target = call.attempt(check)
        call.agree(f" of {{{', '.join(map(str, items))}}} at {target!r}{details}")
        return call, items, target


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


def _check_variables(items: list[Item]) -> None:
    for item in items:
        if isinstance(item, VariableItem):
            item.check()


# --- saving -------------------------------------------------------------------------


def _take(call: CollectiveCall, items: list[Item]) -> Snapshot:
    """Return the current arrays and states. Collective."""

    def read() -> tuple[dict[str, Array], dict[str, Json]]:
        arrays: dict[str, Array] = {}
        states: dict[str, Json] = {}
        for item in items:
            if isinstance(item, StateItem):
                states[item.name] = item.encoded()
            elif item.on_read:
                arrays[item.name] = item.variable.read_value()
            else:
                arrays[item.name] = item.variable.values[0]
        return arrays, states

    arrays, states = call.together(read)

    def summarize() -> list[int]:
        texts = [json.dumps(state, sort_keys=True) for state in states.values()]
        return [
            *(_checksum(x) for x in arrays.values()),
            *(mismatch.fingerprint(text) for text in texts),
        ]

    rows = call.same(call.attempt(summarize))
    differing = set()
    if rows is not None:
        for name, column in zip(
            [*arrays, *states], zip(*rows, strict=True), strict=True
        ):
            if len(set(column)) > 1:
                differing.add(name)
                if name in arrays:
                    raise CollectiveMismatchError(_drifted(call, name, column))
    values = {name: [state] for name, state in states.items()}
    if differing:
        own = json.dumps({name: states[name] for name in sorted(differing)})
        everybody = [json.loads(x) for x in call.comm.all_gather_objects(own.encode())]
        for name in differing:
            values[name] = [row[name] for row in everybody]
    return Snapshot(list(arrays.items()), values, call.size)


def _checksum(x: Array) -> int:
    dtype = x.dtype
    if dtype.kind in "fc" and dtype.char in "gG" and np.finfo(dtype).nmant == 63:
        # The number is ten bytes of sixteen; the rest is uninitialized.
        parts = np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(-1, 16)
        x = np.ascontiguousarray(parts[:, :10])
    return mismatch.fingerprint(checksums.summarize(x))


def _drifted(call: CollectiveCall, name: str, column: tuple[int, ...]) -> str:
    """Return the message for a variable whose copies differ; name the minority."""
    groups: dict[int, list[int]] = {}
    for rank, number in enumerate(column):
        groups.setdefault(number, []).append(rank)
    most, *others = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    odd = sorted(rank for ranks in others for rank in ranks)
    have = "has" if len(odd) == 1 else "have"
    return on_rank(
        call.rank,
        f"{call.name}: the copies of {name!r} are not equal: {format_ranks(odd)} "
        f"{have} another value than {format_ranks(most)}. Nothing was saved. Make the "
        "variable in the scope of the strategy, and change it by its own methods only",
    )


# --- restoring ----------------------------------------------------------------------


def _alike_now(call: CollectiveCall, items: list[Item]) -> dict[str, bool]:
    """Return for each generator whether it is the same on all ranks. Collective."""
    generators = [x for x in items if isinstance(x, StateItem) and x.kind != "object"]
    if not generators:
        return {}

    def summarize() -> list[int]:
        texts = [json.dumps(x.encoded(), sort_keys=True) for x in generators]
        return [mismatch.fingerprint(text) for text in texts]

    rows = call.same(call.attempt(summarize))
    if rows is None:
        return dict.fromkeys((x.name for x in generators), True)
    columns = zip(*rows, strict=True)
    return {
        x.name: len(set(column)) == 1
        for x, column in zip(generators, columns, strict=True)
    }


def _fit(
    call: CollectiveCall,
    items: list[Item],
    files: CheckpointFiles,
    saved: dict[str, SavedState],
    partial: bool,
) -> list[Item]:
    """Return the items to restore; raise with a list of those that do not match."""
    arrays = files.manifest.arrays
    wrong: list[str] = []
    missing: list[str] = []
    fitting: list[Item] = []
    for item in items:
        if item.name not in arrays and item.name not in saved:
            missing.append(item.name)
        elif problem := _problem(item, files):
            wrong.append(problem)
        else:
            fitting.append(item)
            if isinstance(item, StateItem):  # which may not support the number of ranks
                contents.choose_state(item, saved[item.name], 0, call.size)
    names = {item.name for item in items}
    unexpected = [name for name in [*arrays, *saved] if name not in names]
    if partial and (fitting or not items):
        missing, unexpected = [], []
    if not (wrong or missing or unexpected):
        return fitting
    lines = [f"{call.name}: the checkpoint {files.path!r} does not fit:", *wrong]
    if missing:
        lines.append(f"missing in the checkpoint: {_listed(missing)}")
    if unexpected:
        lines.append(f"only in the checkpoint: {_listed(unexpected)}")
    hints = []
    if unexpected:
        hints.append(
            "An object that makes variables at its first use, such as an optimizer, "
            "must make them before (`optimizer.build(variables)`)."
        )
    if partial:
        hints.append("Nothing of it is among the objects, whatever `partial` says.")
    elif missing or unexpected:
        hints.append("Write `partial=True` to restore what both have.")
    raise CheckpointError(
        "\n  ".join(lines) + "\n" + " ".join([*hints, "Nothing was changed."])
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(repr, names[:_MOST_NAMES])) + more


def _problem(item: Item, files: CheckpointFiles) -> str:
    """Return the problem with an item's data in the checkpoint, or ""."""
    manifest = files.manifest
    if isinstance(item, StateItem):
        if item.name in manifest.arrays:
            return f"{item.name!r}: expected a state, got an array"
        try:
            return contents.check_generator(item, manifest.states[item.name])
        except Exception as error:
            raise damaged_checkpoint(
                f"{files.manifest_path} is malformed, although its checksum is right: "
                f"the entry ['states'][{item.name!r}] is not the state of a generator: "
                f"{type(error).__name__}: {error}"
            ) from error
    part = manifest.arrays.get(item.name)
    if part is None:
        return f"{item.name!r}: expected an array, got a state"
    variable = item.variable
    expected = (variable.dtype.name, tuple(variable.shape))
    if expected == (part.dtype, part.shape):
        return ""
    return (
        f"{item.name!r}: expected {expected[0]} {expected[1]}, got {part.dtype} "
        f"{part.shape}"
    )


def _put_states(
    call: CollectiveCall,
    states: dict[str, SavedState],
    items: Mapping[str, Item],
    before: list[tuple[StateItem, State]],
) -> None:
    """Restore all states, and add to ``before`` what they were. Collective."""
    for name, saved in states.items():
        item = items[name]
        assert isinstance(item, StateItem)
        before.append((item, call.together(item.get)))

        def put(item: StateItem = item, saved: SavedState = saved) -> None:
            item.set(contents.choose_state(item, saved, call.rank, call.size))

        call.together(put)


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


def _room_for(
    items: Sequence[VariableItem], arrays: dict[str, HostArray]
) -> list[HostArray]:
    """Return the arrays of rank 0, taken from ``arrays``; on others room for them."""
    return [
        arrays.pop(item.name)
        if item.name in arrays
        else np.empty(item.variable.shape, item.variable.dtype)
        for item in items
    ]


def _prepared(
    items: Sequence[VariableItem], arrays: Sequence[HostArray]
) -> list[Array]:
    """Return what each variable's copy here is to be, on its device."""
    return [
        policy_of(item.variable).own_part(
            storage_of(item.variable),
            storage_of(item.variable).prepare("assign", x),
        )
        for item, x in zip(items, arrays, strict=True)
    ]
