"""The items of a checkpoint: variables, random generators, objects with a state.

The user's objects are decomposed into *items*, each with a name such as
``optimizer/momentum``. All ranks find the same items, in the order of their names.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from mpidist._base import backend
from mpidist._base.errors import CheckpointError
from mpidist._base.variable_enums import VariableAggregation, VariableSynchronization
from mpidist._checkpoints import state_json
from mpidist._checkpoints.state_json import Json, State
from mpidist._values.distributed import DistributedValues
from mpidist._values.variable import Variable

# The methods of different libraries for getting and setting an object's state.
_PAIRS: Final = (
    ("state", "restore"),  # iterators of mpidist
    ("get_state", "set_state"),  # iterators of grain, numpy.random.RandomState
    ("state_dict", "load_state_dict"),  # those of torch
    ("getstate", "setstate"),  # random.Random
)


@dataclasses.dataclass(frozen=True)
class VariableItem:
    """A variable, which is saved as an array."""

    name: str
    variable: Variable

    def __str__(self) -> str:
        kind = ""
        if self.on_read:
            kind = f" ON_READ {self.variable.aggregation.name}"
        shape = tuple(self.variable.shape)
        return f"{self.name!r}: {self.variable.dtype.name} {shape}{kind}"

    @property
    def on_read(self) -> bool:
        """Whether each replica has its own value."""
        return self.variable.synchronization is VariableSynchronization.ON_READ

    @property
    def nbytes(self) -> int:
        """The size in bytes, without a read, which is collective for ON_READ."""
        shape, dtype = self.variable.shape, self.variable.dtype
        return math.prod(shape) * int(dtype.itemsize)

    def check(self) -> None:
        """Raise a ValueError if the variable does not have a single value."""
        if self.on_read and self.variable.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"Checkpoint: Could not save {self.name!r}: an ON_READ variable with "
                "aggregation=NONE has no single value, as nothing says how to combine "
                "its copies; create it with aggregation=SUM, MEAN or ONLY_FIRST_REPLICA"
            )


@dataclasses.dataclass(frozen=True)
class StateItem:
    """An object with a small state, which is saved in the manifest.

    Attributes:
        name: its name in the checkpoint.
        kind: "generator" for one of `numpy.random`, "object" for another.
        get: returns its state.
        set: sets its state.
        merge: merges the states of all replicas into one for any number of replicas, if
            the object supports it.
    """

    name: str
    kind: Literal["generator", "object"]
    get: Callable[[], State]
    set: Callable[[State], object]
    merge: Callable[[list[State]], State] | None = None

    def __str__(self) -> str:
        return f"{self.name!r}: state of {self.kind}"

    def encoded(self) -> Json:
        """Return the state as JSON."""
        return state_json.encode(self.get(), f"Checkpoint: {self.name!r}")


Item = VariableItem | StateItem


def collect(objects: Mapping[str, object], early: bool = False) -> list[Item]:
    """Decompose objects, and return the items in the order of their names.

    Args:
        objects: the objects, by name.
        early: whether to skip items that an object does not have yet: the
            ``variables`` of an optimizer raise RuntimeError before it has created them.

    Raises:
        TypeError: if an object cannot be saved and restored.
        ValueError: if two items would have the same name.
    """
    items: dict[str, Item] = {}
    for name, value in objects.items():
        for item in _items_of(name, value, early):
            if item.name in items:
                raise ValueError(
                    f"Checkpoint: two objects would both be {item.name!r}; give them "
                    "different names"
                )
            if "\0" in item.name:
                raise ValueError(
                    f"Checkpoint: a name with a null byte in it, {item.name!r}"
                )
            items[item.name] = item
    return [items[name] for name in sorted(items)]


def _items_of(name: str, value: object, early: bool) -> Iterator[Item]:
    if isinstance(value, Variable):
        yield VariableItem(name, value)
        return
    if isinstance(value, (np.random.Generator, np.random.BitGenerator)):
        yield _generator_item(name, value)
        return
    nested = _children(name, value)
    if nested is not None:
        for child_name, child in nested:
            yield from _items_of(f"{name}/{child_name}", child, early)
        return
    for get, put in _PAIRS:
        getter, setter = getattr(value, get, None), getattr(value, put, None)
        if callable(getter) and callable(setter) and not isinstance(value, type):
            merge = getattr(value, "merge_states", None)
            yield StateItem(name, "object", getter, setter, merge)
            return
    try:
        variables = getattr(value, "variables", None)
    except RuntimeError:
        if early:
            return
        raise
    if isinstance(variables, (list, tuple)):
        yield from _variables_of(name, variables)
        return
    raise TypeError(_explain(name, value))


def _children(name: str, value: object) -> list[tuple[str, object]] | None:
    """Return the entries of a list, tuple, dict, or another checkpoint."""
    own = getattr(type(value), "__checkpoint_objects__", None)  # of a Checkpoint
    if own is not None:
        value = own(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (str, int)):
                raise TypeError(
                    f"Checkpoint: expected the keys of {name!r} to be str or int, got "
                    f"{key!r} of type {type(key).__name__}"
                )
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        fields = getattr(value, "_fields", None) or map(str, range(len(value)))
        return list(zip(fields, value, strict=True))
    return None


def _variables_of(name: str, variables: Sequence[object]) -> Iterator[Item]:
    """Yield the variables of an optimizer, with names made unique by a number."""
    used: set[str] = set()
    for variable in variables:
        if not isinstance(variable, Variable):
            raise TypeError(
                f"Checkpoint: expected `{name}.variables` to be a list of `mpidist."
                f"Variable`, got one with {variable!r:.80} of type "
                f"{type(variable).__name__}"
            )
        own, number = variable.name, 0
        while own in used:
            number += 1
            own = f"{variable.name}_{number}"
        used.add(own)
        yield VariableItem(f"{name}/{own}", variable)


def _generator_item(
    name: str, value: np.random.Generator | np.random.BitGenerator
) -> StateItem:
    bits = value.bit_generator if isinstance(value, np.random.Generator) else value

    def get() -> State:
        return bits.state

    def put(state: State) -> None:
        bits.state = state

    return StateItem(name, "generator", get, put)


def _explain(name: str, value: object) -> str:
    kind = type(value).__name__
    start = f"Checkpoint: {name!r} is {value!r:.80} of type {kind}"
    if isinstance(value, (bool, int, float, complex)) or backend.is_array(value):
        what = "an array" if getattr(value, "ndim", 0) else "a number"
        return (
            f"{start}: {what} cannot be restored in place. In the scope of the "
            f"strategy make a variable of it, `{name} = mpidist.Variable("
            f"{'array' if what == 'an array' else repr(value)})`, and change it by "
            "`assign` or `assign_add`"
        )
    if isinstance(value, DistributedValues):
        return (
            f"{start}: it cannot be restored in place. Make a variable of it, or an "
            "object with `state()` and `restore(state)`"
        )
    return (
        f"{start}, which cannot be saved; expected a `mpidist.Variable`, an object "
        "with `variables` (an optimizer), a `numpy.random.Generator`, an object with "
        "`state()` and `restore(state)` (an iterator), or a list, tuple or dict of "
        "these. For numbers, strings and lists write a small class with these two "
        "methods"
    )


# --- random generators, on a different number of ranks ------------------------------


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


def choose_state(item: StateItem, saved: SavedState, rank: int, size: int) -> State:
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
        rank: the number of this replica.
        size: the number of replicas.

    Raises:
        CheckpointError: if an object other than a generator was saved with a state for
            each replica, on a different number of replicas, and cannot merge them.
    """
    values = saved.values
    if len(values) == 1 and (
        saved.saved_on > 1 or saved.alike or item.kind != "generator"
    ):
        return state_json.decode(values[0])
    if item.kind != "generator" and len(values) != size:
        if item.merge is not None:
            return item.merge([state_json.decode(value) for value in values])
        raise CheckpointError(
            f"{item.name!r} was saved with another state on each of {len(values)} "
            f"replicas, and cannot be restored on {size}; restore it on "
            f"{len(values)}, give the object a method `merge_states(states)` that "
            "makes one state of all, or write `restore(path, partial=True)` with a "
            "Checkpoint without it"
        )
    if rank < len(values):
        return state_json.decode(values[rank])
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()
    entropy = int.from_bytes(digest, "little")
    seed = np.random.SeedSequence(entropy, spawn_key=(rank,))
    name = _generator_name(values[0])
    make = _bit_generator(name)
    if make is None:
        raise CheckpointError(
            f"{item.name!r} was saved on {saved.saved_on} replicas, but mpidist cannot "
            f"make another {name}; restore it on at most {saved.saved_on}"
        )
    return make(seed).state


