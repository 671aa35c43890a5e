"""What mpidist says of the functions of MPI that it calls, compared with a count."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launching import run_ranks
from replicas import rarely

from mpidist import _native

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    for name, more in (("plain", []), ("large", ["-DLARGE_COUNTS"])):
        output = ["-o", str(folder / f"{name}.so")]
        command = ["cc", "-O1", "-shared", "-fPIC", *more, *output]
        command += [str(HERE / "profile.c"), "-ldl"]
        subprocess.run(command, check=True, timeout=100)
    return folder


def counts(libraries: Path, ranks: int, nodes: int, **env: str) -> dict[str, Any]:
    """Return what was counted of each call; it is what mpidist said."""
    settings = {"MPIDIST_SIMULATED_NODES": str(nodes), **env}
    program = [str(HERE / "profiled_program.py"), str(libraries)]
    result = run_ranks(ranks, program, timeout=200, env=settings)
    assert result.returncode == 0, result
    counted = {}
    for line in result.stdout.splitlines():
        row = json.loads(line)
        counted[row["call"]] = row["counted"]
        if "said" not in row:
            continue
        said: dict[str, int] = {}
        for name, count in row["said"].items():
            name = "Start" if name.startswith("Start of ") else name
            said[f"MPI_{name}"] = said.get(f"MPI_{name}", 0) + count
        assert row["counted"] == said, row
    return counted


@pytest.mark.skipif(not _native.available(), reason="the native core is not built")
@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), rarely(3, 3), rarely(9, 9)])
def test_the_functions_of_mpi_that_calls_use(libraries, ranks, nodes):
    counted = counts(libraries, ranks, nodes)
    assert sum(counted["MPIStrategy"].values()) <= (7 if ranks == nodes else 13)
    header = {"MPI_Start": 2}  # with that of the end of `run`
    assert counted["all_reduce of 4 B"] == header
    assert counted["all_reduce of 1 MiB"] in (
        {**header, "MPI_Iallreduce": 1},
        {**header, "MPI_Iallgather": 1},  # Open MPI, two nodes
    )
    gathered = {**header, "MPI_Iallgather": 1}
    assert counted["all_gather of 1 MiB"] == gathered
    assert counted["all_gather of 4 B"] == header
    assert counted["merge_call that does nothing"] == {**header, "MPI_Ibcast": 1}


def test_one_node_calls_nothing_of_mpi(libraries):
    counted = counts(libraries, 2, 1)
    assert counted["all_reduce of 4 B"] == counted["all_reduce of 16 MiB"] == {}
    assert sum(counted["MPIStrategy"].values()) <= 6


def test_the_user_chooses_what_reduces(libraries):
    large = "all_reduce of 16 MiB"
    counted = counts(libraries, 3, 3, MPIDIST_ALLREDUCE="iallgather:2")
    assert {"MPI_Iallgather"} == {*counted[large]} - {"MPI_Start"}
    counted = counts(libraries, 3, 3, MPIDIST_ALLREDUCE="iallreduce:8")
    assert counted[large]["MPI_Iallreduce"] == 8
