"""Memory for results, reused after the user has dropped the results in it.

Fresh pages cost more than a reduction: the system has to find and clear each of them at
its first use. So large results are in slots of one memory, as those of a node's arena
are (``py_memory.c``). A result that the user keeps, or a view of it, keeps its slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from mpidist import _native
from mpidist._agreement.channel import NOWHERE
from mpidist._base import backend
from mpidist._base.types import Array, DType, HostArray, Shape

SMALLEST: Final = 64 * 1024

array_in: Final[Callable[..., HostArray]] = np.ndarray
"""Makes an array: ``array_in(shape, dtype, slot, start)``."""


def arrays_in(
    slots: _native.Pool,
    kinds: Sequence[tuple[Shape, DType]],
    starts: Sequence[int],
    nbytes: int,
) -> tuple[list[Any], int]:
    """Return uninitialized arrays in one slot, and its offset.

    Where there is no room for it they have memory of their own, which is `NOWHERE`.

    Args:
        slots: of an arena.
        kinds: the shapes and dtypes of the arrays.
        starts: where in the slot they begin.
        nbytes: the size of the slot.
    """
    slot = slots.take(nbytes)
    if slot is None:
        return [np.empty(shape, dtype) for shape, dtype in kinds], NOWHERE
    return [
        array_in(shape, dtype, slot, start)
        for (shape, dtype), start in zip(kinds, starts, strict=True)
    ], slot.offset


class Pool:
    """Host memory that is kept between calls; without the native core there is none.

    Args:
        limit: the maximum number of bytes kept, in use or not. Results for which there
            is no room have memory of their own.
    """

    def __init__(self, limit: int) -> None:
        self.limit: int = limit if _native.core is not None else 0
        self._slots: _native.Pool | None = None

    def empty(self, shape: Shape, dtype: DType) -> HostArray:
        """Return an uninitialized array."""
        nbytes = math.prod(shape) * dtype.itemsize
        if SMALLEST <= nbytes <= self.limit:
            slots = self._slots or self._map()
            slot = None if slots is None else slots.take(nbytes)
            if slot is not None:
                return array_in(shape, dtype, slot)
        return np.empty(shape, dtype)

    def empty_like(self, x: Array, shape: Shape, dtype: DType) -> Array:
        """Return an uninitialized array, on the GPU that ``x`` is on."""
        if backend.is_device_array(x):
            return backend.empty_like(x, shape, dtype)
        return self.empty(shape, dtype)

    def _map(self) -> _native.Pool | None:
        try:
            memory = _native.core.Memory(-1, self.limit)
        except OSError:  # the address space is limited
            self.limit = 0
            return None
        self._slots = _native.core.Pool(memory, 0, self.limit)
        return self._slots

    def close(self) -> None:
        """Keep no memory but that of results in use, for as long as each is."""
        self.limit = 0
        if self._slots is not None:
            self._slots.close()

    __del__ = close
