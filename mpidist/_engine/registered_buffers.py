"""Registered buffers: arrays that are already in the memory that ranks share.

`Strategy.buffers_like` makes them: an all-reduce reads them in place, without a copy.
"""

from __future__ import annotations

import numpy as np

from mpidist import _native
from mpidist._agreement.mismatch import Call
from mpidist._base import backend, nest
from mpidist._base.memory import LINE, round_up
from mpidist._base.types import Array, HostArray, Nest
from mpidist._engine.observed import memory_for
from mpidist._engine.resources import Resources, timed
from mpidist._timeline.observer import observed


class RegisteredBuffers(Resources):
    """Makes registered buffers; the arguments of `Resources`."""

    @observed(memory_for)
    @timed
    def buffers_like(self, tree: Nest) -> Nest:
        """Return zeros of the same structure, shapes and dtypes. Collective.

        Host arrays are in this rank's arena, which the other ranks can read, if there
        is room.

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

    def _zeros(self, like: list[Array]) -> list[Array]:
        """Return zeros; host arrays in one slot, each at the begin of a cache line."""
        starts, end = [], 0
        for x in like:
            starts.append(end)
            if not backend.is_device_array(x):
                end += round_up(x.nbytes, LINE)
        slot = None
        if self.node is not None and end:
            slot = self.node.pool.take(end)
        if slot is None:
            return [backend.module_of(x).zeros(x.shape, x.dtype) for x in like]
        np.frombuffer(slot, np.uint8)[:] = 0
        return [
            _zeros_in(slot, start, x) for x, start in zip(like, starts, strict=True)
        ]


def _zeros_in(slot: _native.Slot, start: int, like: Array) -> Array:
    """Return a GPU array of zeros, or an array in a slot that holds zeros."""
    if backend.is_device_array(like):
        zeros: Array = backend.module_of(like).zeros(like.shape, like.dtype)
        return zeros
    array: HostArray = np.ndarray(like.shape, like.dtype, slot, start)
    return array
