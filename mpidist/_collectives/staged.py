"""GPU arrays by way of the host: copied there, moved as host arrays are, copied back.

All waits for copies are here. Their order (CUDA C++ Programming Guide, "Streams",
"Events"; CUDA runtime API, "API synchronization behavior"):

- Copies from the GPU are queued on the current stream, after the kernels that write the
  data. The host waits for an event behind them, so the page-locked memory is free again
  when the call that reads it returns.
- Copies to the GPU come from other memory, which the driver has copied when such a call
  returns. They are queued on the current stream too: after the kernels that use the
  memory of the results, and before those that read them. The host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from mpidist._base import backend, gpus
from mpidist._base.memory import LINE, round_up
from mpidist._base.types import Array, DeviceArray, HostArray
from mpidist._collectives.transports import DirectTransport, Transport

_FIRST_BYTES: Final = 16 * 2**20


class HostMemory:
    """Page-locked memory through which the GPU arrays of a rank pass.

    16 MiB, and for calls of more a block of the maximum size. Arrays that have no room
    there pass through memory of the driver, which takes one more copy.

    Args:
        most: the maximum size in bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._memory: HostArray | None = None

    def prepare(self, nbytes: int = 0) -> HostArray:
        """Return the memory, with ``nbytes`` if it may and can have so many."""
        first, memory = min(_FIRST_BYTES, self._most), self._memory
        if memory is None:
            memory = self._memory = gpus.pinned_empty(first)
        if memory.size < min(nbytes, self._most):
            try:
                memory = self._memory = gpus.pinned_empty(self._most)
            except Exception:  # of CUDA
                self._most = memory.size
        return memory

    def load(self, arrays: Sequence[Array]) -> list[HostArray]:
        """Return arrays as host arrays; those of GPUs are valid until the next call.

        Args:
            arrays: some of them on the current GPU.
        """
        on_device = filter(backend.is_device_array, arrays)
        memory = self.prepare(sum(round_up(x.nbytes, LINE) for x in on_device))
        at, hosts, kept = 0, [], []
        for x in arrays:
            end = at + round_up(x.nbytes, LINE)
            if not backend.is_device_array(x) or end > memory.size:
                hosts.append(backend.to_host(x))
                continue
            raw = backend.as_bytes(backend.contiguous(x))
            host = memory[at : at + raw.size]
            raw.get(stream=gpus.current_stream(), out=host, blocking=False)
            kept.append(raw)  # until it is read: it may be a copy
            hosts.append(backend.from_bytes(host, x.dtype, tuple(x.shape)))
            at = end
        for raw in kept[-1:]:
            backend.synchronize(raw)
        return hosts


def store(host: HostArray, x: DeviceArray) -> None:
    """Queue the copy of an array that is not page-locked to the current GPU."""
    if x.size:
        raw = backend.as_bytes(backend.contiguous(host))
        backend.as_bytes(x).set(raw, stream=gpus.current_stream())


class StagedTransport(Transport):
    """Copies GPU buffers through the host, where another transport takes over.

    It reduces none: a nest goes by the routes of host arrays (`staged_route`).

    Args:
        host: moves them between the ranks.
        memory: through which they pass.
    """

    name = "staged"

    def __init__(self, host: DirectTransport, memory: HostMemory) -> None:
        self._host = host
        self._memory = memory

    def broadcast(self, buffer: DeviceArray, root: int) -> None:
        """Copy the root's ``buffer`` to all ranks."""
        comm = self._host.comm
        if comm.size == 1 or not buffer.size:
            return
        with buffer.device:
            if comm.rank == root:
                (host,) = self._memory.load([buffer])
                self._host.broadcast(host, root)
            else:
                host = np.empty(buffer.shape, buffer.dtype)
                self._host.broadcast(host, root)
                store(host, buffer)

    def all_gather(
        self, send: DeviceArray, receive: DeviceArray, counts: list[int]
    ) -> None:
        """Concatenate bytes of all ranks, on all ranks."""
        if self._host.comm.size == 1:
            receive[...] = send
            return
        if not sum(counts):
            return
        with receive.device:
            (own,) = self._memory.load([send])
            host = np.empty(receive.shape, receive.dtype)
            self._host.all_gather(own, host, counts)
            store(host, receive)
