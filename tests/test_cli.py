"""The command line: `mpidist info`, `check` and `bench`, on ranks and without."""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import subprocess
import sys
import types

import pytest
from launching import ROOT, rank_environment, run_ranks

from mpidist import _cli
from mpidist._cli import _check_command

TIMEOUT = 100.0
TINY = ["--models", "mlp", "--packs", "64KiB", "--batch", "4", "--sizes", "4B,1KiB"]
TINY += ["--repeats", "1", "--seconds", "0.001"]
BENCHES = ["all_reduce", "nest", "merge", "gather", "train"]

# Runs the command line as if a package were not installed.
WITHOUT = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: (
    None if name == {name!r} else found(name, *rest)
)
from mpidist import _cli
_cli.run()
"""


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


# --- bench ------------------------------------------------------------------------


def has_matplotlib():
    return importlib.util.find_spec("matplotlib") is not None


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    """Run all benchmarks on a number of ranks, once; with pictures on two."""
    done = {}

    def run(ranks):
        if ranks not in done:
            folder = tmp_path_factory.mktemp("bench")
            outputs = ["--json", folder / "r.json"]
            if ranks == 2 and has_matplotlib():
                outputs += ["--plot", folder / "p.png"]
            done[ranks] = folder, command(ranks, "bench", *TINY, *outputs)
        return done[ranks]

    return run


@pytest.mark.core
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bench(benched, ranks):
    folder, result = benched(ranks)
    assert result.returncode == 0, result.stdout + result.stderr
    whole = json.loads((folder / "r.json").read_text())
    assert (whole["format"], whole["version"]) == ("mpidist-bench", 1)
    assert (whole["ranks"], whole["nodes"]) == (ranks, 1)
    assert whole["benches"] == BENCHES
    assert whole["machine"]["cores"] >= 1
    assert whole["software"]["mpi"].split()[0] in ("Open", "MPICH", "Intel")
    assert whole["options"]["effort"]["repeats"] == 1
    assert whole["transports"]["host"]["name"] in ("direct", "shared")
    cases = [(row["bench"], row["case"]) for row in whole["results"]]
    assert cases == [
        ("all_reduce", "4 B"),
        ("all_reduce", "1 KiB"),
        ("nest", "784-512-512-10"),
        ("merge", "empty run (Barrier)"),
        ("merge", "empty merge_call (Barrier, Bcast)"),
        ("merge", "reduce of a scalar (Allreduce)"),
        ("merge", "update of 20 x 50k float32"),
        ("merge", "update of 20 x 50k float64"),
        ("gather", "4 B per rank"),
        ("gather", "1 KiB per rank"),
        ("train", "784-512-512-10, 4 rows per rank"),
    ]
    for row in whole["results"]:
        names = set(row["timings"])
        assert {"mpidist", row["baseline"]} <= names
        assert set(row["ours"]) == {n for n in names if n.startswith("mpidist")}
        for timing in row["timings"].values():
            assert 0 < timing["lower"] <= timing["median"] <= timing["upper"]
            assert timing["samples"] == 1
            assert timing["calls"] >= 1
        assert row["timings"][row["baseline"]]["ratio"] == 1.0
    # One rank prints one table of each.
    for name in BENCHES:
        assert len(re.findall(rf"^{name}: ", result.stdout, re.M)) == 1
    for case in {case for _, case in cases}:
        lines = re.findall(rf"^{re.escape(case)}  ", result.stdout, re.M)
        assert len(lines) == [c for _, c in cases].count(case)
    assert "64 KiB packs" in result.stdout
    assert ("One rank: nothing is communicated" in result.stdout) == (ranks == 1)


def test_pictures(benched, tmp_path):
    pytest.importorskip("matplotlib")
    folder, result = benched(2)
    assert result.returncode == 0, result.stdout + result.stderr
    for bench in BENCHES:
        picture = folder / f"p-{bench}.png"
        assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert str(picture) in result.stdout
    # The same from the file; and a model of it.
    record, again = folder / "r.json", tmp_path / "again.png"
    assert _cli.main(["bench", "show", str(record), "--plot", str(again)]) == 0
    assert (tmp_path / "again-train.png").exists()
    model = tmp_path / "model.svg"
    fit = ["--fit", str(record), "--plot", str(model)]
    assert _cli.main(["bench", "model", *fit]) == 0
    assert "<svg" in model.read_text()


@pytest.mark.core
def test_tables_from_a_file(benched, capsys):
    folder, result = benched(1)
    path = str(folder / "r.json")
    assert _cli.main(["bench", "show", path]) == 0
    assert capsys.readouterr().out.rstrip() in result.stdout
    assert _cli.main(["bench", "show", path, "merge", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 5
    assert {line.count("|") for line in lines} == {lines[0].count("|")}


def test_against_torch(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "r.json"
    options = [*TINY, "--against", "torch", "--json", path]
    what = ["all_reduce", "nest", "gather", "train"]
    result = command(2, "bench", *what, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    whole = json.loads(path.read_text())
    assert whole["software"]["torch"]
    for row in whole["results"]:
        wanted = "torch DDP" if row["bench"] == "train" else "torch gloo"
        assert row["timings"][wanted]["median"] > 0


def test_a_package_that_is_missing_is_one_message():
    program = WITHOUT.format(name="torch")
    argv = ["-c", program, "bench", "train", *TINY, "--against", "torch"]
    result = run_ranks(2, argv, timeout=TIMEOUT)
    message = the_error(result)
    assert "PyTorch is not installed" in message
    assert "pip install torch" in message
    assert result.stdout == ""


def test_a_picture_without_matplotlib_is_an_error(monkeypatch, capsys, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else found(name, *rest),
    )
    assert _cli.main(["bench", "model", "--plot", str(tmp_path / "a.png")]) == 2
    assert "matplotlib is not installed" in capsys.readouterr().err


# --- the model, and files, in one process --------------------------------------------


def test_model(capsys, tmp_path):
    path = tmp_path / "m.json"
    arguments = ["--alpha", "3us", "--beta", "10GB/s", "--ranks-per-node", "4"]
    arguments += ["--ranks", "64", "--sizes", "4B,1MB", "--json", str(path)]
    assert _cli.main(["bench", "model", *arguments]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^--alpha +3.00 us +3e-06 s +given$", text, re.M)
    assert "assumed" in text
    whole = json.loads(path.read_text())
    assert whole["parameters"]["beta"] == pytest.approx(1e-10)
    assert whole["origins"]["beta"] == "given"
    assert whole["origins"]["overhead"] == "assumed"
    rows = whole["predictions"]
    assert {(row["ranks"], row["nodes"]) for row in rows} == {
        *((2, 1), (4, 1), (8, 2), (16, 4), (32, 8), (64, 16))
    }
    assert {row["transport"] for row in rows} == {"mpi4py", "direct", "shared"}
    assert len(rows) == 6 * 2 * 3
    assert all(row["seconds"] > 0 for row in rows)


def test_the_model_goes_to_4096_ranks(capsys):
    assert _cli.main(["bench", "model"]) == 0
    assert "\n4,096    256 " in capsys.readouterr().out


# --- help and errors ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--help"], ["info", "check", "bench", "mpirun"]),
        (["info", "--help"], ["--json", "--device", "mpirun -n 4 mpidist info"]),
        (["check", "--help"], ["--timeout", "srun", "Exits 0"]),
        (["bench", "--help"], [*BENCHES, "--sizes", "--against", "model", "show"]),
        (["bench", "model", "--help"], ["--alpha", "--fit", "12.5GB/s"]),
        (["bench", "show", "--help"], ["--markdown", "--plot"]),
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
    assert "commands:\n  info" in capsys.readouterr().out
    assert _cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mpidist ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bnech"], "mpidist: error: expected one of info, check, bench, got 'bnech'"),
        (["info", "-x"], "mpidist info: error: unrecognized arguments: -x"),
        (["check", "--timeout", "0"], "expected a time above 0, got '0'"),
        (["bench", "allreduce"], "expected one of all_reduce, nest, merge, gather"),
        (["bench", "--sizes", "4X"], "expected a size such as 4B, 64KiB or 1MB, got"),
        (["bench", "--repeats", "0"], "expected a number of at least 1, got '0'"),
        (["bench", "--seconds", "0"], "expected a time above 0, got '0'"),
        (
            ["bench", "--models", "vgg"],
            "expected one of resnet50, bert, mlp, got 'vgg'",
        ),
        (["bench", "--against", "heat"], "invalid choice: 'heat'"),
        (["bench", "model", "--beta", "fast"], "expected a bandwidth such as 12.5GB/s"),
        (["bench", "model", "--ranks", "1"], "--ranks: expected at least 2"),
        (["bench", "model", "--fit", "/no/f"], "/no/f can not be read"),
        (["bench", "model", "--json", "/no/f"], "there is no folder /no"),
        (["bench", "model", "--plot", "m.doc"], "has to end with .png, .svg or .pdf"),
        (["bench", "show", "/no/f"], "/no/f can not be read"),
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
        (["bench", "--repeats", "no"], "expected a number of at least 1, got 'no'"),
        (["bench", "merge", "--json", "/no/such/f"], "there is no folder /no/such"),
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
    assert "ranks 0, 1, 2, each on" in text
    assert "guard        off" in text
    assert "MPIDIST_GUARD=0" in text
    assert "host arrays  " in text


def test_info_says_when_the_launcher_is_of_another_mpi():
    result = alone("info", env={"MV2_COMM_WORLD_SIZE": "2"})
    assert result.returncode == 1
    assert "the launcher started 2 processes, but to mpi4py each is" in result.stdout


def test_info_says_when_there_can_be_no_strategy():
    result = alone("info", "--device", "gpu:999")
    assert result.returncode == 1
    assert "problems     MPIStrategy can not be made: " in result.stdout
    assert "gpu:999" in result.stdout


# --- check ------------------------------------------------------------------------


@pytest.mark.core
def test_check_on_ranks():
    result = command(3, "check", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["failed"] == 0
    states = {row["name"]: row["state"] for row in found["checks"]}
    assert list(states) == [
        *("ranks", "versions", "settings", "strategy", "all_reduce", "all_gather"),
        *("merge_call", "optimizer", "mismatch", "exception"),
        *("cores", "shared memory", "CUDA-aware MPI"),
    ]
    assert set(states.values()) <= {"ok", "note"}


def test_check_prints_a_line_each():
    result = alone("check")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "\noptimizer       ok      the copies of the weights" in result.stdout
    assert "\nmismatch        ok      not with one rank" in result.stdout
    assert result.stdout.rstrip().endswith("all is well")


def test_check_finds_what_differs_between_ranks():
    program = (
        "import os, sys\n"
        "from mpidist import _cli\n"
        "from mpidist._cli._speaking import launched_rank\n"
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


@pytest.mark.parametrize(
    ("outcome", "transport", "state", "advice"),
    [
        ("works", "direct", "ok", ""),
        ("works", "staged", "note", "MPIDIST_CUDA_AWARE=1"),
        ("crashed", "staged", "ok", ""),
        ("crashed", "direct", "FAILED", "MPIDIST_CUDA_AWARE=0"),
    ],
)
def test_what_the_probe_of_gpu_buffers_means(
    monkeypatch, outcome, transport, state, advice
):
    found = types.SimpleNamespace(outcome=outcome, detail="in a sum")
    monkeypatch.setattr(
        _check_command, "probe_direct", lambda ranks, timeout_seconds: found
    )
    given = _check_command._probe(2, transport)
    assert given.state == state
    assert given.text.startswith(f"{outcome} on 2 ranks: in a sum")
    assert advice in given.text + given.advice


# --- how it is loaded ----------------------------------------------------------------


def test_importing_loads_nothing_of_it():
    program = (
        "import sys, mpidist\n"
        "def loaded(names): return [n for n in names if n in sys.modules]\n"
        "print(loaded(['mpidist._cli', 'mpidist._bench', 'argparse']))\n"
        "import mpidist._cli\n"
        "print(loaded(['mpi4py.MPI', 'cupy', 'torch', 'matplotlib']))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    first, second = result.stdout.splitlines()
    assert "mpidist" not in first
    assert second == "[]"


def test_the_console_script_is_declared():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    scripts = setup["options.entry_points"]["console_scripts"]
    assert scripts.strip() == "mpidist = mpidist._cli:run"
    assert callable(_cli.run)
