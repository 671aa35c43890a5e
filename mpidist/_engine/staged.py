"""GPU buffers through page-locked host memory, in pieces that overlap.

For buffers that `mpidist._engine.device_routes` does not move through the memory of a
node: between nodes, without the native core, with dtypes that NCCL lacks; broadcasts
and gathers.

A buffer is moved in pieces. At the same time piece k + 1 is copied from the GPU, MPI
moves piece k, and piece k - 1 is copied to the GPU. Each direction has a stream, so the
two copies overlap::

    from the GPU   0  1  2  3
    MPI               0  1  2  3
    to the GPU           0  1  2  3

Their order is enforced as follows (CUDA C++ Programming Guide, "Streams", "Events"):

- both streams wait for the user's current stream first: its kernels have then written
  the data, and no longer use the memory of the results;
- the host waits for the event that ends a copy from the GPU before MPI may read it;
- a copy from the GPU waits for the last copy to the GPU from the same page-locked slot,
  and so does MPI if it writes to a slot without such a copy;
- at the end the current stream waits for the last copy to the GPU. Neither the host nor
  any other stream waits.

A buffer of one piece has nothing to overlap with: its copies use the current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from mpidist._base import backend
from mpidist._base.memory import LINE, round_up
from mpidist._base.types import DeviceArray, DType, HostArray
from mpidist._engine.transports import DirectTransport
from mpidist._mpi.communicator import MPIOp

# The minimum size of a piece of a buffer that is cut for the sake of overlap.
SMALLEST_PIECE_BYTES: Final = 256 * 1024
_SLOTS: Final = 3
_SMALLEST_SHARE: Final = 16 * 1024

_Load = Callable[
    [int, HostArray, backend.Stream], None
]  # of piece, slot's memory, stream
_Move = Callable[[int, HostArray], None]  # of piece, slot's memory


class StagedTransport:
    """Moves GPU buffers through the host, where another transport takes over.

    Args:
        host: moves the pieces between the ranks.
        piece_bytes: size of a piece; the same on all ranks. None: a buffer is moved
            whole, as on ranks with arrays on the host.
    """

    name = "staged"

    def __init__(self, host: DirectTransport, piece_bytes: int | None = None) -> None:
        self._host = host
        self._piece_bytes = piece_bytes
        self._rings: dict[int, _SlotRing] = {}

    def prepare(self, near: DeviceArray) -> None:
        """Allocate page-locked memory for the GPU of the array ``near``."""
        self._ring_of(near)

    def allreduce(self, send: DeviceArray, receive: DeviceArray, op: MPIOp) -> None:
        """Reduce ``send`` of all ranks into ``receive``."""
        if self._host.comm.size == 1:
            if send is not receive:
                receive[...] = send
            return
        pieces = self._cut(send.size, send.dtype)

        def move(k: int, memory: HostArray) -> None:
            self._host.allreduce_in_place(_view(memory, pieces[k], send.dtype), op)

        self._run(
            send,
            len(pieces),
            _bytes(pieces, send.dtype),
            _loader(send, pieces),
            move,
            _storer(receive, pieces),
        )

    def allreduce_in_place(self, buffer: DeviceArray, op: MPIOp) -> None:
        """Reduce ``buffer`` of all ranks into itself."""
        self.allreduce(buffer, buffer, op)

    def reduce(self, buffer: DeviceArray, op: MPIOp, root: int) -> None:
        """Reduce ``buffer`` of all ranks into that of the root."""
        if self._host.comm.size == 1:
            return
        pieces = self._cut(buffer.size, buffer.dtype)

        def move(k: int, memory: HostArray) -> None:
            self._host.reduce(_view(memory, pieces[k], buffer.dtype), op, root)

        to_here = self._host.comm.rank == root
        self._run(
            buffer,
            len(pieces),
            _bytes(pieces, buffer.dtype),
            _loader(buffer, pieces),
            move,
            _storer(buffer, pieces) if to_here else None,
        )

    def broadcast(self, buffer: DeviceArray, root: int) -> None:
        """Copy the root's ``buffer`` to all ranks."""
        if self._host.comm.size == 1:
            return
        pieces = self._cut(buffer.size, buffer.dtype)

        def move(k: int, memory: HostArray) -> None:
            self._host.broadcast(_view(memory, pieces[k], buffer.dtype), root)

        from_here = self._host.comm.rank == root
        self._run(
            buffer,
            len(pieces),
            _bytes(pieces, buffer.dtype),
            _loader(buffer, pieces) if from_here else None,
            move,
            None if from_here else _storer(buffer, pieces),
        )

    def all_gather(
        self, send: DeviceArray, receive: DeviceArray, counts: list[int]
    ) -> None:
        """Concatenate bytes of all ranks, on all ranks."""
        rank, size = self._host.comm.rank, self._host.comm.size
        if size == 1:
            receive[...] = send
            return
        longest = max(counts)
        share = self._share_bytes(longest)
        starts = [sum(counts[:r]) for r in range(size)]
        steps = -(-longest // share) if longest else 0

        def part(r: int, k: int) -> tuple[int, int]:
            """Return which bytes of rank ``r`` are moved in step ``k``."""
            return min(k * share, counts[r]), min((k + 1) * share, counts[r])

        def load(k: int, memory: HostArray, stream: backend.Stream) -> None:
            first, last = part(rank, k)
            if first < last:
                host = memory[-share:][: last - first]
                backend.start_copy_to_host(send[first:last], host, stream)

        def move(k: int, memory: HostArray) -> None:
            sizes = [last - first for first, last in (part(r, k) for r in range(size))]
            mine = memory[-share:][: sizes[rank]]
            self._host.all_gather(mine, memory[: sum(sizes)], sizes)

        def store(k: int, memory: HostArray, stream: backend.Stream) -> None:
            if steps == 1:  # contiguous on the host and on the GPU
                host = memory[: receive.size]
                backend.start_copy_to_device(host, receive, stream)
                return
            offset = 0
            for r in range(size):
                first, last = part(r, k)
                if first < last:
                    host = memory[offset : offset + last - first]
                    target = receive[starts[r] + first : starts[r] + last]
                    backend.start_copy_to_device(host, target, stream)
                offset += last - first

        self._run(receive, steps, (size + 1) * share, load, move, store)

    def check(self) -> None:
        """Do nothing: calls of MPI report their failures themselves."""

    # --- pieces -------------------------------------------------------------------

    def _cut(self, count: int, dtype: DType) -> list[slice]:
        """Return the pieces of a flat array: the same on all ranks."""
        if count == 0:
            return []
        room = count
        if self._piece_bytes is not None:
            # At least four pieces, unless they would be small.
            room = max(-(-count // 4), SMALLEST_PIECE_BYTES // dtype.itemsize)
            line = max(1, LINE // dtype.itemsize)
            room = round_up(room, line)
            room = max(1, min(room, self._piece_bytes // dtype.itemsize))
        return [slice(i, min(i + room, count)) for i in range(0, count, room)]

    def _share_bytes(self, longest: int) -> int:
        """Return how many bytes of each rank go in one step of an all-gather."""
        size = self._host.comm.size
        if self._piece_bytes is None:
            return longest
        share = max(self._piece_bytes // (size + 1), _SMALLEST_SHARE)
        return min(share // LINE * LINE, longest)

    def _run(
        self,
        near: DeviceArray,
        count: int,
        slot_bytes: int,
        load: _Load | None,
        move: _Move,
        store: _Load | None,
    ) -> None:
        """Move ``count`` pieces through the three steps.

        Args:
            near: an array on the GPU in question.
            count: number of pieces.
            slot_bytes: what the largest piece needs.
            load: queues the copies from the GPU, if any.
            move: has MPI move a piece, in the slot's memory.
            store: queues the copies to the GPU, if any.
        """
        if count == 0:
            return
        with near.device:
            ring = self._ring_of(near)
            ring.reserve(slot_bytes)
            current = backend.current_stream()
            inward = outward = current
            if count > 1:
                inward, outward = ring.inward, ring.outward
                current.record(ring.ready)
                inward.wait_event(ring.ready)
                outward.wait_event(ring.ready)
            slots = [ring.next_slot() for _ in range(min(count, _SLOTS))]

            def start(k: int) -> None:
                slot = slots[k % _SLOTS]
                if load is not None:
                    inward.wait_event(slot.stored)
                    load(k, slot.memory, inward)
                    inward.record(slot.loaded)

            start(0)
            for k in range(count):
                if k + 1 < count:
                    start(k + 1)
                slot = slots[k % _SLOTS]
                (slot.stored if load is None else slot.loaded).synchronize()
                move(k, slot.memory)
                if store is not None:
                    store(k, slot.memory, outward)
                    outward.record(slot.stored)
            if store is not None and outward is not current:
                current.wait_event(slot.stored)

    def _ring_of(self, near: DeviceArray) -> _SlotRing:
        """Return the streams and slots for the GPU of an array."""
        number = int(near.device.id)
        ring = self._rings.get(number)
        if ring is None:
            nbytes = 0
            if self._piece_bytes is not None:
                shares = (self._host.comm.size + 1) * _SMALLEST_SHARE
                nbytes = max(self._piece_bytes, shares)
            with near.device:
                ring = self._rings[number] = _SlotRing(nbytes)
        return ring


class _SlotRing:
    """Streams and slots for the copies of one GPU, kept between calls."""

    def __init__(self, nbytes: int) -> None:
        self.inward = backend.new_stream()
        self.outward = backend.new_stream()
        self.ready = backend.new_event()
        self._slots = [_Slot() for _ in range(_SLOTS)]
        self._turn = 0
        self._nbytes = 0
        self.reserve(nbytes)

    def next_slot(self) -> _Slot:
        """Return the slot that was used least recently."""
        self._turn = (self._turn + 1) % _SLOTS
        return self._slots[self._turn]

    def reserve(self, nbytes: int) -> None:
        """Allocate slots of at least this size."""
        if nbytes <= self._nbytes:
            return
        for slot in self._slots:
            slot.stored.synchronize()  # its memory is no longer read
            slot.memory = backend.pinned_empty(nbytes, "u1")
        self._nbytes = nbytes


class _Slot:
    """Page-locked memory, and events at the end of the last copies to and from it."""

    def __init__(self) -> None:
        self.memory: HostArray = np.empty(0, np.uint8)  # until `reserve`
        self.loaded = backend.new_event()
        self.stored = backend.new_event()


def _view(memory: HostArray, piece: slice, dtype: DType) -> HostArray:
    return memory[: (piece.stop - piece.start) * dtype.itemsize].view(dtype)


def _bytes(pieces: list[slice], dtype: DType) -> int:
    """Return the size of the largest piece, which is the first."""
    first = pieces[0] if pieces else slice(0, 0)
    return int((first.stop - first.start) * dtype.itemsize)


def _loader(x: DeviceArray, pieces: list[slice]) -> _Load:
    def load(k: int, memory: HostArray, stream: backend.Stream) -> None:
        host = _view(memory, pieces[k], x.dtype)
        backend.start_copy_to_host(x[pieces[k]], host, stream)

    return load


def _storer(x: DeviceArray, pieces: list[slice]) -> _Load:
    def store(k: int, memory: HostArray, stream: backend.Stream) -> None:
        host = _view(memory, pieces[k], x.dtype)
        backend.start_copy_to_device(host, x[pieces[k]], stream)

    return store
