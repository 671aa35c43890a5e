"""What mpidist says of the functions of MPI that it calls, compared with a count."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from launching import mpi_vendor, run_ranks
from replicas import long_only, slow

from mpidist import _native

HERE = Path(__file__).parent
MAKING = "making an `MPIStrategy`"
BY_MPI = {  # the calls that move arrays by MPI on one node, too
    "`Checkpoint.restore` of 1 MiB": {"MPI_Ibcast"},
    "`merge_call` that looks at 1 MiB of each rank": {
        "MPI_Iallreduce",  # of the sizes
        "MPI_Igatherv",
    },
}
core = pytest.mark.skipif(
    not _native.available(), reason="the native core is not built"
)

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


# Only for ranks: mpirun is not made for it.
PRELOAD = """
import ctypes, os, sys
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
folder, *program = sys.argv[1:]
large = hasattr(ctypes.CDLL(MPI.__file__), "PMPI_Iallreduce_c")
os.environ["LD_PRELOAD"] = os.path.join(folder, "large.so" if large else "plain.so")
os.execv(sys.executable, [sys.executable, *program])
"""


def counts(libraries: Path, ranks: int, nodes: int, **env: str) -> dict[str, Any]:
    """Return what was counted of each call; it is what mpidist said."""
    settings = {"MPIDIST_SIMULATED_NODES": str(nodes), **env}
    program = ["-c", PRELOAD, libraries, HERE / "profiled_program.py"]
    program.append(libraries / f"saved_{ranks}_{nodes}")
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


LAYOUTS = {  # ranks, and nodes
    "one node": (2, 1),
    "nodes of one rank": (3, 3),
    "nodes of two ranks": (4, 2),
}


def table(columns: dict[str, dict[str, Any]]) -> str:
    """Return what was counted as a table in Markdown, calls alike in one row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for call in next(iter(columns.values())):
        cells = []
        for counted in columns.values():
            row = {name.removeprefix("MPI_"): n for name, n in counted[call].items()}
            cells.append(
                ", ".join(
                    f"`{name}`" if n == 1 else f"{n} x `{name}`"
                    for name, n in sorted(row.items(), key=lambda x: x[0] != "Start")
                )
            )
        alike.setdefault(tuple(cells), []).append(call)
    lines = [["call", *columns], ["---"] * (len(columns) + 1)]
    lines += [["; ".join(calls), *cells] for cells, calls in alike.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@core
def test_the_page_has_what_calls_use(libraries):
    """Counted with Open MPI 5; others choose other ways for large arrays."""
    columns = {name: counts(libraries, *layout) for name, layout in LAYOUTS.items()}
    for name, counted in columns.items():
        check(counted, *LAYOUTS[name])
    name, version = mpi_vendor()
    if name == "Open MPI" and version >= (5,):
        page = (HERE.parents[1] / "docs" / "mpi.md").read_text(encoding="utf-8")
        found = table(columns)
        assert found in page, f"docs/mpi.md: not\n{found}"


@core
@long_only
def test_more_ranks_use_the_same(libraries):
    check(counts(libraries, 9, 9), 9, 9)


def check(counted: dict[str, Any], ranks: int, nodes: int) -> None:
    """Check what holds for all MPIs."""
    if nodes == 1:
        assert sum(counted[MAKING].values()) <= 6
        for call, row in counted.items():
            if call != MAKING:
                assert {*row} == BY_MPI.get(call, set()), (call, row)
        return
    intel = mpi_vendor()[0] == "Intel MPI"
    # One MPI_Iallgatherv is two MPI_Ibcast there, and no all-gather is persistent.
    assert sum(counted[MAKING].values()) <= (7 if ranks == nodes else 13 + intel)
    header = "MPI_Iallgather" if intel else "MPI_Start"
    assert counted["`all_reduce` of 4 B"] == {header: 1}
    assert counted["`all_reduce` of 1 MiB"] in (
        Counter([header, "MPI_Iallreduce"]),
        Counter([header, "MPI_Iallgather"]),  # Open MPI, two nodes
    )
    assert counted["`all_gather` of 4 B"] == {header: 1}
    assert counted["`all_gather` of 1 MiB"] == Counter([header, "MPI_Iallgather"])
    assert counted["`merge_call` that does nothing"] == Counter([header, "MPI_Ibcast"])


@slow
def test_the_user_chooses_what_reduces(libraries):
    large = "`all_reduce` of 16 MiB"
    counted = counts(libraries, 2, 2, MPIDIST_ALLREDUCE="iallgather:2")
    headers = {"MPI_Start", "MPI_Iallgather"}
    assert {"MPI_Ialltoallv", "MPI_Iallgatherv"} == {*counted[large]} - headers
    counted = counts(libraries, 2, 2, MPIDIST_ALLREDUCE="iallreduce:8")
    assert counted[large]["MPI_Iallreduce"] == 8
