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
lost (`exit_code`): it ends with 0.

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

A daemon thread that is in a call when the program ends never returns from it, or raises
because this rank, or another, has left. Both end the job. Such a thread may wait for
its turn to tell, so the end of the program waits for it; and a second for the threads
that have used a strategy, as one may just have failed, and not have come to its hook.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any, Final

from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call
from mpidist._agreement.sections import leave_program
from mpidist._base import hints, reporting, threads
from mpidist._base.errors import CollectiveTimeoutError, format_exception
from mpidist._mpi import library, survival
from mpidist._runtime import context, exit_code, job_end, termination

_LEAVING: Final = Call("nothing more: its program has ended")
_FINALIZE_SECONDS: Final = 30


def _replace(
    module: ModuleType, name: str, replacement: Callable[..., Any]
) -> Callable[[], None]:
    """Replace a function of a module; return what undoes it.

    If another hook replaced it since, that one stays, and calls the original.

    Args:
        module: the module.
        name: the name of the function.
        replacement: called with the original function, then its arguments.
    """
    previous, active = getattr(module, name), True

    @functools.wraps(previous)
    def hook(*args: Any) -> Any:
        return replacement(previous, *args) if active else previous(*args)

    def undo() -> None:
        nonlocal active
        active = False
        if getattr(module, name) is hook:
            setattr(module, name, previous)

    setattr(module, name, hook)
    return undo


_Function = Callable[[], Any]
_last_calls: Final[threads.ReplicaLocal[list[_Function]]] = threads.ReplicaLocal(list)
_hooks: list[Callable[[], None]] = []  # what undoes them
_making = False  # a strategy is being created, or creating it has failed
# That of this process, if a function of `before_end` has failed, or by a signal, if it
# is the only one of a job.
_code_at_end = 0


def install() -> None:
    """Install the hooks, unless they are installed: a strategy is being created."""
    global _making
    _making = True
    if _hooks:
        return
    exit_code.note(None)
    _hooks.append(_replace(sys, "excepthook", _end_program))
    _hooks.append(_replace(threading, "excepthook", _end_thread))
    _hooks.append(_replace(sys, "exit", _exit))
    termination.install()
    atexit.register(_leave)


def watch(guard: Guard, *, waits: bool) -> None:
    """Keep the hooks for a strategy that was created.

    Args:
        guard: the guard of the strategy.
        waits: whether this process waits at its end for those of the other ranks.
    """
    global _making
    if threads.current() is None:
        _making = False
        if waits and job_end.rank_of_job() is not None:
            reporting.start()
        job_end.tell_launcher(job_end.BEGUN)
    job_end.guards.get()[guard] = waits


def forget(guard: Guard) -> None:
    """Undo `watch`: the strategy was closed. Remove the hooks with the last one."""
    not_before_end(guard.settle)
    not_before_end(guard.raise_failure)
    guards = job_end.guards.get()
    if guards.pop(guard, None) is None or guards or _making:
        return
    if threads.current() is not None:  # replicas as threads have no hooks
        return
    if survival.is_on():  # `_end` may have to end the process, and needs its exit code
        return
    while _hooks:
        _hooks.pop()()
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


def _make_last_calls() -> None:
    """Call the functions of `before_end`, each once, also if one of them raises."""
    functions, raised = _last_calls.get(), []
    while functions:
        try:
            functions.pop(0)()
        except (Exception, SystemExit) as error:
            raised.append(error)
    # That another rank has left says less than an error of this one.
    errors = [error for error in raised if isinstance(error, Exception)] or raised
    for other in errors[1:]:
        text = format_exception(other)
        errors[0].add_note(f"And another one at the end of the program:\n{text}")
    if errors:
        raise errors[0]


def _call_last() -> None:
    global _code_at_end
    try:
        _make_last_calls()
    except SystemExit as error:  # of a rank that has left; this one leaves with it
        _code_at_end = exit_code.as_number(error.code)
    except BaseException as error:
        _code_at_end = 1
        about = type(error), error, error.__traceback__
        if _hooks or job_end.rank_of_job() is None:
            _end_program(sys.__excepthook__, *about)
        else:
            sys.__excepthook__(*about)


def become_child() -> None:
    """Have this process, which a rank has forked, end by itself."""
    exit_code.note(None)
    if not _hooks:
        _hooks.append(_replace(sys, "excepthook", _end_program))
        _hooks.append(_replace(sys, "exit", _exit))


