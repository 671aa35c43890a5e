"""The checks of `mpidist check` that look at machines: what each finds.

The faults are made in the ranks of a real job: a rename in two steps, an fsync that
fails, a clock that jumps, ranks that are bound to one core. Those that need several
hosts are in tests/_collectives/test_hosts.py.
"""

import json
import os
import re
import sys

import pytest
from launching import run_ranks

from mpidist._cli import system_checks
from mpidist._cli.facts import CheckFailedError, Job, attempt, ok

FAULTS = """
import ctypes, os, platform, sys, time
from mpidist import _cli
from mpidist._cli.speaking import launched_rank
import mpi4py.MPI  # starts, and needs the variables of the launcher
rank = launched_rank()
folder = ["--folder", sys.argv[1]]
rename, fsync = os.rename, os.fsync

def check(name, *words):
    code = _cli.main(["check", "--json", *words])
    if rank == 0:
        print(f"--- {name} ended with {code}", flush=True)

def rename_in_two_steps(old, new):
    if os.path.exists(new) and os.path.isfile(new):
        os.unlink(new)
        time.sleep(0.02)
    rename(old, new)

def fail(descriptor):
    raise OSError(22, "Invalid argument")

if rank == 0:
    os.rename = rename_in_two_steps
check("rename", *folder)
os.rename = rename
if rank == 0:
    os.fsync = fail
check("fsync", *folder)
os.fsync = fsync
if rank == 1:
    upward = {"x86_64": 0x800, "aarch64": 0x400000}
    ctypes.CDLL("libm.so.6").fesetround(upward[platform.machine()])
core = min(os.sched_getaffinity(0))  # Intel MPI has given each rank another one
os.sched_setaffinity(0, {mpi4py.MPI.COMM_WORLD.bcast(core)})
for name in list(os.environ):
    if name.startswith(("OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL")):
        del os.environ[name]
os.environ.update(SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="1(x2)")
os.environ["SLURM_GPUS_ON_NODE"] = "2"
check("machine")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what is found with each fault, in one job: exit code, rows by name."""
    folder = tmp_path_factory.mktemp("folder")
    result = run_ranks(2, ["-c", FAULTS, str(folder)], timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    assert list(folder.iterdir()) == []
    pieces = re.split(r"^--- (\w+) ended with (\d)\n", result.stdout, flags=re.M)
    reports = zip(pieces[1::3], pieces[2::3], pieces[::3], strict=False)
    return {
        name: (int(code), {row["name"]: row for row in json.loads(text)["checks"]})
        for name, code, text in reports
    }


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("rename", "rank 1: while rank 0 replaced a file there was none for a moment"),
        ("fsync", "rank 0: a file cannot be replaced or synchronised: [Errno 22]"),
    ],
)
def test_a_folder_that_is_not_safe_for_checkpoints(found, fault, text):
    code, rows = found[fault]
    assert code == 1
    assert rows["folder"]["state"] == "FAILED"
    assert rows["folder"]["text"].startswith(text)
    assert rows["folder"]["advice"] == "save checkpoints to another file system"
    failed = [name for name, row in rows.items() if row["state"] == "FAILED"]
    assert failed == ["folder"]


@pytest.mark.core
def test_what_is_wrong_with_machines(found):
    code, rows = found["machine"]
    assert code == 0  # notes
    assert rows["placement"]["text"] == (
        "SLURM placed 1 + 1 ranks, but those that share memory are 2"
    )
    assert rows["versions"]["text"].startswith(
        "the processor of rank 1 does not round to nearest, which a library"
    )
    if (os.cpu_count() or 1) > 1:
        assert rows["cores"]["text"].startswith("2 ranks may run on 1 of ")
        assert "--bind-to none" in rows["cores"]["advice"]
    assert rows["GPUs"]["text"].startswith("SLURM gave this node 2 GPUs, and CuPy ")


def test_a_folder_that_is_missing(tmp_path):
    missing = tmp_path / "no"
    with pytest.raises(CheckFailedError, match=f"rank 0 cannot write to {missing}: No"):
        system_checks.check_folder(Job(), str(missing))
    assert system_checks.check_folder(Job(), "/dev/shm").state == "note"


def test_gpus_that_ranks_share(monkeypatch):
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    job = Job()
    job.mine["gpu"] = {"gpus": 0, "reason": "CuPy is not installed"}
    assert system_checks.gpus(job).text.startswith("none: Cu")
    job.mine["gpu"] = {"gpus": 2, "reason": ""}
    assert system_checks.gpus(job) == ok("2, for 1 ranks of a node")
    job.local_size = 4
    found = system_checks.gpus(job)
    assert found.text.startswith("the 4 ranks of a node share its GPUs (2)")
    assert found.advice == "start one rank for each GPU"


def test_a_limit_of_open_files_that_is_too_low():
    job = Job()
    assert system_checks.open_files(job).state == "ok"
    job.nodes = [range(10**7)]
    found = system_checks.open_files(job)
    assert re.fullmatch(r"\d+ for each process; .* 40000032, which is more", found.text)
    assert found.advice.startswith("`ulimit -n 40000032` before mpirun")


def test_an_mpirun_of_another_mpi(tmp_path, monkeypatch):
    job = Job()
    vendor = job.mpi.get_vendor()[0]
    other = {"Open MPI": "HYDRA build details:", "MPICH": "mpirun (Open MPI) 5.0"}
    if vendor not in other:
        pytest.skip(f"of {vendor} the other launcher is not known")
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\necho '{other[vendor]}'\n")
    mpirun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = system_checks.libraries(job)
    assert found.state == "note"
    assert found.text.startswith(f"mpi4py uses {vendor}, and {mpirun}, the first on")
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable) + ":/usr/bin:/bin")
    assert system_checks.libraries(job).state == "ok"


def test_libraries_of_a_process(tmp_path):
    first, second = tmp_path / "libmpi.so.40", tmp_path / "libmpich.so.12"
    for path in (first, second):
        path.touch()
    (tmp_path / "libmpi.so").symlink_to(first)
    maps = tmp_path / "maps"
    row = "7f00-7f01 r-xp 00000000 08:01 1 {}\n"
    names = [first, tmp_path / "libmpi.so", "/usr/lib/libmpi_cxx.so.40", "[heap]"]
    maps.write_text("".join(row.format(name) for name in names))
    assert system_checks.loaded_libraries(maps) in (
        [str(first)],
        [str(tmp_path / "libmpi.so")],
    )
    maps.write_text("".join(row.format(name) for name in (first, second)))
    assert system_checks.loaded_libraries(maps) == [str(first), str(second)]


def test_kinds_of_file_systems():
    mounts = [
        "/dev/a / ext4 rw 0 0",
        "tmpfs /dev/shm tmpfs rw 0 0",
        "server:/x /home/a\\040b nfs4 rw 0 0",
        "s /scratch lustre rw 0 0",
    ]
    for path, kind in (
        ("/etc", "ext4"),
        ("/dev/shm/x", "tmpfs"),
        ("/dev/shmx", "ext4"),
        ("/home/a b/c", "nfs4"),
        ("/scratch", "lustre"),
    ):
        assert system_checks.file_system(path, mounts) == kind
    assert system_checks.file_system("/etc", []) == "unknown"


def test_an_exception_in_a_check_is_a_failure():
    outcome = attempt(Job(), lambda job: 1 / 0)
    assert (outcome.state, outcome.text) == (
        "FAILED",
        "ZeroDivisionError: division by zero",
    )
