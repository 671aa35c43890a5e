"""The ranks that a command runs on: mpi4py, facts about each, what a check finds."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import operator
import os
import platform
import re
import resource
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

import mpidist
from mpidist import _native
from mpidist._base import gpus, machine
from mpidist._base.environment import read_environment
from mpidist._base.errors import format_ranks, ranks_by
from mpidist._base.names import counted
from mpidist._cli.speaking import UsageError, let_the_first_speak
from mpidist._mpi import launcher, library, versions
from mpidist._strategy.strategy import group_of

RawComm: TypeAlias = Any
"""A communicator of mpi4py. One module imports mpi4py, so its types have no names."""
Facts: TypeAlias = dict[str, Any]
"""Facts by name, as JSON has them."""

# Variables of other programs that change what mpidist does, or how fast.
_OTHERS: Final = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "OMPI_MCA_osc", "OMPI_MCA_btl", "OMPI_MCA_pml"),
    *("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"),
    *("UCX_TLS", "UCX_NET_DEVICES", "FI_PROVIDER"),
)
_T = TypeVar("_T")
_J = TypeVar("_J", bound="Job")


class WrongResultError(Exception):
    """A call that was to be timed gave a wrong result; all ranks raise the same."""


class Job:
    """All ranks of COMM_WORLD, and raw mpi4py on a duplicate of it.

    Attributes:
        mpi: the module ``mpi4py.MPI``.
        comm: the communicator that hand-written code uses.
        rank: the rank of this process.
        size: the number of ranks.
        facts: those of each rank.
        mine: those of this rank.
        nodes: for each machine the ranks on it, which share memory, as those of a
            strategy do: host names need not differ.
        node: those on the machine of this rank.
        local_size: how many these are.
        near_sizes: the number of ranks in each group that shares memory by what MPI
            says; MPI asks the launcher, which may take one machine for several.
        stranger: a message if the launcher started ranks that MPI does not know of; ""
            if it knows all.
    """

    def __init__(self) -> None:
        """Duplicate COMM_WORLD. Collective; starts MPI.

        Raises:
            UsageError: if an environment variable of any rank is invalid.
        """
        self.mpi: ModuleType = library.mpi_module()
        self.comm: RawComm = self.mpi.COMM_WORLD.Dup()
        wrong = ""
        try:
            read_environment()
        except ValueError as error:
            wrong = str(error)
        if wrong := next(filter(None, self.comm.allgather(wrong)), ""):
            raise UsageError(wrong)
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.facts: list[Facts] = self.comm.allgather(facts_of_rank(self.mpi))
        self.mine: Facts = self.facts[self.rank]
        self.stranger: str = ""
        launch = library.find_launch_of_several()
        if self.size == 1 and launch is not None:
            version = self.mpi.Get_library_version()
            self.stranger = launcher.describe_alone(launch, version)
        by_place = ranks_by([one["place"] for one in self.facts])
        self.nodes: list[list[int]] = list(by_place.values())
        self.node: list[int] = by_place[self.mine["place"]]
        self.local_size: int = len(self.node)
        near = self.comm.Split_type(self.mpi.COMM_TYPE_SHARED)
        leaders = self.comm.allgather(near.bcast(self.rank, 0))
        near.Free()
        self.near_sizes: list[int] = list(map(len, ranks_by(leaders).values()))

    def free(self) -> None:
        """Free the communicator. Collective; ranks that are strangers wait a while."""
        self.comm.Free()
        if self.stranger:
            let_the_first_speak()

    def from_root(self, value: _T) -> _T:
        """Return rank 0's value on all ranks. Collective."""
        return self.comm.bcast(value, 0)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return the element-wise maximum over the ranks, on all. Collective."""
        send = np.array(seconds, np.float64)
        receive = np.empty_like(send)
        self.comm.Allreduce(send, receive, self.mpi.MAX)
        return [float(value) for value in receive]


# --- what a check finds ---------------------------------------------------------------

OK: Final = "ok"
NOTE: Final = "note"
FAILED: Final = "FAILED"
_STATES: Final = (OK, NOTE, FAILED)
BUG: Final = (
    "this should not happen: please report it, with the output of `mpidist info`. "
    "MPIDIST_IMPLEMENTATION=direct uses only MPI"
)


class CheckFailedError(Exception):
    """A check failed; the message says what is wrong, ``advice`` what to do."""

    def __init__(self, wrong: str, advice: str = BUG) -> None:
        super().__init__(wrong)
        self.advice = advice


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check has found on this rank, or on all."""

    text: str
    advice: str = ""
    state: str = NOTE


def ok(text: str) -> Finding:
    """Return what a check returns if all is well."""
    return Finding(text, state=OK)


