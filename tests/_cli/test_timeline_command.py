"""`mpidist timeline`."""

from __future__ import annotations

import pytest

from mpidist import _cli
from mpidist._timeline import files
from mpidist._timeline.observer import Span


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with a timeline, where the test runs."""
    monkeypatch.chdir(tmp_path)
    span = Span(0, 1, "call", 1, 0.0, 1.0, 8, "eager", "", "all_reduce")
    files.write(files.Timeline({0: "a"}, [span]), tmp_path / "run.json")
    return tmp_path


def test_a_summary(folder, capsys):
    assert _cli.main(["timeline", "run.json"]) == 0
    found, errors = capsys.readouterr()
    assert found.startswith("timeline of 1 rank on 1 host, 1.00 s in all\n")
    assert errors == ""


def test_a_picture(folder, capsys):
    pytest.importorskip("matplotlib")
    assert _cli.main(["timeline", "run.json", "--plot", "run.png"]) == 0
    assert capsys.readouterr().err == ""
    assert (folder / "run.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("other.json", "other.json is not a timeline of mpidist"),
        ("missing.json", "missing.json"),
    ],
)
def test_files_that_are_none(folder, capsys, name, text):
    (folder / "other.json").write_text("{}")
    assert _cli.main(["timeline", name]) == 2
    assert text in capsys.readouterr().err
