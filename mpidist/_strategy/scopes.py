"""The strategy and the replica context in force, as users ask for them."""

from __future__ import annotations

from typing import Any

from mpidist._runtime import context
from mpidist._strategy import default as default  # puts itself in force
from mpidist._strategy.replica_context import ReplicaContext
from mpidist._strategy.strategy import Strategy, group_of


def get_strategy() -> Strategy:
    """Return the strategy in force; outside every scope the default strategy.

    Never None. Inside ``scope()``, ``run``, ``merge_fn`` and ``update`` it is the
    strategy that these belong to. Not collective.
    """
    strategy: Strategy = context.current().group.strategy
    return strategy


def get_replica_context() -> ReplicaContext | Any:
    """Return the replica context, or None in cross-replica context.

    Outside every scope it is that of the default strategy: replica 0 of 1. Not
    collective.

    For type checkers it may be anything else too: in replica functions, where most
    programs call it, it is never None, and is used without a test for that.
    """
    return context.current().replica_context


def get_cross_replica_context() -> Strategy | None:
    """Return the strategy in cross-replica context, and None in a replica context.

    Not collective. The opposite of `get_replica_context`; TensorFlow has it among its
    deprecated names.
    """
    frame = context.current()
    return frame.group.strategy if frame.replica_context is None else None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enter the scope of a strategy for good, without ``with``. Not collective.

    Args:
        strategy: the strategy, in place of one that was set before; None to leave.

    Raises:
        RuntimeError: inside a ``with strategy.scope():`` block.
        TypeError: for anything but a strategy or None.
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
