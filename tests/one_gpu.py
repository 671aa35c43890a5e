"""Lets ranks that share a GPU use NCCL, for tests."""

import os

import pytest
from replicas import everywhere

import mpidist

_failed: list[str] = []  # why NCCL did not connect the ranks, which takes long


def make_nccl(monkeypatch, new_strategy) -> mpidist.MPIStrategy:
    """Return a strategy whose GPU arrays go by NCCL, also if ranks share a GPU.

    NCCL refuses that on one host. With another name of the host for each rank it sees
    no shared GPU, and connects the ranks by sockets.
    """
    from mpidist._base import gpus

    if _failed:
        pytest.fail(f"as before: {_failed[0]}")
    rank = everywhere(os.getpid()).index(os.getpid())
    device = gpus.select_device("gpu", rank)
    if len({*everywhere(gpus.gpu_bus_id(device))}) < len(everywhere(None)):
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"  # NCCL reads it once
        monkeypatch.setattr(gpus, "gpu_bus_id", lambda device: f"rank {rank}")
    try:
        return new_strategy(device="gpu", implementation="NCCL")
    except ValueError as error:
        _failed.append(str(error))
        raise
