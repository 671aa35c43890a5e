"""The context of a replica function, and the collectives it may call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any, overload

import numpy as np

from mpidist._agreement.async_calls import CollectiveHandle
from mpidist._agreement.mismatch import call_of
from mpidist._base.options import CallOptions
from mpidist._base.reduce_op import REDUCE_OPS, ReduceOp, Reduction, as_reduce_op
from mpidist._base.remedies import explain_attributes
from mpidist._base.types import Args, Given, Kwargs, Leaf, Nest
from mpidist._merge.merge_call import merge_call
from mpidist._runtime import context, interruptions
from mpidist._runtime.begin_async import begin_async
from mpidist._runtime.dispatch import check_arguments
from mpidist._runtime.interruptions import tells
from mpidist._strategy.contexts import (
    checked,
    checker,
    require_current,
    require_scope,
    warn_of_own_value,
)
from mpidist._strategy.folds import fold
from mpidist._strategy.strategy import Strategy, group_of
from mpidist._values.array_like import ArrayLike
from mpidist._values.distributed import PerReplica


@explain_attributes
class ReplicaContext:
    """The replica that the code runs on, inside `Strategy.run`.

    `mpidist.get_replica_context` returns it. It can also be created directly, on every
    rank, and entered with ``with``.

    Args:
        strategy: the strategy.
        replica_id_in_sync_group: the number of this rank's replica, or None, which
            means the same.

    Raises:
        ValueError: if the id is not an int, or not that of this rank's replica.
    """

    def __init__(
        self, strategy: Strategy, replica_id_in_sync_group: int | None
    ) -> None:
        group = group_of(strategy, "ReplicaContext")
        own, given = group.replica_id, replica_id_in_sync_group
        is_int = isinstance(given, (int, np.integer)) and not isinstance(given, bool)
        if not (given is None or is_int):
            raise ValueError(
                "ReplicaContext: replica_id_in_sync_group can only be an integer or "
                f"None, got {given!r}"
            )
        if given is not None and int(given) != own:
            raise ValueError(
                f"ReplicaContext: this rank hosts replica {own} of {strategy}, and "
                f"cannot enter the context of replica {given}; write None for its own"
            )
        self._entered: list[tuple[int, context.Frame]] = []  # by which threads
        self._group = group
        self._all_reduce = group.all_reduce
        self._all_gather = group.all_gather
        if not group.is_mpi:
            gathers = functools.partial(warn_of_own_value, "all_gather")
            self._all_reduce = checked(warn_of_own_value, group.all_reduce)
            self._all_gather = checked(gathers, group.all_gather)

    def __enter__(self) -> ReplicaContext:
        """Make this the current replica context."""
        context.note_use(self._group, "ReplicaContext")
        is_other = any(one != get_ident() for one, _ in self._entered[-1:])
        if is_other and self._group.num_replicas > 1:
            where = " is in a `with` block of the same replica context"
            call = call_of("ReplicaContext")
            raise self._group.guard.breakdown.two_threads(where, call)
        frame = context.Frame(self._group, context.Level.REPLICA, replica_context=self)
        frame.__enter__()
        self._entered.append((get_ident(), frame))
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the context that was current before."""
        entry = context.last_of_thread(self._entered)
        self._entered.remove(entry)
        entry[1].__exit__(*error)

    def __reduce__(self) -> tuple[type[ReplicaContext], tuple[Strategy, None]]:
        # When merge_fn returns it: on each rank the context of its own replica.
        return (ReplicaContext, (self.strategy, None))

    def __repr__(self) -> str:
        return (
            f"<mpidist.ReplicaContext: replica {self._group.replica_id} of "
            f"{self.num_replicas_in_sync}>"
        )

    @property
    def strategy(self) -> Strategy:
        """The strategy of this replica."""
        return self._group.strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of this replica, from 0 to ``num_replicas_in_sync - 1``."""
        return self._group.replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that are kept in sync."""
        return self._group.num_replicas

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica, as a tuple with one string."""
        return (self._group.device_name,)

    @overload
    def all_reduce(
        self,
        reduce_op: Reduction,
        value: int | ArrayLike | PerReplica,
        options: CallOptions = None,
    ) -> Any: ...
    @overload
    def all_reduce(
        self, reduce_op: Reduction, value: Given, options: CallOptions = None
    ) -> Given: ...

    def all_reduce(
        self, reduce_op: Reduction, value: Nest, options: CallOptions = None
    ) -> Nest:
        """Reduce ``value`` over all replicas; all of them get the result.

        Collective: every replica must call this, in the same order. On one node it uses
        shared memory. Between nodes up to 1 KiB travels with the header, one MPI
        collective; more moves by others, which do not block: arrays above 1 MiB in
        pieces, smaller ones together, once for each dtype and ``bytes_per_pack``. On
        one node large results share one block of memory, which is freed when the last
        of them is.

        Args:
            reduce_op: a `ReduceOp` or its name; or an associative function of two
                arrays, such as ``numpy.logaddexp``, the same on all replicas. It is
                called as ``f(f(x0, x1), x2)`` in the order of the replicas, on every
                rank, which therefore gets the arrays of all (an all-gather). It must
                return an array of the same shape and dtype. A `CrossDeviceOps` does not
                see it.
            value: a nest of arrays and numbers, of the same structure, shapes and
                dtypes on all replicas. It is not changed.
            options: communication options for this call.

        Returns:
            The same nest with the results, bit-identical on all replicas. SUM, MIN, MAX
            and PROD keep the dtype. So does MEAN, except that MEAN of integers is
            float64. Python numbers give Python numbers.

        Raises:
            RuntimeError: if called outside this replica context.
            TypeError: if a leaf is not an array, or the operation is not defined for
                its dtype, or a function returns another shape or dtype.
            ReplicaError: if a function raised on another rank.
            CollectiveMismatchError: if the replicas' calls differ, or the results of a
                function.

        Example, on two replicas::

            def replica_fn():
                ctx = mpidist.get_replica_context()
                return ctx.all_reduce("SUM", {"a": 1, "b": [40]})  # {'a': 2, 'b': [80]}


            strategy.run(replica_fn)
        """
        try:
            if context.current().replica_context is not self:
                require_current(self, "all_reduce")
            if type(reduce_op) is str and reduce_op in REDUCE_OPS:
                # What programs write: without another Python call.
                return self._all_reduce(REDUCE_OPS[reduce_op], value, options)
            return self._reduce_now(reduce_op, value, options)
        except BaseException as error:
            interruptions.left(self._group, "all_reduce", error)
            raise

    @overload
    def all_gather(
        self, value: ArrayLike | PerReplica, axis: int, options: CallOptions = None
    ) -> Any: ...
    @overload
    def all_gather(
        self, value: Given, axis: int, options: CallOptions = None
    ) -> Given: ...

    def all_gather(self, value: Nest, axis: int, options: CallOptions = None) -> Nest:
        """Concatenate ``value`` of all replicas along an axis.

        Collective: every replica must call this, in the same order. On one node it uses
        shared memory. Between nodes it uses ``MPI_Iallgather`` (``MPI_Iallgatherv`` if
        sizes differ), once for each leaf, or once for all leaves if they are small. Up
        to 1 KiB travels with the header; above 8 replicas 1 KiB of all together.

        Args:
            value: a nest of arrays of at least one dimension, of the same dtypes and
                shapes on all replicas, except for the size along ``axis`` (0 is
                allowed).
            axis: the axis to concatenate along; negative values count from the end.
            options: communication options for this call.

        Returns:
            The same nest with the results, in the order of the replicas.

        Raises:
            RuntimeError: if called outside this replica context.
            TypeError, ValueError: if a leaf is not an array, or the axis is out of
                range.
            CollectiveMismatchError: if the replicas' calls differ.

        Example, on two replicas::

            def replica_fn():
                ctx = mpidist.get_replica_context()
                rank = np.array([ctx.replica_id_in_sync_group])
                return ctx.all_gather(rank, axis=0)  # array([0, 1])


            strategy.run(replica_fn)
        """
        try:
            if context.current().replica_context is not self:
                require_current(self, "all_gather")
            return self._all_gather(value, axis, options)
        except BaseException as error:
            interruptions.left(self._group, "all_gather", error)
            raise

    @overload
    def all_reduce_async(
        self,
        reduce_op: Reduction,
        value: int | ArrayLike | PerReplica,
        options: CallOptions = None,
    ) -> CollectiveHandle[Any]: ...
    @overload
    def all_reduce_async(
        self, reduce_op: Reduction, value: Given, options: CallOptions = None
    ) -> CollectiveHandle[Given]: ...

    @tells("all_reduce_async")
    def all_reduce_async(
        self, reduce_op: Reduction, value: Nest, options: CallOptions = None
    ) -> CollectiveHandle[Nest]:
        """Start an asynchronous `all_reduce`, and return a handle for its result.

        Collective, as `all_reduce`: every replica starts the same calls in the same
        order. A thread of the strategy executes them one after the other, in that
        order. Any other collective call first waits for all of them. Not in
        tf.distribute.

        It is synchronous, with the result ready when this returns, if there is one
        replica, on a GPU, with a function as ``reduce_op`` or a `CrossDeviceOps`, and
        if MPI was not started with ``MPI_THREAD_MULTIPLE`` (see ``mpidist info``).

        Args:
            reduce_op: as for `all_reduce`.
            value: as for `all_reduce`. Neither the arrays nor the lists and dicts that
                hold them may change before `result` has returned: the result would be
                undefined. With ``MPIDIST_DEBUG=1`` `result` then raises RuntimeError.
            options: communication options for this call.

        Returns:
            A handle, whose ``result()`` waits, and returns what `all_reduce` would have
            returned. What that would have raised is raised by ``result()`` or by the
            next synchronous collective call, whichever comes first; at the latest at
            the end of `Strategy.run` or, as an uncaught exception, of the program.
            Asynchronous calls started in between are not executed, and raise the same
            error. A handle that is dropped without ``result()`` gives a
            RuntimeWarning, once.

        Raises:
            RuntimeError: if called outside this replica context.

        Example, on two replicas::

            def replica_fn(x):
                handle = mpidist.get_replica_context().all_reduce_async("SUM", x)
                norm = np.linalg.norm(x)  # this is computed during the all-reduce
                return norm, handle.result()


            norm, total = strategy.run(replica_fn, args=(np.ones(3),))
            strategy.experimental_local_results(total)  # (array([2., 2., 2.]),)
        """
        at_once = type(reduce_op) is not ReduceOp and callable(reduce_op)
        make = functools.partial(self._reduce_now, reduce_op, value, options)
        return self._begin("all_reduce_async", value, make, at_once)

    @tells("all_gather_async")
    def all_gather_async(
        self, value: Given, axis: int, options: CallOptions = None
    ) -> CollectiveHandle[Given]:
        """Start an asynchronous `all_gather`, and return a handle for its result.

        Collective; otherwise as `all_reduce_async`.

        Args:
            value: as for `all_gather`; it may not change before `result` has returned.
            axis: as for `all_gather`.
            options: communication options for this call.

        Returns:
            A handle: ``result()`` waits, and returns or raises as `all_gather` does.

        Raises:
            RuntimeError: if called outside this replica context.
        """
        make = functools.partial(self._all_gather, value, axis, options)
        return self._begin("all_gather_async", value, make)

    def _begin(
        self, name: str, value: Nest, make: Callable[[], Nest], at_once: bool = False
    ) -> CollectiveHandle[Any]:
        require_current(self, name)
        check = checker(name, value)
        return begin_async(self._group, name, make, at_once=at_once, check=check)

    @overload
    def merge_call(
        self,
        merge_fn: Callable[..., PerReplica[Given]],
        args: Args = (),
        kwargs: Kwargs = None,
    ) -> Given: ...
    @overload
    def merge_call(
        self, merge_fn: Callable[..., Leaf], args: Args = (), kwargs: Kwargs = None
    ) -> Leaf: ...
    @overload
    def merge_call(
        self, merge_fn: Callable[..., Nest], args: Args = (), kwargs: Kwargs = None
    ) -> Nest: ...

    @tells("merge_call")
    def merge_call(
        self, merge_fn: Callable[..., Nest], args: Args = (), kwargs: Kwargs = None
    ) -> Nest:
        """Run ``merge_fn`` once, for all replicas, on the coordinator.

        Collective: every replica must call this, in the same order. All replicas
        wait. Rank 0 calls its ``merge_fn(strategy, *args, **kwargs)`` in
        cross-replica context; the ``merge_fn`` of the others is not called. In the
        default strategy, outside every scope, it gets the arguments unchanged.

        Args:
            merge_fn: the function.
            args: its positional arguments: nests of the same structure on all
                replicas. Each array or number is passed as a `PerReplica`; rank 0 has
                its own component, and the others stay on their ranks until they are
                accessed. Variables are passed unchanged. So are other objects if they
                are equal on all replicas; otherwise they are passed as a PerReplica.
                Objects that hold variables are compared by class and first variable.
            kwargs: its keyword arguments, treated in the same way.

        Returns:
            This replica's part of the result of ``merge_fn``: its component of
            PerReplica and Mirrored values (also nested ones); anything else unchanged.

        Raises:
            RuntimeError: if called outside this replica context.
            TypeError: if an argument cannot be compared, such as a lock or an open
                file; ``merge_fn`` may close over it instead.
            Exception: any exception that ``merge_fn`` raises, on every replica.
            CollectiveMismatchError: if the replicas' calls differ.

        Example, on two replicas::

            def merge_fn(strategy, x):
                return strategy.reduce("MEAN", x, axis=None)


            def replica_fn():
                ctx = mpidist.get_replica_context()
                rank = ctx.replica_id_in_sync_group
                return ctx.merge_call(merge_fn, args=(rank,))  # 0.5


            strategy.run(replica_fn)
        """
        group = self._group
        if context.current().replica_context is not self:
            require_current(self, "merge_call")
        kwargs = {} if kwargs is None else kwargs
        if not group.is_mpi:
            check_arguments("merge_call", args, kwargs)
            require_scope("merge_call")
            with group.cross_frame:
                return merge_fn(self.strategy, *args, **kwargs)
        observers = group.guard.observers
        if observers is None:
            return merge_call(group, merge_fn, args, kwargs)
        with observers.whole("merge_call", merge_fn, group.guard):
            return merge_call(group, merge_fn, args, kwargs)

    def _reduce_now(self, op: Reduction, value: Nest, options: CallOptions) -> Nest:
        if type(op) is not ReduceOp:
            if callable(op):
                return fold(self._group, op, value, options, "all_reduce")
            with self._group.guard.checking("all_reduce"):
                op = as_reduce_op(op, "all_reduce")
        return self._all_reduce(op, value, options)
