"""The policies of variables: copies are combined on write, on read, or never.

A policy defines what reading and writing mean at each level. The storage prepares the
values (dtype, shape, device) and changes this rank's copy; the policy communicates.
"""

from __future__ import annotations

import warnings
from typing import Any, Final, NoReturn

import numpy as np

from mpidist._base.errors import level_of_caller
from mpidist._base.indexed_slices import IndexedSlices, Scatter
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.threads import ReplicaLocal
from mpidist._base.types import Array, Nest
from mpidist._base.variable_enums import VariableAggregation
from mpidist._runtime.context import Frame, Level
from mpidist._values.distributed import PerReplica, own_component
from mpidist._values.storage import Assignment, VariableStorage

_OPERATION: Final = {
    VariableAggregation.SUM: ReduceOp.SUM,
    VariableAggregation.MEAN: ReduceOp.MEAN,
}


class OnWrite:
    """All copies are always equal: the replicas' values are combined first."""

    def write(self, storage: VariableStorage, how: Assignment, value: Nest) -> None:
        """Write in a replica context: combine, then change every copy. Collective."""
        storage.apply(how, self._aggregate(storage, how, value))

    def scatter(self, storage: VariableStorage, how: Scatter, value: Nest) -> None:
        """Write rows in a replica context, as `write` does. Collective."""
        call = storage.describe_call(f"scatter_{how}")
        _require_aggregation(storage, f"scatter_{how}")
        collectives = storage.group.collectives
        aggregation = storage.attributes.aggregation
        try:
            indices, rows = storage.prepare_slices(how, value)
        except Exception as error:
            collectives.invalid(call, error)
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            indices, rows = collectives.share(lambda: [indices, rows], call)
        else:
            own = IndexedSlices(rows, indices)
            both = storage.group.all_reduce(_OPERATION[aggregation], own, call=call)
            indices, rows = both.indices, both.values
        storage.apply_slices(how, indices, rows)

    def store(self, storage: VariableStorage, how: Assignment, value: Array) -> None:
        """Write a value that all ranks have, in cross-replica context."""
        storage.apply(how, value)

    def own_part(self, storage: VariableStorage, value: Array) -> Array:
        """Return what this rank's copy is if ``value`` is assigned on all ranks."""
        return value

    def _aggregate(
        self, storage: VariableStorage, how: Assignment, value: Nest
    ) -> Array:
        _require_aggregation(storage, how)
        call = storage.describe_call(how)
        collectives = storage.group.collectives
        try:
            # Treat a PerReplica that the function closes over as an argument.
            own = own_component(value) if isinstance(value, PerReplica) else value
            prepared = storage.prepare(how, own)
        except Exception as error:
            collectives.invalid(call, error)
        if storage.attributes.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            first: Array = collectives.broadcast(prepared, call=call)
            return first
        result: Array = storage.group.all_reduce(
            _OPERATION[storage.attributes.aggregation], prepared, call=call
        )
        return result


class OnRead:
    """Each replica writes its own copy; cross-replica reading combines them."""

    def read(self, storage: VariableStorage) -> Array:
        """Return all copies combined, in a new array. Collective."""
        collectives, array = storage.group.collectives, storage.array
        aggregation = storage.attributes.aggregation
        call = storage.describe_call(
            "reading, which all ranks have to do since it is ON_READ,"
        )
        result: Array
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            result = collectives.broadcast(array, call=call)
        else:
            result = storage.group.all_reduce(_OPERATION[aggregation], array, call=call)
        if isinstance(result, np.ndarray):
            result.flags.writeable = False  # as for other variables; no copy changes
        return result

    def write(self, storage: VariableStorage, how: Assignment, value: Nest) -> None:
        """Write the own copy in a replica context, without communication."""
        if isinstance(value, PerReplica):
            value = own_component(value)
        storage.apply(how, storage.prepare(how, value))

    def scatter(self, storage: VariableStorage, how: Scatter, value: Nest) -> NoReturn:
        """Raise: not supported, as in TensorFlow."""
        raise NotImplementedError(
            f"Variable {storage.name!r}.scatter_{how}: ON_READ variables have no "
            "scatter operations; write `variable.assign(new)`, where `new` is a copy "
            "of `variable.read_value()` that has been changed"
        )

    def store(self, storage: VariableStorage, how: Assignment, value: Array) -> None:
        """Write in cross-replica context, so that reading returns the written value."""
        if storage.attributes.aggregation is not VariableAggregation.SUM:
            storage.apply(how, value)
            return
        group = storage.group
        if how == "assign":
            storage.apply(how, self.own_part(storage, value))
        elif group.replica_id == 0:
            storage.apply(how, value)  # to one copy: the sum changes by it

    def own_part(self, storage: VariableStorage, value: Array) -> Array:
        """Return what this rank's copy is if ``value`` is assigned on all ranks."""
        if storage.attributes.aggregation is not VariableAggregation.SUM:
            return value
        group = storage.group
        share: Array = _share_of(value, group.replica_id, group.num_replicas)
        return share


