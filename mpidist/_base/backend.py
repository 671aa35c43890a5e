"""Arrays on the host and on a GPU.

Whether an object is a CuPy array is decided by ``sys.modules``: if CuPy has not been
imported (`gpus`) there are no CuPy arrays.
"""

from __future__ import annotations

import functools
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from mpidist._base import gpus, guests
from mpidist._base.expect import expect
from mpidist._base.nest import Structure, flatten
from mpidist._base.types import Array, DeviceArray, DType, HostArray, Nest, Shape

LeafKind = Literal["array", "scalar", "number", "torch", "jax"]
ArrayModule: TypeAlias = Any
"""NumPy or CuPy, which has no types."""

_A = TypeVar("_A", HostArray, DeviceArray, Array)
_NUMBERS: Final = "biufc"  # kinds of dtypes, from narrow to wide


def seed(number: int) -> None:
    """Seed the global random numbers of NumPy, and of CuPy if it is imported."""
    np.random.seed(number)  # noqa: NPY002 - for code that uses them
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        cupy.random.seed(number)


def is_device_array(x: object) -> TypeGuard[DeviceArray]:
    """Return whether ``x`` is a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, getattr(cupy, "ndarray", ()))


def is_masked(x: object) -> bool:
    """Return whether ``x`` is a masked array; without the slow import of their module.

    An import in a call that a `ReplicaStopped` ends may leave Python's lock of imports.
    """
    made = sys.modules.get("numpy.ma")
    return made is not None and isinstance(x, getattr(made, "MaskedArray", ()))


def is_array(x: object) -> bool:
    """Return whether ``x`` is a NumPy array or scalar, or an array of CuPy, torch, JAX.

    `as_array` makes a NumPy or CuPy array of it, and `restore` the reverse.
    """
    return (
        isinstance(x, (np.ndarray, np.generic))
        or is_device_array(x)
        or guests.kind_of(x) is not None
    )


def as_real(x: object) -> float | None:
    """Return a real number, or the one in an array of no dimensions; else None."""
    if isinstance(x, bool):
        return None
    if isinstance(x, numbers.Real):
        return float(x)
    if getattr(x, "shape", None) != () or isinstance(x, np.generic):
        return None
    array = as_array(x, "a setting")[0]
    return float(to_host(array)) if number_kind(array.dtype) in "iuf" else None


def as_number(
    call: str,
    name: str,
    value: object,
    fits: Callable[[float], bool],
    which: str,
    kind: str = "a number",
) -> float:
    """Return a setting as a float.

    Args:
        call: the name of what it is a setting of, such as "SGD".
        name: of the setting.
        value: the setting.
        fits: returns whether a number is allowed.
        which: the numbers that are, in words.
        kind: what else would be allowed, in words.

    Raises:
        TypeError: if it is not a number.
        ValueError: if the number is not allowed.
    """
    x = as_real(value)
    expect(x is not None, call, f"`{name}` to be {kind}", value)
    assert x is not None
    expect(fits(x), call, f"`{name}` to be {which}", value, error=ValueError)
    return x


def as_positive(call: str, name: str, value: object) -> float:
    """Return a setting above 0 as a float; see `as_number`."""
    return as_number(call, name, value, lambda x: x > 0, "above 0")


def is_number(x: object) -> bool:
    """Return whether ``x`` is a Python number, but not a bool."""
    return isinstance(x, (int, float, complex)) and not isinstance(x, bool)


def module_of(x: object) -> ArrayModule:
    """Return the array module that ``x`` belongs to."""
    return sys.modules["cupy"] if is_device_array(x) else np


def as_array(x: object, call: str) -> tuple[Array, LeafKind]:
    """Return a leaf as an array, and the kind of the leaf.

    Args:
        x: a NumPy or CuPy array, a torch tensor, a JAX array, a NumPy scalar, a Python
            number or bool.
        call: the name of the calling function, for the message.

    Returns:
        The array (0-d for numbers; native byte order; copied only if necessary),
        and "array", "torch", "jax", "scalar" (NumPy) or "number" (Python).

    Raises:
        TypeError: if it is anything else; the message says what to write.
        OverflowError: if a Python int does not fit into 64 bits.
    """
    if type(x) is np.ndarray and x.dtype.isbuiltin == 1 and x.dtype.kind in _NUMBERS:
        return x, "array"  # of a dtype of NumPy's, in native byte order
    if is_device_array(x):
        return x, "array"
    if is_masked(x):
        raise TypeError(
            f"{call}: got a masked array, whose mask would be lost; write "
            "`x.filled(value)`, or reduce data and mask as two arrays"
        )
    if isinstance(x, (np.ndarray, np.generic)):
        array = np.asarray(x)
        check_dtype(array.dtype, call)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        return array, "array" if isinstance(x, np.ndarray) else "scalar"
    if isinstance(x, (bool, int, float, complex)):
        array = np.asarray(x)
        # NumPy converts ints beyond int64 to uint64, whose sums would wrap.
        if array.dtype.kind not in _NUMBERS or array.dtype == np.uint64:
            raise OverflowError(
                f"{call}: the int {x} does not fit into int64 (64 bits); convert it "
                "to float first"
            )
        return array, "number"
    guest = guests.kind_of(x)
    if guest is not None:
        view = guests.as_view(x, guest, call)
        check_dtype(view.dtype, call)
        return view, guest
    component = getattr(type(x), "_as_component", None)
    if component is not None:  # of a Mirrored or a Variable: this replica's
        return as_array(component(x), call)
    if isinstance(x, numbers.Number):
        raise TypeError(
            f"{call}: expected an array or a Python or NumPy number, got "
            f"{type(x).__name__}; write `float(x)`"
        )
    raise TypeError(f"{call}: {_not_an_array(x)}")


def of_lists(x: Nest, call: str) -> Nest:
    """Return a list or tuple of numbers as an array; anything else unchanged.

    Raises:
        ValueError: if it has lists of several lengths.
    """
    try:
        return np.asarray(x) if isinstance(x, (list, tuple)) else x
    except ValueError:
        raise ValueError(
            f"{call}: expected an array or lists of one length, got {x!r:.80}; fill "
            "them up to one length, or pass each of them alone"
        ) from None


def as_arrays(
    leaves: list[Nest], structure: Structure, call: str
) -> list[tuple[Array, LeafKind]]:
    """Return `as_array` of the leaves of a nest; an error says which leaf it is."""
    return structure.each(functools.partial(as_array, call=call), leaves)


def _not_an_array(x: object) -> str:
    kind = type(x).__name__
    if x is None:
        return (
            "expected an array or a number, got None; leave out what has no value on "
            "any rank, such as the gradient of an unused variable, and pass zeros of "
            "the same shape where only some ranks have none"
        )
    if isinstance(x, (list, tuple, range)):
        return f"expected an array, got a {kind}; write `numpy.asarray(...)` around it"
    if isinstance(x, Mapping):
        how = ", which is no plain dict; write `dict(...)` around it"
        if not flatten(x)[1].is_leaf:
            how = "; make a call for each of its values"
        return f"expected an array or a number, got a {kind}{how}"
    if hasattr(x, "__dlpack__"):
        return (
            "expected an array of NumPy, CuPy, torch or JAX, got "
            f"{type(x).__module__}.{kind}; write "
            "`numpy.from_dlpack(x)` or `cupy.from_dlpack(x)`, which do not copy"
        )
    how = "x.toarray()" if hasattr(x, "toarray") else "numpy.asarray(x)"
    return (
        f"expected an array or a number, got {x!r:.80} of type {kind}; "
        f"write `{how}` if it holds numbers"
    )


def check_dtype(dtype: DType, call: str) -> None:
    """Raise a TypeError if a dtype does not hold numbers."""
    if number_kind(dtype) in _NUMBERS:
        return
    write = "`x.astype(float)` if the array holds numbers"
    if dtype.names:
        write = f"`x[{dtype.names[0]!r}]`, and so on: its fields one by one"
    elif dtype.kind in "mM":
        write = '`x.view("int64")`, in which NaT is the smallest number'
    raise TypeError(
        f"{call}: arrays of dtype {dtype} cannot be communicated; expected a bool, "
        f"integer, floating or complex dtype. Write {write}"
    )


def number_kind(dtype: DType) -> str:
    """Return the kind of a dtype as NumPy's; of ml_dtypes "f" for bfloat16, else "V".

    Their own are "V" for bfloat16 and "f" for float8_e5m2, for which MPI has no type.
    """
    if dtype.isbuiltin == 2:  # not one of NumPy's
        return "f" if guests.is_bfloat16(dtype) else "V"
    return str(dtype.kind)


def fits(x: Any, dtype: DType) -> bool:
    """Return whether values may be cast: to the same kind of dtype, or a wider one.

    Integers may be cast to integers if they are in the dtype's range.
    """
    own, wanted = number_kind(x.dtype), number_kind(dtype)
    if own in "iu" and wanted in "iu":
        limits = np.iinfo(dtype)
        return not x.size or limits.min <= int(x.min()) <= int(x.max()) <= limits.max
    return 0 <= _NUMBERS.find(own) <= _NUMBERS.find(wanted)


def as_floating(dtype: DType) -> DType:
    """Return a dtype if it is floating or complex, else float64: that of a mean."""
    return dtype if number_kind(dtype) in "fc" else np.dtype(np.float64)


def widened(dtype: DType) -> DType:
    """Return the dtype that computes with a floating one: float32 for up to 16 bits."""
    return np.dtype(np.float32) if dtype.itemsize <= 2 else dtype


def restore(array: Array, kind: LeafKind) -> Nest:
    """Return an array as the kind of leaf that it was: the reverse of `as_array`."""
    if kind == "number":
        return array.item()
    return array[()] if kind == "scalar" else as_given(array, kind)


def restore_all(
    arrays: Iterable[Array], pairs: Sequence[tuple[Array, LeafKind]]
) -> list[Nest]:
    """Return `restore` of arrays with the shapes of leaves; None if there is none.

    Args:
        arrays: one for each leaf, or None.
        pairs: what `as_array` returned for the leaves.
    """
    return [
        None if x is None else restore(x, kind)
        for x, (_, kind) in zip(arrays, pairs, strict=True)
    ]


def copied(x: Nest) -> Nest:
    """Return a copy of an array; what cannot change, as JAX's, and others unchanged."""
    if isinstance(x, np.ndarray) or is_device_array(x):
        return x.copy()
    return x.detach().clone() if guests.kind_of(x) == "torch" else x


