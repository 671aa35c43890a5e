"""This rank's copy of a variable, and the conversion of values for it.

Nothing here communicates. `synchronization` determines when copies are combined, and
`Variable` is the public face of both.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Final, Literal, NoReturn

import numpy as np
from numpy.typing import DTypeLike

from mpidist._base import backend, checksums, indexed_slices
from mpidist._base.indexed_slices import IndexedSlices, Scatter
from mpidist._base.types import Array, DType, Nest, Shape
from mpidist._base.variable_enums import (
    VariableAggregation,
    VariableSynchronization,
)
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.distributed import (
    Mirrored,
    PerReplica,
    PerReplicaOfOne,
    own_component,
    to_plain,
)

Assignment = Literal["assign", "assign_add", "assign_sub"]

_NO_KEY: Final = (0, 0)


@dataclasses.dataclass(frozen=True)
class Attributes:
    """The name of a variable, and how its copies are combined."""

    name: str
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation

    def __str__(self) -> str:
        return (
            f"Variable {self.name!r} ({self.synchronization.name}, "
            f"aggregation={self.aggregation.name})"
        )


class VariableStorage:
    """This rank's copy of a variable, its attributes, and how it is changed.

    A `mpidist.Variable` has one; other rooms get it by `variable.storage_of`. Its
    fields are public in the package, and only the methods here write to the array.

    Attributes:
        group: the replicas that have a copy.
        attributes: the name of the variable, and how its copies are combined.
        on_read: whether the copies are combined when the variable is read.
        array: this rank's copy, which keeps its address.
        view: a view of the array, which users get; read-only if it is on the host.
        fingerprint: a function that returns the fingerprint of the array for a seed.
        key: the key of the variable in the group's registry, the same on all ranks.
        retired: why it cannot be used any more; "" while it can.
    """

    __slots__ = (
        "array",
        "attributes",
        "fingerprint",
        "group",
        "key",
        "on_read",
        "retired",
        "view",
    )

    def __init__(
        self, group: ReplicaGroup, attributes: Attributes, value: Array
    ) -> None:
        """Copy ``value`` to the device of this rank's replica."""
        self.group = group
        self.attributes = attributes
        self.on_read: bool = (
            attributes.synchronization is VariableSynchronization.ON_READ
        )
        # A separate copy: the user keeps the initial array. In C order on all ranks,
        # because the last bits of a sum, for example, depend on the order.
        host = np.array(backend.to_host(value), order="C")
        self.array: Array = backend.place(host, group.collectives.device)
        self.view: Array = self.array.view()
        if not backend.is_device_array(self.array):
            self.view.flags.writeable = False
        self.fingerprint: Callable[[int], int] = checksums.fingerprinter(self.array)
        self.key: tuple[int, int] = _NO_KEY  # until the registry has the variable
        self.retired: str = ""

    def retire(self, why: str) -> None:
        """Drop the array. Every later use of the variable raises, and says why."""
        self.retired = why
        del self.array, self.view, self.fingerprint

    def __getattr__(self, name: str) -> NoReturn:
        # Called for a field that is not there: those of a retired variable.
        if name in ("array", "view", "fingerprint"):
            raise RuntimeError(
                f"Variable {self.name!r} can no longer be used: {self.retired}"
            )
        raise AttributeError(name)

    @property
    def name(self) -> str:
        """The name of the variable."""
        return self.attributes.name

    def describe_call(self, how: str) -> str:
        """Return the name of a call of the variable, which all ranks compare."""
        # With the key: names need not be unique.
        return f"Variable {self.attributes.name!r}.{how} [#{self.key[0]}]"

    def prepare_slices(self, how: Scatter, value: Nest) -> tuple[Array, Array]:
        """Return the indices and rows of an `IndexedSlices`, converted for the array.

        Raises:
            TypeError, ValueError: if the array has no such rows, see
                `Variable.scatter_add`.
        """
        call = f"Variable {self.name!r}.scatter_{how}"
        if isinstance(value, (Mirrored, PerReplicaOfOne)):
            value = own_component(value)
        if isinstance(value, PerReplica):
            self._refuse_per_replica(f"scatter_{how}")
        if not isinstance(value, IndexedSlices):
            raise TypeError(
                f"{call}: expected a `mpidist.IndexedSlices`, got "
                f"{type(value).__name__}; write `mpidist.IndexedSlices(values, "
                "indices)`"
            )
        shape, dtype = self.array.shape, self.array.dtype
        if not shape:
            raise ValueError(f"{call}: a variable of shape () has no rows")
        if how == "div" and dtype.kind in "iub":
            raise ValueError(
                f"{call}: {dtype.name} would need rounding; make the variable "
                "with a floating dtype"
            )
        indices = backend.as_array(value.indices, call)[0]
        if isinstance(value.indices, PerReplica) or isinstance(
            value.values, PerReplica
        ):
            self._refuse_per_replica(f"scatter_{how}")
        rows_shape = (int(indices.shape[0]), *shape[1:])
        rows = self.prepare(f"scatter_{how}", value.values, rows_shape)
        bad = (indices < 0) | (indices >= shape[0])
        if bool(bad.any()):
            raise ValueError(
                f"{call}: expected indices from 0 to {shape[0] - 1}, got "
                f"{backend.to_host(indices[bad])[:5].tolist()}"
            )
        return indices.astype(np.int64, copy=False), rows

    def _refuse_per_replica(self, how: str) -> NoReturn:
        raise TypeError(
            f"Variable {self.name!r}.{how}: got a PerReplica, which would make the "
            f"copies differ; write `variable.{how}(strategy.reduce(op, value, axis="
            f"None))`, or in merge_fn `variable.{how}(strategy.extended.reduce_to(op, "
            "value, variable))`. In a replica function it takes each replica's own "
            "value"
        )

    def prepare(self, how: str, value: Nest, shape: Shape | None = None) -> Array:
        """Return ``value`` as an array of this variable's dtype, shape and device.

        Args:
            how: the name of the method of `Variable`, for messages.
            value: an array, a number, a list, a variable or a Mirrored.
            shape: the shape; default: that of the variable.

        Raises:
            TypeError, ValueError: if the value does not fit, see `Variable.assign`.
        """
        own = self.array
        if (
            type(value) is np.ndarray
            and isinstance(own, np.ndarray)
            and value.dtype is own.dtype
            and value.shape == own.shape
            and shape is None
            and own.dtype.kind != "b"
        ):
            return value
        dtype = own.dtype
        call = f"Variable {self.name!r}.{how}"
        if dtype.kind == "b" and how in ("assign_sub", "scatter_sub"):
            raise ValueError(
                f"{call}: bool cannot be subtracted; write `variable.assign(variable "
                "& ~value)`, or make the variable with an integer dtype"
            )
        shape = own.shape if shape is None else shape
        if isinstance(value, (Mirrored, PerReplicaOfOne)):
            value = own_component(value)
        if isinstance(value, PerReplica):
            self._refuse_per_replica(how)
        value = to_plain(value)
        listed = isinstance(value, (list, tuple))
        x: Array
        x, kind = backend.as_array(np.asarray(value) if listed else value, call)
        if tuple(x.shape) != shape:
            raise ValueError(
                f"{call}: expected a value of shape {shape}, got "
                f"{backend.describe(x)}; write `numpy.full({shape}, value)` to "
                "spread a number over the array"
            )
        python_numbers = listed or kind == "number"
        if x.dtype != dtype and not _fits(x, dtype, python_numbers):
            raise ValueError(
                f"{call}: expected a value that fits into {dtype.name}, got "
                f"{backend.describe(x)}; write `value.astype({dtype.name!r})`"
            )
        if x.dtype != dtype:
            x = x.astype(dtype)
        if backend.is_device_array(x) != backend.is_device_array(own):
            x = backend.place(backend.to_host(x), self.group.collectives.device)
        return x

    def apply(self, how: Assignment, value: Any) -> None:
        """Change the array; ``value`` is the array that `prepare` has returned."""
        own: Any = self.array  # NumPy's types of functions know no CuPy arrays
        if how == "assign":
            own[...] = value
        elif how == "assign_add":
            np.add(own, value, out=own)
        else:
            np.subtract(own, value, out=own)

    def apply_slices(self, how: Scatter, indices: Array, rows: Array) -> None:
        """Change rows of the array; the rest is what `prepare_slices` has returned."""
        indexed_slices.scatter(self.array, how, indices, rows)


