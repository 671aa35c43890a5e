"""The gradients of parameters: which there are, and their reductions over the ranks.

Of sparse gradients all ranks get the rows of all. Whether a parameter has one is agreed
in the first call of an owner, which reduces flags alone, since the sum of a dense one
would take the memory of a large table. They come with the gradients later: what some
rank finds to be sparse then counts as zeros, and all ranks make the call once more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch._compile import _disable_dynamo

from mpidist._base import backend, guests
from mpidist._base.expect import expect
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.reduce_op import ReduceOp, as_reduce_op
from mpidist._runtime.group import ReplicaGroup

Parameters: TypeAlias = "torch.nn.Module | Iterable[torch.nn.Parameter]"
"""A module, or parameters in the same order on all ranks."""
Named: TypeAlias = "list[tuple[str, torch.nn.Parameter]]"
Sums: TypeAlias = dict[str, Any]
"""Reduced arrays, by the names of parameters; and by the next two."""

# No parameter has these names: those of modules have no spaces.
# Two rows of flags: which parameters have a gradient, and which a sparse one.
PRESENT: Final = "which parameters have a gradient"
FLAGS: Final = "flags of the ranks"
_WRITE_PARAMETERS: Final = "write `module.parameters()`"
# By owner and group: the names of those that had a sparse gradient on some rank.
_sparse: Final[Any] = weakref.WeakKeyDictionary()


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
    sums = sums_of(owner, group, named, gradients_of(named), op, call)
    assign(named, sums, divisor)


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
    of_groups = _sparse.get(owner)
    if of_groups is None:
        of_groups = _sparse[owner] = weakref.WeakKeyDictionary()
    while True:
        known = of_groups.get(group)
        with group.guard.checking(call):
            arrays = _arrays_of(named, gradients, known, call)
            if flags:
                arrays[FLAGS] = np.array(flags, np.float32)
        results = group.all_reduce_of(owner)(op, arrays, None, call)
        flagged = results[PRESENT][1].tolist()
        found = {name for (name, _), x in zip(named, flagged, strict=True) if x}
        if known is not None and found <= known:
            return results
        of_groups[group] = found | (known or set())


def assign(named: Named, sums: Sums, divisor: int) -> None:
    """Set the gradients that some rank has. Not collective.

    Args:
        named: the parameters.
        sums: of their gradients.
        divisor: divides them.
    """
    flags = sums[PRESENT].tolist()
    for (name, parameter), some, sparse in zip(named, *flags, strict=True):
        if not some:
            continue
        gradient = sums[name]
        if isinstance(gradient, IndexedSlices):
            gradient = of_rows(gradient)
            if sparse < some:  # it is dense on some rank
                gradient = gradient.to_dense()
        else:
            gradient = guests.restore(gradient, "torch")
        if gradient.layout is torch.strided:
            gradient = guests.in_layout_of(gradient, parameter)
        parameter.grad = gradient.div_(divisor) if divisor > 1 else gradient


def _arrays_of(
    named: Named,
    gradients: Sequence[torch.Tensor | None],
    sparse: set[str] | None,
    call: str,
) -> dict[str, Any]:
    """Return the gradients as arrays, zeros for those that are missing.

    Args:
        named: the parameters.
        gradients: of them.
        sparse: the names of those whose gradients travel as rows; None: nothing is
            known yet, and only flags are returned.
        call: the name of the call, for messages.
    """
    arrays: dict[str, Any] = {}
    flags = np.zeros((2, len(named)), np.float32)
    flags[0] = 1
    for i, ((name, parameter), gradient) in enumerate(
        zip(named, gradients, strict=True)
    ):
        if gradient is None:
            flags[0, i] = 0
        elif gradient.shape != parameter.shape:
            raise ValueError(
                f"{call}: the gradient of {name!r} has shape {tuple(gradient.shape)}, "
                f"but the parameter {tuple(parameter.shape)}; its `data` was replaced "
                "after `backward()`: call `optimizer.zero_grad()` then"
            )
        elif gradient.layout is not torch.strided:
            flags[1, i] = 1
        if sparse is None:
            continue
        if name in sparse and parameter.dim():  # another one may have had this name
            arrays[name] = rows_of(parameter, gradient)
            continue
        if gradient is None or flags[1, i]:
            gradient = torch.zeros_like(parameter)
        array, _ = backend.as_array(gradient, f"{call}: the gradient of {name!r}")
        arrays[name] = array
    if sparse is not None and len(arrays) < len(named):
        raise ValueError(f"{call}: two parameters have the same name")
    arrays[PRESENT] = flags
    return arrays


def rows_of(parameter: torch.Tensor, gradient: torch.Tensor | None) -> IndexedSlices:
    """Return the rows of a gradient that are not zero; None: no rows."""
    if gradient is None:
        numbers = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return IndexedSlices(parameter.detach()[:0], numbers, parameter.shape)
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        gradient = gradient.to_dense().to_sparse(1)
    gradient = gradient.coalesce()
    return IndexedSlices(gradient.values(), gradient.indices()[0], gradient.shape)


def of_rows(rows: IndexedSlices) -> torch.Tensor:
    """Return rows as a sparse tensor: equal ones are added, in their order."""
    numbers: Any = rows.indices
    return torch.sparse_coo_tensor(
        numbers[None], rows.values, rows.dense_shape, check_invariants=False
    ).coalesce()


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
            hooks[id(p)] = p.register_post_accumulate_grad_hook(_disable_dynamo(ready))


def gradients_of(named: Named) -> list[torch.Tensor | None]:
    """Return the gradients of parameters; None for those that have none."""
    return [p.grad for _, p in named]
