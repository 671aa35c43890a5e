"""Communicators: flat buffers and small messages over MPI.

`Communicator` is a private duplicate of an MPI communicator. What all rooms ask of one
is `AnyCommunicator`: `mpidist.testing` has another for replicas that are threads.

Methods that communicate are collective over the communicator, unless they say
otherwise, and count what they are given (`Traffic`). Buffers are one-dimensional and
C-contiguous; large ones are moved in pieces, since MPI 3 counts in ints.

Data goes by MPI's non-blocking collectives, which are polled (`buffers`), and what is
started and not waited for here is a `Request`. How long a rank waits, and what it does
while it waits, is up to the `Waiter` that the communicator is made with. What blocks in
MPI: making communicators of some of the ranks and giving communicators back, after a
polled step, which shows that all ranks are there; and reductions and copies of GPU
buffers, under a watchdog.

Making a communicator is *agreed step by step* (`together`): if a step fails on one rank
alone, all ranks learn of it before the next collective call, and all raise.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from mpidist import _native
from mpidist._base import machine
from mpidist._base.environment import AllReduceChoice
from mpidist._base.reduce_op import MPIOp
from mpidist._mpi import between, collective_release, survival, versions
from mpidist._mpi.allreduce_algorithm import Algorithm, chosen_algorithm
from mpidist._mpi.any_communicator import MESSAGE_BYTES, AnyCommunicator
from mpidist._mpi.buffers import Buffer, BufferCollectives, BufferReduction
from mpidist._mpi.duplication import duplicate
from mpidist._mpi.library import MpiComm, give_launcher_time, mpi_module
from mpidist._mpi.requests import Begun, Request, StartHeader, Transfer, Waiter
from mpidist._mpi.traffic import Traffic

_CALL: Final = "MPIStrategy(...)"
_NOTICE_TAG: Final = 7
_PROBES: Final = 4
_KEY_BYTES: Final = 16
_LENGTH: Final = struct.Struct("=q")  # of a message, before its bytes
_WORDS: Final = 6  # of a header without the core
_LAUNCHER_SECONDS: Final = 2  # until it knows which process has died elsewhere


class Communicator(AnyCommunicator):
    """A private duplicate of an MPI communicator.

    Attributes:
        machine_rank: this rank's number on its machine, which may simulate nodes.
        node_ranks: the ranks of this node, in its order.
        node_sizes: the number of ranks of each node.
        buffers: the collectives of this communicator, without its statistics.
        rank_infos: what each rank has told the others of itself.
    """

    def __init__(
        self,
        comm: MpiComm,
        waiter: Waiter,
        simulated_nodes: int = 1,
        problem: str = "",
        allreduce: AllReduceChoice | None = None,
        about: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Duplicate ``comm``, and see that its ranks fit each other. Collective.

        All that ranks must know of each other is in one text of each (`versions`).

        Args:
            comm: an mpi4py intra-communicator.
            waiter: waits for what is started on it. While it is broken the communicator
                is not freed.
            simulated_nodes: how many nodes each machine acts as, for tests. If ranks
                say different numbers, the largest counts.
            problem: why this rank cannot take part; "": it can.
            allreduce: how the user wants sums between nodes to be made. If ranks say
                different ones, all take the same, until they are compared.
            about: returns what else this rank tells the others of itself
                (``rank_infos``), as JSON has it.

        Raises:
            ValueError: on all ranks, if one of them has a problem.
            CollectiveMismatchError: on all ranks, if their versions do not fit.
        """
        self.traffic = Traffic()
        self.outlives_ranks = survival.is_on()
        self._waiter = waiter
        self._channel: _native.Between | None = None
        self._to_free: list[Callable[[], object]] = []
        self._dropped = False
        self._comm = duplicate(comm, waiter.wait)
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()
        self._algorithm: Algorithm | None = None
        self.buffers: BufferCollectives = self._new_buffers(self._comm)

        def rank_info() -> dict[str, Any]:
            host = mpi_module().Get_processor_name()
            return {
                "host": host,
                "machine": machine.node_id(host),
                "cores": os.cpu_count() or 1,
                "simulated_nodes": simulated_nodes,
                "allreduce": allreduce or (0, 0),
                "key": os.urandom(_KEY_BYTES).hex(),
                "unused": collective_release.unused(),
                **between.rank_info(),
                **about(),
            }

        text = versions.write(problem, rank_info)
        # By MPI alone: another rank may have another version of all code above MPI.
        rank_infos, error = versions.judge(self.rank, self._gather_bytes(text))
        if error is not None:  # all ranks raise it
            self._comm.Free()
            raise error
        self.rank_infos: list[dict[str, Any]] = rank_infos
        gathers, in_flight = max(info["allreduce"] for info in rank_infos)
        self._message = memoryview(bytearray(_LENGTH.size + MESSAGE_BYTES))
        self._words = np.zeros((self.size + 1, _WORDS), np.int64)
        if in_flight:
            choice = AllReduceChoice(bool(gathers), in_flight)
            self.buffers.algorithm = self._algorithm = chosen_algorithm(choice)
        self._find_node(rank_infos)
        self.identity = rank_infos[0]["key"]
        self._resource = collective_release.CollectiveResource(
            self.identity, self.size, self._in_use, self._free, self._is_orphan
        )
        collective_release.release_unused(
            self.all_gather_objects, [info["unused"] for info in rank_infos]
        )

    def _new_buffers(self, comm: MpiComm) -> BufferCollectives:
        count = self.traffic.count_mpi
        return BufferCollectives(comm, self._waiter, count, self._algorithm)

    def _find_node(self, rank_infos: list[dict[str, Any]]) -> None:
        """Find this rank's place on its machine, and on its node. Not collective."""
        self.host_names = [info["host"] for info in rank_infos]
        machines: dict[str, list[int]] = {}
        for rank, info in enumerate(rank_infos):
            machines.setdefault(info["machine"], []).append(rank)
        self.crowded = any(
            len(ranks) > rank_infos[rank]["cores"]
            for ranks in machines.values()
            for rank in ranks
        )
        ranks = machines[rank_infos[self.rank]["machine"]]
        self.machine_rank: int = ranks.index(self.rank)
        self.machine_size = len(ranks)
        if self.machine_size < self.size:
            give_launcher_time(_LAUNCHER_SECONDS)
        most = max(info["simulated_nodes"] for info in rank_infos)
        nodes: dict[tuple[int, int], list[int]] = {}
        for ranks in machines.values():
            for k, rank in enumerate(ranks):
                nodes.setdefault((ranks[0], k * most // len(ranks)), []).append(rank)
        self.node_ranks = next(n for n in nodes.values() if self.rank in n)
        self.local_rank = self.node_ranks.index(self.rank)
        self.local_size = len(self.node_ranks)
        self.node_sizes: list[int] = [len(n) for n in nodes.values()]
        self.smallest_node = min(self.node_sizes)
        self.num_nodes = len(nodes)
        firsts = {rank: n[0] for n in nodes.values() for rank in n}
        order = sorted({*firsts.values()})
        self.node_numbers = [order.index(firsts[rank]) for rank in range(self.size)]

    def open_headers(self) -> StartHeader | _native.Between:
        """Return what exchanges headers by MPI. It is freed with this communicator."""
        if not all(info["core"] for info in self.rank_infos):
            return self._start_header
        headers = between.CoreHeaders(self._comm, self.rank_infos, crowded=self.crowded)
        self._to_free.append(headers.free)
        self.traffic.mpi_calls_of_core = headers.calls
        self._channel = headers.channel
        return self._channel

    def _start_header(self, words: tuple[int, ...], begun: Begun, /) -> Request:
        sent, received = self._words[0], self._words[1:]
        sent[:] = words
        self.traffic.count_mpi("Iallgather")
        start = map(self._comm.Iallgather, (sent,), (received,))
        # One step in C, which starts it and counts it: a signal cannot divide it.
        begun.extend(
            enumerate(zip(start, (self._words,), strict=True), begun[-1][0] + 1)
        )
        return Transfer(begun[-1][1][0].Test, self._words, received.tolist)

    def on_free(self, function: Callable[[], None]) -> None:
        """Call a function before the communicator is freed."""
        self._to_free.insert(0, function)

    def drop(self) -> None:
        """Mark it as unused by this rank. Not collective.

        It is freed at the next release at which all its ranks have marked it.
        """
        self.traffic.leave_core()
        self._dropped = True

    def release_unused(self) -> None:
        """Free the communicators that none of their ranks uses. Collective."""
        collective_release.release_unused(self.all_gather_objects)

    def give_back(self) -> None:
        """Free it after `release_unused`, or without lost ranks. Not collective."""
        self._resource.give_back()

    def _in_use(self) -> bool:
        return not self._dropped or bool(self._waiter.broken)

    def _is_orphan(self) -> bool:
        return self._dropped and self.losses() is not None

    def _free(self) -> None:
        for free in self._to_free:
            free()
        self._to_free = []
        self._comm.Free()

    # --- nodes ------------------------------------------------------------------

    def connect_peers(self) -> BufferCollectives | None:
        """Return the ranks that have this rank's `local_rank`. Collective.

        There is one of each node, in the order of the nodes' first ranks, so rank 0 is
        the first of its own. None if some node has no such rank. It blocks in MPI
        without a deadline: call it when all ranks are known to be on the way, as after
        a header or another polled step.

        Raises:
            Exception: on all ranks, if some rank could not make it.
        """
        mpi, slot = mpi_module(), self.local_rank
        in_use = slot < self.smallest_node
        color = slot if in_use else mpi.UNDEFINED
        peers = self._comm.Split(color, self.node_ranks[0])

        def make() -> BufferCollectives | None:
            if not in_use:
                return None
            self._to_free.append(peers.Free)
            return self._new_buffers(peers)

        return self.together(make, _CALL)

    # --- reductions -----------------------------------------------------------

    def allreduce(self, reductions: Sequence[BufferReduction]) -> None:
        """Reduce buffers over all ranks, into buffers of all ranks."""
        self.buffers.allreduce(reductions)
        for reduction in reductions:
            self.traffic.count("Allreduce", reduction.receive.nbytes)

    def reduce(self, buffer: Buffer, op: MPIOp, root: int) -> None:
        """Reduce ``buffer`` of all ranks into that of the root; others keep theirs."""
        self.buffers.reduce(buffer, op, root)
        self.traffic.count("Reduce", buffer.nbytes)

    # --- copies ---------------------------------------------------------------

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """Copy ``buffer`` of the root to all ranks."""
        self.buffers.broadcast(buffer, root)
        self.traffic.count("Bcast", buffer.nbytes)

    def all_gather(self, send: Buffer, receive: Buffer, counts: list[int]) -> None:
        """Concatenate bytes of all ranks, in rank order, on all ranks.

        Args:
            send: uint8, this rank's ``counts[rank]`` bytes.
            receive: uint8, the sum of ``counts``.
            counts: bytes of each rank; the same on all ranks.
        """
        self.buffers.all_gather(send, receive, counts)
        self.traffic.count("Allgatherv", send.nbytes)

    def gather(
        self, send: Buffer, receive: Buffer | None, counts: list[int], root: int
    ) -> None:
        """Concatenate bytes of all ranks, in rank order, on the root alone."""
        self.buffers.gather(send, receive, counts, root)
        self.traffic.count("Gatherv", send.nbytes)

    def scatter(
        self, send: Buffer | None, receive: Buffer, counts: list[int], root: int
    ) -> None:
        """Give each rank its part of the root's bytes."""
        self.buffers.scatter(send, receive, counts, root)
        self.traffic.count("Scatterv", receive.nbytes)

    # --- small messages -------------------------------------------------------

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        counts = [row[0] for row in self._gather_integers([len(data)])]
        texts = self.buffers.merge(np.frombuffer(data, np.uint8), counts)
        return [x.tobytes() for x in np.split(texts, np.cumsum(counts)[:-1])]

    def all_gather_integers(self, numbers: list[int]) -> list[list[int]]:
        """Return the (equally many) integers of each rank, on all ranks."""
        self.traffic.count("Allgather", 8 * len(numbers))
        return self._gather_integers(numbers)

    def _gather_integers(self, numbers: list[int]) -> list[list[int]]:
        own, count = np.array(numbers, np.int64), len(numbers)
        rows = self.buffers.merge(own, [count] * self.size)
        return rows.reshape(self.size, count).tolist()

    def start_message(self, data: bytes | None) -> Request:
        """Start sending at most `MESSAGE_BYTES` from rank 0 to all.

        Args:
            data: None on the ranks that wait for it.
        """
        message = self._message  # sent and received before the next one
        if data is not None:
            _LENGTH.pack_into(message, 0, len(data))
            message[_LENGTH.size : _LENGTH.size + len(data)] = data

        def read() -> bytes:
            (size,) = _LENGTH.unpack_from(message)
            return bytes(message[_LENGTH.size : _LENGTH.size + size])

        self.traffic.count("Ibcast", message.nbytes)
        self.traffic.count_mpi("Ibcast")
        try:
            request = self._comm.Ibcast(message, 0)
        except BaseException as error:
            raise self._waiter.failed(error) from None
        transfer = Transfer(request.Test, message, read)
        if self._channel is not None:
            transfer.tests_first_by(functools.partial(self._channel.complete, request))
        return transfer

    def start_send(self, data: bytes, receiver: int) -> Request:
        """Start sending a small message to one rank (`receive_any`). Not collective."""
        buffer = np.frombuffer(data, np.uint8)
        request = self._comm.Isend(buffer, receiver, _NOTICE_TAG)
        test = request.Test
        if self.outlives_ranks:
            test = functools.partial(survival.has_ended, request)
        return Transfer(test, buffer)

    def receive_any(self) -> bytes | None:
        """Return a message that some rank has sent by `start_send`, or None.

        Not collective.
        """
        mpi = mpi_module()
        status = mpi.Status()
        # The first probe may only make progress, and a later one find the message.
        if not any(
            self._comm.Iprobe(mpi.ANY_SOURCE, _NOTICE_TAG, status)
            for _ in range(_PROBES)
        ):
            return None
        data = np.empty(status.Get_count(mpi.BYTE), np.uint8)
        self._comm.Recv(data, status.Get_source(), _NOTICE_TAG)
        return data.tobytes()

    # --- ranks that die -------------------------------------------------------

    def losses(self) -> tuple[int, ...] | None:
        """Return which ranks are lost; see `survival.losses`. Not collective."""
        return survival.losses(self._comm)

    def revoke(self) -> None:
        """End all calls of MPI on it, on all ranks, if MPI can. Not collective."""
        if self.outlives_ranks:
            self._comm.Revoke()
