"""What `Strategy.scope` returns: a context manager that may be entered repeatedly."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any, Generic, TypeVar

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the scope, unless a later one is still open."""
        frame, before = self._entered[-1]
        if kind is None and creators.current() != before:
            raise RuntimeError(
                f"Variable creator scope nesting error: the scope of {self._group} was "
                "left inside a `variable_creator_scope` that was entered in it; leave "
                "scopes in the reverse order, best with `with`"
            )
        frame.__exit__(kind, error, trace)
        self._entered.pop()
