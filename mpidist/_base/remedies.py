"""What to write instead of names and keywords that programs for other libraries use.

A name that mpidist does not have raises AttributeError, and a keyword TypeError, as
always in Python; the message ends with the line to write. `docs/porting.md` has the
same names in tables. ``hasattr`` and ``dir`` are not affected, nor are names that begin
and end with two underscores, by which pickle, copy and inspect ask objects for their
protocols.

The hooks are set by functions, not written as ``def __getattr__``: type checkers would
then accept every name.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

from mpidist._base.remedy_keywords import KEYWORDS, Keyword
from mpidist._base.remedy_tables import ATTRIBUTES

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T", bound=type)


def explain_module(name: str) -> None:
    """Let a missing name of a module of this package say what to write instead."""

    def look(missing: str) -> NoReturn:
        raise missing_name(
            name, f"module {name!r} has no attribute {missing!r}", missing
        )

    setattr(sys.modules[name], "__getattr__", look)  # noqa: B010 - see the module


def explain_attributes(cls: _T, owner: str = "") -> _T:
    """Let missing attributes of the objects of a class say what to write instead.

    Args:
        cls: the class; a metaclass for the attributes of its classes.
        owner: the key of `ATTRIBUTES`, if it is not the name of the class.
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
        owner: the key of `ATTRIBUTES`.
        message: what the error says in any case.
        missing: the name.
    """
    remedy = ATTRIBUTES.get(owner, {}).get(missing)
    if remedy is None:
        return AttributeError(message)  # Python adds `name`, and "Did you mean"
    return AttributeError(
        f"{message}; {remedy} (docs/porting.md has all names)", name=missing, obj=None
    )


def explain_keywords(call: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator: keywords of TensorFlow are ignored, or say what to write.

    Not for calls in a hot path: it adds a Python call.

    Args:
        call: the key of `KEYWORDS`, and the name of the call in messages.
    """
    known = KEYWORDS[call]

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def explained(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if kwargs and not known.keys().isdisjoint(kwargs):
                _without(call, known, kwargs)
            return function(*args, **kwargs)

        return explained

    return decorate


def _without(call: str, known: Mapping[str, Keyword], kwargs: dict[str, Any]) -> None:
    """Remove the keywords that are ignored.

    Raises:
        TypeError: for one that is not; the message says what to write.
    """
    for name in known.keys() & kwargs.keys():
        keyword, value = known[name], kwargs[name]
        default = keyword.default
        is_default = type(value) is type(default) and value == default
        if not (keyword.ignored or is_default or value is None or value is False):
            raise TypeError(
                f"{call}: got an unexpected keyword argument {name!r}; "
                f"{keyword.remedy} (docs/porting.md has all arguments)"
            )
        del kwargs[name]
