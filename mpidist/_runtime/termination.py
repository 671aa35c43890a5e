"""SIGTERM as an exception, so that `finally` blocks run when a job is ended.

Ctrl-C in a terminal reaches the launcher alone. MPICH's passes SIGINT on, of which
Python makes a KeyboardInterrupt. Open MPI's sends its ranks SIGTERM, and SIGKILL 0.25 s
later (PRRTE 3 and 4: ``odls_base_default_fns.c``), or as soon as one of them ends.
Batch systems send SIGTERM too. Python ends at once by SIGTERM, so this module has it
raise `Terminated`, a KeyboardInterrupt, in the main thread; waits for other ranks come
back to Python several times a second.

The handler is installed with the other hooks of `process_exit`, if SIGTERM still has
its default action: a program's own handler, and SIG_IGN, stay; not in an interactive
Python, which does not end by a KeyboardInterrupt; and not in a job whose ranks go on
when one is killed (`survival`).

In a forked child SIGTERM has its default action again. Python drops a signal that comes
between the fork and that, so it is blocked there: `Process.terminate` may be quick.

Launchers and batch systems often both send SIGTERM. A second one does not interrupt
what the first has begun: it is ignored as long as the exception of the first exists.

From the moment at which it is interrupted, Open MPI's mpirun prints nothing that ranks
write. `tell` therefore writes to the standard error of mpirun itself, if that is the
parent of this process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import stat
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

from mpidist._base import reporting
from mpidist._base.errors import CollectiveError
from mpidist._base.interactive import is_interactive
from mpidist._mpi import launcher, survival

# The processes of Open MPI's mpirun, by their name in ``/proc``.
_MPIRUN: Final = ("mpirun", "mpiexec", "prterun", "orterun")


class Terminated(KeyboardInterrupt):
    """This process got SIGTERM."""


_raised: Callable[[], Terminated | None] = lambda: None  # noqa: E731
_owner = 0  # the process that has installed the handler
_forking: Final = threading.local()  # its ``mask``: the signals blocked before a fork


def install() -> None:
    """Have SIGTERM raise `Terminated`, if nothing else handles it."""
    global _owner
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        and not is_interactive()
        and not survival.is_on()
    ):
        signal.signal(signal.SIGTERM, _raise)
        _owner = os.getpid()
        _watch_forks()


def remove() -> None:
    """Undo `install`; a handler that was installed over this one stays."""
    global _owner
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is _raise
    ):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _owner = 0


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(
        before=_block, after_in_parent=_unblock, after_in_child=_leave_to_child
    )


def _block() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _leave_to_child() -> None:
    remove()
    _unblock()


def _raise(number: int, frame: FrameType | None) -> None:
    global _raised
    # Removed, but kept by another handler; a forked child; or nobody catches it.
    if _owner != os.getpid() or _is_shutting_down(frame):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    elif _raised() is None:
        error = Terminated("SIGTERM")
        _raised = weakref.ref(error)
        try:
            raise error
        finally:
            del error  # the traceback has this frame: a cycle, which would stay


def _is_shutting_down(frame: FrameType | None) -> bool:
    """Return whether the program has ended, and Python waits for its threads.

    An exception would be printed, and ignored. A rank that was stopped is woken by the
    launcher that ends it, and may be anywhere.
    """
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return (
        frame is not None
        and frame.f_code.co_name == "_shutdown"
        and frame.f_globals.get("__name__") == "threading"
    )


def ignore() -> None:
    """Ignore SIGINT and SIGTERM from now on: this process ends by what follows."""
    with contextlib.suppress(ValueError):  # in another thread than the main one
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if signal.getsignal(signal.SIGTERM) is _raise:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def cause_of(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interrupt by which a program ends; None if it ends by something else.

    Collective calls in a `finally` block fail, since the other ranks were interrupted
    elsewhere: their errors do not count.

    Args:
        error: an uncaught exception.
    """
    while isinstance(error, CollectiveError):
        error = error.__cause__ or error.__context__
    return error if isinstance(error, KeyboardInterrupt) else None


def came_from_launcher(error: KeyboardInterrupt) -> bool:
    """Return whether it is not the Ctrl-C of a terminal in which Python was started."""
    return isinstance(error, Terminated) or launcher.find_launch() is not None


def exit_code(error: KeyboardInterrupt) -> int:
    """Return the code that a shell reports for the signal: 130 or 143."""
    number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
    return 128 + number


def describe(error: KeyboardInterrupt) -> str:
    """Return what the user is told."""
    return "ended by SIGTERM" if isinstance(error, Terminated) else "interrupted"


def tell(text: str, error: KeyboardInterrupt) -> None:
    """Write to standard error; to mpirun's own, if it prints nothing any more."""
    if not isinstance(error, Terminated) or not _tell_by_mpirun(text):
        reporting.write_stderr(text)


def _tell_by_mpirun(text: str) -> bool:
    """Write to the standard error of Open MPI's mpirun; return whether that will do.

    On other hosts the parent is a daemon. If it is a file, mpirun writes its next line
    over this one; then it also prints what ranks write.
    """
    launch = launcher.find_launch()
    parent = Path(f"/proc/{os.getppid()}")
    if launch is None or launch.launcher != launcher.OPEN_MPI:
        return False
    try:
        if (parent / "comm").read_text().strip() not in _MPIRUN:
            return False
        with open(parent / "fd/2", "a", encoding="utf-8") as file:
            file.write(text)
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        flags = re.search(r"flags:\s*(\d+)", (parent / "fdinfo/2").read_text())
    except OSError:
        return False
    return not is_file or (flags is not None and bool(int(flags[1], 8) & os.O_APPEND))
