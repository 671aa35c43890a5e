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
and is read in the same way.

The checksum is CRC-32 (`zlib.crc32`): it detects every error burst of up to 32 bits,
and misses 1 in 2**32 of other errors. Measured on one core: 2.1 GB/s, SHA-256: 0.8
GB/s. It does not protect against deliberate changes.

The formats: NumPy's NEP 1, and https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import collections.abc
import json
import math
import os
import time
import weakref
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Final, Literal

import numpy as np

from mpidist._base import backend, guests, state_json
from mpidist._base.errors import CheckpointError, damaged_checkpoint
from mpidist._base.expect import expect
from mpidist._base.remedies import explain_attributes
from mpidist._base.state_json import Json, State, Stored, host_copy
from mpidist._base.types import HostArray
from mpidist._checkpoints import manifest as manifests
from mpidist._checkpoints.exchange import Values
from mpidist._checkpoints.manifest import MANIFEST, Manifest, Part

CHUNK_BYTES: Final = 2**23
FileFormat = Literal["npz", "safetensors"]
_Written = Iterator[tuple[str, HostArray]]

_SAFETENSORS: Final = {  # its names of dtypes
    **{f"int{n}": f"I{n}" for n in (8, 16, 32, 64)},
    **{f"uint{n}": f"U{n}" for n in (8, 16, 32, 64)},
    **{f"float{n}": f"F{n}" for n in (16, 32, 64)},
    "bfloat16": "BF16",
    "bool": "BOOL",
}
_NOTHING: Final = memoryview(b"")


def write_checkpoint(
    directory: str,
    number: int,
    arrays: Mapping[str, Stored],
    states: Values,
    replicas: int,
    file_format: FileFormat,
    saved_at_ns: int,
) -> None:
    """Write the files of a checkpoint to an empty directory, and synchronise them.

    There is never a second copy of all arrays.
    """
    name = f"arrays-{number}.{file_format}"
    parts: dict[str, Part] = {}
    with open(os.path.join(directory, name), "x+b") as file:

        def part_of_file() -> tuple[int, int, str]:
            file.flush()
            start, end = manifests.end_of(parts), file.tell()
            return start, end, _checksum(file.fileno(), start, end)

        write = _write_npz if file_format == "npz" else _write_safetensors
        for array, x in write(file, arrays):
            parts[array] = Part(*part_of_file(), x.dtype.name, x.shape, x.nbytes)
        rest = Part(*part_of_file())
        os.fsync(file.fileno())
    manifest = Manifest(replicas, saved_at_ns, name, parts, rest, states)
    manifests.write_manifest(os.path.join(directory, MANIFEST), manifest)


def check_format(arrays: Mapping[str, Stored], file_format: object) -> None:
    """Raise if the format is unknown, or does not support one of the dtypes."""
    call, what = "Checkpoint.save", '`format` to be "npz" or "safetensors"'
    known = file_format in ("npz", "safetensors")
    expect(known, call, what, file_format, error=ValueError)
    for name, x in arrays.items():
        if file_format == "safetensors" and x.dtype.name not in _SAFETENSORS:
            raise ValueError(
                f"{call}: {name!r} is {x.dtype.name} {tuple(x.shape)}, and "
                f'safetensors has no dtype {x.dtype.name}; write `format="npz"`'
            )


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
            "dtype": _SAFETENSORS[x.dtype.name],
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


def _checksum(fd: int, start: int, end: int, into: memoryview = _NOTHING) -> str:
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


# --- reading ------------------------------------------------------------------------


