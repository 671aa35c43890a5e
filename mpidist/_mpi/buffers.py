"""MPI's collectives of flat buffers, polled.

Each method starts non-blocking collectives of MPI, and waits for them with a deadline
(`Waiter`). MPI chooses how each moves data. What is decided here is into how many
collectives an array is cut, and for an all-reduce which ones (`Algorithm`).

**Invariants.** All ranks of the communicator call the same method with the same sizes:
the guard ensures it. On the host no array but the scratch memory of an all-reduce is
allocated after a method has begun. A wait that ends with an exception leaks its buffers
(MPI may still write to them), and no call follows on this communicator.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from mpidist._base import backend
from mpidist._base.memory import LINE, leak, round_up
from mpidist._base.reduce_op import COMBINE, MPIOp
from mpidist._base.types import Array, HostArray
from mpidist._mpi.allreduce_algorithm import (
    MOST_PIECE,
    NEVER,
    Algorithm,
    fastest_algorithm,
)
from mpidist._mpi.library import MpiComm, MpiRequest, mpi_module
from mpidist._mpi.ops import op_of
from mpidist._mpi.requests import Transfer, Waiter

_MOST_UNIFIED: Final = 2**16  # bytes
_MOST_MERGED: Final = 2**22

Buffer: TypeAlias = Array
"""A one-dimensional, C-contiguous array on the host or on a GPU."""


class BufferReduction(NamedTuple):
    """A buffer that is to be all-reduced.

    Attributes:
        send: this rank's; None: it is in ``receive``.
        receive: for the result.
        op: the operation.
        then: called with each part of ``receive`` that has its result, in order, while
            other parts are still moving.
    """

    send: Buffer | None
    receive: Buffer
    op: MPIOp
    then: Callable[[slice], None] | None = None

    def keep(self) -> None:
        """Take this rank's values as the result: there is no other rank."""
        if self.send is not None:
            self.receive[...] = self.send
        self.conclude()

    def conclude(self, part: slice | None = None) -> None:
        """Note that a part, or all, of ``receive`` has its result."""
        if self.then is not None:
            self.then(slice(0, self.receive.size) if part is None else part)


