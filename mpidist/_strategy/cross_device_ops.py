"""The interface for choosing, or implementing, how values are reduced.

`StrategyExtended.reduce_to` and everything built on it (`Strategy.reduce`,
`ReplicaContext.all_reduce`) go through the strategy's `CrossDeviceOps`. Its methods run
on every rank, in cross-replica context; each rank passes its own component.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from mpidist._agreement.guard import SectionResult
from mpidist._agreement.mismatch import Call, fingerprint
from mpidist._base import backend, checksums
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.options import CommunicationOptions
from mpidist._base.reduce_op import ReduceOp, as_reduce_op
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import home_of
from mpidist._strategy.reductions import (
    Destination,
    Pair,
    broadcast_value,
    check_destinations,
    root_of,
)
from mpidist._values.distributed import DistributedValues, Mirrored, own_component
from mpidist._values.locality import component_of, differs, is_same
from mpidist._values.variable import Variable, storage_of

T = TypeVar("T")


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
        options: CommunicationOptions | None = None,
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
        options: CommunicationOptions | None = None,
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

        def reduce() -> list[Nest]:
            op = as_reduce_op(reduce_op, call)
            for value, destinations in pairs:
                if not (differs(value) or is_same(group, value)):
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

        def same(results: list[Nest]) -> list[Nest]:
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

        def broadcast() -> Nest:
            check_destinations(group, destinations, call)
            value = tensor.value() if isinstance(tensor, Variable) else tensor
            return self.broadcast_implementation(value, destinations)

        result = _on_all(group, call, broadcast, lambda result: [result])
        if isinstance(result, (bool, int, float, complex)):
            return result
        return _mirror(group, result)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Nest,
        destinations: Destination,
        options: CommunicationOptions | None,
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
        options: CommunicationOptions | None,
    ) -> list[Nest]:
        """Combine several values, by default one at a time. Collective."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Nest, destinations: Destination) -> Nest:
        """Copy rank 0's value to all ranks, by default with MPI Bcast. Collective."""
        return broadcast_value(context.current().group, lambda: tensor)


def _on_all(
    group: ReplicaGroup,
    call: str,
    body: Callable[[], T],
    same: Callable[[T], list[Nest]],
) -> T:
    """Run code that may be the user's, and wait until all ranks have finished.

    Collective. An exception on one rank is raised on all. The results that ``same``
    selects become Mirrored. From then on their components are assumed to be the same,
    so they are compared here, unless the guard is off.
    """
    guard = group.guard

    def checked(section: SectionResult) -> T:
        try:
            with context.entered(group.cross_frame):
                result = body()
            if guard.checks:
                text = ", ".join(_describe_result(x) for x in same(result))
                section.set_result(text, fingerprint(text))
        except Exception:
            raise
        except BaseException:  # such as sys.exit: not repeated on other ranks
            section.kind = "raised"
            raise
        return result

    result: T = guard.run_section(Call(f"the end of {call}"), checked)
    return result


def _mirror(group: ReplicaGroup, result: Nest) -> Nest:
    """Wrap a result that is the same on all ranks.

    Also if it is already wrapped on this rank, because all ranks count keys.
    """
    return group.registry.wrap_tree(Mirrored, own_component(result))


def _describe_result(x: Nest) -> str:
    x = component_of(x)
    if isinstance(x, IndexedSlices):
        return f"IndexedSlices of {_describe_result(x.values)}"
    if backend.is_array(x) or backend.is_number(x):
        return checksums.summarize(backend.as_array(x, "reduce")[0])
    return f"a {type(x).__name__}"


def group_of_values(values: list[Nest]) -> ReplicaGroup:
    """Return the group that these values belong to, or else the current one.

    Users may call `CrossDeviceOps` outside every scope, where the current group is that
    of the default strategy.
    """
    for value in values:
        if isinstance(value, Variable):
            return storage_of(value).group
        home = home_of(value) if isinstance(value, DistributedValues) else None
        if home is not None:
            found: ReplicaGroup = home.group
            return found
    return context.current().group
