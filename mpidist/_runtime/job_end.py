"""How a rank ends the whole job: after an exception, or Ctrl-C; see `process_exit`.

The rank that failed prints why, and aborts. Those that raise because of it wait for
that, and the others that fail too have turns, so that the user sees one traceback.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from mpidist._agreement.breakdown import Breakdown, State
from mpidist._agreement.guard import Guard
from mpidist._base import reporting, threads
from mpidist._base.errors import (
    CollectiveError,
    RemoteTraceback,
    ReplicaLostError,
    format_exception,
)
from mpidist._mpi import library, survival
from mpidist._runtime import context, termination

ENDED_FILE: Final = "MPIDIST_ENDED_FILE"
"""The environment variable with the path of a file that a rank creates at its end."""
BEGUN: Final = ".begun"
"""What follows in the path of a file that a rank creates with its first strategy."""
GAVE_UP: Final = ".gave-up"
"""The same of one that a rank creates before it ends the job, or without the others."""

# Removed from the environment: a job that this rank starts is not the launcher's.
_launchers_file: Final = os.environ.pop(ENDED_FILE, "")
_ENDED: Final = object()
# The rank that failed prints and aborts. The others, which raise because of it, wait
# for that, so that the user sees one traceback.
_OTHERS_FIRST_SECONDS: Final = 3.0
# Long enough for the first rank that aborts to end the others, also on a busy machine.
_TURN_SECONDS: Final = 0.5
_OTHERS_TURN_SECONDS: Final = 1.0
_FORWARD_SECONDS: Final = 0.3
# How long the text of an uncaught exception may take if nobody reads standard error.
_TELL_SECONDS: Final = 5.0
# How long a rank whose text nobody reads waits for the turns of others that gave up.
_UNREAD_SECONDS: Final = 10.0
# How long a rank that was interrupted waits for the `finally` blocks of the others; and
# then for the end by a launcher that interrupts all, or for the line of another.
_CLEAN_UP_SECONDS: Final = 5.0
_INTERRUPT_SECONDS: Final = 1.0
_ABORT_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.001
# How long the end of a program waits for a thread that is ending the job, which takes
# less unless a hook of the user does not return; and for one that may be about to.
_THREAD_SECONDS: Final = 30.0
_UNWIND_SECONDS: Final = 1.0

_ending: Final = threading.Event()  # a thread is in `end_job`
# The guards of all strategies, and whether their ranks wait for each other at the end.
guards: Final[threads.ReplicaLocal[dict[Guard, bool]]] = threads.ReplicaLocal(dict)


def rank_of_job() -> int | None:
    """Return this process's rank; None if no other could wait for it."""
    return None if library.world_size() == 1 else library.world_rank()


def breakdowns() -> list[Breakdown]:
    """Return the `Breakdown` of each strategy of this process."""
    return [guard.breakdown for guard in guards.get()]


def gave_up() -> list[Breakdown]:
    """Return the `Breakdown` of each strategy that has given up on a rank."""
    return [one for one in breakdowns() if one.gave_up]


def tell_launcher(what: str = "") -> None:
    """Tell `mpidist run` how far this rank has come, by a file.

    Args:
        what: `BEGUN` or `GAVE_UP`; "": it ends by itself, and was not killed.
    """
    if _launchers_file:
        with contextlib.suppress(OSError):
            Path(_launchers_file + what).touch()


def wait_for(waits: list[Iterator[None]]) -> None:
    """Advance waits in turn until all have ended: ranks may wait in another order."""
    while waits := [wait for wait in waits if next(wait, _ENDED) is None]:
        time.sleep(_PAUSE_SECONDS)


def end_job(
    rank: int,
    error: BaseException,
    where: str,
    show: Callable[[], Any] | None,
    *,
    waits: bool = True,
) -> NoReturn:
    """Print an exception, and abort the job. Does not return.

    Args:
        rank: this rank.
        error: the exception.
        where: " in thread ..." if it is not the main thread's; otherwise "".
        show: prints it; None: print its traceback without mpidist's frames.
        waits: whether a rank that raises because of another first waits for that one.
    """
    _ending.set()
    # Ctrl-C reaches ranks one after the other: this one may already be here because of
    # another, and ends by what follows in any case.
    termination.ignore()
    because_of_others = waits and _is_because_of_others(error)
    if because_of_others:
        _let_others_first()
    # Several ranks may fail at once: the lowest that lives prints, and ends the job.
    lost = error.replicas if isinstance(error, ReplicaLostError) else ()
    place = rank - sum(replica < rank for replica in lost)
    turn = _OTHERS_TURN_SECONDS if because_of_others else _TURN_SECONDS
    time.sleep(turn * (1 + min(place, 4)) if place > 0 else 0.0)
    if because_of_others and _has_another_told():
        # The one that told ends the job, when its text is out: see `_FORWARD_SECONDS`.
        time.sleep(2 * _FORWARD_SECONDS)
        _abort(1, silently=True)
    text = f"mpidist: rank {rank} raised an exception{where}, ending the job:\n"
    if show is None:
        text += format_exception(error)

    def tell() -> None:
        # Not with `logging`: the text must be written before MPI_Abort ends the
        # process, and a handler may buffer it, or be off.
        reporting.flush_streams()
        reporting.write_stderr(text)

    reporting.write(tell, _TELL_SECONDS)
    if show is not None and not reporting.is_stuck():
        _show(show, error)
    if reporting.is_stuck() and gave_up():
        time.sleep(_UNREAD_SECONDS)  # until another, which may be read, ends the job
        _abort(1)
    _note_told()
    # MPICH's launcher forwards nothing after it learns of the abort: give it time.
    time.sleep(_FORWARD_SECONDS)
    _abort(1)


