"""Arrays on the host and on a GPU; the only user of CuPy.

CuPy is imported only to look for a GPU when a strategy is made. Whether an
object is a CuPy array is asked of ``sys.modules``: where nobody has imported
CuPy there are no CuPy arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import numbers
import sys
import types
import warnings
import zlib
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from mpidist._base.types import Array, DeviceArray, DType, HostArray, Nest, Shape

LeafKind = Literal["array", "scalar", "number"]
ArrayModule: TypeAlias = Any
"""NumPy or CuPy, which has no types."""
Stream: TypeAlias = Any
"""A `cupy.cuda.Stream`."""
Event: TypeAlias = Any
"""A `cupy.cuda.Event`."""

_A = TypeVar("_A", bound=Array)
# Of any buffer: NumPy's types say that arrays are one only from Python 3.12 on.
_crc32: Final[Callable[..., int]] = zlib.crc32

_SMALL_BYTES: Final = 4096
_END_BYTES: Final = 256
_MOST_WORDS: Final = 8192
_LEAST_STEP: Final = 8
SAMPLED_BYTES: Final = 2**20
_FEW_VALUES: Final = 6
_MANTISSA_OF_X87: Final = 63
_REAL_AND_COMPLEX: Final = "biufc"


@dataclasses.dataclass(frozen=True)
class Device:
    """Where a replica keeps its arrays: the host, or one GPU."""

    kind: Literal["cpu", "gpu"]
    index: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"

    def name_on(self, rank: int) -> str:
        """Return the device string, in the manner of TensorFlow's."""
        return f"/rank:{rank}/device:{self.kind.upper()}:{self.index}"

    @property
    def array_module(self) -> ArrayModule:
        """NumPy or CuPy."""
        if self.kind == "gpu":
            return sys.modules["cupy"]
        return np

    def activate(self) -> None:
        """Make this the current device of the thread."""
        if self.kind == "gpu":
            sys.modules["cupy"].cuda.Device(self.index).use()


def select_device(request: object, local_rank: int) -> Device:
    """Return the device that a request such as ``"auto"`` or ``"gpu:1"`` means.

    Args:
        request: "auto", "cpu", "gpu" or "gpu:K".
        local_rank: this rank's number on its node; ranks are dealt to GPUs in turn.

    Raises:
        TypeError, ValueError: for another request.
        RuntimeError: for "gpu" where CuPy or the GPU is missing.
    """
    if not isinstance(request, str):
        raise TypeError(
            'MPIStrategy: expected `device` to be "auto", "cpu", "gpu" or "gpu:K", '
            f"got {request!r} of type {type(request).__name__}"
        )
    kind, _, index = request.lower().partition(":")
    if request.lower() == "cpu":
        return Device("cpu")
    if kind not in ("auto", "gpu") or (index and not index.isdigit()):
        raise ValueError(
            'MPIStrategy: expected `device` to be "auto", "cpu", "gpu" or "gpu:K", '
            f"got {request!r}"
        )
    if kind == "auto" and index:
        raise ValueError(f'MPIStrategy: write device="gpu:{index}", not {request!r}')
    count, reason = count_gpus()
    if count == 0:
        if kind == "auto":
            return Device("cpu")
        raise RuntimeError(
            f'MPIStrategy: device={request!r}, but {reason}; write device="cpu", or '
            "install the extra `cuda12` or `cuda13` on a machine with a GPU"
        )
    chosen = int(index) if index else local_rank % count
    if chosen >= count:
        raise ValueError(
            f"MPIStrategy: device={request!r}, but this machine has {count} GPU(s), "
            f"numbered from 0"
        )
    return Device("gpu", chosen)


def count_gpus() -> tuple[int, str]:
    """Return the number of GPUs, and the reason where it is 0."""
    if "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:
        return 0, "CuPy is not installed"
    try:
        import cupy

        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # a broken CuPy or driver: as good as none
        return 0, f"CuPy finds no GPU ({type(error).__name__}: {error})"
    return count, "" if count else "CuPy finds no GPU"


