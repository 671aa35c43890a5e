"""Arrays and other objects as messages: heads, pickled, and the arrays' bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist._base import backend
from mpidist._base.types import Array, DType, HostArray, Shape


@dataclasses.dataclass(frozen=True)
class ArrayHead:
    """Dtype and shape of an array whose bytes travel separately; or an object.

    Attributes:
        dtype: of the array; None for an object.
        payload: the object.
    """

    dtype: DType | None
    shape: Shape
    kind: backend.LeafKind
    on_device: bool
    payload: Any = None  # any object that can be pickled

    @property
    def nbytes(self) -> int:
        """The bytes of the array; 0 for an object."""
        if self.dtype is None:
            return 0
        return math.prod(self.shape) * int(self.dtype.itemsize)


def head_of(value: Any, call: str) -> ArrayHead:
    """Return the head of an array or object."""
    if backend.is_array(value):
        x, kind = backend.as_array(value, call)
        return ArrayHead(x.dtype, tuple(x.shape), kind, backend.is_device_array(x))
    return ArrayHead(None, (), "array", False, payload=value)


def join_bytes(arrays: Sequence[HostArray]) -> HostArray:
    """Return the bytes of arrays, one after the other."""
    parts = [backend.as_bytes(backend.contiguous(x)) for x in arrays]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def split_bytes(
    raw: HostArray, heads: list[ArrayHead], device: backend.Device
) -> list[Any]:
    """Return the arrays and objects of heads; the reverse of `join_bytes`.

    Args:
        raw: the bytes of the arrays.
        heads: of the arrays and objects.
        device: where arrays go that were on a GPU.
    """
    values = []
    start = 0
    for head in heads:
        if head.dtype is None:
            values.append(head.payload)
            continue
        # A copy: it is aligned, and does not keep the whole buffer alive.
        own = raw[start : start + head.nbytes].copy()
        start += head.nbytes
        array: Array = backend.from_bytes(own, head.dtype, head.shape)
        if head.on_device:
            array = backend.place(array, device)
        values.append(backend.restore(array, head.kind))
    return values
