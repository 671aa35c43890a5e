"""Memory for results, reused after the user has dropped the results in it.

Fresh pages cost more than a reduction: the system has to find and clear each of them at
its first use. So large results are views of arrays that are kept here, and such an
array is reused when nothing refers to it. A result that the user keeps, or a view of
it, keeps its memory.
"""

from __future__ import annotations

import math
import sys
from typing import Final

import numpy as np

from mpidist._base.memory import PAGE
from mpidist._base.types import DType, HostArray, Shape

SMALLEST: Final = 64 * 1024


def _count_unused() -> int:
    """Return how many references this Python counts for a block that only a pool has.

    From the list, the loop, and the call that counts: 3, some of which Python 3.14 and
    later borrow. With a number too large, memory in use would be handed out.
    """
    kept = [np.empty(0, np.uint8)]
    for block in kept:
        return sys.getrefcount(block)
    raise AssertionError


UNUSED: Final = _count_unused()
"""The number of references to a block that only a list and a loop refer to."""


class Pool:
    """Host memory that is kept between calls.

    Args:
        limit: the maximum number of bytes kept, in use or not. Beyond it unused memory
            is released, and new memory is not kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes: int = 0
        # By size: the blocks, and where in them results begin.
        self._kept: dict[int, list[tuple[HostArray, int]]] = {}

    def empty(self, shape: Shape, dtype: DType) -> HostArray:
        """Return an uninitialized array."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALLEST or nbytes > self.limit:
            return np.empty(shape, dtype)
        kept = self._kept.get(nbytes, ())
        for block, start in kept:
            if sys.getrefcount(block) <= UNUSED:
                return np.ndarray(shape, dtype, block, start)
        if self.nbytes + nbytes > self.limit:
            del kept
            self._release(self.nbytes + nbytes - self.limit)
        block = np.empty(nbytes + PAGE, np.uint8)
        # Half a page after the begin of a page. At the same offset in their pages as
        # other arrays, loads wait for unrelated stores ("4K aliasing"): a sum took 2.5
        # times as long.
        start = (PAGE // 2 - block.ctypes.data) % PAGE
        if self.nbytes + nbytes <= self.limit:
            self._kept.setdefault(nbytes, []).append((block, start))
            self.nbytes += nbytes
        return np.ndarray(shape, dtype, block, start)

    def _release(self, nbytes: int) -> None:
        """Release unused memory: at least this much, if there is enough."""
        for size in list(self._kept):
            remaining = []
            for block, start in self._kept[size]:
                if nbytes > 0 and sys.getrefcount(block) <= UNUSED:
                    nbytes -= size
                    self.nbytes -= size
                else:
                    remaining.append((block, start))
            if remaining:
                self._kept[size] = remaining
            else:
                self._kept.pop(size, None)
