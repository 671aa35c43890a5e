"""The routes of nests with leaves on a GPU.

- *nccl*, *direct*: leaves are packed into flat buffers on the GPU, which NCCL or a
  CUDA-aware MPI moves (`bucket_route`).
- *staged*: through the memory of the node, without a buffer on either side: `staging`.
  Small nests are sent with their header, as host arrays. With several nodes, large
  nests are reduced in the memory of each node, and slices between nodes (`nodes`).

All others (small nests between nodes, no native core, longdouble, ...) use the mpi
route, whose flat buffers are staged through the host.

For the other ranks *staged* is the same as *eager*, *shared* and *hierarchical*: the
same headers, pieces, steps, layout and kernels. So a nest may have leaves on the host
and on a GPU, and a strategy ranks with and without a GPU: each rank copies its own
arrays in and out.

If a queued operation fails (CUDA reports it later), this rank must stay in step: it
makes all steps, sends the contents of the area, and tells the other ranks with the next
header, at which all raise. Until then the others have wrong results, but cannot share
or save them.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpidist import _native
from mpidist._agreement.channel import LEFT, LeftError
from mpidist._agreement.mismatch import Call
from mpidist._base import backend
from mpidist._base.memory import round_up
from mpidist._base.types import Array, DeviceArray, HostArray
from mpidist._engine import nodes
from mpidist._engine.between_route import has_same_bits
from mpidist._engine.bucket_route import uses
from mpidist._engine.core_routes import CoreNest, EagerReduce, fits_header, takes
from mpidist._engine.hierarchical_route import exchange_of
from mpidist._engine.nodes import NodeExchange
from mpidist._engine.plan import Plan, PreparedPlan, Results, Signature
from mpidist._engine.resources import Resources
from mpidist._engine.staging import Lane, LeafRange, Piece, Staging


def staged(resources: Resources, signature: Signature) -> Plan | None:
    """Return the plan of a nest that is staged through the node's memory."""
    if not uses(signature, "staged") or not takes(resources, signature):
        return None
    if resources.nodes is not None:
        nbytes = CoreNest(signature.leaves, resources.comm.size, wide=True).nbytes
        small = nbytes < nodes.LEAST_BYTES or signature.compress is not None
        small = small or not has_same_bits(resources)
        return None if small else StagedReduce(resources, signature)
    if fits_header(resources, signature):
        return StagedEager(resources, signature)
    return StagedReduce(resources, signature)


def _nearest(arrays: Sequence[Array]) -> DeviceArray:
    """Return the first array that is on a GPU."""
    return next(x for x in arrays if backend.is_device_array(x))


class StagedEager(Plan):
    """All-reduces small nests on GPUs, each with its header."""

    route = "staged"

    def __init__(self, resources: Resources, signature: Signature) -> None:
        super().__init__(resources, signature.call)
        assert resources.staging is not None
        self._staging: Staging = resources.staging
        self._on_device = [leaf.on_device for leaf in signature.leaves]
        self._results = [leaf.reduction.result for leaf in signature.leaves]
        self._wanted = signature.root in (None, resources.comm.rank)
        on_host = [
            dataclasses.replace(leaf, on_device=False) for leaf in signature.leaves
        ]
        self._plan = EagerReduce(
            resources, dataclasses.replace(signature, leaves=on_host)
        )

    def __call__(
        self,
        arrays: Sequence[Array],
        call: Call | None = None,
        timeout: float | None = None,
    ) -> Results:
        """Agree with the other ranks, and reduce; see `Plan`."""
        guard, call = self._guard, call or self.call
        try:
            near = _nearest(arrays)
            with near.device:
                hosts = self._load(near, arrays)
                results = self._new_results(arrays) if self._wanted else None
        except Exception as error:
            raise guard.fail(call, error) from None
        sums = self._plan(hosts, call, timeout)
        if results is None:
            return sums
        try:
            with near.device:
                self._store(sums, results)
        except Exception as error:
            raise guard.fail(call, error, "raised") from None
        return results

    def _load(self, near: DeviceArray, arrays: Sequence[Array]) -> list[Array]:
        """Return copies of the arrays on the host."""
        scratch, at, hosts = self._staging.scratch(), 0, []
        kept = []  # copies, until they are read
        for x in arrays:
            if not backend.is_device_array(x):
                hosts.append(x)
                continue
            raw = backend.as_bytes(backend.contiguous(x))
            host = scratch[at : at + raw.size]
            backend.start_copy_to_host(raw, host, backend.current_stream())
            kept.append(raw)
            hosts.append(backend.from_bytes(host, x.dtype, tuple(x.shape)))
            at += round_up(raw.size, _native.core.LINE)
        backend.synchronize(near)
        return hosts

    def _new_results(self, arrays: Sequence[Array]) -> Results:
        return [
            backend.empty_like(x, tuple(x.shape), dtype) if on_device else None
            for x, dtype, on_device in zip(
                arrays, self._results, self._on_device, strict=True
            )
        ]

    def _store(self, sums: list[HostArray], results: Results) -> None:
        """Queue the copies to the GPU.

        The driver has copied memory that is not page-locked when such a call returns
        (CUDA runtime API, "API synchronization behavior").
        """
        stream = backend.current_stream()
        for i, (host, result) in enumerate(zip(sums, results, strict=True)):
            if result is None:
                results[i] = host
            elif result.size:
                raw = backend.as_bytes(host)
                backend.start_copy_to_device(raw, backend.as_bytes(result), stream)


