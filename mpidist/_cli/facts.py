"""Facts about ranks, machines and libraries, for `info`, `check` and `bench`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import re
import resource
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

import numpy as np

import mpidist
from mpidist import _native
from mpidist._base import gpus
from mpidist._base.errors import format_ranks
from mpidist._cli.job import Job
from mpidist._mpi import launcher, library
from mpidist._strategy.strategy import group_of
from mpidist.cluster import expand_tasks_per_node

_PROBE_BYTES: Final = 8 * 2**20
_INTERFACES: Final = Path("/proc/net/dev")  # /sys may be that of another namespace
_SENT: Final = 8  # the column of the bytes sent
_CARDS: Final = Path("/sys/class/infiniband")
_CARD_UNIT: Final = 4  # its counters count words of so many bytes

Facts: TypeAlias = dict[str, Any]
"""What `mpidist info --json` prints, or a part of it."""


def software_facts(mpi: ModuleType) -> dict[str, str]:
    """Return names and versions. Not collective."""
    name, version = mpi.get_vendor()
    return {
        "mpidist": mpidist.__version__,
        "mpi": f"{name} {'.'.join(map(str, version))}",
        "mpi_library": mpi.Get_library_version().splitlines()[0].rstrip("\0 ,"),
        "mpi_standard": ".".join(map(str, mpi.Get_version())),
        "mpi_threads": library.thread_level(),
        "mpi4py": importlib.metadata.version("mpi4py"),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def machine_facts() -> Facts:
    """Return facts about this rank's machine. Not collective."""
    return {
        "host": platform.node(),
        "processor": _processor_name(),
        "cores": os.cpu_count() or 1,
        "cores_for_this_rank": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _processor_name() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^(?:model name|Model)\s*:(.*)", text, re.M):
            return found[1].strip()
    return platform.processor() or platform.machine()


def environment_facts(others: Collection[str] = ()) -> dict[str, str]:
    """Return the variables of mpidist that are set here, and others that are."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("MPIDIST_") or name in others
    }


def is_crowded(job: Job) -> bool:
    """Return whether any node has more ranks than cores. Collective."""
    return not job.everywhere(job.local_size <= (os.cpu_count() or 1))


def transport_facts(strategy: mpidist.Strategy) -> dict[str, Facts]:
    """Return how each kind of array ("host", "gpu") is moved, and why."""
    chosen = group_of(strategy).collectives.resources.transports
    reasons = {"host": chosen.host_reason, "gpu": chosen.reason}
    names = {"host": chosen.host.name, "gpu": chosen.device.name}
    facts: dict[str, Facts] = {}
    for kind, name in names.items():
        reason = reasons[kind]
        text = f"{name}: {reason}" if reason else name
        text = reason if reason.startswith(name) else text
        facts[kind] = {"name": name, "reason": reason, "text": text}
    return facts


def core_facts(missing: Sequence[str]) -> Facts:
    """Return which ranks lack the native core, given why each does (or "")."""
    lacking = [rank for rank, why in enumerate(missing) if why]
    if not lacking:
        return {"missing_on": [], "text": "present", "advice": ""}
    where = "" if len(lacking) == len(missing) else f" on {format_ranks(lacking)}"
    means = "everything goes by MPI, correctly but more slowly"
    return {
        "missing_on": lacking,
        "text": f"{missing[lacking[0]]}{where}; {means}",
        "advice": _native.ADVICE,
    }


def gpu_facts() -> Facts:
    """Return the version of CuPy, and how many GPUs it finds. Not collective."""
    count, reason = gpus.count_gpus()
    version = getattr(sys.modules.get("cupy"), "__version__", None)
    return {"cupy": version, "gpus": count, "reason": reason}


def differences(
    mine: Mapping[str, str], first: Mapping[str, str], where: str
) -> dict[str, str]:
    """Return in a sentence for each fact how that of a rank is not rank 0's."""
    none = "not set"
    return {
        key: f"{key} is {mine.get(key, none)} {where}, and {first.get(key, none)} on "
        "rank 0"
        for key in dict.fromkeys([*mine, *first])
        if mine.get(key) != first.get(key)
    }


def describe_stranger(size: int) -> str:
    """Return a message if the launcher started ranks that MPI does not know of.

    Returns:
        The message; "" if MPI knows all ranks.
    """
    launch = launcher.find_launch()
    if size > 1 or launch is None or (launch.size or 1) == 1:
        return ""
    version = library.mpi_module().Get_library_version()
    return launcher.describe_alone(launch, version)


# --- where the ranks are ------------------------------------------------------------


def launcher_facts(variables: Mapping[str, str]) -> Facts:
    """Return how this process was started; None where nothing says it. Not collective.

    - ``name``: such as "mpirun of Open MPI"; "" without one.
    - ``size``: how many processes it started.
    - ``slurm_job``: the id of the SLURM job; under srun only ``slurm_step``, the id of
      its step, and ``slurm_mpi_type``, what srun was told by ``--mpi``.
    - ``tasks_per_node``: the tasks that SLURM placed on each node; under srun only.
    """
    found = launcher.find_launch(variables)
    name = "" if found is None else found.launcher
    facts: Facts = {
        "name": name,
        "size": None if found is None else found.size,
        "slurm_job": variables.get("SLURM_JOB_ID"),
        "slurm_step": None,
        "slurm_mpi_type": None,
        "tasks_per_node": None,
    }
    if name.startswith("srun"):
        facts["slurm_step"] = variables.get("SLURM_STEP_ID")
        facts["slurm_mpi_type"] = variables.get("SLURM_MPI_TYPE", "none")
        with contextlib.suppress(KeyError, ValueError):
            counts = expand_tasks_per_node(variables["SLURM_STEP_TASKS_PER_NODE"])
            facts["tasks_per_node"] = counts
    return facts


def launcher_text(facts: Facts) -> str:
    """Return the launcher in one line."""
    job = facts["slurm_job"]
    if not facts["name"]:
        return f"none, in SLURM job {job}" if job else "none"
    many = facts["size"] or 1
    text = f"{facts['name']} started {many} process{'es' * (many != 1)}"
    if facts["slurm_step"] is not None:
        text += f", step {facts['slurm_step']} of SLURM job {job}"
    elif job:
        text += f", in SLURM job {job}"
    return text


def core_use() -> Facts:
    """Return the cores of this rank: what it may use, and what limits it.

    - ``machine``: the cores of the machine.
    - ``allowed``: the numbers of those that this rank may run on.
    - ``quota``: cores' worth of time that the control group allows; None: no limit.
    - ``slurm``: the cores of the machine that SLURM gave to the job; None: no SLURM.
    """
    given = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return {
        "machine": os.cpu_count() or 1,
        "allowed": sorted(os.sched_getaffinity(0)),
        "quota": _quota(),
        "slurm": int(given) if given.isdigit() else None,
    }


def _quota() -> float | None:
    """Return the limit of this process's control group, or a group above, in cores."""
    limits = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, kinds, group = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        root = Path("/sys/fs/cgroup") / ("cpu" if kinds else "")
        here = root / group.lstrip("/")
        for folder in (here, *here.parents):
            limits += _limit_of(folder)
            if folder == root:
                break
    return min(limits, default=None)


def _limit_of(folder: Path) -> list[float]:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return []
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]


