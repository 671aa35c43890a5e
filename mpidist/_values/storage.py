"""This rank's copy of a variable, and the conversion of values for it."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import numpy as np

from mpidist._base import backend, indexed_slices
from mpidist._base.indexed_slices import IndexedSlices, Scatter
from mpidist._base.options import VariableAggregation, VariableSynchronization
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.distributed import ArrayLike, Mirrored, PerReplica


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


class VariableStorage(ArrayLike):
    """The base class of `mpidist.Variable`: everything without communication.

    `synchronization` operates on it, and determines when copies are combined.
    """

    _group: ReplicaGroup
    _attributes: Attributes
    _array: Any
    _view: Any  # of the array; read-only if it is on the host
    _fingerprinter: Any  # computes the fingerprint of the array
    _key: tuple[int, int]

    @property
    def name(self) -> str:
        """The given name, or "Variable"."""
        return self._attributes.name

    @property
    def trainable(self) -> bool:
        """The value of the argument ``trainable``."""
        return self._attributes.trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies are combined."""
        return self._attributes.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How values that replicas assign are combined."""
        return self._attributes.aggregation

    @property
    def device(self) -> str:
        """The device of this rank's copy."""
        name: str = self._group.device_name
        return name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self._array.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the array."""
        return self._array.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return int(self._array.ndim)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self._array.size)

    def __len__(self) -> int:
        return len(self._array)

    # --- converting values, and writing them

    def _call(self, how: str) -> str:
        # With the key: names need not be unique.
        return f"Variable {self.name!r}.{how} [#{self._key[0]}]"

    def _prepare_slices(self, how: Scatter, value: Any) -> tuple[Any, Any]:
        """Return indices and rows, converted for this variable."""
        call = f"Variable {self.name!r}.scatter_{how}"
        if isinstance(value, Mirrored):
            value = value._own
        if isinstance(value, PerReplica):
            self._refuse_per_replica(f"scatter_{how}")
        if not isinstance(value, IndexedSlices):
            raise TypeError(
                f"{call}: expected a `mpidist.IndexedSlices`, got "
                f"{type(value).__name__}; write `mpidist.IndexedSlices(values, "
                "indices)`"
            )
        if not self.shape:
            raise ValueError(f"{call}: a variable of shape () has no rows")
        if how == "div" and self.dtype.kind in "iub":
            raise ValueError(
                f"{call}: {self.dtype.name} would need rounding; make the variable "
                "with a floating dtype"
            )
        indices = backend.as_array(value.indices, call)[0]
        if isinstance(value.indices, PerReplica) or isinstance(
            value.values, PerReplica
        ):
            self._refuse_per_replica(f"scatter_{how}")
        shape = (int(indices.shape[0]), *self.shape[1:])
        rows = self._prepare(f"scatter_{how}", value.values, shape)
        bad = (indices < 0) | (indices >= self.shape[0])
        if bool(bad.any()):
            raise ValueError(
                f"{call}: expected indices from 0 to {self.shape[0] - 1}, got "
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

    def _prepare(
        self, how: str, value: Any, shape: tuple[int, ...] | None = None
    ) -> Any:
        """Return ``value`` as an array of this variable's dtype, shape and device."""
        own = self._array
        if (
            type(value) is np.ndarray
            and type(own) is np.ndarray
            and value.dtype is own.dtype
            and value.shape == own.shape
            and shape is None
            and own.dtype.kind != "b"
        ):
            return value
        call = f"Variable {self.name!r}.{how}"
        if self.dtype.kind == "b" and how in ("assign_sub", "scatter_sub"):
            raise ValueError(
                f"{call}: bool cannot be subtracted; write `variable.assign(variable "
                "& ~value)`, or make the variable with an integer dtype"
            )
        shape = self.shape if shape is None else shape
        if isinstance(value, PerReplica):
            self._refuse_per_replica(how)
        if isinstance(value, Mirrored):
            value = value._own
        if isinstance(value, ArrayLike):
            value = value._read()
        listed = isinstance(value, (list, tuple))
        x, kind = backend.as_array(np.asarray(value) if listed else value, call)
        if tuple(x.shape) != shape:
            raise ValueError(
                f"{call}: expected a value of shape {shape}, got "
                f"{backend.describe(x)}; write `numpy.full({shape}, value)` to "
                "spread a number over the array"
            )
        python_numbers = listed or kind == "number"
        if x.dtype != self.dtype and not _fits(x, self.dtype, python_numbers):
            raise ValueError(
                f"{call}: expected a value that fits into {self.dtype.name}, got "
                f"{backend.describe(x)}; write `value.astype({self.dtype.name!r})`"
            )
        if x.dtype != self.dtype:
            x = x.astype(self.dtype)
        if backend.is_device_array(x) != backend.is_device_array(self._array):
            x = backend.place(backend.to_host(x), self._group.collectives.device)
        return x

    def _apply(self, how: str, value: Any) -> None:
        if how == "assign":
            self._array[...] = value
        elif how == "assign_add":
            np.add(self._array, value, out=self._array)
        else:
            np.subtract(self._array, value, out=self._array)

    def _apply_slices(self, how: Scatter, indices: Any, rows: Any) -> None:
        indexed_slices.scatter(self._array, how, indices, rows)


def _fits(x: Any, dtype: Any, python_numbers: bool) -> bool:
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
