"""The sum of gradients over the replicas."""

from __future__ import annotations

from mpidist._agreement.mismatch import Call
from mpidist._base import backend, checksums
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array
from mpidist._engine.plan import Plan
from mpidist._runtime import context
from mpidist._runtime.group import BatchReducer, ReplicaGroup
from mpidist._values.distributed import PerReplica
from mpidist._values.variable import Variable
from mpidist.optimizers._arguments import APPLY, as_gradient


class GradientSum:
    """The fused sum of gradients: everything that can fail, then the transfer."""

    def __init__(
        self,
        group: ReplicaGroup,
        arrays: list[Array],
        variables: list[Variable],
    ) -> None:
        collectives = group.collectives
        self._group = group
        self._arrays = arrays
        self._variables = variables
        self._plan: Plan | None = None
        self._ops = group.custom_ops if arrays else None
        self.text = f"{len(arrays)} gradients"
        if collectives.comm.size == 1 or not arrays:
            return
        plan = collectives.plans.find(ReduceOp.SUM, arrays, APPLY)
        self.text = plan.call.text
        if self._ops is None:
            self._plan = plan

    def run(self, call: Call) -> list[Array]:
        """Return the sums, which are the same on all ranks. Collective.

        Nothing changes before all ranks have agreed.

        Args:
            call: the contents of the header.
        """
        if self._plan is not None:
            return self._plan(self._arrays, call)
        self._group.guard.agree(call)
        ops = self._ops
        return self._arrays if ops is None else self._run_by_user(ops)

    def _run_by_user(self, ops: BatchReducer) -> list[Array]:
        """Sum with the user's `CrossDeviceOps`; check that all ranks got the same."""
        group = self._group
        collectives = group.collectives
        number = group.registry.next_key()
        pairs = [
            (group.registry.wrap(PerReplica, x, (number, i)), variable)
            for i, (x, variable) in enumerate(
                zip(self._arrays, self._variables, strict=True)
            )
        ]
        with context.entered(group.cross_frame):  # an exception is raised on all ranks
            sums = ops.batch_reduce(ReduceOp.SUM, pairs, None)
        try:
            results = [
                backend.contiguous(as_gradient(self._group, x, variable, False, True))
                for x, variable in zip(sums, self._variables, strict=True)
            ]
            call = f"{APPLY} with gradients that `cross_device_ops` has reduced to "
            if collectives.guard.checks:
                call += ", ".join(checksums.summarize(x) for x in results)
        except Exception as error:
            collectives.invalid(APPLY, error)
        collectives.guard.agree(Call(call))
        return results
