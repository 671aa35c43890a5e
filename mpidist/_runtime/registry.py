"""The distributed values of a group of replicas, by keys that all ranks share."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

import numpy as np

from mpidist._base import backend, nest
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.types import Nest

Key = Hashable


class Registered:
    """A value that can have a key: the base of distributed values and variables.

    The fields are private, because all names of these classes are for users. Other
    rooms read them by the functions below, such as `key_of`.
    """

    _key: Key | None = None

    def _seen(self, frame: Any) -> tuple[Any, Any]:
        raise NotImplementedError


class Components(Registered):
    """What a registry sets in a value: the base of `mpidist.DistributedValues`."""

    _own: Nest  # this rank's component
    _all: tuple[Nest, ...] | None  # those of all ranks, if they are known here
    _replica_id: int
    _num_replicas: int
    _home: Registry


# Functions written in C: commands and updates call them for each of their values.
key_of: Final[Callable[[Registered], Key]] = operator.attrgetter("_key")
"""Return the key of a value; None if it has none."""

component: Final[Callable[[Components], Nest]] = operator.attrgetter("_own")
"""Return this rank's component of a value."""

gathered: Final[Callable[[Components], tuple[Nest, ...] | None]] = operator.attrgetter(
    "_all"
)
"""Return the components of all ranks; None if they are not known here."""

home_of: Final[Callable[[Components], Registry]] = operator.attrgetter("_home")
"""Return the registry that has given a value its key."""


def set_gathered(value: Components, components: tuple[Nest, ...] | None) -> None:
    """Store the components of all ranks in a value, or remove them."""
    value._all = components


def set_component(value: Components, own: Nest) -> None:
    """Store this rank's component in a value, without those of the others."""
    value._own, value._all = own, None


_C = TypeVar("_C", bound=Components)
_R = TypeVar("_R", bound=Registered)


class _Reference(weakref.ref[Registered]):
    """A value that a registry does not keep alive, and its key."""

    __slots__ = ("dropped", "key")
    key: Key
    dropped: list[Key] | None


class Registry:
    """The distributed values of a group by key: the same key on every rank.

    Keys are counted by collective calls, which all ranks make in the same order.
    Values live as long as the user's program keeps them; those of a ``merge_call``
    as long as it lasts, or until the coordinator has dropped them.
    """

    def __init__(self, group: Any, replica_id: int, num_replicas: int) -> None:
        self.group = group  # a `ReplicaGroup`, which is defined above this file
        self._replica_id = replica_id
        self._num_replicas = num_replicas
        self._values: dict[Key, _Reference] = {}
        self.count: int = 0
        self.shows_all: bool = False  # `values` of all ranks, as where one has all
        # Variables that merge_fn has created: the followers keep them until rank 0
        # has dropped its own, and has told them.
        self.kept: dict[Key, Registered] = {}
        self.dropped: list[Key] = []
        # Callbacks are C functions: an exception that a signal's handler raises in one
        # written in Python, such as KeyboardInterrupt, would be ignored.
        self._dead: deque[weakref.ref[Registered]] = deque()

    def forget_dropped(self) -> None:
        """Remove the values that the program has dropped, and tell who watches them."""
        while self._dead:
            try:
                reference = self._dead.popleft()
            except IndexError:  # where another thread has taken the last one
                return
            assert isinstance(reference, _Reference)
            if reference.dropped is not None:
                reference.dropped.append(reference.key)
            if self._values.get(reference.key) is reference:
                del self._values[reference.key]

    def next_key(self) -> int:
        """Count one collective call; return its number."""
        self.count += 1
        return self.count

    def add(self, key: Key, value: _R) -> _R:
        """Give a value its key, and return it."""
        value._key = key
        self._remember(key, value)
        return value

    def _remember(self, key: Key, value: Registered) -> None:
        if self._dead:
            self.forget_dropped()
        reference = _Reference(value, self._dead.append)
        reference.key = key
        reference.dropped = None
        self._values[key] = reference

    def wrap(self, kind: type[_C], own: Nest, key: Key) -> _C:
        """Return a PerReplica or Mirrored with this component and this key."""
        # Without a call of a constructor and of `add`: merge_call makes many of them.
        value = kind.__new__(kind)
        value._own = own
        value._all = None
        value._replica_id = self._replica_id
        value._num_replicas = self._num_replicas
        value._key = key
        value._home = self
        self._remember(key, value)
        return value

    def has(self, value: Registered) -> bool:
        """Return whether this is the value with its key: then all ranks have one."""
        reference = self._values.get(value._key)
        return reference is not None and reference() is value

    def watch(self, value: Registered, dropped: list[Key]) -> None:
        """Append the key of a value to a list when the value is dropped.

        This replaces `weakref.finalize`, which takes longer than creating the value.
        """
        if self.has(value):
            self._values[value._key].dropped = dropped

    def check(self, call: str, value: Nest) -> None:
        """Raise if a distributed value belongs to another strategy.

        Raises:
            RuntimeError: if it does.
        """
        home = getattr(value, "_home", None)
        if isinstance(value, Components) and home not in (None, self):
            raise RuntimeError(
                f"{call}: Mixing different Strategy objects: {value!r:.80} belongs to "
                "another strategy; use that strategy's methods, or take this rank's "
                "component with its `experimental_local_results`"
            )

    def wrap_tree(self, kind: type[Components], tree: Nest) -> Nest:
        """Wrap the arrays and numbers of a nest that one collective call returned.

        Variables and leaves of other kinds stay as they are.
        """
        return self.wrap_numbered(kind, tree, self.next_key())

    def wrap_numbered(self, kind: type[Components], tree: Nest, number: int) -> Nest:
        """Wrap as `wrap_tree` does, for a call that was counted before."""
        if tree is None or isinstance(tree, Registered):
            return tree
        leaves, structure = nest.flatten(tree)
        return structure.unflatten(
            [
                self.wrap(kind, leaf, (number, i)) if is_component(leaf) else leaf
                for i, leaf in enumerate(leaves)
            ]
        )

    def values(self) -> list[Registered]:
        """Return the values that still exist."""
        found = [reference() for reference in list(self._values.values())]
        return [x for x in found if x is not None]

    def get(self, key: Key) -> Any:
        """Return the value with this key; None if it no longer exists."""
        reference = self._values.get(key)
        return None if reference is None else reference()


def is_component(x: Nest) -> bool:
    """Return whether `run` returns a PerReplica for this leaf: an array or number."""
    if type(x) is np.ndarray:
        return True
    numbers = (bool, int, float, complex, IndexedSlices)
    return isinstance(x, numbers) or backend.is_array(x)
