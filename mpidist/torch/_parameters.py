"""The tensors of modules and optimizers, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from mpidist._base import guests, nest
from mpidist._base.expect import expect
from mpidist._base.remedies import explain_keywords
from mpidist._base.types import Nest
from mpidist._strategy.current import check_root, group_of_call
from mpidist._strategy.strategy import Strategy
from mpidist._values.consistency import compare_arrays
from mpidist.torch._gradients import BROADCAST

Tensors: TypeAlias = "torch.nn.Module | Mapping[str, torch.Tensor]"
"""A module, or its tensors by name, such as `module.state_dict()`."""


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
    """
    call = "mpidist.torch.broadcast_parameters"
    group = group_of_call(strategy, call)
    with group.guard.checking(call):
        tensors = tensors_of(module, call)
        check_root(root, group, call)
    received = group.collectives.broadcast(tensors, root, call=f"{call} from {root}")
    if group.replica_id == root:
        return
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
        RuntimeError: if no strategy is active.
    """
    call = "mpidist.torch.broadcast_optimizer_state"
    group = group_of_call(strategy, call)

    if getattr(optimizer, "state_is_collective", False):
        with group.guard.checking(call):
            raise TypeError(
                f"{call}: the state of a ZeroRedundancyOptimizer is on all ranks; "
                "write `optimizer.load_state_dict(state)` on all ranks, each takes its "
                "part"
            )

    def state() -> list[Nest]:
        is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
        expect(is_optimizer, call, "a `torch.optim.Optimizer`", optimizer)
        leaves, structure = nest.flatten(optimizer.state_dict())
        return [structure.unflatten(range(len(leaves))), *leaves]

    numbered, *leaves = group.collectives.share(state, call)
    if group.replica_id != 0:
        state_dict = nest.map_structure(lambda i: leaves[i], numbered)
        guests.load_state(optimizer, state_dict)


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
