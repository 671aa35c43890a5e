"""What to write instead of names and keywords that programs for other libraries use.

A name that mpidist does not have raises AttributeError, and a keyword TypeError, as
always in Python; the message ends with the line to write, from ``remedies.json``, which
is read at the first such error. `mpidist docs porting` says what replaces whole parts.
``hasattr`` and ``dir`` are not affected, nor are names that begin and end with two
underscores, by which pickle, copy and inspect ask objects for their protocols.

The hooks are set by functions, not written as ``def __getattr__``: type checkers would
then accept every name.
"""

from __future__ import annotations

import functools
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final, ForwardRef, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T", bound=type)
_MORE: Final = "(more: `mpidist docs porting`, `mpidist docs coming_from`)"


@functools.cache
def tables() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the contents of ``remedies.json``.

    - ``names``: what to write, by the module or class and the missing name.
    - ``keywords``: by the call and the keyword, ``write``; ``ignored`` if it is ignored
      with any value, as it changes no result; and ``default``, the value that says what
      is the case here (if it is not given, False), which is ignored, as None is.
      ``like`` names an earlier call, whose other keywords it has too.

    A text ``=KEY`` in the file stands for one that several names share.
    """
    path = Path(__file__).with_name("remedies.json")
    whole = json.loads(path.read_text(encoding="utf-8"))
    shared = {f"={key}": text for key, text in whole.pop("shared").items()}
    for names in whole["names"].values():
        names.update({name: shared.get(text, text) for name, text in names.items()})
    for keywords in whole["keywords"].values():
        alike = whole["keywords"].get(keywords.pop("like", ""), {})
        keywords.update(alike | keywords)
        for keyword in keywords.values():
            keyword["write"] = shared.get(keyword["write"], keyword["write"])
    return whole


_PYTHONS: Final = ("annotations", "TYPE_CHECKING")  # imported for Python itself
_later: Final[dict[str, Mapping[str, tuple[str, ...]]]] = {}
_published: Final[dict[str, list[Any]]] = {}  # by name


def publish(
    name: str,
    outer: Container[str] = (),
    later: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Complete a module whose names without an underscore are public.

    They are its ``__all__``. Tracebacks and reprs say mpidist.MPIStrategy, whatever
    file it is in. A missing name says what to write instead. The same for the modules
    among them.

    Args:
        name: of the module.
        outer: the public names of the module that it is in; they belong to that.
        later: modules in it that are imported at the first use of them, or of names of
            theirs that are public in this module too. Each calls this itself, but
            for rooms, which are in mpidist and not public: only names of theirs are.
    """
    module = vars(sys.modules[name])
    above, _, own = name.rpartition(".")
    outer = outer or _later.get(above, {}).get(own, ())
    public = {
        key: value
        for key, value in module.items()
        if key == "__version__" or (key[0].isalpha() and key not in _PYTHONS)
    }
    places: dict[str, str] = {}
    later = _later.setdefault(name, later or {})
    for room, names in later.items():
        # With the colon an ImportError is raised, not taken for the end of the modules.
        is_public = room[0] != "_"
        place = f"{name if is_public else 'mpidist'}.{room}:"
        places |= {x: place + x for x in names} | ({room: place} if is_public else {})
    module["__all__"] = sorted({*public, *places})
    for key, value in public.items():
        if isinstance(value, ModuleType):
            publish(value.__name__, public)
        elif callable(value):
            _claim(value, above if key in outer else name)

    def look(missing: str) -> object:
        if missing not in places:
            message = f"module {name!r} has no attribute {missing!r}"
            raise missing_name(name, message, missing)
        found = module[missing] = pkgutil.resolve_name(places[missing])
        if places[missing].startswith("mpidist._"):
            _claim(found, name)
        return found

    module["__getattr__"] = look
    module["__dir__"] = lambda: sorted({*module, *places})


def _claim(value: Any, module: str) -> None:
    """Say that a class or function is of a public module.

    The annotations of a class are still looked up in the module that defines it: with
    `typing.get_type_hints`, and by what uses it (functions know theirs).
    """
    if isinstance(value, type):
        notes = vars(value).get("__annotations__", {})
        for key, note in notes.items():
            if isinstance(note, str):
                notes[key] = ForwardRef(note, module=value.__module__, is_class=True)
    value.__module__ = module
    same = _published.setdefault(value.__name__, [])
    if value not in same:
        same.append(value)


