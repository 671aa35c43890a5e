"""Restoring: whether a checkpoint fits, what it has, which state each rank gets.

Rank 0 sends the arrays, and every rank has them all, on its device, before anything
changes, so that no rank can lack the memory later. Then come the states, because a
user's `restore` may raise (then the objects restored before it get their old state
back), and last the variables, by copies in memory.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._base import backend, state_json
from mpidist._base.errors import CheckpointError, CollectiveError
from mpidist._base.names import listed as listed_in_short
from mpidist._base.state_json import Json, State, host_copy
from mpidist._base.types import DType, HostArray, Shape, record
from mpidist._checkpoints.collective_call import CollectiveCall
from mpidist._checkpoints.exchange import Values
from mpidist._checkpoints.items import (
    GeneratorItem,
    Item,
    LaterItem,
    StateItem,
    VariableItem,
    first_state,
)
from mpidist._checkpoints.manifest import malformed
from mpidist._checkpoints.storage import CheckpointReader, manifest_of, read_arrays
from mpidist._values.variable import Variable, storage_of

listed: Final = functools.partial(listed_in_short, most=20)


def unnoticed(names: list[str]) -> str:
    """Return a message about objects that were attached unnoticed."""
    return (
        f"not restored, although in the checkpoint: {listed(names)}; attached after "
        "the restore, to a list, a dict or another object that tells nothing, or a "
        "pytree. Write `checkpoint.restore(path, partial=True)` once more, after that"
    )


# --- does it fit? -------------------------------------------------------------------


def unfit(
    call: CollectiveCall, path: str, lines: list[str], hint: str = ""
) -> CheckpointError:
    listing = "\n  ".join([f"{call.name}: the checkpoint{path} does not fit:", *lines])
    return CheckpointError(f"{listing}\n{hint}Nothing was changed.")


def problem_of(item: Item, reader: CheckpointReader) -> str:
    """Return the problem with an item's data in the checkpoint, or ""."""
    manifest = manifest_of(reader)
    if isinstance(item, StateItem):
        if item.name not in manifest.states:
            return f"{item.name!r}: expected a state, got an array"
        try:
            return item.refuse(manifest.states[item.name])
        except Exception as error:
            raise malformed(
                reader.path,
                f"the entry ['states'][{item.name!r}] is not the state of a generator: "
                f"{type(error).__name__}: {error}",
            ) from error
    part = manifest.arrays.get(item.name)
    if part is None or not isinstance(item, VariableItem):
        is_state = item.name in manifest.states
        return f"{item.name!r}: expected an array, got a state" if is_state else ""
    dtype, shape = item.variable.dtype.name, tuple(item.variable.shape)
    if (dtype, shape) == (part.dtype, part.shape):
        return ""
    return f"{item.name!r}: expected {dtype} {shape}, got {part.dtype} {part.shape}"


# --- what it has --------------------------------------------------------------------


def names_of(items: Iterable[Item], names: Collection[str]) -> dict[str, list[str]]:
    """Return for each item, by its name, those of the names in a checkpoint it has."""
    found = {x.name: [x.name] * (x.name in names) for x in items}
    later: dict[str, list[str]] = {x.name: [] for x in items if type(x) is LaterItem}
    for name in names if later else ():
        *outer, _ = itertools.accumulate(name.split("/"), "{}/{}".format)
        for item in later.keys() & outer:
            later[item].append(name)
    return found | later


@record
class Found:
    """What a checkpoint has of some items: rank 0 sends it to all.

    Attributes:
        names: those of the items.
        states: their states.
        kinds: the dtypes and shapes of their arrays.
        replicas: the number of replicas that saved it.
        left: the names of what only the checkpoint has.
    """

    names: list[str]
    states: Values
    kinds: Mapping[str, tuple[DType, Shape]]
    replicas: int
    left: list[str]


