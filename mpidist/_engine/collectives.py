"""The collectives: each collective once, for whoever calls it.

Replica code, cross-replica code and the coordinator's commands all end here. Every
collective goes the same way: look at the arguments, agree with the other ranks
(`Guard`), move the bytes (`Transports`), and wrap the result. What can fail on one rank
alone happens before the agreement, and its failure is told to all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

import numpy as np

from mpidist import _native, _transports
from mpidist._agreement.channel import LEFT, LeftError
from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call, call_of
from mpidist._base import backend, nest
from mpidist._base.cache import Cache
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.memory import LINE, round_up
from mpidist._base.options import (
    CommunicationImplementation,
    CommunicationOptions,
    Environment,
    ReduceOp,
)
from mpidist._engine import (
    NO_MEMORY,
    ROUTES,
    CoreGather,
    FlatBuffers,
    GatherLeaf,
    Means,
    MpiGather,
    Node,
    Nodes,
    Plans,
    SharedMemory,
    Signature,
    Staging,
    leaves_of,
    make_gather,
)
from mpidist._engine.plans import Route
from mpidist._engine.pool import Pool
from mpidist._mpi.communicator import AnyCommunicator

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MOST_PLANS: Final = 1024
_POOL_BYTES: Final = 512 * 2**20
_MESSAGE_ROOM: Final = 2**20
_Compressed = tuple[str, bool]
"""The format in which sums go between nodes, and whether errors are fed back."""

_SENDING: Final = Call("a message to all ranks")
_UNCOMPRESSED: Final[_Compressed] = ("none", False)


@dataclasses.dataclass(frozen=True)
class _ArrayHead:
    """Dtype and shape of an array whose bytes travel apart; or a whole object."""

    dtype: Any
    shape: tuple[int, ...]
    kind: backend.LeafKind
    on_device: bool
    payload: Any = None

    @property
    def nbytes(self) -> int:
        if self.dtype is None:
            return 0
        return math.prod(self.shape) * int(self.dtype.itemsize)


def describe_compression(compression: _Compressed) -> str:
    """Return a text for the fingerprint of a call."""
    scheme, feedback = compression
    return f"compression={scheme}{' and error_feedback' if feedback else ''}"


def timed(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Count the time that a collective takes in the statistics."""

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        collectives: Any = args[0]
        with collectives.comm.traffic.timed():
            return method(*args, **kwargs)

    return call


