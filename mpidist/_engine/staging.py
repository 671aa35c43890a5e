"""Copies between the GPUs of a rank and the memory that its node shares.

A piece of a nest is copied from the GPU directly into this rank's piece area, and its
sum from the node's area for sums directly back, without a copy on the host. For that
these areas are page-locked, in each process, at its first use of them. If the driver or
a limit refuses (RLIMIT_MEMLOCK, a system that cannot page-lock shared memory), a
page-locked slot is used in between, at the cost of another copy on the host.

The order of the copies of a `Lane` (CUDA C++ Programming Guide, "Streams", "Events"):

- Copies from the GPU are queued on the current stream, after the kernels that write the
  data. Those to the GPU have a stream of their own, and overlap.
- `Lane.land` makes the host wait for both, by events, before this rank makes a step. So
  after the step the other ranks can read what was copied into the area, and overwrite
  sums that were copied out.
- A copy to the GPU is queued after a `land` for the first copy from it: all earlier
  work of the current stream has then ended, including that which used the memory of the
  results.
- The last `land` comes before the call returns. So the results are visible to every
  stream, and no copy of the call is in progress: the areas for sums are used by all
  calls of all ranks, and other routes need not know about this one. It costs the time
  of one piece's copy, some 20 us.

Rejected for the last point: returning at once, with the current stream and the next
user of the areas waiting for the event. The areas have many users, most without a GPU,
and if one of them did not wait, sums would be wrong.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np

from mpidist import _native
from mpidist._base import backend
from mpidist._base.types import Array, DeviceArray, HostArray
from mpidist._engine.node import Node

_SUMS: Final = -1  # the "rank" of the areas for sums


class LeafRange(NamedTuple):
    """Bytes of a leaf in a piece: their range in the leaf, and offset in the piece."""

    leaf: int
    start: int
    stop: int
    at: int


class Piece(NamedTuple):
    """A piece of a nest: its size, and the ranges of leaves in it."""

    nbytes: int
    parts: list[LeafRange]


class Staging:
    """Resources of copies between GPUs and a node's memory, kept between calls.

    Args:
        node: whose memory it is.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._areas: tuple[_Areas, _Areas] | None = None
        self._lanes: dict[int, Lane] = {}
        self._scratch: HostArray | None = None

    def lane_of(self, near: DeviceArray) -> Lane:
        """Return the lane of the GPU that ``near`` is on, which is the current one."""
        number = int(near.device.id)
        lane = self._lanes.get(number)
        if lane is None:
            if self._areas is None:
                self._areas = self._open(self._node.rank), self._open(_SUMS)
            lane = self._lanes[number] = Lane(*self._areas)
        return lane

    def scratch(self) -> HostArray:
        """Return page-locked memory for a nest that is sent with its header."""
        if self._scratch is None:
            self._scratch = backend.pinned_empty(_native.core.EAGER_BYTES, "u1")
        return self._scratch

    def close(self) -> None:
        """Unlock all page-locked memory. Not collective."""
        self._lanes.clear()
        for areas in self._areas or ():
            areas.unlock()
        self._areas = self._scratch = None

    def _open(self, rank: int) -> _Areas:
        start = self._node.channel.area(rank, 0)
        memory = np.frombuffer(self._node.memory, np.uint8)
        return _Areas(memory[start : start + 2 * self._node.piece_bytes])


class _Areas:
    """Two adjacent areas that are used alternately, and how a GPU reaches them.

    Attributes:
        areas: their memory.
        slot: page-locked memory of the size of one, if they are not page-locked.
    """

    def __init__(self, memory: HostArray) -> None:
        half = memory.nbytes // 2
        self.areas: tuple[HostArray, HostArray] = memory[:half], memory[half:]
        self.slot: HostArray | None = None
        self._unlock: Callable[[], object] | None = None
        try:
            unlock = backend.page_lock(memory)
        except Exception:  # of CUDA, which has classes of its own
            self.slot = backend.pinned_empty(half, "u1")
        else:
            # Called before the memory is released, to which the function refers.
            self._unlock = weakref.finalize(self, unlock)

    def unlock(self) -> None:
        if self._unlock is not None:
            self._unlock()


class Lane:
    """Moves pieces between one GPU and the areas.

    A failure is kept, and nothing is copied after it: the other ranks wait for the
    steps of this one, which it has to make nevertheless.

    Args:
        own: this rank's areas.
        sums: those for sums.

    Attributes:
        error: the first failure since `begin`, if any.
    """

    def __init__(self, own: _Areas, sums: _Areas) -> None:
        self._own = own
        self._sums = sums
        self._outward = backend.new_stream()
        self._loaded = backend.new_event()
        self._stored = backend.new_event()
        self._landing: HostArray | None = None
        self.error: Exception | None = None

    def begin(self) -> None:
        """Forget earlier failures."""
        self.error = self._landing = None

    def load(self, piece: Piece, area: int, leaves: list[Array]) -> None:
        """Queue the copies of a piece to this rank's area.

        Args:
            piece: which.
            area: number of the area; its lowest bit says which of the two.
            leaves: flat arrays of bytes.
        """
        if self.error is not None:
            return
        with self._keep_error():
            memory = self._own.areas[area & 1]
            if self._own.slot is not None:
                self._landing = memory[: piece.nbytes]
                memory = self._own.slot
            stream = backend.current_stream()
            for leaf, start, stop, at in piece.parts:
                x, host = leaves[leaf][start:stop], memory[at : at + stop - start]
                if backend.is_device_array(x):
                    backend.start_copy_to_host(x, host, stream)
                else:
                    host[...] = x
            self._loaded.record(stream)

    def store(self, piece: Piece, area: int, leaves: list[Array]) -> None:
        """Queue the copies of a piece from the area for sums; see `load`."""
        if self.error is not None:
            return
        with self._keep_error():
            memory = self._sums.areas[area & 1]
            if self._sums.slot is not None:
                self._sums.slot[: piece.nbytes] = memory[: piece.nbytes]
                memory = self._sums.slot
            for leaf, start, stop, at in piece.parts:
                x, host = leaves[leaf][start:stop], memory[at : at + stop - start]
                if backend.is_device_array(x):
                    backend.start_copy_to_device(host, x, self._outward)
                else:
                    x[...] = host
            self._stored.record(self._outward)

    def land(self) -> None:
        """Wait until all copies have ended."""
        with self._keep_error():
            self._loaded.synchronize()
            if self._landing is not None and self._own.slot is not None:
                self._landing[...] = self._own.slot[: self._landing.size]
                self._landing = None
        with self._keep_error():
            self._stored.synchronize()

    @contextlib.contextmanager
    def _keep_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of CUDA, or of no memory
            if self.error is None:
                self.error = error
