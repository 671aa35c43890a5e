"""Messages from rank 0: byte strings for which all other ranks wait.

On one node they go through a ring buffer in the core's channel: rank 0 does not wait
for readers while there is room. Otherwise they are broadcast by MPI: a short one whole,
a long one after its length.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np

from mpidist import _native
from mpidist._agreement.channel import LEFT, LeftError
from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call, call_of
from mpidist._mpi.any_communicator import MESSAGE_BYTES, AnyCommunicator
from mpidist._timeline.observer import Observers, Span, observed

_MESSAGE_ROOM: Final = 2**20
_SENDING: Final = Call("a message to all ranks")
FROM_RANK_0: Final = "a message from rank 0"


# How messages are observed (`observer`).


def _sends(
    observers: Observers, messages: RootMessages, data: bytes
) -> AbstractContextManager[Any]:
    number = messages.guard.sequence + 1
    return observers.call(len(data), messages.route, _SENDING.text, number)


def _receives(
    observers: Observers, messages: RootMessages, what: str = FROM_RANK_0, **_: object
) -> AbstractContextManager[Any]:
    return observers.call(0, messages.route, what, messages.guard.sequence + 1)


def _has_received(span: Span, data: bytes) -> None:
    if span.kind == "message":  # else it is part of a call, which has its own bytes
        span.nbytes = len(data)


class RootMessages:
    """Sends messages from rank 0 to all other ranks.

    Args:
        comm: the ranks.
        guard: waits for them, with its deadline.
        ring: the core's channel, if all ranks share its ring buffer; else None.
    """

    def __init__(
        self, comm: AnyCommunicator, guard: Guard, ring: _native.Channel | None
    ) -> None:
        self.comm = comm
        self.guard = guard
        self.ring = ring
        self.route = "mpi" if ring is None else "shared"
        # For the rest of messages of medium length: after rank 0 has sent the length no
        # allocation may fail. A page of it uses no memory before its first use.
        self._message_room = np.empty(_MESSAGE_ROOM, np.uint8)

    @observed(_sends)
    def send(self, data: bytes) -> None:
        """Send bytes from rank 0 to all ranks, which wait for them."""
        comm, guard, ring = self.comm, self.guard, self.ring
        guard.sequence += 1
        if ring is not None:
            comm.traffic.count("Ibcast", len(data))
            guard.begin(_SENDING)
            room = _native.core.MESSAGE_BYTES - 1
            try:  # in parts, of which the first byte marks the last
                for start in range(0, len(data) or 1, room):
                    head = b"\1" if start + room >= len(data) else b"\0"
                    if ring.post(head + data[start : start + room]) == LEFT:
                        raise LeftError(ring.who)
            except BaseException as error:
                raise guard.abandon(_SENDING, error) from error.__cause__
            return
        short = len(data) < MESSAGE_BYTES
        head = b"\1" + data if short else b"\0" + len(data).to_bytes(8, "little")
        guard.waits.wait(comm.start_message(head), "a message")
        if not short:
            raw = np.frombuffer(data, np.uint8)
            if len(data) > _MESSAGE_ROOM:
                comm.together(lambda: None, FROM_RANK_0)  # the others allocate
            comm.broadcast(raw, 0)

    @observed(_receives, _has_received)
    def receive(self, what: str = FROM_RANK_0, timeout: float | None = None) -> bytes:
        """Return the bytes that rank 0 sends.

        Args:
            what: what this rank waits for, in messages about the deadline.
            timeout: seconds to wait; None: the strategy's; 0: forever.
        """
        comm, guard, ring = self.comm, self.guard, self.ring
        guard.sequence += 1
        if ring is not None:
            call = call_of(what)
            guard.begin(call, timeout)
            parts: list[bytes] = []
            try:
                while not (parts and parts[-1].startswith(b"\1")):
                    part = ring.take()
                    if isinstance(part, int):  # LEFT
                        raise LeftError(ring.who)
                    parts.append(part)
            except BaseException as error:
                raise guard.abandon(call, error) from error.__cause__
            data = b"".join([part[1:] for part in parts])
            comm.traffic.count("Ibcast", len(data))
            return data
        with comm.traffic:
            request = comm.start_message(None)
            guard.waits.wait(request, what, timeout)
            head: bytes = request.result
            if head[:1] == b"\1":
                return head[1:]
            size = int.from_bytes(head[1:], "little")
            rest = self._message_room[:size]
            if size > _MESSAGE_ROOM:
                rest = comm.together(lambda: np.empty(size, np.uint8), what)
            comm.broadcast(rest, 0)
            return rest.tobytes()
