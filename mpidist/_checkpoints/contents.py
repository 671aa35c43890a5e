"""Decomposes the objects of a user into items, by names such as ``optimizer/momentum``.

All ranks find the same items, in the order of their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from mpidist._base import backend, guests, nest, state_json
from mpidist._base.expect import expect
from mpidist._base.names import unique
from mpidist._checkpoints import guest_items
from mpidist._checkpoints.guest_items import Held
from mpidist._checkpoints.items import (
    Item,
    LaterItem,
    NumpyGeneratorItem,
    StateItem,
    VariableItem,
)
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.distributed import DistributedValues
from mpidist._values.module import Module, built_optimizers
from mpidist._values.variable import Variable, storage_of

# The methods of different libraries for getting and setting an object's state.
_PAIRS: Final = (
    ("state", "restore"),  # iterators of mpidist
    ("get_state", "set_state"),  # iterators of grain, numpy.random.RandomState
    ("state_dict", "load_state_dict"),  # those of torch
    ("getstate", "setstate"),  # random.Random
)


Unmade: TypeAlias = Literal["refuse", "skip", "later"]
"""What to do with an object whose ``variables`` raise RuntimeError, since it has not
made them yet: raise, leave it out, or make a `LaterItem` of it if it supports that."""


def collect(objects: MutableMapping[str, Any], unmade: Unmade = "refuse") -> list[Item]:
    """Decompose objects, and return the items in the order of their names.

    Args:
        objects: the objects, by name; restored pytrees of JAX are put there.
        unmade: what to do with an object that has not made its variables yet.

    Raises:
        TypeError: if an object cannot be saved and restored.
        ValueError: if two items would have the same name.
    """
    items: dict[str, Item] = {}
    for name, value in _entries(objects):
        for item in _items_of(name, value, unmade):
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


def checked(objects: MutableMapping[str, Any]) -> list[Item]:
    """Decompose objects, and check states that can be read without communication.

    Raises:
        TypeError: if one cannot be saved.
    """
    items = collect(objects, "skip")
    for item in items:
        if not isinstance(item, StateItem) or not item.readable:
            continue
        try:
            state = item.get()
        except Exception:  # not ready yet; it is read again when it is saved
            continue
        state_json.pack(state, item.name, "Checkpoint")
    return items


def group_of(items: Iterable[Item], call: str) -> ReplicaGroup | None:
    """Return the strategy of the variables; None if all are plain variables."""
    groups = [
        storage_of(x.variable).group for x in items if isinstance(x, VariableItem)
    ]
    found = {group for group in groups if group.is_mpi}
    if len(found) > 1:
        raise ValueError(
            f"{call}: its variables belong to {len(found)} strategies; make a "
            "Checkpoint for each"
        )
    return next(iter(found), None)


def containers(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Yield what contains other objects, each once, with its name."""
    children = vars(value).items() if isinstance(value, Module) else _children(value)
    if children is not None and id(value) not in seen:
        seen.add(id(value))
        yield name, value
        for key, child in children:
            yield from containers(f"{name}/{key}" if name else str(key), child, seen)


def is_plain(name: str, value: object) -> bool:
    """Return whether a value can be kept by itself: it is no object with a state."""
    if guest_items.is_tree(value):
        return True
    try:
        state_json.pack(value, name, "")
    except TypeError:
        return False
    # A tensor of torch is restored in place, as others of the program have it too.
    return not any(guests.kind_of(x) == "torch" for x in nest.flatten(value)[0])