def read_only(x: Nest) -> Nest:
    """Return a view of a NumPy array that cannot be written; other leaves unchanged."""
    if isinstance(x, np.ndarray):
        x = x.view()
        x.flags.writeable = False
    return x


def as_given(array: Array, kind: LeafKind) -> Nest:
    """Return an array as one of the library that the leaf was of; NumPy for numbers."""
    if kind == "torch" or kind == "jax":
        return guests.restore(array, kind)
    return array


def contiguous(x: _A) -> _A:
    """Return ``x`` in C order and aligned, copied only if necessary.

    mpi4py has no MPI datatype for unaligned arrays. A 0-d array stays 0-d.
    """
    flags = x.flags
    if flags.c_contiguous:
        return x if getattr(flags, "aligned", True) else x.copy()
    return module_of(x).ascontiguousarray(x)


def flat(x: _A) -> _A:
    """Return a C-contiguous array as one dimension, without a copy."""
    return x.reshape(-1)


def empty_like(x: Array, shape: Shape, dtype: npt.DTypeLike) -> Array:
    """Return a new array on the device of ``x``."""
    return module_of(x).empty(shape, dtype)


def to_host(x: Array) -> HostArray:
    """Return a NumPy array with the values of ``x``; ``x`` itself if it is one."""
    if isinstance(x, np.ndarray) or not is_device_array(x):
        return np.asarray(x)
    return x.get()


