"""Reading a checkpoint without MPI."""

from __future__ import annotations

import collections.abc
import os
import time
from collections.abc import Iterator

from mpidist._base import guests
from mpidist._base.remedies import explain_attributes
from mpidist._base.types import HostArray
from mpidist._checkpoints import state_json, storage
from mpidist._checkpoints.state_json import State


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
        self._files = storage.CheckpointFiles(os.fspath(path))

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
