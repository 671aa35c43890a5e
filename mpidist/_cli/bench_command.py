"""`mpidist bench`: raw mpi4py and mpidist, timed alternately in the same processes.

`bench_timing` says what a figure is, and `bench_cases` has the work that is timed.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from mpidist._cli.bench_cases import CASES, Case
from mpidist._cli.bench_timing import Bench, Row, parse_size, show_seconds, show_size
from mpidist._cli.facts import machine_facts, software_facts, transport_facts
from mpidist._cli.job import Job, UsageError
from mpidist._cli.speaking import Parser, positive_seconds, say

ABOUT: Final = "time mpidist against raw mpi4py, on these ranks"
FORMAT: Final = "mpidist-bench"
VERSION: Final = 3
_DESCRIPTION: Final = """\
Times raw mpi4py and mpidist alternately in the same processes, after comparing
both results with the correct one, and prints each row as soon as it is
measured: work, bytes, raw, mpidist, and their ratio. Start it on the ranks to
measure:

  mpirun -n 2 mpidist bench
  mpirun -n 4 mpidist bench all_reduce --sizes 4B,64KiB,16MiB --json F.json

NAME (default: all):
  all_reduce   the sum of one float32 array             raw: Allreduce in place
  nest         the sums of many arrays in one call      raw: pack, Allreduce,
                                                             unpack
  all_gather   an array of each rank, on all            raw: Allgather
  run          an empty function                        raw: Barrier
  merge_call   an empty merge_fn                        raw: Barrier, Bcast
  reduce       the sum of a Python number               raw: Allreduce
  update       sums of gradients, and the update of     raw: for each Allreduce,
               20 variables in merge_fn                      multiply, subtract
  strategy     making an MPIStrategy                    raw: Dup
"""


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(parse_size(part) for part in text.split(",")))


def _parser() -> Parser:
    parser = Parser("bench", _DESCRIPTION)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="a benchmark, see above")
    text = "sizes of the arrays of all_reduce and all_gather: 4B,64KiB,1MB"
    add("--sizes", type=_sizes, metavar="LIST", help=text)
    effort = parser.add_mutually_exclusive_group().add_argument
    text = "about how long to measure a row (default: 1)"
    effort("--seconds", type=positive_seconds, default=1.0, metavar="S", help=text)
    text = "at most three samples of each: shows that it works, not how fast"
    effort("--quick", action="store_true", help=text)
    add("--json", metavar="FILE", help="write the results to FILE, with quartiles")
    return parser


def bench(arguments: Sequence[str], cases: Mapping[str, Case] = CASES) -> int:
    """Run `mpidist bench` with these arguments; return the exit code. Collective."""
    parser = _parser()
    given = parser.parse_args(list(arguments))
    unknown = [name for name in given.names if name not in cases]
    if unknown:
        known = ", ".join(cases)
        parser.error(f"argument NAME: expected one of {known}, got {unknown[0]!r}")
    job = Job()
    _write(job, given.json, "", "a")
    run = Bench(job, given.sizes, given.seconds, quick=given.quick, show=_print_row)
    chosen = [cases[name] for name in dict.fromkeys(given.names or cases)]
    text = json.dumps(_measure(run, chosen), indent=1)
    _write(job, given.json, text, "w")
    job.free()
    return 0


def _write(job: Job, path: str | None, text: str, mode: str) -> None:
    """Write a file on rank 0, if one was requested; all ranks raise if it cannot."""
    problem = ""
    if path is not None and job.rank == 0:
        try:
            with open(path, mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            problem = f"--json {path} cannot be written: {error.strerror}"
    if problem := job.from_root(problem):
        raise UsageError(problem)


def _measure(run: Bench, cases: Iterable[Case]) -> dict[str, Any]:
    """Run cases one after the other; return what is written to a file. Collective."""
    facts = _facts(run)
    say(
        f"{header(facts)}\nthe first MPIStrategy: {show_seconds(run.first_seconds)}, "
        f"{run.first_files} more open files per rank\n"
    )
    say(_line("work", "bytes", "raw", "mpidist", "ratio"))
    say("-" * 74)
    for case in cases:
        case(run)
    # Not after an exception, which one rank may have alone: closing waits for all.
    run.strategy.close()
    notes = ["Medians of alternating samples; of each, the slowest rank's time."]
    if any(time.is_noisy for row in run.rows for time in (row.raw, row.ours)):
        notes.append("~: the quartiles are more than 30% of the median apart.")
    say("\n" + "\n".join(notes + run.notes))
    rows = [{**dataclasses.asdict(row), "ratio": row.ratio} for row in run.rows]
    head = {"format": FORMAT, "version": VERSION, "unit": "seconds"}
    return {**head, **facts, "notes": run.notes, "rows": rows}


def _facts(run: Bench) -> dict[str, Any]:
    job = run.job
    if run.crowded:
        run.notes.append(
            "There are more ranks than cores: ranks wait for a core, and times depend\n"
            "on when they get one."
        )
    if job.size == 1:
        run.notes.append(
            "One rank: nothing is communicated; start it with mpirun -n 2."
        )
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "ranks": job.size,
        "nodes": run.nodes,
        "simulated": run.nodes > len(job.nodes),
        "crowded": run.crowded,
        "machine": machine_facts(),
        "software": software_facts(job.mpi),
        "transports": transport_facts(run.strategy),
        "environment": {
            k: v for k, v in sorted(os.environ.items()) if k.startswith("MPIDIST_")
        },
        "strategy": {"seconds": run.first_seconds, "files": run.first_files},
    }


def header(facts: Mapping[str, Any]) -> str:
    """Return some lines about where and with what a record was made."""
    machine, software = facts["machine"], facts["software"]
    kind = "simulated nodes" if facts["simulated"] else "nodes"
    nodes = "" if facts["nodes"] == 1 else f" on {facts['nodes']} {kind}"
    ranks = f"{facts['ranks']} rank{'s' * (facts['ranks'] != 1)}{nodes}"
    return (
        f"mpidist {software['mpidist']}: {ranks}; {facts['date']}\n"
        f"{software['mpi']}, mpi4py {software['mpi4py']}, NumPy {software['numpy']}, "
        f"Python {software['python']}\n"
        f"{machine['cores']} cores per {'machine' if facts['simulated'] else 'node'}, "
        f"{machine['processor']}\n"
        f"host arrays: {facts['transports']['host']['text']}"
    )


def _line(work: str, *cells: str) -> str:
    return f"{work:<30}" + "".join(f"{cell:>11}" for cell in cells)


def _print_row(row: Row) -> None:
    size = "" if row.nbytes is None else show_size(row.nbytes)
    times = [show_seconds(t.median) + "~" * t.is_noisy for t in (row.raw, row.ours)]
    say(_line(row.work, size, *times, f"{row.ratio:.2f}"))
