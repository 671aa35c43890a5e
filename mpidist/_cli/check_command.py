"""`mpidist check`: does mpidist work on these ranks?

Each check runs on all ranks and finds what is wrong on this one. Then the ranks
exchange their results over a separate communicator, and rank 0 prints one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

import mpidist
from mpidist import _native
from mpidist._base.types import HostArray, Nest
from mpidist._cli.facts import (
    core_facts,
    describe_stranger,
    gpu_facts,
    software_facts,
    transport_facts,
)
from mpidist._cli.folder_check import check_folder
from mpidist._cli.job import Job
from mpidist._cli.outcomes import (
    BUG,
    FAILED,
    OK,
    CheckFailedError,
    Note,
    attempt,
)
from mpidist._cli.speaking import Parser, let_the_first_speak, positive_seconds, say
from mpidist._cli.system_checks import SystemChecks
from mpidist._mpi import versions
from mpidist._mpi.library import query_cuda_support
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
_OF_ONE_RANK: Final = ("MPIDIST_TRACE",)  # may differ between ranks
_T = TypeVar("_T")
_EXPORT: Final = (
    "export it to all ranks (Open MPI: mpirun -x KEY; MPICH: mpirun -genv KEY ...)"
)
_LIBRARY: Final = (
    "test the MPI library first: `mpirun -n 2 python -m mpi4py.bench helloworld`"
)


class _Checks:
    """The checks, in the order in which they are made."""

    def __init__(self, job: Job, timeout: float) -> None:
        self._job = job
        self._timeout = timeout
        self._made: mpidist.MPIStrategy | None = None

    @property
    def _strategy(self) -> mpidist.MPIStrategy:
        if self._made is None:
            raise CheckFailedError("there is no strategy to try it with", "see above")
        return self._made

    def close(self) -> None:
        """Close the strategy. Collective."""
        if self._made is not None:
            self._made.close()

    def ranks(self) -> str:
        """Check that the ranks find each other."""
        job = self._job
        alone = describe_stranger(job.size)
        if alone:
            wrong, _, advice = alone.partition(" is alone: ")
            raise CheckFailedError(f"{wrong} is alone", advice)
        total = job.comm.allreduce(job.rank)
        if total != job.size * (job.size - 1) // 2:
            raise CheckFailedError(f"the sum of all ranks is {total}", _LIBRARY)
        more = "; start more with mpirun -n N" if job.size == 1 else ""
        nodes = f"{job.nodes} node{'s' * (job.nodes != 1)}"
        return f"{job.size} rank{'s' * (job.size != 1)} on {nodes}{more}"

    def versions(self) -> str | Note:
        """Check that all ranks have the same software, and round alike."""
        states = self._job.comm.allgather(versions.floating_point_state())
        facts = {**software_facts(self._job.mpi), **versions.describe()}
        self._compare(facts, "unknown", versions.ADVICE)
        floats = versions.floats_that_differ(states)
        if floats:
            return Note(floats, "import the same libraries on all ranks")
        return f"{facts['mpi']}, mpi4py {facts['mpi4py']}, NumPy {facts['numpy']}"

    def settings(self) -> str:
        """Check that all ranks have the same environment variables."""
        mine = {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("MPIDIST_") and name not in _OF_ONE_RANK
        }
        self._compare(mine, "not set", _EXPORT)
        return ", ".join(f"{k}={v}" for k, v in mine.items()) or "none set"

    def _compare(self, mine: dict[str, str], none: str, advice: str) -> None:
        """Raise for the first fact that is not that of rank 0. Collective."""
        first = self._job.from_root(mine)
        for key in dict.fromkeys([*mine, *first]):
            here, there = mine.get(key, none), first.get(key, none)
            if here != there:
                raise CheckFailedError(
                    f"{key} is {here} here, and {there} on rank 0",
                    advice.replace("KEY", key),
                )

    def strategy(self) -> str:
        """Make a strategy."""
        self._made = mpidist.MPIStrategy(
            communication_options=mpidist.experimental.CommunicationOptions(
                timeout_seconds=self._timeout
            )
        )
        host = transport_facts(self._made)["host"]["text"]
        where = self._made.extended.worker_devices[0].partition("device:")[2]
        return f"arrays on {where}, host arrays: {host}"

    def all_reduce(self) -> str:
        """Reduce arrays of several dtypes and sizes."""
        size, rank = self._job.size, self._job.rank
        factor = size * (size + 1) // 2
        cases: dict[str, HostArray] = {
            "float32": np.ones(3, np.float32),
            "float64, 8 MB": np.ones(10**6),
            "int64": np.arange(5),
            "float16": np.ones(7, np.float16),
            "complex128": np.full(4, 1j),
        }
        given = {name: x * (rank + 1) for name, x in cases.items()}
        sums = self._run(lambda ctx: ctx.all_reduce("SUM", given))
        largest = self._run(lambda ctx: ctx.all_reduce("MAX", rank))
        mean = self._run(lambda ctx: ctx.all_reduce("MEAN", float(rank)))
        for name, x in cases.items():
            found = sums[name]
            if found.dtype != x.dtype or not np.array_equal(found, x * factor):
                raise CheckFailedError(f"the sum of {name} is wrong", BUG)
        if largest != size - 1 or mean != (size - 1) / 2:
            raise CheckFailedError(
                f"MAX of the ranks is {largest}, MEAN is {mean}", BUG
            )
        return f"SUM of {', '.join(cases)}; MAX, MEAN"

    def gather(self) -> str:
        """Gather arrays of different lengths."""
        rank, size = self._job.rank, self._job.size
        expected = np.concatenate([np.full(r + 1, r) for r in range(size)])
        found = self._run(lambda ctx: ctx.all_gather(np.full(rank + 1, rank), 0))
        if not np.array_equal(found, expected):
            raise CheckFailedError(f"got {found.tolist()!r:.60}", BUG)
        return f"{len(expected)} rows of {size} ranks"

    def merge_call(self) -> str:
        """Have rank 0 command the others, and update a variable."""
        strategy, rank, size = self._strategy, self._job.rank, self._job.size
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
            strategy.extended.update(w, _assign, args=(total,))
            return sum(strategy.experimental_local_results(number))

        def replica(ctx: mpidist.ReplicaContext) -> Nest:
            return ctx.merge_call(merge_fn, (np.full(1000, float(rank)), rank))

        total = self._run(replica)
        expected = size * (size - 1) / 2
        if total != expected or not np.array_equal(w.numpy(), np.full(1000, expected)):
            raise CheckFailedError(f"rank 0 found {total}, expected {expected}", BUG)
        if len(calls) != (rank == 0):
            raise CheckFailedError("merge_fn did not run once, on rank 0 alone", BUG)
        return "merge_fn ran once, on rank 0; a variable was updated on all"

    def training(self) -> str:
        """Take one step with an optimizer."""
        strategy, size = self._strategy, self._job.size
        with strategy.scope():
            w = mpidist.Variable(np.ones(100, np.float32))
            sgd = mpidist.optimizers.SGD(learning_rate=0.5)
        gradient = strategy.array_module.full(100, 1 / size, np.float32)
        self._run(lambda ctx: sgd.apply_gradients([(gradient, w)]))
        if not np.allclose(w.numpy(), 0.5):
            raise CheckFailedError(f"the weights are {w.numpy()[:3]} ...", BUG)
        mpidist.check_in_sync(w)
        return "the copies of the weights are in sync"

    def mismatch(self) -> str:
        """Make calls that differ: an error on all ranks."""
        last = self._job.size - 1
        if last == 0:
            return "not tried: there is one rank"
        if not group_of(self._strategy).guard.enabled:
            return "not tried: MPIDIST_GUARD=0"
        try:  # one element more on the last rank
            rows = np.ones(3 + (self._job.rank == last))
            self._run(lambda ctx: ctx.all_reduce("SUM", rows))
        except mpidist.CollectiveMismatchError:
            return "CollectiveMismatchError on all ranks"
        raise CheckFailedError(
            "arrays of different shapes were added without an error", BUG
        )

    def exception(self) -> str:
        """Raise on one rank: all ranks learn of it."""
        if not group_of(self._strategy).guard.enabled:
            return "not tried: MPIDIST_GUARD=0"
        last = self._job.size - 1
        is_last = self._job.rank == last

        def replica(ctx: mpidist.ReplicaContext) -> Nest:
            if is_last:
                raise KeyError("on purpose")
            return ctx.all_reduce("SUM", 1.0)

        with contextlib.suppress(KeyError if is_last else mpidist.ReplicaError):
            self._run(replica)
            raise CheckFailedError(
                f"an exception on rank {last} did not reach this rank", BUG
            )
        return f"raised on rank {last}, and all ranks learned of it"

    def native_core(self) -> str | Note:
        """Say which ranks lack the native core, and why."""
        core = core_facts(self._job.comm.allgather(_native.missing))
        return Note(core["text"], core["advice"]) if core["advice"] else core["text"]

    def cuda_aware(self) -> str:
        """Say whether MPI accepts GPU arrays, as it says, and how they move."""
        facts, found = self._job.from_root((gpu_facts(), query_cuda_support()))
        if not facts["gpus"]:
            return f"not tried: {facts['reason']}"
        name = self._made and transport_facts(self._made)["gpu"]["name"]
        says = f"the MPI says so ({found})" if found else "the MPI does not say so"
        return f"{says}; GPU arrays are moved by: {name or 'nothing'}"

    def _run(self, replica: Callable[[mpidist.ReplicaContext], _T]) -> _T:
        """Run on all replicas; return the result of this rank's replica."""
        strategy = self._strategy
        result = strategy.run(lambda: replica(mpidist.get_replica_context()))
        found: tuple[_T, ...] = strategy.experimental_local_results(result)
        return found[0]


