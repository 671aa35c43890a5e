"""The sums of many arrays at once, against packing them by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from mpidist._base.types import HostArray, Nest, Shape
from mpidist._bench.job import Job
from mpidist._bench.session import Session
from mpidist._bench.shapes import MODELS

_SMALL: Final[list[Shape]] = [(256,)] * 20
_SLOWER: Final = 5.0  # a network is measured this many times as long as an array


def packed(job: Job, arrays: Sequence[HostArray]) -> Callable[[], list[HostArray]]:
    """Return a function that packs, calls one `Allreduce` in place, and unpacks.

    This is what a careful user writes by hand: the flat buffer and the arrays for the
    sums are allocated once.
    """
    comm, in_place, add = job.comm, job.mpi.IN_PLACE, job.mpi.SUM
    flat = np.empty(sum(x.size for x in arrays), np.float32)
    out = [np.empty_like(x) for x in arrays]
    ends = np.cumsum([x.size for x in arrays])
    views = [
        flat[end - x.size : end].reshape(x.shape)
        for x, end in zip(arrays, ends, strict=True)
    ]

    def call() -> list[HostArray]:
        for view, x in zip(views, arrays, strict=True):
            np.copyto(view, x)
        comm.Allreduce(in_place, flat, add)
        for view, x in zip(views, out, strict=True):
            np.copyto(x, view)
        return out

    return call


def small_nest(session: Session) -> None:
    """Sum 20 arrays of 256 float32 numbers in one call. Collective."""
    arrays = [session.numbers(math.prod(shape)) for shape in _SMALL]
    by_hand = packed(session.job, arrays)

    def replica() -> None:
        context = session.context()

        def ours() -> Nest:
            return context.all_reduce("SUM", arrays)

        work = f"{len(arrays)} arrays of 1 KiB"
        session.check(
            work,
            mpi4py=_are_sums(session, by_hand()),
            mpidist=_are_sums(session, ours()),
        )
        times = session.measure(by_hand, ours)
        nbytes = sum(x.nbytes for x in arrays)
        session.add("small_nest", *times, work=work, nbytes=nbytes)

    session.strategy.run(replica)


def nest(session: Session) -> None:
    """Sum the gradients of ResNet-50 and of BERT-base, as lists. Collective."""
    for name, shapes in MODELS.items():
        nbytes = sum(4 * math.prod(shape) for shape in shapes())
        if session.has_room(name, nbytes, copies=8):
            _network(session, name, shapes())


def _network(session: Session, name: str, shapes: list[Shape]) -> None:
    gradients = [session.numbers(math.prod(shape)).reshape(shape) for shape in shapes]
    buffers = session.strategy.buffers_like(gradients)  # other ranks read these
    for buffer, gradient in zip(buffers, gradients, strict=True):
        buffer[...] = gradient
    by_hand = packed(session.job, gradients)

    def replica() -> None:
        context = session.context()

        def ours() -> Nest:
            return context.all_reduce("SUM", gradients)

        def in_buffers() -> Nest:
            return context.all_reduce("SUM", buffers)

        session.check(
            name,
            mpi4py=_are_sums(session, by_hand()),
            mpidist=_are_sums(session, ours()),
            buffers_like=_are_sums(session, in_buffers()),
        )
        raw, *times = session.measure(by_hand, ours, in_buffers, times=_SLOWER)
        nbytes = sum(x.nbytes for x in gradients)
        for kind, time in zip(("nest", "nest in buffers_like"), times, strict=True):
            work = f"{name} {kind}"
            session.add("nest", raw, time, work=work, nbytes=nbytes, aim=kind)

    session.strategy.run(replica)


def _are_sums(session: Session, arrays: Sequence[HostArray]) -> bool:
    return all(np.array_equal(x.reshape(-1), session.total(x.size)) for x in arrays)
