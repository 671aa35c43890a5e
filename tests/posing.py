"""Host memory that poses as a GPU array: a stand-in for the parts of CuPy we use.

`ndarray` is no NumPy array and has no buffer: MPI finds its memory only through
``__cuda_array_interface__``, as it finds that of a CuPy array. Like CuPy it refuses to
be converted to NumPy or to be mixed with NumPy arrays. `install` puts it in the place
of CuPy; the library then runs the very code that it runs on a GPU.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np


def unwrap(x: Any) -> Any:
    if isinstance(x, ndarray):
        return x._host
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError("posing: Unsupported type <class 'numpy.ndarray'>")
    if isinstance(x, (list, tuple)):
        return type(x)(unwrap(item) for item in x)
    return x


def wrap(x: Any) -> Any:
    if isinstance(x, (np.ndarray, np.generic)):
        return ndarray(np.asarray(x))
    if isinstance(x, tuple):
        return tuple(wrap(item) for item in x)
    return x


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):  # noqa: N801 - CuPy's name
    synchronized = 0

    def __init__(self, host: np.ndarray) -> None:
        self._host = host

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = dict(self._host.__array_interface__)
        return {**interface, "version": 3, "stream": None}

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("posing: Implicit conversion to a NumPy array is not allowed")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kw: Any) -> Any:
        if not all(
            isinstance(x, (ndarray, int, float, complex, np.generic)) for x in inputs
        ):
            return NotImplemented
        out = kw.pop("out", None)
        if out is not None:
            kw["out"] = tuple(unwrap(x) for x in out)
        result = getattr(ufunc, method)(*(unwrap(x) for x in inputs), **kw)
        return out[0] if out is not None else wrap(result)

    def __array_function__(self, func: Any, types: Any, args: Any, kw: Any) -> Any:
        return wrap(func(*unwrap(tuple(args)), **{k: unwrap(v) for k, v in kw.items()}))

    def __getitem__(self, index: Any) -> Any:
        found = self._host[unwrap(index)]
        return ndarray(found if isinstance(found, np.ndarray) else np.asarray(found))

    def __setitem__(self, index: Any, value: Any) -> None:
        self._host[unwrap(index)] = unwrap(value)

    def __len__(self) -> int:
        return len(self._host)

    def __bool__(self) -> bool:
        return bool(self._host)

    def __int__(self) -> int:
        return int(self._host)

    def __float__(self) -> float:
        return float(self._host)

    def __repr__(self) -> str:
        return f"posing.{self._host!r}"

    def get(self, out: Any = None) -> Any:
        if out is None:
            return self._host.copy()
        out[...] = self._host
        return out

    def set(self, values: np.ndarray) -> None:
        if type(values) is not np.ndarray or values.dtype != self._host.dtype:
            raise TypeError("posing: set() takes a NumPy array of the same dtype")
        if values.shape != self._host.shape or not values.flags.c_contiguous:
            raise ValueError("posing: set() takes a C-contiguous array of this shape")
        self._host[...] = values

    def view(self, *args: Any) -> Any:
        return ndarray(self._host.view(*args))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self._host, name)
        if not callable(found):
            return wrap(found) if isinstance(found, np.ndarray) else found

        def method(*args: Any, **kwargs: Any) -> Any:
            result = found(*unwrap(args), **{k: unwrap(v) for k, v in kwargs.items()})
            return result if name in ("item", "tolist") else wrap(result)

        return method


class _Stream:
    def synchronize(self) -> None:
        ndarray.synchronized += 1


class _Device:
    current = 0

    def __init__(self, index: int) -> None:
        self.index = index

    def use(self) -> None:
        _Device.current = self.index


def _make_module(num_devices: int) -> types.ModuleType:
    module = types.ModuleType("cupy")
    module.ndarray = ndarray  # type: ignore[attr-defined]

    def asarray(x: Any, dtype: Any = None) -> Any:
        if isinstance(x, ndarray):
            return x if dtype is None else x.astype(dtype)
        if hasattr(x, "__cuda_array_interface__"):
            return ndarray(np.asarray(_Interface(x.__cuda_array_interface__)))
        return ndarray(np.array(x, dtype=dtype))  # a copy: host to device

    def from_numpy(name: str) -> Any:
        function = getattr(np, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs = {k: unwrap(v) for k, v in kwargs.items()}
            return wrap(function(*unwrap(args), **kwargs))

        return call

    module.asarray = module.array = asarray  # type: ignore[attr-defined]
    for name in (
        *("arange", "argmin", "ascontiguousarray", "concatenate", "empty", "exp"),
        *("full", "isnan", "max", "mean", "min", "moveaxis", "ones", "prod", "sqrt"),
        *("stack", "sum", "where", "zeros"),
    ):
        setattr(module, name, from_numpy(name))
    cuda = types.SimpleNamespace(
        Device=_Device,
        get_current_stream=_Stream,
        runtime=types.SimpleNamespace(getDeviceCount=lambda: num_devices),
    )
    module.cuda = cuda  # type: ignore[attr-defined]
    return module


class _Interface:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = {**interface, "version": 3}


def install(monkeypatch: Any, num_devices: int = 1) -> types.ModuleType:
    """Put the stand-in in the place of CuPy, for one test; return it."""
    module = _make_module(num_devices)
    cupyx = types.ModuleType("cupyx")
    cupyx.empty_pinned = np.empty  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupyx", cupyx)
    return module
