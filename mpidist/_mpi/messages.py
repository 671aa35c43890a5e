"""Collectives of flat buffers, built from polled messages between pairs of ranks.

MPI's own collectives block: if a rank is stopped, killed or cut off, the others hang in
them. Its non-blocking ones do not say which rank they wait for. So the data of a
collective is sent by `Isend` and `Irecv`, which are tested until all have completed:
the wait (``wait``) has a deadline, and each open receive names a rank that has not
sent.

**Algorithms.** NumPy combines the parts, in the order of the ranks, so all ranks have
the same bits, and small integers wrap as they do in NumPy (Open MPI's own sums of them
saturate).

- *whole*: a small buffer is sent from each rank to each other one, and all combine;
- *doubling*: a small buffer of many ranks, in log2 steps. In each step a rank swaps
  what it has with one partner. The lower half comes first in each sum, so the order is
  a tree over the ranks in their order, the same for all of them;
- *slices*: each rank receives one slice of a buffer from all, combines it, and sends it
  to all: twice (R - 1) / R of the bytes, which is the minimum. Buffers are cut into
  pieces, so that the memory for received data stays small; a piece is sent while the
  one before it is combined and sent back, so that the network is never idle.

Copies from one rank go down a tree, or if they are large in slices; all-gathers
directly between each pair, or for small parts of many ranks in log2 steps.

**Invariants.** All ranks of the communicator call the same method with the same sizes:
the guard ensures it. Messages between two ranks do not overtake each other, so one tag
is enough, and another for messages of some of the ranks. No array is allocated on the
host after a method has begun. A wait that ends with an exception leaks its buffers (MPI
may still write to them), and no call follows on this communicator.

Rejected: `Iallreduce` and the like. Open MPI's take 1.5 times as long as the blocking
ones between 16 KiB and 1 MiB, add as MPI does, accept no GPU buffers, and do not say
which rank is missing.
Measured on one node, 2 ranks, against blocking `Allreduce`: slices take 0.9 at 1 MiB
and 0.5 to 0.7 at 16 MiB with Open MPI, 0.5 and 0.6 with MPICH.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias

import numpy as np

from mpidist._base import backend
from mpidist._base.memory import LINE, leak, round_up
from mpidist._base.types import Array
from mpidist._mpi.library import MpiComm, MpiRequest

Buffer: TypeAlias = Array
"""A one-dimensional, C-contiguous array on the host or on a GPU."""
MPIOp = Literal["SUM", "PROD", "MIN", "MAX"]

COMBINE: Final[dict[MPIOp, np.ufunc]] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
}
FEW: Final = 8
"""The most ranks that exchange small buffers between each pair."""

_TAG: Final = 8
_TAG_OF_SOME: Final = 10
# Tests of a request between two yields of a waiting rank's core, and yields before it
# looks at the clock.
_TESTS: Final = 4
_YIELDS: Final = 2000


def _unchanged(error: BaseException) -> BaseException:
    """Return the error."""
    return error


class Transfers:
    """Messages in progress: one request, which knows which ranks have not sent.

    Attributes:
        ranks: for each message the rank at its other end.
    """

    __slots__ = ("_buffers", "_next", "_receives", "_requests", "ranks")

    def __init__(self) -> None:
        self._requests: list[MpiRequest] = []
        self.ranks: list[int] = []
        self._buffers: list[Buffer] = []
        self._receives = 0
        self._next = 0

    def add(
        self, request: MpiRequest, rank: int, buffer: Buffer, *, receives: bool
    ) -> None:
        """Add a request that was started; those that receive come first."""
        self._requests.append(request)
        self.ranks.append(rank)
        self._buffers.append(buffer)
        self._receives += receives

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Return whether all have completed, and make progress."""
        requests, number = self._requests, self._next
        while number < len(requests) and requests[number].Test():
            number += 1
        self._next = number
        return number == len(requests)

    def spin(self, spins: int) -> bool:
        """Test for a moment, first without a pause; return whether all completed.

        Args:
            spins: tests before this rank yields its core for the first time.
        """
        yields = _YIELDS
        for number, request in enumerate(self._requests):
            test = request.Test
            while not test():
                spins -= 1
                if spins > 0:
                    continue
                if spins % _TESTS == 0:
                    os.sched_yield()
                    yields -= 1
                    if not yields:
                        self._next = number
                        return False
        self._next = len(self._requests)
        return True

    @property
    def completed(self) -> int:
        """How many have completed."""
        self.Test()
        left = self._requests[self._next :]
        return len(self._requests) - sum(not request.Test() for request in left)

    @property
    def awaited(self) -> list[int]:
        """The ranks that have not sent; if all have, those that have not received."""
        left = [
            (number < self._receives, rank)
            for number, (rank, request) in enumerate(
                zip(self.ranks, self._requests, strict=True)
            )
            if not request.Test()
        ]
        senders = sorted({rank for receives, rank in left if receives})
        return senders or sorted({rank for _, rank in left})

    @property
    def result(self) -> None:
        """Nothing: the buffers have what was received."""

    def leak(self) -> None:
        """Leak the buffers: the messages are abandoned, and MPI may still use them."""
        leak(self)


