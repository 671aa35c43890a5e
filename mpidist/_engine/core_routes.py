"""The routes through the memory that the ranks of one node share.

- *eager*, for small nests: the data is sent with the header. One exchange does both,
  and every rank has the sum when it has read all headers.
- *shared*, for all others: one algorithm that moves pieces (``algorithms.h``). Its
  sources are copies of the caller's arrays, or registered buffers: arrays that are
  already in the arenas (`Strategy.buffers_like`, earlier results). Its destination is a
  slot in each rank's arena, to which all ranks write; or private memory, if the arena
  of some rank is full.

Both add from rank 0 upwards, in the core, so both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NoReturn

import numpy as np

from mpidist import _native
from mpidist._agreement.mismatch import Call
from mpidist._base import backend
from mpidist._base.memory import round_up
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array, DType, HostArray
from mpidist._engine.buckets import Leaf, Results
from mpidist._engine.node import Node
from mpidist._engine.nodes import NodeExchange
from mpidist._engine.plans import PlanResources, Signature
from mpidist._engine.pool import SMALLEST

# Every rank adds all data: above this size in all it is faster to divide the work.
_EAGER_BYTES_OF_ALL: Final = 128 * 1024
# If ranks share cores, one of them adds for all.
_EAGER_BYTES_CROWDED: Final = 32 * 1024
_KEPT_BYTES: Final = 64  # leaves of this size are copied out of the slot


def eager(resources: PlanResources, signature: Signature) -> EagerReduce | None:
    """Return the plan of a small nest."""
    if any(leaf.on_device for leaf in signature.leaves):
        return None
    fits = (
        resources.node is not None
        and takes(resources, signature)
        and fits_header(resources, signature)
    )
    return EagerReduce(resources, signature) if fits else None


def shared(resources: PlanResources, signature: Signature) -> SharedReduce | None:
    """Return the plan of any nest of host arrays."""
    if any(leaf.on_device for leaf in signature.leaves):
        return None
    fits = resources.node is not None and takes(resources, signature)
    return SharedReduce(resources, signature) if fits else None


def takes(resources: PlanResources, signature: Signature) -> bool:
    """Return whether the core can reduce such leaves, on the host or a GPU.

    It says the same on ranks that have them on the host and on a GPU.
    """
    return (
        (resources.node is not None or resources.nodes is not None)
        and signature.transports.host.name == "shared"
        and all(is_for_core(resources, leaf) for leaf in signature.leaves)
    )


def fits_header(resources: PlanResources, signature: Signature) -> bool:
    """Return whether a nest that the core takes travels with its header."""
    assert resources.node is not None
    room = min(_native.core.EAGER_BYTES, _EAGER_BYTES_OF_ALL // resources.node.size)
    if resources.node.channel.tree:
        room = _EAGER_BYTES_CROWDED
    line = _native.core.LINE
    total = sum(round_up(nbytes_of(resources, x), line) for x in signature.leaves)
    return bool(total <= room)


def is_for_core(resources: PlanResources, leaf: Leaf) -> bool:
    """Return whether the core has a kernel for a leaf."""
    name = _name_of(travels_as(resources, leaf))
    return bool(_native.core.has_kernel(name, leaf.reduction.combining))


def travels_as(resources: PlanResources, leaf: Leaf) -> DType:
    """Return the dtype of a leaf in the core.

    It is the leaf's own, also for 16-bit floats, which the kernels add in float32 and
    round once. Only means of integers are converted to floats before. Between nodes
    16-bit floats are converted to float32, since the sum of a node would be rounded.
    """
    reduction = leaf.reduction
    wide = reduction.compute.itemsize > reduction.dtype.itemsize
    if (resources.nodes is not None or resources.wide) and wide:
        return reduction.compute
    if reduction.op is ReduceOp.MEAN and reduction.dtype.kind in "iu":
        return reduction.result
    return reduction.dtype


def _name_of(dtype: DType) -> str:
    if backend.is_bfloat16(dtype):
        return "bf2"
    return f"{dtype.kind}{dtype.itemsize}"


def nbytes_of(resources: PlanResources, leaf: Leaf) -> int:
    """Return the bytes of a leaf in the core."""
    return math.prod(leaf.shape) * int(travels_as(resources, leaf).itemsize)


def _node_of(resources: PlanResources) -> Node:
    node = resources.node if resources.nodes is None else resources.nodes.node
    assert node is not None
    return node


class CoreReduce:
    """What these plans have in common: the nest in the core, and its sources."""

    node: Node

    def __init__(self, resources: PlanResources, signature: Signature) -> None:
        self.call: Call = signature.call
        nodes = resources.nodes
        self._guard = resources.guard
        self._wanted = signature.root in (None, resources.comm.rank)
        rows = []
        for leaf in signature.leaves:
            mean = leaf.reduction.op is ReduceOp.MEAN
            operation = leaf.reduction.combining
            name = _name_of(travels_as(resources, leaf))
            divisor = resources.comm.size if mean else 0
            rows.append(_native.ReduceLeaf(name, operation, leaf.shape, divisor))
        self._core = self._new_core(resources, signature, rows)
        self._traffic = resources.comm.traffic
        self._to_root = signature.root is not None
        self._sizes = [nbytes_of(resources, leaf) for leaf in signature.leaves]
        self._nbytes = sum(self._sizes)
        self._shapes = [
            (leaf.shape, travels_as(resources, leaf)) for leaf in signature.leaves
        ]
        self._casts = casts = any(
            leaf.reduction.dtype is not dtype
            for leaf, (_, dtype) in zip(signature.leaves, self._shapes, strict=True)
        )
        self._exchange: NodeExchange | None = None
        if nodes is not None:
            self._exchange = self._new_exchange(resources, signature, rows)
        self._views = any(backend.is_bfloat16(dtype) for _, dtype in self._shapes)
        self._plain = not (casts or self._views)

    def _new_core(
        self,
        resources: PlanResources,
        signature: Signature,
        rows: list[_native.ReduceLeaf],
    ) -> _native.Reduce:
        """Return the nest in the core."""
        self.node = node = _node_of(resources)
        if resources.nodes is not None:  # the sum over the nodes is divided
            rows = [row._replace(divisor=0) for row in rows]
        return _native.core.Reduce(
            node.channel,
            rows,
            node.piece_bytes,
            signature.call.fingerprint,
            resources.guard.patience_ms,
            signature.root is None,
        )

    def _new_exchange(
        self,
        resources: PlanResources,
        signature: Signature,
        rows: list[_native.ReduceLeaf],
    ) -> NodeExchange:
        """Return the object that reduces pieces over the nodes."""
        assert resources.nodes is not None
        compression = signature.compress() if signature.compress else None
        dtype = self._shapes[0][1] if self._shapes else None
        return NodeExchange(
            resources.nodes,
            resources.guard,
            self._core,
            rows,
            self._sizes,
            compression,
            dtype,
        )

    def __call__(
        self,
        arrays: list[Array],
        call: Call | None = None,
        timeout: float | None = None,
    ) -> Results:
        """Agree with the other ranks, and reduce; see `Plan`."""
        call = call or self.call
        try:
            sources = self._sources(arrays)
        except Exception as error:
            raise self._guard.fail(call, error, "invalid") from None
        results = self._run(sources, call, timeout)
        if results is None:
            try:  # nothing was sent yet; a copy is contiguous, and aligned for C
                sources = [x.copy() for x in sources]
            except Exception as error:
                raise self._guard.fail(call, error, "invalid") from None
            results = self._run(sources, call, timeout)
            assert results is not None
        return results

    def attempt(self, arrays: list[Array], timeout: float | None) -> Results | None:
        """Do as a call; or return None, without effect, if the signature differs.

        Args:
            arrays: NumPy arrays.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        return self._run(arrays, self.call, timeout) if self._plain else None

    def _run(
        self, sources: list[Array], call: Call, timeout: float | None
    ) -> Results | None:
        """Reduce arrays; return None if they are not what the core expects."""
        raise NotImplementedError

    def _agreed(
        self,
        status: int,
        call: Call,
        again: Callable[[int], int],
        results: list[Array],
    ) -> Results:
        """Return the results of a call that has this status; see `Guard.conclude`."""
        if status:
            self._guard.conclude(status, again)
        else:
            self._guard.count()
        if self._to_root:  # the core counts calls without a root
            self._traffic.count("Reduce", self._nbytes)
        return results if self._wanted else [None] * len(results)

    def _sources(self, arrays: list[Array]) -> list[Array]:
        """Return arrays for the core, converted to its dtypes."""
        if self._casts:
            arrays = [
                x if x.dtype == dtype else x.astype(dtype)
                for x, (_, dtype) in zip(arrays, self._shapes, strict=True)
            ]
        return self._raw(arrays) if self._views else arrays

    @staticmethod
    def _raw(arrays: list[Array]) -> list[Array]:
        """Return arrays with the buffer protocol, which bfloat16 lacks."""
        return [
            backend.contiguous(x).view(np.uint16) if backend.is_bfloat16(x.dtype) else x
            for x in arrays
        ]


