"""Processes that die: what MPI says of them, and what the others can do.

*User-Level Failure Mitigation*, ULFM, is the fault tolerance chapter that the MPI Forum
has under review (https://fault-tolerance.org, "ULFM specification"; Bland, Bouteiller,
Herault, Bosilca, Dongarra, "Post-failure recovery of MPI communication capability",
2013). Open MPI has it since 5.0, and turns it on in jobs that were started by ``mpirun
--with-ft ulfm``. There the launcher does not end the job when a process dies. Instead

- a call that needs a dead process fails, with an error of the class
  ``MPI_ERR_PROC_FAILED``, on the processes that need it; the others may wait forever;
- ``comm.Revoke()`` ends the calls of all processes on a communicator, with
  ``MPI_ERR_REVOKED``, and every later one but the following three. One process alone
  may call it, also a second time;
- `failed_ranks` says who is known here to have died. Other processes may know of
  others, or less;
- `agree` and ``comm.Shrink()`` are collective over the living, also on a communicator
  that was revoked: the one makes the same decision on all, also if processes die in it;
  the other makes a communicator of the living, in their order, the same everywhere.

All of this is off in other MPIs and in other jobs: `is_on` says so, and a process that
dies ends the job.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from mpidist._base.memory import leak
from mpidist._mpi.library import MpiComm, MpiRequest, mpi_module, world_rank

LEARN_SECONDS: Final = 1.0
"""How long it may be until MPI knows why a call has failed."""

_SLEEP: Final = 0.0002
_END_SECONDS: Final = 15.0


def has_ended(request: MpiRequest) -> bool:
    """Return whether a message was sent, or its receiver has died."""
    try:
        return bool(request.Test())
    except mpi_module().Exception:
        return True


@functools.cache
def is_on() -> bool:
    """Return whether this job goes on when a process dies. Not collective.

    The functions of ULFM may be there and do nothing, so this asks for what Open MPI
    has read from its setting ``mpi_ft_enable``, which ``--with-ft ulfm`` sets. (The
    predefined attribute MPI_FT has the same, but neither the standard nor mpi4py has
    its key.)
    """
    try:
        library = ctypes.CDLL(mpi_module().__file__)
        return bool(ctypes.c_bool.in_dll(library, "ompi_ftmpi_enabled").value)
    except (OSError, ValueError):  # another MPI, or an Open MPI without it
        return False


def agree(comm: MpiComm, flag: int, wait: Callable[[MpiRequest], None]) -> int:
    """Return the bitwise and of the flags of all living processes. Collective.

    All get the same. It also works on a communicator that was revoked.

    Args:
        comm: the processes, of which some may have died.
        flag: the bits of this process.
        wait: waits for a request. It may raise: then this process takes no part in
            what the others agree on.

    Returns:
        0 on all processes if one of them has died since they last acknowledged that
        (ULFM specification, MPI_COMM_AGREE: the error is the same on all of them).
    """
    result = np.array([flag], np.intc)
    try:
        wait(comm.Iagree(result))
    except mpi_module().Exception as error:
        if not _is_failure(error):
            raise
        return 0
    except BaseException:
        leak(result)  # MPI may still write to it
        raise
    return int(result[0])


def failed_ranks(comm: MpiComm) -> tuple[int, ...]:
    """Return the ranks of ``comm`` that are known to have died. Not collective."""
    mpi = mpi_module()
    # MPI learns of a death while it makes progress.
    with contextlib.suppress(mpi.Exception):
        comm.Iprobe(mpi.ANY_SOURCE, mpi.ANY_TAG)
    failed, group = comm.Get_failed(), comm.Get_group()
    ranks = tuple(int(rank) for rank in failed.Translate_ranks(None, group))
    failed.Free()
    group.Free()
    return ranks


def losses(comm: MpiComm) -> tuple[int, ...] | None:
    """Return which ranks of ``comm`` are lost. Not collective.

    Returns:
        None: none is, as far as this process knows, or the job would have ended with
        it (`is_on`). The ranks; empty if another process has revoked ``comm``, since it
        knows of some.
    """
    if not is_on():
        return None
    failed = failed_ranks(comm)
    return failed if failed or comm.Is_revoked() else None


def losses_behind(
    error: BaseException, losses: Callable[[], tuple[int, ...] | None]
) -> tuple[int, ...] | None:
    """Return which ranks are lost, if MPI raised an error because of that.

    When a process dies MPI also raises errors of other classes, such as that a
    connection was closed, and before it knows that the process has died.

    Args:
        error: what was raised; not always by MPI.
        losses: returns which ranks are lost, as `losses`.

    Returns:
        None: it is another error.
    """
    if world_rank() is None:  # replicas that are threads need no MPI
        return None
    if not is_on() or not isinstance(error, mpi_module().Exception):
        return None
    end = time.monotonic() + LEARN_SECONDS
    while (found := losses()) is None:
        if _is_failure(error):
            return ()
        if time.monotonic() > end:
            return None
        time.sleep(_SLEEP)
    return found


def end() -> bool:
    """Wait for the ends of the living processes; return whether some have died.

    Collective over the processes of COMM_WORLD, at their ends; all get the same. It
    waits as MPI_Finalize would, but not for more than some seconds.
    """
    if not is_on():
        return False
    mpi = mpi_module()
    world = mpi.COMM_WORLD
    flag = np.array([not failed_ranks(world)], np.intc)
    deadline = time.monotonic() + _END_SECONDS
    try:
        request = world.Iagree(flag)
        while not request.Test():
            if time.monotonic() > deadline:
                return True
            time.sleep(_SLEEP)
    except mpi.Exception:
        return True
    return not flag[0]


def _is_failure(error: BaseException) -> bool:
    """Return whether MPI raised this since a process died, or comm was revoked."""
    mpi = mpi_module()
    return isinstance(error, mpi.Exception) and error.Get_error_class() in (
        mpi.ERR_PROC_FAILED,
        mpi.ERR_PROC_FAILED_PENDING,
        mpi.ERR_REVOKED,
    )
