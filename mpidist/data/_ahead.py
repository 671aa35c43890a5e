"""Threads that work ahead of a loop. They never call MPI, and end with its iterator."""

from __future__ import annotations

import collections
import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Final, TypeAlias, TypeVar

from mpidist._base.threads import start_thread

_T = TypeVar("_T")
_R = TypeVar("_R")
_Tasks: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Any] | None]"

AUTOTUNE: Final = -1
"""tf.data's request to choose a number itself."""
_END: Final = object()
_MOST: Final = 1024  # threads, and items that are read ahead, which are requested first


def default_workers() -> int:
    """Return the number of threads for `AUTOTUNE`: the cores of this rank, up to 8."""
    return min(8, len(os.sched_getaffinity(0)))


class Ahead(Iterator[_R]):
    """Iterates over ``function(item)`` for each item, in order; threads call it.

    ``items`` is read by the caller's thread. An exception, of ``function`` or of
    ``items``, is raised at its place, and ends the iteration. The threads start with
    the first `next`. They end at the end, on `close`, and when this object is
    collected: each after the call that it is in.

    Args:
        function: called by several threads at the same time.
        items: the arguments.
        threads: the number of threads, 1 or more.
        most: how many results are requested when the first of them is taken, and no
            more; by default one for each thread.
    """

    def __init__(
        self,
        function: Callable[[_T], _R],
        items: Iterable[_T],
        threads: int,
        most: int | None = None,
    ) -> None:
        self._function, self._items = function, iter(items)
        threads = min(threads, _MOST)
        self._most, self._limit = most or threads, threads
        self._tasks: _Tasks = queue.SimpleQueue()
        self._waiting: collections.deque[Future[_R]] = collections.deque()
        self._threads: list[threading.Thread] = []
        self._more = True
        self._process = os.getpid()
        self._stop = weakref.finalize(
            self, _stop, self._process, self._tasks, self._waiting, threads
        )

    def __next__(self) -> _R:
        if os.getpid() != self._process:
            raise RuntimeError(
                "this process was forked while a thread of its parent read this "
                "dataset ahead; make a new iterator here, or call `iter` after the fork"
            )
        while self._more and len(self._waiting) < self._most:
            self._request()
        try:
            if self._waiting:
                result = self._waiting.popleft().result()
                if result is not _END:
                    return result
        except BaseException as error:
            self.close(wait=False)
            if isinstance(error, StopIteration):  # of the function: no end
                raise RuntimeError("a function raised StopIteration") from error
            raise
        self.close(wait=False)
        raise StopIteration

    def _request(self) -> None:
        future: Future[_R] = Future()
        try:
            item = next(self._items)
        except StopIteration:
            self._more = False
            return
        except Exception as error:  # what was taken before comes first
            self._more = False
            self._waiting.append(future)
            future.set_exception(error)
            return
        self._waiting.append(future)
        self._tasks.put((future, item))
        if len(self._threads) < self._limit:
            # A daemon, so that a call that never returns does not keep the process,
            # as it does in a ThreadPoolExecutor.
            thread = start_thread("data", _work, self._function, self._tasks)
            self._threads.append(thread)

    def close(self, *, wait: bool = True) -> None:
        """End the iteration, and wait until the threads have ended.

        Args:
            wait: False: do not wait; each thread ends after the call that it is in.
        """
        self._more = False
        self._stop()
        self._waiting.clear()
        for thread in self._threads if wait else ():
            thread.join()


def read_ahead(items: Iterator[_T], depth: int) -> Iterator[_T]:
    """Return an iterator over ``items``; a thread reads up to ``depth`` items ahead.

    But no more than 1024. With a depth of 0 there is no thread.
    """
    most = min(depth, _MOST) + 1
    return Ahead(_next, itertools.repeat(items), 1, most) if depth else items


def stop_reading(items: object, *, wait: bool) -> None:
    """Stop the threads of an iterator, if it has some, as `Ahead.close`."""
    if isinstance(items, Ahead):
        items.close(wait=wait)


def _next(items: Iterator[Any]) -> Any:
    return next(items, _END)


def _stop(
    process: int, tasks: _Tasks, waiting: collections.deque[Future[Any]], most: int
) -> None:
    # In a forked child the threads do not exist, and may have held these locks.
    if os.getpid() == process:
        for future in waiting:
            future.cancel()
        for _ in range(most):
            tasks.put(None)


def _work(function: Callable[[Any], Any], tasks: _Tasks) -> None:
    """Run in a thread. It does not refer to the `Ahead`, which can be collected."""
    while (task := tasks.get()) is not None:
        future, item = task
        if future.set_running_or_notify_cancel():
            try:
                result = function(item)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del task, future, item  # an idle thread holds no element