class Messages:
    """Collectives over the ranks of one MPI communicator, or some of them.

    Args:
        comm: an mpi4py intra-communicator.
        wait: called with messages in progress; returns when they have completed, and
            raises at the deadline.
        ranks: those of ``comm`` that take part, in their order; None: all.
        failed: returns what to raise in place of an exception of MPI.

    Attributes:
        wait: the argument.
        few: the most ranks that exchange small buffers between each pair.
        chunk_elements: the most elements of one message. MPI 3 takes counts as C ints;
            a power of two keeps the pieces aligned.
        piece_bytes: the size of the pieces that large buffers are reduced in.
        message_bytes: the most bytes of one message. Each that completes shows that its
            sender is there.
        whole_bytes_of_two: what two ranks exchange as a whole.
        whole_bytes: what more ranks do: the bytes that a rank receives from all others.
        least_slice: the bytes of a slice of many ranks, below which doubling is faster.
        tree_bytes: what is copied down a tree, and not in slices.
    """

    # Attributes of the class, so that tests can set smaller ones of an object.
    few = FEW
    chunk_elements = 2**30
    piece_bytes = 2 * 2**20
    message_bytes = 32 * 2**20
    whole_bytes_of_two = 512 * 1024
    whole_bytes = 64 * 1024
    least_slice = 2048
    tree_bytes = 64 * 1024

    def __init__(
        self,
        comm: MpiComm,
        wait: Callable[[Transfers], None],
        ranks: Sequence[int] | None = None,
        failed: Callable[[BaseException], BaseException] = _unchanged,
    ) -> None:
        self._comm = comm
        self.wait = wait
        self._failed = failed
        # The ranks in ``comm``, and in messages to the user.
        self._names = list(range(comm.Get_size()) if ranks is None else ranks)
        self.rank: int = self._names.index(comm.Get_rank())
        self.size: int = len(self._names)
        self._tag = _TAG if ranks is None else _TAG_OF_SOME
        # Each rank begins with the next one, so that not all send to the same.
        self._others = [(self.rank + k) % self.size for k in range(1, self.size)]
        # Uses no memory before it is written to.
        room = 2 * (self.piece_bytes + 4 * LINE * (self.size + 1))
        self._host_scratch = np.empty(room, np.uint8)
        self._device_scratch: Array | None = None

    # --- messages -------------------------------------------------------------

    def swap(
        self,
        sends: Sequence[tuple[int, Buffer]],
        receives: Sequence[tuple[int, Buffer]],
    ) -> None:
        """Send buffers to ranks, and receive others from them.

        Args:
            sends: pairs of a rank and a buffer, which is not empty.
            receives: the same.

        Raises:
            CollectiveTimeoutError: from `wait`; the buffers are then leaked.
        """
        self.finish(self.begin(sends, receives))

    def begin(
        self,
        sends: Sequence[tuple[int, Buffer]],
        receives: Sequence[tuple[int, Buffer]],
    ) -> Transfers:
        """Start what `swap` does; `finish` waits for it."""
        transfers = Transfers()
        try:
            self.start(transfers, sends, receives)
        except BaseException as error:
            transfers.leak()
            raise self._failed(error) from None
        return transfers

    def finish(self, transfers: Transfers) -> None:
        """Wait for what `begin` has started.

        Raises:
            CollectiveTimeoutError: from `wait`; the buffers are then leaked.
        """
        try:
            self.wait(transfers)
        except BaseException:
            transfers.leak()
            raise

    def start(
        self,
        transfers: Transfers,
        sends: Sequence[tuple[int, Buffer]],
        receives: Sequence[tuple[int, Buffer]],
    ) -> None:
        """Start to send and to receive; see `swap`."""
        comm, names, tag = self._comm, self._names, self._tag
        add = transfers.add
        for number, buffer in receives:
            rank = names[number]
            for part in self._parts(buffer):
                request = comm.Irecv(part, rank, tag)
                add(request, rank, part, receives=True)
        for number, buffer in sends:
            rank = names[number]
            for part in self._parts(buffer):
                request = comm.Isend(part, rank, tag)
                add(request, rank, part, receives=False)

    def _parts(self, buffer: Buffer) -> Sequence[Buffer]:
        most = min(self.chunk_elements, max(1, self.message_bytes // buffer.itemsize))
        if buffer.size <= most:
            return (buffer,)
        return [buffer[i : i + most] for i in range(0, buffer.size, most)]

    def _scratch(self, like: Buffer) -> Buffer:
        """Return memory (uint8) on the device of ``like``: the host or the GPU."""
        if not backend.is_device_array(like):
            return self._host_scratch
        if self._device_scratch is None:
            self._device_scratch = backend.empty_like(
                like, self._host_scratch.shape, np.uint8
            )
        return self._device_scratch

    def _rows(
        self, like: Buffer, count: int, nbytes: int, half: int = 0
    ) -> list[Buffer]:
        """Return ``count`` aligned arrays of ``nbytes`` bytes in the scratch memory.

        Args:
            like: has their dtype, and is on their device.
            count: how many; with their padding at most half of the scratch memory.
            nbytes: of each.
            half: 1 for the second half.
        """
        scratch = self._scratch(like)
        scratch = scratch[half * (scratch.size // 2 // LINE * LINE) :]
        step = round_up(nbytes, LINE)
        return [
            scratch[k * step : k * step + nbytes].view(like.dtype) for k in range(count)
        ]

    # --- reductions -------------------------------------------------------------

    def allreduce(self, send: Buffer | None, receive: Buffer, op: MPIOp) -> None:
        """Reduce ``send`` of all ranks into ``receive`` of all ranks.

        Args:
            send: this rank's; None: it is in ``receive``.
            receive: for the result.
            op: the operation.
        """
        size, nbytes = self.size, receive.nbytes
        if size == 1 or not nbytes:
            if send is not None:
                receive[...] = send
        elif size == 2 and nbytes <= min(self.whole_bytes_of_two, self._limit(receive)):
            self._exchange_with_one(send, receive, op)
        elif size <= self.few and nbytes * (size - 1) <= self.whole_bytes:
            self._exchange_whole(send, receive, op)
        elif size > self.few and nbytes < min(
            size * self.least_slice, self.piece_bytes
        ):
            self._double(send, receive, op)
        else:
            source = receive if send is None else send
            self._exchange_slices(source, receive, op, self._others)

    def reduce(self, buffer: Buffer, op: MPIOp, root: int) -> None:
        """Reduce ``buffer`` of all ranks into that of the root; others keep theirs."""
        if self.size == 1 or not buffer.nbytes:
            return
        if buffer.nbytes * (self.size - 1) > self.whole_bytes:
            self._exchange_slices(buffer, buffer, op, [root])
        elif self.rank != root:
            self.swap([(root, buffer)], [])
        else:
            rows = self._rows(buffer, self.size, buffer.nbytes)
            self.swap([], [(k, rows[k]) for k in self._others])
            parts = [*rows[:root], buffer, *rows[root + 1 :]]
            self._combine(parts, rows[root], buffer, op)

    def _limit(self, buffer: Buffer) -> int:
        return int(self.chunk_elements * buffer.itemsize)

    def _pieces(self, buffer: Buffer) -> list[slice]:
        most = min(self.chunk_elements, max(1, self.piece_bytes // buffer.itemsize))
        count = -(-buffer.size // most)
        step = -(-buffer.size // count)  # equal ones
        step = min(most, round_up(step, LINE))
        return [slice(i, i + step) for i in range(0, buffer.size, step)]

    def _exchange_with_one(
        self, source: Buffer | None, target: Buffer, op: MPIOp
    ) -> None:
        other = 1 - self.rank
        theirs = target
        if source is None:
            source = target
            (theirs,) = self._rows(target, 1, target.nbytes)
        self.swap([(other, source)], [(other, theirs)])
        pair = (theirs, source) if self.rank else (source, theirs)
        COMBINE[op](*pair, out=target)

    def _exchange_whole(self, source: Buffer | None, target: Buffer, op: MPIOp) -> None:
        source = target if source is None else source
        rows = self._rows(target, self.size, target.nbytes)
        self.swap(
            [(k, source) for k in self._others], [(k, rows[k]) for k in self._others]
        )
        parts = [*rows[: self.rank], source, *rows[self.rank + 1 :]]
        self._combine(parts, rows[self.rank], target, op)

    def _double(self, source: Buffer | None, target: Buffer, op: MPIOp) -> None:
        """Combine in log2 steps; ranks beyond a power of two join with a neighbour."""
        combine, me = COMBINE[op], self.rank
        (theirs,) = self._rows(target, 1, target.nbytes)
        if source is not None:
            target[...] = source
            backend.synchronize(target)
        power = 1 << (self.size.bit_length() - 1)
        paired = 2 * (self.size - power)  # so many ranks join in pairs
        if me < paired:
            if me % 2:
                self.swap([(me - 1, target)], [])
            else:
                self.swap([], [(me + 1, theirs)])
                combine(target, theirs, out=target)
                backend.synchronize(target)
        if me >= paired or not me % 2:
            number = me // 2 if me < paired else me - paired // 2
            step = 1
            while step < power:
                partner = number ^ step
                rank = 2 * partner if 2 * partner < paired else partner + paired // 2
                self.swap([(rank, target)], [(rank, theirs)])
                pair = (target, theirs) if number < partner else (theirs, target)
                combine(*pair, out=target)
                backend.synchronize(target)
                step *= 2
        if me < paired:
            if me % 2:
                self.swap([], [(me - 1, target)])
            else:
                self.swap([(me + 1, target)], [])

    def _exchange_slices(
        self, source: Buffer, target: Buffer, op: MPIOp, receivers: list[int]
    ) -> None:
        """Reduce in slices; the receivers get all of them, the others none."""
        pieces = [
            _Piece(source[part], target[part], self._slices(target[part]), number % 2)
            for number, part in enumerate(self._pieces(target))
        ]
        last = len(pieces) - 1
        try:
            self._send_slices(pieces[0])
            for number, piece in enumerate(pieces):
                if number < last:
                    self._send_slices(pieces[number + 1])
                self.wait(piece.there)
                self._send_sum(piece, op, receivers)
                if number:
                    self.wait(pieces[number - 1].back)
            self.wait(pieces[last].back)
        except BaseException as error:
            for piece in pieces:
                piece.there.leak()
                piece.back.leak()
            raise self._failed(error) from None

    def _send_slices(self, piece: _Piece) -> None:
        """Start sending each rank its slice of a piece, and receiving this rank's."""
        slices, me = piece.slices, self.rank
        nbytes = (slices[me].stop - slices[me].start) * piece.target.itemsize
        piece.rows = self._rows(piece.target, self.size, nbytes, piece.half)
        self.start(
            piece.there,
            [
                (k, piece.source[slices[k]])
                for k in self._others
                if slices[k].start < slices[k].stop
            ],
            [(k, piece.rows[k]) for k in self._others] if nbytes else [],
        )

    def _send_sum(self, piece: _Piece, op: MPIOp, receivers: list[int]) -> None:
        """Combine this rank's slice; start sending it and receiving the others."""
        slices, rows, target, me = piece.slices, piece.rows, piece.target, self.rank
        own = slices[me]
        # Only a receiver may write to its buffer.
        receives = me in receivers or receivers is self._others
        out = target[own] if receives else rows[me]
        if out.size:
            parts = [*rows[:me], piece.source[own], *rows[me + 1 :]]
            self._combine(parts, rows[me], out, op)
        self.start(
            piece.back,
            [(k, out) for k in receivers if k != me] if out.size else [],
            [
                (k, target[slices[k]])
                for k in self._others
                if slices[k].start < slices[k].stop
            ]
            if receives
            else [],
        )

    def _slices(self, buffer: Buffer) -> list[slice]:
        line = max(1, LINE // buffer.itemsize)
        lines = -(-buffer.size // line)
        cuts = [
            min(lines * k // self.size * line, buffer.size)
            for k in range(self.size + 1)
        ]
        return [slice(a, b) for a, b in itertools.pairwise(cuts)]

    def _combine(
        self, parts: list[Buffer], scratch: Buffer, out: Buffer, op: MPIOp
    ) -> None:
        """Reduce in the order of the ranks; ``out`` may be one of the parts."""
        combine = COMBINE[op]
        total = parts[0]
        for part in parts[1:-1]:
            combine(total, part, out=scratch)
            total = scratch
        combine(total, parts[-1], out=out)
        backend.synchronize(out)

    # --- copies -----------------------------------------------------------------

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """Copy ``buffer`` of the root to all ranks."""
        if self.size == 1 or not buffer.nbytes:
            return
        if self.size == 2 or buffer.nbytes <= self.tree_bytes:
            self._broadcast_down(buffer, root)
            return
        slices = self._slices(buffer)
        filled = [k for k in range(self.size) if slices[k].start < slices[k].stop]
        me = self.rank
        if me == root:
            self.swap([(k, buffer[slices[k]]) for k in filled if k != me], [])
        else:
            own = [(root, buffer[slices[me]])] if me in filled else []
            self.swap([], own)
        # The root has all, and sends its own slice only.
        self.swap(
            [(k, buffer[slices[me]]) for k in self._others if k != root]
            if me in filled
            else [],
            [(k, buffer[slices[k]]) for k in self._others if k in filled]
            if me != root
            else [],
        )

    def _broadcast_down(self, buffer: Buffer, root: int) -> None:
        """Copy along a binomial tree, the root at its top."""
        number, size = (self.rank - root) % self.size, self.size
        step = 1
        while step < size and not number & step:
            step *= 2
        if number:
            self.swap([], [((number - step + root) % size, buffer)])
        children = []
        while step > 1:
            step //= 2
            if number + step < size:
                children.append((number + step + root) % size)
        self.swap([(k, buffer) for k in children], [])

    def all_gather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        """Concatenate buffers of all ranks, in rank order, on all ranks.

        Args:
            send: this rank's ``counts[rank]`` elements.
            receive: the sum of ``counts``.
            counts: elements of each rank; the same on all ranks.
        """
        starts = [0, *itertools.accumulate(counts)]
        me, size = self.rank, self.size
        own = receive[starts[me] : starts[me + 1]]
        if size <= self.few or receive.nbytes > size * self.least_slice:
            self.swap(
                [(k, send) for k in self._others] if counts[me] else [],
                [
                    (k, receive[starts[k] : starts[k + 1]])
                    for k in self._others
                    if counts[k]
                ],
            )
            own[...] = send
            return
        own[...] = send
        backend.synchronize(own)
        have = 1  # parts, from this rank's own on
        while have < size:
            more = min(have, size - have)
            source, target = (me + have) % size, (me - have) % size
            self.swap(
                [(target, x) for x in _wrapped(receive, starts, me, more)],
                [(source, x) for x in _wrapped(receive, starts, source, more)],
            )
            have += more

    def gather(
        self, send: Buffer, receive: Buffer | None, counts: Sequence[int], root: int
    ) -> None:
        """Concatenate buffers of all ranks, in rank order, on the root alone."""
        if self.rank != root:
            self.swap([(root, send)] if send.size else [], [])
        elif receive is not None:
            starts = [0, *itertools.accumulate(counts)]
            parts = [receive[a:b] for a, b in itertools.pairwise(starts)]
            self.swap([], [(k, parts[k]) for k in self._others if counts[k]])
            parts[root][...] = send

    def scatter(
        self, send: Buffer | None, receive: Buffer, counts: Sequence[int], root: int
    ) -> None:
        """Give each rank its part of the root's buffer."""
        if self.rank != root:
            self.swap([], [(root, receive)] if receive.size else [])
        elif send is not None:
            starts = [0, *itertools.accumulate(counts)]
            parts = [send[a:b] for a, b in itertools.pairwise(starts)]
            self.swap([(k, parts[k]) for k in self._others if counts[k]], [])
            receive[...] = parts[root]

    def exchange(self, send: Buffer, receive: Buffer) -> None:
        """Send row k of ``send`` to rank k, and receive row k from it."""
        receive[self.rank] = send[self.rank]
        self.swap(
            [(k, send[k]) for k in self._others],
            [(k, receive[k]) for k in self._others],
        )


def _wrapped(buffer: Buffer, starts: list[int], first: int, count: int) -> list[Buffer]:
    """Return ``count`` parts from number ``first`` on, wrapping at the last one."""
    size = len(starts) - 1
    last = first + count
    found = [buffer[starts[first] : starts[min(last, size)]]]
    if last > size:
        found.append(buffer[: starts[last - size]])
    return [x for x in found if x.size]


class _Piece:
    """A piece of a buffer that is reduced in slices.

    Attributes:
        rows: the slices of all ranks that this rank combines.
        half: of the scratch memory, which has the rows.
        there: the messages with slices to combine.
        back: the messages with combined slices.
    """

    __slots__ = ("back", "half", "rows", "slices", "source", "target", "there")

    def __init__(
        self, source: Buffer, target: Buffer, slices: list[slice], half: int
    ) -> None:
        self.source = source
        self.target = target
        self.slices = slices
        self.half = half
        self.rows: list[Buffer] = []
        self.there = Transfers()
        self.back = Transfers()
