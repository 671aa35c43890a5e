"""StrategyExtended: the cross-replica operations that `Strategy` builds on.

Each method validates its arguments and calls `dispatch.perform`, which runs the
operation of the same name here or, when rank 0 is in ``merge_fn``, commands all ranks
to run it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import overload

import mpidist.cluster  # and, at the first use, `mpidist.data`, which takes long
from mpidist._base import nest
from mpidist._base.expect import as_int, expect
from mpidist._base.options import CallOptions
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.remedies import explain_attributes
from mpidist._base.types import Args, Kwargs, Nest
from mpidist._merge.updates import Update, run_update
from mpidist._runtime import context, dispatch, interruptions
from mpidist._runtime.dispatch import OnRank0
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.interruptions import tells
from mpidist._runtime.registry import component
from mpidist._strategy import operations as operations  # registers them
from mpidist._strategy.contexts import MultiStepContext
from mpidist._strategy.reductions import Destination, Everywhere, Pair, root_of
from mpidist._values.components import check_owner
from mpidist._values.distributed import (
    DistributedValues,
    Mirrored,
    PerReplica,
    components_of,
    select_replica,
)
from mpidist._values.variable import Variable, storage_of


@explain_attributes
class StrategyExtended:
    """Additional strategy methods, for libraries and ported ``merge_fn`` code.

    `Strategy.extended` returns it. All methods are for cross-replica context: at
    program level every rank must make the call (collective); inside ``merge_fn`` the
    coordinator calls them for all ranks.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group

    def __repr__(self) -> str:
        return f"<mpidist.StrategyExtended of {self._group}>"

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices that replicas run on, in replica order."""
        return self._group.device_names

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold variables: those of the replicas."""
        return self._group.device_names

    @property
    def experimental_between_graph(self) -> bool:
        """Whether every process builds its own program: True over MPI."""
        return self._group.is_mpi

    @property
    def experimental_require_static_shapes(self) -> bool:
        """False: shapes may change from step to step."""
        return False

    @property
    def experimental_should_init(self) -> bool:
        """True: every process makes its own copies of variables."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints: rank 0 does."""
        return self._group.replica_id == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: rank 0 does."""
        return self._group.replica_id == 0

    def value_container(self, value: Nest) -> Nest:
        """Return the variable that an array is a copy of, otherwise ``value``.

        Not collective. At program level `Variable.value` and `Variable.values` return
        such copies; results of arithmetic are not copies.
        """
        for x in self._group.registry.values():
            if isinstance(x, Variable) and storage_of(x).view is value:
                return x
        return value

    def variable_created_in_scope(self, v: Nest) -> bool:
        """Return whether a variable belongs to this strategy. Not collective.

        Variables created outside every scope belong to the default strategy.

        Raises:
            TypeError: if ``v`` is not a variable.
        """
        call, is_variable = "variable_created_in_scope", isinstance(v, Variable)
        expect(is_variable, call, "a `mpidist.Variable`", v)
        return storage_of(v).group is self._group

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: object) -> Iterator[None]:
        """Place the variables created inside with another one. Not collective.

        This has no effect: every variable has a copy on each replica's device. The
        arguments are validated as in TensorFlow.

        Raises:
            RuntimeError: if called outside the scope of this strategy.
            ValueError: if it is not a variable of this strategy.
        """
        if context.current().group is not self._group:
            raise RuntimeError(
                "colocate_vars_with: Need to be inside `with strategy.scope()` for "
                f"{self._group}"
            )
        variable = colocate_with_variable
        if not isinstance(variable, Variable) or not self.variable_created_in_scope(
            variable
        ):
            raise ValueError(
                "`colocate_vars_with` must only be passed a variable created in this "
                f"Strategy's scope, got {variable!r:.80}"
            )
        yield

    @tells("read_var")
    def read_var(self, v: Nest) -> Nest:
        """Return a variable's value in cross-replica context. Collective if ON_READ.

        Args:
            v: a `Variable`. A plain array is returned unchanged.

        Returns:
            A new array: the value of a mirrored variable, or the combined copies of an
            ON_READ variable.

        Raises:
            ValueError: for an ON_READ variable with aggregation NONE.
        """
        context.require_cross_replica(self._group, "read_var")
        if isinstance(v, Variable):
            check_owner(self._group, "read_var", v)
            return v.read_value()
        return v

    def non_slot_devices(self, var_list: object) -> tuple[str, ...]:
        """Return the devices for state without a variable: those of all replicas."""
        return self._group.device_names

    @tells("update_non_slot")
    def update_non_slot(
        self,
        colocate_with: Variable | tuple[str, ...] | list[str],
        fn: Callable[..., Nest],
        args: Args = (),
        kwargs: Kwargs = None,
        group: bool = True,
    ) -> Nest:
        """Run ``fn(*args, **kwargs)`` on every device. Collective.

        Like `update`, for state that does not belong to a variable. Assignments in
        ``fn`` change the replica's own copies.

        Args:
            colocate_with: what `non_slot_devices` returned, or a variable.
            fn: the function.
            args: its positional arguments, as for `update`.
            kwargs: its keyword arguments, as for `update`.
            group: as for `update`.

        Returns:
            The same as for `update`.

        Raises:
            ValueError: if ``colocate_with`` is neither of these. Otherwise as `update`.
        """
        frame = context.require_cross_replica(self._group, "update_non_slot")
        if not isinstance(colocate_with, Variable) and (
            not isinstance(colocate_with, (tuple, list))
            or not all(isinstance(name, str) for name in colocate_with)
            or tuple(colocate_with) != self._group.device_names
        ):
            with dispatch.checking(self._group, "update_non_slot"):
                raise ValueError(
                    "update_non_slot: expected `colocate_with` to be what "
                    "`non_slot_devices` returned, or a variable, got "
                    f"{colocate_with!r:.80}"
                )
        return self._update(frame, Update(None, fn, args, kwargs, group))

    def experimental_make_numpy_dataset(
        self, numpy_input: Nest, session: object = None
    ) -> mpidist.data.Dataset:
        """Create a dataset from the rows of arrays. Not collective.

        Args:
            numpy_input: an array, or a tuple or dict of arrays with the same number of
                rows. A list of arrays is stacked: each array is a row.
            session: accepted and ignored.

        Returns:
            A `mpidist.data.Dataset`; call ``batch`` on it before it is distributed.
        """
        return mpidist.data.Dataset._of_numpy(self._group, numpy_input)

    @tells("experimental_run_steps_on_iterator")
    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Nest], object],
        iterator: Iterator[Nest],
        iterations: int = 1,
        initial_loop_values: dict[str, Nest] | None = None,
    ) -> MultiStepContext:
        """Call ``fn(context, element)`` for the next elements. Collective.

        Args:
            fn: called in cross-replica context with a `MultiStepContext` and an
                element of the iterator; it usually calls `Strategy.run`.
            iterator: a `DistributedIterator`, or anything with ``get_next`` or
                ``__next__``.
            iterations: how many elements to take, at least 1.
            initial_loop_values: the outputs before the first step.

        Returns:
            The `MultiStepContext`, with the outputs of the last step.

        Raises:
            ValueError: if ``iterations`` is less than 1.
            OutOfRangeError: if a `DistributedIterator` ends earlier.
        """
        call = "experimental_run_steps_on_iterator"
        context.require_cross_replica(self._group, call)
        with dispatch.checking(self._group, call):
            iterations = as_int(call, "iterations", iterations, least=1)
        step_context = MultiStepContext()
        step_context.last_step_outputs.update(initial_loop_values or {})
        with context.scope(self._group):
            for _ in range(iterations):
                if hasattr(iterator, "get_next"):
                    element = iterator.get_next()
                else:
                    element = next(iterator)
                fn(step_context, element)
        return step_context

    def call_for_each_replica(
        self, fn: Callable[..., Nest], args: Args = (), kwargs: Kwargs = None
    ) -> Nest:
        """Run ``fn`` once per replica; see `Strategy.run`. Collective."""
        kwargs = {} if kwargs is None else kwargs
        return dispatch.perform(self._group, "call_for_each_replica", fn, args, kwargs)

    @overload
    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: PerReplica,
        destinations: Everywhere,
        options: CallOptions = None,
        *,
        experimental_hints: CallOptions = None,
    ) -> Mirrored: ...
    @overload
    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Nest,
        destinations: Destination,
        options: CallOptions = None,
        *,
        experimental_hints: CallOptions = None,
    ) -> Nest: ...

    @tells("reduce_to")
    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Nest,
        destinations: Destination,
        options: CallOptions = None,
        *,
        experimental_hints: CallOptions = None,
    ) -> Nest:
        """Combine a per-replica value over all replicas. Collective.

        Args:
            reduce_op: a `ReduceOp`, its name, or `VariableAggregation` SUM or MEAN.
            value: a `PerReplica`, or a nest of them.
            destinations: where the result goes. A variable (which does not change), a
                distributed value, an array, or a device that every rank has, such as
                "/cpu:0": to every replica. A device string of `worker_devices`, or with
                "/task:K": to that rank only (a reduce).
            options: communication options for this call.
            experimental_hints: the older name of ``options``.

        Returns:
            `Mirrored`, in the nest of ``value``. For the device of a rank: plain arrays
            on that rank and None on the others, as in mpi4py; in ``merge_fn``, if
            the device is not rank 0's, a `PerReplica` of these. A value that is the
            same on all replicas is returned unchanged for MEAN, MIN and MAX.

        Raises:
            ValueError: for SUM or PROD of a value that is not per replica, or if a
                destination is invalid.

        Example, on two replicas::

            x = strategy.run(lambda: np.array([1.0, 2.0]))
            total = strategy.extended.reduce_to("SUM", x, destinations="/cpu:0")
            total.value()  # array([2., 4.])
        """
        options = _one_of("reduce_to", options, experimental_hints)
        pairs = [(value, destinations)]
        return self._reduce_pairs(reduce_op, pairs, options, "reduce_to")[0]

    @tells("batch_reduce_to")
    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[Pair],
        options: CallOptions = None,
        *,
        experimental_hints: CallOptions = None,
    ) -> list[Nest]:
        """Combine several per-replica values, in one fused reduction. Collective.

        Args:
            reduce_op: as for `reduce_to`.
            value_destination_pairs: an iterable of (value, destinations).
            options: communication options for this call.
            experimental_hints: the older name of ``options``.

        Returns:
            A list with the result of `reduce_to` for each pair, in order.
        """
        options = _one_of("batch_reduce_to", options, experimental_hints)
        pairs = value_destination_pairs
        if not isinstance(pairs, (list, tuple)) and isinstance(pairs, Iterable):
            with dispatch.checking(self._group, "batch_reduce_to"):
                pairs = list(pairs)
        return self._reduce_pairs(reduce_op, pairs, options, "batch_reduce_to")

    def _reduce_pairs(
        self,
        reduce_op: ReduceOp | str,
        pairs: Iterable[Pair],
        options: CallOptions,
        call: str,
    ) -> list[Nest]:
        name = "batch_reduce_to"
        results: list[Nest] = dispatch.perform(
            self._group, name, reduce_op, pairs, options, call, call=call
        )
        if not any(isinstance(destinations, str) for _, destinations in pairs):
            return results
        alone = context.current().coordinator is not None
        for i, (_, destinations) in enumerate(pairs):
            # For one rank: a PerReplica, and this code may see that of this rank.
            if not alone or root_of(self._group, destinations) == 0:
                results[i] = nest.map_structure(
                    lambda x: component(x) if isinstance(x, PerReplica) else x,
                    results[i],
                )
        return results

    @tells("broadcast_to")
    def broadcast_to(self, tensor: Nest, destinations: Destination) -> Nest:
        """Copy rank 0's value to every replica. Collective.

        Args:
            tensor: an array, or a Python number.
            destinations: as for `reduce_to`; every replica gets the value.

        Returns:
            `Mirrored`. Python numbers and Mirrored values are returned unchanged.
        """
        context.require_cross_replica(self._group, "broadcast_to")
        if isinstance(tensor, Variable):
            with dispatch.checking(self._group, "broadcast_to"):
                tensor = tensor.value()  # on all ranks, if it is ON_READ
        return dispatch.perform(
            self._group, "broadcast_to", OnRank0(tensor), destinations
        )

    def update(
        self,
        var: Nest,
        fn: Callable[..., Nest],
        args: Args = (),
        kwargs: Kwargs = None,
        group: bool = True,
    ) -> Nest:
        """Run ``fn(var, *args, **kwargs)`` on every replica, to change its copy.

        Collective. In ``fn``, `Variable.assign` and similar methods change the
        replica's own copy, without communication. ``fn`` receives Mirrored arguments as
        their value, and the replica's own component of PerReplica arguments. ``fn``
        must leave all copies of a mirrored variable equal, so its arguments are usually
        results of a reduction. If it does not, all ranks raise. In ``merge_fn`` each
        rank runs ``fn`` with its own objects, if ``merge_fn`` can reach them (through
        ``self``, closure, defaults, globals, arguments). Numbers, strings and objects
        that ``merge_fn`` creates are sent from rank 0.

        In a replica function all replicas call it, each with its own arguments, under
        the same check.

        Args:
            var: the variable.
            fn: the function.
            args: its other positional arguments; those that are not distributed values
                have to be the same on all replicas.
            kwargs: its keyword arguments, under the same condition.
            group: whether to return the results as a single Mirrored.

        Returns:
            The result of ``fn`` as `Mirrored`; with ``group=False`` tuples of the
            replicas' results (those that `Strategy.experimental_local_results`
            returns). If ``var`` is not distributed: ``fn(var, ...)``. In a replica
            function the replica's own result; with ``group=False`` in a tuple.

        Raises:
            ValueError: if an argument is an ON_READ variable and ``var`` is mirrored;
                in ``merge_fn`` if a rank does not have an object that ``fn`` refers
                to, or has one of another type.
            TypeError: in ``merge_fn``, if an object that it created cannot be sent,
                such as a lock.
            ReplicaError: if ``fn`` raised on another replica. Then all copies of the
                variables it wrote are reset to rank 0's (with arguments of each
                replica's own: to the values that they had).
            CollectiveMismatchError: if some rank did not make this call, if plain
                arguments are not the same on all replicas, or if ``fn`` left different
                values in mirrored variables, or returned different values, on some
                replica (all copies are then reset too). For arrays larger than 64 KiB a
                sample of words is compared, a different one in each update;
                `check_in_sync` compares all. Not checked with the guard off.

        In ``merge_fn`` the coordinator continues with the next update without waiting
        for the other replicas. Errors in its own ``fn`` are raised here; ReplicaError
        and CollectiveMismatchError may be raised, on all ranks, by a later call that
        communicates, or by `ReplicaContext.merge_call`. To catch them inside
        ``merge_fn``, pass ``group=False``: this call then waits for all replicas.

        Example, on two replicas::

            with strategy.scope():
                weights = mpidist.Variable(np.zeros(2))


            def update_fn(w, g):
                w.assign_sub(g)


            def merge_fn(strategy, gradient):
                total = strategy.extended.reduce_to("SUM", gradient, weights)
                strategy.extended.update(weights, update_fn, args=(total,))


            def replica_fn():
                mpidist.get_replica_context().merge_call(merge_fn, args=(np.ones(2),))


            strategy.run(replica_fn)
            weights.numpy()  # array([-2., -2.])
        """
        try:
            frame = context.current()
            if (
                frame.coordinator is not None  # the usual case, in merge_fn
                and (group and type(var) is Variable)
                and storage_of(var).group is self._group is frame.group
            ):
                return frame.coordinator.update(Update(var, fn, args, kwargs, True))
            if context.is_in_replica(self._group) and isinstance(var, Variable):
                check_owner(self._group, "update", var)
                update = Update(var, fn, args, kwargs, False)
                result = run_update(self._group, update, own=True)
                return result if group else (result,)
            frame = context.require_cross_replica(self._group, "update")
            if not isinstance(var, Variable) or (
                self._group.is_mpi and not storage_of(var).group.is_mpi
            ):
                if isinstance(var, DistributedValues):
                    hint = "use `strategy.run` to work on each replica's component"
                    with dispatch.checking(self._group, "update"):
                        expect(False, "update", "a `mpidist.Variable`", var, hint)
                own = select_replica(tuple(args)), select_replica(kwargs or {})
                return fn(var, *own[0], **own[1])
            check_owner(self._group, "update", var)
            return self._update(frame, Update(var, fn, args, kwargs, group))
        except BaseException as error:
            interruptions.left(self._group, "update", error)
            raise

    # --- internal to the package ------------------------------------------------------

    def _update(self, frame: context.Frame, update: Update) -> Nest:
        if frame.coordinator is not None:
            result = frame.coordinator.update(update)
        else:
            result = run_update(self._group, update)
        if update.grouped:
            return result
        leaves, structure = nest.flatten(result)
        return structure.unflatten(components_of(leaves))


def _one_of(call: str, options: CallOptions, hints: CallOptions) -> CallOptions:
    if options is not None and hints is not None:
        raise TypeError(
            f"{call}: got both `options` and its older name `experimental_hints`; "
            "write `options` only"
        )
    return options if hints is None else hints
