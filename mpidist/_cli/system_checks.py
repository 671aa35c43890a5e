"""The checks of `mpidist check` that look at machines, not at mpidist."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from mpidist import _native
from mpidist._base.environment import NAMES
from mpidist._base.errors import format_ranks
from mpidist._base.names import counted
from mpidist._cli.facts import CheckFailedError, Facts, Finding, Job, ok, sizes_text
from mpidist._cli.run_command import WORDS_OF, version_of
from mpidist._cli.speaking import UsageError
from mpidist._mpi import versions as software
from mpidist._mpi.library import OPEN_MPI_SETTINGS
from mpidist.cluster import this_process

_NEEDED_SHM: Final = 64 * 2**20
_LIBRARY_NAME: Final = re.compile(r"/libmpi(ch)?\.so[.\d]*$")
_MAY_DIFFER: Final = {"MPIDIST_TRACE", "CUDA_VISIBLE_DEVICES"}
_EXPORT: Final = (
    "export it to all ranks (Open MPI: mpirun -x KEY; MPICH: mpirun -genv KEY ...)"
)
_CONTAINERS: Final = "Ranks of a node share memory in one container (--ipc=host)"
_MORE_CORES: Final = (
    "ask for more cores (--cpus-per-task), or, if the launcher binds several ranks to "
    "one core, bind to none (mpirun --bind-to none)"
)
_IS_THAT_MEANT: Final = "several of SLURM's nodes are one machine: is that meant?"


def libraries(job: Job) -> Finding:
    """Check that there is one MPI: in this process, and on the PATH."""
    loaded = loaded_libraries(Path("/proc/self/maps"))
    if len(loaded) > 1:
        raise CheckFailedError(
            f"two MPI libraries are in one process: {' and '.join(loaded)}",
            "another module was built with another MPI (h5py, CuPy, PETSc): "
            "install it for the MPI that mpi4py uses",
        )
    vendor = job.mpi.get_vendor()[0]
    mpirun, version = shutil.which("mpirun"), ""
    if job.rank == 0 and mpirun is not None and vendor in WORDS_OF:
        with contextlib.suppress(UsageError):
            version = version_of(mpirun)
    found = [mpi for mpi, words in WORDS_OF.items() if any(w in version for w in words)]
    if found and vendor not in found:
        return Finding(
            f"mpi4py uses {vendor}, and {mpirun}, the first on the PATH, is that of "
            f"{found[0]}: with it each rank would be alone",
            f"put the folder of {vendor}'s mpirun first, or start by `mpidist run`",
        )
    found = [f"{vendor}: {', '.join(loaded) or 'linked into mpi4py'}"]
    return ok("; ".join(found + tcp_settings(job)))


def tcp_settings(job: Job) -> list[str]:
    """Return a text on what Open MPI's TCP between nodes has; none on one node."""
    if len(job.nodes) == 1 or job.mpi.get_vendor()[0] != "Open MPI":
        return []
    values = [f"{k}={os.environ.get(k, '(not set)')}" for k in OPEN_MPI_SETTINGS]
    return [
        f"over TCP: {', '.join(values)}, which a program that imports mpi4py.MPI "
        "before it makes a strategy must set itself (mpirun -x)"
    ]


def loaded_libraries(maps: Path) -> list[str]:
    """Return the files of MPI libraries that a process has loaded, by its maps."""
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()}
    found = {path for path in paths if _LIBRARY_NAME.search(path)}
    return sorted({os.path.realpath(path): path for path in found}.values())


def versions(job: Job) -> Finding:
    """Check that all ranks have the same software, and round alike."""
    mine = {**job.mine["software"], **software.describe()}
    first = job.from_root(mine)
    for key in mine:
        if mine[key] != first[key]:
            raise CheckFailedError(_differs(key, mine, first), software.ADVICE)
    floats = software.floats_that_differ([one["floats"] for one in job.facts])
    if floats:
        return Finding(floats, "import the same libraries on all ranks")
    return ok(f"{mine['mpi']}, mpi4py {mine['mpi4py']}, NumPy {mine['numpy']}")


