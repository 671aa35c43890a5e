"""The mpirun commands of docs/guide/launching.md: those of this MPI are run."""

import re
import shlex
import shutil
import sys

import hosts
import pytest
from launching import ROOT, find_mpirun, run_command

GUIDE = ROOT / "docs/guide/launching.md"
LINES = re.findall(
    r"^mpirun (-.* python examples/hello\.py)$", GUIDE.read_text(encoding="utf-8"), re.M
)
OF_OPEN_MPI = [line for line in LINES if line.startswith("--")]
OF_MPICH = [line for line in LINES if not line.startswith(("--", "-n"))]


def test_the_guide_has_commands_of_both():
    assert len(OF_OPEN_MPI) >= 4
    assert len(OF_MPICH) >= 3


@pytest.mark.core
def test_the_commands_run(tmp_path):
    open_mpi = hosts.is_open_mpi()
    slots = "localhost slots=4\n" if open_mpi else "localhost:4\n"
    (tmp_path / "hosts.txt").write_text(slots)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for line in OF_OPEN_MPI if open_mpi else OF_MPICH:
        words = [find_mpirun(), *shlex.split(line)]
        words[words.index("python")] = sys.executable
        done = run_command(words, 100, cwd=tmp_path)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert done.stdout.count("hello from replica") == 2, line
