"""What is directly in an object: attributes, slots, items, and what a function uses.

Nothing here runs the user's code: attributes are read from ``__dict__`` and from slots.
"""

from __future__ import annotations

import enum
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mpidist._base.cache import Cache

MOST: Final = 512
"""The largest number of objects with names in one `merge_call`."""

_MOST_KINDS: Final = 4096
_KEYS: Final = frozenset((str, int, bool, float, bytes, type(None)))

Step: TypeAlias = str | int | tuple[Any, ...]
"""A step of a path: an attribute, an index, ``(key,)`` of a dict, or the kind and name
of a part of a function, such as ``("closure", "x")``."""

Part: TypeAlias = tuple[Step, Any]
"""An object directly in another one, and the step to it."""


class Kind(NamedTuple):
    """How the objects of a type are treated that are not values.

    Attributes:
        parts: returns the objects directly in one.
        named: whether they have names; a tuple has none, but what is in it has.
        has_module: whether they may be found by module and name instead.
    """

    parts: Callable[[Any], Iterable[Part]]
    named: bool = True
    has_module: bool = False


THING: Final = Kind(lambda x: ())  # the objects in it have no names
_CLASS: Final = Kind(lambda x: (), has_module=True)
_VALUES: Final = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    type(NotImplemented),
    range,
    slice,
    frozenset,
    np.generic,
    np.dtype,
    enum.Enum,
    types.ModuleType,
    types.CodeType,
    types.BuiltinFunctionType,
    np.ufunc,
)

kinds: Cache[type, Kind | None] = Cache(_MOST_KINDS)
_values_too: list[type] = []


def register_values(*types_of_values: type) -> None:
    """Treat objects of these types, and of types derived from them, as values."""
    _values_too.extend(types_of_values)
    kinds.clear()


def kind_of(kind: type) -> Kind | None:
    """Return how the objects of a type are treated; None if they are values."""
    try:
        return kinds[kind]
    except KeyError:
        found = kinds[kind] = _find_kind(kind)
        return found


def is_ours(kind: type) -> bool:
    """Return whether a class is of this package."""
    return str(kind.__module__).partition(".")[0] == "mpidist"


def _find_kind(kind: type) -> Kind | None:
    if kind in _PLAIN:
        return _PLAIN[kind]
    if issubclass(kind, (*_VALUES, *_values_too)):
        return None
    if issubclass(kind, type):
        return _CLASS
    if is_ours(kind):
        return THING
    base = next((x for x in (list, tuple, dict) if issubclass(kind, x)), object)
    plain = _PLAIN.get(base, THING)
    members = [(name, x) for c in kind.__mro__ for name, x in vars(c).items()]
    slots = [(k, x) for k, x in members if type(x) is types.MemberDescriptorType]
    dicts = [x for name, x in members if name == "__dict__"]
    if any(type(x) is not types.GetSetDescriptorType for x in dicts):
        return THING  # reading it might run code
    if not slots and not dicts:
        return plain

    def parts(x: Any) -> list[Part]:
        found = [*plain.parts(x)]
        if dicts:
            found += object.__getattribute__(x, "__dict__").items()
        for name, descriptor in slots:
            try:
                found.append((name, descriptor.__get__(x)))
            except AttributeError:  # not set
                continue
        return found

    return Kind(parts, named=base is not tuple)


def _items_of_dict(x: dict[Any, Any]) -> list[Part]:
    items = itertools.islice([*dict.items(x)], MOST)
    return [((key,), part) for key, part in items if type(key) in _KEYS]


def _parts_of_function(function: types.FunctionType) -> list[Part]:
    parts: list[Part] = [(("globals",), function.__globals__)]
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            parts.append((("closure", name), cell.cell_contents))
        except ValueError:  # an empty cell
            continue
    for i, x in enumerate(function.__defaults__ or ()):
        parts.append((("default", i), x))
    for name, x in (function.__kwdefaults__ or {}).items():
        parts.append((("default", name), x))
    names = function.__globals__
    parts += [(("global", x), names[x]) for x in mentioned_by(code) if x in names]
    return parts


_PLAIN: Final[dict[type, Kind]] = {
    types.FunctionType: Kind(_parts_of_function, has_module=True),
    types.MethodType: Kind(
        lambda x: (("__self__", x.__self__), ("__func__", x.__func__))
    ),
    functools.partial: Kind(
        lambda x: (("func", x.func), ("args", x.args), ("keywords", x.keywords))
    ),
    np.ndarray: THING,
    list: Kind(lambda x: enumerate(itertools.islice(list.__iter__(x), MOST))),
    tuple: Kind(
        lambda x: enumerate(itertools.islice(tuple.__iter__(x), MOST)), named=False
    ),
    dict: Kind(_items_of_dict),
}


@functools.lru_cache(maxsize=512)
def mentioned_by(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code mentions, which include those of its globals."""
    found: dict[str, None] = {}
    codes = [code]
    while codes:
        one = codes.pop()
        found.update(dict.fromkeys(one.co_names))
        codes += [x for x in one.co_consts if type(x) is types.CodeType]
    return tuple(found)


def parts_of(x: Any, kind: Kind, home: object) -> Iterable[Part]:
    """Return the objects in one; functions with other globals are not entered."""
    if type(x) is types.FunctionType and x.__globals__ is not home:
        return ()
    return kind.parts(x)


def values_in(x: object, wanted: tuple[type, ...], ids: set[int]) -> Iterator[object]:
    """Yield the objects in an object that have one of these types or ids."""
    home = x.__globals__ if type(x) is types.FunctionType else None
    seen = {id(x)}
    objects = [x]
    for current in objects:
        kind = kind_of(type(current))
        if len(objects) > MOST or kind is None:
            return
        for _, part in parts_of(current, kind, home):
            if issubclass(type(part), wanted) or id(part) in ids:
                yield part
            elif id(part) not in seen and kind_of(type(part)) is not None:
                seen.add(id(part))
                objects.append(part)
