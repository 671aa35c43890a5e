"""Calls that move little or no data, and the update of variables in merge_fn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

import mpidist
from mpidist._base.types import HostArray, Nest
from mpidist._bench.session import Session

_ANSWER: Final = 42
_VARIABLES: Final = 20
_COUNT: Final = 50_000  # numbers of each
_RATE: Final = np.float32(2.0**-10)  # exact in float32, as the sums are


def run(session: Session) -> None:
    """Run an empty function on all replicas, against `Barrier`. Collective."""
    comm, strategy = session.job.comm, session.strategy

    def nothing() -> None:
        pass

    def ours() -> Nest:
        return strategy.run(nothing)

    session.check("empty run", mpidist=ours() is None)
    session.add("run", *session.measure(comm.Barrier, ours), work="empty run")


def merge_call(session: Session) -> None:
    """Have rank 0 compute a number, against `Barrier` and `Bcast`. Collective."""
    comm, rank = session.job.comm, session.job.rank
    message = np.zeros(1, np.int64)

    def by_hand() -> int:
        comm.Barrier()  # all replicas stop
        message[0] = _ANSWER if rank == 0 else 0
        comm.Bcast(message, 0)  # and receive rank 0's number
        return message[0]  # type: ignore[no-any-return]  # a NumPy integer

    def answer(strategy: mpidist.Strategy) -> int:
        return _ANSWER

    def replica() -> None:
        context = session.context()

        def ours() -> Nest:
            return context.merge_call(answer)

        work = "empty merge_call"
        session.check(work, mpi4py=by_hand() == _ANSWER, mpidist=ours() == _ANSWER)
        session.add("merge_call", *session.measure(by_hand, ours), work=work)

    session.strategy.run(replica)


def reduce(session: Session) -> None:
    """Sum a Python number of each replica, against `Allreduce`. Collective."""
    comm, mpi, strategy = session.job.comm, session.job.mpi, session.strategy
    mine = session.job.rank + 1.0
    expected = session.job.size * (session.job.size + 1) / 2
    send, receive = np.array([mine]), np.empty(1)
    value = strategy.run(lambda: mine)

    def by_hand() -> float:
        comm.Allreduce(send, receive, mpi.SUM)
        return receive[0]  # type: ignore[no-any-return]  # a NumPy float

    def ours() -> Nest:
        return strategy.reduce("SUM", value, axis=None)

    work = "reduce of a number"
    session.check(work, mpi4py=by_hand() == expected, mpidist=ours() == expected)
    session.add("reduce", *session.measure(by_hand, ours), work=work)


def update(session: Session) -> None:
    """Update 20 variables by gradients, in merge_fn and by hand. Collective."""
    comm, mpi, strategy = session.job.comm, session.job.mpi, session.strategy
    gradients = [session.numbers(_COUNT) for _ in range(_VARIABLES)]
    arrays = [np.zeros(_COUNT, np.float32) for _ in range(_VARIABLES)]
    total = np.empty(_COUNT, np.float32)
    with strategy.scope():
        variables = [mpidist.Variable(x) for x in arrays]

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

    def is_right(results: Sequence[HostArray | mpidist.Variable]) -> bool:
        after = -_RATE * session.total(_COUNT)
        return all(np.array_equal(np.asarray(x), after) for x in results)

    def replica() -> None:
        context = session.context()

        def ours() -> list[mpidist.Variable]:
            context.merge_call(merge_fn, tuple(gradients))
            return variables

        work = f"update of {_VARIABLES} x 50k floats"
        session.check(work, mpi4py=is_right(by_hand()), mpidist=is_right(ours()))
        nbytes = _VARIABLES * total.nbytes
        session.add("update", *session.measure(by_hand, ours), work=work, nbytes=nbytes)

    strategy.run(replica)
