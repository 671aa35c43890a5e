"""Results as plain data: made, put together from the ranks, compared, written short.

A result is a nest in JSON: None, True, False and texts are themselves; everything else
is an object with one of these keys:

- ``number``: a Python number;
- ``array``, with ``dtype`` and ``shape``: the elements, as nested lists;
- ``list``, ``tuple`` (with the ``type``, of a named one) and ``dict``;
- ``replicas``: one result per replica;
- ``own``: this rank's entry of the former, until the ranks are put together;
- ``rank0``: what counts on rank 0 only, until then;
- ``error``: the name of an exception's class, with its ``bases`` and whether the
  message ``says`` what was asked for; ``uncaught`` if it ended the program, which is
  always a failure;
- ``ranks``: what the ranks have, where that should be the same and is not.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Result = Any

# How close the results of one dtype have to be: the two sides add in another order.
TOLERANCE = {"float16": 2e-3, "float32": 1e-6, "complex64": 1e-6}
OTHER_TOLERANCE = 1e-12


@dataclasses.dataclass(frozen=True)
class Described:
    """A result as plain data already: of what may change later."""

    result: Result


@dataclasses.dataclass(frozen=True)
class Replicas:
    """One value per replica."""

    values: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Own:
    """The value of this rank's replica."""

    value: Any


