"""What is saved: the present values of all items, compared over the ranks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpidist._base import backend
from mpidist._base.guests import DeviceCopy
from mpidist._base.types import Array
from mpidist._checkpoints import state_items
from mpidist._checkpoints.collective_call import CollectiveCall
from mpidist._checkpoints.contents import Item, VariableItem
from mpidist._checkpoints.state_items import StateItem, States
from mpidist._checkpoints.state_json import Packed, Stored, host_copy


def take(call: CollectiveCall, items: list[Item]) -> tuple[dict[str, Array], States]:
    """Return the current arrays of variables, and states. Collective.

    Raises:
        CollectiveMismatchError: if the copies of a variable or parameter differ.
        ValueError: if a variable has no single value.
    """
    call.attempt(lambda: _check_variables(items))
    objects_with_state = [item for item in items if isinstance(item, StateItem)]

    def read() -> tuple[dict[str, Array], dict[str, Packed]]:
        arrays = {
            item.name: item.variable.read_value()
            if item.on_read
            else item.variable.values[0]
            for item in items
            if isinstance(item, VariableItem)
        }
        return arrays, {item.name: item.pack() for item in objects_with_state}

    arrays, packed = call.together(read)
    return arrays, state_items.exchange(call, objects_with_state, packed, arrays)


def joined(variables: Mapping[str, Stored], objects: States, call: str) -> States:
    """Return states with the arrays of variables too.

    Raises:
        ValueError: if two arrays have the same name.
    """
    for name in variables:
        if name in objects.arrays:
            raise ValueError(
                f"{call}: the variable {name!r} and a tensor in the state of an object "
                "have the same name; give one of them another name"
            )
    return States(objects.values, {**variables, **objects.arrays})


def copied(states: States) -> States:
    """Return states whose arrays do not change with the objects."""
    arrays: dict[str, Stored] = {}
    for name, x in states.arrays.items():
        host = host_copy(x)
        is_own = isinstance(x, DeviceCopy) or backend.is_device_array(x)
        arrays[name] = host if is_own else np.array(host)
    return States(states.values, arrays)


def generators_alike(call: CollectiveCall, items: list[Item]) -> dict[str, bool]:
    """Return for each generator whether it is the same on all ranks. Collective."""
    found = [x for x in items if isinstance(x, StateItem) and x.kind == "generator"]
    if not found:
        return {}
    numbers = call.attempt(lambda: {item.name: item.pack().number for item in found})
    differing = call.differing(numbers)
    return {name: name not in differing for name in numbers}


def _check_variables(items: list[Item]) -> None:
    for item in items:
        if isinstance(item, VariableItem):
            item.check()
