"""When timelines are recorded, and how their parts become one file.

A strategy that is made inside `timeline` records there; else, if ``MPIDIST_TIMELINE``
names a file, there until the program ends. Then rank 0 merges the parts of all
processes, which it reads from the file system. If it does not see all of them, or if a
process was killed, the parts stay, for the command `mpidist timeline`.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import time
import weakref
from collections.abc import Iterator
from typing import Final

from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call
from mpidist._base import reporting, threads
from mpidist._base.environment import Environment
from mpidist._base.errors import format_ranks, warn_caller
from mpidist._base.expect import as_path
from mpidist._mpi import library
from mpidist._mpi.communicator import Communicator
from mpidist._runtime import process_exit
from mpidist._timeline.observer import Observer, Observers
from mpidist._timeline.recorder import Recorder
from mpidist._timeline.trace import Lines

# For a network file system to show rank 0 what the others have written.
_WAIT_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.05


class _Recording(Recorder):
    """A timeline that is being recorded.

    Args:
        path: of the timeline.

    Attributes:
        guards: of the strategies that were made meanwhile, with their numbers of ranks.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.guards: list[tuple[int, weakref.ref[Guard]]] = []

    def end(self) -> None:
        """Close the part; see that all ranks have, and merge them."""
        self.close()
        # The same on all ranks: each may have others with fewer ranks.
        for _, reference in sorted(self.guards, key=lambda pair: -pair[0]):
            guard = reference()
            if guard is not None and not guard.closed and not guard.broken:
                guard.agree(Call("the end of mpidist.timeline"))
                break
        _merge(self)


_blocks: Final = threads.ReplicaLocal[list[_Recording]](list)
_of_program: list[_Recording] = []
_numbers = threads.ReplicaLocal(lambda: itertools.count(1))  # of observed strategies


@contextlib.contextmanager
def timeline(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record what the strategies that are created in the block do. Collective.

    Every rank enters and leaves it. At the end rank 0 writes one file for all ranks, on
    one clock, which https://ui.perfetto.dev and ``chrome://tracing`` show, and
    ``mpidist timeline PATH`` summarizes: runs, collective calls with their bytes,
    routes and who was waited for, merge_call, updates, input and checkpoints.

    A call costs some 10 microseconds more while it is recorded. Strategies that were
    made before are not recorded. ``MPIDIST_TIMELINE=PATH`` does the same for a whole
    program.

    Args:
        path: of the file, on a file system that all ranks share; compressed with gzip
            if it ends in ".gz". An older file is replaced. Each rank writes to
            ``PATH.rank<N>`` meanwhile. If rank 0 cannot read all of these, it says so
            and they stay; ``mpidist timeline PATH`` reads them too.

    Raises:
        OSError: by `MPIStrategy` in the block, on all ranks, if a rank cannot write.
    """
    recording = _Recording(as_path("mpidist.timeline", path))
    blocks = _blocks.get()
    blocks.append(recording)
    try:
        yield
    except BaseException:
        blocks.remove(recording)
        recording.close()  # its part stays: the ranks may be anywhere
        raise
    blocks.remove(recording)
    if not recording.guards:
        warn_caller(
            "mpidist.timeline: no MPIStrategy was made in the block, so nothing was "
            f"recorded in {recording.path}; make it inside"
        )
        return
    recording.end()


def observe(communicator: Communicator, environment: Environment) -> Observers | None:
    """Return what observes a strategy that is made now; None: nothing does.

    Args:
        communicator: of the strategy.
        environment: says whether there are a trace and a timeline of the program.
    """
    rank, size = communicator.rank, communicator.size
    recording = _recording_now(environment.timeline)
    if not environment.trace and recording is None:
        return None
    number = next(_numbers.get())
    observers: list[Observer] = []
    if environment.trace:
        begins, traffic = environment.trace > 1, communicator.traffic
        observers.append(Lines(rank, size, number, begins=begins, traffic=traffic))
    if recording is not None:
        recording.add_strategy(number, communicator.identity, rank, size)
        observers.append(recording)
    return Observers(observers, number)


def begin(path: str, communicator: Communicator, guard: Guard) -> None:
    """Open the file for a strategy that `observe` was called for, if it is recorded.

    Args:
        path: of the timeline of the program; "": there is none.
        communicator: of the strategy.
        guard: of the strategy.

    Raises:
        OSError: if it cannot be written.
    """
    recording = _recording_now(path)
    if recording is not None:
        is_thread = threads.current() is not None
        rank = communicator.machine_rank if is_thread else library.world_rank()
        try:
            recording.open(rank or 0, library.world_size())
        except OSError as error:
            if recording in _of_program:
                error.add_note(f"It is the timeline that MPIDIST_TIMELINE={path} names")
            raise
        recording.guards.append((communicator.size, weakref.ref(guard)))


def _recording_now(path: str) -> _Recording | None:
    """Return where a strategy that is made now is recorded; None: nowhere."""
    if blocks := _blocks.get():
        return blocks[-1]
    if path and not _of_program:
        _of_program.append(_Recording(path))
        atexit.register(_of_program[0].close)  # before the ranks meet
    return _of_program[0] if path else None


def _merge(recording: _Recording) -> None:
    """Merge the parts into one file, if this is rank 0."""
    if recording.rank != 0:
        return
    from mpidist._timeline import files  # which other programs need not import

    path = recording.path
    deadline = time.monotonic() + _WAIT_SECONDS
    try:
        while not files.are_complete(parts := files.read_parts(path)):
            if time.monotonic() > deadline:
                ranks = [part.rank for part in parts if not part.complete]
                ends = f"; the recording of {format_ranks(ranks)} ended early"
                reporting.warn(
                    "mpidist.timeline: rank 0 does not see the complete parts of all "
                    f"ranks ({path}.rank*){ends if ranks else ''}. Copy them into one "
                    "folder if they are on other machines, and run: mpidist timeline "
                    f"{path}"
                )
                return
            time.sleep(_PAUSE_SECONDS)
        files.merge_files(path, parts)
    except (OSError, files.FormatError) as error:
        reporting.warn(f"mpidist.timeline: rank 0 cannot write {path}: {error}")


def _end_program() -> None:
    if library.is_forbidden():  # a forked child
        return
    for recording in _of_program:
        guards = [reference() for _, reference in recording.guards]
        broken = [g for g in guards if g is not None and g.broken and not g.closed]
        if not broken:
            _merge(recording)


# Functions of atexit are called in reverse, and that of `process_exit`, which may end
# the process, was registered when it was imported: so this runs before it, and after
# the ranks have met at their ends.
assert process_exit
atexit.register(_end_program)
