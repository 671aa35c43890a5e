"""Functions of a program, sent to other ranks: fast where they are simple.

cloudpickle sends a function that no module has by its name (a lambda, a function in a
function) as its code, with all that it refers to, which takes some 300 us. Most
functions that are passed to ``update`` are *simple*: they refer to modules and
builtins, and close over numbers, strings, arrays and distributed values. Their code is
marshalled once, and only what they close over is taken each time.
"""

from __future__ import annotations

import builtins
import dis
import marshal
import pkgutil
import sys
import types
from typing import Any, Final

_MOST: Final = 256
_GLOBAL: Final = frozenset(
    ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME")
)
_MISSING: Final = object()
_LOADS: Final = "LOAD_GLOBAL"
_IMPORT: Final = "IMPORT_NAME"

# By the number of a code object: the object itself, the globals that it reads (None:
# it is not simple), and what is sent of it.
_known: dict[int, tuple[types.CodeType, tuple[str, ...] | None, bytes]] = {}
# What was received: the code, and by their heads the functions that close over nothing.
_received: dict[bytes, tuple[types.CodeType, dict[Any, Any]]] = {}


class Sent:
    """A simple function that closes over nothing, as it was when it was sent."""

    __slots__ = ("_code", "_globals", "_modules")

    def __init__(self, function: types.FunctionType) -> None:
        self._code = function.__code__
        self._globals = function.__globals__
        names = _known[id(self._code)][1] or ()
        self._modules = [(name, self._globals.get(name)) for name in names]

    def is_like(self, function: Any) -> bool:
        """Whether a function would be sent as this one was."""
        if type(function) is not types.FunctionType:
            return False
        names = self._globals
        if function.__code__ is not self._code or function.__globals__ is not names:
            return False
        if _has_more(function):
            return False
        return not self._modules or all(
            names.get(name) is module for name, module in self._modules
        )


def _has_more(function: types.FunctionType) -> bool:
    """Whether a function is more than its code and its globals."""
    return bool(
        function.__closure__
        or function.__defaults__
        or function.__kwdefaults__
        or function.__dict__
    )


def sent(function: Any) -> Sent | None:
    """Return what tells whether a later function is like this one, which was sent.

    Args:
        function: for which `reduce_simple` has given something.

    Returns:
        None where it closes over something, or has defaults: that may change.
    """
    return None if _has_more(function) else Sent(function)


def reduce_simple(function: types.FunctionType, values: tuple[type, ...]) -> Any:
    """Return how to rebuild a simple function, as `pickle` wants it; None for others.

    Args:
        function: the function.
        values: the types of what it may close over, beside numbers and strings.
    """
    code = function.__code__
    known = _known.get(id(code))
    if known is None:
        if len(_known) >= _MOST:
            _known.clear()
        names = _globals_of(code)
        data = b"" if names is None else marshal.dumps(code)
        known = _known[id(code)] = (code, names, data)
    _, names, data = known
    if names is None or function.__dict__ or function.__kwdefaults__:
        return None
    modules = []
    for name in names:
        found = function.__globals__.get(name, _MISSING)
        if found is _MISSING:
            continue  # a builtin
        if type(found) is not types.ModuleType or (
            sys.modules.get(found.__name__) is not found
        ):
            return None
        modules.append((name, found.__name__))
    closed = []
    for cell in function.__closure__ or ():
        try:
            closed.append(cell.cell_contents)
        except ValueError:  # empty
            return None
    allowed: tuple[type, ...] = (*_PLAIN, *values)
    defaults = function.__defaults__ or ()
    if not all(isinstance(x, allowed) for x in (*closed, *defaults)):
        return None
    place = tuple(function.__globals__.get(name) for name in _PLACE)
    if not all(isinstance(x, (str, type(None))) for x in place):
        return None
    head = (place, function.__qualname__, tuple(modules))
    return rebuild, (data, head, tuple(closed), defaults)


_PLACE: Final = ("__name__", "__package__", "__file__")
_PLAIN: Final[tuple[type, ...]] = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
)


def rebuild(
    data: bytes,
    head: tuple[tuple[str | None, ...], str, tuple[tuple[str, str], ...]],
    closed: tuple[Any, ...],
    defaults: tuple[Any, ...],
) -> Any:
    """Make the function that was sent."""
    known = _received.get(data)
    if known is None:
        if len(_received) >= _MOST:
            _received.clear()
        known = _received[data] = (marshal.loads(data), {})
    code, functions = known
    # The same code has other modules where a global has been bound anew.
    alone = not (closed or defaults)
    if alone and (function := functions.get(head)) is not None:
        return function
    place, qualname, modules = head
    names: dict[str, Any] = dict(zip(_PLACE, place, strict=True))
    names |= {name: _module(path) for name, path in modules}
    function = types.FunctionType(
        code,
        {"__builtins__": builtins, **names},
        code.co_name,
        defaults or None,
        tuple(types.CellType(x) for x in closed),
    )
    function.__qualname__ = qualname
    if alone:
        if len(functions) >= _MOST:
            functions.clear()
        functions[head] = function
    return function


def _module(name: str) -> Any:
    """Return a module; one that is loaded may have any name."""
    return sys.modules.get(name) or pkgutil.resolve_name(name)


def _globals_of(code: types.CodeType) -> tuple[str, ...] | None:
    """Return the globals that a code reads; None where it writes some, or imports."""
    names: dict[str, None] = {}
    codes = [code]
    while codes:
        one = codes.pop()
        for instruction in dis.get_instructions(one):
            if instruction.opname == _IMPORT:
                return None  # relative to a package, perhaps
            if instruction.opname in _GLOBAL:
                if instruction.opname != _LOADS:
                    return None
                names[instruction.argval] = None
        codes += [x for x in one.co_consts if isinstance(x, types.CodeType)]
    return tuple(names)
