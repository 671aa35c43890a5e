"""Batch norm over the rows of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm  # the base of 1d, 2d and 3d

from mpidist._base.expect import expect
from mpidist._base.reduce_op import ReduceOp
from mpidist._runtime.group import ReplicaGroup
from mpidist._strategy.current import group_of_call
from mpidist._strategy.strategy import Strategy
from mpidist.torch._tensors import untraced

_CALL = "mpidist.torch.SyncBatchNorm"


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose mean and variance are those of the rows of all ranks.

    In place of `torch.nn.SyncBatchNorm`, which needs a process group. Arguments, state
    and results are those of torch's ``BatchNorm1d``, ``BatchNorm2d`` and
    ``BatchNorm3d`` on the whole batch; a rank may have fewer rows than the others, or
    none. In training each forward pass makes two all-reduces of one number per channel,
    and each backward pass too: both are collective then. In evaluation nothing is
    communicated. The statistics are computed in float32, or in float64 for input of
    that dtype.

    Args:
        num_features: the number of channels, which are axis 1 of the input.
        eps, momentum, affine, track_running_stats, device, dtype: as in torch.
        strategy: the ranks; default: the current strategy at each forward pass. A copy
            of the module, by ``copy.deepcopy`` or pickle, uses the default.

    Raises:
        TypeError: at a forward pass, for input that is no tensor of floating-point
            numbers.
        ValueError: at a forward pass, for input with fewer than two axes, and for one
            value per channel on all ranks together.
        CollectiveMismatchError: if dtypes, numbers of channels, ``eps`` or ``momentum``
            differ between ranks.
        RuntimeError: if no strategy is active.
    """

    _strategy: Strategy | None = None

    def __init__(
        self, *args: Any, strategy: Strategy | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._strategy = strategy

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, *, strategy: Strategy | None = None
    ) -> Any:
        """Replace each batch norm in a module. Not collective.

        Args:
            module: the module. Its batch norms' parameters and buffers are kept.
            strategy: as for the constructor.

        Returns:
            The module, or, if it is a batch norm itself, what replaces it.
        """
        if isinstance(module, _BatchNorm):
            return cls._converted(module, strategy)
        known: dict[torch.nn.Module, Any] = {}
        # One may have several names.
        for path, child in list(module.named_modules(remove_duplicate=False)):
            if isinstance(child, _BatchNorm):
                if child not in known:
                    known[child] = cls._converted(child, strategy)
                parent, _, name = path.rpartition(".")
                setattr(module.get_submodule(parent), name, known[child])
        return module

    @classmethod
    def _converted(cls, own: Any, strategy: Strategy | None) -> Any:
        """Return what replaces a batch norm."""
        if isinstance(own, cls):
            return own
        new = cls(
            own.num_features,
            own.eps,
            own.momentum,
            own.affine,
            own.track_running_stats,
            strategy=strategy,
        )
        # The tensors themselves: an optimizer may have them already.
        tensors = "weight", "bias", "running_mean", "running_var", "num_batches_tracked"
        for name in (*tensors, "training"):
            setattr(new, name, getattr(own, name))
        return new

    def forward(self, input: torch.Tensor) -> Any:
        """Return the normalized input. Collective in training."""
        if not self.training:  # also without running statistics: as torch's
            return super().forward(input)
        return self._in_training(input)

    @untraced
    def _in_training(self, input: torch.Tensor) -> Any:
        group = group_of_call(self._strategy, _CALL)
        with group.guard.checking(_CALL):
            self._check_input_dim(input)
        axes = [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        dtype = torch.promote_types(input.dtype, torch.float32)
        x = input.to(dtype)
        own = x.new_full((1,), x.numel() / self.num_features)
        call = f"{_CALL} with eps={self.eps}, momentum={self.momentum}"
        total = _SumOverRanks.apply(group, torch.cat([x.sum(axes), own]), call)
        count = total[-1].detach()
        if count <= 1:
            raise ValueError(
                f"{_CALL}: expected more than 1 value per channel on all ranks "
                f"together, got {int(count)}"
            )
        mean = total[:-1] / count
        centred = x - mean.view(shape)
        squares = _SumOverRanks.apply(group, centred.square().sum(axes), _CALL)
        variance = squares / count
        if self.track_running_stats:
            self._update(mean.detach(), variance.detach() * (count / (count - 1)))
        y = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(input.dtype)

    def _update(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:  # the mean of all batches
            factor = 1 / int(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        is_floating = isinstance(input, torch.Tensor) and input.is_floating_point()
        expect(is_floating, _CALL, "a tensor of floating-point numbers", input)
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"{_CALL}: expected input of shape (rows, {self.num_features}, ...), "
                f"got {tuple(input.shape)}"
            )

    def __getstate__(self) -> dict[str, Any]:
        # Of deepcopy and pickle: a strategy is a group of processes, and has no copies.
        return {k: v for k, v in self.__dict__.items() if k != "_strategy"}


class _SumOverRanks(torch.autograd.Function):
    """A sum over the ranks, whose gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, group: ReplicaGroup, x: torch.Tensor, call: str) -> Any:
        ctx.group = group
        return group.all_reduce(ReduceOp.SUM, x.contiguous(), None, call)

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, Any, None]:
        # This function again, not `all_reduce`: of gradients of gradients it is a part.
        call = f"{_CALL}, backward"
        return None, _SumOverRanks.apply(ctx.group, gradient, call), None