@dataclasses.dataclass(frozen=True)
class OnRank0:
    """A value of which only rank 0's counts."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Raised:
    """That something raised: the name of the class, and those of its bases."""

    error: str
    says: bool | None = None
    bases: Sequence[str] = ()
    uncaught: bool = False
    message: str = dataclasses.field(default="", compare=False)

    @classmethod
    def of(
        cls, error: BaseException, says: str | None = None, *, uncaught: bool = False
    ) -> Raised:
        """Describe an exception; ``says``: text to look for in its message."""
        bases = [
            base.__name__
            for base in type(error).__mro__[1:]
            if base not in (Exception, BaseException, object)
        ]
        found = None if says is None else says.lower() in str(error).lower()
        return cls(type(error).__name__, found, bases, uncaught, str(error))


def describe(value: Any, to_array: Callable[[Any], Any] = lambda x: None) -> Result:
    """Return a value as plain data.

    Args:
        value: a nest of plain values, arrays and the classes above.
        to_array: returns the NumPy array of a side's own array, else None.

    Raises:
        TypeError: for a leaf of another kind.
    """

    def inner(x: Any) -> Result:
        return describe(x, to_array)

    match value:
        case None | bool() | str():
            return value
        case enum.Enum():
            return value.name
        case int() | float() if type(value) in (int, float):
            return {"number": value}
        case Described():
            return value.result
        case Replicas():
            return {"replicas": [inner(x) for x in value.values]}
        case Own():
            return {"own": inner(value.value)}
        case OnRank0():
            return {"rank0": inner(value.value)}
        case Raised():
            result: dict[str, Any] = {"error": value.error, "bases": [*value.bases]}
            if value.says is not None:
                result["says"] = value.says
            if value.uncaught:
                result["uncaught"] = True
            return result
        case tuple():
            name = type(value).__name__
            return {"tuple": [inner(x) for x in value], "type": name}
        case list():
            return {"list": [inner(x) for x in value]}
        case Mapping():
            return {"dict": {str(k): inner(value[k]) for k in sorted(value)}}
        case np.ndarray() | np.generic():
            return _describe_array(np.asarray(value))
    array = to_array(value)
    if array is None:
        raise TypeError(
            f"a program returned {type(value).__name__} {value!r:.200}; write "
            "`d.replicas(value)` for a distributed one"
        )
    return _describe_array(array)


def _describe_array(x: Any) -> Result:
    if x.dtype.kind in "OSU":
        texts = [t.decode() if isinstance(t, bytes) else str(t) for t in x.ravel()]
        return texts[0] if x.shape == () else {"list": texts}
    data = np.stack([x.real, x.imag], axis=-1) if x.dtype.kind == "c" else x
    if data.dtype.name in ("float16", "bfloat16"):
        data = data.astype(np.float64)
    return {"array": data.tolist(), "dtype": x.dtype.name, "shape": [*x.shape]}


# --- the ranks of one run, put together -----------------------------------------------


def merge(ranks: Sequence[Result]) -> Result:
    """Put together what the ranks of one run have, in the order of the ranks."""
    first = ranks[0]
    if all(isinstance(r, dict) and "error" in r for r in ranks):
        return _merge_errors(ranks)
    if not isinstance(first, dict):
        return first if all(r == first for r in ranks) else {"ranks": [*ranks]}
    if "rank0" in first:
        return first["rank0"]
    if not all(isinstance(r, dict) and r.keys() == first.keys() for r in ranks):
        return {"ranks": [*ranks]}
    if "own" in first:
        return {"replicas": [r["own"] for r in ranks]}
    for key in ("list", "tuple"):
        if key in first:
            columns = [r[key] for r in ranks]
            if len({len(c) for c in columns}) > 1:
                return {"ranks": [*ranks]}
            return {**first, key: [merge(row) for row in zip(*columns, strict=True)]}
    if "dict" in first:
        if any(r["dict"].keys() != first["dict"].keys() for r in ranks):
            return {"ranks": [*ranks]}
        return {
            "dict": {k: merge([r["dict"][k] for r in ranks]) for k in first["dict"]}
        }
    return first if all(equal(first, r) for r in ranks[1:]) else {"ranks": [*ranks]}


def _merge_errors(ranks: Sequence[Result]) -> Result:
    """Return the error: what one replica raises, the others have as ReplicaError."""
    own = [r for r in ranks if r["error"] != "ReplicaError"] or [*ranks]
    if any(r["error"] != own[0]["error"] for r in own):
        return {"ranks": [*ranks]}
    said = [r.get("says") for r in own]
    return {**own[0], "says": all(said)} if said[0] is not None else own[0]


# --- comparing ------------------------------------------------------------------------


def equal(a: Result, b: Result, *, loose: bool = False) -> bool:
    """Return whether two results are the same.

    A Python number equals a scalar array of any dtype with its value. Arrays have to
    agree in dtype and shape, and in their elements to within `TOLERANCE`. An error of
    ``b`` equals one of ``a`` also if it is of a subclass.

    Args:
        a: the expected one, or TensorFlow's.
        b: the other.
        loose: whether lists of numbers equal arrays of any dtype, and errors without
            a ``says`` those with one, and lists the entries of the replicas, as in
            expected values that people write.
    """
    if loose:
        if isinstance(a, dict) and "list" in a and isinstance(b, dict) and "array" in b:
            numbers = _numbers(a)
            b_numbers = np.asarray(b["array"], dtype=object)
            return numbers is not None and _close(numbers, b_numbers.tolist(), 1e-6)
        if isinstance(a, dict) and "list" in a and isinstance(b, dict):
            for key in {"replicas", "tuple"} & b.keys():
                a = {key: a["list"], "type": b.get("type")}
        if isinstance(a, dict) and "tuple" in a and isinstance(b, dict):
            a = {**a, "type": b.get("type")}
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return type(a) is type(b) and a == b
    if "number" in a or "number" in b:
        x, y = _scalar(a), _scalar(b)
        return x is not None and y is not None and _close(x, y, _tolerance(a, b))
    if "array" in a and "array" in b:
        return (
            a["dtype"] == b["dtype"]
            and a["shape"] == b["shape"]
            and _close(a["array"], b["array"], _tolerance(a, b))
        )
    if "uncaught" in a or "uncaught" in b:
        return False
    if "error" in a and "error" in b:
        related = a["error"] in (b["error"], *b["bases"])
        return related and (a.get("says", True) == b.get("says", True))
    for key in ("list", "tuple", "replicas", "ranks"):
        if key in a and key in b:
            return (
                a.get("type") == b.get("type")
                and len(a[key]) == len(b[key])
                and all(
                    equal(x, y, loose=loose)
                    for x, y in zip(a[key], b[key], strict=True)
                )
            )
    if "dict" in a and "dict" in b:
        return a["dict"].keys() == b["dict"].keys() and all(
            equal(a["dict"][k], b["dict"][k], loose=loose) for k in a["dict"]
        )
    return False


def _scalar(x: Result) -> Any:
    if "number" in x:
        return x["number"]
    return x["array"] if x.get("shape") == [] else None


def _numbers(x: Result) -> Any:
    """Return nested lists of numbers for such a result, else None."""
    if isinstance(x, bool):
        return x
    if isinstance(x, dict) and "number" in x:
        return x["number"]
    if isinstance(x, dict) and "list" in x:
        rows = [_numbers(row) for row in x["list"]]
        return None if any(row is None for row in rows) else rows
    return None


def _tolerance(*results: Result) -> float:
    return max(TOLERANCE.get(r.get("dtype"), OTHER_TOLERANCE) for r in results)


def _close(x: Any, y: Any, tolerance: float) -> bool:
    if isinstance(x, list) or isinstance(y, list):
        return (
            isinstance(x, list)
            and isinstance(y, list)
            and len(x) == len(y)
            and all(_close(a, b, tolerance) for a, b in zip(x, y, strict=True))
        )
    if math.isnan(x) or math.isnan(y):
        return math.isnan(x) and math.isnan(y)
    if math.isinf(x) or math.isinf(y):
        return bool(x == y)
    return abs(x - y) <= tolerance * max(abs(x), abs(y))


# --- writing --------------------------------------------------------------------------


def show(x: Result) -> str:
    """Return a result as a short text, for the report and for failures."""
    if not isinstance(x, dict):
        return repr(x)
    if "number" in x:
        return _show_number(x["number"])
    if "array" in x:
        text = _show_numbers(x["array"])
        empty = "" if math.prod(x["shape"]) else f" of shape {tuple(x['shape'])}"
        usual = x["dtype"] in ("float32", "bool")
        return text + empty if usual else f"{text}{empty} {x['dtype']}"
    if "error" in x:
        missing = x.get("says") is False
        ended = "the program ended with " if x.get("uncaught") else ""
        return ended + x["error"] + (" (with another message)" if missing else "")
    if "dict" in x:
        return "{" + ", ".join(f"{k}: {show(v)}" for k, v in x["dict"].items()) + "}"
    if "replicas" in x:
        return " | ".join(show(v) for v in x["replicas"])
    if "ranks" in x:
        rows = [f"rank {i}: {show(v)}" for i, v in enumerate(x["ranks"])]
        return "the ranks differ: " + "; ".join(rows)
    if "tuple" in x:
        return "(" + ", ".join(show(v) for v in x["tuple"]) + ")"
    if "list" in x:
        return "[" + ", ".join(show(v) for v in x["list"]) + "]"
    return repr(x)


def _show_number(x: Any) -> str:
    return f"{x:.6g}" if isinstance(x, float) else str(x)


def _show_numbers(x: Any) -> str:
    if isinstance(x, list):
        return "[" + ", ".join(_show_numbers(row) for row in x) + "]"
    return _show_number(x)
