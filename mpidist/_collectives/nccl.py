"""GPU buffers by NCCL, through `cupy.cuda.nccl`.

NCCL moves buffers from GPU to GPU (NVLink, PCIe, InfiniBand), in kernels that are
queued on the current stream: a call returns before the data has moved, later kernels on
that stream see the results, and the host does not wait. MPI sends NCCL's id when the
communicator is made, and the header before each call, so all ranks take part.

NCCL chooses the order of summation by size and machine, and not by rank; it does not
guarantee the same bits in another run.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mpidist._base import backend, gpus, threads
from mpidist._base.reduce_op import MPIOp
from mpidist._base.types import DeviceArray, DType
from mpidist._collectives.transports import Transport
from mpidist._mpi.any_communicator import AnyCommunicator
from mpidist._mpi.buffers import BufferReduction

NcclCommunicator: TypeAlias = Any
"""A `cupy.cuda.nccl.NcclCommunicator`; CuPy has no types."""

_FEW: Final = 3
_LONGEST_CONNECT: Final = 300.0  # seconds
_LATE: Final = "it did not find all ranks within"


class _Reduction(NamedTuple):
    """The reduction of one dtype with one operation, in NCCL's numbers."""

    type: int
    parts: int  # elements of that type in one of the dtype
    op: int


class NcclTransport(Transport):
    """Moves GPU buffers by NCCL.

    Args:
        communicator: an `NcclCommunicator` of all ranks.
        rank: this rank in it.
        count: called with the kind and the bytes of each call, for the statistics.
    """

    name = "nccl"

    def __init__(
        self,
        communicator: NcclCommunicator,
        rank: int,
        count: Callable[[str, int], None],
    ) -> None:
        self._nccl = gpus.nccl_module()
        self._communicator = communicator
        self._rank = rank
        self._count = count

    def supports(self, dtype: DType, op: str) -> bool:
        """Return whether NCCL has the type and the operation."""
        return self._find(dtype, op) is not None

    def allreduce(self, reductions: Sequence[BufferReduction]) -> None:
        """Reduce buffers over all ranks, into buffers of all ranks."""
        for reduction in reductions:
            send, receive, op, _ = reduction
            found = self._find(receive.dtype, op)
            if found is not None and receive.size:
                count = receive.size * found.parts
                buffers: list[Any] = [receive if send is None else send, receive]
                where = map(gpus.address, buffers)
                self._queue(
                    self._communicator.allReduce, *where, count, found.type, found.op
                )
                self._count("ncclAllReduce", receive.nbytes)
            reduction.conclude()

    def reduce(self, buffer: DeviceArray, op: MPIOp, root: int) -> None:
        """Reduce ``buffer`` of all ranks into that of the root; others keep theirs."""
        found = self._find(buffer.dtype, op)
        if found is not None and buffer.size:
            count, where = buffer.size * found.parts, gpus.address(buffer)
            kind = found.type, found.op, root  # NCCL writes it on the root alone
            self._queue(self._communicator.reduce, where, where, count, *kind)
            self._count("ncclReduce", buffer.nbytes)

    def broadcast(self, buffer: DeviceArray, root: int) -> None:
        """Copy the root's ``buffer`` to all ranks."""
        if buffer.size:
            count, where = buffer.nbytes, gpus.address(buffer)
            byte = self._nccl.NCCL_UINT8
            self._queue(self._communicator.broadcast, where, where, count, byte, root)
            self._count("ncclBroadcast", buffer.nbytes)

    def all_gather(
        self, send: DeviceArray, receive: DeviceArray, counts: list[int]
    ) -> None:
        """Concatenate bytes of all ranks, on all ranks.

        If ranks have different numbers of bytes it is a group of broadcasts, as in
        NCCL's user guide ("Group Calls"): NCCL has no all-gather for them.
        """
        byte = self._nccl.NCCL_UINT8
        if sum(counts) == 0:
            return
        self._count("ncclAllGather", send.nbytes)
        source, start = gpus.address(send), gpus.address(receive)
        if len(set(counts)) == 1:
            self._queue(self._communicator.allGather, source, start, counts[0], byte)
            return
        call = self._communicator.broadcast
        self._nccl.groupStart()
        try:
            for root, count in enumerate(counts):
                if count:
                    where = source if root == self._rank else start
                    self._queue(call, where, start, count, byte, root)
                start += count
        finally:
            self._nccl.groupEnd()

    def _queue(self, call: Callable[..., object], *arguments: int) -> None:
        """Make a call of NCCL, whose last argument is the stream."""
        call(*arguments, gpus.current_stream().ptr)

    def check(self) -> None:
        """Check whether an earlier call has failed, which NCCL reports only later.

        Raises:
            RuntimeError: if one has.
        """
        try:
            self._communicator.check_async_error()
        except Exception as error:
            raise RuntimeError(
                f"NCCL reports that an earlier call failed on rank {self._rank} "
                f"({error}); its results are missing. The usual reasons are a rank "
                "that has died, a network failure, and an error of an earlier kernel; "
                "NCCL_DEBUG=INFO makes NCCL print more. This strategy can no longer "
                "use NCCL: make a new one, or write MPIDIST_IMPLEMENTATION=staged"
            ) from error

    def close(self) -> None:
        """Destroy the communicator after all queued work is done. Collective."""
        gpus.current_stream().synchronize()
        self._communicator.destroy()

    def abort(self) -> None:
        """End the work that waits for a rank that has died. Not collective."""
        self._communicator.abort()

    def _find(self, dtype: DType, op: str) -> _Reduction | None:
        """Return how NCCL reduces a dtype; None if it has no such type or operation.

        It has no 16-bit integers, no bool, no complex types, and older ones no bfloat16
        (NCCL user guide, "Types"). A complex sum consists of the sums of its parts.
        """
        is_complex = dtype.kind == "c"
        name = f"float{4 * dtype.itemsize}" if is_complex else dtype.name
        type_number = getattr(self._nccl, f"NCCL_{name.upper()}", None)
        op_number = getattr(self._nccl, f"NCCL_{op}", None)
        if type_number is None or op_number is None or (is_complex and op != "SUM"):
            return None
        return _Reduction(int(type_number), 1 + is_complex, int(op_number))