def is_device_array(x: object) -> TypeGuard[DeviceArray]:
    """Return whether ``x`` is a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, getattr(cupy, "ndarray", ()))


def is_array(x: object) -> bool:
    """Return whether ``x`` is a NumPy array or scalar, or a CuPy array."""
    return isinstance(x, (np.ndarray, np.generic)) or is_device_array(x)


def is_number(x: object) -> bool:
    """Return whether ``x`` is a Python number; a bool is not taken for one."""
    return isinstance(x, (int, float, complex)) and not isinstance(x, bool)


def module_of(x: object) -> ArrayModule:
    """Return the array module that ``x`` belongs to."""
    return sys.modules["cupy"] if is_device_array(x) else np


def as_array(x: object, call: str) -> tuple[Array, LeafKind]:
    """Return a leaf as an array, and what it was.

    Args:
        x: a NumPy or CuPy array, a NumPy scalar, a Python number or bool.
        call: the name of the calling function, for the message.

    Returns:
        The array (0-d for numbers; native byte order; not copied unless it must
        be), and "array", "scalar" (NumPy) or "number" (Python).

    Raises:
        TypeError: for anything else, saying what to write.
        OverflowError: for a Python int beyond 64 bits.
    """
    if type(x) is np.ndarray and x.dtype.isnative and x.dtype.kind in _REAL_AND_COMPLEX:
        return x, "array"
    if is_device_array(x):
        return x, "array"
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{call}: got a masked array, whose mask would be lost; write "
            "`x.filled(value)`, or reduce data and mask as two arrays"
        )
    if isinstance(x, np.ndarray):
        array = np.asarray(x)
        check_dtype(array.dtype, call)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        return array, "array"
    if isinstance(x, np.generic):
        array = np.asarray(x)
        check_dtype(array.dtype, call)
        return array, "scalar"
    if isinstance(x, (bool, int, float, complex)):
        array = np.asarray(x)
        # NumPy makes uint64 of ints beyond int64, whose sums would wrap.
        if array.dtype.kind not in _REAL_AND_COMPLEX or array.dtype == np.uint64:
            raise OverflowError(
                f"{call}: the int {x} does not fit into int64 (64 bits); convert it "
                "to float first"
            )
        return array, "number"
    component = getattr(type(x), "_as_component", None)
    if component is not None:  # a Mirrored or a Variable: what this replica has of it
        return as_array(component(x), call)
    if isinstance(x, numbers.Number):
        raise TypeError(
            f"{call}: expected an array or a Python or NumPy number, got "
            f"{type(x).__name__}; write `float(x)`"
        )
    raise TypeError(f"{call}: {_not_an_array(x)}")


def _not_an_array(x: object) -> str:
    kind = type(x).__name__
    if x is None:
        return (
            "expected an array or a number, got None; leave out what has no value "
            "(for example the gradient of an unused variable)"
        )
    if isinstance(x, (list, tuple, range)):
        return (
            f"expected an array, got a {kind}; write `numpy.asarray(...)` around the "
            f"{kind}"
        )
    if hasattr(x, "__dlpack__"):
        return (
            f"expected a NumPy or CuPy array, got {type(x).__module__}.{kind}; write "
            "`numpy.from_dlpack(x)` or `cupy.from_dlpack(x)`, which do not copy"
        )
    return (
        f"expected a NumPy or CuPy array or a number, got {x!r:.80} of type {kind}; "
        "write `numpy.asarray(x)` if it holds numbers"
    )


def check_dtype(dtype: DType, call: str) -> None:
    """Raise a TypeError for a dtype that holds no numbers."""
    if dtype.kind in _REAL_AND_COMPLEX or is_bfloat16(dtype):
        return
    raise TypeError(
        f"{call}: arrays of dtype {dtype} cannot be communicated; expected a bool, "
        "integer, floating or complex dtype. Write `x.astype(float)` if the array "
        "holds numbers"
    )


def is_bfloat16(dtype: DType) -> bool:
    """Return whether this is the bfloat16 of ml_dtypes."""
    return bool(dtype.kind == "V" and dtype.name == "bfloat16")


def restore(array: Array, kind: LeafKind) -> Nest:
    """Return an array as what the leaf it came from was: the reverse of as_array."""
    if kind == "array":
        return array
    return array.item() if kind == "number" else array[()]


def contiguous(x: _A) -> _A:
    """Return ``x`` in C order, copied only if need be; a 0-d array stays 0-d.

    And aligned: mpi4py has no MPI datatype for what is not.
    """
    flags = x.flags
    if flags.c_contiguous:
        return x if getattr(flags, "aligned", True) else x.copy()
    copied: _A = module_of(x).ascontiguousarray(x)
    return copied


def flat(x: _A) -> _A:
    """Return a C-contiguous array as one dimension, without a copy."""
    return x.reshape(-1)


def empty_like(x: Array, shape: Shape, dtype: npt.DTypeLike) -> Array:
    """Return a new array, where ``x`` is."""
    made: Array = module_of(x).empty(shape, dtype)
    return made


def to_host(x: Array) -> HostArray:
    """Return a NumPy array with the values of ``x``; NumPy arrays as they are."""
    return x.get() if is_device_array(x) else np.asarray(x)


def like(x: Array, host: Array) -> Array:
    """Return a NumPy array's values as an array where ``x`` is."""
    return sys.modules["cupy"].asarray(host) if is_device_array(x) else host


