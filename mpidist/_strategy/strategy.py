"""Strategy: what `MPIStrategy` and the default strategy share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from mpidist._base.nest import map_structure
from mpidist._base.options import (
    ReduceOp,
)
from mpidist._runtime import context, dispatch
from mpidist._runtime.group import ReplicaGroup
from mpidist._strategy.cluster_resolver import MPIClusterResolver
from mpidist._strategy.extended import StrategyExtended, local_results
from mpidist._strategy.value_context import ValueContext
from mpidist._values.distributed import PerReplica, own_component
from mpidist.data import (
    Dataset,
    DistributedDataset,
    DistributedIterator,
    InputContext,
    InputOptions,
    InputReplicationMode,
)


@dataclasses.dataclass(frozen=True)
class CommunicationStatistics:
    """What a strategy has communicated so far, on this rank.

    Attributes:
        seconds: time in collectives, waiting for other ranks included.
        calls: number of MPI calls that moved arrays, by MPI name.
        bytes: bytes of this rank's buffers in them, by MPI name.
    """

    seconds: float
    calls: dict[str, int]
    bytes: dict[str, int]


class Strategy:
    """Runs code on replicas and keeps their state together.

    The methods are those of ``tf.distribute.Strategy``. Make an `MPIStrategy`; this
    class is what it shares with the default strategy.
    """

    _name = "Strategy"

    def __init__(self, group: ReplicaGroup) -> None:
        """Take a group of replicas, and show it to users."""
        group.strategy = self
        self._group = group
        self._extended = StrategyExtended(group)

    def __repr__(self) -> str:
        group = self._group
        return (
            f"<mpidist.{self._name} #{group.number}: replica {group.replica_id} of "
            f"{group.num_replicas}, on {group.device_name}>"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self} cannot be pickled or copied: it is a group of processes. Make it "
            "once, and call `mpidist.get_strategy()` where it is needed"
        )

    @property
    def extended(self) -> StrategyExtended:
        """More methods, for library writers."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas: the ranks of the communicator."""
        return self._group.num_replicas

    @property
    def replica_id(self) -> int:
        """The number of this process's replica, from 0: its rank.

        At all levels; in a replica function it is what the replica context calls
        ``replica_id_in_sync_group``. Beyond tf.distribute, where one process has
        several replicas.
        """
        return self._group.replica_id

    @property
    def array_module(self) -> Any:
        """NumPy or CuPy: the module for arrays on this replica's device."""
        return self._group.device.array_module

    @property
    def cluster_resolver(self) -> MPIClusterResolver | None:
        """What MPI knows of the processes; None for the default strategy."""
        group = self._group
        if not group.is_mpi:
            return None
        return MPIClusterResolver(
            group.host_names, group.replica_id, group.device_names
        )

    def communication_statistics(self) -> CommunicationStatistics:
        """Return what was communicated so far, on this rank. Not collective."""
        traffic = self._group.communicator.traffic
        return CommunicationStatistics(*traffic.total())

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Make this the current strategy, in cross-replica context.

        Not collective. Variables that are made inside are mirrored. May be entered
        again inside itself.

        Raises:
            RuntimeError: inside the scope of another strategy, or in a replica
                function.
        """
        with context.scope(self._group):
            yield self

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Run ``fn`` once on every replica.

        Collective: every rank must call this, in the same order.

        Args:
            fn: the replica function; every rank calls its own.
            args: its positional arguments. PerReplica and Mirrored arguments (nested
                too) arrive as the replica's component, variables as themselves.
            kwargs: its keyword arguments, likewise.
            options: taken and not used (``tf.distribute.RunOptions`` is for TPUs).

        Returns:
            What ``fn`` returns: each array or number of the nest as a `PerReplica`,
            also with one replica; variables, None and other objects as they are.

        Raises:
            Exception: what ``fn`` raised on this rank.
            ReplicaError: if it raised on another rank.
            CollectiveMismatchError: if replicas made different collective calls, or
                returned different structures.
            RuntimeError: in a replica function, or in another strategy's scope.
        """
        kwargs = {} if kwargs is None else kwargs
        return dispatch.perform(
            self._group, "call_for_each_replica", fn, args, kwargs, call="Strategy.run"
        )

    experimental_run_v2 = run

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any) -> Any:
        """Combine a per-replica value into one. Collective.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value: a `PerReplica`, or a nest of them.
            axis: None to combine the replicas' arrays element by element; an int or
                a tuple of ints to reduce each array over these axes too. MEAN then
                divides by the number of elements over all replicas, so that uneven
                last batches, and empty ones, count as they should.

        Returns:
            One array or number, the same on all ranks, in the nest of ``value``. A
            value that is not per replica comes back as it is for MEAN, MIN and MAX.

        Raises:
            ValueError: for an unknown operation, an axis out of range, or SUM or
                PROD of a value that is not per replica.
            CollectiveMismatchError: if the ranks' arrays differ in shape or dtype.
        """
        return self._perform("reduce", reduce_op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate a per-replica value along an axis. Collective.

        Args:
            value: a `PerReplica` of arrays of at least one dimension, whose shapes
                may differ along ``axis``.
            axis: the axis to concatenate along; negative from the end.

        Returns:
            One array, in the order of the replicas, on all ranks. A value that is
            not per replica comes back as it is.

        Raises:
            TypeError, ValueError: if it is not an array, or the axis is out of range.
            CollectiveMismatchError: if shapes differ elsewhere, or dtypes differ.
        """
        return self._perform("gather", value, axis)

    def buffers_like(self, nest: Any) -> Any:
        """Make arrays that are reduced where they are, without a copy. Collective.

        For what a program reduces again and again, such as gradients: make the buffers
        once, write into them in each step (``buffers["w"][...] = g``, ``out=``), and
        pass them, or the whole nest, to `ReplicaContext.all_reduce`, `reduce`,
        ``batch_reduce_to`` or an optimizer. On one node they are in memory that the
        ranks share: each rank reads the others' directly. That takes place if all
        arrays of a call are buffers, which lie at the same distances from each other
        on all ranks, and are too large to travel with the header; otherwise they are
        copied as any array is. The result is a new array in both cases, with the same
        bits, and the buffers keep their values. A buffer is yours again as soon as the
        call has returned.

        Every rank has its own values in them: they are NumPy arrays like any other.
        They outlive the strategy. Beyond tf.distribute.

        Args:
            nest: arrays, numbers or variables, of the same structure, shapes and
                dtypes on all ranks. Of a `PerReplica` this rank's component counts.

        Returns:
            The same structure, with zeros of the same shapes and dtypes. Where the
            ranks share no memory (one rank, several nodes, no native core, not enough
            of it left), and for GPU arrays, these are ordinary arrays.

        Raises:
            TypeError: if a leaf is not an array or a number.
            RuntimeError: in a replica function, and in ``merge_fn``, which one rank
                runs for all: make them at program level, and pass them on.
            CollectiveMismatchError: if structures, shapes or dtypes differ.
        """
        frame = context.require_cross_replica(self._group, "buffers_like")
        if frame.coordinator is not None:
            raise RuntimeError(
                "buffers_like: merge_fn runs on rank 0 alone, but every rank has "
                "buffers of its own; make them at program level, before "
                "`strategy.run`, and pass them to the replica function"
            )
        return self._group.collectives.buffers_like(map_structure(own_component, nest))

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components that this process can see, as a tuple.

        At program level this rank's, as a tuple of one. In ``merge_fn`` those of all
        replicas, in replica order; they are gathered then. A nest gives one nest per
        replica; a value that is not distributed gives ``(value,)``.
        """
        return local_results(self._group, value)

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Return the local components; see `experimental_local_results`."""
        return self.experimental_local_results(value)

    def group(self, value: Any, name: str | None = None) -> None:
        """Return None: results are there when a call returns, with nothing to wait for.

        Args:
            value: what a call returned.
            name: taken and not used.
        """

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """See `StrategyExtended.colocate_vars_with`, whose older place this is."""
        with self._extended.colocate_vars_with(colocate_with_variable):
            yield

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Make a `PerReplica` from a function. Collective.

        Args:
            value_fn: called with a `ValueContext`. At program level every rank calls
                it for its own replica; in ``merge_fn`` rank 0 calls it for each.

        Returns:
            A PerReplica for each leaf of what ``value_fn`` returns, of any type.

        Raises:
            ReplicaError: if ``value_fn`` raised on another rank.
        """
        frame = context.require_cross_replica(
            self._group, "experimental_distribute_values_from_function"
        )
        given: object = value_fn
        if not callable(given):
            error = TypeError(
                "experimental_distribute_values_from_function: expected `value_fn` to "
                f"be a function of a ValueContext, got {value_fn!r}"
            )
            if frame.coordinator is not None:
                raise error
            self._group.collectives.invalid("experimental_distribute_values", error)
        if frame.coordinator is None:
            return dispatch.execute(self._group, "distribute_values", (value_fn,))
        number = self._group.num_replicas
        values = [value_fn(ValueContext(i, number)) for i in range(number)]
        return map_structure(lambda *row: PerReplica(row), *values)

    # --- datasets (mpidist.data) ------------------------------------------------

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Split the global batches of a dataset over the replicas. Collective.

        Every rank gives the same dataset. Each of its batches is one step, of which
        each replica gets a piece, in order; by which rule says
        `InputOptions.auto_shard_policy`. All rows come exactly once.

        Args:
            dataset: a `mpidist.data.Dataset` that went through ``batch``: a rank then
                reads its own rows only. Or anything with ``__len__`` and
                ``__getitem__``, or any iterable, whose items are global batches: nests
                of arrays with a common first dimension. Every rank reads all of these,
                and keeps its rows. Torch tensors become arrays without a copy.
            options: `mpidist.InputOptions`.

        Returns:
            The dataset of `PerReplica` elements.

        Raises:
            TypeError: for an array, or a nest of arrays, which is not a dataset.
            ValueError: for rows that are not in batches, or a policy that is not for
                this.
            NotImplementedError: for `InputReplicationMode.PER_REPLICA`.
            CollectiveMismatchError: if the ranks' datasets differ in what can be seen
                of them: length, batch size, seeds, dtypes.
        """
        return DistributedDataset._of_batches(self._group, dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Give each replica an input of its own. Collective.

        Args:
            dataset_fn: called once on each rank, with its `InputContext`. It returns
                what `experimental_distribute_dataset` takes, but with batches of this
                replica alone, which come as they are. The ranks' inputs may differ in
                length: a rank without rows gets empty arrays until all are done.
            options: `mpidist.InputOptions`.

        Returns:
            The dataset of `PerReplica` elements.

        Raises:
            ReplicaError: if ``dataset_fn`` raised on another rank.
        """
        return DistributedDataset._of_function(self._group, dataset_fn, options)

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Do the same; see `distribute_datasets_from_function`, its name now."""
        return DistributedDataset._of_function(self._group, dataset_fn, options)

    def experimental_make_numpy_dataset(
        self, numpy_input: Any, session: Any = None
    ) -> Dataset:
        """Make a dataset of the rows of arrays. Not collective.

        Args:
            numpy_input: a nest of arrays with the same first dimension; a list of
                arrays is stacked, so that each of them is a row.
            session: taken and not used.
        """
        return Dataset._of_numpy(self._group, numpy_input)

    def make_dataset_iterator(self, dataset: Any) -> DistributedIterator:
        """Return an iterator over a dataset of global batches. Collective.

        For code of TensorFlow 1: `experimental_distribute_dataset` and ``iter``.
        """
        return iter(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> DistributedIterator:
        """Return an iterator over inputs from a function. Collective.

        For code of TensorFlow 1: `distribute_datasets_from_function` and ``iter``.

        Args:
            input_fn: as there; it may also return a function without arguments that
                gives the next batch, and raises StopIteration at the end.
            replication_mode: `InputReplicationMode.PER_WORKER`.

        Raises:
            ValueError: for another mode.
        """
        call = "make_input_fn_iterator"
        try:
            options = InputOptions(experimental_replication_mode=replication_mode)
        except TypeError as error:
            self._group.collectives.invalid(call, error)
        return iter(
            DistributedDataset._of_function(
                self._group, input_fn, options, call, functions=True
            )
        )

    def experimental_run(
        self,
        fn: Callable[..., Any],
        input_iterator: DistributedIterator | None = None,
    ) -> Any:
        """Run ``fn`` on each replica, with the next element. Collective.

        For code of TensorFlow 1: ``run(fn, args=(next(input_iterator),))``.

        Args:
            fn: the replica function.
            input_iterator: gives its argument; None: it has none.
        """
        if input_iterator is None:
            return self.run(fn)
        return self.run(fn, args=(input_iterator.get_next(),))

    def _perform(self, name: str, *args: Any) -> Any:
        return dispatch.perform(self._group, name, *args)


def group_of(strategy: Strategy) -> ReplicaGroup:
    """Return the group of replicas that a strategy shows to its users."""
    return strategy._group
