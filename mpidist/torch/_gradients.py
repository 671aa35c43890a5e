"""The gradients of parameters: which there are, and their reductions over the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch._compile import _disable_dynamo

from mpidist._base import backend, guests
from mpidist._base.expect import expect
from mpidist._base.reduce_op import ReduceOp, as_reduce_op
from mpidist._base.types import Array
from mpidist._runtime.group import ReplicaGroup

Parameters: TypeAlias = "torch.nn.Module | Iterable[torch.nn.Parameter]"
"""A module, or parameters in the same order on all ranks."""
Named: TypeAlias = "list[tuple[str, torch.nn.Parameter]]"
Sums: TypeAlias = dict[str, Any]
"""Reduced arrays, by the names of parameters; and by the next two."""

# No parameter has these names: those of modules have no spaces.
PRESENT: Final = "which parameters have a gradient"
FLAGS: Final = "flags of the ranks"
_WRITE_PARAMETERS: Final = "write `module.parameters()`"


def check_op(op: ReduceOp | str, call: str) -> ReduceOp:
    """Return a reduction of gradients.

    Raises:
        TypeError, ValueError: if it is not MEAN or SUM.
    """
    checked = as_reduce_op(op, call)
    if checked not in (ReduceOp.MEAN, ReduceOp.SUM):
        raise ValueError(f"{call}: expected `op` to be MEAN or SUM, got {op!r}")
    return checked


def is_stepped(parameter: torch.Tensor) -> bool:
    """Return whether a step may change a parameter: torch goes by the gradient, too."""
    return parameter.requires_grad or parameter.grad is not None


def named_parameters(module: Parameters, call: str) -> Named:
    """Return the parameters that have gradients, with their names.

    Raises:
        TypeError: if it is neither a module nor parameters.
        ValueError: if there are none.
    """
    if isinstance(module, torch.nn.Module):
        named = list(module.named_parameters())
    else:
        several = isinstance(module, Iterable) and not guests.kind_of(module)
        what = "a `torch.nn.Module` or its parameters"
        expect(several, call, what, module, _WRITE_PARAMETERS)
        named = [(f"parameter {i}", p) for i, p in enumerate(module)]
    for _, parameter in named:
        is_tensor = guests.kind_of(parameter) == "torch"
        expect(is_tensor, call, "parameters", parameter, _WRITE_PARAMETERS)
    named = [(name, p) for name, p in named if is_stepped(p)]
    if not named:
        raise ValueError(f"{call}: no parameter requires a gradient")
    return named


def reduce_gradients(
    owner: object,
    group: ReplicaGroup,
    named: Named,
    op: ReduceOp,
    call: str,
    divisor: int = 1,
) -> None:
    """Replace the gradients by their reductions over the ranks. Collective.

    Args:
        owner: of the plans; see `ReplicaGroup.all_reduce_of`.
        group: the ranks.
        named: the parameters.
        op: MEAN or SUM.
        call: the name of the call, for messages.
        divisor: divides the results.
    """
    gradients = [parameter.grad for _, parameter in named]
    assign(named, sums_of(owner, group, named, gradients, op, call), divisor)


def sums_of(
    owner: object,
    group: ReplicaGroup,
    named: Named,
    gradients: Sequence[torch.Tensor | None],
    op: ReduceOp,
    call: str,
    flags: Sequence[float] = (),
) -> Sums:
    """Reduce gradients over the ranks. Collective.

    Args:
        owner: of the plans; see `ReplicaGroup.all_reduce_of`.
        group: the ranks.
        named: their parameters.
        gradients: this rank's; None: it has none, which counts as zeros.
        op: MEAN or SUM.
        call: the name of the call, for messages.
        flags: numbers of this rank, which are reduced with them.
    """
    with group.guard.checking(call):
        arrays = _arrays_of(named, gradients, call)
        if flags:
            arrays[FLAGS] = np.array(flags, np.float32)
    return group.all_reduce_of(owner)(op, arrays, None, call)


def assign(named: Named, sums: Sums, divisor: int) -> None:
    """Set the gradients that some rank has. Not collective.

    Args:
        named: the parameters.
        sums: of their gradients.
        divisor: divides them.
    """
    present: Sequence[float] = sums[PRESENT].tolist()
    for (name, parameter), some in zip(named, present, strict=True):
        if not some:
            continue
        gradient = guests.restore(sums[name], "torch")
        gradient = guests.in_layout_of(gradient, parameter)
        parameter.grad = gradient.div_(divisor) if divisor > 1 else gradient


def _arrays_of(
    named: Named, gradients: Sequence[torch.Tensor | None], call: str
) -> dict[str, Array]:
    """Return the gradients as arrays, zeros for those that are missing."""
    arrays: dict[str, Array] = {}
    present = np.ones(len(named), np.float32)
    for i, ((name, parameter), gradient) in enumerate(
        zip(named, gradients, strict=True)
    ):
        if gradient is None:
            present[i] = 0
            gradient = torch.zeros_like(parameter)
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"{call}: the gradient of {name!r}: got a sparse one; write "
                "`torch.nn.Embedding(..., sparse=False)`"
            )
        if gradient.shape != parameter.shape:
            raise ValueError(
                f"{call}: the gradient of {name!r} has shape {tuple(gradient.shape)}, "
                f"but the parameter {tuple(parameter.shape)}; its `data` was replaced "
                "after `backward()`: call `optimizer.zero_grad()` then"
            )
        array, _ = backend.as_array(gradient, f"{call}: the gradient of {name!r}")
        arrays[name] = array
    if len(arrays) < len(named):
        raise ValueError(f"{call}: two parameters have the same name")
    arrays[PRESENT] = present
    return arrays


def set_hooks(hooks: dict[int, Any], named: Named, note: Any) -> None:
    """Have torch call a method when a gradient is ready, as long as its object lives.

    Args:
        hooks: those that were set before.
        named: the parameters.
        note: the method, bound to the object.
    """
    # Not a WeakMethod, whose lines would come before the first try of ``note``.
    owner, function = weakref.ref(note.__self__), note.__func__

    def ready(parameter: torch.Tensor) -> None:
        this = owner()
        if this is not None:
            function(this, parameter)
        else:
            hooks.pop(id(parameter)).remove()

    known = {id(p) for _, p in named}
    for key in [key for key in hooks if key not in known]:
        hooks.pop(key).remove()
    for _, p in named:
        if id(p) not in hooks and p.requires_grad:  # torch refuses others
            # Also of this function `torch.compile` would make one for each shape.
            hook = _disable_dynamo(ready)
            hooks[id(p)] = p.register_post_accumulate_grad_hook(hook)


def gradients_of(named: Named) -> list[torch.Tensor | None]:
    """Return the gradients of parameters; None for those that have none."""
    return [p.grad for _, p in named]