class EagerReduce(CoreReduce):
    """All-reduces small nests, each with its header."""

    def __init__(self, resources: PlanResources, signature: Signature) -> None:
        super().__init__(resources, signature)
        self._eager = self._core.eager
        alone = len(self._sizes) == 1 and self._plain and not self._to_root
        self._pool = resources.pool
        self._is_large = self._nbytes >= SMALLEST
        quick = alone and not self._is_large
        self.quick: _native.Reduce = self._core if quick else None

    def concluded(self, status: int, x: HostArray, result: HostArray) -> HostArray:
        """End a call of `quick` that has another status than OK; see `_native`."""
        number = self.call.fingerprint
        self._agreed(
            status, self.call, lambda ms: self._eager(x, result, number, ms), [result]
        )
        return result

    def interrupted(self, error: BaseException) -> NoReturn:
        """End a call of `quick` that raised."""
        raise self._guard.leave_payload(self.call, error) from None

    def _run(
        self, sources: list[Array], call: Call, timeout: float | None
    ) -> Results | None:
        guard = self._guard
        try:
            new = self._pool.empty if self._is_large else np.empty
            results: list[Array] = [new(shape, dtype) for shape, dtype in self._shapes]
            targets = self._raw(results) if self._views else results
        except Exception as error:
            raise guard.fail(call, error, "invalid") from None
        patience = guard.enter(call, timeout)
        try:
            if call is self.call and timeout is None:
                status = self._eager(sources, targets)
            else:
                status = self._eager(sources, targets, call.fingerprint, patience)
        except BaseException as error:
            raise guard.leave_payload(call, error) from None
        if status == 0 and not self._to_root:
            guard.sequence += 1  # `count`, without its 2% of a small call
            return results
        if status is None:
            return None
        number = call.fingerprint
        return self._agreed(
            status, call, lambda ms: self._eager(sources, targets, number, ms), results
        )