@explain_attributes
class CheckpointReader(collections.abc.Mapping[str, HostArray]):
    """The arrays of a checkpoint by name, read when they are accessed.

    `load_checkpoint` creates it. It needs no strategy and no MPI, does not communicate,
    and stays readable if the checkpoint is replaced or deleted meanwhile. Each array is
    verified as it is read. ``print(reader)`` lists them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a checkpoint.

        Raises:
            FileNotFoundError: if there is none.
            CheckpointError: if the manifest is damaged, or the array file is missing or
                has a different size.
        """
        self._path = os.fspath(path)
        seen = None
        while True:
            self._manifest = manifest = manifests.read_manifest(self._path)
            self._array_path = os.path.join(self._path, manifest.file)
            try:
                # Open from now on: it stays when the checkpoint is replaced.
                self._fd = manifests.open_regular(self._array_path)
                break
            except FileNotFoundError:
                # Replaced between the two reads? Then there is a new manifest.
                if manifest == seen:
                    raise damaged_checkpoint(
                        f"{self._array_path} is missing, but {MANIFEST} beside it "
                        "names it: a part of the checkpoint was deleted or not copied"
                    ) from None
                seen = manifest
        weakref.finalize(self, os.close, self._fd)
        size = os.fstat(self._fd).st_size
        if size != manifest.rest.end:
            raise damaged_checkpoint(
                f"{self._array_path} is damaged: expected {manifest.rest.end} bytes, "
                f"got {size}"
            )

    def __getitem__(self, name: str) -> HostArray:
        part = self._manifest.arrays.get(name)
        if part is None:
            names = ", ".join(map(repr, self)) or "nothing"
            raise KeyError(
                f"{name!r} is not among the arrays of {self._path!r}: {names}"
            )
        try:
            dtype = guests.dtype_of(part.dtype)
        except TypeError as error:
            at = os.path.join(self._path, MANIFEST)
            raise CheckpointError(f"{at}: array {name!r}: {error}") from None
        if part.nbytes != math.prod(part.shape) * dtype.itemsize:
            raise manifests.malformed(
                self._path,
                f"the entry ['arrays'][{name!r}] is {part.dtype} {part.shape}, of "
                f"{part.nbytes} bytes",
            )
        x = np.empty(part.shape, dtype)
        self._verify(part, f"array {name!r}", backend.as_bytes(x).data)
        return x

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.arrays)

    def __len__(self) -> int:
        return len(self._manifest.arrays)

    def __repr__(self) -> str:
        manifest = self._manifest
        nbytes = sum(part.nbytes for part in manifest.arrays.values())
        saved_at = time.localtime(manifest.saved_at_ns / 1e9)
        when = time.strftime("%Y-%m-%d %H:%M:%S", saved_at)
        return (
            f"<mpidist.CheckpointReader of {self.path!r}: {len(self)} arrays of "
            f"{nbytes:,} bytes, {len(manifest.states)} states, saved on "
            f"{self.num_replicas} replicas at {when}>"
        )

    def __str__(self) -> str:
        lines = [repr(self)]
        for name, part in self._manifest.arrays.items():
            lines.append(f"  {name}: {part.dtype} {part.shape}")
        for name, values in self._manifest.states.items():
            several = f", one for each of {len(values)}" if len(values) > 1 else ""
            lines.append(f"  {name}: state{several}")
        return "\n".join(lines)

    @property
    def path(self) -> str:
        """The directory that it is read from."""
        return self._path

    @property
    def num_replicas(self) -> int:
        """The number of replicas that saved it."""
        return self._manifest.replicas

    @property
    def states(self) -> dict[str, tuple[State, ...]]:
        """The states by name: one, or one for each replica if they differed.

        Tensors of torch and JAX are NumPy arrays if the library was not imported.
        """
        tensor = state_json.tensors_from(self.__getitem__, imports=False)
        return {
            name: tuple(state_json.unpack(value, tensor) for value in values)
            for name, values in self._manifest.states.items()
        }

    def verify(self) -> None:
        """Read everything, and verify all checksums.

        Raises:
            CheckpointError: if something is damaged; the message names the file and the
                array.
        """
        for name, part in self._manifest.arrays.items():
            self._verify(part, f"array {name!r}")
        self._verify_rest()

    def _verify_rest(self) -> None:
        self._verify(self._manifest.rest, "the part after all arrays")

    def _verify(self, part: Part, what: str, into: memoryview = _NOTHING) -> None:
        found = _checksum(self._fd, part.start, part.end, into)
        if found != part.crc32:
            raise damaged_checkpoint(
                f"{self._array_path} is damaged: {what} has the checksum {found}, and "
                f"{part.crc32} in the manifest. Restore another checkpoint"
            )


def manifest_of(reader: CheckpointReader) -> Manifest:
    """Return the manifest of an open checkpoint."""
    return reader._manifest


def read_arrays(reader: CheckpointReader, names: Iterable[str]) -> dict[str, HostArray]:
    """Return some arrays, after verifying them, and what the file has after all."""
    reader._verify_rest()
    return {name: reader[name] for name in names}
