"""The short way of an all-reduce: one host array, through shared memory.

What a training step does most often should cost least. For one array in the memory of
the host, without options of its own, everything that does not depend on the values is
made once, and a call looks it up by dtype and shape:

- `FusedReduce`, for small arrays: the array and the header of the guard are published
  together, so that one exchange between the ranks does for both;
- `HostedReduce`, for larger ones: the result is where the other ranks read it;
- `StreamReduce`, where there is no room for that: a header, then a stream of pieces.

Another rank may go the long way in the same call: its leaf is no plain array, or it
gives options that change nothing. The header tells, by the mark of a fused array, which
is not compared: where the marks differ all ranks go the long way, and nothing is lost.

Why fused arrays need two places only: an array has the place of its header, by turns. A
rank writes array k + 2 after it has completed header k + 1, so all have begun k + 1, so
all have read k. Where a header is confirmed by a second one, nobody reads the array.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mpidist._options import ReduceOp
from mpidist._pool import SMALLEST
from mpidist._transports import COMBINE, IGNORED, NOWHERE, Hosting, SharedTransport

if TYPE_CHECKING:
    from mpidist._fusion import Leaf
    from mpidist._guard import Guard
    from mpidist._pool import Pool
    from mpidist._reports import Call

# What overflows becomes infinite, as it does in MPI. Entering `numpy.errstate` would
# cost more than the sum; where warnings are errors, `IGNORED` are caught.
for _module in (r"mpidist\._lean", r"mpidist\._transports\._hosting"):
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=_module)
_FUSED: Final = 1  # the mark of a fused array in its header
# Smaller arrays in memory that the ranks share are copied in faster than the long way
# finds where they are.
_RESIDENT: Final = 4 * 2**20
HOSTED: Final = 2
"""The mark of arrays whose results are where all ranks can write."""


def make(
    guard: Guard,
    call: Call,
    leaf: Leaf,
    transport: SharedTransport,
    pool: Pool,
    move: Callable[[Any, Any], None],
    resides: Callable[[Any], bool],
    meets: Callable[[], bool],
    hosting: Hosting | None,
) -> FusedReduce | HostedReduce | StreamReduce | None:
    """Return the short way for arrays such as ``leaf``; None where there is none.

    Args:
        guard: of the strategy.
        call: what the header says.
        leaf: what is known of the arrays.
        transport: through which they go.
        pool: where memory for results comes from.
        move: reduces an array into another, the long way, after the header.
        resides: whether an array is in memory that the ranks share, where it is
            better reduced in place. Small ones are as fast with their header.
        meets: whether arrays of a stream have a header: not where the guard is off, but
            for the sake of resident arrays. Alike on all ranks.
        hosting: reduces such arrays where the other ranks read the result, if it can.
    """
    if not _can_be_lean(leaf):
        return None
    if is_fused(leaf, transport):
        return FusedReduce(guard, call, leaf, transport, pool, move)
    if hosting is not None:
        return HostedReduce(guard, call, leaf, transport, pool, move, resides, hosting)
    return StreamReduce(guard, call, leaf, transport, pool, resides, meets)


def is_fused(leaf: Leaf, transport: SharedTransport) -> bool:
    """Whether a single leaf goes with its header, also where the guard is off.

    What this asks for is the same on all ranks. A rank that goes the long way has to
    exchange that header too.
    """
    nbytes = leaf.size * leaf.reduction.wire.itemsize
    return _can_be_lean(leaf) and nbytes <= transport.fused_bytes


def _can_be_lean(leaf: Leaf) -> bool:
    reduction = leaf.reduction
    return reduction.encoding == "none" and reduction.mpi != "gather" and leaf.size > 0


class FusedReduce:
    """All-reduces small arrays of one dtype and shape, each with its header."""

    __slots__ = (
        "_call",
        "_combine",
        "_count",
        "_data",
        "_dtype",
        "_empty",
        "_guard",
        "_move",
        "_nbytes",
        "_shape",
        "_traffic",
        "_transport",
        "_turns",
    )

    def __init__(
        self,
        guard: Guard,
        call: Call,
        leaf: Leaf,
        transport: SharedTransport,
        pool: Pool,
        move: Callable[[Any, Any], None],
    ) -> None:
        reduction = leaf.reduction
        operation: Any = reduction.mpi
        self._guard = guard
        self._call = call
        self._move = move
        self._data = guard.pack(call, _FUSED)
        self._transport = transport
        self._traffic = transport.comm.traffic
        self._shape = leaf.shape
        self._dtype = reduction.wire
        self._nbytes = leaf.size * self._dtype.itemsize
        self._combine = COMBINE[operation]
        self._empty = pool.empty if self._nbytes >= SMALLEST else np.empty
        self._count: Any = None
        if reduction.op is ReduceOp.MEAN:
            self._count = self._dtype.type(transport.comm.size)
        self._turns = []
        for turn in (0, 1):
            parts = transport.fused_parts(turn, leaf.shape, self._dtype)
            self._turns.append((parts[transport.comm.rank], *parts[:2], parts[2:]))

    def __call__(self, x: Any) -> Any:
        """Return the result; None where ``x`` has to go the long way. Collective."""
        start = time.perf_counter()
        try:
            result = self._empty(self._shape, self._dtype)
        except MemoryError:
            return None  # where all ranks are told
        transport = self._transport
        mine, first, second, others = self._turns[transport.board.headers & 1]
        mine[...] = x
        if not self._guard.agree_packed(self._call, self._data, _FUSED):
            self._move(x, result)
            return result
        combine = self._combine
        try:  # contextlib.suppress would cost as much as the sum
            combine(first, second, out=result)
        except IGNORED:  # the result is whole
            pass
        if others:
            self._add(result, others)
        if self._count is not None:
            self._divide(result)
        self._traffic.add("Allreduce", self._nbytes, start)
        return result

    def _add(self, result: Any, others: Any) -> None:
        for other in others:
            try:
                self._combine(result, other, out=result)
            except IGNORED:
                pass

    def _divide(self, result: Any) -> None:
        try:
            np.true_divide(result, self._count, out=result)
        except IGNORED:
            pass


class HostedReduce:
    """All-reduces arrays of one dtype and shape, each to where all ranks can write."""

    def __init__(
        self,
        guard: Guard,
        call: Call,
        leaf: Leaf,
        transport: SharedTransport,
        pool: Pool,
        move: Callable[[Any, Any], None],
        resides: Callable[[Any], bool],
        hosting: Hosting,
    ) -> None:
        self._guard = guard
        self._call = call
        self._move = move
        self._resides = resides
        self._data = guard.pack(call, HOSTED)
        self._board = transport.board
        self._traffic = transport.comm.traffic
        self._pool = pool
        self._shape = leaf.shape
        self._dtype = leaf.reduction.wire
        self._hosting = hosting
        self._nbytes = leaf.size * self._dtype.itemsize

    def __call__(self, x: Any) -> Any:
        """Return the result; None where ``x`` has to go the long way. Collective."""
        if not x.flags.c_contiguous or (
            x.base is not None and self._nbytes >= _RESIDENT and self._resides(x)
        ):
            return None
        start = time.perf_counter()
        hosting = self._hosting
        arrays = [x.reshape(-1)]
        try:
            place = hosting.place()
            if place is None:
                result = self._pool.empty(self._shape, self._dtype)
                self._board.note(NOWHERE)
            else:
                block, offset = place
                result = np.ndarray(self._shape, self._dtype, block)
                self._board.note(offset)
                hosting.copy_in(offset, arrays)
        except MemoryError:
            return None  # where all ranks are told
        if not self._guard.agree_packed(self._call, self._data, HOSTED):
            self._move(x, result)
            return result
        try:
            offsets = self._board.notes()
            hosted = min(offsets) != NOWHERE
            if hosted:
                hosting.reduce(offsets, arrays)
        except BaseException as error:
            raise self._guard.leave_payload(self._call, error) from None
        if hosted:
            self._traffic.add("Allreduce", self._nbytes, start)
        else:
            self._move(x, result)
        return result


class StreamReduce:
    """All-reduces arrays of one dtype and shape, piece by piece."""

    def __init__(
        self,
        guard: Guard,
        call: Call,
        leaf: Leaf,
        transport: SharedTransport,
        pool: Pool,
        resides: Callable[[Any], bool],
        meets: Callable[[], bool],
    ) -> None:
        reduction = leaf.reduction
        operation: Any = reduction.mpi
        self._guard = guard
        self._call = call
        self._resides = resides
        self._meets = meets
        self._data = guard.pack(call, 0)
        self._transport = transport
        self._pool = pool
        self._shape = leaf.shape
        self._dtype = reduction.wire
        self._op = operation
        self._mean = reduction.op is ReduceOp.MEAN
        self._schedule = transport.stream.schedule((leaf.size,), self._dtype)
        self._nbytes = leaf.size * self._dtype.itemsize

    def __call__(self, x: Any) -> Any:
        """Return the result; None where ``x`` has to go the long way. Collective."""
        if not x.flags.c_contiguous or (x.base is not None and self._resides(x)):
            return None
        start = time.perf_counter()
        try:
            result = self._pool.empty(self._shape, self._dtype)
        except MemoryError:
            return None  # where all ranks are told
        if self._meets():
            self._guard.agree_packed(self._call, self._data, 0)
        else:
            self._guard.agree(self._call)  # that the strategy can be used
        transport = self._transport
        try:
            transport.stream.reduce(
                self._schedule,
                [x.reshape(-1)],
                [result.reshape(-1)],
                self._op,
                transport.comm.size if self._mean else None,
            )
        except BaseException as error:
            raise self._guard.leave_payload(self._call, error) from None
        transport.comm.traffic.add("Allreduce", self._nbytes, start)
        return result
