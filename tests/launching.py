"""Starts Python programs under mpirun, with a deadline: for tests in one process."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]

ULFM = ("--with-ft", "ulfm")  # the options of Open MPI's mpirun
JOB_MARK = "MPIDIST_TEST_JOB"  # by which the processes of a job are found again
# A rank that is killed while it makes a strategy leaves a file in /dev/shm for a
# minute. So that a test beside it does not take that for its own, ranks name theirs.
FILES = "MPIDIST_TEST_FILES"
NAME_FILES = f"""
import os
from mpidist._collectives import node
node._PREFIX += os.environ["{FILES}"]
"""
# Of PMIx, in Open MPI's mpirun: once in some hundred times, before any rank is there.
LAUNCHER_FAULT = "listener thread failed to start"

_PR_SET_PDEATHSIG = 1

# What mpirun gives its ranks. If pytest is one, these would make another mpirun believe
# that it is part of the same job.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_OF_JOBS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MPIR_")

# The test machine may have fewer cores than ranks, and be a container without a user.
_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # the same for Open MPI 4
    # Closing this module, which one node does not need, takes Open MPI a `sleep(1)`.
    "OMPI_MCA_btl": "^ofi",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

# In a program whose ranks fail together: the lowest one ends the job before the next
# one's turn to speak, on a busy machine too.
ONLY_THE_FIRST = "from mpidist._runtime import job_end; job_end._TURN_SECONDS = 60.0"

# The rank that fails ends the job before the others, which raise because of it, give up
# waiting for that, on a busy machine too.
ONLY_WHO_FAILS = (
    "from mpidist._runtime import job_end; job_end._OTHERS_FIRST_SECONDS = 60.0"
)

# For programs that fork: from Python 3.12 on os.fork warns of the threads that MPI has.
FORKS = {"PYTHONWARNINGS": "ignore:This process (pid=:DeprecationWarning"}


def run_ranks(
    n: int,
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    options: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run this Python with the arguments ``argv`` on ``n`` ranks.

    Args:
        n: number of ranks.
        argv: what follows ``python``: a script or ``-c`` or ``-m``, and arguments.
        timeout: seconds; then every process that was started is killed.
        env: environment variables to set on top.
        cwd: folder to run in.
        options: of mpirun, such as `ULFM`.

    Returns:
        The exit status of mpirun, and what the ranks wrote to stdout and stderr.

    Raises:
        TimeoutError: at the deadline, with what was written until then.
    """
    program = [os.fspath(x) for x in argv]
    command = [find_mpirun(), *options, "-n", str(n), sys.executable, *program]
    return run_command(command, timeout, env, cwd)


# Each program in the folder that it is in, or the one named; and what a rank prints in
# files.
_IN_TURN = """
import json, os, runpy, sys

for number, (folder, argv) in enumerate(json.loads(sys.argv[2])):
    os.chdir(folder)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        name = f"{sys.argv[1]}/{number}{stream.name}{os.getpid()}"
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), stream.fileno())
    sys.path[0] = os.path.dirname(argv[0])
    arguments, sys.argv = sys.argv, argv
    runpy.run_path(argv[0], run_name="__main__")
    sys.argv = arguments
"""


def run_in_turn(
    n: int,
    programs: Sequence[Sequence[str | os.PathLike[str]]],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """Run programs that end well, one after the other, in ``n`` processes.

    Most of the time of a short job is the start of Python, MPI and libraries.

    Args:
        n: number of ranks.
        programs: for each the script, and arguments.
        timeout: seconds for all of them.
        env: environment variables to set on top.
        cwd: folder to run in; by default that of the script.

    Returns:
        For each program what the ranks wrote to stdout and stderr.

    Raises:
        AssertionError: one of them has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        argv = [[os.fspath(x) for x in program] for program in programs]
        given = json.dumps(
            [[cwd or os.path.dirname(x[0]), x] for x in argv], default=os.fspath
        )
        done = run_ranks(n, ["-c", _IN_TURN, folder, given], timeout=timeout, env=env)
        results = []
        for number, program in enumerate(argv):
            out, err = (
                "".join(
                    path.read_text(encoding="utf-8")
                    for path in sorted(Path(folder).glob(f"{number}<{stream}>*"))
                )
                for stream in ("stdout", "stderr")
            )
            results.append(subprocess.CompletedProcess(program, 0, out, err))
    assert done.returncode == 0, [*(x for x in results if x.stderr), done]
    return results


def run_command(
    command: Sequence[str | os.PathLike[str]],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command that starts ranks; arguments and the rest as for `run_ranks`."""
    result = _run_once(command, timeout, env, cwd)
    if LAUNCHER_FAULT in result.stderr:
        # mpirun itself, on a machine with much to do; no rank was started.
        result = _run_once(command, timeout, env, cwd)
    return result


def _run_once(
    command: Sequence[str | os.PathLike[str]],
    timeout: float,
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
) -> subprocess.CompletedProcess[str]:
    words = [os.fspath(x) for x in command]
    mark = f"job-{uuid.uuid4().hex}"
    environment = rank_environment(env)
    # Added to that of an outer job, which then finds these processes too.
    environment[JOB_MARK] = f"{environment.get(JOB_MARK, '')} {mark}"
    # Files, since a stray process that held a pipe open would keep us waiting.
    with output_file() as out, output_file() as err:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )
        try:
            late = not _ends_within(process, timeout)
            if late:
                os.killpg(process.pid, signal.SIGTERM)  # mpirun then cleans up
                _ends_within(process, 3)
        finally:
            kill_marked(mark)
            status = process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    if late:
        raise TimeoutError(
            f"{' '.join(words[1:])[:500]!r} did not end within "
            f"{timeout} s\n--- stdout\n{texts[0]}\n--- stderr\n{texts[1]}"
        )
    return subprocess.CompletedProcess(words, status, *texts)


