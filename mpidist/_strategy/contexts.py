"""The contexts that functions of users receive: for values, and in a loop of steps."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TypeAlias

from mpidist._base import nest
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._values.distributed import PerReplica


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
