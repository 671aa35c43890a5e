"""Whether the other ranks live: a rank that waits has to know it soon.

In jobs that go on when a process dies (`mpidist._mpi.survival`) MPI tells it, if it
learns of it from the launcher, or from the network. But shared memory has no errors,
and a launcher may be slow, or not notice. So a rank that waits also looks at the
processes of its own machine: in ``/proc/<pid>/stat``, several times a second, after it
has slept. Nothing is looked at while ranks do not wait.

A process is dead if there is none of its number, or another one, which has started
later; if it is a zombie; or if it is in `do_exit` (a large process may need seconds to
give its memory back). It is not dead if it was stopped, by SIGSTOP or by a debugger.
Only those are looked at that were seen alive when the strategy was made: in another PID
namespace the numbers mean other processes.

Where the job ends with its first dead process, the launcher is given some seconds to do
that, and nothing changes. If it does not, waiting ranks raise, and not only at their
deadline.

Rejected: robust futexes (they belong to a thread, whose end would look like a death);
locks of files (a process loses all of its locks on a file when it closes any descriptor
of it, and a child of `fork` may keep them); pidfds (one descriptor for each rank of the
machine, in each; not in Linux before 5.3, nor in a Python built for an older one).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from mpidist._agreement.stacks import Process
from mpidist._base.machine import status_of
from mpidist._mpi import survival
from mpidist._mpi.any_communicator import AnyCommunicator

_LAUNCHER_SECONDS: Final = 5.0
"""How long a launcher that ends the job with its first dead process may take."""


class Lives:
    """Which ranks of a communicator still live, as far as this one knows.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: AnyCommunicator) -> None:
        self._comm = comm
        self._here: list[tuple[int, Process]] = []
        self._dead_since: float | None = None

    def watch(self, processes: Sequence[Process]) -> None:
        """Look at the processes of this machine from now on.

        Args:
            processes: of all ranks.
        """
        own = processes[self._comm.rank].machine
        self._here = [
            (rank, process)
            for rank, process in enumerate(processes)
            if own and process.machine == own and rank != self._comm.rank
            if _lives(process)
        ]

    def losses(self) -> tuple[int, ...] | None:
        """Return which ranks are lost. Not collective.

        Returns:
            None if none is. Empty if another rank says that some are.
        """
        known = self._comm.losses()
        dead = [rank for rank, process in self._here if not _lives(process)]
        if dead and not survival.is_on():
            now = time.monotonic()
            if self._dead_since is None:
                self._dead_since = now
            if now - self._dead_since <= _LAUNCHER_SECONDS:
                return known  # the launcher has time to end the job
        if known is None and not dead:
            return None
        return tuple(sorted({*dead, *(known or ())}))


def _lives(process: Process) -> bool:
    status = status_of(process.pid)
    return status is not None and status.start == process.start and not status.ended