def run_alone(
    *command: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    base: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float = 100,
) -> subprocess.CompletedProcess[str]:
    """Run a command that starts no ranks, or Python with options such as ``-c``.

    The environment is ``base``, by default `rank_environment`, with ``env`` on top.
    """
    start = (sys.executable,) if os.fspath(command[0]).startswith("-") else ()
    return subprocess.run(
        [*start, *command],
        cwd=cwd,
        env={**(rank_environment() if base is None else base), **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_python(*argv: str | os.PathLike[str], **options: Any) -> str:
    """Run Python in a process that is no rank; return what it wrote to stdout.

    It must end with code 0, and write nothing to stderr.
    """
    done = run_alone(sys.executable, *argv, **options)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


@functools.cache
def mpi_vendor() -> tuple[str, tuple[int, ...]]:
    """Return the name and the version of mpi4py's MPI, which is not started here."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
    found = run_python("-c", f"{code}; print(repr(MPI.get_vendor()))")
    name, version = ast.literal_eval(found)
    return name, version


def outlives_ranks() -> bool:
    """Return whether jobs of this mpirun go on when a rank dies, with `ULFM`."""
    name, version = mpi_vendor()
    return name == "Open MPI" and version >= (5,)


def find_mpirun() -> str:
    """Return the mpirun that `mpidist run` starts."""
    from mpidist._cli.run_command import find_mpirun  # all of the command line

    return find_mpirun()


def plain_environment() -> dict[str, str]:
    """Return the environment without what changes the output of a pytest in it."""
    of_pytest = ("CI", "BUILD_NUMBER", "FORCE_COLOR", "PY_COLORS", "PYTEST_ADDOPTS")
    return {k: v for k, v in os.environ.items() if k not in of_pytest}


def rank_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment to start mpirun in."""
    env = dict(os.environ)
    if any(name in env for name in RANK_VARIABLES):
        env = {k: v for k, v in env.items() if not k.startswith(_OF_JOBS)}
    for name, value in _SETTINGS.items():
        env.setdefault(name, value)
    if not _is_installed():
        paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
        env["PYTHONPATH"] = os.pathsep.join(paths)
    # Unbuffered, Python writes a line and its end apart, and ranks mix theirs.
    env.pop("PYTHONUNBUFFERED", None)
    env.update(extra or {})
    return env


def _is_installed() -> bool:
    # A build leaves metadata in the repository, which is no installation.
    elsewhere = [p for p in sys.path if Path(p).resolve() != ROOT]
    found = importlib.metadata.distributions(name="mpidist", path=elsewhere)
    return any(True for _ in found)


def left_over(name: str, seconds: float = 20) -> set[str]:
    """Return the files in /dev/shm that stay, of ranks whose `FILES` is ``name``."""
    end = time.monotonic() + seconds
    while files := {path.name for path in Path("/dev/shm").glob(f"mpidist-{name}*")}:
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    return files


def end_with_parent() -> None:
    """Have this process, a child, end with its parent, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def output_file() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def kill_marked(mark: str) -> None:
    """Kill mpirun and the ranks, which mpirun puts into sessions of their own."""
    found = True
    while found:
        found = False
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # gone, or somebody else's
                if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)
                    found = True
        time.sleep(0.01 * found)
