"""Scopes of strategies, and what warns of calls outside of every scope.

The default strategy, which is current there, has one replica, so its `all_reduce`
returns the value itself. In a program on several ranks that is a wrong sum, and nothing
else shows it: the first such call warns. In a thread that the function of a scope has
started it is never meant, so there it raises.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from mpidist._base import threads
from mpidist._base.errors import level_of_caller
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._values import creators

_S = TypeVar("_S")


class Scope(contextlib.ContextDecorator, Generic[_S]):
    """The scope of a strategy, for ``with``: entered once, several times, or nested.

    Args:
        group: the group of the strategy.
        strategy: what ``as`` gives.
    """

    def __init__(self, group: ReplicaGroup, strategy: _S) -> None:
        self._group = group
        self._strategy = strategy
        # For each time that it is entered: its frame, and the creators of variables.
        self._entered: list[tuple[Any, creators.Creators]] = []

    def __enter__(self) -> _S:
        """Enter cross-replica context; of the default strategy: change nothing."""
        frame: contextlib.AbstractContextManager[None] = context.scope(self._group)
        if not self._group.is_mpi:
            frame = contextlib.nullcontext()
        frame.__enter__()
        self._entered.append((frame, creators.current()))
        return self._strategy

    def __exit__(self, *error: object) -> None:
        """Leave the scope, unless a later one is still open."""
        frame, before = self._entered[-1]
        if error[0] is None and creators.current() != before:
            raise RuntimeError(
                f"Variable creator scope nesting error: the scope of {self._group} was "
                "left inside a `variable_creator_scope` that was entered in it; leave "
                "scopes in the reverse order, best with `with`"
            )
        frame.__exit__(*error)
        self._entered.pop()


# The groups of several ranks that this process is in, and that no warning has named.
_open = threads.ReplicaLocal(weakref.WeakSet[ReplicaGroup])


def note_open(group: ReplicaGroup) -> None:
    """Note that a strategy has been made."""
    if group.num_replicas > 1:
        _open.get().add(group)


def note_closed(group: ReplicaGroup) -> None:
    """Note that a strategy has been closed."""
    _open.get().discard(group)


def require_scope(call: str) -> None:
    """Raise if the caller is a thread that a function in a scope has started.

    A scope and a replica context belong to a thread. In another one the call would be
    of the default strategy, which has one replica.

    Args:
        call: the name of the call.

    Raises:
        RuntimeError: if another thread is in the scope of several replicas.
    """
    if threads.current() is not None:
        return  # the other threads may be other replicas
    group = context.entered_elsewhere()
    if group is not None:
        raise RuntimeError(
            f"[rank {group.replica_id}] {call}: the thread "
            f"{threading.current_thread().name!r} is in no scope, so each rank would "
            f"get its own value back, not one of all {group.num_replicas} replicas of "
            f"{group}, which another thread has entered. Enter it in this thread too, "
            "while that one waits: `with ctx:`, of the `ctx` that "
            "`mpidist.get_replica_context()` returned in the replica function; or at "
            "program level call `strategy.run(fn)` in this thread"
        )


def warn_of_own_value() -> None:
    """Warn, once until another is made, if the caller could mean a strategy.

    Raises:
        RuntimeError: as `require_scope`.
    """
    require_scope("all_reduce")
    for group in list(_open.get()):
        _open.get().clear()
        warnings.warn(
            f"[rank {group.replica_id}] all_reduce: this code runs outside of every "
            "scope, in the default strategy of one replica, so each rank gets its own "
            f"value back, not one of all {group.num_replicas} replicas of {group}; "
            "call it in a function that you pass to `strategy.run(fn)`",
            RuntimeWarning,
            stacklevel=level_of_caller(),
        )
        return


def checked(
    check: Callable[[], None], function: Callable[..., Nest]
) -> Callable[..., Nest]:
    """Return a function with a check before it, for the default strategy's calls."""

    def call(*args: Any, **kwargs: Any) -> Nest:
        check()
        return function(*args, **kwargs)

    return call
