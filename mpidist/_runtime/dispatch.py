"""Executes cross-replica calls: immediately, or as commands of the coordinator.

An *operation* is a function ``operation(group, *args)`` that every rank runs, with the
same effect on all. At program level all ranks call it. Inside ``merge_fn`` only rank 0
calls it: the call becomes a command, and then every rank runs the same operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias, TypeVar

from mpidist._base.environment import debugging
from mpidist._base.hints import add_hint
from mpidist._base.interactive import without_own_frames
from mpidist._base.types import Nest
from mpidist._runtime import context, interruptions
from mpidist._runtime.group import ReplicaGroup


class OnRank0:
    """An argument that only rank 0 uses: commands carry None in its place."""

    def __init__(self, value: Nest) -> None:
        self.value = value

    def __reduce__(self) -> tuple[type[OnRank0], tuple[None]]:
        return (OnRank0, (None,))


# `Any` is what an operation returns, and what it takes after the group: each has its
# own arguments.
Operation: TypeAlias = Callable[..., Any]
_F = TypeVar("_F", bound=Operation)

_operations: Final[dict[str, Operation]] = {}


def operation(name: str) -> Callable[[_F], _F]:
    """Register a function as the operation of that name."""

    def register(function: _F) -> _F:
        _operations[name] = function
        return function

    return register


def perform(group: ReplicaGroup, name: str, *args: Any, call: str = "") -> Any:
    """Check that a cross-replica call is legal here, and execute it.

    Args:
        group: the group that the call is for.
        name: the name of the operation.
        args: the arguments of the operation.
        call: the name that the user wrote, if it is another one.

    Raises:
        RuntimeError: in a replica context, or in the scope of another strategy.
    """
    try:
        frame = context.require_cross_replica(group, call or name)
        if frame.coordinator is not None:
            return frame.coordinator.command(name, args)
        return _operations[name](group, *args)
    except BaseException as error:
        interruptions.left(group, call or name, error)
        # Users look for their own code. Not in a section: its end finds out from the
        # frames of this package whether the exception came in it (`is_interruption`).
        if not group.guard.sections and not debugging():
            add_hint(error)  # it looks at these frames
            error.__traceback__ = without_own_frames(error.__traceback__)
        raise


def execute(group: ReplicaGroup, name: str, args: tuple[Any, ...]) -> Any:
    """Run the operation on this rank."""
    return _operations[name](group, *args)


def checking(group: ReplicaGroup, call: str) -> AbstractContextManager[None]:
    """Return a context for checks of the arguments of a cross-replica call.

    What they raise is raised on all ranks; inside ``merge_fn``, which rank 0 runs
    alone, on rank 0.
    """
    if context.current().coordinator is not None:
        return contextlib.nullcontext()
    return group.guard.checking(call)


def check_arguments(call: str, args: object, kwargs: object) -> None:
    """Raise if ``args`` or ``kwargs`` cannot be passed to a function.

    Raises:
        ValueError: if ``args`` is not a list or tuple (as in TensorFlow).
        TypeError: if ``kwargs`` is not a dict with strings as keys.
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
