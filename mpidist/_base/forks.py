"""Objects that a forked child has to repair, such as locks of threads it does not have.

Only the thread that forks exists in the child; a lock that another one held stays
locked there.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class RepairedInChildren(Generic[_T]):
    """A set of objects, held weakly, that each forked child repairs.

    Args:
        repair: called in the child with each of them.
    """

    def __init__(self, repair: Callable[[_T], None]) -> None:
        self._repair = repair
        self._objects: weakref.WeakSet[_T] = weakref.WeakSet()
        self._registered = False

    def add(self, x: _T) -> None:
        """Have children that are forked from now on repair an object."""
        if not self._registered:
            os.register_at_fork(after_in_child=self._repair_all)
            self._registered = True
        self._objects.add(x)

    def _repair_all(self) -> None:
        for x in list(self._objects):
            self._repair(x)
