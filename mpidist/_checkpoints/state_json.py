"""The states of objects as JSON, and back to equal objects, without pickle.

JSON has fewer types than Python, so a value that it lacks is a dictionary with one key
that begins with "$" and names the type. Reading calls no constructor that the file
chooses, and allocates no more than the file's text.
"""

from __future__ import annotations

import base64
import math
from typing import Any, TypeAlias

import numpy as np

from mpidist._base.types import HostArray

State: TypeAlias = Any
"""The state of a user's object: None, bools, numbers, strings, bytes and NumPy arrays,
in lists, tuples and dicts."""
Json: TypeAlias = Any
"""What `json.loads` returns."""

_ARRAY_KINDS = "biufc"  # bool, integers, floating, complex


def encode(state: State, where: str) -> Json:
    """Return a state as JSON that `decode` converts back to equal objects.

    Args:
        state: the state.
        where: the name of the object that has it, for the message.

    Raises:
        TypeError: if the state has an object of another type.
    """
    if state is None or isinstance(state, bool) or type(state) is int:
        return state
    if isinstance(state, np.generic) and not isinstance(state, (np.str_, np.bytes_)):
        return {"$scalar": _encode_array(np.asarray(state), where)}
    if isinstance(state, str):
        return str(state)
    if isinstance(state, float):
        return float(state) if math.isfinite(state) else {"$float": repr(float(state))}
    if isinstance(state, complex):
        return {"$complex": [repr(state.real), repr(state.imag)]}
    if isinstance(state, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(state).decode()}
    if isinstance(state, np.ndarray):
        return {"$array": _encode_array(state, where)}
    if type(state) is list:
        return [encode(item, where) for item in state]
    if type(state) is tuple:
        return {"$tuple": [encode(item, where) for item in state]}
    if isinstance(state, dict):
        if all(type(key) is str and not key.startswith("$") for key in state):
            return {key: encode(item, where) for key, item in state.items()}
        pairs = [[encode(k, where), encode(v, where)] for k, v in state.items()]
        return {"$dict": pairs}
    raise TypeError(
        f"{where}: its state has {state!r:.80} of type {type(state).__name__}, which "
        "cannot be saved; a state is made of None, bools, numbers, strings, bytes and "
        "NumPy arrays, in lists, tuples and dicts"
    )


def decode(value: Json) -> State:
    """Return the state that `encode` has encoded.

    Raises:
        Exception: of any kind, if `encode` does not return such a value.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: decode(item) for key, item in value.items()}
    ((key, content),) = value.items()
    match key:
        case "$scalar":
            return _decode_array(content)[()]
        case "$array":
            return _decode_array(content)
        case "$float":
            return float(content)
        case "$complex":
            real, imaginary = content
            return complex(float(real), float(imaginary))
        case "$bytes":
            return base64.b64decode(content, validate=True)
        case "$tuple":
            return tuple(decode(item) for item in content)
        case "$dict":
            return {decode(k): decode(v) for k, v in content}
    raise ValueError(f"unknown type {key!r}")


def _encode_array(x: HostArray, where: str) -> Json:
    if x.dtype.kind not in _ARRAY_KINDS:
        raise TypeError(
            f"{where}: its state has an array of dtype {x.dtype}, which cannot be "
            "saved; expected a bool, integer, floating or complex dtype"
        )
    data = base64.b64encode(x.tobytes()).decode()
    return {"dtype": x.dtype.str, "shape": list(x.shape), "base64": data}


def _decode_array(content: Json) -> HostArray:
    dtype = np.dtype(str(content["dtype"]))
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"an array of dtype {dtype}")
    # `frombuffer` and `reshape` compare the sizes before anything is allocated.
    data = np.frombuffer(base64.b64decode(content["base64"], validate=True), dtype)
    return data.reshape(content["shape"]).copy()
