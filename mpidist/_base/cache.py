"""A dict that drops its oldest entries."""

from __future__ import annotations

from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


class Cache(dict[_K, _V]):
    """A dict with a maximum size: a new entry drops the oldest.

    A look-up is as fast as in a dict, since it does not reorder entries. Threads may
    share a cache: it may then exceed its limit by a few entries.

    Args:
        limit: the maximum number of entries.
    """

    __slots__ = ("_limit",)

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: _K, value: _V) -> None:
        if key not in self:
            while len(self) >= self._limit and self._drop_oldest():
                pass
        super().__setitem__(key, value)

    def _drop_oldest(self) -> bool:
        try:
            oldest = next(iter(self))
        except (StopIteration, RuntimeError):  # another thread changed it
            return False
        self.pop(oldest, None)
        return True
