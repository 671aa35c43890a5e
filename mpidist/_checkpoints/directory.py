"""The checkpoints in a directory: which are complete, and which is the newest."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import NamedTuple

from mpidist._base.errors import CheckpointError, warn_caller
from mpidist._base.expect import as_path
from mpidist._checkpoints import manifest
from mpidist._checkpoints.storage import CheckpointReader, manifest_of


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
    is a directory, too: its own path is returned unchanged, so that a program may pass
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
        The path; None if there is no checkpoint.
    """
    directory = as_path("latest_checkpoint", checkpoint_dir)
    return find_latest(directory, checkpoint_name)


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
