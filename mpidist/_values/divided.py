"""Variables whose elements are divided among the ranks, such as slots of optimizers."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import numpy as np

from mpidist._base import backend
from mpidist._base.types import Array, Nest, Shape
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.arguments import Attributes, convert
from mpidist._values.distributed import PerReplica
from mpidist._values.storage import OnReadStorage


class Part(NamedTuple):
    """What this rank has of a variable whose elements are divided among the ranks.

    Attributes:
        shape: of the variable.
        start: the first element that is here, in C order.
    """

    shape: Shape
    start: int


class DividedStorage(OnReadStorage):
    """Each rank has a part of the elements; cross-replica reading puts them together.

    What is written is the whole, of which each rank takes its part.

    Attributes:
        part: which elements the array has, which is flat.
    """

    __slots__ = ("part",)

    def __init__(
        self, group: ReplicaGroup, attributes: Attributes, value: Array, part: Part
    ) -> None:
        super().__init__(group, attributes, value)
        self.part = part

    @property
    def shape(self) -> Shape:
        """The shape of the variable."""
        return self.part.shape

    def prepare(self, how: str, value: Nest) -> Array:
        """Return ``value`` as an array of this variable's dtype, shape and device."""
        if isinstance(value, PerReplica):
            raise TypeError(
                f"Variable {self.name!r}.{how}: got a PerReplica; expected the whole, "
                "the same on all ranks, of which each takes its part"
            )
        return convert(*self._target(how), value, self.shape)

    def read(self) -> Array:
        """Return the whole, in a new array. Collective."""
        call = self.describe_call(
            "reading, which all ranks have to do since it is divided among them,"
        )
        whole: Array = self.group.collectives.all_gather(self.array, 0, None, call)
        whole = whole.reshape(self.shape)
        if isinstance(whole, np.ndarray):
            whole.flags.writeable = False
        return whole

    def component(self) -> NoReturn:
        """Raise: parts do not correspond to each other."""
        raise ValueError(
            f"Variable {self.name!r}: its elements are divided among the ranks, so its "
            "parts cannot be combined; read it: `variable.value()` is the whole in "
            "cross-replica context, and this rank's part in a replica function"
        )

    def apply(self, how: str, value: Array) -> None:
        """Change the array, given the whole or this rank's part."""
        # A part of the same shape as the whole is the whole.
        whole = tuple(value.shape) == self.shape
        super().apply(how, self.own_part(value) if whole else value)

    def write(self, how: str, value: Nest) -> None:
        """Write the own part in a replica context, without communication."""
        self.apply(how, self.prepare(how, value))

    def store(self, how: str, value: Array) -> None:
        """Write a value that all ranks have."""
        self.apply(how, value)

    def own_part(self, value: Array) -> Array:
        """Return what this rank's part is if ``value`` is assigned on all ranks."""
        start = self.part.start
        flat: Array = backend.flat(backend.contiguous(value))
        return flat[start : start + self.array.size]
