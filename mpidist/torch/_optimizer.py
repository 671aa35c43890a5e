"""A torch optimizer whose steps use the gradients of all ranks."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from mpidist._base import reporting
from mpidist._base.backend import as_number
from mpidist._base.expect import as_int, expect
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.remedies import explain_keywords, missing_name
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.interruptions import tells
from mpidist._strategy.current import get_strategy, group_of_call
from mpidist._strategy.strategy import Strategy
from mpidist._values.consistency import Steps
from mpidist.torch._gradients import (
    Named,
    check_op,
    is_stepped,
    reduce_gradients,
    set_hooks,
)
from mpidist.torch._overlap import Overlap
from mpidist.torch._tensors import BROADCAST, untraced

# `Any` for type checkers: an optimizer around one of another class replaces it in
# `optimizer = DistributedOptimizer(optimizer)`.
_AnyOptimizer: Any = torch.optim.Optimizer


class DistributedOptimizer(_AnyOptimizer):
    """A torch optimizer that reduces the gradients over all ranks before each step.

    Before the first step it compares the parameters of all ranks, which have to be the
    same (`broadcast_parameters`).

    It replaces the optimizer in an unchanged training loop. Learning rate schedulers
    and `mpidist.Checkpoint` accept it in place of the optimizer, because it has the
    optimizer's parameter groups and state.

    Args:
        optimizer: the optimizer of the module's parameters.
        op: MEAN or SUM, see `all_reduce_gradients`.
        backward_passes_per_step: the number k of backward passes whose gradients are
            accumulated, without communication. `step` and `zero_grad` are called after
            each, and do nothing after the first k - 1; after pass k the gradients,
            divided by k, are reduced and the step is made. So k batches act as one of k
            times the rows. Horovod's `step` comes once after k passes: 1 here.
        max_norm: if given, the reduced gradients are scaled so that their global norm
            is at most this, by `torch.nn.utils.clip_grad_norm_`.
        overlap: whether gradients are reduced during the backward pass, as soon as an
            eighth of them, but 1 to 4 MB, is ready; `step` waits for them. None: if the
            ranks are on several nodes, since the network's time is what it hides. In
            the first step, and for gradients on GPUs, they are reduced in `step`.
            Gradients that the program changes after the backward pass, but not through
            ``p.grad.data``, whose changes torch does not count, are reduced once more.
            If the ranks on which a parameter has a gradient change from step to step,
            no other collective call may come between ``backward()`` and `step`, and not
            another optimizer's step either: write False then. Nor may a ``backward()``
            of its parameters come after the last use of an optimizer that is in a
            reference cycle, unless another was made: ranks collect it at different
            times, so some would begin reductions. Call ``gc.collect()`` on all first.
        named_parameters: ``module.named_parameters()``: for names in messages.
        strategy: the ranks; default: the strategy in whose scope it is made, and
            outside of every scope the current one at each step.

    Raises:
        TypeError, ValueError: for other arguments.
        OutOfSyncError: by the first `step`, if parameters differ between ranks.

    Example::

        model = torch.nn.Linear(2, 1)
        mpidist.torch.broadcast_parameters(model, strategy=strategy)
        optimizer = torch.optim.Adam(model.parameters())
        optimizer = mpidist.torch.DistributedOptimizer(
            optimizer, max_norm=1.0, strategy=strategy
        )
        loss = model(torch.ones(4, 2)).mean()  # of this rank's rows
        loss.backward()
        optimizer.step()
    """

    @explain_keywords("mpidist.torch.DistributedOptimizer")
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        op: ReduceOp | str = ReduceOp.MEAN,
        backward_passes_per_step: int = 1,
        max_norm: float | None = None,
        overlap: bool | None = None,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        # Without the base class's constructor: groups and state are the optimizer's.
        call = type(self).__name__
        is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
        hint = "write `DistributedOptimizer(torch.optim.Adam(model.parameters()))`"
        expect(is_optimizer, call, "a `torch.optim.Optimizer`", optimizer, hint)
        if isinstance(optimizer, DistributedOptimizer):
            raise TypeError(f"{call}: the optimizer is a {call} already")
        k, norm = backward_passes_per_step, max_norm
        k = as_int(call, "backward_passes_per_step", k, least=1)
        if norm is not None:
            fits = lambda x: 0 < x < math.inf  # noqa: E731
            norm = as_number(call, "max_norm", norm, fits, "above 0, and finite")
        what = "`overlap` to be True, False or None"
        expect(overlap is None or isinstance(overlap, bool), call, what, overlap)
        self._optimizer = optimizer
        self._wanted = overlap
        self._op = check_op(op, call)
        self._passes_per_step = k
        self._passes = 0
        self._synchronized = False
        self._hooks: dict[int, Any] = {}  # since `synchronize`
        self._max_norm = norm
        self._names: dict[int, str] = {
            id(p): name for name, p in named_parameters or ()
        }
        self._strategy = strategy
        if strategy is None and context.has_strategy():
            self._strategy = get_strategy()
        self._compared: ReplicaGroup | None = None
        self._steps = Steps()  # since then
        self._told = False
        self._overlap = Overlap(self._op, f"{call}.step")
        self._overlap.watch(self._named())

    def __getattr__(self, name: str) -> Any:
        # What the base class's constructor would have set, and the subclass's own.
        if name == "_optimizer":
            raise AttributeError(name)
        try:
            found = getattr(self._optimizer, name)
        except AttributeError as error:
            owner = "mpidist.torch.DistributedOptimizer"
            raise missing_name(owner, str(error), name) from None
        unreduced = self._passes == 0 < self._overlap.passes
        silent = self._told or (self._strategy and self._strategy.replica_id)
        if unreduced and callable(found) and not silent:
            self._told = True
            kind = type(self._optimizer).__name__
            reporting.warn(
                f"mpidist: {type(self).__name__}: `{name}` of {kind} gets this rank's "
                "own gradients. Write `optimizer.synchronize()` after each backward "
                "pass"
            )
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        # An optimizer's steps use its own, as of an empty state, to begin anew.
        own = name in ("defaults", "param_groups", "state")
        object.__setattr__(self._optimizer if own else self, name, value)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer cannot be pickled or copied; save "
            "`optimizer.state_dict()`, or wrap a copy of the optimizer inside"
        )

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._optimizer!r})"

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # What torch.amp.GradScaler.step reads first. It would skip the step on a rank
        # whose own gradients are not finite, and the next step of that rank would meet
        # this one of the others: gradients of different batches, added without a word.
        if self._max_norm is not None:
            raise TypeError(
                "GradScaler.step of a mpidist.torch.DistributedOptimizer: its "
                "`max_norm` clips gradients that are still scaled; write "
                "`torch.nn.utils.clip_grad_norm_` after `scaler.unscale_` instead"
            )
        if self._synchronized:
            return False  # the scaler does it: it finds the same on all ranks
        k = self._passes_per_step
        if k > 1:
            raise TypeError(
                "GradScaler.step of a mpidist.torch.DistributedOptimizer with "
                f"backward_passes_per_step={k}: leave that out, divide the loss by {k},"
                " and call `synchronize`, the scaler's methods and `zero_grad` after "
                f"the last of {k} passes"
            )
        raise TypeError(
            "GradScaler.step of a mpidist.torch.DistributedOptimizer: each rank would "
            "skip a step by its own gradients; write `optimizer.synchronize()` after "
            "each backward pass, before `scaler.unscale_` and `scaler.step`: an inf on "
            "one rank is then one on all"
        )

    @property
    def passes(self) -> int:
        """The number of backward passes since the last step."""
        return self._passes

    @untraced
    @tells("DistributedOptimizer.step", operator.attrgetter("_compared"))
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, clip them, and step. Collective at each k-th call.

        Args:
            closure: a function that computes the gradients and returns the loss, for
                optimizers such as LBFGS. After each call of it the gradients and the
                loss are reduced. Not with ``backward_passes_per_step``.

        Returns:
            What the optimizer returns; None if this call made no step.
        """
        call = f"{type(self).__name__}.step"
        if closure is not None:
            if self._passes_per_step > 1:
                raise ValueError(
                    f"{call}: a closure cannot be used with backward_passes_per_step="
                    f"{self._passes_per_step}; accumulate inside the closure"
                )
            self._compare(group_of_call(self._strategy, call), call)
            return self._optimizer.step(self._reduced(closure, call))
        if not self._synchronized:
            self._check_passes(call)
            self._passes += 1
            if self._passes < self._passes_per_step:
                return None
            self._passes = 0
            self._reduce(call)
        self._synchronized = False
        return self._optimizer.step()

    @untraced
    @tells("DistributedOptimizer.synchronize", operator.attrgetter("_compared"))
    def synchronize(self) -> None:
        """Reduce the gradients now; the next `step` does not reduce them again.

        For what a program does with the gradients of all ranks before the step: to clip
        them, to log their norm, to undo the scale of a `torch.amp.GradScaler`. It is
        called after ``backward`` (Horovod's method of the same name). Collective, but
        before the k-th backward pass it does nothing. The next backward pass has to be
        followed by another call, also if the program leaves out the step.
        """
        if self._synchronized or self._passes + 1 < self._passes_per_step:
            return
        self._reduce(f"{type(self).__name__}.synchronize")
        self._passes = 0
        self._synchronized = True
        set_hooks(self._hooks, self._named(), self._note)

    def _note(self, _: torch.Tensor) -> None:
        """Note that a backward pass has changed the gradients."""
        self._synchronized = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless more passes are to be accumulated.

        Args:
            set_to_none: whether they become None instead of zeros. Zeros are kept in
                memory that all ranks of a node share, and not copied there again.
        """
        if self._passes == 0:
            self._synchronized = False
            self._overlap.restart()
            self._optimizer.zero_grad(set_to_none)

    def _check_passes(self, call: str) -> None:
        """Check that the program calls `step` after each pass, if it counts them."""
        k, passes = self._passes_per_step, self._overlap.passes
        if self._passes or not 1 < k <= passes:
            return
        with group_of_call(self._strategy, call).guard.checking(call):
            raise ValueError(
                f"{call}: with backward_passes_per_step={k}, `step` and `zero_grad` "
                f"are called after each backward pass, and the last of {k} calls "
                f"makes a step; got {passes} passes before the first call. If all "
                "passes of a step come before its `step`, as in Horovod or with "
                "`no_sync`, leave backward_passes_per_step out: the gradients are "
                "their sum. For several losses write `(loss_a + loss_b).backward()`"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state of the optimizer, and discard passes accumulated so far.

        Args:
            state_dict: from `state_dict`, of this class or of the optimizer's.
        """
        self._optimizer.load_state_dict(state_dict)
        if self._passes:  # their gradients are not those of this state
            self._passes = 0
            self.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer.

        Args:
            param_group: their settings, as in torch.
        """
        self._optimizer.add_param_group(param_group)
        if self._wanted is not False:
            self._overlap.watch(self._named())

    def _reduced(self, closure: Callable[[], Any], call: str) -> Callable[[], Any]:
        def reduced() -> Any:
            loss = closure()
            self._reduce(call, compares=False)  # the optimizer may have moved them
            group = group_of_call(self._strategy, call)
            return group.all_reduce(self._op, loss, None, f"{call}: the loss")

        return reduced

    def _reduce(self, call: str, *, compares: bool = True) -> None:
        group = group_of_call(self._strategy, call)
        named = self._named()
        self._overlap.warn_of_changes(group, named)
        first = self._compared is not group
        if first and compares:
            self._compare(group, call)
        if self._overlaps(group):
            self._overlap.reduce(group, named, self._passes_per_step)
        else:
            self._overlap.stop()
            passes = self._passes_per_step
            reduce_gradients(self._overlap, group, named, self._op, call, passes)
        if compares and not first:  # now all ranks have begun the same buckets
            self._compare(group, call)
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for _, p in named], self._max_norm)

    def _compare(self, group: ReplicaGroup, call: str) -> None:
        """Compare the parameters of all ranks, in some steps. Collective."""
        if self._compared is not group:
            self._compared, self._steps = group, Steps()
        self._steps.begin(group, lambda: dict(self._named()), call, BROADCAST)

    def _overlaps(self, group: ReplicaGroup) -> bool:
        """Return whether gradients are reduced during the backward pass.

        It is the same on all ranks.
        """
        wanted = self._wanted
        if wanted is None:
            wanted = len(set(group.node_numbers)) > 1
        on_host = not any("GPU" in name.upper() for name in group.device_names)
        return wanted and on_host and group.num_replicas > 1

    def _named(self) -> Named:
        parameters = [p for g in self._optimizer.param_groups for p in g["params"]]
        return [
            (self._names.get(id(p), f"parameter {i}"), p)
            for i, p in enumerate(parameters)
            if is_stepped(p)
        ]
