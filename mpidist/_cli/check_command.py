"""`mpidist check`: does mpidist work on these ranks?

Each check runs on all ranks and finds what is wrong on this one. Then the ranks
exchange their results over a separate communicator, and rank 0 prints one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

import mpidist
from mpidist._base.names import counted
from mpidist._base.types import HostArray, Nest
from mpidist._cli import facts, folder_check, system_checks
from mpidist._cli.facts import (
    BUG,
    FAILED,
    OK,
    CheckFailedError,
    Finding,
    Job,
    attempt,
    ok,
)
from mpidist._cli.speaking import Parser, positive_seconds, say
from mpidist._strategy.strategy import group_of

ABOUT: Final = "a quick test of these ranks: does everything work here?"
_DESCRIPTION: Final = """\
Tests on these ranks what a program needs: that they find each other, that
reductions, gathers, merge_call, variables and optimizers give right results,
and that mistakes raise errors on all ranks instead of hanging. Run it on a new
cluster before the first real job:

  mpirun -n 4 mpidist check
  srun -N 2 --ntasks-per-node 4 --mpi=pmix mpidist check

  mpirun -n 4 mpidist check --folder /scratch/me

Exits 0 if all is well, 1 if a check failed; a note is not a failure. No check
waits longer than --timeout.
"""
_T = TypeVar("_T")
_LIBRARY: Final = (
    "test the MPI library first: `mpirun -n 2 python -m mpi4py.bench helloworld`"
)


class _Job(Job):
    """The ranks, and the strategy that is tried on them."""

    def __init__(self, timeout: float, folder: str) -> None:
        super().__init__()
        self.timeout, self.folder = timeout, folder
        self.made: mpidist.MPIStrategy | None = None

    @property
    def strategy(self) -> mpidist.MPIStrategy:
        """The strategy."""
        if self.made is None:
            raise CheckFailedError("there is no strategy to try it with", "see above")
        return self.made

    def run(self, replica: Callable[[mpidist.ReplicaContext], _T]) -> _T:
        """Run on all replicas; return the result of this rank's replica."""
        strategy = self.strategy
        result = strategy.run(lambda: replica(mpidist.get_replica_context()))
        return strategy.experimental_local_results(result)[0]


def _ranks(job: _Job) -> Finding:
    """Check that the ranks find each other."""
    if job.stranger:
        wrong, _, advice = job.stranger.partition(" is alone: ")
        raise CheckFailedError(f"{wrong} is alone", advice)
    total = job.comm.allreduce(job.rank)
    if total != job.size * (job.size - 1) // 2:
        raise CheckFailedError(f"the sum of all ranks is {total}", _LIBRARY)
    more = "; start more with mpirun -n N" if job.size == 1 else ""
    nodes = counted(len(job.nodes), "node")
    return ok(f"{counted(job.size, 'rank')} on {nodes}{more}")


def _strategy(job: _Job) -> Finding:
    """Make a strategy."""
    options = mpidist.experimental.CommunicationOptions(timeout_seconds=job.timeout)
    job.made = mpidist.MPIStrategy(communication_options=options)
    moved = facts.transport_facts(job.made)
    where = job.made.extended.worker_devices[0].partition("device:")[2]
    text = f"arrays on {where}, host arrays: {moved['host']['text']}"
    if where.startswith("GPU"):
        text += f", GPU arrays: {moved['gpu']['text']}"
    return ok(text)


def _all_reduce(job: _Job) -> Finding:
    """Reduce arrays of several dtypes and sizes."""
    size, rank = job.size, job.rank
    factor = size * (size + 1) // 2
    cases: dict[str, HostArray] = {
        "float32": np.ones(3, np.float32),
        "float64, 8 MB": np.ones(10**6),
        "int64": np.arange(5),
        "float16": np.ones(7, np.float16),
        "complex128": np.full(4, 1j),
    }
    given = {name: x * (rank + 1) for name, x in cases.items()}
    sums = job.run(lambda ctx: ctx.all_reduce("SUM", given))
    largest = job.run(lambda ctx: ctx.all_reduce("MAX", rank))
    mean = job.run(lambda ctx: ctx.all_reduce("MEAN", float(rank)))
    for name, x in cases.items():
        found = sums[name]
        if found.dtype != x.dtype or not np.array_equal(found, x * factor):
            raise CheckFailedError(f"the sum of {name} is wrong")
    if largest != size - 1 or mean != (size - 1) / 2:
        raise CheckFailedError(f"MAX of the ranks is {largest}, MEAN is {mean}")
    return ok(f"SUM of {', '.join(cases)}; MAX, MEAN")


def _gather(job: _Job) -> Finding:
    """Gather arrays of different lengths."""
    rank, size = job.rank, job.size
    expected = np.concatenate([np.full(r + 1, r) for r in range(size)])
    found = job.run(lambda ctx: ctx.all_gather(np.full(rank + 1, rank), 0))
    if not np.array_equal(found, expected):
        raise CheckFailedError(f"got {found.tolist()!r:.60}")
    return ok(f"{counted(len(expected), 'row')} of {counted(size, 'rank')}")


