"""Reductions over several nodes, each with memory that its ranks share.

A piece goes through the window as on one node (`SharedTransport`), with one more step:
when a rank has reduced its slice over its node, it all-reduces the slice with the ranks
of the same number on the other nodes (its *peers*: one communicator per number), into
the result area of its node. So all ranks of a node send at the same time, each a part.

Where nodes have different numbers of ranks, there are as many slices across nodes as
the smallest node has ranks. The ranks of a larger node first reduce slices of their own
over the node, all of them, and tick once more before the slices across nodes go out.

Of small arrays every rank copies all in; the first rank of each node, the *leader*,
reduces them, all-reduces with the other leaders, and writes the result. Those that are
smaller still go to MPI as they are: three waits would take longer than its own.

Order of summation: within a node that of its ranks. The sums of the nodes are added in
the order that MPI takes for them: with two nodes there is one; with more it depends on
the number of nodes and the size of the piece, and is the same in every run. All ranks
have the same bits. With compression it is the order of the nodes.

Where every node has one rank there is nothing to share: `OnePerNode` is
`DirectTransport`, but for compression.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mpidist import _board as board_module
from mpidist._comm import Communicator, MPIOp
from mpidist._transports import _shared
from mpidist._transports._compression import Compression, compresses
from mpidist._transports._direct import DirectTransport
from mpidist._transports._shared import (
    SMALLEST_AREA,
    area_bytes_for,
    areas_of,
    make_board,
)
from mpidist._transports._stream import COMBINE

_BY_MPI_BYTES: Final = 4 * 1024
# Leaders read the arrays of their whole node, so less where it has more ranks.
_BY_LEADERS_BYTES: Final = 256 * 1024
_HALVE_BYTES: Final = 2**20
_PIECE_BYTES: Final = 8 * 2**20
_LINE: Final = 64


class NodesTransport(DirectTransport):
    """All-reduces host arrays through the windows of the nodes."""

    name = "shared"

    def __init__(self, comm: Communicator, area_bytes: int, *, crowded: bool) -> None:
        """Make the window and the communicators. Collective."""
        super().__init__(comm)
        self.comm: Communicator = comm
        self._me = comm.local_rank
        self._ranks = comm.local_size
        self._slices = comm.smallest_node
        self._area_bytes = area_bytes
        head = board_module.BYTES
        own = head + 2 * area_bytes + (0 if self._me else 2 * area_bytes)
        parts = comm.share_memory(own, head)
        self._board = make_board(comm, parts, crowded=crowded)
        self._inputs = [areas_of(part, head, area_bytes) for part in parts]
        self._results = areas_of(parts[0], head + 2 * area_bytes, area_bytes)
        self._turn = 0
        # The same on all ranks, as every choice of a way.
        self._by_leaders = _BY_LEADERS_BYTES * comm.num_nodes // comm.size
        self._peers = comm.split_peers()

    @np.errstate(all="ignore")
    def allreduce(self, send: Any, receive: Any, op: MPIOp) -> None:
        """Reduce ``send`` of all ranks into ``receive``."""
        if send.size == 0:
            return
        if send.nbytes <= _BY_MPI_BYTES:
            super().allreduce(send, receive, op)
            return
        self.comm.traffic.count("Allreduce", send.nbytes)
        compression = self.compression
        if compression is not None and compresses(op, send):
            self._reduce_by_slices(send, receive, op, compression)
        elif send.nbytes <= self._by_leaders:
            self._reduce_by_leaders(send, receive, op)
        else:
            self._reduce_by_slices(send, receive, op, None)

    def allreduce_in_place(self, buffer: Any, op: MPIOp) -> None:
        """Reduce ``buffer`` of all ranks into itself."""
        if buffer.nbytes <= _BY_MPI_BYTES:
            super().allreduce_in_place(buffer, op)  # which MPI calls another call
        else:
            self.allreduce(buffer, buffer, op)

    def _reduce_by_leaders(self, send: Any, receive: Any, op: MPIOp) -> None:
        self._turn ^= 1
        board, turn, result = self._board, self._turn, self._result(send)
        if self._me:
            self._inputs[self._me][turn][: send.nbytes].view(send.dtype)[...] = send
            # One tick for the copy, and one for the result: the leader's comes last.
            board.tick()
            board.tick()
            board.wait()
            receive[...] = result
            return
        board.step()
        combine = COMBINE[op]
        total = send
        for pair in self._inputs[1:]:
            part = pair[turn][: send.nbytes].view(send.dtype)
            combine(total, part, out=receive)
            total = receive
        if self._ranks == 1:
            receive[...] = send
        if self._peers is not None:
            self._peers.allreduce_in_place(receive, op)
        result[...] = receive
        board.tick()

    def _reduce_by_slices(
        self, send: Any, receive: Any, op: MPIOp, compression: Compression | None
    ) -> None:
        room = min(self._area_bytes, _PIECE_BYTES) // send.dtype.itemsize
        if send.nbytes > _HALVE_BYTES and send.size < 2 * room:
            half = -(-send.size // 2)  # two pieces of one size overlap better
            room = min(room, -(-half // _LINE) * _LINE)
        before: tuple[Any, Any] | None = None
        for start in range(0, send.size, room):
            source = send[start : start + room]
            self._turn ^= 1
            self._copy_in(source)
            if before is not None:
                self._copy_out(*before)
            self._board.step()
            result = self._result(source)
            self._reduce_piece(source, result, op, compression)
            self._board.tick()
            before = receive[start : start + room], result
        if before is not None:
            self._copy_out(*before)

    def _copy_out(self, target: Any, result: Any) -> None:
        self._board.wait()
        target[...] = result

    def _result(self, like: Any) -> Any:
        return self._results[self._turn][: like.nbytes].view(like.dtype)

    def _reduce_piece(
        self, source: Any, result: Any, op: MPIOp, compression: Compression | None
    ) -> None:
        """Reduce this rank's slices of a piece that all ranks of the node have.

        Args:
            source: this rank's piece.
            result: where it goes, for all of the node.
            op: the operation.
            compression: of what goes to other nodes.
        """
        self._reduce_on_node(source, result, op)
        if self._ranks > self._slices:
            self._board.step()  # the slices of other ranks are in the one across nodes
        if self._peers is None:
            return
        first, last = self._bounds(result, self._slices)
        if first == last:
            return
        part = result[first:last]
        if compression is not None:
            compression.allreduce(self._peers, part)
        else:
            self._peers.allreduce_in_place(part, op)

    def _reduce_on_node(self, source: Any, result: Any, op: MPIOp) -> None:
        first, last = self._bounds(result, self._ranks)
        if first == last:
            return
        turn, size = self._turn, result.dtype.itemsize
        parts = [
            pair[turn][first * size : last * size].view(result.dtype)
            for pair in self._inputs
        ]
        parts[self._me] = source[first:last]
        out = result[first:last]
        if len(parts) == 1:
            out[...] = parts[0]
            return
        combine = COMBINE[op]
        combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            combine(out, part, out=out)

    def _copy_in(self, source: Any) -> None:
        """Copy a piece to where the others read it, but for this rank's own slice."""
        first, last = self._bounds(source, self._ranks)
        area = self._inputs[self._me][self._turn][: source.nbytes].view(source.dtype)
        area[:first] = source[:first]
        area[last:] = source[last:]

    def _bounds(self, piece: Any, slices: int) -> tuple[int, int]:
        """Return where this rank's slice of a piece begins and ends, on cache lines."""
        line = max(1, _LINE // piece.dtype.itemsize)
        lines = -(-piece.size // line)
        first = lines * self._me // slices * line
        last = lines * (self._me + 1) // slices * line
        return min(first, piece.size), min(last, piece.size)


class OnePerNode(DirectTransport):
    """MPI on the buffer as it stands, or compressed: every node has one rank."""

    def __init__(self, comm: Communicator) -> None:
        """Make the communicator. Collective."""
        super().__init__(comm)
        self._peers = comm.split_peers()

    def allreduce(self, send: Any, receive: Any, op: MPIOp) -> None:
        """Reduce ``send`` of all ranks into ``receive``."""
        compression = self.compression
        if compression is None or not compresses(op, send) or self._peers is None:
            super().allreduce(send, receive, op)
            return
        self.comm.traffic.count("Allreduce", send.nbytes)
        if receive is not send:
            receive[...] = send
        room = _PIECE_BYTES // send.dtype.itemsize
        for start in range(0, send.size, room):
            compression.allreduce(self._peers, receive[start : start + room])

    def allreduce_in_place(self, buffer: Any, op: MPIOp) -> None:
        """Reduce ``buffer`` of all ranks into itself."""
        compression = self.compression
        if compression is None or not compresses(op, buffer):
            super().allreduce_in_place(buffer, op)
        else:
            self.allreduce(buffer, buffer, op)


def set_up(
    comm: Communicator, *, wanted: bool, crowded: bool
) -> DirectTransport | None:
    """Make what reduces host arrays, where all ranks want it, and can. Collective.

    Args:
        comm: the ranks.
        wanted: whether this rank wants memory that ranks share, or compression.
        crowded: whether this machine has more ranks than cores.

    Returns:
        None where all that is left is `DirectTransport`.
    """
    if comm.num_nodes == 1:
        return _shared.set_up(comm, wanted=wanted, crowded=crowded)
    if comm.num_nodes == comm.size:
        return OnePerNode(comm) if comm.all_min(int(wanted)) else None
    area = comm.all_min(
        area_bytes_for(comm.machine_size + comm.num_nodes) if wanted else 0
    )
    if area < SMALLEST_AREA:
        return None
    return NodesTransport(comm, area, crowded=crowded)