def end_at_deadline(error: Exception) -> None:
    """End the job now, since this rank has waited too long. Does not return.

    With ``MPIDIST_TIMEOUT_ABORT=1``, in place of an exception, which a program may
    catch, or which may never leave it: a rank that cleans up can wait for another.
    """
    rank = library.world_rank()
    if rank is not None:
        job_end.end_job(rank, error, "", None, waits=False)


def _end_program(
    previous: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """End the job because of an uncaught exception."""
    global _code_at_end
    hints.add_hint(error)
    rank = job_end.rank_of_job()
    interrupt = termination.cause_of(error)
    if rank is None:
        exit_code.note(1 if interrupt is None else termination.exit_code(interrupt))
        # As for a program without MPI, if Ctrl-C came from a terminal.
        if interrupt is not None and termination.came_from_launcher(interrupt):
            _code_at_end = termination.exit_code(interrupt)
            line = f"mpidist: {termination.describe(interrupt)}\n"
            termination.tell(line, interrupt)
        else:
            previous(kind, error, trace)
        return
    if interrupt is not None:
        job_end.end_interrupted(rank, interrupt)
    own = previous is sys.__excepthook__
    show = None if own else functools.partial(previous, kind, error, trace)
    job_end.end_job(rank, error.with_traceback(trace), "", show)


def _end_thread(
    previous: Callable[..., Any], args: threading.ExceptHookArgs, /
) -> None:
    """End the job because of an exception in a thread that has used a strategy."""
    rank, error = job_end.rank_of_job(), args.exc_value
    if error is not None:
        hints.add_hint(error)
    # This runs in the thread. If it ends by sys.exit, other ranks need not know.
    if rank is None or not isinstance(error, Exception) or not context.was_used():
        previous(args)
        return
    own = previous is threading.__excepthook__
    show = None if own else functools.partial(previous, args)
    name = "" if args.thread is None else f" in thread {args.thread.name!r}"
    job_end.end_job(rank, error.with_traceback(args.exc_traceback), name, show)


def _exit(previous: Callable[..., Any], status: Any = None, /) -> None:
    """Note the exit code, for the ranks that wait for this one."""
    exit_code.note(0 if status is None and library.is_forbidden() else status)
    previous(status)


def _leave() -> None:
    """Wait until all ranks of all strategies have reached their end."""
    rank = library.world_rank()
    if rank is None:
        return
    _call_last()  # also if this was registered after it
    others = context.other_users()
    try:
        job_end.let_threads_end()
        leave(exit_code.noted)
        # This rank's end, or another's, has ended a call of theirs.
        job_end.let_threads_end(others)
    except KeyboardInterrupt as interrupt:
        if job_end.rank_of_job() is None:
            raise
        job_end.end_interrupted(rank, interrupt)
    except CollectiveTimeoutError as error:
        # Without a traceback: the frames of an atexit function tell a user nothing.
        job_end.end_job(rank, error.with_traceback(None), "", None, waits=False)
    except Exception as error:  # another thread is in a call, for example
        if job_end.rank_of_job() is None:
            raise
        job_end.let_threads_end()
        where = " at the end of its program"
        job_end.end_job(rank, error.with_traceback(None), where, None, waits=False)


def leave(code: Any) -> None:
    """Wait for the end of the other replicas of all strategies of this one.

    Args:
        code: the argument of `sys.exit`; None: this one has reached its end.

    Raises:
        CollectiveTimeoutError: at the deadline.
    """
    _make_last_calls()
    guards = job_end.guards.get()
    waiting = [guard for guard, waits in guards.items() if waits]
    job_end.wait_for([leave_program(guard, _LEAVING, code) for guard in waiting])
    # Also if all others have come to their ends: they wait for this one's.
    job_end.wait_for([one.wait_for_ends() for one in job_end.gave_up()])


def _end() -> None:
    """End without MPI_Finalize if it might hang for a lost rank, or is not ours."""
    termination.remove()  # Python handles no signal in MPI_Finalize, which may be long
    is_rank = library.world_rank() is not None
    misses = any(one.misses_ranks for one in job_end.breakdowns())
    finalizes = False
    if not library.is_forbidden():
        job_end.tell_launcher()
        finalizes = bool(_code_at_end)
        if not (finalizes or misses or (is_rank and survival.end())):
            if is_rank and survival.is_on():
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(_FINALIZE_SECONDS)
            if not reporting.is_stuck():
                return
            finalizes = True
    _flush()
    if misses:
        job_end.tell_launcher(job_end.GAVE_UP)
    code = exit_code.as_number(exit_code.noted) or _code_at_end
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
        reporting.flush_streams()


atexit.register(_end)  # so early that it runs after the functions of users
