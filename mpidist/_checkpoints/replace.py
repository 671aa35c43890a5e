"""Writing a checkpoint to its path: at any moment there is a complete one or none.

A checkpoint is a directory of two files (`storage`); its manifest names the other.
Everything is first written to a temporary directory, ``.NAME.tmp-...`` in the same
parent, and every file and that directory are synchronised to the disk. Then,

- if there is nothing at the path, or an empty directory: ``rename(beside, path)``;
- if there is a checkpoint: the array file is renamed into its directory, under a name
  that is not in use there, and the directory is synchronised; then the new manifest is
  renamed over the old one. This last rename replaces the old checkpoint by the new one.
  The old array file is deleted afterwards.

Each step is one rename, which POSIX makes atomic, also over an existing file
(https://pubs.opengroup.org/onlinepubs/9699919799/functions/rename.html). So a process
that is killed, or a machine that stops, between any two steps leaves the previous or
the new checkpoint, complete, and no recovery is needed to read it. The next save to
this path first deletes any other remains (a temporary directory; an array file that no
manifest names). One job at a time may save to a path.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Callable

from mpidist._base.errors import CheckpointError
from mpidist._checkpoints.manifest import ARRAY_FILE, MANIFEST, TEMPORARY, read_manifest


def replace(path: str, write: Callable[[str, int], None]) -> None:
    """Write a checkpoint to ``path``, replacing one that may be there.

    Args:
        path: the path of the checkpoint's directory.
        write: writes the array file and the manifest into the directory passed to it.
            Its second argument is the number of the array file.

    Raises:
        FileExistsError: if there is something else at the path, which is left
            unchanged.
        OSError: if it cannot be written; the previous checkpoint is unchanged.
    """
    path = os.path.realpath(path)
    parent = os.path.dirname(path)
    _make_directories(parent)
    number = _next_number(path)
    clean(parent, os.path.basename(path))
    if number > 1:
        # Each job that is killed between the two renames leaves an array file, and they
        # may fill the disk. Those of a checkpoint whose manifest is damaged stay.
        with contextlib.suppress(OSError, CheckpointError):
            if len(os.listdir(path)) > 2:
                _delete_files(path, keep=read_manifest(path).file)
    beside = _beside(path)
    os.mkdir(beside)
    mode = stat.S_IMODE(os.stat(beside).st_mode)
    with contextlib.suppress(OSError):  # a file system without modes
        os.chmod(beside, mode & ~0o077)  # for nobody else until it is whole
    try:
        write(beside, number)
        sync_directory(beside)
        if number > 1:
            data = _move_into(beside, path)
        else:
            with contextlib.suppress(OSError):
                os.chmod(beside, mode)
            os.rename(beside, path)
            sync_directory(parent)
    except BaseException as error:
        if isinstance(error, FileNotFoundError) and not os.path.exists(beside):
            raise OSError(
                f"the temporary {beside!r} is gone: another process saves to {path!r}, "
                "too; under mpirun save in the scope of a strategy (`with "
                "mpidist.MPIStrategy().scope():`), where rank 0 writes for all"
            ) from error
        shutil.rmtree(beside, ignore_errors=True)
        raise
    if number > 1:
        # The new checkpoint is in place: leftover files are no reason to fail.
        shutil.rmtree(beside, ignore_errors=True)
        _delete_files(path, keep=data)


def remove(path: str) -> None:
    """Delete a checkpoint; a partial one is never visible under its name."""
    path = os.path.realpath(path)
    beside = _beside(path)
    os.rename(path, beside)
    shutil.rmtree(beside, ignore_errors=True)


def clean(parent: str, name: str) -> None:
    """Delete the files that killed jobs left next to a checkpoint of that name.

    Args:
        parent: the directory that it is in.
        name: its name; "step-*" for "step-" and a number.
    """
    own = re.escape(name).replace(r"\*", r"\d+")
    pattern = re.compile(rf"\.{own}{re.escape(TEMPORARY)}[0-9a-f]{{8}}")
    with contextlib.suppress(OSError):
        for found in os.listdir(parent):
            if pattern.fullmatch(found):
                shutil.rmtree(os.path.join(parent, found), ignore_errors=True)


def sync_directory(path: str) -> None:
    """Synchronise the names in a directory to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _beside(path: str) -> str:
    parent, name = os.path.split(path)
    return os.path.join(parent, f".{name}{TEMPORARY}{os.urandom(4).hex()}")


def _make_directories(path: str) -> None:
    """Create a directory and its parents, and synchronise them to the disk."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for one in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(one)
        sync_directory(one)  # which raises if it is not a directory
        sync_directory(os.path.dirname(one))


def _next_number(path: str) -> int:
    """Return 1 if there is nothing, else a number that no array file has."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return 1
    except NotADirectoryError:
        raise FileExistsError(
            f"expected a checkpoint directory, or nothing, at {path!r}, got a "
            "file; delete it, or save to another path"
        ) from None
    used = [0]
    for name in names:
        match = ARRAY_FILE.fullmatch(name)
        # NFS has such a file for one that is deleted, and still open here.
        if match is None and name != MANIFEST and not name.startswith(".nfs"):
            raise FileExistsError(
                f"expected a checkpoint, or nothing, at {path!r}, got a directory with "
                f"{name!r} in it; save to another path, such as "
                f"{os.path.join(path, 'checkpoint')!r}"
            )
        if match is not None:
            used.append(int(match[1]))
    return max(max(used) + 1, 2) if names else 1


def _move_into(beside: str, path: str) -> str:
    """Replace the checkpoint at the path; return the name of its array file."""
    data, manifest = sorted(os.listdir(beside), key=lambda n: n == MANIFEST)
    os.rename(os.path.join(beside, data), os.path.join(path, data))
    sync_directory(path)
    os.rename(os.path.join(beside, manifest), os.path.join(path, manifest))
    sync_directory(path)
    return data


def _delete_files(path: str, keep: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            if name != keep and ARRAY_FILE.fullmatch(name):
                os.unlink(os.path.join(path, name))
