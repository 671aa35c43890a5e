"""The tensors of modules and optimizers: the same on all ranks, or all-reduced."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.utils.weak import WeakIdKeyDictionary

from mpidist._agreement.mismatch import Call
from mpidist._base import guests, nest
from mpidist._base.expect import expect
from mpidist._base.reduce_op import ReduceOp, as_reduce_op
from mpidist._base.remedies import explain_keywords
from mpidist._base.types import Nest
from mpidist._checkpoints import guest_items
from mpidist._strategy.current import check_root, group_of_call
from mpidist._strategy.strategy import Strategy
from mpidist._values.consistency import Steps, compare_arrays
from mpidist.torch._gradients import (
    Parameters,
    check_op,
    named_parameters,
    of_rows,
    reduce_gradients,
    rows_of,
)

Tensors: TypeAlias = "torch.nn.Module | Mapping[str, torch.Tensor]"
"""A module, or its tensors by name, such as `module.state_dict()`."""
_F = TypeVar("_F", bound=Callable[..., Any])

BROADCAST: Final = "`mpidist.torch.broadcast_parameters(module)`"

# Of `all_reduce_gradients`: the `Steps`, by a parameter and a group of ranks.
_steps: Final = WeakIdKeyDictionary()


def untraced(function: _F) -> _F:
    """Keep `torch.compile` from tracing mpidist, which would take a minute."""
    disabled = _disable_dynamo(function)  # lazily; its frames are in tracebacks

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        traced = torch.compiler.is_compiling()
        return disabled(*args, **kwargs) if traced else function(*args, **kwargs)

    return called  # type: ignore[return-value]


@explain_keywords("mpidist.torch.broadcast_parameters")
def broadcast_parameters(
    module: Tensors, root: int = 0, *, strategy: Strategy | None = None
) -> None:
    """Give the tensors of a module the values of one rank, in place. Collective.

    Once, before training: modules are initialized with random numbers, which differ
    between ranks without a common seed.

    Args:
        module: a module: its parameters and buffers; or tensors by name. Names, dtypes
            and shapes are the same on all ranks.
        root: the rank whose values are copied.
        strategy: the ranks; default: the current strategy.

    Raises:
        TypeError, ValueError: for other arguments.
        CollectiveMismatchError: if names, dtypes or shapes differ between ranks.
        RuntimeError: if no strategy is active.

    Example::

        model = torch.nn.Linear(2, 1)
        mpidist.torch.broadcast_parameters(model, strategy=strategy)
        mpidist.torch.check_in_sync(model, strategy=strategy)
    """
    call = "mpidist.torch.broadcast_parameters"
    group = group_of_call(strategy, call)
    with group.guard.checking(call):
        tensors = tensors_of(module, call)
        for tensor in tensors.values():
            _check_written(tensor, call)
        check_root(root, group, call)
    received = group.collectives.broadcast(tensors, root, call=f"{call} from {root}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(received[name])


@explain_keywords("mpidist.torch.broadcast_optimizer_state")
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, *, strategy: Strategy | None = None
) -> None:
    """Give an optimizer the state of rank 0's. Collective.

    For programs that load a checkpoint of torch on rank 0 only. The other ranks need
    no state: it is created. The settings of the parameter groups (learning rates) are
    copied too.

    Args:
        optimizer: an optimizer of the same parameters on all ranks.
        strategy: the ranks; default: the current strategy.

    Raises:
        TypeError: if it is not an optimizer, or a `ZeroRedundancyOptimizer`.
        ValueError: if the numbers of parameters in the groups differ from rank 0's.
        CollectiveMismatchError: if the optimizers are of different classes.
        RuntimeError: if no strategy is active.
    """
    call = "mpidist.torch.broadcast_optimizer_state"
    group = group_of_call(strategy, call)

    with group.guard.checking(call):
        is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
        expect(is_optimizer, call, "a `torch.optim.Optimizer`", optimizer)
        if getattr(optimizer, "state_is_collective", False):
            raise TypeError(
                f"{call}: the state of a ZeroRedundancyOptimizer is on all ranks; "
                "write `optimizer.load_state_dict(state)` on all ranks, each takes its "
                "part"
            )

    def state() -> list[Nest]:
        leaves, structure = nest.flatten(optimizer.state_dict())
        return [structure.unflatten(range(len(leaves))), *leaves]

    text = f"{call} of {type(optimizer).__name__}"
    numbered, *leaves = group.collectives.share(state, text)
    with group.guard.checking(call):
        if group.replica_id != 0:
            state_dict = nest.map_structure(lambda i: leaves[i], numbered)
            guest_items.load_state(optimizer, state_dict)
    group.guard.agree(Call(call))


def check_in_sync(module: Tensors, *, strategy: Strategy | None = None) -> None:
    """Check that the tensors of a module are the same on all ranks. Collective.

    Compares checksums of 128 bits (BLAKE2b), in one message. Buffers that each rank
    computes from its own data, such as the running means of batch norm, may differ:
    pass ``dict(module.named_parameters())`` to leave them out.

    Args:
        module: as for `broadcast_parameters`.
        strategy: the ranks; default: the current strategy.

    Raises:
        OutOfSyncError: on all ranks, with the names of the tensors that differ.
        TypeError: for other arguments.
        CollectiveMismatchError: if names, dtypes or shapes differ between ranks.
        RuntimeError: if no strategy is active.
    """
    call = "mpidist.torch.check_in_sync"
    group = group_of_call(strategy, call)
    with group.guard.checking(call):
        tensors = tensors_of(module, call)
    advice = f"Find what changed them. Rank 0's values for all: {BROADCAST}"
    compare_arrays(group, tensors, call, advice)


def tensors_of(module: Tensors, call: str) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module, by name.

    Raises:
        TypeError: if it is neither a module nor tensors by name.
    """
    if isinstance(module, torch.nn.Module):
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}
    expect(
        isinstance(module, Mapping)
        and all(guests.kind_of(x) == "torch" for x in module.values()),
        call,
        "a `torch.nn.Module`, or a dict of tensors by name",
        module,
        "write `dict(module.named_parameters())`",
    )
    return dict(module)