def explain_attributes(cls: _T, owner: str = "") -> _T:
    """Let missing attributes of the objects of a class say what to write instead.

    Args:
        cls: the class; a metaclass for the attributes of its classes.
        owner: the key of the table, if it is not the name of the class.
    """

    def look(self: object, missing: str) -> object:
        if is_own_attribute(self, missing):
            return type(self).__getattribute__(self, missing)
        kind = f"{type(self).__name__!r} object"
        if isinstance(self, type):
            kind = f"type object {self.__name__!r}"
        message = f"{kind} has no attribute {missing!r}"
        raise missing_name(owner or cls.__name__, message, missing)

    setattr(cls, "__getattr__", look)  # noqa: B010 - see the module
    return cls


def is_own_attribute(owner: object, name: str) -> bool:
    """Return whether a missing attribute is a property that has raised AttributeError.

    Python then calls ``__getattr__``, which should get it again: its own message, such
    as that of a user's subclass, says what is wrong.
    """
    return any(name in vars(cls) for cls in type(owner).__mro__)


def missing_name(owner: str, message: str, missing: str) -> AttributeError:
    """Return the error for a name that a module or an object does not have.

    Args:
        owner: the key of the table of names.
        message: what the error says in any case.
        missing: the name.
    """
    # NumPy, pickle and others ask objects for protocols all the time.
    is_protocol = missing[:2] == missing[-2:] == "__" and "mpidist" not in owner
    remedy = None if is_protocol else tables()["names"].get(owner, {}).get(missing)
    if remedy is None:
        return AttributeError(message)  # Python adds `name`, and "Did you mean"
    return AttributeError(f"{message}; {remedy} {_MORE}", name=missing, obj=None)


def explain_keywords(call: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator: keywords of TensorFlow are ignored, or say what to write.

    Not for calls in a hot path: it adds a Python call.

    Args:
        call: the key of the table of keywords, and the name of the call in messages. A
            class with a table of its own, which derives from that of the call, has its.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        accepted = inspect.signature(function).parameters.keys()

        @functools.wraps(function)
        def explained(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not accepted >= kwargs.keys():
                made = type(args[0]).__name__ if "." not in call and args else ""
                known = tables()["keywords"]
                _drop_ignored(made if made in known else call, kwargs)
                unknown = sorted(kwargs.keys() - accepted)
                if made in known and unknown:  # Python names the class of `__init__`
                    raise TypeError(
                        f"{made}.__init__() got an unexpected keyword argument "
                        f"{unknown[0]!r}"
                    )
            return function(*args, **kwargs)

        return explained

    return decorate


def wrong_call(text: str, names: Mapping[str, Any]) -> str:
    """Return what to write in place of a call that Python refuses; "" if unknown.

    Without a cost for calls that are right, as `explain_keywords` has.

    Args:
        text: Python's message: "Strategy.gather() missing 1 required positional ...".
        names: the globals of the caller, which may have something else of that name.
    """
    found = re.match(r"((\w+)(?:\.(\w+))?)\(\) .*\bargument(?:s| '(\w+)')?", text)
    if found is None:
        return ""
    heirs = [
        one
        for same in _published.values()
        for one in same
        if one.__init__.__qualname__ == found[1]
    ]
    called, *others = _published.get(found[2], heirs[:1]) or [None]
    if called is None or others or names.get(found[2], called) is not called:
        return ""
    keyword = tables()["keywords"].get(found[1], {}).get(found[4])
    if keyword is not None:
        return f"{keyword['write']} {_MORE}"
    if isinstance(called, type):
        # Not the class: Python before 3.11.4 takes the arguments of its `__new__`.
        called = getattr(called, found[3] or "__init__")
    signature = inspect.signature(called)
    parameters = [
        one.replace(annotation=one.empty)
        for one in signature.parameters.values()
        if one.name != "self"
    ]
    taken = inspect.Signature(parameters)
    if heirs[1:]:  # Python names the class that they inherit from
        return f"the arguments of such a class are `{taken}`"
    return f"call it as `{found[1].removesuffix('.__init__')}{taken}`"


def _drop_ignored(call: str, kwargs: dict[str, Any]) -> None:
    """Remove the keywords that are ignored.

    Raises:
        TypeError: for one that is not; the message says what to write.
    """
    known = tables()["keywords"][call]
    for name in known.keys() & kwargs.keys():
        keyword, value = known[name], kwargs[name]
        default = keyword.get("default", False)
        is_default = type(value) is type(default) and value == default
        if not (keyword.get("ignored") or is_default or value is None):
            raise TypeError(
                f"{call}: got an unexpected keyword argument {name!r}; "
                f"{keyword['write']} {_MORE}"
            )
        del kwargs[name]
