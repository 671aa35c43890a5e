"""Names of the objects that a ``merge_fn`` can reach, which every rank has.

Each rank passes its own ``merge_fn`` to `merge_call`. Only rank 0's is called, but the
objects that it closes over are on the other ranks too: their ``merge_fn`` closes over
them. If a function that rank 0 sends refers to such an object, the name of the object
is sent, and each rank uses its own object. A name is a path: ``merge_fn``, the closure
variable ``self``, the attribute ``optimizer``.

The rule
--------
- Objects that have a name: those that, when the `merge_call` begins, are reached from
  merge_fn (its ``__self__``, closure, defaults, the parts of a `functools.partial`, the
  globals that its code mentions) and from those arguments of the call that merge_fn
  receives unchanged, through attributes, slots, lists, tuples, dicts and functions of
  the program: the nearest ones first, up to `MOST`.
- Values have no name: numbers, strings, tuples, frozensets and the like are sent by
  value. So are objects that merge_fn creates.
- A name stands for each rank's own object, in the state that it has on that rank.
  Changes that merge_fn has made to rank 0's object before it calls `update` are not
  made on the other ranks.
- Names are valid for one `merge_call`, during which all these objects stay alive.
- merge_fns of different code (a dummy on some ranks) have no names: then everything is
  sent by value.

Each rank checks, for each name that is used, before the function runs: the object
exists, it has the type of rank 0's object, it is the same object under each of the
names of rank 0's object, and no other name in use stands for it. If a check fails, all
ranks raise an error. Differences between objects that are not named (a log that only
rank 0 keeps) have no effect. If the state of objects differs, the comparison after an
update (`updates`) finds what matters: copies of variables that differ.

The objects are found when the `merge_call` begins, on all ranks at the same time, and
not when the first name is needed: by then merge_fn may have replaced objects.

Nothing here runs the user's code: attributes are read from ``__dict__`` and from slots.
"""

from __future__ import annotations

import enum
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mpidist._base.cache import Cache
from mpidist._merge.functions import is_global

MOST: Final = 512
"""The largest number of objects with names in one `merge_call`."""

_MOST_KINDS: Final = 4096
_MOST_ALIASES: Final = 4
_KEYS: Final = frozenset((str, int, bool, float, bytes, type(None)))

Step: TypeAlias = str | int | tuple[Any, ...]
"""A step of a path: an attribute, an index, ``(key,)`` of a dict, or the kind and name
of a part of a function, such as ``("closure", "x")``."""

Path: TypeAlias = tuple[Step, ...]

Name: TypeAlias = tuple[Path, tuple[tuple[Path, Path], ...], str]
"""What is sent for an object of rank 0: the path to it; pairs of paths that lead to one
object there, which is this one or on the way to it; and the text of its type."""

Part: TypeAlias = tuple[Step, Any]
"""An object directly in another one, and the step to it."""


class _Kind(NamedTuple):
    """How the objects of a type are treated that are not values.

    Attributes:
        parts: returns the objects directly in one.
        named: whether they have names; a tuple has none, but what is in it has.
        has_module: whether they may be found by module and name instead.
    """

    parts: Callable[[Any], Iterable[Part]]
    named: bool = True
    has_module: bool = False


_THING: Final = _Kind(lambda x: ())  # the objects in it have no names
_CLASS: Final = _Kind(lambda x: (), has_module=True)
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

_kinds: Cache[type, _Kind | None] = Cache(_MOST_KINDS)
_values_too: list[type] = []


def register_values(*kinds: type) -> None:
    """Treat objects of these types, and of types derived from them, as values."""
    _values_too.extend(kinds)
    _kinds.clear()


def _kind_of(kind: type) -> _Kind | None:
    """Return how the objects of a type are treated; None if they are values."""
    try:
        return _kinds[kind]
    except KeyError:
        found = _kinds[kind] = _find_kind(kind)
        return found


def is_ours(kind: type) -> bool:
    """Return whether a class is of this package."""
    return str(kind.__module__).partition(".")[0] == "mpidist"


def _find_kind(kind: type) -> _Kind | None:
    if kind in _PLAIN:
        return _PLAIN[kind]
    if issubclass(kind, (*_VALUES, *_values_too)):
        return None
    if issubclass(kind, type):
        return _CLASS
    if is_ours(kind):
        return _THING
    base = next((x for x in (list, tuple, dict) if issubclass(kind, x)), object)
    plain = _PLAIN.get(base, _THING)
    members = [(name, x) for c in kind.__mro__ for name, x in vars(c).items()]
    slots = [(k, x) for k, x in members if type(x) is types.MemberDescriptorType]
    dicts = [x for name, x in members if name == "__dict__"]
    if any(type(x) is not types.GetSetDescriptorType for x in dicts):
        return _THING  # reading it might run code
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

    return _Kind(parts, named=base is not tuple)


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
    parts += [(("global", x), names[x]) for x in _mentioned_by(code) if x in names]
    return parts


