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
from mpidist._collectives.plan import Key, Leaf, Plan, PlanCache, QuickCalls, Signature
from mpidist._collectives.resources import UNCOMPRESSED, Resources
from mpidist._collectives.staged_route import staged

_USUAL: Final = ("all_reduce", None, None)  # call, options and root
# What the keys of plans have of the form of one array or number; see `_form_of`.
_FORMS: Final[dict[type, type | None]] = {
    np.ndarray: None,
    **{kind: kind for kind in (float, int, np.float32, np.float64)},
}
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
        self, resources: Resources, cache: PlanCache, all_gather: Callable[..., Nest]
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
        kind, timeout = type(tree), None
        try:
            if options is not None:
                timeout = self._resources.merge_options(options).timeout_seconds
            if kind not in _FORMS:
                leaves, structure = nest.flatten(tree)
        except Exception:  # `_first_time` raises it again, on all ranks
            return self._first_time(op, tree, options, call, root)
        plan: Plan | None
        call_key: Key
        if kind in _FORMS:
            x, form = np.asarray(tree), _FORMS[kind]
            of_call = self.cache.get((call, op._name_, options, root, form))
            plan = None if of_call is None else of_call.get((x.dtype, x.shape))
            if plan is None:
                return self._first_time(op, tree, options, call, root)
            if form is not None:
                return _as_number(plan([x], None, timeout)[0], form)
            if (call, options, root) == _USUAL:
                self.quick.keep(op, tree, plan)
            return plan([x], None, timeout)[0]
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
                pairs = backend.as_arrays(leaves, structure, call)
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
        results = dict(enumerate(leaves))
        sparse = {i: x for i, x in results.items() if isinstance(x, IndexedSlices)}
        dense = {i: x for i, x in results.items() if i not in sparse}
        to_root = "" if root is None else f" to rank {root}"
        call = f"{call}{to_root} {op.name} of IndexedSlices"
        shapes = [x.dense_shape for x in sparse.values()]
        if shapes != [None] * len(shapes):
            call += f" with dense_shape {shapes}"
        with self._resources.guard.checking(call):
            if op not in (ReduceOp.SUM, ReduceOp.MEAN):
                raise TypeError(
                    f"{call} is not defined, only SUM and MEAN; reduce a dense array"
                )
            ranks = self._resources.comm.size
            parts = [_part_of(x, op, ranks, call) for x in sparse.values()]
        gathered = self._all_gather(parts, 0, options, call)
        if dense:
            reduced = self.quick.entry(op, [*dense.values()], options, call, None)
            results.update(zip(dense, reduced, strict=True))
        for (i, x), part in zip(sparse.items(), gathered, strict=True):
            results[i] = IndexedSlices(part[0], part[1], x.dense_shape)
        if root not in (None, self._resources.comm.rank):
            results = dict.fromkeys(results)
        return structure.unflatten(results.values())

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
    if kind in _FORMS and arrays[0].dtype.kind != "u":  # large ints are uint64
        return _FORMS[kind]
    return None if structure.is_leaf else structure


def _as_number(x: HostArray | None, kind: type) -> Any:
    if x is None:
        return None
    return x.item() if kind in (int, float) else x[()]


def _part_of(x: IndexedSlices, op: ReduceOp, ranks: int, call: str) -> list[Nest]:
    """Return what a rank sends of slices: the values, for a mean divided; indices."""
    values, kind = backend.as_array(x.values, call)
    if op is ReduceOp.MEAN:
        how = dtype_table.reduction(values.dtype, op, call)  # not of bool
        values = (values / how.wire.type(ranks)).astype(how.result)
    return [backend.as_given(values, kind), x.indices]


def _leaf_of(op: ReduceOp, x: Array, call: str) -> Leaf:
    """Return what a plan knows of an array.

    Raises:
        TypeError: if the operation is not defined for its dtype.
    """
    reduction = dtype_table.reduction(x.dtype, op, call)
    return Leaf(tuple(x.shape), reduction, backend.is_device_array(x))