def _entries(objects: MutableMapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in objects.items():
        yield name, Held(objects, name) if guest_items.is_tree(value) else value


def _items_of(name: str, value: object, unmade: Unmade) -> list[Item]:
    """Return the items of an object; slots of optimizers get the name of the count."""
    if isinstance(value, Variable):
        return [VariableItem(name, value)]
    found = list(_parts_of(name, value, unmade))
    own = {id(x.variable): x for x in found if isinstance(x, VariableItem)}
    optimizers: Sequence[Any] = ()
    if isinstance(value, Module):
        optimizers = built_optimizers(value)
    elif hasattr(value, "__restore_later__"):
        optimizers = (value,)
    for optimizer in optimizers:
        count = f"{name}/{optimizer.name}/iterations"
        if own:
            first, *slots = optimizer.variables
            count = own[id(first)].name
            for slot in slots:
                own[id(slot)].count = count
        outer, _, last = count.rpartition("/")
        rate = f"{outer}/{last.replace('iterations', 'learning_rate')}"
        get, put = optimizer.__saved_rate__, optimizer.__restore_rate__
        found.append(StateItem(rate, get, put, is_optional=True, owner=optimizer))
    return found


def _parts_of(name: str, value: object, unmade: Unmade) -> Iterator[Item]:
    if isinstance(value, (np.random.Generator, np.random.BitGenerator)):
        yield NumpyGeneratorItem(name, value)
    elif item := guest_items.item_of(name, value):
        item.owner = None if isinstance(value, Held) else value
        yield item
    elif (children := _children(value)) is not None:
        for key, child in children:
            expected = f"the keys of {name!r} to be str or int"
            expect(isinstance(key, (str, int)), "Checkpoint", expected, key)
            yield from _items_of(f"{name}/{key}", child, unmade)
    elif methods := _state_methods(value):
        get, put = (getattr(value, method) for method in methods)
        merge = getattr(value, "merge_states", None)
        readable = "state_dict" in methods
        yield StateItem(name, get, put, merge=merge, readable=readable, owner=value)
    else:
        yield from _variables_of(name, value, unmade)


def _state_methods(value: object) -> tuple[str, str] | None:
    """Return the names of the methods that get and set the state of an object."""
    for pair in () if isinstance(value, type) else _PAIRS:
        if all(callable(getattr(value, method, None)) for method in pair):
            return pair
    return None


def _children(value: object) -> Iterable[tuple[object, object]] | None:
    """Return the entries of a list, tuple, dict, or another checkpoint."""
    own = getattr(type(value), "__checkpoint_objects__", None)  # of a Checkpoint
    if own is not None:
        return _entries(own(value))
    parts = nest.parts_of(value)
    if parts is None:
        return None
    return zip(getattr(value, "_fields", parts), parts.values(), strict=True)


def _variables_of(
    name: str, value: object, unmade: Unmade
) -> Iterator[VariableItem | LaterItem]:
    """Yield the variables of an optimizer, with names made unique by a number."""
    try:
        variables = getattr(value, "variables", None)
    except RuntimeError:
        if unmade == "later" and hasattr(value, "__restore_later__"):
            yield LaterItem(name, owner=value)
        elif unmade != "skip":
            raise
        return
    if not isinstance(variables, (list, tuple)):
        raise TypeError(_explain(name, value))
    for variable in variables:
        expected = f"`{name}.variables` to be a list of `mpidist.Variable`"
        expect(isinstance(variable, Variable), "Checkpoint", expected, variable)
    for own, variable in zip(unique(v.name for v in variables), variables, strict=True):
        yield VariableItem(f"{name}/{own}", variable)


def _explain(name: str, value: object) -> str:
    kind = type(value).__name__
    start = f"Checkpoint: {name!r} is {value!r:.80} of type {kind}"
    if guests.kind_of(value) == "jax":
        outer = name.partition("/")[0]
        return (
            f"{start}: an array of JAX cannot be restored in place. Pass a pytree of "
            f"such arrays alone, by a name of its own: `Checkpoint({outer}=pytree)`, "
            f"and set it before you save, `checkpoint.{outer} = pytree`"
        )
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
        "`state()` and `restore(state)` (an iterator) or `state_dict` and "
        "`load_state_dict` (of torch), a pytree of JAX arrays, or a list, tuple or "
        "dict of these. For numbers, strings and lists write a "
        "small class with these two methods"
    )
