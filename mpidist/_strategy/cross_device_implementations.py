"""The implementations of `CrossDeviceOps` that tf.distribute has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any  # for the arguments of users' functions

from mpidist._base import backend, nest
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.options import CommunicationOptions
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Nest
from mpidist._engine import dtype_table
from mpidist._runtime.group import ReplicaGroup
from mpidist._strategy.cross_device_ops import CrossDeviceOps, group_of_values
from mpidist._strategy.reductions import (
    Destination,
    Pair,
    check_destinations,
    reduce_pairs,
    root_of,
)
from mpidist._values.distributed import Mirrored
from mpidist._values.locality import component_of


class CollectiveAllReduce(CrossDeviceOps):
    """Reduces all values with MPI Allreduce in few messages; the default."""

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Nest,
        destinations: Destination,
        options: CommunicationOptions | None,
    ) -> Nest:
        """All-reduce one value. Collective."""
        pairs = [(per_replica_value, destinations)]
        group = group_of_values([per_replica_value])
        return reduce_pairs(group, reduce_op, pairs, options, "reduce_to")[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: list[Pair],
        options: CommunicationOptions | None,
    ) -> list[Nest]:
        """All-reduce several values, packed together. Collective."""
        group = group_of_values([value for value, _ in value_destination_pairs])
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
        value_destination_pairs: list[Pair],
        options: CommunicationOptions | None,
    ) -> list[Nest]:
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
        reduce_to_device: a device string, as for `StrategyExtended.reduce_to`; None,
            or a device that every rank has: rank 0's.
        accumulation_fn: a function of the list of all replicas' values, in replica
            order, that returns their sum (in any definition). It is called on that
            device's rank. MEAN divides its result by the number of replicas. None: the
            MPI operation.
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[list[Any]], Nest] | None = None,
    ) -> None:
        """Store the device and the function."""
        self._device = reduce_to_device
        self._accumulate = accumulation_fn

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Nest,
        destinations: Destination,
        options: CommunicationOptions | None,
    ) -> Nest:
        """Reduce to the device, then broadcast. Collective."""
        group = group_of_values([per_replica_value])
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
            total = _zeros_like_result(reduce_op, own, call)
        everywhere = collectives.broadcast(total, center, options, call)
        if wanted_at is not None:
            return everywhere if group.replica_id == wanted_at else None
        return group.registry.wrap_tree(Mirrored, everywhere)

    def _combine(
        self,
        group: ReplicaGroup,
        op: ReduceOp,
        own: Nest,
        center: int,
        options: CommunicationOptions | None,
    ) -> Nest:
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
        expected = _zeros_like_result(op, x, call)
        if op is ReduceOp.MEAN:
            total = total / len(rows)
        total = total.astype(expected.dtype, copy=False)
        if tuple(total.shape) != tuple(x.shape):
            raise ValueError(
                f"{call}: expected a result of shape {tuple(x.shape)}, got "
                f"{backend.describe(total)}"
            )
        return backend.restore(total, kind)


def _zeros_like_result(op: ReduceOp, own: Nest, call: str) -> Nest:
    """Return zeros with the shape and dtype of a reduction's result."""
    x, kind = backend.as_array(own, call)
    dtype = dtype_table.reduction(x.dtype, op, call).result
    result = backend.empty_like(x, x.shape, dtype)
    result[...] = 0
    return backend.restore(result, kind)
