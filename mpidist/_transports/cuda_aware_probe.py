"""Tries MPI on GPU buffers in child processes, so that a crash does no harm.

A wrong assumption about CUDA-aware MPI is a segmentation fault, which no `try` catches.
So a child makes the calls of the direct transport, and its parent reads the outcome.

A child on one rank proves that this MPI starts here, recognizes GPU memory, and copies
it correctly, in short and long messages to itself. It does not prove that the network,
or two processes of a node, can transfer GPU memory, or that sums are correct. Two ranks
(``ranks=2``) prove that for this node; between nodes only a run does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

import numpy as np

from mpidist._agreement.deadline import Deadline
from mpidist._base import backend
from mpidist._base.types import Array, HostArray
from mpidist._mpi import library
from mpidist._mpi.communicator import Communicator
from mpidist._transports import DirectTransport

Outcome = Literal[
    "works", "wrong", "refused", "crashed", "timed out", "no gpu", "no mpi"
]

RECORD_PREFIX: Final = "mpidist-probe "
_COUNTS: Final = (1, 256, 100_003, 2**20 + 3)  # float32, below and above eager limits
_OF_LAUNCHERS: Final = (
    *("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_APP_", "OMPI_NUM_APP", "OMPI_FIRST_"),
    *("OMPI_ARGV", "OMPI_COMMAND", "OMPI_FILE_LOCATION", "OMPI_MCA_ess"),
    *(
        "OMPI_MCA_orte",
        "OMPI_MCA_pmix",
        "OMPI_MCA_initial_wdir",
        "OMPI_MCA_shmem",
        "PMI_",
        "PMIX_",
    ),
    *("PRTE_LAUNCHED", "PRTE_MCA_ess", "PRTE_MCA_prte", "PRTE_MCA_plm", "HYDRA_"),
    *("HYDI_", "MPI_LOCAL", "MPIR_", "PALS_", "FLUX_", "I_MPI_HYDRA", "SLURM_"),
)


@dataclasses.dataclass(frozen=True)
class Probe:
    """The outcome of MPI on GPU buffers, in child processes.

    Attributes:
        outcome: "works": all results were right. "wrong": a result was wrong.
            "refused": MPI or mpi4py raised an exception. "crashed": a signal ended a
            child. "timed out": it was stopped. "no gpu": CuPy finds no GPU, so nothing
            was tried. "no mpi": a child could not start MPI, or there is no mpirun.
        ranks: number of processes.
        detail: one line of text: the last step, the exception, the signal.
        seconds: the duration.
        mpi: name and version of the library, if known.
        says: how MPI reports that it is CUDA-aware; "" if it does not.
    """

    outcome: Outcome
    ranks: int
    detail: str
    seconds: float
    mpi: str = ""
    says: str = ""


def probe_direct(
    ranks: int = 1,
    *,
    device: int | None = None,
    timeout_seconds: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> Probe:
    """Try MPI on GPU buffers in a child process. Not collective.

    May be called in a process of an MPI job: the child's environment is without the
    launcher's variables, so it does not join that job. It is a separate process on this
    machine, or with ``ranks=2`` an mpirun with two. The user's settings for the MPI
    library (``OMPI_MCA_pml``, ``UCX_TLS``, ...) stay set.

    Args:
        ranks: 1, or more, by the mpirun beside this Python or on the PATH.
        device: number of the GPU; None: GPUs are assigned round-robin.
        timeout_seconds: after which the children are stopped.
        env: additional environment variables.
    """
    command = [sys.executable, "-m", "mpidist._transports.cuda_aware_probe"]
    command += [] if device is None else [str(device)]
    start = time.perf_counter()
    if ranks > 1:
        mpirun = _find_mpirun()
        if mpirun is None:
            return Probe("no mpi", ranks, "there is no mpirun on the PATH", 0.0)
        command = [mpirun, "-n", str(ranks), *command]
    environment = child_environment({**os.environ, **(env or {})})
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        late = False
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
        file.seek(0)
        text = file.read().decode(errors="replace")
    seconds = time.perf_counter() - start
    return _judge(ranks, process.returncode, late, text, seconds)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that launchers set for ranks."""
    kept = {k: v for k, v in environment.items() if not k.startswith(_OF_LAUNCHERS)}
    kept["PYTHONUNBUFFERED"] = "1"
    kept["PYTHONFAULTHANDLER"] = ""  # a crash is an expected outcome: no traceback
    kept["MPIDIST_ABORT"] = "0"
    # The probe may have more ranks than cores.
    kept.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    kept.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
    if os.geteuid() == 0:
        kept.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        kept.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    root = str(Path(__file__).resolve().parents[2])  # where the package is
    kept["PYTHONPATH"] = os.pathsep.join(
        [root, *filter(None, [kept.get("PYTHONPATH")])]
    )
    return kept


