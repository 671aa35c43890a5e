"""The arguments of `Variable` and its methods: what fits, and what is refused.

Nothing here communicates, and nothing changes the variable.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike

from mpidist._base import backend, gpus
from mpidist._base.errors import warn_caller
from mpidist._base.expect import as_member, expect
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.threads import ReplicaLocal
from mpidist._base.types import Array, DType, Nest, Shape, record
from mpidist._base.variable_enums import VariableAggregation, VariableSynchronization
from mpidist._runtime.context import Frame, Level
from mpidist._values.array_like import to_plain
from mpidist._values.distributed import is_per_replica

_COMBINED: Final = (VariableAggregation.SUM, VariableAggregation.MEAN)
_NOT_COMBINED: Final = ("scatter_min", "scatter_max", "scatter_update")
# The names of variables that a warning has named.
_warned: Final[ReplicaLocal[list[str]]] = ReplicaLocal(list)


@record
class Attributes:
    """The name of a variable, how its copies are combined, and what that rules out."""

    name: str
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation

    def __str__(self) -> str:
        return (
            f"Variable {self.name!r} ({self.synchronization.name}, "
            f"aggregation={self.aggregation.name})"
        )

    @property
    def on_read(self) -> bool:
        """Whether the copies are combined when the variable is read."""
        return self.synchronization is VariableSynchronization.ON_READ

    def no_aggregation(self, how: str) -> ValueError:
        """Return the error of replicas' values that differ, and are not combined.

        Args:
            how: the name of the method of `Variable` that writes them.
        """
        return ValueError(
            f"Variable {self.name!r}.{how}: You must specify an aggregation method to "
            "update a mirrored variable in a replica context, since the replicas' "
            "values differ. Write `Variable(..., aggregation=mpidist."
            "VariableAggregation.MEAN)` (or SUM, or ONLY_FIRST_REPLICA), or assign in "
            "cross-replica context: after `strategy.run`, or in a `merge_call`"
        )

    def require_readable(self) -> None:
        """Raise a ValueError if the copies of an ON_READ variable are not combined."""
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"Variable {self.name!r}: an ON_READ variable with aggregation=NONE "
                "has no one value in cross-replica context, since nothing says how to "
                "combine its copies. Read it in a replica function, write "
                "`strategy.experimental_local_results(variable)`, or make it with "
                "aggregation=SUM, MEAN or ONLY_FIRST_REPLICA"
            )

    def check_scatter(self, how: str) -> None:
        """Raise a NotImplementedError if rows cannot be changed, or not in this way."""
        call, aggregation = f"Variable {self.name!r}.{how}", self.aggregation
        if self.on_read:
            raise NotImplementedError(
                f"{call}: ON_READ variables have no scatter operations; write "
                "`variable.assign(new)`, where `new` is a copy of "
                "`variable.read_value()` that has been changed"
            )
        if how in _NOT_COMBINED and aggregation in _COMBINED:
            raise NotImplementedError(
                f"{call}: not for aggregation={aggregation.name}; make the variable "
                "with aggregation=NONE (then all replicas write the same rows) or "
                "ONLY_FIRST_REPLICA"
            )

    def check_plain_write(self, how: str, frame: Frame) -> None:
        """Warn once, or raise, if replicas write a variable made outside every scope.

        Each process has one of its own then; the scope may have been forgotten.

        Args:
            how: the name of the method of `Variable`.
            frame: where it is called.

        Raises:
            RuntimeError: if it has an aggregation, which nothing would do; in merge_fn,
                which one rank runs.
        """
        if frame.group.num_replicas == 1:
            return
        call = f"Variable {self.name!r}.{how}: this variable was made outside every"
        if frame.level is Level.COORDINATOR and not self.on_read:
            raise RuntimeError(
                f"{call} scope, so each process has one of its own, and merge_fn would "
                "change that of rank 0 only; make it in `with strategy.scope():`"
            )
        if frame.level is not Level.REPLICA:
            return
        if self.aggregation is not VariableAggregation.NONE:
            raise RuntimeError(
                f"{call} scope, so each process has one of its own, and nothing would "
                f"combine the replicas' values by {self.aggregation.name}; make it in "
                "`with strategy.scope():`, or with aggregation=NONE if each process is "
                "to have its own"
            )
        # ON_READ says that each replica has its own value.
        if self.on_read or _warned.get():
            return
        _warned.get().append(self.name)
        warn_caller(
            f"[rank {frame.group.replica_id}] {call} scope, so each of the "
            f"{frame.group.num_replicas} replicas writes one of its own, and their "
            "values may differ; make it in `with strategy.scope():`, or with "
            'synchronization="ON_READ" if each process is to have its own'
        )


def check_attributes(
    trainable: object, name: Any, synchronization: object, aggregation: object
) -> Attributes:
    """Return the attributes for the arguments of `Variable` of these names.

    Raises:
        TypeError, ValueError: if they are not as `Variable` says.
    """
    fits = name is None or isinstance(name, str)
    expect(fits, "Variable", "`name` to be a str", name)
    kind, none = VariableSynchronization, VariableSynchronization.NONE
    synchronization = as_member(
        "Variable", "synchronization", synchronization, kind, none
    )
    aggregation = as_member("Variable", "aggregation", aggregation, VariableAggregation)
    name = name or "Variable"
    if synchronization is none:
        raise ValueError(
            f"Variable {name!r}: `NONE` variable synchronization mode is not "
            "supported; write AUTO, ON_WRITE or ON_READ"
        )
    on_read = synchronization is VariableSynchronization.ON_READ
    return Attributes(
        name=name,
        trainable=not on_read if trainable is None else bool(trainable),
        synchronization=(
            synchronization if on_read else VariableSynchronization.ON_WRITE
        ),
        aggregation=aggregation,
    )


def convert(
    call: str, own: Array, device: gpus.Device, value: Nest, shape: Shape | None = None
) -> Array:
    """Return ``value`` as an array with dtype, shape and device of a variable's.

    Args:
        call: the variable and the name of the method, for messages.
        own: this rank's copy.
        device: of this rank.
        value: an array, a number, a list, a variable or a Mirrored.
        shape: the shape; default: that of the variable.

    Raises:
        TypeError, ValueError: if the value does not fit, see `Variable.assign`.
    """
    dtype = own.dtype
    if dtype.kind == "b" and call.endswith("_sub"):
        raise ValueError(
            f"{call}: bool cannot be subtracted; write `variable.assign(variable "
            "& ~value)`, or make the variable with an integer dtype"
        )
    shape = own.shape if shape is None else shape
    _refuse_per_replica(call, value)
    x = _as_array(value, call)
    if tuple(x.shape) != shape:
        raise ValueError(
            f"{call}: expected a value of shape {shape}, got "
            f"{backend.describe(x)}; write `numpy.full({shape}, value)` to "
            "spread a number over the array"
        )
    if x.dtype != dtype:
        _check_fits(call, x, dtype)
        x = x.astype(dtype)
    if backend.is_device_array(x) != backend.is_device_array(own):
        x = backend.place(backend.to_host(x), device)
    return x


def convert_slices(
    call: str, own: Array, device: gpus.Device, value: Nest
) -> IndexedSlices:
    """Return an `IndexedSlices` with its indices and rows converted for the array.

    Arguments as for `convert`.

    Raises:
        TypeError, ValueError: if the array has no such rows, see
            `Variable.scatter_add`.
    """
    _refuse_per_replica(call, value)
    value = to_plain(value)
    if not isinstance(value, IndexedSlices):
        raise TypeError(
            f"{call}: expected a `mpidist.IndexedSlices`, got "
            f"{type(value).__name__}; write `mpidist.IndexedSlices(values, "
            "indices)`"
        )
    shape, dtype, divides = own.shape, own.dtype, call.endswith("_div")
    if not shape:
        raise ValueError(f"{call}: a variable of shape () has no rows")
    if divides and dtype.kind == "b":
        raise ValueError(f"{call}: bool cannot be divided; make the variable with ints")
    indices = backend.as_array(value.indices, call)[0]
    _refuse_per_replica(call, value.indices)
    rows_shape = (int(indices.shape[0]), *shape[1:])
    rows = convert(call, own, device, value.values, rows_shape)
    if divides and dtype.kind in "iu" and not bool((rows != 0).all()):
        raise ValueError(
            f"{call}: {dtype.name} cannot be divided by 0; make the variable with a "
            "floating dtype"
        )
    bad = (indices < 0) | (indices >= shape[0])
    if bool(bad.any()):
        raise ValueError(
            f"{call}: expected indices from 0 to {shape[0] - 1}, got "
            f"{backend.to_host(indices[bad])[:5].tolist()}"
        )
    return IndexedSlices(rows, indices.astype(np.int64, copy=False))


def _refuse_per_replica(call: str, value: Nest) -> None:
    how = call.rpartition(".")[2]
    if is_per_replica(value):
        raise TypeError(
            f"{call}: got a PerReplica, which would make the copies differ; write "
            f"`variable.{how}(strategy.reduce(op, value, axis=None))`, or in merge_fn "
            f"`variable.{how}(strategy.extended.reduce_to(op, value, variable))`. In a "
            "replica function it takes each replica's own value"
        )


def _check_fits(call: str, x: Array, dtype: DType) -> None:
    if not backend.fits(x, dtype):
        raise ValueError(
            f"{call}: expected a value that fits into {dtype.name}, got "
            f"{backend.describe(x)}; make the variable with `dtype={x.dtype.name!r}`, "
            f"or write `numpy.asarray(value).astype({dtype.name!r})`, which may cut off"
        )


def _as_array(value: Nest, call: str) -> Array:
    return backend.as_array(backend.of_lists(to_plain(value), call), call)[0]


def initial_array(
    initial_value: Nest,
    dtype: DTypeLike | None,
    shape: Shape | None,
    attributes: Attributes,
) -> Array:
    """Return the array that a variable begins with, a new one on the host.

    Args:
        initial_value: as given to `Variable`.
        dtype: as given to `Variable`: whatever NumPy takes for a dtype.
        shape: as given to `Variable`.
        attributes: the attributes of the variable.

    Raises:
        TypeError, ValueError: if the value is not as `Variable` says.
    """
    call = f"Variable {attributes.name!r}"
    value = initial_value() if callable(initial_value) else initial_value
    if is_per_replica(value):
        raise TypeError(
            f"{call}: got a PerReplica as initial value; write `strategy.reduce(op, "
            "value, axis=None)` or one array"
        )
    x = _as_array(value, call)
    if dtype is not None:
        given = x
        try:
            x = x.astype(dtype)
        except TypeError as error:
            raise TypeError(f"{call}: dtype={dtype!r:.80}: {error}") from error
        if given.dtype.kind in "iu" and x.dtype.kind in "iu":
            _check_fits(call, given, x.dtype)
        # In native byte order, in which the other ranks get it.
        x = backend.as_array(x, call)[0]
    backend.check_dtype(x.dtype, call)
    wanted = (shape,) if isinstance(shape, int) else shape
    if wanted is not None and tuple(x.shape) != tuple(wanted):
        raise ValueError(
            f"{call}: expected an initial value of shape {tuple(wanted)}, got "
            f"{backend.describe(x)}"
        )
    floating = backend.number_kind(x.dtype) in "fc"
    if attributes.aggregation is VariableAggregation.MEAN and not floating:
        raise ValueError(
            f"{call}: aggregation=MEAN of dtype {x.dtype.name}, which is not floating, "
            "is not supported; write dtype=float, or another aggregation"
        )
    if attributes.aggregation is VariableAggregation.SUM and x.dtype.kind == "b":
        raise ValueError(
            f"{call}: aggregation=SUM of bool is not defined; write dtype=int to "
            "count, or another aggregation"
        )
    # A copy: the user keeps the initial array. In C order on all ranks, because the
    # last bits of a sum, for example, depend on the order.
    return np.array(backend.to_host(x), order="C")
