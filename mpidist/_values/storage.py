"""A replica's copy of a variable: what changes it, and when copies are combined.

`VariableStorage` is of a mirrored variable: the replicas' values are combined before
they are written. `OnReadStorage` combines the copies when they are read.
`DividedStorage` has a part of the elements on each rank, such as slots of optimizers.
`Variable` is the public face of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np

from mpidist._agreement.mismatch import call_of
from mpidist._base import backend, checksums, indexed_slices
from mpidist._base.fingerprint import fingerprint_of
from mpidist._base.gpus import Device
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array, Nest, Shape
from mpidist._base.variable_enums import VariableAggregation
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.arguments import Attributes, convert, convert_slices
from mpidist._values.distributed import PerReplica, own_component

_OF_ALL: Final = ("assign", "assign_add", "assign_sub")
_NO_KEY: Final = (0, 0)
_OPERATION: Final = {
    VariableAggregation.SUM: ReduceOp.SUM,
    VariableAggregation.MEAN: ReduceOp.MEAN,
}


class Part(NamedTuple):
    """What this rank has of a variable whose elements are divided among the ranks.

    Attributes:
        shape: of the variable.
        start: the first element that is here, in C order.
    """

    shape: Shape
    start: int


class VariableStorage:
    """This rank's copy of a variable, its attributes, and how it is changed.

    All copies are always equal: the replicas' values are combined before they are
    written. A `mpidist.Variable` has one; other rooms get it by `variable.storage_of`.
    Its fields are public in the package, and only the methods here write to the array.

    Attributes:
        group: the replicas that have a copy.
        attributes: the name of the variable, and how its copies are combined.
        on_read: whether the copies are combined when the variable is read.
        array: this rank's copy, which keeps its address.
        view: a view of the array, which users get; read-only if it is on the host.
        fingerprint: a function that returns the fingerprint of the array for a seed.
        key: the key of the variable in the group's registry, the same on all ranks.
        restored: the number of the last restore of a checkpoint; 0: of none.
        first: its first value as a short text, if a checkpoint waited for variables
            when it was made; see `_checkpoints/restore`.
        retired: why it cannot be used any more; "" while it can.
    """

    on_read: bool = False
    __slots__ = (
        "array",
        "attributes",
        "fingerprint",
        "first",
        "group",
        "key",
        "restored",
        "retired",
        "view",
    )

    def __init__(
        self, group: ReplicaGroup, attributes: Attributes, value: Array
    ) -> None:
        """Move ``value`` to the device of this rank's replica, or keep it there."""
        self.group = group
        self.attributes = attributes
        self.array: Array = backend.place(value, group.collectives.device)
        self.view: Array = backend.read_only(self.array)
        self.fingerprint: Callable[[int], int] = checksums.fingerprinter(self.array)
        self.key: tuple[int, int] = _NO_KEY  # until the registry has the variable
        self.restored = 0
        self.first: str | None = None
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

    @property
    def shape(self) -> Shape:
        """The shape of the variable."""
        return tuple(self.array.shape)

    def describe_call(self, how: str) -> str:
        """Return the name of a call of the variable, which all ranks compare."""
        # With the key: names need not be unique.
        return f"Variable {self.attributes.name!r}.{how} [#{self.key[0]}]"

    def prepare(self, how: str, value: Nest) -> Any:
        """Return what `apply` takes: an array of this variable's dtype and device.

        Of the variable's shape; for the methods that change rows an `IndexedSlices`.

        Args:
            how: the name of the method of `Variable`.
            value: an array, a number, a list, a variable or a Mirrored.

        Raises:
            TypeError, ValueError: if the value does not fit, see `Variable.assign` and
                `Variable.scatter_add`.
        """
        own = self.array
        if (
            type(value) is np.ndarray
            and isinstance(own, np.ndarray)
            and value.dtype is own.dtype
            and value.shape == own.shape
            and own.dtype.kind != "b"
            and how in _OF_ALL
        ):
            return value
        fit = convert if how in _OF_ALL else convert_slices
        return fit(*self._target(how), value)

    def _target(self, how: str) -> tuple[str, Array, Device]:
        return f"Variable {self.name!r}.{how}", self.array, self.group.device

    def component(self) -> Array:
        """Return this rank's copy, to be combined with the others."""
        return self.view

    def apply(self, how: str, value: Any) -> None:
        """Change the array; ``value`` is what `prepare` has returned."""
        own: Any = self.array  # NumPy's types of functions know no CuPy arrays
        if how == "assign":
            own[...] = value
        elif how == "assign_add":
            np.add(own, value, out=own)
        elif how == "assign_sub":
            np.subtract(own, value, out=own)
        else:
            rows = value.indices, value.values
            indexed_slices.scatter(own, how.removeprefix("scatter_"), *rows)

    # --- on all ranks -----------------------------------------------------------------

    def read(self) -> Array:
        """Return all copies combined, in a new array: of ON_READ ones. Collective."""
        call = self.describe_call(
            "reading, which all ranks have to do since it is ON_READ,"
        )
        # Read-only, as other variables: no copy changes with it.
        return backend.read_only(self._combine(self.array, call))

    def write(self, how: str, value: Nest) -> None:
        """Write in a replica context: combine, then change every copy. Collective."""
        call, guard = self.describe_call(how), self.group.guard
        is_combined = self.attributes.aggregation is not VariableAggregation.NONE
        with guard.checking(call):
            # Treat a PerReplica that the function closes over as an argument.
            prepared = self.prepare(how, own_component(value))
            text = "" if is_combined else checksums.summarize_value(prepared, call)
        if is_combined:
            prepared = self._combine(prepared, call)
        elif not guard.agree_on(call_of(call), fingerprint_of(text)):
            raise self.attributes.no_aggregation(how)
        self.apply(how, prepared)

    def _combine(self, own: Any, call: str) -> Any:
        """Combine what the replicas have by the aggregation. Collective."""
        collectives, aggregation = self.group.collectives, self.attributes.aggregation
        if aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
            return self.group.all_reduce(_OPERATION[aggregation], own, call=call)
        if isinstance(own, IndexedSlices):  # of which the others may have fewer rows
            rows = [own.values, own.indices]
            return IndexedSlices(*collectives.share(lambda: rows, call))
        return collectives.broadcast(own, call=call)

    def store(self, how: str, value: Array) -> None:
        """Write a value that all ranks have, in cross-replica context."""
        self.apply(how, value)

    def own_part(self, value: Array) -> Array:
        """Return what this rank's copy is if ``value`` is assigned on all ranks."""
        return value


