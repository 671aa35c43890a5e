"""What the commands print on ranks, also with faults: all in one job.

The faults are made in the ranks: a rename in two steps, an fsync that fails, ranks that
are bound to one core. Those that need several hosts are in
tests/_collectives/test_hosts.py.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from launching import run_ranks

PROGRAM = """
import ctypes, os, platform, sys, time
from mpidist import _cli
from mpidist._cli.speaking import launched_rank
rank, folder = launched_rank(), ["--folder", sys.argv[1]]
rename, fsync = os.rename, os.fsync

def run(name, *words, **variables):
    os.environ.update(variables)
    try:
        code = _cli.main(words)
    except SystemExit as end:
        code = end.code
    for variable in variables:
        del os.environ[variable]
    if rank == 0:
        print(f"--- {name} ended with {code}", flush=True)

def rename_in_two_steps(old, new):
    if os.path.exists(new) and os.path.isfile(new):
        os.unlink(new)
        time.sleep(0.02)
    rename(old, new)

def fail(descriptor):
    raise OSError(22, "Invalid argument")

run("help", "bench", "--help")
run("usage", "bench", "--seconds", "no")
run("file", "bench", "run", "--json", "/no/such/f")
run("variable", "info", **({"MPIDIST_TIMEOUT": "soon"} if rank else {}))
run("info", "info", MPIDIST_GUARD="0", MPIDIST_TRACE=str(rank))
run("check", "check", "--json", *folder)
run("differs", "check", MPIDIST_FUSION_MB=f"1{rank}")
run("trace", "check", MPIDIST_TRACE=str(rank))
if rank == 0:
    os.rename = rename_in_two_steps
run("rename", "check", "--json", *folder)
os.rename = rename
if rank == 0:
    os.fsync = fail
run("fsync", "check", "--json", *folder)
os.fsync = fsync
if rank == 1:
    upward = {"x86_64": 0x800, "aarch64": 0x400000}
    ctypes.CDLL("libm.so.6").fesetround(upward[platform.machine()])
import mpi4py.MPI
core = min(os.sched_getaffinity(0))  # Intel MPI has given each rank another one
os.sched_setaffinity(0, {mpi4py.MPI.COMM_WORLD.bcast(core)})
for name in list(os.environ):
    if name.startswith(("OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL")):
        del os.environ[name]
os.environ.update(SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="1(x2)")
os.environ["SLURM_NODEID"] = str(rank)
run("machine", "check", "--json", SLURM_GPUS_ON_NODE="2")
"""


class OnRanks(NamedTuple):
    """What commands printed on 2 ranks.

    Attributes:
        found: of each command its exit code, and its standard output.
        errors: the standard error of all of them.
        folder: the one that was checked.
    """

    found: dict[str, tuple[int, str]]
    errors: str
    folder: Path

    def rows(self, name):
        """Return the exit code of a check, and its rows by name."""
        code, text = self.found[name]
        return code, {row["name"]: row for row in json.loads(text)["checks"]}


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    """Run the commands, one after the other in one job."""
    folder = tmp_path_factory.mktemp("folder")
    result = run_ranks(2, ["-c", PROGRAM, str(folder)], timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    pieces = re.split(r"^--- (\w+) ended with (\d)\n", result.stdout, flags=re.M)
    rows = zip(pieces[1::3], pieces[2::3], pieces[::3], strict=False)
    found = {name: (int(code), text) for name, code, text in rows}
    return OnRanks(found, result.stderr, folder)


@pytest.mark.core
def test_ranks_print_a_message_or_help_once(on_ranks):
    """Also if one rank alone finds the mistake."""
    code, text = on_ranks.found["help"]
    assert (code, text.count("usage: mpidist bench")) == (0, 1)
    for name in ("usage", "file", "variable"):
        assert on_ranks.found[name] == (2, "")
    for message in (
        "error: argument --seconds: expected seconds above 0, such as",
        "--json /no/such/f cannot be written: No such file",
        "error: the environment variable MPIDIST_TIMEOUT is 'soon'",
    ):
        assert on_ranks.errors.count(message) == 1


@pytest.mark.core
def test_info(on_ranks):
    code, text = on_ranks.found["info"]
    assert code == 0
    assert "\nproblems " not in text
    assert text.count("mpi4py  ") == 1
    for line in (
        "ranks        2 on 1 node",
        ": ranks 0-1, ",
        "launcher     mpirun of ",
        "started 2 processes",
        "guard        off",
        "MPIDIST_GUARD=0",
        "host arrays  ",
    ):
        assert line in text


@pytest.mark.core
def test_check(on_ranks):
    code, rows = on_ranks.rows("check")
    assert code == 0, rows
    assert list(rows) == [
        *("ranks", "MPI library", "versions", "settings", "native core"),
        *("placement", "cores", "open files", "GPUs", "shared memory"),
        *("strategy", "all_reduce", "all_gather", "merge_call", "optimizer"),
        *("mismatch", "exception", "folder"),
    ]
    assert {row["state"] for row in rows.values()} <= {"ok", "note"}
    assert rows["ranks"]["text"] == "2 ranks on 1 node"
    assert "rename is atomic" in rows["folder"]["text"]
    assert list(on_ranks.folder.iterdir()) == []


def test_what_differs_between_ranks(on_ranks):
    code, text = on_ranks.found["differs"]
    assert code == 1
    wrong = "settings        FAILED  rank 1: MPIDIST_FUSION_MB is 11 here, and 10 on"
    assert f"\n{wrong}" in text
    assert "-> export it to all ranks" in text
    assert "CollectiveMismatchError" in text
    assert "there is no strategy to try it with" in text
    assert re.search(r"\n[1-9]\d* of 17 checks failed\n$", text)


def test_some_ranks_alone_may_write_a_trace(on_ranks):
    code, text = on_ranks.found["trace"]
    assert code == 0, text
    assert " rank=1/2 " in on_ranks.errors
    assert " rank=0/2 " not in on_ranks.errors


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("rename", "rank 1: while rank 0 replaced a file there was none for a moment"),
        ("fsync", "rank 0: a file cannot be replaced or synchronised: [Errno 22]"),
    ],
)
def test_a_folder_that_is_not_safe_for_checkpoints(on_ranks, fault, text):
    code, rows = on_ranks.rows(fault)
    assert code == 1
    (failed,) = [row for row in rows.values() if row["state"] == "FAILED"]
    assert failed["name"] == "folder"
    assert failed["text"].startswith(text)
    assert failed["advice"] == "save checkpoints to another file system"


@pytest.mark.core
def test_what_is_wrong_with_machines(on_ranks):
    code, rows = on_ranks.rows("machine")
    assert code == 0  # notes
    assert rows["placement"]["text"] == (
        "srun --mpi=none put 1 ranks on this host, and 2 share memory"
    )
    assert rows["versions"]["text"].startswith(
        "the processor of rank 1 does not round to nearest, which a library"
    )
    if (os.cpu_count() or 1) > 1:
        assert rows["cores"]["text"].startswith("2 ranks on 1 of ")
        assert "--bind-to none" in rows["cores"]["advice"]
    assert rows["GPUs"]["text"].startswith("SLURM gave this node 2 GPUs, and CuPy ")
