"""The benchmarks on simulated nodes, job after job; launch/performance calls it.

    nodes.py NODES RANKS_PER_NODE FILE [options of mpidist bench]

NODES are numbers such as 2,4,8: for each a job on this machine acts as so many nodes
(MPIDIST_SIMULATED_NODES). Their ratios are printed side by side, and FILE gets all
results. The cores are those of one machine, so the ratios count, not the times.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpidist._base.names import show_seconds
from mpidist._cli import run_command
from mpidist._cli.measuring import show_size

BENCHMARKS = Path(__file__).resolve().parent
CASES = ("all_reduce", "all_gather", "merge_call", "strategy")


def run(nodes: int, ranks: int, path: Path, words: Sequence[str]) -> dict[str, Any]:
    """Run a job; return what it has written to a file."""
    mpirun = run_command.find_mpirun()
    version = run_command.version_of(mpirun)
    environment = {
        **os.environ,
        **run_command.settings(ranks, version, os.environ),
        "MPIDIST_SIMULATED_NODES": str(nodes),
    }
    program = [sys.executable, str(BENCHMARKS), *CASES, *words]
    command = [mpirun, "-n", str(ranks), *program, "--json", str(path)]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        sys.exit(f"the benchmarks on {nodes} nodes ended with code {code}")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def side_by_side(records: Sequence[dict[str, Any]]) -> str:
    """Return the ratios of several records, one column for each."""

    def line(work: str, nbytes: int | None, cells: Sequence[object]) -> str:
        size = "" if nbytes is None else show_size(nbytes)
        return f"{work:<27}{size:>10}" + "".join(f"{cell!s:>9}" for cell in cells)

    ratios: dict[tuple[str, int | None], list[str]] = {}
    for column, record in enumerate(records):
        for row in record["rows"]:
            cells = ratios.setdefault((row["work"], row["nbytes"]), [""] * len(records))
            cells[column] = f"{row['ratio']:.2f}"
    made = [record["strategy"] for record in records]
    seconds = [show_seconds(one["seconds"]) for one in made]
    head = line("nodes", None, [record["nodes"] for record in records])
    return "\n".join(
        [
            head,
            "-" * len(head),
            line("ranks", None, [record["ranks"] for record in records]),
            *(line(*key, cells) for key, cells in ratios.items()),
            line("the first MPIStrategy", None, seconds),
            line("  more open files per rank", None, [one["files"] for one in made]),
        ]
    )


def main() -> None:
    numbers, per_node, file, *words = sys.argv[1:]
    records = []
    with tempfile.TemporaryDirectory(prefix="mpidist-bench-") as folder:
        for nodes in map(int, numbers.split(",")):
            path = Path(folder) / f"{nodes}.json"
            records.append(run(nodes, nodes * int(per_node), path, words))
            print(flush=True)
    print("The time of mpidist over that of raw mpi4py:\n")
    print(side_by_side(records), flush=True)
    head = {"format": "mpidist-bench-nodes", "version": records[0]["version"]}
    Path(file).write_text(json.dumps({**head, "records": records}, indent=1))


if __name__ == "__main__":
    main()
