"""Reductions over several nodes, each with memory that its ranks share.

Small arrays go to MPI as they are. Large ones are taken as one stream, which is cut
into pieces as on one node (`Stream`), with one more step: when a rank has reduced its
slice over its node, it all-reduces the slice with the ranks of the same number on the
other nodes (its *peers*: one communicator per number; `Across`), in the result area of
its node. So all ranks of a node send at the same time, each a part, and each byte
leaves a node once.

Where nodes have different numbers of ranks, there are as many slices across nodes as
the smallest node has ranks. The ranks of a larger node first reduce slices of their own
over the node, all of them, and tick once more before the slices across nodes go out.

Where every node has one rank there is nothing to share: a piece that is part of one
array goes from where it is to where its result will be, others are packed.

Order of summation: within a node that of its ranks. The sums of the nodes are added in
the order of the nodes, where these are few (`FEW`), or with compression; else in that
which MPI takes for their number and the size of the slice, the same in every run. All
ranks have the same bits.

Why two areas for each are enough: as in `Stream`. The sums across nodes are in the
result area before the tick that tells of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from mpidist import _board as board_module
from mpidist._board import Board, LeftError
from mpidist._comm import Communicator, MPIOp, Peers
from mpidist._transports import _shared
from mpidist._transports._across import FEW, Across
from mpidist._transports._compression import LEAST_BYTES as COMPRESSED_BYTES
from mpidist._transports._compression import Compression
from mpidist._transports._direct import DirectTransport
from mpidist._transports._shared import (
    SMALLEST_AREA,
    area_bytes_for,
    areas_of,
    make_board,
)
from mpidist._transports._stream import (
    COMBINE,
    Convert,
    Piece,
    Schedule,
    slice_of,
)

_LEAST_BYTES: Final = 2 * 2**20
_LEAST_BYTES_OF_TWO: Final = 128 * 1024
_PIECE_BYTES: Final = 2 * 2**20
_PIECE_BYTES_OF_ONE: Final = 4 * 2**20
_LEAST_SLICE: Final = 128 * 1024
_MOST_SCHEDULES: Final = 64


class NodesTransport(DirectTransport):
    """All-reduces large host arrays by the nodes; all else as `DirectTransport`."""

    def __init__(self, comm: Communicator, stream: NodesStream, least: int) -> None:
        """Take what `set_up` has made."""
        super().__init__(comm)
        self.name = "direct" if comm.num_nodes == comm.size else "shared"
        self.stream = stream
        self.least_bytes = least

    @property
    def compression(self) -> Compression | None:
        """Of the bucket that is being reduced."""
        return self.stream.compression

    @compression.setter
    def compression(self, compression: Compression | None) -> None:
        self.stream.compression = compression

    def streams(self, nbytes: int, *, compressed: bool = False) -> bool:
        """Whether arrays of so many bytes together go as a stream."""
        return nbytes >= self.least_bytes or (compressed and nbytes > COMPRESSED_BYTES)

    def allreduce(self, send: Any, receive: Any, op: MPIOp) -> None:
        """Reduce ``send`` of all ranks into ``receive``."""
        compressed = self.compression is not None
        if not self.streams(send.nbytes, compressed=compressed):
            super().allreduce(send, receive, op)
            return
        self.comm.traffic.count("Allreduce", send.nbytes)
        schedule = self.stream.schedule((send.size,), send.dtype)
        self.stream.reduce(schedule, [send], [receive], op)

    def allreduce_in_place(self, buffer: Any, op: MPIOp) -> None:
        """Reduce ``buffer`` of all ranks into itself."""
        compressed = self.compression is not None
        if self.streams(buffer.nbytes, compressed=compressed):
            self.allreduce(buffer, buffer, op)
        else:
            super().allreduce_in_place(buffer, op)

    def reducer(
        self, nbytes: int, op: MPIOp, divisor: int | None = None
    ) -> Callable[[Any, Any], None]:
        """Return the fastest way from a host array to one for its result.

        Another rank may go the long way in the same call. So the stream divides here
        as there: each rank its slice, for all of its node.
        """
        if not self.streams(nbytes):
            return super().reducer(nbytes, op, divisor)

        def reduce(send: Any, receive: Any) -> None:
            stream = self.stream
            schedule = stream.schedule((send.size,), send.dtype)
            send, receive = send.reshape(-1), receive.reshape(-1)
            stream.reduce(schedule, [send], [receive], op, divisor)

        return reduce


class NodesStream:
    """Reduces arrays of all ranks, piece by piece; for nodes of one rank each.

    Args:
        peers: one rank of each node; None on a rank that has none.
        piece_bytes: the most bytes of a piece.
        rank: this rank's number on its node.
        ranks: of this node.
    """

    compression: Compression | None = None
    _halves = False  # few pieces: the same on nodes with one rank and with several

    def __init__(
        self, peers: Peers | None, piece_bytes: int, rank: int = 0, ranks: int = 1
    ) -> None:
        self._peers = peers
        self._across = None if peers is None else Across(peers, piece_bytes)
        self._rank = rank
        self._ranks = ranks
        self._schedules: dict[Any, Schedule] = {}
        self.piece_bytes = piece_bytes
        # For pieces of several arrays; no memory before it is used.
        self._packed = np.empty(piece_bytes, np.uint8)

    def schedule(self, sizes: tuple[int, ...], dtype: Any) -> Schedule:
        """Return the schedule for arrays of these sizes."""
        key = (sizes, dtype)
        found = self._schedules.get(key)
        if found is None:
            if len(self._schedules) >= _MOST_SCHEDULES:
                self._schedules.clear()
            found = self._schedules[key] = Schedule(
                sizes,
                dtype,
                self.piece_bytes // dtype.itemsize,
                self._rank,
                self._ranks,
                halve=self._halves,
            )
        return found

    def reduce(
        self,
        schedule: Schedule,
        sends: list[Any],
        receives: list[Any],
        op: MPIOp,
        divisor: int | None = None,
        encode: Convert | None = None,
        decode: Convert | None = None,
    ) -> None:
        """Reduce arrays of all ranks, as `Stream.reduce`. Collective.

        Args:
            schedule: for their sizes, and the dtype that travels.
            sends: one-dimensional arrays; may be the ``receives``.
            receives: one-dimensional arrays, for the results.
            op: the operation.
            divisor: what the results are divided by, before they are decoded.
            encode: ``encode(number of the array, part of it, where to write it)``.
            decode: ``decode(number of the array, what came out, where to write it)``.
        """
        nbytes = sum(schedule.sizes) * schedule.dtype.itemsize
        self._compresses = (
            self.compression is not None
            and op == "SUM"
            and schedule.dtype.kind == "f"
            and nbytes > COMPRESSED_BYTES
        )
        by = None if divisor is None else schedule.dtype.type(divisor)
        with np.errstate(all="ignore"):
            self._reduce(schedule, sends, receives, op, by, encode, decode)

    def _reduce(
        self,
        schedule: Schedule,
        sends: list[Any],
        receives: list[Any],
        op: MPIOp,
        by: Any,
        encode: Convert | None,
        decode: Convert | None,
    ) -> None:
        dtype = schedule.dtype
        for piece in schedule.pieces:
            if len(piece.all) == 1 and encode is None:
                leaf, where, _, _ = piece.all[0]
                source = _part(sends[leaf], where)
                target = _part(receives[leaf], where)
                same = sends[leaf] is receives[leaf]
                self._reduce_across(None if same else source, target, op, by)
                continue
            last = piece.all[-1][3]
            packed = self._packed[: last * dtype.itemsize].view(dtype)
            for leaf, where, start, stop in piece.all:
                x = _part(sends[leaf], where)
                if encode is None:
                    packed[start:stop] = x
                else:
                    encode(leaf, x, packed[start:stop])
            self._reduce_across(None, packed, op, by)
            for leaf, where, start, stop in piece.all:
                out = _part(receives[leaf], where)
                if decode is None:
                    out[...] = packed[start:stop]
                else:
                    decode(leaf, packed[start:stop], out)

    def _reduce_across(self, source: Any, target: Any, op: MPIOp, by: Any) -> None:
        """All-reduce with the peers, and divide; the source None is in the target."""
        if self._compresses and self._peers is not None:
            if source is not None:
                target[...] = source
            assert self.compression is not None
            self.compression.allreduce(self._peers, target)
        elif self._across is not None:
            self._across.reduce(source, target, op)
        if by is not None:
            np.true_divide(target, by, out=target)


class SharingStream(NodesStream):
    """The same for nodes of which some have several ranks, which share memory.

    Args:
        comm: all ranks.
        peers: as in `NodesStream`.
        board: of this node.
        inputs: for each rank of the node its two areas.
        results: two areas of the node for results.
        piece_bytes: the size of an area, or less.
    """

    _halves = True  # one is copied while the other is reduced

    def __init__(
        self,
        comm: Communicator,
        peers: Peers | None,
        board: Board,
        inputs: list[Any],
        results: Any,
        piece_bytes: int,
    ) -> None:
        super().__init__(peers, piece_bytes, comm.local_rank, comm.local_size)
        self._slices = comm.smallest_node
        self._node_ranks = comm.node_ranks
        self._board = board
        self._inputs = inputs
        self._results = results
        self._turn = 0

    def _reduce(
        self,
        schedule: Schedule,
        sends: list[Any],
        receives: list[Any],
        op: MPIOp,
        by: Any,
        encode: Convert | None,
        decode: Convert | None,
    ) -> None:
        try:
            self._reduce_pieces(schedule, sends, receives, op, by, encode, decode)
        except BaseException as error:
            self._board.leave()  # the others of the node wait for its ticks
            if isinstance(error, LeftError):
                raise LeftError(self._node_ranks[error.rank], error.why) from None
            raise

    def _reduce_pieces(
        self,
        schedule: Schedule,
        sends: list[Any],
        receives: list[Any],
        op: MPIOp,
        by: Any,
        encode: Convert | None,
        decode: Convert | None,
    ) -> None:
        board, dtype, me = self._board, schedule.dtype, self._rank
        before: tuple[Any, Piece] | None = None
        for piece in schedule.pieces:
            self._turn ^= 1
            turn = self._turn
            area = self._inputs[me][turn].view(dtype)
            for leaf, where, start, stop in (
                piece.others if encode is None else piece.all
            ):
                x = _part(sends[leaf], where)
                if encode is None:
                    area[start:stop] = x
                else:
                    encode(leaf, x, area[start:stop])
            if before is not None:
                self._copy_out(before, receives, decode)
            board.step()
            result = self._results[turn].view(dtype)
            if encode is not None:
                self._combine(turn, piece.first, piece.last, result, op, None)
            else:
                for leaf, where, start, stop in piece.own:
                    x = _part(sends[leaf], where)
                    self._combine(turn, start, stop, result, op, x)
            if self._ranks > self._slices:
                board.step()  # slices of other ranks are in the one across nodes
            if me < self._slices:
                first, last = slice_of(piece.all[-1][3], dtype, me, self._slices)
                if first < last:
                    self._reduce_across(None, result[first:last], op, by)
            board.tick()
            before = result, piece
        if before is not None:
            self._copy_out(before, receives, decode)

    def _combine(
        self, turn: int, start: int, stop: int, result: Any, op: MPIOp, own: Any
    ) -> None:
        """Reduce a part of a piece over the node, in the order of its ranks."""
        if start == stop:
            return
        parts = [pair[turn].view(result.dtype)[start:stop] for pair in self._inputs]
        if own is not None:
            parts[self._rank] = own
        out = result[start:stop]
        if len(parts) == 1:
            out[...] = parts[0]
            return
        combine = COMBINE[op]
        combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            combine(out, part, out=out)

    def _copy_out(
        self, piece: tuple[Any, Piece], receives: list[Any], decode: Convert | None
    ) -> None:
        result, cut = piece
        self._board.wait()
        for leaf, where, start, stop in cut.all:
            out = _part(receives[leaf], where)
            if decode is None:
                out[...] = result[start:stop]
            else:
                decode(leaf, result[start:stop], out)


def _part(x: Any, where: slice | None) -> Any:
    return x if where is None else x[where]


def set_up(
    comm: Communicator, *, wanted: bool, crowded: bool
) -> DirectTransport | None:
    """Make what reduces host arrays, where all ranks want it, and can. Collective.

    Args:
        comm: the ranks.
        wanted: whether this rank wants more than MPI on the whole array.
        crowded: whether this machine has more ranks than cores.

    Returns:
        None where all that is left is `DirectTransport`.
    """
    if comm.num_nodes == 1:
        return _shared.set_up(comm, wanted=wanted, crowded=crowded)
    if comm.num_nodes == comm.size:
        if not comm.all_min(int(wanted)):
            return None
        least = _LEAST_BYTES_OF_TWO if comm.size == 2 else _LEAST_BYTES
        # Many leave it to MPI, as a whole.
        least = least if comm.size <= FEW else sys.maxsize
        stream = NodesStream(comm.split_peers(), _PIECE_BYTES_OF_ONE)
        return NodesTransport(comm, stream, least)
    area = area_bytes_for(comm.machine_size + comm.num_nodes) if wanted else 0
    area = comm.all_min(min(area, piece_bytes_for(comm.smallest_node)))
    if area < SMALLEST_AREA:
        return None
    peers = comm.split_peers()
    made: NodesTransport | None = None
    try:
        made = _share(comm, peers, area, crowded=crowded)
    except Exception as error:  # an MPI that has no such windows here
        print(f"mpidist: no memory that the ranks share: {error}", file=sys.stderr)
    return made if comm.all_min(int(made is not None)) else None


def piece_bytes_for(slices: int) -> int:
    """Return how large pieces are, of which each slice is all-reduced over nodes."""
    return max(_PIECE_BYTES, _LEAST_SLICE * slices)


def _share(
    comm: Communicator, peers: Peers | None, area: int, *, crowded: bool
) -> NodesTransport:
    """Make the window of each node. Collective."""
    head = board_module.BYTES
    parts = comm.share_memory(head + (2 if comm.local_rank else 4) * area, head)
    board = make_board(comm, parts, crowded=crowded)
    inputs = [areas_of(part, head, area) for part in parts]
    results = areas_of(parts[0], head + 2 * area, area)
    stream = SharingStream(comm, peers, board, inputs, results, area)
    return NodesTransport(comm, stream, _LEAST_BYTES)