ON_WRITE = OnWrite()
ON_READ = OnRead()


def _share_of(value: Any, replica_id: int, num_replicas: int) -> Any:
    """Return a replica's share of a sum. Shares of integers add up exactly."""
    # An array, as the result is: NumPy's types of its functions know no CuPy arrays.
    if value.dtype.kind not in "iu":
        return value / value.dtype.type(num_replicas)
    # The number of replicas may exceed the range of an int8.
    wide = value.dtype if value.dtype.itemsize == 8 else np.dtype(np.int64)
    quotient, rest = np.divmod(value.astype(wide), wide.type(num_replicas))
    return (quotient + (rest > replica_id)).astype(value.dtype)


def _require_aggregation(storage: VariableStorage, how: str) -> None:
    if storage.attributes.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"Variable {storage.name!r}.{how}: You must specify an aggregation "
            "method to update a mirrored variable in a replica context, since each "
            "replica may have another value. Write `Variable(..., aggregation="
            "mpidist.VariableAggregation.MEAN)` (or SUM, or ONLY_FIRST_REPLICA), "
            "or assign in cross-replica context: after `strategy.run`, or in a "
            "`merge_call`"
        )


def require_readable(storage: VariableStorage) -> None:
    """Raise if the copies of an ON_READ variable cannot be combined.

    Raises:
        ValueError: if its aggregation is NONE.
    """
    if storage.attributes.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"Variable {storage.name!r}: an ON_READ variable with aggregation=NONE "
            "has no one value in cross-replica context, since nothing says how to "
            "combine its copies. Read it in a replica function, write "
            "`strategy.experimental_local_results(variable)`, or make it with "
            "aggregation=SUM, MEAN or ONLY_FIRST_REPLICA"
        )


_names: ReplicaLocal[list[str]] = ReplicaLocal(list)  # of what a warning has named


def check_plain_write(storage: VariableStorage, how: str, frame: Frame) -> None:
    """Warn once, or raise, if replicas write a variable made outside every scope.

    Each process has one of its own then; the scope may have been forgotten.

    Args:
        storage: of the variable.
        how: the name of the method of `Variable`.
        frame: where it is called.

    Raises:
        RuntimeError: if it has an aggregation, which nothing would do.
    """
    if frame.level is not Level.REPLICA or frame.group.num_replicas == 1:
        return
    attributes = storage.attributes
    call = f"Variable {attributes.name!r}.{how}: this variable was made outside every"
    if attributes.aggregation is not VariableAggregation.NONE:
        raise RuntimeError(
            f"{call} scope, so each process has one of its own, and nothing would "
            f"combine the replicas' values by {attributes.aggregation.name}; make it "
            "in `with strategy.scope():`, or with aggregation=NONE if each process is "
            "to have its own"
        )
    # ON_READ says that each replica has its own value.
    if storage.on_read or _names.get():
        return
    _names.get().append(attributes.name)
    warnings.warn(
        f"[rank {frame.group.replica_id}] {call} scope, so each of the "
        f"{frame.group.num_replicas} replicas writes one of its own, and their values "
        "may differ; make it in `with strategy.scope():`, or with synchronization="
        '"ON_READ" if each process is to have its own',
        RuntimeWarning,
        stacklevel=level_of_caller(),
    )
