"""The end of a program as a call of all ranks: each waits for those of the others."""

from __future__ import annotations

import time
from collections.abc import Iterator

from mpidist._agreement.breakdown import State
from mpidist._agreement.channel import AGAIN, NOWHERE, OK
from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call
from mpidist._agreement.notices import AT_END
from mpidist._agreement.polling import LOOK_SECONDS
from mpidist._base.errors import CollectiveTimeoutError, ReplicaLostError
from mpidist._timeline.observer import NOTHING


def leave(guard: Guard, call: Call, code: object) -> Iterator[None]:
    """Wait, at the end of the program, for the end of the others' programs.

    Yields while it waits, so that the caller can wait for several guards. A rank that
    is still in a collective learns that this one has gone.

    Args:
        guard: of the ranks.
        call: what this rank says that it does.
        code: the argument of `sys.exit`; None: it has reached its end.

    Raises:
        CollectiveTimeoutError: at the deadline. If another rank has given up on some
            rank, that one raises, and this one returns.
    """
    try:
        with NOTHING if guard.broken else guard.observed(call):
            yield from _meet(guard, call, SystemExit(code))
    except CollectiveTimeoutError:
        if guard.breakdown.state is not State.TOLD:
            raise
    except Exception as error:
        if not isinstance(guard.breakdown.failed(error), ReplicaLostError):
            raise


def _meet(guard: Guard, call: Call, gone: SystemExit) -> Iterator[None]:
    """Exchange headers until all ranks are at their ends."""
    channel = guard.channel
    guard.begin(call)
    while not guard.broken:
        channel.start(0, call.fingerprint, 0, 0, guard.patience_ms, NOWHERE)
        start = next_look = time.monotonic()
        while (status := channel.test()) is None:
            yield
            now = time.monotonic()
            if now >= next_look:
                next_look = now + LOOK_SECONDS
                guard.waits.look(AT_END, now - start)
        if status == AGAIN:
            continue
        guard.sequence += 1
        if status == OK:
            return
        guard.reports.exchange(call, gone, "exit")
