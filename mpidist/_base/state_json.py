"""The states of objects as JSON and arrays, and back to equal objects, without pickle.

JSON has fewer types than Python, so a value that it lacks is a dictionary with one key
that begins with "$" and names the type. Tensors of torch and JAX and large NumPy arrays
are taken out, to be stored as arrays; the JSON has their names. Reading calls no
constructor that the file chooses, and allocates no more than the file's text.
"""

from __future__ import annotations

import base64
import collections
import functools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import numpy as np

from mpidist._base import backend, checksums, guests
from mpidist._base.fingerprint import fingerprint_of
from mpidist._base.guests import DeviceCopy
from mpidist._base.types import Array, HostArray, record

State: TypeAlias = Any
"""The state of a user's object: None, bools, numbers, strings, bytes, NumPy arrays and
tensors, in lists, tuples and dicts."""
Json: TypeAlias = Any
"""What `json.loads` returns."""
Stored: TypeAlias = Array | DeviceCopy
OnTensor: TypeAlias = Callable[[str, str, str], State]
"""Gets a library, the name of an array, and a type of device; returns the tensor."""

_ARRAY_KINDS: Final = "biufc"  # bool, integers, floating, complex
_MOST_INLINE: Final = 2**14  # bytes of a NumPy array in the JSON
_LIBRARIES: Final[dict[str, guests.GuestKind | None]] = {
    "numpy": None,
    "torch": "torch",
    "jax": "jax",
}


def host_copy(x: Stored) -> HostArray:
    """Return an array on the host, which may be the same memory."""
    return x.host() if isinstance(x, DeviceCopy) else backend.to_host(x)


def own_copy(x: Stored, out: HostArray | None = None) -> HostArray:
    """Return a copy on the host; in ``out``, which may be overwritten, if it fits."""
    if isinstance(x, DeviceCopy) or backend.is_device_array(x):
        return host_copy(x)
    if out is None or out.shape != x.shape or out.dtype != x.dtype:
        return np.array(x)
    out[...] = x
    return out


def checksum(x: Stored) -> int:
    """Return a number that differs if an array does."""
    array = x.host() if isinstance(x, DeviceCopy) else x
    return fingerprint_of(checksums.summarize(array))


@record
class Packed:
    """A state as JSON, and the arrays that it names."""

    value: Json
    arrays: dict[str, Stored]

    @functools.cached_property
    def checksums(self) -> dict[str, int]:
        """The checksums of the arrays, by name."""
        return {name: checksum(x) for name, x in self.arrays.items()}

    @property
    def number(self) -> int:
        """A number that differs if the state does."""
        text = json.dumps(_each_dict(self.value, _sort_pairs), sort_keys=True)
        return fingerprint_of((text, sorted(self.checksums.items())))


def pack(state: State, name: str, where: str) -> Packed:
    """Return a state as JSON and arrays, whose names begin with ``name``.

    Raises:
        TypeError: if the state has an object of another type.
    """
    packer = _Packer(where)
    return Packed(packer.encode(state, name), packer.arrays)


class _Packer:
    def __init__(self, where: str) -> None:
        self._where = where
        self.arrays: dict[str, Stored] = {}

    def encode(self, state: State, at: str) -> Json:
        if state is None or isinstance(state, bool) or type(state) is int:
            return state
        if isinstance(state, str):
            return str.__str__(state)  # of a member of an enum its value
        if isinstance(state, (bytes, bytearray)):
            text = base64.b64encode(state).decode()
            return {"$bytes" if isinstance(state, bytes) else "$bytearray": text}
        if isinstance(state, (np.ndarray, np.generic)):
            return self._numpy(state, at)
        if isinstance(state, float):
            finite = math.isfinite(state)
            return float(state) if finite else {"$float": repr(float(state))}
        if isinstance(state, complex):
            return {"$complex": [repr(state.real), repr(state.imag)]}
        if isinstance(state, (list, tuple, dict)):
            return self._container(state, at)
        kind = guests.kind_of(state)
        if kind is not None:
            x = guests.as_stored(state, kind, f"{self._where}: {at!r}")
            return self._tensor(kind, x, at, guests.device_of(state, kind))
        raise self._refused(state, at)

    def _container(self, state: State, at: str) -> Json:
        if isinstance(state, collections.Counter):
            return {"$counter": self._pairs(state, at)}
        if isinstance(state, dict):
            if all(type(key) is str and not key.startswith("$") for key in state):
                return {k: self.encode(x, f"{at}/{k}") for k, x in state.items()}
            return {"$dict": self._pairs(state, at)}
        items = [self.encode(x, f"{at}/{i}") for i, x in enumerate(state)]
        if type(state) is list:
            return items
        if type(state) is tuple or type(state).__name__ == "Size":  # of torch
            return {"$tuple": items}
        raise self._refused(state, at)

    def _pairs(self, state: dict[Any, State], at: str) -> Json:
        return [
            [self.encode(key, at), self.encode(x, f"{at}/{key}")]
            for key, x in state.items()
        ]

    def _numpy(self, x: Any, at: str) -> Json:
        if backend.is_masked(x):  # the mask would be lost
            raise self._refused(x, at)
        if x.dtype.kind not in _ARRAY_KINDS:
            raise TypeError(
                f"{self._where}: {at!r}: its state has an array of dtype {x.dtype}, "
                "which cannot be saved; expected a bool, integer, floating or complex "
                "dtype"
            )
        if x.nbytes > _MOST_INLINE:
            x = x.astype(x.dtype.newbyteorder("="), copy=False)  # that of the file
            return self._tensor("numpy", x, at, "cpu")
        data = base64.b64encode(x.tobytes()).decode()
        content = {"dtype": x.dtype.str, "shape": list(x.shape), "base64": data}
        return {"$array" if isinstance(x, np.ndarray) else "$scalar": content}

    def _tensor(self, library: str, x: Stored, at: str, device: str) -> Json:
        name = at.replace("\0", "?")
        while name in self.arrays:  # two keys may be the same text
            name += "'"
        self.arrays[name] = x
        return {"$tensor": [library, name, device]}

    def _refused(self, state: State, at: str) -> TypeError:
        name = at.partition("/")[0]
        inside = "" if at == name else f" at {at!r}"
        return TypeError(
            f"{self._where}: {name!r}: its state has {state!r:.80} of type "
            f"{type(state).__name__}{inside}, which cannot be saved; a state is made "
            "of None, bools, numbers, strings, bytes, NumPy arrays and tensors of "
            "torch or JAX, in lists, tuples and dicts"
        )


