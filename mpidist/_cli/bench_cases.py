"""The work that `mpidist bench` times: each by hand with mpi4py, and by mpidist.

Each case is one function, which checks the results of both and adds rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

import mpidist
from mpidist._base.types import HostArray
from mpidist._cli.bench_timing import Bench
from mpidist._cli.units import show_size

_KIB: Final = 2**10
_MIB: Final = 2**20
_NESTS: Final = ((20, _KIB), (100, _MIB))  # arrays, and bytes of each
_ANSWER: Final = 42
_VARIABLES: Final = 20
_COUNT: Final = 50_000  # numbers of each variable
_RATE: Final = np.float32(2.0**-10)  # exact in float32, as the sums are

Case = Callable[[Bench], None]


def in_replicas(case: Callable[..., None]) -> Callable[..., None]:
    """Return a case that runs as a replica function of the strategy."""

    @functools.wraps(case)
    def run(bench: Bench, *arguments: Any) -> None:
        bench.strategy.run(case, (bench, *arguments))

    return run


def all_reduce(bench: Bench) -> None:
    """Sum one contiguous float32 array of each size over the ranks. Collective."""
    for nbytes in bench.all_reduce_sizes:
        if bench.has_room(f"all_reduce of {show_size(nbytes)}", nbytes, copies=6):
            _all_reduce(bench, max(1, nbytes // 4))


@in_replicas
def _all_reduce(bench: Bench, count: int) -> None:
    comm, mpi, context = bench.job.comm, bench.job.mpi, bench.context()
    x = bench.numbers(count)
    buffer = x.copy()

    def by_hand() -> HostArray:
        comm.Allreduce(mpi.IN_PLACE, buffer, mpi.SUM)
        return buffer

    def ours() -> Any:
        return context.all_reduce("SUM", x)

    bench.check(
        f"all_reduce of {show_size(x.nbytes)}",
        mpi4py=bench.are_sums([by_hand()]),
        mpidist=bench.are_sums([ours()]),
    )
    buffer.fill(0)  # sums of sums would overflow
    bench.row("all_reduce", by_hand, ours, nbytes=x.nbytes)


def all_gather(bench: Bench) -> None:
    """Concatenate a float32 array of each rank, on all ranks. Collective."""
    for nbytes in bench.all_gather_sizes:
        work = f"all_gather of {show_size(nbytes)} of each rank"
        if bench.has_room(work, nbytes, copies=5 * bench.job.size):
            _all_gather(bench, max(1, nbytes // 4), work)


@in_replicas
def _all_gather(bench: Bench, count: int, work: str) -> None:
    comm, context = bench.job.comm, bench.context()
    x, whole = bench.numbers(count), bench.numbers_of_all(count)
    buffer = np.empty_like(whole)

    def by_hand() -> HostArray:
        comm.Allgather(x, buffer)
        return buffer

    def ours() -> Any:
        return context.all_gather(x, 0)

    bench.check(
        work,
        mpi4py=np.array_equal(by_hand(), whole),
        mpidist=np.array_equal(ours(), whole),
    )
    bench.row("all_gather", by_hand, ours, nbytes=x.nbytes)


def packed(bench: Bench, arrays: Sequence[HostArray]) -> Callable[[], list[HostArray]]:
    """Return a function that packs, calls one `Allreduce` in place, and unpacks.

    This is what a careful user writes by hand: the flat buffer and the arrays for the
    sums are allocated once.
    """
    comm, mpi = bench.job.comm, bench.job.mpi
    flat = np.empty(sum(x.size for x in arrays), np.float32)
    out = [np.empty_like(x) for x in arrays]
    ends = np.cumsum([x.size for x in arrays])[:-1]
    views = [
        part.reshape(x.shape)
        for part, x in zip(np.split(flat, ends), arrays, strict=True)
    ]

    def call() -> list[HostArray]:
        for view, x in zip(views, arrays, strict=True):
            np.copyto(view, x)
        comm.Allreduce(mpi.IN_PLACE, flat, mpi.SUM)
        for view, x in zip(views, out, strict=True):
            np.copyto(x, view)
        return out

    return call


def nest(bench: Bench) -> None:
    """Sum many arrays in one call, as the gradients of a network. Collective."""
    for count, nbytes in _NESTS:
        work = f"{count} arrays of {show_size(nbytes)}"
        if bench.has_room(work, count * nbytes, copies=8):
            _nest(bench, work, [bench.numbers(nbytes // 4) for _ in range(count)])


@in_replicas
def _nest(bench: Bench, work: str, arrays: list[HostArray]) -> None:
    context, by_hand = bench.context(), packed(bench, arrays)

    def ours() -> Any:
        return context.all_reduce("SUM", arrays)

    bench.check(work, mpi4py=bench.are_sums(by_hand()), mpidist=bench.are_sums(ours()))
    nbytes = sum(x.nbytes for x in arrays)
    bench.row("nest", by_hand, ours, work=work, nbytes=nbytes)


def run(bench: Bench) -> None:
    """Run an empty function on all replicas, against `Barrier`. Collective."""

    def nothing() -> None:
        pass

    def ours() -> Any:
        return bench.strategy.run(nothing)

    bench.check("empty run", mpidist=ours() is None)
    bench.row("run", bench.job.comm.Barrier, ours, work="empty run")


@in_replicas
def merge_call(bench: Bench) -> None:
    """Have rank 0 compute a number, against `Barrier` and `Bcast`. Collective."""
    comm, rank, context = bench.job.comm, bench.job.rank, bench.context()
    message = np.zeros(1, np.int64)

    def by_hand() -> int:
        comm.Barrier()  # all replicas stop
        message[0] = _ANSWER if rank == 0 else 0
        comm.Bcast(message, 0)  # and receive rank 0's number
        return int(message[0])

    def answer(strategy: mpidist.Strategy) -> int:
        return _ANSWER

    def ours() -> Any:
        return context.merge_call(answer)

    work = "empty merge_call"
    bench.check(work, mpi4py=by_hand() == _ANSWER, mpidist=ours() == _ANSWER)
    bench.row("merge_call", by_hand, ours, work=work)


def reduce(bench: Bench) -> None:
    """Sum a Python number of each replica, against `Allreduce`. Collective."""
    comm, mpi = bench.job.comm, bench.job.mpi
    mine = bench.job.rank + 1.0
    expected = bench.job.size * (bench.job.size + 1) / 2
    send, receive = np.array([mine]), np.empty(1)
    value = bench.strategy.run(lambda: mine)

    def by_hand() -> float:
        comm.Allreduce(send, receive, mpi.SUM)
        return float(receive[0])

    def ours() -> Any:
        return bench.strategy.reduce("SUM", value, axis=None)

    work = "reduce of a number"
    bench.check(work, mpi4py=by_hand() == expected, mpidist=ours() == expected)
    bench.row("reduce", by_hand, ours, work=work)


def update(bench: Bench) -> None:
    """Update 20 variables by gradients, in merge_fn and by hand. Collective."""
    with bench.strategy.scope():
        zeros = np.zeros(_COUNT, np.float32)
        variables = [mpidist.Variable(zeros) for _ in range(_VARIABLES)]
    _update(bench, variables)


@in_replicas
def _update(bench: Bench, variables: list[mpidist.Variable]) -> None:
    comm, mpi, context = bench.job.comm, bench.job.mpi, bench.context()
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

    def is_right(results: Sequence[HostArray | mpidist.Variable]) -> bool:
        after = -_RATE * bench.total(_COUNT)
        return all(np.array_equal(np.asarray(x), after) for x in results)

    work = f"update of {_VARIABLES} x 50k floats"
    bench.check(work, mpi4py=is_right(by_hand()), mpidist=is_right(ours()))
    bench.row("update", by_hand, ours, work=work, nbytes=_VARIABLES * total.nbytes)


def strategy(bench: Bench) -> None:
    """Make an MPIStrategy, against a duplicate of a communicator. Collective."""
    made: list[Any] = []

    def by_hand() -> None:
        made.append(bench.job.comm.Dup())

    def ours() -> None:
        made.append(mpidist.MPIStrategy(device="cpu"))

    def undo() -> None:
        one = made.pop()
        if isinstance(one, mpidist.MPIStrategy):
            one.close()
        else:
            one.Free()

    bench.row("strategy", by_hand, ours, work="making an MPIStrategy", after=undo)


CASES: Final[dict[str, Case]] = {
    "all_reduce": all_reduce,
    "nest": nest,
    "all_gather": all_gather,
    "run": run,
    "merge_call": merge_call,
    "reduce": reduce,
    "update": update,
    "strategy": strategy,
}
