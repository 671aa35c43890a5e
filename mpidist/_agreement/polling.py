"""How a rank waits for MPI: it tests, then yields its core, then sleeps.

MPI makes progress only while it is called, so every wait is a loop of tests. `poll` is
the only such loop in Python: waits for headers, data and messages differ in what they
do several times a second (``look``), which checks deadlines. Before it the core tests
headers and their data for a moment, without Python (``_native/py_between.c``).
Ranks that share memory wait in ``_native/channel.c``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final

from mpidist._mpi.requests import Request

LOOK_SECONDS: Final = 0.05
"""The time between two looks."""

SHORT_SLEEP: Final = 0.0002
# MPI moves data only while it is tested: a rank that waits for data yields for longer.
YIELD_SECONDS: Final = 0.02
YIELD_SECONDS_FOR_DATA: Final = 2.0

_LONG_SLEEP: Final = 0.002
_SHORT_SLEEPS_UNTIL: Final = 1.0


class _Here(threading.local):
    """How this thread waits.

    Attributes:
        yields_core: returns whether to sleep at once, as another thread of this process
            needs the core; None: this thread never does.
    """

    yields_core: Callable[[], bool] | None = None


here: Final = _Here()


def poll(
    request: Request,
    look: Callable[[float], bool | None],
    *,
    yield_seconds: float = YIELD_SECONDS,
) -> None:
    """Test a request until it has completed.

    Args:
        request: one with a method ``wait_for(seconds)`` is waited for by that, without
            a loop of tests.
        look: called with the seconds waited, several times a second. It may raise, and
            returns whether the wait starts again.
        yield_seconds: how long this rank yields its core before it sleeps.
    """
    wait = getattr(request, "wait_for", None)
    start = time.monotonic()
    next_look = start + LOOK_SECONDS
    yields_core = here.yields_core
    while not request.Test():
        now = time.monotonic()
        if now >= next_look:
            next_look = now + LOOK_SECONDS
            if look(now - start):
                start = now
        if wait is not None:
            wait(LOOK_SECONDS)
        elif now - start < yield_seconds and not (yields_core and yields_core()):
            os.sched_yield()
        else:
            is_new = now - start < _SHORT_SLEEPS_UNTIL
            time.sleep(SHORT_SLEEP if is_new else _LONG_SLEEP)