def attempt(job: _J, check: Callable[[_J], Finding]) -> Finding:
    """Make a check on all ranks; return the same finding on all. Collective."""
    try:
        mine = check(job)
    except CheckFailedError as failure:
        mine = Finding(str(failure), failure.advice, FAILED)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        # The settings are the user's, and the message of a ValueError says all.
        advice = "" if isinstance(error, ValueError) else BUG
        mine = Finding(f"{type(error).__name__}: {first_line}", advice, FAILED)
    findings: list[Finding] = job.comm.allgather(mine)
    worst = max(findings, key=lambda one: _STATES.index(one.state))  # the first of them
    ranks = [rank for rank, one in enumerate(findings) if one.state == worst.state]
    if job.size == 1 or (len(ranks) == job.size and worst.state != FAILED):
        return worst
    return dataclasses.replace(worst, text=f"{format_ranks(ranks)}: {worst.text}")


# --- facts: nothing here communicates ------------------------------------------------


def facts_of_rank(mpi: ModuleType) -> Facts:
    """Return the facts about this rank; under "place" what ranks of a node share."""
    vendor, version = mpi.get_vendor()
    gpu_count, no_gpu = gpus.count_gpus()
    given = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return {
        "place": machine.node_id(mpi.Get_processor_name()),
        "software": {
            "mpidist": mpidist.__version__,
            "mpi": f"{vendor} {'.'.join(map(str, version))}",
            "mpi_standard": ".".join(map(str, mpi.Get_version())),
            "mpi_threads": library.thread_level(),
            "mpi4py": importlib.metadata.version("mpi4py"),
            "numpy": np.__version__,
            "python": _python(),
        },
        "machine": {
            "host": platform.node(),
            "processor": _processor_name(),
            "architecture": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "cores": os.cpu_count() or 1,
            "allowed": sorted(os.sched_getaffinity(0)),  # to this rank
            "quota": _quota(),  # of a control group; None: no limit
            "slurm": int(given) if given.isdigit() else None,
        },
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("MPIDIST_") or name in _OTHERS
        },
        "launcher": launcher_text(os.environ),
        "gpu": {
            "cupy": getattr(sys.modules.get("cupy"), "__version__", None),
            "gpus": gpu_count,
            "reason": no_gpu,
        },
        "core_missing": _native.missing,  # why, or ""
        "floats": versions.floating_point_state(),
        "files": len(os.listdir("/proc/self/fd")),
        "most_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "shared_memory": _shared_memory(),
    }


def _python() -> str:
    version = platform.python_version()
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        return version
    is_on: bool = operator.methodcaller("_is_gil_enabled")(sys)  # documented
    state = "on, which the native core needs" if is_on else "off"
    return f"{version}, free-threaded (its GIL is {state})"


def _processor_name() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^(?:model name|Model)\s*:(.*)", text, re.M):
            return found[1].strip()
    return platform.processor() or platform.machine()


def _shared_memory() -> list[int] | None:
    """Return the size of ``/dev/shm`` and what of it is free; None without one."""
    try:
        status = os.statvfs(machine.SHARED_MEMORY)
    except OSError:
        return None
    return [status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize]


def _quota() -> float | None:
    """Return the limit of this process's control group, or a group above, in cores."""
    limits = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, group = line.split(":", 2)
            if kinds and "cpu" not in kinds.split(","):
                continue
            root = Path("/sys/fs/cgroup") / ("cpu" if kinds else "")
            here = root / group.lstrip("/")
            for folder in (here, *here.parents):
                if folder.is_relative_to(root):
                    limits += _limit_of(folder)
    return min(limits, default=None)


def _limit_of(folder: Path) -> list[float]:
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, IndexError, ValueError):
            words = " ".join((folder / name).read_text() for name in names).split()
            return [] if words[0] in ("max", "-1") else [int(words[0]) / int(words[1])]
    return []


def launcher_text(variables: Mapping[str, str]) -> str:
    """Return in words how this process was started."""
    found, job = launcher.find_launch(variables), launcher.find_batch_job(variables)
    text = "none"
    if found is not None:
        many = counted(found.size or 1, "process", "processes")
        text = f"{found.launcher} started {many}"
        if found.launcher.startswith("srun"):
            return f"{text}, step {variables.get('SLURM_STEP_ID')} of {job}"
    return f"{text}, in {job}" if job else text


def transport_facts(strategy: mpidist.Strategy) -> dict[str, Facts]:
    """Return how each kind of array ("host", "gpu") is moved, and why."""
    chosen = group_of(strategy).collectives.resources.transports
    reasons = {
        "host": (chosen.host.name, chosen.host_reason),
        "gpu": (chosen.device.name, chosen.reason),
    }
    return {
        kind: {
            "name": name,
            "text": reason if reason.startswith(name) else f"{name}: {reason}",
        }
        for kind, (name, reason) in reasons.items()
    }


def sizes_text(sizes: Sequence[int]) -> str:
    """Return the numbers of ranks of the nodes: ``4 nodes, 2 on each``."""
    text, few, many = counted(len(sizes), "node"), min(sizes), max(sizes)
    if len(sizes) == 1:
        return text
    if few == many:
        return f"{text}, {few} on each"
    each = f"{few} to {many} on each" if len(sizes) > 8 else " + ".join(map(str, sizes))
    return f"{text}, {each}"
