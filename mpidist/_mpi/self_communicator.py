"""The group of one replica, which works without MPI: that of the default strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpidist._mpi.buffers import Buffer, MPIOp
from mpidist._mpi.communicator import MESSAGE_BYTES, Request
from mpidist._mpi.traffic import Traffic

_T = TypeVar("_T")


class SelfCommunicator:
    """The group of one: what `Communicator` does, for one rank without MPI."""

    rank = 0
    size = 1
    local_rank = 0
    local_size = machine_size = 1
    num_nodes = smallest_node = 1
    outlives_ranks = False
    message_bytes = MESSAGE_BYTES
    identity = ""

    def __init__(self) -> None:
        self.traffic: Traffic = Traffic()
        self.node_ranks: list[int] = [0]
        self.node_numbers: list[int] = [0]
        self.host_names: list[str] = ["localhost"]

    def together(self, step: Callable[[], _T], what: str) -> _T:
        """Run the step."""
        return step()

    def allreduce(self, send: Buffer, receive: Buffer, op: MPIOp) -> None:
        """Copy ``send`` into ``receive``."""
        receive[...] = send

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

    def start_message(self, data: bytes | None) -> Request:
        """Return the message."""
        return _Done(data)

    def start_send(self, data: bytes, receiver: int) -> Request:
        """Do nothing: there is nobody else."""
        return _Done(None)

    def receive_any(self) -> bytes | None:
        """Return None: there is nobody else."""
        return None

    def losses(self) -> tuple[int, ...] | None:
        """Return None: there is nobody else."""
        return None

    def revoke(self) -> None:
        """Do nothing: there is nobody else."""


class _Done:
    """A request that has completed already."""

    def __init__(self, result: object) -> None:
        self.result = result

    def leak(self) -> None:
        """Do nothing: it has completed."""

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        return True
