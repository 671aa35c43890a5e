"""Duplicating a communicator that belongs to the user, with a limit to the wait.

The duplicate is made by ``Idup``, a collective call on the user's communicator, and MPI
cannot take it back: ranks that give up leave it pending there, and the next collective
call of theirs on that communicator would meet it on those that never came. What MPI has
instead (a call of point to point messages that come first, `MPI_Comm_create_group`)
leaves messages that a receive of the user's would take, or has no limit.

So what a rank has begun is kept with the communicator, as an attribute of MPI, and the
next attempt on it goes on from there, instead of beginning another that the others
would take for the first. After one that all ranks make nothing is pending.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

from mpidist._base.errors import CollectiveTimeoutError
from mpidist._mpi.collective_release import count
from mpidist._mpi.library import MpiComm, MpiRequest, mpi_module

_CALL: Final = "MPIStrategy(...)"


class _Attempt:
    """A duplication that was begun.

    Attributes:
        duplicate: the new communicator; of use when the request is complete.
        request: that of the duplication.
        meeting: a barrier on the duplicate; None before that is complete.
    """

    def __init__(self, comm: MpiComm) -> None:
        self.duplicate, self.request = comm.Idup()
        self.meeting: MpiRequest | None = None


def duplicate(comm: MpiComm, wait: Callable[[MpiRequest, str], None]) -> MpiComm:
    """Return a duplicate of ``comm``, when all ranks have it. Collective.

    Args:
        comm: an mpi4py intra-communicator.
        wait: waits for a request of the call with this name, and no longer than it may.

    Raises:
        CollectiveTimeoutError: if some rank does not come. `comm` then keeps what was
            begun, for the next call.
        RuntimeError: if MPI has no communicator left.
    """
    key = _key()
    attempt = comm.Get_attr(key)
    if attempt is None:
        attempt = _Attempt(comm)
        comm.Set_attr(key, attempt)
    try:
        wait(attempt.request, _CALL)
        # MPI may complete a duplication that other ranks have given up on. What
        # follows blocks, so first all ranks show that they are there.
        if attempt.meeting is None:
            attempt.meeting = attempt.duplicate.Ibarrier()
        wait(attempt.meeting, _CALL)
    except CollectiveTimeoutError as error:
        raise CollectiveTimeoutError(
            f"{error}. Until then make no other collective call on `comm`: its "
            "duplication is pending, and the next MPIStrategy on it goes on with that"
        ) from None
    except mpi_module().Exception as error:
        if error.Get_error_class() != mpi_module().ERR_OTHER:
            raise
        raise RuntimeError(
            f"{_CALL}: MPI cannot make another communicator; {count()} of strategies "
            "are not freed in this process, and some MPI libraries can have 2,000. "
            "Close strategies with `strategy.close()`. Those that gave up are never "
            "freed: end the program, and start it again from its last checkpoint"
        ) from error
    comm.Delete_attr(key)
    return attempt.duplicate


@functools.cache
def _key() -> int:
    """Return the key of MPI's attribute. A duplicate does not have it."""
    return mpi_module().Comm.Create_keyval()
