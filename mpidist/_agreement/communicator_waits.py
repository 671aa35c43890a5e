"""How a communicator waits: while a strategy is set up, and then by its guard.

What ends the waits of a strategy's calls, such as the deadline, is in `waiting`.
"""

from __future__ import annotations

from collections.abc import Callable

from mpidist._agreement.guard import Guard
from mpidist._agreement.polling import poll
from mpidist._base.errors import CollectiveTimeoutError, ReplicaLostError, format_ranks
from mpidist._mpi import survival
from mpidist._mpi.requests import Request, Transfer


class CommunicatorWaits:
    """Waits for the requests of a communicator: a `mpidist._mpi.requests.Waiter`.

    While a strategy is set up each wait has a time limit. The guard, which needs the
    communicator and so is made after it, then takes over.

    Args:
        seconds: the limit of each wait; 0: none.
        losses: returns which ranks are lost; see `survival.losses`.

    Attributes:
        guard: waits for data; None: there is none yet, or the strategy is gone.
    """

    def __init__(
        self,
        seconds: float,
        losses: Callable[[], tuple[int, ...] | None] = lambda: None,
    ) -> None:
        self.seconds = seconds
        self._losses = losses
        self.guard: Guard | None = None

    @property
    def broken(self) -> str:
        """Why messages may never complete; "" while they will."""
        return "" if self.guard is None else self.guard.broken

    def wait(self, request: Request, what: str) -> None:
        """Wait for a request of the set-up.

        Raises:
            CollectiveTimeoutError: at the limit.
            ReplicaLostError: if a rank is lost.
        """

        def look(waited: float) -> None:
            if (lost := self._losses()) is not None:
                raise lost_in_set_up(lost)
            if self.seconds and waited > self.seconds:
                raise CollectiveTimeoutError(
                    f"{what}: not all ranks of the communicator made this call within "
                    f"{self.seconds:.3g} s; make the strategy on every rank of `comm`"
                )

        try:
            poll(request, look)
        except BaseException as error:
            raise self.failed(error) from error.__cause__

    def wait_data(self, transfer: Transfer) -> None:
        """Wait for collectives of MPI that move data.

        Raises:
            CollectiveTimeoutError: at the limit, or at the guard's.
        """
        if self.guard is None:
            self.wait(transfer, "MPIStrategy(...)")
        else:
            self.guard.waits.wait_data(transfer)

    def block(self, call: Callable[[], object]) -> None:
        """Make a call of MPI that blocks, under the watchdog of the guard."""
        if self.guard is None:
            call()
        else:
            self.guard.waits.block(call)

    def failed(self, error: BaseException) -> BaseException:
        """Return what to raise in place of an exception of MPI."""
        if self.guard is not None:
            return self.guard.breakdown.failed(error)
        lost = survival.losses_behind(error, self._losses)
        return error if lost is None else lost_in_set_up(lost)


def lost_in_set_up(replicas: tuple[int, ...]) -> ReplicaLostError:
    """Return the error that a rank is lost before there is a strategy.

    Args:
        replicas: the ranks; empty if they are not known.
    """
    who = format_ranks(replicas) if replicas else "some rank"
    return ReplicaLostError(
        f"MPIStrategy(...): the process of {who} of `comm` has died; call `Revoke` and "
        "`Shrink` of `comm`, and make the strategy on the result",
        replicas,
        "MPIStrategy(...)",
    )
