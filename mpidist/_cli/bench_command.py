"""`mpidist bench`: raw mpi4py and mpidist, timed alternately in the same processes.

`bench_timing` says what a figure is. Each case is one function, which does the work by
hand with mpi4py, and by mpidist; developers have more of them, in `launch/benchmarks/`.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

import mpidist
from mpidist import ReplicaContext
from mpidist._base.types import HostArray
from mpidist._cli import facts
from mpidist._cli.bench_timing import (
    Bench,
    Row,
    line_of,
    parse_size,
    show_seconds,
    show_size,
)
from mpidist._cli.facts import Job
from mpidist._cli.speaking import Parser, UsageError, positive_seconds, say

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
_NESTS: Final = ((20, 2**10), (100, 2**20))  # arrays, and bytes of each
_ANSWER: Final = 42
_VARIABLES: Final = 20
_COUNT: Final = 50_000  # numbers of each variable
_RATE: Final = np.float32(2.0**-10)  # exact in float32, as the sums are

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
    for nbytes in bench.all_reduce_sizes:
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
    for nbytes in bench.all_gather_sizes:
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


def packed(bench: Bench, arrays: Sequence[HostArray]) -> Callable[[], list[HostArray]]:
    """Return a function that packs, calls one `Allreduce` in place, and unpacks.

    This is what a careful user writes by hand: the flat buffer and the arrays for the
    sums are allocated once.
    """
    comm, mpi = bench.job.comm, bench.job.mpi
    flat = np.empty(sum(x.size for x in arrays), np.float32)
    out = [np.empty_like(x) for x in arrays]
    ends = np.cumsum([x.size for x in arrays])[:-1]
    parts = np.split(flat, ends)
    views = [part.reshape(x.shape) for part, x in zip(parts, arrays, strict=True)]

    def call() -> list[HostArray]:
        for view, x in zip(views, arrays, strict=True):
            np.copyto(view, x)
        comm.Allreduce(mpi.IN_PLACE, flat, mpi.SUM)
        for view, x in zip(views, out, strict=True):
            np.copyto(x, view)
        return out

    return call


@in_replicas
def nest(bench: Bench, context: ReplicaContext) -> None:
    """Sum many arrays in one call, as the gradients of a network. Collective."""
    for count, nbytes in _NESTS:
        work = f"{count} arrays of {show_size(nbytes)}"
        if bench.has_room(work, count * nbytes, copies=8):
            arrays = [bench.numbers(nbytes // 4) for _ in range(count)]
            ours = functools.partial(context.all_reduce, "SUM", arrays)
            expected = [bench.total(nbytes // 4)] * count
            by_hand, total = packed(bench, arrays), count * nbytes
            bench.compare("nest", by_hand, ours, expected, work=work, nbytes=total)


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


def reduce(bench: Bench) -> None:
    """Sum a Python number of each replica, against `Allreduce`. Collective."""
    comm, mpi, size = bench.job.comm, bench.job.mpi, bench.job.size
    mine = bench.job.rank + 1.0
    send, receive = np.array([mine]), np.empty(1)
    value = bench.strategy.run(lambda: mine)

    def by_hand() -> float:
        comm.Allreduce(send, receive, mpi.SUM)
        return float(receive[0])

    ours = functools.partial(bench.strategy.reduce, "SUM", value, axis=None)
    expected = size * (size + 1) / 2
    bench.compare("reduce", by_hand, ours, expected, work="reduce of a number")


def update(bench: Bench) -> None:
    """Update 20 variables by gradients, in merge_fn and by hand. Collective."""
    with bench.strategy.scope():
        zeros = np.zeros(_COUNT, np.float32)
        variables = [mpidist.Variable(zeros) for _ in range(_VARIABLES)]
    _update(bench, variables)


@in_replicas
def _update(
    bench: Bench, context: ReplicaContext, variables: list[mpidist.Variable]
) -> None:
    comm, mpi = bench.job.comm, bench.job.mpi
    gradients = [bench.numbers(_COUNT) for _ in variables]
    arrays = [np.zeros(_COUNT, np.float32) for _ in variables]
    total = np.empty(_COUNT, np.float32)

    def by_hand() -> list[HostArray]:
        for array, gradient in zip(arrays, gradients, strict=True):
            comm.Allreduce(gradient, total, mpi.SUM)
            np.multiply(total, _RATE, out=total)
            np.subtract(array, total, out=array)
        return arrays

    def descend(variable: mpidist.Variable, gradient: HostArray) -> None:
        variable.assign_sub(_RATE * gradient)

    def merge_fn(strategy: mpidist.Strategy, *per_replica: mpidist.PerReplica) -> None:
        pairs = list(zip(per_replica, variables, strict=True))
        totals = strategy.extended.batch_reduce_to("SUM", pairs)
        for variable, gradient in zip(variables, totals, strict=True):
            strategy.extended.update(variable, descend, args=(gradient,))

    def ours() -> list[mpidist.Variable]:
        context.merge_call(merge_fn, tuple(gradients))
        return variables

    expected = [-_RATE * bench.total(_COUNT)] * _VARIABLES
    work, nbytes = f"update of {_VARIABLES} x 50k floats", _VARIABLES * total.nbytes
    bench.compare("update", by_hand, ours, expected, work=work, nbytes=nbytes)


def strategy(bench: Bench) -> None:
    """Make an MPIStrategy, against a duplicate of a communicator. Collective."""
    ends: list[Callable[[], object]] = []

    def by_hand() -> None:
        ends.append(bench.job.comm.Dup().Free)

    def ours() -> None:
        ends.append(mpidist.MPIStrategy(device="cpu").close)

    timings = bench.measure([by_hand, ours], lambda: ends.pop()())
    bench.add(Row("strategy", "making an MPIStrategy", None, *timings))


CASES: Final[dict[str, Case]] = {
    case.__name__: case
    for case in (
        *(all_reduce, nest, all_gather),
        *(run, merge_call, reduce, update, strategy),
    )
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
    run = Bench(job, given.sizes, given.seconds, quick=given.quick)
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
    record = _facts(run)
    say(
        f"{header(record)}\nthe first MPIStrategy: {show_seconds(run.first_seconds)}, "
        f"{run.first_files} more open files per rank\n"
    )
    say(line_of("work", "bytes", "raw", "mpidist", "ratio"))
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
    return {**head, **record, "notes": run.notes, "rows": rows}


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
        "machine": job.mine["machine"],
        "software": job.mine["software"],
        "transports": facts.transport_facts(run.strategy),
        "environment": job.mine["environment"],
        "strategy": {"seconds": run.first_seconds, "files": run.first_files},
    }


def header(record: Mapping[str, Any]) -> str:
    """Return some lines about where and with what a record was made."""
    machine, software = record["machine"], record["software"]
    kind = "simulated nodes" if record["simulated"] else "nodes"
    nodes = "" if record["nodes"] == 1 else f" on {record['nodes']} {kind}"
    ranks = f"{facts.counted(record['ranks'], 'rank')}{nodes}"
    return (
        f"mpidist {software['mpidist']}: {ranks}; {record['date']}\n"
        f"{software['mpi']}, mpi4py {software['mpi4py']}, NumPy {software['numpy']}, "
        f"Python {software['python']}\n"
        f"{machine['cores']} cores per {'machine' if record['simulated'] else 'node'}, "
        f"{machine['processor']}\n"
        f"host arrays: {record['transports']['host']['text']}"
    )
