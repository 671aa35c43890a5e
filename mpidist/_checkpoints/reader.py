"""Reading a checkpoint without MPI."""

from __future__ import annotations

import collections.abc
import os
import time
from collections.abc import Iterator
from typing import Any

from mpidist._checkpoints import storage


class CheckpointReader(collections.abc.Mapping[str, Any]):
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
        self._files = storage.Files(os.fspath(path))

    def __getitem__(self, name: str) -> Any:
        info = self._files.arrays[name]
        return self._files.read(name, storage.dtype_of(info.dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._files.arrays)

    def __len__(self) -> int:
        return len(self._files.arrays)

    def __repr__(self) -> str:
        content = self._files.content
        nbytes = sum(info.nbytes for info in self._files.arrays.values())
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._saved_at / 1e9))
        return (
            f"<mpidist.CheckpointReader of {self.path!r}: {len(self)} arrays of "
            f"{nbytes:,} bytes, {len(content['states'])} states, saved on "
            f"{self.num_replicas} replicas at {when}>"
        )

    def __str__(self) -> str:
        lines = [repr(self)]
        for name, info in self._files.arrays.items():
            lines.append(f"  {name}: {info.dtype} {info.shape}")
        for name, entry in self._files.content["states"].items():
            several = (
                f", one for each of {n}" if (n := len(entry["values"])) > 1 else ""
            )
            lines.append(f"  {name}: state{several}")
        return "\n".join(lines)

    @property
    def path(self) -> str:
        """The directory that it is read from."""
        return self._files.path

    @property
    def num_replicas(self) -> int:
        """The number of replicas that saved it."""
        return int(self._files.content["replicas"])

    @property
    def states(self) -> dict[str, tuple[Any, ...]]:
        """The states by name: one, or one for each replica if they differed."""
        return {
            name: tuple(storage.decode(value) for value in entry["values"])
            for name, entry in self._files.content["states"].items()
        }

    def verify(self) -> None:
        """Read everything, and verify all checksums.

        Raises:
            CheckpointError: if something is damaged; the message names the file and the
                array.
        """
        self._files.verify()

    @property
    def _saved_at(self) -> int:
        return int(self._files.content["saved_at_ns"])


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
