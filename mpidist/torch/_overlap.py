"""Gradients that are reduced while the backward pass computes others.

torch calls a hook when it has accumulated the gradient of a parameter. In the first
step hooks only note the order, and how often each parameter is ready until `step`.
Rank 0's order divides the parameters into *buckets*, the same on all ranks. From then
on a bucket is begun when all its gradients are ready, and those before it are begun.
The last bucket, and those that are not full, are begun by `step`. So between two steps
each rank begins every bucket once, in the same order, whatever its backward passes do.

What a bucket was begun with may not be what `step` finds: after another backward pass,
a `zero_grad`, or a change by the program. A tensor's identity and version show that.
Each rank says which buckets are *stale* with its last bucket, and all reduce these once
more. If that happens again in the next step, all buckets wait for `step` from then on.

Parameters without a gradient on some rank are in the last bucket, once they are known,
and so are those with a sparse one, which no backward pass may change meanwhile.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from mpidist._agreement.async_calls import CollectiveHandle
from mpidist._base import reporting, threads
from mpidist._base.reduce_op import ReduceOp
from mpidist._runtime.begin_async import begin_async
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.interruptions import tells
from mpidist.torch._gradients import (
    FLAGS,
    PRESENT,
    Named,
    Sums,
    assign,
    gradients_of,
    reduce_gradients,
    set_hooks,
    sums_of,
)

BUCKET_BYTES: Final = 4 * 2**20
# Of fewer gradients buckets are smaller, so that the first is reduced while the
# backward pass computes the others: DistributedDataParallel's first has this size, too.
_LEAST_BUCKET_BYTES: Final = 2**20
_BUCKETS: Final = 8
# How often a tensor was written to, counted by torch; documented, if not by its name.
_version_of: Final = operator.attrgetter("_version")
_is_view: Final = operator.methodcaller("_is_view")  # it shares the version of another
_all: Final = threads.ReplicaLocal(weakref.WeakSet["Overlap"])


@dataclasses.dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        named: the parameters, in the order in which they are ready.
        text: of the bucket, for messages.
        waiting: how many of them are not ready.
        handle: of the reduction, once it is begun.
        taken: the gradients that it was begun with, and their versions.
    """

    named: Named
    text: str
    waiting: int = 0
    handle: CollectiveHandle[Sums] | None = None
    taken: Sequence[tuple[torch.Tensor | None, int]] = ()

    def is_stale(self) -> bool:
        """Return whether gradients are not those that it was begun with."""
        return not all(
            _is_same(now, *before)
            for now, before in zip(gradients_of(self.named), self.taken, strict=True)
        )


@dataclasses.dataclass(eq=False)
class _Plan:
    """The buckets of one list of parameters.

    Attributes:
        group: the ranks.
        named: the parameters.
        number: of this plan: no other optimizer's has the same.
        order: their numbers, in the order in which rank 0 has them ready.
        counts: how often each is ready until a step.
        last: the numbers of those that are in the last bucket.
    """

    group: ReplicaGroup
    named: Named
    number: int
    order: list[int]
    counts: list[int]
    last: set[int]

    def __post_init__(self) -> None:
        named, order, last = self.named, self.order, self.last
        self.failures = self.group.guard.reports.failures
        members: list[list[int]] = [[]]
        share = sum(p.nbytes for _, p in named) // _BUCKETS
        enough = min(BUCKET_BYTES, max(_LEAST_BUCKET_BYTES, share))
        nbytes = 0
        for i in order:
            if i in last:
                continue
            if nbytes >= enough:
                members.append([])
                nbytes = 0
            members[-1].append(i)
            nbytes += named[i][1].nbytes
        members[-1] += [i for i in order if i in last]
        self.buckets = [
            _Bucket([named[i] for i in some], f"bucket {k + 1} of {len(members)}")
            for k, some in enumerate(members)
        ]
        self._bucket_of = {
            id(p): bucket for bucket in self.buckets for _, p in bucket.named
        }
        self.restart()

    def is_usable(self) -> bool:
        """Return whether the ranks have begun the same buckets, and can begin more."""
        guard = self.group.guard
        return not guard.broken and self.failures == guard.reports.failures

    def restart(self) -> None:
        """Wait for the gradients of the next step."""
        self._left: dict[int, int] = {
            id(p): n for (_, p), n in zip(self.named, self.counts, strict=True)
        }
        self.waits = False  # for `step`, with all buckets
        self.next = 0
        for bucket in self.buckets:
            bucket.waiting, bucket.handle = len(bucket.named), None
            bucket.taken = ()

    def note(self, parameter: torch.Tensor) -> bool:
        """Note a gradient; return whether the next bucket can be begun."""
        left = self._left.get(id(parameter), 0)
        if left:
            self._left[id(parameter)] = left - 1
            if left == 1:
                self._bucket_of[id(parameter)].waiting -= 1
        return self.next < len(self.buckets) - 1 and not self.buckets[self.next].waiting


