"""Functions in commands: what is sent of a function, and how it is rebuilt.

Every rank runs the same program, so most of a function is already on all ranks:

- A function that its module has under its name is sent as these two names.
- Of any other function (a lambda, a nested function) the code object is sent once, and
  has a number from then on. Its globals are those of its module on each rank. So names
  in the code (``eval``, ``globals()``, imports, ``global``) mean the same on all ranks,
  and no bytecode is analysed. Closure, defaults and attributes are sent with each call,
  with their current values.
- If its globals are not those of a module (made by ``exec``), nor those of
  ``merge_fn``, cloudpickle copies the globals that its code mentions.

Code objects are sent by marshal, which requires the same Python on all ranks.
cloudpickle takes ten times as long, once for each code object, and is not simpler.

Rejected: sending code and globals with each call. That requires an analysis of the
bytecode to know which globals it reads, which fails silently if it is incomplete.
"""

from __future__ import annotations

import marshal
import pkgutil
import sys
import types
from typing import Any, Final, TypeAlias

Globals: TypeAlias = dict[str, Any]
"""The globals of a module: any objects."""
Module: TypeAlias = Any
"""A module, or what a program has put in its place in ``sys.modules``."""
State: TypeAlias = tuple[Any, ...]
"""What `fill` gives a function. A plain tuple, since it is pickled with each call."""
MAIN: Final = "__main__"
# Rank 0 remembers fewer codes than the others keep, so they have every code that it
# names, even if one message brings many new ones.
MOST_SENT: Final = 512
MOST_KEPT: Final = 4096


class Codes:
    """The code objects that one strategy has sent, by number; on all ranks.

    Attributes:
        unsent: on rank 0: numbers and codes for the next message.
    """

    def __init__(self) -> None:
        self._count = 0
        self.sent: dict[int, tuple[types.CodeType, int]] = {}
        self.received: dict[int, types.CodeType] = {}
        self.unsent: list[tuple[int, bytes]] = []

    def number_of(self, code: types.CodeType) -> int:
        """Return the number by which the other ranks know a code object."""
        known = self.sent.get(id(code))
        if known is not None:
            return known[1]
        self.unsent.append((self._count, marshal.dumps(code)))
        while len(self.sent) >= MOST_SENT:
            del self.sent[next(iter(self.sent))]
        self.sent[id(code)] = (code, self._count)
        self._count += 1
        return self._count - 1

    def receive(self, number: int, data: bytes) -> None:
        """Keep a code object that rank 0 has sent."""
        while len(self.received) >= MOST_KEPT:
            del self.received[next(iter(self.received))]
        self.received[number] = marshal.loads(data)

    def code(self, number: int) -> types.CodeType:
        """Return the code object with this number."""
        found = self.received.get(number)
        if found is None:
            raise LookupError(
                f"one message of the coordinator carries more than {MOST_KEPT} "
                "functions; define them in a module that all ranks import"
            )
        return found


def module_of(names: Globals) -> str | None:
    """Return the name of the module whose globals these are; None if there is none."""
    name = names.get("__name__")
    module = sys.modules.get(name) if type(name) is str else None
    return name if module is not None and module.__dict__ is names else None


def module(name: str) -> Module:
    """Return this rank's module of that name, which need not be importable."""
    return sys.modules.get(name) or pkgutil.resolve_name(name)


def globals_of(name: str) -> Globals:
    """Return the globals of this rank's module of that name."""
    return module(name).__dict__  # type: ignore[no-any-return]


def lookup(module: str, name: str) -> Any:
    """Return the object that a module has under a qualified name, or None."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def lookup_or_raise(module: str, name: str) -> Any:
    """Return the object that this rank's module has under a qualified name.

    Raises:
        AttributeError: if there is none.
    """
    globals_of(module)
    found = lookup(module, name)
    if found is None:
        where = "the program" if module == MAIN else f"module {module!r}"
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
    return lookup(module, name) is x


def is_plain(function: types.FunctionType) -> bool:
    """Whether a function is only its code, its globals and what it closes over."""
    code = function.__code__
    return not (
        function.__defaults__
        or function.__kwdefaults__
        or function.__dict__
        or function.__name__ != code.co_name
        or function.__qualname__ != code.co_qualname
    )


def make(
    code: types.CodeType, names: Globals, closed: list[object]
) -> types.FunctionType:
    """Make a function that `is_plain`."""
    cells = tuple([types.CellType(x) for x in closed])
    return types.FunctionType(code, names, code.co_name, None, cells)


def make_empty(code: types.CodeType, names: Globals) -> types.FunctionType:
    """Make a function whose cells are empty, for `fill`.

    In two steps, since a function may close over itself.
    """
    cells = tuple([types.CellType() for _ in code.co_freevars])
    return types.FunctionType(code, names, code.co_name, None, cells)


def state_of(function: types.FunctionType) -> State:
    """Return what `fill` needs to rebuild this function."""
    closed: list[tuple[object, ...]] = []
    for cell in function.__closure__ or ():
        try:
            closed.append((cell.cell_contents,))
        except ValueError:
            closed.append(())  # an empty cell
    return (
        tuple(closed),
        function.__defaults__,
        function.__kwdefaults__,
        function.__dict__,
        function.__name__,
        function.__qualname__,
    )


def fill(function: types.FunctionType, state: State) -> None:
    """Set the state of a function to the result of `state_of`."""
    closed, defaults, keyword_defaults, attributes, name, qualname = state
    for cell, contents in zip(function.__closure__ or (), closed, strict=True):
        if contents:
            cell.cell_contents = contents[0]
    function.__defaults__ = defaults
    function.__kwdefaults__ = keyword_defaults
    function.__dict__.update(attributes)
    function.__name__, function.__qualname__ = name, qualname
