"""The route of small nests of host arrays between few ranks without shared memory.

The data is sent behind the header (`headers.Rows`): one exchange instead of two. Every
rank writes its leaves to its send buffer, finds those of the others in its receive
buffers, and adds all in rank order.

A rank that has failed sends no data: its header says so, and all raise. Ranks whose
headers agree have the same plan, and so the same layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import numpy as np

from mpidist._agreement.channel import MessageChannel
from mpidist._agreement.mismatch import Call
from mpidist._base.memory import round_up
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array, DType, HostArray, Shape
from mpidist._engine.buckets import Results
from mpidist._engine.dtype_table import Reduction
from mpidist._engine.plans import PlanResources, Signature
from mpidist._mpi.messages import COMBINE

_ALIGNMENT: Final = 16  # that all dtypes need


def header(resources: PlanResources, signature: Signature) -> HeaderReduce | None:
    """Return the plan of a small nest, if ranks exchange headers by messages."""
    channel = resources.guard.channel
    if not isinstance(channel, MessageChannel) or not resources.guard.enabled:
        return None
    if signature.root is not None or signature.compress is not None:
        return None
    if signature.transports.mixed:  # a rank with arrays on a GPU uses another route
        return None
    if any(x.on_device or x.reduction.mpi == "gather" for x in signature.leaves):
        return None
    nbytes = [leaf.size * leaf.reduction.wire.itemsize for leaf in signature.leaves]
    if not 0 < sum(round_up(n, _ALIGNMENT) for n in nbytes) <= channel.room:
        return None
    return HeaderReduce(resources, signature, channel)


class HeaderReduce:
    """All-reduces small nests, each with its header."""

    def __init__(
        self, resources: PlanResources, signature: Signature, channel: MessageChannel
    ) -> None:
        self.call = signature.call
        self._guard = resources.guard
        self._traffic = resources.comm.traffic
        self._size = resources.comm.size
        self._channel = channel
        self._leaves: list[_Leaf] = []
        at, rank = 0, resources.comm.rank
        self._payload = 0
        for leaf in signature.leaves:
            wire, reduction = leaf.reduction.wire, leaf.reduction
            nbytes = leaf.size * wire.itemsize
            parts = [
                row[at : at + nbytes].view(wire).reshape(leaf.shape)
                for row in channel.payload_rows
            ]
            plain = reduction.encoding == "none" and reduction.op is not ReduceOp.MEAN
            self._leaves.append(
                _Leaf(
                    leaf.shape,
                    reduction,
                    parts[rank],
                    parts[0],
                    parts[1:],
                    COMBINE[reduction.mpi],  # type: ignore[index]
                    plain,
                    reduction.result,
                )
            )
            self._payload += nbytes
            at += round_up(nbytes, _ALIGNMENT)
        self._nbytes = at

    def __call__(
        self,
        arrays: list[Array],
        call: Call | None = None,
        timeout: float | None = None,
    ) -> Results:
        """Agree with the other ranks, and reduce; see `Plan`."""
        # An exception of NumPy (`np.seterr`) would leave the others waiting.
        with np.errstate(all="ignore"):
            return self._reduce(arrays, call or self.call, timeout)

    def _reduce(
        self, arrays: list[Array], call: Call, timeout: float | None
    ) -> Results:
        guard, channel, nbytes = self._guard, self._channel, self._nbytes
        results: Results = []
        if guard.blocked:  # MPI may still read what would be written here
            guard.enter(call, timeout)
        try:
            # Allocate before the agreement: a failure must be reported to all ranks.
            for x, leaf in zip(arrays, self._leaves, strict=True):
                results.append(np.empty(leaf.shape, leaf.result))
                leaf.load(x)
        except Exception as error:
            raise guard.fail(call, error, "invalid") from None
        patience = guard.enter(call, timeout)
        number, traffic = call.fingerprint, self._traffic
        with traffic:
            try:
                status = channel.meet_with(number, patience, nbytes)
            except BaseException as error:
                raise guard.leave_payload(call, error) from None
            if status:
                guard.conclude(status, lambda ms: channel.meet_with(number, ms, nbytes))
            else:
                guard.count()
        try:
            for result, leaf in zip(results, self._leaves, strict=True):
                leaf.reduce(result, self._size)
        except Exception as error:  # no memory for the conversion
            raise guard.fail(call, error, "raised") from None
        traffic.count("Allreduce", self._payload)
        return results


@dataclasses.dataclass(slots=True)
class _Leaf:
    """A leaf of a nest, and the buffers of all ranks for it."""

    shape: Shape
    reduction: Reduction
    mine: HostArray
    first: HostArray
    others: list[HostArray]
    combine: Callable[..., HostArray]
    plain: bool
    result: DType

    def load(self, x: Array) -> None:
        """Write this rank's leaf to the send buffer."""
        if self.plain:
            self.mine[...] = x
        else:
            self.reduction.encode(x, self.mine)

    def reduce(self, out: HostArray, size: int) -> None:
        """Combine the leaves of all ranks, in rank order."""
        combine, total = self.combine, self.first
        target = out if self.plain else None
        for part in self.others:
            total = combine(total, part, out=target)
        if not self.plain:
            self.reduction.decode(total, size, out)
