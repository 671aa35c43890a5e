"""The files of a checkpoint: a manifest, and one file with the bytes of all arrays.

::

    step-100/
        manifest.json     what is in it: JSON, its own checksum first
        arrays-1.npz      the arrays, for `numpy.load`; or arrays-1.safetensors

NumPy and `zipfile` write the npz. Its members are not compressed, and safetensors does
not compress either, so in both formats the bytes of an array are contiguous, in C order
(the order of every variable), and the same few lines read both: the manifest divides
the file into one part for each array, which ends with the array's bytes, and one for
the end of the file. A part begins where the one before ends, so the headers of the
formats belong to parts too: every byte of the file is in one part, and each part has a
checksum. An array is read from its part directly into its memory.

The manifest also holds the small states (random generators, iterators; `state_json`).
Nothing is ever pickled. A manifest may have the right checksum and still be malformed:
`parse_manifest` checks every entry, before anything is allocated.

The checksum is CRC-32 (`zlib.crc32`): it detects every error burst of up to 32 bits,
and misses 1 in 2**32 of other errors. Measured on one core: 2.1 GB/s, SHA-256: 0.8
GB/s. It does not protect against deliberate changes.

Rejected: reading by `zipfile` and `numpy.load` (they check the members' CRC-32, but do
not notice a flipped bit in 152 of the 530 bytes of a file with two small arrays: fields
of the zip's headers; safetensors has no checksums; and each chunk is copied once more);
the writer of the ``safetensors`` package (it takes a copy of all arrays as bytes). The
formats: NumPy's NEP 1, and https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import stat
import weakref
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Final, Literal, TypeVar

import numpy as np

from mpidist._base import backend
from mpidist._base.errors import CheckpointError, damaged_checkpoint
from mpidist._base.types import Array, DType, HostArray, Shape
from mpidist._checkpoints import state_json
from mpidist._checkpoints.state_json import Json
from mpidist._version import __version__

_T = TypeVar("_T")

MANIFEST: Final = "manifest.json"
ARRAY_FILE: Final = re.compile(r"arrays-(\d+)\.(npz|safetensors)")
CHUNK_BYTES: Final = 2**23
FileFormat = Literal["npz", "safetensors"]
NamedArrays = Sequence[tuple[str, Array]]

_NOTHING: Final = memoryview(b"")
_KIND: Final = "mpidist checkpoint"
_VERSION: Final = 2
_NO_CHECKSUM: Final = "00000000"
_HEAD: Final = '{\n "crc32": "'
_DTYPE: Final = re.compile(r"bool|u?int\d+|b?float\d+(_\w+)?|complex\d+")
_LARGEST_MANIFEST: Final = 2**28  # the states of thousands of ranks
_MOST_DIMENSIONS: Final = 32  # of all versions of NumPy
_SAFETENSORS: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}


@dataclasses.dataclass(frozen=True)
class FilePart:
    """A part of the array file: its bytes from ``start`` to ``end``.

    Attributes:
        start: the offset of its first byte: the end of the part before.
        end: the offset of the byte after it.
        crc32: its checksum, as 8 hexadecimal digits.
    """

    start: int
    end: int
    crc32: str


@dataclasses.dataclass(frozen=True)
class ArrayPart(FilePart):
    """A part that ends with the bytes of an array.

    Attributes:
        dtype: the name of the array's dtype, such as "float32" or "bfloat16".
        shape: its shape.
        nbytes: the number of its bytes.
    """

    dtype: str
    shape: Shape
    nbytes: int


@dataclasses.dataclass(frozen=True)
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
    arrays: Mapping[str, ArrayPart]
    rest: FilePart
    states: Mapping[str, list[Json]]


# --- writing ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What is saved.

    Attributes:
        arrays: names, and NumPy or CuPy arrays.
        states: for each object with a state one value, or one for each replica.
        replicas: the number of replicas.
    """

    arrays: NamedArrays
    states: Mapping[str, list[Json]]
    replicas: int


def write_checkpoint(
    directory: str,
    number: int,
    snapshot: Snapshot,
    file_format: FileFormat,
    saved_at_ns: int,
) -> None:
    """Write the files of a checkpoint, and synchronise them to disk.

    Args:
        directory: the path of an empty directory.
        number: the number in the name of the array file.
        snapshot: what to save.
        file_format: the format of the array file.
        saved_at_ns: the time, for the manifest.
    """
    name = f"arrays-{number}.{file_format}"
    path = os.path.join(directory, name)
    arrays, rest = _write_arrays(path, snapshot.arrays, file_format)
    manifest = Manifest(
        snapshot.replicas, saved_at_ns, name, arrays, rest, snapshot.states
    )
    _write_manifest(os.path.join(directory, MANIFEST), manifest)