class Collectives:
    """The collectives of one group of replicas."""

    routes: tuple[Route, ...] = ROUTES

    def __init__(
        self,
        comm: AnyCommunicator,
        guard: Guard,
        options: CommunicationOptions,
        environment: Environment,
        device: backend.Device,
        memory: SharedMemory = NO_MEMORY,
    ) -> None:
        self.comm = comm
        self._memory = memory
        self._shared = memory.make_transport and memory.make_transport(guard)
        self.node: Node | None = memory.node
        self.nodes: Nodes | None = memory.nodes
        self.guard = guard
        self.options = options
        self.device = device
        self._environment = environment
        self._transports: dict[Any, _transports.Transports] = {}
        self.devices: _transports.Devices = _transports.Devices(
            comm, device, environment
        )
        # All-gathers, and those of single arrays by dtype and shape.
        self._gathers: Cache[Any, Any] = Cache(_MOST_PLANS)
        self._array_gathers: Cache[Any, Any] = Cache(_MOST_PLANS)
        self._pool = Pool(_POOL_BYTES)
        # For messages that are long, but not very: no memory fails between their head
        # and the rest. It takes none before it is used.
        self._message_room = np.empty(_MESSAGE_ROOM, np.uint8)
        self.compression: _Compressed = self._compression_of(options)
        # GPU buffers go as wholes until `decide_device_transports`.
        wanted = self.implementation
        if wanted is CommunicationImplementation.NCCL:
            wanted = CommunicationImplementation.STAGED
        self.transports: _transports.Transports = _transports.choose(
            comm, wanted, self._shared, self.devices, memory.problem
        )
        self._staging: Staging | None = None
        self.plans: Plans = self._new_plans()

    def _new_plans(self) -> Plans:
        if self._staging is not None:
            self._staging.close()
        node = self.node if self.nodes is None else self.nodes.node
        self._staging = None if node is None else Staging(node)
        means = Means(
            self.comm,
            self.guard,
            self.node,
            self.nodes,
            self._pool,
            FlatBuffers(),
            self._staging,
        )
        return Plans(
            means,
            self.routes,
            self._describe,
            self.merge_options,
            self.invalid,
            self._all_reduce_rows,
        )

    @property
    def implementation(self) -> CommunicationImplementation:
        """What the options ask for, and where they leave it open the environment."""
        wanted = self.options.implementation
        if wanted is CommunicationImplementation.AUTO:
            return self._environment.implementation
        return wanted

    def decide_device_transports(self, timeout_seconds: float) -> None:
        """Have all ranks take the same way for GPU buffers. Collective, and once.

        Args:
            timeout_seconds: how long NCCL may look for the ranks; 0: no limit.

        Raises:
            ValueError: on all ranks, for what cannot be.
        """
        self.devices.decide(
            self.implementation, self.transports.host, timeout_seconds or None
        )
        self.transports = self._choose(self.options)
        self.plans = self._new_plans()
        staged = self.transports.device
        if (
            self.device.kind == "gpu"
            and not self.devices.decision.mixed
            and isinstance(staged, _transports.StagedTransport)
        ):
            try:  # page-locked memory: who has none must say so
                staged.prepare(self.device.array_module.empty(1, np.uint8))
            except Exception as error:
                self.invalid("MPIStrategy(...)", error)
            self.guard.agree(Call("MPIStrategy(...), with memory for GPU buffers"))

    def close(self) -> None:
        """Give back what the transports of GPU buffers hold. Collective."""
        self.devices.close()

    def _choose(self, options: CommunicationOptions) -> _transports.Transports:
        chosen = self._transports.get(options.implementation)
        if chosen is None:
            wanted = options.implementation
            if wanted is CommunicationImplementation.AUTO:
                wanted = self._environment.implementation
            chosen = self._transports[options.implementation] = _transports.choose(
                self.comm,
                wanted,
                self._shared,
                self.devices,
                self._memory.problem,
            )
        chosen.check()
        return chosen

    def release(self) -> None:
        """Let go of shared memory: the strategy is being closed. Not collective."""
        self._memory, self._shared = NO_MEMORY, None
        self.node = self.nodes = None
        self.comm.traffic.leave_core()
        self.plans = self._new_plans()
        self._gathers.clear()
        self._array_gathers.clear()
        self._pool = Pool(0)  # its memory goes with the last result
        direct = _transports.DirectTransport(self.comm)
        self.transports = _transports.Transports(direct, direct, "closed")
        self._transports = dict.fromkeys(CommunicationImplementation, self.transports)

    def merge_options(
        self, options: CommunicationOptions | None
    ) -> CommunicationOptions:
        """Return the strategy's options with those of one call on top.

        Raises:
            ValueError: if the call sets ``guard``, which is the strategy's.
        """
        if options is None:
            return self.options
        merged = self.options.merge(options)
        if options.guard is not None and options.guard != self.guard.enabled:
            raise ValueError(
                "`guard` cannot be changed for one call, since the ranks would wait "
                "for different things; write `MPIStrategy(communication_options="
                "CommunicationOptions(guard=...))`"
            )
        return merged

    def _compression_of(self, options: CommunicationOptions) -> _Compressed:
        """Return what ``options`` and the environment say of compression."""
        scheme = options.compression
        if scheme is None:
            scheme = self._environment.compression
        kind = options.implementation
        if kind is CommunicationImplementation.AUTO:
            kind = self._environment.implementation
        if scheme == "none" or kind is CommunicationImplementation.DIRECT:
            return _UNCOMPRESSED
        feedback = options.error_feedback
        if feedback is None:
            feedback = self._environment.error_feedback
        return scheme, feedback

    def invalid(self, call: str, error: BaseException) -> NoReturn:
        """Raise ``error``, which this rank found in its arguments, on all ranks.

        One that came from a collective call they have already.
        """
        raise self.guard.fail(Call(f"{call} with invalid arguments"), error, "invalid")

    # --- all_reduce -----------------------------------------------------------

    def all_reduce(
        self,
        op: ReduceOp,
        tree: Any,
        options: CommunicationOptions | None = None,
        call: str = "all_reduce",
        root: int | None = None,
    ) -> Any:
        """Reduce each leaf of ``tree`` over the ranks. Collective.

        Args:
            op: the operation.
            tree: a nest of arrays and numbers; the same structure, shapes and dtypes
                on all ranks.
            options: of this call.
            call: the name of the call in messages.
            root: the one rank that wants the results (MPI Reduce); None: all do.

        Returns:
            The nest of results, new arrays, bit-identical on all ranks; with a
            ``root`` a nest of None on the others.
        """
        return self.plans.all_reduce(op, tree, options, call, root)

    def _describe(
        self,
        op: ReduceOp,
        structure: nest.Structure,
        arrays: list[Any],
        call: str,
        options: CommunicationOptions,
        root: int | None,
    ) -> Signature:
        """Return the signature of an all-reduce.

        What a route looks at is in the text, or the same on all ranks.
        """
        bytes_per_pack = options.bytes_per_pack
        implementation = options.implementation
        compression = self.compression
        if options is not self.options:
            compression = self._compression_of(options)
        text = structure.render([backend.describe(x) for x in arrays])
        if bytes_per_pack != self.options.bytes_per_pack:
            # The ranks must cut their buffers at the same places.
            text += f" with bytes_per_pack={bytes_per_pack}"
        if implementation is not self.options.implementation:
            text += f" with implementation={implementation.name}"
        if compression != self.compression:
            text += f" with {describe_compression(compression)}"
        # Likewise: what is on the GPU has buckets of its own, and goes its own way.
        text += self._places(arrays, structure)
        compress = None
        if compression != _UNCOMPRESSED and self.comm.num_nodes > 1:
            compress = functools.partial(_transports.Compression, *compression)
        to_root = "" if root is None else f" to rank {root}"
        return Signature(
            Call(f"{call}{to_root} {op.name} {text}"),
            leaves_of(op, arrays, call),
            root,
            self._choose(options),
            bytes_per_pack or self._environment.bytes_per_pack,
            compress,
        )

    @timed
    def buffers_like(self, tree: Any) -> Any:
        """Return zeros of the same structure, shapes and dtypes. Collective.

        Those on the host are in this rank's arena, where the others can read them, if
        there is room.

        Args:
            tree: a nest of arrays and numbers, of the same structure, shapes and
                dtypes on all ranks.
        """
        call = "buffers_like"
        try:
            leaves, structure = nest.flatten(tree)
            like = [backend.as_array(leaf, call)[0] for leaf in leaves]
            results = self._zeros(like)
        except Exception as error:
            self.invalid(call, error)
        text = structure.render([backend.describe(x) for x in like])
        self.guard.agree(Call(f"{call} {text}"))
        return structure.unflatten(results)

    def _zeros(self, like: list[Any]) -> list[Any]:
        """Return zeros; on the host side by side in one block, each on a line."""
        starts, end = [], 0
        for x in like:
            starts.append(end)
            if not backend.is_device_array(x):
                end += round_up(x.nbytes, LINE)
        block = None
        if self.node is not None and end:
            block = self.node.pool.take(end)
        if block is None:
            return [backend.module_of(x).zeros(x.shape, x.dtype) for x in like]
        np.frombuffer(block, np.uint8)[:] = 0
        return [
            backend.module_of(x).zeros(x.shape, x.dtype)
            if backend.is_device_array(x)
            else np.ndarray(x.shape, x.dtype, block, start)
            for x, start in zip(like, starts, strict=True)
        ]

    def _all_reduce_rows(
        self,
        op: ReduceOp,
        tree: Any,
        options: CommunicationOptions | None,
        call: str,
        root: int | None,
    ) -> Any:
        """All-reduce a nest some of whose leaves are rows: those are concatenated."""
        to_here = root is None or root == self.comm.rank
        if root is not None:
            call = f"{call} to rank {root}"
        leaves, structure = nest.flatten(tree)
        sparse = [i for i, x in enumerate(leaves) if isinstance(x, IndexedSlices)]
        call = f"{call} of IndexedSlices"
        try:
            if op not in (ReduceOp.SUM, ReduceOp.MEAN):
                raise TypeError(
                    f"{call}: {op.name} is not defined, only SUM and MEAN; reduce a "
                    "dense array"
                )
            results = list(leaves)
            dense = [x for i, x in enumerate(leaves) if i not in sparse]
            parts = []
            for i in sparse:
                values = backend.as_array(leaves[i].values, call)[0]
                if op is ReduceOp.MEAN:
                    values = values / values.dtype.type(self.comm.size)
                parts.append([values, leaves[i].indices])
        except Exception as error:
            self.invalid(call, error)
        gathered = self.all_gather(parts, 0, options, call)
        for i, (values, indices) in zip(sparse, gathered, strict=True):
            results[i] = IndexedSlices(values, indices, leaves[i].dense_shape)
        if dense:
            reduced = iter(self.plans.all_reduce(op, dense, options, call, None))
            results = [
                x if i in sparse else next(reduced) for i, x in enumerate(results)
            ]
        return structure.unflatten(results if to_here else [None] * len(results))

    def _places(self, arrays: list[Any], structure: nest.Structure) -> str:
        mixed = self.devices.decision.mixed
        return _transports.place_text(arrays, structure, mixed)

    # --- all_gather -----------------------------------------------------------

    def all_gather(
        self,
        tree: Any,
        axis: int,
        options: CommunicationOptions | None = None,
        call: str = "all_gather",
    ) -> Any:
        """Concatenate each leaf of ``tree`` over the ranks. Collective.

        Args:
            tree: a nest of arrays of at least one dimension, which may differ between
                ranks in their size along ``axis``, and only there.
            axis: the axis to concatenate along, negative from the end.
            options: of this call.
            call: the name of the call in messages.

        Returns:
            The nest of results, on all ranks, in rank order.
        """
        if type(tree) is np.ndarray and options is None and type(axis) is int:
            plan = self._array_gathers.get((call, axis, tree.dtype, tree.shape))
            if plan is not None:
                return plan((tree,))[0]
        return self._all_gather(tree, axis, options, call)

    @timed
    def _all_gather(
        self, tree: Any, axis: int, options: CommunicationOptions | None, call: str
    ) -> Any:
        """All-gather anything, after a look at it."""
        try:
            merged = self.merge_options(options)
            leaves, structure = nest.flatten(tree)
            if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
                raise NotImplementedError(
                    f"{call} does not support IndexedSlices; gather its `values` and "
                    "`indices`"
                )
            arrays = [backend.as_array(leaf, call)[0] for leaf in leaves]
            axes = [_check_axis(x, axis, call) for x in arrays]
            plan = self._gather_of(call, axis, structure, arrays, axes, merged)
            if type(tree) is np.ndarray and arrays[0] is tree and options is None:
                key = (call, axis, tree.dtype, tree.shape)
                self._array_gathers[key] = plan
        except Exception as error:
            self.invalid(call, error)
        return structure.unflatten(plan(arrays, merged.timeout_seconds))

    def _gather_of(
        self,
        call: str,
        axis: int,
        structure: nest.Structure,
        arrays: list[Any],
        axes: list[int],
        options: CommunicationOptions,
    ) -> CoreGather | MpiGather:
        """Return the way of an all-gather of such arrays."""
        transports = self._choose(options)
        implementation = options.implementation
        on_device = [backend.is_device_array(x) for x in arrays]
        shapes = [tuple(x.shape) for x in arrays]
        leaves = [
            GatherLeaf(x.dtype, shape[:k], shape[k + 1 :])
            for x, shape, k in zip(arrays, shapes, axes, strict=True)
        ]
        key = (call, axis, structure, implementation, *on_device, *leaves)
        found = self._gathers.get(key)
        if found is not None:
            return found  # type: ignore[no-any-return]
        described = [
            f"{x.dtype.name} {_shape_without(shape, k)}"
            for x, shape, k in zip(arrays, shapes, axes, strict=True)
        ]
        text = structure.render(described) + self._places(arrays, structure)
        if implementation is not self.options.implementation:
            text += f" with implementation={implementation.name}"
        made = make_gather(
            self.guard,
            Call(f"{call} axis={axis} {text}"),
            leaves,
            transports,
            self.node,
            self._pool,
            anywhere=any(on_device) or self.devices.decision.mixed,
        )
        self._gathers[key] = made
        return made

    # --- copies from one rank -------------------------------------------------

    @timed
    def broadcast(
        self,
        tree: Any,
        root: int = 0,
        options: CommunicationOptions | None = None,
        call: str = "broadcast",
    ) -> Any:
        """Return the root's leaves on all ranks. Collective.

        Args:
            tree: a nest of arrays and numbers, of the same structure, shapes and
                dtypes on all ranks.
            root: the rank whose values count.
            options: of this call.
            call: the name of the call in messages.
        """
        try:
            merged = self.merge_options(options)
            transports = self._choose(merged)
            leaves, structure = nest.flatten(tree)
            pairs = [backend.as_array(leaf, call) for leaf in leaves]
            results = [backend.contiguous(x).copy() for x, _ in pairs]
        except Exception as error:
            self.invalid(call, error)
        text = structure.render([backend.describe(x) for x in results])
        text += self._places(results, structure)
        self.guard.agree(Call(f"{call} {text}"), merged.timeout_seconds)
        for x in results:
            transports.of(x).broadcast(backend.as_bytes(x), root)
        return structure.unflatten(
            [
                backend.restore(x, kind)
                for x, (_, kind) in zip(results, pairs, strict=True)
            ]
        )

    @timed
    def share(self, make: Callable[[], list[Any]], text: str) -> list[Any]:
        """Return rank 0's values on all ranks, which need know nothing of them.

        Collective. ``make`` is called on rank 0 alone; if it raises, all ranks do.

        Args:
            make: gives the values: arrays go from their buffers, all else pickled.
            text: what this is for, the same on all ranks.

        Returns:
            The values; host arrays on a rank whose device is the host.
        """
        call = Call(text)
        values: list[Any] = []
        if self.comm.rank == 0:
            try:
                values = make()
                heads = [_head_of(value, text) for value in values]
                data = pickle.dumps(heads)
            except Exception as error:
                raise self.guard.fail(call, error, "invalid") from None
        self.guard.agree(call)
        if self.comm.rank != 0:
            return self.receive_arrays(text)
        self.send_bytes(data)
        self._send_values(values, heads, text)
        return values

    def _send_values(
        self, values: list[Any], heads: list[_ArrayHead], call: str
    ) -> None:
        """Broadcast the arrays of rank 0, for which all have memory."""
        arrays = self._with_memory(
            lambda: [
                backend.contiguous(backend.as_array(value, "broadcast")[0])
                for value, head in zip(values, heads, strict=True)
                if head.dtype is not None
            ],
            heads,
            call,
        )
        for x in arrays:
            self.transports.of(x).broadcast(backend.as_bytes(x), 0)

    def _with_memory(
        self, allocate: Callable[[], list[Any]], heads: list[_ArrayHead], call: str
    ) -> list[Any]:
        """Return what ``allocate`` does, if it succeeds on all ranks. Collective.

        Raises:
            MemoryError: on all ranks, where it does not on some.
        """
        if all(head.dtype is None for head in heads):
            return []
        return self.comm.together(allocate, call)

    def send_arrays(self, values: list[Any], call: str) -> None:
        """Send arrays and objects from rank 0, to ranks that wait for them.

        Without agreement: for the coordinator, whose followers only wait.
        """
        heads = [_head_of(value, call) for value in values]
        self.send_bytes(pickle.dumps(heads))
        self._send_values(values, heads, call)

    def receive_arrays(self, call: str = "a message from rank 0") -> list[Any]:
        """Return what rank 0 sends with `send_arrays`.

        Raises:
            MemoryError: on all ranks, where some rank has no memory for them.
        """
        heads: list[_ArrayHead] = pickle.loads(self.receive_bytes())
        arrays = self._with_memory(
            lambda: [
                (self.device.array_module if head.on_device else np).empty(
                    head.shape, head.dtype
                )
                for head in heads
                if head.dtype is not None
            ],
            heads,
            call,
        )
        for x in arrays:
            self.transports.of(x).broadcast(backend.as_bytes(x), 0)
        received = iter(arrays)
        return [
            head.payload
            if head.dtype is None
            else backend.restore(next(received), head.kind)
            for head in heads
        ]

    # --- one value per rank, to and from rank 0 ---------------------------------

    @timed
    def collect(self, values: list[Any], call: str) -> list[list[Any]]:
        """Return the values of all ranks on rank 0, and nothing elsewhere.

        Collective. The values may differ in dtype and shape between ranks.

        Returns:
            On rank 0 a list with, for each rank, the list of its values.
        """
        try:
            heads = [_head_of(value, call) for value in values]
            data = pickle.dumps(heads)
            arrays = [
                backend.to_host(backend.contiguous(backend.as_array(value, call)[0]))
                for value, head in zip(values, heads, strict=True)
                if head.dtype is not None
            ]
            send = _join_bytes(arrays)
        except Exception as error:
            self.invalid(call, error)
        self.guard.agree(Call(f"{call} of {len(values)} values"))
        all_heads: list[list[_ArrayHead]] = [
            pickle.loads(item) for item in self.comm.all_gather_objects(data)
        ]
        counts = [sum(head.nbytes for head in heads) for heads in all_heads]
        room = sum(counts) if self.comm.rank == 0 else 0
        receive = self.comm.together(lambda: np.empty(room, np.uint8), call)
        if self.comm.rank != 0:
            self.comm.gather(send, None, counts, 0)
            return []
        self.comm.gather(send, receive, counts, 0)
        result = []
        start = 0
        for heads, count in zip(all_heads, counts, strict=True):
            result.append(self._split(receive[start : start + count], heads))
            start += count
        result[0] = list(values)
        return result

    @timed
    def scatter(self, values: list[list[Any]] | None, call: str) -> list[Any]:
        """Give each rank its list of values, which rank 0 has. Collective.

        Args:
            values: on rank 0 a list of values for each rank; elsewhere None.
            call: the name of the call in messages.
        """
        heads: list[list[_ArrayHead]] = []
        joined = np.empty(0, np.uint8)
        if values is not None:
            try:
                heads = [[_head_of(v, call) for v in row] for row in values]
                data = pickle.dumps(heads)
                joined = _join_bytes(
                    [
                        backend.to_host(backend.as_array(value, call)[0])
                        for row, row_heads in zip(values, heads, strict=True)
                        for value, head in zip(row, row_heads, strict=True)
                        if head.dtype is not None
                    ]
                )
            except Exception as error:
                self.invalid(call, error)
        self.guard.agree(Call(call))
        if values is not None:
            self.send_bytes(data)
        else:
            heads = pickle.loads(self.receive_bytes())
        counts = [sum(head.nbytes for head in row) for row in heads]
        own = counts[self.comm.rank]
        receive = self.comm.together(lambda: np.empty(own, np.uint8), call)
        self.comm.scatter(None if values is None else joined, receive, counts, 0)
        if values is not None:
            return list(values[0])
        return self._split(receive, heads[self.comm.rank])

    def _split(self, raw: Any, heads: list[_ArrayHead]) -> list[Any]:
        values = []
        start = 0
        for head in heads:
            if head.dtype is None:
                values.append(head.payload)
                continue
            # A copy: it is aligned, and does not keep the whole buffer alive.
            part = raw[start : start + head.nbytes].copy()
            start += head.nbytes
            array = backend.from_bytes(part, head.dtype, head.shape)
            if head.on_device:
                array = backend.place(array, self.device)
            values.append(backend.restore(array, head.kind))
        return values

    # --- bytes from rank 0 ------------------------------------------------------

    def check_plain(self, call: str, values: list[Any]) -> None:
        """See that values which each rank has of its own are the same. Collective."""
        if not self.guard.checks:
            return
        texts = [
            backend.summarize(backend.as_array(value, call)[0])
            for value in values
            if backend.is_array(value) or backend.is_number(value)
        ]
        if texts:
            self.guard.agree(
                Call(
                    f"{call} of {', '.join(texts)}, which is not per replica (what "
                    "differs between ranks comes from `strategy.run`, or "
                    "`experimental_distribute_values_from_function`)"
                )
            )

    @property
    def ring(self) -> Any:
        """The core's channel, where messages of rank 0 go through a ring; or None.

        Then rank 0 does not wait for who reads them, while there is room.
        """
        return None if self.node is None else self.node.channel

    def send_bytes(self, data: bytes) -> None:
        """Send bytes from rank 0 to all ranks, which wait for them."""
        comm, ring = self.comm, self.ring
        self.guard.count()
        if ring is not None:
            comm.traffic.count("Ibcast", len(data))
            self._post(ring, data)
            return
        short = len(data) < comm.message_bytes
        head = b"\1" + data if short else b"\0" + len(data).to_bytes(8, "little")
        self.guard.wait(comm.start_message(head), "a message")
        if not short:
            raw = np.frombuffer(data, np.uint8)
            if len(data) > _MESSAGE_ROOM:
                comm.together(_nothing, "a message from rank 0")
            comm.broadcast(raw, 0)

    def _post(self, ring: Any, data: bytes) -> None:
        """Send a message through the ring: a mark, and as much as a message takes."""
        room = _native.core.MESSAGE_BYTES - 1
        self.guard.enter_wait(_SENDING, None)
        try:
            for start in range(0, len(data) or 1, room):
                last = start + room >= len(data)
                part = data if not start and last else data[start : start + room]
                if ring.post((b"\1" if last else b"\0") + part) == LEFT:
                    raise LeftError(ring.who)
        except BaseException as error:
            raise self.guard.leave_payload(_SENDING, error) from None

    def receive_bytes(
        self, what: str = "a message from rank 0", timeout: float | None = None
    ) -> bytes:
        """Return the bytes that rank 0 sends.

        Args:
            what: this rank waits for, in the messages of the deadline.
            timeout: seconds to wait; None: the strategy's; 0: forever.
        """
        comm, ring = self.comm, self.ring
        self.guard.count()
        if ring is not None:
            data = self._take(ring, what, timeout)
            comm.traffic.count("Ibcast", len(data))
            return data
        with comm.traffic:
            request = comm.start_message(None)
            self.guard.wait(request, what, timeout)
            head: bytes = request.result
            if head[:1] == b"\1":
                return head[1:]
            size = int.from_bytes(head[1:], "little")
            rest = self._message_room[:size]
            if size > _MESSAGE_ROOM:
                rest = comm.together(lambda: np.empty(size, np.uint8), what)
            comm.broadcast(rest, 0)
            return rest.tobytes()

    def _take(self, ring: Any, what: str, timeout: float | None) -> bytes:
        """Return a message of rank 0 that came through the ring."""
        call = call_of(what)
        parts: list[bytes] = []
        self.guard.enter_wait(call, timeout)
        try:
            while True:
                part = ring.take()
                if part == LEFT:
                    raise LeftError(ring.who)
                if part[:1] == b"\1" and not parts:
                    return part[1:]  # type: ignore[no-any-return]
                parts.append(part[1:])
                if part[:1] == b"\1":
                    return b"".join(parts)
        except BaseException as error:
            raise self.guard.leave_payload(call, error) from None


def _nothing() -> None:
    """Do nothing."""


def _head_of(value: Any, call: str) -> _ArrayHead:
    if backend.is_array(value):
        x, kind = backend.as_array(value, call)
        return _ArrayHead(x.dtype, tuple(x.shape), kind, backend.is_device_array(x))
    return _ArrayHead(None, (), "array", False, payload=value)


def _join_bytes(arrays: Sequence[Any]) -> Any:
    parts = [backend.as_bytes(backend.contiguous(x)) for x in arrays]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def _check_axis(x: Any, axis: object, call: str) -> int:
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise TypeError(
            f"{call}: expected `axis` to be an int, got {axis!r} of type "
            f"{type(axis).__name__}"
        )
    if x.ndim == 0:
        raise ValueError(
            f"{call}: expected arrays of at least one dimension, got {x.dtype.name} "
            "(); write `numpy.reshape(x, (1,))` to gather one number per replica"
        )
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{call}: expected -{x.ndim} <= axis < {x.ndim} for {backend.describe(x)}, "
            f"got axis={axis}"
        )
    return int(axis) % int(x.ndim)


def _shape_without(shape: tuple[int, ...], axis: int) -> str:
    sizes = ["*" if k == axis else str(n) for k, n in enumerate(shape)]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
