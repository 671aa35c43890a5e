"""Scopes, the contexts that functions receive, and what is checked where they are used.

The default strategy, which is current outside of every scope, has one replica, so its
`all_reduce` and `reduce` return the value itself. In a program on several ranks that is
a wrong sum, and nothing else shows it: the first such call warns. In a thread that the
function of a scope has started it is never meant, so there it raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from mpidist._base import checksums, nest, threads
from mpidist._base.environment import debugging, read_environment
from mpidist._base.errors import warn_caller
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Nest
from mpidist._mpi import library
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._values import creators

_S = TypeVar("_S")

_IN_UPDATE: Final = (
    "It cannot communicate: make the call before `update`, and pass the result in its "
    "`args`"
)
_REDUCE: Final = "Write `strategy.reduce(op, value, axis=None)` here"
_GATHER: Final = "Write `strategy.gather(value, axis)` here"
_INSTEAD: Final = {
    "all_reduce": _REDUCE,
    "all_reduce_async": _REDUCE,
    "all_gather": _GATHER,
    "all_gather_async": _GATHER,
    "merge_call": "Here the function can be called as it is: `merge_fn(strategy, ...)`",
}


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """The replica that a value is created for.

    `Strategy.experimental_distribute_values_from_function` passes one to its
    ``value_fn``; it can also be created directly.

    Attributes:
        replica_id_in_sync_group: the number of the replica, from 0.
        num_replicas_in_sync: the number of replicas.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __repr__(self) -> str:
        return (
            f"mpidist.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )


class MultiStepContext:
    """Collects the outputs of the steps of a loop.

    `StrategyExtended.experimental_run_steps_on_iterator` creates one, passes it to each
    step, and returns it.

    Attributes:
        last_step_outputs: the values last stored by `set_last_step_output`, by name.
        non_tensor_outputs: the values last stored by `set_non_tensor_output`, by name.
    """

    def __init__(self) -> None:
        """Start with no outputs."""
        self.last_step_outputs: dict[str, Nest] = {}
        self.non_tensor_outputs: dict[str, Nest] = {}

    @property
    def run_op(self) -> None:
        """None: there are no graphs, so there is no operation."""
        return

    def set_last_step_output(
        self, name: str, output: Nest, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Store an output of this step. Collective if there is a ``reduce_op``.

        Args:
            name: the key of the output.
            output: a nest; in cross-replica context a nest of `PerReplica`, if it is to
                be reduced.
            reduce_op: how it is combined over the replicas, element by element. None:
                it is stored unchanged. Required in a replica function.

        Raises:
            ValueError: if ``reduce_op`` is missing in a replica function.
        """
        in_replica = context.current().replica_context
        if reduce_op is None:
            if in_replica is not None:
                raise ValueError(
                    "set_last_step_output: expected a `reduce_op` in a replica "
                    "function, since each replica has its own output; write "
                    "`reduce_op=mpidist.ReduceOp.MEAN`, or return the output and set "
                    "it in cross-replica context"
                )
        elif in_replica is not None:
            output = in_replica.all_reduce(reduce_op, output)
        else:
            strategy = context.current().group.strategy
            output = strategy.reduce(reduce_op, output, axis=None)
        self.last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: Nest) -> None:
        """Store an output of any type. Collective in a replica function.

        There it stores a tuple with the outputs of all replicas, on all of them.
        """
        replica_context = context.current().replica_context
        if replica_context is not None:
            output = replica_context.merge_call(_all_of, args=(output,))
        self.non_tensor_outputs[name] = output

    def __repr__(self) -> str:
        return (
            f"<mpidist.MultiStepContext: outputs {sorted(self.last_step_outputs)}, "
            f"other outputs {sorted(self.non_tensor_outputs)}>"
        )


# `Strategy` is defined in a module that imports this one.
def _all_of(strategy: Any, output: Nest) -> tuple[Nest, ...]:
    rows: tuple[Nest, ...] = strategy.experimental_local_results(output)
    number: int = strategy.num_replicas_in_sync
    return rows if len(rows) == number else rows * number  # the same on all replicas


# Any: a `ReplicaContext`, whose module imports this one.
def require_current(own: Any, call: str) -> None:
    """Raise unless a replica context is that of the code which makes a call.

    Raises:
        RuntimeError: if it is not.
    """
    frame = context.current()
    if frame.replica_context is own:
        return
    if frame.replica_context is None:
        in_update = frame.level is context.Level.UPDATE
        raise RuntimeError(
            f"ReplicaContext.{call}: Need to be inside `call_for_each_replica()`: "
            f"this code runs {frame.level.value}. "
            f"{_IN_UPDATE if in_update else _INSTEAD[call]}"
        )
    what = f"ReplicaContext: another context of {own.strategy} is current"
    if frame.group.strategy is not own.strategy:
        what = f"Strategy objects: {frame.group} is not {own.strategy}"
    write = f"write `mpidist.get_replica_context().{call}(...)`"
    if not frame.group.is_mpi:  # whose result would be this rank's own
        write = (
            "this thread is in no scope. Make the call in a function that you pass to "
            "`strategy.run(fn)`; in a thread that such a function has started, and "
            "waits for, write it in `with ctx:`, of the function's context"
        )
    raise RuntimeError(f"ReplicaContext.{call}: Mismatching {what}; {write}")


def checker(name: str, value: Nest) -> Callable[[], None] | None:
    """Return a function that raises if a nest has changed since.

    None without ``MPIDIST_DEBUG``, and for a nest that the call refuses.
    """

    def digests() -> tuple[nest.Structure, list[str]]:
        leaves, structure = nest.flatten(value)
        return structure, [checksums.summarize_value(x, name) for x in leaves]

    def check() -> None:
        if digests() != before:
            raise RuntimeError(
                f"{name}: its `value` has changed since the call was begun, before "
                "`result()`: on some rank the result may have parts of both values; "
                "write to another array, or pass a copy"
            )

    if debugging():
        with contextlib.suppress(Exception):  # which the call raises, too
            before = digests()
            return check
    return None


# --- scopes -------------------------------------------------------------------------


class Scope(contextlib.ContextDecorator, Generic[_S]):
    """The scope of a strategy, for ``with``: entered once, several times, or nested.

    Args:
        group: the group of the strategy.
        strategy: what ``as`` gives.
    """

    def __init__(self, group: ReplicaGroup, strategy: _S) -> None:
        self._group = group
        self._strategy = strategy
        # For each time that it is entered: the thread, its frame, and the creators of
        # variables.
        self._entered: list[tuple[int, Any, creators.Creators]] = []

    def __enter__(self) -> _S:
        """Enter cross-replica context; of the default strategy: change nothing."""
        frame: contextlib.AbstractContextManager[None] = context.scope(self._group)
        if not self._group.is_mpi:
            if threads.current() is None and not read_environment().alone:
                library.check_uses_mpi()
            frame = contextlib.nullcontext()
        frame.__enter__()
        self._entered.append((threading.get_ident(), frame, creators.current()))
        return self._strategy

    def __exit__(self, *error: object) -> None:
        """Leave the scope, unless a later one is still open."""
        entry = _, frame, before = context.last_of_thread(self._entered)
        if error[0] is None and creators.current() != before:
            raise RuntimeError(
                f"Variable creator scope nesting error: the scope of {self._group} was "
                "left inside a `variable_creator_scope` that was entered in it; leave "
                "scopes in the reverse order, best with `with`"
            )
        frame.__exit__(*error)
        self._entered.remove(entry)


# The groups of several ranks that have been made here, and that no warning has named.
_open = threads.ReplicaLocal(weakref.WeakSet[ReplicaGroup])


def note_open(group: ReplicaGroup) -> None:
    """Note that a strategy has been made."""
    if group.num_replicas > 1:
        _open.get().add(group)


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


def warn_of_own_value(call: str = "all_reduce") -> None:
    """Warn, once until another is made, if the caller could mean a strategy.

    Args:
        call: the name of the call.

    Raises:
        RuntimeError: as `require_scope`.
    """
    require_scope(call)
    refused = context.has_strategy()  # which the call itself says
    found = [x for x in _open.get() if not (refused or x.guard.broken)]
    for group in found[:1]:
        _open.get().clear()
        where = "in a function that you pass to `strategy.run(fn)`"
        if call.startswith("Strategy."):
            where = "on the strategy that you have made, or in `with strategy.scope():`"
        warn_caller(
            f"[rank {group.replica_id}] {call}: this code runs outside of every scope, "
            "in the default strategy of one replica, so each rank gets its own "
            f"value back, not one of all {group.num_replicas} replicas of {group}; "
            f"call it {where}"
        )


def checked(
    check: Callable[[], None], function: Callable[..., Nest]
) -> Callable[..., Nest]:
    """Return a function with a check before it, for the default strategy's calls."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Nest:
        check()
        return function(*args, **kwargs)

    return call
