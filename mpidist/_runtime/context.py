"""Which group of replicas, and at which of the levels, the current thread runs.

A stack of frames per thread. Strategies push frames of their groups.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import threading
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

from mpidist._base import reporting
from mpidist._runtime.group import ReplicaGroup

_E = TypeVar("_E", bound=tuple[Any, ...])


class Level(enum.Enum):
    """What kind of code runs, and with it which calls are legal."""

    CROSS_REPLICA = "in cross-replica context"
    REPLICA = "in a replica context (inside `strategy.run`)"
    COORDINATOR = "inside merge_fn"
    UPDATE = "inside the function of `update`"


@dataclasses.dataclass(slots=True, eq=False)  # frozen ones are slow to make
class Frame:
    """One entry of the stack; do not change it. ``with frame:`` makes it the innermost.

    ``batch`` is told of each `Variable` that the function of an update writes.
    ``sync_on_read`` says that reading an ON_READ variable in a replica aggregates it.
    """

    group: ReplicaGroup
    level: Level
    replica_context: Any = None  # a `mpidist.ReplicaContext`, handed to users
    # Their classes are defined above this file.
    coordinator: Any = None  # in merge_fn a `Coordinator`, by which all ranks act
    batch: Any = None  # an `UpdateBatch`
    sync_on_read: bool = False

    def __enter__(self) -> None:
        _stack.frames.append(self)

    def __exit__(self, *error: object) -> None:
        frames = _stack.frames
        if self not in frames:  # Python may close a generator in any thread
            frames = next((x for x in _elsewhere() if self in x), _Frames([self]))
        if frames[-1] is self:
            frames.pop()
        elif error[0] is GeneratorExit:
            frames.remove(self)  # another generator's may be open inside
        elif error[0] is not None:
            # It may have come in the last line of a block inside this one.
            del frames[frames.index(self) :]
        else:
            raise RuntimeError(
                f"a scope of {self.group} was left while a later one is still open; "
                "leave scopes in the reverse order, best with `with`"
            )


class _Frames(list[Frame]):
    """The frames of one thread: a list to which there can be weak references."""


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames = _threads[threading.get_ident()] = _Frames()
        self.scope_is_global = False
        self.used = False


_threads: weakref.WeakValueDictionary[int, _Frames] = weakref.WeakValueDictionary()
_stack = _Stack()
_users: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_defaults: list[Frame] = []


def set_default(frame: Frame) -> None:
    """Set the frame that applies when no strategy is active."""
    _defaults[:] = [frame]


def current() -> Frame:
    """Return the innermost frame; the default one outside every scope."""
    frames = _stack.frames
    return frames[-1] if frames else _defaults[0]


def entered_elsewhere() -> ReplicaGroup | None:
    """Return a group of several replicas that another thread has entered, if any."""
    groups = (frame.group for frames in _elsewhere() for frame in list(frames))
    return next((group for group in groups if group.num_replicas > 1), None)


def runs_elsewhere(group: ReplicaGroup) -> bool:
    """Return whether another thread is in a replica function of a group."""
    return any(group.replica_frame in frames for frames in _elsewhere())


def _elsewhere() -> Iterator[_Frames]:
    """Return the lists of other threads."""
    for reference in _threads.valuerefs():
        frames = reference()
        if frames is not None and frames is not _stack.frames:
            yield frames


def depth() -> int:
    """Return the number of frames on the stack of this thread."""
    return len(_stack.frames)


def last_of_thread(entries: list[_E]) -> _E:
    """Return the last entry of this thread into the ``with`` blocks of an object.

    Of another, if there is none: Python may close a generator in any thread.

    Args:
        entries: each is the number of a thread, and what it has entered.
    """
    own = [one for one in entries if one[0] == threading.get_ident()]
    return (own or entries)[-1]


def unwind() -> None:
    """Drop the frames of a call that an exception has ended, at any line.

    An exception in the last lines of a ``with`` block may leave its frame behind. The
    scopes and replica contexts that the program has entered stay.
    """
    frames = _stack.frames
    for number, frame in enumerate(frames):
        if _is_of_call(frame):
            del frames[number:]
            return


def _is_of_call(frame: Frame) -> bool:
    """Return whether a call of mpidist has entered a frame, not the program."""
    return (
        frame.level in (Level.COORDINATOR, Level.UPDATE)
        or frame is frame.group.cross_frame
        or frame is frame.group.replica_frame
    )


def scope(group: ReplicaGroup) -> Frame:
    """Return what enters cross-replica context: `Strategy.scope`. Not collective.

    Raises:
        RuntimeError: inside the scope of another strategy, or in a replica function;
            of the default strategy inside any scope.
    """
    if group is _defaults[0].group:
        if _stack.frames:
            raise RuntimeError(
                "Must not nest Strategy scopes: the default strategy's scope cannot "
                f"be entered inside that of {current().group}"
            )
        return Frame(group, Level.CROSS_REPLICA)
    frame = require_cross_replica(group, "scope")
    if frame.coordinator is None:
        return Frame(group, Level.CROSS_REPLICA)
    return dataclasses.replace(frame)  # in merge_fn, which it stays


def push_global(frame: Frame | None) -> None:
    """Enter, replace or leave the scope that is used without ``with``."""
    if (_stack.frames and not _stack.scope_is_global) or len(_stack.frames) > 1:
        raise RuntimeError(
            "Must not be called inside a `Strategy` scope. "
            "`experimental_set_strategy` is for the top level of a program; leave the "
            "`with strategy.scope():` block first"
        )
    _stack.frames[:] = [] if frame is None else [frame]
    _stack.scope_is_global = frame is not None


def in_global_scope() -> bool:
    """Return whether this code is at program level, in the scope of `push_global`."""
    return _stack.scope_is_global and len(_stack.frames) == 1


def has_strategy() -> bool:
    """Return whether a strategy other than the default one is active.

    Not collective.
    """
    return current().group is not _defaults[0].group


@contextlib.contextmanager
def variable_sync_on_read_context() -> Iterator[None]:
    """In a replica function: make reading an ON_READ variable aggregate its copies.

    Not collective by itself. Each read inside it is collective, so all replicas must
    make the same ones. This applies to all kinds of reading: `Variable.value`,
    `Variable.read_value`, `Variable.numpy`, operators, and NumPy functions. In
    cross-replica context reading always aggregates.

    Example, on two replicas::

        def replica_fn():
            total.assign(5.0)
            with mpidist.variable_sync_on_read_context():
                return total + 2.0  # np.float64(12.0)


        with strategy.scope():
            total = mpidist.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        strategy.run(replica_fn)
    """
    frame = current()
    if frame.replica_context is None or not _stack.frames:
        yield
        return
    with dataclasses.replace(frame, sync_on_read=True):
        yield


def in_cross_replica_context() -> bool:
    """Return whether `get_replica_context` returns None.

    True in ``scope()``, in ``merge_fn`` and in the function of ``update``. Not
    collective.
    """
    return current().replica_context is None


def require_cross_replica(group: ReplicaGroup, call: str) -> Frame:
    """Return the frame if ``call`` of this group is legal here, else raise."""
    frames = _stack.frames
    frame = frames[-1] if frames else _defaults[0]
    if frames and frame.group is not group:
        raise RuntimeError(
            f"{call}: Mixing different Strategy objects: {frame.group} is not "
            f"{group}. Leave the scope of the first one, or make the call on "
            "`mpidist.get_strategy()`"
        )
    if frame.level is Level.REPLICA and frames:
        raise RuntimeError(
            f"{call}: Method requires being in cross-replica context, use "
            f"get_replica_context().merge_call(). This code runs {frame.level.value}: "
            f"{_instead(call)}"
        )
    if not _stack.used:
        note_use(group, call)
    return frame


def is_in_replica(group: ReplicaGroup) -> bool:
    """Return whether this code runs in a replica function of this group."""
    if not _stack.frames:
        return False
    frame = _stack.frames[-1]
    return frame.level is Level.REPLICA and frame.group is group


def require_program_level(group: ReplicaGroup, call: str) -> None:
    """Raise unless every rank of this group runs this code, outside `Strategy.run`.

    For calls in which every rank takes part with something of its own: iterators,
    checkpoints. In ``merge_fn`` one rank acts for all.
    """
    if _stack.frames:
        frame = current()
        if frame.level is not Level.CROSS_REPLICA:
            alone = frame.level is not Level.REPLICA
            raise RuntimeError(
                f"{call}: expected to be called at program level, by every rank; this "
                f"code runs {frame.level.value}"
                f"{', where one rank acts for all' if alone else ''}. Call it before "
                "or after `strategy.run`, and pass its result as an argument"
            )
        if frame.group is not group:
            raise RuntimeError(
                f"{call}: Mixing different Strategy objects: it belongs to {group}, "
                f"but the scope of {frame.group} is entered; leave that scope first"
            )
    note_use(group, call)


def note_use(group: ReplicaGroup, call: str) -> None:
    """Note that this thread calls a strategy.

    Raises:
        RuntimeError: if it writes a report, in the middle of another call.
    """
    if not _stack.used and group is not _defaults[0].group:
        if reporting.is_reporting():
            raise RuntimeError(
                f"{call}: called while mpidist writes a report, by a logging handler, "
                "for example. The rank may be in the middle of another call, and the "
                "other ranks do not make this one; a handler may only write"
            )
        _stack.used = True
        _users.add(threading.current_thread())


def was_used() -> bool:
    """Return whether this thread has called a strategy, or was in its scope.

    The default strategy does not count.
    """
    return _stack.used


def other_users() -> list[threading.Thread]:
    """Return the other threads that live and for which `was_used` holds."""
    own = threading.current_thread()
    return [one for one in list(_users) if one is not own and one.is_alive()]


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
