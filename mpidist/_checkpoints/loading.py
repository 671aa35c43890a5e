"""A checkpoint's arrays, to read without MPI."""

from __future__ import annotations

import os

from mpidist._base.expect import expect
from mpidist._checkpoints.manager import latest_checkpoint
from mpidist._checkpoints.storage import CheckpointReader


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
    expect(
        isinstance(path, (str, os.PathLike)),
        "load_checkpoint",
        "`path` to be the path of a checkpoint",
        path,
        "where `latest_checkpoint` returns None there is no checkpoint yet",
    )
    return CheckpointReader(latest_checkpoint(path) or path)