@untraced
def all_reduce_gradients(
    module: Parameters,
    op: ReduceOp | str = ReduceOp.MEAN,
    *,
    strategy: Strategy | None = None,
) -> None:
    """Reduce the gradients of all parameters over the ranks, in one call. Collective.

    Between ``loss.backward()`` and ``optimizer.step()``. Each rank's gradients are read
    from where they are, and replaced by the results: ``p.grad`` is another tensor
    afterwards, the same on all ranks, bit for bit. On one node its memory is shared, so
    that gradients that are accumulated there (``zero_grad(set_to_none=False)``) are
    not copied before the next call.

    A parameter that has no gradient on some rank counts as zeros there, as in torch's
    DistributedDataParallel with ``find_unused_parameters=True``; if it has none on any
    rank, ``p.grad`` stays None. Frozen parameters without one are left out. Sparse
    gradients stay sparse, with the rows of all ranks, unless one is dense on some rank.

    Args:
        module: a module, or its parameters in the same order on all ranks.
        op: MEAN if the loss is a mean over the rows of each rank, as with
            DistributedDataParallel; SUM if it is this rank's share of the mean over all
            rows (`mpidist.compute_average_loss`), which also holds for uneven batches.
        strategy: the ranks; default: the current strategy.

    Raises:
        TypeError, ValueError: for other operations and arguments.
        OutOfSyncError: by the first call, if parameters differ between ranks.
        CollectiveMismatchError: if names, dtypes or shapes differ between ranks.
        RuntimeError: if no strategy is active.

    Example, on two replicas::

        model = torch.nn.Linear(1, 1)
        mpidist.torch.broadcast_parameters(model, strategy=strategy)
        loss = model(torch.full((4, 1), 1.0 + strategy.replica_id)).mean()
        loss.backward()
        mpidist.torch.all_reduce_gradients(model, "MEAN", strategy=strategy)
        model.weight.grad  # tensor([[1.5000]])
    """
    call = "mpidist.torch.all_reduce_gradients"
    group = group_of_call(strategy, call)
    with group.guard.checking(call):
        checked = check_op(op, call)
        named = named_parameters(module, call)
    of_groups = _steps.setdefault(named[0][1], weakref.WeakKeyDictionary())
    steps = of_groups.setdefault(group, Steps())
    steps.begin(group, lambda: dict(named), call, BROADCAST)
    reduce_gradients(steps, group, named, checked, call)


@untraced
@explain_keywords("mpidist.torch.all_reduce")
def all_reduce(
    tensors: Nest, op: ReduceOp | str, *, strategy: Strategy | None = None
) -> Nest:
    """Replace tensors by their reductions over the ranks, in place. Collective.

    For losses and metrics at program level. Autograd does not see it.

    Args:
        tensors: a tensor, or a nest of them (tuples, dicts, lists), with the same
            structure, shapes and dtypes on all ranks. Sparse ones (SUM, MEAN) may have
            other rows on each rank.
        op: a `ReduceOp` or its name, such as "SUM", which is torch's default.
        strategy: the ranks; default: the current strategy.

    Returns:
        ``tensors``.

    Raises:
        TypeError, ValueError: for other operations and arguments.
        CollectiveMismatchError: if structures, shapes or dtypes differ between ranks.
        RuntimeError: if no strategy is active.

    Example::

        loss = torch.tensor(0.5)  # of this rank's rows
        mpidist.torch.all_reduce(loss, "MEAN", strategy=strategy)  # tensor(0.5000)
    """
    call = "mpidist.torch.all_reduce"
    group = group_of_call(strategy, call)
    with group.guard.checking(call):
        checked = as_reduce_op(op, call)
        leaves, structure = nest.flatten(tensors)
        check = functools.partial(_check_replaced, op=checked, call=call)
        structure.each(check, leaves)
        rows = [rows_of(x, x) if x.is_sparse else x for x in leaves]
        given = structure.unflatten(rows)
    results, _ = nest.flatten(group.all_reduce(checked, given, None, call))
    with torch.inference_mode():  # without autograd, into tensors made there too
        for tensor, result in zip(leaves, results, strict=True):
            if tensor.is_sparse:
                result = of_rows(result)
                if tensor.sparse_dim() > 1:
                    result = result.to_dense().to_sparse(tensor.sparse_dim())
            tensor.copy_(result)
    return tensors


def _check_written(tensor: torch.Tensor, call: str) -> None:
    """Raise a TypeError for a tensor to which torch would refuse to write, too late."""
    if tensor.layout is torch.strided:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        own = all(n < 2 or step for n, step in steps)
        expect(own, call, "a tensor that is not expanded", tensor, _WRITE_CLONE)


def _check_replaced(leaf: Nest, op: ReduceOp, call: str) -> None:
    """Raise a TypeError unless a leaf is a tensor that can hold the result."""
    is_tensor = guests.kind_of(leaf) == "torch"
    expect(is_tensor, call, "tensors", leaf, "write `torch.as_tensor(x)`")
    _check_written(leaf, call)
    if op is ReduceOp.MEAN and not leaf.dtype.is_floating_point:
        fits = leaf.dtype.is_complex
        hint = "whose mean is no integer; write `x.float()`"
        expect(fits, call, "floats for MEAN", leaf, hint)


_WRITE_CLONE: Final = "of which elements share memory; write `x.clone()`"
