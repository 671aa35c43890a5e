"""The checks of `mpidist check` that look at machines, not at mpidist."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mpidist._base.gpus import count_gpus
from mpidist._cli.facts import (
    launcher_facts,
    open_file_use,
    open_files_text,
    sizes_text,
)
from mpidist._cli.job import CheckFailedError, Job, Note, UsageError
from mpidist._cli.run_command import version_of
from mpidist._mpi import launcher

_NEEDED_SHM: Final = 64 * 2**20
_LIBRARY_NAME: Final = re.compile(r"/libmpi(ch)?\.so[.\d]*$")


def libraries(job: Job) -> str | Note:
    """Check that there is one MPI: in this process, and on the PATH."""
    loaded = loaded_libraries(Path("/proc/self/maps"))
    if len(loaded) > 1:
        raise CheckFailedError(
            f"two MPI libraries are in one process: {' and '.join(loaded)}",
            "another module was built with another MPI (h5py, CuPy, PETSc): "
            "install it for the MPI that mpi4py uses",
        )
    vendor = job.mpi.get_vendor()[0]
    if job.rank == 0:
        other = _other_launcher(vendor)
        if other:
            return other
    return f"{vendor}: {', '.join(loaded) or 'linked into mpi4py'}"


def placement(job: Job) -> str | Note:
    """Check that the ranks are on the nodes that they were asked to be on."""
    sizes = job.node_sizes
    text = sizes_text(sizes)
    facts = launcher_facts(os.environ)
    counts = facts["tasks_per_node"]
    if len(job.near_sizes) > job.nodes:
        advice = _why_apart(os.environ.get("SLURMD_NODENAME", ""))
        if counts is not None and sorted(counts) == sorted(job.near_sizes):
            advice = "several of SLURM's nodes are one machine: is that meant?"
        return Note(
            f"the ranks that share memory are {_sum(sizes)}, and MPI takes them "
            f"for {_sum(job.near_sizes)}: its messages between these are slower",
            advice,
        )
    if counts is not None and sorted(counts) != sorted(sizes):
        return Note(
            f"SLURM placed {_sum(counts)} ranks, but those that share memory are "
            f"{_sum(sizes)}",
            "several of SLURM's nodes are one machine: is that meant?"
            if job.nodes < len(counts)
            else "ranks of one node that are in different containers cannot share "
            "memory: start one container for all (--ipc=host)",
        )
    local = next(
        (os.environ[name] for name in launcher.LOCAL_SIZES if name in os.environ),
        "",
    )
    if local.isdigit() and int(local) != job.local_size:
        return Note(
            f"{facts['name']} put {local} ranks on this host, of which "
            f"{job.local_size} share memory",
            "are they in containers of their own (--ipc=host), or do two hosts "
            "have one name?",
        )
    held = os.environ.get("SLURM_JOB_NUM_NODES", "")
    by_mpirun = facts["name"].startswith("mpirun")
    if by_mpirun and job.rank == 0 and held.isdigit() and int(held) > len(sizes):
        return Note(
            f"the job has {held} nodes, and its ranks are on {len(sizes)}",
            "mpirun -n N fills one node after the other: say how many ranks go on "
            "each (Open MPI: --map-by ppr:K:node; MPICH: -ppn K)",
        )
    if counts is None and max(sizes) - min(sizes) > 1:
        return Note(
            text,
            "nodes with more ranks take longer, and the others wait for them: the "
            "same number on each is faster",
        )
    return text


def gpus(job: Job) -> str | Note:
    """Check that there are GPUs for the ranks of this node."""
    given = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    local = job.local_size
    count, why_none = count_gpus()
    # Ranks that SLURM has given GPUs of their own see different ones.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    alike = len(set(job.comm.allgather(visible))) == 1
    if count == 0:
        if given.isdigit() and int(given) > 0:
            return Note(
                f"SLURM gave this node {given} GPUs, and {why_none}",
                'pip install "mpidist[cuda12]"; `python -c "import cupy; '
                'cupy.show_config()"` says more',
            )
        return f"none: {why_none}"
    if local > count and alike:
        return Note(
            f"the {local} ranks of a node share its GPUs ({count}), and NCCL cannot "
            "be used",
            "start one rank for each GPU",
        )
    return f"{count}, for {local} ranks of a node"


def cores(job: Job) -> str | Note:
    """Check that there are cores for the ranks of this node."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    cores = os.cpu_count() or 1
    allowed = job.comm.allgather(sorted(os.sched_getaffinity(0)))
    mine = [allowed[r] for r in range(job.size) if job.node_of[r] == job.node]
    usable = len({core for one in mine for core in one})
    if job.local_size > cores:
        return Note(
            f"{job.local_size} ranks on {cores} cores: ranks wait for a core, and "
            "calls take many times as long as with one rank per core"
        )
    if job.local_size > usable:
        return Note(
            f"{job.local_size} ranks may run on {usable} of {cores} cores only",
            "the launcher binds several ranks to one core: ask for more cores "
            "(--cpus-per-task), or bind to none (mpirun --bind-to none)",
        )
    if job.local_size > 1 and not threads:
        return Note(
            "OMP_NUM_THREADS is not set: NumPy's BLAS may use all cores in every "
            "rank; `export OMP_NUM_THREADS=1`"
        )
    return f"{usable} of {cores} cores, for {job.local_size} ranks of a node"


