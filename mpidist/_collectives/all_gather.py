"""All-gathers: the arguments, the choice of a plan, and its call.

A plan holds everything that does not depend on values: it is made once for a call, a
structure, dtypes, and shapes without the axis. The lengths along the axis may differ
between ranks and between calls, so the ranks exchange them. `make_plan` chooses a plan
of `core_gather` for host arrays, or the one of `mpi_gather`.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from mpidist import _native
from mpidist._agreement.channel import between_of
from mpidist._agreement.mismatch import Call
from mpidist._base import backend, nest
from mpidist._base.expect import as_int
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.memory import LINE
from mpidist._base.options import CommunicationOptions
from mpidist._base.types import Array, Nest, Shape
from mpidist._collectives.core_gather import ArenaGather, HeaderGather
from mpidist._collectives.mpi_gather import GatherLeaf, GatherSignature, MpiGather
from mpidist._collectives.observed import nest_of_all
from mpidist._collectives.plan import Key, Plan, PlanCache, QuickCalls
from mpidist._collectives.pool import SMALLEST
from mpidist._collectives.resources import Resources, timed
from mpidist._timeline.observer import observed

_QUICK_BYTES: Final = 32 * 1024  # which travel with the header on one node


class AllGathers:
    """Concatenates arrays of all ranks.

    Attributes:
        quick: `all_gather`, of which the core runs plans of small arrays.

    Args:
        resources: of the strategy.
        cache: of its plans.
    """

    def __init__(self, resources: Resources, cache: PlanCache) -> None:
        self.resources = resources
        self._cache = cache
        self.quick: QuickCalls = QuickCalls(resources, self.all_gather, 0)

    @observed(nest_of_all)
    def all_gather(
        self,
        tree: Nest,
        axis: int,
        options: CommunicationOptions | None = None,
        call: str = "all_gather",
    ) -> Nest:
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
            shape, k = tree.shape, axis if axis >= 0 else axis + tree.ndim
            leaf = (tree.dtype, shape[:k], shape[k + 1 :], False)
            of_call = self._cache.get((call, axis, None, None))
            plan = None if of_call is None else of_call.get((leaf,))
            if plan is not None and 0 <= k < tree.ndim:
                if call == "all_gather":
                    self.quick.keep(axis, tree, plan, k)
                return plan((tree,))[0]
        return self._all_gather(tree, axis, options, call)

    @timed
    def _all_gather(
        self, tree: Nest, axis: int, options: CommunicationOptions | None, call: str
    ) -> Nest:
        """All-gather any nest, after checks of its leaves."""
        with self.resources.guard.checking(call):
            merged = self.resources.merge_options(options)
            leaves, structure = nest.flatten(tree)
            if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
                raise NotImplementedError(
                    f"{call} does not support IndexedSlices; gather its `values` and "
                    "`indices`"
                )
            pairs = backend.as_arrays(leaves, structure, call)
            arrays = [x for x, _ in pairs]
            axis = as_int(call, "axis", axis)
            axes = [_check_axis(x, axis, call) for x in arrays]
            alone = len(leaves) == 1 and leaves[0] is tree
            call_key = (call, axis, None if alone else structure, options)
            plan = self._find(call_key, structure, arrays, axes, merged)
        results = plan(arrays, None, merged.timeout_seconds)
        return structure.unflatten(backend.restore_all(results, pairs))

    def _find(
        self,
        call_key: Key,
        structure: nest.Structure,
        arrays: list[Array],
        axes: list[int],
        options: CommunicationOptions,
    ) -> Plan:
        """Return the plan of an all-gather of such arrays."""
        resources = self.resources
        on_device = [backend.is_device_array(x) for x in arrays]
        shapes = [tuple(x.shape) for x in arrays]
        around = [(s[:k], s[k + 1 :]) for s, k in zip(shapes, axes, strict=True)]
        rows = zip(arrays, around, on_device, strict=True)
        leaves_key = tuple([(x.dtype, *sizes, where) for x, sizes, where in rows])
        found = self._cache.find(call_key, leaves_key)
        if found is not None:
            return found
        call, axis, *_ = call_key
        described = [
            f"{x.dtype.name} {_shape_without(shape, k)}"
            for x, shape, k in zip(arrays, shapes, axes, strict=True)
        ]
        text = structure.render(described)
        text += resources.text_of_devices(arrays, structure)
        if options.implementation is not resources.options.implementation:
            text += f" with implementation={options.implementation.name}"
        signature = GatherSignature(
            Call(f"{call} axis={axis} {text}"),
            [GatherLeaf(x.dtype, *s) for x, s in zip(arrays, around, strict=True)],
            resources.transports_of(options),
            not any(on_device) and not resources.transport_choice.decision.mixed,
        )
        made = make_plan(resources, signature)
        self._cache.keep(call_key, leaves_key, made)
        return made


def make_plan(resources: Resources, signature: GatherSignature) -> Plan:
    """Return the plan of a signature; of the same class on all ranks."""
    lengths_bytes = 8 * len(signature.leaves)
    node = resources.node if signature.transports.host.name == "shared" else None
    between = between_of(resources.guard.channel)
    if not signature.on_host:
        pass
    elif node is not None and _native.core.EAGER_BYTES - lengths_bytes > LINE:
        core = _new_core(resources, signature, node.channel)
        large = ArenaGather(resources, signature, core, node)
        return HeaderGather(resources, signature, core, large, _QUICK_BYTES)
    elif between is not None and lengths_bytes <= between.share:
        core = _new_core(resources, signature, between)
        by_mpi, quick_bytes = MpiGather(resources, signature), between.share - 8
        if by_mpi.is_one_block:
            quick_bytes = max(quick_bytes, SMALLEST)
        return HeaderGather(resources, signature, core, by_mpi, quick_bytes)
    return MpiGather(resources, signature)


def _new_core(
    resources: Resources,
    signature: GatherSignature,
    channel: _native.Channel | _native.Between,
) -> _native.Gather:
    """Return the nest in the core; the channel exchanges its headers."""
    rows = [
        (math.prod(leaf.before), math.prod(leaf.after) * leaf.dtype.itemsize)
        for leaf in signature.leaves
    ]
    fingerprint, timeout_ms = signature.call.fingerprint, resources.guard.timeout_ms
    return _native.core.Gather(channel, rows, fingerprint, timeout_ms)


def _check_axis(x: Array, axis: int, call: str) -> int:
    if x.ndim == 0:
        raise ValueError(
            f"{call}: expected arrays of at least one dimension, got {x.dtype.name} "
            "(); write `numpy.reshape(x, (1,))` to gather one number per replica. Each "
            "number of a list is a value of its own: write `numpy.asarray(x)` for an "
            "array of them"
        )
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{call}: expected -{x.ndim} <= axis < {x.ndim} for {backend.describe(x)}, "
            f"got axis={axis}"
        )
    return axis % int(x.ndim)


def _shape_without(shape: Shape, axis: int) -> str:
    sizes = ["*" if k == axis else str(n) for k, n in enumerate(shape)]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
