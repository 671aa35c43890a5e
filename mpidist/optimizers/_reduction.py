"""The sum of gradients over the replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpidist import _arrays, _context, _nest
from mpidist._options import ReduceOp
from mpidist._reports import Call
from mpidist._values import PerReplica
from mpidist._variables import Variable
from mpidist.optimizers._arguments import APPLY, as_gradient

if TYPE_CHECKING:
    from mpidist import _collectives
    from mpidist._strategy import Strategy
    from mpidist.optimizers._optimizer import Optimizer


class Reduction:
    """The fused sum of gradients: all that can fail, then all that moves."""

    def __init__(
        self,
        optimizer: Optimizer,
        strategy: Strategy,
        arrays: list[Any],
        variables: list[Variable],
    ) -> None:
        collectives = strategy.extended._collectives
        self._strategy = strategy
        self._arrays = arrays
        self._variables = variables
        self._reduction: _collectives.Reduction | None = None
        self._by_user = bool(strategy.extended._custom_ops and arrays)
        self.text = f"{len(arrays)} gradients"
        if collectives.comm.size == 1 or not arrays:
            return
        structure = _nest.flatten(arrays)[1]
        plan = collectives._plan(
            ReduceOp.SUM, structure, arrays, APPLY, collectives.options
        )
        self.text = plan.call.text
        if self._by_user:
            return
        self._reduction = collectives.reserve(
            plan, arrays, results=lambda: _kept(optimizer, plan, arrays)
        )

    def agree(self, call: Call) -> None:
        """Agree with the other ranks, before anything is changed. Collective."""
        collectives = self._strategy.extended._collectives
        if self._reduction is None:
            collectives.guard.agree(call)
        else:
            collectives.agree(call, self._reduction)

    def run(self) -> list[Any]:
        """Return the sums, which are the same on all ranks. Collective.

        They are to be read at once: they may be in memory that the next reduction
        writes to.
        """
        if self._by_user:
            return self._run_by_user()
        if self._reduction is None:
            return self._arrays  # of one replica
        collectives = self._strategy.extended._collectives
        return collectives.sum_for_once(self._reduction)

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
        frame = _context.Frame(self._strategy, _context.Level.CROSS_REPLICA)
        with _context.entered(frame):  # what it raises, all ranks raise
            ops = extended._cross_device_ops
            sums = ops.batch_reduce(ReduceOp.SUM, pairs, None)
        try:
            results = [
                _arrays.contiguous(
                    as_gradient(self._strategy, x, variable, False, True)
                )
                for x, variable in zip(sums, self._variables, strict=True)
            ]
            call = f"{APPLY} with gradients that `cross_device_ops` has reduced to "
            if collectives.guard.checks:
                call += ", ".join(_arrays.summarize(x) for x in results)
        except Exception as error:
            collectives.invalid(APPLY, error)
        collectives.guard.agree(Call(call))
        return results


def _kept(optimizer: Optimizer, plan: Any, arrays: list[Any]) -> list[Any]:
    """Return arrays for sums, kept from step to step."""
    if optimizer._reduced_plan is not plan:
        optimizer._reduced_plan = None
        optimizer._reduced = []  # first, so that there are never two sets
        optimizer._reduced = [
            _arrays.empty_like(x, leaf.shape, leaf.reduction.result)
            for x, leaf in zip(arrays, plan.leaves, strict=True)
        ]
        optimizer._reduced_plan = plan
    return optimizer._reduced
