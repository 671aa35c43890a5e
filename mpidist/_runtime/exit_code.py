"""The exit code of this process, for which Python has no hook.

Ranks that wait for one that leaves should leave with the same exit code, which often
tells something to a job script. No hook is called for SystemExit, and when atexit
functions run, the exception, its traceback and its frames no longer exist. So
`process_exit` replaces `sys.exit` by a function that notes the code here. This misses
``raise SystemExit(code)``, and ``from sys import exit`` before the strategy was
created; the waiting ranks then raise CollectiveMismatchError, and the job ends with
code 1. A thread's sys.exit ends only that thread, and its code is not noted. The code
of a SystemExit that is caught stays noted: it counts if the rank then leaves early, or
ends without MPI_Finalize (`process_exit`).

Rejected: an audit hook (there is no event for sys.exit, and it cannot be removed);
keeping the SystemExit, to see at the end how far it came (its traceback keeps the
frames, and so all arrays of a program that has caught it); reading the byte code of
the outermost frame, of which Python does not promise where an ended frame points.
"""

from __future__ import annotations

import threading
from typing import Any

noted: Any = None
"""What was noted; None: nothing, so the program has not called sys.exit."""


def note(code: Any) -> None:
    """Note the argument of a `sys.exit`; 1 for an uncaught exception; None: nothing."""
    global noted
    if threading.current_thread() is threading.main_thread():
        noted = code


def as_number(code: Any) -> int:
    """Return the number that the argument of a `sys.exit` stands for."""
    if code is not None and not isinstance(code, int):
        return 1  # a text, which was printed
    return (code or 0) & 0xFF