def _assign(variable: mpidist.Variable, value: HostArray) -> None:
    variable.assign(value)


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
    job = Job()
    checks = _Checks(job, given.timeout)
    system = SystemChecks(job)
    made: dict[str, Callable[[], str | Note]] = {
        "ranks": checks.ranks,
        "MPI library": system.libraries,
        "versions": checks.versions,
        "settings": checks.settings,
        "strategy": checks.strategy,
        "all_reduce": checks.all_reduce,
        "all_gather": checks.gather,
        "merge_call": checks.merge_call,
        "optimizer": checks.training,
        "mismatch": checks.mismatch,
        "exception": checks.exception,
        "native core": checks.native_core,
        "placement": system.spread,
        "cores": system.cores,
        "open files": system.open_files,
        "GPUs": system.gpus,
        "shared memory": system.shared_memory,
        "folder": lambda: check_folder(job, given.folder),
        "CUDA-aware MPI": checks.cuda_aware,
    }
    if given.folder is None:
        del made["folder"]
    alone = describe_stranger(job.size)
    if alone:  # the others would fail for this reason
        made = {"ranks": checks.ranks}
    outcomes = []
    for name, one in made.items():
        outcome = attempt(job, name, one)
        outcomes.append(outcome)
        if not given.json:
            say(f"{name:<15} {outcome.state:<6}  {outcome.text}")
            if outcome.state != OK and outcome.advice:
                say(f"{'':<15} {'':<6}  -> {outcome.advice}")
    checks.close()
    failed = sum(one.state == FAILED for one in outcomes)
    if given.json:
        rows = [dataclasses.asdict(one) for one in outcomes]
        say(json.dumps({"failed": failed, "checks": rows}, indent=1))
    elif failed:
        say(f"\n{failed} of {len(outcomes)} checks failed")
    else:
        say("\nall is well")
    job.free()
    if alone:
        let_the_first_speak()
    return 1 if failed else 0