class _Work(NamedTuple):
    """What a call moves: bytes of the sources on a GPU or the host, and new arrays."""

    near: DeviceArray
    lane: Lane
    sources: list[Array]
    results: Results


class StagedReduce(PreparedPlan[_Work]):
    """All-reduces nests on GPUs piece by piece.

    As in `md_shared_run` for host arrays: there is one step for each piece, after which
    the sums of the previous piece are copied out, and the next piece is copied in,
    while the host reduces its slice.
    """

    route = "staged"

    def __init__(self, resources: Resources, signature: Signature) -> None:
        super().__init__(resources, signature.call)
        nodes, node = resources.nodes, resources.node
        nest = CoreNest(
            signature.leaves, resources.comm.size, wide=resources.nodes is not None
        )
        self._shapes, self._sizes = nest.shapes, nest.sizes
        self._core = nest.on_node(resources, signature)
        self._nodes = nodes
        self._exchange: NodeExchange | None = None
        if nodes is not None:
            node = nodes.node
            self._exchange = exchange_of(resources, nodes, signature, nest, self._core)
        assert resources.staging is not None
        assert node is not None
        self.node = node
        self._staging: Staging = resources.staging
        self._wanted = signature.root in (None, resources.comm.rank)
        self._kind = "Allreduce" if signature.root is None else "Reduce"
        self._results = [leaf.reduction.result for leaf in signature.leaves]
        self._pieces = self._cut()

    def _prepare(self, arrays: list[Array]) -> _Work:
        near = _nearest(arrays)
        with near.device:
            sources = [
                backend.as_bytes(backend.contiguous(x if x.dtype == t else x.astype(t)))
                for x, (_, t) in zip(arrays, self._shapes, strict=True)
            ]
            results: Results = [None] * len(arrays)
            if self._wanted:
                results = [
                    backend.empty_like(x, shape, dtype)
                    for x, (shape, dtype) in zip(arrays, self._shapes, strict=True)
                ]
            return _Work(near, self._staging.lane_of(near), sources, results)

    def _agree(self, call: Call, timeout: float | None) -> None:
        if self._nodes is not None:
            self._guard.agree(call, timeout)
        else:
            self._guard.agree_offset(call, _native.core.NOWHERE, timeout)

    def _move(self, work: _Work) -> None:
        try:
            with work.near.device:
                self._move_pieces(work.lane, work.sources, work.results)
        except BaseException:
            if self._nodes is not None:  # the others of the node wait for its steps
                self.node.channel.leave()
            raise

    def _conclude(self, call: Call, work: _Work) -> Results:
        try:
            if work.lane.error is not None:
                raise work.lane.error
            with work.near.device, np.errstate(all="ignore"):
                results = [
                    x if x is None or x.dtype == dtype else x.astype(dtype)
                    for x, dtype in zip(work.results, self._results, strict=True)
                ]
        except Exception as error:
            raise self._guard.fail(call, error, "raised") from None
        self._comm.traffic.count(self._kind, sum(self._sizes))
        return results

    def _move_pieces(self, lane: Lane, sources: list[Array], results: Results) -> None:
        core, area, pieces = self._core, self.node.channel.areas_used, self._pieces
        exchange = self._exchange
        targets = [backend.as_bytes(x) for x in results] if self._wanted else None
        core.start()
        lane.begin()
        try:
            lane.load(pieces[0], area, sources)
            lane.land()
            for p in range(len(pieces)):
                self._step()
                if p and targets is not None:
                    lane.store(pieces[p - 1], area + p - 1, targets)
                if p + 1 < len(pieces):
                    lane.load(pieces[p + 1], area + p + 1, sources)
                core.combine(p)
                if exchange is not None:
                    exchange.begin(p, area + p)
                lane.land()
                if exchange is not None:
                    exchange.finish()
            self._step()
            if targets is not None:
                lane.store(pieces[-1], area + len(pieces) - 1, targets)
        except BaseException:
            if exchange is not None:
                exchange.leave()
            raise
        finally:
            lane.land()
            core.finish()

    def _step(self) -> None:
        """Wait until all ranks of the node have made this step."""
        channel = self.node.channel
        if self._nodes is not None:
            self._nodes.step(self._guard)
            return
        channel.publish()
        if channel.wait() == LEFT:
            raise LeftError(channel.who)

    def _cut(self) -> list[Piece]:
        """Return the pieces of the nest."""
        starts, pieces = self._core.starts, []
        stops = [start + size for start, size in zip(starts, self._sizes, strict=True)]
        for p in range(self._core.pieces):
            first, last = self._core.piece(p)
            parts = []
            for i in range(bisect.bisect_right(stops, first), len(starts)):
                if starts[i] >= last:
                    break
                a, b = max(first, starts[i]), min(last, stops[i])
                if a < b:
                    parts.append(LeafRange(i, a - starts[i], b - starts[i], a - first))
            pieces.append(Piece(last - first, parts))
        return pieces
