"""The machine that this process runs on, and the processes of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

SHARED_MEMORY: Final = "/dev/shm"
"""Where files in memory are."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_EXITING: Final = 0x4  # PF_EXITING, in the flags of Linux's include/linux/sched.h


def boot_id() -> str:
    """Return what Linux drew at its start: the same in all processes of the machine.

    Returns:
        "" on other systems.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def node_id(host: str) -> str:
    """Return what is the same for the ranks of a node, which share memory.

    Processes in containers that share ``/dev/shm`` have the same; others of one machine
    do not.

    Args:
        host: the name of this host, as MPI says it.
    """
    try:
        return f"{host} {boot_id()} {os.stat(SHARED_MEMORY).st_dev}"
    except OSError:
        return f"{host} {boot_id()}"


class ProcessStatus(NamedTuple):
    """Of a process, from ``/proc/<pid>/stat`` (proc_pid_stat(5))."""

    state: str
    flags: int
    start: int  # ticks since boot

    @property
    def ended(self) -> bool:
        return self.state in "ZXx" or bool(self.flags & _EXITING)


def status_of(pid: int) -> ProcessStatus | None:
    """Return the status of a process; None if there is none of this number."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read().rpartition(b")")[2].split()
        return ProcessStatus(fields[0].decode("ascii"), int(fields[6]), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None
