"""The benchmarks of moving arrays: all_reduce, nest and gather."""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np

import mpidist
from mpidist._bench import _torch
from mpidist._bench._contest import Contestant
from mpidist._bench._raw import PackedAllReduce
from mpidist._bench._results import COPY
from mpidist._bench._session import NO_GUARD, OURS, RESIDENT, Session
from mpidist._bench._shapes import MODELS
from mpidist._bench._units import show_size

IN_PLACE: Final = "mpi4py in place"
OUT_OF_PLACE: Final = "mpi4py out of place"
PACKED: Final = "mpi4py packed"
_KIB: Final = 2**10
_MIB: Final = 2**20
ALL_REDUCE_SIZES: Final = (
    *(4, _KIB, 16 * _KIB, 64 * _KIB, 256 * _KIB),
    *(_MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB),
)
GATHER_SIZES: Final = (4, _KIB, 16 * _KIB, 256 * _KIB, _MIB, 4 * _MIB)
_TITLES: Final = {"resnet50": "ResNet-50", "bert": "BERT-base", "mlp": "784-512-512-10"}


def all_reduce(session: Session) -> None:
    """Sum one contiguous float32 array of each size. Collective."""
    for nbytes in session.options.sizes or ALL_REDUCE_SIZES:
        count = max(1, nbytes // 4)
        if session.has_room(8 * 4 * count):
            _all_reduce(session, count)
        else:
            session.note(f"all_reduce of {show_size(nbytes)} left out: no memory")


def _all_reduce(session: Session, count: int) -> None:
    job = session.job
    comm, in_place, add = job.comm, job.mpi.IN_PLACE, job.mpi.SUM
    x, total = session.pattern(count), session.pattern_sum(count)
    y, z = x.copy(), np.empty_like(x)

    def right(result: Any) -> bool:
        return result.dtype == np.float32 and np.array_equal(result, total)

    def raw_in_place() -> Any:
        comm.Allreduce(in_place, y, add)
        return y

    def raw_out_of_place() -> Any:
        comm.Allreduce(x, z, add)
        return z

    guarded, unguarded = session.replicas, session.unguarded
    contestants = [
        session.copy(x, z),
        Contestant(IN_PLACE, raw_in_place, right, prepare=lambda: y.fill(0)),
        Contestant(OUT_OF_PLACE, raw_out_of_place, right),
        Contestant(OURS, lambda: guarded.all_reduce(x), right, guarded.within),
        Contestant(NO_GUARD, lambda: unguarded.all_reduce(x), right, unguarded.within),
    ]
    window = session.resident(x)
    if window is not None:
        contestants.append(
            Contestant(
                RESIDENT, lambda: guarded.all_reduce(window), right, guarded.within
            )
        )
    if session.gloo is not None:
        gloo, tensor = session.gloo, session.gloo.tensor(x)
        contestants.append(
            Contestant(
                _torch.NAME,
                lambda: gloo.all_reduce(tensor),
                lambda result: right(result.numpy()),
                prepare=lambda: tensor.zero_(),
            )
        )
    session.contest(
        "all_reduce",
        show_size(4 * count),
        contestants,
        baseline=IN_PLACE,
        nbytes=4 * count,
        facts={"dtype": "float32"},
    )


def nest(session: Session) -> None:
    """Sum the gradients of known networks, a tensor each. Collective."""
    for name in session.options.models:
        shapes = MODELS[name]()
        nbytes = 4 * sum(int(np.prod(shape)) for shape in shapes)
        copies = 8 if session.gloo is None else 9
        if session.has_room(copies * nbytes):
            _nest(session, _TITLES[name], shapes, nbytes)
        else:
            session.note(
                f"nest of {_TITLES[name]} left out: it takes "
                f"{show_size(copies * nbytes)} on each rank, which are not free"
            )


def _nest(
    session: Session, title: str, shapes: list[tuple[int, ...]], nbytes: int
) -> None:
    counts = [int(np.prod(shape)) for shape in shapes]
    pairs = list(zip(counts, shapes, strict=True))
    gradients = [session.pattern(n).reshape(shape) for n, shape in pairs]
    out = [np.empty_like(g) for g in gradients]

    def right(result: Any) -> bool:
        return len(result) == len(shapes) and all(
            r.shape == shape and np.array_equal(r.reshape(-1), session.pattern_sum(n))
            for r, (n, shape) in zip(result, pairs, strict=True)
        )

    pack = PackedAllReduce(session.job, gradients)

    def packed() -> Any:
        pack(gradients, out)
        return out

    def copy() -> Any:
        for target, source in zip(out, gradients, strict=True):
            np.copyto(target, source)
        return out

    def copied(result: Any) -> bool:
        return all(map(np.array_equal, result, gradients))

    guarded = session.replicas
    contestants = [
        Contestant(COPY, copy, copied),
        Contestant(PACKED, packed, right),
        Contestant(OURS, lambda: guarded.all_reduce(gradients), right, guarded.within),
    ]
    for size in session.options.packs:
        options = mpidist.experimental.CommunicationOptions(bytes_per_pack=size)
        contestants.append(
            Contestant(
                f"{OURS}, {show_size(size)} packs",
                functools.partial(guarded.all_reduce, gradients, options),
                right,
                guarded.within,
            )
        )
    window = session.resident(gradients)
    if window is not None:
        contestants.append(
            Contestant(
                RESIDENT, lambda: guarded.all_reduce(window), right, guarded.within
            )
        )
    if session.gloo is not None:
        gloo, tensors = session.gloo, [session.gloo.tensor(g) for g in gradients]
        contestants.append(
            Contestant(
                _torch.NAME,
                lambda: gloo.all_reduce_coalesced(tensors),
                lambda result: right([tensor.numpy() for tensor in result]),
                prepare=lambda: [tensor.zero_() for tensor in tensors],
            )
        )
    session.contest(
        "nest",
        title,
        contestants,
        baseline=PACKED,
        nbytes=nbytes,
        seconds=6.0,
        facts={"dtype": "float32", "tensors": len(shapes), "numbers": nbytes // 4},
    )


def gather(session: Session) -> None:
    """Concatenate an array of each rank, on all. Collective."""
    for nbytes in session.options.sizes or GATHER_SIZES:
        count = max(1, nbytes // 4)
        if session.has_room(5 * 4 * count * session.job.size):
            _gather(session, count)
        else:
            session.note(f"gather of {show_size(nbytes)} left out: no memory")


def _gather(session: Session, count: int) -> None:
    job = session.job
    comm, size = job.comm, job.size
    x = session.pattern(count)
    base = session.pattern_sum(count) / np.float32(size * (size + 1) // 2)
    whole = np.concatenate([base * np.float32(rank + 1) for rank in range(size)])
    y, z = np.empty_like(whole), np.empty_like(whole)
    counts = [count] * size

    def right(result: Any) -> bool:
        return result.dtype == np.float32 and np.array_equal(result, whole)

    def even() -> Any:
        comm.Allgather(x, y)
        return y

    def uneven() -> Any:
        comm.Allgatherv(x, [z, counts])
        return z

    guarded, unguarded = session.replicas, session.unguarded
    contestants = [
        session.copy(whole, z),
        Contestant("mpi4py Allgather", even, right),
        Contestant("mpi4py Allgatherv", uneven, right),
        Contestant(OURS, lambda: guarded.all_gather(x), right, guarded.within),
        Contestant(NO_GUARD, lambda: unguarded.all_gather(x), right, unguarded.within),
    ]
    if session.gloo is not None:
        gloo, tensor = session.gloo, session.gloo.tensor(x)
        parts = [gloo.tensor(x) for _ in range(size)]
        contestants.append(
            Contestant(
                _torch.NAME,
                lambda: gloo.all_gather(parts, tensor),
                lambda result: right(np.concatenate([p.numpy() for p in result])),
            )
        )
    session.contest(
        "gather",
        f"{show_size(4 * count)} per rank",
        contestants,
        baseline="mpi4py Allgather",
        nbytes=4 * count * size,
        seconds=0.7,
        facts={"dtype": "float32", "bytes_per_rank": 4 * count},
    )
