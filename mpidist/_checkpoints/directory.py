"""The checkpoints in a directory: complete ones, the newest, and waiting for others."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from mpidist._base.backend import as_number
from mpidist._base.errors import CheckpointError, warn_caller
from mpidist._base.expect import as_path, expect
from mpidist._checkpoints import manifest
from mpidist._checkpoints.collective_call import CollectiveCall
from mpidist._checkpoints.storage import CheckpointReader, manifest_of
from mpidist._mpi import library
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup

_CALL: Final = "checkpoints_iterator"
_POLL_SECONDS = 1.0


class Entry(NamedTuple):
    """A checkpoint; they are ordered by when they were saved."""

    saved_at: int  # in ns; unique within a directory
    number: int
    path: str


def scan(
    directory: str, prefix: str | None, verified: str | None = None
) -> tuple[list[Entry], int]:
    """Find the checkpoints of a manager, or all, and verify the newest.

    Args:
        directory: where they are.
        prefix: that of their names; None: all.
        verified: the path of one that was verified before.

    Returns:
        The complete checkpoints, in the order of saving, and the highest number in use;
        -1 if there is none.
    """
    entries = []
    numbers = _numbers(directory, prefix)
    for name, number in numbers.items():
        path = os.path.join(directory, name)
        reader = _open(path, lambda reader: None)
        if reader is not None:  # one without arrays has a length of 0
            entries.append(Entry(manifest_of(reader).saved_at_ns, number, path))
    entries.sort()
    while entries and (path := entries[-1].path) != verified:
        if _open(path, CheckpointReader.verify) is not None:
            break
        entries.pop()
    return entries, max(numbers.values(), default=-1)


def _open(
    path: str, check: Callable[[CheckpointReader], None]
) -> CheckpointReader | None:
    """Return a checkpoint that passes a check; None, and a warning, if not."""
    try:
        reader = CheckpointReader(path)
        check(reader)
    except (CheckpointError, OSError) as error:
        warn_of_skipped(path, str(error))
        return None
    return reader


def _numbers(directory: str, prefix: str | None) -> dict[str, int]:
    """Return names in a directory, with the numbers in them, or 0."""
    if prefix is None:
        return dict.fromkeys(manifest.checkpoints_in(directory), 0)
    names = os.listdir(directory) if os.path.exists(directory) else []
    pattern = re.compile(rf"{re.escape(prefix)}-(\d+)")
    return {name: int(match[1]) for name in names if (match := pattern.fullmatch(name))}


def latest_checkpoint(
    checkpoint_dir: str | os.PathLike[str], checkpoint_name: str | None = None
) -> str | None:
    """Return the path of the newest complete checkpoint in a directory.

    It was saved by a `CheckpointManager`, or there by `Checkpoint.save`. A checkpoint
    is a directory, too: of one its own path is returned, so that a program may pass
    either.

    Not collective: it reads the directory on the rank that calls it, needs no strategy
    and no MPI, and skips damaged checkpoints with a warning. In a program on several
    ranks, `CheckpointManager.latest_checkpoint` and
    `CheckpointManager.restore_or_initialize` ask rank 0 alone, so that ranks without
    access to the directory get the same path.

    Args:
        checkpoint_dir: the directory.
        checkpoint_name: the prefix of the names of a manager in it; None: those of all
            managers, and others.

    Returns:
        The absolute path; None if there is no checkpoint.
    """
    return find_latest(as_path("latest_checkpoint", checkpoint_dir), checkpoint_name)


def find_latest(
    checkpoint_dir: str | os.PathLike[str],
    checkpoint_name: str | None = None,
    verified: str | None = None,
) -> str | None:
    """Return what `latest_checkpoint` does, without reading one that was verified."""
    directory = os.path.abspath(checkpoint_dir)
    if os.path.exists(os.path.join(directory, manifest.MANIFEST)):
        return directory
    entries, _ = scan(directory, checkpoint_name, verified)
    return entries[-1].path if entries else None


def load_checkpoint(path: str | os.PathLike[str]) -> CheckpointReader:
    """Open a checkpoint to read its arrays, without MPI. Not collective.

    Args:
        path: the path of the directory; or of one with checkpoints, such as that of a
            `CheckpointManager`, for the newest of them.

    Returns:
        A mapping of names to NumPy arrays; ``dict(load_checkpoint(path))`` reads all.

    Raises:
        FileNotFoundError: if there is none.
        CheckpointError: if it is damaged.
        TypeError: if ``path`` is no path.
    """
    hint = "where `latest_checkpoint` returns None there is no checkpoint yet"
    path = as_path("load_checkpoint", path, hint)
    return CheckpointReader(find_latest(path) or path)


def warn_of_skipped(path: str, reason: str) -> None:
    warn_caller(f"CheckpointManager: the checkpoint {path!r} is skipped: {reason}")


# --- waiting for checkpoints that another job saves, to evaluate them --------


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
            f"{_CALL}: it is not clear which ranks wait for checkpoints together; "
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
    call = CollectiveCall(group, _CALL)
    seen: str | None = None
    began = time.monotonic()

    def check() -> None:
        as_path(_CALL, checkpoint_dir)
        for name, value in (("min_interval_secs", interval), ("timeout", timeout or 0)):
            as_number(_CALL, name, value, lambda x: x >= 0, "0 seconds or more")
        expected = "`timeout_fn` to be a function"
        expect(timeout_fn is None or callable(timeout_fn), _CALL, expected, timeout_fn)

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
            context.require_program_level(group, _CALL)
            time.sleep(max(0.0, interval - (time.monotonic() - found)))
        elif path is None:
            if call.on_rank_0(lambda: timeout_fn is None or bool(timeout_fn())):
                return
        else:
            continue
        began = time.monotonic()
