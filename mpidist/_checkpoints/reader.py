"""Reading the files of a checkpoint, without MPI."""

from __future__ import annotations

import collections.abc
import math
import os
import time
import weakref
from collections.abc import Iterator

import numpy as np

from mpidist._base import backend, guests
from mpidist._base.errors import CheckpointError, damaged_checkpoint
from mpidist._base.remedies import explain_attributes
from mpidist._base.types import HostArray
from mpidist._checkpoints import state_json
from mpidist._checkpoints.manifest import (
    MANIFEST,
    Part,
    open_regular,
    read_manifest,
)
from mpidist._checkpoints.state_json import State
from mpidist._checkpoints.storage import NOTHING, checksum


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
        seen = None
        while True:
            self.manifest = manifest = read_manifest(path)
            self.array_path = os.path.join(path, manifest.file)
            try:
                self._fd = open_regular(self.array_path)
                break
            except FileNotFoundError:
                # Replaced between the two reads? Then there is a new manifest.
                if manifest == seen:
                    raise damaged_checkpoint(
                        f"{self.array_path} is missing, but {MANIFEST} beside it names "
                        "it: a part of the checkpoint was deleted or not copied"
                    ) from None
                seen = manifest
        weakref.finalize(self, os.close, self._fd)
        size = os.fstat(self._fd).st_size
        if size != manifest.rest.end:
            raise damaged_checkpoint(
                f"{self.array_path} is damaged: expected {manifest.rest.end} bytes, "
                f"got {size}"
            )

    def read(self, name: str) -> HostArray:
        """Return an array, after verifying its part of the file."""
        part = self.manifest.arrays[name]
        try:
            dtype = guests.dtype_of(part.dtype)
        except TypeError as error:
            raise CheckpointError(
                f"{self.manifest_path}: array {name!r}: {error}"
            ) from None
        if part.nbytes != math.prod(part.shape) * dtype.itemsize:
            raise damaged_checkpoint(
                f"{self.manifest_path} is malformed: the entry ['arrays'][{name!r}] is "
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

    def _verify(self, part: Part, what: str, into: memoryview = NOTHING) -> None:
        found = checksum(self._fd, part.start, part.end, into)
        if found != part.crc32:
            raise damaged_checkpoint(
                f"{self.array_path} is damaged: {what} has the checksum {found}, and "
                f"{part.crc32} in the manifest. Restore another checkpoint"
            )


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
            CheckpointError: if it is damaged.
        """
        self._files = CheckpointFiles(os.fspath(path))

    def __getitem__(self, name: str) -> HostArray:
        if name in self._files.manifest.arrays:
            return self._files.read(name)
        names = ", ".join(map(repr, self)) or "nothing"
        raise KeyError(f"{name!r} is not among the arrays of {self.path!r}: {names}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._files.manifest.arrays)

    def __len__(self) -> int:
        return len(self._files.manifest.arrays)

    def __repr__(self) -> str:
        manifest = self._files.manifest
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
        for name, part in self._files.manifest.arrays.items():
            lines.append(f"  {name}: {part.dtype} {part.shape}")
        for name, values in self._files.manifest.states.items():
            several = f", one for each of {len(values)}" if len(values) > 1 else ""
            lines.append(f"  {name}: state{several}")
        return "\n".join(lines)

    @property
    def path(self) -> str:
        """The directory that it is read from."""
        return self._files.path

    @property
    def num_replicas(self) -> int:
        """The number of replicas that saved it."""
        return self._files.manifest.replicas

    @property
    def states(self) -> dict[str, tuple[State, ...]]:
        """The states by name: one, or one for each replica if they differed.

        Tensors of torch and JAX are NumPy arrays if the library was not imported.
        """
        return {
            name: tuple(state_json.unpack(value, self._tensor) for value in values)
            for name, values in self._files.manifest.states.items()
        }

    def _tensor(self, library: str, name: str, device: str) -> State:
        x = self._files.read(name)
        if library == "torch" and guests.library("torch") is not None:
            return guests.from_stored(x, "torch", device)
        if library == "jax" and guests.library("jax") is not None:
            return guests.from_stored(x, "jax", device)
        return x

    def verify(self) -> None:
        """Read everything, and verify all checksums.

        Raises:
            CheckpointError: if something is damaged; the message names the file and the
                array.
        """
        self._files.verify()


def load_checkpoint(path: str | os.PathLike[str]) -> CheckpointReader:
    """Open a checkpoint to read its arrays, without MPI. Not collective.

    Args:
        path: the path of the directory.

    Returns:
        A mapping of names to NumPy arrays; ``dict(load_checkpoint(path))`` reads all.

    Raises:
        FileNotFoundError: if there is none.
        CheckpointError: if it is damaged.
    """
    return CheckpointReader(path)
