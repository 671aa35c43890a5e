"""Arrays of torch and JAX: the only module that knows what they are.

It imports neither to recognize their arrays: if a library is not in ``sys.modules``,
there are none. A rank that receives a value from another rank that used a library
imports it then, as pickle would.

Torch tensors and JAX arrays on the host become NumPy arrays of the same memory, those
on a GPU CuPy arrays (through DLPack, which orders the streams), and results are turned
back in the same way. `mpidist docs arrays` has the table of what is copied.

DLPack orders reads after writes. It does not tell a library that memory which it gets
back is still in use on another stream: each library reuses memory in the order of its
own streams. So JAX arrays on a GPU are copied in both directions, since JAX has no
stream that others could wait for; torch is told of CuPy's stream if its own is another,
and gets a copy of a result then.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from mpidist._base import gpus
from mpidist._base.types import Array, DType, HostArray, Shape

GuestKind: TypeAlias = Literal["torch", "jax"]
Guest: TypeAlias = Any
"""A torch tensor or a JAX array."""

_CLASSES: Final[dict[GuestKind, str]] = {"torch": "Tensor", "jax": "Array"}
_OUTSIDE: Final = (
    "inside `jax.jit`, `jax.grad`, `jax.vmap` or the like there are no values yet; "
    "call it outside, with what the transformed function returns (for example on the "
    "gradients that `jax.jit(jax.value_and_grad(loss))` returns)"
)


def kind_of(x: object) -> GuestKind | None:
    """Return the library that an array is of; None if it is of neither."""
    modules = sys.modules
    for kind in ("torch", "jax"):
        if kind in modules and isinstance(
            x, getattr(modules[kind], _CLASSES[kind], ())
        ):
            return kind
    return None


def seed(number: int) -> None:
    """Seed the random numbers of torch, if it is imported; JAX has none to seed."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


def shuffles(loader: object) -> bool:
    """Return whether this is a DataLoader of torch with a new order in each pass."""
    torch, sampler = sys.modules.get("torch"), getattr(loader, "sampler", None)
    return torch is not None and isinstance(sampler, torch.utils.data.RandomSampler)


def as_view(x: Guest, kind: GuestKind, call: str) -> Array:
    """Return a torch tensor or JAX array as a NumPy or CuPy array.

    A view of the same memory, except for lazily conjugated or negated tensors, and JAX
    arrays whose layout NumPy does not have. It may have any strides. That of a JAX
    array is read-only. A gradient is not recorded.

    Args:
        x: the tensor or array.
        kind: its library.
        call: the name of the calling function, for the message.

    Raises:
        TypeError: if it has no values (meta tensors, JAX tracers), no dense memory
            (sparse, nested, quantized tensors), or is on another device or several.
    """
    return _view_of_torch(x, call) if kind == "torch" else _view_of_jax(x, call)


class DeviceCopy:
    """A tensor that is not on the host, of which `host` returns a copy that is.

    Attributes:
        dtype: the dtype of the copy.
        shape: its shape.
        nbytes: its size.
        host: makes it.
    """

    def __init__(
        self, dtype: DType, shape: Shape, host: Callable[[], HostArray]
    ) -> None:
        self.dtype, self.shape, self.host = dtype, shape, host
        self.nbytes = math.prod(shape) * dtype.itemsize


def as_stored(x: Guest, kind: GuestKind, call: str) -> Array | DeviceCopy:
    """Return a tensor for a file: an array, or how to copy it from its device.

    Other than `as_view` it takes tensors on any device, and needs no CuPy.

    Raises:
        TypeError: as `as_view`.
    """
    if kind == "jax":
        device = _device_of_jax(x, call)
        if device.platform == "cpu":
            host: HostArray = np.asarray(x)  # mypy with NumPy 2.5 asks for the type
            return host
        return DeviceCopy(x.dtype, x.shape, lambda: np.asarray(x))
    torch = sys.modules["torch"]
    dense = x.layout is torch.strided and not (x.is_nested or x.is_quantized)
    if x.device.type in ("cpu", "meta") or not dense:
        return _view_of_torch(x, call)
    sample: HostArray = _view_of_torch(torch.empty(0, dtype=x.dtype), call)
    shape = tuple(x.shape)
    return DeviceCopy(
        sample.dtype, shape, lambda: _view_of_torch(x.detach().cpu(), call)
    )


def device_of(x: Guest, kind: GuestKind) -> str:
    """Return the type of the device that holds a tensor, such as "cpu" or "cuda"."""
    if kind == "torch":
        return str(x.device.type)
    return str(next(iter(x.devices())).platform)


