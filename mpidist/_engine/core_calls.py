"""Calls with small arrays, whose plans the core looks up and runs itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpidist import _native
from mpidist._agreement.guard import Guard
from mpidist._base.types import HostArray, Nest


class CoreCalls:
    """A collective with two arguments, of which one is an array.

    Attributes:
        entry: the collective, with what the core does itself of it.

    Args:
        guard: of the strategy.
        call: the collective, for all that the core does not do.
        array: which of its arguments is the array, 0 or 1.
    """

    def __init__(self, guard: Guard, call: Callable[..., Nest], array: int) -> None:
        self.entry: Callable[..., Nest] = call
        self._calls: _native.ArrayCall = None
        if _native.core is not None and guard.calls is None:
            self._calls = self.entry = _native.core.ArrayCall(guard, call, array)

    def keep(self, key: object, x: HostArray, plan: Any, axis: int = 0) -> None:
        """Have the core run a plan, if it can: one that has ``quick``.

        Args:
            key: the argument that is not the array.
            x: an array of the plan.
            plan: a plan of an all-reduce, or an all-gather.
            axis: of a gather, not negative.
        """
        quick = getattr(plan, "quick", None)
        if self._calls is not None and quick is not None:
            self._calls.keep(key, x, quick, plan.call, plan, axis)

    def forget(self) -> None:
        """Drop all plans."""
        if self._calls is not None:
            self._calls.forget()
