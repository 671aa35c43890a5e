"""The memory that the ranks of a node share: one file for each node and strategy.

With several nodes, each has its own, and ranks with the same number on their nodes
exchange the sums of their nodes (`nodes`).

The first rank of a node makes a file in memory (/dev/shm), reserves its first part, and
sends its name to the others; they map it, and it is unlinked at once. So nothing is
left of it after the processes, however they end; if the first rank is killed before it
has unlinked the file, the next strategy on the machine does (`_unlink_abandoned`). The
rest of the file, one part for
each rank (its *arena*), uses no memory until results are placed there (`Pool`), and is
reserved before it is touched: if there is no room a call uses other memory, and no
process ends by SIGBUS.

The memory lives as long as an array views it, also after the strategy was closed and
after ``MPI_Finalize``, since MPI does not know about it.

Every step that may fail on one rank is followed by an agreement of all: either all
ranks have the memory, or none has, and all know why.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from mpidist import _native
from mpidist._base.machine import SHARED_MEMORY
from mpidist._base.memory import PAGE
from mpidist._base.types import record
from mpidist._mpi.communicator import Communicator

# Of a piece area: two of each rank, and the piece itself, fit into a core's cache. On
# nodes of many ranks all areas together are limited.
_LARGEST_AREA: Final = 512 * 1024
_AREAS_BYTES: Final = 64 * 2**20
# Between nodes each rank sends a slice of a piece, which should not be too small.
_AREA_BETWEEN_NODES: Final = 2 * 2**20
_SLICE_BETWEEN_NODES: Final = 128 * 1024
_AREAS_BYTES_BETWEEN_NODES: Final = 512 * 2**20
_LARGEST_ARENA: Final = 4 * 2**30
# Loops of a waiting rank before it yields its core, and then sleeps. 500 were shorter
# than an empty merge_fn: every fourth merge_call of 2 ranks slept, and took 130 to 400
# us in place of 20 to 30. With more ranks than cores a rank would occupy the core of
# the one that it waits for.
_SPINS: Final = 4000
_SPINS_CROWDED: Final = 20

_PREFIX: Final = "mpidist-"  # of the names of the files, between which is chance
_SUFFIX: Final = ".shared-memory"
_ABANDONED_SECONDS: Final = 60.0  # from when on a file that nobody has locked is

_T = TypeVar("_T")


@record
class Node:
    """What the ranks of a node share.

    Attributes:
        memory: all of it.
        channel: where they meet.
        pool: slots in this rank's arena.
        rank: this rank's number on the node.
        size: how many ranks the node has.
        piece_bytes: the size of a piece area.
    """

    memory: _native.Memory
    channel: _native.Channel
    pool: _native.Pool
    rank: int
    size: int
    piece_bytes: int


def rank_info(*, wanted: bool) -> dict[str, Any]:
    """Return what this rank tells the others before they share memory.

    Args:
        wanted: whether it wants to.
    """
    problem = "" if _native.available() else _native.missing
    return {
        "no_memory": problem if wanted else "not asked for",
        "free_memory": free_bytes(),
    }


def open_node(comm: Communicator) -> tuple[Node | None, str]:
    """Make shared memory on each node, if all ranks want it and can. Collective.

    Args:
        comm: all ranks, which have told each other what `rank_info` returned.

    Returns:
        This node's memory; None on all ranks if a step failed on one of them, and why
        (with one rank "").
    """
    if comm.size == 1:
        return None, ""
    core, rank_infos = _native.core, comm.rank_infos
    found = _first([info["no_memory"] for info in rank_infos])
    if found:
        return None, found
    largest = max(comm.node_sizes)
    if largest > core.MAX_RANKS:
        at_most = f"at most {core.MAX_RANKS} can share memory"
        return None, f"{largest} ranks on one node; {at_most}"
    alone = comm.num_nodes == 1
    area = min(area_bytes_for(size, alone=alone) for size in comm.node_sizes)
    # Results to which all ranks write are used on one node only: half of what is free,
    # divided by the ranks, of which nothing is reserved yet.
    free = min(info["free_memory"] for info in rank_infos)
    arena = min(free // 2 // comm.size, _LARGEST_ARENA) // PAGE * PAGE if alone else 0
    total, head = core.total_bytes(comm.local_size, area, arena)
    made: tuple[int, str] | None = None
    problem = ""
    if comm.local_rank == 0:
        made, problem = _attempt(lambda: make_file(total, head))
    try:
        # A path of each node's first rank; the problem of any.
        path = "" if made is None else made[1]
        rows = comm.all_gather_objects((path, problem))
        found = next((text for _, text in rows if text), "")
        if found:
            return None, f"no memory in {SHARED_MEMORY}: {found}"
        path = rows[comm.node_ranks[0]][0]
        node, problem = _attempt(
            lambda: connect(map_file(path, total), comm, area, arena)
        )
        found = _first(comm.all_gather_objects(problem))
        return (None, found) if found else (node, "")
    finally:
        if made is not None:
            os.close(made[0])
            with contextlib.suppress(OSError):
                os.unlink(made[1])


def _first(problems: list[str]) -> str:
    """Return the problem of the first rank that has one; "" if none has."""
    found = (f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
    return next(found, "")


def area_bytes_for(size: int, *, alone: bool) -> int:
    """Return the size of a piece area on a node with this many ranks.

    Args:
        size: the ranks of the node.
        alone: whether it is the only node.
    """
    largest, most = _LARGEST_AREA, _AREAS_BYTES
    if not alone:
        largest = max(_AREA_BETWEEN_NODES, _SLICE_BETWEEN_NODES * size)
        most = _AREAS_BYTES_BETWEEN_NODES
    return min(largest, most // (2 * size + 2) // PAGE * PAGE)


def free_bytes() -> int:
    """Return the free memory for files of the node."""
    try:
        status = os.statvfs(SHARED_MEMORY)
        return status.f_bavail * status.f_frsize
    except OSError:
        return 0


def make_file(total: int, head: int) -> tuple[int, str]:
    """Make a file of this size, with its first part reserved.

    It is locked until it is closed, or this process ends.
    """
    _unlink_abandoned()
    fd, path = tempfile.mkstemp(_SUFFIX, _PREFIX, SHARED_MEMORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.ftruncate(fd, total)
        os.posix_fallocate(fd, 0, head)
    except BaseException:
        os.close(fd)
        os.unlink(path)
        raise
    return fd, path


def _unlink_abandoned() -> None:
    """Unlink files of processes that were killed before they had unlinked them.

    Whether a process is alive is told by its lock, not by its id, which means another
    process in another container. The age is for files that are not locked yet.
    """
    for path in Path(SHARED_MEMORY).glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):  # another user's, or locked, or gone
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(fd).st_mtime > _ABANDONED_SECONDS:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            finally:
                os.close(fd)


def map_file(path: str, total: int) -> _native.Memory:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _native.core.Memory(fd, total)
    finally:
        os.close(fd)


def connect(memory: _native.Memory, comm: Communicator, area: int, arena: int) -> Node:
    core, rank, size = _native.core, comm.local_rank, comm.local_size
    spins = _SPINS_CROWDED if comm.crowded else _SPINS
    channel = core.Channel(memory, size, rank, area, arena, comm.crowded, spins)
    _, head = core.total_bytes(size, area, arena)
    pool = core.Pool(memory, head + rank * arena, arena)
    return Node(memory, channel, pool, rank, size, area)


def _attempt(step: Callable[[], _T]) -> tuple[_T | None, str]:
    """Return the result of a step and "", or None and its exception as a text."""
    try:
        return step(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
