"""The verbs: each collective once, for whoever calls it.

Replica code, cross-replica code and the coordinator's commands all end here. Every
verb goes the same way: look at the arguments, agree with the other ranks (`Guard`),
move the bytes (`Transports`), and wrap the result. What can fail on one rank alone
happens before the agreement, and its failure is told to all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

import numpy as np

from mpidist import (
    _arrays,
    _dtypes,
    _fusion,
    _gathering,
    _lean,
    _lean_direct,
    _nest,
    _transports,
)
from mpidist._comm import AnyCommunicator
from mpidist._guard import Guard
from mpidist._options import (
    CommunicationImplementation,
    CommunicationOptions,
    Environment,
    ReduceOp,
)
from mpidist._pool import Pool
from mpidist._reports import Call
from mpidist._residents import Residents, Split, reduce_run
from mpidist._sparse import IndexedSlices
from mpidist._transports import NOWHERE, SharedTransport

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MOST_PLANS: Final = 1024
# What may go the short way. A number has the dtype that NumPy gives it.
_SHORT: Final = frozenset((np.ndarray, float, int, np.float32, np.float64))
_POOL_BYTES: Final = 512 * 2**20
_HAVE_BUFFERS: Final = Call("buffers_like, with memory of this rank's own")
_Compressed = tuple[str, bool]
"""The format in which sums go between nodes, and whether errors are fed back."""

_UNCOMPRESSED: Final[_Compressed] = ("none", False)


@dataclasses.dataclass(frozen=True)
class _Plan:
    call: Call
    leaves: list[_fusion.Leaf]
    buckets: list[_fusion.Bucket]
    room: int
    is_fused: bool  # other ranks may go the short way, with a header in any case
    hosting: _transports.Hosting | None


@dataclasses.dataclass(slots=True)
class Reduction:
    """An all-reduce: its arrays, and the way that it goes.

    Attributes:
        plan: what is done.
        arrays: the leaves, which stay as they are.
        results: the arrays for the results; None where this rank wants none.
        split: what is reduced in place, if anything.
        offset: where the results are in this rank's part of the arena, if they are.
        offsets: the same of all ranks, once they have agreed that all have them there.
    """

    plan: _Plan
    arrays: list[Any]
    results: list[Any]
    split: Split | None = None
    offset: int = NOWHERE
    offsets: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class _ArrayHead:
    """Dtype and shape of an array whose bytes travel apart; or a whole object."""

    dtype: Any
    shape: tuple[int, ...]
    kind: _arrays.LeafKind
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
    """Count the time that a verb takes in the statistics."""

    @functools.wraps(method)
    def verb(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        collectives: Any = args[0]
        with collectives.comm.traffic.timed():
            return method(*args, **kwargs)

    return verb


class Collectives:
    """The verbs of one group of replicas."""

    def __init__(
        self,
        comm: AnyCommunicator,
        guard: Guard,
        options: CommunicationOptions,
        environment: Environment,
        device: _arrays.Device,
        shared: _transports.DirectTransport | None = None,
    ) -> None:
        self.comm = comm
        self._shared = shared
        self.guard = guard
        self.options = options
        self.device = device
        self._environment = environment
        self._transports: dict[Any, _transports.Transports] = {}
        self.devices = _transports.Devices(comm, device, environment)
        self._buffers = _fusion.FlatBuffers()
        self._plans: dict[Any, _Plan] = {}
        # Short ways: by call, operation, dtype and shape; and those of "all_reduce".
        self._short: dict[Any, Any] = {}
        self.short: dict[Any, Any] = {}
        # The ways of an all-gather, and those of single arrays by dtype and shape.
        self._gathers: dict[Any, Any] = {}
        self._short_gathers: dict[Any, Any] = {}
        self._pool = Pool(_POOL_BYTES)
        self.compression = self._compression_of(options)
        # GPU buffers go as wholes until the ranks have met (`settle`).
        wanted = self.implementation
        if wanted is CommunicationImplementation.NCCL:
            wanted = CommunicationImplementation.STAGED
        self.transports = _transports.choose(comm, wanted, shared, self.devices)
        self._residents: Residents | None = None
        host = self.transports.host
        if isinstance(shared, SharedTransport) and host is shared:
            self._residents = Residents(_transports.Blocks(shared.comm, shared.board))

    @property
    def implementation(self) -> CommunicationImplementation:
        """What the options ask for, and where they leave it open the environment."""
        wanted = self.options.implementation
        if wanted is CommunicationImplementation.AUTO:
            return self._environment.implementation
        return wanted

    def settle(self, timeout_seconds: float) -> None:
        """Have all ranks take the same way for GPU buffers. Collective, and once.

        Args:
            timeout_seconds: how long NCCL may look for the ranks; 0: no limit.

        Raises:
            ValueError: on all ranks, for what can not be.
        """
        self.devices.settle(
            self.implementation, self.transports.host, timeout_seconds or None
        )
        self.transports = self._choose(self.options)
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
                self.comm, wanted, self._shared, self.devices
            )
        chosen.check()
        return chosen

    def release(self) -> None:
        """Let go of shared memory: the strategy is being closed. Not collective."""
        self._shared = self._residents = None
        self._short.clear()
        self.short.clear()
        self._gathers.clear()
        self._short_gathers.clear()
        self._plans.clear()
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
                "`guard` can not be changed for one call, since the ranks would wait "
                "for different things; write `MPIStrategy(communication_options="
                "CommunicationOptions(guard=...))`"
            )
        return merged

    def _compression_of(self, options: CommunicationOptions) -> _Compressed:
        """Return what ``options`` and the environment say of compression.

        Raises:
            ValueError: where there is nothing that could compress.
        """
        scheme = options.compression
        if scheme is None:
            scheme = self._environment.compression
        kind = options.implementation
        if kind is CommunicationImplementation.AUTO:
            kind = self._environment.implementation
        if scheme == "none" or kind is CommunicationImplementation.DIRECT:
            return _UNCOMPRESSED
        if self.comm.num_nodes > 1 and self._shared is None:
            raise ValueError(
                f'compression="{scheme}" needs memory that the ranks of a node share: '
                "room in /dev/shm, and `compression` or `CommunicationImplementation."
                "SHARED` in the options with which all ranks make the strategy"
            )
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
            call: the name of the verb in messages.
            root: the one rank that wants the results (MPI Reduce); None: all do.

        Returns:
            The nest of results, new arrays, bit-identical on all ranks; with a
            ``root`` a nest of None on the others.
        """
        kind = type(tree)
        if kind in _SHORT and options is None and root is None:
            x = tree if kind is np.ndarray else np.asarray(tree)
            short = self._short.get((call, op._name_, x.dtype, x.shape))
            if short is not None:
                result = short(x)
                if result is not None:
                    if kind is np.ndarray:
                        return result
                    return result.item() if kind in (int, float) else result[()]
        return self._all_reduce(op, tree, options, call, root)

    @timed
    def _all_reduce(
        self,
        op: ReduceOp,
        tree: Any,
        options: CommunicationOptions | None,
        call: str,
        root: int | None,
    ) -> Any:
        """All-reduce anything, the long way."""
        if root is not None:
            call = f"{call} to rank {root}"
        to_here = root is None or root == self.comm.rank
        try:
            merged = self.merge_options(options)
            transports = self._choose(merged)
            leaves, structure = _nest.flatten(tree)
            if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
                return self._all_reduce_sparse(
                    op, leaves, structure, options, call, to_here
                )
            pairs = [_arrays.as_array(leaf, call) for leaf in leaves]
            arrays = [array for array, _ in pairs]
            plan = self._plan(op, structure, arrays, call, merged)
            # All memory before the agreement: who has none must say so.
            reduction = self.reserve(plan, arrays, transports, root)
            if type(tree) in _SHORT and options is None and root is None:
                self._shorten(plan, op, arrays[0], call)
        except Exception as error:
            self.invalid(call, error)
        self.agree(plan.call, reduction, merged.timeout_seconds)
        self.move(reduction, transports, root)
        return structure.unflatten(
            [
                _arrays.restore(result, kind) if to_here else None
                for result, (_, kind) in zip(reduction.results, pairs, strict=True)
            ]
        )

    def _host(
        self, leaves: list[_fusion.Leaf], options: CommunicationOptions
    ) -> _transports.Hosting | None:
        """Return how leaves are reduced whose results all ranks can write to."""
        shared = self._choose(options).host
        if not isinstance(shared, SharedTransport) or shared.arena is None:
            return None
        if not leaves or not all(leaf.is_plain for leaf in leaves):
            return None
        nbytes = sum(leaf.size * leaf.reduction.wire.itemsize for leaf in leaves)
        if not shared.fused_bytes < nbytes <= shared.arena.nbytes // 2:
            return None
        hosted = []
        for leaf in leaves:
            operation: Any = leaf.reduction.mpi
            mean = leaf.reduction.op is ReduceOp.MEAN
            wire = leaf.reduction.wire
            hosted.append(_transports.HostedLeaf(leaf.shape, wire, operation, mean))
        comm = shared.comm
        return _transports.Hosting(
            shared.board, shared.arena, hosted, comm.local_rank, comm.local_size
        )

    def _new_result(self, x: Any, leaf: _fusion.Leaf) -> Any:
        if leaf.on_device:
            return _arrays.empty_like(x, leaf.shape, leaf.reduction.result)
        return self._pool.empty(leaf.shape, leaf.reduction.result)

    def _shorten(self, plan: _Plan, op: ReduceOp, x: Any, call: str) -> None:
        """Have the next array of this dtype and shape go the short way."""
        host = self.transports.host
        if not (isinstance(host, SharedTransport) or self.guard.checks):
            return
        if len(self._short) >= _MOST_PLANS:
            self._short.clear()
            self.short.clear()

        def move(x: Any, result: Any) -> None:
            arrays = [_arrays.contiguous(x)]
            self.move(Reduction(plan, arrays, [result]), self.transports)

        def resides(x: Any) -> bool:
            residents = self._residents
            return residents is not None and residents.blocks.find(x) is not None

        def meets() -> bool:
            residents = self._residents
            return self.guard.enabled or (residents is not None and residents.used)

        made: Any = None
        if isinstance(host, SharedTransport):
            made = _lean.make(
                *(self.guard, plan.call, plan.leaves[0], host, self._pool),
                *(move, resides, meets, plan.hosting),
            )
        elif plan.buckets[0].compression is None:
            made = _lean_direct.make(
                self.guard, plan.call, plan.leaves[0], host, self._pool
            )
        if made is not None:
            self._short[call, op._name_, x.dtype, x.shape] = made
            if call == "all_reduce":
                self.short[op._name_, x.dtype, x.shape] = made

    def reserve(
        self,
        plan: _Plan,
        arrays: list[Any],
        transports: _transports.Transports | None = None,
        root: int | None = None,
        results: Callable[[], list[Any]] | None = None,
    ) -> Reduction:
        """Allocate what an all-reduce needs, and find the way that it could go.

        Args:
            plan: of the call.
            arrays: the leaves; those that have to be are replaced by contiguous ones.
            transports: of the call; None: the strategy's.
            root: as in `all_reduce`.
            results: gives arrays for the results that are not in the arena; None: new
                ones.
        """
        transports = transports or self.transports
        split = None
        residents = self._residents
        if residents is not None and residents.used and transports.host is self._shared:
            split = residents.split(
                plan,
                plan.leaves,
                arrays,
                lambda leaves: _fusion.plan_buckets(leaves, plan.room, streams=True),
            )
        for bucket in (*plan.buckets, *(() if split is None else split.buckets)):
            _fusion.reserve(bucket, plan.leaves, arrays, self._buffers, transports)
        hosting = plan.hosting
        if split is not None and (results is not None or not split.one):
            hosting = None
        if hosting is not None and root is None:
            place = hosting.place()
            if place is not None:
                block, offset = place
                if split is None:
                    hosting.copy_in(offset, [_arrays.flat(x) for x in arrays])
                made = hosting.results(block)
                return Reduction(plan, arrays, made, split, offset)
        if root is not None and root != self.comm.rank:
            return Reduction(plan, arrays, [None] * len(arrays), split)
        if results is not None:
            return Reduction(plan, arrays, results(), split)
        made = [
            self._new_result(x, leaf)
            for x, leaf in zip(arrays, plan.leaves, strict=True)
        ]
        return Reduction(plan, arrays, made, split)

    def agree(
        self, call: Call, reduction: Reduction, timeout: float | None = None
    ) -> None:
        """Agree with the other ranks, also on the way to go. Collective.

        Args:
            call: which must be the same on all ranks.
            reduction: from `reserve`; takes what was agreed.
            timeout: as of `Guard.agree`.
        """
        split, hosting = reduction.split, reduction.plan.hosting
        residents, board = self._residents, self.comm.board
        if not (
            reduction.plan.is_fused
            or hosting is not None
            or (residents is not None and residents.used)
        ):
            self.guard.agree(call, timeout)
            return
        number = 0
        mark = 0 if split is None else split.mark
        if board is not None and hosting is not None:
            number = board.headers + 1
            board.note(reduction.offset)
            if split is None:
                mark = _lean.HOSTED
        if not self.guard.agree_softly(call, mark, timeout):
            reduction.split = None
        # Notes come with a header: where a second one has confirmed the first, without.
        elif number and board is not None and board.headers == number:
            offsets = board.notes()
            if min(offsets) != NOWHERE:
                reduction.offsets = offsets

    # Who has NumPy raise errors would leave the others waiting for this rank.
    @np.errstate(all="ignore")
    def move(
        self,
        reduction: Reduction,
        transports: _transports.Transports,
        root: int | None = None,
    ) -> None:
        """Do an all-reduce, when all ranks have agreed. Collective.

        Args:
            reduction: of the call.
            transports: of the call.
            root: as in `all_reduce`.
        """
        try:
            self._move(reduction, transports, root)
            if reduction.offset != NOWHERE and reduction.plan.hosting is not None:
                for i in reduction.plan.hosting.tiny:
                    reduction.results[i] = reduction.results[i].copy()
        except BaseException as error:
            raise self.guard.leave_payload(reduction.plan.call, error) from None

    def _move(
        self,
        reduction: Reduction,
        transports: _transports.Transports,
        root: int | None,
    ) -> None:
        plan, split, arrays = reduction.plan, reduction.split, reduction.arrays
        if reduction.offsets is not None and plan.hosting is not None:
            self.comm.traffic.count("Allreduce", plan.hosting.nbytes)
            if split is None:
                flat = [_arrays.flat(x) for x in arrays]
                plan.hosting.reduce(reduction.offsets, flat)
            else:
                (block,) = split.blocks.values()
                plan.hosting.reduce_resident(reduction.offsets, block, split.starts)
            return
        buckets: Sequence[_fusion.Bucket] = plan.buckets
        if split is not None:
            buckets = split.buckets
            for run in split.runs:
                self.comm.traffic.count("Allreduce", run.stop - run.start)
                reduce_run(run, split, plan.leaves, self.comm.size, reduction.results)
        for bucket in buckets:
            _fusion.reduce_bucket(
                bucket,
                plan.leaves,
                arrays,
                transports,
                self._buffers,
                reduction.results,
                root,
            )

    @timed
    def sum_for_once(self, reduction: Reduction) -> list[Any]:
        """Return the sums, to be read at once. Collective.

        Where all arrays are in memory that the ranks share, the sums are there too,
        read-only, and only until the next such call: nothing is copied out.

        Args:
            reduction: by SUM, on which all ranks have agreed.
        """
        split = reduction.split
        if split is not None and self._residents is not None:
            plan = reduction.plan
            try:
                with np.errstate(all="ignore"):  # as in `move`
                    sums = self._residents.reduce_here(split, plan.leaves)
            except BaseException as error:
                raise self.guard.leave_payload(plan.call, error) from None
            if sums is not None:
                for run in split.runs:
                    self.comm.traffic.count("Allreduce", run.stop - run.start)
                return sums
        self.move(reduction, self.transports)
        return reduction.results

    @timed
    def buffers_like(self, tree: Any) -> Any:
        """Return zeros of the same structure, shapes and dtypes. Collective.

        Those on the host are in memory that the ranks share, where there is some.

        Args:
            tree: a nest of arrays and numbers, of the same structure, shapes and
                dtypes on all ranks.
        """
        call = "buffers_like"
        try:
            leaves, structure = _nest.flatten(tree)
            like = [_arrays.as_array(leaf, call)[0] for leaf in leaves]
            results = [
                _arrays.module_of(x).zeros(x.shape, x.dtype)
                if self._residents is None or _arrays.is_device_array(x)
                else None
                for x in like
            ]
        except Exception as error:
            self.invalid(call, error)
        text = structure.render([_arrays.describe(x) for x in like])
        self.guard.agree(Call(f"{call} {text}"))
        hosted = [i for i, x in enumerate(results) if x is None]
        if self._residents is not None and hosted:
            shapes = [(tuple(like[i].shape), like[i].dtype) for i in hosted]
            made = self._residents.make(shapes)
            if made is None:
                try:
                    made = [np.zeros(shape, dtype) for shape, dtype in shapes]
                except Exception as error:
                    self.invalid(call, error)
                self.guard.agree(_HAVE_BUFFERS)
            for i, x in zip(hosted, made, strict=True):
                results[i] = x
        return structure.unflatten(results)

    def _all_reduce_sparse(
        self,
        op: ReduceOp,
        leaves: list[Any],
        structure: _nest.Structure,
        options: CommunicationOptions | None,
        call: str,
        to_here: bool,
    ) -> Any:
        """All-reduce a nest some of whose leaves are rows: those are concatenated."""
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
                values = _arrays.as_array(leaves[i].values, call)[0]
                if op is ReduceOp.MEAN:
                    values = values / values.dtype.type(self.comm.size)
                parts.append([values, leaves[i].indices])
        except Exception as error:
            self.invalid(call, error)
        gathered = self.all_gather(parts, 0, options, call)
        for i, (values, indices) in zip(sparse, gathered, strict=True):
            results[i] = IndexedSlices(values, indices, leaves[i].dense_shape)
        if dense:
            reduced = iter(self.all_reduce(op, dense, options, call))
            results = [
                x if i in sparse else next(reduced) for i, x in enumerate(results)
            ]
        return structure.unflatten(results if to_here else [None] * len(results))

    def _plan(
        self,
        op: ReduceOp,
        structure: _nest.Structure,
        arrays: list[Any],
        call: str,
        options: CommunicationOptions,
    ) -> _Plan:
        host = self._choose(options).host
        streams = host.streams(sys.maxsize)
        bytes_per_pack = options.bytes_per_pack
        implementation = options.implementation
        compression = self.compression
        if options is not self.options:
            compression = self._compression_of(options)
        described = tuple(
            (x.dtype, x.shape, _arrays.is_device_array(x)) for x in arrays
        )
        how = (bytes_per_pack, implementation, compression)
        key = (op, structure, call, how, described)
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        leaves = [
            _fusion.Leaf(tuple(shape), _dtypes.reduction(dtype, op, call), on_device)
            for dtype, shape, on_device in described
        ]
        room = bytes_per_pack or self._environment.bytes_per_pack
        text = structure.render([_arrays.describe(x) for x in arrays])
        if bytes_per_pack != self.options.bytes_per_pack:
            # The ranks must cut their buffers at the same places.
            text += f" with bytes_per_pack={bytes_per_pack}"
        if implementation is not self.options.implementation:
            text += f" with implementation={implementation.name}"
        if compression != self.compression:
            text += f" with {describe_compression(compression)}"
        compress = None
        if compression != _UNCOMPRESSED and self.comm.num_nodes > 1:
            compress = functools.partial(_transports.Compression, *compression)
        # Likewise: what is on the GPU has buckets of its own, and goes its own way.
        text += self._places(arrays, structure)
        mixed = self.devices.decision.mixed
        plan = _Plan(
            Call(f"{call} {op.name} {text}"),
            leaves,
            _fusion.plan_buckets(leaves, room, compress, streams=streams),
            room,
            is_fused=isinstance(host, SharedTransport)
            and structure.is_leaf
            and (mixed or not leaves[0].on_device)
            and _lean.is_fused(leaves[0], host),
            hosting=self._host(leaves, options),
        )
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def _places(self, arrays: list[Any], structure: _nest.Structure) -> str:
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
            call: the name of the verb in messages.

        Returns:
            The nest of results, on all ranks, in rank order.
        """
        if type(tree) is np.ndarray and options is None and type(axis) is int:
            # What has been gathered before is so again, without another look.
            short = self._short_gathers.get((call, axis, tree.dtype, tree.shape))
            if short is not None:
                return short((tree,))[0]
        return self._all_gather(tree, axis, options, call)

    @timed
    def _all_gather(
        self, tree: Any, axis: int, options: CommunicationOptions | None, call: str
    ) -> Any:
        """All-gather anything, after a look at it."""
        try:
            merged = self.merge_options(options)
            leaves, structure = _nest.flatten(tree)
            if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
                raise NotImplementedError(
                    f"{call} does not support IndexedSlices; gather its `values` and "
                    "`indices`"
                )
            arrays = [_arrays.as_array(leaf, call)[0] for leaf in leaves]
            axes = [_check_axis(x, axis, call) for x in arrays]
            gather = self._gather_of(call, axis, structure, arrays, axes, merged)
            if type(tree) is np.ndarray and arrays[0] is tree and options is None:
                if len(self._short_gathers) >= _MOST_PLANS:
                    self._short_gathers.clear()
                key = (call, axis, tree.dtype, tree.shape)
                self._short_gathers[key] = gather
        except Exception as error:
            self.invalid(call, error)
        return structure.unflatten(gather(arrays, merged.timeout_seconds))

    def _gather_of(
        self,
        call: str,
        axis: int,
        structure: _nest.Structure,
        arrays: list[Any],
        axes: list[int],
        options: CommunicationOptions,
    ) -> _gathering.SharedGather | _gathering.MpiGather:
        """Return the way of an all-gather of such arrays."""
        transports = self._choose(options)
        implementation = options.implementation
        on_device = [_arrays.is_device_array(x) for x in arrays]
        shapes = [tuple(x.shape) for x in arrays]
        leaves = [
            _gathering.GatherLeaf(x.dtype, shape[:k], shape[k + 1 :])
            for x, shape, k in zip(arrays, shapes, axes, strict=True)
        ]
        key = (call, axis, structure, implementation, *on_device, *leaves)
        gather = self._gathers.get(key)
        if gather is not None:
            return gather  # type: ignore[no-any-return]
        described = [
            f"{x.dtype.name} {_shape_without(shape, k)}"
            for x, shape, k in zip(arrays, shapes, axes, strict=True)
        ]
        text = structure.render(described) + self._places(arrays, structure)
        if implementation is not self.options.implementation:
            text += f" with implementation={implementation.name}"
        gather = _gathering.make(
            self.guard,
            Call(f"{call} axis={axis} {text}"),
            leaves,
            transports,
            self._pool,
            anywhere=any(on_device) or self.devices.decision.mixed,
        )
        if len(self._gathers) >= _MOST_PLANS:
            self._gathers.clear()
            self._short_gathers.clear()
        self._gathers[key] = gather
        return gather

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
            call: the name of the verb in messages.
        """
        try:
            merged = self.merge_options(options)
            transports = self._choose(merged)
            leaves, structure = _nest.flatten(tree)
            pairs = [_arrays.as_array(leaf, call) for leaf in leaves]
            results = [_arrays.contiguous(x).copy() for x, _ in pairs]
        except Exception as error:
            self.invalid(call, error)
        text = structure.render([_arrays.describe(x) for x in results])
        text += self._places(results, structure)
        self.guard.agree(Call(f"{call} {text}"), merged.timeout_seconds)
        for x in results:
            transports.of(x).broadcast(_arrays.as_bytes(x), root)
        return structure.unflatten(
            [
                _arrays.restore(x, kind)
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
            data = self.receive_bytes()
            heads = pickle.loads(data)
            values = [self._receive_array(head) for head in heads]
        else:
            self.send_bytes(data)
            values = [
                self._send_array(value, head)
                for value, head in zip(values, heads, strict=True)
            ]
        return values

    def _send_array(self, value: Any, head: _ArrayHead) -> Any:
        if head.dtype is None:
            return value
        x = _arrays.contiguous(_arrays.as_array(value, "broadcast")[0])
        self.transports.of(x).broadcast(_arrays.as_bytes(x), 0)
        return value

    def _receive_array(self, head: _ArrayHead) -> Any:
        if head.dtype is None:
            return head.payload
        module = self.device.array_module if head.on_device else np
        x = module.empty(head.shape, head.dtype)
        self.transports.of(x).broadcast(_arrays.as_bytes(x), 0)
        return _arrays.restore(x, head.kind)

    def send_arrays(self, values: list[Any], call: str) -> None:
        """Send arrays and objects from rank 0, to ranks that wait for them.

        Without agreement: for the coordinator, whose followers only wait.
        """
        heads = [_head_of(value, call) for value in values]
        self.send_bytes(pickle.dumps(heads))
        for value, head in zip(values, heads, strict=True):
            self._send_array(value, head)

    def receive_arrays(self) -> list[Any]:
        """Return what rank 0 sends with `send_arrays`."""
        heads = pickle.loads(self.receive_bytes())
        return [self._receive_array(head) for head in heads]

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
                _arrays.to_host(_arrays.contiguous(_arrays.as_array(value, call)[0]))
                for value, head in zip(values, heads, strict=True)
                if head.dtype is not None
            ]
        except Exception as error:
            self.invalid(call, error)
        self.guard.agree(Call(f"{call} of {len(values)} values"))
        all_heads: list[list[_ArrayHead]] = [
            pickle.loads(item) for item in self.comm.all_gather_objects(data)
        ]
        counts = [sum(head.nbytes for head in heads) for heads in all_heads]
        send = _join_bytes(arrays)
        if self.comm.rank != 0:
            self.comm.gather(send, None, counts, 0)
            return []
        receive = np.empty(sum(counts), np.uint8)
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
            call: the name of the verb in messages.
        """
        heads: list[list[_ArrayHead]] = []
        joined = np.empty(0, np.uint8)
        if values is not None:
            try:
                heads = [[_head_of(v, call) for v in row] for row in values]
                data = pickle.dumps(heads)
                joined = _join_bytes(
                    [
                        _arrays.to_host(_arrays.as_array(value, call)[0])
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
        receive = np.empty(counts[self.comm.rank], np.uint8)
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
            array = _arrays.from_bytes(part, head.dtype, head.shape)
            if head.on_device:
                array = _arrays.place(array, self.device)
            values.append(_arrays.restore(array, head.kind))
        return values

    # --- bytes from rank 0 ------------------------------------------------------

    def check_plain(self, call: str, values: list[Any]) -> None:
        """See that values which each rank has of its own are the same. Collective."""
        if not self.guard.checks:
            return
        texts = [
            _arrays.summarize(_arrays.as_array(value, call)[0])
            for value in values
            if _arrays.is_array(value) or _arrays.is_number(value)
        ]
        if texts:
            self.guard.agree(
                Call(
                    f"{call} of {', '.join(texts)}, which is not per replica (what "
                    "differs between ranks comes from `strategy.run`, or "
                    "`experimental_distribute_values_from_function`)"
                )
            )

    def send_bytes(self, data: bytes) -> None:
        """Send bytes from rank 0 to all ranks, which wait for them."""
        comm = self.comm
        short = len(data) < comm.message_bytes
        head = b"\1" + data if short else b"\0" + len(data).to_bytes(8, "little")
        board = comm.board
        if board is not None and board.post(head):
            comm.traffic.count("Ibcast", comm.message_bytes)
        else:
            self.guard.wait(comm.start_message(head), "a message", 0.0)
        self.guard.sequence += 1
        if not short:
            comm.broadcast(np.frombuffer(data, np.uint8).copy(), 0)

    def receive_bytes(
        self, what: str = "a message from rank 0", timeout: float | None = 0.0
    ) -> bytes:
        """Return the bytes that rank 0 sends.

        Inside a verb there is no deadline: its header has shown that all are there.
        """
        comm = self.comm
        with comm.traffic:
            board = comm.board
            head = None if board is None else board.take()
            if head is not None:
                comm.traffic.count("Ibcast", comm.message_bytes)
            else:
                request = comm.start_message(None)
                self.guard.wait(request, what, timeout)
                head = request.result
            self.guard.sequence += 1
            if head[:1] == b"\1":
                return head[1:]
            rest = np.empty(int.from_bytes(head[1:], "little"), np.uint8)
            comm.broadcast(rest, 0)
            return rest.tobytes()


def _head_of(value: Any, call: str) -> _ArrayHead:
    if _arrays.is_array(value):
        x, kind = _arrays.as_array(value, call)
        return _ArrayHead(x.dtype, tuple(x.shape), kind, _arrays.is_device_array(x))
    return _ArrayHead(None, (), "array", False, payload=value)


def _join_bytes(arrays: Sequence[Any]) -> Any:
    parts = [_arrays.as_bytes(_arrays.contiguous(x)) for x in arrays]
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
            f"{call}: expected -{x.ndim} <= axis < {x.ndim} for {_arrays.describe(x)}, "
            f"got axis={axis}"
        )
    return int(axis) % int(x.ndim)


def _shape_without(shape: tuple[int, ...], axis: int) -> str:
    sizes = ["*" if k == axis else str(n) for k, n in enumerate(shape)]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