def check_format(arrays: NamedArrays, file_format: object) -> None:
    """Raise if the format is unknown, or does not support one of the dtypes."""
    if file_format not in ("npz", "safetensors"):
        raise ValueError(
            f'Checkpoint.save: expected `format` to be "npz" or "safetensors", got '
            f"{file_format!r}"
        )
    for name, x in arrays:
        if file_format == "safetensors" and x.dtype.name not in _SAFETENSORS:
            raise ValueError(
                f"Checkpoint.save: {name!r} is {backend.describe(x)}, and safetensors "
                f'has no dtype {x.dtype.name}; write `format="npz"`'
            )


def _write_arrays(
    path: str, arrays: NamedArrays, file_format: FileFormat
) -> tuple[dict[str, ArrayPart], FilePart]:
    """Write the array file; return its parts. There is never a second copy of it."""
    parts: dict[str, ArrayPart] = {}
    with open(path, "x+b") as file:

        def part_from(start: int) -> FilePart:
            file.flush()
            end = file.tell()
            return FilePart(start, end, _checksum(file.fileno(), start, end))

        def written(name: str, x: HostArray) -> None:
            part = part_from(_end_of(parts))
            parts[name] = ArrayPart(
                **vars(part), dtype=x.dtype.name, shape=x.shape, nbytes=x.nbytes
            )

        write = _write_npz if file_format == "npz" else _write_safetensors
        write(file, arrays, written)
        rest = part_from(_end_of(parts))
        os.fsync(file.fileno())
    return parts, rest


def _end_of(parts: dict[str, ArrayPart]) -> int:
    return parts[next(reversed(parts))].end if parts else 0


def _write_npz(
    file: IO[bytes], arrays: NamedArrays, written: Callable[[str, HostArray], None]
) -> None:
    # Unlike numpy.savez, one array at a time is on the host.
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays:
            x = _host_array(array)
            plain = x.view(f"u{x.dtype.itemsize}") if x.dtype.kind == "V" else x
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, plain, allow_pickle=False)
            written(name, x)


