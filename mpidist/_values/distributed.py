"""Values with one component per replica, and array-like objects."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Generic, NoReturn, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from mpidist._base import backend, guests, nest
from mpidist._base.remedies import explain_attributes, is_own_attribute, missing_name
from mpidist._base.types import Array, DType, HostArray, Nest, Own, Shape
from mpidist._runtime import context
from mpidist._runtime.registry import Components, Key, Registry

_C = TypeVar("_C", bound=Components)

_DELEGATED: Final = frozenset(
    [
        "T",
        "all",
        "any",
        "argmax",
        "argmin",
        "astype",
        "clip",
        "conj",
        "copy",
        "cumsum",
        "dot",
        "flatten",
        "imag",
        "item",
        "itemsize",
        "max",
        "mean",
        "min",
        "nbytes",
        "prod",
        "ravel",
        "real",
        "reshape",
        "round",
        "squeeze",
        "std",
        "strides",
        "sum",
        "tolist",
        "trace",
        "transpose",
        "var",
    ]
)


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
        if not isinstance(values, (list, tuple)):
            raise TypeError(
                f"{name}: expected a list or tuple of components, got "
                f"{type(values).__name__}"
            )
        group = context.current().group
        if len(values) != group.num_replicas:
            raise ValueError(
                f"{name}: expected one component for each of the "
                f"{group.num_replicas} replicas of {group}, got "
                f"{len(values)}"
            )
        self._all = tuple(values)
        self._replica_id = group.replica_id
        self._num_replicas = len(values)
        self._own = values[self._replica_id]
        self._key = None
        self._home = group.registry

    @property
    def values(self) -> tuple[Own, ...]:
        """The components that this process can see, in replica order.

        Only this rank's, except in ``merge_fn``: there all of them. The first time
        that they are read there communicates: it gathers them from their ranks.
        """
        coordinator = context.current().coordinator
        if coordinator is not None and self._all is None:
            coordinator.fetch([self])
        if self._all is not None and (coordinator is not None or self._key is None):
            return self._all
        return (self._own,)

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


@explain_attributes
class PerReplica(DistributedValues[Own]):
    """A value that is different on each replica.

    In annotations ``PerReplica[float]``, for a number on each replica.

    It has no operators, because ``x + 1`` would be ambiguous. Reduce it
    (`Strategy.reduce`), gather it (`Strategy.gather`), pass it to
    `Strategy.run`, or take this rank's component with
    `Strategy.experimental_local_results`.
    """

    # Makes NumPy and CuPy arrays defer operators to this class.
    __array_ufunc__: Callable[..., Any] | None = None

    def __bool__(self) -> bool:
        raise TypeError(f"a PerReplica has no truth value; {_ALTERNATIVES}")

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


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or"),
    *("xor", "lshift", "rshift"),
):
    for _prefix in ("", "r"):
        setattr(PerReplica, f"__{_prefix}{_name}__", _refuse_operator)
for _name in (
    *("neg", "pos", "abs", "invert", "float", "int", "lt", "le", "gt", "ge"),
    *("getitem", "iter", "contains", "complex", "round", "divmod", "rdivmod"),
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


class ArrayLike(np.lib.mixins.NDArrayOperatorsMixin):
    """An object that acts as an array in arithmetic, NumPy and CuPy functions.

    Results are plain arrays. In-place operators and item assignment raise, because they
    would change one copy only.

    It deliberately has no ``__cuda_array_interface__``: with one, CuPy would handle
    ``x @ variable`` itself, and fail on the type. Without it CuPy defers to
    `__array_ufunc__`. `value` returns the CuPy array for functions that require one.
    """

    __array_priority__: float = 1000.0

    def _refuse_write(self, what: str) -> NoReturn:
        raise TypeError(
            f"`{what.format(x='x')}` would change the copy of one replica only; write "
            "a new array with `x = x + ...`, or put the value into a `mpidist.Variable`"
        )

    def _array_view(self) -> Array:
        """Return the value as an array, also if it is a number."""
        array: Array = backend.as_array(self.value(), type(self).__name__)[0]
        return array

    @property
    def shape(self) -> Shape:
        """Shape of the array."""
        return tuple(self._array_view().shape)

    @property
    def dtype(self) -> DType:
        """Dtype of the array."""
        dtype: DType = self._array_view().dtype
        return dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return int(self._array_view().ndim)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self._array_view().size)

    def value(self) -> Any:
        """Return the array itself, without a copy. All operations use it.

        A NumPy array is read-only. A CuPy array cannot be: do not write to it.
        """
        raise NotImplementedError

    def numpy(self) -> HostArray:
        """Return a copy, as a NumPy array on the host.

        Not collective, except for an ON_READ variable in cross-replica context.
        """
        return np.array(backend.to_host(self._array_view()))

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> HostArray:
        x = self._array_view()
        if backend.is_device_array(x):
            raise TypeError(
                f"this {type(self).__name__} is on a GPU and is not copied to the "
                "host unasked; write `x.numpy()` for a copy there, or `x.value()` for "
                "the CuPy array"
            )
        return np.array(x, dtype=dtype, copy=copy)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a copy for ``from_dlpack`` of torch, JAX, NumPy and CuPy.

        Always a copy: torch does not know read-only memory, and arrays of JAX must not
        change, as a variable does. `value` is the array without a copy.

        Raises:
            BufferError: for ``copy=False``.
        """
        if copy is False:
            raise BufferError(
                f"a {type(self).__name__} gives a copy over DLPack, because its memory "
                "is read-only; leave out `copy=False`, or use `x.value()`"
            )
        return guests.export_copy(self._array_view(), stream, max_version, dl_device)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._array_view().__dlpack_device__()
        return device

    def __jax_array__(self) -> Any:
        return guests.restore(self._array_view().copy(), "jax")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kw: Any) -> Any:
        for target in kw.get("out", ()):
            if isinstance(target, ArrayLike):
                target._refuse_write(f"numpy.{ufunc.__name__}(..., out={{x}})")
        if method == "at" and isinstance(inputs[0], ArrayLike):
            inputs[0]._refuse_write(f"numpy.{ufunc.__name__}.at({{x}}, ...)")
        inputs = tuple(to_plain(x) for x in inputs)
        if ufunc in _OPERATORS and not _HOST.issuperset(map(type, inputs)):
            for kind in map(guests.kind_of, inputs):
                if kind is not None and method == "__call__" and not kw:
                    return _OPERATORS[ufunc](*(_as_guest(x, kind) for x in inputs))
        return getattr(ufunc, method)(
            *inputs, **{k: to_plain(v) for k, v in kw.items()}
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = (_tensors(args), _tensors(kwargs or {}))
        return func(*args, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(kwargs.get("out"), ArrayLike):
            kwargs["out"]._refuse_write(f"numpy.{func.__name__}(..., out={{x}})")
        if func is np.copyto and args and isinstance(args[0], ArrayLike):
            args[0]._refuse_write("numpy.copyto({x}, ...)")
        return func(*_plain_arguments(args), **_plain_arguments(kwargs))

    def __getitem__(self, index: Any) -> Any:
        return self.value()[to_plain(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._refuse_write("{x}[...] = ...")

    def __len__(self) -> int:
        return len(self.value())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value())

    def __contains__(self, value: Any) -> bool:
        return bool((self.value() == to_plain(value)).any())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __float__(self) -> float:
        return float(self.value())

    def __complex__(self) -> complex:
        return complex(self.value())

    def __index__(self) -> int:
        return int(self.value().__index__())

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self._array_view().item(), ndigits)

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        return format(self.value(), spec)

    def __getattr__(self, name: str) -> Any:
        if name in _DELEGATED:
            return getattr(self.value(), name)
        if is_own_attribute(self, name):
            return object.__getattribute__(self, name)
        kind = type(self).__name__
        message = f"{kind!r} object has no attribute {name!r}"
        raise missing_name(kind, message, name)


# Of torch and JAX: NumPy's functions would convert them to NumPy arrays.
_HOST: Final = frozenset((np.ndarray, int, float, np.float64, np.float32))
_OPERATORS: Final[dict[Any, Callable[..., Any]]] = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.true_divide: operator.truediv,
    np.floor_divide: operator.floordiv,
    np.remainder: operator.mod,
    np.power: operator.pow,
    np.matmul: operator.matmul,
    np.bitwise_and: operator.and_,
    np.bitwise_or: operator.or_,
    np.bitwise_xor: operator.xor,
    np.less: operator.lt,
    np.less_equal: operator.le,
    np.equal: operator.eq,
    np.not_equal: operator.ne,
    np.greater: operator.gt,
    np.greater_equal: operator.ge,
    np.negative: operator.neg,
    np.absolute: operator.abs,
}


def _make_in_place(symbol: str) -> Callable[[ArrayLike, Any], NoReturn]:
    def refuse(self: ArrayLike, other: Any) -> NoReturn:
        self._refuse_write(f"{{x}} {symbol} ...")

    return refuse


for _name, _symbol in {
    "add": "+=",
    "sub": "-=",
    "mul": "*=",
    "truediv": "/=",
    "floordiv": "//=",
    "mod": "%=",
    "pow": "**=",
    "matmul": "@=",
    "and": "&=",
    "or": "|=",
    "xor": "^=",
    "lshift": "<<=",
    "rshift": ">>=",
}.items():
    setattr(ArrayLike, f"__i{_name}__", _make_in_place(_symbol))


class Mirrored(DistributedValues[Any], ArrayLike):
    """A value that is the same on all replicas: the result of a reduction.

    It acts as the array that it holds.
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

    @property
    def values(self) -> tuple[Nest, ...]:
        """The components that this process can see; they are all equal."""
        if context.current().coordinator is not None:
            return (self.value(),) * self._num_replicas
        return (self.value(),)

    def __repr__(self) -> str:
        return f"Mirrored(on {self._num_replicas} replicas: {self._own!r})"

    def __getattr__(self, name: str) -> Any:
        # Any attribute of its value, as in TensorFlow, except private ones: pickle and
        # copy look them up before there is a component.
        if name.startswith("_"):
            raise AttributeError(f"'Mirrored' object has no attribute {name!r}")
        return getattr(self.value(), name)


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


class RegistryOfOne(Registry):
    """The registry of one replica: its component is all that there is."""

    def wrap(self, kind: type[_C], own: Nest, key: Key) -> _C:
        """Return a PerReplica that acts as its component, or a Mirrored."""
        if kind is PerReplica:
            return super().wrap(PerReplicaOfOne, own, key)  # type: ignore[return-value]
        return super().wrap(kind, own, key)


def to_plain(x: Nest) -> Nest:
    """Return the array of an `ArrayLike`, and anything else unchanged."""
    return x.value() if isinstance(x, ArrayLike) else x


def _as_guest(x: Nest, kind: guests.GuestKind) -> Nest:
    """Return an operand as an array of torch or JAX: a copy, which stays as it is."""
    if backend.is_number(x) or guests.kind_of(x) is not None:
        return x
    return guests.restore(backend.as_array(x, "operand")[0].copy(), kind)


def _tensors(x: Nest) -> Nest:
    """Replace what is `ArrayLike` in the arguments of a function of torch."""
    if isinstance(x, (list, tuple)) and type(x) in (list, tuple):
        return type(x)(_tensors(item) for item in x)
    if type(x) is dict:
        return {key: _tensors(item) for key, item in x.items()}
    return _as_guest(x.value(), "torch") if isinstance(x, ArrayLike) else x


def _plain_arguments(x: Nest) -> Nest:
    if isinstance(x, (list, tuple)) and type(x) in (list, tuple):
        return type(x)(_plain_arguments(item) for item in x)
    if type(x) is dict:
        return {key: _plain_arguments(item) for key, item in x.items()}
    return to_plain(x)


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
