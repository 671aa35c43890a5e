"""Copies between the GPUs of a rank and the memory that its node shares.

A piece of a nest goes from the GPU straight into this rank's piece area, and its sum
from the node's area for sums straight back: no copy on the host. For that these areas
are page-locked, in each process, at its first use of them. Where the driver or a limit
refuses (RLIMIT_MEMLOCK, a system that cannot page-lock shared memory), a page-locked
slot lies between: one copy on the host more, and everything else the same.

What orders the copies of a `Lane` (CUDA C++ Programming Guide, "Streams", "Events"):

- Copies from the GPU go on the current stream: after the kernels that write what is
  sent. Those to the GPU go on a stream of their own, beside them.
- `Lane.land` has the host wait for both, by events, before this rank makes a step. So
  whoever waits for the step finds in the area what was copied there, and may write over
  sums that were copied from.
- A copy to the GPU is queued after a `land` for the first copy from it: what the
  current stream had queued before the call has ended by then, also what used the memory
  of the results before.
- The last `land` comes before the call returns. So the results are there for every
  stream, and nothing of the call is under way: the areas for sums belong to all calls
  of all ranks, and those of other kinds need not know of this one. It costs the time of
  one piece's copy, some 20 us.

Rejected for the last point: to return at once, have the current stream wait, and the
next user of the areas for the event. There are many users of the areas, most of which
never see a GPU, and one that forgets to look is wrong sums.
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

_SUMS: Final = -1  # the "rank" of the node's areas for sums


class LeafRange(NamedTuple):
    """Bytes of a leaf in a piece: where in the leaf, and where in the piece."""

    leaf: int
    start: int
    stop: int
    at: int


class Piece(NamedTuple):
    """A piece of a nest: its bytes, and what of which leaves they are."""

    nbytes: int
    parts: list[LeafRange]


class Staging:
    """What copies between GPUs and the memory of a node need, kept from call to call.

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
        """Return page-locked memory for a nest that travels with its header."""
        if self._scratch is None:
            self._scratch = backend.pinned_empty(_native.core.EAGER_BYTES, "u1")
        return self._scratch

    def close(self) -> None:
        """Page-lock nothing any more. Not collective."""
        self._lanes.clear()
        for areas in self._areas or ():
            areas.unlock()
        self._areas = self._scratch = None

    def _open(self, rank: int) -> _Areas:
        start = self._node.channel.area(rank, 0)
        memory = np.frombuffer(self._node.memory, np.uint8)
        return _Areas(memory[start : start + 2 * self._node.piece_bytes])


class _Areas:
    """Two neighbouring areas that are used in turn, and how a GPU reaches them.

    Attributes:
        turns: their memory.
        slot: page-locked memory of one area, where theirs is not; else None.
    """

    def __init__(self, memory: HostArray) -> None:
        half = memory.nbytes // 2
        self.turns: tuple[HostArray, HostArray] = memory[:half], memory[half:]
        self.slot: HostArray | None = None
        self._unlock: Callable[[], object] | None = None
        try:
            unlock = backend.page_lock(memory)
        except Exception:  # of CUDA, which has classes of its own
            self.slot = backend.pinned_empty(half, "u1")
        else:
            # Before the memory goes, which the function keeps.
            self._unlock = weakref.finalize(self, unlock)

    def unlock(self) -> None:
        if self._unlock is not None:
            self._unlock()


class Lane:
    """Moves pieces between one GPU and the areas.

    What fails is kept, and nothing is copied after it: the other ranks wait for the
    steps of this one, which it has to make all the same.

    Args:
        own: this rank's areas.
        sums: those for sums.

    Attributes:
        error: what has failed since `begin`; None: nothing.
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
        """Forget what has failed."""
        self.error = self._landing = None

    def load(self, piece: Piece, turn: int, leaves: list[Array]) -> None:
        """Queue the copies of a piece to this rank's area.

        Args:
            piece: which.
            turn: its lowest bit says which of the two areas.
            leaves: flat arrays of bytes.
        """
        if self.error is not None:
            return
        with self._keep_error():
            memory = self._own.turns[turn & 1]
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

    def store(self, piece: Piece, turn: int, leaves: list[Array]) -> None:
        """Queue the copies of a piece from the area for sums; see `load`."""
        if self.error is not None:
            return
        with self._keep_error():
            memory = self._sums.turns[turn & 1]
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