def like(x: Array, host: Array) -> Array:
    """Return the values of a NumPy array as an array on the device of ``x``."""
    return sys.modules["cupy"].asarray(host) if is_device_array(x) else host


def place(host: Array, device: gpus.Device) -> Array:
    """Return the values of a NumPy array as an array on a device."""
    return device.array_module.asarray(host)


def fill(target: Array, values: Array) -> None:
    """Copy ``values`` into ``target``, from host to GPU or back if necessary."""
    if not is_device_array(target):
        target[...] = to_host(values)
    elif is_device_array(values):
        target[...] = values
    else:
        # set() requires the same dtype and C order.
        host = np.ascontiguousarray(values, dtype=target.dtype)
        target.set(host.reshape(target.shape))


def synchronize(x: Array) -> None:
    """Wait until the GPU has written ``x``, before the host or MPI reads it.

    It waits for an event because of the null stream: an event on it waits for what
    blocking streams have queued, as a kernel would. CUDA does not guarantee that for a
    wait for the stream itself (driver API, "Stream synchronization behavior").
    """
    if is_device_array(x):
        gpus.current_stream().record(gpus.new_event()).synchronize()


def as_bytes(x: _A) -> _A:
    """View a C-contiguous array as one dimension of uint8, without a copy."""
    return x.reshape(-1).view(np.uint8)


def from_bytes(raw: _A, dtype: DType, shape: Shape) -> _A:
    """View uint8 as an array of a dtype and shape."""
    if raw.size == 0:
        return module_of(raw).empty(shape, dtype)
    return raw.view(dtype).reshape(shape)


def describe(x: Any) -> str:
    """Return for example ``float32 (3, 4)``."""
    return f"{x.dtype.name} {tuple(x.shape)}"
