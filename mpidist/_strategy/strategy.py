"""Strategy: the base class of `MPIStrategy` and the default strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, NoReturn, TypeAlias, overload

import mpidist.cluster  # and, at the first use, `mpidist.data`, which takes long
from mpidist._base.expect import expect
from mpidist._base.nest import map_structure
from mpidist._base.reduce_op import Reduction
from mpidist._base.remedies import explain_attributes
from mpidist._base.types import Args, Given, Kwargs, Leaf, Nest, OtherLeaf
from mpidist._runtime import context, dispatch
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.interruptions import tells
from mpidist._strategy.contexts import Scope, ValueContext
from mpidist._strategy.extended import StrategyExtended
from mpidist._values.components import local_results
from mpidist._values.distributed import PerReplica, own_component
from mpidist.cluster import MPIClusterResolver

# Of an argument that a TypeError with the line to write asks for.
_NO_AXIS: Final[Any] = inspect.Parameter.empty
_RUN: Final = "call_for_each_replica"
SupportsWrite: TypeAlias = Any
"""A file, or another object with ``write``."""
# Any: datasets of other libraries, which may have `__getitem__` instead of `__iter__`.
Batches: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class CommunicationStatistics:
    """Statistics of a strategy's communication so far, on this rank.

    Attributes:
        seconds: time in collectives, including waiting for other ranks.
        calls: number of collectives that moved arrays, by the name of the equivalent
            MPI operation, and of messages from rank 0 to all ranks (``Ibcast``). On one
            node most of them use shared memory, not MPI.
        bytes: bytes of this rank's buffers in these calls, by the same names.
        mpi_calls: number of calls of MPI functions, by name: those that moved arrays,
            headers and messages.
    """

    seconds: float
    calls: dict[str, int]
    bytes: dict[str, int]
    mpi_calls: dict[str, int]


@explain_attributes
class Strategy:
    """Runs code on replicas and keeps their state together.

    The methods are those of ``tf.distribute.Strategy``. Create an `MPIStrategy`; this
    is the base class of it and of the default strategy.
    """

    _name = "Strategy"
    _deals = False  # the elements of one input pipeline, in turn

    def __init__(self, group: ReplicaGroup) -> None:
        """Wrap a group of replicas for users."""
        group.strategy = self
        self._group = group
        self._cluster_resolver: MPIClusterResolver | None = None

    def __repr__(self) -> str:
        group = self._group
        return (
            f"<mpidist.{self._name} #{group.number}: replica {group.replica_id} of "
            f"{group.num_replicas}, on {group.device_name}>"
        )

    def __reduce__(self) -> NoReturn:
        self._group.__reduce__()

    @functools.cached_property
    def extended(self) -> StrategyExtended:
        """Additional methods, for libraries."""
        return StrategyExtended(self._group)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas: the ranks of the communicator."""
        return self._group.num_replicas

    @property
    def replica_id(self) -> int:
        """The number of this process's replica, from 0: its rank.

        Available at all levels; in a replica function it equals the context's
        ``replica_id_in_sync_group``. Not in tf.distribute, where one process has
        several replicas.
        """
        return self._group.replica_id

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, which prints, logs and plots. Not in tf.distribute.

        Do not make collective calls depend on it: checkpoints, reductions and reading
        ON_READ variables are for every rank.
        """
        return self._group.replica_id == 0

    def print(
        self,
        *values: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: SupportsWrite | None = None,
        flush: bool = True,
    ) -> None:
        """Print on rank 0 only. Not collective.

        Args:
            values: as for Python's ``print``, like ``sep``, ``end`` and ``file``.
            sep: between the values.
            end: after the last one.
            file: default: the standard output.
            flush: whether the text is shown at once. Default True: the output of a rank
                is a pipe to the launcher, which Python would buffer.
        """
        if self.is_main_process:
            print(*values, sep=sep, end=end, file=file, flush=flush)

    @property
    def array_module(self) -> ModuleType:
        """NumPy or CuPy: the module for arrays on this replica's device."""
        return self._group.device.array_module

    @property
    def cluster_resolver(self) -> MPIClusterResolver | Any:
        """The ranks, their hosts and devices; None for the default strategy.

        The same object each time. The type includes ``Any`` for type checkers: no test
        for None is needed.
        """
        group = self._group
        if self._cluster_resolver is None and group.is_mpi:
            self._cluster_resolver = MPIClusterResolver(
                group.host_names,
                group.replica_id,
                group.device_names,
                group.node_numbers,
            )
        return self._cluster_resolver

    def communication_statistics(self) -> CommunicationStatistics:
        """Return statistics of this rank's communication so far. Not collective."""
        traffic = self._group.communicator.traffic
        return CommunicationStatistics(*traffic.total(), traffic.total_mpi())

    def scope(self) -> Scope[Strategy]:
        """Make this the current strategy, in cross-replica context.

        Not collective. Variables created inside have a copy on each replica. A scope
        may be entered again inside itself, and the returned object may be used again.
        The scope of the default strategy has no effect.

        Raises:
            RuntimeError: when it is entered inside the scope of another strategy, or in
                a replica function; when it is left before a scope that was entered in
                it, such as that of `variable_creator_scope`.

        Example::

            with strategy.scope():
                weights = mpidist.Variable(np.zeros(3))  # a copy on each replica
            weights.distribute_strategy is strategy  # True
        """
        return Scope(self._group, self)

    @overload  # of a function without types
    def run(
        self,
        fn: Callable[..., NoReturn],
        args: Args = (),
        kwargs: Kwargs = None,
        options: object = None,
    ) -> Nest: ...
    @overload
    def run(
        self,
        fn: Callable[..., Leaf],
        args: Args = (),
        kwargs: Kwargs = None,
        options: object = None,
    ) -> PerReplica[Leaf]: ...
    @overload
    def run(
        self,
        fn: Callable[..., tuple[Leaf, OtherLeaf]],
        args: Args = (),
        kwargs: Kwargs = None,
        options: object = None,
    ) -> tuple[PerReplica[Leaf], PerReplica[OtherLeaf]]: ...
    @overload
    def run(
        self,
        fn: Callable[..., dict[str, Leaf]],
        args: Args = (),
        kwargs: Kwargs = None,
        options: object = None,
    ) -> dict[str, PerReplica[Leaf]]: ...
    @overload
    def run(
        self,
        fn: Callable[..., Nest],
        args: Args = (),
        kwargs: Kwargs = None,
        options: object = None,
    ) -> Nest: ...

    def run(
        self,
        fn: Callable[..., Nest],
        args: Args = (),
        kwargs: Kwargs = None,
        options: object = None,
    ) -> Nest:
        """Run ``fn`` once on every replica.

        Collective: every rank must call this, in the same order. If a subclass
        overrides `scope`, ``fn`` runs in that scope, as in TensorFlow, except in
        ``merge_fn``.

        Args:
            fn: the replica function; every rank calls its own.
            args: its positional arguments. PerReplica and Mirrored arguments (also
                nested ones) are passed as the replica's component, variables unchanged.
            kwargs: its keyword arguments, passed in the same way.
            options: accepted and ignored (``tf.distribute.RunOptions`` is for TPUs).

        Returns:
            The result of ``fn``: each array or number of the nest as a `PerReplica`,
            also with one replica; variables, None and other objects unchanged.

        Raises:
            Exception: the exception that ``fn`` raised on this rank.
            ReplicaError: if ``fn`` raised on another rank.
            CollectiveMismatchError: if replicas made different collective calls, or
                returned different structures.
            RuntimeError: in a replica function, or in another strategy's scope.

        Example, on two replicas::

            def replica_fn(x):
                return x**2


            x = strategy.experimental_distribute_values_from_function(
                lambda ctx: 1.0 + ctx.replica_id_in_sync_group
            )
            squares = strategy.run(replica_fn, args=(x,))
            strategy.reduce("SUM", squares, axis=None)  # 5.0
        """
        kwargs = {} if kwargs is None else kwargs
        group = self._group
        given = group, _RUN, fn, args, kwargs
        if group.before_run is not None:
            group.before_run()
        own = type(self).scope is not Strategy.scope  # may have creators of variables
        if own and not (context.is_in_replica(group) or context.current().coordinator):
            with contextlib.ExitStack() as stack:
                with dispatch.checking(group, "Strategy.run"):
                    stack.enter_context(self.scope())
                return dispatch.perform(*given, call="Strategy.run")
        return dispatch.perform(*given, call="Strategy.run")

    experimental_run_v2 = run

    @overload
    def reduce(
        self, reduce_op: Reduction, value: PerReplica[Given], axis: None
    ) -> Given: ...
    @overload
    def reduce(
        self, reduce_op: Reduction, value: Nest, axis: int | tuple[int, ...] | None
    ) -> Nest: ...

    def reduce(
        self,
        reduce_op: Reduction,
        value: Nest,
        axis: int | tuple[int, ...] | None = _NO_AXIS,
    ) -> Nest:
        """Combine a per-replica value into one. Collective.

        Args:
            reduce_op: a `ReduceOp` or its name; or an associative function of two
                arrays, as for `ReplicaContext.all_reduce`, with ``axis=None``.
            value: a `PerReplica`, or a nest of them.
            axis: None to combine the replicas' arrays element by element; an int or
                a tuple of ints to reduce each array over these axes too. MEAN then
                divides by the number of elements over all replicas, so uneven last
                batches, and empty ones, are weighted correctly.

        Returns:
            One array or number, the same on all ranks, in the nest of ``value``. With
            MEAN, MIN and MAX a value that is not per replica is its own result, reduced
            over ``axis`` if that is not None.

        Raises:
            ValueError: if the operation is unknown or the axis out of range, or for SUM
                or PROD of a value that is not per replica.
            CollectiveMismatchError: if the ranks' arrays differ in shape or dtype.

        Example, on two replicas::

            value = strategy.run(lambda: np.array([1.0, 2.0]))
            strategy.reduce("SUM", value, axis=None)  # array([2., 4.])
            strategy.reduce("SUM", value, axis=0)  # np.float64(6.0)
        """
        if axis is _NO_AXIS:
            with dispatch.checking(self._group, "reduce"):
                raise TypeError(
                    "Strategy.reduce: missing the argument `axis`; write `axis=None` "
                    "to combine the replicas' arrays element by element, or the axes "
                    "to reduce, too"
                )
        return dispatch.perform(self._group, "reduce", reduce_op, value, axis)

    @overload
    def gather(self, value: PerReplica[Given], axis: int) -> Given: ...
    @overload
    def gather(self, value: Nest, axis: int) -> Nest: ...

    def gather(self, value: Nest, axis: int) -> Nest:
        """Concatenate a per-replica value along an axis. Collective.

        Args:
            value: a `PerReplica` of arrays of at least one dimension, whose shapes
                may differ along ``axis``.
            axis: the axis to concatenate along; negative values count from the end.

        Returns:
            One array, in the order of the replicas, on all ranks. A value that is not
            per replica is returned unchanged.

        Raises:
            TypeError, ValueError: if it is not an array, or the axis is out of range.
            CollectiveMismatchError: if other dimensions or the dtypes differ.

        Example, on two replicas::

            value = strategy.run(lambda: np.array([1.0, 2.0]))
            strategy.gather(value, axis=0)  # array([1., 2., 1., 2.])
        """
        return dispatch.perform(self._group, "gather", value, axis)

    @tells("buffers_like")
    def buffers_like(self, nest: Nest) -> Nest:
        """Create arrays that can be reduced without copying them first. Collective.

        Use these for arrays that a program reduces repeatedly, such as gradients:
        create the buffers once, write into them in each step
        (``buffers["w"][...] = g``, ``out=``), and pass them, or the whole nest, to
        `ReplicaContext.all_reduce`, `reduce`, ``batch_reduce_to`` or an optimizer. On
        one node they are in shared memory: each rank reads the other ranks' buffers
        directly. This applies if all arrays of a call are buffers, with the same
        relative offsets on all ranks, and are too large to be sent with the header;
        otherwise they are copied like any array. The result is a new array in both
        cases, with the same bits, and the buffers keep their values. You can write to a
        buffer again as soon as the call has returned.

        Every rank has its own values in them: they are ordinary NumPy arrays. They
        outlive the strategy. Not in tf.distribute.

        Args:
            nest: arrays, numbers or variables, of the same structure, shapes and
                dtypes on all ranks. For a `PerReplica` this rank's component is used.

        Returns:
            The same structure, with zeros of the same shapes and dtypes. If the ranks
            cannot share memory (one rank, several nodes, no native core, not enough
            shared memory left), and for GPU arrays, these are ordinary arrays.

        Raises:
            TypeError: if a leaf is not an array or a number.
            RuntimeError: in a replica function, and in ``merge_fn``, which one rank
                runs for all: create them at program level and pass them in.
            CollectiveMismatchError: if structures, shapes or dtypes differ.

        Example, on two replicas::

            buffers = strategy.buffers_like({"w": np.zeros(100_000)})
            buffers["w"][...] = 1.0
            total = strategy.reduce("SUM", strategy.run(lambda: buffers), axis=None)
            total["w"][0]  # np.float64(2.0)
        """
        context.require_program_level(self._group, "buffers_like")
        return self._group.collectives.buffers_like(map_structure(own_component, nest))

    @overload
    def experimental_local_results(
        self, value: PerReplica[Given]
    ) -> tuple[Given, ...]: ...
    @overload
    def experimental_local_results(self, value: Nest) -> tuple[Nest, ...]: ...

    @tells("experimental_local_results")
    def experimental_local_results(self, value: Nest) -> tuple[Nest, ...]:
        """Return the components that this process can see, as a tuple.

        At program level a tuple with this rank's component only. In ``merge_fn``, and
        by the name `mpidist.MirroredStrategy`, those of all replicas, in replica order,
        which this call gathers: it is collective there. A nest gives one nest per
        replica; a value that is not distributed gives ``(value,)``.

        Example::

            value = strategy.run(lambda: 7)
            strategy.experimental_local_results(value)  # (7,)
        """
        return local_results(value)

    def unwrap(self, value: Nest) -> tuple[Nest, ...]:
        """Return the local components; see `experimental_local_results`."""
        return self.experimental_local_results(value)

    def group(self, value: Nest, name: str | None = None) -> None:
        """Return None: calls are synchronous, so there is nothing to wait for.

        Args:
            value: the result of a call.
            name: accepted and ignored.
        """

    def colocate_vars_with(
        self, colocate_with_variable: object
    ) -> contextlib.AbstractContextManager[None]:
        """See `StrategyExtended.colocate_vars_with`; this is its older location."""
        return self.extended.colocate_vars_with(colocate_with_variable)

    @overload  # of a function without types
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], NoReturn]
    ) -> Nest: ...
    @overload
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Leaf]
    ) -> PerReplica[Leaf]: ...
    @overload
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Nest]
    ) -> Nest: ...

    @tells("experimental_distribute_values_from_function")
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Nest]
    ) -> Nest:
        """Create a `PerReplica` from a function. Collective.

        Args:
            value_fn: called with a `ValueContext`. At program level every rank calls
                it for its own replica; in ``merge_fn`` rank 0 calls it for each.

        Returns:
            A PerReplica for each leaf of the result of ``value_fn``, of any type.

        Raises:
            ReplicaError: if ``value_fn`` raised on another rank.

        Example, on two replicas::

            ranks = strategy.experimental_distribute_values_from_function(
                lambda ctx: np.array([ctx.replica_id_in_sync_group])
            )
            strategy.gather(ranks, axis=0)  # array([0, 1])
        """
        call = "experimental_distribute_values_from_function"
        frame = context.require_cross_replica(self._group, call)
        what = "`value_fn` to be a function of a ValueContext"
        with dispatch.checking(self._group, call):
            expect(callable(value_fn), call, what, value_fn)
        if frame.coordinator is None:
            return dispatch.execute(self._group, "distribute_values", (value_fn,))
        number = self._group.num_replicas
        values = [value_fn(ValueContext(i, number)) for i in range(number)]
        return map_structure(lambda *row: PerReplica(row), *values)

    # --- datasets (mpidist.data) ------------------------------------------------

    @tells("experimental_distribute_dataset")
    def experimental_distribute_dataset(
        self, dataset: Batches, options: mpidist.data.InputOptions | None = None
    ) -> mpidist.data.DistributedDataset:
        """Split the global batches of a dataset over the replicas. Collective.

        Every rank passes the same dataset. If its arrays are in memory, some of their
        rows are compared, and a RuntimeWarning says if they differ. Each batch is one
        step, and each replica gets a part of it, in order;
        `InputOptions.auto_shard_policy` sets the rule. Every row is used exactly once.

        Args:
            dataset: a batched `mpidist.data.Dataset`, of which each rank reads only its
                own rows. Or anything with ``__len__`` and ``__getitem__``, or any
                iterable, whose items are global batches: nests of arrays with a common
                first dimension. Every rank then reads all items and keeps its own rows.
                Torch tensors and JAX arrays become NumPy arrays without a copy.
            options: `mpidist.InputOptions`.

        Returns:
            The dataset of `PerReplica` elements.

        Raises:
            TypeError: if it is an array or a nest of arrays, which is not a dataset.
            ValueError: if the dataset is not batched, or the policy does not apply to
                it.
            NotImplementedError: for `InputReplicationMode.PER_REPLICA`.
            CollectiveMismatchError: if the visible properties of the ranks' datasets
                differ: length, batch size, seeds, dtypes.

        Example, on two replicas::

            dataset = mpidist.data.Dataset.range(8).batch(4)
            for batch in strategy.experimental_distribute_dataset(dataset):
                rows = strategy.experimental_local_results(batch)[0]
                rows.shape  # (2,)
        """
        return mpidist.data.DistributedDataset._of_batches(
            self._group, dataset, options
        )

    @tells("distribute_datasets_from_function")
    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[mpidist.data.InputContext], Batches],
        options: mpidist.data.InputOptions | None = None,
    ) -> mpidist.data.DistributedDataset:
        """Give each replica its own input. Collective.

        Args:
            dataset_fn: called once on each rank, with its `InputContext`. It returns
                what `experimental_distribute_dataset` accepts, but with batches for
                this replica only, which are used unchanged. The ranks' inputs may
                differ in length: a rank without rows gets empty arrays until all have
                finished.
            options: `mpidist.InputOptions`.

        Returns:
            The dataset of `PerReplica` elements.

        Raises:
            ReplicaError: if ``dataset_fn`` raised on another rank.

        Example, on two replicas::

            def dataset_fn(context):
                n, rank = context.num_input_pipelines, context.input_pipeline_id
                dataset = mpidist.data.Dataset.range(8).shard(n, rank)
                return dataset.batch(context.get_per_replica_batch_size(4))


            batches = strategy.distribute_datasets_from_function(dataset_fn)
            first = next(iter(batches))
            strategy.gather(first, axis=0)  # array([0, 2, 1, 3])
        """
        return mpidist.data.DistributedDataset._of_function(
            self._group, dataset_fn, options, deals=self._deals
        )

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_make_numpy_dataset(
        self, numpy_input: Nest, session: object = None
    ) -> mpidist.data.Dataset:
        """Create a dataset from the rows of arrays. Not collective.

        Args:
            numpy_input: a nest of arrays with the same first dimension; a list of
                arrays is stacked, so that each array is a row.
            session: accepted and ignored.
        """
        return mpidist.data.Dataset._of_numpy(self._group, numpy_input)

    def make_dataset_iterator(
        self, dataset: Batches
    ) -> mpidist.data.DistributedIterator:
        """Return an iterator over a dataset of global batches. Collective.

        For TensorFlow 1 code: ``iter(experimental_distribute_dataset(dataset))``.
        """
        return iter(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[mpidist.data.InputContext], Batches],
        replication_mode: mpidist.data.InputReplicationMode | None = None,
    ) -> mpidist.data.DistributedIterator:
        """Return an iterator over inputs from a function. Collective.

        For TensorFlow 1 code: ``iter(distribute_datasets_from_function(input_fn))``.

        Args:
            input_fn: as ``dataset_fn`` there; it may also return a function without
                arguments that returns the next batch and raises StopIteration at the
                end.
            replication_mode: `InputReplicationMode.PER_WORKER`, which is the default.

        Raises:
            ValueError: if the mode is another one.
        """
        call = "make_input_fn_iterator"
        with self._group.guard.checking(call):
            if replication_mode is None:
                replication_mode = mpidist.data.InputReplicationMode.PER_WORKER
            options = mpidist.data.InputOptions(
                experimental_replication_mode=replication_mode
            )
        return iter(
            mpidist.data.DistributedDataset._of_function(
                self._group, input_fn, options, call, functions=True, deals=self._deals
            )
        )

    def experimental_run(
        self,
        fn: Callable[..., Nest],
        input_iterator: mpidist.data.DistributedIterator | None = None,
    ) -> Nest:
        """Run ``fn`` on each replica, with the next element. Collective.

        For TensorFlow 1 code: ``run(fn, args=(next(input_iterator),))``.

        Args:
            fn: the replica function.
            input_iterator: supplies its argument; None: no argument.
        """
        if input_iterator is None:
            return self.run(fn)
        return self.run(fn, args=(input_iterator.get_next(),))


def group_of(strategy: Strategy, call: str = "") -> ReplicaGroup:
    """Return the group of a strategy, which is an argument of the call."""
    hint = "write `strategy = mpidist.MPIStrategy()`"
    expect(isinstance(strategy, Strategy), call, "a `mpidist.Strategy`", strategy, hint)
    return strategy._group
