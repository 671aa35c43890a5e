"""Functions that return the current strategy and replica context."""

from __future__ import annotations

from typing import Any

from mpidist._runtime import context
from mpidist._strategy import default as default  # makes itself current
from mpidist._strategy.replica_context import ReplicaContext
from mpidist._strategy.strategy import Strategy, group_of


def get_strategy() -> Strategy:
    """Return the current strategy; outside every scope the default strategy.

    Never None. Inside ``scope()``, ``run``, ``merge_fn`` and ``update`` it is the
    strategy they belong to. Not collective.
    """
    strategy: Strategy = context.current().group.strategy
    return strategy


def get_replica_context() -> ReplicaContext | Any:
    """Return the replica context, or None in cross-replica context.

    Outside every scope it is the default strategy's context: replica 0 of 1. Not
    collective.

    The return type includes ``Any`` for type checkers: in replica functions, where most
    programs call it, it is never None, and no test for None is needed.
    """
    return context.current().replica_context


def get_cross_replica_context() -> Strategy | None:
    """Return the strategy in cross-replica context, None in a replica context.

    Not collective. The opposite of `get_replica_context`. In TensorFlow it is
    deprecated.
    """
    frame = context.current()
    return frame.group.strategy if frame.replica_context is None else None


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
    given: object = strategy
    if not isinstance(given, Strategy):
        raise TypeError(
            "experimental_set_strategy: expected a `mpidist.Strategy` or None, got "
            f"{strategy!r}"
        )
    context.push_global(context.Frame(group_of(given), context.Level.CROSS_REPLICA))