class Overlap:
    """The reductions of one optimizer's gradients.

    Args:
        op: MEAN or SUM.
        call: the name of the step, for messages.
    """

    def __init__(self, op: ReduceOp, call: str) -> None:
        self._op, self._call = op, call
        self._plan: _Plan | None = None
        # One that the program has dropped may still be there on some ranks, since they
        # collect garbage at different times: those before this one begin nothing.
        for other in _all.get():
            if other._plan is not None:
                other._plan.waits = True
        _all.get().add(self)
        self._ready: dict[int, int] = {}  # since the last step: how often, in order
        self._found: dict[int, tuple[torch.Tensor | None, int, str]] = {}  # then
        self._hooks: dict[int, Any] = {}
        self._redone = 0  # steps in which buckets were stale, one after the other
        self._holds = False

    def watch(self, named: Named) -> None:
        """Have torch call this object when a gradient is ready."""
        set_hooks(self._hooks, named, self._note)

    def stop(self) -> None:
        """Have torch call nothing, until the next `reduce`."""
        while self._hooks:
            self._hooks.popitem()[1].remove()
        self._forget()

    @tells("DistributedOptimizer.step")
    def _note(self, parameter: torch.Tensor) -> None:
        """Note that a gradient is ready, and begin what can be begun."""
        plan = self._plan
        if plan is not None and not plan.is_usable():
            self._forget()
            plan = None
        if plan is None:
            self._ready[id(parameter)] = self._ready.get(id(parameter), 0) + 1
            gradient = parameter.grad
            self._found[id(parameter)] = (*_with_version(gradient), _sum_of(gradient))
            return
        can_begin = plan.note(parameter)
        while can_begin and not (self._holds or plan.waits):
            self._begin(plan)
            bucket = plan.buckets[plan.next]
            can_begin = bucket is not plan.buckets[-1] and not bucket.waiting

    @property
    def _group(self) -> ReplicaGroup | None:
        return None if self._plan is None else self._plan.group

    @property
    def passes(self) -> int:
        """How many backward passes were noted before the first reduction.

        The least of the parameters: some are ready several times in a pass, those of a
        module that is used several times under reentrant checkpointing.
        """
        return min(self._ready.values(), default=0)

    def restart(self) -> None:
        """Forget these passes: the program forgets their gradients."""
        self._ready = {}

    def warn_of_changes(self, group: ReplicaGroup, named: Named) -> None:
        """Warn if the program has changed gradients before the first reduction."""
        found, self._found = self._found, {}
        if not found or group.replica_id or group.num_replicas == 1:
            return
        if any(
            p.grad is not None
            and id(p) in found
            and not (
                (_is_view(p.grad) or _is_same(p.grad, *found[id(p)][:2]))
                and _sum_of(p.grad) == found[id(p)][2]
            )
            for _, p in named
        ):
            reporting.warn(
                f"mpidist: {self._call}: the program has changed gradients after the "
                "backward pass, before they are reduced: a norm that is clipped there "
                "is that of a rank's own. Write `optimizer.synchronize()` before the "
                "change, or `max_norm`"
            )

    def _forget(self) -> None:
        self._plan = None
        self._ready, self._found = {}, {}

    def _begin(self, plan: _Plan, flags: Sequence[float] = ()) -> None:
        """Begin the next bucket. Collective."""
        bucket = plan.buckets[plan.next]
        plan.next += 1
        gradients = gradients_of(bucket.named)
        bucket.taken = [_with_version(x) for x in gradients]
        named, group, op = bucket.named, plan.group, self._op
        call = f"{self._call} [optimizer #{plan.number}], {bucket.text}"
        bucket.handle = begin_async(
            group,
            call,
            lambda: sums_of(self, group, named, gradients, op, call, flags),
            warns=False,
        )

    def reduce(self, group: ReplicaGroup, named: Named, divisor: int) -> None:
        """Replace the gradients by their reductions over the ranks. Collective.

        Args:
            group: the ranks.
            named: the parameters.
            divisor: divides the results.
        """
        plan = self._plan
        if plan is not None and not (plan.group is group and plan.is_usable()):
            self._forget()
            plan = None
        try:
            if plan is None:
                reduce_gradients(self, group, named, self._op, self._call, divisor)
                self._make_plan(group, named)
            else:
                self._finish(plan, named, divisor)
        except BaseException:
            self._forget()
            raise

    def _make_plan(self, group: ReplicaGroup, named: Named) -> None:
        """Divide the parameters into buckets, as rank 0 has had them ready."""
        counts = [self._ready.get(id(p), 0) for _, p in named]
        numbers = {id(p): i for i, (_, p) in enumerate(named)}
        order = [numbers.pop(key) for key in self._ready if key in numbers]
        order += numbers.values()
        self._ready = {}
        self.watch(named)
        call = f"{self._call}, the order of the gradients"
        rows = group.collectives.broadcast(np.array([order, counts]), call=call)
        order, counts = rows.tolist()
        if any(counts):
            gradients = gradients_of(named)  # reduced, so alike on all ranks
            last = {
                i
                for i, (n, x) in enumerate(zip(counts, gradients, strict=True))
                if not n or x is None or x.is_sparse
            }
            self._plan = _Plan(group, named, group.guard.sequence, order, counts, last)

    def _finish(self, plan: _Plan, named: Named, divisor: int) -> None:
        """Begin the buckets that are left, and wait for all of them."""
        *others, last = plan.buckets
        while plan.next < len(others):
            self._begin(plan)
        # Also how many ranks there are, if the sum of a flag is to say "all".
        self._begin(plan, [1.0, *map(_Bucket.is_stale, others)])
        sums = [bucket.handle.result() for bucket in plan.buckets if bucket.handle]
        full, *stale = sums[-1][FLAGS].tolist()
        for i, bucket in enumerate(others):
            if stale[i]:
                call = f"{self._call}, {bucket.text}, once more"
                again = bucket.named, gradients_of(bucket.named), self._op, call
                sums[i] = sums_of(self, plan.group, *again)
        missing: set[str] = set()
        for bucket, found in zip(plan.buckets, sums, strict=True):
            assign(bucket.named, found, divisor)
            if bucket is not last:
                present, sparse = found[PRESENT].tolist()
                missing.update(
                    name
                    for (name, _), part, rows in zip(
                        bucket.named, present, sparse, strict=True
                    )
                    if part < full or rows
                )
        plan.restart()
        self._count_stale(plan, any(stale))
        self._adapt(plan, named, divisor, missing)

    def _adapt(
        self, plan: _Plan, named: Named, divisor: int, missing: set[str]
    ) -> None:
        """Reduce what is not in a plan, and replace the plan if it does not fit.

        Args:
            plan: of this step.
            named: the parameters of this step.
            divisor: divides the results.
            missing: the names of those without a gradient on some rank, or with a
                sparse one, which should be in the last bucket.
        """
        planned = {id(p) for _, p in plan.named}
        more = [(name, p) for name, p in named if id(p) not in planned]
        if more:
            reduce_gradients(self, plan.group, more, self._op, self._call, divisor)
        if len(named) != len(plan.named) or more:  # frozen, or added
            self.watch(named)
            self._forget()
        elif missing:
            late = {i for i, (name, _) in enumerate(plan.named) if name in missing}
            self._plan = dataclasses.replace(plan, last=plan.last | late)

    def _count_stale(self, plan: _Plan, stale: bool) -> None:
        self._redone = self._redone + 1 if stale else 0
        if self._redone < 2 or self._holds:
            return
        self._holds = True
        if plan.group.replica_id == 0:
            reporting.warn(
                f"mpidist: {self._call}: in two successive steps gradients have changed"
                " after they were ready (by the program, by backward passes of another "
                "number, or as views of one buffer), and were reduced twice. From now "
                "on they are reduced in `step`: overlap=False"
            )


def _with_version(x: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    return x, 0 if x is None else _version_of(x)


def _sum_of(x: torch.Tensor | None) -> str:
    """Return a sum, which shows changes that torch does not count: by ``.data``."""
    return "" if x is None else repr(x.detach().sum().item())


def _is_same(
    now: torch.Tensor | None, before: torch.Tensor | None, version: int
) -> bool:
    """Return whether a gradient is the one before, and was not written to."""
    return now is before and (now is None or _version_of(now) == version)
