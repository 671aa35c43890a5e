"""Memory for results, used again when the user has dropped what was in it.

The pages of fresh memory cost more than a reduction: the system has to find and clear
each of them at its first use. So large results are views of arrays that are kept here,
and one of those is given out again when nothing refers to it any more. A result that
the user keeps, or any view of it, keeps its memory for as long.
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
    """Return the references to a block that only a pool has, as this Python counts.

    In the list, of the loop, and of the call that counts: 3, of which Python 3.14 and
    later versions may borrow some. One too many would give away memory in use.
    """
    kept = [np.empty(0, np.uint8)]
    for block in kept:
        return sys.getrefcount(block)
    raise AssertionError


UNUSED: Final = _count_unused()
"""The references to a block that only a list has, and a loop over it."""


class Pool:
    """Host memory that is kept from call to call.

    Args:
        limit: most bytes to keep, in use or not. Beyond it memory that is not in use is
            given back, and what is made goes without being kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes: int = 0
        # By size: the blocks, and where in them results begin.
        self._kept: dict[int, list[tuple[HostArray, int]]] = {}

    def empty(self, shape: Shape, dtype: DType) -> HostArray:
        """Return an array whose values are not set."""
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
        # Half a page after a page begins. At the same place in their pages as other
        # arrays are, loads wait for stores that have nothing to do with them ("4K
        # aliasing"): a sum took 2.5 times as long.
        start = (PAGE // 2 - block.ctypes.data) % PAGE
        if self.nbytes + nbytes <= self.limit:
            self._kept.setdefault(nbytes, []).append((block, start))
            self.nbytes += nbytes
        return np.ndarray(shape, dtype, block, start)

    def _release(self, nbytes: int) -> None:
        """Give back memory that is not in use: at least so much, where there is."""
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
                del self._kept[size]
