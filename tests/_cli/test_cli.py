"""The command line: arguments, help and errors; `mpidist info` and `check`."""

from __future__ import annotations

import configparser
import json
import re
import sys

import pytest
from launching import ROOT, run_alone, run_python, run_ranks

from mpidist import _cli
from mpidist._cli.bench_command import CASES

TIMEOUT = 100.0
PROGRAM = """
import json, os, sys
from mpidist import _cli
from mpidist._cli.speaking import launched_rank
for name, words in json.loads(sys.argv[1]).items():
    rank, before = launched_rank(), dict(os.environ)
    while "=" in words[0]:
        variable, _, value = words.pop(0).partition("=")
        os.environ[variable] = value.format(rank=rank)
    try:
        code = _cli.main(words)
    except SystemExit as end:
        code = end.code
    os.environ.clear()
    os.environ.update(before)
    if rank == 0:
        print(f"--- {name} ended with {code}", flush=True)
"""
COMMANDS = {
    "help": ["bench", "--help"],
    "usage": ["bench", "--seconds", "no"],
    "file": ["bench", "run", "--json", "/no/such/f"],
    "info": ["MPIDIST_GUARD=0", "info"],
    "check": ["check", "--json", "--folder"],
    "differs": ["MPIDIST_FUSION_MB=1{rank}", "check"],
    "trace": ["MPIDIST_TRACE={rank}", "check"],
}


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    """Return what commands print on 3 ranks, one after the other in one job.

    Returns:
        For each its exit code and standard output; the standard error of all; and the
        folder that is checked.
    """
    folder = tmp_path_factory.mktemp("folder")
    words = {**COMMANDS, "check": [*COMMANDS["check"], str(folder)]}
    result = run_ranks(3, ["-c", PROGRAM, json.dumps(words)], timeout=TIMEOUT)
    assert result.returncode == 0, result.stdout + result.stderr
    pieces = re.split(r"^--- (\w+) ended with (\d)\n", result.stdout, flags=re.M)
    found = {
        name: (int(code), out)
        for out, name, code in zip(
            pieces[::3], pieces[1::3], pieces[2::3], strict=False
        )
    }
    return found, result.stderr, folder


# --- help and errors ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--help"], ["info", "check", "bench", "mpirun"]),
        (["info", "--help"], ["--json", "--device", "mpirun -n 4 mpidist info"]),
        (["check", "--help"], ["--timeout", "srun", "Exits 0"]),
        (["bench", "--help"], [*CASES, "--sizes", "--quick"]),
        (
            ["sbatch", "--help"],
            ["mpidist sbatch [OPTIONS] [-- COMMAND [ARGUMENT ...]]", "--preemptible"],
        ),
    ],
)
def test_help(arguments, texts, capsys):
    with pytest.raises(SystemExit) as caught:
        _cli.main(arguments)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for text in texts:
        assert text in out


