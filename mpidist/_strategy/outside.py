"""A warning for reductions outside of every scope, where each rank is on its own.

The default strategy has one replica, so its `all_reduce` returns the value itself. In a
program on several ranks that is a wrong sum, and nothing else shows it.
"""

from __future__ import annotations

import warnings
import weakref

from mpidist._base.errors import level_of_caller
from mpidist._base.threads import ReplicaLocal
from mpidist._runtime.group import ReplicaGroup


def _make() -> weakref.WeakSet[ReplicaGroup]:
    return weakref.WeakSet()


# The groups of several ranks that this process is in, and that no warning has named.
_open = ReplicaLocal(_make)


def note_open(group: ReplicaGroup) -> None:
    """Note that a strategy has been made."""
    if group.num_replicas > 1:
        _open.get().add(group)


def note_closed(group: ReplicaGroup) -> None:
    """Note that a strategy has been closed."""
    _open.get().discard(group)


def warn_of_own_value() -> None:
    """Warn, once until another is made, if the caller could mean a strategy."""
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