def place(host: Array, device: Device) -> Array:
    """Return a NumPy array's values as an array on a device."""
    made: Array = device.array_module.asarray(host)
    return made


def fill(target: Array, values: Array) -> None:
    """Copy ``values`` into ``target``, from host to GPU or back if need be."""
    if is_device_array(target):
        if is_device_array(values):
            target[...] = values
        else:
            # set() wants the very dtype and C order.
            host = np.ascontiguousarray(values, dtype=target.dtype)
            target.set(host.reshape(target.shape))
    else:
        target[...] = to_host(values)


def synchronize(x: Array) -> None:
    """Wait until the GPU has written ``x``, before anybody else reads it.

    Until an event, for the sake of the null stream: an event on it waits for what
    blocking streams have queued, as a kernel would. Of a wait for the stream itself
    CUDA does not say that (driver API, "Stream synchronization behavior").
    """
    if is_device_array(x):
        current_stream().record(new_event()).synchronize()


def as_bytes(x: _A) -> _A:
    """View a C-contiguous array as one dimension of uint8, without a copy."""
    if x.dtype.kind == "V":
        x = x.view(f"u{x.dtype.itemsize}")
    return x.reshape(-1).view(np.uint8)


def value_bytes(x: _A) -> _A:
    """Return the bytes of an array that hold its values, in C order, to compare.

    The 80-bit numbers of x86 are padded with 6 bytes, in which anything may be.
    """
    raw = as_bytes(contiguous(x))
    if x.dtype.char in "gG" and np.finfo(np.longdouble).nmant == _MANTISSA_OF_X87:
        width = np.dtype(np.longdouble).itemsize
        kept: _A = raw.reshape(-1, width)[:, :10]
        return contiguous(kept).reshape(-1)
    return raw


def from_bytes(raw: _A, dtype: DType, shape: Shape) -> _A:
    """View uint8 as an array of a dtype and shape; copies where not aligned."""
    if raw.size == 0:
        empty: _A = module_of(raw).empty(shape, dtype)
        return empty
    return raw.view(dtype).reshape(shape)


def describe(x: Array) -> str:
    """Return for example ``float32 (3, 4)``."""
    return f"{x.dtype.name} {tuple(x.shape)}"


