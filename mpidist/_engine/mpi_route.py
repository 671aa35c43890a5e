"""The route that accepts everything: a header, then buckets by the transports.

For nests that other routes do not accept: without the core, large nests between nodes
of one rank, GPU buffers, operations that the core lacks. Leaves are packed into flat
buffers (`buckets`), which a transport reduces.
"""

from __future__ import annotations

import numpy as np

from mpidist import _native
from mpidist._agreement.mismatch import Call
from mpidist._base import backend
from mpidist._base.types import Array
from mpidist._engine import buckets as _buckets
from mpidist._engine.buckets import Results
from mpidist._engine.plans import PlanResources, Signature
from mpidist._engine.pool import SMALLEST


def mpi(resources: PlanResources, signature: Signature) -> MpiReduce:
    """Return the plan of any nest."""
    return MpiReduce(resources, signature)


class MpiReduce:
    """All-reduces nests by buckets."""

    def __init__(self, resources: PlanResources, signature: Signature) -> None:
        self.call = signature.call
        self._guard = resources.guard
        self._comm = resources.comm
        self._pool = resources.pool
        self._leaves = signature.leaves
        self._root = signature.root
        self._transports = signature.transports
        self._wanted = signature.root in (None, resources.comm.rank)
        self._buckets = _buckets.plan_buckets(
            signature.leaves,
            signature.bytes_per_pack,
            signature.compress,
        )
        self._buffers = resources.buffers

    def __call__(
        self,
        arrays: list[Array],
        call: Call | None = None,
        timeout: float | None = None,
    ) -> Results:
        """Agree with the other ranks, and reduce; see `Plan`."""
        guard = self._guard
        call = call or self.call
        try:
            # Allocate before the agreement: a failure must be reported to all ranks.
            arrays = list(arrays)
            results = self._prepare(arrays)
        except Exception as error:
            raise guard.fail(call, error, "invalid") from None
        with self._comm.traffic.timed():
            guard.agree(call, timeout)
            self._move_or_leave(arrays, results, call)
        return results

    def _prepare(self, arrays: list[Array]) -> Results:
        """Allocate all memory that a call needs; return that of the results."""
        self._transports.device.check()
        for bucket in self._buckets:
            _buckets.reserve(bucket, self._leaves, arrays, self._buffers)
        if not self._wanted:
            return [None] * len(arrays)
        return [
            self._new_result(x, leaf)
            for x, leaf in zip(arrays, self._leaves, strict=True)
        ]

    def _move_or_leave(self, arrays: list[Array], results: Results, call: Call) -> None:
        try:
            # An exception of NumPy (`np.seterr`) would leave the others waiting.
            with np.errstate(all="ignore"), _native.DefaultFloatState():
                self._move(arrays, results)
        except BaseException as error:
            raise self._guard.leave_payload(call, error) from None

    def _move(self, arrays: list[Array], results: Results) -> None:
        for bucket in self._buckets:
            _buckets.reduce_bucket(
                bucket,
                self._leaves,
                arrays,
                self._transports,
                self._buffers,
                results,
                self._root,
            )

    def _new_result(self, x: Array, leaf: _buckets.Leaf) -> Array:
        if leaf.on_device:
            return backend.empty_like(x, leaf.shape, leaf.reduction.result)
        if leaf.size * leaf.reduction.result.itemsize < SMALLEST:
            return np.empty(leaf.shape, leaf.reduction.result)
        return self._pool.empty(leaf.shape, leaf.reduction.result)
