"""The command line: arguments, help and errors, and how it is loaded."""

from __future__ import annotations

import configparser
import sys

import pytest
from launching import ROOT, run_alone, run_python

from mpidist import _cli
from mpidist._cli.bench_command import CASES
from mpidist._timeline import files


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        ("", ["info", "check", "bench", "mpirun"]),
        ("run", ["--restarts", "mpidist run -n 2 -m package.module"]),
        ("sbatch", ["mpidist sbatch [OPTIONS] [-- COMMAND [ARGUMENT ...]]"]),
        ("info", ["--json", "--device", "mpirun -n 4 mpidist info"]),
        ("check", ["--timeout", "srun", "Exits 0"]),
        ("bench", [*CASES, "--sizes", "--quick"]),
        ("timeline", ["--plot", "MPIDIST_TIMELINE=run.json"]),
        ("docs", ["mpidist docs porting"]),
    ],
)
def test_help_fits_80_columns(command, texts, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        _cli.main([*command.split(), "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for text in texts:
        assert text in out


def test_docs(capsys):
    """The pages of the checkout; tests/project/test_install.py has those of a wheel."""
    assert _cli.main(["docs"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"porting", "guide/torch", "tutorial/1_hello"} <= set(names)
    for name in ("guide/torch", "torch", "docs/guide/torch.md"):
        assert _cli.main(["docs", name]) == 0
        page = (ROOT / "docs/guide/torch.md").read_text(encoding="utf-8")
        assert capsys.readouterr().out.rstrip() == page.rstrip()


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
        (["bench", "allreduce"], "expected one of all_reduce, all_gather, run, merge"),
        (["bench", "--sizes", "4X"], "expected a size such as 4B, 64KiB or 1MB, got"),
        (["bench", "--seconds", "1", "--quick"], "not allowed with argument --seconds"),
        (["docs", "prting"], "did you mean `mpidist docs porting`?"),
        (["timeline", "missing.json"], "program with MPIDIST_TIMELINE=missing.json"),
        (["timeline", "setup.cfg"], "setup.cfg is not a timeline of mpidist"),
    ],
)
def test_bad_arguments(arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert _cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("error:") == 1


@pytest.mark.parametrize("words", [["info"], ["run", "-n", "2", "setup.py"]])
def test_a_bad_environment_variable(words, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MPIDIST_TIMEOUT", "soon")
    assert _cli.main(words) == 2
    assert "variable MPIDIST_TIMEOUT is 'soon'" in capsys.readouterr().err


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


@pytest.mark.parametrize("words", ["docs porting", "bench --help", "timeline run"])
@pytest.mark.parametrize(("reader", "read"), [("head -c 10", 10), ("true", 0)])
def test_a_reader_that_has_left_is_no_error(words, reader, read, tmp_path):
    files.write(files.Timeline({0: "a"}, []), tmp_path / "run")
    command = f"{sys.executable} -m mpidist {words} | {reader}"
    done = run_alone("bash", "-o", "pipefail", "-c", command, cwd=tmp_path)
    assert (len(done.stdout), done.stderr) == (read, "")
    assert done.returncode in (0, 141)
