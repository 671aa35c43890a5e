"""The items of a checkpoint: variables, and objects with a state.

Those of torch and JAX are in `guest_items`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Final

import numpy as np

from mpidist._base import backend, checksums, nest, state_json
from mpidist._base.state_json import Json, Packed, State
from mpidist._base.variable_enums import VariableAggregation, VariableSynchronization
from mpidist._values.variable import Variable, storage_of

_MOST_LINES: Final = 5


@dataclasses.dataclass(eq=False)
class Item:
    """A part of the objects of a checkpoint, under a name.

    Attributes:
        is_optional: whether a checkpoint may lack it; then it stays as it is.
        is_held: whether it is a value that the program replaces, not an object.
        owner: the object; None for a variable, and for what is held.
    """

    name: str
    is_optional: bool = dataclasses.field(default=False, kw_only=True)
    is_held: bool = dataclasses.field(default=False, kw_only=True)
    owner: Any = dataclasses.field(default=None, kw_only=True)

    def is_changed(self) -> bool:
        """Return whether the program may have changed it since it was made."""
        return False


@dataclasses.dataclass(eq=False)
class VariableItem(Item):
    """A variable, which is saved as an array."""

    variable: Variable
    count: str = ""  # for a slot of an optimizer: the name of its iterations

    def __str__(self) -> str:
        kind = f" ON_READ {self.variable.aggregation.name}" if self.on_read else ""
        shape = tuple(self.variable.shape)
        return f"{self.name!r}: {self.variable.dtype.name} {shape}{kind}"

    @property
    def on_read(self) -> bool:
        """Whether each replica has its own value."""
        return self.variable.synchronization is VariableSynchronization.ON_READ

    def is_changed(self) -> bool:
        storage = storage_of(self.variable)
        return storage.first != checksums.summarize(storage.array)

    def check(self) -> None:
        """Raise a ValueError if the variable does not have a single value."""
        if self.on_read and self.variable.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"Checkpoint: Could not save {self.name!r}: an ON_READ variable with "
                "aggregation=NONE has no single value, as nothing says how to combine "
                "its copies; create it with aggregation=SUM, MEAN or ONLY_FIRST_REPLICA"
            )


@dataclasses.dataclass(eq=False)
class StateItem(Item):
    """An object with a state.

    Attributes:
        get: returns its state.
        set: sets its state.
        merge: merges the states of all replicas into one for any number of replicas;
            None if the object does not support it.
        readable: whether `get` may be called when the checkpoint is made: it does not
            communicate.
        forget: drops what an object has beside its state, its gradients; None: nothing.
        shared: returns which arrays, by name, must be the same on all replicas.
        is_fixed: whether the names, dtypes and shapes of its tensors do not change.
    """

    kind: ClassVar[str] = "object"
    get: Callable[[], State]
    set: Callable[[State], object]
    merge: Callable[[list[State]], State] | None = None
    readable: bool = True
    forget: Callable[[], object] | None = None
    shared: Callable[[Collection[str]], Collection[str]] = lambda names: ()
    is_fixed: bool = False

    def __str__(self) -> str:
        return f"{self.name!r}: state of {self.kind}"

    def is_changed(self) -> bool:
        return not self.is_optional or self.get() is not None  # an assigned rate

    def pack(self, call: str = "Checkpoint") -> Packed:
        """Return the state as JSON and arrays; these may share the object's memory."""
        return state_json.pack(self.get(), self.name, call)

    def copy(self) -> State:
        """Return a copy of the state, which does not change with the object."""
        return nest.map_structure(backend.copied, self.get())

    def refuse(self, values: list[Json]) -> str:
        """Return why the saved states cannot be set, or "". Called on rank 0.

        Raises:
            Exception: of any kind, if a state is malformed.
        """
        for value in values:  # perhaps of `numpy.random.RandomState`
            parts = value.get("$tuple") if isinstance(value, dict) else None
            if isinstance(parts, list) and len(parts) > 2 and parts[0] == "MT19937":
                _check_position("MT19937", {"state": {"pos": parts[2]}})
        return ""

    def misfit(self, state: State) -> str:
        """Return why a state cannot be set, or "". Called on each rank."""
        return _differences(self.name, self.get(), state) if self.is_fixed else ""


def first_state(states: list[State]) -> State:
    """Return the state of replica 0: the ``merge`` of items that save no other."""
    return states[0]


@dataclasses.dataclass(eq=False)
class GeneratorItem(StateItem):
    """A random generator.

    Attributes:
        stream: returns the state of a new generator, from a seed; None: mpidist cannot
            make one.
    """

    kind = "generator"
    stream: Callable[[np.random.SeedSequence], State] | None = None


class NumpyGeneratorItem(GeneratorItem):
    """A generator of NumPy, or its bit generator."""

    def __init__(
        self, name: str, value: np.random.Generator | np.random.BitGenerator
    ) -> None:
        bits = value.bit_generator if isinstance(value, np.random.Generator) else value
        put = functools.partial(setattr, bits, "state")
        super().__init__(name, lambda: bits.state, put, owner=bits)
        self._kind = kind = type(bits)
        if getattr(np.random, kind.__name__, None) is kind:
            self.stream = lambda seed: kind(seed).state

    def refuse(self, values: list[Json]) -> str:
        """Return what is wrong with the kind of generator; raise for a bad state."""
        own = self._kind.__name__
        for value in values:
            found = value.get("bit_generator") if isinstance(value, dict) else None
            saved = found if isinstance(found, str) else ""
            if saved != own:
                return (
                    f"{self.name!r}: expected the state of a {own}, got that of "
                    f"{saved or 'another object'}; make the generator by "
                    f"`numpy.random.Generator(numpy.random.{saved or own}(seed))`"
                )
            if self.stream is not None:
                state = state_json.unpack(value, _no_tensor)
                self._kind(0).state = state
                _check_position(own, state)
        return ""


@dataclasses.dataclass(eq=False)
class LaterItem(Item):
    """An object without variables yet; it restores them when it makes them.

    Its owner has ``__saved_unbuilt__`` and ``__restore_later__``, as `Optimizer` has.
    """

    def __str__(self) -> str:
        return f"{self.name!r}: no variables yet"


def _check_position(name: str, state: State) -> None:
    """Raise if NumPy would read outside a generator's buffer: it does not check."""
    if name == "MT19937":
        position, size = state["state"]["pos"], 624
    elif name == "Philox":
        position, size = state["buffer_pos"], 4
    else:
        return
    if not 0 <= position <= size:
        raise ValueError(f"expected a position from 0 to {size}, got {position}")


def _no_tensor(library: str, name: str, device: str) -> State:
    raise ValueError(f"a tensor, {name!r}")


def _differences(name: str, own: State, saved: State) -> str:
    """Return how saved tensors differ from an object's in names, dtypes and shapes."""
    if not isinstance(own, dict):
        own, saved = {"": own}, {"": saved}
    if not isinstance(saved, dict):
        return f"{name!r}: expected tensors by name, got {type(saved).__name__}"
    lines = []
    for key in {**own, **saved}:
        at = f"{name}/{key}".removesuffix("/")
        if key not in saved:
            lines.append(f"{at!r}: missing in the checkpoint")
        elif key not in own:
            lines.append(f"{at!r}: only in the checkpoint")
        elif (here := _describe(own[key])) != (there := _describe(saved[key])):
            lines.append(f"{at!r}: expected {here}, got {there}")
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more"]
    return "\n  ".join(lines)


def _describe(x: Any) -> str:
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    return type(x).__name__
