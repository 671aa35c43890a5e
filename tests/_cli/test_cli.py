"""The command line: arguments, help and errors; `mpidist info` and `check`."""

from __future__ import annotations

import configparser
import json
import subprocess
import sys

import pytest
from launching import ROOT, rank_environment, run_python, run_ranks

from mpidist import _cli
from mpidist._cli.bench_cases import CASES

TIMEOUT = 100.0


def command(ranks, *arguments, env=None):
    argv = ["-m", "mpidist", *map(str, arguments)]
    return run_ranks(ranks, argv, timeout=TIMEOUT, env=env)


def alone(*arguments, env=None):
    """Run the command line in one process, without mpirun."""
    return subprocess.run(
        [sys.executable, "-m", "mpidist", *arguments],
        env=rank_environment(env),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def the_error(result, code=2):
    """Return the one message of a command that failed."""
    assert result.returncode == code, result.stdout + result.stderr
    assert result.stderr.count("error:") == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


# --- help and errors ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--help"], ["info", "check", "bench", "mpirun"]),
        (["info", "--help"], ["--json", "--device", "mpirun -n 4 mpidist info"]),
        (["check", "--help"], ["--timeout", "srun", "Exits 0"]),
        (["bench", "--help"], [*CASES, "--sizes", "--quick", "--nodes 2,4,8"]),
    ],
)
def test_help(arguments, texts, capsys):
    with pytest.raises(SystemExit) as caught:
        _cli.main(arguments)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for text in texts:
        assert text in out


def test_without_a_command_it_helps(capsys):
    assert _cli.main([]) == 0
    assert "commands:\n  run" in capsys.readouterr().out
    assert _cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mpidist ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["bnech"],
            "mpidist: error: expected one of run, sbatch, info, check, bench, "
            "timeline, got 'bnech'; did you mean `mpidist bench`?\nusage:",
        ),
        (["train.py"], "timeline, got 'train.py'\nusage: mpidist"),
        (["info", "-x"], "mpidist info: error: unrecognized arguments: -x"),
        (["check", "--timeout", "0"], "expected a time above 0, got '0'"),
        (["bench", "allreduce"], "expected one of all_reduce, nest, all_gather, run"),
        (["bench", "--sizes", "4X"], "expected a size such as 4B, 64KiB or 1MB, got"),
        (["bench", "--seconds", "0"], "expected a time above 0, got '0'"),
        (["bench", "--seconds", "1", "--quick"], "not allowed with argument --seconds"),
        (["bench", "model"], "expected one of all_reduce, nest, all_gather, run"),
        (
            ["bench", "--nodes", "2", "--ranks-per-node", "1,2"],
            "--ranks-per-node: expected one number, and --nodes",
        ),
        (
            ["bench", "--ranks-per-node", "2"],
            "--ranks-per-node: expected one number, and --nodes",
        ),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    assert _cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("error:") == 1


def test_a_bad_environment_variable(monkeypatch, capsys):
    monkeypatch.setenv("MPIDIST_TIMEOUT", "soon")
    assert _cli.main(["info"]) == 2
    assert "variable MPIDIST_TIMEOUT is 'soon'" in capsys.readouterr().err


@pytest.mark.core
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--seconds", "no"], "expected a time such as 2us or 1.5e-6, got"),
        (["bench", "run", "--json", "/no/such/f"], "there is no folder /no/such"),
    ],
)
def test_bad_arguments_are_one_message_of_all_ranks(arguments, message):
    result = command(3, *arguments)
    assert message in the_error(result)
    assert result.stdout == ""


def test_the_help_is_printed_once():
    result = command(2, "bench", "--help")
    assert result.returncode == 0
    assert result.stdout.count("usage: mpidist bench") == 1


# --- info -------------------------------------------------------------------------


@pytest.mark.core
def test_info_without_mpirun():
    result = alone("info", "--json", env={"MPIDIST_TIMEOUT": "77"})
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["ranks"] == 1
    assert facts["problems"] == []
    assert facts["nodes"][0]["ranks"] == [0]
    assert facts["environment"]["MPIDIST_TIMEOUT"] == "77"
    strategy = facts["strategy"]
    assert strategy["timeout_seconds"] == 77
    assert strategy["guard"] is True
    assert set(strategy["transports"]) == {"host", "gpu"}


