"""The route of large nests of host arrays between nodes of several ranks.

After a header by messages, each node adds up a piece in its memory, as *shared* does,
and its ranks then all-reduce a slice each with their peers on the other nodes
(`nodes`). While the slice travels, the sums of the piece before are copied out, and the
next piece is copied in. For each piece there is one step of the ranks of a node, which
says that this rank has copied the piece in, and that of the piece before its slice has
the sums of all nodes.

Why two areas for each are enough: as in ``algorithms.h``. A rank copies piece p + 1 to
where p - 1 was after the step of p, before which all have reduced p - 1; and it reduces
p + 1 to where the sums of p - 1 were after the step of p + 1, before which all have
copied them out.

Where sums travel as 16-bit floats (`CommunicationOptions.compression`), the floats of
each dtype that may are a nest of their own, one after the other behind one header.
"""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

import numpy as np

from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call
from mpidist._base import backend
from mpidist._base.types import Array, DType, HostArray
from mpidist._engine.buckets import Leaf, Results
from mpidist._engine.core_routes import CoreReduce, nbytes_of, takes
from mpidist._engine.nodes import Nodes
from mpidist._engine.plans import PlanResources, Signature
from mpidist._engine.pool import SMALLEST
from mpidist._mpi.traffic import Traffic
from mpidist._transports import COMPRESSED_BYTES

LEAST_BYTES: Final = 64 * 1024
"""Of a nest; smaller ones go by messages between all ranks (`mpi_route`)."""


def hierarchical(
    resources: PlanResources, signature: Signature
) -> HierarchicalReduce | None:
    """Return the plan of a large nest of host arrays."""
    if resources.nodes is None or any(leaf.on_device for leaf in signature.leaves):
        return None
    if not takes(resources, signature):
        return None
    if signature.compress is not None and signature.transports.mixed:
        return None  # `staged` does not compress: all go by messages
    groups = _groups(resources, signature)
    nbytes = sum(nbytes_of(resources, leaf) for leaf in signature.leaves)
    if nbytes < LEAST_BYTES and not any(compressed for _, compressed in groups):
        return None
    return HierarchicalReduce(resources, resources.nodes, signature, groups)


def _groups(
    resources: PlanResources, signature: Signature
) -> list[tuple[list[int], bool]]:
    """Return which leaves go together, and whether as 16-bit floats."""
    plain: list[int] = []
    lossy: dict[DType, list[int]] = {}
    for index, leaf in enumerate(signature.leaves):
        if signature.compress is not None and leaf.reduction.compressible:
            lossy.setdefault(leaf.reduction.wire, []).append(index)
        else:
            plain.append(index)
    groups = []
    for members in lossy.values():
        nbytes = sum(nbytes_of(resources, signature.leaves[i]) for i in members)
        if nbytes > COMPRESSED_BYTES:
            groups.append((members, True))
        else:
            plain += members
    return [*groups, (plain, False)] if plain else groups


class HierarchicalReduce:
    """All-reduces nests over each node, and slices of them over the nodes.

    Args:
        means: of the strategy.
        nodes: of this rank.
        signature: of the calls.
        groups: which leaves go together, and whether as 16-bit floats.
    """

    def __init__(
        self,
        resources: PlanResources,
        nodes: Nodes,
        signature: Signature,
        groups: list[tuple[list[int], bool]],
    ) -> None:
        self.call = signature.call
        self._guard: Guard = resources.guard
        self._traffic: Traffic = resources.comm.traffic
        self._pool = resources.pool
        self._nodes = nodes
        self._leaves = signature.leaves
        self._wanted = signature.root in (None, resources.comm.rank)
        self._kind = "Allreduce" if signature.root is None else "Reduce"
        self._groups = [
            (members, _Group(resources, _part_of(signature, members, compressed)))
            for members, compressed in groups
        ]

    def one(self, x: Array) -> Array:
        """Reduce one array, with a result on all ranks; see `Plan`."""
        result: Array = self([x])[0]
        return result

    def __call__(
        self,
        arrays: list[Array],
        call: Call | None = None,
        timeout: float | None = None,
    ) -> Results:
        """Agree with the other ranks, and reduce; see `Plan`."""
        guard, call = self._guard, call or self.call
        results: Results = [None] * len(arrays)
        try:
            # All memory before the agreement: who has none must say so.
            if self._wanted:
                results = [self._new_result(leaf) for leaf in self._leaves]
            works = [
                group.prepare([(arrays[i], results[i]) for i in members])
                for members, group in self._groups
            ]
        except Exception as error:
            raise guard.fail(call, error, "invalid") from None
        with self._traffic.timed():
            guard.agree(call, timeout)
            try:
                # Who has NumPy raise errors would leave the others waiting.
                with np.errstate(all="ignore"):
                    for (_, group), work in zip(self._groups, works, strict=True):
                        group.run(self._nodes, guard, work)
            except BaseException as error:
                self._nodes.node.channel.leave()  # the others wait for its steps
                raise guard.leave_payload(call, error) from None
        for (members, _), (_, sums) in zip(self._groups, works, strict=True):
            for i, total in zip(members, sums, strict=True):
                if total is not None and total is not results[i]:
                    with np.errstate(all="ignore"):
                        np.copyto(results[i], backend.to_host(total), casting="unsafe")
        self._traffic.count(self._kind, sum(group.nbytes for _, group in self._groups))
        return results

    def _new_result(self, leaf: Leaf) -> HostArray:
        dtype = leaf.reduction.result
        if leaf.size * dtype.itemsize < SMALLEST:
            return np.empty(leaf.shape, dtype)
        return self._pool.empty(leaf.shape, dtype)


def _part_of(signature: Signature, members: list[int], compressed: bool) -> Signature:
    return dataclasses.replace(
        signature,
        leaves=[signature.leaves[i] for i in members],
        compress=signature.compress if compressed else None,
    )


class _Work(NamedTuple):
    """What the core reads, and what it writes."""

    sources: list[Array]
    sums: list[Array | None]  # None: this rank wants no result


class _Group(CoreReduce):
    """Leaves that go together, as one sequence of bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's arrays, as they travel."""
        return self._nbytes

    def prepare(self, pairs: list[tuple[Array, Array | None]]) -> _Work:
        """Return what the core reads, and what it writes. Not collective.

        Args:
            pairs: arrays of this rank, and those for their sums; where sums travel in
                another dtype, these are to be cast from what this returns.
        """
        sources, sums = [], []
        for (x, result), (shape, dtype) in zip(pairs, self._shapes, strict=True):
            x = x if x.dtype == dtype else x.astype(dtype)
            x = backend.contiguous(x)
            sources.append(x if x.flags.aligned else x.copy())
            fits = result is None or result.dtype == dtype
            sums.append(result if fits else np.empty(shape, dtype))
        return _Work(sources, sums)

    def run(self, nodes: Nodes, guard: Guard, work: _Work) -> None:
        """Reduce. Collective, after an agreement."""
        core, exchange = self._core, self._exchange
        pieces, turn = core.pieces, nodes.node.channel.turn
        assert exchange is not None
        if not pieces:
            return
        core.start(work.sources, work.sums if self._wanted else None)
        exchange.start()
        try:
            core.copy_in(0)
            for p in range(pieces):
                nodes.step(guard)
                core.combine(p)
                exchange.begin(p, turn + p)
                if p:
                    core.copy_out(p - 1)
                if p + 1 < pieces:
                    core.copy_in(p + 1)
                exchange.finish()
            nodes.step(guard)
            core.copy_out(pieces - 1)
        except BaseException:
            exchange.leave()
            raise
        finally:
            core.finish()
