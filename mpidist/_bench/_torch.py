"""PyTorch's gloo beside mpidist, on the same ranks; the only user of torch here.

`mpirun` starts the ranks; they find each other through a store of torch's on rank 0,
whose address goes by MPI.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from mpidist._bench._job import Job, UsageError

NAME: Final = "torch gloo"
_TIMEOUT: Final = datetime.timedelta(seconds=120)


class Gloo:
    """The process group "gloo" over all ranks."""

    def __init__(self, job: Job) -> None:
        """Connect the ranks. Collective.

        Raises:
            UsageError: on all ranks, where torch can not connect them.
        """
        import torch
        import torch.distributed as distributed

        self.torch: Any = torch
        self._distributed: Any = distributed
        self.size = job.size
        # The collectives of lists are marked as deprecated, with nothing for gloo in
        # their place.
        warnings.filterwarnings("ignore", module=r"torch\.")
        warnings.filterwarnings("ignore", message=r".*torch\.distributed\.")
        cores = len(os.sched_getaffinity(0))
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, cores // job.local_size))
        problem = None
        address, store = None, None
        try:
            if job.rank == 0:
                name = "127.0.0.1" if job.nodes == 1 else job.mpi.Get_processor_name()
                store = self._store(name, 0, job.size, is_master=True)
                address = (name, store.port)
        except Exception as error:
            problem = f"torch could not make a store on rank 0: {error}"
        job.require(problem)
        name, port = job.from_root(address)
        try:
            if store is None:
                store = self._store(name, port, job.size, is_master=False)
            distributed.init_process_group(
                "gloo",
                store=store,
                rank=job.rank,
                world_size=job.size,
                timeout=_TIMEOUT,
            )
        except Exception as error:
            problem = (
                f"torch's gloo could not connect the ranks: {error}; "
                "GLOO_SOCKET_IFNAME names the network interface to use"
            )
        job.require(problem)

    @staticmethod
    def missing() -> str | None:
        """Return what to say where torch is not there, else None."""
        if importlib.util.find_spec("torch") is None:
            return (
                "--against torch: PyTorch is not installed in this environment; "
                "install it with `pip install torch`, or leave the option out"
            )
        return None

    def close(self) -> None:
        """Disconnect. Collective."""
        self._distributed.barrier()
        self._distributed.destroy_process_group()

    def tensor(self, array: Any) -> Any:
        """Return a tensor with a copy of the values."""
        return self.torch.from_numpy(np.array(array))

    def all_reduce(self, tensor: Any) -> Any:
        """Sum a tensor in place. Collective."""
        self._distributed.all_reduce(tensor)
        return tensor

    def all_reduce_coalesced(self, tensors: Sequence[Any]) -> Any:
        """Sum tensors in place, by one call. Collective."""
        self._distributed.all_reduce_coalesced(tensors)
        return tensors

    def all_gather(self, out: Sequence[Any], tensor: Any) -> Any:
        """Gather a tensor of all ranks into tensors that are there. Collective."""
        self._distributed.all_gather(out, tensor)
        return out

    def trainer(
        self,
        parameters: Sequence[Any],
        x: Any,
        y: Any,
        rate: float,
        *,
        distributed: bool,
    ) -> Callable[[], Any]:
        """Return a function that makes one step of training. Collective.

        Args:
            parameters: weights (inputs, outputs) and biases, in turn.
            x: float32 (rows, inputs) of this rank.
            y: int64 (rows,), the classes.
            rate: the learning rate.
            distributed: with DistributedDataParallel, else this rank by itself.

        Returns:
            The step; it returns the parameters, as arrays, after it.
        """
        torch = self.torch
        layers: list[Any] = []
        for i in range(0, len(parameters), 2):
            weight, bias = parameters[i], parameters[i + 1]
            layer = torch.nn.Linear(*weight.shape)
            with torch.no_grad():
                layer.weight.copy_(torch.from_numpy(weight.T.copy()))
                layer.bias.copy_(torch.from_numpy(bias.copy()))
            layers += [layer, torch.nn.ReLU()]
        plain = torch.nn.Sequential(*layers[:-1])
        model = (
            torch.nn.parallel.DistributedDataParallel(plain) if distributed else plain
        )
        optimizer = torch.optim.SGD(plain.parameters(), lr=rate)
        loss = torch.nn.CrossEntropyLoss()  # the mean; DDP takes the mean over ranks
        inputs, classes = torch.from_numpy(x), torch.from_numpy(y)

        def step() -> Any:
            optimizer.zero_grad()
            loss(model(inputs), classes).backward()
            optimizer.step()
            return plain

        return step

    @staticmethod
    def parameters_of(model: Any) -> list[Any]:
        """Return a model's parameters as `trainer` was given them."""
        values = [p.detach().numpy() for p in model.parameters()]
        return [v.T if v.ndim == 2 else v for v in values]

    def _store(self, name: str, port: int, size: int, *, is_master: bool) -> Any:
        return self._distributed.TCPStore(
            name, port, size, is_master, timeout=_TIMEOUT, wait_for_workers=False
        )


__all__ = ["NAME", "Gloo", "UsageError"]