@pytest.mark.parametrize(
    "command", ["", "run", "sbatch", "info", "check", "bench", "timeline", "docs"]
)
def test_help_fits_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        _cli.main([*command.split(), "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_docs(capsys):
    """The pages of the checkout; tests/project/test_install.py has those of a wheel."""
    assert _cli.main(["docs"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"porting", "guide/torch", "tutorial/1_hello"} <= set(names)
    for name in ("guide/torch", "torch", "docs/guide/torch.md"):
        assert _cli.main(["docs", name]) == 0
        page = (ROOT / "docs/guide/torch.md").read_text(encoding="utf-8")
        assert capsys.readouterr().out.rstrip() == page.rstrip()
    assert _cli.main(["docs", "prting"]) == 2
    assert "did you mean `mpidist docs porting`?" in capsys.readouterr().err


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
            "timeline, docs, got 'bnech'; did you mean `mpidist bench`?\nusage:",
        ),
        (["train.py"], "timeline, docs, got 'train.py'\nusage: mpidist"),
        (["info", "-x"], "mpidist info: error: unrecognized arguments: -x"),
        (["check", "--timeout", "0"], "expected seconds above 0, such as 1.5, got '0'"),
        (["bench", "allreduce"], "expected one of all_reduce, nest, all_gather, run"),
        (["bench", "--sizes", "4X"], "expected a size such as 4B, 64KiB or 1MB, got"),
        (["bench", "--seconds", "0"], "expected seconds above 0, such as 1.5, got '0'"),
        (["bench", "--seconds", "1", "--quick"], "not allowed with argument --seconds"),
        (["bench", "model"], "expected one of all_reduce, nest, all_gather, run"),
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
def test_ranks_print_a_message_or_help_once(on_ranks):
    """Also if one rank alone finds the mistake."""
    found, errors, _ = on_ranks
    assert found["help"][0] == 0
    assert found["help"][1].count("usage: mpidist bench") == 1
    assert found["usage"] == found["file"] == (2, "")
    assert (
        errors.count("error: argument --seconds: expected seconds above 0, such as")
        == 1
    )
    assert errors.count("--json /no/such/f cannot be written: No such file") == 1


# --- info -------------------------------------------------------------------------


@pytest.mark.core
def test_info_without_mpirun(monkeypatch, capsys):
    monkeypatch.setenv("MPIDIST_TIMEOUT", "77")
    assert _cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ranks"] == 1
    assert facts["problems"] == []
    assert facts["nodes"][0]["ranks"] == [0]
    assert facts["open_files"]["limit"] > facts["open_files"]["needed"] > 0
    assert facts["environment"]["MPIDIST_TIMEOUT"] == "77"
    strategy = facts["strategy"]
    assert strategy["timeout_seconds"] == 77
    assert strategy["guard"] is True
    assert set(strategy["transports"]) == {"host", "gpu"}


@pytest.mark.core
def test_info_on_ranks(on_ranks):
    code, text = on_ranks[0]["info"]
    assert code == 0
    assert not re.search(r"^problems ", text, re.M), text
    assert text.count("mpi4py  ") == 1
    assert "ranks        3 on 1 node" in text
    assert ": ranks 0-2, " in text
    assert "launcher     mpirun of " in text
    assert "started 3 processes" in text
    assert "guard        off" in text
    assert "MPIDIST_GUARD=0" in text
    assert "host arrays  " in text


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


def test_info_says_when_there_can_be_no_strategy(capsys):
    assert _cli.main(["info", "--device", "gpu:999"]) == 1
    out = capsys.readouterr().out
    assert "problems     MPIStrategy cannot be made: " in out
    assert "gpu:999" in out


# --- check ------------------------------------------------------------------------


@pytest.mark.core
def test_check_on_ranks(on_ranks):
    code, text = on_ranks[0]["check"]
    assert code == 0, text
    found = json.loads(text)
    assert found["failed"] == 0
    states = {row["name"]: row["state"] for row in found["checks"]}
    assert list(states) == [
        *("ranks", "MPI library", "versions", "settings", "strategy"),
        *("all_reduce", "all_gather", "merge_call", "optimizer", "mismatch"),
        *("exception", "native core", "placement", "cores", "open files"),
        *("GPUs", "shared memory", "folder", "CUDA-aware MPI"),
    ]
    assert set(states.values()) <= {"ok", "note"}
    assert "3 ranks on 1 node" in text
    assert "rename is atomic" in text
    assert list(on_ranks[2].iterdir()) == []


def test_check_prints_a_line_each(capsys):
    assert _cli.main(["check"]) == 0
    out = capsys.readouterr().out
    assert "\noptimizer       ok      the copies of the weights" in out
    assert "\nmismatch        ok      not tried: there is one rank" in out
    assert "\nopen files      ok      " in out
    assert out.rstrip().endswith("all is well")


def test_check_finds_what_differs_between_ranks(on_ranks):
    code, text = on_ranks[0]["differs"]
    lines = text.splitlines()
    assert code == 1
    wrong = "settings        FAILED  ranks 1-2: MPIDIST_FUSION_MB is 11 here, and 10 on"
    assert any(line.startswith(wrong) for line in lines), text
    assert "-> export it to all ranks" in text
    assert "CollectiveMismatchError" in text
    assert "there is no strategy to try it with" in text
    assert lines[-1].endswith("checks failed")


def test_check_lets_some_ranks_alone_write_a_trace(on_ranks):
    found, errors, _ = on_ranks
    assert found["trace"][0] == 0, found["trace"][1]
    assert " rank=1/3 " in errors
    assert " rank=0/3 " not in errors


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


def test_a_reader_that_has_left_is_no_error():
    for words in ("docs porting", "bench --help"):
        for reader, read in (("head -c 10", 10), ("true", 0)):
            command = f"{sys.executable} -m mpidist {words} | {reader}"
            done = run_alone("bash", "-o", "pipefail", "-c", command)
            assert (len(done.stdout), done.stderr) == (read, "")
            assert done.returncode in (0, 141)
