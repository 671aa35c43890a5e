"""launch/benchmarks, which launch/performance runs: its cases, aims and tables."""

from __future__ import annotations

import importlib
import json
import math
import re
import shutil
import sys

import pytest
from launching import ROOT, run_command, run_ranks
from replicas import long_only

BENCHMARKS = ROOT / "launch" / "benchmarks"
TIMEOUT = 200.0
MIB = 2**20


@pytest.fixture
def load(monkeypatch):
    """Import a module of launch/benchmarks, for this test only."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def one(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        return module

    return one


@long_only
def test_the_benchmarks_of_developers_run(tmp_path):
    path = tmp_path / "r.json"
    names = ["nest", "reduce", "update", "strategy", "networks", "commits"]
    argv = [BENCHMARKS, *names, "--quick", "--json", path]
    result = run_ranks(2, argv, timeout=TIMEOUT)
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads(path.read_text())
    assert [(row["work"], row["nbytes"]) for row in record["rows"]] == [
        ("20 arrays of 1 KiB", 20 * 2**10),
        ("100 arrays of 1 MiB", 100 * MIB),
        ("reduce of a number", None),
        ("update of 20 x 50k floats", 20 * 4 * 50_000),
        ("making an MPIStrategy", None),
        ("ResNet-50 nest", 4 * 25_557_032),
        ("ResNet-50 nest in buffers_like", 4 * 25_557_032),
        ("training step, with a commit", 2 * 4 * 256 * (784 + 10) + 8),
        ("commit", 4 * 2**10),
        ("commit", 4 * MIB),
    ]
    assert record["strategy"]["seconds"] > 0
    assert record["strategy"]["files"] >= 0
    assert "BERT-base was left out: it is too large for a quick run." in record["notes"]


@long_only
def test_ratios_of_simulated_nodes_side_by_side(tmp_path):
    path = tmp_path / "n.json"
    words = ["2,3", "1", path, "--quick", "--sizes", "4B,64KiB"]
    command = [sys.executable, BENCHMARKS / "nodes.py", *words]
    result = run_command(command, TIMEOUT)
    assert result.returncode == 0, result.stdout + result.stderr
    records = json.loads(path.read_text())["records"]
    assert [(one["ranks"], one["nodes"]) for one in records] == [(2, 2), (3, 3)]
    assert "3 ranks on 3 simulated nodes" in result.stdout
    table = result.stdout.partition("The time of mpidist over")[2]
    assert re.search(r"^nodes +2 +3$", table, re.M)
    assert re.search(r"^ranks +2 +3$", table, re.M)
    for row, other in zip(*(one["rows"] for one in records), strict=True):
        ratios = rf"{row['ratio']:.2f} +{other['ratio']:.2f}"
        assert re.search(rf"^{row['work']}.* +{ratios}$", table, re.M), table
    assert re.search(r"^the first MPIStrategy( +[\d.,]+ m?s){2}$", table, re.M), table


@pytest.mark.parametrize(
    ("name", "tensors", "numbers"),
    [
        ("ResNet-50", 161, 25_557_032),  # as torchvision counts them
        ("BERT-base", 199, 109_482_240),  # as Hugging Face counts them
    ],
)
def test_the_shapes_of_known_networks(load, name, tensors, numbers):
    shapes = load("nests").MODELS[name]()
    assert len(shapes) == tensors
    assert sum(math.prod(shape) for shape in shapes) == numbers


def test_an_aim_is_met(load):
    aim = load("aims").Aim
    assert aim(0.5).is_met(2.0, 1.0)
    assert not aim(0.5).is_met(2.0, 1.1)
    assert aim(1.0, 3e-6).is_met(1e-6, 4e-6)
    assert not aim(0.0, 6e-6).is_met(1e-3, 7e-6)


def test_the_pages_are_filled_from_the_results(load, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    shutil.copytree(ROOT / "docs" / "performance", tmp_path / "performance")
    shutil.copy(ROOT / "docs" / "performance.md", tmp_path)
    pages = [tmp_path / "performance.md", tmp_path / "performance" / "tables.md"]
    before = [page.read_text() for page in pages]
    for page, text in zip(pages, before, strict=True):
        assert "| all_reduce | 4 B |" in text
        page.write_text(text.replace("| all_reduce | 4 B |", "| old |"))
    (tmp_path / "performance" / "all_reduce-2.png").unlink()
    monkeypatch.setattr(sys, "argv", ["fill.py", str(tmp_path)])
    load("fill").main()
    assert [page.read_text() for page in pages] == before
    assert (tmp_path / "performance" / "all_reduce-2.png").exists()
