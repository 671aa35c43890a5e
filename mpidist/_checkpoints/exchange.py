"""Compares states and variables over the ranks, and gathers the states that differ."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from mpidist._agreement.mismatch import Call
from mpidist._base import state_json
from mpidist._base.errors import CollectiveMismatchError, format_ranks, on_rank
from mpidist._base.state_json import Json, Packed, Stored, checksum, host_copy
from mpidist._base.types import HostArray
from mpidist._checkpoints.collective_call import CollectiveCall
from mpidist._checkpoints.items import GeneratorItem, Item, StateItem
from mpidist._values.consistency import Difference, difference_in, find_differences

Values: TypeAlias = dict[str, list[Json]]
"""The states of items by name: one value for all ranks, or one for each rank."""


def exchange(
    call: CollectiveCall,
    items: Sequence[StateItem],
    packed: Mapping[str, Packed],
    variables: Mapping[str, Stored],
    names: Collection[str],
) -> tuple[Values, dict[str, Stored]]:
    """Compare states and variables over the ranks. Collective.

    Args:
        call: the call that reads them.
        items: the items with a state.
        packed: this rank's states, by the names of the items.
        variables: the copies of variables to compare.
        names: of all variables.

    Returns:
        The states of all ranks, and the arrays that they name.

    Raises:
        CollectiveMismatchError: if an array differs that must not.
        ValueError: if arrays of states or variables have the same name.
    """
    differing = {}
    numbers: dict[str, int] = {}
    with call.guard.checking(call.name):
        _check_names(call, packed, names)
        if call.size > 1:  # for a save with `wait=False` a checksum takes long
            numbers |= {name: checksum(x) for name, x in variables.items()}
            numbers |= {name: x.number for name, x in packed.items()}
    if call.size > 1:
        differing = _differing(call, numbers)
    for name in variables:
        if name in differing:
            raise _drifted(call, name, differing[name], _OF_VARIABLES)
    values = {item.name: [packed[item.name].value] for item in items}
    arrays = {name: x for item in items for name, x in packed[item.name].arrays.items()}
    if differing:
        own = [item for item in items if item.name in differing]
        _gather(call, own, packed, values, arrays)
    return values, arrays


def _check_names(
    call: CollectiveCall, packed: Mapping[str, Packed], variables: Collection[str]
) -> None:
    """Raise a ValueError if arrays of variables or states have one name."""
    owners: dict[str, str] = {}
    for name, state in packed.items():
        for array in state.arrays:
            if array in variables:
                raise ValueError(
                    f"{call.name}: the variable {array!r} and a tensor in the state of "
                    "an object have the same name; give one of them another name"
                )
            if array in owners:
                raise ValueError(
                    f"{call.name}: a tensor in the state of {owners[array]!r} and one "
                    f"in that of {name!r} would both be {array!r}; give one of the "
                    "objects another name"
                )
            owners[array] = name


def differing_generators(call: CollectiveCall, items: Sequence[Item]) -> list[str]:
    """Return the names of the generators that differ between ranks. Collective."""
    found = [x for x in items if isinstance(x, GeneratorItem)]
    if not found:
        return []
    with call.guard.checking(call.name):
        numbers = {x.name: x.pack().number for x in found}
    return [*_differing(call, numbers)]


def _differing(
    call: CollectiveCall, numbers: Mapping[str, int]
) -> dict[str, Difference]:
    return find_differences(call.group, Call(f"{call.name}, comparing"), numbers)


def _gather(
    call: CollectiveCall,
    items: Sequence[StateItem],
    packed: Mapping[str, Packed],
    values: Values,
    arrays: dict[str, Stored],
) -> None:
    """Add the states of all ranks, of items whose state differs. Collective."""
    own = []
    for item in items:
        value, sums = packed[item.name].value, packed[item.name].checksums
        own.append((value, sums, sums.keys() & {*item.shared(sums)}))
    rows = call.comm.all_gather_objects(own)
    # The same on all ranks: of states that do not differ they have the same arrays.
    taken = {*arrays, *(name for row in rows for _, sums, _ in row for name in sums)}
    sent: list[str] = []
    for i, item in enumerate(items):
        all_sums = [row[i][1] for row in rows]
        # On some rank: a module may lack it on another one.
        shared = set().union(*(row[i][2] for row in rows))
        sent += _arrays_to_send(call, all_sums, shared)
        values[item.name] = []
        for rank, row in enumerate(rows):  # with the names of arrays unlike rank 0's
            value, sums, _ = row[i]
            differing = [x for x in sums if sums[x] != all_sums[0].get(x)]
            names = {name: _on_rank(name, rank, taken) for name in differing}
            values[item.name].append(state_json.renamed(value, names))

    def dump() -> bytes:
        return pickle.dumps({array: host_copy(arrays[array]) for array in sent})

    # All wait for the end of this: the exchange has no header.
    data = call.together(dump)
    for rank, part in enumerate(call.comm.all_gather_objects(data)):
        others: dict[str, HostArray] = pickle.loads(part)
        arrays |= {_on_rank(name, rank, taken): x for name, x in others.items()}


def _arrays_to_send(
    call: CollectiveCall, all_sums: list[dict[str, int]], shared: Collection[str]
) -> Iterator[str]:
    """Yield the names of the arrays of a state of which this rank sends its own copy.

    Args:
        call: the save.
        all_sums: of each rank the checksums of the arrays, by name.
        shared: the names of arrays that must be equal on all ranks.

    Raises:
        CollectiveMismatchError: if one of those differs, or some ranks have none (on
            all ranks).
    """
    for array in dict.fromkeys(array for each in all_sums for array in each):
        column = [each.get(array) for each in all_sums]
        found = difference_in(column)
        if not found.drifted:
            continue
        if array in shared:
            if None in column:
                lacking = [rank for rank, x in enumerate(column) if x is None]
                text = f"there is no {array!r} on {format_ranks(lacking)}"
                raise _refused(call, text, "Save the same structure on all ranks")
            raise _drifted(call, array, found, _OF_TENSORS)
        mine = column[call.rank]
        if mine is not None and (call.rank == 0 or mine != column[0]):
            yield array


def _on_rank(array: str, rank: int, taken: Collection[str]) -> str:
    """Return the name of an array of a rank, which no other array has."""
    if rank == 0:
        return array
    name = f"{array} (rank {rank})"
    while name in taken:
        name += "'"
    return name


_OF_VARIABLES: Final = (
    "Make the variable in the scope of the strategy, and change it by its own methods "
    "only"
)
_OF_TENSORS: Final = (
    "Give all ranks the same values before training: "
    "`mpidist.torch.broadcast_parameters(module)`, `mpidist.jax.broadcast(tree)`; and "
    "reduce the gradients of each step. A random key of each rank's own make by "
    "`jax.random.key(seed)`, not by `PRNGKey`"
)


def _drifted(
    call: CollectiveCall, name: str, found: Difference, remedy: str
) -> CollectiveMismatchError:
    """Return the error for an array whose copies differ; it names the minority."""
    have = "has" if len(found.drifted) == 1 else "have"
    text = (
        f"the copies of {name!r} are not equal: {format_ranks(found.drifted)} {have} "
        f"another value than {format_ranks(found.agreeing)}"
    )
    return _refused(call, text, remedy)


def _refused(call: CollectiveCall, text: str, remedy: str) -> CollectiveMismatchError:
    text = f"{call.name}: {text}. Nothing was saved. {remedy}"
    return CollectiveMismatchError(on_rank(call.rank, text))
