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

The manifest also holds the small states (random generators, iterators; `state_json`);
tensors of states are arrays. Nothing is ever pickled. Version 2 had no such tensors,
and is read in the same way. A manifest may have the right checksum and still be
malformed: `read_manifest` checks every entry, before anything is allocated.

The checksum is CRC-32 (`zlib.crc32`): it detects every error burst of up to 32 bits,
and misses 1 in 2**32 of other errors. Measured on one core: 2.1 GB/s, SHA-256: 0.8
GB/s. It does not protect against deliberate changes.

Rejected: reading by `zipfile` and `numpy.load` (they check the members' CRC-32, but do
not notice a flipped bit in 152 of the 530 bytes of a file with two small arrays: fields
of the zip's headers; safetensors has no checksums; and each chunk is copied once more);
the writer of the ``safetensors`` package (it wants all arrays on the host). The
formats: NumPy's NEP 1, and https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Final, Literal

import numpy as np

from mpidist._base import backend
from mpidist._base.types import DType, HostArray
from mpidist._checkpoints.exchange import Values
from mpidist._checkpoints.manifest import (
    MANIFEST,
    Manifest,
    Part,
    end_of,
    write_manifest,
)
from mpidist._checkpoints.state_json import Json, Stored, host_copy

CHUNK_BYTES: Final = 2**23
FileFormat = Literal["npz", "safetensors"]
_Written = Iterator[tuple[str, HostArray]]

NOTHING: Final = memoryview(b"")


def write_checkpoint(
    directory: str,
    number: int,
    arrays: Mapping[str, Stored],
    states: Values,
    replicas: int,
    file_format: FileFormat,
    saved_at_ns: int,
) -> None:
    """Write the files of a checkpoint, and synchronise them to disk.

    There is never a second copy of all arrays.

    Args:
        directory: the path of an empty directory.
        number: the number in the name of the array file.
        arrays: all arrays, by name: those of variables, and those of the states.
        states: the states, by name.
        replicas: the number of replicas.
        file_format: the format of the array file.
        saved_at_ns: the time, for the manifest.
    """
    name = f"arrays-{number}.{file_format}"
    parts: dict[str, Part] = {}
    with open(os.path.join(directory, name), "x+b") as file:

        def part_of_file() -> tuple[int, int, str]:
            file.flush()
            start, end = end_of(parts), file.tell()
            return start, end, checksum(file.fileno(), start, end)

        write = _write_npz if file_format == "npz" else _write_safetensors
        for array, x in write(file, arrays):
            parts[array] = Part(*part_of_file(), x.dtype.name, x.shape, x.nbytes)
        rest = Part(*part_of_file())
        os.fsync(file.fileno())
    manifest = Manifest(replicas, saved_at_ns, name, parts, rest, states)
    write_manifest(os.path.join(directory, MANIFEST), manifest)


def check_format(arrays: Mapping[str, Stored], file_format: object) -> None:
    """Raise if the format is unknown, or does not support one of the dtypes."""
    if file_format not in ("npz", "safetensors"):
        raise ValueError(
            f'Checkpoint.save: expected `format` to be "npz" or "safetensors", got '
            f"{file_format!r}"
        )
    for name, x in arrays.items():
        if file_format == "safetensors" and not _safetensors_name(x.dtype):
            raise ValueError(
                f"Checkpoint.save: {name!r} is {x.dtype.name} {tuple(x.shape)}, and "
                f'safetensors has no dtype {x.dtype.name}; write `format="npz"`'
            )


def _safetensors_name(dtype: DType) -> str:
    """Return the name of a dtype in safetensors, such as "BF16"; "" if it has none."""
    if dtype.name == "bool":
        return "BOOL"
    found = re.fullmatch(r"(uint|int|bfloat|float)(8|16|32|64)", dtype.name)
    if found is None:
        return ""
    return {"uint": "U", "int": "I", "bfloat": "BF", "float": "F"}[found[1]] + found[2]


def _write_npz(file: IO[bytes], arrays: Mapping[str, Stored]) -> _Written:
    # Unlike numpy.savez, one array at a time is on the host.
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            x = backend.contiguous(host_copy(array))
            plain = x.view(f"u{x.dtype.itemsize}") if x.dtype.kind == "V" else x
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, plain, allow_pickle=False)
            yield name, x


def _write_safetensors(file: IO[bytes], arrays: Mapping[str, Stored]) -> _Written:
    entries: dict[str, Json] = {}
    end = 0
    for name, x in arrays.items():
        start, end = end, end + int(x.nbytes)
        entries[name] = {
            "dtype": _safetensors_name(x.dtype),
            "shape": list(x.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, array in arrays.items():
        host = backend.contiguous(host_copy(array))
        file.write(backend.as_bytes(host).data)
        yield name, host


def checksum(fd: int, start: int, end: int, into: memoryview = NOTHING) -> str:
    """Return the checksum of a part of a file; read its last bytes into memory."""
    data_start = end - len(into)
    scratch = memoryview(bytearray(max(0, min(CHUNK_BYTES, data_start - start))))
    found = 0
    while start < end:
        if start < data_start:
            view = scratch[: data_start - start]
        else:
            view = into[start - data_start :][:CHUNK_BYTES]
        count = os.preadv(fd, [view], start)
        if count == 0:  # the file is shorter now: the checksum will be wrong
            break
        found = zlib.crc32(view[:count], found)
        start += count
    return f"{found:08x}"
