"""The manifest of a checkpoint: what is in it, as JSON that begins with its checksum.

A manifest may have the right checksum and still be malformed: `read_manifest` checks
every entry, before anything is allocated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from mpidist._base import state_json
from mpidist._base.errors import CheckpointError, damaged_checkpoint
from mpidist._base.state_json import Json
from mpidist._base.types import Shape, record
from mpidist._version import __version__

MANIFEST: Final = "manifest.json"
TEMPORARY: Final = ".tmp-"  # in names that begin with a dot
ARRAY_FILE: Final = re.compile(r"arrays-(\d+)\.(npz|safetensors)")

_KIND: Final = "mpidist checkpoint"
_VERSION: Final = 3  # 2: without tensors in states
_NO_CHECKSUM: Final = "00000000"
_HEAD: Final = '{\n "crc32": "'
_DTYPE: Final = re.compile(r"bool|u?int\d+|b?float\d+(_\w+)?|complex\d+")
_LARGEST_MANIFEST: Final = 2**28  # the states of thousands of ranks
_MOST_NAMES: Final = 10  # in a message
_MOST_DIMENSIONS: Final = 32  # of all versions of NumPy


@record
class Part:
    """A part of the array file, which ends with the bytes of an array.

    Attributes:
        start: the offset of its first byte: the end of the part before.
        end: the offset of the byte after it.
        crc32: its checksum, as 8 hexadecimal digits.
        dtype: the name of the array's dtype, such as "float32" or "bfloat16".
        shape: its shape.
        nbytes: the number of its bytes; 0 for the part after all arrays.
    """

    start: int
    end: int
    crc32: str
    dtype: str = "bool"
    shape: Shape = (0,)
    nbytes: int = 0


_OF_ARRAYS: Final = {field.name for field in dataclasses.fields(Part)}


@record
class Manifest:
    """The contents of a manifest.

    Attributes:
        replicas: the number of replicas that saved the checkpoint.
        saved_at_ns: the time, in ns since 1970.
        file: the name of the array file.
        arrays: the parts of the array file, by the name of the array, in their order.
        rest: the last part, after all arrays.
        states: for each object with a state one value, or one for each replica.
    """

    replicas: int
    saved_at_ns: int
    file: str
    arrays: Mapping[str, Part]
    rest: Part
    states: Mapping[str, list[Json]]

    def of_states(self, names: Iterable[str]) -> list[str]:
        """Return the names of the arrays that the states of these names have."""
        return state_json.array_names(x for name in names for x in self.states[name])


def end_of(parts: dict[str, Part]) -> int:
    """Return the offset of the byte after the last part."""
    return parts[next(reversed(parts))].end if parts else 0


def write_manifest(path: str, manifest: Manifest) -> None:
    """Write a manifest; its first entry is the checksum of the rest."""
    entries = {
        "crc32": _NO_CHECKSUM,
        "format": _KIND,
        "version": _VERSION,
        "mpidist": __version__,
        **vars(manifest),
        "rest": {key: getattr(manifest.rest, key) for key in ("start", "end", "crc32")},
    }
    text = json.dumps(entries, indent=1, allow_nan=False, default=vars)
    if len(text) >= _LARGEST_MANIFEST:  # the file ends with another byte
        raise ValueError(
            f"Checkpoint.save: the states are {len(text):,} bytes of JSON, more than "
            f"the {_LARGEST_MANIFEST:,} that can be restored; keep long lists of "
            "numbers in a state as NumPy arrays"
        )
    head = f"{_HEAD}{zlib.crc32(text.encode()):08x}"
    with open(path, "xb") as file:
        file.write((head + text[len(head) :] + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: str) -> Manifest:
    """Return the manifest of the checkpoint in a directory.

    Raises:
        FileNotFoundError: if there is none.
        CheckpointError: if it is damaged, malformed, or of another version.
    """
    name = os.path.join(path, MANIFEST)
    try:
        with open(open_regular(name), "rb") as file:
            if os.fstat(file.fileno()).st_size <= _LARGEST_MANIFEST:
                return _parse(file.read(), path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"there is no checkpoint at {path!r}: expected a directory with a "
            f"{MANIFEST} there{_nearby(path)}. A relative path begins at the directory "
            f"that rank 0 runs in, {os.getcwd()!r}"
        ) from None
    raise damaged_checkpoint(
        f"{name} is damaged: it has more than {_LARGEST_MANIFEST:,} bytes. Restore "
        "another checkpoint"
    )


def _parse(data: bytes, path: str) -> Manifest:
    """Return the contents of the manifest of a checkpoint."""
    start, stop = len(_HEAD), len(_HEAD) + len(_NO_CHECKSUM)
    text = data[:start] + _NO_CHECKSUM.encode() + data[stop:].removesuffix(b"\n")
    found = data[start:stop].decode("ascii", "replace")
    if not data.endswith(b"}\n") or f"{zlib.crc32(text):08x}" != found:
        raise damaged_checkpoint(
            f"{os.path.join(path, MANIFEST)} is damaged: its bytes do not have the "
            "checksum that it begins with. Restore another checkpoint"
        )
    try:
        content = json.loads(text)
        with _entry(content, "version") as version:
            _require(type(version) is int and type(content.get("format")) is str)
        if content["format"] == _KIND and version in (2, _VERSION):
            return _manifest_of(content)
    except Exception as error:  # whatever its contents lead to, RecursionError too
        raise malformed(path, str(error) or type(error).__name__) from error
    raise CheckpointError(
        f"{os.path.join(path, MANIFEST)}: expected version 2 or {_VERSION} of the "
        f"format of `mpidist.Checkpoint`, got version {version}; version 1 can be read "
        "by mpidist from before the release 0.1.0 only, a later version by the mpidist "
        f"that wrote it, {content.get('mpidist')}"
    )


def malformed(path: str, problem: str) -> CheckpointError:
    """Return the error for a manifest that says what cannot be."""
    return damaged_checkpoint(
        f"{os.path.join(path, MANIFEST)} is malformed, although its checksum is right: "
        f"{problem}. Restore another checkpoint"
    )


@contextlib.contextmanager
def _entry(content: Json, key: str) -> Iterator[Json]:
    """Yield an entry of a dictionary; what reads it raises if it cannot be."""
    value = content.get(key)
    try:
        yield value
    except Exception as error:  # whatever its contents lead to
        problem = str(error) or type(error).__name__
        text = f"the entry [{key!r}] is {value!r:.80}: {problem}"
        raise ValueError(text) from error


def _require(fits: object) -> None:
    if not fits:
        raise ValueError("no checkpoint has that")


def _manifest_of(content: Json) -> Manifest:
    with _entry(content, "replicas") as replicas:
        _require(type(replicas) is int and replicas > 0)
    with _entry(content, "saved_at_ns") as saved_at:
        _require(type(saved_at) is int and 0 <= saved_at < 2**63)
    with _entry(content, "file") as file:
        _require(ARRAY_FILE.fullmatch(file))  # and not ../elsewhere
    arrays: dict[str, Part] = {}
    with _entry(content, "arrays") as entries:
        for name in entries:
            with _entry(entries, name) as entry:
                _require(entry.keys() >= _OF_ARRAYS)
                arrays[name] = _part(entry, end_of(arrays))
    with _entry(content, "states") as states:
        for name in states:
            with _entry(states, name) as values:
                _require(type(values) is list and len(values) in (1, replicas))
                for value in values:
                    state_json.unpack(value, lambda _, array, device: arrays[array])
    with _entry(content, "rest") as entry:
        rest = _part(entry, end_of(arrays))
    return Manifest(replicas, saved_at, file, arrays, rest, states)


def _part(entry: Json, begin: int) -> Part:
    """Return a part of the file that begins there; "rest" is one without an array."""
    known = {key: entry[key] for key in _OF_ARRAYS & entry.keys()}
    part = Part(**{**known, "shape": tuple(entry.get("shape", (0,)))})
    lengths = part.shape
    numbers = part.start, part.end, part.nbytes, *lengths
    _require(all(type(n) is int and n >= 0 for n in numbers) and part.start == begin)
    _require(type(part.crc32) is str and _DTYPE.fullmatch(part.dtype))
    _require(math.prod(n or 1 for n in lengths) < 2**48)
    _require(len(lengths) <= _MOST_DIMENSIONS)
    # At least one byte for each element, so no array is larger than the file.
    _require(math.prod(lengths) <= part.nbytes <= part.end - begin)
    return part


def checkpoints_in(directory: str) -> list[str]:
    """Return the names of the checkpoints in a directory, in alphabetical order."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    return [
        name
        for name in names
        if not (name.startswith(".") and TEMPORARY in name)
        and os.path.lexists(os.path.join(directory, name, MANIFEST))
    ]


def _nearby(path: str) -> str:
    """Return which checkpoints are in a directory, or beside a path, for a message."""
    place = "in it" if os.path.isdir(path) else "beside it"
    directory = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    names = checkpoints_in(directory)
    if not names:
        return ""
    listed = ", ".join(map(repr, names[-_MOST_NAMES:]))
    more = f"{len(names) - _MOST_NAMES} others and " if len(names) > _MOST_NAMES else ""
    return (
        f"; {place} {'is' if len(names) == 1 else 'are'} {more}{listed}: pass the path "
        f"of one, such as `mpidist.latest_checkpoint({directory!r})`"
    )


def open_regular(path: str) -> int:
    """Open a file to read; anything else may block, or never end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise damaged_checkpoint(f"{path} is damaged: it is not a regular file")
