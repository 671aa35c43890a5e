"""Asynchronous calls (`all_reduce_async`): begun now, made by a thread, awaited later.

Each strategy has one such thread. It makes the calls in the order in which the program
has begun them, by the same plans as all calls. A synchronous call first waits for the
asynchronous ones before it (`Guard.settle`), so the headers of a rank have the order of
its program, and two threads are never in calls of one strategy at once.

A failure is raised at a place of the program that is the same on all ranks: by the
`result` of the call, or by the next synchronous call, whichever is first; at the end of
the program it ends the job like an uncaught exception. Until then the thread makes no
further call, since the program of another rank may not have come so far: calls that
were begun meanwhile get the same error.

An exception that ends the program's own wait, such as Ctrl-C, is raised in the thread's
wait too (`AsyncCalls.stop`), which tells the other ranks.

Rejected: a second communicator (nothing would compare the order of both).
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, TypeAlias, TypeVar

from mpidist._agreement import mismatch, polling
from mpidist._agreement.channel import between_of
from mpidist._base import threads
from mpidist._timeline.observer import NOTHING, Observers

_T = TypeVar("_T")
_AnyCall: TypeAlias = "CollectiveHandle[Any]"

# How long a rank that is interrupted waits for its thread, which looks every 50 ms.
_STOP_SECONDS: Final = 5.0


class CollectiveHandle(Generic[_T]):
    """An asynchronous collective call; `ReplicaContext.all_reduce_async` returns it.

    A handle that is dropped without a call of `result` gives a RuntimeWarning, once for
    each strategy. What its call raises is then raised by the next synchronous
    collective call, or at the end of the program.
    """

    _calls: AsyncCalls | None = None

    def __init__(
        self,
        guard: Any,
        name: str,
        make: Callable[[], _T],
        warns: bool,
        check: Callable[[], None] | None,
    ) -> None:
        """Hold a call; `AsyncCalls.begin` makes them."""
        self._guard = guard  # a `Guard`, which is defined above this file
        self._name = name
        self._make: Callable[[], _T] | None = make
        self._site = mismatch.user_site() if warns else None
        self._check = check  # called by `result`, until it does not raise
        self._lock = threading.Lock()
        self._lock.acquire()
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._warns = warns
        self._generation = 0

    def __repr__(self) -> str:
        state = "ended" if self._done else "begun"
        return f"<mpidist.experimental.CollectiveHandle: {self._name}, {state}>"

    def done(self) -> bool:
        """Return whether `result` will return, or raise, at once. Not collective.

        Ranks may get different answers, so no collective call may depend on it.
        """
        return self._done

    def result(self) -> _T:
        """Wait for the call, and return what it would have returned. Not collective.

        It can be called several times.

        Raises:
            Exception: what the call, or one that was begun before it, raised.
            RuntimeError: if the strategy was closed before the call ended.
        """
        self._warns = False
        guard = self._guard
        try:
            if not self._done and guard.closed:
                raise RuntimeError(f"{self._name}: {guard.broken}")
            if self._calls is not None:
                self._calls.wait_for(self)
            if self._error is not None:
                if self._calls is not None and self._calls.failure is self._error:
                    self._calls.drain()
                raise self._error
            if self._check is not None:
                self._check()
                self._check = None
            return self._value
        except BaseException as error:
            if error is not self._error:
                guard.breakdown.interrupted(self._name, error)
            raise
        finally:
            del self, guard  # which the traceback of the error refers to

    def _run(self, *, at_once: bool = False) -> None:
        """Make the call; called by `AsyncCalls`."""
        calls, make = self._calls, self._make
        if self._done:
            return
        self._make = None
        assert calls is not None
        assert make is not None
        if calls.failure is not None:
            self._error = calls.failure
        else:
            try:
                self._value = make()
            except BaseException as error:
                self._guard.breakdown.interrupted(self._name, error)
                if at_once and not isinstance(error, Exception):
                    raise
                trace = error.__traceback__  # without this frame, which refers to it
                self._error = error.with_traceback(trace and trace.tb_next)
                calls.failure = error
        del make  # what it refers to goes with the result
        self._end(self._error)

    def _end(self, error: BaseException | None) -> None:
        """Mark the call as ended, and wake who waits for it."""
        if not self._done:
            self._error = error
            self._done = True
            self._lock.release()

    def _wait(self, seconds: float = -1) -> None:
        """Wait until the call has ended: on a lock, a wait that signals can end."""
        if not self._done and self._lock.acquire(timeout=seconds):
            self._lock.release()

    def __del__(self) -> None:
        calls = self._calls
        if calls is None:  # it was not begun
            return
        site = self._site
        if site is None or not self._warns or self._error is not None:
            return
        if sys.is_finalizing():  # the program has kept it to its end
            return
        if calls.has_warned or calls.generation != self._generation:
            return
        calls.has_warned = True
        warnings.warn_explicit(
            f"{self._name}: the handle was dropped without `result()`, so nobody gets "
            "what the call returns; keep it, and call `result()`, on every rank",
            RuntimeWarning,
            site.file,
            site.line,
        )


class AsyncCalls:
    """The asynchronous calls of a strategy, and the thread that makes them.

    Args:
        guard: of the strategy.

    Attributes:
        failure: what a call has raised, until the program raises it.
        has_warned: whether a handle that was dropped has warned.
        generation: counts up whenever handles become obsolete; only handles of the
            current generation warn if they are dropped.
    """

    def __init__(self, guard: Any) -> None:
        self._guard = weakref.proxy(guard)  # which has this object
        self._queue: queue.SimpleQueue[_AnyCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Weakly: the queue, then the thread, keep a call until it has ended.
        self._last: weakref.ref[_AnyCall] | None = None  # since all were awaited
        self._awaited = False  # the program waits for a call, and computes nothing
        self._stop: BaseException | None = None
        self.failure: BaseException | None = None
        self.has_warned = False
        self.generation: int = 0
        weakref.finalize(self, self._queue.put, None).atexit = False

    @property
    def unsettled(self) -> bool:
        """Whether a call may still be in progress, or has failed."""
        return self._last is not None or self.failure is not None

    def begin(self, call: _AnyCall, *, at_once: bool) -> None:
        """Queue a call for the thread; or, ``at_once``, make it in this thread.

        Args:
            call: the call. It is made after all that were begun before.
            at_once: whether to make it here, and return when it has ended.
        """
        call._calls = self
        call._generation = self.generation
        if at_once:
            self._wait_for_last()
            call._run(at_once=True)
            self._guard.update_blocked()
            return
        try:
            if self._thread is None:
                replica, observers = threads.current(), self._guard.observers
                given = self._queue, replica, weakref.ref(self), observers
                with self._guard.checking(call._name):  # there may be no memory for it
                    self._thread = threads.start_thread("communication", _work, *given)
                self._set_awaited(False)
            self._last = weakref.ref(call)
            self._guard.update_blocked()
            self._queue.put(call)
        except BaseException as error:  # of a signal; the thread may not have it
            call._end(error)
            raise

    def is_own_thread(self) -> bool:
        """Return whether this thread makes the calls."""
        return threading.current_thread() is self._thread

    def wait_for(self, call: _AnyCall) -> None:
        """Wait until a call has ended."""
        observers, observed = self._guard.observers, NOTHING
        if observers is not None and not call.done():
            text = f"the wait for {call._name}"
            observed = observers.work(text, 0, "waits for begun")
        self._set_awaited(True)
        try:
            with observed:
                call._wait()
        finally:
            self._set_awaited(False)

    def _set_awaited(self, awaited: bool) -> None:
        """Have the thread leave its core while it waits, unless the program does."""
        self._awaited = awaited
        between, thread = between_of(self._guard.channel), self._thread
        if between is not None and thread is not None:
            between.sleeper = 0 if awaited else thread.ident

    def _wait_for_last(self) -> None:
        if self._last is not None and (last := self._last()) is not None:
            self.wait_for(last)

    def settle(self) -> None:
        """Wait for all calls that were begun, and raise what one of them raised."""
        failure = self.drain()
        if failure is not None:
            raise failure

    def drain(self, error: BaseException | None = None) -> BaseException | None:
        """Wait for all calls that were begun; return what the program is to raise.

        Args:
            error: what it raises anyway; None: what a call has raised.
        """
        if error is not None:
            self.silence_handles()
        if self.is_own_thread() or not self.unsettled:
            return error
        self._wait_for_last()
        failure, self._last, self.failure = self.failure, None, None
        self._guard.update_blocked()
        if failure is not None:
            self.silence_handles()
        return error or failure

    def silence_handles(self) -> None:
        """Let no existing handle warn: an exception keeps the program from using it."""
        self.generation += 1

    # --- ending the wait of the thread --------------------------------------------

    def stop(self, error: BaseException) -> None:
        """End all calls, since the program was interrupted by an exception.

        Args:
            error: the exception, which is raised in the wait of the thread (`look`).
        """
        last = None if self._last is None else self._last()
        if last is None or last.done() or self.is_own_thread():
            return
        trace = error.__traceback__
        self._stop = error
        last._wait(_STOP_SECONDS)
        error.__traceback__ = trace
        if last.done():
            self._stop = None
        self._last = None
        self.drain(error)

    def look(self) -> None:
        """In a wait of the thread: raise the exception of `stop`."""
        if self._stop is not None and self.is_own_thread():
            raise self._stop

    def end(self) -> None:
        """End the thread: the strategy is closed, or this process is a forked child."""
        self.silence_handles()
        self._queue.put(None)


def _work(
    calls: queue.SimpleQueue[_AnyCall | None],
    replica: threads.ThreadReplica | None,
    owner: weakref.ref[AsyncCalls],
    observers: Observers | None,
) -> None:
    """Run the thread: make the calls. It holds no reference to the strategy."""

    def yields_core() -> bool:
        begun = owner()
        return begun is None or not begun._awaited  # the program computes

    polling.here.yields_core = yields_core
    if observers is not None:
        observers.makes_begun_calls()
    with contextlib.ExitStack() as stack:
        if replica is not None:
            stack.enter_context(threads.entered(replica))
        while (call := calls.get()) is not None:
            mismatch.begun.site = call._site
            call._run()
            del call