class SharedReduce(CoreReduce):
    """All-reduces nests piece by piece."""

    def __init__(self, resources: PlanResources, signature: Signature) -> None:
        super().__init__(resources, signature)
        self._starts = self._core.starts
        self._room = self._core.nbytes
        # A user who keeps the loss must not keep the gradients beside it alive.
        self._tiny = [
            i
            for i, (shape, dtype) in enumerate(self._shapes)
            if math.prod(shape) * dtype.itemsize <= _KEPT_BYTES < self._room
        ]
        self._layout = [
            (shape, dtype, start)
            for (shape, dtype), start in zip(self._shapes, self._starts, strict=True)
        ]

    def _run(
        self, sources: list[Array], call: Call, timeout: float | None
    ) -> Results | None:
        guard, reduce = self._guard, self._core.shared
        try:
            offset, results = self._new_results()
            targets = self._raw(results) if self._views else results
        except Exception as error:
            raise guard.fail(call, error, "invalid") from None
        patience = guard.enter(call, timeout)
        number = call.fingerprint
        try:
            status = reduce(sources, targets, offset, number, patience)
        except BaseException as error:
            raise guard.leave_payload(call, error) from None
        if status is None:
            return None
        found = self._agreed(
            status,
            call,
            lambda ms: reduce(sources, targets, offset, number, ms),
            results,
        )
        if self._wanted:
            for i in self._tiny:
                found[i] = found[i].copy()
        return found

    def _new_results(self) -> tuple[int, list[Array]]:
        """Return the offset of the results in the arena, and the results."""
        slot = self.node.pool.take(self._room)
        if slot is None:
            results: list[Array] = [
                np.empty(shape, dtype) for shape, dtype in self._shapes
            ]
            return _native.core.NOWHERE, results
        array: Callable[..., Array] = np.ndarray
        return slot.offset, [
            array(shape, dtype, slot, start) for shape, dtype, start in self._layout
        ]
