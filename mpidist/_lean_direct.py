"""The short way of an all-reduce of one host array by MPI: a header, and the array.

For ranks that do not all share memory. As in `_lean`, what does not depend on the
values is made at the first call of a dtype and shape. What other ranks see of a call is
what the long way shows, so some may go this way and others that.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist._options import ReduceOp
from mpidist._pool import SMALLEST

if TYPE_CHECKING:
    from mpidist._fusion import Leaf
    from mpidist._guard import Guard
    from mpidist._pool import Pool
    from mpidist._reports import Call
    from mpidist._transports import DirectTransport


def make(
    guard: Guard, call: Call, leaf: Leaf, transport: DirectTransport, pool: Pool
) -> DirectReduce | None:
    """Return the short way for arrays such as ``leaf``; None where there is none.

    Args:
        guard: of the strategy.
        call: what the header says.
        leaf: what is known of the arrays, which go uncompressed.
        transport: through which they go.
        pool: where memory for results comes from.
    """
    reduction = leaf.reduction
    if reduction.encoding != "none" or reduction.mpi == "gather":
        return None
    if leaf.on_device or leaf.size == 0:
        return None
    return DirectReduce(guard, call, leaf, transport, pool)


class DirectReduce:
    """All-reduces arrays of one dtype and shape."""

    __slots__ = (
        "_call",
        "_char",
        "_data",
        "_dtype",
        "_empty",
        "_guard",
        "_nbytes",
        "_reduce",
        "_shape",
        "_traffic",
    )

    def __init__(
        self,
        guard: Guard,
        call: Call,
        leaf: Leaf,
        transport: DirectTransport,
        pool: Pool,
    ) -> None:
        reduction = leaf.reduction
        operation: Any = reduction.mpi
        self._guard = guard
        self._call = call
        self._data = guard.pack(call, 0)
        self._traffic = transport.comm.traffic
        self._shape = leaf.shape
        self._dtype = reduction.wire
        self._char = self._dtype.char
        self._nbytes = leaf.size * self._dtype.itemsize
        divisor = transport.comm.size if reduction.op is ReduceOp.MEAN else None
        self._reduce = transport.reducer(self._nbytes, operation, divisor)
        self._empty = pool.empty if self._nbytes >= SMALLEST else np.empty

    def __call__(self, x: Any) -> Any:
        """Return the result; None where ``x`` has to go the long way. Collective."""
        flags = x.flags
        if not (flags.c_contiguous and flags.aligned):
            return None  # mpi4py has no MPI datatype for what is not aligned
        start = time.perf_counter()
        try:
            result = self._empty(self._shape, self._dtype)
        except MemoryError:
            return None  # where all ranks are told
        if x.dtype.char != self._char:  # equal to NumPy, but not to mpi4py: q and l
            x = x.view(self._dtype)
        self._guard.agree_packed(self._call, self._data, 0)
        try:
            self._reduce(x, result)
        except BaseException as error:
            raise self._guard.leave_payload(self._call, error) from None
        self._traffic.add("Allreduce", self._nbytes, start)
        return result
