"""Memory for results, reused after the user has dropped the results in it.

Fresh pages cost more than a reduction: the system has to find and clear each of them at
its first use. So large results are in slots of one memory, as those of a node's arena
are (``py_memory.c``). A result that the user keeps, or a view of it, keeps its slot.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from mpidist import _native
from mpidist._base.types import DType, HostArray, Shape

SMALLEST: Final = 64 * 1024


class Pool:
    """Host memory that is kept between calls; without the native core there is none.

    Args:
        limit: the maximum number of bytes kept, in use or not. Results for which there
            is no room have memory of their own.
    """

    def __init__(self, limit: int) -> None:
        self._slots: _native.Pool | None = None
        if _native.core is not None and limit:
            try:
                memory = _native.core.Memory(-1, limit)
            except OSError:  # the address space is limited
                return
            self._slots = _native.core.Pool(memory, 0, limit)

    def empty(self, shape: Shape, dtype: DType) -> HostArray:
        """Return an uninitialized array."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._slots is None or nbytes < SMALLEST:
            return np.empty(shape, dtype)
        slot = self._slots.take(nbytes)
        return (
            np.empty(shape, dtype) if slot is None else np.ndarray(shape, dtype, slot)
        )
