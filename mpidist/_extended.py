"""StrategyExtended: the cross-replica verbs beneath `Strategy`.

Each method checks its arguments' form and hands over to `_dispatch.perform`, which runs
the verb of the same name here, or commands it where rank 0 is in ``merge_fn``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mpidist import _context, _dispatch, _nest
from mpidist import _verbs as _verbs  # registers them
from mpidist._collectives import Collectives
from mpidist._dispatch import OnRank0
from mpidist._options import CommunicationOptions, ReduceOp
from mpidist._replica import ReplicaContext
from mpidist._values import DistributedValues, Registry, select_replica
from mpidist._variables import Variable

if TYPE_CHECKING:
    from mpidist._coordinator import Coordinator
    from mpidist._strategy import Strategy


class StrategyExtended:
    """More of a strategy: for library writers and ported ``merge_fn`` code.

    `Strategy.extended` returns it. All methods are for cross-replica context: at
    program level every rank must make the call (collective); inside ``merge_fn`` the
    coordinator makes it for all.
    """

    def __init__(
        self, strategy: Strategy, collectives: Collectives, *, is_mpi: bool
    ) -> None:
        self._strategy = strategy
        self._collectives = collectives
        self._is_mpi = is_mpi
        comm = collectives.comm
        self._replica_id = comm.rank
        self._num_replicas = comm.size
        self._registry = Registry(comm.rank, comm.size)
        self._device_name = collectives.device.name_on(comm.rank)
        names = comm.all_gather_objects(self._device_name.encode())
        self._devices = tuple(name.decode() for name in names)
        self._replica_context = ReplicaContext(strategy, None)

    def __repr__(self) -> str:
        return f"<mpidist.StrategyExtended of {self._strategy}>"

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices that replicas run on, in replica order."""
        return self._devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold variables: those of the replicas."""
        return self._devices

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``fn`` once per replica; see `Strategy.run`. Collective."""
        kwargs = {} if kwargs is None else kwargs
        return self._perform("call_for_each_replica", fn, args, kwargs)

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Combine a per-replica value over all replicas. Collective.

        Args:
            reduce_op: a `ReduceOp`, its name, or `VariableAggregation` SUM or MEAN.
            value: a `PerReplica`, or a nest of them.
            destinations: where the result is wanted: a variable (which does not
                change), a distributed value or array (for all of whose replicas it
                is), or a device string of `worker_devices`. Every replica gets it.
            options: for this call.
            experimental_hints: the older name of ``options``.

        Returns:
            `Mirrored`, in the nest of ``value``. A value that is the same on all
            replicas comes back as it is for MEAN, MIN and MAX.

        Raises:
            ValueError: for SUM or PROD of a value that is not per replica, or a
                destination that is none.
        """
        options = _one_of("reduce_to", options, experimental_hints)
        return self._perform("reduce_to", reduce_op, value, destinations, options)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Any,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Combine several per-replica values, in one fused reduction. Collective.

        Args:
            reduce_op: as for `reduce_to`.
            value_destination_pairs: an iterable of (value, destinations).
            options: for this call.
            experimental_hints: the older name of ``options``.

        Returns:
            A list with what `reduce_to` gives for each pair, in order.
        """
        options = _one_of("batch_reduce_to", options, experimental_hints)
        if isinstance(value_destination_pairs, Iterator):
            value_destination_pairs = list(value_destination_pairs)
        result: list[Any] = self._perform(
            "batch_reduce_to", reduce_op, value_destination_pairs, options
        )
        return result

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Give every replica the value that rank 0 has. Collective.

        Args:
            tensor: an array, or a Python number.
            destinations: as for `reduce_to`; every replica gets the value.

        Returns:
            `Mirrored`. Python numbers and Mirrored values come back as they are.
        """
        if isinstance(tensor, Variable):
            tensor = tensor._read()  # on all ranks, where it is ON_READ
        return self._perform("broadcast_to", OnRank0(tensor), destinations)

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Run ``fn(var, *args, **kwargs)`` on every replica, to change its copy.

        Collective. In ``fn``, `Variable.assign` and its kin change the replica's own
        copy, with no communication. Mirrored arguments arrive as their value. On the
        coordinator ``fn`` travels to the other ranks, with the local values that it
        closes over; a function that can be imported goes by name.

        Args:
            var: the variable.
            fn: the function.
            args: its further positional arguments, the same on all replicas.
            kwargs: its keyword arguments, likewise.
            group: whether to return the results as one Mirrored.

        Returns:
            What ``fn`` returns, as `Mirrored`; with ``group=False`` as tuples of the
            replicas' results (those that `Strategy.experimental_local_results`
            gives). For a ``var`` that is not distributed: ``fn(var, ...)``.

        Raises:
            ValueError: for a PerReplica among the arguments, which would make the
                copies differ.
            ReplicaError: if ``fn`` raised on another replica. Then all copies of what
                it wrote are made equal to rank 0's again.
            CollectiveMismatchError: for plain arguments that are not the same on all
                replicas (likewise).
        """
        kwargs = {} if kwargs is None else kwargs
        frame = _context.require_cross_replica(self._strategy, "update")
        if not isinstance(var, Variable):
            if isinstance(var, DistributedValues):
                error = TypeError(
                    f"update: expected a `mpidist.Variable`, got a {type(var).__name__}"
                    "; use `strategy.run` to work on each replica's component"
                )
                if frame.coordinator is not None:
                    raise error
                self._collectives.invalid("update", error)
            return fn(var, *select_replica(tuple(args)), **select_replica(kwargs))
        self._check_owner("update", var)
        text = f"update of Variable {var.name!r} [#{var._key[0]}]"
        result = self._perform("update", var, fn, args, kwargs, group, text)
        if group:
            return result
        _fetch(frame.coordinator, _nest.flatten(result)[0])
        return _nest.map_structure(_local_results_of, result)

    # --- for the package ------------------------------------------------------

    def _perform(self, name: str, *args: Any) -> Any:
        return _dispatch.perform(self._strategy, name, *args)

    def _check_owner(self, call: str, variable: Variable) -> None:
        if variable.distribute_strategy is not self._strategy:
            raise RuntimeError(
                f"{call}: Mixing different Strategy objects: {variable!r} belongs to "
                f"{variable.distribute_strategy}, not to {self._strategy}"
            )


