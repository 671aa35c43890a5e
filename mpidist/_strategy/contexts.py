"""The contexts that functions of users receive: for values, and in a loop of steps.

And what a replica context checks: where it is used, and the arrays of begun calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

from mpidist._base import backend, checksums, nest
from mpidist._base.environment import debugging
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._values.distributed import PerReplica

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


class _HasNext(Protocol):
    """An iterator."""

    def __next__(self) -> Nest: ...


class _HasGetNext(Protocol):
    """A `mpidist.DistributedIterator`, or an object like one."""

    def get_next(self) -> Nest:
        """Return the next element."""


Steps: TypeAlias = _HasNext | _HasGetNext
"""The elements that a loop takes, one for each step."""


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
    leaves = nest.flatten(output)[0]
    rows: tuple[Nest, ...] = strategy.experimental_local_results(output)
    if any(isinstance(leaf, PerReplica) for leaf in leaves):
        return rows
    number: int = strategy.num_replicas_in_sync
    return rows[:1] * number  # the same on all replicas


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
    raise RuntimeError(
        f"ReplicaContext.{call}: Mismatching {what}; write "
        f"`mpidist.get_replica_context().{call}(...)`"
    )


def checker(name: str, value: Nest) -> Callable[[], None] | None:
    """Return a function that raises if a nest has changed since.

    None without ``MPIDIST_DEBUG``, and for a nest that the call refuses.
    """

    def digests() -> list[str]:
        arrays = [x for x in nest.flatten(value)[0] if backend.is_array(x)]
        return [checksums.summarize(backend.as_array(x, name)[0]) for x in arrays]

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
