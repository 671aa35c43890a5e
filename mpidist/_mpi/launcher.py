"""What the launcher says about this process, before MPI has been started.

Launchers set environment variables. Those of mpirun are read first: if mpirun runs
inside a SLURM job, the task variables of SLURM describe its daemon, not the ranks. A
batch script itself has ``SLURM_NTASKS``, but no variable of a step, so a program which
it starts without a launcher is not taken for one of many.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from mpidist._base.types import record

ALLOW_ALONE = "MPIDIST_ALONE"
"""The environment variable that allows processes that MPI does not connect."""


@record
class Launch:
    """How this process was started.

    Attributes:
        launcher: its name, for messages.
        rank: of this process; None if the launcher does not say.
        size: how many processes it started together; None if it does not say.
        local_rank: of this process on its host; None if the launcher does not say.
        local_size: how many there are on its host; None if it does not say.
    """

    launcher: str
    rank: int | None
    size: int | None
    local_rank: int | None = None
    local_size: int | None = None


_NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
OPEN_MPI = "mpirun of Open MPI"
_MPICH = "mpirun of MPICH or Intel MPI"
_FOR_TORCH = ("torchrun", "accelerate launch")
# Their variables: rank and size among all ranks, and among those on the host.
_LAUNCHERS = (
    (OPEN_MPI, *(f"OMPI_COMM_WORLD_{x}" for x in _NUMBERS)),
    ("mpirun of MVAPICH2", *(f"MV2_COMM_WORLD_{x}" for x in _NUMBERS)),
    (_MPICH, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_BATCH_JOBS = {"SLURM": "SLURM_JOB_ID", "PBS": "PBS_JOBID", "LSF": "LSB_JOBID"}
_LAUNCHER_PROCESSES = {  # their names, of at most 15 letters
    *("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_pr"),
    *("prterun", "prted", "orterun", "orted", "srun", "slurmstepd"),
}
_LIBRARIES_OF_RANKS = ("/mpi4py/MPI.", "/mpidist/_native/_core.")
_SRUN_LOCAL_RANK = "SLURM_LOCALID"  # under mpirun that of its daemon


def find_launch(environment: Mapping[str, str] | None = None) -> Launch | None:
    """Return how this process was started; None if by no launcher of several.

    Args:
        environment: the variables; None: those of this process.
    """
    variables = os.environ if environment is None else environment
    step = _number(variables, "SLURM_STEP_NUM_TASKS")
    for name, *keys in _LAUNCHERS:
        if any(key in variables for key in keys[:2]):
            if step is not None and name == _MPICH:
                kind = variables.get("SLURM_MPI_TYPE", "")
                if kind.startswith("pmi"):  # else it is mpirun in a SLURM job
                    name, keys[2:] = f"srun --mpi={kind}", [_SRUN_LOCAL_RANK]
            return Launch(name, *(_number(variables, key) for key in keys))
    if "TORCHELASTIC_RUN_ID" in variables:
        return _launch_of_torch(variables)
    if step is not None:
        kind = variables.get("SLURM_MPI_TYPE", "none")
        rank_and_local = ("SLURM_PROCID", _SRUN_LOCAL_RANK)
        own, local_rank = (_number(variables, key) for key in rank_and_local)
        return Launch(f"srun --mpi={kind}", own, step, local_rank)
    own = _number(variables, "PMIX_RANK")
    if own is not None:
        return Launch("a launcher with PMIx", own, None)
    return _launch_of_torch(variables) if "MASTER_ADDR" in variables else None


def find_batch_job(variables: Mapping[str, str]) -> str:
    """Return the batch job of this process, as in "SLURM job 7"; "": none."""
    jobs = {system: variables.get(key) for system, key in _BATCH_JOBS.items()}
    return next((f"{system} job {job}" for system, job in jobs.items() if job), "")


@functools.cache  # nothing of it changes while this process runs
def find_rank_above() -> int | None:
    """Return the id of the process of a rank that started this one, if one has.

    It was launched as the same rank, and has loaded mpi4py and this package's core.
    Between them may be shells, and servers of `multiprocessing`; not a launcher, which
    starts a job of its own.
    """
    launch = find_launch()
    if launch is None or launch.size == 1:
        return None
    pid = os.getppid()
    try:
        while pid > 1:
            of = Path(f"/proc/{pid}")
            name, _, rest = (of / "stat").read_text().partition("(")[2].rpartition(")")
            if name in _LAUNCHER_PROCESSES:
                return None
            words = os.fsdecode((of / "environ").read_bytes()).split("\0")
            variables = dict(word.split("=", 1) for word in words if "=" in word)
            if find_launch(variables) != launch:
                return None
            maps = (of / "maps").read_text()
            if all(library in maps for library in _LIBRARIES_OF_RANKS):
                return pid
            pid = int(rest.split()[1])
    except (OSError, ValueError, IndexError):  # another user's, gone, or no Linux
        pass
    return None


def _launch_of_torch(variables: Mapping[str, str]) -> Launch | None:
    """Return what torchrun and launchers like it say; MPI knows nothing of them."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, size, local = (_number(variables, name) for name in names)
    if rank is None or size is None:
        return None
    by_accelerate = any(name.startswith("ACCELERATE_") for name in variables)
    return Launch(_FOR_TORCH[by_accelerate], rank, size, local)


def describe_alone(launch: Launch, library: str) -> str:
    """Return the message for a process that MPI does not connect to the others.

    Args:
        launch: with a size of more than 1.
        library: the MPI library that mpi4py uses.
    """
    mpich = "mpich" in library.lower()
    kind = "pmi2" if mpich else "pmix"
    if launch.launcher.startswith("srun"):
        cure = (
            f"SLURM did not tell MPI of the others; write `srun --mpi={kind}` "
            "(`srun --mpi=list` says what this SLURM has)"
        )
    elif launch.launcher in _FOR_TORCH:
        program = os.path.basename(sys.argv[0])
        program = program if program.endswith(".py") else "program.py"
        cure = (
            "it connects them for torch.distributed, not for MPI; write `mpirun -n "
            f"{launch.size} python {program}` or `mpidist run -n {launch.size} "
            f"{program}`"
        )
    else:
        cure = (
            "the launcher is that of another MPI library; use the mpirun of the "
            "environment that mpi4py is in"
        )
    return (
        f"{launch.launcher} started {launch.size} processes, but to mpi4py "
        f"({library.partition(',')[0].partition(chr(10))[0].strip()}) each is alone: "
        f"{cure}"
    )


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "")
    return int(text) if text.isdigit() else None
