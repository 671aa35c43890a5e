"""What the commands of `merge_call` are made of, and how it travels.

A message is a tuple of plain objects, which marshal writes several times as fast as
pickle. Variables, distributed values and simple functions are put into tuples by hand:
keys stand for what every rank has. What has anything else in it is pickled as a whole,
with the same keys, and arrays travel apart, from their buffers.
"""

from __future__ import annotations

import hashlib
import io
import marshal
import pickle
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
import numpy as np

from mpidist import _arrays, _functions
from mpidist._options import ReduceOp
from mpidist._values import DistributedValues, Key, Mirrored, PerReplica
from mpidist._variables import Variable

if TYPE_CHECKING:
    from mpidist._strategy import Strategy

_STRATEGY: Final = "strategy"
_EXTENDED: Final = "extended"
_CONTEXT: Final = "context"
_VALUE: Final = "value"
_ARRAY: Final = "array"
_MAIN: Final = "__main__"
_LOCAL: Final = "<locals>"
_KEYED: Final = frozenset((Variable, Mirrored, PerReplica))
_CLOSED_OVER: Final = (DistributedValues, Variable, np.ndarray, np.generic)
ATOMS: Final = frozenset((bool, int, float, str, bytes, type(None)))
_PICKLED: Final = "pickled"  # no plain form

KeyOf = Callable[[Any], Key]
"""Gives the key under which every rank has a value."""


def encode(message: Any, key_of: KeyOf, strategy: Strategy) -> tuple[Any, list[Any]]:
    """Take a message apart; return its plain part, and arrays that travel apart.

    What it is made of is mostly variables, values and simple functions. That is put
    into tuples by hand, since a `_Pickler` takes longer than all the rest.
    """
    plain = plain_of(message, key_of)
    if plain is not _PICKLED:
        return plain, []
    stream = io.BytesIO()
    pickler = _Pickler(stream, key_of, strategy)
    pickler.dump(message)
    return ("pickle", stream.getvalue()), pickler.arrays


def plain_of(x: Any, key_of: KeyOf) -> Any:
    """Return an object in a form for marshal; ``_PICKLED`` where there is none."""
    kind = type(x)
    if kind in ATOMS:
        return x
    if kind in _KEYED:
        return (_VALUE, key_of(x))
    if kind is tuple or kind is list:
        if kind is list and (keys := _keys_of_pairs(x, key_of)) is not None:
            return ("pairs", keys)
        items = [plain_of(item, key_of) for item in x]
        return _PICKLED if _PICKLED in items else (kind.__name__, *items)
    if kind is ReduceOp:
        return ("op", x.name)
    if kind is dict and not x:
        return ("dict",)
    if isinstance(x, (DistributedValues, Variable)):
        return (_VALUE, key_of(x))
    if kind is types.FunctionType:
        if is_at_top_of_main(x):
            return ("main", x.__qualname__)
        simple = _functions.reduce_simple(x, _CLOSED_OVER)
        if simple is not None:
            data, head, closed, defaults = simple[1]
            parts = [plain_of(closed, key_of), plain_of(defaults, key_of)]
            return _PICKLED if _PICKLED in parts else ("fn", data, head, *parts)
    return _PICKLED


def arguments_of(args: Any, key_of: KeyOf) -> list[tuple[bool, Any]] | None:
    """Return the arguments of an update for `given`; None if some have other types.

    Of what these are there is nothing to check: it is the same on all ranks.
    """
    found: list[tuple[bool, Any]] = []
    for x in args:
        kind = type(x)
        if kind is Mirrored:
            found.append((True, key_of(x)))
        elif kind in ATOMS:
            found.append((False, x))
        else:
            return None
    return found


def given(arguments: list[tuple[bool, Any]], strategy: Strategy) -> list[Any]:
    """Return the arguments for which `arguments_of` has given this."""
    return [value_of(x, strategy) if keyed else x for keyed, x in arguments]


def _keys_of_pairs(x: list[Any], key_of: KeyOf) -> list[Key] | None:
    """Return the keys of a list of pairs (value, variable); None for other lists."""
    keys: list[Key] = []
    for pair in x:
        if type(pair) is not tuple or len(pair) != 2:
            return None
        first, second = pair
        if type(first) not in _KEYED or type(second) not in _KEYED:
            return None
        keys += (key_of(first), key_of(second))
    return keys


def is_at_top_of_main(function: Any) -> bool:
    """Whether a function is at the top level of the script, as on every rank."""
    name = getattr(function, "__qualname__", "")
    return (
        function.__module__ == _MAIN
        and _LOCAL not in name
        and _lookup(_MAIN, name) is function
    )


def dump(message: tuple[Any, ...]) -> bytes:
    """Return a message as bytes: by marshal, several times as fast, where it can be."""
    try:
        return b"m" + marshal.dumps(message)
    except ValueError:
        return b"p" + pickle.dumps(message)