def summarize(x: Array) -> str:
    """Return a short text that differs where the values differ in a single bit.

    Small arrays are written out. Of large ones it is the sum of their 64-bit words,
    and a checksum of their ends: as fast as memory, and no reason to trust it against
    an adversary.
    """
    raw = value_bytes(x)
    words = raw[: raw.size // 8 * 8]
    if int(raw.size) <= _SMALL_BYTES:
        total = 0
    else:
        total = int(words.view(np.uint64).sum(dtype=np.uint64))
    ends = to_host(raw[:_SMALL_BYTES]), to_host(raw[-_SMALL_BYTES:])
    checksum = _crc32(ends[1], _crc32(ends[0], total & 0xFFFFFFFF)) ^ total
    if x.size <= _FEW_VALUES:
        return f"{to_host(x).tolist()} (checksum {checksum:x})"
    return f"{describe(x)} with checksum {checksum:x}"


def sample(x: Array) -> str:
    """Return a short text that differs where the values differ, as a rule.

    As `summarize` for up to a MiB. Of larger arrays it looks at some words that are
    spread over it and at its ends, so that its cost does not grow with the size.
    """
    raw = value_bytes(x)
    if int(raw.size) <= SAMPLED_BYTES:
        return summarize(x)
    words = raw[: raw.size // 8 * 8].view(np.uint64)
    spread = words[:: int(words.size) * 8 // SAMPLED_BYTES]
    total = int(spread.sum(dtype=np.uint64))
    ends = to_host(raw[:_SMALL_BYTES]), to_host(raw[-_SMALL_BYTES:])
    checksum = _crc32(ends[1], _crc32(ends[0])) ^ total
    return f"{describe(x)} with checksum {checksum:x}"


def fingerprint_of_array(x: Array, seed: int) -> int:
    """Return a fingerprint that differs where values or dtypes differ, as a rule.

    It is the same on every rank, and for arrays on the host and on a GPU. Of arrays of
    more than 64 KiB it looks at the ends, and at some words that are spread over the
    array: at others with another seed.

    Args:
        x: the array.
        seed: a number that is the same on all ranks.
    """
    raw = value_bytes(x)
    char = ord(x.dtype.char)
    if int(raw.size) <= _SMALL_BYTES:
        return char << 32 | _crc32(to_host(raw))
    words = raw[: raw.size // 8 * 8].view(np.uint64)
    if words.size > _MOST_WORDS:
        step = max(_LEAST_STEP, int(words.size) // _MOST_WORDS)
        words = words[seed % step :: step]
    total = int(words.sum(dtype=np.uint64))
    ends = to_host(raw[:_END_BYTES]), to_host(raw[-_END_BYTES:])
    return _mixed(char, _crc32(ends[1], _crc32(ends[0])), total)


def _mixed(char: int, ends: int, total: int) -> int:
    """Return 62 bits of a dtype, a checksum of the ends and a sum of words."""
    return (total * 0x9E3779B97F4A7C15 + (char << 32 | ends)) & 0x3FFFFFFFFFFFFFFF


def fingerprinter(x: Array) -> Callable[[int], int]:
    """Return a function that gives `fingerprint_of_array` for a seed.

    For arrays that live long: views of the array are made once.

    Args:
        x: an array in C order, which keeps its address.
    """
    if is_device_array(x) or x.dtype.char in "gG":
        return lambda seed: fingerprint_of_array(x, seed)
    raw, char = to_host(as_bytes(x)), ord(x.dtype.char)
    checksum = _crc32
    if raw.size <= _SMALL_BYTES:
        view = raw.data
        return lambda seed: char << 32 | checksum(view)
    words = raw[: raw.size // 8 * 8].view(np.uint64)
    step = 1
    if words.size > _MOST_WORDS:
        step = max(_LEAST_STEP, words.size // _MOST_WORDS)
    first, last = raw[:_END_BYTES].data, raw[-_END_BYTES:].data
    add: Callable[..., np.generic] = np.add.reduce

    def look(seed: int) -> int:
        total = int(add(words[seed % step :: step] if step > 1 else words))
        return _mixed(char, checksum(last, checksum(first)), total)

    return look


# --- streams and page-locked memory, for copies beside other work -------------------


def pinned_empty(count: int, dtype: npt.DTypeLike) -> HostArray:
    """Return a NumPy array in page-locked memory, for copies to and from a GPU."""
    cupyx = importlib.import_module("cupyx")
    made: HostArray = cupyx.empty_pinned(count, dtype)
    return made


def page_lock(x: HostArray) -> Callable[[], None]:
    """Page-lock the memory of a NumPy array, for copies to and from all GPUs.

    Where it is addressed as the host addresses it (all 64-bit systems) no flag is
    needed for that: CUDA runtime API, `cudaHostRegister`.

    Args:
        x: a contiguous array, of whole pages.

    Returns:
        A function that ends it, which must be called while no copy is under way. It
        keeps the memory until then.

    Raises:
        RuntimeError: of CUDA, where the driver or a limit of the system refuses.
    """
    runtime = sys.modules["cupy"].cuda.runtime
    runtime.hostRegister(x.ctypes.data, x.nbytes, 0)

    def unlock() -> None:
        with contextlib.suppress(Exception):  # of a driver that has ended already
            runtime.hostUnregister(x.ctypes.data)

    return unlock


def current_stream() -> Stream:
    """Return CuPy's current stream, on which kernels of this thread are queued."""
    return sys.modules["cupy"].cuda.get_current_stream()


def new_stream() -> Stream:
    """Return a stream of the current GPU that does not wait for the default one."""
    return sys.modules["cupy"].cuda.Stream(non_blocking=True)


def new_event() -> Event:
    """Return an event of the current GPU; until it is recorded it counts as past."""
    return sys.modules["cupy"].cuda.Event(disable_timing=True)


def start_copy_to_host(x: DeviceArray, host: HostArray, stream: Stream) -> None:
    """Queue a copy of ``x`` into page-locked memory of its dtype and shape."""
    x.get(stream=stream, out=host, blocking=False)


def start_copy_to_device(host: HostArray, x: DeviceArray, stream: Stream) -> None:
    """Queue a copy of page-locked memory into ``x``, of its dtype and shape."""
    x.set(host, stream=stream)


def continue_from(stream: Stream | None) -> Stream:
    """Have the current stream wait for what is queued on ``stream``; return it.

    Args:
        stream: the stream on which memory was used last; None: on none.
    """
    current = current_stream()
    if stream is not None and stream != current:
        current.wait_event(stream.record(new_event()))
    return current


def gpu_bus_id(device: Device) -> str:
    """Return the PCI address of a GPU, however CUDA_VISIBLE_DEVICES numbers it."""
    return str(sys.modules["cupy"].cuda.Device(device.index).pci_bus_id)


def nccl_module() -> types.ModuleType:
    """Return CuPy's NCCL.

    Raises:
        ImportError: if the library is not there.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's, which the error repeats
        module = importlib.import_module("cupy.cuda.nccl")
    if not module.available:
        raise ImportError(
            "CuPy does not find libnccl; `pip install nvidia-nccl-cu12` (or -cu13) "
            "brings it"
        )
    return module


def address(x: DeviceArray) -> int:
    """Return where on its GPU a CuPy array begins."""
    return int(x.data.ptr)
