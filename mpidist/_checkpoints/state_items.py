"""Objects with a state: how it is read, compared over the ranks, and set again."""

from __future__ import annotations

import collections
import dataclasses
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from mpidist._base import guests
from mpidist._base.errors import CollectiveMismatchError, format_ranks, on_rank
from mpidist._base.types import HostArray
from mpidist._checkpoints import state_json
from mpidist._checkpoints.collective_call import CollectiveCall
from mpidist._checkpoints.state_json import (
    Json,
    Packed,
    State,
    Stored,
    checksum,
    host_copy,
)


@dataclasses.dataclass(frozen=True)
class StateItem:
    """An object with a state.

    Attributes:
        name: its name in the checkpoint.
        kind: "generator" for a random generator, "object" for another.
        get: returns its state.
        set: sets its state.
        merge: merges the states of all replicas into one for any number of replicas, if
            the object supports it.
        stream: returns the state of a new generator, from a seed; None: it cannot.
        readable: whether `get` may be called when the checkpoint is made: it does not
            communicate.
        shared: whether an array of this name must be the same on all replicas.
        refuse: returns why the saved states, as JSON, cannot be set, or "". On rank 0.
        misfit: returns why a state cannot be set, or "". On each rank.
    """

    name: str
    kind: Literal["generator", "object"]
    get: Callable[[], State]
    set: Callable[[State], object]
    merge: Callable[[list[State]], State] | None = None
    stream: Callable[[np.random.SeedSequence], State] | None = None
    readable: bool = False
    shared: Callable[[str], bool] = lambda name: False
    refuse: Callable[[list[Json]], str] = lambda values: ""
    misfit: Callable[[State], str] = lambda state: ""

    def __str__(self) -> str:
        return f"{self.name!r}: state of {self.kind}"

    def pack(self, call: str = "Checkpoint") -> Packed:
        """Return the state as JSON and arrays; these may share the object's memory."""
        return state_json.pack(self.get(), self.name, call)


class States(NamedTuple):
    """The states of items: for each one value, or one for each rank; their arrays."""

    values: dict[str, list[Json]]
    arrays: dict[str, Stored]


def exchange(
    call: CollectiveCall,
    items: Sequence[StateItem],
    packed: Mapping[str, Packed],
    variables: Mapping[str, Stored],
) -> States:
    """Compare states and variables over the ranks; return the states of all ranks.

    Collective.

    Args:
        call: the call that reads them.
        items: the items with a state.
        packed: this rank's states, by the names of the items.
        variables: the copies of variables, which must be the same on all ranks.

    Raises:
        CollectiveMismatchError: if an array differs that must not.
    """

    def numbers() -> dict[str, int]:
        sums = {name: checksum(x) for name, x in variables.items()}
        return sums | {name: x.number for name, x in packed.items()}

    differing = call.differing(call.attempt(numbers))
    for name in variables:
        if name in differing:
            text = _drifted(call, name, differing[name], _OF_VARIABLES)
            raise CollectiveMismatchError(text)
    values = {item.name: [packed[item.name].value] for item in items}
    arrays = {name: x for item in items for name, x in packed[item.name].arrays.items()}
    if differing:
        own = [item for item in items if item.name in differing]
        _gather(call, own, packed, values, arrays)
    return States(values, arrays)


def _gather(
    call: CollectiveCall,
    items: Sequence[StateItem],
    packed: Mapping[str, Packed],
    values: dict[str, list[Json]],
    arrays: dict[str, Stored],
) -> None:
    """Add the states of all ranks, of items whose state differs. Collective."""
    own = []
    for item in items:
        value, sums = packed[item.name].value, packed[item.name].checksums
        own.append((value, sums, set(filter(item.shared, sums))))
    rows = [pickle.loads(x) for x in call.comm.all_gather_objects(pickle.dumps(own))]
    sent: list[str] = []
    for i, item in enumerate(items):
        all_sums = [row[i][1] for row in rows]
        shared = set().union(*(row[i][2] for row in rows))
        for array in dict.fromkeys(array for each in all_sums for array in each):
            column = [each.get(array) for each in all_sums]
            if len(set(column)) == 1:
                continue
            if array in shared:  # on some rank: a module may lack it on another one
                text = _drifted(call, array, column, _OF_TENSORS)
                raise CollectiveMismatchError(text)
            mine = column[call.rank]
            if mine is not None and (call.rank == 0 or mine != column[0]):
                sent.append(array)
        values[item.name] = [
            _value_of(row[i][0], row[i][1], all_sums[0], rank)
            for rank, row in enumerate(rows)
        ]

    def dump() -> bytes:
        return pickle.dumps({array: host_copy(arrays[array]) for array in sent})

    # All wait for the end of this: the exchange has no header.
    data = call.together(dump, scope=False)
    for rank, part in enumerate(call.comm.all_gather_objects(data)):
        others: dict[str, HostArray] = pickle.loads(part)
        arrays |= {_on_rank(array, rank): x for array, x in others.items()}


def _value_of(
    value: Json, own: dict[str, int], first: dict[str, int], rank: int
) -> Json:
    """Return a rank's state, with the names of arrays that are not those of rank 0."""
    differing = [name for name, number in own.items() if number != first.get(name)]
    return state_json.renamed(value, {name: _on_rank(name, rank) for name in differing})


def _on_rank(array: str, rank: int) -> str:
    return f"{array} (rank {rank})" if rank else array


_OF_VARIABLES: Final = (
    "Make the variable in the scope of the strategy, and change it by its own methods "
    "only"
)
_OF_TENSORS: Final = (
    "Give all ranks the same values before training: "
    "`mpidist.torch.broadcast_parameters(module)`, `mpidist.jax.broadcast(tree)`; and "
    "reduce the gradients of each step"
)


def _drifted(
    call: CollectiveCall, name: str, column: Sequence[object], remedy: str
) -> str:
    """Return the message for an array whose copies differ; name the minority."""
    groups: dict[object, list[int]] = {}
    for rank, number in enumerate(column):
        groups.setdefault(number, []).append(rank)
    most, *others = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    odd = sorted(rank for ranks in others for rank in ranks)
    have = "has" if len(odd) == 1 else "have"
    return on_rank(
        call.rank,
        f"{call.name}: the copies of {name!r} are not equal: {format_ranks(odd)} "
        f"{have} another value than {format_ranks(most)}. Nothing was saved. {remedy}",
    )


def tensors_from(arrays: Mapping[str, HostArray]) -> state_json.OnTensor:
    """Return what `unpack` calls for each tensor: it takes the memory of the arrays."""

    def tensor(library: str, name: str, device: str) -> Any:
        if library == "numpy":
            return arrays[name]
        kind: guests.GuestKind = "torch" if library == "torch" else "jax"
        return guests.from_stored(arrays[name], kind, device)

    return tensor


def copied_state(item: StateItem) -> State:
    """Return a copy of an item's state, which does not change with the object."""
    return _copied(item.get())


def _copied(state: State) -> State:
    if type(state) in (list, tuple):
        return type(state)(map(_copied, state))
    if isinstance(state, dict) and not isinstance(state, collections.Counter):
        return {key: _copied(x) for key, x in state.items()}
    if isinstance(state, np.ndarray):
        return state.copy()
    return state.clone() if guests.kind_of(state) == "torch" else state