def load(data: bytes) -> Any:
    """Return the message that `dump` was given."""
    body = memoryview(data)[1:]
    return marshal.loads(body) if data[:1] == b"m" else pickle.loads(body)


def decode(head: Any, strategy: Strategy, arrays: list[Any]) -> Any:
    """Put together what `encode` has taken apart."""
    if type(head) is not tuple:
        return head
    kind, *items = head
    if kind == "tuple":
        return tuple([decode(item, strategy, arrays) for item in items])
    if kind == _VALUE:
        return value_of(items[0], strategy)
    if kind == "pickle":
        return _Unpickler(items[0], strategy, arrays).load()
    if kind == "pairs":
        values = [value_of(key, strategy) for key in items[0]]
        return list(zip(values[::2], values[1::2], strict=True))
    if kind == "list":
        return [decode(item, strategy, arrays) for item in items]
    if kind == "dict":
        return {}
    if kind == "main":
        return _lookup_or_raise(_MAIN, items[0])
    if kind == "op":
        return ReduceOp[items[0]]
    data, names, closed, defaults = items
    return _functions.rebuild(
        data,
        names,
        decode(closed, strategy, arrays),
        decode(defaults, strategy, arrays),
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions by cloudpickle; values by key; arrays apart."""

    def __init__(self, stream: io.BytesIO, key_of: KeyOf, strategy: Strategy) -> None:
        super().__init__(stream, protocol=5, buffer_callback=None)
        self._key_of = key_of
        self._known = {
            id(strategy): (_STRATEGY,),
            id(strategy.extended): (_EXTENDED,),
            id(strategy.extended._replica_context): (_CONTEXT,),
        }
        self.arrays: list[Any] = []

    def persistent_id(self, obj: Any) -> Any:
        # Called for every object in the message: a function has some ninety.
        if isinstance(obj, (DistributedValues, Variable)):
            return (_VALUE, self._key_of(obj))
        plain = type(obj) is np.ndarray and obj.dtype.kind in "biufc" and obj.size > 8
        if plain or _arrays.is_device_array(obj):
            self.arrays.append(obj)
            return (_ARRAY, len(self.arrays) - 1)
        return self._known.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        # Every rank runs the same program, so what is at the top level of the script
        # is there too: by reference, as for any other module. cloudpickle would copy
        # it with the globals that it uses.
        if isinstance(obj, (types.FunctionType, type)):
            if is_at_top_of_main(obj):
                return (_lookup_or_raise, (_MAIN, obj.__qualname__))
            if type(obj) is types.FunctionType and (
                simple := _functions.reduce_simple(obj, _CLOSED_OVER)
            ):
                return simple
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, strategy: Strategy, arrays: list[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._strategy = strategy
        self._arrays = arrays

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == _STRATEGY:
            return self._strategy
        if pid[0] == _EXTENDED:
            return self._strategy.extended
        if pid[0] == _CONTEXT:
            return self._strategy.extended._replica_context
        if pid[0] == _ARRAY:
            return self._arrays[pid[1]]
        return value_of(pid[1], self._strategy)


def value_of(key: Key, strategy: Strategy) -> Any:
    """Return the value of rank 0 that a key stands for, as this rank has it."""
    value = strategy.extended._registry.get(key)
    if value is None:
        raise ValueError(
            f"merge_fn uses a value that rank {strategy.extended._replica_id} has not "
            "kept; pass it to `merge_call` as an argument"
        )
    return value


def _lookup(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _lookup_or_raise(module: str, name: str) -> Any:
    found = _lookup(module, name)
    if found is None:
        raise AttributeError(
            f"`{name}` is not defined in the program of this rank; define it on all "
            "ranks, outside `if rank == 0`"
        )
    return found


def object_hash(x: Any) -> int:
    """Return a hash that is the same on all ranks for equal objects."""
    try:
        data = _canonical(x)
    except Exception:
        # Not picklable (a lock, an open file, an object that holds variables): the
        # ranks' objects are taken for the same if they are of the same type.
        data = type(x).__qualname__.encode()
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def _canonical(x: Any) -> bytes:
    """Pickle an object so that equal ones give equal bytes in every process."""
    stream = io.BytesIO()
    pickler = _CanonicalPickler(stream, protocol=5)
    # Without the memo: which strings are one object differs between processes.
    pickler.fast = True
    pickler.dump(x)
    return stream.getvalue()


class _CanonicalPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def persistent_id(self, obj: Any) -> Any:
        # The order of a set depends on the hashes of strings, which are randomised;
        # that of a dict does not count when dicts are compared.
        if type(obj) in (set, frozenset):
            return (type(obj).__name__, sorted(_canonical(item) for item in obj))
        if type(obj) is dict:
            pairs = ((_canonical(k), _canonical(v)) for k, v in obj.items())
            return ("dict", sorted(pairs))
        return None