def settings(job: Job) -> Finding:
    """Check that all ranks have the same environment variables, with right names."""
    mine, first = job.mine["environment"], job.facts[0]["environment"]
    names = sorted({*mine, *first} - _MAY_DIFFER)
    for key in sorted(names, key=lambda name: not name.startswith("MPIDIST_")):
        if mine.get(key) != first.get(key):
            text, advice = _differs(key, mine, first), _EXPORT.replace("KEY", key)
            if key.startswith("MPIDIST_"):
                raise CheckFailedError(text, advice)
            return Finding(text, advice)
    for key in sorted({*mine} - {*NAMES}):
        # Those of mpidist's own commands and tests are not as close to any.
        close = difflib.get_close_matches(key, NAMES, 1, 0.75)
        if close:
            return Finding(f"mpidist reads no {key}", f"did you mean {close[0]}?")
    return ok(", ".join(f"{k}={v}" for k, v in mine.items()) or "none set")


def _differs(key: str, mine: Facts, first: Facts) -> str:
    none = "not set"
    return f"{key} is {mine.get(key, none)} here, and {first.get(key, none)} on rank 0"


def native_core(job: Job) -> Finding:
    """Say which ranks lack the native core, and why."""
    missing = [one["core_missing"] for one in job.facts]
    lacking = [rank for rank, why in enumerate(missing) if why]
    if not lacking:
        return ok("present")
    where = "" if len(lacking) == job.size else f" on {format_ranks(lacking)}"
    means = "everything goes by MPI, correctly but more slowly"
    return Finding(f"{missing[lacking[0]]}{where}; {means}", _native.ADVICE)


def placement(job: Job) -> Finding:
    """Check that the ranks are on the nodes that they were asked to be on."""
    sizes, near, here = list(map(len, job.nodes)), job.near_sizes, this_process()
    as_placed = here.local_size in (None, job.local_size)
    if len(near) > len(sizes):
        return Finding(
            f"the ranks that share memory are {_sum(sizes)}, and MPI takes them "
            f"for {_sum(near)}: its messages between these are slower",
            _why_apart() if as_placed else _IS_THAT_MEANT,
        )
    if not as_placed:
        several = (here.local_size or 0) < job.local_size
        return Finding(
            f"{here.launcher} put {here.local_size} ranks on this host, and "
            f"{job.local_size} share memory",
            _IS_THAT_MEANT if several else f"do two hosts have one name? {_CONTAINERS}",
        )
    held = os.environ.get("SLURM_JOB_NUM_NODES", "")
    by_mpirun = here.launcher.startswith("mpirun")
    if by_mpirun and job.rank == 0 and held.isdigit() and int(held) > len(sizes):
        return Finding(
            f"the job has {held} nodes, and its ranks are on {len(sizes)}",
            "mpirun -n N fills one node after the other: say how many ranks go on "
            "each (Open MPI: --map-by ppr:K:node; MPICH: -ppn K)",
        )
    if max(sizes) - min(sizes) > 1 and not here.launcher.startswith("srun"):
        advice = "the same number on each is faster: the others wait for the fullest"
        return Finding(sizes_text(sizes), advice)
    return ok(sizes_text(sizes))


def _sum(sizes: Sequence[int]) -> str:
    return " + ".join(map(str, sizes))


def _why_apart() -> str:
    """Return why MPI, which asks PMIx by the name of the host, may not know them."""
    host = os.uname().nodename.partition(".")[0]
    node = os.environ.get("SLURMD_NODENAME", "").partition(".")[0]
    if node not in ("", host):
        return (
            f"this host is {host}, and its NodeName in slurm.conf is {node}: Open MPI "
            "under srun takes each rank for one of another node. Make the names equal, "
            "or start the ranks with mpirun in the job"
        )
    return (
        "the launcher tells MPI which ranks are on one host: does it know the hosts by "
        "other names than they have, or by one name for two?"
    )