def unpack(value: Json, tensor: OnTensor) -> State:
    """Return the state that `pack` has encoded; ``tensor`` returns its arrays.

    Raises:
        Exception: of any kind, if `pack` does not return such a value.
    """

    def decode(found: dict[str, Any]) -> State:
        if not any(key.startswith("$") for key in found):
            return found
        ((key, content),) = found.items()
        if key == "$tensor":
            library, name, device = content
            if library not in _LIBRARIES or not device.isidentifier():
                raise ValueError(f"a tensor of {library!r} on {device!r}")
            return tensor(library, name, device)
        return _DECODERS[key](content)

    return _each_dict(value, decode)


def _each_dict(value: Json, replace: Callable[[dict[str, Any]], Any]) -> Any:
    """Return JSON with each of its dicts replaced, the innermost first."""
    return json.loads(json.dumps(value), object_hook=replace)


def tensors_from(read: Callable[[str], HostArray], *, imports: bool = True) -> OnTensor:
    """Return what `unpack` calls for each tensor: it takes the memory of an array.

    Without ``imports`` the tensor of a library that the program does not use is an
    array of NumPy.
    """

    def tensor(library: str, name: str, device: str) -> State:
        x, kind = read(name), _LIBRARIES[library]
        if kind is None or not (imports or guests.library(kind)):
            return x
        return guests.from_stored(x, kind, device)

    return tensor


def array_names(values: Iterable[Json]) -> list[str]:
    """Return the names of the arrays that the JSON of states names, each once."""
    names: dict[str, None] = {}
    for value in values:
        unpack(value, lambda library, name, device: names.setdefault(name))
    return [*names]


def renamed(value: Json, names: dict[str, str]) -> Json:
    """Return the JSON of a state with other names for some of its arrays."""

    def rename(found: dict[str, Any]) -> Json:
        if "$tensor" in found:
            library, name, device = found["$tensor"]
            found["$tensor"] = [library, names.get(name, name), device]
        return found

    return _each_dict(value, rename)


def _sort_pairs(found: dict[str, Any]) -> Json:
    """Put the pairs of a dict that is not one in JSON in an order of their keys."""
    for tag in found.keys() & {"$dict", "$counter"}:
        found[tag].sort(key=json.dumps)
    return found


def _decode_array(content: Json) -> HostArray:
    dtype = np.dtype(str(content["dtype"]))
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"an array of dtype {dtype}")
    # `frombuffer` and `reshape` compare the sizes before anything is allocated.
    data = np.frombuffer(base64.b64decode(content["base64"], validate=True), dtype)
    return data.reshape(content["shape"]).copy()


_DECODERS: Final[dict[str, Callable[[Json], State]]] = {
    "$scalar": lambda x: _decode_array(x)[()],
    "$array": _decode_array,
    "$float": float,
    "$complex": lambda x: complex(*map(float, x)),
    "$bytes": functools.partial(base64.b64decode, validate=True),
    "$bytearray": lambda x: bytearray(base64.b64decode(x, validate=True)),
    "$tuple": tuple,
    "$dict": dict,
    "$counter": lambda x: collections.Counter(dict(x)),
}
