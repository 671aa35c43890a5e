"""All-reduces: the arguments, the plan for them, and its call.

All reductions use `Plans.all_reduce`: of Python numbers, arrays, nests, the gradients
of an optimizer. The *signature* of a call is its name, operation, structure and
options, and for each leaf the dtype, the shape and the kind of device. The first route
that accepts a signature makes the plan, and all calls with the signature use it,
including the first one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._base import backend, nest
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.options import CommunicationOptions
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array, HostArray, Nest
from mpidist._collectives import dtype_table
from mpidist._collectives.between_route import between
from mpidist._collectives.bucket_route import buckets, mpi
from mpidist._collectives.compression import Compression
from mpidist._collectives.core_routes import on_node
from mpidist._collectives.hierarchical_route import hierarchical
from mpidist._collectives.observed import ObservedPlan
from mpidist._collectives.plan import (
    Key,
    Leaf,
    Plan,
    PlanCache,
    QuickCalls,
    Signature,
)
from mpidist._collectives.resources import UNCOMPRESSED, Resources
from mpidist._collectives.staged_route import staged

_USUAL: Final = ("all_reduce", None, None)  # call, options and root
_NUMBERS: Final = frozenset((float, int, np.float32, np.float64))
_ARRAYS: Final = {np.ndarray}

ROUTES: Final[Sequence[Callable[[Resources, Signature], Plan | None]]] = (
    on_node,
    between,
    hierarchical,
    buckets,
    staged,
    mpi,
)
"""Each makes a plan for a signature; None if it does not accept it. The last does."""


class Plans:
    """All-reduces of a strategy.

    Attributes:
        quick: `all_reduce`, of which the core runs plans of small arrays.
        owned: with error feedback, those of each owner; see `of`.

    Args:
        resources: of the strategy.
        cache: of its plans.
        all_gather: of the strategy, for `IndexedSlices`.
    """

    def __init__(
        self,
        resources: Resources,
        cache: PlanCache,
        all_gather: Callable[..., Nest],
    ) -> None:
        self._resources = resources
        self.cache = cache
        self.owned: weakref.WeakKeyDictionary[object, Plans]
        self.owned = weakref.WeakKeyDictionary()
        self._all_gather = all_gather
        self.quick: QuickCalls = QuickCalls(resources, self.all_reduce, 1)

    def all_reduce(
        self,
        op: ReduceOp,
        tree: Nest,
        options: CommunicationOptions | None = None,
        call: str = "all_reduce",
        root: int | None = None,
    ) -> Nest:
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
        if options is not None and type(options) is not CommunicationOptions:
            return self._first_time(op, tree, options, call, root)  # which refuses it
        kind = type(tree)
        call_key: Key
        if kind in _NUMBERS:
            x = np.asarray(tree)
            of_call = self.cache.get((call, op._name_, options, root, kind))
            if of_call is None or (kind is int and x.dtype.kind != "i"):
                return self._first_time(op, tree, options, call, root)
            timeout = None if options is None else self._timeout_of(options)
            return _as_number(of_call.last([x], None, timeout)[0], kind)
        if kind is np.ndarray:
            call_key = (call, op._name_, options, root, None)
            of_call = self.cache.get(call_key)
            plan = None if of_call is None else of_call.get((tree.dtype, tree.shape))
            if plan is None:
                return self._first_time(op, tree, options, call, root)
            timeout = None if options is None else self._timeout_of(options)
            if (call, options, root) == _USUAL:
                self.quick.keep(op, tree, plan)
            return plan([tree], None, timeout)[0]
        try:
            leaves, structure = nest.flatten(tree)
            timeout = self._timeout_of(options)
        except Exception:  # `_first_time` raises it again, on all ranks
            return self._first_time(op, tree, options, call, root)
        if {*map(type, leaves)} == _ARRAYS:
            call_key = (call, op._name_, options, root, structure)
            of_call = self.cache.get(call_key)
            if of_call is not None:
                results = of_call.last.attempt(leaves, timeout)
                if results is not None:
                    return structure.unflatten(results)
            plan = self.cache.find(call_key, _key_of(leaves))
            if plan is not None:
                return structure.unflatten(plan(leaves, None, timeout))
        return self._first_time(op, tree, options, call, root)

    def _timeout_of(self, options: CommunicationOptions | None) -> float | None:
        if options is None:
            return None
        return self._resources.merge_options(options).timeout_seconds

    def _first_time(
        self,
        op: ReduceOp,
        tree: Nest,
        options: CommunicationOptions | None,
        call: str,
        root: int | None,
    ) -> Nest:
        """Check every leaf, keep the plan, and run it."""
        with self._resources.guard.checking(call):
            merged = self._resources.merge_options(options)
            leaves, structure = nest.flatten(tree)
            has_slices = any(isinstance(leaf, IndexedSlices) for leaf in leaves)
            if not has_slices:
                pairs = [backend.as_array(leaf, call) for leaf in leaves]
                arrays = [array for array, _ in pairs]
                form = _form_of(tree, structure, arrays)
                call_key = (call, op._name_, options, root, form)
                plan = self._find(
                    self.cache, call_key, op, structure, arrays, call, merged, root
                )
        if has_slices:  # collective: what it raises, all ranks know already
            return self._reduce_slices(op, leaves, structure, options, call, root)
        results = plan(arrays, None, merged.timeout_seconds)
        return structure.unflatten(backend.restore_all(results, pairs))

    def _reduce_slices(
        self,
        op: ReduceOp,
        leaves: list[Nest],
        structure: nest.Structure,
        options: CommunicationOptions | None,
        call: str,
        root: int | None,
    ) -> Nest:
        """All-reduce a nest with `IndexedSlices`, whose rows are concatenated."""
        to_here = root is None or root == self._resources.comm.rank
        if root is not None:
            call = f"{call} to rank {root}"
        sparse = [i for i, x in enumerate(leaves) if isinstance(x, IndexedSlices)]
        call = f"{call} {op.name} of IndexedSlices"
        shapes = [leaves[i].dense_shape for i in sparse]
        if any(shape is not None for shape in shapes):
            call += f" with dense_shape {shapes}"
        with self._resources.guard.checking(call):
            if op not in (ReduceOp.SUM, ReduceOp.MEAN):
                raise TypeError(
                    f"{call} is not defined, only SUM and MEAN; reduce a dense array"
                )
            results = list(leaves)
            dense = [x for i, x in enumerate(leaves) if i not in sparse]
            parts = []
            for i in sparse:
                values, kind = backend.as_array(leaves[i].values, call)
                if op is ReduceOp.MEAN:
                    how = dtype_table.reduction(values.dtype, op, call)  # not of bool
                    size = how.wire.type(self._resources.comm.size)
                    values = (values / size).astype(how.result)
                parts.append([backend.as_given(values, kind), leaves[i].indices])
        gathered = self._all_gather(parts, 0, options, call)
        for i, (values, indices) in zip(sparse, gathered, strict=True):
            results[i] = IndexedSlices(values, indices, leaves[i].dense_shape)
        if dense:
            reduced = iter(self.quick.entry(op, dense, options, call, None))
            results = [
                x if i in sparse else next(reduced) for i, x in enumerate(results)
            ]
        return structure.unflatten(results if to_here else [None] * len(results))

    def of(self, owner: object) -> Plans:
        """Return the all-reduces of what an owner reduces again and again.

        With error feedback their plans are the owner's, and kept as long: what is lost
        by compression is not added to sums of others.
        """
        if not self._resources.compression.error_feedback:
            return self
        found = self.owned.get(owner)
        if found is None:
            found = Plans(self._resources, PlanCache(), self._all_gather)
            self.owned[owner] = found
        return found

    def find(
        self, arrays: list[Array], call: str, owner: object, places: Iterable[int]
    ) -> Plan:
        """Return a plan of an owner for the sum of a list of arrays. Not collective.

        With error feedback it is for arrays of these places there.
        """
        structure, op = nest.flatten(arrays)[1], ReduceOp.SUM
        call_key: Key = (call, op._name_, None, None, structure)
        options, cache = self._resources.options, self.of(owner).cache
        if self._resources.compression.error_feedback:
            call_key = (call_key, *places)
        return self._find(cache, call_key, op, structure, arrays, call, options, None)

    def _find(
        self,
        cache: PlanCache,
        call_key: Key,
        op: ReduceOp,
        structure: nest.Structure,
        arrays: list[Array],
        call: str,
        options: CommunicationOptions,
        root: int | None,
    ) -> Plan:
        leaves_key = _key_of(arrays)
        plan = cache.find(call_key, leaves_key)
        if plan is None:
            signature = self._sign(op, structure, arrays, call, options, root)
            plan = self._make(signature)
            cache.keep(call_key, leaves_key, plan)
        return plan

    def _make(self, signature: Signature) -> Plan:
        resources = self._resources
        # One is found, since the last route takes everything.
        plan = next(filter(None, (route(resources, signature) for route in ROUTES)))
        return (
            plan if resources.guard.observers is None else ObservedPlan(resources, plan)
        )

    def _sign(
        self,
        op: ReduceOp,
        structure: nest.Structure,
        arrays: list[Array],
        call: str,
        options: CommunicationOptions,
        root: int | None,
    ) -> Signature:
        """Return the signature of an all-reduce.

        Everything that a route looks at is in the text, or the same on all ranks.
        """
        resources = self._resources
        usual = resources.options
        compression = resources.compression
        if options is not usual:
            compression = resources.compression_of(options)
        text = structure.render([backend.describe(x) for x in arrays])
        if options.bytes_per_pack != usual.bytes_per_pack:
            # The ranks must cut their buffers at the same places.
            text += f" with bytes_per_pack={options.bytes_per_pack}"
        if options.implementation is not usual.implementation:
            text += f" with implementation={options.implementation.name}"
        if compression != resources.compression:
            text += f" with {compression}"
        # For the same reason: GPU arrays have their own buckets and routes.
        text += resources.text_of_devices(arrays, structure)
        compress = None
        if compression != UNCOMPRESSED and resources.comm.num_nodes > 1:
            compress = functools.partial(Compression, *compression)
        to_root = "" if root is None else f" to rank {root}"
        return Signature(
            Call(f"{call}{to_root} {op.name} {text}"),
            [_leaf_of(op, x, call) for x in arrays],
            root,
            resources.transports_of(options),
            options.bytes_per_pack or resources.environment.bytes_per_pack,
            resources.comm.size,
            resources.node is None,
            compress,
        )


def _key_of(arrays: list[Array]) -> Key:
    """Return the key of leaves: what is known of them before their values."""
    found: list[object] = []
    for x in arrays:
        found += (x.dtype, x.shape)
        if not isinstance(x, np.ndarray):
            found[-1] = (*x.shape, "on a device")
    return tuple(found)


def _form_of(tree: Nest, structure: nest.Structure, arrays: list[Array]) -> object:
    """Return what the key of a plan has of a nest's form; for a number its type."""
    kind = type(tree)
    if kind in _NUMBERS and arrays[0].dtype.kind != "u":  # large ints are uint64
        return kind
    return None if structure.is_leaf else structure


def _as_number(x: HostArray | None, kind: type) -> Any:
    if x is None:
        return None
    return x.item() if kind in (int, float) else x[()]


def _leaf_of(op: ReduceOp, x: Array, call: str) -> Leaf:
    """Return what a plan knows of an array.

    Raises:
        TypeError: if the operation is not defined for its dtype.
    """
    reduction = dtype_table.reduction(x.dtype, op, call)
    return Leaf(tuple(x.shape), reduction, backend.is_device_array(x))