def check_generator(item: StateItem, values: list[Json]) -> str:
    """Return why a generator cannot take the saved states, or "".

    Raises:
        Exception: of any kind, if a state is malformed.
    """
    if item.kind != "generator":
        for value in values:
            _check_random_state(value)
        return ""
    own = item.get()["bit_generator"]
    for value in values:
        saved = _generator_name(value)
        if saved != own:
            return (
                f"{item.name!r}: expected the state of a {own}, got that of "
                f"{saved or 'another object'}; make the generator by "
                f"`numpy.random.Generator(numpy.random.{saved or own}(seed))`"
            )
        make = _bit_generator(own)
        if make is not None:
            state = state_json.decode(value)
            make(0).state = state
            _check_position(own, state)
    return ""


def _check_random_state(value: Json) -> None:
    """Raise if this is a state of `numpy.random.RandomState` with a bad position."""
    parts = value.get("$tuple") if isinstance(value, dict) else None
    if isinstance(parts, list) and len(parts) > 2 and parts[0] == "MT19937":
        _check_position("MT19937", {"state": {"pos": parts[2]}})


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


def _generator_name(value: Json) -> str:
    name = value.get("bit_generator") if isinstance(value, dict) else None
    return name if isinstance(name, str) else ""


def _bit_generator(name: str) -> type[np.random.BitGenerator] | None:
    found = getattr(np.random, name, None)
    if isinstance(found, type) and issubclass(found, np.random.BitGenerator):
        return found
    return None