def connect(
    comm: AnyCommunicator, device: gpus.Device, timeout_seconds: float | None
) -> tuple[NcclCommunicator | None, str]:
    """Make a communicator of NCCL, and test it. Collective.

    It does not raise. All ranks return a communicator, or all return a problem.

    Args:
        comm: the ranks; each has a GPU of its own.
        device: of this rank.
        timeout_seconds: of the strategy. NCCL connects the ranks by its own means, and
            has five minutes at most: if one rank fails the others would wait forever.

    Returns:
        The communicator, and ""; or None, and the reason.
    """
    key: Any = None  # bytes, or a tuple of integers before CuPy 14
    failure = ""
    if comm.rank == 0:
        try:
            key = gpus.nccl_module().get_unique_id()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    key, failure = comm.all_gather_objects((key, failure))[0]
    if failure:
        return None, f"rank 0 could not begin: {failure}"
    made: list[NcclCommunicator] = []
    problem: list[str] = []

    def make() -> None:
        try:
            device.activate()
            nccl = gpus.nccl_module()
            made.append(nccl.NcclCommunicator(comm.size, key, comm.rank))
            _try_sum(made[0], nccl, comm.size, device)
        except Exception as error:
            problem.append(f"{type(error).__name__}: {error}")

    deadline = min(timeout_seconds or _LONGEST_CONNECT, _LONGEST_CONNECT)
    thread = threads.start_thread("NCCL", make)
    thread.join(deadline)
    late = thread.is_alive()
    text = f"{_LATE} {deadline} s" if late else ""
    text = text or "".join(problem)
    texts = comm.all_gather_objects(text)
    if not any(texts):
        return made[0], ""
    if made and not late:
        made[0].abort()
    # Ranks that only waited come last: the cause was on another rank.
    failed = [f"rank {r}: {t}" for r, t in enumerate(texts) if t]
    failed.sort(key=lambda text: _LATE in text)
    return None, "; ".join(failed[:_FEW]) + ("; ..." if len(failed) > _FEW else "")


def _try_sum(
    communicator: NcclCommunicator,
    nccl: types.ModuleType,
    size: int,
    device: gpus.Device,
) -> None:
    """Sum ones over the ranks: only the first call makes NCCL connect them."""
    x = device.array_module.ones(1, np.float32)
    where, stream = gpus.address(x), gpus.current_stream()
    communicator.allReduce(
        where, where, 1, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr
    )
    stream.synchronize()
    communicator.check_async_error()
    total = float(backend.to_host(x)[0])
    if total != size:
        raise RuntimeError(f"the sum of 1 over {size} ranks was {total}")
