"""What a plan of a collective is, and the steps that all plans have.

A plan holds what is known of a call before its values: it is made once for a
signature, kept in `PlanCache`, and called with leaves. It prepares what can fail on one
rank alone, agrees with the other ranks, and moves. Until they have agreed a failure is
told to all ranks (`Guard.fail`), and the strategy can be used on; an exception after
that breaks the call off (`Guard.payload`).

All ranks that agree have the same plan: what decides which one it is is in the text of
the call, or the same on all ranks of a strategy. What may differ between ranks, such as
whether an array is contiguous, or where the memory of a result is, is known to the plan
alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NoReturn, TypeAlias, TypeVar

import numpy as np

from mpidist import _native
from mpidist._agreement.mismatch import Call
from mpidist._base import backend, guests
from mpidist._base.cache import Cache
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array, DType, HostArray, Nest, Shape, record
from mpidist._collectives.compression import LEAST_BYTES, Compression
from mpidist._collectives.dtype_table import Reduction
from mpidist._collectives.resources import Resources
from mpidist._collectives.transports import Transports

_MOST: Final = 1024

_Work = TypeVar("_Work")

Results: TypeAlias = list[Any]
"""New arrays, one for each leaf; None for each on a rank that wants none."""
Key: TypeAlias = tuple[object, ...]


@record
class Leaf:
    """What the plan of a reduction knows of a leaf: everything except its values."""

    shape: Shape
    reduction: Reduction
    on_device: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def compressible(self) -> bool:
        """Whether it may be sent as 16-bit floats: large sums of float32 and the like.

        Means of integers may not, which travel as float64.
        """
        dtype, wire = self.reduction.dtype, self.reduction.wire
        floats = backend.number_kind(dtype) == "f" and wire.itemsize in (4, 8)
        large = self.size * wire.itemsize > LEAST_BYTES and not self.on_device
        return floats and large and self.reduction.combining == "SUM"


class CoreNest:
    """The leaves of a reduction as the core takes them.

    Dtypes are the leaves' own, also of 16-bit floats, which the kernels add in float32
    and round once. Only means of integers are converted to floats before.

    Args:
        leaves: of the signature.
        ranks: the number of ranks.
        wide: whether 16-bit floats are summed as float32 on their way, and small
            integers as 32-bit ones: between nodes sums are rounded, or wrap, more than
            once.

    Attributes:
        core_leaves: each leaf as the core is told of it.
        shapes: shape and dtype of each leaf.
        sizes: bytes of each leaf.
        casts: whether some leaf is converted to another dtype first.
    """

    def __init__(self, leaves: list[Leaf], ranks: int, *, wide: bool) -> None:
        self.shapes: list[tuple[Shape, DType]] = [
            (leaf.shape, _travels_as(leaf, wide)) for leaf in leaves
        ]
        self.core_leaves = [
            _native.ReduceLeaf(
                _name_of(dtype),
                leaf.reduction.combining,
                shape,
                ranks if leaf.reduction.op is ReduceOp.MEAN else 0,
            )
            for leaf, (shape, dtype) in zip(leaves, self.shapes, strict=True)
        ]
        self.sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes]
        cast = [
            size
            for size, leaf, (_, dtype) in zip(
                self.sizes, leaves, self.shapes, strict=True
            )
            if leaf.reduction.dtype is not dtype
        ]
        self.casts: bool = bool(cast)
        self._casts_most = 2 * sum(cast) >= self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(self.sizes)

    @property
    def has_kernels(self) -> bool:
        """Whether the core can reduce all leaves."""
        has_kernel = _native.core.has_kernel
        return all(has_kernel(x.dtype, x.operation) for x in self.core_leaves)

    def sources(
        self, arrays: Sequence[Array], results: Results | None
    ) -> Sequence[Array]:
        """Return arrays converted to the dtypes that the core takes.

        Args:
            arrays: this rank's.
            results: in the arena, where all ranks can read; None: not there. Arrays are
                converted there, unless that would copy more bytes than it converts.
        """
        if results is not None and self._casts_most:
            for result, x in zip(results, arrays, strict=True):
                result[...] = x
            return results
        both = zip(arrays, self.shapes, strict=True)
        return [x if x.dtype == dtype else x.astype(dtype) for x, (_, dtype) in both]


def _travels_as(leaf: Leaf, wide: bool) -> DType:
    reduction = leaf.reduction
    if wide and reduction.compute.itemsize > reduction.dtype.itemsize:
        return reduction.compute
    if reduction.op is ReduceOp.MEAN and reduction.dtype.kind in "iu":
        return reduction.result
    return reduction.dtype


def _name_of(dtype: DType) -> str:
    if guests.is_bfloat16(dtype):
        return "bf2"
    return f"{dtype.kind}{dtype.itemsize}"


@record
class Signature:
    """What is known of a reduction before its values.

    Attributes:
        call: what the header says.
        leaves: of the nest.
        root: the one rank that wants the results; None: all do.
        transports: of the options.
        bytes_per_pack: the maximum size of a bucket of several leaves.
        ranks: the number of ranks.
        wide: whether sums are rounded more than once: see `CoreNest`.
        compress: makes the compression of a bucket, if sums are compressed.
    """

    call: Call
    leaves: list[Leaf]
    root: int | None
    transports: Transports
    bytes_per_pack: int
    ranks: int
    wide: bool
    compress: Callable[[], Compression] | None = None

    @functools.cached_property
    def nest(self) -> CoreNest:
        """The leaves as the core takes them."""
        return CoreNest(self.leaves, self.ranks, wide=self.wide)

    @property
    def on_device(self) -> bool:
        """Whether some leaf is on a GPU."""
        return any(leaf.on_device for leaf in self.leaves)


class Plan:
    """A collective of nests of one signature.

    Attributes:
        call: what its header says.
        route: its name, as in traces.
        quick: runs calls with one small array in the core, without Python
            (``py_calls.c``); None: there is no such way.
        quick_bytes: the maximum size of such an array.
    """

    route: str = ""
    quick: _native.Reduce | _native.Gather | None = None
    quick_bytes: int = 0

    def __init__(self, resources: Resources, call: Call) -> None:
        self.call = call
        self._guard = resources.guard
        self._comm = resources.comm

    def __call__(
        self,
        arrays: Sequence[Array],
        call: Call | None = None,
        timeout: float | None = None,
    ) -> Results:
        """Agree with the other ranks, and move. Collective.

        Args:
            arrays: the leaves, with any memory layout. They are not changed.
            call: the contents of the header, if they differ from `call`.
            timeout: seconds to wait for the others; None: the strategy's.

        Returns:
            The results: new arrays, with the same bits on all ranks. If only the root
            of a reduction wants them, None for each on the other ranks.
        """
        return self._run(arrays, call or self.call, timeout)

    def _run(
        self, arrays: Sequence[Array], call: Call, timeout: float | None
    ) -> Results:
        raise NotImplementedError

    def attempt(self, arrays: list[Array], timeout: float | None) -> Results | None:
        """Run the plan if arrays have its signature; else return None, without effect.

        Args:
            arrays: NumPy arrays.
            timeout: seconds to wait for the others; None: the strategy's.
        """
        return None

    def concluded(self, status: int, x: HostArray, result: HostArray | None) -> Any:
        """End a call of `quick` whose header did not have the status OK.

        The core calls it. ``result`` is None if the core has allocated none.
        """
        raise NotImplementedError

    def interrupted(self, error: BaseException) -> NoReturn:
        """Break off a call of `quick` that raised. The core calls it."""
        raise self._guard.abandon(self.call, error) from None


class PreparedPlan(Plan, Generic[_Work]):
    """A plan whose header is a step of its own."""

    def _run(
        self, arrays: Sequence[Array], call: Call, timeout: float | None
    ) -> Results:
        guard = self._guard
        try:  # not `checking`, which takes three calls of Python
            # Allocate before the agreement: a failure must be reported to all ranks.
            work = self._prepare(list(arrays))
        except Exception as error:
            raise guard.fail(call, error) from None
        with self._comm.traffic:
            guard.agree(call, timeout)
            # An exception of NumPy (`np.seterr`) would leave the others waiting.
            plain = np.errstate(all="ignore")
            with guard.payload(call), plain, _native.DefaultFloatState():
                return self._move(work)

    def _prepare(self, arrays: list[Array]) -> _Work:
        """Return all that a call needs, its memory included. Not collective."""
        raise NotImplementedError

    def _move(self, work: _Work) -> Results:
        """Return the results, now that all ranks have agreed. Collective."""
        raise NotImplementedError


class PlansOfCall(Cache[Key, Plan]):
    """The plans of calls that differ only in their leaves, by a key of the leaves.

    Attributes:
        last: the one that was used last, if there is one.
    """

    __slots__ = ("last",)

    last: Plan


class PlanCache(Cache[Key, PlansOfCall]):
    """The plans of a strategy: by all but the leaves of a call, then by its leaves.

    Making the key of many leaves takes time. A plan can check by itself whether arrays
    have its signature (`Plan.attempt`), so the one that was used last is tried first.
    """

    def __init__(self) -> None:
        super().__init__(_MOST)

    def find(self, call_key: Key, leaves_key: Key) -> Plan | None:
        """Return the plan for a call and its leaves; None if there is none yet."""
        of_call = self.get(call_key)
        found = None if of_call is None else of_call.get(leaves_key)
        if of_call is not None and found is not None:
            of_call.last = found
        return found

    def keep(self, call_key: Key, leaves_key: Key, plan: Plan) -> None:
        """Keep a plan."""
        known = self.get(call_key)
        of_call = PlansOfCall(_MOST) if known is None else known
        of_call[leaves_key] = of_call.last = plan
        if known is None:  # complete: the communication thread uses plans, too
            self[call_key] = of_call

    def plans(self) -> list[Plan]:
        """Return all plans."""
        return [plan for of_call in self.values() for plan in of_call.values()]


class QuickCalls:
    """A collective whose plans for one small array the core runs, without Python.

    Attributes:
        entry: what callers call in place of the collective. The core looks up a plan
            for the array, and calls the collective if there is none.

    Args:
        resources: of the strategy.
        call: the collective, a function of an array and one other argument.
        array: which of its arguments is the array, 0 or 1.
    """

    def __init__(
        self, resources: Resources, call: Callable[..., Nest], array: int
    ) -> None:
        self.entry: Callable[..., Nest] = call
        self._calls: _native.ArrayCall = None
        if _native.core is not None and resources.guard.observers is None:
            make = _native.core.ArrayCall
            self._calls = self.entry = make(resources.guard, call, array)

    def keep(self, key: object, x: HostArray, plan: Plan, axis: int = 0) -> None:
        """Have the core run a plan, if it can.

        Args:
            key: the argument that is not the array.
            x: an array of the plan.
            plan: a plan of an all-reduce, or an all-gather.
            axis: of a gather, not negative.
        """
        quick = plan.quick if x.nbytes <= plan.quick_bytes else None
        if self._calls is not None and quick is not None:
            self._calls.keep(key, x, quick, plan.call, plan, axis)

    def forget(self) -> None:
        """Drop all plans."""
        if self._calls is not None:
            self._calls.forget()