def _find_mpirun() -> str | None:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a child and its descendants, if it still runs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def _judge(ranks: int, code: int, late: bool, text: str, seconds: float) -> Probe:
    """Return the outcome, from the output and the exit code of children."""
    records = [
        json.loads(line[len(RECORD_PREFIX) :])
        for line in text.splitlines()
        if line.startswith(RECORD_PREFIX)
    ]
    known: dict[str, str] = {}
    for record in records:
        known |= {k: v for k, v in record.items() if k in ("mpi", "says")}
    tried = [r["step"] for r in records if "step" in r]
    ended = [r for r in records if "outcome" in r]

    def result(outcome: Outcome, detail: str) -> Probe:
        return Probe(outcome, ranks, detail, seconds, **known)

    bad = [r for r in ended if r["outcome"] != "works"]
    if bad:
        return result(bad[0]["outcome"], bad[0]["detail"])
    if late:
        return result("timed out", f"after {seconds:.0f} s, in {_last(tried)}")
    if len(ended) == ranks and code == 0:
        return result("works", ended[0]["detail"])
    # An mpirun exits with 128 + the signal of a rank, or only prints the signal.
    number = -code if code < 0 else code - 128
    written = re.search(r"\bsignal (\d+)\b", text)
    if number <= 0 and written is not None:
        number = int(written[1])
    with contextlib.suppress(ValueError):
        name = signal.Signals(number).name
        if tried or code < 0:
            return result("crashed", f"{name}, in {_last(tried)}")
    if tried:
        return result("crashed", f"exit status {code}, in {_last(tried)}")
    lines = [line for line in text.splitlines() if line.strip()]
    said = lines[-1].strip() if lines else f"exit status {code}"
    return result("no mpi", f"a child did not come as far as MPI: {said:.300}")


def _last(tried: list[str]) -> str:
    return tried[-1] if tried else "starting MPI"


# --- the child ------------------------------------------------------------------------


def _child(arguments: list[str]) -> None:
    """Make the calls; print the name of each before it."""

    def say(**record: str) -> None:
        print(RECORD_PREFIX + json.dumps(record), flush=True)

    try:
        # The GPU first: without one there is no need to start MPI.
        device = backend.select_device("gpu", 0)
    except Exception as error:
        say(outcome="no gpu", detail=str(error))
        return
    mpi = library.mpi_module()
    world = mpi.COMM_WORLD
    vendor, version = mpi.get_vendor()
    name = f"{vendor} {'.'.join(map(str, version))}"
    say(mpi=name, says=library.query_cuda_support())
    try:
        request = arguments[0] if arguments else ""
        if request or world.size > 1:
            text = f"gpu:{request}" if request else "gpu"
            device = backend.select_device(text, world.Get_rank())
        device.activate()
        detail = _try_calls(mpi, device.array_module, lambda step: say(step=step))
    except Exception as error:
        say(outcome="refused", detail=f"{type(error).__name__}: {error}")
        return
    if detail:
        say(outcome="wrong", detail=detail)
    else:
        say(outcome="works", detail=f"{name}, ranks: {world.size}, GPU {device.index}")


def _try_calls(
    mpi: types.ModuleType, xp: backend.ArrayModule, say: Callable[[str], None]
) -> str:
    """Return what was wrong; "" if all results were right."""
    comm = Communicator(mpi.COMM_WORLD, Deadline(0.0))
    direct = DirectTransport(comm)
    rank, size = comm.rank, comm.size
    total = size * (size + 1) // 2
    for count in _COUNTS:
        base = np.arange(count, dtype=np.float32) % 1000
        x = xp.asarray(base * (rank + 1))
        y = xp.zeros(count, np.float32)
        whole = xp.zeros(4 * count * size, np.uint8)
        raw = backend.as_bytes(x)
        sums = base * total
        calls: list[tuple[str, Callable[[], None], Array, HostArray]] = [
            (
                "Sendrecv",
                functools.partial(_send_around, mpi, x, y, rank, size),
                y,
                base * ((rank - 1) % size + 1),
            ),
            ("Allreduce", functools.partial(direct.allreduce, x, y, "SUM"), y, sums),
            (
                "Allreduce in place",
                functools.partial(direct.allreduce_in_place, x, "SUM"),
                x,
                sums,
            ),
            ("Bcast", functools.partial(direct.broadcast, x, size - 1), x, sums),
            (
                "Allgatherv",
                functools.partial(direct.all_gather, raw, whole, [4 * count] * size),
                whole,
                np.tile(sums, size).view(np.uint8),
            ),
        ]
        for name, call, found, want in calls:
            step = f"{name} of {4 * count} bytes"
            say(step)
            call()
            if not np.array_equal(backend.to_host(found), want):
                return f"{step} gave wrong values"
    return ""


def _send_around(
    mpi: types.ModuleType, x: Array, y: Array, rank: int, size: int
) -> None:
    backend.synchronize(x)
    mpi.COMM_WORLD.Sendrecv(x, (rank + 1) % size, 0, y, (rank - 1) % size, 0)


if __name__ == "__main__":
    _child(sys.argv[1:])
