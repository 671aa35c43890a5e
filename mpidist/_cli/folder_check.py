"""A check of `mpidist check`: whether a folder is fit for checkpoints."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from mpidist._checkpoints.replace import sync_directory
from mpidist._cli.facts import CheckFailedError, Finding, Job, ok

_ROUNDS: Final = 30
_BLOCK: Final = 64 * 2**10
_STALE_SECONDS: Final = 5.0
_ELSEWHERE: Final = "save checkpoints to another file system"


def check_folder(job: Job, path: str) -> Finding:
    """Have rank 0 replace a file again and again, while the others read it. Collective.

    A checkpoint relies on three properties (`_checkpoints/replace.py`): a file that is
    renamed over another is at any moment the old or the new one, whole; fsync of files
    and directories works; and what rank 0 wrote is what other ranks then read.

    Raises:
        CheckFailedError: on the ranks that see that a property does not hold.
    """
    path = os.path.realpath(path)
    name = f".mpidist-check-{secrets.token_hex(4)}"
    inside = Path(job.from_root(os.path.join(path, name)))
    file, problem, took, is_last = inside / "file", "", 0.0, True
    try:
        if job.rank == 0:
            inside.mkdir()
            file.write_bytes(_block(0))
    except OSError as error:
        problem = f"rank 0 cannot write to {path}: {error.strerror}"
        shutil.rmtree(inside, ignore_errors=True)
    if problem := job.from_root(problem):
        raise CheckFailedError(problem, "choose a folder that rank 0 may write to")
    try:
        unseen = job.comm.allgather(not _becomes_true(inside.is_dir))
        if unseen[job.rank]:
            raise CheckFailedError(
                f"what rank 0 writes to {path} is not seen here",
                "name a folder of a file system that all nodes share",
            )
        if any(unseen):
            return ok(f"{path} is seen here")
        try:
            if job.rank == 0:
                took = _replace(file)
        finally:  # the others are there at once, and follow until rank 0 is
            written = job.comm.Ibarrier()
        try:
            while job.rank and not written.Test():
                _read(file)
            is_last = not job.rank or _becomes_true(lambda: _read(file) == _ROUNDS)
        finally:
            written.Wait()
    finally:
        job.comm.Barrier()
        if job.rank == 0:
            shutil.rmtree(inside, ignore_errors=True)
    if not is_last:
        return Finding(
            f"{_STALE_SECONDS:g} s after rank 0 replaced a file, an older one is read "
            "here",
            "the file system caches: read files on rank 0 only",
        )
    kind = file_system(path, Path("/proc/self/mounts").read_text().splitlines())
    if kind in ("tmpfs", "ramfs"):
        return Finding(f"{path} is {kind}: in the memory of this node, gone with it")
    return ok(f"{path} ({kind}): rename is atomic; an fsync takes {took * 1000:.2g} ms")


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


def _becomes_true(condition: Callable[[], bool]) -> bool:
    """Return whether a condition becomes true, which file systems may show late."""
    end = time.monotonic() + _STALE_SECONDS
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _replace(file: Path) -> float:
    """Replace a file many times; return the mean time of a write and an fsync."""
    seconds, new = 0.0, file.with_name("new")
    try:
        for number in range(1, _ROUNDS + 1):
            start = time.monotonic()
            with open(new, "wb") as opened:
                opened.write(_block(number))
                opened.flush()
                os.fsync(opened.fileno())
            seconds += time.monotonic() - start
            os.rename(new, file)
            sync_directory(str(file.parent))
    except OSError as error:
        with contextlib.suppress(OSError):  # the others wait for the last one
            new.write_bytes(_block(_ROUNDS))
            os.rename(new, file)
        text = f"a file cannot be replaced or synchronised: {error}"
        raise CheckFailedError(text, _ELSEWHERE) from None
    return seconds / _ROUNDS


def _read(file: Path) -> int:
    """Return which of the files it is; raise if it is none."""
    try:
        found = file.read_bytes()
    except FileNotFoundError:
        wrong = " there was none for a moment"
    except OSError as error:
        wrong = f": {error}"
    else:
        if len(found) == _BLOCK and not found.strip(found[:1]):
            return found[0]
        wrong = " part of another was read"
    raise CheckFailedError(f"while rank 0 replaced a file{wrong}", _ELSEWHERE)


def _block(number: int) -> bytes:
    return bytes([number]) * _BLOCK
