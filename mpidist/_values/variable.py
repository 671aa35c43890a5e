"""Variables: an array with a copy on each replica."""

from __future__ import annotations

import dataclasses
import enum
import weakref
from typing import Any, Literal, NoReturn

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._base import backend
from mpidist._base.indexed_slices import Scatter
from mpidist._base.options import VariableAggregation, VariableSynchronization
from mpidist._runtime import context, dispatch
from mpidist._runtime.dispatch import OnRank0
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.distributed import ArrayLike, Mirrored, PerReplica
from mpidist._values.storage import Attributes, VariableStorage
from mpidist._values.synchronization import ON_READ, ON_WRITE

Assignment = Literal["assign", "assign_add", "assign_sub"]


@dataclasses.dataclass(frozen=True)
class _Given:
    """Data that all ranks have for a variable; an initial value for `Variable`."""

    group: ReplicaGroup
    value: Any
    attributes: Attributes


class Variable(VariableStorage):
    """An array with a copy on each replica.

    A variable created in ``strategy.scope()`` or in a replica function has a copy on
    each replica: rank 0 computes the initial value and sends it to all. Outside every
    scope it is a plain variable with one copy. It acts as an array in arithmetic and in
    NumPy and CuPy functions; results are plain arrays. The address of its array never
    changes.

    Only `assign`, `assign_add`, `assign_sub` and the `scatter_add` family change it.
    Their effect, and the result of reading, depend on ``synchronization``.

    ON_WRITE, the default: a *mirrored* variable, whose copies are always equal. Reading
    it needs no communication.

    - In a replica context the values of all replicas are first combined according to
      ``aggregation`` (the argument is combined, then the operation is applied to every
      copy). With NONE this is an error.
    - In cross-replica context the value must be the same on all ranks. A `Mirrored`
      always is; a plain value is checked by checksum, unless the guard is off.
    - In the function of ``strategy.extended.update`` each copy is assigned its own
      value.

    ON_READ: a *sync-on-read* variable, such as a metric: each replica has its own
    value.

    - In a replica context reading and assigning use the replica's own copy, without
      communication.
    - In cross-replica context reading it (`value`, `numpy`, operators, ...) is a
      collective call that combines the copies according to ``aggregation``: the sum,
      the mean, or replica 0's. With NONE this is an error.
    - In cross-replica context, reading after `assign` returns the assigned value: with
      SUM each copy gets ``value / n`` (integers are split into shares that add up
      exactly), otherwise ``value``. With SUM, `assign_add` and `assign_sub` change only
      replica 0's copy, so that the sum changes by the value; otherwise they change all
      copies.

    Collective: all replicas create a variable together, in the same order.

    Args:
        initial_value: an array, number or list, or a function that returns one.
            Only rank 0's is used, and only rank 0 calls the function.
        trainable: stored for the user; default True, but False for ON_READ.
        name: for messages.
        dtype: the dtype of the array; default: that of the initial value.
        synchronization: ON_WRITE, ON_READ or AUTO (the same as ON_WRITE); or its name.
        aggregation: how the replicas' values are combined; or its name.
        shape: the required shape of the initial value, if given.

    Raises:
        ValueError: for MEAN of a dtype that is not floating-point, SUM of bool, an
            unsupported synchronization, or an initial value of another shape.
        TypeError: if the initial value is not an array.
    """

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
        """Compute the initial value on rank 0 and copy it to all ranks. Collective."""
        if type(initial_value) is _Given:  # from the operations below
            self._set_up(initial_value)
            return
        frame = context.current()
        group = frame.group
        collectives = group.collectives
        try:
            attributes = _check_attributes(
                trainable, name, synchronization, aggregation
            )
            if isinstance(initial_value, Variable):
                # On all ranks, if it is ON_READ.
                initial_value = initial_value._read()
        except Exception as error:
            if frame.coordinator is not None:
                raise
            collectives.invalid("Variable(...)", error)

        def make() -> Any:
            return _initial_array(initial_value, dtype, shape, attributes)

        if frame.coordinator is not None:
            arguments = (make(), attributes, OnRank0(self))
            frame.coordinator.command("create_variable", arguments)
            registry = group.registry
            weakref.finalize(self, registry.dropped.append, self._key)
            return
        text = f"{attributes}, dtype={dtype}, shape={shape}"
        (value,) = collectives.share(lambda: [make()], text)
        self._set_up(_Given(group, value, attributes))

    def _set_up(self, given: _Given) -> None:
        """Create this rank's copy, and draw the key."""
        group, attributes = given.group, given.attributes
        device = group.collectives.device
        self._group = group
        self._attributes = attributes
        on_read = attributes.synchronization is VariableSynchronization.ON_READ
        self._policy = ON_READ if on_read else ON_WRITE
        # A separate copy: the user keeps the initial array. In C order on all ranks,
        # because the last bits of a sum, for example, depend on the order.
        host = np.array(backend.to_host(given.value), order="C")
        self._array = backend.place(host, device)
        self._view = self._array.view()
        if not backend.is_device_array(self._array):
            self._view.flags.writeable = False
        self._fingerprinter = backend.fingerprinter(self._array)
        registry = group.registry
        registry.add((registry.next_key(), 0), self)

    # --- properties -----------------------------------------------------------

    @property
    def distribute_strategy(self) -> Any:
        """The strategy that the variable belongs to."""
        return self._group.strategy

    @property
    def values(self) -> tuple[Any, ...]:
        """The copies that this process can see: its own, read-only.

        In ``merge_fn`` one for each replica; for an ON_READ variable this gathers them
        from their ranks.
        """
        coordinator = context.current().coordinator
        if coordinator is None:
            return (self._view,)
        if self._policy is ON_WRITE or not self._group.is_mpi:
            return (self._view,) * self._group.num_replicas
        (column,) = coordinator.command("collect", ([self],))
        for x in column[1:]:
            if not backend.is_device_array(x):
                x.flags.writeable = False
        return (self._view, *column[1:])

    def is_initialized(self) -> bool:
        """Return True: a variable is initialized when created. Not collective."""
        return True

    def __repr__(self) -> str:
        # This replica's copy: printing must not communicate.
        host = np.array(backend.to_host(self._view))
        kind, whose = "", ""
        if self._policy is ON_READ:
            kind = f" ON_READ {self.aggregation.name}"
            whose = f" on replica {self._group.replica_id}"
        return (
            f"<mpidist.Variable {self.name!r}{kind} shape={self.shape} "
            f"dtype={self.dtype.name}, value{whose}={np.array2string(host)}>"
        )

    def __format__(self, spec: str) -> str:
        return format(self._read(), spec) if spec else str(self)

    __hash__ = object.__hash__

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"Variable {self.name!r} cannot be pickled: it has a copy on each rank; "
            "write `variable.numpy()` for its value"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """Return a new variable with the same copies. Collective."""
        arguments = (self, f"deepcopy of {self._call('value')}")
        group = self._group
        if not group.is_mpi:  # with one copy, so it can be created anywhere
            copied = dispatch.execute(group, "copy_variable", arguments)
            memo[id(self)] = copied
            return copied  # type: ignore[no-any-return]
        copied = dispatch.perform(
            group, "copy_variable", *arguments, call="copy.deepcopy"
        )
        if context.current().coordinator is not None:
            registry = group.registry
            weakref.finalize(copied, registry.dropped.append, copied._key)
        memo[id(self)] = copied
        return copied  # type: ignore[no-any-return]

    # --- reading --------------------------------------------------------------

    def _read(self) -> Any:
        if self._policy is ON_WRITE:
            return self._view
        return ON_READ.read(self, self._check_frame("reading"))

    def _as_component(self) -> Any:
        return self._view

    def _refuse_write(self, what: str) -> NoReturn:
        raise TypeError(
            f"`{what.format(x='variable')}` would change one copy of Variable "
            f"{self.name!r} only; write `variable.assign_add(value)`, `assign_sub` or "
            "`assign`, or `out = variable + value` for a new array"
        )

    def read_value(self) -> Any:
        """Return a copy of the value, an array on this replica's device.

        For an ON_READ variable in cross-replica context the combined copies; this is
        then a collective call.
        """
        return self._read().copy()

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
            value: an array or number of this variable's shape; NumPy must be able to
                cast its dtype to the variable's with same-kind casting.
            use_locking: accepted and ignored, as in TensorFlow 2.
            name: accepted and ignored, as in TensorFlow 2.
            read_value: whether to return the variable.

        Returns:
            This variable, which acts as its new value; None without ``read_value``.

        Raises:
            ValueError: if the shape or dtype does not match, and in a replica context
                with aggregation NONE.
            CollectiveMismatchError: in cross-replica context, if a plain value is not
                the same on all ranks.
        """
        return self._write("assign", value, read_value)

    def assign_add(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable | None:
        """Add to the value. Collective; arguments and errors as for `assign`."""
        return self._write("assign_add", value, read_value)

    def assign_sub(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable | None:
        """Subtract from the value. Collective; arguments and errors as for `assign`."""
        return self._write("assign_sub", value, read_value)

    def scatter_add(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Add rows to rows. Collective, except in the function of ``update``.

        In a replica context the rows of all replicas are first combined according to
        the aggregation: SUM applies the rows of all replicas; MEAN does too, each
        divided by the number of replicas; ONLY_FIRST_REPLICA applies replica 0's. The
        replicas may have different numbers of rows. A row that occurs several times is
        applied several times.

        Args:
            sparse_delta: an `IndexedSlices` whose rows have the shape of this
                variable's rows. In cross-replica context it must be the same on all
                ranks.
            use_locking: accepted and ignored, as in TensorFlow 2.
            name: accepted and ignored, as in TensorFlow 2.

        Returns:
            This variable.

        Raises:
            ValueError: if an index is out of range, or the rows' shape or dtype does
                not match, and in a replica context with aggregation NONE.
            TypeError: if it is not an `IndexedSlices`.
            NotImplementedError: for an ON_READ variable.
            CollectiveMismatchError: in cross-replica context, if the rows are not the
                same on all ranks.
        """
        return self._scatter("add", sparse_delta)

    def scatter_sub(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Subtract from rows. Collective; arguments and errors as for `scatter_add`."""
        return self._scatter("sub", sparse_delta)

    def scatter_mul(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Multiply rows. Collective; arguments and errors as for `scatter_add`."""
        return self._scatter("mul", sparse_delta)

    def scatter_div(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Divide rows. Collective; arguments and errors as for `scatter_add`.

        Raises a ValueError for integers.
        """
        return self._scatter("div", sparse_delta)

    def scatter_min(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Set rows to the elementwise minimum. Collective, like `scatter_add`.

        Only for aggregation NONE and ONLY_FIRST_REPLICA; otherwise it raises
        NotImplementedError, as in TensorFlow: a sum or mean of the replicas' bounds is
        not a bound.
        """
        return self._scatter("min", sparse_delta)

    def scatter_max(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Set rows to the elementwise maximum. Collective, like `scatter_min`."""
        return self._scatter("max", sparse_delta)

    def scatter_update(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Replace rows. Collective, like `scatter_min`.

        If a row occurs several times, the last value is used.
        """
        return self._scatter("update", sparse_delta)

    def _check_frame(self, how: str) -> context.Frame | None:
        """Return the frame that applies to a call; None if only this copy matters."""
        frame = context.current()
        group = self._group
        if not group.is_mpi:
            self._check_plain(how, frame)
            return None
        if frame.group is not group and context.has_strategy():
            raise RuntimeError(
                f"Variable.{how}: Mixing different Strategy objects: Variable "
                f"{self.name!r} belongs to {group}, but {frame.group} is in "
                "force; make the variable in the scope of the strategy that uses it"
            )
        if frame.level is context.Level.UPDATE:
            return None
        return frame

    def _check_plain(self, how: str, frame: context.Frame) -> None:
        """Raise if replicas write a variable that was created outside the scope."""
        if (
            how != "reading"
            and frame.level is context.Level.REPLICA
            and frame.group.num_replicas > 1
            and self.aggregation is not VariableAggregation.NONE
        ):
            raise RuntimeError(
                f"Variable {self.name!r}.{how}: this variable was made outside every "
                "scope, so each process has one of its own, and nothing would combine "
                f"the replicas' values by {self.aggregation.name}; make it in `with "
                "strategy.scope():`, or with aggregation=NONE if each process is to "
                "have its own"
            )

    def _write(self, how: Assignment, value: Any, read_value: bool) -> Variable | None:
        frame = self._check_frame(how)
        if frame is None:
            prepared = self._prepare(how, value)
            self._record()
            self._apply(how, prepared)
        elif frame.level is context.Level.REPLICA and context.has_strategy():
            self._policy.write(self, how, value)
        else:
            dispatch.perform(self._group, "assign_variable", self, how, value)
        return self if read_value else None

    def _scatter(self, how: Scatter, value: Any) -> Variable:
        call = f"scatter_{how}"
        frame = self._check_frame(call)
        if self._policy is ON_READ:
            ON_READ.scatter(self, how, value)
        combining = (VariableAggregation.SUM, VariableAggregation.MEAN)
        if how in ("min", "max", "update") and self.aggregation in combining:
            raise NotImplementedError(
                f"Variable {self.name!r}.{call}: not for aggregation="
                f"{self.aggregation.name}; make the variable with aggregation=NONE "
                "(and write in cross-replica context) or ONLY_FIRST_REPLICA"
            )
        if frame is None:
            indices, rows = self._prepare_slices(how, value)
            self._record()
            self._apply_slices(how, indices, rows)
        elif frame.level is context.Level.REPLICA and context.has_strategy():
            self._policy.scatter(self, how, value)
        else:
            dispatch.perform(self._group, "scatter_variable", self, how, value)
        return self

    def _record(self) -> None:
        """Tell the running update, if any, that this copy is written."""
        frame = context.current()
        mirrored = self._policy is ON_WRITE
        if frame.written is not None and mirrored and frame.group is self._group:
            frame.written.append(self)


@dispatch.operation("create_variable")
def _create_variable(
    group: ReplicaGroup, value: Any, attributes: Attributes, marked: OnRank0
) -> Variable:
    """Create the variable that merge_fn creates.

    Args:
        group: the group that it belongs to.
        value: the initial array.
        attributes: its attributes.
        marked: on rank 0 the variable whose constructor runs; unused on the others.
    """
    given = _Given(group, value, attributes)
    variable: Variable | None = marked.value
    if variable is None:
        return Variable(given)
    variable._set_up(given)
    return variable


@dispatch.operation("copy_variable")
def _copy_variable(group: ReplicaGroup, variable: Variable, text: str) -> Variable:
    group.guard.agree(Call(text))
    return Variable(_Given(group, variable._array, variable._attributes))


def _member(kind: type[enum.Enum], value: object) -> object:
    """Return the member of an enumeration for a name (case-insensitive)."""
    if isinstance(value, str):
        return kind.__members__.get(value.upper(), value)
    return value


def _check_attributes(
    trainable: object, name: object, synchronization: object, aggregation: object
) -> Attributes:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"Variable: expected `name` to be a str, got {name!r}")
    synchronization = _member(VariableSynchronization, synchronization)
    aggregation = _member(VariableAggregation, aggregation)
    if not isinstance(synchronization, VariableSynchronization):
        raise ValueError(
            "Variable: expected `synchronization` to be a `mpidist."
            f"VariableSynchronization` (AUTO, ON_WRITE or ON_READ), got "
            f"{synchronization!r}"
        )
    if not isinstance(aggregation, VariableAggregation):
        raise ValueError(
            "Variable: expected `aggregation` to be a `mpidist.VariableAggregation` "
            f"(NONE, SUM, MEAN or ONLY_FIRST_REPLICA), got {aggregation!r}"
        )
    name = name or "Variable"
    if synchronization is VariableSynchronization.NONE:
        raise ValueError(
            f"Variable {name!r}: `NONE` variable synchronization mode is not "
            "supported; write AUTO, ON_WRITE or ON_READ"
        )
    on_read = synchronization is VariableSynchronization.ON_READ
    return Attributes(
        name=name,
        trainable=not on_read if trainable is None else bool(trainable),
        synchronization=(
            synchronization if on_read else VariableSynchronization.ON_WRITE
        ),
        aggregation=aggregation,
    )


def _initial_array(
    initial_value: Any, dtype: Any, shape: Any, attributes: Attributes
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
    x, _ = backend.as_array(value, call)
    x = x if dtype is None else x.astype(dtype)
    backend.check_dtype(x.dtype, call)
    if shape is not None and tuple(x.shape) != tuple(shape):
        raise ValueError(
            f"{call}: expected an initial value of shape {tuple(shape)}, got "
            f"{backend.describe(x)}"
        )
    floating = x.dtype.kind in "fc" or backend.is_bfloat16(x.dtype)
    if attributes.aggregation is VariableAggregation.MEAN and not floating:
        raise ValueError(
            f"{call}: aggregation=MEAN of dtype {x.dtype.name}, which is not floating, "
            "is not supported; write dtype=float, or another aggregation"
        )
    if attributes.aggregation is VariableAggregation.SUM and x.dtype.kind == "b":
        raise ValueError(
            f"{call}: aggregation=SUM of bool is not defined; write dtype=int to "
            "count, or another aggregation"
        )
    return x


def check_owner(group: ReplicaGroup, call: str, variable: Variable) -> None:
    """Raise if a variable belongs to another group.

    Raises:
        RuntimeError: if it does.
    """
    if variable._group is not group:
        raise RuntimeError(
            f"{call}: Mixing different Strategy objects: {variable!r} belongs to "
            f"{variable._group}, not to {group}"
        )
