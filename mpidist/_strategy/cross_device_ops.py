"""The interface for choosing, or implementing, how values are reduced.

`StrategyExtended.reduce_to` and everything built on it (`Strategy.reduce`,
`ReplicaContext.all_reduce`) go through the strategy's `CrossDeviceOps`. Its methods run
on every rank, in cross-replica context; each rank passes its own component.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpidist._agreement.guard import Part
from mpidist._agreement.mismatch import Call, fingerprint
from mpidist._base import backend, nest
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.options import CommunicationOptions, ReduceOp, as_reduce_op
from mpidist._engine import dtypes
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import Registry
from mpidist._values.distributed import (
    ArrayLike,
    DistributedValues,
    Mirrored,
    PerReplica,
    own_component,
)
from mpidist._values.synchronization import component_of, differs
from mpidist._values.variable import Variable, check_owner


class CrossDeviceOps:
    """Defines how per-replica values are reduced and copied between replicas.

    Pass one to `MPIStrategy`. Subclasses override `reduce_implementation` and, to
    handle several values more efficiently than one at a time,
    `batch_reduce_implementation` and `broadcast_implementation`. These methods run on
    every rank, with the strategy as the current one. They may call anything that is
    legal in cross-replica context (`Strategy.run`, `Strategy.gather`), or the
    implementation of their base class. An exception raised on one rank is raised on
    all. The result must be the same on all ranks; a checksum verifies this unless the
    guard is off.

    Example: sum in half precision::

        class Halves(mpidist.CollectiveAllReduce):
            def reduce_implementation(self, op, value, destinations, options):
                run = mpidist.get_strategy().run
                half = run(lambda x: x.astype("float16"), args=(value,))
                total = super().reduce_implementation(op, half, destinations, options)
                return None if total is None else total.astype("float32")

    (For a device string the result is None on all ranks but one.)
    """

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combine one per-replica value. Collective.

        Args:
            reduce_op: a `ReduceOp` or its name.
            per_replica_value: a `PerReplica` of arrays or numbers.
            destinations: as for `StrategyExtended.reduce_to`.
            options: communication options for this call.

        Returns:
            `Mirrored`; for a device string the array on that device's rank, and None
            on the others.

        Raises:
            ValueError: if the value is not a PerReplica, or the destinations are
                invalid.
        """
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce(reduce_op, pairs, options)[0]

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Any,
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Combine several per-replica values. Collective.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value_destination_pairs: a list of (value, destinations).
            options: communication options for this call.

        Returns:
            A list with the result of `reduce` for each pair.

        Raises:
            ValueError: as for `reduce`.
        """
        pairs = list(value_destination_pairs)
        group = _group_of([value for value, _ in pairs])
        call = f"{type(self).__name__}.batch_reduce"

        def reduce() -> list[Any]:
            op = as_reduce_op(reduce_op, call)
            for value, destinations in pairs:
                if not differs(value):
                    raise ValueError(
                        f"{call}: expected a `mpidist.PerReplica`, got {value!r:.80}; "
                        "pass what `strategy.run` returned"
                    )
                check_destinations(group, destinations, call)
            if len(pairs) == 1:
                value, destinations = pairs[0]
                return [self.reduce_implementation(op, value, destinations, options)]
            results = self.batch_reduce_implementation(op, pairs, options)
            if not isinstance(results, list) or len(results) != len(pairs):
                raise TypeError(
                    f"{call}: expected a list of {len(pairs)} results from "
                    f"`batch_reduce_implementation`, got {results!r:.80}"
                )
            return results

        def same(results: list[Any]) -> list[Any]:
            return [
                result
                for result, (_, destinations) in zip(results, pairs, strict=True)
                if root_of(group, destinations) is None
            ]

        results = _on_all(group, call, reduce, same)
        return [
            result
            if root_of(group, destinations) is not None
            else _mirror(group, result)
            for result, (_, destinations) in zip(results, pairs, strict=True)
        ]

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copy rank 0's value to every replica. Collective.

        Args:
            tensor: an array or a Python number; only rank 0's is used.
            destinations: as for `StrategyExtended.broadcast_to`.

        Returns:
            `Mirrored`. Python numbers are returned unchanged.
        """
        group = _group_of([destinations, tensor])
        call = f"{type(self).__name__}.broadcast"

        def broadcast() -> Any:
            check_destinations(group, destinations, call)
            value = tensor._read() if isinstance(tensor, Variable) else tensor
            return self.broadcast_implementation(value, destinations)

        result = _on_all(group, call, broadcast, lambda result: [result])
        if isinstance(result, (bool, int, float, complex)):
            return result
        return _mirror(group, result)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None,
    ) -> Any:
        """Combine one value; subclasses override this. Collective."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define reduce_implementation; derive "
            "from `mpidist.CollectiveAllReduce`, or define it"
        )

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: list[tuple[Any, Any]],
        options: CommunicationOptions | None,
    ) -> list[Any]:
        """Combine several values, by default one at a time. Collective."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copy rank 0's value to all ranks, by default with MPI Bcast. Collective."""
        return broadcast_value(context.current().group, lambda: tensor)


