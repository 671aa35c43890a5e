"""When the copies of a variable are combined: on write, or on read.

A policy defines what reading and writing mean at each level. `Variable` prepares the
values (dtype, shape, device) and changes this rank's copy; the policy communicates.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._base import backend
from mpidist._base.indexed_slices import IndexedSlices, Scatter
from mpidist._base.options import ReduceOp, VariableAggregation
from mpidist._runtime import context, dispatch
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.distributed import DistributedValues, Mirrored, PerReplica
from mpidist._values.storage import VariableStorage

_OPERATION: Final = {
    VariableAggregation.SUM: ReduceOp.SUM,
    VariableAggregation.MEAN: ReduceOp.MEAN,
}


class OnWrite:
    """All copies are always equal: the replicas' values are combined first."""

    def write(self, variable: VariableStorage, how: str, value: Any) -> None:
        """Write in a replica context: combine, then change every copy. Collective."""
        variable._apply(how, self._aggregate(variable, how, value))

    def scatter(self, variable: VariableStorage, how: Scatter, value: Any) -> None:
        """Do the same as `write`, for rows. Collective."""
        call = variable._call(f"scatter_{how}")
        _require_aggregation(variable, f"scatter_{how}")
        collectives = variable._group.collectives
        aggregation = variable.aggregation
        try:
            indices, rows = variable._prepare_slices(how, value)
        except Exception as error:
            collectives.invalid(call, error)
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            indices, rows = collectives.share(lambda: [indices, rows], call)
        else:
            own = IndexedSlices(rows, indices)
            both = variable._group.all_reduce(_OPERATION[aggregation], own, call=call)
            indices, rows = both.indices, both.values
        variable._apply_slices(how, indices, rows)

    def store(self, variable: VariableStorage, how: str, value: Any) -> None:
        """Write a value that all ranks have, in cross-replica context."""
        variable._apply(how, value)

    def _aggregate(self, variable: VariableStorage, how: str, value: Any) -> Any:
        _require_aggregation(variable, how)
        call = variable._call(how)
        collectives = variable._group.collectives
        try:
            # Treat a PerReplica that the function closes over as an argument.
            own = value._own if isinstance(value, PerReplica) else value
            prepared = variable._prepare(how, own)
        except Exception as error:
            collectives.invalid(call, error)
        if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return collectives.broadcast(prepared, call=call)
        return variable._group.all_reduce(
            _OPERATION[variable.aggregation], prepared, call=call
        )


class OnRead:
    """Each replica writes its own copy; cross-replica reading combines them."""

    def read(self, variable: VariableStorage, frame: context.Frame | None) -> Any:
        """Return the own copy in a replica or without a frame, else all combined."""
        if frame is None:
            return variable._view
        if frame.level is not context.Level.REPLICA or not context.has_strategy():
            _require_readable(variable)
            return dispatch.perform(variable._group, "read_variable", variable)
        if frame.sync_on_read:
            _require_readable(variable)
            return _read_variable(variable._group, variable)
        return variable._view

    def write(self, variable: VariableStorage, how: str, value: Any) -> None:
        """Write the own copy in a replica context, without communication."""
        if isinstance(value, PerReplica):
            value = value._own
        variable._apply(how, variable._prepare(how, value))

    def scatter(self, variable: VariableStorage, how: Scatter, value: Any) -> NoReturn:
        """Raise: not supported, as in TensorFlow."""
        raise NotImplementedError(
            f"Variable {variable.name!r}.scatter_{how}: ON_READ variables have no "
            "scatter operations; write `variable.assign(new)`, where `new` is a copy "
            "of `variable.read_value()` that has been changed"
        )

    def store(self, variable: VariableStorage, how: str, value: Any) -> None:
        """Write in cross-replica context, so that reading returns the written value."""
        if variable.aggregation is not VariableAggregation.SUM:
            variable._apply(how, value)
            return
        group = variable._group
        if how == "assign":
            share = _share_of(value, group.replica_id, group.num_replicas)
            variable._apply(how, share)
        elif group.replica_id == 0:
            variable._apply(how, value)  # to one copy: the sum changes by it


ON_WRITE = OnWrite()
ON_READ = OnRead()


