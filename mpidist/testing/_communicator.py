"""A communicator between threads: does the same as `_mpi.communicator`, without MPI.

Sums are computed once for all ranks, in rank order, by NumPy. GPU arrays are copied
through the host.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from mpidist._base import backend
from mpidist._base.errors import CollectiveTimeoutError, format_ranks, on_rank
from mpidist._base.reduce_op import COMBINE, MPIOp
from mpidist._base.types import Array, HostArray
from mpidist._mpi.any_communicator import MESSAGE_BYTES, AnyCommunicator
from mpidist._mpi.buffers import Buffer, BufferReduction
from mpidist._mpi.requests import Begun, Request, StartHeader
from mpidist._mpi.traffic import Traffic
from mpidist.testing._world import Channel, Combine, Part, Pending, Round

# How often a wait in a payload checks for messages from the others.
_LOOK_SECONDS: Final = 0.05


def _copy(x: Array) -> HostArray:
    """Return a new NumPy array with the values of ``x``."""
    return np.array(backend.to_host(x))


def _reduce(op: MPIOp, parts: list[HostArray]) -> HostArray:
    """Reduce arrays into the first of them, in their order."""
    result, *others = parts
    for part in others:
        with np.errstate(all="ignore"):
            COMBINE[op](result, part, out=result, casting="no")
    return result


class ThreadCommunicator(AnyCommunicator):
    """One replica's end of a channel.

    All methods that communicate are collective over the channel.

    Args:
        channel: the channel, used by this communicator only.
        rank: the rank of this replica in it.
        place: the number of this replica among all threads of the run.
        seconds: the deadline of a strategy on it; 0: none.
    """

    def __init__(
        self, channel: Channel, rank: int, place: int, seconds: float = 0.0
    ) -> None:
        self._channel = channel
        self._number = 0
        self.rank = self.local_rank = rank
        self.machine_rank = place
        self.size = self.local_size = self.machine_size = channel.size
        self.smallest_node = channel.size
        self.node_ranks = list(range(channel.size))
        self.node_numbers = [0] * channel.size
        self.host_names = ["localhost"] * channel.size
        self.identity = channel.identity
        self.traffic = Traffic()
        # How long this rank waits for the others in a payload; 0: forever.
        self._timeout = seconds
        self._when_freed: Callable[[], None] = lambda: None

    # --- lifetime ---------------------------------------------------------------

    def on_free(self, function: Callable[[], None]) -> None:
        """Register a function to call when the strategy is closed."""
        self._when_freed = function

    def drop(self) -> None:
        """Do nothing: shared objects are freed when nothing refers to them."""

    def release_unused(self) -> None:
        """Do nothing, as `drop`."""

    def give_back(self) -> None:
        """Call the registered functions: the strategy was closed."""
        self._when_freed()

    # --- calls ------------------------------------------------------------------

    def start(
        self,
        kind: str,
        part: Part,
        combine: Combine | None = None,
        root: int | None = None,
    ) -> Pending:
        """Post this member's part of the next call; see `Channel.post`."""
        self._number += 1
        one = self._channel.post(self.rank, self._number, kind, part, combine, root)
        return Pending(self._channel, self.rank, one)

    def call(
        self,
        kind: str,
        part: Part,
        combine: Combine | None = None,
        root: int | None = None,
    ) -> Part:
        """Make a call and return its result."""
        pending = self.start(kind, part, combine, root)
        start = time.monotonic()
        while not pending.wait_for(_LOOK_SECONDS):
            if self._timeout and time.monotonic() - start > self._timeout:
                raise CollectiveTimeoutError(
                    on_rank(
                        self.rank,
                        f"{format_ranks(pending.missing)} did not reach {kind} "
                        f"within {self._timeout:.3g} s",
                    )
                )
        return pending.result

    def open_headers(self) -> StartHeader:
        """Return what starts to exchange headers between threads."""

        def start(words: tuple[int, ...], begun: Begun) -> Pending:
            pending = self.start("a header", words)
            begun.append((begun[-1][0] + 1, pending))
            return pending

        return start

    def start_message(self, data: bytes | None) -> Pending:
        """Start sending bytes from rank 0 to all; ``data`` is None on the receivers."""
        self.traffic.count("Ibcast", MESSAGE_BYTES)
        return self.start("a message of rank 0", data, root=0)

    def start_send(self, data: bytes, receiver: int) -> Request:
        """Start sending a small message to one rank."""
        self._channel.notices[receiver].append(data)
        sent = Round("a message to one rank", [], set(), done=True)
        return Pending(self._channel, self.rank, sent)

    def receive_any(self) -> bytes | None:
        """Return a message that some rank has sent by `start_send`, or None."""
        notices = self._channel.notices[self.rank]
        return notices.popleft() if notices else None

    # --- reductions -------------------------------------------------------------

    def allreduce(self, reductions: Sequence[BufferReduction]) -> None:
        """Reduce buffers over all ranks, into buffers of all ranks."""
        for reduction in reductions:
            send, receive, op, _ = reduction
            self.traffic.count("Allreduce", receive.nbytes)
            mine = _copy(receive if send is None else send)
            # A number may have one dimension on some ranks and none on others.
            combine = functools.partial(_reduce, op)
            kind = f"an all-reduce ({op} of {mine.size} {mine.dtype})"
            result = self.call(kind, mine.reshape(-1), combine)
            backend.fill(receive, result.reshape(receive.shape))
            reduction.conclude()

    def reduce(self, buffer: Buffer, op: MPIOp, root: int) -> None:
        """Reduce ``buffer`` of all ranks into that of the root; others keep theirs."""
        self.traffic.count("Reduce", buffer.nbytes)
        combine = functools.partial(_reduce, op)
        kind = f"a reduction to rank {root} ({op} of {buffer.size} {buffer.dtype})"
        result = self.call(kind, _copy(buffer), combine)
        if self.rank == root:
            backend.fill(buffer, result)

    # --- copies -----------------------------------------------------------------

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """Copy ``buffer`` of the root to all ranks."""
        self.traffic.count("Bcast", buffer.nbytes)
        kind = f"a broadcast of {buffer.nbytes} bytes from rank {root}"
        if self.rank == root:
            self.start(kind, _copy(buffer), root=root)
        else:
            backend.fill(buffer, self.call(kind, None, root=root))

    def all_gather(self, send: Buffer, receive: Buffer, counts: list[int]) -> None:
        """Concatenate bytes of all ranks, in rank order, on all ranks."""
        self.traffic.count("Allgatherv", send.nbytes)
        kind = f"an all-gather of {counts} bytes"
        backend.fill(receive, self.call(kind, _copy(send), np.concatenate))

    def gather(
        self, send: Buffer, receive: Buffer | None, counts: list[int], root: int
    ) -> None:
        """Concatenate bytes of all ranks, in rank order, on the root only."""
        self.traffic.count("Gatherv", send.nbytes)
        kind = f"a gather of {counts} bytes to rank {root}"
        if self.rank != root:
            self.start(kind, _copy(send), np.concatenate)
            return
        result = self.call(kind, _copy(send), np.concatenate)
        if receive is not None:
            backend.fill(receive, result)

    def scatter(
        self, send: Buffer | None, receive: Buffer, counts: list[int], root: int
    ) -> None:
        """Send each rank its part of the root's bytes."""
        self.traffic.count("Scatterv", receive.nbytes)
        kind = f"a scatter of {counts} bytes from rank {root}"
        part = None if send is None else _copy(send)
        whole = self.call(kind, part, root=root)
        end = sum(counts[: self.rank + 1])
        backend.fill(receive, whole[end - counts[self.rank] : end])

    # --- small messages ---------------------------------------------------------

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        return list(self.call("an exchange of bytes", data))

    def all_gather_integers(self, numbers: list[int]) -> list[list[int]]:
        """Return the integers of each rank (the same number), on all ranks."""
        self.traffic.count("Allgather", 8 * len(numbers))
        rows = self.call("an exchange of integers", [int(n) for n in numbers])
        return [list(row) for row in rows]