class BufferCollectives:
    """Collectives of the ranks of one MPI communicator.

    Args:
        comm: an mpi4py intra-communicator.
        waiter: waits, with a deadline.
        count: told the name of each function of MPI that is called.
        algorithm: of all-reduces; None: `fastest_algorithm`.

    Attributes:
        rank: of this process.
        size: the number of ranks.
        algorithm: of all-reduces.
        same_bits: whether MPI's all-reduce gives all ranks the same bits. If not, one
            rank reduces, and the others get a copy.
        most_bytes: the most bytes of one collective.
    """

    # MPI 3 counts in C ints. Of the class: tests set a smaller one of an object.
    most_bytes = 2**31 - 2**20

    def __init__(
        self,
        comm: MpiComm,
        waiter: Waiter,
        count: Callable[[str], None],
        algorithm: Algorithm | None = None,
    ) -> None:
        self.comm = comm
        self._waiter = waiter
        self._count = count
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.same_bits: bool = True
        self._mpi = mpi_module()
        self.algorithm: Algorithm = algorithm or fastest_algorithm(
            self._mpi.get_vendor()[0], self.size
        )
        self._scratch: HostArray = np.empty(0, np.uint8)

    def start(self, call: Callable[..., MpiRequest], *arguments: Any) -> Transfer:
        """Start a collective, the same on all ranks; `finish` waits for it.

        Args:
            call: a method of ``comm``.
            arguments: its arguments.
        """
        self._count(call.__name__)
        try:
            return Transfer(call(*arguments).Test, arguments)
        except BaseException as error:
            leak(arguments)
            raise self._waiter.failed(error) from None

    def finish(self, transfer: Transfer) -> None:
        """Wait for what `start` has started.

        Raises:
            CollectiveTimeoutError: at the deadline; the buffers are then leaked.
        """
        try:
            self._waiter.wait_data(transfer)
        except BaseException:
            transfer.leak()
            raise

    # --- reductions -------------------------------------------------------------

    def allreduce(self, reductions: Sequence[BufferReduction]) -> None:
        """Reduce buffers over all ranks, into buffers of all ranks.

        Args:
            reductions: with the same sizes and operations on all ranks. Their pieces
                move as if they were those of one buffer.
        """
        pieces: list[tuple[BufferReduction, slice, bool]] = []
        for reduction in reductions:
            receive = reduction.receive
            if self.size == 1 or not receive.size:
                reduction.keep()
            elif not self.same_bits:
                self._reduce_and_broadcast(reduction)
            elif backend.is_device_array(receive):
                self._allreduce_on_device(reduction)
            else:
                is_sum, least = reduction.op == "SUM", self.algorithm.exchanged_bytes
                exchanges = is_sum and receive.nbytes >= least
                parts = self._pieces(receive, self.algorithm)
                pieces += [(reduction, part, exchanges) for part in parts]
        slots = self._slots(pieces)
        steps: list[Iterator[None]] = []
        for number, (reduction, part, exchanges) in enumerate(pieces):
            move = self._exchange if exchanges else self._iallreduce
            steps.append(move(reduction, part, slots[number % len(slots)]))
        try:
            self._interleave(steps)
        except BaseException:
            leak((reductions, slots, steps))  # others may be in progress
            raise

    def _interleave(self, pieces: Sequence[Iterator[None]]) -> None:
        """Make the steps of pieces: each begins with the wait for what the last began.

        The next step of a piece is made when ``in_flight`` others have made theirs:
        those are moving while this rank adds, or concludes. A piece is waited for
        before the one that uses the same scratch memory starts.
        """
        lag = self.algorithm.in_flight
        for number in range(len(pieces) + 2 * lag):
            for piece in (number - lag, number, number - 2 * lag):
                if 0 <= piece < len(pieces):
                    next(pieces[piece], None)

    def _allreduce_on_device(self, reduction: BufferReduction) -> None:
        send, receive, op, _ = reduction
        for part in self._pieces(receive, Algorithm(False, 1, MOST_PIECE, NEVER)):
            source = self._mpi.IN_PLACE if send is None else send[part]
            self._block(
                self.comm.Allreduce, source, receive[part], op_of(receive.dtype, op)
            )
            reduction.conclude(part)

    def _reduce_and_broadcast(self, reduction: BufferReduction) -> None:
        send, receive, op, _ = reduction
        if send is not None:
            receive[...] = send
            backend.synchronize(receive)
        self.reduce(receive, op, 0)
        self.broadcast(receive, 0)
        reduction.conclude()

    def _iallreduce(
        self, reduction: BufferReduction, part: slice, slot: HostArray
    ) -> Iterator[None]:
        """Make the steps of a piece: MPI's all-reduce; what follows it."""
        send, receive, op, _ = reduction
        target = receive[part]
        if send is None:  # not MPI_IN_PLACE: see `fastest_algorithm`
            source = slot[: target.nbytes].view(target.dtype)
            source[...] = target
        else:
            source = send[part]
        transfer = self.start(
            self.comm.Iallreduce, source, target, op_of(target.dtype, op)
        )
        yield
        self.finish(transfer)
        _unify_nans(target)
        reduction.conclude(part)

    def _exchange(
        self, reduction: BufferReduction, part: slice, slot: HostArray
    ) -> Iterator[None]:
        """Make the steps of a piece: get this rank's part; add, gather; what follows.

        The parts of a rank come from all of them, and its sums go to all.
        """
        send, receive, op, _ = reduction
        target = receive[part]
        source = target if send is None else send[part]
        starts = [target.size * rank // self.size for rank in range(self.size + 1)]
        counts = [b - a for a, b in itertools.pairwise(starts)]
        own, places = counts[self.rank], (counts, starts[:-1])
        rows = slot.view(target.dtype)[: self.size * own].reshape(self.size, own)
        same = ([own] * self.size, [own * rank for rank in range(self.size)])
        transfer = self.start(self.comm.Ialltoallv, [source, places], [rows, same])
        yield
        self.finish(transfer)
        mine = target[starts[self.rank] :][:own]
        COMBINE[op](rows[0], rows[1], out=mine)
        for row in rows[2:]:
            COMBINE[op](mine, row, out=mine)
        transfer = self.start(
            self.comm.Iallgatherv, self._mpi.IN_PLACE, [target, places]
        )
        yield
        self.finish(transfer)
        reduction.conclude(part)

    def _pieces(self, buffer: Buffer, algorithm: Algorithm) -> list[slice]:
        """Return equal pieces of a buffer, of whole cache lines."""
        most = min(MOST_PIECE, self.most_bytes)
        count = max(
            1, buffer.nbytes // algorithm.piece_bytes, -(-buffer.nbytes // most)
        )
        step = round_up(-(-buffer.size // count), LINE)
        return [slice(i, i + step) for i in range(0, buffer.size, step)]

    def _slots(
        self, pieces: Sequence[tuple[BufferReduction, slice, bool]]
    ) -> list[HostArray]:
        """Return scratch memory for each piece in flight.

        It holds a copy of a piece, or this rank's part of it from all ranks; one part
        may have an element more than others.
        """
        most = 0
        for (send, receive, *_), part, exchanges in pieces:
            if exchanges or send is None:
                nbytes = (part.stop - part.start + self.size) * receive.itemsize
                most = max(most, round_up(nbytes, LINE))
        count = min(len(pieces), self.algorithm.in_flight)
        if self._scratch.nbytes < count * most:
            self._scratch = np.empty(count * most, np.uint8)
        return [self._scratch[k * most :][:most] for k in range(count)]

    def reduce(self, buffer: Buffer, op: MPIOp, root: int) -> None:
        """Reduce ``buffer`` of all ranks into that of the root; others keep theirs."""
        if self.size == 1 or not buffer.size:
            return
        mpi_op = op_of(buffer.dtype, op)

        def arguments(part: Buffer) -> tuple[Any, ...]:
            if self.rank == root:
                return self._mpi.IN_PLACE, part, mpi_op, root
            return part, None, mpi_op, root

        self._run_in_pieces(buffer, "Reduce", arguments)

    # --- copies -----------------------------------------------------------------

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """Copy ``buffer`` of the root to all ranks."""
        if self.size == 1 or not buffer.size:
            return
        self._run_in_pieces(buffer, "Bcast", lambda part: (part, root))

    def _run_in_pieces(
        self,
        buffer: Buffer,
        name: Literal["Reduce", "Bcast"],
        arguments: Callable[[Buffer], tuple[Any, ...]],
    ) -> None:
        blocks = backend.is_device_array(buffer)
        call = getattr(self.comm, name if blocks else f"I{name.lower()}")
        step = max(1, min(MOST_PIECE, self.most_bytes) // buffer.itemsize)
        for i in range(0, buffer.size, step):
            part = buffer[i : i + step]
            if blocks:
                self._block(call, *arguments(part))
            else:
                self.move(call, *arguments(part))

    def move(self, call: Callable[..., MpiRequest], *arguments: Any) -> None:
        """Start a collective with these arguments, and wait for it."""
        self.finish(self.start(call, *arguments))

    def _block(self, call: Callable[..., object], *arguments: Any) -> None:
        """Move GPU buffers by a call that blocks, if MPI is CUDA-aware."""
        self._count(call.__name__)
        self._waiter.block(functools.partial(call, *arguments))

    def all_gather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        """Concatenate buffers of all ranks, in rank order, on all ranks.

        Args:
            send: this rank's ``counts[rank]`` elements.
            receive: the sum of ``counts``.
            counts: elements of each rank; the same on all ranks.
        """
        if not any(counts):
            return
        send, receive = send[: counts[self.rank]], receive[: sum(counts)]
        unequal = len(set(counts)) > 1
        if receive.nbytes > self.most_bytes or (unequal and not _has_iallgatherv()):
            ends = [*starts_of(counts), None]
            for root in range(self.size):
                part = receive[ends[root] : ends[root + 1]]
                if root == self.rank:
                    part[...] = send
                    backend.synchronize(part)
                self.broadcast(part, root)
            return
        where = [receive, (counts, starts_of(counts))]
        if backend.is_device_array(receive):
            self._block(self.comm.Allgatherv, send, where)
        elif unequal:
            self.move(self.comm.Iallgatherv, send, where)
        else:
            self.move(self.comm.Iallgather, send, receive)

    def gather(
        self, send: Buffer, receive: Buffer | None, counts: Sequence[int], root: int
    ) -> None:
        """Concatenate buffers of all ranks, in rank order, on the root alone."""
        for part, whole in self._parts_of_all(send, receive, counts):
            self.move(self.comm.Igatherv, part, whole, root)

    def scatter(
        self, send: Buffer | None, receive: Buffer, counts: Sequence[int], root: int
    ) -> None:
        """Give each rank its part of the root's buffer."""
        for part, whole in self._parts_of_all(receive, send, counts):
            self.move(self.comm.Iscatterv, whole, part, root)

    def _parts_of_all(
        self, own: Buffer, whole: Buffer | None, counts: Sequence[int]
    ) -> Iterator[tuple[Buffer, list[Any] | None]]:
        """Yield pairs for one collective each: a part of ``own``, and one of ``whole``.

        Usually there is one pair. What is too large for one collective is moved in
        parts of one rank at a time, to which the other ranks contribute nothing.

        Args:
            own: the buffer of this rank.
            whole: on the root the buffer with the parts of all ranks; elsewhere None.
            counts: elements of each rank.
        """
        if sum(counts) * own.itemsize <= self.most_bytes:
            everywhere = (counts, starts_of(counts))
            yield own, None if whole is None else [whole, everywhere]
            return
        step = max(1, self.most_bytes // own.itemsize)
        for rank, (start, count) in enumerate(
            zip(starts_of(counts), counts, strict=True)
        ):
            for first in range(0, count, step):
                size = min(step, count - first)
                here = own[first : first + size] if rank == self.rank else own[:0]
                sizes = [size if r == rank else 0 for r in range(self.size)]
                place = None
                if whole is not None:
                    at = start + first
                    place = [whole[at : at + size], (sizes, [0] * self.size)]
                yield here, place

    def merge(self, own: HostArray, counts: Sequence[int]) -> HostArray:
        """Return the concatenation of small arrays of all ranks, in rank order.

        Up to 4 MiB by an all-reduce, to which each rank gives zeros for the others.
        Open MPI's all-gathers connect each rank with every other (over TCP that takes a
        descriptor for each of them, which ends at a thousand ranks), its all-reduces
        with a few.

        Args:
            own: integers, this rank's ``counts[rank]``.
            counts: elements of each rank; the same on all ranks.
        """
        most = max(counts)
        if self.size * most * own.itemsize > _MOST_MERGED:
            result = np.empty(sum(counts), own.dtype)
            self.all_gather(own, result, counts)
            return result
        rows = np.zeros((self.size, most), own.dtype)
        rows[self.rank, : own.size] = own
        if most:
            self.move(self.comm.Iallreduce, self._mpi.IN_PLACE, rows, self._mpi.BOR)
        return np.concatenate([row[:n] for row, n in zip(rows, counts, strict=True)])

    def exchange(self, send: Buffer, receive: Buffer) -> None:
        """Send row k of ``send`` to rank k, and receive row k from it."""
        self.move(self.comm.Ialltoall, send, receive)


@functools.cache
def _has_iallgatherv() -> bool:
    """Return whether ``Iallgatherv`` ends.

    Intel MPI's does not, on one of the ranks, where one of them has 1 MiB and another
    nothing (2021.18.1, 2 to 4 ranks, unless I_MPI_ADJUST_IALLGATHERV is 2 or 4).
    """
    return bool(mpi_module().get_vendor()[0] != "Intel MPI")


def starts_of(counts: Sequence[int]) -> list[int]:
    """Return where the part of each rank begins."""
    return [0, *itertools.accumulate(counts)][:-1]


def _unify_nans(total: HostArray) -> None:
    """Do as ``md_unify_nans`` of the core (``_native/kernels.h``), for all kinds."""
    if total.nbytes <= _MOST_UNIFIED and total.dtype.kind in "fc":
        parts = total.view(total.real.dtype)
        parts[np.isnan(parts)] = np.nan