def find(
    call: CollectiveCall,
    items: Sequence[Item],
    reader: CheckpointReader,
    arrays: dict[str, HostArray],
    partial: bool,
    outer: Callable[[str], str | None],
) -> Found:
    """Return what the checkpoint has of some items, and read their arrays.

    On rank 0. The slots of an optimizer that was saved before it was built are to be
    zero.

    Args:
        call: the call that restores them.
        items: they.
        reader: the checkpoint.
        arrays: gets their arrays.
        partial: whether something may be missing on either side.
        outer: returns which of the objects has an item in the checkpoint, or None.

    Raises:
        CheckpointError: if it is damaged; if it does not fit, with a list of all
            that does not.
    """
    manifest = manifest_of(reader)
    saved = dict.fromkeys([*manifest.arrays, *manifest.states])
    own = names_of(items, saved)
    zero = _slots_not_saved(items, saved, own)
    found = [x for x in items if own[x.name] or x.name in zero]
    # A state that is an array itself has an array of its own name.
    parts = {*manifest.of_states(manifest.states)}.difference(manifest.states)
    known = parts.union(*own.values())
    left = [name for name in saved if name not in known]
    lines, hint = [problem for x in found if (problem := problem_of(x, reader))], ""
    # With `partial`, too, something has to be in both.
    if not partial or (items and not any(map(outer, saved))):
        more, hint = _in_one_only(items, found, left, partial)
        lines += more
    if lines:
        raise unfit(call, f" {reader.path!r}", lines, hint)
    states = _read(reader, found, own, zero, arrays)
    kinds = {name: (x.dtype, x.shape) for name, x in arrays.items()}
    return Found([x.name for x in found], states, kinds, manifest.replicas, left)


def _read(
    reader: CheckpointReader,
    found: Sequence[Item],
    names: Mapping[str, Sequence[str]],
    zero: Mapping[str, Variable],
    arrays: dict[str, HostArray],
) -> Values:
    """Return the states of items; read arrays, or make those that are zero."""
    manifest = manifest_of(reader)
    states = {
        x.name: manifest.states[x.name] for x in found if isinstance(x, StateItem)
    }
    own = [name for x in found for name in names[x.name] if name in manifest.arrays]
    needed = dict.fromkeys([*own, *manifest.of_states(states)])
    arrays |= read_arrays(reader, needed)
    for name, variable in zero.items():
        arrays[name] = np.zeros(variable.shape, variable.dtype)
    return states


def _in_one_only(
    items: Sequence[Item], found: Sequence[Item], left: list[str], partial: bool
) -> tuple[list[str], str]:
    """Return what only the objects have, or only the checkpoint; and a hint."""
    given, lines = {x.name for x in found}, []
    missing = [x.name for x in items if x.name not in given and not x.is_optional]
    if missing:
        lines.append(f"missing in the checkpoint: {listed(missing)}")
    if left:
        lines.append(f"only in the checkpoint: {listed(left)}")
    if partial:
        return lines, "Nothing of it is among the objects, whatever `partial` says. "
    hint = "Write `partial=True` to restore what both have, now or later. "
    return lines, hint if lines else ""


def _slots_not_saved(
    items: Sequence[Item],
    saved: Mapping[str, object],
    names: Mapping[str, Collection[str]],
) -> dict[str, Variable]:
    """Return the slots, by name, of optimizers that were saved before they were built.

    Args:
        items: those that are restored.
        saved: what the checkpoint has, by name.
        names: those in the checkpoint of each item.
    """
    slots = [x for x in items if isinstance(x, VariableItem) and x.count]
    built = {slot.count for slot in slots if names[slot.name]}
    return {
        x.name: x.variable for x in slots if x.count in saved and x.count not in built
    }


# --- which state each rank gets -----------------------------------------------------


def _choose(
    call: CollectiveCall,
    item: StateItem,
    values: list[Json],
    arrays: Mapping[str, HostArray],
    apart: bool,
) -> State:
    """Return the state that this replica restores.

    A state that was the same on all replicas has one value, and all get it. Otherwise
    replica i gets the i-th value. Additional generators get a new stream: that of the
    `numpy.random.SeedSequence` whose entropy is the SHA-256 of all saved states, and
    whose ``spawn_key`` is ``(rank,)``, as `SeedSequence.spawn` makes them.

    Raises:
        CheckpointError: if it does not fit this number of replicas.
    """
    count, rank, size = len(values), call.rank, call.size
    unpack = functools.partial(
        state_json.unpack, tensor=state_json.tensors_from(arrays.__getitem__)
    )
    if count == 1 and not apart:
        return unpack(values[0])
    if not isinstance(item, GeneratorItem):
        if count == size:
            return unpack(values[rank])
        if item.merge is first_state:
            return unpack(values[0])
        if item.merge is not None:
            # Copies, since what several replicas had alike is in `arrays` once.
            own = state_json.tensors_from(lambda name: arrays[name].copy())
            return item.merge([state_json.unpack(value, own) for value in values])
        raise CheckpointError(
            f"{item.name!r} was saved with another state on each of {count} "
            f"replicas, and cannot be restored on {size}; restore it on "
            f"{count}, give the object a method `merge_states(states)` that "
            "makes one state of all, or write `restore(path, partial=True)` with a "
            "Checkpoint without it"
        )
    if count < size and item.stream is None:
        raise CheckpointError(
            f"{item.name!r} was saved on {count} replicas, but mpidist cannot "
            f"make another generator of its kind; restore it on at most {count}"
        )
    if rank < count:
        return unpack(values[rank])
    assert item.stream is not None
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for value in values:
        for name in state_json.array_names([value]):
            digest.update(host_copy(arrays[name]).tobytes())
    entropy = int.from_bytes(digest.digest(), "little")
    return item.stream(np.random.SeedSequence(entropy, spawn_key=(rank,)))


