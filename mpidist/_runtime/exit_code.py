"""The exit code of this process, for which Python has no hook.

Ranks that wait for one that leaves should leave with the same exit code, which often
tells something to a job script. No hook is called for SystemExit, and when atexit
functions run, the exception, its traceback and its frames no longer exist. So
`process_exit` replaces `sys.exit` by a function that notes the code here. This misses
``raise SystemExit(code)``, and ``from sys import exit`` before the strategy was
created; the waiting ranks then raise CollectiveMismatchError, and the job ends with
code 1. A thread's sys.exit ends only that thread, and its code is not noted. The code
of a SystemExit that is caught stays noted: it counts if the rank then leaves early.

Rejected: an audit hook (there is no event for sys.exit, and it cannot be removed);
keeping the SystemExit, to see at the end how far it came (its traceback keeps the
frames, and so all arrays of a program that has caught it).
"""

from __future__ import annotations

import dis
import sys
import threading
from types import FrameType
from typing import Any

_noted: Any = None
_outermost: FrameType | None = None  # of the program


def begin() -> None:
    """Forget what was noted, and note the outermost frame of the program."""
    global _noted, _outermost
    _noted = None
    if threading.current_thread() is threading.main_thread():
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
        _outermost = frame


def note(code: Any) -> None:
    """Note the argument of a `sys.exit`; or 1, of an uncaught exception."""
    global _noted
    if threading.current_thread() is threading.main_thread():
        _noted = code


def noted() -> Any:
    """Return what was noted; None: nothing, so the program has not called sys.exit."""
    return _noted


def of_process() -> int:
    """Return the code with which this process is to end, at its end."""
    code = _noted
    raised = _was_raised()
    if raised is False:
        code = 0  # a `sys.exit` before was caught
    elif raised and code is None:
        code = 1  # of an exception, or a SystemExit that was not made by `sys.exit`
    return as_number(code)


def as_number(code: Any) -> int:
    """Return the number that the argument of a `sys.exit` stands for."""
    if code is not None and not isinstance(code, int):
        return 1  # a text, which was printed
    return (code or 0) & 0xFF


def _was_raised() -> bool | None:
    """Return whether the program has ended by an exception; None: it is not known."""

    def returns() -> FrameType:
        return sys._getframe()

    # A frame that has ended shows its last instruction: a return, unless an exception
    # ended it. CPython does not promise that, so it is tried with a frame that returns.
    if _outermost is None or not _ended_by_return(returns()):
        return None
    return not _ended_by_return(_outermost)


def _ended_by_return(frame: FrameType) -> bool:
    instruction = frame.f_code.co_code[frame.f_lasti]
    return dis.opname[instruction].startswith("RETURN")
