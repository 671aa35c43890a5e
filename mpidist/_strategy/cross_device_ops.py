"""How values are reduced: the interface, and the implementations of tf.distribute.

`StrategyExtended.reduce_to` and everything built on it (`Strategy.reduce`,
`ReplicaContext.all_reduce`) go through the strategy's `CrossDeviceOps`. Its methods run
on every rank, in cross-replica context; each rank passes its own component.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

from mpidist._agreement.mismatch import Call
from mpidist._agreement.sections import SectionResult, run_section
from mpidist._base import backend, checksums, nest
from mpidist._base.expect import as_int, expect
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.options import CallOptions, CommunicationOptions
from mpidist._base.reduce_op import ReduceOp, as_reduce_op
from mpidist._base.types import Nest
from mpidist._collectives import dtype_table
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._strategy.reductions import (
    Destination,
    Pair,
    broadcast_value,
    check_destinations,
    group_of_values,
    reduce_pairs,
    root_of,
)
from mpidist._values.components import component_of, differs
from mpidist._values.distributed import Mirrored, own_component
from mpidist._values.variable import Variable, is_same

_Result: TypeAlias = tuple[Nest, bool]
"""A result, and whether it is for all ranks."""
_NUMBERS: Final = (bool, int, float, complex)


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
        per_replica_value: Nest,
        destinations: Destination,
        options: CallOptions = None,
    ) -> Nest:
        """Combine one per-replica value. Collective.

        Args:
            reduce_op: a `ReduceOp` or its name.
            per_replica_value: a `PerReplica` of arrays or numbers. Of a `Mirrored` or a
                variable each replica's copy counts.
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
        value_destination_pairs: Iterable[Pair],
        options: CallOptions = None,
    ) -> list[Nest]:
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
        group = group_of_values([value for value, _ in pairs])
        call = f"{type(self).__name__}.batch_reduce"

        def reduce() -> list[_Result]:
            op = as_reduce_op(reduce_op, call)
            for value, destinations in pairs:
                fits = differs(value) or is_same(group, value)
                what = "a `mpidist.PerReplica`"
                hint = "pass what `strategy.run` returned"
                expect(fits, call, what, value, hint, error=ValueError)
                check_destinations(group, destinations, call)
            if len(pairs) == 1:
                results = [self.reduce_implementation(op, *pairs[0], options)]
            else:
                results = self.batch_reduce_implementation(op, pairs, options)
            fits = isinstance(results, list) and len(results) == len(pairs)
            what = f"a list of {len(pairs)} results from `batch_reduce_implementation`"
            expect(fits, call, what, results)
            return [
                (result, root_of(group, destinations) is None)
                for result, (_, destinations) in zip(results, pairs, strict=True)
            ]

        return _run_on_all(group, call, reduce)

    def broadcast(self, tensor: Nest, destinations: Destination) -> Nest:
        """Copy rank 0's value to every replica. Collective.

        Args:
            tensor: an array or a Python number; only rank 0's is used.
            destinations: as for `StrategyExtended.broadcast_to`.

        Returns:
            `Mirrored`. Python numbers are returned unchanged.
        """
        group = group_of_values([destinations, tensor])
        call = f"{type(self).__name__}.broadcast"

        def broadcast() -> list[_Result]:
            check_destinations(group, destinations, call)
            value = tensor.value() if isinstance(tensor, Variable) else tensor
            return [(self.broadcast_implementation(value, destinations), True)]

        (result,) = _run_on_all(group, call, broadcast)
        number = own_component(result)
        return number if isinstance(number, _NUMBERS) else result

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Nest,
        destinations: Destination,
        options: CallOptions,
    ) -> Nest:
        """Combine one value; subclasses override this. Collective."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define reduce_implementation; derive "
            "from `mpidist.CollectiveAllReduce`, or define it"
        )

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: list[Pair],
        options: CallOptions,
    ) -> list[Nest]:
        """Combine several values, by default one at a time. Collective."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Nest, destinations: Destination) -> Nest:
        """Copy rank 0's value to all ranks, by default by one broadcast. Collective."""
        return broadcast_value(context.current().group, lambda: tensor)


class CollectiveAllReduce(CrossDeviceOps):
    """Reduces several values together, by one all-reduce; the default."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Reduce several values one at a time where only that is overridden."""
        super().__init_subclass__(**kwargs)
        ours, many = CollectiveAllReduce, "batch_reduce_implementation"
        if cls.reduce_implementation is not ours.reduce_implementation and (
            getattr(cls, many) is ours.batch_reduce_implementation
        ):
            setattr(cls, many, CrossDeviceOps.batch_reduce_implementation)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Nest,
        destinations: Destination,
        options: CallOptions,
    ) -> Nest:
        """All-reduce one value. Collective."""
        pairs = [(per_replica_value, destinations)]
        group = group_of_values([per_replica_value])
        return reduce_pairs(group, reduce_op, pairs, options, "reduce_to")[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: list[Pair],
        options: CallOptions,
    ) -> list[Nest]:
        """All-reduce several values, packed together. Collective."""
        pairs = value_destination_pairs
        group = group_of_values([value for value, _ in pairs])
        return reduce_pairs(group, reduce_op, pairs, options, "batch_reduce_to")


class _Packed(CollectiveAllReduce):
    def __init__(self, num_packs: int = 1) -> None:
        """Store the number of packs, 0 or more."""
        self._num_packs = as_int(type(self).__name__, "num_packs", num_packs, least=0)

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: list[Pair],
        options: CallOptions,
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
            order, that returns one value in place of their sum. It is called on that
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
        options: CallOptions,
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
        call = f"{call} from rank {center}"  # of which the gather says nothing
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
        options: CallOptions,
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
        result = _zeros_like_result(op, x, call)
        fits = backend.fits(total, result.dtype)
        if not fits or tuple(total.shape) != tuple(x.shape):
            raise ValueError(
                f"{call}: expected a result of shape {tuple(x.shape)} whose values "
                f"fit {result.dtype}, got {backend.describe(total)}"
            )
        backend.fill(result, total / len(rows) if op is ReduceOp.MEAN else total)
        return backend.restore(result, kind)


def _run_on_all(
    group: ReplicaGroup, call: str, body: Callable[[], list[_Result]]
) -> list[Nest]:
    """Run code that may be the user's, and wait until all ranks have finished.

    Collective. An exception on one rank is raised on all. Results for all ranks become
    Mirrored, whose components are assumed to be the same from then on: so they are
    compared here, unless the guard is off.
    """
    guard = group.guard

    def checked(section: SectionResult) -> list[_Result]:
        with group.cross_frame:
            results = body()
        if guard.checks:
            texts = [
                checksums.summarize_value(component_of(x), call)
                for x, for_all in results
                if for_all
            ]
            section.set_result(", ".join(texts))
        return results

    results = run_section(guard, Call(f"the end of {call}"), checked)
    # Wrapped again where this rank has a Mirrored already: all ranks count keys.
    return [
        group.registry.wrap_tree(Mirrored, own_component(x)) if for_all else x
        for x, for_all in results
    ]


def _zeros_like_result(op: ReduceOp, own: Nest, call: str) -> Nest:
    x, kind = backend.as_array(own, call)
    dtype = dtype_table.reduction(x.dtype, op, call).result
    result = backend.empty_like(x, x.shape, dtype)
    result[...] = 0
    return backend.restore(result, kind)
