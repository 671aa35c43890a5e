"""Strategy, MPIStrategy, and the default strategy of one replica without MPI."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from mpidist import _transports
from mpidist._agreement import mismatch
from mpidist._agreement.channel import Channel, MessageChannel
from mpidist._agreement.guard import Guard, poll
from mpidist._base import backend, threads
from mpidist._base.nest import map_structure
from mpidist._base.options import (
    CommunicationImplementation,
    CommunicationOptions,
    Environment,
    ReduceOp,
    read_environment,
)
from mpidist._engine import Node, Nodes, open_node, open_nodes
from mpidist._engine.collectives import Collectives, describe_compression
from mpidist._mpi.communicator import (
    Communicator,
    SelfCommunicator,
    check_communicator,
    local_rank,
)
from mpidist._runtime import context, dispatch, process_exit
from mpidist._strategy.cluster_resolver import MPIClusterResolver
from mpidist._strategy.cross_device_ops import CrossDeviceOps
from mpidist._strategy.extended import StrategyExtended, local_results
from mpidist._strategy.replica_context import ReplicaContext, ValueContext
from mpidist._values.distributed import PerReplica, own_component
from mpidist.data import (
    Dataset,
    DistributedDataset,
    DistributedIterator,
    InputContext,
    InputOptions,
    InputReplicationMode,
)

_numbers = threads.ReplicaLocal(lambda: itertools.count(1))


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

    def __init__(
        self,
        collectives: Collectives,
        *,
        is_mpi: bool,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        self._number = next(_numbers.get()) if is_mpi else 0
        self._collectives = collectives
        self._num_replicas = collectives.comm.size
        self._extended = StrategyExtended(
            self, collectives, is_mpi=is_mpi, cross_device_ops=cross_device_ops
        )

    def __repr__(self) -> str:
        extended = self._extended
        return (
            f"<mpidist.{self._name} #{self._number}: replica {extended._replica_id} of "
            f"{self._num_replicas}, on {extended._device_name}>"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self} can not be pickled or copied: it is a group of processes. Make it "
            "once, and call `mpidist.get_strategy()` where it is needed"
        )

    @property
    def extended(self) -> StrategyExtended:
        """More methods, for library writers."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas: the ranks of the communicator."""
        return self._num_replicas

    @property
    def replica_id(self) -> int:
        """The number of this process's replica, from 0: its rank.

        At all levels; in a replica function it is what the replica context calls
        ``replica_id_in_sync_group``. Beyond tf.distribute, where one process has
        several replicas.
        """
        return self._extended._replica_id

    @property
    def array_module(self) -> Any:
        """NumPy or CuPy: the module for arrays on this replica's device."""
        return self._collectives.device.array_module

    @property
    def cluster_resolver(self) -> MPIClusterResolver | None:
        """What MPI knows of the processes; None for the default strategy."""
        extended = self._extended
        if not extended._is_mpi:
            return None
        return MPIClusterResolver(
            extended._hosts, extended._replica_id, extended._devices
        )

    def communication_statistics(self) -> CommunicationStatistics:
        """Return what was communicated so far, on this rank. Not collective."""
        traffic = self._collectives.comm.traffic
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
        frame = context.require_cross_replica(self, "scope")
        if frame.strategy is self and frame.coordinator is not None:
            inner = frame
        else:
            inner = context.Frame(self, context.Level.CROSS_REPLICA)
        with context.entered(dataclasses.replace(inner)):
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
            self, "call_for_each_replica", fn, args, kwargs, call="Strategy.run"
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
            TypeError, ValueError: for what is no array, or an axis out of range.
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
            TypeError: for what is no array or number.
            RuntimeError: in a replica function, and in ``merge_fn``, which one rank
                runs for all: make them at program level, and pass them on.
            CollectiveMismatchError: if structures, shapes or dtypes differ.
        """
        frame = context.require_cross_replica(self, "buffers_like")
        if frame.coordinator is not None:
            raise RuntimeError(
                "buffers_like: merge_fn runs on rank 0 alone, but every rank has "
                "buffers of its own; make them at program level, before "
                "`strategy.run`, and pass them to the replica function"
            )
        return self._collectives.buffers_like(map_structure(own_component, nest))

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components that this process can see, as a tuple.

        At program level this rank's, as a tuple of one. In ``merge_fn`` those of all
        replicas, in replica order; they are gathered then. A nest gives one nest per
        replica; a value that is not distributed gives ``(value,)``.
        """
        return local_results(self, value)

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
            self, "experimental_distribute_values_from_function"
        )
        given: object = value_fn
        if not callable(given):
            error = TypeError(
                "experimental_distribute_values_from_function: expected `value_fn` to "
                f"be a function of a ValueContext, got {value_fn!r}"
            )
            if frame.coordinator is not None:
                raise error
            self._collectives.invalid("experimental_distribute_values", error)
        if frame.coordinator is None:
            return dispatch.execute(self, "distribute_values", (value_fn,))
        number = self._num_replicas
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
        return DistributedDataset._of_batches(self, dataset, options)

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
        return DistributedDataset._of_function(self, dataset_fn, options)

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Do the same; see `distribute_datasets_from_function`, its name now."""
        return DistributedDataset._of_function(self, dataset_fn, options)

    def experimental_make_numpy_dataset(
        self, numpy_input: Any, session: Any = None
    ) -> Dataset:
        """Make a dataset of the rows of arrays. Not collective.

        Args:
            numpy_input: a nest of arrays with the same first dimension; a list of
                arrays is stacked, so that each of them is a row.
            session: taken and not used.
        """
        return Dataset._of_numpy(self, numpy_input)

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
            self._collectives.invalid(call, error)
        return iter(
            DistributedDataset._of_function(
                self, input_fn, options, call, functions=True
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
        return dispatch.perform(self, name, *args)


class MPIStrategy(Strategy):
    """One replica on each rank of an MPI communicator.

    Collective: every rank of ``comm`` makes it. It communicates on a duplicate of
    ``comm``, so strategies, and other users of the communicator, do not disturb each
    other. The first one starts MPI if that has not been done, and installs the hooks
    that end the whole job on an uncaught exception (``MPIDIST_ABORT=0``: does not);
    closing the last one takes them away.

    Args:
        comm: an `mpi4py.MPI.Comm`; None is COMM_WORLD. Groups of ranks can have
            strategies of their own: ``MPIStrategy(MPI.COMM_WORLD.Split(color))``.
            In the function of `mpidist.testing.run` a `mpidist.testing.ThreadGroup`;
            None is all of its replicas.
        device: "auto" is this rank's GPU (by its number on the node) where CuPy finds
            one, and else the host; "cpu"; "gpu"; "gpu:K".
        communication_options: `mpidist.experimental.CommunicationOptions`; the same
            on all ranks.
        cross_device_ops: how values are reduced: a `CrossDeviceOps`, of the same
            class on all ranks. None is `CollectiveAllReduce`.

    Raises:
        TypeError, ValueError: for arguments that are none of these, or a setting that
            can not be read; on every rank.
        CollectiveMismatchError: if the ranks' versions of Python, mpidist, NumPy or
            cloudpickle do not fit each other, or their numbers do not have the same
            bytes, or the ranks were given other arguments; on every rank.
        RuntimeError: for "gpu" where there is none; on every rank.
        ImportError: where there is no MPI library.
    """

    _name = "MPIStrategy"

    def __init__(
        self,
        comm: Any = None,
        device: str = "auto",
        communication_options: CommunicationOptions | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        """Join the other ranks of ``comm`` in a strategy. Collective."""
        problem = ""
        try:
            environment = read_environment()
        except ValueError as error:  # perhaps on this rank alone: all hear of it
            environment, problem = Environment(), str(error)
        replica = threads.current()
        if replica is not None:
            environment = replica.adapt(environment)
        elif environment.abort:
            process_exit.install()
        given = communication_options
        timeout = environment.timeout_seconds
        if (
            isinstance(given, CommunicationOptions)
            and given.timeout_seconds is not None
        ):
            timeout = float(given.timeout_seconds)

        def wait(request: Any, what: str) -> None:
            poll(request, what, timeout)

        if replica is not None:
            communicator = replica.connect(comm, wait)
        else:
            communicator = Communicator(
                check_communicator(comm),
                wait,
                environment.simulated_nodes,
                problem,
            )
        try:
            self._set_up(
                communicator, environment, timeout, device, given, cross_device_ops
            )
        except BaseException:
            communicator.drop()
            raise

    def _set_up(
        self,
        communicator: Communicator,
        environment: Environment,
        timeout: float,
        device: str,
        given: CommunicationOptions | None,
        ops: CrossDeviceOps | None,
    ) -> None:
        kind = environment.implementation
        if isinstance(given, CommunicationOptions):
            asked = given.implementation
            if asked is not CommunicationImplementation.AUTO:
                kind = asked
        wanted = kind is not CommunicationImplementation.DIRECT
        crowded = communicator.machine_size > (os.cpu_count() or 1)
        # It decides how the ranks meet, so all must have the same answer.
        crowded = not communicator.all_min(int(not crowded))
        node: Node | None = None
        nodes: Nodes | None = None
        shared: _transports.DirectTransport | None = None
        if threads.current() is not None:
            shared = _transports.DirectTransport(communicator)
        elif communicator.num_nodes == 1:
            opened = open_node(communicator, wanted=wanted, crowded=crowded)
            node, communicator.why_not_shared = opened.node, opened.problem
            if node is not None:
                communicator.traffic.core = node.channel
                shared = _transports.SharedTransport(
                    communicator, node.channel, node.piece_bytes
                )
        else:
            nodes, communicator.why_not_shared = open_nodes(
                communicator, wanted=wanted, crowded=crowded
            )
            if nodes is not None:
                shared = _transports.NodesTransport(communicator)
        enabled = environment.guard
        if isinstance(given, CommunicationOptions) and given.guard is not None:
            enabled = given.guard
        # The constructor itself is always guarded: ranks may have been given
        # different options, `guard` among them.
        channel: Channel | None = None
        if communicator.size > 1:
            channel = MessageChannel(communicator) if node is None else node.channel
        guard = Guard(
            communicator,
            channel,
            timeout_seconds=timeout,
            stall_seconds=environment.stall_seconds,
        )
        if nodes is not None:
            guard.watch_steps(nodes.node.channel)
        # The communicator and the guard outlive the verbs: they go on all ranks
        # together, when the last of them has collected its strategy.
        communicator.must_stay = lambda: bool(guard.broken)
        collectives = _make_collectives(
            communicator,
            guard,
            device,
            given,
            environment,
            enabled,
            ops,
            shared,
            node,
            nodes,
        )
        communicator.when_freed = lambda: process_exit.forget(guard)
        weakref.finalize(collectives, communicator.drop).atexit = False
        collectives.settle(timeout)
        guard.enabled = enabled
        super().__init__(collectives, is_mpi=True, cross_device_ops=ops)
        if environment.abort:
            process_exit.watch(guard, waits=enabled)

    def close(self) -> None:
        """Give the communicator, and what the ranks share, back to MPI. Collective.

        The strategy can not be used afterwards; its variables can still be read, and
        so can results and `buffers_like` buffers, whose memory stays as they do. One
        that is not closed, but collected as garbage on every rank, is given back when
        these ranks make or close another one.
        """
        guard = self._collectives.guard
        if guard.broken:
            return
        context.require_cross_replica(self, "MPIStrategy.close")
        guard.agree(mismatch.Call("MPIStrategy.close"))
        guard.close()
        self._collectives.close()
        self._collectives.release()
        self._collectives.comm.free()


def _make_collectives(
    communicator: Communicator,
    guard: Guard,
    device: object,
    options: object,
    environment: Environment,
    enabled: bool,
    cross_device_ops: object,
    shared: _transports.DirectTransport | None,
    node: Node | None,
    nodes: Nodes | None,
) -> Collectives:
    """Check the arguments of MPIStrategy on all ranks, and build its verbs."""
    try:
        if options is not None and not isinstance(options, CommunicationOptions):
            raise TypeError(
                "MPIStrategy: expected `communication_options` to be a `mpidist."
                f"experimental.CommunicationOptions`, got {type(options).__name__}"
            )
        if cross_device_ops is not None and not isinstance(
            cross_device_ops, CrossDeviceOps
        ):
            raise TypeError(
                "MPIStrategy: expected `cross_device_ops` to be a `mpidist."
                f"CrossDeviceOps`, got {cross_device_ops!r:.80}"
            )
        settings = CommunicationOptions().merge(options)
        chosen = backend.select_device(device, local_rank(communicator))
        chosen.activate()
        collectives = Collectives(
            communicator, guard, settings, environment, chosen, shared, node, nodes
        )
    except Exception as error:
        raise guard.fail(mismatch.Call("MPIStrategy(...)"), error, "invalid") from None
    ops = ""
    if cross_device_ops is not None:
        ops = f", {type(cross_device_ops).__qualname__} as cross_device_ops"
    more = ""
    if collectives.compression[0] != "none":
        more += f", {describe_compression(collectives.compression)}"
    if environment.simulated_nodes != 1:
        more += f", MPIDIST_SIMULATED_NODES={environment.simulated_nodes}"
    guard.agree(
        mismatch.Call(
            f"MPIStrategy(...) with {settings.bytes_per_pack} bytes_per_pack, "
            f"{guard.timeout_seconds} timeout_seconds, "
            f"{settings.implementation.name}, guard={enabled}, "
            f"MPIDIST_FUSION_MB={environment.bytes_per_pack / 2**20}{ops}{more}"
        )
    )
    return collectives


class _DefaultStrategy(Strategy):
    """What is in force outside every scope: one replica, on the host, no MPI."""

    _name = "default strategy"

    def __init__(self) -> None:
        environment = Environment(
            abort=False,
            cuda_aware=None,
            guard=False,
            timeout_seconds=0.0,
            stall_seconds=0.0,
            bytes_per_pack=0,
        )
        comm = SelfCommunicator()
        guard = Guard(comm, None, timeout_seconds=0.0, stall_seconds=0.0, enabled=False)
        device = backend.Device("cpu")
        super().__init__(
            Collectives(comm, guard, CommunicationOptions(), environment, device),
            is_mpi=False,
        )

    def __repr__(self) -> str:
        return "<mpidist default strategy: 1 replica, without MPI>"

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Enter cross-replica context of the default strategy."""
        if context.depth():
            raise RuntimeError(
                "Must not nest Strategy scopes: the default strategy's scope can not "
                f"be entered inside that of {context.get_strategy()}"
            )
        with context.entered(context.Frame(self, context.Level.CROSS_REPLICA)):
            yield self


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enter the scope of a strategy for good, without ``with``. Not collective.

    Args:
        strategy: the strategy, in place of one that was set before; None to leave.

    Raises:
        RuntimeError: inside a ``with strategy.scope():`` block.
        TypeError: for anything but a strategy or None.
    """
    if strategy is None:
        context.push_global(None)
        return
    if not isinstance(strategy, Strategy):
        raise TypeError(
            "experimental_set_strategy: expected a `mpidist.Strategy` or None, got "
            f"{strategy!r}"
        )
    context.push_global(context.Frame(strategy, context.Level.CROSS_REPLICA))


def _install_default() -> None:
    strategy = _DefaultStrategy()
    replica_context: ReplicaContext = strategy.extended._replica_context
    context.set_default(
        context.Frame(strategy, context.Level.REPLICA, replica_context=replica_context)
    )


_install_default()
