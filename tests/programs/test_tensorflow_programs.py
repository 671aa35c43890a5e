"""Programs like those of TensorFlow's tutorials and guides, ported by the script alone.

They check their results themselves; some need an even number of replicas.
"""

import logging
import re
import subprocess
from pathlib import Path

import pytest
from launching import ROOT

PROGRAMS = sorted(Path(__file__).with_name("of_tensorflow").glob("*.py"))

pytestmark = [pytest.mark.mpi, pytest.mark.one_size, pytest.mark.replicas(2)]


@pytest.fixture
def root_level():
    """Set the level of the root logger back: programs set it."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def ported(path, script):
    done = subprocess.run(
        ["sed", "-E", "-f", "-", path], input=script, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("root_level")
def test_it_runs_and_is_right(path, strategy, folder):
    text = ported(path, (ROOT / "docs/port.sed").read_text(encoding="utf-8"))
    assert not re.search(r"\btf\.|\btensorflow\b", text.split('"""\n', 1)[1])
    exec(compile(text, path, "exec"), {"__name__": "__main__", "FOLDER": str(folder)})