class CollectiveAllReduce(CrossDeviceOps):
    """Reduces all values with MPI Allreduce in few messages; the default."""

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None,
    ) -> Any:
        """All-reduce one value. Collective."""
        pairs = [(per_replica_value, destinations)]
        group = _group_of([per_replica_value])
        return reduce_pairs(group, reduce_op, pairs, options, "reduce_to")[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: list[tuple[Any, Any]],
        options: CommunicationOptions | None,
    ) -> list[Any]:
        """All-reduce several values, packed together. Collective."""
        group = _group_of([value for value, _ in value_destination_pairs])
        return reduce_pairs(
            group, reduce_op, value_destination_pairs, options, "batch_reduce_to"
        )


class _Packed(CollectiveAllReduce):
    def __init__(self, num_packs: int = 1) -> None:
        """Store the number of packs.

        Raises:
            ValueError: if the number is negative.
        """
        if isinstance(num_packs, bool) or not isinstance(num_packs, int):
            raise TypeError(
                f"{type(self).__name__}: expected `num_packs` to be an int, got "
                f"{num_packs!r}"
            )
        if num_packs < 0:
            raise ValueError(
                f"{type(self).__name__}: expected `num_packs` to be 0 or more, got "
                f"{num_packs}"
            )
        self._num_packs = num_packs

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: list[tuple[Any, Any]],
        options: CommunicationOptions | None,
    ) -> list[Any]:
        """All-reduce several values in about ``num_packs`` messages. Collective."""
        if options is None or not options.bytes_per_pack:
            leaves = nest.flatten([value for value, _ in value_destination_pairs])[0]
            total = sum(
                backend.as_array(component_of(x), "batch_reduce")[0].nbytes
                for x in leaves
                if not isinstance(component_of(x), IndexedSlices)
            )
            packs = self._num_packs or total or 1
            size = CommunicationOptions(bytes_per_pack=max(1, -(-total // packs)))
            options = size if options is None else options.merge(size)
        return super().batch_reduce_implementation(
            reduce_op, value_destination_pairs, options
        )


class NcclAllReduce(_Packed):
    """Like `CollectiveAllReduce`, with values packed into ``num_packs`` messages.

    The name is TensorFlow's. `mpidist.experimental.CommunicationOptions` selects the
    library that transfers the data, not this class.

    Args:
        num_packs: the number of packs; 0: one message for each value.
    """


class HierarchicalCopyAllReduce(_Packed):
    """Like `CollectiveAllReduce`, with values packed into ``num_packs`` messages.

    The name is TensorFlow's. The MPI library chooses an algorithm for the machine.

    Args:
        num_packs: the number of packs; 0: one message for each value.
    """


class ReductionToOneDevice(CrossDeviceOps):
    """Reduces to one rank, which then broadcasts the result to the others.

    Slower than an all-reduce, but it can use a custom reduction function.

    Args:
        reduce_to_device: a device string of `StrategyExtended.worker_devices`;
            None: the first.
        accumulation_fn: a function of the list of all replicas' values, in replica
            order, that returns their sum (in any definition). It is called on that
            device's rank. MEAN divides its result by the number of replicas. None: the
            MPI operation.
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Store the device and the function."""
        self._device = reduce_to_device
        self._accumulate = accumulation_fn

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None,
    ) -> Any:
        """Reduce to the device, then broadcast. Collective."""
        group = _group_of([per_replica_value])
        collectives = group.collectives
        device = self._device or group.device_names[0]
        check_destinations(group, device, type(self).__name__)
        center = root_of(group, device) or 0
        own = component_of(per_replica_value)
        call = type(self).__name__
        if isinstance(own, IndexedSlices):  # rows are concatenated, not added
            pairs = [(per_replica_value, destinations)]
            return reduce_pairs(group, reduce_op, pairs, options, call)[0]
        if self._accumulate is None:
            total = collectives.all_reduce(reduce_op, own, options, call, center)
        else:
            total = self._combine(group, reduce_op, own, center, options)
        wanted_at = root_of(group, destinations)
        if wanted_at == center:
            return total
        if total is None:
            total = _empty_result(reduce_op, own, call)
        everywhere = collectives.broadcast(total, center, options, call)
        if wanted_at is not None:
            return everywhere if group.replica_id == wanted_at else None
        return group.registry.wrap_tree(Mirrored, everywhere)

    def _combine(
        self, group: ReplicaGroup, op: ReduceOp, own: Any, center: int, options: Any
    ) -> Any:
        collectives = group.collectives
        call = f"{type(self).__name__} with accumulation_fn"
        accumulate = self._accumulate
        if op not in (ReduceOp.SUM, ReduceOp.MEAN) or accumulate is None:
            raise ValueError(f"{call}: expected SUM or MEAN, got {op.name}")
        x, kind = backend.as_array(own, call)
        row = backend.contiguous(x).reshape(1, *x.shape)
        rows = collectives.all_gather(row, 0, options, call)
        if group.replica_id != center:
            return None
        total = backend.as_array(accumulate(list(rows)), call)[0]
        expected = _empty_result(op, x, call)
        if op is ReduceOp.MEAN:
            total = total / len(rows)
        total = total.astype(expected.dtype, copy=False)
        if tuple(total.shape) != tuple(x.shape):
            raise ValueError(
                f"{call}: expected a result of shape {tuple(x.shape)}, got "
                f"{backend.describe(total)}"
            )
        return backend.restore(total, kind)


def _empty_result(op: ReduceOp, own: Any, call: str) -> Any:
    """Return an empty array with the shape and dtype of a reduction's result."""
    x, kind = backend.as_array(own, call)
    result = backend.empty_like(x, x.shape, dtypes.reduction(x.dtype, op, call).result)
    result[...] = 0
    return backend.restore(result, kind)


# --- shared by the operations and the classes above -----------------------------------


def all_reduce(
    group: ReplicaGroup,
    op: ReduceOp,
    tree: Any,
    options: CommunicationOptions | None = None,
    call: str = "all_reduce",
) -> Any:
    """All-reduce a nest of own components, with the user's ops if given."""
    ops = group.custom_ops
    if ops is None:
        return group.collectives.all_reduce(op, tree, options, call)
    leaves, structure = nest.flatten(tree)
    number = group.registry.next_key()
    wrapped = [
        group.registry.wrap(PerReplica, own_component(x), (number, i))
        for i, x in enumerate(leaves)
    ]
    pairs = [(x, x) for x in wrapped]
    results = ops.batch_reduce(op, pairs, options)
    return structure.unflatten([own_component(x) for x in results])


def reduce_pairs(
    group: ReplicaGroup,
    op: ReduceOp,
    pairs: list[tuple[Any, Any]],
    options: CommunicationOptions | None,
    call: str,
) -> list[Any]:
    """All-reduce nests of per-replica values; reduce those for one rank to it.

    Values for all ranks become Mirrored.
    """
    registry = group.registry
    results = reduce_components(group, op, pairs, options, call)
    mirrored = [i for i, (_, to) in enumerate(pairs) if root_of(group, to) is None]
    wrapped = registry.wrap_tree(Mirrored, [results[i] for i in mirrored])
    for i, x in zip(mirrored, wrapped, strict=True):
        results[i] = x
    return results


def reduce_components(
    group: ReplicaGroup,
    op: ReduceOp,
    pairs: list[tuple[Any, Any]],
    options: CommunicationOptions | None,
    call: str,
) -> list[Any]:
    """Do the same as `reduce_pairs`, with plain results that the caller wraps."""
    collectives = group.collectives
    groups: dict[int | None, list[int]] = {}
    for i, (_, destinations) in enumerate(pairs):
        groups.setdefault(root_of(group, destinations), []).append(i)
    results: list[Any] = [None] * len(pairs)
    for root in sorted(groups, key=lambda r: -1 if r is None else r):
        members = groups[root]
        own = [nest.map_structure(component_of, pairs[i][0]) for i in members]
        reduced = collectives.all_reduce(op, own, options, call, root)
        for i, x in zip(members, reduced, strict=True):
            results[i] = x
    return results


def broadcast_value(group: ReplicaGroup, get: Callable[[], Any]) -> Any:
    """Copy the value that ``get`` returns on rank 0 to all ranks. Collective."""

    def make() -> list[Any]:
        value = get()
        if isinstance(value, PerReplica):
            raise TypeError(
                "broadcast_to: got a PerReplica, which is not one value; write "
                "`strategy.extended.reduce_to(op, value, destinations)`"
            )
        if isinstance(value, (bool, int, float, complex)):
            return [value, True]
        if isinstance(value, ArrayLike):
            value = value._read()
        # A copy: later changes to the array must not show on one rank only.
        return [backend.as_array(value, "broadcast_to")[0].copy(), False]

    value, is_number = group.collectives.share(make, "broadcast_to")
    if is_number:
        return value
    return group.registry.wrap_tree(Mirrored, value)


def root_of(group: ReplicaGroup, destinations: Any) -> int | None:
    """Return the rank of a device string; None for all other destinations."""
    if isinstance(destinations, str) and group.is_mpi:
        return group.device_names.index(destinations)
    return None


def check_destinations(group: ReplicaGroup, destinations: Any, call: str) -> None:
    """Raise a ValueError if the destinations are invalid."""
    if isinstance(destinations, Variable):
        check_owner(group, call, destinations)
        return
    if isinstance(destinations, (DistributedValues, ArrayLike)):
        return
    if backend.is_array(destinations):
        return
    if isinstance(destinations, str) and destinations in group.device_names:
        return
    raise ValueError(
        f"{call}: destinations must be a `mpidist.Variable`, a distributed value, an "
        f"array or one of {group.device_names}, got {destinations!r:.80}"
    )


def _on_all(
    group: ReplicaGroup,
    call: str,
    body: Callable[[], Any],
    same: Callable[[Any], list[Any]],
) -> Any:
    """Run code that may be the user's, and wait until all ranks have finished.

    Collective. An exception on one rank is raised on all. The results that ``same``
    selects become Mirrored. From then on their components are assumed to be the same,
    so they are compared here, unless the guard is off.
    """
    guard = group.guard

    def checked(part: Part) -> Any:
        try:
            with context.entered(group.cross_frame):
                result = body()
            if guard.checks:
                text = ", ".join(_describe_result(x) for x in same(result))
                part.set_result(text, fingerprint(text))
        except Exception:
            raise
        except BaseException:  # such as sys.exit: not repeated on other ranks
            part.kind = "raised"
            raise
        return result

    return guard.run_section(Call(f"the end of {call}"), checked)


def _mirror(group: ReplicaGroup, result: Any) -> Any:
    """Wrap a result that is the same on all ranks.

    Also if it is already wrapped on this rank, because all ranks count keys.
    """
    return group.registry.wrap_tree(Mirrored, own_component(result))


def _describe_result(x: Any) -> str:
    x = component_of(x)
    if isinstance(x, IndexedSlices):
        return f"IndexedSlices of {_describe_result(x.values)}"
    if backend.is_array(x) or backend.is_number(x):
        return backend.summarize(backend.as_array(x, "reduce")[0])
    return f"a {type(x).__name__}"


def _group_of(values: list[Any]) -> ReplicaGroup:
    """Return the group that these values belong to, or else the current one."""
    for value in values:
        if isinstance(value, Variable):
            return value._group
        home = getattr(value, "_home", None)
        if isinstance(home, Registry):
            found: ReplicaGroup = home.group
            return found
    return context.current().group
