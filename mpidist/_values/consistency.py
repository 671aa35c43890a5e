"""Checks that the copies of mirrored variables are equal, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._base import backend, checksums, nest, reporting
from mpidist._base.errors import OutOfSyncError, format_ranks, on_rank
from mpidist._base.expect import expect
from mpidist._base.types import Array, Nest
from mpidist._runtime import context, dispatch, interruptions
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.components import check_owner
from mpidist._values.variable import Variable, array_of, storage_of

_CALL: Final = "check_in_sync"
_MOST_NAMED: Final = 5  # arrays, or ranks, in a message
_DIGEST_BYTES: Final = 16
_K = TypeVar("_K")


def check_in_sync(variables: Nest) -> None:
    """Check that all replicas have the same copies of mirrored variables.

    Collective, at every level. Each rank computes a checksum (BLAKE2b, of 128 bits)
    of its copies; the ranks compare them in one message, whatever the number of
    variables. mpidist keeps copies equal, but it cannot detect code that writes to a
    CuPy array returned by `Variable.value`, a function of `update` that computes
    different bits on another machine, or faulty memory.

    Args:
        variables: a `Variable` or a nest of them, the same on all ranks.

    Raises:
        OutOfSyncError: on every rank, if copies differ. The message names the
            variables, the ranks that differ, and where they first differ.
        TypeError: if a leaf is not a variable.
        ValueError: for an ON_READ variable, whose copies may differ.

    Example::

        with strategy.scope():
            weights = mpidist.Variable(np.ones(2))
        mpidist.check_in_sync(weights)  # None
    """
    try:
        leaves = nest.flatten(variables)[0]
        if not leaves:
            return
        group = _group_of(leaves)
        with dispatch.checking(group, _CALL):
            for leaf in leaves:
                is_variable = isinstance(leaf, Variable)
                expect(is_variable, _CALL, "a `mpidist.Variable`", leaf)
                if storage_of(leaf).on_read:
                    raise ValueError(
                        f"{_CALL}: the copies of {leaf!r} may differ, since it is "
                        "ON_READ"
                    )
                check_owner(group, _CALL, leaf)
        if context.is_in_replica(group):
            _check(group, leaves)
        else:
            dispatch.perform(group, _CALL, leaves)
    except BaseException as error:
        interruptions.left(_group_of(nest.flatten(variables)[0]), _CALL, error)
        raise


def _group_of(leaves: list[Nest]) -> ReplicaGroup:
    return next(
        (storage_of(x).group for x in leaves if isinstance(x, Variable)),
        context.current().group,
    )


@dispatch.operation(_CALL)
def _check(group: ReplicaGroup, variables: list[Variable]) -> None:
    text = ", ".join(f"{v.name!r} #{storage_of(v).key[0]}" for v in variables)
    advice = (
        "Find what changed them. Rank 0's copy for all: `variable.assign("
        "strategy.extended.broadcast_to(variable.value(), variable))`"
    )
    head = f"{_CALL}: the copies of a mirrored variable differ:"
    arrays = {variable: array_of(variable) for variable in variables}
    _compare(group, f"{_CALL}({text})", arrays, _describe, head, advice)


def compare_arrays(
    group: ReplicaGroup, named: Mapping[str, Nest], call: str, advice: str
) -> None:
    """Compare arrays, or tensors, of all ranks by checksums. Collective.

    Raises:
        OutOfSyncError: on all ranks, with the names of those that differ, and advice.
    """
    with group.guard.checking(call):
        arrays = {name: backend.as_array(x, call)[0] for name, x in named.items()}
    if group.num_replicas == 1:
        return
    described = [f"{name!r}: {backend.describe(x)}" for name, x in arrays.items()]
    head = f"{call}: tensors differ between ranks:"
    text = f"{call} of {{{', '.join(described)}}}"
    _compare(
        group, text, arrays, lambda _, *one: "  {!r} {}".format(*one), head, advice
    )


def _compare(
    group: ReplicaGroup,
    text: str,
    arrays: Mapping[_K, Array],
    describe: Callable[[ReplicaGroup, _K, Difference], str],
    head: str,
    advice: str,
) -> None:
    """Raise OutOfSyncError if arrays are not the same on all ranks. Collective.

    Args:
        group: the ranks.
        text: of the call, which the ranks compare.
        arrays: of the same names on all ranks.
        describe: returns the lines for one of them. Collective.
        head: the first line.
        advice: the last line.
    """
    with group.guard.checking(text):
        digests = {name: digest(x) for name, x in arrays.items()}
    found = [*find_differences(group, Call(text), digests).items()]
    lines = [describe(group, *one) for one in found[:_MOST_NAMED]]
    if len(found) > len(lines):
        lines.append(f"  and {len(found) - len(lines)} more")
    if lines:
        text = "\n".join([head, *lines, advice])
        raise OutOfSyncError(on_rank(group.replica_id, text))


class Steps:
    """Steps that all ranks make with the same parameters.

    Attributes:
        number: how many were begun.
    """

    def __init__(self) -> None:
        self.number = 0
        self._told = False

    def begin(
        self,
        group: ReplicaGroup,
        named: Callable[[], Mapping[str, Nest]],
        call: str,
        broadcast: str,
    ) -> None:
        """Compare the parameters of all ranks, in steps 0, 1, 2, 4, 8, ... Collective.

        Before the first step a difference raises OutOfSyncError; later, when unlike
        processors may have rounded unlike, rank 0 logs a warning, once.

        Args:
            group: the ranks.
            named: returns the parameters, by name.
            call: the name of the call, for messages.
            broadcast: the line that gives all ranks the same.
        """
        number = self.number
        advice = f"Before the first step copy rank 0's to all ranks: {broadcast}"
        if number:
            advice = (
                f"They were the same before the first of {number} steps. Find what "
                "differs: a learning rate (ReduceLROnPlateau needs a loss reduced over "
                "all ranks), or what the program does to parameters and reduced "
                "gradients"
            )
        try:
            if not number & (number - 1):
                compare_arrays(group, named(), call, advice)
        except OutOfSyncError as error:
            if not number:
                raise
            if group.replica_id == 0 and not self._told:
                reporting.warn(f"mpidist: {error}")
            self._told = True
        self.number += 1


class Difference(NamedTuple):
    """Which copies of an array differ.

    Attributes:
        drifted: the ranks whose copies are not the most frequent one.
        agreeing: the other ranks.
    """

    drifted: list[int]
    agreeing: list[int]

    def __str__(self) -> str:
        drifted, agreeing = format_ranks(self.drifted), format_ranks(self.agreeing)
        return f"on {drifted}, compared with {agreeing}"


def digest(array: Array) -> bytes:
    """Return 128 bits that depend on the values of an array."""
    raw = checksums.value_bytes(backend.to_host(array))
    return hashlib.blake2b(raw.data, digest_size=_DIGEST_BYTES).digest()


def find_differences(
    group: ReplicaGroup, call: Call, digests: Mapping[_K, bytes | int]
) -> dict[_K, Difference]:
    """Compare digests, of the same names on all ranks; return what differs.

    Collective: one header if nothing does.
    """
    own = [*digests.values()]
    columns = zip(*group.guard.values_of_all(call, own), strict=True)
    found = zip(digests, columns, strict=True)
    return {name: difference_in(x) for name, x in found if len({*x}) > 1}


def difference_in(column: Sequence[object]) -> Difference:
    """Return the ranks whose values are not the most frequent; in a tie, the first."""
    usual = max(column, key=column.count)
    drifted = [rank for rank, one in enumerate(column) if one != usual]
    return Difference(drifted, [r for r in range(len(column)) if r not in drifted])


def _describe(group: ReplicaGroup, variable: Variable, difference: Difference) -> str:
    """Describe which ranks differ, and where. Collective."""
    comm = group.communicator
    mine = backend.contiguous(backend.to_host(array_of(variable)))
    theirs = mine.copy()
    comm.broadcast(backend.as_bytes(theirs), difference.agreeing[0])
    text = ""
    if group.replica_id in difference.drifted:
        differ = checksums.value_bytes(mine) != checksums.value_bytes(theirs)
        places = differ.reshape(mine.size, -1).any(axis=1)
        first = int(places.argmax())
        index = tuple(int(i) for i in np.unravel_index(first, mine.shape))
        at = f"[{', '.join(map(str, index))}]" if index else ""
        text = (
            f"    rank {group.replica_id}: {int(places.sum())} of "
            f"{mine.size} elements, the first at {variable.name}{at}: "
            f"{_both(mine.reshape(-1)[first], theirs.reshape(-1)[first])}"
        )
    lines = [*filter(None, comm.all_gather_objects(text))]
    head = f"  Variable {variable.name!r} {difference}:"
    return "\n".join([head, *lines[:_MOST_NAMED]])


def _both(mine: np.generic, theirs: np.generic) -> str:
    """Format two numbers, with their bytes if they print the same."""
    texts = [str(x.item()) for x in (mine, theirs)]
    if texts[0] == texts[1]:
        texts = [
            f"{text} (0x{x.tobytes()[::-1].hex()})"
            for text, x in zip(texts, (mine, theirs), strict=True)
        ]
    return f"{texts[0]} instead of {texts[1]}"
