"""The waits of calls of MPI that block: those that move GPU buffers.

Nothing ends such a call in this process, neither an exception nor a signal's handler.
So a thread looks in its place, as in other waits (`waiting`): it reads and posts
notices, by which the ranks know who is missing, and at the deadline ends the job with
the same message. It starts with the first call, and ends with the guard.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from mpidist._base import threads
from mpidist._mpi.any_communicator import AnyCommunicator

_LOOK_SECONDS: Final = 0.1
_FIRST_SECONDS: Final = 1.0  # no look disturbs shorter calls


class Watchdog:
    """Looks around while this rank is in a call of MPI that blocks.

    Args:
        comm: the ranks.

    Attributes:
        end: ends the job. A strategy sets this, and the next.
        prepare: called in the thread when it starts: each has its own current GPU.
    """

    end: Callable[[Exception], None]
    prepare: Callable[[], None]

    def __init__(self, comm: AnyCommunicator) -> None:
        self._comm = comm
        self._thread: threading.Thread | None = None
        # How to look in the call that this rank is in, and when it began.
        self._call: tuple[Callable[[float], object], float] | None = None
        self._looking = threading.Lock()
        self._closed = threading.Event()

    def close(self) -> None:
        """End the thread: no call is made any more."""
        self._closed.set()

    @contextlib.contextmanager
    def watch(self, look: Callable[[float], object]) -> Iterator[None]:
        """Watch a call, in a ``with`` block.

        Args:
            look: called with the seconds waited, in the thread, several times a second.
                What it raises ends the job.
        """
        self._call = look, time.monotonic()
        if self._thread is None:
            self._thread = threads.start_thread("watchdog", self._run)
        try:
            yield
        finally:
            self._call = None
            with self._looking:  # until the last look has ended
                pass

    def _run(self) -> None:
        self.prepare()
        while not self._closed.wait(_LOOK_SECONDS):
            with self._looking:
                self._look()

    def _look(self) -> None:
        if (call := self._call) is None:
            return
        look, since = call
        waited = time.monotonic() - since
        if waited < _FIRST_SECONDS:
            return
        try:
            look(waited)
        except Exception as error:
            self._call = None
            if self._comm.losses() is not None:  # the job goes on, and the call raises
                self._comm.revoke()
            else:
                self.end(error.with_traceback(None))
