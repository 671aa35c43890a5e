"""Carries out cross-replica calls: at once, or as commands of the coordinator.

An *operation* is a function ``operation(group, *args)`` that every rank runs, with the
same effect on all. At program level all ranks call it. Inside ``merge_fn`` only rank 0
does: there the call becomes a command, and then every rank runs the very same
operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup


class OnRank0:
    """An argument of which only rank 0's counts: no command carries it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return (OnRank0, (None,))


_operations: dict[str, Callable[..., Any]] = {}


def operation(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the operation of that name."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _operations[name] = function
        return function

    return register


def perform(group: ReplicaGroup, name: str, *args: Any, call: str = "") -> Any:
    """Check that a cross-replica call is legal here, and carry it out.

    Args:
        group: whose call it is.
        name: of the operation.
        args: of the operation.
        call: the name that the user wrote, where it is another.

    Raises:
        RuntimeError: in a replica context, or in the scope of another strategy.
    """
    frame = context.require_cross_replica(group, call or name)
    if frame.coordinator is not None:
        return frame.coordinator.command(name, args)
    return execute(group, name, args)


def execute(group: ReplicaGroup, name: str, args: tuple[Any, ...]) -> Any:
    """Run the operation on this rank."""
    return _operations[name](group, *args)


def refuse(group: ReplicaGroup, call: str, error: Exception) -> NoReturn:
    """Raise an error that a cross-replica call found in its arguments.

    Inside ``merge_fn`` on rank 0, which runs it alone; otherwise on all ranks.
    """
    if context.current().coordinator is not None:
        raise error
    group.collectives.invalid(call, error)


def check_arguments(call: str, args: object, kwargs: object) -> None:
    """Raise for ``args`` or ``kwargs`` that cannot be passed on.

    Raises:
        ValueError: if ``args`` is no list or tuple (as TensorFlow has it).
        TypeError: if ``kwargs`` is no dict with string keys.
    """
    if not isinstance(args, (list, tuple)):
        raise ValueError(
            f"{call}: positional args must be a list or tuple, got {type(args)}; write "
            "`args=(value,)` for one argument"
        )
    if type(kwargs) is dict and not kwargs:
        return
    if not isinstance(kwargs, dict) or not all(isinstance(k, str) for k in kwargs):
        raise TypeError(
            f"{call}: expected `kwargs` to be a dict with names as keys, got {kwargs!r}"
        )
