"""The types of arrays and nests that annotations name.

An array is on the host (NumPy) or on a GPU (CuPy, which is optional and has no types).
Each room says which of the two it takes, or both: staging mistakes are type errors.

`Any` is the exception. It stands for what no type describes: objects of users that
are passed through, and modules and objects of libraries without types. A nest is one
of these: any container that optree knows, of any depth.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias, dataclass_transform

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


class DeviceArray:
    """A CuPy array, of any dtype and number of dimensions, for annotations."""

    __eq__: Any
    __ne__: Any
    __lt__: Any
    __ge__: Any
    __add__: Any
    __sub__: Any
    __mul__: Any
    __truediv__: Any
    __xor__: Any
    __rshift__: Any
    __getitem__: Any
    __setitem__: Any

    def __getattr__(self, name: str) -> Any: ...


Array: TypeAlias = HostArray | DeviceArray
"""A NumPy or CuPy array, of any dtype and number of dimensions."""
