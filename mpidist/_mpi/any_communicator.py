"""Communicators, as all rooms see them: that of one rank, which works without MPI.

`communicator` has the one over MPI. This one is that of the default strategy.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from mpidist._base.errors import as_told, on_rank
from mpidist._base.reduce_op import MPIOp
from mpidist._mpi.buffers import Buffer, BufferReduction
from mpidist._mpi.requests import Request, Transfer
from mpidist._mpi.traffic import Traffic

_T = TypeVar("_T")


MESSAGE_BYTES: Final = 1016
"""The most bytes of a message that is sent at once (`start_message`)."""


class AnyCommunicator:
    """The interface of all communicators, and its implementation for one rank.

    Attributes:
        rank: of this process.
        size: the number of ranks.
        machine_size: the number of ranks on this machine.
        crowded: whether a machine has more ranks than cores; the same on all ranks.
        local_rank: this rank's number on its node.
        local_size: the number of ranks on its node.
        node_ranks: the ranks of its node, in its order.
        num_nodes: the number of nodes; the same on all ranks.
        smallest_node: the fewest ranks of a node; the same on all ranks.
        node_numbers: the node of each rank, from 0 in the order of their first ranks.
        host_names: the machine of each rank.
        identity: the same on all ranks, and of no other communicator.
        outlives_ranks: whether the job goes on when a rank dies (`survival.is_on`).
        traffic: what this rank has communicated.
    """

    rank: int = 0
    size: int = 1
    machine_size: int = 1
    crowded: bool = False
    local_rank: int = 0
    local_size: int = 1
    num_nodes: int = 1
    smallest_node: int = 1
    identity: str = ""
    outlives_ranks: bool = False

    def __init__(self) -> None:
        self.traffic: Traffic = Traffic()
        self.node_ranks: list[int] = [0]
        self.node_numbers: list[int] = [0]
        self.host_names: list[str] = ["localhost"]

    def together(self, step: Callable[[], _T], what: str) -> _T:
        """Run a step that can fail on one rank; continue if none failed. Collective.

        Args:
            step: what this rank does alone, or what all do in one call of MPI.
            what: the call that it is a step of, for the message.

        Raises:
            Exception: what the step raised on this rank. If it raised on another one:
                a MemoryError if that was one, else a RuntimeError with its text.
        """
        error: Exception | None = None
        result: Any = None
        text = ""
        try:
            result = step()
        except Exception as raised:
            error = raised
            kind = "M" if isinstance(error, MemoryError) else "E"
            text = f"{kind}{type(error).__name__}: {error}"
        texts = self._gather_bytes(text.encode(errors="replace"))
        if error is not None:
            raise as_told(error, self.identity)
        for culprit, other in enumerate(texts):
            if other:
                failure = MemoryError if other[:1] == b"M" else RuntimeError
                reason = f"{what} failed on rank {culprit}: {other[1:].decode()}"
                text = on_rank(self.rank, reason)
                raise as_told(failure(text), self.identity)
        return result

    def allreduce(self, reductions: Sequence[BufferReduction]) -> None:
        """Take the values of the one rank."""
        for reduction in reductions:
            reduction.keep()

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

    def all_gather_objects(self, x: _T) -> list[_T]:
        """Return the objects of all ranks, on all of them: copies, made by pickle."""
        # Empty texts, for which only lengths are gathered if all ranks have one.
        data = b"" if isinstance(x, str) and not x else pickle.dumps(x)
        self.traffic.count("Allgatherv", len(data))
        rows: list[Any] = [
            pickle.loads(x) if x else "" for x in self._gather_bytes(data)
        ]
        return rows

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def all_gather_integers(self, numbers: list[int]) -> list[list[int]]:
        """Return the integers of the one rank."""
        return [list(numbers)]

    def start_message(self, data: bytes | None) -> Request:
        """Return the message."""
        return Transfer(lambda: True, data, lambda: data)

    def start_send(self, data: bytes, receiver: int) -> Request:
        """Do nothing: there is nobody else."""
        return Transfer(lambda: True, data)

    def receive_any(self) -> bytes | None:
        """Return None: there is nobody else."""
        return None

    def losses(self) -> tuple[int, ...] | None:
        """Return None: there is nobody else."""
        return None

    def revoke(self) -> None:
        """Do nothing: there is nobody else."""
