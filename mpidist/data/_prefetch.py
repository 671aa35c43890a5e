"""A thread that reads ahead. It never calls MPI, and ends with its consumer."""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar

from mpidist._base.forks import RepairedInChildren

_T = TypeVar("_T")


class _Shelf:
    """A bounded queue and a stop flag, shared by the thread and its consumer."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.changed = threading.Condition()
        self.ready: collections.deque[Any] = collections.deque()
        self.ended = False
        self.error: BaseException | None = None
        self.stopped = False

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.ready.clear()
            self.changed.notify_all()

    def abandon(self) -> None:
        """Stop waiting for the thread, in a forked child, which does not have it."""
        self.changed = threading.Condition()  # the thread may have held the other
        if not self.ended:
            self.ended = True
            self.error = RuntimeError(
                "this process was forked while a thread of its parent read this "
                "dataset ahead; make a new iterator here, or call `iter` after the fork"
            )

    def put(self, item: Any) -> bool:
        """Add an item when there is space; return False to stop."""
        with self.changed:
            while len(self.ready) >= self.depth and not self.stopped:
                self.changed.wait()
            if self.stopped:
                return False
            self.ready.append(item)
            self.changed.notify_all()
        return True

    def finish(self, error: BaseException | None) -> None:
        with self.changed:
            self.ended, self.error = True, error
            self.changed.notify_all()


_shelves: Final = RepairedInChildren(_Shelf.abandon)


def _fill(items: Iterator[Any], shelf: _Shelf) -> None:
    """Run in the thread. It refers to the shelf, so the consumer can be collected."""
    try:
        for item in items:
            if not shelf.put(item):
                break
            del item
    except BaseException as error:
        shelf.finish(error)
    else:
        shelf.finish(None)


class Prefetcher(Generic[_T]):
    """Iterates over ``items``; a thread reads up to ``depth`` items ahead.

    An exception in ``items`` is raised at its position. The thread starts with the
    first `next`. It ends at the end of ``items``, on `close`, and when the Prefetcher
    is collected.

    Args:
        items: the iterator to read; nothing else may read it.
        depth: the maximum number of items that are ready, 1 or more.
    """

    def __init__(self, items: Iterator[_T], depth: int) -> None:
        self._shelf = _Shelf(depth)
        self._thread = threading.Thread(
            target=_fill,
            args=(items, self._shelf),
            name="mpidist-prefetch",
            daemon=True,
        )
        self._started = False
        self._stop = weakref.finalize(self, self._shelf.stop)

    def __iter__(self) -> Prefetcher[_T]:
        return self

    def __next__(self) -> _T:
        if not self._started:
            self._started = True
            _shelves.add(self._shelf)
            self._thread.start()
        shelf = self._shelf
        with shelf.changed:
            while not shelf.ready and not shelf.ended and not shelf.stopped:
                shelf.changed.wait()
            if shelf.ready:
                item: _T = shelf.ready.popleft()
                shelf.changed.notify_all()
                return item
            error, shelf.error = shelf.error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self, *, wait: bool = True) -> None:
        """Stop the thread, and wait until it has ended.

        Args:
            wait: False: do not wait; it ends by itself, after the current item.
        """
        self._stop()
        if self._started and wait:
            self._thread.join()
