"""How several nodes reduce together: the memory of each, and MPI between peers.

The ranks of a node share memory (`node`). Ranks with the same number on their nodes are
*peers*: there are as many groups of them as the smallest node has ranks. A piece of a
nest is reduced

1. over each node, in its memory: each rank reduces one slice;
2. over the nodes: each rank with peers all-reduces one slice with them by MPI, in the
   area of the node's sums (`NodeExchange`).

So all ranks of a node send at the same time, and each byte leaves a node once. On a
node with more ranks than the smallest one the slices of 1 and 2 differ, and its ranks
make a step between them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final, NamedTuple

import numpy as np

from mpidist import _native
from mpidist._agreement.channel import LEFT, LeftError
from mpidist._agreement.guard import Guard
from mpidist._base import threads
from mpidist._base.memory import LINE
from mpidist._base.types import DType, HostArray
from mpidist._collectives.compression import Compression
from mpidist._collectives.node import Node, open_node
from mpidist._mpi.buffers import BufferCollectives, Transfer
from mpidist._mpi.communicator import Communicator
from mpidist._mpi.ops import host_op

LEAST_BYTES: Final = 64 * 1024 + 1
"""The least bytes of a nest for the memory of the nodes.

The steps of a node cost more than MPI between all ranks takes for a smaller one: on 8
simulated nodes of two ranks 16 KiB took 3.9 times raw MPI's time, and 1.1 without.
"""


@dataclasses.dataclass(frozen=True)
class Nodes:
    """One of several nodes, as a rank sees it.

    Attributes:
        node: the memory of its ranks.
        ranks: of this node, in its order.
        peers: one rank of each node; None on a rank without peers.
        slices: how many slices of a piece are sent between nodes.
        scratch: memory (uint8) for what MPI sends or receives of a slice.
    """

    node: Node
    ranks: list[int]
    peers: BufferCollectives | None
    slices: int
    scratch: HostArray

    def memory(self) -> HostArray:
        """Return the memory of the node as an array of bytes."""
        return np.frombuffer(self.node.memory, np.uint8)

    def step(self, guard: Guard) -> None:
        """Wait until all ranks of this node have made this step.

        Raises:
            CollectiveTimeoutError: at the deadline, or if another rank has given up.
            LeftError: if a rank of this node has left.
        """
        channel = self.node.channel
        channel.publish()
        if guard.waits.wait_step(channel.wait, self._missing) == LEFT:
            raise LeftError(self.ranks[channel.who])

    def _missing(self) -> list[int]:
        return [self.ranks[k] for k in self.node.channel.missing()]


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """What the ranks of a strategy share, if anything; the same on all ranks.

    Attributes:
        node: the memory of one node.
        nodes: that of each of several nodes.
        problem: why there is none; "" if there is, or with one rank.
        in_process: whether replicas are threads, which need none.
    """

    node: Node | None = None
    nodes: Nodes | None = None
    problem: str = ""
    in_process: bool = False


NO_MEMORY: Final = SharedMemory()


def open_shared_memory(comm: Communicator) -> SharedMemory:
    """Make shared memory, if all ranks want it and can. Collective.

    Args:
        comm: all ranks, which have told each other what `node.look` returned.
    """
    if threads.current() is not None:
        return SharedMemory(problem="replicas are threads", in_process=True)
    if comm.num_nodes > 1:
        nodes, problem = _open_nodes(comm)
        return SharedMemory(None, nodes, problem)
    node, problem = open_node(comm)
    if node is None:
        return SharedMemory(problem=problem)
    comm.traffic.core = node.channel
    return SharedMemory(node)


def _open_nodes(comm: Communicator) -> tuple[Nodes | None, str]:
    """Make shared memory on each of several nodes, and find peers. Collective.

    Returns:
        None if a node cannot, or if each has one rank and nothing to share; and why.
    """
    if comm.num_nodes == comm.size:
        return None, "each node has one rank"
    node, problem = open_node(comm)
    if node is None:
        return None, problem
    peers, slices = comm.find_peers(), comm.smallest_node
    copies = comm.num_nodes if peers is not None and peers.way.gathers else 1
    lines = copies * (node.piece_bytes // LINE // slices + 2)
    scratch = comm.together(
        lambda: np.empty(lines * LINE, np.uint8), "MPIStrategy(...)"
    )
    return Nodes(node, comm.node_ranks, peers, slices, scratch), ""


class NodeExchange:
    """All-reduces pieces of a nest over the nodes, after each node has added them up.

    Args:
        nodes: of this rank.
        guard: waits for the other ranks.
        core: the nest, for the reduction over the node.
        rows: of the nest, as the core takes them, with the divisors of means.
        sizes: bytes of each leaf.
        compression: of the nest, whose leaves are then floats of one dtype.
        dtype: of these floats.
    """

    def __init__(
        self,
        nodes: Nodes,
        guard: Guard,
        core: _native.Reduce,
        rows: list[_native.ReduceLeaf],
        sizes: list[int],
        compression: Compression | None = None,
        dtype: DType | None = None,
    ) -> None:
        self._nodes = nodes
        self._guard = guard
        self._core = core
        node = nodes.node
        # The same layout; it makes no step, and knows the divisors.
        self._layout = _native.core.Reduce(node.channel, rows, node.piece_bytes)
        self._compression = compression
        self._dtype = dtype
        self._divisor = rows[0].divisor if rows else 0
        self._ranges = list(zip(self._layout.starts, sizes, strict=True))
        self._runs = _find_runs(rows, self._ranges)
        self._divides = any(row.divisor for row in rows)
        self._first = 0
        self._slice: HostArray | None = None
        self._copies: list[HostArray] = []
        self._transfer: Transfer | None = None

    def start(self) -> None:
        """Begin a call, with the pieces of the last one."""
        if self._compression is not None:
            self._compression.begin()

    def begin(self, piece: int, area: int) -> None:
        """Begin to send this rank's slice of a piece, which the node has reduced.

        Args:
            piece: its number.
            area: the number of the area that has its sums, by its lowest bit.
        """
        nodes = self._nodes
        if nodes.node.size > nodes.slices:
            nodes.step(self._guard)  # slices of other ranks are in the ones that go out
        peers, me = nodes.peers, nodes.node.rank
        self._slice = None
        if peers is None:
            return
        first, last = self._core.piece(piece)
        cuts = _cut(last - first, nodes.slices)
        a, b = cuts[me], cuts[me + 1]
        if a == b:
            return
        start = nodes.node.channel.area(-1, area)
        self._first = first + a
        self._slice = nodes.memory()[start + a : start + b]
        if self._compression is None:
            self._transfer = self._send(peers, self._slice)

    def _send(self, peers: BufferCollectives, piece: HostArray) -> Transfer:
        """Start to reduce a slice over the peers, or to gather those of all."""
        scratch = self._nodes.scratch
        if peers.way.gathers:
            rows = scratch[: piece.size * peers.size]
            self._copies = list(rows.reshape(peers.size, piece.size))
            call = functools.partial(peers.comm.Iallgather, piece, rows)
            return peers.start((call,), piece, rows)
        source = scratch[: piece.size]
        source[...] = piece  # not MPI_IN_PLACE: see `way_of`
        self._copies = [piece]
        calls = []
        for run in self._runs:
            a = max(run.start - self._first, 0)
            b = min(run.stop - self._first, piece.size)
            if a < b:
                send, receive = run.of(source[a:b]), run.of(piece[a:b])
                calls.append(
                    functools.partial(peers.comm.Iallreduce, send, receive, run.op)
                )
        return peers.start(calls, source, piece)

    def finish(self) -> None:
        """Wait until the slice has the sums of all nodes."""
        peers, piece = self._nodes.peers, self._slice
        if piece is None or peers is None:
            return
        if self._compression is not None:
            self._reduce_compressed(peers, self._compression)
            return
        assert self._transfer is not None
        peers.finish(self._transfer)
        self._transfer = None
        if len(self._copies) > 1 or self._divides:
            self._layout.reduce_range(self._first, self._copies, piece)

    def leave(self) -> None:
        """Leak buffers that MPI may still read and write, after an interruption."""
        if self._transfer is not None:
            self._transfer.leak()
            self._transfer = None

    def _reduce_compressed(
        self, peers: BufferCollectives, compression: Compression
    ) -> None:
        """All-reduce the floats of the slice, as one array, as 16-bit floats."""
        assert self._slice is not None
        assert self._dtype is not None
        first, last = self._first, self._first + self._slice.size
        parts = [
            self._slice[max(a, first) - first : min(a + n, last) - first]
            for a, n in self._ranges
            if max(a, first) < min(a + n, last)
        ]
        if not parts:
            return
        floats = parts[0] if len(parts) == 1 else np.concatenate(parts)
        floats = floats.view(self._dtype)
        compression.allreduce(peers, floats)
        if self._divisor:
            np.true_divide(floats, self._dtype.type(self._divisor), out=floats)
        if len(parts) > 1:
            raw, at = floats.view(np.uint8), 0
            for part in parts:
                part[...] = raw[at : at + part.size]
                at += part.size


class _Run(NamedTuple):
    """Leaves that follow each other, of one dtype and operation: one call of MPI.

    Attributes:
        start: the first byte, in the layout of the nest.
        stop: the end of the last leaf.
        dtype: of the elements, as MPI takes them.
        op: an `mpi4py.MPI.Op`.
        datatype: of MPI, if NumPy's is none of its own.
    """

    start: int
    stop: int
    dtype: DType
    op: Any
    datatype: Any

    def of(self, raw: HostArray) -> Any:
        """Return bytes as MPI takes them."""
        if self.datatype is None:
            return raw.view(self.dtype)
        return [raw, raw.size // self.datatype.Get_size(), self.datatype]


def _find_runs(
    rows: list[_native.ReduceLeaf], ranges: list[tuple[int, int]]
) -> list[_Run]:
    """Return the runs of a nest, in their order."""
    runs: list[_Run] = []
    names: list[tuple[str, str]] = []
    for row, (start, nbytes) in zip(rows, ranges, strict=True):
        name = (row.dtype, row.operation)
        if (
            names and names[-1] == name
        ):  # with the bytes between them, which nobody reads
            runs[-1] = runs[-1]._replace(stop=start + nbytes)
            continue
        names.append(name)
        op, dtype, datatype = host_op(*name)
        runs.append(_Run(start, start + nbytes, dtype, op, datatype))
    return runs


def _cut(nbytes: int, count: int) -> list[int]:
    """Return the limits of ``count`` equal parts, in bytes, at cache lines."""
    lines = nbytes // LINE
    return [lines * k // count * LINE for k in range(count + 1)]
