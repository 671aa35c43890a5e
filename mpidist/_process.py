"""What happens to the job when one of its processes ends, well or badly.

MPI has no rule for a process that ends early: the others wait for it for ever. So,
from the first `MPIStrategy` on,

- an uncaught exception prints its traceback, with the rank, and aborts the job;
- a process that reaches its end waits for the others' (as MPI_Finalize would), and a
  rank that still waits in a collective learns that this one has left: by
  `sys.exit(code)`, or by finishing.

``MPIDIST_ABORT=0`` turns both off.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final

from mpidist import _comm
from mpidist._errors import CollectiveError, RemoteTraceback, format_exception
from mpidist._guard import Guard
from mpidist._reports import Call

_LEAVING: Final = Call("nothing more: this rank has left the program")
_SHORT: Final = 0.0005
_LONG: Final = 0.02
# The rank that failed prints and aborts; the others, which raise because of it, wait
# for that, so that a person reads one traceback.
_OTHERS_FIRST_SECONDS: Final = 1.5
_TURN_SECONDS: Final = 0.2
_FORWARD_SECONDS: Final = 0.3
_INTERRUPTED: Final = 130  # what a shell reports after Ctrl-C

_guards: list[Guard] = []
_process_id = 0
_exit_code: Any = None
_installed = False


def watch(guard: Guard) -> None:
    """Have the end of this process wait for the ranks of ``guard``."""
    _guards.append(guard)


def forget(guard: Guard) -> None:
    """Stop that: the strategy was closed."""
    with contextlib.suppress(ValueError):
        _guards.remove(guard)


def install() -> None:
    """Install the hooks, once."""
    global _installed, _process_id
    if _installed:
        return
    _installed = True
    _process_id = os.getpid()
    previous_hook = sys.excepthook
    previous_exit = sys.exit

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        rank = None if _is_child() else _comm.world_rank()
        if rank is None or _comm.world_size() == 1:
            previous_hook(kind, error, trace)
            return
        _end_job(rank, kind, error, trace)

    def exit_and_remember(status: Any = None, /) -> None:
        # An atexit handler can not see the exit code; the ranks that wait for this
        # one shall leave with the same. `raise SystemExit` is not seen here: those
        # ranks then raise CollectiveMismatchError instead.
        global _exit_code
        _exit_code = status
        previous_exit(status)

    sys.excepthook = excepthook
    sys.exit = exit_and_remember  # type: ignore[assignment]
    atexit.register(_leave)


def _is_child() -> bool:
    """Whether this is a fork of the rank, such as a data loader: not MPI's business."""
    return os.getpid() != _process_id


def _end_job(
    rank: int,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        text = f"mpidist: rank {rank}: interrupted\n"
        code = _INTERRUPTED
    else:
        because_of_others = isinstance(error, CollectiveError) or isinstance(
            error.__cause__, RemoteTraceback
        )
        wait = _OTHERS_FIRST_SECONDS if because_of_others else 0.0
        # Several ranks may fail at once: the lowest prints, and ends the job.
        time.sleep(wait + (_TURN_SECONDS * (1 + min(rank, 4)) if rank else 0.0))
        lines = format_exception(error.with_traceback(trace))
        text = f"mpidist: rank {rank} raised an exception, ending the job:\n{lines}"
        code = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
    # MPICH's launcher forwards no more once it learns of the abort: give it time.
    time.sleep(_FORWARD_SECONDS)
    _comm.abort(code)


def _leave() -> None:
    """Wait until all ranks of all strategies have come to their end."""
    if _is_child() or _comm.world_rank() is None:
        return
    waiting: list[Iterator[None]] = [
        guard.leave(_LEAVING, _exit_code) for guard in _guards
    ]
    start = time.monotonic()
    while waiting:
        for leaving in list(waiting):
            try:
                next(leaving)
            except StopIteration:
                waiting.remove(leaving)
        if waiting:
            time.sleep(_SHORT if time.monotonic() - start < 1.0 else _LONG)
