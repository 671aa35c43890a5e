"""Commits: copies of a state in the memory of the replicas, the same on all of them.

Making one: encode the states and copy the variables, on each replica by itself; compare
the states over the replicas, in one header (so all of them commit, and the same), which
also tells if one has failed; exchange the states if they differ; combine the ON_READ
variables. Nothing of it counts until the replicas have agreed (`_members`).

What is different on each replica survives it: ON_READ variables are combined, as
reading does, and differing states of generators are on all replicas.

Putting one back: replicas without it, which were spares, get it from one that has it.
Then each sets its objects. Generators of which each replica has its own stay with the
replicas that are left, and a spare goes on with those of the one that it replaces.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

from mpidist._base import backend, state_json
from mpidist._base.errors import (
    CheckpointError,
    CollectiveMismatchError,
    by_value,
    on_rank,
)
from mpidist._base.state_json import Json, Packed, own_copy
from mpidist._base.types import HostArray, record
from mpidist._checkpoints import exchange, restoring
from mpidist._checkpoints.collective_call import CollectiveCall
from mpidist._checkpoints.exchange import Values
from mpidist._checkpoints.items import GeneratorItem, Item, StateItem, VariableItem


@record
class Commit:
    """A copy of a state.

    Attributes:
        number: commits are counted; it is the same on all replicas.
        place: the number of this replica among those that made the commit.
        size: how many replicas made it.
        arrays: the values of the variables, and the tensors of the states.
        states: the other states: one for all replicas, or one for each.
    """

    number: int
    place: int
    size: int
    arrays: dict[str, HostArray]
    states: dict[str, list[Json]]


def take(
    call: CollectiveCall,
    items: Sequence[Item],
    number: int,
    plain: Collection[str],
    reused: Commit | None,
) -> Commit:
    """Return a copy of the items. Collective.

    Args:
        call: the call that makes it.
        items: what to copy.
        number: of the new commit.
        plain: the names of the plain values, which are the same on all replicas.
        reused: a commit of the same items that is no longer needed; its memory is used.

    Raises:
        CollectiveMismatchError: if a plain value differs between the replicas.
        TypeError: if a state cannot be kept, on one replica; all raise it.
    """
    old = {} if reused is None else reused.arrays
    objects = [item for item in items if isinstance(item, StateItem)]

    variables = [item for item in items if isinstance(item, VariableItem)]
    on_read = [item for item in variables if item.on_read]

    def prepare() -> tuple[dict[str, Packed], dict[str, HostArray]]:
        packed = {item.name: item.pack("State.commit") for item in objects}
        return packed, {
            x.name: own_copy(x.variable.value(), old.get(x.name))
            for x in variables
            if not x.on_read
        }

    packed, arrays = call.attempt(prepare)
    names = {x.name for x in variables}
    states, tensors = exchange.exchange(call, objects, packed, {}, names)
    _check_differing(call, objects, states, plain)

    def rest() -> dict[str, HostArray]:
        read = {x.name: backend.to_host(x.variable.read_value()) for x in on_read}
        return read | {name: own_copy(x, old.get(name)) for name, x in tensors.items()}

    if tensors or on_read:
        # In a section: a replica without memory for it tells the others.
        arrays |= call.together(rest)
    return Commit(number, call.rank, call.size, arrays, states)


def _check_differing(
    call: CollectiveCall,
    items: Sequence[StateItem],
    states: dict[str, list[Json]],
    plain: Collection[str],
) -> None:
    """Raise, on all replicas, for a state that differs and may not."""
    for item in items:
        column = states[item.name]
        if len(column) == 1:
            continue
        if item.name in plain:
            values = [
                state_json.unpack(state, lambda library, name, device: name)
                for state in column
            ]
            problem = (
                f"{item.name!r} is not the same on all replicas:\n"
                f"{by_value([f'{value!r:.80}' for value in values])}\n"
                "A plain value must be, since a replica that dies would take its own "
                "with it. Reduce it (`strategy.reduce`), or make an ON_READ variable "
                "of it"
            )
        elif not isinstance(item, GeneratorItem) and item.merge is None:
            problem = (
                f"{item.name!r} has another state on each replica, and no method "
                "`merge_states(states)`, so it could not go on with fewer replicas. "
                "Make its state the same on all of them, or add the method, which "
                "makes one state of all"
            )
        else:
            continue
        raise CollectiveMismatchError(on_rank(call.rank, f"{call.name}: {problem}"))


# --- putting it back ----------------------------------------------------------------


def share(call: CollectiveCall, own: Commit | None, has: Sequence[bool]) -> Commit:
    """Return the commit on all replicas, those that have joined too. Collective.

    Args:
        call: the call that puts it back.
        own: the commit; None on a replica that does not have it.
        has: for each replica whether it does; at least one of them.
    """
    root = has.index(True)
    mine = {} if own is None else own.arrays
    head: Any = None
    if own is not None and call.rank == root:
        kinds = {name: (x.dtype, x.shape) for name, x in mine.items()}
        head = own.number, own.size, own.states, kinds
    number, size, states, kinds = call.comm.all_gather_objects(head)[root]
    arrays = restoring.share(call, kinds, mine, root)
    return own or Commit(number, -1, size, arrays, states)


def put(
    call: CollectiveCall, items: Sequence[Item], commit: Commit, places: Sequence[int]
) -> None:
    """Set all objects to a commit that all replicas have. Collective.

    Args:
        call: the call that puts it back.
        items: the objects.
        commit: the commit.
        places: for each replica the number, among those that made the commit, of the
            one that it is or replaces.
    """
    by_name = {item.name: item for item in items}
    missing = sorted(by_name.keys() - commit.states.keys() - commit.arrays.keys())
    if missing:
        raise CheckpointError(
            f"{call.name}: {', '.join(map(repr, missing))} is not in the commit; "
            "`build` has to return the same objects each time"
        )
    saved: Values = {}
    for name, values in commit.states.items():
        # One replica has one generator, which then is that of all.
        several = len(values) > 1 and isinstance(by_name[name], GeneratorItem)
        saved[name] = [values[place] for place in places] if several else values

    def copy() -> dict[str, HostArray]:
        names = state_json.array_names(itertools.chain(*saved.values()))
        return commit.arrays | {name: commit.arrays[name].copy() for name in names}

    restoring.put(call, by_name, saved, call.together(copy))
    for item in items:  # of the step that was lost; a spare has none
        if isinstance(item, StateItem) and item.forget is not None:
            item.forget()
