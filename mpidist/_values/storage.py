"""This rank's copy of a variable, and what changes it.

Nothing here communicates. `synchronization` determines when copies are combined, and
`Variable` is the public face of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NoReturn

import numpy as np

from mpidist._base import backend, checksums, indexed_slices
from mpidist._base.indexed_slices import Scatter
from mpidist._base.types import Array, Nest
from mpidist._base.variable_enums import VariableSynchronization
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.arguments import Attributes, Target, convert, convert_slices

Assignment = Literal["assign", "assign_add", "assign_sub"]

_NO_KEY: Final = (0, 0)


class VariableStorage:
    """This rank's copy of a variable, its attributes, and how it is changed.

    A `mpidist.Variable` has one; other rooms get it by `variable.storage_of`. Its
    fields are public in the package, and only the methods here write to the array.

    Attributes:
        group: the replicas that have a copy.
        attributes: the name of the variable, and how its copies are combined.
        on_read: whether the copies are combined when the variable is read.
        array: this rank's copy, which keeps its address.
        view: a view of the array, which users get; read-only if it is on the host.
        fingerprint: a function that returns the fingerprint of the array for a seed.
        key: the key of the variable in the group's registry, the same on all ranks.
        retired: why it cannot be used any more; "" while it can.
    """

    __slots__ = (
        "array",
        "attributes",
        "fingerprint",
        "group",
        "key",
        "on_read",
        "retired",
        "view",
    )

    def __init__(
        self, group: ReplicaGroup, attributes: Attributes, value: Array
    ) -> None:
        """Copy ``value`` to the device of this rank's replica."""
        self.group = group
        self.attributes = attributes
        self.on_read: bool = (
            attributes.synchronization is VariableSynchronization.ON_READ
        )
        # A separate copy: the user keeps the initial array. In C order on all ranks,
        # because the last bits of a sum, for example, depend on the order.
        host = np.array(backend.to_host(value), order="C")
        self.array: Array = backend.place(host, group.collectives.device)
        self.view: Array = self.array.view()
        if not backend.is_device_array(self.array):
            self.view.flags.writeable = False
        self.fingerprint: Callable[[int], int] = checksums.fingerprinter(self.array)
        self.key: tuple[int, int] = _NO_KEY  # until the registry has the variable
        self.retired: str = ""

    def retire(self, why: str) -> None:
        """Drop the array. Every later use of the variable raises, and says why."""
        self.retired = why
        del self.array, self.view, self.fingerprint

    def __getattr__(self, name: str) -> NoReturn:
        # Called for a field that is not there: those of a retired variable.
        if name in ("array", "view", "fingerprint"):
            raise RuntimeError(
                f"Variable {self.name!r} can no longer be used: {self.retired}"
            )
        raise AttributeError(name)

    @property
    def name(self) -> str:
        """The name of the variable."""
        return self.attributes.name

    def describe_call(self, how: str) -> str:
        """Return the name of a call of the variable, which all ranks compare."""
        # With the key: names need not be unique.
        return f"Variable {self.attributes.name!r}.{how} [#{self.key[0]}]"

    def prepare(self, how: str, value: Nest) -> Array:
        """Return ``value`` as an array of this variable's dtype, shape and device.

        Args:
            how: the name of the method of `Variable`, for messages.
            value: an array, a number, a list, a variable or a Mirrored.

        Raises:
            TypeError, ValueError: if the value does not fit, see `Variable.assign`.
        """
        own = self.array
        if (
            type(value) is np.ndarray
            and isinstance(own, np.ndarray)
            and value.dtype is own.dtype
            and value.shape == own.shape
            and own.dtype.kind != "b"
        ):
            return value
        return convert(self._target(), how, value)

    def prepare_slices(self, how: Scatter, value: Nest) -> tuple[Array, Array]:
        """Return the indices and rows of an `IndexedSlices`, converted for the array.

        Raises:
            TypeError, ValueError: if the array has no such rows, see
                `Variable.scatter_add`.
        """
        return convert_slices(self._target(), how, value)

    def _target(self) -> Target:
        return Target(self.name, self.array, self.group.collectives.device)

    def apply(self, how: Assignment, value: Any) -> None:
        """Change the array; ``value`` is the array that `prepare` has returned."""
        own: Any = self.array  # NumPy's types of functions know no CuPy arrays
        if how == "assign":
            own[...] = value
        elif how == "assign_add":
            np.add(own, value, out=own)
        else:
            np.subtract(own, value, out=own)

    def apply_slices(self, how: Scatter, indices: Array, rows: Array) -> None:
        """Change rows of the array; the rest is what `prepare_slices` has returned."""
        indexed_slices.scatter(self.array, how, indices, rows)
