"""`SlurmClusterResolver`: the tasks of a SLURM step, without MPI."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Final

from mpidist._mpi import launcher
from mpidist.cluster._hostlist import expand_hostlist, expand_tasks_per_node
from mpidist.cluster._resolvers import ClusterResolver
from mpidist.cluster._spec import ClusterSpec

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_SMI_SECONDS: Final = 30


class SlurmClusterResolver(ClusterResolver):
    """The tasks of a SLURM step, from the environment variables of SLURM.

    For programs that need addresses of their own, and for batch scripts. It needs no
    MPI, and starts none. In a step (under ``srun``) it describes the step's tasks, and
    which one this process is. In a batch script it describes the tasks that ``srun``
    would start there; this process is then none of them, and ``task_id`` is None. Under
    ``mpirun`` in a job SLURM's variables describe the daemons of mpirun, not the ranks:
    use `mpidist.Strategy.cluster_resolver`.

    Tasks are placed as SLURM does, by the distributions block, cyclic and plane. Hosts
    keep SLURM's order and their full names. TensorFlow's class of this name sorts hosts
    as text, and drops leading zeros.

    Args:
        jobs: the number of tasks of each job, which get the tasks in the order of
            their names; default: all tasks are ``"worker"``.
        port_base: port of the first task of each host, the next ones have the next.
        gpus_per_node: default: ``SLURM_GPUS_ON_NODE``, else the entries of
            ``CUDA_VISIBLE_DEVICES``, else what ``nvidia-smi`` lists.
        gpus_per_task: default: as many as all tasks of a node can have; 0 on a machine
            without GPUs.
        tasks_per_node: a number, or one by host name; default: SLURM's.
        auto_set_gpu: whether `cluster_spec` sets ``CUDA_VISIBLE_DEVICES`` to this
            task's GPUs: entries of its present value, if it has one. Never for tasks
            without GPUs, nor if SLURM has given the task GPUs of its own.
        rpc_layer: the protocol that `master` puts before an address; None: none.

    Raises:
        RuntimeError: outside of a SLURM job, under ``mpirun``, or if more tasks or
            GPUs are requested than there are.
        ValueError: if a variable or a number is invalid.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        """Read the environment."""
        self.rpc_layer = rpc_layer
        self._port_base = port_base
        self._auto_set_gpu = auto_set_gpu
        self._read_step(tasks_per_node)
        most = max(self._tasks_on.values())
        available = _count_gpus() if gpus_per_node is None else gpus_per_node
        if gpus_per_task is None:
            gpus_per_task = available // most
        if available < 0 or gpus_per_task < 0:
            raise ValueError("SlurmClusterResolver: expected numbers of GPUs from 0")
        self._gpus_per_task = gpus_per_task
        if most * self._gpus_per_task > available:
            raise RuntimeError(
                "Requested more GPUs per node than available. SlurmClusterResolver: "
                f"{most} tasks with {gpus_per_task} GPUs each on a node that has "
                f"{available}"
            )
        self._jobs = {"worker": len(self._hosts)} if jobs is None else dict(jobs)
        requested = sum(self._jobs.values())
        if requested > len(self._hosts):
            raise RuntimeError(
                f"Requested {requested} tasks but only {len(self._hosts)} were "
                "assigned."
            )

    def _read_step(self, tasks_per_node: int | Mapping[str, int] | None) -> None:
        """Find the host of each task, and which task this process is."""
        found = launcher.find_launch()
        if found is not None and not found.launcher.startswith("srun"):
            raise RuntimeError(
                f"SlurmClusterResolver: this process was started by {found.launcher}, "
                "and SLURM's variables describe its daemons, not the ranks; write "
                "`resolver = mpidist.MPIStrategy().cluster_resolver` in its place"
            )
        self._rank: int | None = None
        list_of_nodes, tasks = "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"
        if found is not None or "SLURM_STEP_NODELIST" in os.environ:
            self._rank = int(_variable("SLURM_PROCID"))
            list_of_nodes, tasks = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
        nodes = expand_hostlist(_variable(list_of_nodes))
        if tasks_per_node is None:
            counts = expand_tasks_per_node(_variable(tasks))
        elif isinstance(tasks_per_node, int):
            counts = [tasks_per_node] * len(nodes)
        else:
            counts = [tasks_per_node.get(node, 0) for node in nodes]
        if len(counts) != len(nodes) or not nodes or min(counts) < 1:
            raise ValueError(
                "SlurmClusterResolver: expected a number of tasks for each of the "
                f"nodes {nodes}, got {counts}"
            )
        self._tasks_on = dict(zip(nodes, counts, strict=True))
        self._hosts = _place_tasks(self._tasks_on)
        if self._rank is not None and self._rank >= len(self._hosts):
            raise ValueError(
                f"SlurmClusterResolver: this is task {self._rank}, and the nodes have "
                f"{len(self._hosts)} tasks: {self._tasks_on}"
            )

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks; sets ``task_type`` and ``task_id``.

        It also sets ``CUDA_VISIBLE_DEVICES``; see ``auto_set_gpu``.
        """
        started = dict.fromkeys(self._tasks_on, 0)
        addresses = []
        for task, host in enumerate(self._hosts):
            if task == self._rank and self._auto_set_gpu:
                self._set_gpus(started[host])
            addresses.append(f"{host}:{self._port_base + started[host]}")
            started[host] += 1
        cluster = {}
        first = 0
        for job, count in sorted(self._jobs.items()):
            cluster[job] = addresses[first : first + count]
            if self._rank is not None and first <= self._rank < first + count:
                self.task_type: str | None = job
                self.task_id: int | None = self._rank - first
            first += count
        return ClusterSpec(cluster)

    def _set_gpus(self, local_rank: int) -> None:
        count = self._gpus_per_task
        first = local_rank * count
        visible = os.environ.get(_VISIBLE)
        ids = list(map(str, range(first + count)))
        if visible is not None:
            ids = visible.split(",")
        if count and len(ids) >= first + count and len(ids) > count:
            os.environ[_VISIBLE] = ",".join(ids[first : first + count])
        elif count and visible is None:
            os.environ[_VISIBLE] = ",".join(ids[first:])

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return ``task_type`` and ``task_id``: None before `cluster_spec`."""
        return self.task_type, self.task_id

    def _accelerators(self, task_id: int | None) -> dict[str, int]:
        return {"GPU": self._gpus_per_task} if self._gpus_per_task else {}