def _fits(x: Array, dtype: DType, python_numbers: bool) -> bool:
    """Return whether values may be cast: to the same kind of dtype, or a wider one.

    Integers given as Python numbers must be in the dtype's range.
    """
    if backend.is_bfloat16(dtype):
        return x.dtype.kind in "biuf"
    if python_numbers and x.dtype.kind in "iu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return bool(((x >= limits.min) & (x <= limits.max)).all())
    order = "biufc"
    return bool(
        np.can_cast(x.dtype, dtype, "same_kind")
        or order.find(x.dtype.kind) < order.find(dtype.kind)
    )


def _member(kind: type[enum.Enum], value: object) -> object:
    """Return the member of an enumeration for a name (case-insensitive)."""
    if isinstance(value, str):
        return kind.__members__.get(value.upper(), value)
    return value


def check_attributes(
    trainable: object, name: object, synchronization: object, aggregation: object
) -> Attributes:
    """Return the attributes for the arguments of `Variable` of these names.

    Raises:
        TypeError, ValueError: if they are not as `Variable` says.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"Variable: expected `name` to be a str, got {name!r}")
    synchronization = _member(VariableSynchronization, synchronization)
    aggregation = _member(VariableAggregation, aggregation)
    if not isinstance(synchronization, VariableSynchronization):
        raise ValueError(
            "Variable: expected `synchronization` to be a `mpidist."
            f"VariableSynchronization` (AUTO, ON_WRITE or ON_READ), got "
            f"{synchronization!r}"
        )
    if not isinstance(aggregation, VariableAggregation):
        raise ValueError(
            "Variable: expected `aggregation` to be a `mpidist.VariableAggregation` "
            f"(NONE, SUM, MEAN or ONLY_FIRST_REPLICA), got {aggregation!r}"
        )
    name = name or "Variable"
    if synchronization is VariableSynchronization.NONE:
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


def initial_array(
    initial_value: Nest,
    dtype: DTypeLike | None,
    shape: Shape | None,
    attributes: Attributes,
) -> Array:
    """Return the array that a variable begins with.

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
    if isinstance(value, PerReplica) and not isinstance(value, PerReplicaOfOne):
        raise TypeError(
            f"{call}: got a PerReplica as initial value; write `strategy.reduce(op, "
            "value, axis=None)` or one array"
        )
    if isinstance(value, (Mirrored, PerReplicaOfOne)):
        value = own_component(value)
    value = to_plain(value)
    if isinstance(value, (list, tuple)):
        value = np.asarray(value)
    x: Array
    x, _ = backend.as_array(value, call)
    x = x if dtype is None else x.astype(dtype)
    backend.check_dtype(x.dtype, call)
    if shape is not None and tuple(x.shape) != tuple(shape):
        raise ValueError(
            f"{call}: expected an initial value of shape {tuple(shape)}, got "
            f"{backend.describe(x)}"
        )
    floating = x.dtype.kind in "fc" or backend.is_bfloat16(x.dtype)
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
    return x
