"""All-gathers: the arguments, the plan for them, and its call."""

from __future__ import annotations

from typing import Final

import numpy as np

from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call
from mpidist._base import backend, nest
from mpidist._base.cache import Cache
from mpidist._base.environment import Environment
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.options import CommunicationOptions
from mpidist._base.types import Array, Nest, Shape
from mpidist._engine.core_calls import CoreCalls
from mpidist._engine.gather_plans import (
    CoreGather,
    GatherLeaf,
    GatherSignature,
    MpiGather,
    make,
)
from mpidist._engine.memory import SharedMemory
from mpidist._engine.observed import nest_of_all
from mpidist._engine.resources import Resources, timed
from mpidist._mpi.communicator import AnyCommunicator
from mpidist._timeline.observer import observed

_MOST_PLANS: Final = 1024


class AllGathers(Resources):
    """Concatenates arrays of all ranks; the arguments of `Resources`.

    Attributes:
        gather_plans: by call, axis, structure, implementation, and leaves.
        small_gathers: calls with small arrays; ``entry`` is `all_gather` for callers.
    """

    def __init__(
        self,
        comm: AnyCommunicator,
        guard: Guard,
        options: CommunicationOptions,
        environment: Environment,
        device: backend.Device,
        memory: SharedMemory,
    ) -> None:
        super().__init__(comm, guard, options, environment, device, memory)
        self.gather_plans: Cache[tuple[object, ...], CoreGather | MpiGather] = Cache(
            _MOST_PLANS
        )
        # For single arrays without options: by call, axis, dtype and shape.
        self._array_plans: Cache[tuple[object, ...], CoreGather | MpiGather] = Cache(
            _MOST_PLANS
        )
        self.small_gathers: CoreCalls = CoreCalls(guard, self.all_gather, 0)

    def _forget_gathers(self) -> None:
        self.gather_plans.clear()
        self._array_plans.clear()
        self.small_gathers.forget()

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
            plan = self._array_plans.get((call, axis, tree.dtype, tree.shape))
            if plan is not None:
                if tree.nbytes <= plan.quick_bytes and call == "all_gather":
                    self.small_gathers.keep(axis, tree, plan, axis % tree.ndim)
                return plan((tree,))[0]
        return self._all_gather(tree, axis, options, call)

    @timed
    def _all_gather(
        self, tree: Nest, axis: int, options: CommunicationOptions | None, call: str
    ) -> Nest:
        """All-gather any nest, after checks of its leaves."""
        try:
            merged = self.merge_options(options)
            leaves, structure = nest.flatten(tree)
            if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
                raise NotImplementedError(
                    f"{call} does not support IndexedSlices; gather its `values` and "
                    "`indices`"
                )
            pairs = [backend.as_array(leaf, call) for leaf in leaves]
            arrays = [x for x, _ in pairs]
            axes = [_check_axis(x, axis, call) for x in arrays]
            plan = self._gather_plan(call, axis, structure, arrays, axes, merged)
            if type(tree) is np.ndarray and arrays[0] is tree and options is None:
                key = (call, axis, tree.dtype, tree.shape)
                self._array_plans[key] = plan
        except Exception as error:
            self.invalid(call, error)
        results = plan(arrays, merged.timeout_seconds)
        return structure.unflatten(
            [
                backend.as_given(x, kind)
                for x, (_, kind) in zip(results, pairs, strict=True)
            ]
        )

    def _gather_plan(
        self,
        call: str,
        axis: int,
        structure: nest.Structure,
        arrays: list[Array],
        axes: list[int],
        options: CommunicationOptions,
    ) -> CoreGather | MpiGather:
        """Return the plan of an all-gather of such arrays."""
        transports = self.transports_of(options)
        implementation = options.implementation
        on_device = [backend.is_device_array(x) for x in arrays]
        shapes = [tuple(x.shape) for x in arrays]
        leaves = [
            GatherLeaf(x.dtype, shape[:k], shape[k + 1 :])
            for x, shape, k in zip(arrays, shapes, axes, strict=True)
        ]
        key = (call, axis, structure, implementation, *on_device, *leaves)
        found = self.gather_plans.get(key)
        if found is not None:
            return found
        described = [
            f"{x.dtype.name} {_shape_without(shape, k)}"
            for x, shape, k in zip(arrays, shapes, axes, strict=True)
        ]
        text = structure.render(described) + self.text_of_devices(arrays, structure)
        if implementation is not self.options.implementation:
            text += f" with implementation={implementation.name}"
        on_host = not any(on_device) and not self.devices.decision.mixed
        signature = GatherSignature(
            Call(f"{call} axis={axis} {text}"), leaves, transports, on_host
        )
        made = make(self.guard, signature, self.node, self.pool)
        self.gather_plans[key] = made
        return made


def _check_axis(x: Array, axis: object, call: str) -> int:
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


def _shape_without(shape: Shape, axis: int) -> str:
    sizes = ["*" if k == axis else str(n) for k, n in enumerate(shape)]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
