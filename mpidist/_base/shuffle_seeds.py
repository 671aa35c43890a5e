"""The seeds of shuffles for which the program gives none.

They are numbered in the order in which the program makes them, so they differ from each
other, and are the same on all ranks and in each run. `mpidist.seed_all` begins anew.

Functions of the program that run while elements are read, in threads and on some ranks
only, would count in any order: there the seed is 0.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np

from mpidist._base import threads


class _Reading(threading.local):
    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exception: object) -> None:
        self.depth -= 1


reading: Final = _Reading()
"""A context manager around functions that run while elements are read."""

_made: Final = threads.ReplicaLocal(lambda: [0, 0])  # the program's seed, and a count


def begin(seed: int) -> None:
    """Begin anew, with the seeds that belong to a seed of the program."""
    position()[:] = seed, 0


def position() -> list[int]:
    """Return where the count of this replica is; assign to its items to go there."""
    return _made.get()


@contextlib.contextmanager
def counted_from(number: int) -> Iterator[None]:
    """Count from a number that the ranks share; go on where the count was."""
    made = position()
    before, made[1] = made[1], number << 32
    try:
        yield
    finally:
        made[1] = before


def next_seed() -> int:
    """Return the seed of the next shuffle."""
    if reading.depth:
        return 0
    seed, count = made = position()
    made[1] += 1
    sequence = np.random.SeedSequence(seed, spawn_key=(count,))
    return int(sequence.generate_state(1)[0])