def _merge_call(job: _Job) -> Finding:
    """Have rank 0 command the others, and update a variable."""
    strategy, rank, size = job.strategy, job.rank, job.size
    with strategy.scope():
        w = mpidist.Variable(np.zeros(1000))
    calls = []

    def merge_fn(
        strategy: mpidist.Strategy,
        gradient: mpidist.PerReplica,
        number: mpidist.PerReplica,
    ) -> int:
        calls.append(1)
        total = strategy.extended.reduce_to("SUM", gradient, w)
        strategy.extended.update(w, mpidist.Variable.assign, args=(total,))
        return sum(strategy.experimental_local_results(number))

    def replica(ctx: mpidist.ReplicaContext) -> Nest:
        return ctx.merge_call(merge_fn, (np.full(1000, float(rank)), rank))

    total = job.run(replica)
    expected = size * (size - 1) / 2
    if total != expected or not np.array_equal(w.numpy(), np.full(1000, expected)):
        raise CheckFailedError(f"rank 0 found {total}, expected {expected}")
    if len(calls) != (rank == 0):
        raise CheckFailedError("merge_fn did not run once, on rank 0 alone")
    return ok("merge_fn ran once, on rank 0; a variable was updated on all")


def _training(job: _Job) -> Finding:
    """Take one step with an optimizer."""
    strategy, size = job.strategy, job.size
    with strategy.scope():
        w = mpidist.Variable(np.ones(100, np.float32))
        sgd = mpidist.optimizers.SGD(learning_rate=0.5)
    gradient = strategy.array_module.full(100, 1 / size, np.float32)
    job.run(lambda ctx: sgd.apply_gradients([(gradient, w)]))
    if not np.allclose(w.numpy(), 0.5):
        raise CheckFailedError(f"the weights are {w.numpy()[:3]} ...")
    mpidist.check_in_sync(w)
    return ok("the copies of the weights are in sync")


def _mismatch(job: _Job) -> Finding:
    """Make calls that differ: an error on all ranks."""
    last = job.size - 1
    if last == 0:
        return ok("not tried: there is one rank")
    if not group_of(job.strategy).guard.enabled:
        return ok("not tried: MPIDIST_GUARD=0")
    try:  # one element more on the last rank
        rows = np.ones(3 + (job.rank == last))
        job.run(lambda ctx: ctx.all_reduce("SUM", rows))
    except mpidist.CollectiveMismatchError:
        return ok("CollectiveMismatchError on all ranks")
    raise CheckFailedError("arrays of different shapes were added without an error")


def _exception(job: _Job) -> Finding:
    """Raise on one rank: all ranks learn of it."""
    if not group_of(job.strategy).guard.enabled:
        return ok("not tried: MPIDIST_GUARD=0")
    last = job.size - 1
    is_last = job.rank == last

    def replica(ctx: mpidist.ReplicaContext) -> Nest:
        if is_last:
            raise KeyError("on purpose")
        return ctx.all_reduce("SUM", 1.0)

    with contextlib.suppress(KeyError if is_last else mpidist.ReplicaError):
        job.run(replica)
        raise CheckFailedError(f"an exception on rank {last} did not reach this rank")
    return ok(f"raised on rank {last}, and all ranks learned of it")


_CHECKS: Final[dict[str, Callable[[_Job], Finding]]] = {
    "ranks": _ranks,
    **system_checks.CHECKS,
    "strategy": _strategy,
    "all_reduce": _all_reduce,
    "all_gather": _gather,
    "merge_call": _merge_call,
    "optimizer": _training,
    "mismatch": _mismatch,
    "exception": _exception,
    "folder": lambda job: folder_check.check_folder(job, job.folder),
}


def check(arguments: Sequence[str]) -> int:
    """Run `mpidist check` with these arguments; return the exit code. Collective."""
    parser = Parser("check", _DESCRIPTION)
    add = parser.add_argument
    text = "seconds that ranks wait for each other (default: 60)"
    add("--timeout", type=positive_seconds, default=60.0, metavar="S", help=text)
    text = "also test whether files there can be replaced safely, as checkpoints are"
    add("--folder", metavar="DIR", help=text)
    add("--json", action="store_true", help="print JSON")
    given = parser.parse_args(list(arguments))
    job = _Job(given.timeout, given.folder or "")
    names = ["ranks"] if job.stranger else list(_CHECKS)  # others would fail for this
    if given.folder is None and not job.stranger:
        names.remove("folder")
    failed, rows = 0, []
    for name in names:
        found = attempt(job, _CHECKS[name])
        if found.advice == BUG and failed:
            found = dataclasses.replace(found, advice="see above")
        failed += found.state == FAILED
        rows.append({"name": name, **dataclasses.asdict(found)})
        if not given.json:
            say(f"{name:<15} {found.state:<6}  {found.text}")
            if found.state != OK and found.advice:
                say(f"{'':<15} {'':<6}  -> {found.advice}")
    if job.made is not None:
        job.made.close()
    if given.json:
        say(json.dumps({"failed": failed, "checks": rows}, indent=1))
    else:
        wrong = f"{failed} of {len(rows)} checks failed"
        say(f"\n{wrong if failed else 'all is well'}")
    job.free()
    return 1 if failed else 0
