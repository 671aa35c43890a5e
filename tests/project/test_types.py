"""The types of public names, as mypy and pyright see them in a user's program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, run_ranks

TYPED = ROOT / "tests/programs/typed.py"

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import numpy as np
import mpidist

strategy = mpidist.MPIStrategy()
with strategy.scope():
    v = mpidist.Variable(np.zeros(3))


def assign(v: mpidist.Variable, y: float) -> None:
    v.assign(y)


def step(x: float) -> float:
    ctx = mpidist.get_replica_context()
    total: float = ctx.all_reduce("SUM", x)

    def merge(strategy: mpidist.Strategy, x: mpidist.PerReplica) -> None:
        y = strategy.extended.reduce_to("MEAN", x, v)
        strategy.extended.reduce_to("MEAN", x, np.zeros(3))
        strategy.extended.batch_reduce_to("SUM", zip([x], [v], strict=True))
        strategy.extended.update(v, assign, args=(y,))

    ctx.merge_call(merge, args=(total,))
    count: int = ctx.strategy.num_replicas_in_sync
    return total / count


strategy.run(step, args=(1.0,))
mpidist.Variable(0, aggregation="SUM", synchronization="ON_READ")
wrong: str = mpidist.get_strategy().num_replicas_in_sync
"""


def run(
    *command: str | Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in the root of the repository."""
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


def test_users_programs_type_check(tmp_path):
    """One that has a single error, and one that names the types of results."""
    pytest.importorskip("mypy")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--no-pretty"]  # strict: setup.cfg
    result = run(*command, path, TYPED)
    wrong = len(PROGRAM.splitlines())
    errors = [line for line in result.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1, result.stdout + result.stderr
    assert f"program.py:{wrong}: error: Incompatible types" in errors[0]


def test_results_have_types_for_pyright():
    command = shutil.which("basedpyright") or shutil.which("pyright")
    if command is None:
        pytest.skip("neither pyright nor basedpyright is installed")
    done = run(command, "--pythonpath", sys.executable, "--level", "error", TYPED)
    assert done.returncode == 0, done.stdout + done.stderr


def test_types_of_public_names_are_complete():
    command = shutil.which("basedpyright")
    if command is None:
        pytest.skip("basedpyright is not installed")
    pytest.importorskip("torch")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [command, "--verifytypes", "mpidist", "--ignoreexternal"]
    done = run(*command, env=os.environ | {"PATH": path})
    names = re.findall(r"^mpidist\.\S*", done.stdout, flags=re.MULTILINE)
    assert names == ["mpidist.torch._optimizer.DistributedOptimizer"], done.stdout


def test_the_program_of_types_runs():
    done = run_ranks(2, ["-bb", str(TYPED)], timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["(0, 0)", "1.5"]
