"""The check of `mpidist check` that tries a folder for checkpoints."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from mpidist._cli.job import CheckFailedError, Job, Note

_ROUNDS: Final = 30
_BLOCK: Final = 64 * 2**10
_PATIENCE_SECONDS: Final = 30.0
_STALE_SECONDS: Final = 5.0


def check_folder(job: Job, path: str) -> str | Note:
    """Have rank 0 replace a file again and again, while the others read it. Collective.

    A checkpoint relies on three properties (`_checkpoints/replace.py`): a file that is
    renamed over another is at any moment the old or the new one, whole; fsync of files
    and directories works; and what rank 0 wrote is what other ranks then read.

    Args:
        job: the ranks.
        path: an existing folder.

    Raises:
        CheckFailedError: on the ranks that see that a property does not hold.
    """
    path = os.path.realpath(path)
    name = f".mpidist-check-{secrets.token_hex(4)}"
    inside = Path(job.from_root(os.path.join(path, name)))
    file, problem, seconds = inside / "file", "", 0.0
    if job.rank == 0:
        try:
            inside.mkdir()
            file.write_bytes(_block(0))
        except OSError as error:
            problem = f"rank 0 cannot write to {path}: {error.strerror}"
    problem = job.from_root(problem)
    if problem:
        raise CheckFailedError(problem, "choose a folder that rank 0 may write to")
    try:
        unseen = job.comm.allgather(not _wait_until(inside.is_dir))
        if unseen[job.rank]:
            raise CheckFailedError(
                f"what rank 0 writes to {path} is not seen here",
                "name a folder of a file system that all nodes share",
            )
        if any(unseen):
            return f"{path} is seen here"
        if job.rank == 0:
            problem, seconds = _replace(file)
        else:
            problem = _read_all(file)
        job.comm.Barrier()
        is_last = _wait_until(lambda: bool(problem) or _read(file) == ("", _ROUNDS))
        wrong = "" if is_last else _read(file)[0]
        job.comm.Barrier()
    finally:
        if job.rank == 0:
            shutil.rmtree(inside, ignore_errors=True)
    if problem:
        raise CheckFailedError(problem, "save checkpoints to another file system")
    if not is_last:
        return Note(
            f"{_STALE_SECONDS:g} s after rank 0 replaced a file, an older one is read "
            f"here{f' ({wrong})' if wrong else ''}",
            "the file system caches: read files on rank 0 only",
        )
    kind = file_system(path, Path("/proc/self/mounts").read_text().splitlines())
    if kind in ("tmpfs", "ramfs"):
        return Note(f"{path} is {kind}: in the memory of this node, and gone with it")
    took = f"{seconds * 1000:.2g} ms"
    return f"{path} ({kind}): rename is atomic; an fsync takes {took}"


def file_system(path: str, mounts: Sequence[str]) -> str:
    """Return the kind of file system of a path, given ``/proc/self/mounts``."""
    found = ("", "unknown")
    for line in mounts:
        _, where, kind, *_ = line.split()
        where = where.replace("\\040", " ")
        inside = path == where or path.startswith(where.rstrip("/") + "/")
        if inside and len(where) >= len(found[0]):
            found = (where, kind)
    return found[1]


def _wait_until(condition: Callable[[], bool]) -> bool:
    """Return whether a condition becomes true, which file systems may show late."""
    end = time.monotonic() + _STALE_SECONDS
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _replace(file: Path) -> tuple[str, float]:
    """Replace a file; return what went wrong, and the mean time of an fsync."""
    seconds, new = 0.0, file.with_name("new")
    try:
        for number in range(1, _ROUNDS + 1):
            with new.open("wb") as stream:
                stream.write(_block(number))
                stream.flush()
                start = time.monotonic()
                os.fsync(stream.fileno())
                seconds += time.monotonic() - start
            os.rename(new, file)
            directory = os.open(file.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
    except OSError as error:
        with contextlib.suppress(OSError):  # the others wait for the last one
            new.write_bytes(_block(_ROUNDS))
            os.rename(new, file)
        return f"a file cannot be replaced or synchronised: {error}", 0.0
    return "", seconds / _ROUNDS


def _read_all(file: Path) -> str:
    """Read a file until it is the last one; return what was wrong with it."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < end:
        problem, number = _read(file)
        if problem or number == _ROUNDS:
            return problem
    return ""  # that it is late is found next


def _read(file: Path) -> tuple[str, int]:
    """Return what is wrong with a file, or "" and which one it is."""
    try:
        found = file.read_bytes()
    except FileNotFoundError:
        return "while rank 0 replaced a file there was none for a moment", -1
    except OSError as error:
        return f"while rank 0 replaced a file: {error}", -1
    if len(found) != _BLOCK or found.strip(found[:1]):
        return "while rank 0 replaced a file part of another was read", -1
    return "", found[0]


def _block(number: int) -> bytes:
    return bytes([number]) * _BLOCK
