"""merge_call: rank 0 commands, the other ranks follow.

The protocol
------------
1. *Entry.* All ranks agree on the structure of the arguments (one header). Arrays and
   numbers become `PerReplica` handles; each rank keeps its component under the same
   key. Other objects are compared by a fingerprint in the same header
   (`argument_equality`). Equal objects are passed to merge_fn. If any differ, all ranks
   exchange the fingerprints, and those that differ become PerReplica of objects. The
   code of merge_fn is compared in the same way. If it is the same, every rank finds
   the objects that its merge_fn can reach: these have names (`object_names`).
2. *Commands.* Rank 0 runs merge_fn. Each cross-replica operation that it calls is one
   message to the followers: its name and arguments. Objects that every rank has are
   sent by name (`commands`). Then every rank runs the operation
   (`dispatch.execute`), which has its own agreement and moves its own data, and
   registers its results under the same keys. *Updates* are messages too, but rank 0
   does not wait for the others; they end together (`updates`).
3. *End.* The last message contains the result or the exception of merge_fn. Values
   that the ranks have are sent by key, arrays that rank 0 has created are broadcast
   from their buffers, PerReplica that rank 0 has created are scattered, and the rest
   is in the message.

When something fails
--------------------
- merge_fn raises: the last message carries the exception; all ranks raise.
- An operation fails: on all ranks or on none (see `collectives`). Rank 0 raises inside
  merge_fn, which may catch the exception, so the followers wait for the next message
  without raising. If merge_fn does not catch it, they raise their own exception, or
  rank 0's.
- An update fails on a follower: it discards the updates after it, until the join that
  ends them. Rank 0 learns of it there (`updates`).
- A follower cannot read a message (a function cannot be imported there): it joins the
  operation's agreement with its error flag set.
- Rank 0 takes too long: the followers' wait for a message has the guard's deadline.

Memory: when rank 0 drops a handle, its key is sent with the next command, and the
followers drop theirs. At the end of the merge_call all are dropped.

Rejected: gathering the arguments on rank 0 (which this module exists to avoid); running
merge_fn on every rank, as TensorFlow's multi-worker strategy does (side effects happen
N times, and code that looks at one replica's values diverges silently).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from mpidist._agreement.mismatch import Call, call_of
from mpidist._base import backend, nest, threads
from mpidist._base.environment import debugging
from mpidist._base.fingerprint import fingerprint_of
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.types import Nest
from mpidist._collectives.collectives import Collectives
from mpidist._merge.argument_equality import (
    fingerprint_of_argument,
    fingerprint_of_function,
)
from mpidist._merge.coordinator import Coordinator
from mpidist._merge.follower import Follower
from mpidist._merge.object_names import Changes, Names
from mpidist._merge.object_parts import ATOMS
from mpidist._runtime import dispatch
from mpidist._runtime.dispatch import OnRank0, check_arguments
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import Key, Registered, gathered, set_component
from mpidist._values.components import check_owner
from mpidist._values.distributed import (
    DistributedValues,
    Mirrored,
    PerReplica,
    own_component,
)
from mpidist._values.variable import Variable, storage_of

_NO_ARGUMENTS: Final = nest.flatten(((), {}))[1]
_WITHOUT_ARGUMENTS: Final = call_of(f"merge_call {_NO_ARGUMENTS.render([])}")
DEBUGGING = debugging()  # read once: each merge_call asks
_COMPONENT: Final = "component"
_OBJECT: Final = "object"
_READ_ONCE: Final = (zip, map, filter, enumerate, types.GeneratorType)


def merge_call(
    group: ReplicaGroup,
    merge_fn: Callable[..., Nest],
    args: Sequence[Nest],
    kwargs: Mapping[str, Nest],
) -> Nest:
    """Run ``merge_fn`` on rank 0; return this replica's part of its result.

    Collective.
    """
    collectives = group.collectives
    leaves: list[Nest] = []
    kinds: list[str] = []
    structure, call = _NO_ARGUMENTS, _WITHOUT_ARGUMENTS
    try:  # without the calls of `Guard.checking`
        check_arguments("merge_call", args, kwargs)
        args = tuple(args)
        if not callable(merge_fn):
            raise TypeError(
                f"merge_call: expected `merge_fn` to be a function, got {merge_fn!r}"
            )
        if args or kwargs:
            leaves, structure = nest.flatten((args, kwargs))
            kinds = [_kind_of(leaf, group) for leaf in leaves]
            call = call_of(f"merge_call {structure.render(kinds)}")
        fingerprints = [fingerprint_of_function(merge_fn)]
        if _OBJECT in kinds:
            fingerprints += [
                fingerprint_of_argument(
                    leaves[i], partial(_argument, args, kwargs, i), group
                )
                for i, kind in enumerate(kinds)
                if kind == _OBJECT
            ]
    except Exception as error:
        collectives.invalid("merge_call", error)
    same = _compare(collectives, call, fingerprints)
    try:
        side, changes = _side_of(group, merge_fn, leaves, kinds, same)
        if args or kwargs:  # also empty lists, which are copied
            args, kwargs = structure.unflatten(leaves)
    except BaseException as error:  # the others wait for commands, or obey them
        raise collectives.guard.abandon(None, error) from None
    del leaves  # on rank 0 only merge_fn keeps its arguments
    if isinstance(side, Coordinator):
        result = side.lead(merge_fn, args, kwargs)
    else:
        del args, kwargs
        result = side.follow()
    if changes is not None:
        changes.tell(collectives)
    return result


def _side_of(
    group: ReplicaGroup,
    merge_fn: Callable[..., Nest],
    leaves: list[Nest],
    kinds: list[str],
    same: list[bool],
) -> tuple[Coordinator | Follower, Changes | None]:
    """Return this rank's side of the call; replace the leaves that become handles.

    And what compares the objects that merge_fn can reach, with ``MPIDIST_DEBUG=1``.

    Args:
        group: the ranks.
        merge_fn: the function.
        leaves: of the arguments.
        kinds: of the leaves.
        same: whether the code of the function and each object is the same everywhere.
    """
    held: dict[Key, Registered] = {}
    objects: list[tuple[int, Nest]] = []
    same_objects = iter(same[1:])
    number = group.registry.next_key() if leaves else 0
    for index, kind in enumerate(kinds):
        leaf = leaves[index]
        if kind == _COMPONENT or (kind == _OBJECT and not next(same_objects)):
            key = (number, index)
            own = own_component(leaf)
            held[key] = leaves[index] = group.registry.wrap(PerReplica, own, key)
        elif kind == _OBJECT and type(leaf) not in ATOMS:
            objects.append((index, leaf))
    names = changes = None
    if same[0] and group.num_replicas > 1:
        names = Names(merge_fn, objects, group.public_objects)
        # Replicas that are threads have the objects in common.
        if DEBUGGING and threads.current() is None:
            changes = Changes(names)
    if group.replica_id == 0:
        return Coordinator(group, held, names), changes
    return Follower(group, held, names), changes


def _compare(
    collectives: Collectives, call: Call, fingerprints: list[int]
) -> list[bool]:
    """Return for each of the fingerprints whether it is the same on all ranks.

    Collective: the header of the merge_call.
    """
    one = len(fingerprints) == 1
    combined = fingerprints[0] if one else fingerprint_of(fingerprints)
    alike = collectives.guard.agree_on(call, combined)
    if alike or one:
        return [alike] * len(fingerprints)
    rows = collectives.comm.all_gather_integers(fingerprints)
    return [len({*column}) == 1 for column in zip(*rows, strict=True)]


def _argument(args: Sequence[Nest], kwargs: Mapping[str, Nest], number: int) -> str:
    """Return the argument that contains the leaf with this number, for messages."""
    named = [(f"args[{i}]", x) for i, x in enumerate(args)]
    named += [(f"kwargs[{key!r}]", kwargs[key]) for key in sorted(kwargs)]
    for name, part in named:
        leaves = nest.flatten(part)[0]
        if number < len(leaves):
            return name if len(leaves) == 1 else f"{name}, leaf {number}"
        number -= len(leaves)
    return "of merge_call"


def _kind_of(leaf: Nest, group: ReplicaGroup) -> str:
    """Return how an argument is passed: a text that all ranks compare."""
    if isinstance(leaf, Variable):
        check_owner(group, "merge_call", leaf)
        return f"Variable {leaf.name!r} #{storage_of(leaf).key}"
    if isinstance(leaf, (DistributedValues, IndexedSlices)):
        return _COMPONENT
    if backend.is_number(leaf) or backend.is_array(leaf):
        backend.as_array(leaf, "merge_call")
        return _COMPONENT
    if isinstance(leaf, _READ_ONCE):
        name = type(leaf).__name__
        raise TypeError(
            f"merge_call: got a {name} among the arguments, whose items are not passed "
            f"as values of all replicas; write `list(...)` around the {name}"
        )
    return _OBJECT


# --- operations that only the coordinator uses ----------------------------------------


@dispatch.operation("collect")
def _collect(
    group: ReplicaGroup, values: list[DistributedValues | Variable]
) -> list[list[Nest]]:
    """Return the components of values: on rank 0, a column for each value."""
    collectives = group.collectives
    own = [
        storage_of(x).view if isinstance(x, Variable) else own_component(x)
        for x in values
    ]
    rows = collectives.collect(own, "experimental_local_results")
    return [list(column) for column in zip(*rows, strict=True)]


@dispatch.operation("scatter")
def _scatter(group: ReplicaGroup, marked: OnRank0, mirrored: bool) -> DistributedValues:
    """Send each rank its component of a value that rank 0 has created; return it."""
    collectives = group.collectives
    registry = group.registry
    value = marked.value
    rows = None if value is None else [[own] for own in gathered(value) or ()]
    (own,) = collectives.scatter(rows, "scatter a PerReplica of the coordinator")
    key = (registry.next_key(), 0)
    if value is None:
        return registry.wrap(Mirrored if mirrored else PerReplica, own, key)
    # A copy here, too: merge_fn may change its array after the others have theirs.
    set_component(value, own)
    return registry.add(key, value)