@pytest.mark.core
def test_info_on_ranks():
    result = command(3, "info", env={"MPIDIST_GUARD": "0"})
    assert result.returncode == 0, result.stderr
    text = result.stdout
    assert text.count("mpi4py  ") == 1
    assert "ranks        3 on 1 node" in text
    assert ": ranks 0-2, " in text
    assert "launcher     mpirun of " in text
    assert "started 3 processes" in text
    assert "guard        off" in text
    assert "MPIDIST_GUARD=0" in text
    assert "host arrays  " in text


def test_info_says_when_the_launcher_is_of_another_mpi():
    result = alone("info", env={"MV2_COMM_WORLD_SIZE": "2"})
    assert result.returncode == 1
    assert "mpirun of MVAPICH2 started 2 processes, but to mpi4py" in result.stdout
    assert "use the mpirun of the environment that mpi4py is in" in result.stdout


def test_check_says_only_that_the_launcher_is_of_another_mpi():
    result = alone("check", env={"MV2_COMM_WORLD_SIZE": "2"})
    assert result.returncode == 1
    first, second, _, last = result.stdout.splitlines()
    assert first.startswith("ranks           FAILED  mpirun of MVAPICH2 started 2 pro")
    assert "-> the launcher is that of another MPI library; use the mpirun" in second
    assert last == "1 of 1 checks failed"


def test_info_says_when_there_can_be_no_strategy():
    result = alone("info", "--device", "gpu:999")
    assert result.returncode == 1
    assert "problems     MPIStrategy cannot be made: " in result.stdout
    assert "gpu:999" in result.stdout


# --- check ------------------------------------------------------------------------


@pytest.mark.core
def test_check_on_ranks(tmp_path):
    result = command(3, "check", "--json", "--folder", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["failed"] == 0
    states = {row["name"]: row["state"] for row in found["checks"]}
    assert list(states) == [
        *("ranks", "MPI library", "versions", "settings", "strategy"),
        *("all_reduce", "all_gather", "merge_call", "optimizer", "mismatch"),
        *("exception", "native core", "placement", "cores", "open files"),
        *("GPUs", "shared memory", "folder", "clocks", "CUDA-aware MPI"),
    ]
    assert set(states.values()) <= {"ok", "note"}
    assert "3 ranks on 1 node" in result.stdout
    assert "rename is atomic" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_check_prints_a_line_each():
    result = alone("check")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "\noptimizer       ok      the copies of the weights" in result.stdout
    assert "\nmismatch        ok      not tried: there is one rank" in result.stdout
    assert result.stdout.rstrip().endswith("all is well")


def test_check_finds_what_differs_between_ranks():
    program = (
        "import os, sys\n"
        "from mpidist import _cli\n"
        "from mpidist._cli.speaking import launched_rank\n"
        "os.environ['MPIDIST_FUSION_MB'] = str(1 + launched_rank())\n"
        "_cli.run()\n"
    )
    result = run_ranks(2, ["-c", program, "check"], timeout=TIMEOUT)
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    wrong = "settings        FAILED  rank 1: MPIDIST_FUSION_MB is 2 here, and 1 on rank"
    assert any(line.startswith(wrong) for line in lines), result.stdout
    assert "-> export it to all ranks" in result.stdout
    assert "CollectiveMismatchError" in result.stdout
    assert "there is no strategy to try it with" in result.stdout
    assert lines[-1].endswith("checks failed")


def test_check_lets_one_rank_alone_write_a_trace():
    program = (
        "import os\n"
        "from mpidist import _cli\n"
        "from mpidist._cli.speaking import launched_rank\n"
        "os.environ['MPIDIST_TRACE'] = str(launched_rank())\n"
        "_cli.run()\n"
    )
    result = run_ranks(2, ["-c", program, "check"], timeout=TIMEOUT)
    assert result.returncode == 0, result.stdout
    assert " rank=1/2 " in result.stderr
    assert " rank=0/2 " not in result.stderr


# --- how it is loaded ----------------------------------------------------------------


def test_importing_loads_nothing_of_it():
    program = (
        "import sys, mpidist\n"
        "def loaded(names): return [n for n in names if n in sys.modules]\n"
        "print(loaded(['mpidist._cli', 'argparse']))\n"
        "import mpidist._cli\n"
        "print(loaded(['mpi4py.MPI', 'cupy', 'torch', 'matplotlib']))\n"
    )
    first, second = run_python("-c", program).splitlines()
    assert "mpidist" not in first
    assert second == "[]"


def test_the_console_script_is_declared():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    scripts = setup["options.entry_points"]["console_scripts"]
    assert scripts.strip() == "mpidist = mpidist._cli:run"
    assert callable(_cli.run)
