"""The route of large nests of host arrays between nodes of four ranks or more.

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

If sums are sent as 16-bit floats (`CommunicationOptions.compression`), nodes of two
ranks are enough, and the floats of each dtype that allows it are a nest of their own,
one after the other behind one header.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect, bisect_left
from typing import Any, NamedTuple

import numpy as np

from mpidist import _native
from mpidist._base import backend
from mpidist._base.memory import LINE, lay_out, round_up
from mpidist._base.types import Array, DType, HostArray
from mpidist._collectives.compression import Compression
from mpidist._collectives.core_routes import reduce_on_node, supports
from mpidist._collectives.nodes import Nodes
from mpidist._collectives.plan import PreparedPlan, Results, Signature
from mpidist._collectives.resources import Resources
from mpidist._mpi.buffers import BufferCollectives
from mpidist._mpi.communicator import Communicator
from mpidist._mpi.ops import host_op
from mpidist._mpi.requests import Transfer


def hierarchical(
    resources: Resources, signature: Signature
) -> HierarchicalReduce | None:
    """Return the plan of a large nest of host arrays."""
    nodes = resources.nodes
    if nodes is None or signature.on_device or not supports(signature):
        return None
    comm = resources.comm
    if isinstance(comm, Communicator) and not comm.buffers.same_bits:
        return None
    groups = _groups(signature)
    compresses = any(part.compress is not None for _, part in groups)
    if signature.nest.nbytes < nodes.least_bytes and not compresses:
        return None
    return HierarchicalReduce(resources, nodes, signature, groups)


def _groups(signature: Signature) -> list[tuple[list[int], Signature]]:
    """Return groups of leaves, each with its signature: compressed or not."""
    plain: list[int] = []
    lossy: dict[DType, list[int]] = {}
    for index, leaf in enumerate(signature.leaves):
        if signature.compress is not None and leaf.compressible:
            lossy.setdefault(leaf.reduction.wire, []).append(index)
        else:
            plain.append(index)
    groups = [(some, _part_of(signature, some, lossy=True)) for some in lossy.values()]
    if plain:
        groups.append((plain, _part_of(signature, plain, lossy=False)))
    return groups


class HierarchicalReduce(PreparedPlan[tuple[list[Array], Results]]):
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
        self._nbytes = signature.nest.nbytes
        self._wanted = signature.root in (None, resources.comm.rank)
        self._kind = "Allreduce" if signature.root is None else "Reduce"
        self._groups = [Group(resources, nodes, *group) for group in groups]

    def _prepare(self, arrays: list[Array]) -> tuple[list[Array], Results]:
        # NumPy calls an empty array aligned wherever it is
        sources = [backend.contiguous(x) if x.size else x.copy() for x in arrays]
        if not self._wanted:
            return sources, [None] * len(arrays)
        new = self._pool.empty
        return sources, [
            new(leaf.shape, leaf.reduction.result) for leaf in self._leaves
        ]

    def _move(self, work: tuple[list[Array], Results]) -> Results:
        sources, results = work
        try:
            for group in self._groups:
                sums = [results[i] for i in group.members] if self._wanted else None
                group.run([sources[i] for i in group.members], sums)
        except BaseException:
            self._nodes.node.channel.leave()  # the others wait for its steps
            raise
        self._comm.traffic.count(self._kind, self._nbytes)
        return results


def _part_of(signature: Signature, members: list[int], lossy: bool) -> Signature:
    return dataclasses.replace(
        signature,
        leaves=[signature.leaves[i] for i in members],
        compress=signature.compress if lossy else None,
    )


class Group:
    """Leaves that are reduced together, as one sequence of bytes.

    Attributes:
        members: their numbers in the nest.
    """

    def __init__(
        self,
        resources: Resources,
        nodes: Nodes,
        members: list[int],
        signature: Signature,
    ) -> None:
        nest = signature.nest
        self.members = members
        self._dtype = nest.shapes[0][1]  # of all, if they are compressed
        self._nodes = nodes
        self._guard = resources.guard
        node = nodes.node
        self._core = reduce_on_node(node, resources, signature, node.piece_bytes)
        self._compression = signature.compress() if signature.compress else None
        self._starts, _ = lay_out(nest.sizes)
        self._ranges = list(zip(self._starts, nest.sizes, strict=True))
        self._runs = _find_runs(nest.core_leaves, self._ranges)
        self._ends = list(map(sum, self._ranges))
        self._shapes, self._casts = nest.shapes, nest.casts
        self._divisor = max((x.divisor for x in nest.core_leaves), default=0)
        # Of the call: the memory of the node, and the number of its first area.
        self._memory: HostArray = nodes.scratch
        self._area = 0
        # Of the slice of this rank that is sent.
        self._first = 0
        self._slice: HostArray | None = None
        self._copies: HostArray = nodes.scratch  # of the slice, from all nodes
        self._transfers: list[Transfer] = []

    def run(self, sources: list[Array], sums: list[Any] | None) -> None:
        """Reduce. Collective, after an agreement.

        Args:
            sources: of this rank, C-contiguous.
            sums: for the results; None: this rank wants none.
        """
        core, nodes, guard = self._core, self._nodes, self._guard
        pieces, self._area = core.pieces, nodes.node.channel.areas_used
        if not pieces:
            return
        self._memory = np.frombuffer(nodes.node.memory, np.uint8)
        core.start(self._uncast(sources), sums and self._uncast(sums))
        if self._compression is not None:
            self._compression.begin()
        try:
            self._copy(0, sources, out=False)
            for p in range(pieces):
                nodes.step(guard)
                core.combine(p)
                self._begin(p)
                if p:
                    self._copy(p - 1, sums, out=True)
                if p + 1 < pieces:
                    self._copy(p + 1, sources, out=False)
                self.finish()
            nodes.step(guard)
            self._copy(pieces - 1, sums, out=True)
        except BaseException:
            for transfer in self._transfers:  # MPI may still use their buffers
                transfer.leak()
            raise
        finally:
            core.finish()

    def _uncast(self, arrays: list[Array]) -> list[Array | None]:
        """Return the arrays that the core copies; None for others."""
        pairs = zip(arrays, self._shapes, strict=True)
        return [x if x.dtype == dtype else None for x, (_, dtype) in pairs]

    def _copy(self, piece: int, arrays: list[Array] | None, *, out: bool) -> None:
        """Copy a piece of arrays in, or its sums ``out``."""
        if arrays is None:
            return
        core = self._core
        (core.copy_out if out else core.copy_in)(piece)
        if not self._casts:  # the core converts none
            return
        (first, last), start = core.piece(piece), self._areas(piece)[out]
        area = self._memory[start : start + last - first]
        for i in range(bisect(self._ends, first), bisect_left(self._starts, last)):
            x, (_, dtype) = backend.flat(arrays[i]), self._shapes[i]
            if x.dtype != dtype:
                begin, size = self._starts[i], dtype.itemsize
                a, b = max(first, begin), min(last, self._ends[i])
                part = x[(a - begin) // size : (b - begin) // size]
                pair = part, area[a - first : b - first].view(dtype)
                target, values = pair if out else pair[::-1]
                np.copyto(target, values, casting="unsafe")

    def _areas(self, piece: int) -> tuple[int, int]:
        """Return where this rank's area for a piece, and that for its sums, are."""
        return self._nodes.node.channel.areas(self._area + piece)

    def _begin(self, piece: int) -> None:
        """Begin to send this rank's slice of a piece, which the node has reduced."""
        nodes = self._nodes
        if nodes.node.size > nodes.slices:
            nodes.step(self._guard)  # slices of other ranks are in the ones that go out
        peers, me = nodes.peers, nodes.node.rank
        self._slice = None
        if peers is None:
            return
        first, last = self._core.piece(piece)
        lines, n = (last - first) // LINE, nodes.slices
        a, b = (lines * k // n * LINE for k in (me, me + 1))  # n parts, at cache lines
        if a == b:
            return
        _, start = self._areas(piece)
        self._first = first + a
        self._slice = self._memory[start + a : start + b]
        if self._compression is None:
            self._send(peers, self._slice)

    def _send(self, peers: BufferCollectives, piece: HostArray) -> None:
        """Start to all-reduce a slice over the peers, or to all-gather theirs."""
        comm, begun, scratch = peers.comm, self._transfers, self._nodes.scratch
        if peers.algorithm.gathers:
            self._copies = rows = scratch[: piece.size * peers.size]
            begun.append(peers.start(comm.Iallgather, piece, rows))
            return
        source = scratch[: piece.size]
        source[...] = piece  # not MPI_IN_PLACE: see `fastest_algorithm`
        self._copies = piece
        for run in self._runs:
            a = max(run.start - self._first, 0)
            b = min(run.stop - self._first, piece.size)
            if a < b:
                count = (b - a) // run.datatype.Get_size()
                send, receive = ([x[a:b], count, run.datatype] for x in (source, piece))
                begun.append(peers.start(comm.Iallreduce, send, receive, run.op))

    def finish(self) -> None:
        """Wait until the slice has the sums of all nodes."""
        peers, piece = self._nodes.peers, self._slice
        if piece is None or peers is None:
            return
        if self._compression is not None:
            self._reduce_compressed(peers, self._compression)
            return
        for transfer in self._transfers:
            peers.finish(transfer)
        self._transfers.clear()
        if self._copies is not piece or self._divisor:
            self._core.reduce_range(self._first, self._copies, piece)

    def _reduce_compressed(
        self, peers: BufferCollectives, compression: Compression
    ) -> None:
        """All-reduce the floats of the slice, as one array, as 16-bit floats."""
        assert self._slice is not None
        for start, nbytes in self._ranges:  # there are no numbers between leaves
            end = max(start + nbytes - self._first, 0)
            self._slice[end : round_up(end, LINE)] = 0
        floats = self._slice.view(self._dtype)
        compression.allreduce(peers, floats)
        if self._divisor:
            np.true_divide(floats, self._dtype.type(self._divisor), out=floats)


class _Run(NamedTuple):
    """Leaves that follow each other, of one dtype and operation: one call of MPI.

    Attributes:
        start: the first byte, in the layout of the nest.
        stop: the end of the last leaf.
        datatype: of the elements, an `mpi4py.MPI.Datatype`.
        op: an `mpi4py.MPI.Op`.
    """

    start: int
    stop: int
    datatype: Any
    op: Any


def _find_runs(
    leaves: list[_native.ReduceLeaf], ranges: list[tuple[int, int]]
) -> list[_Run]:
    """Return the runs of a nest, in their order."""
    runs: list[_Run] = []
    placed = zip(leaves, ranges, strict=True)
    for name, run in itertools.groupby(placed, lambda x: (x[0].dtype, x[0].operation)):
        # With the bytes between them, which nobody reads.
        places = [place for _, place in run]
        runs.append(_Run(places[0][0], sum(places[-1]), *host_op(*name)))
    return runs
