"""Requests: operations of MPI that were started, their buffers, and what waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from mpidist._base.memory import leak


class Request(Protocol):
    """A non-blocking operation that was started."""

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Return whether it has completed, and make progress."""

    def leak(self) -> None:
        """Leak its buffers: it is abandoned, and MPI may still use them."""

    @property
    def result(self) -> Any:
        """The result of the communication, once it has completed."""


Begun: TypeAlias = deque[tuple[int, Any]]
"""The number of the last header that was begun, and what it uses: one entry."""

StartHeader: TypeAlias = Callable[[tuple[int, ...], Begun], Request]
"""Starts an all-gather of integers; the request's result has a row for each rank."""


class Transfer:
    """A request of MPI in progress, with the buffers that it uses.

    mpi4py's requests do not keep the buffers alive: with Open MPI the sum of a
    temporary array was wrong once it had been collected (mpi4py 4.1.2).

    Args:
        test: the method of mpi4py's request.
        buffers: what the request reads and writes.
        read: returns what was received; None: the caller has the buffer.

    Attributes:
        Test: returns whether it has completed, and makes progress.
    """

    __slots__ = ("Test", "_buffers", "_read")

    def __init__(
        self,
        test: Callable[[], bool],
        buffers: Any,
        read: Callable[[], Any] | None = None,
    ) -> None:
        self.Test: Callable[[], bool] = test
        self._buffers = buffers
        self._read = read

    def tests_first_by(self, test: Callable[[], bool]) -> None:
        """Replace the first test by ``test``, which polls for a while in C.

        So a short wait ends before `polling.poll` looks at its clock.
        """
        usual = self.Test

        def first() -> bool:
            self.Test = usual
            return test()

        self.Test = first

    @property
    def result(self) -> Any:
        """The received data, once the communication has completed."""
        return None if self._read is None else self._read()

    def leak(self) -> None:
        """Leak the buffers: MPI may still use them."""
        leak(self)


class Waiter(Protocol):
    """Waits for the requests of a communicator, with a deadline."""

    def wait(self, request: Request, what: str) -> None:
        """Wait until a request has completed."""

    @property
    def broken(self) -> str:
        """Why messages may never complete; "" while they will."""

    def wait_data(self, transfer: Transfer) -> None:
        """Wait until collectives have completed."""

    def block(self, call: Callable[[], object]) -> None:
        """Make a call of MPI that blocks, under a watchdog."""

    def failed(self, error: BaseException) -> BaseException:
        """Return what to raise in place of an exception of MPI."""
