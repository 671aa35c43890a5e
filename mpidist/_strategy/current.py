"""The current strategy and replica context, its rank, and the random numbers there."""

from __future__ import annotations

import random
from typing import Any, SupportsIndex

import numpy as np

from mpidist._base import backend, guests, shuffle_seeds, threads
from mpidist._base.expect import as_int, expect
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._strategy import setup as setup  # makes the default strategy current
from mpidist._strategy.replica_context import ReplicaContext
from mpidist._strategy.strategy import Strategy, group_of
from mpidist.cluster import this_process


def get_strategy() -> Strategy:
    """Return the current strategy; outside every scope the default strategy.

    Never None. Inside ``scope()``, ``run``, ``merge_fn`` and ``update`` it is the
    strategy they belong to. Not collective.

    Example::

        with strategy.scope():
            mpidist.get_strategy() is strategy  # True
    """
    return context.current().group.strategy


def get_replica_context() -> ReplicaContext | Any:
    """Return the replica context, or None in cross-replica context.

    Outside every scope it is the default strategy's context: replica 0 of 1. Not
    collective.

    The return type includes ``Any`` for type checkers: in replica functions, where most
    programs call it, it is never None, and no test for None is needed.

    Example, on two replicas::

        def replica_fn():
            return mpidist.get_replica_context().num_replicas_in_sync  # 2


        strategy.run(replica_fn)
        with strategy.scope():
            mpidist.get_replica_context()  # None
    """
    return context.current().replica_context


def get_cross_replica_context() -> Strategy | None:
    """Return the strategy in cross-replica context, None in a replica context.

    Not collective. The opposite of `get_replica_context`. In TensorFlow it is
    deprecated.
    """
    frame = context.current()
    return frame.group.strategy if frame.replica_context is None else None


def group_of_call(strategy: Strategy | None, call: str) -> ReplicaGroup:
    """Return the group of a call that every rank makes, at program or replica level.

    Args:
        strategy: the argument of the call; None: the current strategy.
        call: its name, for messages.

    Raises:
        RuntimeError: outside every scope without a strategy; where one rank runs for
            all, or without communication; in the scope of another strategy.
    """
    frame = context.current()
    if frame.level in (context.Level.COORDINATOR, context.Level.UPDATE):
        raise RuntimeError(
            f"{call}: this code runs {frame.level.value}, but all ranks have to make "
            "this call; make it in the replica function, or at program level"
        )
    if strategy is None:
        if not context.has_strategy():
            raise RuntimeError(
                f"{call}: no strategy is active; call it in `with strategy.scope():` "
                "or in the function of `strategy.run`, or pass `strategy=strategy`"
            )
        return frame.group
    group = group_of(strategy, call)
    if context.has_strategy() and group is not frame.group:
        raise RuntimeError(
            f"{call}: Mixing different Strategy objects: got {strategy}, but "
            f"{frame.group} is the current strategy"
        )
    return group


def check_root(root: object, group: ReplicaGroup, call: str) -> None:
    """Raise if an argument is not the number of a rank.

    Raises:
        TypeError, ValueError: if it is not.
    """
    number, most = as_int(call, "root", root, least=0), group.num_replicas - 1
    expect(number <= most, call, f"`root` from 0 to {most}", root, error=ValueError)


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enter the scope of a strategy permanently, without ``with``. Not collective.

    Args:
        strategy: the strategy, which replaces one set before; None to leave the scope.

    Raises:
        RuntimeError: if called inside a ``with strategy.scope():`` block.
        TypeError: if it is not a strategy or None.
    """
    if strategy is None:
        context.push_global(None)
        return
    group = group_of(strategy, "experimental_set_strategy")
    context.push_global(context.Frame(group, context.Level.CROSS_REPLICA))


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

    Example::

        generator = mpidist.seed_all(1, strategy=strategy)
        noise = generator.normal(size=3)  # different on each rank
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
        return group_of(strategy, "seed_all").replica_id
    if context.has_strategy():
        return context.current().group.replica_id
    replica = threads.current()
    return this_process().rank if replica is None else replica.rank