def gpus(job: Job) -> Finding:
    """Check that there are GPUs for the ranks of this node."""
    given = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    count, why_none = job.mine["gpu"]["gpus"], job.mine["gpu"]["reason"]
    if count == 0:
        if not given.isdigit() or int(given) == 0:
            return ok(f"none: {why_none}")
        return Finding(
            f"SLURM gave this node {given} GPUs, and {why_none}",
            'pip install "mpidist[cuda12]"; `python -c "import cupy; '
            'cupy.show_config()"` says more',
        )
    # Ranks that SLURM has given GPUs of their own see different ones.
    visible = {x["environment"].get("CUDA_VISIBLE_DEVICES") for x in job.facts}
    if job.local_size > count and len(visible) == 1:
        return Finding(
            f"the {job.local_size} ranks of a node share its GPUs ({count}), and NCCL "
            "cannot be used",
            "start one rank for each GPU",
        )
    return ok(f"{count}, for {counted(job.local_size, 'rank')} of a node")


def cores(job: Job) -> Finding:
    """Check that there are cores for the ranks of this node."""
    count, text = cores_of([job.facts[rank]["machine"] for rank in job.node])
    if job.local_size > count:
        return Finding(
            f"{job.local_size} ranks on {text}: ranks wait for a core, and calls take "
            "much longer",
            "" if count == job.mine["machine"]["cores"] else _MORE_CORES,
        )
    if job.local_size > 1 and "OMP_NUM_THREADS" not in job.mine["environment"]:
        return Finding(
            "OMP_NUM_THREADS is not set: NumPy's BLAS may use all cores in every rank",
            "`export OMP_NUM_THREADS=1`",
        )
    return ok(f"{text}, for {counted(job.local_size, 'rank')} of a node")


def cores_of(ranks: Sequence[Facts]) -> tuple[int, str]:
    """Return the cores that the job has on a node, as a number and as text.

    Args:
        ranks: of each rank of the node what it says of its machine.
    """
    machine = ranks[0]["cores"]
    allowed = len({core for one in ranks for core in one["allowed"]})
    limits = [(allowed, "its ranks may run on no others")]
    limits += [
        (max(1, math.ceil(one["quota"])), "by the control group")
        for one in ranks
        if one["quota"] is not None
    ]
    if ranks[0]["slurm"] is not None:
        limits.append((ranks[0]["slurm"], "by SLURM"))
    fewest, why = min(limits, key=lambda limit: limit[0])
    count = min(fewest, machine)
    text = f"{count} of {machine} cores"
    if count < machine:
        text += f" ({why})"
    each = [len(one["allowed"]) for one in ranks]
    if min(each) < allowed:
        text += f", each rank on {min(each)}"
        text += f" to {max(each)}" if max(each) > min(each) else ""
    return count, text


def open_files(job: Job) -> Finding:
    """Check that the ranks, and mpirun, may open the files that they need.

    A rank has up to one connection to each other rank. The mpirun of a node has three
    (Open MPI) or four (MPICH) files for each rank there, and some twenty others.
    """
    in_ranks = max(one["files"] for one in job.facts) + job.size
    needed = max(in_ranks, 4 * max(map(len, job.nodes)) + 32)
    limit = min(one["most_files"] for one in job.facts)
    text = f"{limit} for each process; this job needs about {needed}"
    if needed <= limit:
        return ok(text)
    return Finding(
        f"{text}, which is more",
        f"`ulimit -n {needed}` before mpirun, and on all nodes "
        "(/etc/security/limits.conf)",
    )


def shared_memory(job: Job) -> Finding:
    """Check that ranks of this node can share memory."""
    found = job.mine["shared_memory"]
    size, free = found or (0, 0)
    if job.local_size > 1 and found is None:
        return Finding("there is no /dev/shm: ranks of a node cannot share memory")
    if job.local_size > 1 and free < _NEEDED_SHM:
        return Finding(
            f"/dev/shm has {free / 2**20:.0f} MiB free of {size / 2**20:.0f}: too "
            "little for ranks to share memory efficiently",
            "containers: --shm-size 1g; else `mount -o remount,size=... /dev/shm`",
        )
    smallest = min((one["shared_memory"] or (0, 0))[1] for one in job.facts)
    return ok(f"/dev/shm: {smallest / 2**30:.3g} GiB free")


# `mpidist info` shows them too.
CHECKS: Final[dict[str, Callable[[Job], Finding]]] = {
    "MPI library": libraries,
    "versions": versions,
    "settings": settings,
    "native core": native_core,
    "placement": placement,
    "cores": cores,
    "open files": open_files,
    "GPUs": gpus,
    "shared memory": shared_memory,
}
