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
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from mpidist import _native
from mpidist._agreement.mismatch import Call
from mpidist._base import backend
from mpidist._base.memory import round_up
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array, DType, HostArray, Shape
from mpidist._collectives.plan import Leaf, Plan, Results, Signature
from mpidist._collectives.pool import SMALLEST
from mpidist._collectives.resources import Resources

# Every rank adds all data: above this size in all it is faster to divide the work.
_EAGER_BYTES_OF_ALL: Final = 128 * 1024
# If ranks share cores, one of them adds for all.
_EAGER_BYTES_CROWDED: Final = 32 * 1024
_KEPT_BYTES: Final = 64  # leaves of this size are copied out of the slot


def eager(resources: Resources, signature: Signature) -> EagerReduce | None:
    """Return the plan of a small nest of host arrays."""
    if not _is_on_node(resources, signature) or not fits_header(resources, signature):
        return None
    return EagerReduce(resources, signature)


def shared(resources: Resources, signature: Signature) -> SharedReduce | None:
    """Return the plan of any nest of host arrays."""
    if not _is_on_node(resources, signature):
        return None
    return SharedReduce(resources, signature)


def _is_on_node(resources: Resources, signature: Signature) -> bool:
    on_device = any(leaf.on_device for leaf in signature.leaves)
    return resources.node is not None and not on_device and takes(resources, signature)


def takes(resources: Resources, signature: Signature) -> bool:
    """Return whether the core can reduce such leaves, on the host or a GPU.

    It says the same on ranks that have them on the host and on a GPU.
    """
    several = resources.nodes is not None
    return (
        (resources.node is not None or several)
        and signature.transports.host.name == "shared"
        and CoreNest(signature.leaves, resources.comm.size, wide=several).has_kernels
    )


