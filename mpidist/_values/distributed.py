"""Values with one component per replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NoReturn, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from mpidist._base import backend, nest
from mpidist._base.expect import expect
from mpidist._base.remedies import explain_attributes
from mpidist._base.types import HostArray, Nest, Own
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.interruptions import tells
from mpidist._runtime.registry import Components, Key, Registered, Registry
from mpidist._values.array_like import BINARY_NAMES, ArrayLike

_C = TypeVar("_C", bound=Components)
Seen: TypeAlias = tuple[ReplicaGroup | None, Any]
"""What code sees of a value: None and all components; or, where some are on other
ranks, the group that gathers them, and this rank's."""


class DistributedValues(Components, Generic[Own]):
    """A value with a component on each replica.

    Users get these from `Strategy.run`, from
    `Strategy.experimental_distribute_values_from_function` and as the arguments of a
    ``merge_fn``; they rarely create one. Each rank holds its own component; the others
    are on their ranks. On the coordinator, inside ``merge_fn``, `values` contains all
    of them.

    Args:
        values: one component per replica, in replica order; for a ``merge_fn`` that
            creates a value for each replica.
    """

    def __init__(self, values: Sequence[Own]) -> None:
        """Hold one component for each replica of the active strategy.

        Raises:
            TypeError: if ``values`` is not a list or tuple.
            ValueError: if it does not have one component per replica.
        """
        name = type(self).__name__
        fits = isinstance(values, (list, tuple))
        expect(fits, name, "a list or tuple of components", values)
        group = context.current().group
        if len(values) != group.num_replicas:
            raise ValueError(
                f"{name}: expected one component for each of the "
                f"{group.num_replicas} replicas of {group}, got {len(values)}; "
                "`values` of a PerReplica has this process's alone: write "
                "`strategy.gather(x, axis=0)` for the rows of all"
            )
        self._all = tuple(values)
        self._replica_id = group.replica_id
        self._num_replicas = len(values)
        self._own = values[self._replica_id]
        self._key = None
        self._home = group.registry

    @property
    @tells("values", lambda self: readers(self._home))
    def values(self) -> tuple[Own, ...]:
        """The components that this process can see, in replica order.

        Only this rank's, except in ``merge_fn``: there all of them. The first time
        that they are read there communicates: it gathers them from their ranks. With a
        `mpidist.MirroredStrategy` every reading gathers all: all ranks read them.
        """
        return components_of([self])[0]

    def _seen(self, frame: context.Frame) -> Seen:
        if self._all is not None and (frame.coordinator or self._key is None):
            return None, self._all
        if self._num_replicas > 1 and sees_all(self._home, frame):
            return self._home.group, self._own
        return None, (self._own,)

    def _as_component(self) -> Nest:
        return self._own

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._all is not None:
            rows = [f"  {i}: {value!r}" for i, value in enumerate(self._all)]
            return f"{name}:{{\n" + ",\n".join(rows) + "\n}"
        return (
            f"{name}(replica {self._replica_id} of {self._num_replicas}: {self._own!r})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: its components are on other "
            "ranks. Write `strategy.experimental_local_results(value)[0]` for this "
            "rank's component, or `strategy.gather(value, axis=0)` for all of them"
        )


def readers(home: Registry) -> ReplicaGroup | None:
    """Return the ranks that read ``values`` together; None: each reads its own."""
    return home.group if home.shows_all else None


def sees_all(home: Registry, frame: context.Frame) -> bool:
    """Return whether code sees what other ranks have of values that differ."""
    in_update = frame.level is context.Level.UPDATE
    return frame.coordinator is not None or (home.shows_all and not in_update)


def components_of(leaves: list[Nest]) -> list[tuple[Nest, ...]]:
    """Return the components of each leaf that this code can see, in replica order.

    Those on other ranks are gathered by one call: in merge_fn to rank 0; where a
    registry shows all, to all ranks, which is collective.
    """
    frame = context.current()
    columns: list[Any] = []
    away: dict[ReplicaGroup, list[int]] = {}
    for i, x in enumerate(leaves):
        group, seen = x._seen(frame) if isinstance(x, Registered) else (None, (x,))
        columns.append(seen)
        if group is not None:
            away.setdefault(group, []).append(i)
    for group, places in away.items():
        if frame.coordinator is not None:
            found = frame.coordinator.fetch([leaves[i] for i in places])
        else:
            n, own = len(places), [columns[i] for i in places]
            call = f"experimental_local_results of {n} values" if n > 1 else "values"
            rows = group.collectives.collect_on_all(own, call)
            found = [*zip(*rows, strict=True)]
        for i, column in zip(places, found, strict=True):
            columns[i] = column
    return columns


