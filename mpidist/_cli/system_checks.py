"""The checks of `mpidist check` that look at machines, not at mpidist."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from mpidist import _native
from mpidist._base.errors import format_ranks
from mpidist._cli.facts import CheckFailedError, Facts, Finding, Job, ok, sizes_text
from mpidist._cli.run_command import OPEN_MPI, version_of
from mpidist._cli.speaking import UsageError
from mpidist.cluster import this_process

_NEEDED_SHM: Final = 64 * 2**20
_ROUNDS: Final = 30
_BLOCK: Final = 64 * 2**10
_STALE_SECONDS: Final = 5.0
_LIBRARY_NAME: Final = re.compile(r"/libmpi(ch)?\.so[.\d]*$")
_WORDS_OF: Final = {"Open MPI": OPEN_MPI, "MPICH": ("HYDRA",)}
_CONTAINERS: Final = "ranks of a node share memory in one container (--ipc=host)"
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
    if job.rank == 0 and mpirun is not None and vendor in _WORDS_OF:
        with contextlib.suppress(UsageError):
            version = version_of(mpirun)
    found = [
        mpi for mpi, words in _WORDS_OF.items() if any(w in version for w in words)
    ]
    if found and vendor not in found:
        return Finding(
            f"mpi4py uses {vendor}, and {mpirun}, the first on the PATH, is that of "
            f"{found[0]}: with it each rank would be alone",
            f"put the folder of {vendor}'s mpirun first, or start by `mpidist run`",
        )
    return ok(f"{vendor}: {', '.join(loaded) or 'linked into mpi4py'}")


def loaded_libraries(maps: Path) -> list[str]:
    """Return the files of MPI libraries that a process has loaded, by its maps."""
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()}
    found = {path for path in paths if _LIBRARY_NAME.search(path)}
    return sorted({os.path.realpath(path): path for path in found}.values())


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
    sizes, near = list(map(len, job.nodes)), job.near_sizes
    launch = job.mine["launcher"]
    counts = launch["tasks_per_node"]
    if len(near) > len(sizes):
        as_slurm = counts is not None and sorted(counts) == sorted(near)
        return Finding(
            f"the ranks that share memory are {_sum(sizes)}, and MPI takes them "
            f"for {_sum(near)}: its messages between these are slower",
            _IS_THAT_MEANT if as_slurm else _why_apart(),
        )
    if counts is not None and sorted(counts) != sorted(sizes):
        return Finding(
            f"SLURM placed {_sum(counts)} ranks, but those that share memory are "
            f"{_sum(sizes)}",
            _IS_THAT_MEANT if len(sizes) < len(counts) else _CONTAINERS,
        )
    local = this_process().local_size
    if local not in (None, job.local_size):
        return Finding(
            f"{launch['name']} put {local} ranks on this host, of which "
            f"{job.local_size} share memory",
            f"do two hosts have one name? Else, {_CONTAINERS}",
        )
    held = os.environ.get("SLURM_JOB_NUM_NODES", "")
    by_mpirun = launch["name"].startswith("mpirun")
    if by_mpirun and job.rank == 0 and held.isdigit() and int(held) > len(sizes):
        return Finding(
            f"the job has {held} nodes, and its ranks are on {len(sizes)}",
            "mpirun -n N fills one node after the other: say how many ranks go on "
            "each (Open MPI: --map-by ppr:K:node; MPICH: -ppn K)",
        )
    if counts is None and max(sizes) - min(sizes) > 1:
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
    return ok(f"{count}, for {job.local_size} ranks of a node")


def cores(job: Job) -> Finding:
    """Check that there are cores for the ranks of this node."""
    here = [job.facts[rank]["cores"] for rank in job.node]
    total, usable = here[0]["machine"], len(_allowed(here))
    if job.local_size > total:
        text = f"{job.local_size} ranks on {total} cores"
        return Finding(f"{text}: ranks wait for a core, and calls take much longer")
    if job.local_size > usable:
        return Finding(
            f"{job.local_size} ranks may run on {usable} of {total} cores only",
            "the launcher binds several ranks to one core: ask for more cores "
            "(--cpus-per-task), or bind to none (mpirun --bind-to none)",
        )
    if job.local_size > 1 and "OMP_NUM_THREADS" not in job.mine["environment"]:
        return Finding(
            "OMP_NUM_THREADS is not set: NumPy's BLAS may use all cores in every "
            "rank; `export OMP_NUM_THREADS=1`"
        )
    return ok(f"{cores_text(here)}, for {job.local_size} ranks of a node")


def _allowed(ranks: Sequence[Facts]) -> set[int]:
    return {core for one in ranks for core in one["allowed"]}


def cores_text(ranks: Sequence[Facts]) -> str:
    """Return the cores that the job has on a node, given those of each rank there."""
    machine, allowed = ranks[0]["machine"], len(_allowed(ranks))
    limits = [(allowed, "its ranks may run on no others")]
    limits += [
        (max(1, math.ceil(one["quota"])), "by the control group")
        for one in ranks
        if one["quota"] is not None
    ]
    if ranks[0]["slurm"] is not None:
        limits.append((ranks[0]["slurm"], "by SLURM"))
    fewest, why = min(limits, key=lambda limit: limit[0])
    text = f"{min(fewest, machine)} of {machine} cores"
    if fewest < machine:
        text += f" ({why})"
    each = [len(one["allowed"]) for one in ranks]
    if min(each) < allowed:
        text += f", each rank on {min(each)}"
        text += f" to {max(each)}" if max(each) > min(each) else ""
    return text


def open_file_use(job: Job) -> Facts:
    """Return how many files may be open, and about how many have to be.

    A rank has up to one connection to each other rank. The mpirun of a node has three
    (Open MPI) or four (MPICH) files for each rank there, and some twenty others.
    """
    in_ranks = max(one["files"] for one in job.facts) + job.size
    in_mpirun = 4 * max(map(len, job.nodes)) + 32
    return {
        "limit": min(one["most_files"] for one in job.facts),
        "needed": max(in_ranks, in_mpirun),
    }


def open_files(job: Job) -> Finding:
    """Check that the ranks, and mpirun, may open the files that they need."""
    limit, needed = open_file_use(job).values()
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
    "native core": native_core,
    "placement": placement,
    "cores": cores,
    "open files": open_files,
    "GPUs": gpus,
    "shared memory": shared_memory,
}


# --- a folder for checkpoints -------------------------------------------------------

_ELSEWHERE: Final = "save checkpoints to another file system"


def check_folder(job: Job, path: str) -> Finding:
    """Have rank 0 replace a file again and again, while the others read it. Collective.

    A checkpoint relies on three properties (`_checkpoints/replace.py`): a file that is
    renamed over another is at any moment the old or the new one, whole; fsync of files
    and directories works; and what rank 0 wrote is what other ranks then read.

    Raises:
        CheckFailedError: on the ranks that see that a property does not hold.
    """
    path = os.path.realpath(path)
    name = f".mpidist-check-{secrets.token_hex(4)}"
    inside = Path(job.from_root(os.path.join(path, name)))
    file, problem, took, is_last = inside / "file", "", 0.0, True
    try:
        if job.rank == 0:
            inside.mkdir()
            file.write_bytes(_block(0))
    except OSError as error:
        problem = f"rank 0 cannot write to {path}: {error.strerror}"
        shutil.rmtree(inside, ignore_errors=True)
    if problem := job.from_root(problem):
        raise CheckFailedError(problem, "choose a folder that rank 0 may write to")
    try:
        unseen = job.comm.allgather(not _becomes_true(inside.is_dir))
        if unseen[job.rank]:
            raise CheckFailedError(
                f"what rank 0 writes to {path} is not seen here",
                "name a folder of a file system that all nodes share",
            )
        if any(unseen):
            return ok(f"{path} is seen here")
        try:
            if job.rank == 0:
                took = _replace(file)
        finally:  # the others are there at once, and follow until rank 0 is
            written = job.comm.Ibarrier()
        try:
            if job.rank:
                is_last = _follow(file, written.Test)
        finally:
            written.Wait()
    finally:
        job.comm.Barrier()
        if job.rank == 0:
            shutil.rmtree(inside, ignore_errors=True)
    if not is_last:
        return Finding(
            f"{_STALE_SECONDS:g} s after rank 0 replaced a file, an older one is read "
            "here",
            "the file system caches: read files on rank 0 only",
        )
    kind = file_system(path, Path("/proc/self/mounts").read_text().splitlines())
    if kind in ("tmpfs", "ramfs"):
        return Finding(f"{path} is {kind}: in the memory of this node, gone with it")
    return ok(f"{path} ({kind}): rename is atomic; an fsync takes {took * 1000:.2g} ms")


def file_system(path: str, mounts: Sequence[str]) -> str:
    """Return the kind of file system of a path, given ``/proc/self/mounts``."""
    found = ("", "unknown")
    for line in mounts:
        _, where, kind, *_ = line.split()
        where = where.replace("\\040", " ")
        inside = path == where or path.startswith(where.rstrip("/") + "/")
        if inside and len(where) >= len(found[0]):
            found = (where, kind)
    return found[1]


def _becomes_true(condition: Callable[[], bool]) -> bool:
    """Return whether a condition becomes true, which file systems may show late."""
    end = time.monotonic() + _STALE_SECONDS
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _replace(file: Path) -> float:
    """Replace a file many times; return the mean time of a write and an fsync."""
    seconds, new = 0.0, file.with_name("new")
    try:
        for number in range(1, _ROUNDS + 1):
            start = time.monotonic()
            new.write_bytes(_block(number))
            _synchronise(new)
            seconds += time.monotonic() - start
            os.rename(new, file)
            _synchronise(file.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # the others wait for the last one
            new.write_bytes(_block(_ROUNDS))
            os.rename(new, file)
        text = f"a file cannot be replaced or synchronised: {error}"
        raise CheckFailedError(text, _ELSEWHERE) from None
    return seconds / _ROUNDS


def _synchronise(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _follow(file: Path, is_written: Callable[[], bool]) -> bool:
    """Read a file until it is the last one; return False if an older one stays."""
    end = math.inf
    while _read(file) != _ROUNDS:
        if end == math.inf and is_written():
            end = time.monotonic() + _STALE_SECONDS
        if time.monotonic() > end:
            return False
    return True


def _read(file: Path) -> int:
    """Return which of the files it is; raise if it is none."""
    try:
        found = file.read_bytes()
    except FileNotFoundError:
        wrong = " there was none for a moment"
    except OSError as error:
        wrong = f": {error}"
    else:
        if len(found) == _BLOCK and not found.strip(found[:1]):
            return found[0]
        wrong = " part of another was read"
    raise CheckFailedError(f"while rank 0 replaced a file{wrong}", _ELSEWHERE)


def _block(number: int) -> bytes:
    return bytes([number]) * _BLOCK
