"""Random generators in a checkpoint, on the same number of ranks or another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from mpidist._base.errors import CheckpointError
from mpidist._base.types import HostArray
from mpidist._checkpoints import state_json
from mpidist._checkpoints.state_items import StateItem, tensors_from
from mpidist._checkpoints.state_json import Json, State, host_copy


class SavedState(NamedTuple):
    """A state in a checkpoint.

    Attributes:
        values: one for all replicas, or one for each, as JSON.
        saved_on: the number of replicas that saved it.
        alike: whether the object's state is the same on all replicas now.
    """

    values: list[Json]
    saved_on: int
    alike: bool


def item_of(
    name: str, value: np.random.Generator | np.random.BitGenerator
) -> StateItem:
    """Return the item of a generator of NumPy."""
    bits = value.bit_generator if isinstance(value, np.random.Generator) else value
    kind = type(bits)

    def put(state: State) -> None:
        bits.state = state

    def stream(seed: np.random.SeedSequence) -> State:
        return kind(seed).state

    def refuse(values: list[Json]) -> str:
        return _refusal(name, kind, values)

    own = getattr(np.random, kind.__name__, None) is kind
    return StateItem(
        name,
        "generator",
        lambda: bits.state,
        put,
        stream=stream if own else None,
        readable=True,
        refuse=refuse,
    )


def choose_state(
    item: StateItem,
    saved: SavedState,
    arrays: Mapping[str, HostArray],
    rank: int,
    size: int,
) -> State:
    """Return the state that a replica restores.

    A state that was the same on all replicas has one value, and all get it. Otherwise
    replica i gets the i-th value. On additional replicas, generators that were not
    saved get new streams: those of the `numpy.random.SeedSequence` whose entropy is the
    SHA-256 of all saved states, and whose ``spawn_key`` is ``(i,)``, as
    `SeedSequence.spawn` makes them.

    A checkpoint of one replica does not show whether its generator should be the same
    on all replicas. In this case the generators' states before restoring determine it.

    Args:
        item: the item to restore.
        saved: its state in the checkpoint.
        arrays: the arrays of the checkpoint; the state takes their memory.
        rank: the number of this replica.
        size: the number of replicas.

    Raises:
        CheckpointError: if the state cannot be restored on this number of replicas.
    """
    values, tensor = saved.values, tensors_from(arrays)
    check_count(item, saved, size)
    if len(values) == 1 and (
        saved.saved_on > 1 or saved.alike or item.kind != "generator"
    ):
        return state_json.unpack(values[0], tensor)
    if item.kind != "generator" and len(values) != size:
        assert item.merge is not None
        return item.merge([state_json.unpack(value, tensor) for value in values])
    if rank < len(values):
        return state_json.unpack(values[rank], tensor)
    assert item.stream is not None
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for value in values:
        for name in state_json.array_names(value):
            digest.update(host_copy(arrays[name]).tobytes())
    entropy = int.from_bytes(digest.digest(), "little")
    return item.stream(np.random.SeedSequence(entropy, spawn_key=(rank,)))


def check_count(item: StateItem, saved: SavedState, size: int) -> None:
    """Check that a state can be restored on this number of replicas.

    Raises:
        CheckpointError: if it cannot.
    """
    count = len(saved.values)
    if item.kind != "generator":
        if count in (1, size) or item.merge is not None:
            return
        raise CheckpointError(
            f"{item.name!r} was saved with another state on each of {count} "
            f"replicas, and cannot be restored on {size}; restore it on "
            f"{count}, give the object a method `merge_states(states)` that "
            "makes one state of all, or write `restore(path, partial=True)` with a "
            "Checkpoint without it"
        )
    alike = count == 1 and (saved.saved_on > 1 or saved.alike)
    if count < size and not alike and item.stream is None:
        raise CheckpointError(
            f"{item.name!r} was saved on {saved.saved_on} replicas, but mpidist cannot "
            f"make another generator of its kind; restore it on at most "
            f"{saved.saved_on}"
        )


def _refusal(name: str, kind: type[np.random.BitGenerator], values: list[Json]) -> str:
    """Return why a generator cannot take the saved states, or "".

    Raises:
        Exception: of any kind, if a state is malformed.
    """
    own = kind.__name__
    for value in values:
        found = value.get("bit_generator") if isinstance(value, dict) else None
        saved = found if isinstance(found, str) else ""
        if saved != own:
            return (
                f"{name!r}: expected the state of a {own}, got that of "
                f"{saved or 'another object'}; make the generator by "
                f"`numpy.random.Generator(numpy.random.{saved or own}(seed))`"
            )
        if getattr(np.random, own, None) is kind:
            state = state_json.unpack(value, tensors_from({}))
            kind(0).state = state
            _check_position(own, state)
    return ""


def check_random_state(values: list[Json]) -> str:
    """Raise if these are states of `numpy.random.RandomState` with a bad position."""
    for value in values:
        parts = value.get("$tuple") if isinstance(value, dict) else None
        if isinstance(parts, list) and len(parts) > 2 and parts[0] == "MT19937":
            _check_position("MT19937", {"state": {"pos": parts[2]}})
    return ""


def _check_position(name: str, state: State) -> None:
    """Raise if NumPy would read outside a generator's buffer: it does not check."""
    if name == "MT19937":
        position, size = state["state"]["pos"], 624
    elif name == "Philox":
        position, size = state["buffer_pos"], 4
    else:
        return
    if not 0 <= position <= size:
        raise ValueError(f"expected a position from 0 to {size}, got {position}")
