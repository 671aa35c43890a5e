"""The checks of `mpidist check` that look at machines, not at mpidist."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from mpidist._base.gpus import count_gpus
from mpidist._cli import facts
from mpidist._cli.job import CheckFailedError, Job, Note
from mpidist._cli.run_command import version_of
from mpidist._cli.speaking import UsageError
from mpidist._mpi import launcher

_NEEDED_SHM: Final = 64 * 2**20
_ROUNDS: Final = 30
_BLOCK: Final = 64 * 2**10
_PATIENCE_SECONDS: Final = 30.0
_STALE_SECONDS: Final = 5.0
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
    sizes = list(map(len, job.nodes))
    text = facts.sizes_text(sizes)
    launch = facts.launcher_facts(os.environ)
    counts = launch["tasks_per_node"]
    if len(job.near_sizes) > len(job.nodes):
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
            if len(job.nodes) < len(counts)
            else "ranks of one node that are in different containers cannot share "
            "memory: start one container for all (--ipc=host)",
        )
    local = next(
        (os.environ[name] for name in launcher.LOCAL_SIZES if name in os.environ),
        "",
    )
    if local.isdigit() and int(local) != job.local_size:
        return Note(
            f"{launch['name']} put {local} ranks on this host, of which "
            f"{job.local_size} share memory",
            "are they in containers of their own (--ipc=host), or do two hosts "
            "have one name?",
        )
    held = os.environ.get("SLURM_JOB_NUM_NODES", "")
    by_mpirun = launch["name"].startswith("mpirun")
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
    usable = len({core for rank in job.node for core in allowed[rank]})
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
    use = facts.open_file_use(job)
    if use["needed"] > use["limit"]:
        return Note(
            facts.open_files_text(use),
            f"`ulimit -n {use['needed']}` before mpirun, and on all nodes "
            "(/etc/security/limits.conf)",
        )
    return facts.open_files_text(use)


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


# --- a folder for checkpoints -------------------------------------------------------


def check_folder(job: Job, path: str) -> str | Note:
    """Have rank 0 replace a file again and again, while the others read it. Collective.

    A checkpoint relies on three properties (`_checkpoints/replace.py`): a file that is
    renamed over another is at any moment the old or the new one, whole; fsync of files
    and directories works; and what rank 0 wrote is what other ranks then read.

    Args:
        job: the ranks.
        path: an existing folder.

    Raises:
        CheckFailedError: on the ranks that see that a property does not hold.
    """
    path = os.path.realpath(path)
    name = f".mpidist-check-{secrets.token_hex(4)}"
    inside = Path(job.from_root(os.path.join(path, name)))
    file, problem, seconds = inside / "file", "", 0.0
    if job.rank == 0:
        try:
            inside.mkdir()
            file.write_bytes(_block(0))
        except OSError as error:
            problem = f"rank 0 cannot write to {path}: {error.strerror}"
    problem = job.from_root(problem)
    if problem:
        raise CheckFailedError(problem, "choose a folder that rank 0 may write to")
    try:
        unseen = job.comm.allgather(not _wait_until(inside.is_dir))
        if unseen[job.rank]:
            raise CheckFailedError(
                f"what rank 0 writes to {path} is not seen here",
                "name a folder of a file system that all nodes share",
            )
        if any(unseen):
            return f"{path} is seen here"
        if job.rank == 0:
            problem, seconds = _replace(file)
        else:
            problem = _read_all(file)
        job.comm.Barrier()
        is_last = _wait_until(lambda: bool(problem) or _read(file) == ("", _ROUNDS))
        wrong = "" if is_last else _read(file)[0]
        job.comm.Barrier()
    finally:
        if job.rank == 0:
            shutil.rmtree(inside, ignore_errors=True)
    if problem:
        raise CheckFailedError(problem, "save checkpoints to another file system")
    if not is_last:
        return Note(
            f"{_STALE_SECONDS:g} s after rank 0 replaced a file, an older one is read "
            f"here{f' ({wrong})' if wrong else ''}",
            "the file system caches: read files on rank 0 only",
        )
    kind = file_system(path, Path("/proc/self/mounts").read_text().splitlines())
    if kind in ("tmpfs", "ramfs"):
        return Note(f"{path} is {kind}: in the memory of this node, and gone with it")
    took = f"{seconds * 1000:.2g} ms"
    return f"{path} ({kind}): rename is atomic; an fsync takes {took}"


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


def _wait_until(condition: Callable[[], bool]) -> bool:
    """Return whether a condition becomes true, which file systems may show late."""
    end = time.monotonic() + _STALE_SECONDS
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _replace(file: Path) -> tuple[str, float]:
    """Replace a file; return what went wrong, and the mean time of an fsync."""
    seconds, new = 0.0, file.with_name("new")
    try:
        for number in range(1, _ROUNDS + 1):
            with new.open("wb") as stream:
                stream.write(_block(number))
                stream.flush()
                start = time.monotonic()
                os.fsync(stream.fileno())
                seconds += time.monotonic() - start
            os.rename(new, file)
            directory = os.open(file.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
    except OSError as error:
        with contextlib.suppress(OSError):  # the others wait for the last one
            new.write_bytes(_block(_ROUNDS))
            os.rename(new, file)
        return f"a file cannot be replaced or synchronised: {error}", 0.0
    return "", seconds / _ROUNDS


def _read_all(file: Path) -> str:
    """Read a file until it is the last one; return what was wrong with it."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < end:
        problem, number = _read(file)
        if problem or number == _ROUNDS:
            return problem
    return ""  # that it is late is found next


def _read(file: Path) -> tuple[str, int]:
    """Return what is wrong with a file, or "" and which one it is."""
    try:
        found = file.read_bytes()
    except FileNotFoundError:
        return "while rank 0 replaced a file there was none for a moment", -1
    except OSError as error:
        return f"while rank 0 replaced a file: {error}", -1
    if len(found) != _BLOCK or found.strip(found[:1]):
        return "while rank 0 replaced a file part of another was read", -1
    return "", found[0]


def _block(number: int) -> bytes:
    return bytes([number]) * _BLOCK
