"""A dict that forgets its oldest entries."""

from __future__ import annotations

from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


class Cache(dict[_K, _V]):
    """A dict of at most so many entries: a new one drops the oldest.

    Looking up is as fast as in a dict, since it moves nothing. Threads may share one:
    it may then have a few entries more.

    Args:
        limit: the most entries.
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
        except (StopIteration, RuntimeError):  # another thread is at it
            return False
        self.pop(oldest, None)
        return True
