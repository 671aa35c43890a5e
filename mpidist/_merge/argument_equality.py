"""Whether an argument of `merge_call` is the same on all ranks.

Arrays and numbers are not compared: each replica has its own. For any other argument
the header of the call contains a fingerprint; if it is the same on all ranks, merge_fn
receives the argument unchanged. It is the fingerprint

1. for an object that holds variables or a strategy (a model, an optimizer): of its
   class, and of the first variable that it holds. Such an object belongs to the
   program, each rank has its own, and it cannot be copied. It is found through
   attributes, slots, lists, tuples and dicts, as names are (`object_parts`);
2. for any other object: of its pickled form, made independent of the process: the order
   of sets and dicts and the identity of strings have no effect;
3. for an object of this package that cannot be pickled (an optimizer before its first
   step, an iterator): of its class, as in 1.

Other objects (a lock, an open file, a generator) cannot be compared: all ranks raise an
error that names the argument. A merge_fn can still close over them.
"""

from __future__ import annotations

import functools
import io
import types
from collections.abc import Callable
from typing import Any, Final

from mpidist._base.fingerprint import fingerprint, fingerprint_of_bytes
from mpidist._merge import object_parts
from mpidist._merge.commands import Pickler
from mpidist._merge.object_parts import ATOMS, function_in, is_global, state_of
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.distributed import DistributedValues
from mpidist._values.variable import Variable, storage_of

_MOST_FUNCTIONS: Final = 512


def fingerprint_of_argument(
    x: Any, where: Callable[[], str], group: ReplicaGroup
) -> int:
    """Return a fingerprint that is the same on all ranks for equal objects.

    Args:
        x: an argument that is not an array or a number.
        where: returns the position of the argument, for the message.
        group: the ranks. An object that holds their strategy belongs to the program.

    Raises:
        TypeError: if the argument cannot be compared.
    """
    kind = type(x)
    if kind in ATOMS:
        return fingerprint(f"{kind.__name__} {x!r}")
    name = f"{kind.__module__}.{kind.__qualname__}"
    is_named = kind is types.FunctionType and is_global(x)
    if not (is_named or isinstance(x, (type, types.ModuleType))):
        held = _held_by(x, group.public_objects)
        if held is not None:
            return fingerprint(f"one {_name_of(x)} with {held}")
    try:
        return fingerprint_of_bytes(_canonical(x))
    except Exception as error:
        if any(map(object_parts.is_ours, kind.__mro__)):
            return fingerprint(f"one {name}")
        why = str(error).rstrip(".")
        raise TypeError(
            f"merge_call: argument {where()}, a {name.removeprefix('builtins.')}, "
            f"cannot be compared with that of the other ranks: {why}. Let merge_fn "
            "close over it, or pass what it is made from"
        ) from error


def fingerprint_of_function(merge_fn: Any) -> int:
    """Return a fingerprint of the code of a function, without its closure."""
    function = function_in(merge_fn)
    if type(function) is not types.FunctionType:
        return fingerprint(_name_of(function))
    return _fingerprint_of_code(function.__code__, function.__module__)


@functools.lru_cache(_MOST_FUNCTIONS)
def _fingerprint_of_code(code: types.CodeType, module: str) -> int:
    text = f"{module}.{code.co_qualname} {code.co_firstlineno} {code.co_names}"
    return fingerprint_of_bytes(text.encode() + code.co_code)


def _name_of(x: object) -> str:
    """Return the name of a function or class, or of the class of an object."""
    if isinstance(x, (types.FunctionType, types.BuiltinFunctionType, type)):
        return f"{type(x).__name__} {x.__module__}.{x.__qualname__}"
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _held_by(x: object, known: tuple[object, ...]) -> str | None:
    """Describe the variables or strategy that an object holds; None if it has none."""
    ids = {id(one) for one in known}
    held = [*object_parts.values_in(x, (Variable, DistributedValues), ids)]
    keys = [storage_of(part).key for part in held if isinstance(part, Variable)]
    return f"variable {min(keys)}" if keys else ("" if held else None)


def _canonical(x: object) -> bytes:
    """Pickle an object so that equal objects have equal bytes in every process."""
    stream = io.BytesIO()
    _CanonicalPickler(stream).dump(x)
    return stream.getvalue()


class _CanonicalPickler(Pickler):  # type: ignore[misc]
    """Replaces what differs between processes: identities of strings, orders."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        # By id: the number of each dict, and the dict, since the id is not used again.
        self._dicts: dict[int, tuple[int, dict[Any, Any]]] = {}

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is str:
            return obj.encode(errors="surrogatepass")  # a new object each time
        # Nor has it an effect whether two immutable parts are one object.
        if kind is bytes:
            return ("bytes", bytearray(obj))
        if kind is tuple:
            return ("tuple", list(obj))
        if isinstance(obj, io.IOBase):
            raise TypeError("cannot pickle an open file")
        if isinstance(obj, type):
            return _name_of(obj).encode()
        # The order of a set depends on the hashes of strings, which are randomized;
        # the order of a dict has no effect when dicts are compared.
        if kind in (set, frozenset):
            return (kind.__name__, sorted(map(_canonical, obj)))
        if kind is not dict:
            return None
        if id(obj) in self._dicts:  # it may be in itself
            return ("again", self._dicts[id(obj)][0])
        self._dicts[id(obj)] = len(self._dicts), obj
        return ("dict", [(key, obj[key]) for key in sorted(obj, key=_canonical)])

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is types.FunctionType and not is_global(obj):
            code = _name_of(obj).encode() + obj.__code__.co_code
            return object, (), (code, state_of(obj))
        return super().reducer_override(obj)
