"""Threads that call a function for elements, whose results stay in order."""

from __future__ import annotations

import collections
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Final, TypeAlias, TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")
_Task: TypeAlias = tuple["Future[_R]", _T]

AUTOTUNE: Final = -1
"""tf.data's request to choose a number itself."""
_MOST_BY_DEFAULT: Final = 8


def default_workers() -> int:
    """Return the number of threads for `AUTOTUNE`: the cores of this rank, up to 8."""
    return min(_MOST_BY_DEFAULT, len(os.sched_getaffinity(0)))


def ordered_map(
    function: Callable[[_T], _R], items: Iterable[_T], count: int
) -> Iterator[_R]:
    """Yield ``function(item)`` for each item, in order; threads call it.

    Up to ``count`` items are taken from ``items`` before the result of the first is
    requested, and no more. ``items`` is read by the caller's thread. An exception, of
    ``function`` or of ``items``, is raised at its place. The threads end at the end, at
    an exception, and when the generator is closed or collected: each after the call
    that it is in, for which nothing waits.

    Args:
        function: called by several threads at the same time.
        items: the arguments.
        count: the number of threads, 1 or more.
    """
    tasks: queue.SimpleQueue[_Task[_R, _T] | None] = queue.SimpleQueue()
    waiting: collections.deque[Future[_R]] = collections.deque()
    started = 0
    source = iter(items)
    failure: Exception | None = None
    process = os.getpid()

    def first() -> _R:
        if os.getpid() != process:
            raise RuntimeError(
                "this process was forked while threads of its parent read this "
                "dataset; make a new iterator here, or call `iter` after the fork"
            )
        return waiting.popleft().result()

    try:
        while True:
            if len(waiting) == count:
                yield first()
            try:
                item = next(source)
            except StopIteration:
                break
            except Exception as error:  # what was taken before comes first
                failure = error
                break
            future: Future[_R] = Future()
            waiting.append(future)
            tasks.put((future, item))
            if started < count:
                started += 1
                # A daemon, so that a call that never returns does not keep the process.
                threading.Thread(
                    target=_work,
                    args=(function, tasks),
                    name="mpidist-map",
                    daemon=True,
                ).start()
        while waiting:
            yield first()
        if failure is not None:
            raise failure
    finally:
        for future in waiting:
            future.cancel()
        if os.getpid() == process:
            for _ in range(started):
                tasks.put(None)


def _work(
    function: Callable[[_T], _R], tasks: queue.SimpleQueue[_Task[_R, _T] | None]
) -> None:
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
