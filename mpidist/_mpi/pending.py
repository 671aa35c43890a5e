"""Requests of mpi4py that are pending, with their buffers."""

from __future__ import annotations

from collections.abc import Callable

from mpidist._base.memory import leak
from mpidist._base.types import HostArray
from mpidist._mpi.library import MpiRequest, mpi_module


class Pending:
    """A pending request, which keeps its buffer alive.

    mpi4py's request does not: with Open MPI the sum of a temporary array was wrong
    once it had been collected (mpi4py 4.1.2).
    """

    __slots__ = ("Test", "_buffer", "_read")

    def __init__(
        self,
        request: MpiRequest,
        read: Callable[[], bytes],
        buffer: HostArray | memoryview,
    ) -> None:
        self.Test: Callable[[], bool] = request.Test
        self._read = read
        self._buffer = buffer

    def tests_first_by(self, test: Callable[[], bool]) -> None:
        """Have the first test be another, which takes longer."""
        usual = self.Test

        def first() -> bool:
            self.Test = usual
            return test()

        self.Test = first

    @property
    def result(self) -> bytes:
        """What was received, once it has completed."""
        return self._read()

    def leak(self) -> None:
        leak(self)


def has_ended(request: MpiRequest) -> bool:
    """Return whether a message was sent, or its receiver has died."""
    try:
        return bool(request.Test())
    except mpi_module().Exception:
        return True
