"""Many leaves in few flat buffers: the plan of an all-reduce, and its execution.

A plan is made once for each (operation, structure, shapes, dtypes) and kept: it
knows which leaf goes to which place of which buffer, and what MPI is asked to do.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from mpidist import _arrays, _dtypes
from mpidist._comm import MPIOp
from mpidist._options import ReduceOp
from mpidist._transports import (
    LINE,
    Compression,
    DirectTransport,
    Schedule,
    Transports,
)

_NUMPY_COMBINE: Final = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a plan knows of a leaf: everything but its values."""

    shape: tuple[int, ...]
    reduction: _dtypes.Reduction
    on_device: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_plain(self) -> bool:
        """Whether NumPy can reduce it as it is, in lines of the cache."""
        reduction = self.reduction
        return (
            reduction.encoding == "none"
            and reduction.mpi != "gather"
            and not self.on_device
            and self.size > 0
            and LINE % reduction.wire.itemsize == 0
        )


@dataclasses.dataclass
class Bucket:
    """Leaves that travel in one buffer: their indices, and their places in it.

    ``schedule`` is kept here once it has been made (`_reduce_stream`).
    With ``compression`` it is made smaller between nodes.
    """

    leaves: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int
    compression: Compression | None = None
    schedule: Schedule | None = None


class FlatBuffers:
    """Flat buffers that are kept from call to call, one for each kind of array."""

    def __init__(self) -> None:
        self._kept: dict[bool, Any] = {}
        self._stream: Any = None

    def get(self, count: int, dtype: Any, near: Any) -> Any:
        """Return a flat buffer of ``count`` elements, where the array ``near`` is."""
        key = _arrays.is_device_array(near)
        if key:  # the last call may have used the buffer on another stream
            self._stream = _arrays.continue_from(self._stream)
        nbytes = count * dtype.itemsize
        kept = self._kept.get(key)
        if kept is None or kept.nbytes < nbytes:
            kept = self._kept[key] = _arrays.empty_like(near, (nbytes,), np.uint8)
        return kept[:nbytes].view(dtype)


