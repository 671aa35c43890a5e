"""The route of large nests of host arrays between nodes of several ranks.

After a header by MPI, each node reduces a piece in its memory, as in *shared*, and
each of its ranks then all-reduces a slice with its peers on the other nodes (`nodes`).
While the slice is sent, the sums of the previous piece are copied out, and the next
piece is copied in. For each piece the ranks of a node make one step, which means that
this rank has copied the piece in, and that its slice of the previous piece has the sums
of all nodes.

Two areas for each are enough, as in ``algorithms.h``. A rank copies piece p + 1 to the
area of p - 1 after the step of p, before which all have reduced p - 1; and it reduces
p + 1 to the area of the sums of p - 1 after the step of p + 1, before which all have
copied them out.

If sums are sent as 16-bit floats (`CommunicationOptions.compression`), the floats of
each dtype that allows it are a nest of their own, one after the other behind one
header.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._base import backend
from mpidist._base.types import Array, DType
from mpidist._collectives import nodes
from mpidist._collectives.between_route import has_same_bits
from mpidist._collectives.compression import LEAST_BYTES as LEAST_COMPRESSED_BYTES
from mpidist._collectives.core_routes import reduce_on_node, takes
from mpidist._collectives.nodes import NodeExchange, Nodes
from mpidist._collectives.plan import PreparedPlan, Results, Signature
from mpidist._collectives.resources import Resources


def hierarchical(
    resources: Resources, signature: Signature
) -> HierarchicalReduce | None:
    """Return the plan of a large nest of host arrays."""
    if resources.nodes is None or signature.on_device:
        return None
    if not takes(resources, signature):
        return None
    if not has_same_bits(resources):
        return None
    groups = _groups(signature)
    compresses = any(part.compress is not None for _, part in groups)
    if signature.nest.nbytes < nodes.LEAST_BYTES and not compresses:
        return None
    return HierarchicalReduce(resources, resources.nodes, signature, groups)


def _groups(signature: Signature) -> list[tuple[list[int], Signature]]:
    """Return groups of leaves, each with its signature: compressed or not."""
    plain: list[int] = []
    lossy: dict[DType, list[int]] = {}
    for index, leaf in enumerate(signature.leaves):
        if signature.compress is not None and leaf.reduction.compressible:
            lossy.setdefault(leaf.reduction.wire, []).append(index)
        else:
            plain.append(index)
    groups = []
    for members in lossy.values():
        part = _part_of(signature, members, lossy=True)
        if part.nest.nbytes > LEAST_COMPRESSED_BYTES:
            groups.append((members, part))
        else:
            plain += members
    if plain:
        groups.append((plain, _part_of(signature, plain, lossy=False)))
    return groups


class HierarchicalReduce(PreparedPlan["_Call"]):
    """All-reduces nests over each node, and slices of them over the nodes.

    Args:
        resources: of the strategy.
        nodes: of this rank.
        signature: of the calls.
        groups: groups of leaves, each with its signature.
    """

    route = "hierarchical"

    def __init__(
        self,
        resources: Resources,
        nodes: Nodes,
        signature: Signature,
        groups: list[tuple[list[int], Signature]],
    ) -> None:
        super().__init__(resources, signature.call)
        self._pool = resources.pool
        self._nodes = nodes
        self._leaves = signature.leaves
        self._wanted = signature.root in (None, resources.comm.rank)
        self._kind = "Allreduce" if signature.root is None else "Reduce"
        self._groups = [
            (members, _Group(resources, nodes, part)) for members, part in groups
        ]

    def _prepare(self, arrays: list[Array]) -> _Call:
        results: Results = [None] * len(arrays)
        if self._wanted:
            new = self._pool.empty
            results = [new(x.shape, x.reduction.result) for x in self._leaves]
        works = [
            group.prepare([(arrays[i], results[i]) for i in members])
            for members, group in self._groups
        ]
        return _Call(results, works)

    def _move(self, work: _Call) -> None:
        try:
            for (_, group), part in zip(self._groups, work.works, strict=True):
                group.run(part)
        except BaseException:
            self._nodes.node.channel.leave()  # the others wait for its steps
            raise

    def _conclude(self, call: Call, work: _Call) -> Results:
        results = work.results
        for (members, _), (_, sums) in zip(self._groups, work.works, strict=True):
            for i, total in zip(members, sums, strict=True):
                if total is not None and total is not results[i]:
                    with np.errstate(all="ignore"):
                        np.copyto(results[i], backend.to_host(total), casting="unsafe")
        nbytes = sum(group.nbytes for _, group in self._groups)
        self._comm.traffic.count(self._kind, nbytes)
        return results


def _part_of(signature: Signature, members: list[int], lossy: bool) -> Signature:
    return dataclasses.replace(
        signature,
        leaves=[signature.leaves[i] for i in members],
        compress=signature.compress if lossy else None,
    )


class _Work(NamedTuple):
    """What the core reads, and what it writes."""

    sources: list[Array]
    sums: list[Array | None]  # None: this rank wants no result


class _Call(NamedTuple):
    """The results of a call, and what the core needs of each group."""

    results: Results
    works: list[_Work]


class _Group:
    """Leaves that are reduced together, as one sequence of bytes."""

    def __init__(
        self, resources: Resources, nodes: Nodes, signature: Signature
    ) -> None:
        self.nbytes: int = signature.nest.nbytes
        self._shapes = signature.nest.shapes
        self._nodes = nodes
        self._guard = resources.guard
        self._core = reduce_on_node(resources, signature)
        self._wanted = signature.root in (None, resources.comm.rank)
        nest = signature.nest
        self._exchange = NodeExchange(
            nodes,
            resources.guard,
            self._core,
            nest.rows,
            nest.sizes,
            signature.compress() if signature.compress else None,
            nest.shapes[0][1] if nest.shapes else None,
        )

    def prepare(self, pairs: list[tuple[Array, Array | None]]) -> _Work:
        """Return what the core reads, and what it writes. Not collective.

        Args:
            pairs: arrays of this rank, and those for their sums. If sums have another
                dtype, they are to be converted from the sums that this returns.
        """
        sources, sums = [], []
        for (x, result), (shape, dtype) in zip(pairs, self._shapes, strict=True):
            x = x if x.dtype == dtype else x.astype(dtype)
            x = backend.contiguous(x)
            # NumPy calls an empty array aligned wherever it is
            sources.append(x if x.flags.aligned and x.size else x.copy())
            fits = result is None or result.dtype == dtype
            sums.append(result if fits else np.empty(shape, dtype))
        return _Work(sources, sums)

    def run(self, work: _Work) -> None:
        """Reduce. Collective, after an agreement."""
        core, exchange = self._core, self._exchange
        nodes, guard = self._nodes, self._guard
        pieces, area = core.pieces, nodes.node.channel.areas_used
        if not pieces:
            return
        core.start(work.sources, work.sums if self._wanted else None)
        exchange.start()
        try:
            core.copy_in(0)
            for p in range(pieces):
                nodes.step(guard)
                core.combine(p)
                exchange.begin(p, area + p)
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
