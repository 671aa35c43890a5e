"""The deadline of calls of MPI that block: those that move GPU buffers.

Nothing ends such a call in this process, neither an exception nor a signal's handler.
So a thread looks at the clock: it reports a call that takes long, and at the deadline
ends the job with the same message, or, where jobs outlive their ranks (ULFM), revokes
the communicator, which makes the call raise on all ranks. The thread calls MPI only for
that. It starts with the first call, and ends with the guard.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from mpidist._base import reporting, threads
from mpidist._base.errors import CollectiveTimeoutError, on_rank
from mpidist._mpi.any_communicator import AnyCommunicator

_LOOK_SECONDS: Final = 0.1


class Watchdog:
    """Looks at the clock while this rank is in a call of MPI that blocks.

    Args:
        comm: the ranks.
        stall_seconds: after which a call is reported.

    Attributes:
        end: ends the job, at the deadline; None: nothing does.
        expired: what to raise from a call that was revoked at its deadline.
    """

    def __init__(self, comm: AnyCommunicator, stall_seconds: float) -> None:
        self._comm = comm
        self._stall = stall_seconds
        self.end: Callable[[CollectiveTimeoutError], None] | None = None
        self.expired: CollectiveTimeoutError | None = None
        self._thread: threading.Thread | None = None
        # The call that this rank is in: its name, when it began, and its deadline.
        self._call: tuple[str, float, float] | None = None
        self._reported = False
        self._closed = threading.Event()

    def close(self) -> None:
        """End the thread: no call is made any more."""
        self._closed.set()

    @contextlib.contextmanager
    def watch(self, call: str, timeout: float) -> Iterator[None]:
        """Watch a call, in a ``with`` block.

        Args:
            call: its name in messages.
            timeout: seconds until the deadline; 0: none.
        """
        self._reported = False
        self._call = call, time.monotonic(), timeout
        if self._thread is None:
            self._thread = threads.start_thread("watchdog", self._run)
        try:
            yield
        finally:
            self._call = None

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            if (call := self._call) is not None:
                self._look(*call)

    def _look(self, call: str, since: float, timeout: float) -> None:
        waited = time.monotonic() - since
        text = on_rank(
            self._comm.rank,
            f"{call}: this rank has been in a call of MPI that blocks for "
            f"{waited:.3g} s; some rank did not make it, or was stopped in it",
        )
        if waited >= self._stall and not self._reported:
            self._reported = True
            reporting.warn(f"mpidist: {text}")
        if not timeout or waited < timeout:
            return
        error = CollectiveTimeoutError(text)
        if self._comm.outlives_ranks:
            self._call, self.expired = None, error
            self._comm.revoke()
        elif self.end is not None:
            self.end(error)
