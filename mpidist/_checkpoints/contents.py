"""Decomposes the objects of a user into items, by names such as ``optimizer/momentum``.

All ranks find the same items, in the order of their names.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from mpidist._base import backend, guests, nest
from mpidist._base.expect import expect
from mpidist._checkpoints import guest_items, state_json
from mpidist._checkpoints.guest_items import Held
from mpidist._checkpoints.items import (
    Item,
    LaterItem,
    NumpyGeneratorItem,
    StateItem,
    VariableItem,
)
from mpidist._values.distributed import DistributedValues
from mpidist._values.module import Module, built_optimizers
from mpidist._values.variable import Variable

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


def check(items: Sequence[Item]) -> None:
    """Check that the states can be saved that can be read without communication.

    Raises:
        TypeError: if one cannot.
    """
    for item in items:
        if not isinstance(item, StateItem) or not item.readable:
            continue
        try:
            state = item.get()
        except Exception:  # not ready yet; it is read again when it is saved
            continue
        state_json.pack(state, item.name, "Checkpoint")


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


def _items_of(name: str, value: object, unmade: Unmade) -> Iterator[Item]:
    if isinstance(value, Variable):
        yield VariableItem(name, value)
        return
    if isinstance(value, (np.random.Generator, np.random.BitGenerator)):
        yield NumpyGeneratorItem(name, value)
        return
    item = guest_items.item_of(name, value)
    if item is not None:
        yield item
        return
    nested = _children(name, value)
    if nested is not None:
        if unmade == "refuse" and isinstance(value, Module):
            unmade = "skip"  # nobody named this object
        own: dict[int, VariableItem] = {}
        for child_name, child in nested:
            for one in _items_of(f"{name}/{child_name}", child, unmade):
                if isinstance(value, Module) and isinstance(one, VariableItem):
                    own[id(one.variable)] = one
                yield one
        for optimizer in built_optimizers(value) if isinstance(value, Module) else ():
            count, *slots = optimizer.variables
            for slot in slots:
                own[id(slot)].count = own[id(count)].name
        return
    for get, put in _PAIRS:
        getter, setter = getattr(value, get, None), getattr(value, put, None)
        if callable(getter) and callable(setter) and not isinstance(value, type):
            merge = getattr(value, "merge_states", None)
            readable = get == "state_dict"
            yield StateItem(name, getter, setter, merge=merge, readable=readable)
            return
    try:
        variables = getattr(value, "variables", None)
    except RuntimeError:
        keep = getattr(value, "__restore_later__", None)
        if unmade == "later" and keep is not None:
            yield LaterItem(name, value.__saved_unbuilt__, keep)  # type: ignore[attr-defined]
        elif unmade != "skip":
            raise
        return
    if isinstance(variables, (list, tuple)):
        found = list(_variables_of(name, variables))
        if hasattr(value, "__restore_later__"):
            for slot in found[1:]:
                slot.count = found[0].name
        yield from found
        return
    raise TypeError(_explain(name, value))


def _children(name: str, value: object) -> list[tuple[str, object]] | None:
    """Return the entries of a list, tuple, dict, or another checkpoint."""
    own = getattr(type(value), "__checkpoint_objects__", None)  # of a Checkpoint
    if own is not None:
        return list(_entries(own(value)))
    if isinstance(value, Mapping):
        for key in value:
            expected = f"the keys of {name!r} to be str or int"
            expect(isinstance(key, (str, int)), "Checkpoint", expected, key)
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        fields = getattr(value, "_fields", None) or map(str, range(len(value)))
        return list(zip(fields, value, strict=True))
    return None


def _variables_of(name: str, variables: Sequence[object]) -> Iterator[VariableItem]:
    """Yield the variables of an optimizer, with names made unique by a number."""
    used: set[str] = set()
    for variable in variables:
        expected = f"`{name}.variables` to be a list of `mpidist.Variable`"
        expect(isinstance(variable, Variable), "Checkpoint", expected, variable)
        assert isinstance(variable, Variable)
        own, number = variable.name, 0
        while own in used:
            number += 1
            own = f"{variable.name}_{number}"
        used.add(own)
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