def plan_buckets(
    leaves: list[Leaf],
    bytes_per_pack: int,
    compress: Callable[[], Compression] | None = None,
    *,
    streams: bool = False,
) -> list[Bucket]:
    """Deal leaves to buckets of at most ``bytes_per_pack``, in order, by dtype.

    A leaf that is larger than a bucket has one of its own.

    Args:
        leaves: what is to be reduced.
        bytes_per_pack: the most bytes of a bucket of several leaves.
        compress: makes the compression of a bucket of leaves that allow for one.
        streams: whether host arrays go as a stream: then all of a dtype are one
            bucket, which needs no memory.
    """
    groups: dict[tuple[Any, str, bool, bool], list[int]] = {}
    for index, leaf in enumerate(leaves):
        reduction = leaf.reduction
        lossy = compress is not None and reduction.compressible
        key = (reduction.wire, reduction.mpi, leaf.on_device, lossy)
        groups.setdefault(key, []).append(index)
    buckets: list[Bucket] = []

    def add(taken: list[int], offsets: list[int], used: int, lossy: bool) -> None:
        compression = compress() if lossy and compress is not None else None
        buckets.append(Bucket(tuple(taken), tuple(offsets), used, compression))

    for (wire, mpi, on_device, lossy), members in groups.items():
        room = max(1, bytes_per_pack // wire.itemsize)
        if streams and not on_device:
            room = sys.maxsize
        taken: list[int] = []
        offsets: list[int] = []
        used = 0
        for index in members:
            size = leaves[index].size
            if taken and (used + size > room or mpi == "gather"):
                add(taken, offsets, used, lossy)
                taken, offsets, used = [], [], 0
            taken.append(index)
            offsets.append(used)
            used += size
        add(taken, offsets, used, lossy)
    return buckets


def reserve(
    bucket: Bucket,
    leaves: list[Leaf],
    arrays: list[Any],
    buffers: FlatBuffers,
    transports: Transports,
) -> None:
    """Allocate what a bucket will need; may replace arrays by contiguous ones."""
    index = bucket.leaves[0]
    if _streams(bucket, leaves, transports.of(arrays[index])):
        for index in bucket.leaves:
            arrays[index] = _arrays.contiguous(arrays[index])
    elif len(bucket.leaves) > 1:
        buffers.get(bucket.size, leaves[index].reduction.wire, arrays[index])


def reduce_bucket(
    bucket: Bucket,
    leaves: list[Leaf],
    arrays: list[Any],
    transports: Transports,
    buffers: FlatBuffers,
    results: list[Any],
    root: int | None = None,
) -> None:
    """All-reduce the arrays of one bucket into the arrays in ``results``.

    Collective. The input arrays are not changed. With a ``root``, only that rank has
    results, and only it gets them.
    """
    host = transports.host
    if bucket.compression is None:
        _reduce_bucket(bucket, leaves, arrays, transports, buffers, results, root)
        return
    host.compression = bucket.compression.begin()
    try:
        _reduce_bucket(bucket, leaves, arrays, transports, buffers, results, root)
    finally:
        host.compression = None


def _reduce_bucket(
    bucket: Bucket,
    leaves: list[Leaf],
    arrays: list[Any],
    transports: Transports,
    buffers: FlatBuffers,
    results: list[Any],
    root: int | None,
) -> None:
    comm = transports.host.comm
    first = arrays[bucket.leaves[0]]
    reduction = leaves[bucket.leaves[0]].reduction
    to_here = root is None or comm.rank == root
    if reduction.mpi == "gather":
        (index,) = bucket.leaves
        gathered = _reduce_gathered(arrays[index], reduction, transports)
        results[index] = gathered if to_here else None
        return
    transport = transports.of(first)
    operation: MPIOp = reduction.mpi
    if root is None and _streams(bucket, leaves, transport):
        _reduce_stream(bucket, leaves, arrays, transport, results, operation)
        return

    def combine(buffer: Any) -> None:
        if root is None:
            transport.allreduce_in_place(buffer, operation)
        else:
            transport.reduce(buffer, operation, root)

    if len(bucket.leaves) == 1:
        (index,) = bucket.leaves
        send = _arrays.flat(_arrays.contiguous(arrays[index]))
        encoded = reduction.encode(send)
        if reduction.encoding == "none":
            received = (
                encoded if results[index] is None else _arrays.flat(results[index])
            )
            if root is None:
                transport.allreduce(encoded, received, operation)
            else:
                if to_here:
                    received[...] = encoded
                combine(received)
            if reduction.op is ReduceOp.MEAN and to_here:
                reduction.decode(received, comm.size, received)
            return
        if reduction.encoding == "bool":
            encoded = encoded.copy()  # a view of the user's array
        combine(encoded)
        if to_here:
            part = encoded.reshape(leaves[index].shape)
            reduction.decode(part, comm.size, results[index])
        return
    packed = buffers.get(bucket.size, reduction.wire, first)
    places = [
        (index, packed[offset : offset + leaves[index].size])
        for index, offset in zip(bucket.leaves, bucket.offsets, strict=True)
    ]
    for index, part in places:
        leaf = leaves[index]
        leaf.reduction.encode(arrays[index], part.reshape(leaf.shape))
    combine(packed)
    if to_here:
        for index, offset in zip(bucket.leaves, bucket.offsets, strict=True):
            leaf = leaves[index]
            part = packed[offset : offset + leaf.size].reshape(leaf.shape)
            leaf.reduction.decode(part, comm.size, results[index])


def _streams(bucket: Bucket, leaves: list[Leaf], transport: Any) -> bool:
    """Whether a bucket goes as a stream, which needs no buffer."""
    if not isinstance(transport, DirectTransport):
        return False
    reduction = leaves[bucket.leaves[0]].reduction
    if reduction.mpi == "gather":
        return False
    return transport.streams(
        bucket.size * int(reduction.wire.itemsize),
        compressed=bucket.compression is not None,
    )


def _reduce_stream(
    bucket: Bucket,
    leaves: list[Leaf],
    arrays: list[Any],
    transport: Any,
    results: list[Any],
    operation: MPIOp,
) -> None:
    """All-reduce through shared memory, where leaves need no buffer of their own."""
    size = transport.comm.size
    each = [leaves[index].reduction for index in bucket.leaves]
    sends = [_arrays.flat(arrays[index]) for index in bucket.leaves]
    receives = [_arrays.flat(results[index]) for index in bucket.leaves]
    schedule = bucket.schedule
    if schedule is None:
        sizes = tuple(leaves[index].size for index in bucket.leaves)
        schedule = transport.stream.schedule(sizes, each[0].wire)
        bucket.schedule = schedule
    transport.comm.traffic.count("Allreduce", bucket.size * each[0].wire.itemsize)
    if all(reduction.encoding == "none" for reduction in each):
        divisor = size if each[0].op is ReduceOp.MEAN else None
        transport.stream.reduce(schedule, sends, receives, operation, divisor)
        return
    transport.stream.reduce(
        schedule,
        sends,
        receives,
        operation,
        None,
        lambda leaf, x, out: each[leaf].encode(x, out),
        lambda leaf, reduced, out: each[leaf].decode(reduced, size, out),
    )


def _reduce_gathered(
    x: Any, reduction: _dtypes.Reduction, transports: Transports
) -> Any:
    """Reduce what MPI can not: gather all values, combine them in rank order."""
    size = transports.host.comm.size
    send = _arrays.as_bytes(_arrays.contiguous(x))
    receive = _arrays.empty_like(send, (send.size * size,), np.uint8)
    transports.of(x).all_gather(send, receive, [send.size] * size)
    values = _arrays.from_bytes(receive, x.dtype, (size, *x.shape))
    return _NUMPY_COMBINE[reduction.op].reduce(values, axis=0).reshape(x.shape)
