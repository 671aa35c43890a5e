"""Which strategy, and at which of the levels, the current thread runs.

A stack of frames per thread. Strategies push themselves; this module knows none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpidist._merge.coordinator import Coordinator
    from mpidist._strategy.replica_context import ReplicaContext
    from mpidist._strategy.strategy import Strategy


class Level(enum.Enum):
    """What kind of code runs, and with it which calls are legal."""

    CROSS_REPLICA = "in cross-replica context"
    REPLICA = "in a replica context (inside `strategy.run`)"
    COORDINATOR = "inside merge_fn"
    UPDATE = "inside the function of `update`"


@dataclasses.dataclass(slots=True, eq=False)  # frozen ones are slow to make
class Frame:
    """One entry of the stack; not to be changed.

    ``written`` collects the variables that the function of an update writes.
    ``sync_on_read`` says that reading an ON_READ variable in a replica aggregates it.
    """

    strategy: Strategy
    level: Level
    replica_context: ReplicaContext | None = None
    coordinator: Coordinator | None = None
    written: list[Any] | None = None
    sync_on_read: bool = False


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.scope_is_global = False
        self.used = False


_stack = _Stack()
_defaults: list[Frame] = []


def set_default(frame: Frame) -> None:
    """Say what holds where no strategy is in force."""
    _defaults[:] = [frame]


def current() -> Frame:
    """Return the innermost frame; the default one outside every scope."""
    frames = _stack.frames
    return frames[-1] if frames else _defaults[0]


def depth() -> int:
    """Return the number of frames that are in force."""
    return len(_stack.frames)


class entered:  # noqa: N801 - written as a function: `with entered(frame):`
    """Make ``frame`` the innermost one, for the length of a ``with`` block."""

    __slots__ = ("_frame", "_frames")

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def __enter__(self) -> None:
        self._frames = frames = _stack.frames
        frames.append(self._frame)

    def __exit__(self, *error: object) -> None:
        frames = self._frames
        if frames[-1] is not self._frame:
            raise RuntimeError(
                f"a scope of {self._frame.strategy} was left while a later one is "
                "still open; leave scopes in the reverse order, best by `with`"
            )
        frames.pop()


def push_global(frame: Frame | None) -> None:
    """Enter, replace or leave the scope that needs no ``with``."""
    if (_stack.frames and not _stack.scope_is_global) or len(_stack.frames) > 1:
        raise RuntimeError(
            "Must not be called inside a `Strategy` scope. "
            "`experimental_set_strategy` is for the top level of a program; leave the "
            "`with strategy.scope():` block first"
        )
    _stack.frames[:] = [] if frame is None else [frame]
    _stack.scope_is_global = frame is not None


def get_strategy() -> Strategy:
    """Return the strategy in force; outside every scope the default strategy.

    Never None. Inside ``scope()``, ``run``, ``merge_fn`` and ``update`` it is the
    strategy that these belong to. Not collective.
    """
    return current().strategy


def has_strategy() -> bool:
    """Return whether a strategy other than the default one is in force.

    Not collective.
    """
    return current().strategy is not _defaults[0].strategy


def get_replica_context() -> ReplicaContext | None:
    """Return the replica context, or None in cross-replica context.

    Outside every scope it is that of the default strategy: replica 0 of 1. Not
    collective.
    """
    return current().replica_context


def get_cross_replica_context() -> Strategy | None:
    """Return the strategy in cross-replica context, and None in a replica context.

    Not collective. The opposite of `get_replica_context`; TensorFlow has it among its
    deprecated names.
    """
    frame = current()
    return frame.strategy if frame.replica_context is None else None


@contextlib.contextmanager
def variable_sync_on_read_context() -> Iterator[None]:
    """In a replica function: make reading an ON_READ variable aggregate its copies.

    Not collective by itself; each read inside it is, so all replicas must make the
    same ones. All ways to read count: `Variable.value`, `Variable.read_value`,
    `Variable.numpy`, operators, and NumPy functions. In cross-replica context reading
    aggregates anyway.

    Example, on two replicas, with an ON_READ variable ``total`` of aggregation SUM::

        def fn():
            total.assign(5.0)
            with mpidist.variable_sync_on_read_context():
                return total + 2.0  # 12.0: both copies, and 2
    """
    frame = current()
    if frame.replica_context is None or not _stack.frames:
        yield
        return
    with entered(dataclasses.replace(frame, sync_on_read=True)):
        yield


def in_cross_replica_context() -> bool:
    """Return whether `get_replica_context` returns None.

    True in ``scope()``, in ``merge_fn`` and in the function of ``update``. Not
    collective.
    """
    return current().replica_context is None


def require_cross_replica(strategy: Strategy, call: str) -> Frame:
    """Return the frame if ``call`` of ``strategy`` is legal here, else raise."""
    frame = current()
    if _stack.frames and frame.strategy is not strategy:
        raise RuntimeError(
            f"{call}: Mixing different Strategy objects: {frame.strategy} is not "
            f"{strategy}. Leave the scope of the first one, or make the call on "
            "`mpidist.get_strategy()`"
        )
    if frame.level is Level.REPLICA and _stack.frames:
        raise RuntimeError(
            f"{call}: Method requires being in cross-replica context, use "
            f"get_replica_context().merge_call(). This code runs {frame.level.value}: "
            f"{_instead(call)}"
        )
    if strategy is not _defaults[0].strategy:
        _stack.used = True
    return frame


def was_used() -> bool:
    """Return whether this thread has made a call of a strategy, or been in its scope.

    The default strategy does not count.
    """
    return _stack.used


def _instead(call: str) -> str:
    name = call.split(".")[-1]
    if name in ("reduce", "reduce_to", "batch_reduce_to"):
        return "write `mpidist.get_replica_context().all_reduce(op, value)`"
    if name == "gather":
        return (
            "use get_replica_context().all_gather() instead: write "
            "`mpidist.get_replica_context().all_gather(value, axis)`"
        )
    return (
        f"call `{name}` outside `strategy.run`, or in a function that you pass to "
        "`mpidist.get_replica_context().merge_call(...)`"
    )
