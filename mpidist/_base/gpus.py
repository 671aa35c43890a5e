"""The GPUs of this machine, their streams, and page-locked memory; imports CuPy.

CuPy is imported only to look for a GPU when a strategy is made.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings
from typing import Any, Literal, TypeAlias

import numpy as np

from mpidist._base.expect import expect
from mpidist._base.types import DeviceArray, HostArray, record

Stream: TypeAlias = Any
"""A `cupy.cuda.Stream`."""
Event: TypeAlias = Any
"""A `cupy.cuda.Event`."""


@record
class Device:
    """The device of a replica's arrays: the host, or one GPU."""

    kind: Literal["cpu", "gpu"]
    index: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"

    def name_on(self, rank: int) -> str:
        """Return the device string, in the style of TensorFlow."""
        return f"/rank:{rank}/device:{self.kind.upper()}:{self.index}"

    @property
    def array_module(self) -> Any:
        """NumPy or CuPy, which has no types."""
        if self.kind == "gpu":
            return sys.modules["cupy"]
        return np

    def activate(self) -> None:
        """Make this the current device of the thread."""
        if self.kind == "gpu":
            sys.modules["cupy"].cuda.Device(self.index).use()


def select_device(request: Any, local_rank: int) -> Device:
    """Return the device that ``"auto"``, ``"gpu:1"`` and the like mean.

    Args:
        request: "auto", "cpu", "gpu" or "gpu:K".
        local_rank: this rank's number on its node; GPUs are assigned round-robin.

    Raises:
        TypeError, ValueError: if the request is invalid.
        RuntimeError: if the request is "gpu" and CuPy or the GPU is missing.
    """
    call, what = "MPIStrategy", '`device` to be "auto", "cpu", "gpu" or "gpu:K"'
    expect(isinstance(request, str), call, what, request)
    kind, _, index = request.lower().partition(":")
    if request.lower() == "cpu":
        return Device("cpu")
    fits = kind in ("auto", "gpu") and (not index or index.isdigit())
    expect(fits, call, what, request, error=ValueError)
    if kind == "auto" and index:
        raise ValueError(f'MPIStrategy: write device="gpu:{index}", not {request!r}')
    count, reason = count_gpus()
    if count == 0:
        if kind == "auto":
            return Device("cpu")
        raise RuntimeError(
            f'MPIStrategy: device={request!r}, but {reason}; write device="cpu" '
            "(`MirroredStrategy()`, without its `devices`), or install the extra "
            "`cuda12` or `cuda13` on a machine with a GPU"
        )
    chosen = int(index) if index else local_rank % count
    if chosen >= count:
        raise ValueError(
            f"MPIStrategy: device={request!r}, but this machine has {count} GPU(s), "
            f"numbered from 0"
        )
    return Device("gpu", chosen)


def count_gpus() -> tuple[int, str]:
    """Return the number of GPUs, and the reason if it is 0."""
    if "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:
        return 0, "CuPy is not installed"
    try:
        import cupy

        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # a broken CuPy or driver counts as none
        return 0, f"CuPy finds no GPU ({type(error).__name__}: {error})"
    return count, "" if count else "CuPy finds no GPU"


# --- streams and page-locked memory, for copies beside other work -------------------


def pinned_empty(nbytes: int) -> HostArray:
    """Return bytes (uint8) in page-locked memory, for copies to and from a GPU."""
    return importlib.import_module("cupyx").empty_pinned(nbytes, "u1")


def current_stream() -> Stream:
    """Return CuPy's current stream, on which this thread queues kernels."""
    return sys.modules["cupy"].cuda.get_current_stream()


def new_event() -> Event:
    """Return an event of the current GPU; it counts as complete until recorded."""
    return sys.modules["cupy"].cuda.Event(disable_timing=True)


def gpu_bus_id(device: Device) -> str:
    """Return the PCI address of a GPU, which does not depend on its number."""
    return str(sys.modules["cupy"].cuda.Device(device.index).pci_bus_id)


def nccl_module() -> types.ModuleType:
    """Return CuPy's NCCL.

    Raises:
        ImportError: if the library is missing.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's warning, which the error repeats
        module = importlib.import_module("cupy.cuda.nccl")
    if not module.available:
        raise ImportError(
            "CuPy does not find libnccl; `pip install nvidia-nccl-cu12` (or -cu13) "
            "brings it"
        )
    return module


def address(x: DeviceArray) -> int:
    """Return the address of a CuPy array on its GPU."""
    return int(x.data.ptr)
