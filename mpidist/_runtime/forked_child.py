"""A child that a rank has forked, such as a worker of `multiprocessing`, is not a rank.

It has copies of the rank's strategies, and the connections of MPI. Without care its
collective calls would count as the rank's, which then misses a step; `MPI_Finalize` at
its end would wait for the other ranks, or end the rank's part in the job; and what it
writes to a result in shared memory would change that of the rank. So in the child

- every strategy is closed: its collective calls raise, and say why;
- shared memory is mapped again, for this process alone. The child sees what its parent
  has there, also what the parent writes later, but nobody sees what the child writes;
- MPI is not finalized, and how the child ends is not the concern of the other ranks
  (`process_exit`).

Variables, results and datasets can be read, and everything that does not communicate
works. `os.register_at_fork` runs this in the child of `os.fork`, `multiprocessing` and
`concurrent.futures`. The methods ``spawn`` and ``forkserver``, and `subprocess`, start
processes that have nothing of the rank.

Rejected: comparing process ids in each call (the smallest calls take a few
microseconds, and a system call one twentieth of that); memory that a child does not
inherit (``MADV_DONTFORK``: a worker that reads an array of its parent would end by
SIGSEGV).
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Final

from mpidist import _native
from mpidist._agreement.guard import Guard
from mpidist._mpi import library
from mpidist._runtime import process_exit

_guards: Final[weakref.WeakSet[Guard]] = weakref.WeakSet()


@functools.cache
def prepare() -> None:
    """Register what runs in the child, once: before the first strategy is made."""
    os.register_at_fork(after_in_child=_become_child)


def close_in_children(guard: Guard) -> None:
    """Have children that this process forks find the strategy of a guard closed."""
    _guards.add(guard)


def _become_child() -> None:
    if _native.core is not None:
        _native.core.detach()
    for guard in list(_guards):
        if not guard.closed:
            guard.close(library.IN_CHILD)
    if library.world_rank() is not None:
        library.forbid()
        process_exit.become_child()
