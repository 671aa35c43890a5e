"""The types of arrays and nests that annotations name.

An array is on the host (NumPy) or on a GPU (CuPy). CuPy is optional and has no types,
so what the two have in common is a protocol, and each room says which of the three it
takes: staging mistakes are then type errors.

`Any` is the exception. It stands for what no type describes: objects of users that
are passed through, and modules and objects of libraries without types. A nest is one
of these: any container that optree knows, of any depth.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, Self, TypeAlias, dataclass_transform

import numpy as np
from typing_extensions import TypeVar  # with `default`, which `typing` has from 3.13

DType: TypeAlias = np.dtype[Any]
Shape: TypeAlias = tuple[int, ...]
HostArray: TypeAlias = np.ndarray[Any, Any]
"""A NumPy array, of any dtype and number of dimensions."""
Nest: TypeAlias = Any
"""Arrays, numbers and other leaves in nested containers, or one such leaf."""
Args: TypeAlias = tuple[Nest, ...] | list[Nest]
Kwargs: TypeAlias = dict[str, Nest] | None

Own = TypeVar("Own", default=Any, covariant=True)
"""What each replica has, as in ``PerReplica[float]``."""
Leaf = TypeVar("Leaf", bound="complex | np.generic | HostArray")
"""A number or an array of NumPy; those of other libraries may have no types."""
OtherLeaf = TypeVar("OtherLeaf", bound="complex | np.generic | HostArray")
"""Another one."""
Given = TypeVar("Given")
"""Whatever is passed, and returned."""


@dataclass_transform(frozen_default=True)
def record(cls: type[Given]) -> type[Given]:
    """Make a class a dataclass that the checks of types know as frozen.

    Python takes twice as long to make one that is frozen at run time, and longer to
    make its objects: every program waits for that. Those of users are frozen.
    """
    return dataclasses.dataclass(unsafe_hash=True)(cls)


class Array(Protocol):
    """A NumPy or CuPy array, of any dtype and number of dimensions.

    Arguments of public functions are ``HostArray | DeviceArray`` instead: pyright takes
    minutes to match `numpy.ndarray` with this protocol.
    """

    @property
    def dtype(self) -> Any:
        """Its dtype."""

    @property
    def shape(self) -> Shape:
        """Its shape."""

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""

    @property
    def size(self) -> int:
        """The number of its elements."""

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""

    @property
    def flags(self) -> Any:
        """The layout of its memory, such as ``c_contiguous``."""

    @property
    def T(self) -> Self:  # noqa: N802  # NumPy's name
        """The transposed array, a view."""

    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __len__(self) -> int: ...
    def __eq__(self, other: object, /) -> Any: ...
    def __ne__(self, other: object, /) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __le__(self, other: Any, /) -> Any: ...
    def __gt__(self, other: Any, /) -> Any: ...
    def __ge__(self, other: Any, /) -> Any: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...
    def __add__(self, other: Any, /) -> Array: ...
    def __sub__(self, other: Any, /) -> Array: ...
    def __mul__(self, other: Any, /) -> Array: ...
    def __truediv__(self, other: Any, /) -> Array: ...
    def __and__(self, other: Any, /) -> Any: ...
    def __xor__(self, other: Any, /) -> Any: ...
    def __rshift__(self, other: Any, /) -> Any: ...
    def any(self, *args: Any, **kwargs: Any) -> Any:
        """Return whether some element is true."""

    def astype(self, *args: Any, **kwargs: Any) -> Self:
        """Return it with another dtype."""

    def copy(self, *args: Any, **kwargs: Any) -> Self:
        """Return a copy."""

    def fill(self, value: Any, /) -> None:
        """Set all elements to one value."""

    def item(self, *args: Any) -> Any:
        """Return the one element, as a Python number."""

    def ravel(self, *args: Any, **kwargs: Any) -> Self:
        """Return it with one dimension."""

    def reshape(self, *args: Any, **kwargs: Any) -> Self:
        """Return it with another shape."""

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sum of its elements."""

    def tolist(self) -> Any:
        """Return its elements as Python objects, in nested lists."""

    def view(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same memory, with another dtype."""


class DeviceArray(Array, Protocol):
    """A CuPy array, of any dtype and number of dimensions."""

    @property
    def data(self) -> Any:
        """Its memory: a `cupy.cuda.MemoryPointer`."""

    @property
    def device(self) -> Any:
        """The GPU that it is on."""

    def get(self, *args: Any, **kwargs: Any) -> HostArray:
        """Return a copy on the host."""

    def set(self, *args: Any, **kwargs: Any) -> None:
        """Copy an array of the host into it."""