def from_stored(array: HostArray, kind: GuestKind, device: str) -> Guest:
    """Return an array as a tensor, on a type of device if this machine has it.

    Nobody else may write to the array from now on, as for `restore`.
    """
    x = restore(array, kind)
    if device == "cpu":
        return x
    if kind == "torch":
        module = getattr(sys.modules["torch"], device, None)
        return x.to(device) if module is not None and module.is_available() else x
    jax = sys.modules["jax"]
    return jax.device_put(x, jax.local_devices()[0])


def library(kind: GuestKind) -> Any:
    """Return a library if the program has imported it, else None.

    Also None while it is being imported: the garbage collector may then run code that
    asks for it.
    """
    module = sys.modules.get(kind)
    is_partial = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return None if is_partial else module


def is_bfloat16(dtype: DType) -> bool:
    """Return whether this is the bfloat16 of ml_dtypes."""
    return bool(dtype.kind == "V" and dtype.name == "bfloat16")


def dtype_of(name: str) -> DType:
    """Return the dtype of a name, of NumPy or ml_dtypes.

    Raises:
        TypeError: if there is none, or ml_dtypes is not installed.
    """
    try:
        return np.dtype(name)
    except TypeError:
        try:
            return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
        except (ImportError, AttributeError, TypeError):
            raise TypeError(
                f"NumPy itself has no dtype {name}; install ml_dtypes (`pip install "
                "ml_dtypes`)"
            ) from None


def _view_of_torch(x: Guest, call: str) -> Any:
    torch = sys.modules["torch"]
    kind = x.device.type
    if kind == "meta":
        raise TypeError(
            f"{call}: got a torch tensor on device 'meta', which has no values; write "
            "`torch.zeros_like(x, device='cpu')`, or make the module on the host "
            "(`module.to_empty(device='cpu')`, and then its parameters)"
        )
    if kind not in ("cpu", "cuda"):
        raise TypeError(
            f"{call}: got a torch tensor on device {str(x.device)!r}, neither on the "
            "host nor on a GPU of CUDA; write `x.cpu()`"
        )
    if x.is_nested:
        raise TypeError(
            f"{call}: got a nested torch tensor; write "
            "`torch.nested.to_padded_tensor(x, 0)`, or pass `x.unbind()`, a nest"
        )
    if x.layout is not torch.strided:
        layout = str(x.layout).removeprefix("torch.")
        raise TypeError(
            f"{call}: got a {layout} torch tensor; write `x.to_dense()`, or for rows "
            "of a sparse gradient `mpidist.IndexedSlices(values, indices)`"
        )
    x = x.detach()
    if kind == "cpu" and (x.is_conj() or x.is_neg()):
        x = x.resolve_conj().resolve_neg()
    wanted = None
    try:
        if x.dtype is torch.bfloat16:  # NumPy gets it from ml_dtypes
            wanted = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
            x = x.view(torch.int16)
        found: Array = _from_cuda(x) if kind == "cuda" else x.numpy()
        if kind == "cuda":
            _keep_until_read(x)
        return found if wanted is None else found.view(wanted)
    except ImportError as error:
        raise TypeError(
            f"{call}: for torch tensors of dtype bfloat16 install ml_dtypes (`pip "
            "install ml_dtypes`, or the extra `torch`), or write `x.float()`"
        ) from error
    except (TypeError, RuntimeError, BufferError) as error:
        raise TypeError(
            f"{call}: cannot take a torch tensor of dtype {x.dtype} on {kind} "
            f"({error}); convert it to a dtype that NumPy has, or to the host by "
            "`x.cpu()`; inside `torch.func` transforms and `torch.export` there are "
            "no values yet: call it outside"
        ) from error


def _keep_until_read(x: Guest) -> None:
    """Have torch not reuse the memory of a tensor before CuPy's stream has read it."""
    theirs, ours = _streams(x)
    if theirs != ours:
        x.record_stream(ours)


def _streams(x: Guest) -> tuple[Any, Any]:
    """Return torch's current stream on a tensor's GPU, and CuPy's, both as torch's."""
    cuda, number = sys.modules["torch"].cuda, gpus.current_stream().ptr
    for known in (cuda.current_stream(x.device), cuda.default_stream(x.device)):
        if known.cuda_stream == number:  # 0 is no number of an external stream
            return cuda.current_stream(x.device), known
    return cuda.current_stream(x.device), cuda.ExternalStream(number, device=x.device)


