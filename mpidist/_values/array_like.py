"""Objects that act as arrays: in arithmetic, NumPy, CuPy, torch and JAX."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import DTypeLike

from mpidist._base import backend, guests, nest
from mpidist._base.remedies import is_own_attribute, missing_name
from mpidist._base.types import Array, DType, HostArray, Nest, Shape

# The attributes of the array that an `ArrayLike` has, besides those defined below.
_DELEGATED: Final = frozenset((
    "T", "all", "any", "argmax", "argmin", "astype", "clip", "conj", "copy", "cumsum",
    "dot", "flatten", "imag", "item", "itemsize", "max", "mean", "min", "nbytes",
    "prod", "ravel", "real", "reshape", "round", "squeeze", "std", "strides", "sum",
    "tolist", "trace", "transpose", "var",
))  # fmt: skip
# Python's operators of two operands that have an in-place form: the name of the method,
# the symbol, and NumPy's function.
_BINARY: Final = (
    ("add", "+", np.add),
    ("sub", "-", np.subtract),
    ("mul", "*", np.multiply),
    ("truediv", "/", np.true_divide),
    ("floordiv", "//", np.floor_divide),
    ("mod", "%", np.remainder),
    ("pow", "**", np.power),
    ("matmul", "@", np.matmul),
    ("and", "&", np.bitwise_and),
    ("or", "|", np.bitwise_or),
    ("xor", "^", np.bitwise_xor),
    ("lshift", "<<", np.left_shift),
    ("rshift", ">>", np.right_shift),
)
_OTHERS: Final = (
    ("lt", np.less),
    ("le", np.less_equal),
    ("eq", np.equal),
    ("ne", np.not_equal),
    ("gt", np.greater),
    ("ge", np.greater_equal),
    ("neg", np.negative),
    ("abs", np.absolute),
)
BINARY_NAMES: Final = tuple(name for name, _, _ in _BINARY)
"""The names of Python's methods for operators of two operands, without underscores."""
# For operands of torch and JAX: NumPy's functions would convert them to NumPy arrays.
_OPERATORS: Final[dict[Any, Callable[..., Any]]] = {
    function: getattr(operator, f"__{name}__")
    for name, *_, function in (*_BINARY, *_OTHERS)
}
_HOST: Final = frozenset((np.ndarray, int, float, np.float64, np.float32))


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
        return backend.as_array(self.value(), type(self).__name__)[0]

    def _attribute(self, name: str) -> Any:
        """Return an attribute of the value; one of an array, also if it is a number."""
        x = self.value()
        return getattr(x if hasattr(x, name) else self._array_view(), name)

    @property
    def shape(self) -> Shape:
        """Shape of the array."""
        return tuple(self._array_view().shape)

    @property
    def dtype(self) -> DType:
        """Dtype of the array."""
        return self._array_view().dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

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
        return self._array_view().__dlpack_device__()

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
        kwargs, name = kwargs or {}, func.__name__
        target, what = kwargs.get("out"), "..., out={x}"
        if name.endswith("_") and not name.endswith("__"):  # as torch.nn.init.normal_
            target, what = next(iter((*args, *kwargs.values()))), "{x}, ..."
        if isinstance(target, ArrayLike):  # whose copy, as a tensor, would get it
            target._refuse_write(f"{name}({what})")
        args, kwargs = nest.map_structure(_tensor, (args, kwargs))
        return func(*args, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(kwargs.get("out"), ArrayLike):
            kwargs["out"]._refuse_write(f"numpy.{func.__name__}(..., out={{x}})")
        if func is np.copyto and args and isinstance(args[0], ArrayLike):
            args[0]._refuse_write("numpy.copyto({x}, ...)")
        args, kwargs = nest.map_structure(to_plain, (args, kwargs))
        return func(*args, **kwargs)

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
        if self.size != 1:  # `np.float64` asks for an array then: one read is enough
            raise TypeError(
                f"float: expected one element, got an array of shape {self.shape}"
            )
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
            return self._attribute(name)
        if is_own_attribute(self, name):
            return object.__getattribute__(self, name)
        kind = type(self).__name__
        message = f"{kind!r} object has no attribute {name!r}"
        raise missing_name(kind, message, name)


def _make_in_place(symbol: str) -> Callable[[ArrayLike, Any], NoReturn]:
    def refuse(self: ArrayLike, other: Any) -> NoReturn:
        self._refuse_write(f"{{x}} {symbol}= ...")

    return refuse


for _name, _symbol, _ in _BINARY:
    setattr(ArrayLike, f"__i{_name}__", _make_in_place(_symbol))


def to_plain(x: Nest) -> Nest:
    """Return the array of an `ArrayLike`, and anything else unchanged."""
    return x.value() if isinstance(x, ArrayLike) else x


def _as_guest(x: Nest, kind: guests.GuestKind) -> Nest:
    """Return an operand as an array of torch or JAX: a copy, which stays as it is."""
    if backend.is_number(x) or guests.kind_of(x) is not None:
        return x
    return guests.restore(backend.as_array(x, "operand")[0].copy(), kind)


def _tensor(x: Nest) -> Nest:
    return _as_guest(x.value(), "torch") if isinstance(x, ArrayLike) else x