class OnReadStorage(VariableStorage):
    """Each replica writes its own copy; cross-replica reading combines them."""

    on_read: bool = True
    __slots__ = ()

    def write(self, how: str, value: Nest) -> None:
        """Write the own copy in a replica context, without communication."""
        self.apply(how, self.prepare(how, own_component(value)))

    def store(self, how: str, value: Array) -> None:
        """Write in cross-replica context, so that reading returns the written value."""
        is_sum = self.attributes.aggregation is VariableAggregation.SUM
        if how == "assign":
            self.apply(how, self.own_part(value))
        elif not is_sum or self.group.replica_id == 0:  # of one copy: so does the sum
            self.apply(how, value)

    def own_part(self, value: Array) -> Array:
        """Return what this rank's copy is if ``value`` is assigned on all ranks."""
        if self.attributes.aggregation is not VariableAggregation.SUM:
            return value
        group = self.group
        return _share_of(value, group.replica_id, group.num_replicas)


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
        return backend.read_only(whole.reshape(self.shape))

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


def _share_of(value: Any, replica_id: int, num_replicas: int) -> Any:
    """Return a replica's share of a sum. Shares of integers add up exactly."""
    # An array, as the result is: NumPy's types of its functions know no CuPy arrays.
    if value.dtype.kind not in "iu":
        return value / value.dtype.type(num_replicas)
    # The number of replicas may exceed the range of an int8.
    wide = value.dtype if value.dtype.itemsize == 8 else np.dtype(np.int64)
    quotient, rest = np.divmod(value.astype(wide), wide.type(num_replicas))
    return (quotient + (rest > replica_id)).astype(value.dtype)
