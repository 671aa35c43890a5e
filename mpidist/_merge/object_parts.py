"""What is directly in an object, and what is sent of a function.

Nothing here runs the user's code: attributes are read from ``__dict__`` and from slots.

Every rank runs the same program, so most of a function is already on all ranks:

- A function that its module has under its name is sent as these two names.
- Of any other function (a lambda, a nested function) the code object is sent, by
  marshal, and what it closes over, its defaults and attributes, with their current
  values. Its globals are those of its module on each rank. So names in the code
  (``eval``, ``globals()``, imports, ``global``) mean the same on all ranks, and no
  bytecode is analysed.
- If its globals are not those of a module (made by ``exec``), nor those of
  ``merge_fn``, cloudpickle copies the globals that its code mentions.

Rejected: sending code and globals by cloudpickle, which analyses the bytecode to know
which globals it reads, fails silently if that is incomplete, and takes ten times as
long. Numbers for code objects that were sent before: both sides had to keep tables that
agree after an update that one of them has given up.
"""

from __future__ import annotations

import enum
import functools
import itertools
import marshal
import pkgutil
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mpidist._values.distributed import DistributedValues
from mpidist._values.variable import Variable

MOST: Final = 512
"""The largest number of objects with names in one `merge_call`."""

_MOST_KINDS: Final = 4096
_MOST_CODES: Final = 512
ATOMS: Final = frozenset((bool, int, float, str, bytes, type(None)))

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
    """

    parts: Callable[[Any], Iterable[Part]]
    named: bool = True


THING: Final = Kind(lambda x: ())  # the objects in it have no names
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
    DistributedValues,
    Variable,
)


def is_ours(kind: type) -> bool:
    """Return whether a class is of this package."""
    return str(kind.__module__).partition(".")[0] == "mpidist"


def _find_kind(kind: type) -> Kind | None:
    if kind in _PLAIN:
        return _PLAIN[kind]
    if issubclass(kind, _VALUES):
        return None
    if issubclass(kind, type) or is_ours(kind):
        return THING
    base = next((x for x in (list, tuple, dict) if issubclass(kind, x)), object)
    plain = _PLAIN.get(base, THING)
    slots, dicts = _find_attributes(kind)
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


def _find_attributes(
    kind: type,
) -> tuple[list[tuple[str, types.MemberDescriptorType]], list[object]]:
    """Return the slots that a class has, by name, and what it has as ``__dict__``."""
    members = [(name, x) for c in kind.__mro__ for name, x in vars(c).items()]
    slots = [(k, x) for k, x in members if type(x) is types.MemberDescriptorType]
    return slots, [x for name, x in members if name == "__dict__"]


kind_of: Final[Callable[[type], Kind | None]] = functools.lru_cache(_MOST_KINDS)(
    _find_kind
)
"""Return how the objects of a type are treated; None if they are values."""


def _items_of_dict(x: dict[Any, Any]) -> list[Part]:
    items = itertools.islice([*dict.items(x)], MOST)
    return [((key,), part) for key, part in items if type(key) in ATOMS]


def parts_of_function(function: types.FunctionType) -> list[Part]:
    """Return the globals of a function, and what it closes over and mentions."""
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
    types.FunctionType: Kind(parts_of_function),
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


@functools.lru_cache(_MOST_CODES)
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


def values_in(x: Any, wanted: tuple[type, ...], ids: set[int]) -> Iterator[object]:
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


# --- functions ------------------------------------------------------------------------

Globals: TypeAlias = dict[str, Any]
"""The globals of a module: any objects."""
State: TypeAlias = tuple[tuple[object, ...], tuple[Any, ...] | None]
"""What a function closes over; its defaults, attributes and names, if it has others
than its code says. A plain tuple, since it is pickled with each call."""

NO_STATE: Final[State] = ((), None)
"""The state of a function that closes over nothing, and has no defaults."""

# A merge_fn uses the same few functions again and again.
encode = functools.lru_cache(_MOST_CODES)(marshal.dumps)
_decode = functools.lru_cache(_MOST_CODES)(marshal.loads)


def function_in(x: Any) -> Any:
    """Return what a method or `functools.partial` calls; other objects unchanged."""
    while isinstance(x, (types.MethodType, functools.partial)):
        x = x.__func__ if isinstance(x, types.MethodType) else x.func
    return x


class EmptyCell:
    """Stands for the value of a closure variable that has none."""


def module_of(names: Globals) -> str | None:
    """Return the name of the module whose globals these are; None if there is none."""
    name = names.get("__name__")
    module = sys.modules.get(name) if type(name) is str else None
    return name if module is not None and module.__dict__ is names else None


def _globals_of(name: str) -> Globals:
    """Return the globals of this rank's module of that name."""
    # A module need not be importable by its name, if it is there.
    module = sys.modules.get(name) or pkgutil.resolve_name(name)
    return module.__dict__


def _lookup(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def lookup(module: str, name: str) -> Any:
    """Return the object that this rank's module has under a qualified name.

    Raises:
        AttributeError: if there is none.
    """
    _globals_of(module)
    found = _lookup(module, name)
    if found is None:
        where = "the program" if module == "__main__" else f"module {module!r}"
        raise AttributeError(
            f"`{name}` is not defined in {where} of this rank; define it on all "
            "ranks, outside `if rank == 0`"
        )
    return found


def is_global(x: Any) -> bool:
    """Whether a module has this function or class under its qualified name."""
    name, module = x.__qualname__, x.__module__
    if type(name) is not str or type(module) is not str or "<" in name:
        return False
    return _lookup(module, name) is x


def make(
    encoded: bytes, home: str | Globals, *shared: tuple[int, types.FunctionType, int]
) -> types.FunctionType:
    """Make a function whose cells are empty, for `fill`.

    In two steps, since a function may close over itself.

    Args:
        encoded: its code.
        home: its globals, or the name of their module.
        shared: the numbers of cells that are those of another function; this function;
            and their numbers there.
    """
    code: types.CodeType = _decode(encoded)
    names = _globals_of(home) if isinstance(home, str) else home
    cells = [types.CellType() for _ in code.co_freevars]
    for i, other, place in shared:
        cells[i] = (other.__closure__ or ())[place]
    return types.FunctionType(code, names, code.co_name, None, tuple(cells))


def contents_of(function: types.FunctionType) -> tuple[object, ...]:
    """Return what a function closes over."""
    found: list[object] = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(EmptyCell)
    return tuple(found)


def state_of(function: types.FunctionType) -> State:
    """Return what `fill` needs to make this function of an empty one."""
    code = function.__code__
    more = (
        function.__defaults__,
        function.__kwdefaults__,
        function.__dict__,
        function.__name__,
        function.__qualname__,
    )
    plain = more == (None, None, {}, code.co_name, code.co_qualname)
    contents = contents_of(function) if function.__closure__ else ()
    return contents, None if plain else more


def fill(function: types.FunctionType, state: State) -> None:
    """Set the state of a function to the result of `state_of`."""
    contents, more = state
    for cell, x in zip(function.__closure__ or (), contents, strict=True):
        if x is not EmptyCell:
            cell.cell_contents = x
    if more is not None:
        function.__defaults__, function.__kwdefaults__ = more[:2]
        function.__dict__.update(more[2])
        function.__name__, function.__qualname__ = more[3:]
