"""Values that move as they are: between rank 0 and the others, and buffers for sums.

Arrays and other objects travel as a message (pickled heads, or all) and as buffers.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._agreement.root_messages import FROM_RANK_0
from mpidist._base import backend, checksums, nest
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.memory import lay_out
from mpidist._base.options import CommunicationOptions
from mpidist._base.types import Array, DType, HostArray, Nest, Shape, record
from mpidist._collectives.observed import (
    has_values,
    nest_of_all,
    of_values,
    values_from_rank_0,
    values_to_all,
)
from mpidist._collectives.pool import arrays_in
from mpidist._collectives.resources import Resources, timed
from mpidist._timeline.observer import NO_ROUTE, observed

_LARGE: Final = 1 << 20  # bytes of an array
_MEMORY: Final = Call("memory for what rank 0 sends, or gets")
_R = TypeVar("_R")


@record
class _Head:
    """Dtype and shape of an array whose bytes travel separately; or an object.

    Attributes:
        dtype: of the array; None for an object.
        payload: the object.
    """

    dtype: DType | None
    shape: Shape = ()
    kind: backend.LeafKind = "array"
    on_device: bool = False
    payload: Any = None  # any object that can be pickled


def _split(value: Any, call: str) -> tuple[_Head, list[Array]]:
    """Return the head of a value, and the array, if it is one."""
    if not backend.is_array(value):
        return _Head(None, payload=value), []
    x, kind = backend.as_array(value, call)
    return _Head(x.dtype, tuple(x.shape), kind, backend.is_device_array(x)), [x]


class Copies:
    """Copies values between ranks.

    Args:
        resources: of the strategy.
    """

    def __init__(self, resources: Resources) -> None:
        self.resources = resources

    # --- from one rank to all -----------------------------------------------------

    @observed(nest_of_all)
    @timed
    def broadcast(
        self,
        tree: Nest,
        root: int = 0,
        options: CommunicationOptions | None = None,
        call: str = "broadcast",
    ) -> Nest:
        """Return the root's leaves on all ranks. Collective.

        Args:
            tree: a nest of arrays and numbers, of the same structure, shapes and
                dtypes on all ranks.
            root: the rank whose values are copied.
            options: of this call.
            call: the name of the call in messages.
        """
        resources = self.resources
        with resources.guard.checking(call):
            merged = resources.merge_options(options)
            transports = resources.transports_of(merged)
            leaves, structure = nest.flatten(tree)
            pairs = backend.as_arrays(leaves, structure, call)
            results = [x.copy() for x, _ in pairs]
        text = structure.render([backend.describe(x) for x in results])
        text += resources.text_of_devices(results, structure)
        resources.guard.agree(Call(f"{call} {text}"), merged.timeout_seconds)
        with resources.guard.payload():
            for x in results:
                transports.of(x).broadcast(backend.as_bytes(x), root)
        return structure.unflatten(backend.restore_all(results, pairs))

    @observed(of_values(), has_values)
    @timed
    def share(self, make: Callable[[], list[Any]], text: str) -> list[Any]:
        """Return rank 0's values on all ranks, which know nothing of them before.

        Collective. ``make`` is called on rank 0 only; if it raises, all ranks do.

        Args:
            make: returns the values: arrays are sent as buffers, other objects pickled.
            text: the purpose of the call, the same on all ranks.

        Returns:
            The values; host arrays on a rank whose device is the host.
        """
        call, guard = Call(text), self.resources.guard
        if self.resources.comm.rank == 0:
            with guard.checking(call):
                values = make()
                data, arrays = _write_heads(values, text)
        guard.agree(call)
        if self.resources.comm.rank != 0:
            return self.receive_arrays(text)
        self._send(data, arrays, text)
        return values

    @observed(values_to_all)
    def send_arrays(self, values: list[Any], call: str) -> None:
        """Send arrays and objects from rank 0 to ranks that wait for them.

        Without agreement: for the coordinator, whose followers only wait.
        """
        self._send(*_write_heads(values, call), call)

    def _send(self, heads: bytes, arrays: list[Array], call: str) -> None:
        self.resources.messages.send(heads)
        if arrays:
            self._move_arrays(lambda: list(map(backend.contiguous, arrays)), call)

    @observed(values_from_rank_0, has_values)
    def receive_arrays(self, call: str = FROM_RANK_0) -> list[Any]:
        """Return what rank 0 sends with `send_arrays`.

        Raises:
            MemoryError: on all ranks, if the allocation failed on one.
        """
        heads: list[_Head] = pickle.loads(self.resources.messages.receive())
        device = self.resources.device.array_module
        awaited = [head for head in heads if head.dtype is not None]

        def allocate() -> list[Array]:
            return [
                (device if head.on_device else np).empty(head.shape, head.dtype)
                for head in awaited
            ]

        received = iter(self._move_arrays(allocate, call) if awaited else ())
        return [
            head.payload
            if head.dtype is None
            else backend.restore(next(received), head.kind)
            for head in heads
        ]

    def _move_arrays(
        self, allocate: Callable[[], list[Array]], call: str
    ) -> list[Array]:
        """Broadcast rank 0's arrays, when all ranks have memory for them. Collective.

        Args:
            allocate: returns the arrays of rank 0, or memory for them.
            call: the name of the call in messages.

        Raises:
            MemoryError: on all ranks, if ``allocate`` failed on one.
        """
        arrays = self._together(allocate, call)
        with self.resources.guard.payload():
            for x in arrays:
                transport = self.resources.transports.of(x)
                transport.broadcast(backend.as_bytes(x), 0)
        return arrays

    def _together(self, allocate: Callable[[], _R], call: str) -> _R:
        """Allocate memory on all ranks, or on none. Collective.

        A header shows whether all have it, also with the guard off; the ranks exchange
        texts if one has not.

        Args:
            allocate: allocates that of this rank.
            call: the name of the call in messages.

        Raises:
            MemoryError: on all ranks, if ``allocate`` failed on one.
        """
        error: Exception | None = None
        try:
            memory = allocate()
        except Exception as raised:
            error = raised

        def failed() -> None:
            if error is not None:
                raise error

        self.resources.guard.agree_on(_MEMORY, largest=int(error is not None))
        if self.resources.guard.largest:
            self.resources.comm.together(failed, call)
        return memory

    # --- a list of values per rank ------------------------------------------------

    @observed(of_values("mpi"))
    @timed
    def collect(self, values: list[Any], call: str) -> list[list[Any]]:
        """Return the values of all ranks on rank 0; an empty list on the others.

        Collective. The values may differ in dtype and shape between ranks.

        Returns:
            On rank 0 a list with, for each rank, the list of its values.
        """
        comm = self.resources.comm
        with self.resources.guard.checking(call):
            data, large = _write(values, call, _LARGE)
        self.resources.guard.agree(Call(f"{call} of {len(values)} values"))
        sizes = comm.all_gather_integers([data.size, *(x.size for x in large)])
        counts = [0, *(row[0] for row in sizes[1:])]  # rank 0 has its own
        received = self._gather(data, counts, call)
        # A large array travels alone, into the memory where it stays: with the others
        # it would be copied when it is written and when it is read.
        arrived: list[list[HostArray]] = [[] for _ in sizes]
        for rank, row in enumerate(sizes[1:], 1):
            for x, size in zip(large, row[1:], strict=True):
                only = [size if i == rank else 0 for i in range(comm.size)]
                arrived[rank].append(self._gather(x, only, call) if size else x)
        if comm.rank != 0:
            return []
        ends = list(itertools.accumulate(counts))
        rows = [
            self._read(received[ends[rank - 1] : ends[rank]], arrived[rank])
            for rank in range(1, comm.size)
        ]
        return [list(values), *rows]

    @observed(of_values("mpi"))
    @timed
    def collect_on_all(self, values: list[Any], call: str) -> list[list[Any]]:
        """Return the values of all ranks on all of them; otherwise as `collect`."""
        with self.resources.guard.checking(call):
            data, _ = _write(values, call)
        self.resources.guard.agree(Call(call))
        return [*map(self._read, self.resources.comm.all_gather_objects(data))]

    def _gather(self, own: HostArray, counts: list[int], call: str) -> HostArray:
        """Return the bytes of all ranks that have a count on rank 0. Collective."""
        comm = self.resources.comm
        room = sum(counts) if comm.rank == 0 else 0
        received = self._together(lambda: np.empty(room, np.uint8), call)
        to_here = received if comm.rank == 0 else None
        comm.gather(own[: counts[comm.rank]], to_here, counts, 0)
        return received

    @observed(of_values("mpi"), has_values)
    @timed
    def scatter(self, values: list[list[Any]] | None, call: str) -> list[Any]:
        """Give each rank its list of values from rank 0. Collective.

        Args:
            values: on rank 0 a list of values for each rank; elsewhere None.
            call: the name of the call in messages.
        """
        comm, messages = self.resources.comm, self.resources.messages
        if values is not None:
            with self.resources.guard.checking(call):
                parts = [_write(row, call)[0] for row in values]
                joined = np.concatenate(parts)
        self.resources.guard.agree(Call(call))
        if values is not None:
            counts = [part.size for part in parts]
            messages.send(pickle.dumps(counts))
        else:
            counts = pickle.loads(messages.receive())
        own = counts[comm.rank]
        received = self._together(lambda: np.empty(own, np.uint8), call)
        comm.scatter(None if values is None else joined, received, counts, 0)
        return self._read(received)

    def _read(self, data: HostArray, large: Sequence[HostArray] = ()) -> list[Any]:
        """Return the values that `_write` has written."""
        rows: list[tuple[_Head, HostArray | None]] = pickle.loads(data.data)
        values = []
        for number, (head, x) in enumerate(rows):
            if head.dtype is None:
                values.append(head.payload)
                continue
            x = large[number] if x is None else x
            array: Array = backend.from_bytes(x, head.dtype, head.shape)
            if head.on_device:
                array = backend.place(array, self.resources.device)
            values.append(backend.restore(array, head.kind))
        return values

    # --- registered buffers, and checks -------------------------------------------

    @observed(of_values(NO_ROUTE))
    @timed
    def buffers_like(self, tree: Nest) -> Nest:
        """Return zeros of the same structure, shapes and dtypes. Collective.

        Host arrays are in this rank's arena, which the other ranks can read, if there
        is room: an all-reduce then reads them in place, without a copy.

        Args:
            tree: a nest of arrays and numbers, of the same structure, shapes and
                dtypes on all ranks.
        """
        call = "buffers_like"
        with self.resources.guard.checking(call):
            leaves, structure = nest.flatten(tree)
            like = [x for x, _ in backend.as_arrays(leaves, structure, call)]
            results = self._zeros(like)
        text = structure.render([backend.describe(x) for x in like])
        self.resources.guard.agree(Call(f"{call} {text}"))
        return structure.unflatten(results)

    def _zeros(self, like: list[Array]) -> list[Array]:
        """Return zeros; host arrays in one slot, each at the begin of a cache line."""
        node = self.resources.node
        zeros = [backend.module_of(x).zeros(x.shape, x.dtype) for x in like]
        here = [i for i, x in enumerate(like) if not backend.is_device_array(x)]
        if node is not None:
            kinds = [(like[i].shape, like[i].dtype) for i in here]
            layout = lay_out(like[i].nbytes for i in here)
            arrays, _ = arrays_in(node.pool, kinds, *layout)
            for i, x in zip(here, arrays, strict=True):
                x[...] = 0
                zeros[i] = x
        return zeros

    def check_plain(self, call: str, values: list[Nest]) -> None:
        """Check that each rank passed the same values. Collective."""
        if not self.resources.guard.checks:
            return
        texts = [
            checksums.summarize_value(x, call)
            for x in values
            if backend.is_number(x)
            or backend.is_array(x)
            or isinstance(x, IndexedSlices)
        ]
        if texts:
            self.resources.guard.agree(
                Call(
                    f"{call} of {', '.join(texts)}, which is not per replica (what "
                    "differs between ranks comes from `strategy.run`: write "
                    "`strategy.run(lambda: value)` in its place)"
                )
            )


def _write_heads(values: list[Any], call: str) -> tuple[bytes, list[Array]]:
    """Return the heads of values, pickled, and their arrays."""
    parts = [_split(value, call) for value in values]
    heads = pickle.dumps([head for head, _ in parts])
    return heads, [x for _, arrays in parts for x in arrays]


def _write(
    values: list[Any], call: str, most: float = math.inf
) -> tuple[HostArray, list[HostArray]]:
    """Return values as bytes: heads, and the bytes of arrays, pickled.

    Args:
        values: arrays and other objects.
        call: the name of the call in messages.
        most: the most bytes of an array that is pickled.

    Returns:
        The pickled bytes, and for each value the bytes of an array that has more.
    """
    rows: list[tuple[_Head, HostArray | None]] = []
    large = [np.empty(0, np.uint8) for _ in values]
    for number, value in enumerate(values):
        (head, arrays), raw = _split(value, call), None
        for x in arrays:
            raw = backend.as_bytes(backend.contiguous(backend.to_host(x)))
            if raw.size > most:
                large[number], raw = raw, None
        rows.append((head, raw))
    return np.frombuffer(pickle.dumps(rows, protocol=5), np.uint8), large
