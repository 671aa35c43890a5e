"""The base of all update rules: settings, and the formula of a step."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import ClassVar

from mpidist._base.expect import expect
from mpidist._base.types import Array
from mpidist._values.variable import Variable
from mpidist.optimizers._arguments import number
from mpidist.optimizers._clipping import Clipping

Numbers = tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a variable and of its slots, and scratch memory: all flat.

    ``t``, ``u`` and ``wide`` are scratch memory of the same size. ``u`` may be the
    gradient itself: write to it only in or after the last use of that. ``wide`` is None
    if the step is computed in the variable's own dtype.
    """

    part: slice
    w: Array
    slots: tuple[Array, ...]
    t: Array
    u: Array
    wide: Array | None


class Rule:
    """How an optimizer changes variables: the same on all ranks.

    Args:
        kind: the name of the class, for messages.
        name: of the optimizer; None: that of the class.
        clipping: the arguments of `Clipping` after the first one.
        shard_state: whether each rank has a part of the state.
        settings: all other settings except the learning rate.
    """

    _slot_names: ClassVar[tuple[str, ...]] = ()
    # Of the settings that are numbers: what they have to be less than.
    _limits: ClassVar[dict[str, float]] = {}

    def __init__(
        self,
        kind: str,
        name: str | None,
        clipping: tuple[float | None, float | None, float | None],
        shard_state: bool,
        settings: dict[str, float],
    ) -> None:
        expect(name is None or isinstance(name, str), kind, "`name` to be a str", name)
        self._name = name or kind.lower()
        self._shard_state = bool(shard_state)
        self._settings: dict[str, float] = {}
        for key, x in settings.items():
            limit = self._limits.get(key)
            if limit is None:
                self._settings[key] = bool(x)
                continue

            def fits(x: float, limit: float = limit) -> bool:
                return 0 <= x < limit

            which = f"0 or more{f' and below {limit:g}' if limit < math.inf else ''}"
            self._settings[key] = number(kind, key, x, fits, which)
        self._clipping = Clipping(kind, *clipping)
        self._not_decayed: list[str] = []
        self._not_decayed_variables: list[Variable] = []
        self._describe_settings()

    def _describe_settings(self) -> None:
        """Note all settings except the learning rate, the same on all ranks."""
        settings: dict[str, object] = {**self._settings, **self._clipping.settings}
        if self._shard_state:
            settings["shard_state"] = True
        if self._not_decayed:
            settings["not_decayed"] = self._not_decayed
        settings["name"] = self._name
        inner = ", ".join(f"{k}={v!r}" for k, v in settings.items())
        self._text = f"{type(self).__name__}({inner})"

    def _exclude(self, variables: list[Variable], names: list[str]) -> None:
        """Exclude variables, also by regular expressions, from weight decay."""
        self._not_decayed_variables += variables
        self._not_decayed += names
        self._describe_settings()

    def _decays(self, variable: Variable) -> bool:
        if any(variable is excluded for excluded in self._not_decayed_variables):
            return False
        return not any(re.search(name, variable.name) for name in self._not_decayed)

    # --- to be defined by subclasses --------------------------------------------

    def _constants(self, step: int, rate: float, decays: bool) -> Numbers:
        """Return the numbers that the update of a variable needs.

        Args:
            step: the number of this step, from 1.
            rate: its learning rate.
            decays: whether the weights of the variable decay.
        """
        raise NotImplementedError

    @staticmethod
    def _step(w: Array, g: Array, block: Block, constants: Numbers) -> None:
        """Change a block of a variable and of its slots in place.

        Args:
            w: the block of the variable, float32 or wider: its own array, or a copy.
            g: the block of its gradient; do not write to it.
            block: its slots and scratch memory.
            constants: from `_constants`.
        """
        raise NotImplementedError
