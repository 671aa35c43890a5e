"""Rows of an array with their numbers, as `Variable.scatter_add` takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import numpy as np

from mpidist._base import backend
from mpidist._base.types import Array, DType, HostArray, Shape

Listed: TypeAlias = list[Any] | tuple[Any, ...]  # numbers, or lists of them
_UFUNCS: Final[dict[str, np.ufunc]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "min": np.minimum,
    "max": np.maximum,
}


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class IndexedSlices:
    """Some rows of a larger array, as ``tf.IndexedSlices``.

    It represents an array with ``values[k]`` in row ``indices[k]`` and zeros in all
    other rows. Rows that occur more than once are added. An all-reduce with SUM
    concatenates the rows of all replicas, in replica order; with MEAN it also divides
    them by the number of replicas.

    Args:
        values: array of shape ``(k, ...)``: the rows.
        indices: integer array of shape ``(k,)``: their numbers, from 0.
        dense_shape: shape of the larger array, for the reader; None if not known.

    Raises:
        ValueError: if the numbers of indices and rows differ.
        TypeError: if the indices are not integers.

    Attributes:
        values: the rows: an array of shape ``(k, ...)``.
        indices: the numbers of the rows: an array of integers, of shape ``(k,)``.
        dense_shape: the shape of the larger array, if it was given.

    Example::

        with strategy.scope():
            table = mpidist.Variable(np.zeros((5, 2)))
        table.scatter_add(mpidist.IndexedSlices(values=[[1.0, 2.0]], indices=[3]))
        table[3]  # array([1., 2.])
    """

    values: Array
    indices: Array
    dense_shape: Shape | None

    def __init__(
        self,
        values: Array | Listed,
        indices: Array | Listed,
        dense_shape: Iterable[int] | None = None,
    ) -> None:
        """Check and keep the rows. They are not copied."""
        values = backend.of_lists(values, "IndexedSlices(values)")
        if isinstance(indices, (list, tuple)) and not indices:
            indices = np.zeros(0, np.int64)
        indices = backend.of_lists(indices, "IndexedSlices(indices)")
        rows, numbers = (
            backend.as_array(x, f"IndexedSlices({name})")[0]
            for x, name in ((values, "values"), (indices, "indices"))
        )
        if numbers.dtype.kind not in "iu":
            raise TypeError(
                "IndexedSlices: expected integers as `indices`, got "
                f"{backend.describe(numbers)}"
            )
        if numbers.ndim != 1 or rows.ndim < 1 or rows.shape[0] != numbers.shape[0]:
            raise ValueError(
                "IndexedSlices: expected `values` of shape (k, ...) and `indices` of "
                f"shape (k,), got {backend.describe(rows)} and "
                f"{backend.describe(numbers)}"
            )
        shape = None if dense_shape is None else tuple(map(int, dense_shape))
        # Past the check of a frozen class.
        vars(self).update(values=values, indices=indices, dense_shape=shape)

    @property
    def dtype(self) -> DType:
        """The dtype of the rows."""
        return backend.as_array(self.values, "IndexedSlices")[0].dtype


def scatter(array: Array, how: str, indices: Array, values: Array) -> None:
    """Combine rows into ``array``, in place, in their order.

    Indices must be in range. Rows of a GPU array are combined on the host: on a GPU the
    order of atomic operations, and so the last bits of a sum, would be undefined.
    """
    if not backend.is_device_array(array):
        _combine(
            backend.to_host(array),
            how,
            backend.to_host(indices),
            backend.to_host(values),
        )
        return
    rows, places = np.unique(backend.to_host(indices), return_inverse=True)
    touched = backend.to_host(array[backend.like(array, rows)])
    _combine(touched, how, places, backend.to_host(values))
    array[backend.like(array, rows)] = backend.like(array, touched)


def _combine(array: HostArray, how: str, indices: HostArray, values: HostArray) -> None:
    if how == "update":
        array[indices] = values  # the last of equal indices counts
    elif how == "div" and array.dtype.kind in "iu":
        for index, row in zip(indices, values.copy(), strict=True):  # may be a view
            array[index] = _divide(array[index], row)
    else:
        _UFUNCS[how].at(array, indices, values)


def _divide(x: HostArray, y: HostArray) -> HostArray:
    """Return quotients of integers, rounded towards 0, as in C and TensorFlow."""
    with np.errstate(over="ignore"):
        quotient, rest = np.divmod(x, y)
        return quotient + ((rest != 0) & ((x < 0) != (y < 0)))
