"""The sum and the concatenation of one array, against `Allreduce` and `Allgather`."""

from __future__ import annotations

from typing import Final

import numpy as np

from mpidist._base.types import HostArray, Nest
from mpidist._bench.session import Session
from mpidist._bench.units import show_size

_KIB: Final = 2**10
_MIB: Final = 2**20
ALL_REDUCE_SIZES: Final = (
    *(4, _KIB, 16 * _KIB, 64 * _KIB, 256 * _KIB),
    *(_MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB),
)
ALL_GATHER_SIZES: Final = (4, _KIB, 16 * _KIB, 64 * _KIB, _MIB, 16 * _MIB)


def all_reduce(session: Session) -> None:
    """Sum one contiguous float32 array of each size over the ranks. Collective."""
    for nbytes in session.sizes or ALL_REDUCE_SIZES:
        if session.has_room(f"all_reduce of {show_size(nbytes)}", nbytes, copies=6):
            session.strategy.run(_all_reduce, (session, max(1, nbytes // 4)))


def _all_reduce(session: Session, count: int) -> None:
    comm, mpi = session.job.comm, session.job.mpi
    context = session.context()
    x, total = session.numbers(count), session.total(count)
    buffer = x.copy()

    def by_hand() -> HostArray:
        comm.Allreduce(mpi.IN_PLACE, buffer, mpi.SUM)
        return buffer

    def ours() -> Nest:
        return context.all_reduce("SUM", x)

    session.check(
        f"all_reduce of {show_size(x.nbytes)}",
        mpi4py=np.array_equal(by_hand(), total),
        mpidist=np.array_equal(ours(), total),
    )
    buffer.fill(0)  # sums of sums would overflow
    session.add("all_reduce", *session.measure(by_hand, ours), nbytes=x.nbytes)


def all_gather(session: Session) -> None:
    """Concatenate a float32 array of each rank, on all ranks. Collective."""
    for nbytes in session.sizes or ALL_GATHER_SIZES:
        work = f"all_gather of {show_size(nbytes)} of each rank"
        if session.has_room(work, nbytes, copies=5 * session.job.size):
            session.strategy.run(_all_gather, (session, max(1, nbytes // 4)))


def _all_gather(session: Session, count: int) -> None:
    comm = session.job.comm
    context = session.context()
    x, whole = session.numbers(count), session.numbers_of_all(count)
    buffer = np.empty_like(whole)

    def by_hand() -> HostArray:
        comm.Allgather(x, buffer)
        return buffer

    def ours() -> Nest:
        return context.all_gather(x, 0)

    session.check(
        f"all_gather of {show_size(x.nbytes)} of each rank",
        mpi4py=np.array_equal(by_hand(), whole),
        mpidist=np.array_equal(ours(), whole),
    )
    session.add("all_gather", *session.measure(by_hand, ours), nbytes=x.nbytes)