def cores_text(ranks: Sequence[Facts]) -> str:
    """Return the cores of a node that the job has there, given those of each rank."""
    machine = ranks[0]["machine"]
    allowed = len({core for one in ranks for core in one["allowed"]})
    limits = [(allowed, "its ranks may run on no others")]
    quotas = [one["quota"] for one in ranks if one["quota"] is not None]
    if quotas:
        limits.append((max(1, math.ceil(max(quotas))), "by the control group"))
    if ranks[0]["slurm"] is not None:
        limits.append((ranks[0]["slurm"], "by SLURM"))
    fewest, why = min(limits, key=lambda limit: limit[0])
    text = f"{min(fewest, machine)} of {machine} cores"
    if fewest < machine:
        text += f" ({why})"
    each = [len(one["allowed"]) for one in ranks]
    few, many = min(each), max(each)
    if few < allowed:
        span = f"{few}" if few == many else f"{few} to {many}"
        text += f", each rank on {span}"
    return text


def open_file_use(job: Job) -> Facts:
    """Return how many files may be open, and about how many have to be. Collective.

    A rank has up to one connection to each other rank. The mpirun of a node has three
    (Open MPI) or four (MPICH) files for each rank there, and some twenty others.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    mine = len(os.listdir("/proc/self/fd")) + job.size
    needed = max(mine, 4 * job.local_size + 32)
    return {
        "limit": -int(job.slowest([-limit])[0]),
        "needed": int(job.slowest([needed])[0]),
    }


def open_files_text(use: Facts) -> str:
    """Return the limit of open files in one line."""
    text = f"{use['limit']} for each process; this job needs about {use['needed']}"
    return text if use["needed"] <= use["limit"] else f"{text}, which is more"


def sizes_text(sizes: Sequence[int]) -> str:
    """Return the numbers of ranks of the nodes: ``4 nodes, 2 ranks on each``."""
    if len(sizes) == 1:
        return "1 node"
    if len(set(sizes)) == 1:
        return f"{len(sizes)} nodes, {sizes[0]} on each"
    if len(sizes) <= 8:
        return f"{len(sizes)} nodes, {' + '.join(map(str, sizes))}"
    return f"{len(sizes)} nodes, {min(sizes)} to {max(sizes)} on each"


def describe_devices(
    devices: Sequence[str], nodes: Sequence[Facts], ranks: Sequence[Facts], request: str
) -> list[str]:
    """Return which device each rank has, and why: a line for each kind of node.

    Args:
        devices: the device of each rank, such as "/rank:0/device:GPU:1".
        nodes: the ``ranks`` of each node.
        ranks: of each rank ``gpu`` and ``environment``.
        request: the device that the strategy was asked for.
    """
    lines = []
    for node in nodes:
        names = [devices[rank].rpartition("device:")[2] for rank in node["ranks"]]
        shown = ", ".join(names)
        if len(set(names)) == 1:
            shown = names[0] + (" for all ranks" if len(ranks) > 1 else "")
        mine = [ranks[rank] for rank in node["ranks"]]
        visible = [one["environment"].get("CUDA_VISIBLE_DEVICES") for one in mine]
        if request != "auto":
            why = f"--device {request}"
        elif all(name.startswith("CPU") for name in names):
            why = "no GPU is found"
        elif len(set(visible)) > 1:
            own = ", ".join(map(str, visible))
            why = f"each rank sees its own: CUDA_VISIBLE_DEVICES={own}"
        else:
            count = mine[0]["gpu"]["gpus"]
            why = f"the rank's number on its node, modulo {count} GPUs that it sees"
            if visible[0] is not None:
                why += f" (CUDA_VISIBLE_DEVICES={visible[0]})"
        lines.append(f"{shown}; {why}")
    return _lines_of_nodes(lines)


# --- the network ------------------------------------------------------------------


def measure_network(job: Job) -> list[str]:
    """Return what carries messages between nodes, in words. Collective.

    The first rank of each node sends 8 MiB to that of the next node. What the
    interfaces of the machine have sent meanwhile shows which ones MPI uses, whatever
    its settings say.

    Returns:
        A line for each kind of node; none if there is one node.
    """
    if len(job.nodes) == 1:
        return []
    leads = job.rank == job.node[0]
    leaders = job.comm.Split(0 if leads else job.mpi.UNDEFINED, job.rank)
    names = ""
    if leaders != job.mpi.COMM_NULL:
        node, nodes = leaders.Get_rank(), leaders.Get_size()
        send = np.ones(_PROBE_BYTES, np.uint8)
        receive = np.empty_like(send)
        leaders.Barrier()
        before = _sent()
        leaders.Sendrecv(send, (node + 1) % nodes, 0, receive, (node - 1) % nodes, 0)
        leaders.Barrier()
        sent = {name: count - before.get(name, 0) for name, count in _sent().items()}
        names = ", ".join(name for name in sent if sent[name] > _PROBE_BYTES / 4)
        leaders.Free()
    names = names or "no interface of Linux: memory, or a network with its own driver"
    by_rank: list[str] = job.comm.allgather(names)
    return _lines_of_nodes([by_rank[node[0]] for node in job.nodes])


def _lines_of_nodes(texts: Sequence[str]) -> list[str]:
    """Return each text once, with the numbers of its nodes if there are several."""
    kinds: dict[str, list[int]] = {}
    for node, text in enumerate(texts):
        kinds.setdefault(text, []).append(node)
    if len(kinds) == 1:
        return list(kinds)
    return [
        f"{format_ranks(nodes).replace('rank', 'node')}: {text}"
        for text, nodes in kinds.items()
    ]


def _sent() -> dict[str, int]:
    """Return how many bytes each interface and InfiniBand card has sent."""
    found: dict[str, int] = {}
    for line in _INTERFACES.read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        found[name.strip()] = int(numbers.split()[_SENT])
    for path in _CARDS.glob("*/ports/*/counters/port_xmit_data"):
        card = path.parts[len(_CARDS.parts)]
        found[card] = found.get(card, 0) + _read(path) * _CARD_UNIT
    return found


def _read(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