def open_files(job: Job) -> str | Note:
    """Check that the ranks, and mpirun, may open the files that they need."""
    use = open_file_use(job)
    if use["needed"] > use["limit"]:
        return Note(
            open_files_text(use),
            f"`ulimit -n {use['needed']}` before mpirun, and on all nodes "
            "(/etc/security/limits.conf)",
        )
    return open_files_text(use)


def shared_memory(job: Job) -> str | Note:
    """Check that ranks of this node can share memory."""
    advice = "containers: --shm-size 1g; else `mount -o remount,size=... /dev/shm`"
    try:
        status = os.statvfs("/dev/shm")
        size = status.f_blocks * status.f_frsize
        free = status.f_bavail * status.f_frsize
    except OSError:
        size = free = -1
    smallest: int = job.comm.allreduce(free, job.mpi.MIN)
    if free < 0 and job.local_size > 1:
        return Note("there is no /dev/shm: ranks of a node cannot share memory")
    if job.local_size > 1 and free < _NEEDED_SHM:
        return Note(
            f"/dev/shm has {free / 2**20:.0f} MiB free of {size / 2**20:.0f}: too "
            "little for ranks to share memory efficiently",
            advice,
        )
    return f"/dev/shm: {max(smallest, 0) / 2**30:.3g} GiB free"


def _sum(sizes: Sequence[int]) -> str:
    return " + ".join(map(str, sizes))


def _why_apart(node: str) -> str:
    """Return why MPI may not know which ranks are on SLURM's node, and what to do.

    Open MPI learns from SLURM, by PMIx, who else is on its host, and asks for it by the
    name of the host.
    """
    host = os.uname().nodename.partition(".")[0]
    if node and node.partition(".")[0] != host:
        return (
            f"this host is {host}, and its NodeName in slurm.conf is {node}: Open MPI "
            "under srun takes each rank for one of another node. Make the names equal, "
            "or start the ranks with mpirun in the job"
        )
    return (
        "the launcher tells MPI which ranks are on one host: does it know the hosts by "
        "other names than they have, or by one name for two?"
    )


def loaded_libraries(maps: Path) -> list[str]:
    """Return the files of MPI libraries that a process has loaded, by its maps."""
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()}
    found = {path for path in paths if _LIBRARY_NAME.search(path)}
    return sorted({os.path.realpath(path): path for path in found}.values())


def _other_launcher(vendor: str) -> Note | None:
    """Return a note if the first mpirun on the PATH is that of another MPI."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return None
    try:
        version = version_of(mpirun)
    except UsageError:
        return None
    names = {"Open MPI": ("Open MPI", "OpenRTE", "PRRTE"), "MPICH": ("HYDRA",)}
    known = [name for name, words in names.items() for word in words if word in version]
    if not known or vendor not in names or vendor in known:
        return None
    return Note(
        f"mpi4py uses {vendor}, and {mpirun}, the first on the PATH, is that of "
        f"{known[0]}: with it each rank would be alone",
        f"put the folder of {vendor}'s mpirun first, or start by `mpidist run`",
    )
