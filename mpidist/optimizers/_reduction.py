"""The sum of gradients over the replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpidist._agreement.mismatch import Call
from mpidist._base import backend
from mpidist._base.options import ReduceOp
from mpidist._runtime import context
from mpidist._values.distributed import PerReplica
from mpidist._values.variable import Variable
from mpidist.optimizers._arguments import APPLY, as_gradient

if TYPE_CHECKING:
    from mpidist._engine import Plan
    from mpidist._strategy.strategy import Strategy


class Reduction:
    """The fused sum of gradients: all that can fail, then all that moves."""

    def __init__(
        self,
        strategy: Strategy,
        arrays: list[Any],
        variables: list[Variable],
    ) -> None:
        collectives = strategy.extended._collectives
        self._strategy = strategy
        self._arrays = arrays
        self._variables = variables
        self._plan: Plan | None = None
        self._by_user = bool(strategy.extended._custom_ops and arrays)
        self.text = f"{len(arrays)} gradients"
        if collectives.comm.size == 1 or not arrays:
            return
        plan = collectives.plans.find(ReduceOp.SUM, arrays, APPLY, collectives.options)
        self.text = plan.call.text
        if not self._by_user:
            self._plan = plan

    def run(self, call: Call) -> list[Any]:
        """Return the sums, which are the same on all ranks. Collective.

        Nothing is changed before all ranks have agreed.

        Args:
            call: what the header says.
        """
        if self._plan is not None:
            return self._plan(self._arrays, call)
        self._strategy.extended._collectives.guard.agree(call)
        return self._run_by_user() if self._by_user else self._arrays

    def _run_by_user(self) -> list[Any]:
        """Sum by the user's `CrossDeviceOps`, and see that all ranks got the same."""
        extended = self._strategy.extended
        collectives = extended._collectives
        number = extended._registry.next_key()
        pairs = [
            (extended._registry.wrap(PerReplica, x, (number, i)), variable)
            for i, (x, variable) in enumerate(
                zip(self._arrays, self._variables, strict=True)
            )
        ]
        frame = context.Frame(self._strategy, context.Level.CROSS_REPLICA)
        with context.entered(frame):  # what it raises, all ranks raise
            ops = extended._cross_device_ops
            sums = ops.batch_reduce(ReduceOp.SUM, pairs, None)
        try:
            results = [
                backend.contiguous(
                    as_gradient(self._strategy, x, variable, False, True)
                )
                for x, variable in zip(sums, self._variables, strict=True)
            ]
            call = f"{APPLY} with gradients that `cross_device_ops` has reduced to "
            if collectives.guard.checks:
                call += ", ".join(backend.summarize(x) for x in results)
        except Exception as error:
            collectives.invalid(APPLY, error)
        collectives.guard.agree(Call(call))
        return results