# --- setting it ---------------------------------------------------------------------


def share(
    call: CollectiveCall,
    kinds: Mapping[str, tuple[DType, Shape]],
    arrays: dict[str, HostArray],
    root: int = 0,
) -> dict[str, HostArray]:
    """Return the arrays of one rank, on all. Collective.

    Args:
        call: the call that restores them.
        kinds: their dtypes and shapes.
        arrays: the arrays; empty on a rank that does not have them. They are
            overwritten on ranks other than ``root``.
        root: the rank.
    """

    def allocate() -> dict[str, HostArray]:
        return arrays or {name: np.empty(x[1], x[0]) for name, x in kinds.items()}

    arrays = call.together(allocate)
    with call.guard.payload():
        for name in kinds:
            if arrays[name].size:
                call.comm.broadcast(backend.as_bytes(arrays[name]), root)
    return arrays


def put(
    call: CollectiveCall,
    items: Mapping[str, Item],
    states: Values,
    arrays: dict[str, HostArray],
    apart: Collection[str] = (),
    later: tuple[bool, str, int] = (False, "", 0),
) -> None:
    """Restore objects. Collective.

    Args:
        call: the call that restores them.
        items: the items to restore, by name.
        states: the states of each item: one for all replicas, or one for each.
        arrays: all arrays, which are taken: states may share their memory.
        apart: the generators that differ between the replicas, although there is one
            state: replica 0 gets it.
        later: for an object that makes variables later: whether some may be missing,
            the path of the checkpoint, and the number of the restore.
    """

    def prepare() -> tuple[list[Callable[[], None]], list[tuple[StateItem, State]]]:
        steps: list[Callable[[], None]] = []
        own = names_of(items.values(), arrays)
        # Variables first: one may have a name like those that an optimizer makes later.
        for item in sorted(items.values(), key=lambda x: isinstance(x, LaterItem)):
            if isinstance(item, VariableItem):  # its copy here, on its device
                storage = storage_of(item.variable)
                value = storage.prepare("assign", arrays.pop(item.name))
                value = storage.own_part(value)
                steps.append(functools.partial(storage.apply, "assign", value))
            elif isinstance(item, LaterItem):
                start = len(item.name) + 1
                kept = {x[start:]: arrays.pop(x) for x in own[item.name] if x in arrays}
                keep = item.owner.__restore_later__
                steps.append(functools.partial(keep, kept, *later))
        chosen: list[tuple[StateItem, State]] = []
        for name, values in states.items():
            owner = items[name]
            assert isinstance(owner, StateItem)
            chosen.append((owner, _choose(call, owner, values, arrays, name in apart)))
        wrong = [owner.misfit(state) for owner, state in chosen]
        if any(wrong):  # on this replica
            raise unfit(call, "", [*filter(None, wrong)])
        return steps, chosen

    steps, chosen = call.together(prepare)
    arrays.clear()

    def assign() -> None:  # without allocating
        for step in steps:
            step()

    guard = call.guard
    before: list[tuple[StateItem, State]] = []
    headers = sys.maxsize
    try:
        for item, state in chosen:
            before.append((item, call.together(item.copy)))
            call.together(functools.partial(item.set, state))
        headers = guard.channel.headers
        guard.agree_on(Call(f"{call.name}, when all ranks are ready"))
        assign()
    except BaseException as error:
        has_met = guard.channel.headers > headers
        if has_met and not isinstance(error, CollectiveError):
            # The others see that header, and restore all, whatever comes to this.
            assign()
            raise guard.abandon(None, error) from None
        guard.breakdown.interrupted(call.name, error)
        _put_back(call, before, error)
        raise


def _put_back(
    call: CollectiveCall, before: list[tuple[StateItem, State]], error: BaseException
) -> None:
    """Set states back to what they were. Collective, if ranks can still meet."""
    for item, old in reversed(before):
        put_one = functools.partial(item.set, old)
        try:
            if call.guard.broken:
                put_one()
            else:
                call.together(put_one)
        except Exception as again:
            error.add_note(
                f"{item.name!r} did not take its old state back either: {again}"
            )