def fits_header(resources: Resources, signature: Signature) -> bool:
    """Return whether a nest that the core takes travels with its header."""
    assert resources.node is not None
    room = min(_native.core.EAGER_BYTES, _EAGER_BYTES_OF_ALL // resources.node.size)
    if resources.node.channel.tree:
        room = _EAGER_BYTES_CROWDED
    nest = CoreNest(signature.leaves, resources.comm.size, wide=False)
    total = sum(round_up(nbytes, _native.core.LINE) for nbytes in nest.sizes)
    return bool(total <= room)


class CoreNest:
    """The leaves of a reduction as the core takes them.

    Dtypes are the leaves' own, also of 16-bit floats, which the kernels add in float32
    and round once. Only means of integers are converted to floats before.

    Args:
        leaves: of the signature.
        ranks: the number of ranks.
        wide: whether 16-bit floats are summed as float32 on their way, and small
            integers as 32-bit ones: between nodes sums are rounded, or wrap, more than
            once.

    Attributes:
        rows: for the core; means are divided.
        shapes: and dtypes.
        sizes: in bytes.
        casts: whether arrays are converted to these dtypes.
    """

    def __init__(self, leaves: list[Leaf], ranks: int, *, wide: bool) -> None:
        self.shapes: list[tuple[Shape, DType]] = [
            (leaf.shape, _travels_as(leaf, wide)) for leaf in leaves
        ]
        self.rows = [
            _native.ReduceLeaf(
                _name_of(dtype),
                leaf.reduction.combining,
                shape,
                ranks if leaf.reduction.op is ReduceOp.MEAN else 0,
            )
            for leaf, (shape, dtype) in zip(leaves, self.shapes, strict=True)
        ]
        self.sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes]
        self.casts: bool = any(
            leaf.reduction.dtype is not dtype
            for leaf, (_, dtype) in zip(leaves, self.shapes, strict=True)
        )
        self._views = any(row.dtype == "bf2" for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(self.sizes)

    @property
    def has_kernels(self) -> bool:
        """Whether the core can reduce all leaves."""
        has_kernel = _native.core.has_kernel
        return all(has_kernel(row.dtype, row.operation) for row in self.rows)

    @property
    def is_plain(self) -> bool:
        """Whether the core takes the arrays as they are."""
        return not (self.casts or self._views)

    def sources(self, arrays: Sequence[Array]) -> list[Array]:
        """Return arrays for the core, converted to its dtypes."""
        found = list(arrays)
        if self.casts:
            found = [
                x if x.dtype == dtype else x.astype(dtype)
                for x, (_, dtype) in zip(arrays, self.shapes, strict=True)
            ]
        return self.raw(found)

    def raw(self, arrays: list[Array]) -> list[Array]:
        """Return arrays with the buffer protocol, which bfloat16 lacks."""
        if not self._views:
            return arrays
        return [
            backend.contiguous(x).view(np.uint16) if backend.is_bfloat16(x.dtype) else x
            for x in arrays
        ]

    def on_node(self, resources: Resources, signature: Signature) -> _native.Reduce:
        """Return the nest in the core of this rank's node.

        Of several nodes the sum over the nodes is divided, not that of one.
        """
        node, rows = resources.node, self.rows
        if resources.nodes is not None:
            node = resources.nodes.node
            rows = [row._replace(divisor=0) for row in rows]
        assert node is not None
        return _native.core.Reduce(
            node.channel,
            rows,
            node.piece_bytes,
            signature.call.fingerprint,
            resources.guard.patience_ms,
            signature.root is None,
        )


def _travels_as(leaf: Leaf, wide: bool) -> DType:
    reduction = leaf.reduction
    if wide and reduction.compute.itemsize > reduction.dtype.itemsize:
        return reduction.compute
    if reduction.op is ReduceOp.MEAN and reduction.dtype.kind in "iu":
        return reduction.result
    return reduction.dtype


def _name_of(dtype: DType) -> str:
    if backend.is_bfloat16(dtype):
        return "bf2"
    return f"{dtype.kind}{dtype.itemsize}"


class CoreReduce(Plan):
    """All-reduces a nest in one step of the core: header and data.

    Args:
        resources: of the strategy.
        signature: of the calls.
        nest: the leaves.
        exchange: the step. Its arguments: sources, results, where the results are (if
            that matters), the fingerprint of the call, and how many milliseconds to
            wait. It returns the status of the header; or None, if the arrays are not
            what it expects.
    """

    def __init__(
        self,
        resources: Resources,
        signature: Signature,
        nest: CoreNest,
        exchange: Callable[..., Any],
    ) -> None:
        super().__init__(resources, signature.call)
        self._nest = nest
        self._shapes = nest.shapes
        self._plain = nest.is_plain
        self._exchange = exchange
        self._to_root = signature.root is not None
        self._wanted = signature.root in (None, resources.comm.rank)

    def __call__(
        self,
        arrays: Sequence[Array],
        call: Call | None = None,
        timeout: float | None = None,
    ) -> Results:
        """Agree with the other ranks, and reduce; see `Plan`."""
        call = call or self.call
        try:
            sources = arrays if self._plain else self._nest.sources(arrays)
        except Exception as error:
            raise self._guard.fail(call, error) from None
        results = self._run(sources, call, timeout)
        if results is None:
            try:  # nothing was sent yet; a copy is contiguous, and aligned for C
                sources = [x.copy() for x in sources]
            except Exception as error:
                raise self._guard.fail(call, error) from None
            results = self._run(sources, call, timeout)
            assert results is not None
        return results

    def attempt(self, arrays: list[Array], timeout: float | None) -> Results | None:
        """Do as a call, if the arrays have the signature; see `Plan`."""
        return self._run(arrays, self.call, timeout) if self._plain else None

    def _run(
        self, sources: Sequence[Array], call: Call, timeout: float | None
    ) -> Results | None:
        guard, exchange = self._guard, self._exchange
        try:
            results, where = self._new_results()
            targets = results if self._plain else self._nest.raw(results)
        except Exception as error:
            raise guard.fail(call, error) from None
        number, patience = call.fingerprint, guard.enter(call, timeout)
        try:  # not `guard.payload`, which would be 2% of a small call
            if call is self.call and timeout is None:  # as the core knows it
                status = exchange(sources, targets, *where)
            else:
                status = exchange(sources, targets, *where, number, patience)
        except BaseException as error:
            raise guard.abandon(call, error) from None
        if status is None:
            return None
        if status:
            guard.conclude(
                status, lambda ms: exchange(sources, targets, *where, number, ms)
            )
        else:
            guard.sequence += 1
        if self._to_root:  # the core counts calls without a root
            self._comm.traffic.count("Reduce", self._nest.nbytes)
            return results if self._wanted else [None] * len(results)
        return results

    def _new_results(self) -> tuple[Results, tuple[int, ...]]:
        """Return memory for the results, and where it is, if that matters."""
        raise NotImplementedError


class EagerReduce(CoreReduce):
    """All-reduces small nests, each with its header.

    Args:
        resources: of the strategy.
        signature: of the calls.
        nest: the leaves; None: those of the signature.
        core: the nest in the core; None: on this node.
    """

    route = "eager"

    def __init__(
        self,
        resources: Resources,
        signature: Signature,
        nest: CoreNest | None = None,
        core: _native.Reduce = None,
    ) -> None:
        nest = nest or CoreNest(signature.leaves, resources.comm.size, wide=False)
        core = core or nest.on_node(resources, signature)
        super().__init__(resources, signature, nest, core.eager)
        large = nest.nbytes >= SMALLEST
        self._new = resources.pool.empty if large else np.empty
        if len(nest.rows) == 1 and self._plain and not self._to_root and not large:
            self.quick = core
            self.quick_bytes = SMALLEST

    def concluded(self, status: int, x: HostArray, result: HostArray | None) -> Any:
        """End a call of `quick` with this status; see `Plan`."""
        exchange, number = self._exchange, self.call.fingerprint
        self._guard.conclude(status, lambda ms: exchange(x, result, number, ms))
        return result

    def _new_results(self) -> tuple[Results, tuple[int, ...]]:
        new = self._new
        return [new(shape, dtype) for shape, dtype in self._shapes], ()


class SharedReduce(CoreReduce):
    """All-reduces nests piece by piece."""

    route = "shared"

    def __init__(self, resources: Resources, signature: Signature) -> None:
        nest = CoreNest(signature.leaves, resources.comm.size, wide=False)
        core = nest.on_node(resources, signature)
        super().__init__(resources, signature, nest, core.shared)
        assert resources.node is not None
        self.node = resources.node
        self._room = core.nbytes
        # A user who keeps the loss must not keep the gradients beside it alive.
        self._tiny = [
            i for i, size in enumerate(nest.sizes) if size <= _KEPT_BYTES < self._room
        ]
        self._layout = [
            (shape, dtype, start)
            for (shape, dtype), start in zip(nest.shapes, core.starts, strict=True)
        ]

    def _run(
        self, sources: Sequence[Array], call: Call, timeout: float | None
    ) -> Results | None:
        results = super()._run(sources, call, timeout)
        if results is not None and self._wanted:
            for i in self._tiny:
                results[i] = results[i].copy()
        return results

    def _new_results(self) -> tuple[Results, tuple[int, ...]]:
        """Return the results, and their offset in the arena."""
        slot = self.node.pool.take(self._room)
        if slot is None:
            results = [np.empty(shape, dtype) for shape, dtype in self._shapes]
            return results, (_native.core.NOWHERE,)
        array: Callable[..., Array] = np.ndarray
        return [
            array(shape, dtype, slot, start) for shape, dtype, start in self._layout
        ], (slot.offset,)
