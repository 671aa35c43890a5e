"""Buckets: many leaves packed into few flat buffers, and their all-reduce.

The buckets of a signature are planned once: which leaf is at which offset of which
buffer, and which MPI operation reduces it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from mpidist._base import backend
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array, DType, Shape
from mpidist._engine import dtype_table
from mpidist._engine.compression import LEAST_BYTES, Compression
from mpidist._engine.transports import Transport, Transports
from mpidist._mpi.buffers import COMBINE
from mpidist._mpi.communicator import AnyCommunicator, Communicator, MPIOp

Results: TypeAlias = list[Any]
"""New arrays, one for each leaf; None for each on a rank that wants none."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a plan knows of a leaf: everything except its values."""

    shape: Shape
    reduction: dtype_table.Reduction
    on_device: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass
class Bucket:
    """Leaves in one buffer: their indices, and their offsets in it.

    With ``compression`` it is sent as 16-bit floats.
    """

    leaves: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int
    compression: Compression | None = None


class FlatBuffers:
    """Flat buffers that are kept between calls, one for each kind of device."""

    def __init__(self) -> None:
        self._kept: dict[bool, Array] = {}
        self._stream: backend.Stream = None

    def get(self, count: int, dtype: DType, near: Array) -> Array:
        """Return a flat buffer of ``count`` elements on the device of ``near``."""
        key = backend.is_device_array(near)
        if key:  # the last call may have used the buffer on another stream
            self._stream = backend.continue_from(self._stream)
        nbytes = count * dtype.itemsize
        kept = self._kept.get(key)
        if kept is None or kept.nbytes < nbytes:
            kept = self._kept[key] = backend.empty_like(near, (nbytes,), np.uint8)
        found: Array = kept[:nbytes].view(dtype)
        return found


def plan_buckets(
    leaves: list[Leaf],
    bytes_per_pack: int,
    compress: Callable[[], Compression] | None = None,
) -> list[Bucket]:
    """Divide leaves into buckets of at most ``bytes_per_pack``, in order, by dtype.

    A leaf that is larger than a bucket has its own.

    Args:
        leaves: to be reduced.
        bytes_per_pack: the maximum size of a bucket of several leaves.
        compress: makes the compression of a bucket whose leaves allow it.
    """
    groups: dict[tuple[DType, str, bool, bool], list[int]] = {}
    for index, leaf in enumerate(leaves):
        reduction = leaf.reduction
        lossy = compress is not None and reduction.compressible
        key = (reduction.wire, reduction.mpi, leaf.on_device, lossy)
        groups.setdefault(key, []).append(index)
    buckets: list[Bucket] = []

    def add(taken: list[int], offsets: list[int], used: int, lossy: bool) -> None:
        compression = compress() if lossy and compress is not None else None
        buckets.append(Bucket(tuple(taken), tuple(offsets), used, compression))

    for (wire, mpi, _, lossy), members in groups.items():
        room = max(1, bytes_per_pack // wire.itemsize)
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
    arrays: list[Array],
    buffers: FlatBuffers,
) -> None:
    """Allocate the memory of a bucket."""
    index = bucket.leaves[0]
    if len(bucket.leaves) > 1:
        buffers.get(bucket.size, leaves[index].reduction.wire, arrays[index])


def reduce_bucket(
    bucket: Bucket,
    leaves: list[Leaf],
    arrays: list[Array],
    transports: Transports,
    buffers: FlatBuffers,
    results: Results,
    root: int | None = None,
) -> None:
    """All-reduce the arrays of one bucket into the arrays in ``results``.

    Collective. The input arrays are not changed. With a ``root``, only that rank has
    results.
    """
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

    def combine(buffer: Array) -> None:
        compression = bucket.compression
        if compression is not None and _compresses(transport, buffer, operation):
            _reduce_compressed(buffer, compression, comm)
        elif root is None:
            transport.allreduce_in_place(buffer, operation)
        else:
            transport.reduce(buffer, operation, root)

    if len(bucket.leaves) == 1:
        (index,) = bucket.leaves
        send = backend.flat(backend.contiguous(arrays[index]))
        encoded = reduction.encode(send)
        if reduction.encoding == "none":
            received = (
                encoded if results[index] is None else backend.flat(results[index])
            )
            if root is None and bucket.compression is None:
                transport.allreduce(encoded, received, operation)
            else:
                if results[index] is not None:
                    received[...] = encoded
                elif bucket.compression is not None:
                    received = encoded.copy()  # which all ranks write to
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


def _compresses(transport: Transport, buffer: Array, operation: MPIOp) -> bool:
    """Whether the ranks send a buffer as 16-bit floats.

    For nests in the memory of nodes see `hierarchical_route`.
    """
    return (
        operation == "SUM"
        and buffer.nbytes > LEAST_BYTES
        and (transport.name == "staged" or not backend.is_device_array(buffer))
    )


def _reduce_compressed(
    buffer: Array, compression: Compression, comm: AnyCommunicator
) -> None:
    """All-reduce a buffer in place, through the host, as 16-bit floats."""
    assert isinstance(comm, Communicator)  # between nodes
    comm.traffic.count("Allreduce", buffer.nbytes)
    host = backend.to_host(buffer)
    compression.begin().allreduce(comm.buffers, host)
    if host is not buffer:
        backend.fill(buffer, host)


def _reduce_gathered(
    x: Array, reduction: dtype_table.Reduction, transports: Transports
) -> Array:
    """Gather all values and combine them in rank order, if MPI cannot reduce them."""
    size = transports.host.comm.size
    send = backend.as_bytes(backend.contiguous(x))
    receive = backend.empty_like(send, (send.size * size,), np.uint8)
    transports.of(x).all_gather(send, receive, [send.size] * size)
    values = backend.from_bytes(receive, x.dtype, (size, *x.shape))
    combine: Callable[..., Array] = COMBINE[reduction.combining].reduce
    combined = combine(values, axis=0)
    return combined.reshape(x.shape)
