"""Strategies on a real GPU, which the ranks may share, for tests."""

import os

import pytest
from replicas import everywhere

import mpidist
from mpidist._base import gpus


class StrategiesOnGpus:
    """Makes each strategy once: to connect ranks by NCCL takes a second."""

    def __init__(self) -> None:
        self._made: dict[str, mpidist.MPIStrategy] = {}
        self._failed = ""

    def get(self, implementation: str) -> mpidist.MPIStrategy:
        """Return the strategy whose GPU arrays move in this way; skip without it."""
        pytest.importorskip("cupy")
        if implementation == "DIRECT" and not os.environ.get("MPIDIST_TEST_DIRECT"):
            pytest.skip("launch/gpu-check says where MPI takes GPU buffers")
        if self._failed and implementation == "NCCL":
            pytest.fail(f"as before: {self._failed}")
        if implementation not in self._made:
            options = mpidist.experimental.CommunicationOptions(
                implementation=implementation, timeout_seconds=60
            )
            with pytest.MonkeyPatch.context() as patch:
                if implementation == "NCCL":
                    _let_share(patch)
                try:
                    self._made[implementation] = mpidist.MPIStrategy(
                        device="gpu", communication_options=options
                    )
                except ValueError as error:
                    self._failed = str(error) if implementation == "NCCL" else ""
                    raise
        return self._made[implementation]

    def close(self) -> None:
        for strategy in self._made.values():
            strategy.close()


def _let_share(patch: pytest.MonkeyPatch) -> None:
    """Let ranks on one GPU use NCCL, which refuses that on one host.

    With another name of the host for each rank it sees no shared GPU, and connects the
    ranks by sockets.
    """
    pids = everywhere(os.getpid())
    rank = pids.index(os.getpid())
    device = gpus.select_device("gpu", rank)
    if len({*everywhere(gpus.gpu_bus_id(device))}) < len(pids):
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"  # NCCL reads it once
        patch.setattr(gpus, "gpu_bus_id", lambda device: f"rank {rank}")
