"""Waiting for checkpoints that another job saves, to evaluate them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from mpidist._base.backend import as_number
from mpidist._base.expect import as_path, expect
from mpidist._checkpoints.collective_call import CollectiveCall
from mpidist._checkpoints.directory import find_latest
from mpidist._mpi import library
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup

_NAME = "checkpoints_iterator"
_POLL_SECONDS = 1.0


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], object] | None = None,
) -> Iterator[str]:
    """Yield the newest checkpoint of a directory, and then each that is newer.

    It waits for checkpoints, such as those of another job that trains; if several were
    saved meanwhile, it yields the last one. As ``tf.train.checkpoints_iterator``.

    Collective, each step: rank 0 looks into the directory, once a second, and all ranks
    get its path. Call it in the scope of the strategy.

    Args:
        checkpoint_dir: the directory; that of rank 0 counts.
        min_interval_secs: the least number of seconds between two checkpoints.
        timeout: the number of seconds to wait for a checkpoint; None: for ever.
        timeout_fn: called on rank 0 after each ``timeout``; the iterator ends if it
            returns a true value, and otherwise waits again. None: it ends.

    Returns:
        An iterator over paths, the same on all ranks.

    Raises:
        RuntimeError: without a scope, in a job of several ranks.
        TypeError: for a wrong argument, on all ranks.
    """
    group = context.current().group
    if not group.is_mpi and library.world_size() > 1:
        raise RuntimeError(
            f"{_NAME}: it is not clear which ranks wait for checkpoints together; "
            "write `with strategy.scope():` around the loop"
        )
    return _paths(group, checkpoint_dir, min_interval_secs, timeout, timeout_fn)


def _paths(
    group: ReplicaGroup,
    checkpoint_dir: str | os.PathLike[str],
    interval: float,
    timeout: float | None,
    timeout_fn: Callable[[], object] | None,
) -> Iterator[str]:
    call = CollectiveCall(group, _NAME)
    seen: str | None = None
    began = time.monotonic()

    def check() -> None:
        as_path(_NAME, checkpoint_dir)
        for name, value in (("min_interval_secs", interval), ("timeout", timeout or 0)):
            as_number(_NAME, name, value, lambda x: x >= 0, "0 seconds or more")
        expected = "`timeout_fn` to be a function"
        expect(timeout_fn is None or callable(timeout_fn), _NAME, expected, timeout_fn)

    def look() -> str | None:
        """Return the path of a new checkpoint; "": look again; None: the timeout."""
        newest = find_latest(checkpoint_dir, verified=seen)
        if newest is not None and newest != seen:
            return newest
        if timeout is not None and time.monotonic() + _POLL_SECONDS - began > timeout:
            return None
        time.sleep(_POLL_SECONDS)
        return ""

    call.attempt(check)
    while True:
        call.agree("")
        path = call.on_rank_0(look)
        if path:
            seen, found = path, time.monotonic()
            yield path
            context.require_program_level(group, _NAME)
            time.sleep(max(0.0, interval - (time.monotonic() - found)))
        elif path is None:
            if call.on_rank_0(lambda: timeout_fn is None or bool(timeout_fn())):
                return
        else:
            continue
        began = time.monotonic()
