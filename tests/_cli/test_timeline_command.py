"""`mpidist timeline`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from launching import rank_environment

from mpidist._timeline import files
from mpidist._timeline.observer import Span


def run(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "mpidist", "timeline", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=rank_environment(),
        timeout=60,
    )


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a timeline."""
    span = Span(0, 1, "call", 1, 0.0, 1.0, 8, "eager", "", "all_reduce")
    files.write(files.Timeline({0: "a"}, [span]), tmp_path / "run.json")
    return tmp_path


def test_a_summary(folder):
    done = run("run.json", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("timeline of 1 rank on 1 host, 1.00 s in all\n")


def test_a_picture(folder):
    pytest.importorskip("matplotlib")
    done = run("run.json", "--plot", "run.png", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "run.png").read_bytes()[:4] == b"\x89PNG"


def test_files_that_are_none(folder):
    (folder / "other.json").write_text("{}")
    done = run("other.json", cwd=folder)
    assert done.returncode == 2
    assert "other.json is not a timeline of mpidist" in done.stderr
    done = run("missing.json", cwd=folder)
    assert done.returncode == 2
    assert "missing.json" in done.stderr
    assert "Traceback" not in done.stderr
