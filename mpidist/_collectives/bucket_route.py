"""The route that accepts everything: a header, then buckets by the transports.

For nests that other routes do not accept: without the core, large nests between nodes
of few ranks, GPU buffers that NCCL or MPI moves, operations that the core lacks. Leaves
are packed into few flat buffers, which a transport reduces. They are planned once:
which leaf is at which offset of which buffer, and which MPI operation reduces it.
Large leaves on the host are not packed, or, if they travel as another dtype, packed in
parts. Buffers move together, in pieces, and those that have arrived are divided while
others are moving (`BufferCollectives.allreduce`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from mpidist._base import backend
from mpidist._base.reduce_op import MPIOp, ReduceOp
from mpidist._base.types import Array, DType
from mpidist._collectives.compression import Compression
from mpidist._collectives.dtype_table import Reduction
from mpidist._collectives.plan import Leaf, PreparedPlan, Results, Signature
from mpidist._collectives.resources import Resources
from mpidist._collectives.transports import Transport
from mpidist._mpi.allreduce_algorithm import LEAST_EXCHANGED
from mpidist._mpi.buffers import BufferReduction
from mpidist._mpi.communicator import Communicator

# Bytes of a leaf on the host that has its own bucket, if it can be reduced from where
# it is.
_LEAST_UNPACKED: Final = LEAST_EXCHANGED
_BYTES: Final = np.dtype(np.uint8)
_Compress: TypeAlias = Callable[[], Compression]


@dataclasses.dataclass
class Bucket:
    """Leaves in one buffer: their indices, and their offsets in it.

    Attributes:
        wire: the dtype of the buffer.
        operation: of MPI.
        compression: of a buffer that is sent as 16-bit floats.
        is_direct: whether it is one leaf that is reduced from the array to the result.
        part: what it has of its one leaf; None: others may join its leaves, all whole.
    """

    leaves: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int
    wire: DType
    operation: MPIOp
    compression: Compression | None = None
    is_direct: bool = False
    part: slice | None = None


def plan_buckets(
    leaves: list[Leaf],
    bytes_per_pack: int,
    compress: _Compress | None = None,
    root: int | None = None,
) -> list[Bucket]:
    """Divide leaves into buckets of at most ``bytes_per_pack``, by dtype.

    One that is larger is cut into several, unless it is reduced from where it is: then
    it has its own, as a large one on the host has. Those come first.

    Args:
        leaves: to be reduced.
        bytes_per_pack: the maximum size of a bucket of several leaves; of a part of one
            it is at least 1 MiB.
        compress: makes the compression of a bucket of leaves that are `compressible`.
        root: the one rank that wants the results, from packed leaves; None: all do.
    """
    groups: dict[tuple[DType, MPIOp, bool, _Compress | None], list[int]] = {}
    for index, leaf in enumerate(leaves):
        reduction, lossy = leaf.reduction, compress if leaf.compressible else None
        key = (reduction.wire, reduction.combining, leaf.on_device, lossy)
        groups.setdefault(key, []).append(index)
    buckets: list[Bucket] = []
    for (wire, operation, on_device, lossy), members in groups.items():
        room = max(1, bytes_per_pack // wire.itemsize)
        most = max(room, _LEAST_UNPACKED // wire.itemsize)
        new = functools.partial(Bucket, wire=wire, operation=operation)
        bucket: Bucket | None = None
        first = len(buckets)
        for index in members:
            size, plain = leaves[index].size, _is_plain(leaves[index], root, lossy)
            is_large = size * wire.itemsize >= _LEAST_UNPACKED and not on_device
            if is_large if plain else size > most:  # alone
                step = size if plain else most
                for start in range(0, size, step):
                    part = slice(start, min(start + step, size))
                    buckets.append(new((index,), (0,), part.stop - start, part=part))
                continue
            if bucket is None or bucket.size + size > room:
                bucket = new((), (), 0)
                buckets.append(bucket)
            bucket.leaves += (index,)
            bucket.offsets += (bucket.size,)
            bucket.size += size
        for bucket in buckets[first:]:
            if lossy is not None:
                bucket.compression = lossy()
            leaf, alone = leaves[bucket.leaves[0]], len(bucket.leaves) == 1
            bucket.is_direct = alone and _is_plain(leaf, root, lossy)
    return sorted(buckets, key=lambda bucket: not bucket.is_direct)


def _is_plain(leaf: Leaf, root: int | None, lossy: object) -> bool:
    """Return whether a leaf can be reduced from the array to the result."""
    return root is None and lossy is None and leaf.reduction.encoding == "none"


class _Call(NamedTuple):
    arrays: list[Array]
    results: Results
    packed: dict[bool, Array]  # memory for packed buckets, on the host and on the GPU


class BucketReduce(PreparedPlan[_Call]):
    """All-reduces nests by buckets."""

    def __init__(self, resources: Resources, signature: Signature, route: str) -> None:
        super().__init__(resources, signature.call)
        self.route = route
        self._pool = resources.pool
        self._leaves = signature.leaves
        self._root = signature.root
        self._transports = signature.transports
        self._wanted = signature.root in (None, resources.comm.rank)
        self._buckets = plan_buckets(
            signature.leaves,
            signature.bytes_per_pack,
            signature.compress,
            signature.root,
        )
        # Of the largest bucket that is packed, on the host and on the GPU: its bytes,
        # and a leaf that is in the same kind of memory.
        self._packed: dict[bool, tuple[int, int]] = {}
        self._cut = {x.leaves[0] for x in self._buckets if x.part and not x.is_direct}
        for bucket in self._buckets:
            if not bucket.is_direct:
                index = bucket.leaves[0]
                on_device = self._leaves[index].on_device
                nbytes = bucket.size * bucket.wire.itemsize
                largest = self._packed.get(on_device, (0, 0))
                self._packed[on_device] = max(largest, (nbytes, index))

    def _prepare(self, arrays: list[Array]) -> _Call:
        self._transports.device.check()
        packed = {
            on_device: self._pool.empty_like(arrays[index], (nbytes,), _BYTES)
            for on_device, (nbytes, index) in self._packed.items()
        }
        for index in self._cut:
            arrays[index] = backend.flat(backend.contiguous(arrays[index]))
        if not self._wanted:
            return _Call(arrays, [None] * len(arrays), packed)
        results = [
            self._pool.empty_like(x, leaf.shape, leaf.reduction.result)
            for x, leaf in zip(arrays, self._leaves, strict=True)
        ]
        return _Call(arrays, results, packed)

    def _move(self, work: _Call) -> Results:
        # Of each transport: what moves together. One of them is packed, since all
        # buckets are packed into the same memory.
        together: dict[Transport, list[BufferReduction]] = {}
        for bucket in self._buckets:
            transport = self._transports.of(work.arrays[bucket.leaves[0]])
            if bucket.is_direct:
                reduction = self._unpacked(bucket.leaves[0], work)
                together.setdefault(transport, []).append(reduction)
                continue
            packed = self._pack(bucket, work)
            if self._root is not None:
                transport.reduce(packed.receive, packed.op, self._root)
                packed.conclude()
            elif bucket.compression is not None:
                assert isinstance(self._comm, Communicator)  # between nodes
                self._comm.traffic.count("Allreduce", packed.receive.nbytes)
                bucket.compression.begin().allreduce(
                    self._comm.buffers, backend.to_host(packed.receive)
                )
                packed.conclude()
            else:
                transport.allreduce([*together.pop(transport, []), packed])
        for transport, reductions in together.items():
            transport.allreduce(reductions)
        return work.results

    def _unpacked(self, index: int, work: _Call) -> BufferReduction:
        x, result = work.arrays[index], work.results[index]
        reduction = self._leaves[index].reduction
        # C's long and long long may be one dtype, but are two of MPI's types.
        wire = reduction.wire
        source, target = None, backend.flat(result)
        if x.flags.c_contiguous and getattr(x.flags, "aligned", True):
            source = backend.flat(x).view(wire)
        else:
            result[...] = x

        def divide(part: slice) -> None:
            reduction.decode(target[part], self._comm.size, target[part])

        then = divide if reduction.op is ReduceOp.MEAN else None
        return BufferReduction(source, target.view(wire), reduction.combining, then)

    def _pack(self, bucket: Bucket, work: _Call) -> BufferReduction:
        memory = work.packed[self._leaves[bucket.leaves[0]].on_device]
        packed = memory[: bucket.size * bucket.wire.itemsize].view(bucket.wire)
        parts: list[tuple[int, Reduction, Array]] = []
        for index, offset in zip(bucket.leaves, bucket.offsets, strict=True):
            x = work.arrays[index]
            x = x if bucket.part is None else x[bucket.part]
            part = packed[offset : offset + x.size].reshape(x.shape)
            reduction = self._leaves[index].reduction
            reduction.encode(x, part)
            parts.append((index, reduction, part))

        def unpack(moved: slice) -> None:
            if self._wanted and moved.stop >= bucket.size:
                for index, reduction, part in parts:
                    out = work.results[index]
                    if bucket.part is not None:
                        out = backend.flat(out)[bucket.part]
                    reduction.decode(part, self._comm.size, out)

        return BufferReduction(None, packed, bucket.operation, unpack)


def buckets(resources: Resources, signature: Signature) -> BucketReduce | None:
    """Return the plan of a nest on GPUs that NCCL or a CUDA-aware MPI reduces."""
    transport = signature.transports.device
    reductions = [leaf.reduction for leaf in signature.leaves if leaf.on_device]
    if not reductions or not all(
        transport.supports(r.wire, r.combining) for r in reductions
    ):
        return None
    return BucketReduce(resources, signature, transport.name)


def mpi(resources: Resources, signature: Signature) -> BucketReduce:
    """Return the plan of any nest."""
    return BucketReduce(resources, signature, "mpi")