def _device_of_jax(x: Guest, call: str) -> Any:
    """Return the device of an array that has values, on one device."""
    jax = sys.modules["jax"]
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{call}: got a JAX tracer, {x!r:.80}: {_OUTSIDE}")
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        raise TypeError(
            f"{call}: got a JAX array of dtype {x.dtype}, which holds no numbers; for "
            "a random key write `jax.random.key_data(key)`"
        )
    if x.is_deleted():
        raise TypeError(
            f"{call}: got a JAX array of {x.dtype} {x.shape} that has been deleted or "
            "donated to a jitted function; pass what that function returned"
        )
    devices = x.devices()
    if len(devices) > 1:
        raise TypeError(
            f"{call}: got a JAX array on {len(devices)} devices; a replica is one "
            "device: pass an array of one (`jax.device_put(x, jax.local_devices()[0])`"
            "), and one rank for each"
        )
    (device,) = devices
    return device


def _view_of_jax(x: Guest, call: str) -> Array:
    device = _device_of_jax(x, call)
    if device.platform == "cpu":
        host: HostArray = np.asarray(x)
        return host
    try:
        copy = _from_cuda(x).copy()
        gpus.current_stream().synchronize()
        return copy
    except (TypeError, RuntimeError, BufferError) as error:
        raise TypeError(
            f"{call}: cannot take a JAX array on {device.platform} ({error}); for a "
            "copy on the host write `jax.device_get(x)`"
        ) from error


def _from_cuda(x: Guest) -> Array:
    cupy = sys.modules.get("cupy")
    if cupy is None:
        raise TypeError(
            "arrays on a GPU need CuPy, which a strategy on a GPU imports: "
            "`mpidist.MPIStrategy(device='gpu')`"
        )
    return cupy.from_dlpack(x)


def restore(array: Array, kind: GuestKind) -> Guest:
    """Return a NumPy or CuPy array as a torch tensor or JAX array.

    Nobody else may write to the array from now on: tensors share its memory, and so do
    JAX arrays if it begins at a multiple of 64 bytes (XLA copies others).

    Args:
        array: the array, with any strides; a read-only one is copied.
        kind: the library.
    """
    if kind == "torch":
        return _to_torch(array)
    jax = importlib.import_module("jax")
    if not isinstance(array, (np.ndarray, np.generic)):
        copy = jax.numpy.array(jax.dlpack.from_dlpack(array), copy=True)
        return copy.block_until_ready()
    if jax.default_backend() == "cpu":
        return jax.device_put(array)  # without a copy, other than jax.numpy.asarray
    return jax.device_put(array, jax.local_devices(backend="cpu")[0])


def in_layout_of(x: Guest, like: Guest) -> Guest:
    """Return a torch tensor with the strides of another one of its shape.

    torch's fused optimizers read memory in its own order, whatever the strides are, as
    those of a parameter in ``channels_last``.
    """
    if x.shape != like.shape or x.stride() == like.stride():
        return x
    return (
        sys.modules["torch"].empty_like(like, dtype=x.dtype, device=x.device).copy_(x)
    )


def export_copy(
    array: Array,
    stream: Any,
    max_version: tuple[int, int] | None,
    dl_device: tuple[int, int] | None,
) -> Any:
    """Return a copy of an array as a DLPack capsule; the arguments of ``__dlpack__``.

    Raises:
        BufferError: if neither the array's library nor torch can export its dtype.
    """
    own: Any = array.copy()
    if is_bfloat16(array.dtype) and "torch" in sys.modules:
        own = _to_torch(own)  # NumPy cannot export bfloat16
    if not isinstance(own, np.ndarray):
        return own.__dlpack__(stream=stream, max_version=max_version)
    return own.__dlpack__(max_version=max_version, dl_device=dl_device)


def _to_torch(array: Array) -> Guest:
    torch = importlib.import_module("torch")
    short = is_bfloat16(array.dtype)
    raw = array.view(np.int16) if short else array
    if isinstance(raw, (np.ndarray, np.generic)):
        writable = isinstance(raw, np.ndarray) and raw.flags.writeable
        tensor = torch.from_numpy(raw if writable else np.array(raw))
        if not raw.size:  # whose strides are 0 in NumPy, which `view(dtype)` refuses
            tensor = tensor.new_empty(raw.shape)
    else:
        tensor = torch.from_dlpack(raw)
        theirs, ours = _streams(tensor)
        if theirs != ours:
            # CuPy would reuse the memory for a later result while torch's kernels read
            # this one: it waits for the copy.
            tensor = tensor.clone()
            ours.wait_stream(theirs)
    return tensor.view(torch.bfloat16) if short else tensor
