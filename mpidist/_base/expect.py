"""Checks of arguments: a message says the call, what it expects, and what it got."""

from __future__ import annotations

import enum
import operator
import os
from typing import Any, TypeVar

from mpidist._base.types import Shape

_E = TypeVar("_E", bound=enum.Enum)


def expect(
    fits: object,
    call: str,
    what: str,
    got: object,
    hint: str = "",
    *,
    error: type[Exception] = TypeError,
) -> None:
    """Raise an error unless an argument is what a call expects.

    Args:
        fits: whether it is.
        call: the name of the call.
        what: what it expects, such as "`fn` to be a function".
        got: the argument.
        hint: what to write instead, after "; ".
        error: the type of the error.
    """
    if not fits:
        raise error(
            f"{call}: expected {what}, got {got!r:.80} of type {type(got).__name__}"
            f"{hint and '; '}{hint}"
        )


def as_int(
    call: str,
    name: str,
    value: Any,
    *,
    least: int | None = None,
    hint: str = "",
    kind: str = "an int",
) -> int:
    """Return an argument as an int, given one, or an array or variable of one.

    Raises:
        TypeError: if it is something else, a bool too.
        ValueError: if it is less than ``least``, if that is given.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    expect(number is not None, call, f"`{name}` to be {kind}", value, hint)
    assert number is not None
    if least is not None and number < least:
        raise ValueError(
            f"{call}: expected `{name}` to be {least} or more, got {number}"
            f"{hint and '; '}{hint}"
        )
    return number


def as_member(
    call: str, name: str, value: Any, kind: type[_E], refused: _E | None = None
) -> _E:
    """Return a member of an enumeration, given one, or its name in any case.

    The message does not offer one that the caller refuses, with a message of its own.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, str):
        value = kind.__members__.get(value.upper(), value)
    names = ", ".join(member.name for member in kind if member is not refused)
    what = f"`{name}` to be one of {names} ({kind.__name__})"
    expect(isinstance(value, kind), call, what, value, error=ValueError)
    return value


def as_path(call: str, path: Any, hint: str = "") -> str:
    """Return a path as a str; raise a TypeError for anything else, and for ""."""
    fits = isinstance(path, (str, os.PathLike)) and os.fspath(path)
    expect(fits, call, "a path, a str or `os.PathLike`", path, hint)
    return os.fsdecode(path)


def as_row_weights(call: str, weights: Any, shape: Shape) -> Any:
    """Return weights whose axes are the first ones of an array, and for others 1 long.

    Their last axes of length 1 that the array lacks are left out.

    Args:
        call: the method, for the message.
        weights: the argument, an array of any library.
        shape: of the array that they weigh.

    Raises:
        ValueError: if they are of another shape.
    """
    own = tuple(weights.shape)
    while own and own[-1] == 1 and own != shape[: len(own)]:
        own = own[:-1]
    if own != shape[: len(own)]:
        raise ValueError(
            f"{call}: expected a number, or `sample_weight` of shape {shape}, or of "
            f"its first axes, got {weights.dtype} {tuple(weights.shape)}"
        )
    return weights.reshape(own + (1,) * (len(shape) - len(own)))
