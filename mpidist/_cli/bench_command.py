"""`mpidist bench`: mpidist beside raw mpi4py, on the ranks of the job.

Each case is one function, which does the work by hand with mpi4py, and by mpidist;
developers have more of them, in `launch/benchmarks/`.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

import mpidist
from mpidist import ReplicaContext
from mpidist._base.names import counted
from mpidist._base.types import HostArray
from mpidist._cli import facts
from mpidist._cli.facts import Job
from mpidist._cli.measuring import NOISE, Bench, line_of, parse_size, show_size
from mpidist._cli.speaking import Parser, UsageError, positive_seconds, say

ABOUT: Final = "time mpidist against raw mpi4py, on these ranks"
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
  all_gather   an array of each rank, on all            raw: Allgather
  run          an empty function                        raw: Barrier
  merge_call   an empty merge_fn                        raw: Barrier, Bcast
"""

_ANSWER: Final = 42
_NOTES: Final = (
    "Medians of alternating samples; of each, the slowest rank's time.",
    f"~: the quartiles are more than {NOISE:.0%} of the median apart.",
)


# --- the cases ----------------------------------------------------------------------

Case = Callable[[Bench], None]


def in_replicas(case: Callable[..., None]) -> Callable[..., None]:
    """Return a case that runs as a replica function; it also gets its context."""

    @functools.wraps(case)
    def run(bench: Bench, *arguments: Any) -> None:
        bench.strategy.run(
            lambda: case(bench, mpidist.get_replica_context(), *arguments)
        )

    return run


@in_replicas
def all_reduce(bench: Bench, context: ReplicaContext) -> None:
    """Sum one contiguous float32 array of each size over the ranks. Collective."""
    comm, mpi = bench.job.comm, bench.job.mpi
    for nbytes in bench.sizes_of("all_reduce"):
        if not bench.has_room(f"all_reduce of {show_size(nbytes)}", nbytes, copies=6):
            continue
        x = bench.numbers(max(1, nbytes // 4))
        buffer = x.copy()  # of sums of sums, which become infinite

        def by_hand(buffer: HostArray = buffer) -> HostArray:
            comm.Allreduce(mpi.IN_PLACE, buffer, mpi.SUM)
            return buffer

        ours = functools.partial(context.all_reduce, "SUM", x)
        expected = bench.total(x.size)
        bench.compare("all_reduce", by_hand, ours, expected, nbytes=x.nbytes)


@in_replicas
def all_gather(bench: Bench, context: ReplicaContext) -> None:
    """Concatenate a float32 array of each rank, on all ranks. Collective."""
    comm, size = bench.job.comm, bench.job.size
    for nbytes in bench.sizes_of("all_gather"):
        work = f"all_gather of {show_size(nbytes)} of each rank"
        if not bench.has_room(work, nbytes, copies=5 * size):
            continue
        x = bench.numbers(max(1, nbytes // 4))
        whole = np.concatenate([bench.numbers(x.size, rank) for rank in range(size)])
        buffer = np.empty_like(whole)

        def by_hand(x: HostArray = x, buffer: HostArray = buffer) -> HostArray:
            comm.Allgather(x, buffer)
            return buffer

        ours = functools.partial(context.all_gather, x, 0)
        bench.compare("all_gather", by_hand, ours, whole, nbytes=x.nbytes)


def run(bench: Bench) -> None:
    """Run an empty function on all replicas, against `Barrier`. Collective."""
    ours = functools.partial(bench.strategy.run, lambda: None)
    bench.compare("run", bench.job.comm.Barrier, ours, None, work="empty run")


@in_replicas
def merge_call(bench: Bench, context: ReplicaContext) -> None:
    """Have rank 0 compute a number, against `Barrier` and `Bcast`. Collective."""
    comm, rank = bench.job.comm, bench.job.rank
    message = np.zeros(1, np.int64)

    def by_hand() -> int:
        comm.Barrier()  # all replicas stop
        message[0] = _ANSWER if rank == 0 else 0
        comm.Bcast(message, 0)  # and receive rank 0's number
        return int(message[0])

    def answer(strategy: mpidist.Strategy) -> int:
        return _ANSWER

    ours = functools.partial(context.merge_call, answer)
    bench.compare("merge_call", by_hand, ours, _ANSWER, work="empty merge_call")


CASES: Final[dict[str, Case]] = {
    case.__name__: case for case in (all_reduce, all_gather, run, merge_call)
}


# --- the command ----------------------------------------------------------------------


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


def bench(
    arguments: Sequence[str],
    cases: Mapping[str, Case] = CASES,
    describe: Callable[[Job], Mapping[str, Any]] = lambda job: {},
) -> int:
    """Run `mpidist bench`; return the exit code. Collective.

    Args:
        arguments: those of the command line.
        cases: the benchmarks, by name.
        describe: returns more for the file, before there is a strategy. Collective.
    """
    parser = _parser()
    given = parser.parse_args(list(arguments))
    unknown = [name for name in given.names if name not in cases]
    if unknown:
        known = ", ".join(cases)
        parser.error(f"argument NAME: expected one of {known}, got {unknown[0]!r}")
    job = Job()
    if job.stranger:
        job.free()
        raise UsageError(job.stranger)
    _write(job, given.json, "", "a")
    more = describe(job)
    run = Bench(job, given.sizes, given.seconds, quick=given.quick)
    record = {**_describe(run), **more}
    say(f"{header(record)}\n")
    say(line_of("work", "bytes", "raw", "mpidist", "ratio"))
    say("-" * 74)
    for name in dict.fromkeys(given.names or cases):
        cases[name](run)
    # Not after an exception, which one rank may have alone: closing waits for all.
    run.strategy.close()
    say("\n".join(["", *_NOTES, *run.notes]))
    record["notes"] = run.notes
    record["rows"] = [{**dataclasses.asdict(x), "ratio": x.ratio} for x in run.rows]
    _write(job, given.json, json.dumps(record, indent=1), "w")
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


def _describe(run: Bench) -> dict[str, Any]:
    """Return what is written to a file above the rows: where they were measured."""
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
        "format": "mpidist-bench",
        "version": VERSION,
        "unit": "seconds",
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "ranks": job.size,
        "nodes": run.nodes,
        "simulated": run.nodes > len(job.nodes),
        "crowded": run.crowded,
        "machine": job.mine["machine"],
        "software": job.mine["software"],
        "transports": facts.transport_facts(run.strategy),
        "environment": job.mine["environment"],
    }


def header(record: Mapping[str, Any]) -> str:
    """Return some lines about where and with what a record was made."""
    machine, software = record["machine"], record["software"]
    kind = "simulated nodes" if record["simulated"] else "nodes"
    nodes = "" if record["nodes"] == 1 else f" on {record['nodes']} {kind}"
    ranks = f"{counted(record['ranks'], 'rank')}{nodes}"
    return (
        f"mpidist {software['mpidist']}: {ranks}; {record['date']}\n"
        f"{software['mpi']}, mpi4py {software['mpi4py']}, NumPy {software['numpy']}, "
        f"Python {software['python']}\n"
        f"{machine['cores']} cores per {'machine' if record['simulated'] else 'node'}, "
        f"{machine['processor']}\n"
        f"host arrays: {record['transports']['host']['text']}"
    )