def _share_of(value: Any, replica_id: int, num_replicas: int) -> Any:
    """Return a replica's share of a sum. Shares of integers add up exactly."""
    if value.dtype.kind not in "iu":
        return value / value.dtype.type(num_replicas)
    # The number of replicas may exceed the range of an int8.
    wide = value.dtype if value.dtype.itemsize == 8 else np.dtype(np.int64)
    quotient, rest = np.divmod(value.astype(wide), wide.type(num_replicas))
    return (quotient + (rest > replica_id)).astype(value.dtype)


def _require_aggregation(variable: VariableStorage, how: str) -> None:
    if variable.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"Variable {variable.name!r}.{how}: You must specify an aggregation "
            "method to update a mirrored variable in a replica context, since each "
            "replica may have another value. Write `Variable(..., aggregation="
            "mpidist.VariableAggregation.MEAN)` (or SUM, or ONLY_FIRST_REPLICA), "
            "or assign in cross-replica context: after `strategy.run`, or in a "
            "`merge_call`"
        )


def _require_readable(variable: VariableStorage) -> None:
    if variable.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"Variable {variable.name!r}: an ON_READ variable with aggregation=NONE "
            "has no one value in cross-replica context, since nothing says how to "
            "combine its copies. Read it in a replica function, write "
            "`strategy.experimental_local_results(variable)`, or make it with "
            "aggregation=SUM, MEAN or ONLY_FIRST_REPLICA"
        )


@dispatch.operation("read_variable")
def _read_variable(group: ReplicaGroup, variable: VariableStorage) -> Any:
    """Return the combined copies of an ON_READ variable. Collective."""
    collectives = group.collectives
    call = variable._call("reading, which all ranks have to do since it is ON_READ,")
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        result = collectives.broadcast(variable._array, call=call)
    else:
        operation = _OPERATION[variable.aggregation]
        result = group.all_reduce(operation, variable._array, call=call)
    if isinstance(result, np.ndarray):
        result.flags.writeable = False  # as for other variables; no copy is affected
    return result


@dispatch.operation("assign_variable")
def _assign_variable(
    group: ReplicaGroup, variable: VariableStorage, how: str, value: Any
) -> None:
    """Assign a value that is the same on all ranks, and check that it is."""
    collectives = group.collectives
    call = variable._call(how)
    try:
        prepared = variable._prepare(how, value)
    except Exception as error:
        collectives.invalid(call, error)
    text = f"{call} {backend.describe(prepared)}"
    if collectives.guard.checks and not is_same(group, value):
        text += f" = {backend.summarize(prepared)}"
    collectives.guard.agree(Call(text))
    variable._policy.store(variable, how, prepared)


@dispatch.operation("scatter_variable")
def _scatter_variable(
    group: ReplicaGroup, variable: VariableStorage, how: Scatter, value: Any
) -> None:
    """Change rows with values that are the same on all ranks; check that they are."""
    collectives = group.collectives
    call = variable._call(f"scatter_{how}")
    try:
        indices, rows = variable._prepare_slices(how, value)
    except Exception as error:
        collectives.invalid(call, error)
    text = f"{call} {backend.describe(rows)}"
    if collectives.guard.checks and not is_same(group, value):
        text += f" = {backend.summarize(rows)} at {backend.summarize(indices)}"
    collectives.guard.agree(Call(text))
    variable._apply_slices(how, indices, rows)


def is_same(group: ReplicaGroup, value: Any) -> bool:
    """Whether a value is known to be the same on all ranks of a strategy."""
    if isinstance(value, Mirrored):
        return value._key is not None and value._home is group.registry
    if getattr(value, "_policy", None) is not ON_WRITE:
        return False
    return value._group is group and group.is_mpi


def differs(value: Any) -> bool:
    """Whether a value has a component of its own on each replica."""
    if isinstance(value, DistributedValues):
        return isinstance(value, PerReplica)
    return getattr(value, "_policy", None) is ON_READ


def component_of(value: Any) -> Any:
    """Return this rank's component of a distributed value, or copy of a variable."""
    if isinstance(value, DistributedValues):
        return value._own
    return value._array if hasattr(value, "_policy") else value