_PLAIN: Final[dict[type, _Kind]] = {
    types.FunctionType: _Kind(_parts_of_function, has_module=True),
    types.MethodType: _Kind(
        lambda x: (("__self__", x.__self__), ("__func__", x.__func__))
    ),
    functools.partial: _Kind(
        lambda x: (("func", x.func), ("args", x.args), ("keywords", x.keywords))
    ),
    np.ndarray: _THING,
    list: _Kind(lambda x: enumerate(itertools.islice(list.__iter__(x), MOST))),
    tuple: _Kind(
        lambda x: enumerate(itertools.islice(tuple.__iter__(x), MOST)), named=False
    ),
    dict: _Kind(_items_of_dict),
}


@functools.lru_cache(maxsize=512)
def _mentioned_by(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code mentions, which include those of its globals."""
    found: dict[str, None] = {}
    codes = [code]
    while codes:
        one = codes.pop()
        found.update(dict.fromkeys(one.co_names))
        codes += [x for x in one.co_consts if type(x) is types.CodeType]
    return tuple(found)


def _parts_of(x: Any, kind: _Kind, home: object) -> Iterable[Part]:
    """Return the objects in one; functions with other globals are not entered."""
    if type(x) is types.FunctionType and x.__globals__ is not home:
        return ()
    return kind.parts(x)


def values_in(x: object, kinds: tuple[type, ...], ids: set[int]) -> Iterator[object]:
    """Yield the objects in an object that have one of these types or ids."""
    home = x.__globals__ if type(x) is types.FunctionType else None
    seen = {id(x)}
    objects = [x]
    for current in objects:
        kind = _kind_of(type(current))
        if len(objects) > MOST or kind is None:
            return
        for _, part in _parts_of(current, kind, home):
            if issubclass(type(part), kinds) or id(part) in ids:
                yield part
            elif id(part) not in seen and _kind_of(type(part)) is not None:
                seen.add(id(part))
                objects.append(part)


def _home_of(merge_fn: Any) -> dict[str, Any] | None:
    """Return the globals of a function, method, partial or callable object."""
    while isinstance(merge_fn, functools.partial):
        merge_fn = merge_fn.func
    if type(merge_fn) is not types.FunctionType:
        method = vars(type(merge_fn)).get("__call__")
        merge_fn = getattr(merge_fn, "__func__", method)
    return getattr(merge_fn, "__globals__", None)


def may_reach(merge_fn: Any) -> bool:
    """Return whether `Names` may find more than the function itself."""
    if type(merge_fn) is not types.FunctionType:
        return True
    return bool(
        merge_fn.__closure__
        or merge_fn.__defaults__
        or merge_fn.__kwdefaults__
        or _mentioned_by(merge_fn.__code__)
    )


class Names:
    """The objects of one `merge_call` that have names, on one rank.

    Args:
        merge_fn: the function. Functions with other globals are not entered.
        arguments: those of the call that are the same on all ranks, and their numbers.
        known: objects that have a name of another kind, and are not entered.

    Attributes:
        reached: the objects, the nearest ones first.
    """

    def __init__(
        self,
        merge_fn: object,
        arguments: Iterable[tuple[int, object]] = (),
        known: Iterable[object] = (),
    ) -> None:
        # The place of each object that was found, in `reached`, by its id.
        self._found: dict[int, int] = dict.fromkeys(map(id, known), -1)
        # The place of the object that holds it, and the step from there.
        self._origins: list[tuple[int, Step]] = []
        # Further paths to objects that were found before: the place of the object, the
        # place where the last step begins, and this step.
        self._again: list[tuple[int, int, Step]] = []
        self.reached: list[object] = []
        self._names: dict[int, Name | None] = {}  # by place
        self._used: dict[int, Path] = {}  # by place: the name that stands for it
        roots = [("merge_fn", merge_fn)]
        for number, argument in arguments:
            roots.append((f"argument {number} of merge_call", argument))
        self._home = _home_of(merge_fn)
        self._walk(roots)

    def _walk(self, roots: list[tuple[str, object]]) -> None:
        reached, found, origins = self.reached, self._found, self._origins
        home = self._home
        entered: list[_Kind] = []
        current = -1
        parts: Iterable[tuple[Step, object]] = roots
        while True:
            for step, part in parts:
                its_type = type(part)
                role = _kinds[its_type] if its_type in _kinds else _kind_of(its_type)
                if role is None:
                    continue
                place = found.get(id(part))
                if place is not None:
                    if place >= 0:
                        self._again.append((place, current, step))
                    continue
                found[id(part)] = len(reached)
                # The globals of merge_fn have a name, and are not entered.
                entered.append(_THING if part is home else role)
                reached.append(part)
                origins.append((current, step))
            current += 1
            if current >= len(reached) or len(reached) >= MOST:
                break
            kind = entered[current]
            parts = () if kind is _THING else _parts_of(reached[current], kind, home)

    def parts(self, x: object) -> Iterable[Part]:
        """Return what is directly in an object that was reached."""
        kind = _kind_of(type(x))
        if kind is None or x is self._home:
            return ()
        return _parts_of(x, kind, self._home)

    def text_of(self, place: int, step: Step) -> str:
        """Return the path to a part of an object, as a person would write it."""
        path = self._path_of(place)
        if step != "":
            path = (*path, step)
        return f"`{readable(path)}`"

    # --- on rank 0 ------------------------------------------------------------

    def name_of(self, x: object) -> Name | None:
        """Return what stands for an object in commands; None if it has no name."""
        place = self._found.get(id(x), -1)
        if place < 0:
            return None
        if place not in self._names:
            self._names[place] = self._make_name(place, x)
        return self._names[place]

    def _make_name(self, place: int, x: object) -> Name | None:
        kind = _kind_of(type(x))
        if kind is None or not kind.named or (kind.has_module and is_global(x)):
            return None
        aliases = []
        above = place
        while above >= 0:
            found = [(at, step) for k, at, step in self._again if k == above]
            for at, step in found[:_MOST_ALIASES]:
                aliases.append((self._path_of(above), (*self._path_of(at), step)))
            above = self._origins[above][0]
        return self._path_of(place), tuple(aliases), _text_of(x)

    def _path_of(self, place: int) -> Path:
        steps: list[Step] = []
        while place >= 0:
            place, step = self._origins[place]
            steps.append(step)
        return tuple(reversed(steps))

    # --- on the other ranks ---------------------------------------------------

    def object(
        self, path: Path, aliases: Sequence[tuple[Path, Path]], text: str
    ) -> Any:
        """Return this rank's object for the name of an object of rank 0.

        Raises:
            ValueError: if this rank has none, or if it is not like rank 0's.
        """
        place = self._resolve(path)
        wrong = self._difference(place, path, aliases, text)
        if wrong or place is None:
            raise ValueError(
                f"a function that merge_fn sends refers to `{readable(path)}`, and "
                f"each rank uses its own, but {wrong}. Make the objects of the program "
                "alike on all ranks, or make what belongs to rank 0 alone inside "
                "merge_fn"
            )
        self._used[place] = path
        return self.reached[place]

    def _difference(
        self,
        place: int | None,
        path: Path,
        aliases: Sequence[tuple[Path, Path]],
        text: str,
    ) -> str:
        """Return how this rank's object differs from rank 0's; "" if it does not."""
        if place is None:
            return f"this rank has no object under that name (rank 0: {text})"
        mine = _text_of(self.reached[place])
        if mine != text:
            return f"rank 0 has {text} there, and this rank {mine}"
        for one, other in aliases:
            if len({self._resolve(one), self._resolve(other)} - {None}) > 1:
                return (
                    f"`{readable(one)}` and `{readable(other)}` are one object on "
                    "rank 0, and two on this rank"
                )
        before = self._used.get(place, path)
        if before != path:
            return (
                f"it is the same object as `{readable(before)}` on this rank, and "
                "another one on rank 0"
            )
        return ""

    @functools.cached_property
    def _steps(self) -> dict[tuple[int, Step], int]:
        """The place of each object, by the place and the step that lead to it."""
        steps = {origin: place for place, origin in enumerate(self._origins)}
        return steps | {(at, step): place for place, at, step in self._again}

    def _resolve(self, path: Path) -> int | None:
        place: int | None = -1
        for step in path:
            place = self._steps.get((place, step)) if place is not None else None
        return place


def _text_of(x: Any) -> str:
    """Return the type of an object, and the name of a function or class."""
    kind = type(x)
    text = f"a {kind.__module__}.{kind.__qualname__}"
    if issubclass(kind, (type, types.FunctionType)):
        text += f" ({x.__module__}.{x.__qualname__})"
    return text.replace("a builtins.", "a ")


def readable(path: Path) -> str:
    """Return a path as a person would write it."""
    text = ""
    for step in path:
        if type(step) is str:
            text += f".{step}" if text else step
        elif type(step) is int:
            text += f"[{step}]"
        elif type(step) is tuple and len(step) == 1:
            text += f"[{step[0]!r}]"
        elif type(step) is tuple:
            kind, name = step
            text += f".<{kind} {name}>"
    return text
