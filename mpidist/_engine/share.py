"""Values of one rank on all ranks: `broadcast`, `share`, and arrays from rank 0."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._agreement.root_messages import FROM_RANK_0
from mpidist._base import backend, nest
from mpidist._base.options import CommunicationOptions
from mpidist._base.types import Array, Nest
from mpidist._engine.array_heads import ArrayHead, head_of
from mpidist._engine.observed import (
    has_values,
    nest_of_all,
    values_from_rank_0,
    values_of_ranks,
    values_to_all,
)
from mpidist._engine.resources import Resources, timed
from mpidist._timeline.observer import observed


class Sharing(Resources):
    """Copies values from one rank to all; the arguments of `Resources`."""

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
        try:
            merged = self.merge_options(options)
            transports = self.transports_of(merged)
            leaves, structure = nest.flatten(tree)
            pairs = [backend.as_array(leaf, call) for leaf in leaves]
            results = [backend.contiguous(x).copy() for x, _ in pairs]
        except Exception as error:
            self.invalid(call, error)
        text = structure.render([backend.describe(x) for x in results])
        text += self.text_of_devices(results, structure)
        self.guard.agree(Call(f"{call} {text}"), merged.timeout_seconds)
        for x in results:
            transports.of(x).broadcast(backend.as_bytes(x), root)
        return structure.unflatten(
            [
                backend.restore(x, kind)
                for x, (_, kind) in zip(results, pairs, strict=True)
            ]
        )

    @observed(values_of_ranks, has_values)
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
        call = Call(text)
        values: list[Any] = []
        if self.comm.rank == 0:
            try:
                values = make()
                heads = [head_of(value, text) for value in values]
                data = pickle.dumps(heads)
            except Exception as error:
                raise self.guard.fail(call, error, "invalid") from None
        self.guard.agree(call)
        if self.comm.rank != 0:
            return self.receive_arrays(text)
        self.messages.send(data)
        self._send_values(values, heads, text)
        return values

    @observed(values_to_all)
    def send_arrays(self, values: list[Any], call: str) -> None:
        """Send arrays and objects from rank 0 to ranks that wait for them.

        Without agreement: for the coordinator, whose followers only wait.
        """
        heads = [head_of(value, call) for value in values]
        self.messages.send(pickle.dumps(heads))
        self._send_values(values, heads, call)

    @observed(values_from_rank_0, has_values)
    def receive_arrays(self, call: str = FROM_RANK_0) -> list[Any]:
        """Return what rank 0 sends with `send_arrays`.

        Raises:
            MemoryError: on all ranks, if the allocation failed on one.
        """
        heads: list[ArrayHead] = pickle.loads(self.messages.receive())
        arrays = self._allocate(lambda: self._empty_arrays(heads), heads, call)
        for x in arrays:
            self.transports.of(x).broadcast(backend.as_bytes(x), 0)
        received = iter(arrays)
        return [
            head.payload
            if head.dtype is None
            else backend.restore(next(received), head.kind)
            for head in heads
        ]

    def _send_values(
        self, values: list[Any], heads: list[ArrayHead], call: str
    ) -> None:
        """Broadcast the arrays of rank 0, after all ranks have allocated memory."""
        arrays = self._allocate(
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

    def _empty_arrays(self, heads: list[ArrayHead]) -> list[Array]:
        return [
            (self.device.array_module if head.on_device else np).empty(
                head.shape, head.dtype
            )
            for head in heads
            if head.dtype is not None
        ]

    def _allocate(
        self, allocate: Callable[[], list[Array]], heads: list[ArrayHead], call: str
    ) -> list[Array]:
        """Return the result of ``allocate`` if it succeeds on all ranks. Collective.

        Raises:
            MemoryError: on all ranks, if it failed on one.
        """
        if all(head.dtype is None for head in heads):
            return []
        return self.comm.together(allocate, call)
