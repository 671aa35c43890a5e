"""Variables: an array with a copy on each replica, and what all ranks do with it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import DTypeLike

from mpidist._agreement.mismatch import Call
from mpidist._base import backend, checksums, threads
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.remedies import explain_keywords
from mpidist._base.types import Array, DType, Nest, Shape
from mpidist._base.variable_enums import VariableAggregation, VariableSynchronization
from mpidist._mpi import library
from mpidist._runtime import context, dispatch, interruptions
from mpidist._runtime.dispatch import OnRank0
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import Registered, home_of, key_of
from mpidist._values.arguments import Attributes, check_attributes, initial_array
from mpidist._values.array_like import ArrayLike
from mpidist._values.creators import by_creators
from mpidist._values.distributed import Mirrored, Seen, components_of, readers, sees_all
from mpidist._values.storage import DividedStorage, OnReadStorage, Part, VariableStorage

_OF_MEMORY: Final = frozenset(("itemsize", "nbytes", "strides"))
_ODD: Final = 0x9E3779B97F4A7C15  # spreads numbers, and gives each another one


class Variable(ArrayLike, Registered):
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
      the mean, or replica 0's. With NONE this is an error. Each copy begins with the
      initial value: with SUM, n replicas read n times that.
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
        name: for messages; without the ":0" of TensorFlow.
        dtype: the dtype of the array; default: that of the initial value.
        synchronization: ON_WRITE, ON_READ or AUTO (the same as ON_WRITE); or its name.
        aggregation: how the replicas' values are combined; or its name.
        shape: the required shape of the initial value, if given.

    Raises:
        ValueError: for MEAN of an integer dtype or bool, SUM of bool, an unsupported
            synchronization, or an initial value of another shape, or of integers beyond
            those of ``dtype``.
        TypeError: if the initial value is not an array.

    Example, on two replicas::

        with strategy.scope():
            total = mpidist.Variable(np.zeros(2), aggregation="SUM")


        def replica_fn():
            total.assign_add([1.0, 2.0])
            return total * 10.0  # array([20., 40.])


        strategy.run(replica_fn)
        total.numpy()  # array([2., 4.])
    """

    _storage: VariableStorage
    _hash: int = 0

    @interruptions.tells("Variable(...)", lambda _: context.current().group)
    @explain_keywords("Variable")
    @by_creators
    def __init__(
        self,
        initial_value: Nest,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: DTypeLike | None = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
        shape: Shape | None = None,
    ) -> None:
        """Compute the initial value on rank 0 and copy it to all ranks. Collective."""
        frame = context.current()
        group = frame.group
        collectives = group.collectives
        if not group.is_mpi and threads.current() is None:
            library.warn_of_copies()
        with dispatch.checking(group, "Variable(...)"):
            attributes = check_attributes(trainable, name, synchronization, aggregation)
            if isinstance(initial_value, Variable):
                # On all ranks, if it is ON_READ.
                initial_value = initial_value.value()

        def make() -> Array:
            return initial_array(initial_value, dtype, shape, attributes)

        if frame.coordinator is not None:
            arguments = (make(), attributes, OnRank0(self))
            frame.coordinator.command("create_variable", arguments)
            self._note_dropped()
            return
        text = f"{attributes}, {dtype=!s}, {shape=!s}, trainable={attributes.trainable}"
        (value,) = collectives.share(lambda: [make()], text)
        set_up(self, group, value, attributes)

    # --- properties -----------------------------------------------------------

    @property
    def name(self) -> str:
        """The given name, or "Variable"."""
        return self._storage.attributes.name

    @property
    def trainable(self) -> bool:
        """The value of the argument ``trainable``."""
        return self._storage.attributes.trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies are combined: ON_WRITE or ON_READ."""
        return self._storage.attributes.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """The operation that combines the values of replicas."""
        return self._storage.attributes.aggregation

    @property
    def device(self) -> str:
        """The device of this rank's copy."""
        return self._storage.group.device_name

    @property
    def shape(self) -> Shape:
        """Shape of the array."""
        return self._storage.shape

    @property
    def dtype(self) -> DType:
        """Dtype of the array."""
        return self._storage.array.dtype

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name}: a variable of shape () has no len()")
        return self.shape[0]

    @property
    def distribute_strategy(self) -> Any:
        """The strategy that the variable belongs to."""
        # `Any`, since the class is defined in a room above. A protocol of a few of its
        # members would make type checkers reject the others.
        return self._storage.group.strategy

    @property
    @interruptions.tells("values", lambda self: readers(self._storage.group.registry))
    def values(self) -> tuple[Array, ...]:
        """The copies that this process can see: its own, read-only.

        In ``merge_fn``, and of a `mpidist.MirroredStrategy`, one for each replica.
        There, and only there, reading ``values`` of an ON_READ variable communicates:
        it gathers the copies from their ranks.
        """
        return components_of([self])[0]

    def _seen(self, frame: context.Frame) -> Seen:
        storage = self._storage
        group, view = storage.group, storage.view
        if storage.on_read and group.is_mpi:
            several = sees_all(group.registry, frame)
            return (group, view) if several else (None, (view,))
        several = frame.coordinator is not None or group.registry.shows_all
        return None, (view,) * (group.num_replicas if several else 1)

    def ref(self) -> Reference:
        """Return a key for dicts and sets, whose ``deref()`` is this variable.

        The variable itself is such a key, too. Not collective.
        """
        return Reference(self)

    def is_initialized(self) -> bool:
        """Return True: a variable is initialized when created. Not collective."""
        return True

    def __repr__(self) -> str:
        # This replica's copy: printing must not communicate.
        storage = self._storage
        host = np.array(backend.to_host(storage.view))
        kind, whose = "", ""
        if storage.on_read:
            kind = f" ON_READ {self.aggregation.name}"
            whose = f" on replica {storage.group.replica_id}"
        return (
            f"<mpidist.Variable {self.name!r}{kind} shape={self.shape} "
            f"dtype={self.dtype.name}, value{whose}={np.array2string(host)}>"
        )

    def __hash__(self) -> int:
        # The same on all ranks, so that they go through a set in the same order.
        return self._hash

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"Variable {self.name!r} cannot be pickled: it has a copy on each rank; "
            "write `variable.numpy()` for its value"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """Return a new variable with the same copies. Collective."""
        storage = self._storage
        group = storage.group
        arguments = (self, f"deepcopy of {storage.describe_call('value')}")
        copied: Variable
        if not group.is_mpi:  # with one copy, so it can be created anywhere
            copied = dispatch.execute(group, "copy_variable", arguments)
        else:
            copied = dispatch.perform(
                group, "copy_variable", *arguments, call="copy.deepcopy"
            )
            if context.current().coordinator is not None:
                copied._note_dropped()
        memo[id(self)] = copied
        return copied

    def _note_dropped(self) -> None:
        """Tell the other ranks when rank 0 drops this variable, made in merge_fn."""
        registry = self._storage.group.registry
        registry.watch(self, registry.dropped)

    # --- reading --------------------------------------------------------------

    def value(self) -> Any:
        """Return the array itself, without a copy.

        Not collective, except for an ON_READ variable in cross-replica context, where
        it is a new array: the combined copies.

        A NumPy array is read-only. A CuPy array cannot be: do not write to it.
        """
        try:
            storage = self._storage
            if not storage.on_read:
                return storage.view
            frame = context.current()
            if self._is_local("reading", frame):
                return storage.view
            is_inside = frame.group is storage.group  # not outside every scope
            if frame.level is not context.Level.REPLICA or not is_inside:
                storage.attributes.require_readable()
                return dispatch.perform(storage.group, "read_variable", self)
            if frame.sync_on_read:
                storage.attributes.require_readable()
                return storage.read()
            return storage.view
        except BaseException as error:
            interruptions.left(self._storage.group, "Variable.value", error)
            raise

    def __getattr__(self, name: str) -> Any:
        if name in _OF_MEMORY:  # without combining the copies of an ON_READ variable
            return getattr(self._storage.array, name)
        return super().__getattr__(name)

    def _as_component(self) -> Array:
        return self._storage.component()

    def _refuse_write(self, what: str) -> NoReturn:
        instead = (
            "`variable.assign_add(value)`, `assign_sub` or `assign`, or `out = "
            "variable + value` for a new array"
        )
        if "[" in what:
            instead = (
                "`new = variable.numpy()`, `new[1:3] = value`, `variable.assign(new)`"
            )
        raise TypeError(
            f"`{what.format(x='variable')}` would change one copy of Variable "
            f"{self.name!r} only; write {instead}"
        )

    def read_value(self) -> Any:
        """Return a copy of the value, an array on this replica's device.

        For an ON_READ variable in cross-replica context the combined copies; this is
        then a collective call.
        """
        return self.value().copy()

    # --- writing --------------------------------------------------------------

    def assign(
        self,
        value: Nest,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable | Any:
        """Replace the value. Collective, except in the function of ``update``.

        Args:
            value: an array or number of this variable's shape. Its dtype is of the same
                kind as the variable's or of a narrower one (bool, integer, floating,
                complex), and its integers are in the range of an integer variable.
            use_locking: accepted and ignored, as in TensorFlow 2.
            name: accepted and ignored, as in TensorFlow 2.
            read_value: whether to return the variable.

        Returns:
            This variable, which acts as its new value; None without ``read_value``
            (``Any`` for type checkers, so that no test for None is needed).

        Raises:
            ValueError: if the shape or dtype does not match; in a replica context also
                if the replicas' values differ and the aggregation is NONE.
            CollectiveMismatchError: in cross-replica context, if a plain value is not
                the same on all ranks.
        """
        return self._write("assign", value, read_value)

    def assign_add(
        self,
        value: Nest,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable | Any:
        """Add to the value. Collective; arguments and errors as for `assign`."""
        return self._write("assign_add", value, read_value)

    def assign_sub(
        self,
        value: Nest,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable | Any:
        """Subtract from the value. Collective; arguments and errors as for `assign`."""
        return self._write("assign_sub", value, read_value)

    def scatter_add(
        self, sparse_delta: Nest, use_locking: bool = False, name: str | None = None
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
                not match; in a replica context also if the replicas' rows differ and
                the aggregation is NONE.
            TypeError: if it is not an `IndexedSlices`.
            NotImplementedError: for an ON_READ variable.
            CollectiveMismatchError: in cross-replica context, if the rows are not the
                same on all ranks.
        """
        return self._write("scatter_add", sparse_delta)

    def scatter_sub(
        self, sparse_delta: Nest, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Subtract from rows. Collective; arguments and errors as for `scatter_add`."""
        return self._write("scatter_sub", sparse_delta)

    def scatter_mul(
        self, sparse_delta: Nest, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Multiply rows. Collective; arguments and errors as for `scatter_add`."""
        return self._write("scatter_mul", sparse_delta)

    def scatter_div(
        self, sparse_delta: Nest, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Divide rows. Collective; arguments and errors as for `scatter_add`.

        Quotients of integers are rounded towards 0; 0 as a divisor is a ValueError.
        """
        return self._write("scatter_div", sparse_delta)

    def scatter_min(
        self, sparse_delta: Nest, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Set rows to the elementwise minimum. Collective, like `scatter_add`.

        Only for aggregation NONE and ONLY_FIRST_REPLICA; otherwise it raises
        NotImplementedError, as in TensorFlow: a sum or mean of the replicas' bounds is
        not a bound.
        """
        return self._write("scatter_min", sparse_delta)

    def scatter_max(
        self, sparse_delta: Nest, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Set rows to the elementwise maximum. Collective, like `scatter_min`."""
        return self._write("scatter_max", sparse_delta)

    def scatter_update(
        self, sparse_delta: Nest, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Replace rows. Collective, like `scatter_min`.

        If a row occurs several times, the last value is used.
        """
        return self._write("scatter_update", sparse_delta)

    def _is_local(self, how: str, frame: context.Frame) -> bool:
        """Return whether a call concerns only this copy; raise if it is not legal."""
        group = self._storage.group
        if not group.is_mpi:
            if how != "reading":
                self._storage.attributes.check_plain_write(how, frame)
            return True
        if frame.group is not group and context.has_strategy():
            raise RuntimeError(
                f"Variable.{how}: Mixing different Strategy objects: Variable "
                f"{self.name!r} belongs to {group}, but {frame.group} is the "
                "current strategy; make the variable in the scope of the strategy that "
                "uses it"
            )
        return frame.level is context.Level.UPDATE

    def _write(self, how: str, value: Nest, read_value: bool = True) -> Variable | Any:
        try:
            frame, storage = context.current(), self._storage
            is_local = self._is_local(how, frame)
            if how.startswith("scatter"):
                storage.attributes.check_scatter(how)
            if is_local:
                prepared = storage.prepare(how, value)
                batch, mirrored = frame.batch, not storage.on_read
                if batch is not None and mirrored and frame.group is storage.group:
                    batch.will_write(self)
                storage.apply(how, prepared)
            elif frame.level is context.Level.REPLICA and frame.group is storage.group:
                storage.write(how, value)
            else:
                dispatch.perform(storage.group, "assign_variable", self, how, value)
        except BaseException as error:
            interruptions.left(self._storage.group, f"Variable.{how}", error)
            raise
        return self if read_value else None


class Reference:
    """What `Variable.ref` returns: equal to another one of the same variable."""

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def deref(self) -> Variable:
        """Return the variable."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Reference):
            return self._variable is other._variable
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._variable)  # the same on all ranks

    def __repr__(self) -> str:
        return f"<Reference to {self._variable!r}>"


storage_of: Final[Callable[[Variable], VariableStorage]] = operator.attrgetter(
    "_storage"
)
"""Return the storage of a variable: for other rooms. Not a method, since all names of a
`Variable` are for users."""


# Replicas that are threads have variables of the same keys in one process.
_replicas: Final[threads.ReplicaLocal[int]] = threads.ReplicaLocal(
    itertools.count(1).__next__
)


def _hash_of(group: ReplicaGroup, key: tuple[int, int]) -> int:
    """Return a number that no other variable has, whose last 40 bits all ranks have.

    These depend on the key alone: one rank may have made more strategies than another.
    """
    replica = 0 if threads.current() is None else _replicas.get()
    own = (group.number + (replica << 10)) % 2**20
    return own << 40 | key[0] * _ODD % 2**40


def set_up(
    variable: Variable | None,
    group: ReplicaGroup,
    value: Array,
    attributes: Attributes,
    part: Part | None = None,
) -> Variable:
    """Create this rank's copy of a variable whose data all ranks have; draw its key.

    Args:
        variable: whose constructor runs; None: a new one.
        group: the replicas.
        value: the data, in an array that is taken.
        attributes: of the variable.
        part: which elements they are, if each rank has others; None: all.
    """
    if variable is None:
        variable = Variable.__new__(Variable)
    with group.guard.payload():  # the other ranks have it, and count it
        if part is not None:
            variable._storage = DividedStorage(group, attributes, value, part)
        elif attributes.on_read:
            variable._storage = OnReadStorage(group, attributes, value)
        else:
            variable._storage = VariableStorage(group, attributes, value)
        variable._storage.key = key = (group.registry.next_key(), 0)
        variable._hash = variable._hash or _hash_of(group, key)
        group.registry.add(key, variable)
    for note in when_made:
        note(variable._storage)
    return variable


when_made: Final[list[Callable[[VariableStorage], None]]] = []
"""Called with each new variable: `_checkpoints/restore` notes its first value."""


array_of: Final[Callable[[Variable], Array]] = operator.attrgetter("_storage.array")
"""Return this rank's copy of a variable, for changing it in place.

Use it only for changes that are identical on all ranks."""


def is_same(group: ReplicaGroup, value: Nest) -> bool:
    """Return whether a value is known to be the same on all ranks of a group."""
    if isinstance(value, Mirrored):
        return key_of(value) is not None and home_of(value) is group.registry
    if not isinstance(value, Variable):
        return False
    storage = storage_of(value)
    return storage.group is group and group.is_mpi and not storage.on_read


# --- operations -----------------------------------------------------------------------


@dispatch.operation("create_variable")
def _create_variable(
    group: ReplicaGroup, value: Array, attributes: Attributes, marked: OnRank0
) -> Variable:
    """Create the variable that merge_fn creates.

    Args:
        group: the group that it belongs to.
        value: the initial array.
        attributes: its attributes.
        marked: on rank 0 the variable whose constructor runs; unused on the others.
    """
    return set_up(marked.value, group, value, attributes)


@dispatch.operation("copy_variable")
def _copy_variable(group: ReplicaGroup, variable: Variable, text: str) -> Variable:
    group.guard.agree(Call(text))
    storage = variable._storage
    part = getattr(storage, "part", None)  # of a divided one
    return set_up(None, group, storage.array.copy(), storage.attributes, part)


@dispatch.operation("read_variable")
def _read_variable(group: ReplicaGroup, variable: Variable) -> Array:
    """Return the combined copies of an ON_READ variable. Collective."""
    return variable._storage.read()


@dispatch.operation("assign_variable")
def _assign_variable(
    group: ReplicaGroup, variable: Variable, how: str, value: Nest
) -> None:
    """Assign a value that is the same on all ranks, and check that it is."""
    collectives, storage = group.collectives, variable._storage
    call = storage.describe_call(how)
    try:  # not `checking`, which takes three calls of Python
        prepared = storage.prepare(how, value)
    except Exception as error:
        collectives.invalid(call, error)
    is_array = not isinstance(prepared, IndexedSlices)
    text = f"{call} {backend.describe(prepared if is_array else prepared.values)}"
    if collectives.guard.checks and not is_same(group, value):
        text += f" = {checksums.summarize_value(prepared, call)}"
    collectives.guard.agree(Call(text))
    storage.store(how, prepared)
