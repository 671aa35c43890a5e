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

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from mpidist import _native
from mpidist._agreement.channel import NOWHERE
from mpidist._agreement.mismatch import Call
from mpidist._base.memory import lay_out
from mpidist._base.types import Array, HostArray
from mpidist._collectives.node import Node
from mpidist._collectives.plan import Plan, Results, Signature
from mpidist._collectives.pool import SMALLEST, arrays_in
from mpidist._collectives.resources import Resources

# Every rank adds all data: above this size in all it is faster to divide the work.
_EAGER_BYTES_OF_ALL: Final = 128 * 1024
# If ranks share cores, one of them adds for all.
_EAGER_BYTES_CROWDED: Final = 32 * 1024
_KEPT_BYTES: Final = 64  # leaves of this size are copied out of the slot


def on_node(resources: Resources, signature: Signature) -> CoreReduce | None:
    """Return the plan of a nest of host arrays."""
    node = resources.node
    if node is None or signature.on_device or not supports(signature):
        return None
    if _fits_header(node, signature):
        core = reduce_on_node(node, resources, signature, 0)
        return CoreReduce(resources, signature, "eager", core)
    core = reduce_on_node(node, resources, signature, node.piece_bytes)
    return CoreReduce(resources, signature, "shared", core, node.pool)


def supports(signature: Signature) -> bool:
    """Return whether the core can reduce such leaves through the memory of nodes.

    The answer does not depend on whether this rank has them on the host or on a GPU.
    """
    shares = signature.transports.host.name == "shared"
    return shares and signature.nest.has_kernels


def _fits_header(node: Node, signature: Signature) -> bool:
    """Return whether a nest is small enough to travel with its header."""
    room = min(_native.core.EAGER_BYTES, _EAGER_BYTES_OF_ALL // node.size)
    if node.channel.tree:
        room = _EAGER_BYTES_CROWDED
    return bool(lay_out(signature.nest.sizes)[1] <= room)


def reduce_on_node(
    node: Node, resources: Resources, signature: Signature, piece_bytes: int
) -> _native.Reduce:
    """Return a nest in the core of the node; without ``piece_bytes`` for *eager*."""
    return _native.core.Reduce(
        node.channel,
        signature.nest.core_leaves,
        piece_bytes,
        signature.call.fingerprint,
        resources.guard.timeout_ms,
        signature.root is None,
    )


class CoreReduce(Plan):
    """All-reduces a nest in one step of the core: header and data.

    Args:
        resources: of the strategy.
        signature: of the calls.
        route: the name of the route.
        core: the nest in the core. Its ``run`` takes sources, results, the offset of
            the results in the arena, and if they are not the usual ones the fingerprint
            of the call and the time-out in milliseconds. It returns the status of the
            header; or None, and sends nothing, if the arrays are not what it expects.
        arena: of this rank, for results to which all ranks write; None: each rank adds
            all data.
    """

    def __init__(
        self,
        resources: Resources,
        signature: Signature,
        route: str,
        core: _native.Reduce,
        arena: _native.Pool | None = None,
    ) -> None:
        super().__init__(resources, signature.call)
        self.route = route
        self._nest = nest = signature.nest
        self._shapes = nest.shapes
        self._dtypes = [leaf.reduction.result for leaf in signature.leaves]
        self._casts = self._dtypes != [dtype for _, dtype in nest.shapes]
        self._plain = not nest.casts
        self._exchange: Callable[..., Any] = core.run
        self._to_root = signature.root is not None
        self._wanted = signature.root in (None, resources.comm.rank)
        self.arena: _native.Pool | None = arena
        large = nest.nbytes >= SMALLEST
        self._new = resources.pool.empty if large and arena is None else np.empty
        self._tiny: list[int] = []
        if arena is not None:
            self._starts, room = lay_out(nest.sizes)
            self._room = room
            # A user who keeps the loss must not keep the gradients beside it alive.
            sizes = enumerate(nest.sizes)
            self._tiny = [i for i, size in sizes if size <= _KEPT_BYTES < room]
        elif len(self._shapes) == 1 and self._plain and not (self._to_root or large):
            self.quick = core
            self.quick_bytes = SMALLEST

    def _run(
        self, arrays: Sequence[Array], call: Call, timeout: float | None
    ) -> Results:
        results = self._try(arrays, call, timeout)
        if results is None:
            try:  # nothing was sent yet; a copy is contiguous, and aligned for C
                arrays = [x.copy() for x in arrays]
            except Exception as error:
                raise self._guard.fail(call, error) from None
            results = self._try(arrays, call, timeout)
            assert results is not None
        if not self._casts or not self._wanted:
            return results
        with np.errstate(all="ignore"), _native.DefaultFloatState():
            return [
                x if x.dtype == dtype else x.astype(dtype)
                for x, dtype in zip(results, self._dtypes, strict=True)
            ]

    def attempt(self, arrays: list[Array], timeout: float | None) -> Results | None:
        """Run the plan if the arrays have its signature; otherwise return None."""
        return self._try(arrays, self.call, timeout) if self._plain else None

    def concluded(self, status: int, x: HostArray, result: HostArray | None) -> Any:
        """End a call of `quick` with this status; see `Plan`."""
        exchange, fingerprint = self._exchange, self.call.fingerprint
        self._guard.conclude(
            status, lambda ms: exchange(x, result, NOWHERE, fingerprint, ms)
        )
        return result

    def _try(
        self, arrays: Sequence[Array], call: Call, timeout: float | None
    ) -> Results | None:
        guard, exchange, sources = self._guard, self._exchange, arrays
        try:
            if self.arena is None:
                results: Results = [self._new(*one) for one in self._shapes]
                offset = NOWHERE
            else:
                results, offset = arrays_in(
                    self.arena, self._shapes, self._starts, self._room
                )
            if not self._plain:
                sources = self._nest.sources(arrays, results if self.arena else None)
        except Exception as error:
            raise guard.fail(call, error) from None
        fingerprint, timeout_ms = call.fingerprint, guard.enter(call, timeout)
        try:  # not `guard.payload`, which would be 2% of a small call
            if call is self.call and timeout is None:  # as the core knows it
                status = exchange(sources, results, offset)
            else:
                status = exchange(sources, results, offset, fingerprint, timeout_ms)
        except BaseException as error:
            raise guard.abandon(call, error) from None
        if status is None:  # nothing was sent: the call before is still the last one
            guard.call = guard.previous_call
            return None
        if status:
            guard.conclude(
                status, lambda ms: exchange(sources, results, offset, fingerprint, ms)
            )
        else:
            guard.sequence += 1
        if self._to_root:  # the core counts calls without a root
            self._comm.traffic.count("Reduce", self._nest.nbytes)
            if not self._wanted:
                return [None] * len(results)
        for i in self._tiny:
            results[i] = results[i].copy()
        return results