def _write_safetensors(
    file: IO[bytes], arrays: NamedArrays, written: Callable[[str, HostArray], None]
) -> None:
    entries: dict[str, Json] = {}
    end = 0
    for name, x in arrays:
        start, end = end, end + int(x.nbytes)
        entries[name] = {
            "dtype": _SAFETENSORS[x.dtype.name],
            "shape": list(x.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, array in arrays:
        x = _host_array(array)
        file.write(backend.as_bytes(x).data)
        written(name, x)


def _host_array(x: Array) -> HostArray:
    host: HostArray = backend.contiguous(backend.to_host(x))
    return host


def _write_manifest(path: str, manifest: Manifest) -> None:
    """Write a manifest; its first entry is the checksum of the rest."""
    entries = {
        "crc32": _NO_CHECKSUM,
        "format": _KIND,
        "version": _VERSION,
        "mpidist": __version__,
        **dataclasses.asdict(manifest),
    }
    text = json.dumps(entries, indent=1, allow_nan=False)
    head = f"{_HEAD}{zlib.crc32(text.encode()):08x}"
    with open(path, "xb") as file:
        file.write((head + text[len(head) :] + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


# --- reading ------------------------------------------------------------------------


def parse_manifest(data: bytes, path: str) -> Manifest:
    """Return the contents of a manifest.

    Args:
        data: its bytes.
        path: its path, for the messages.

    Raises:
        CheckpointError: if it is damaged, malformed, or of another version.
    """
    start, stop = len(_HEAD), len(_HEAD) + len(_NO_CHECKSUM)
    text = data[:start] + _NO_CHECKSUM.encode() + data[stop:].removesuffix(b"\n")
    found = data[start:stop].decode("ascii", "replace")
    if not data.endswith(b"}\n") or f"{zlib.crc32(text):08x}" != found:
        raise damaged_checkpoint(
            f"{path} is damaged: its bytes do not have the checksum that it begins "
            "with. Restore another checkpoint"
        )
    try:
        content = json.loads(text)
        kind, version = _entry(content, str, "format"), _entry(content, int, "version")
        if (kind, version) == (_KIND, _VERSION):
            return _manifest_of(content)
    except Exception as error:  # whatever its contents lead to, RecursionError too
        raise damaged_checkpoint(
            f"{path} is malformed, although its checksum is right: "
            f"{error or type(error).__name__}. Restore another checkpoint"
        ) from error
    raise CheckpointError(
        f"{path}: expected version {_VERSION} of the format of `mpidist.Checkpoint`, "
        f"got version {version}; version 1 can be read by mpidist from before the "
        "release 0.1.0 only, a later version by the mpidist that wrote it, "
        f"{content.get('mpidist')}"
    )


def _entry(content: Json, kind: type[_T], *keys: str) -> _T:
    """Return ``content[key][key]...``; raise if there is none of that type."""
    value = content
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if type(value) is not kind:
        raise _malformed(f"to be of type {kind.__name__}", value, *keys)
    return value


def _malformed(expected: str, found: object, *keys: str) -> ValueError:
    where = "".join(f"[{key!r}]" for key in keys)
    return ValueError(f"expected the entry {where} {expected}, got {found!r:.80}")


def _manifest_of(content: Json) -> Manifest:
    replicas = _entry(content, int, "replicas")
    if replicas < 1:
        raise _malformed("to be at least 1", replicas, "replicas")
    saved_at = _entry(content, int, "saved_at_ns")
    if not 0 <= saved_at < 2**63:
        raise _malformed("to be a time in ns", saved_at, "saved_at_ns")
    file = _entry(content, str, "file")
    if not ARRAY_FILE.fullmatch(file):  # and not ../elsewhere
        raise _malformed("to be the name of an array file", file, "file")
    arrays: dict[str, ArrayPart] = {}
    for name in _entry(content, dict, "arrays"):
        arrays[name] = _array_part(
            content, name, _file_part(content, arrays, "arrays", name)
        )
    rest = _file_part(content, arrays, "rest")
    states = {
        name: _state_values(content, name, replicas)
        for name in _entry(content, dict, "states")
    }
    return Manifest(replicas, saved_at, file, arrays, rest, states)


def _file_part(content: Json, before: dict[str, ArrayPart], *keys: str) -> FilePart:
    start, end = (
        _entry(content, int, *keys, "start"),
        _entry(content, int, *keys, "end"),
    )
    expected = _end_of(before)
    if start != expected or end < start:
        raise _malformed(f"to start at {expected}", (start, end), *keys)
    return FilePart(start, end, _entry(content, str, *keys, "crc32"))


def _array_part(content: Json, name: str, part: FilePart) -> ArrayPart:
    dtype = _entry(content, str, "arrays", name, "dtype")
    if not _DTYPE.fullmatch(dtype):
        raise _malformed("to be a dtype", dtype, "arrays", name, "dtype")
    shape = _entry(content, list, "arrays", name, "shape")
    if (
        len(shape) > _MOST_DIMENSIONS
        or any(type(length) is not int or length < 0 for length in shape)
        or math.prod(length or 1 for length in shape) >= 2**48
    ):
        raise _malformed("to be a shape", shape, "arrays", name, "shape")
    nbytes = _entry(content, int, "arrays", name, "nbytes")
    # At least one byte for each element, so no array is larger than the file.
    if not math.prod(shape) <= nbytes <= part.end - part.start:
        expected = f"to be the size of {dtype} {tuple(shape)}, inside its part"
        raise _malformed(expected, nbytes, "arrays", name, "nbytes")
    return ArrayPart(**vars(part), dtype=dtype, shape=tuple(shape), nbytes=nbytes)


def _state_values(content: Json, name: str, replicas: int) -> list[Json]:
    values = _entry(content, list, "states", name)
    if len(values) not in (1, replicas):
        expected = f"to have one value, or {replicas}"
        raise _malformed(expected, values, "states", name)
    for value in values:
        try:
            state_json.decode(value)
        except Exception as error:
            expected = f"to be the JSON of a state ({type(error).__name__}: {error})"
            raise _malformed(expected, value, "states", name) from error
    return values


class CheckpointFiles:
    """The open files of a checkpoint.

    They stay readable if the checkpoint is replaced or deleted meanwhile, because the
    array file is open.

    Args:
        path: the path of the checkpoint's directory.

    Raises:
        FileNotFoundError: if there is none.
        CheckpointError: if the manifest is damaged, or the array file is missing or has
            a different size.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.manifest_path = os.path.join(path, MANIFEST)
        seen = b""
        while True:
            data = _read_manifest(path)
            manifest = parse_manifest(data, self.manifest_path)
            self.array_path = os.path.join(path, manifest.file)
            try:
                self._fd = _open_regular(self.array_path)
                break
            except FileNotFoundError:
                # Replaced between the two reads? Then there is a new manifest.
                if data == seen:
                    raise damaged_checkpoint(
                        f"{self.array_path} is missing, but {MANIFEST} beside it names "
                        "it: a part of the checkpoint was deleted or not copied"
                    ) from None
                seen = data
        weakref.finalize(self, os.close, self._fd)
        self.manifest = manifest
        size = os.fstat(self._fd).st_size
        if size != manifest.rest.end:
            raise damaged_checkpoint(
                f"{self.array_path} is damaged: expected {manifest.rest.end} bytes, "
                f"got {size}"
            )

    def read(self, name: str, dtype: DType) -> HostArray:
        """Return an array of that dtype, after verifying its part of the file."""
        part = self.manifest.arrays[name]
        if part.nbytes != math.prod(part.shape) * dtype.itemsize:
            raise damaged_checkpoint(
                f"{self.manifest_path} is malformed: array {name!r} is "
                f"{part.dtype} {part.shape}, of {part.nbytes} bytes. Restore another "
                "checkpoint"
            )
        x = np.empty(part.shape, dtype)
        self._verify(part, f"array {name!r}", backend.as_bytes(x).data)
        return x

    def verify(self) -> None:
        """Verify the whole file.

        Raises:
            CheckpointError: if something is damaged; the message names the file and the
                array.
        """
        for name, part in self.manifest.arrays.items():
            self._verify(part, f"array {name!r}")
        self.verify_rest()

    def verify_rest(self) -> None:
        """Verify the part of the file after all arrays."""
        self._verify(self.manifest.rest, "the part after all arrays")

    def _verify(self, part: FilePart, what: str, into: memoryview = _NOTHING) -> None:
        found = _checksum(self._fd, part.start, part.end, into)
        if found != part.crc32:
            raise damaged_checkpoint(
                f"{self.array_path} is damaged: {what} has the checksum {found}, and "
                f"{part.crc32} in the manifest. Restore another checkpoint"
            )


def read_manifest(path: str) -> Manifest:
    """Return the manifest of a checkpoint.

    Args:
        path: the path of the checkpoint's directory.

    Raises:
        FileNotFoundError: if there is none.
        CheckpointError: if it is damaged.
    """
    return parse_manifest(_read_manifest(path), os.path.join(path, MANIFEST))


def _read_manifest(path: str) -> bytes:
    name = os.path.join(path, MANIFEST)
    try:
        with open(_open_regular(name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _LARGEST_MANIFEST:
                return file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"there is no checkpoint at {path!r}: expected a directory with a "
            f"{MANIFEST} there. A relative path begins at the directory that rank 0 "
            f"runs in, {os.getcwd()!r}"
        ) from None
    raise damaged_checkpoint(
        f"{name} is damaged: it has more than {_LARGEST_MANIFEST:,} bytes. Restore "
        "another checkpoint"
    )


def _open_regular(path: str) -> int:
    """Open a file to read; anything else may block, or never end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise damaged_checkpoint(f"{path} is damaged: it is not a regular file")


def _checksum(fd: int, start: int, end: int, into: memoryview = _NOTHING) -> str:
    """Return the checksum of a part of a file; read its last bytes into memory."""
    data_start = end - len(into)
    scratch = memoryview(bytearray(max(0, min(CHUNK_BYTES, data_start - start))))
    checksum = 0
    while start < end:
        if start < data_start:
            view = scratch[: data_start - start]
        else:
            view = into[start - data_start :][:CHUNK_BYTES]
        count = os.preadv(fd, [view], start)
        if count == 0:  # the file is shorter now: the checksum will be wrong
            break
        checksum = zlib.crc32(view[:count], checksum)
        start += count
    return f"{checksum:08x}"


def dtype_of(name: str) -> DType:
    """Return the dtype of that name; those of ml_dtypes if that is imported."""
    try:
        return np.dtype(name)
    except TypeError:
        raise TypeError(
            f"NumPy itself has no dtype {name}; write `import ml_dtypes` before"
        ) from None
