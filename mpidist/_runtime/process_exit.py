"""What happens to the job when one of its processes ends, normally or by an error.

MPI has no rule for a process that ends early: the others wait for it forever.
Therefore, while a process has an `MPIStrategy`,

- an uncaught exception prints its traceback, with the rank, and aborts the job. This
  includes an exception that ends a thread, if that thread has used a strategy;
- a process that reaches its end waits for the others to reach theirs (as MPI_Finalize
  would). A rank that still waits in a collective learns that this one has left, and
  whether by `sys.exit(code)` or by finishing;
- Ctrl-C and SIGTERM (`termination`) are a KeyboardInterrupt, so `finally` blocks run.
  Launchers end a job when one of its processes ends: so a rank that has run its own
  waits a while for those of the others. One of them prints a line;
- a process that has given up on a rank (`CollectiveTimeoutError`) can still save and
  end with its own exit code. MPI_Finalize and MPI_Abort may then wait forever for the
  lost rank. So the process waits for the ends of the ranks that still respond, and
  briefly for all. If some do not respond, it ends without MPI_Finalize, after all
  `atexit` handlers that were registered after the import of mpidist.

``MPIDIST_ABORT=0`` turns all of this off.

In a job that outlives its processes (`mpidist._mpi.survival`) MPI_Finalize may hang
once one has died (seen in two of thirty jobs, Open MPI 5.0.11). So there the processes
agree at their ends whether all of them live, and end without it if not. One can also
die after that: a process that is not at the end of MPI_Finalize after half a minute is
ended by SIGALRM, which the launcher takes for one more that has died.

A process that a rank has forked (`forked_child`) ends by itself, and without
MPI_Finalize, which would wait for the other ranks, or break the connections that it has
in common with its parent. mpi4py calls it after all `atexit` handlers, and there is no
way to tell it not to, so the process ends in the last of these: with the code of its
`sys.exit`, or 1 after an uncaught exception. The code of ``raise SystemExit(code)`` is
lost: it is 1 if the outermost frame did not end by a return (`exit_code`).

The hooks are `sys.excepthook`, `threading.excepthook`, `sys.exit` and an atexit
function. They are installed when the first strategy is created, and removed when the
last one is closed. They stay if creating the first one failed, or if a strategy is
broken: one rank still has to show that exception. A hook that was there before is
called if it is not Python's own; it then shows the exception. A hook that was
installed over ours stays, and ours then does nothing.

Which exceptions of threads end the job. Python prints them and continues, which is
right for a thread that draws a progress bar. But a thread that has been in the scope
of a strategy, or in a call of one, is the thread in which the program makes its
collective calls (one thread at a time does): the other ranks wait for its next call,
which does not come. They would learn of it only by the deadline, half an hour later.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType
from typing import Any, Final, NoReturn

from mpidist._agreement import program_end
from mpidist._agreement.breakdown import Breakdown, State
from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call
from mpidist._base import hints, reporting, threads
from mpidist._base.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    RemoteTraceback,
    ReplicaLostError,
    format_exception,
)
from mpidist._mpi import library, survival
from mpidist._runtime import context, exit_code, termination

ENDED_FILE: Final = "MPIDIST_ENDED_FILE"
"""The environment variable with the path of a file that a rank creates at its end."""
BEGUN: Final = ".begun"
"""What follows in the path of a file that a rank creates with its first strategy."""
_LEAVING: Final = Call("nothing more: this rank has left the program")
_ENDED: Final = object()
# The rank that failed prints and aborts. The others, which raise because of it, wait
# for that, so that the user sees one traceback.
_OTHERS_FIRST_SECONDS: Final = 3.0
# Long enough for the first rank that aborts to end the others, also on a busy machine.
_TURN_SECONDS: Final = 0.4
_OTHERS_TURN_SECONDS: Final = 1.0
_FORWARD_SECONDS: Final = 0.3
# How long the text of an uncaught exception may take if nobody reads standard error.
_TELL_SECONDS: Final = 5.0
# How long a rank that was interrupted waits for the `finally` blocks of the others; and
# then for the end by a launcher that interrupts all, or for the line of another.
_CLEAN_UP_SECONDS: Final = 5.0
_INTERRUPT_SECONDS: Final = 1.0
_ABORT_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.001
_FINALIZE_SECONDS: Final = 30


class _Hook:
    """A function of a module that is replaced until `remove` is called.

    Args:
        module: the module.
        name: the name of the function.
        replacement: called with the original function, then its arguments.
    """

    def __init__(
        self, module: ModuleType, name: str, replacement: Callable[..., Any]
    ) -> None:
        self._module, self._name = module, name
        self._previous = previous = getattr(module, name)
        self._active = True

        @functools.wraps(previous)
        def call(*args: Any) -> Any:
            if self._active:
                return replacement(previous, *args)
            return previous(*args)

        self._own = call
        setattr(module, name, call)

    def remove(self) -> None:
        """Restore the original; only disable this hook if another one replaced it."""
        self._active = False
        if getattr(self._module, self._name) is self._own:
            setattr(self._module, self._name, self._previous)


# The guards of all strategies, and whether their ranks wait for each other at the end.
_guards: Final[threads.ReplicaLocal[dict[Guard, bool]]] = threads.ReplicaLocal(dict)
_Function = Callable[[], Any]
_last_calls: Final[threads.ReplicaLocal[list[_Function]]] = threads.ReplicaLocal(list)
_hooks: list[_Hook] = []
_making = False  # a strategy is being created, or creating it has failed
_ended_by_signal = False  # the only process of a job
_failed_at_end = False  # a function of `before_end` has
_has_begun = False  # a strategy has been made


def install() -> None:
    """Install the hooks, unless they are installed: a strategy is being created."""
    global _making
    _making = True
    if _hooks:
        return
    exit_code.begin()
    _hooks.append(_Hook(sys, "excepthook", _end_program))
    _hooks.append(_Hook(threading, "excepthook", _end_thread))
    _hooks.append(_Hook(sys, "exit", _exit))
    termination.install()
    atexit.register(_leave)


def watch(guard: Guard, *, waits: bool) -> None:
    """Keep the hooks for a strategy that was created.

    Args:
        guard: the guard of the strategy.
        waits: whether this process waits at its end for those of the other ranks.
    """
    global _making, _has_begun
    if threads.current() is None:
        _making = False
        if waits and _rank_of_job() is not None:
            reporting.start()
        _has_begun = True
        _tell_launcher(BEGUN)
    _guards.get()[guard] = waits


def _breakdowns() -> list[Breakdown]:
    return [guard.breakdown for guard in _guards.get()]


def forget(guard: Guard) -> None:
    """Undo `watch`: the strategy was closed. Remove the hooks with the last one."""
    guards = _guards.get()
    if guards.pop(guard, None) is None or guards or _making:
        return
    if threads.current() is not None:  # replicas as threads have no hooks
        return
    if survival.is_on():  # `_end` may have to end the process, and needs its exit code
        return
    while _hooks:
        _hooks.pop().remove()
    termination.remove()
    atexit.unregister(_leave)


def before_end(function: Callable[[], Any]) -> None:
    """Have a function called before this process waits for the ends of the others.

    What it raises ends the job like an uncaught exception.
    """
    _last_calls.get().append(function)
    if threads.current() is None:
        atexit.unregister(_call_last)
        atexit.register(_call_last)  # before `_leave`: the last one is the first


def not_before_end(function: Callable[[], Any]) -> None:
    """Undo `before_end`."""
    if function in _last_calls.get():
        _last_calls.get().remove(function)


def _call_last() -> None:
    global _failed_at_end
    try:
        for function in list(_last_calls.get()):
            function()
    except BaseException as error:
        _failed_at_end = True
        _end_program(sys.__excepthook__, type(error), error, error.__traceback__)


def become_child() -> None:
    """Have this process, which a rank has forked, end by itself."""
    exit_code.begin()
    if not _hooks:
        _hooks.append(_Hook(sys, "excepthook", _end_program))
        _hooks.append(_Hook(sys, "exit", _exit))


def end_at_deadline(error: CollectiveTimeoutError) -> None:
    """End the job now, since this rank has waited too long. Does not return.

    With ``MPIDIST_TIMEOUT_ABORT=1``, in place of an exception, which a program may
    catch, or which may never leave it: a rank that cleans up can wait for another.
    """
    rank = library.world_rank()
    if rank is not None:
        _end_job(rank, error, "", None, waits=False)


def _rank_of_job() -> int | None:
    """Return this process's rank; None if no other could wait for it."""
    return None if library.world_size() == 1 else library.world_rank()


