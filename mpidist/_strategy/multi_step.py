"""A loop of steps over an iterator, as in the first version of tf.distribute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np

from mpidist._base import nest
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.distributed import PerReplica


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
    """

    def __init__(self) -> None:
        """Start with no outputs."""
        self._last_step_outputs: dict[str, Nest] = {}
        self._non_tensor_outputs: dict[str, Nest] = {}

    @property
    def last_step_outputs(self) -> dict[str, Nest]:
        """The values last stored by `set_last_step_output`, by name."""
        return self._last_step_outputs

    @property
    def non_tensor_outputs(self) -> dict[str, Nest]:
        """The values last stored by `set_non_tensor_output`, by name."""
        return self._non_tensor_outputs

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
        if reduce_op is None:
            if not context.in_cross_replica_context():
                raise ValueError(
                    "set_last_step_output: expected a `reduce_op` in a replica "
                    "function, since each replica has its own output; write "
                    "`reduce_op=mpidist.ReduceOp.MEAN`, or return the output and set "
                    "it in cross-replica context"
                )
            self._last_step_outputs[name] = output
            return
        replica_context = context.current().replica_context
        if replica_context is None:
            strategy = context.current().group.strategy
            output = strategy.reduce(reduce_op, output, axis=None)
        else:
            output = replica_context.all_reduce(reduce_op, output)
        self._last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: Nest) -> None:
        """Store an output of any type. Collective in a replica function.

        There it stores a tuple with the outputs of all replicas, on all of them.
        """
        replica_context = context.current().replica_context
        if replica_context is not None:
            output = replica_context.merge_call(_all_of, args=(output,))
        self._non_tensor_outputs[name] = output

    def __repr__(self) -> str:
        return (
            f"<mpidist.MultiStepContext: outputs {sorted(self._last_step_outputs)}, "
            f"other outputs {sorted(self._non_tensor_outputs)}>"
        )


# `Strategy` is defined in a module that imports this one.
def _all_of(strategy: Any, output: Nest) -> tuple[Nest, ...]:
    leaves = nest.flatten(output)[0]
    rows: tuple[Nest, ...] = strategy.experimental_local_results(output)
    if any(isinstance(leaf, PerReplica) for leaf in leaves):
        return rows
    number: int = strategy.num_replicas_in_sync
    return rows[:1] * number  # the same on all replicas


def check_iterations(iterations: object) -> None:
    """Raise if a number of steps is invalid.

    Raises:
        TypeError: if it is not an int.
        ValueError: if it is less than 1.
    """
    if isinstance(iterations, bool) or not isinstance(iterations, (int, np.integer)):
        raise TypeError(
            "experimental_run_steps_on_iterator: expected `iterations` to be an int, "
            f"got {iterations!r}"
        )
    if iterations < 1:
        raise ValueError(
            "experimental_run_steps_on_iterator: expected 1 or more `iterations`, got "
            f"{iterations}"
        )


def run_steps(
    group: ReplicaGroup,
    fn: Callable[[MultiStepContext, Nest], object],
    iterator: Steps,
    iterations: int,
    initial_loop_values: dict[str, Nest] | None,
) -> MultiStepContext:
    """Call ``fn(context, next element)`` a number of times. Collective."""
    step_context = MultiStepContext()
    step_context.last_step_outputs.update(initial_loop_values or {})
    with context.scope(group):
        for _ in range(iterations):
            if hasattr(iterator, "get_next"):
                element = iterator.get_next()
            else:
                element = next(iterator)
            fn(step_context, element)
    return step_context
