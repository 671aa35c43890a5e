"""The work that `mpidist bench` times: by hand with mpi4py, and by mpidist.

Each case is one function. Developers have more of them, in `launch/benchmarks/`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

import mpidist
from mpidist import ReplicaContext
from mpidist._base.types import HostArray
from mpidist._cli.bench_timing import Bench, Row, show_size

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

    def nothing() -> None:
        pass

    ours = functools.partial(bench.strategy.run, nothing)
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

    def ours() -> Any:
        return bench.strategy.reduce("SUM", value, axis=None)

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
    made: list[Any] = []

    def by_hand() -> None:
        made.append(bench.job.comm.Dup())

    def ours() -> None:
        made.append(mpidist.MPIStrategy(device="cpu"))

    def undo() -> None:
        one = made.pop()
        end = one.close if isinstance(one, mpidist.MPIStrategy) else one.Free
        end()

    timings = bench.measure([by_hand, ours], undo)
    bench.add(Row("strategy", "making an MPIStrategy", None, *timings))


CASES: Final[dict[str, Case]] = {
    case.__name__: case
    for case in (
        *(all_reduce, nest, all_gather),
        *(run, merge_call, reduce, update, strategy),
    )
}
