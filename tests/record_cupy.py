"""Write down what CuPy has: names, signatures, and types that it takes and gives.

    python tests/record_cupy.py tests/cupy_records

makes ``VERSION.json`` there, from the CuPy that this Python imports. It needs no GPU
and no driver, but the library of NCCL (`pip install cupy-cuda12x nvidia-nccl-cu12`).
The stand-in of the tests is held to these records everywhere, and they to the package
where it is installed (tests/_collectives/test_posing.py).
"""

from __future__ import annotations

import importlib
import inspect
import json
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

MODULES = ("cupy", "cupyx", "cupy.cuda", "cupy.cuda.nccl", "cupy.cuda.runtime")
CLASSES = (
    "cupy.ndarray",
    "cupy.cuda.Device",
    "cupy.cuda.Event",
    "cupy.cuda.MemoryPointer",
    "cupy.cuda.Stream",
    "cupy.cuda.nccl.NcclCommunicator",
)
FUNCTIONS = (
    "cupyx.empty_pinned",
    "cupy.cuda.get_current_stream",
    "cupy.cuda.nccl.get_unique_id",
    "cupy.cuda.nccl.groupEnd",
    "cupy.cuda.nccl.groupStart",
    "cupy.cuda.runtime.getDeviceCount",
    *(
        f"cupy.{name}"
        for name in (
            *("arange", "argmin", "array", "asarray", "ascontiguousarray"),
            *("concatenate", "empty", "full", "max", "mean", "min", "moveaxis"),
            *("ones", "prod", "stack", "sum", "where", "zeros"),
        )
    ),
)
_ID_BYTES = 128


def find(path: str) -> Any:
    """Return a module, class or function by its name."""
    module, _, name = path.rpartition(".")
    if path in MODULES:
        return importlib.import_module(path)
    return getattr(find(module) if module else importlib.import_module(path), name)


def names(owner: Any) -> list[str]:
    return [n for n in dir(owner) if not n.startswith("_") or n in _PROTOCOLS]


_PROTOCOLS = ("__array__", "__array_function__", "__array_ufunc__", "__eq__")


class _Word:
    """A default, whose text is an expression of Python."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        if isinstance(self._value, type):
            return self._value.__name__
        return repr(self._value)


def signature(thing: Any) -> str | None:
    """Return the text of a signature; of compiled ones the first line of the help."""
    try:
        found = inspect.signature(thing)
        bare = [
            p.replace(annotation=p.empty, default=_Word(p.default))
            if p.default is not p.empty
            else p.replace(annotation=p.empty)
            for p in found.parameters.values()
        ]
        return str(found.replace(parameters=bare, return_annotation=found.empty))
    except (TypeError, ValueError):
        first = (getattr(thing, "__doc__", None) or "").strip().partition("\n")[0]
        name, bracket, rest = first.partition(" -> ")[0].partition("(")
        is_one = bracket and name.replace(".", "_").isidentifier()
        rest = rest.replace("=u'", "='")
        return f"({rest}" if is_one else None


def outcome(call: Callable[[], Any]) -> str:
    """Return what a call gives: the name of a type, of an error, and its message."""
    try:
        return type(call()).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def array_somewhere() -> Any:
    """Return a CuPy array of 3 x 4 float32, in memory of the host: for its types."""
    cupy = importlib.import_module("cupy")
    host = np.zeros(12, np.float32)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, device_id=0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray((3, 4), np.float32, pointer)


def refusals(array: Any) -> dict[str, str]:
    """Return what an array of 3 x 4 float32 says to what it does not take."""
    like = np.zeros((3, 4), np.float32)
    return {
        "set(list)": outcome(lambda: array.set([1.0])),
        "set(other dtype)": outcome(lambda: array.set(like.astype("f8"))),
        "set(other shape)": outcome(lambda: array.set(like.reshape(-1))),
        "numpy.asarray": outcome(lambda: np.asarray(array)),
        "ctypes": outcome(lambda: array.ctypes),
        "flags.aligned": outcome(lambda: array.flags.aligned),
    }


def types_of_array(array: Any) -> dict[str, str]:
    """Return the types of what the attributes of an array give."""
    paths = ("data.ptr", "device.id", "dtype", "flags.c_contiguous", "nbytes", "ndim")
    found = {}
    for path in (*paths, "shape", "size"):
        value = array
        for name in path.split("."):
            value = getattr(value, name)
        found[path] = type(value).__name__
    flat = array.reshape(-1)
    found["address of [2:]"] = str(flat[2:].data.ptr - array.data.ptr)
    found["view(uint8).size"] = str(flat.view(np.uint8).size)
    return found


def types_of_nccl(nccl: Any) -> dict[str, str]:
    """Return what NCCL's id is, and which ids a communicator takes.

    Without a GPU a good id ends in an error of NCCL, and another one before that.
    """
    key = nccl.get_unique_id()
    integers = tuple(range(-_ID_BYTES // 2, _ID_BYTES // 2))
    found = {"get_unique_id()": f"{type(key).__name__} of {len(key)}"}
    for text, other in (
        ("bytes", bytes(_ID_BYTES)),
        ("tuple", integers),
        ("bytearray", bytearray(_ID_BYTES)),
        ("short bytes", b"x"),
    ):
        said = outcome(lambda other=other: nccl.NcclCommunicator(1, other, 0))
        refused = said.startswith(("TypeError", "ValueError"))
        found[f"NcclCommunicator({text})"] = said if refused else "taken"
    return found


def record() -> dict[str, Any]:
    """Return what is to be written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cupy = importlib.import_module("cupy")
        nccl = importlib.import_module("cupy.cuda.nccl")
        owners = {path: find(path) for path in (*MODULES, *CLASSES)}
        array = array_somewhere()
        owners["cupy.ndarray.flags"] = array.flags
        owners["cupy.cuda.Stream"] = cupy.cuda.Stream.null  # attributes of objects, too
        methods = {
            f"{path}.{name}": signature(getattr(find(path), name))
            for path in CLASSES
            for name in names(owners[path])
            if callable(getattr(find(path), name, None))
        }
        made = {path: signature(find(path)) for path in CLASSES}
        functions = {path: signature(find(path)) for path in FUNCTIONS}
        signatures = methods | made | functions
        return {
            "version": cupy.__version__,
            "names": {path: names(owner) for path, owner in owners.items()},
            "signatures": {k: v for k, v in sorted(signatures.items()) if v},
            "constants": {
                n: getattr(nccl, n) for n in dir(nccl) if n.startswith("NCCL_")
            },
            "array": types_of_array(array),
            "refusals": refusals(array),
            "nccl": types_of_nccl(nccl),
        }


if __name__ == "__main__":
    made = record()
    path = pathlib.Path(sys.argv[1]) / f"{made['version']}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    print(path)
