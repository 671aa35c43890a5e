"""Functions in commands: what is sent of a function, and how it is rebuilt.

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

import functools
import marshal
import pkgutil
import sys
import types
from typing import Any, Final, TypeAlias

Globals: TypeAlias = dict[str, Any]
"""The globals of a module: any objects."""
State: TypeAlias = tuple[tuple[object, ...], tuple[Any, ...] | None]
"""What a function closes over; its defaults, attributes and names, if it has others
than its code says. A plain tuple, since it is pickled with each call."""

NO_STATE: Final[State] = ((), None)
"""The state of a function that closes over nothing, and has no defaults."""

# A merge_fn uses the same few functions again and again.
_MOST_CODES: Final = 512
encode = functools.lru_cache(_MOST_CODES)(marshal.dumps)
_decode = functools.lru_cache(_MOST_CODES)(marshal.loads)


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


def make(encoded: bytes, home: str | Globals) -> types.FunctionType:
    """Make a function whose cells are empty, for `fill`.

    In two steps, since a function may close over itself.

    Args:
        encoded: its code.
        home: its globals, or the name of their module.
    """
    code: types.CodeType = _decode(encoded)
    names = _globals_of(home) if isinstance(home, str) else home
    cells = tuple([types.CellType() for _ in code.co_freevars])
    return types.FunctionType(code, names, code.co_name, None, cells)


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