def _place_tasks(tasks_on: Mapping[str, int]) -> tuple[str, ...]:
    """Return the host of each task of a step.

    If srun is told a distribution, it sets ``SLURM_DISTRIBUTION``; default: block.

    Args:
        tasks_on: the number of tasks of each host, in SLURM's order.

    Raises:
        RuntimeError: for a distribution of the user's own (arbitrary).
    """
    text = os.environ.get("SLURM_DISTRIBUTION", "block").lower()
    kind = text.partition(",")[0].partition(":")[0].partition("=")[0]
    if kind == "arbitrary":
        raise RuntimeError(
            "SlurmClusterResolver: SLURM_DISTRIBUTION=arbitrary does not say which "
            "task is on which host; use `strategy.cluster_resolver` of an "
            "`mpidist.MPIStrategy`"
        )
    blocks = {"cyclic": 1, "plane": int(os.environ.get("SLURM_DIST_PLANESIZE", "1"))}
    block = max(1, blocks.get(kind, max(tasks_on.values())))
    left = dict(tasks_on)
    placed: list[str] = []
    while any(left.values()):  # a block of tasks on one host after the other
        for host in left:
            count = min(block, left[host])
            placed += [host] * count
            left[host] -= count
    return tuple(placed)


def _variable(name: str) -> str:
    if name not in os.environ:
        raise RuntimeError(
            f"{name} not found in environment. Not running inside a SLURM step?"
        )
    return os.environ[name]


def _count_gpus() -> int:
    text = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if text.isdigit():
        return int(text)
    visible = os.environ.get(_VISIBLE)
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    if shutil.which("nvidia-smi") is None:
        return 0
    import subprocess  # each rank of each job would wait for it to be imported

    listed = subprocess.run(
        ["nvidia-smi", "--list-gpus"],
        capture_output=True,
        text=True,
        timeout=_SMI_SECONDS,
        check=False,
    )
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
