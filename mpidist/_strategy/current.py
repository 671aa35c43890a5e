"""Functions that return the current strategy and replica context."""

from __future__ import annotations

from typing import Any

from mpidist._base.expect import as_int, expect
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._strategy import setup as setup  # makes the default strategy current
from mpidist._strategy.replica_context import ReplicaContext
from mpidist._strategy.strategy import Strategy, group_of


def get_strategy() -> Strategy:
    """Return the current strategy; outside every scope the default strategy.

    Never None. Inside ``scope()``, ``run``, ``merge_fn`` and ``update`` it is the
    strategy they belong to. Not collective.
    """
    return context.current().group.strategy


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
    group = group_of(strategy)
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
    call, is_one = "experimental_set_strategy", isinstance(strategy, Strategy)
    expect(is_one, call, "a `mpidist.Strategy` or None", strategy)
    context.push_global(context.Frame(group_of(strategy), context.Level.CROSS_REPLICA))
