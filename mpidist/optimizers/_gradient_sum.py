"""The sum of gradients over the replicas."""

from __future__ import annotations

from mpidist._agreement.mismatch import Call
from mpidist._base import checksums
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array
from mpidist._collectives.plan import Plan
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.distributed import PerReplica
from mpidist._values.variable import Variable
from mpidist.optimizers._arguments import APPLY, as_gradient


def find_plan(group: ReplicaGroup, arrays: list[Array]) -> Plan | None:
    """Return how gradients are summed; None if there is nothing to sum."""
    collectives = group.collectives
    if collectives.comm.size == 1 or not arrays:
        return None
    return collectives.plans.find(ReduceOp.SUM, arrays, APPLY)


def sum_gradients(
    group: ReplicaGroup,
    plan: Plan | None,
    call: Call,
    arrays: list[Array],
    variables: list[Variable],
) -> list[Array]:
    """Return the sums over the replicas, the same on all ranks. Collective.

    Nothing changes before all ranks have agreed.

    Args:
        group: the ranks.
        plan: from `find_plan`.
        call: the contents of the header.
        arrays: the gradients of this replica.
        variables: of the gradients.
    """
    ops = group.custom_ops
    if plan is not None and ops is None:
        return plan(arrays, call)
    group.guard.agree(call)
    if ops is None or not arrays:
        return arrays
    # By the user's `CrossDeviceOps`; are the results the same on all ranks?
    number = group.registry.next_key()
    pairs = [
        (group.registry.wrap(PerReplica, x, (number, i)), variable)
        for i, (x, variable) in enumerate(zip(arrays, variables, strict=True))
    ]
    with context.entered(group.cross_frame):  # an exception is raised on all ranks
        sums = ops.batch_reduce(ReduceOp.SUM, pairs, None)
    with group.guard.checking(APPLY):
        results = [
            as_gradient(group, x, variable, False, True)
            for x, variable in zip(sums, variables, strict=True)
        ]
        text = f"{APPLY} with gradients that `cross_device_ops` has reduced to "
        if group.guard.checks:
            text += ", ".join(checksums.summarize(x) for x in results)
    group.guard.agree(Call(text))
    return results
