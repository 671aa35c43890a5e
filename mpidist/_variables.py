"""Mirrored variables: an array with an equal copy on each replica."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np

from mpidist import _arrays, _context, _dispatch
from mpidist._options import ReduceOp, VariableAggregation, VariableSynchronization
from mpidist._reports import Call
from mpidist._values import ArrayLike, Mirrored, PerReplica

if TYPE_CHECKING:
    from mpidist._strategy import Strategy

Assignment = Literal["assign", "assign_add", "assign_sub"]


@dataclasses.dataclass(frozen=True)
class _Attributes:
    name: str
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation

    def __str__(self) -> str:
        return f"Variable {self.name!r} (aggregation={self.aggregation.name})"


class Variable(ArrayLike):
    """An array with a copy on each replica; all copies are always equal.

    Made in ``strategy.scope()`` or in a replica function it is mirrored: rank 0
    computes the initial value, all get it. Outside every scope it is a plain
    variable of one copy. It acts as an array in arithmetic and in NumPy and CuPy
    functions; results are plain arrays. Its array keeps its address for life.

    It changes by `assign`, `assign_add` and `assign_sub` only:

    - in a replica context the values of all replicas are first combined, as
      ``aggregation`` says (the argument is combined, then the operation is applied
      to every copy). With NONE that is an error;
    - in cross-replica context the value must be the same on all ranks. A `Mirrored`
      is; a plain value is checked (by checksum), unless the guard is off;
    - in the function of ``strategy.extended.update`` each copy takes its own value.

    Collective: all replicas make a variable together, in the same order.

    Args:
        initial_value: an array, number or list, or a function that returns one.
            Only rank 0's is used, and only rank 0 calls the function.
        trainable: kept for the user; default True.
        name: for messages.
        dtype: of the array; default: of the initial value.
        synchronization: AUTO or ON_WRITE.
        aggregation: how assigned values of replicas are combined.
        shape: what the initial value's shape must be, if given.

    Raises:
        ValueError: for MEAN of a dtype that is not floating, a synchronization that
            is not supported, or an initial value of another shape.
        TypeError: for an initial value that is no array.
    """

    _key: tuple[int, int]

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """Compute the initial value on rank 0 and copy it to all. Collective."""
        frame = _context.current()
        strategy = frame.strategy
        collectives = strategy.extended._collectives
        try:
            attributes = _check_attributes(
                trainable, name, synchronization, aggregation
            )
        except Exception as error:
            if frame.coordinator is not None:
                raise
            collectives.invalid("Variable(...)", error)

        def make() -> Any:
            return _initial_array(initial_value, dtype, shape, attributes)

        if frame.coordinator is not None:
            made = frame.coordinator.command("create_variable", (make(), attributes))
            self.__dict__.update(made.__dict__)
            registry = strategy.extended._registry
            registry.add(made._key, self)
            weakref.finalize(self, registry.dropped.append, made._key)
            return
        text = f"{attributes}, dtype={dtype}, shape={shape}"
        (value,) = collectives.share(lambda: [make()], text)
        self._set_up(strategy, value, attributes)

    def _set_up(self, strategy: Strategy, value: Any, attributes: _Attributes) -> None:
        device = strategy.extended._collectives.device
        self._strategy = strategy
        self._attributes = attributes
        # A copy of its own: the user's initial array stays the user's.
        self._array = _arrays.place(np.array(_arrays.to_host(value)), device)
        self._view = self._array.view()
        if not _arrays.is_device_array(self._array):
            self._view.flags.writeable = False
        registry = strategy.extended._registry
        registry.add((registry.next_key(), 0), self)

    # --- what it is -----------------------------------------------------------

    @property
    def name(self) -> str:
        """The name that was given, or "Variable"."""
        return self._attributes.name

    @property
    def trainable(self) -> bool:
        """What was given as ``trainable``."""
        return self._attributes.trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies are brought together."""
        return self._attributes.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How values that replicas assign are combined."""
        return self._attributes.aggregation

    @property
    def distribute_strategy(self) -> Strategy:
        """The strategy that it belongs to."""
        return self._strategy

    @property
    def device(self) -> str:
        """The device of this rank's copy."""
        name: str = self._strategy.extended._device_name
        return name

    @property
    def values(self) -> tuple[Any, ...]:
        """The copies that this process can see: its own, read-only.

        In ``merge_fn`` one for each replica; all are equal.
        """
        if _context.current().coordinator is not None:
            return (self._view,) * self._strategy.num_replicas_in_sync
        return (self._view,)

    def __repr__(self) -> str:
        return (
            f"<mpidist.Variable {self.name!r} shape={self.shape} "
            f"dtype={self.dtype.name}, value={np.array2string(self.numpy())}>"
        )

    __hash__ = object.__hash__

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"Variable {self.name!r} can not be pickled: it has a copy on each rank; "
            "write `variable.numpy()` for its value"
        )

    # --- reading --------------------------------------------------------------

    def _read(self) -> Any:
        return self._view

    def _as_component(self) -> Any:
        return self._view

    def _refuse_write(self, what: str) -> NoReturn:
        raise TypeError(
            f"`{what.format(x='variable')}` would change one copy of Variable "
            f"{self.name!r} only; write `variable.assign_add(value)`, `assign_sub` or "
            "`assign`, or `out = variable + value` for a new array"
        )

    def read_value(self) -> Any:
        """Return a copy of the value, an array on this replica's device."""
        return self._array.copy()

    # --- writing --------------------------------------------------------------

    def assign(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable | None:
        """Replace the value. Collective, except in the function of ``update``.

        Args:
            value: an array or number of this variable's shape; its dtype must be one
                that NumPy casts to the variable's without changing its kind.
            use_locking: taken and not used, as in TensorFlow 2.
            name: likewise.
            read_value: whether to return the variable.

        Returns:
            This variable, which acts as its new value; None without ``read_value``.

        Raises:
            ValueError: for another shape, for a dtype that does not fit, and in a
                replica context with aggregation NONE.
            CollectiveMismatchError: in cross-replica context, for a plain value that
                is not the same on all ranks.
        """
        return self._write("assign", value, read_value)

    def assign_add(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable | None:
        """Add to the value. Collective, and the rest, as `assign`."""
        return self._write("assign_add", value, read_value)

    def assign_sub(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable | None:
        """Subtract from the value. Collective, and the rest, as `assign`."""
        return self._write("assign_sub", value, read_value)

    def _write(self, how: Assignment, value: Any, read_value: bool) -> Variable | None:
        frame = _context.current()
        strategy = self._strategy
        in_force = _context.has_strategy()
        if in_force and frame.strategy is not strategy and strategy.extended._is_mpi:
            raise RuntimeError(
                f"Variable.{how}: Mixing different Strategy objects: Variable "
                f"{self.name!r} belongs to {strategy}, but {frame.strategy} is in "
                "force; make the variable in the scope of the strategy that uses it"
            )
        if not strategy.extended._is_mpi or frame.level is _context.Level.UPDATE:
            prepared = self._prepare(how, value)
            if frame.written is not None:
                frame.written.append(self)
            self._apply(how, prepared)
        elif frame.level is _context.Level.REPLICA and in_force:
            self._apply(how, self._aggregate(how, value))
        else:
            _dispatch.perform(strategy, "assign_variable", self, how, value)
        return self if read_value else None

    def _aggregate(self, how: Assignment, value: Any) -> Any:
        """Combine the values of all replicas. Collective."""
        call = self._call(how)
        aggregation = self.aggregation
        if aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"Variable {self.name!r}.{how}: You must specify an aggregation "
                "method to update a mirrored variable in a replica context, since each "
                "replica may have another value. Write `Variable(..., aggregation="
                "mpidist.VariableAggregation.MEAN)` (or SUM, or ONLY_FIRST_REPLICA), "
                "or assign in cross-replica context: after `strategy.run`, or in a "
                "`merge_call`"
            )
        collectives = self._strategy.extended._collectives
        try:
            prepared = self._prepare(how, value)
        except Exception as error:
            collectives.invalid(call, error)
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return collectives.broadcast(prepared, call=call)
        op = ReduceOp.from_variable_aggregation(aggregation)
        return collectives.all_reduce(op, prepared, call=call)

    def _call(self, how: str) -> str:
        # With the key: names need not be unique.
        return f"Variable {self.name!r}.{how} [#{self._key[0]}]"

    def _prepare(self, how: Assignment, value: Any) -> Any:
        """Return ``value`` as an array of this variable's dtype, shape and device."""
        call = f"Variable {self.name!r}.{how}"
        if isinstance(value, PerReplica):
            raise TypeError(
                f"{call}: got a PerReplica, which would make the copies differ; write "
                f"`variable.{how}(strategy.reduce(op, value, axis=None))`, or in "
                f"merge_fn `variable.{how}(strategy.extended.reduce_to(op, value, "
                "variable))`"
            )
        if isinstance(value, Mirrored):
            value = value._own
        if isinstance(value, ArrayLike):
            value = value._read()
        listed = isinstance(value, (list, tuple))
        x, kind = _arrays.as_array(np.asarray(value) if listed else value, call)
        if tuple(x.shape) != self.shape:
            raise ValueError(
                f"{call}: expected a value of shape {self.shape}, got "
                f"{_arrays.describe(x)}; write `numpy.full({self.shape}, value)` to "
                "spread a number over the array"
            )
        python_numbers = listed or kind == "number"
        if x.dtype != self.dtype and not _fits(x, self.dtype, python_numbers):
            raise ValueError(
                f"{call}: expected a value that fits into {self.dtype.name}, got "
                f"{_arrays.describe(x)}; write `value.astype({self.dtype.name!r})`"
            )
        if x.dtype != self.dtype:
            x = x.astype(self.dtype)
        if _arrays.is_device_array(x) != _arrays.is_device_array(self._array):
            x = _arrays.place(
                _arrays.to_host(x), self._strategy.extended._collectives.device
            )
        return x

    def _apply(self, how: Assignment, value: Any) -> None:
        if how == "assign":
            self._array[...] = value
        elif how == "assign_add":
            np.add(self._array, value, out=self._array)
        else:
            np.subtract(self._array, value, out=self._array)


@_dispatch.verb("create_variable")
def _create_variable(
    strategy: Strategy, value: Any, attributes: _Attributes
) -> Variable:
    variable = Variable.__new__(Variable)
    variable._set_up(strategy, value, attributes)
    return variable


@_dispatch.verb("assign_variable")
def _assign_variable(
    strategy: Strategy, variable: Variable, how: Assignment, value: Any
) -> None:
    """Assign a value that is the same on all ranks, and see that it is."""
    collectives = strategy.extended._collectives
    call = variable._call(how)
    try:
        prepared = variable._prepare(how, value)
    except Exception as error:
        collectives.invalid(call, error)
    text = f"{call} {_arrays.describe(prepared)}"
    trusted = isinstance(value, (Mirrored, Variable)) and value._key is not None
    if collectives.guard.checks and not trusted:
        text += f" = {_arrays.summarize(prepared)}"
    collectives.guard.agree(Call(text))
    variable._apply(how, prepared)


def _fits(x: Any, dtype: Any, python_numbers: bool) -> bool:
    """Return whether values may be cast: to the same kind of dtype, or a wider one.

    Integers that were written as Python numbers must be in the dtype's range.
    """
    if _arrays.is_bfloat16(dtype):
        return x.dtype.kind in "biuf"
    if python_numbers and x.dtype.kind in "iu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return bool(((x >= limits.min) & (x <= limits.max)).all())
    order = "biufc"
    return bool(
        np.can_cast(x.dtype, dtype, "same_kind")
        or order.find(x.dtype.kind) < order.find(dtype.kind)
    )


def _check_attributes(
    trainable: object, name: object, synchronization: object, aggregation: object
) -> _Attributes:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"Variable: expected `name` to be a str, got {name!r}")
    if not isinstance(synchronization, VariableSynchronization):
        raise ValueError(
            "Variable: expected `synchronization` to be a `mpidist."
            f"VariableSynchronization`, got {synchronization!r}"
        )
    if not isinstance(aggregation, VariableAggregation):
        raise ValueError(
            "Variable: expected `aggregation` to be a `mpidist.VariableAggregation`, "
            f"got {aggregation!r}"
        )
    name = name or "Variable"
    if synchronization is VariableSynchronization.NONE:
        raise ValueError(
            f"Variable {name!r}: `NONE` variable synchronization mode is not "
            "supported; write AUTO or ON_WRITE"
        )
    if synchronization is VariableSynchronization.ON_READ:
        raise ValueError(
            f"Variable {name!r}: ON_READ variables are not in this version; keep the "
            "value in a plain array of each replica, and reduce it when you read it"
        )
    return _Attributes(
        name=name,
        trainable=True if trainable is None else bool(trainable),
        synchronization=VariableSynchronization.ON_WRITE,
        aggregation=aggregation,
    )


def _initial_array(
    initial_value: Any, dtype: Any, shape: Any, attributes: _Attributes
) -> Any:
    call = f"Variable {attributes.name!r}"
    value = initial_value() if callable(initial_value) else initial_value
    if isinstance(value, PerReplica):
        raise TypeError(
            f"{call}: got a PerReplica as initial value; write `strategy.reduce(op, "
            "value, axis=None)` or one array"
        )
    if isinstance(value, Mirrored):
        value = value._own
    if isinstance(value, ArrayLike):
        value = value._read()
    if isinstance(value, (list, tuple)):
        value = np.asarray(value)
    x, _ = _arrays.as_array(value, call)
    x = x if dtype is None else x.astype(dtype)
    _arrays.check_dtype(x.dtype, call)
    if shape is not None and tuple(x.shape) != tuple(shape):
        raise ValueError(
            f"{call}: expected an initial value of shape {tuple(shape)}, got "
            f"{_arrays.describe(x)}"
        )
    floating = x.dtype.kind in "fc" or _arrays.is_bfloat16(x.dtype)
    if attributes.aggregation is VariableAggregation.MEAN and not floating:
        raise ValueError(
            f"{call}: aggregation=MEAN of dtype {x.dtype.name}, which is not floating, "
            "is not supported; write dtype=float, or another aggregation"
        )
    return x