def _end_program(
    previous: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """End the job because of an uncaught exception."""
    global _ended_by_signal
    hints.add_hint(error)
    rank = _rank_of_job()
    interrupt = termination.cause_of(error)
    if rank is None:
        exit_code.note(1 if interrupt is None else termination.exit_code(interrupt))
        # As for a program without MPI, if Ctrl-C came from a terminal.
        if interrupt is not None and termination.came_from_launcher(interrupt):
            _ended_by_signal = True
            line = f"mpidist: {termination.describe(interrupt)}\n"
            termination.tell(line, interrupt)
        else:
            previous(kind, error, trace)
        return
    if interrupt is not None:
        _end_interrupted(rank, interrupt)
    show = None
    if previous is not sys.__excepthook__:
        show = lambda: previous(kind, error, trace)  # noqa: E731
    _end_job(rank, error.with_traceback(trace), "", show)


def _end_thread(
    previous: Callable[..., Any], args: threading.ExceptHookArgs, /
) -> None:
    """End the job because of an exception in a thread that has used a strategy."""
    rank, error = _rank_of_job(), args.exc_value
    if error is not None:
        hints.add_hint(error)
    # This runs in the thread. If it ends by sys.exit, other ranks need not know.
    if rank is None or not isinstance(error, Exception) or not context.was_used():
        previous(args)
        return
    show = None
    if previous is not threading.__excepthook__:
        show = lambda: previous(args)  # noqa: E731
    name = "" if args.thread is None else f" in thread {args.thread.name!r}"
    _end_job(rank, error.with_traceback(args.exc_traceback), name, show)


def _exit(previous: Callable[..., Any], status: Any = None, /) -> None:
    """Note the exit code, for the ranks that wait for this one."""
    exit_code.note(0 if status is None and library.is_forbidden() else status)
    previous(status)


def _end_job(
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
    # Ctrl-C reaches ranks one after the other: this one may already be here because of
    # another, and ends by what follows in any case.
    termination.ignore()
    because_of_others = waits and (
        (
            isinstance(error, CollectiveError)
            and not isinstance(error, ReplicaLostError)  # who began it is dead
        )
        or isinstance(error.__cause__, RemoteTraceback)
    )
    if because_of_others:
        _let_others_first()
    # Several ranks may fail at once: the lowest one prints, and ends the job.
    turn = _OTHERS_TURN_SECONDS if because_of_others else _TURN_SECONDS
    time.sleep(turn * (1 + min(rank, 4)) if rank else 0.0)
    if because_of_others and _has_another_told():
        _abort(1, silently=True)
    text = f"mpidist: rank {rank} raised an exception{where}, ending the job:\n"
    if show is None:
        text += format_exception(error)

    def tell() -> None:
        # Not with `logging`: the text must be written before MPI_Abort ends the
        # process, and a handler may buffer it, or be off.
        sys.stdout.flush()
        sys.stderr.flush()
        reporting.write_stderr(text)

    reporting.write(tell, _TELL_SECONDS)
    if show is not None and not reporting.is_stuck():
        with contextlib.suppress(Exception, SystemExit):
            show()  # in this thread: it may be a debugger
            sys.stderr.flush()
    _note_told()
    # MPICH's launcher forwards nothing after it learns of the abort: give it time.
    time.sleep(_FORWARD_SECONDS)
    _abort(1)


def _has_another_told() -> bool:
    """Whether another rank has printed why the job ends, and is about to end it."""
    with contextlib.suppress(Exception):
        for one in _breakdowns():
            if one.gave_up:
                one.read_notices()
                if one.notices.is_told:
                    return True
    return False


def _note_told() -> None:
    """Tell ranks that have given up as well that the user knows why the job ends."""
    with contextlib.suppress(Exception):
        for one in _breakdowns():
            if one.gave_up:
                one.post_end("told")


def _let_others_first() -> None:
    """Wait for the end of the job by the rank that has made this one raise."""
    start = time.monotonic()
    broken = [one for one in _breakdowns() if one.misses_ranks]
    _wait_for([one.wait_for_ends(_OTHERS_FIRST_SECONDS) for one in broken])
    wait = _OTHERS_FIRST_SECONDS
    if any(one.notices.interrupted for one in broken):
        wait += _CLEAN_UP_SECONDS + _INTERRUPT_SECONDS
    time.sleep(max(0.0, start + wait - time.monotonic()))


def _end_interrupted(rank: int, error: KeyboardInterrupt) -> NoReturn:
    """End the job after Ctrl-C or SIGTERM, when all ranks have cleaned up."""
    termination.ignore()
    # If another thread makes the calls of this rank, it may be in the middle of one.
    breakdowns = _breakdowns() if context.was_used() else []
    for one in breakdowns:
        one.abandon("the program", error)
    _wait_for(
        [one.wait_for_ends(_CLEAN_UP_SECONDS, "interrupted") for one in breakdowns]
    )
    tells = all(one.notices.tells_user for one in breakdowns)

    def tell() -> None:
        sys.stdout.flush()
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
    lost = any(one.misses_ranks or one.state is State.LOST for one in _breakdowns())
    if lost or survival.is_on():
        # MPI_Abort may wait for the lost rank, and keeps Python from running.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(_ABORT_SECONDS, exit=True, file=nowhere)
    library.abort(code)
    os._exit(code)  # MPICH's MPI_Abort may return before the launcher ends the process


def _leave() -> None:
    """Wait until all ranks of all strategies have reached their end."""
    rank = library.world_rank()
    if rank is None:
        return
    try:
        leave(exit_code.noted())
    except KeyboardInterrupt as interrupt:
        if _rank_of_job() is None:
            raise
        _end_interrupted(rank, interrupt)
    except CollectiveTimeoutError as error:
        # Without a traceback: the frames of an atexit function tell a user nothing.
        _end_job(rank, error.with_traceback(None), "", None, waits=False)


def leave(code: Any) -> None:
    """Wait for the end of the other replicas of all strategies of this one.

    Args:
        code: the argument of `sys.exit`; None: this one has reached its end.

    Raises:
        CollectiveTimeoutError: at the deadline.
    """
    for function in list(_last_calls.get()):
        function()
    guards = _guards.get()
    _wait_for(
        [
            program_end.leave(guard, _LEAVING, code)
            for guard, waits in guards.items()
            if waits
        ]
    )
    # Also if all others have come to their ends: they wait for this one's.
    _wait_for([one.wait_for_ends() for one in _breakdowns() if one.gave_up])


def _end() -> None:
    """End without MPI_Finalize if it might hang for a lost rank, or is not ours."""
    termination.remove()  # Python handles no signal in MPI_Finalize, which may be long
    if not library.is_forbidden():
        _tell_launcher()
    finalizes = (_ended_by_signal or _failed_at_end) and not library.is_forbidden()
    if not finalizes and not (
        library.is_forbidden()
        or any(one.misses_ranks for one in _breakdowns())
        or (library.world_rank() is not None and survival.end())
    ):
        if library.world_rank() is not None and survival.is_on():
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_FINALIZE_SECONDS)
        if not reporting.is_stuck():
            return
        finalizes = True
    _flush()
    code = 1 if _failed_at_end else exit_code.of_process()
    if finalizes:
        library.finalize_and_exit(code)
    os._exit(code)


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    # A report that is stuck has the locks of its handler, and of standard error.
    if not reporting.is_stuck():
        with contextlib.suppress(Exception):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()


def _tell_launcher(what: str = "") -> None:
    """Tell `mpidist run` how far a rank has come; to its end: it was not killed."""
    path = os.environ.get(ENDED_FILE)
    # The program may have ended MPI itself.
    if path and (library.world_rank() is not None or _has_begun):
        with contextlib.suppress(OSError), open(path + what, "w", encoding="utf-8"):
            pass


atexit.register(_end)  # so early that it runs after the functions of users


def _wait_for(waits: list[Iterator[None]]) -> None:
    """Advance waits in turn until all have ended: ranks may wait in another order."""
    while waits := [wait for wait in waits if next(wait, _ENDED) is None]:
        time.sleep(_PAUSE_SECONDS)
