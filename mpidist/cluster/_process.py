"""What is known about this process before a strategy is created."""

from __future__ import annotations

import contextlib
import os
import platform

from mpidist._base import gpus, threads
from mpidist._base.types import record
from mpidist._mpi import launcher, library
from mpidist.cluster._hostlist import expand_tasks_per_node


@record
class Process:
    """This process among those that its launcher started.

    Attributes:
        launcher: such as "mpirun of Open MPI" or "srun --mpi=pmix"; "" without one.
        rank: its number among all of them, from 0.
        size: how many there are; 1 if the launcher does not say.
        local_rank: its number among those on its host, from 0, by the launcher, not
            always in the order of ranks; None if unknown.
        local_size: how many are on its host; None if unknown.
        node: the number of its host in the job, from 0; None if unknown: only srun
            says it.
        host: the name of its host.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node: int | None
    host: str


def this_process() -> Process:
    """Return which of the launched processes this is; it starts no MPI.

    Each rank may call it by itself, also before the first `mpidist.MPIStrategy`, for
    example to choose a GPU or a folder. Rank and size are those of MPI's COMM_WORLD if
    MPI runs, otherwise those of the launcher's environment variables; without a
    launcher, rank 0 of 1. The other attributes are always from the launcher.
    `mpidist.Strategy.cluster_resolver` has the same for all ranks, as MPI knows it.
    """
    found = launcher.find_launch() or launcher.Launch("", 0, 1)
    name, local_rank = found.launcher, found.local_rank
    local_size, node = _place(found)
    rank, size = found.rank or 0, found.size
    # A replica that is a thread is in a process of its own kind: one, without MPI.
    running = None if threads.current() is not None else library.world_rank()
    if running is not None:
        rank, size = running, library.world_size()
    if size == 1:
        local_rank, local_size, node = 0, 1, 0
    return Process(name, rank, size or 1, local_rank, local_size, node, platform.node())


@record
class ReplicaDevice:
    """What stands for the device of a replica: `mpidist.MirroredStrategy` takes it.

    Attributes:
        name: ``"/device:GPU:*"`` or "/device:CPU:0".
        device_type: "GPU" or "CPU".
    """

    name: str
    device_type: str


def replica_devices(device_type: str | None = None) -> list[ReplicaDevice]:
    """Return a device for each process of the job, where TensorFlow lists GPUs.

    Programs choose a strategy by that number, such as `mpidist.MirroredStrategy` for
    more than one: here each process is a replica, with a GPU or without. It starts no
    MPI.

    Args:
        device_type: None or "GPU": GPUs if CuPy finds one here, otherwise the hosts;
            "CPU": the hosts. There are none of others, such as "TPU".
    """
    if device_type not in (None, "CPU", "GPU"):
        return []
    kind = "CPU" if device_type == "CPU" or not gpus.count_gpus()[0] else "GPU"
    name = f"/device:{kind}:{'*' if kind == 'GPU' else 0}"
    replica = threads.current()
    size = this_process().size if replica is None else replica.size
    return [ReplicaDevice(name, kind)] * size


def _place(launch: launcher.Launch) -> tuple[int | None, int | None]:
    """Return how many processes are on this host, and the number of the host."""
    node = os.environ.get("SLURM_NODEID", "")
    if not launch.launcher.startswith("srun") or not node.isdigit():
        return launch.local_size, None
    with contextlib.suppress(ValueError, IndexError):
        counts = expand_tasks_per_node(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        return counts[int(node)], int(node)
    return None, int(node)