def _is_because_of_others(error: BaseException) -> bool:
    """Whether a rank that lives has told this one of an error."""
    is_lost = isinstance(error, ReplicaLostError)  # then who began it is dead
    of_all = isinstance(error, CollectiveError) and not is_lost
    return of_all or isinstance(error.__cause__, RemoteTraceback)


def _show(show: Callable[[], Any], error: BaseException) -> None:
    """Call the program's hook for an exception; if it fails, print the exception."""
    try:
        show()  # in this thread: it may be a debugger
    except SystemExit:
        pass  # a way to end a hook, as the next one is to end a debugger
    except Exception as failure:
        if not isinstance(failure, getattr(sys.modules.get("bdb"), "BdbQuit", ())):
            text = traceback.format_exc() + format_exception(error)
            reporting.write_stderr(text)
    reporting.flush_streams()


def let_threads_end(others: Sequence[threading.Thread] = ()) -> None:
    """Wait for a thread that is ending the job: the end of this one ends the process.

    Args:
        others: threads that may have failed just now.
    """
    stop = time.monotonic() + _UNWIND_SECONDS
    while not _ending.is_set() and time.monotonic() < stop:
        if not any(thread.is_alive() for thread in others):
            return
        time.sleep(_PAUSE_SECONDS)
    if _ending.is_set():
        time.sleep(_THREAD_SECONDS)


def _has_another_told() -> bool:
    """Whether another rank has printed why the job ends, and is about to end it."""
    with contextlib.suppress(Exception):
        for one in gave_up():
            one.read_notices()
            if one.notices.is_told:
                return True
    return False


def _note_told() -> None:
    """Tell ranks that have given up as well that the user knows why the job ends."""
    with contextlib.suppress(Exception):
        for one in gave_up():
            one.notices.post_end("told")


def _let_others_first() -> None:
    """Wait for the end of the job by the rank that has made this one raise."""
    start = time.monotonic()
    broken = [one for one in breakdowns() if one.misses_ranks]
    wait_for([one.wait_for_ends(_OTHERS_FIRST_SECONDS) for one in broken])
    wait = _OTHERS_FIRST_SECONDS
    if any(one.notices.interrupted for one in broken):
        wait += _CLEAN_UP_SECONDS + _INTERRUPT_SECONDS
    time.sleep(max(0.0, start + wait - time.monotonic()))


def end_interrupted(rank: int, error: KeyboardInterrupt) -> NoReturn:
    """End the job after Ctrl-C or SIGTERM, when all ranks have cleaned up."""
    termination.ignore()
    # If another thread makes the calls of this rank, it may be in the middle of one.
    own = breakdowns() if context.was_used() else []
    for one in own:
        one.abandon("the program", error)
    wait_for([one.wait_for_ends(_CLEAN_UP_SECONDS, "interrupted") for one in own])
    tells = all(one.notices.tells_user for one in own)

    def tell() -> None:
        reporting.flush_streams()
        if tells:
            line = f"mpidist: rank {rank}: {termination.describe(error)}\n"
            termination.tell(line, error)

    reporting.write(tell, _TELL_SECONDS)
    if tells:
        _note_told()
    # Open MPI's mpirun may be about to end all, and prints much about an abort.
    # MPICH's returns the code of the first rank: the one that has told the user.
    time.sleep(_INTERRUPT_SECONDS if tells else 2 * _INTERRUPT_SECONDS)
    _abort(termination.exit_code(error), silently=True)


def _abort(code: int, *, silently: bool = False) -> NoReturn:
    if silently or reporting.is_stuck():
        with contextlib.suppress(OSError):  # MPICH's MPI_Abort prints a line of its own
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    tell_launcher(GAVE_UP)
    lost = any(one.misses_ranks or one.state is State.LOST for one in breakdowns())
    if lost or survival.is_on():
        # MPI_Abort may wait for the lost rank, and keeps Python from running.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(_ABORT_SECONDS, exit=True, file=nowhere)
    library.abort(code)
    os._exit(code)  # MPICH's MPI_Abort may return before the launcher ends the process
