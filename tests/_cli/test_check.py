"""`mpidist check`: what each check finds, in one process."""

import os
import re
import sys
import unittest.mock
from pathlib import Path

import pytest

from mpidist import _cli
from mpidist._cli import folder_check, system_checks
from mpidist._cli.facts import CheckFailedError, Job, attempt, ok


def test_it_prints_a_line_each(capsys):
    assert _cli.main(["check"]) == 0
    out = capsys.readouterr().out
    assert "\noptimizer       ok      the copies of the weights" in out
    assert "\nmismatch        ok      not tried: there is one rank" in out
    assert "\nopen files      ok      " in out
    assert out.rstrip().endswith("all is well")


def test_a_launcher_of_another_mpi(monkeypatch, capsys):
    monkeypatch.setenv("MV2_COMM_WORLD_SIZE", "2")
    assert _cli.main(["info"]) == 1
    out = capsys.readouterr().out
    assert "mpirun of MVAPICH2 started 2 processes, but to mpi4py" in out
    assert "use the mpirun of the environment that mpi4py is in" in out
    assert _cli.main(["check"]) == 1
    first, second, _, last = capsys.readouterr().out.splitlines()
    assert first.startswith("ranks           FAILED  mpirun of MVAPICH2 started 2 pro")
    assert "-> the launcher is that of another MPI library; use the mpirun" in second
    assert last == "1 of 1 checks failed"
    assert _cli.main(["bench", "--quick"]) == 2
    error = "mpidist bench: error: mpirun of MVAPICH2 started 2 processes, but to"
    assert capsys.readouterr().err.startswith(error)


def test_folders(tmp_path, monkeypatch):
    missing = tmp_path / "no"
    with pytest.raises(CheckFailedError, match=f"rank 0 cannot write to {missing}: No"):
        folder_check.check_folder(Job(), str(missing))
    assert folder_check.check_folder(Job(), "/dev/shm").state == "note"
    full = unittest.mock.Mock(side_effect=OSError(28, "No space left"))
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CheckFailedError, match="No space left"):
        folder_check.check_folder(Job(), str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_gpus_that_ranks_share(monkeypatch):
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    job = Job()
    job.mine["gpu"] = {"gpus": 0, "reason": "CuPy is not installed"}
    assert system_checks.gpus(job).text.startswith("none: Cu")
    job.mine["gpu"] = {"gpus": 2, "reason": ""}
    assert system_checks.gpus(job) == ok("2, for 1 rank of a node")
    job.local_size = 4
    found = system_checks.gpus(job)
    assert found.text.startswith("the 4 ranks of a node share its GPUs (2)")
    assert found.advice == "start one rank for each GPU"


def test_more_ranks_than_cores():
    job = Job()
    here = job.mine["machine"]
    assert 1 <= len(here["allowed"]) <= here["cores"]
    assert here["quota"] is None or here["quota"] > 0
    job.local_size = 10**6
    text = system_checks.cores(job).text
    assert text.startswith("1000000 ranks on ")
    assert f" of {here['cores']} cores" in text
    assert ": ranks wait for a core, and calls take much longer" in text


def test_fewer_cores_than_the_machine_has():
    job = Job()
    job.mine["machine"] |= {"cores": 64, "allowed": list(range(64)), "quota": 2.5}
    job.local_size = 4
    found = system_checks.cores(job)
    assert found.text.startswith("4 ranks on 3 of 64 cores (by the control group): ran")
    assert found.advice.startswith("ask for more cores")


def test_variables_that_differ(monkeypatch):
    """Those of others change how fast a rank is, not whether ranks fit together."""
    job = Job()
    job.facts = [{"environment": {"OMP_NUM_THREADS": "4", "MPIDIST_TRACE": "1"}}]
    job.mine = {"environment": {"OMP_NUM_THREADS": "1"}}
    found = system_checks.settings(job)
    assert found.text == "OMP_NUM_THREADS is 1 here, and 4 on rank 0"
    assert "mpirun -x OMP_NUM_THREADS" in found.advice
    job.mine = job.facts[0] = {"environment": {"MPIDIST_TIMOUT": "9", "UCX_TLS": "tcp"}}
    found = system_checks.settings(job)
    assert "MPIDIST_TIMOUT" in found.text
    assert found.advice == "did you mean MPIDIST_TIMEOUT?"
    job.mine = {"environment": {"OMP_NUM_THREADS": "4", "MPIDIST_GUARD": "0"}}
    with pytest.raises(CheckFailedError, match="MPIDIST_GUARD is 0 here, and not set"):
        system_checks.settings(job)


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
    found = system_checks.libraries(job)
    assert (found.state, "over TCP: " in found.text) == ("ok", False)


def test_what_the_tcp_of_open_mpi_has(monkeypatch):
    job = unittest.mock.Mock(nodes=[[0], [1]])
    job.mpi.get_vendor.return_value = ("Open MPI", (5, 0, 11))
    monkeypatch.setenv("OMPI_MCA_btl_tcp_flags", "3")
    monkeypatch.delenv("OMPI_MCA_btl_tcp_eager_limit", raising=False)
    (text,) = system_checks.tcp_settings(job)
    assert "btl_tcp_flags=3, OMPI_MCA_btl_tcp_eager_limit=(not set), which a" in text
    job.mpi.get_vendor.return_value = ("MPICH", (5, 0, 2))
    assert system_checks.tcp_settings(job) == []


def test_libraries_of_a_process(tmp_path):
    first, second = tmp_path / "libmpi.so.40", tmp_path / "libmpich.so.12"
    for path in (first, second):
        path.touch()
    link = tmp_path / "libmpi.so"
    link.symlink_to(first)
    maps = tmp_path / "maps"

    def loaded(*names):
        row = "7f00-7f01 r-xp 00000000 08:01 1 {}\n"
        maps.write_text("".join(row.format(name) for name in names))
        return system_checks.loaded_libraries(maps)

    found = loaded(first, link, "/usr/lib/libmpi_cxx.so.40", "[heap]")
    assert found in ([str(first)], [str(link)])
    assert loaded(first, second) == [str(first), str(second)]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        *(("/etc", "ext4"), ("/dev/shm/x", "tmpfs"), ("/dev/shmx", "ext4")),
        *(("/home/a b/c", "nfs4"), ("/scratch", "lustre")),
    ],
)
def test_kinds_of_file_systems(path, kind):
    mounts = [
        "/dev/a / ext4 rw 0 0",
        "tmpfs /dev/shm tmpfs rw 0 0",
        "server:/x /home/a\\040b nfs4 rw 0 0",
        "s /scratch lustre rw 0 0",
    ]
    assert folder_check.file_system(path, mounts) == kind
    assert folder_check.file_system(path, []) == "unknown"


def test_an_exception_in_a_check_is_a_failure():
    found = attempt(Job(), lambda job: 1 / 0)
    expected = "FAILED", "ZeroDivisionError: division by zero"
    assert (found.state, found.text) == expected
