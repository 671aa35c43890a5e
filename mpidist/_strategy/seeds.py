"""`seed_all`: the random numbers of every library, for each rank."""

from __future__ import annotations

import random
from typing import SupportsIndex

import numpy as np

from mpidist._base import backend, guests, shuffle_seeds, threads
from mpidist._base.expect import as_int
from mpidist._runtime import context
from mpidist._strategy.strategy import Strategy, group_of
from mpidist.cluster import this_process


def seed_all(
    seed: SupportsIndex, *, per_rank: bool = True, strategy: Strategy | None = None
) -> np.random.Generator:
    """Seed the random numbers of Python, NumPy, CuPy and torch on this rank.

    Not collective; call it on all ranks, before they draw any. Streams of different
    ranks are independent (`numpy.random.SeedSequence`), so that each rank shuffles,
    augments and drops out in its own way. Shuffles of a `mpidist.data.Dataset` without
    a seed follow it too, all ranks alike. Initial values of variables are rank 0's, and
    `mpidist.torch.broadcast_parameters` makes those of modules the same.

    Libraries that have not been imported are not seeded. JAX has keys instead: pass
    ``jax.random.key(generator.integers(2**32))``. Replicas that are threads
    (`mpidist.testing`) share the generators of their process: use the one returned.

    Args:
        seed: an int, 0 or more; the same on all ranks.
        per_rank: whether each rank gets its own numbers; False: all get the same.
        strategy: its replica is the rank; default: the current strategy, and outside of
            every scope this process's rank in the job.

    Returns:
        A generator of this rank, seeded like them, for new code.

    Raises:
        TypeError, ValueError: if it is not such a seed.
    """
    number = as_int("seed_all", "seed", seed, least=0)
    key = (_rank(strategy),) if per_rank else ()
    sequence = np.random.SeedSequence(number, spawn_key=key)
    shuffle_seeds.begin(number)
    for_python, for_arrays, for_guests = sequence.generate_state(3).tolist()
    random.seed(for_python)
    backend.seed(for_arrays)
    guests.seed(for_guests)
    return np.random.default_rng(sequence)


def _rank(strategy: Strategy | None) -> int:
    if strategy is not None:
        return group_of(strategy).replica_id
    if context.has_strategy():
        return context.current().group.replica_id
    replica = threads.current()
    return this_process().rank if replica is None else replica.rank