def local_results(strategy: Strategy, value: Any) -> tuple[Any, ...]:
    """Return the components that this process can see, one nest for each replica."""
    leaves, structure = _nest.flatten(value)
    frame = _context.current()
    coordinator = frame.coordinator if frame.strategy is strategy else None
    _fetch(coordinator, leaves)
    columns = [_local_results_of(leaf) for leaf in leaves]
    distributed = [
        len(column)
        for leaf, column in zip(leaves, columns, strict=True)
        if isinstance(leaf, (DistributedValues, Variable))
    ]
    rows = max(distributed, default=1)
    columns = [c if len(c) == rows else c * rows for c in columns]
    return tuple(
        structure.unflatten([column[i] for column in columns]) for i in range(rows)
    )


def _fetch(coordinator: Coordinator | None, leaves: list[Any]) -> None:
    """Gather all of these values at once, where this is the coordinator."""
    if coordinator is not None:
        coordinator.fetch([x for x in leaves if isinstance(x, DistributedValues)])


def _local_results_of(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, (DistributedValues, Variable)):
        return tuple(leaf.values)
    return (leaf,)


def _one_of(call: str, options: Any, hints: Any) -> CommunicationOptions | None:
    if options is not None and hints is not None:
        raise TypeError(
            f"{call}: got both `options` and its older name `experimental_hints`; "
            "write `options` only"
        )
    chosen: CommunicationOptions | None = options if hints is None else hints
    return chosen