@explain_attributes
class PerReplica(DistributedValues[Own]):
    """A value that is different on each replica.

    In annotations ``PerReplica[float]``, for a number on each replica.

    It has no operators, because ``x + 1`` would be ambiguous. Reduce it
    (`Strategy.reduce`), gather it (`Strategy.gather`), pass it to
    `Strategy.run`, or take this rank's component with
    `Strategy.experimental_local_results`.

    Example, on two replicas::

        value = strategy.run(lambda: strategy.replica_id)  # a PerReplica
        strategy.run(lambda x: x + 1, args=(value,))
        strategy.reduce("SUM", value, axis=None)  # 1
    """

    # Makes NumPy and CuPy arrays defer operators to this class.
    __array_ufunc__: Callable[..., Any] | None = None

    def __bool__(self) -> bool:
        raise TypeError(f"a PerReplica has no truth value; {_ALTERNATIVES}")

    def __eq__(self, other: object) -> bool:
        # Containers compare objects; who compares with a value means the components.
        kinds = (int, float, complex, ArrayLike)
        if isinstance(other, kinds) or backend.is_array(other):
            _refuse_operator(self)
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __str__(self) -> str:
        if self._all is not None:
            return repr(self)
        return f"{self!r}; {_TO_COMBINE}"

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(
                f"a PerReplica has no format {spec!r}, since it has a component on "
                f"each replica; {_ALTERNATIVES}"
            )
        return str(self)

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> HostArray:
        frame = context.current()
        if frame.level is not context.Level.REPLICA or not context.has_strategy():
            inside = context.has_strategy()
            where = frame.level.value if inside else "outside every scope"
            raise TypeError(
                f"a PerReplica is not an array {where}: it has a component on each "
                f"replica; {_ALTERNATIVES}"
            )
        return np.array(self._own, dtype=dtype, copy=copy)


def _refuse_operator(self: PerReplica, *others: Any) -> NoReturn:
    raise TypeError(
        "a PerReplica has no operators, since it has a component on each replica; "
        f"{_ALTERNATIVES}"
    )


for _name in BINARY_NAMES:
    for _prefix in ("", "r"):
        setattr(PerReplica, f"__{_prefix}{_name}__", _refuse_operator)
for _name in (
    *("neg", "pos", "abs", "invert", "float", "int", "lt", "le", "gt", "ge"),
    *("getitem", "iter", "len", "contains", "complex", "round", "divmod", "rdivmod"),
):
    setattr(PerReplica, f"__{_name}__", _refuse_operator)


_TO_COMBINE: Final = (
    'for one value of all replicas write strategy.reduce("MEAN", value, axis=None)'
)
_ALTERNATIVES: Final = (
    "write `strategy.reduce(op, value, axis=None)`, "
    "`strategy.experimental_local_results(value)`, or pass it to `strategy.run`. "
    "Numbers that you pass to `merge_call` become PerReplica too"
)


class Mirrored(DistributedValues[Any], ArrayLike):
    """A value that is the same on all replicas: the result of a reduction.

    It acts as the array that it holds.

    Example, on two replicas::

        value = strategy.run(lambda: np.array([1.0, 2.0]))
        total = strategy.extended.reduce_to("SUM", value, value)  # a Mirrored
        total + 1.0  # array([3., 5.])
    """

    def value(self) -> Any:
        """Return the array itself, without a copy. Not collective.

        A NumPy array is read-only. A CuPy array cannot be: do not write to it.
        """
        if isinstance(self._own, np.ndarray):
            view = self._own.view()
            view.flags.writeable = False
            return view
        return self._own

    def _seen(self, frame: context.Frame) -> Seen:
        several = frame.coordinator is not None or self._home.shows_all
        return None, (self.value(),) * (self._num_replicas if several else 1)

    def __repr__(self) -> str:
        return f"Mirrored(on {self._num_replicas} replicas: {self._own!r})"

    def __getattr__(self, name: str) -> Any:
        # Any attribute of its value, as in TensorFlow, except private ones: pickle and
        # copy look them up before there is a component.
        if name.startswith("_"):
            raise AttributeError(f"'Mirrored' object has no attribute {name!r}")
        return self._attribute(name)


class PerReplicaOfOne(ArrayLike, PerReplica[Any]):
    """A PerReplica of the default strategy, which acts as its one component.

    TensorFlow's default strategy returns the values themselves.
    """

    __hash__ = object.__hash__
    __array_ufunc__ = ArrayLike.__array_ufunc__

    def value(self) -> Any:
        """Return the component. Not collective."""
        return self._own

    def __repr__(self) -> str:
        return f"PerReplica(replica 0 of 1: {self._own!r})"

    def __str__(self) -> str:
        return repr(self)


def is_per_replica(x: Nest) -> bool:
    """Return whether a value differs between replicas, of which there are several."""
    return isinstance(x, PerReplica) and not isinstance(x, PerReplicaOfOne)


class RegistryOfOne(Registry):
    """The registry of one replica: its component is all that there is."""

    def wrap(self, kind: type[_C], own: Nest, key: Key) -> _C:
        """Return a PerReplica that acts as its component, or a Mirrored."""
        if kind is PerReplica:
            return super().wrap(PerReplicaOfOne, own, key)  # type: ignore[return-value]
        return super().wrap(kind, own, key)


def select_replica(tree: Nest) -> Nest:
    """Replace PerReplica and Mirrored leaves by this rank's component.

    The component of a Mirrored is read-only on the host, because it must stay the same
    on all replicas.
    """
    return nest.map_structure(argument_of, tree) if tree else tree


def argument_of(x: Nest) -> Nest:
    """Return the object that a function receives for a leaf of its arguments."""
    return x.value() if isinstance(x, Mirrored) else own_component(x)


def own_component(x: Nest) -> Nest:
    """Return this rank's component of a distributed value; other values unchanged."""
    return x._own if isinstance(x, DistributedValues) else x
