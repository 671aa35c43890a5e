"""Tells the other ranks when a signal's exception, or the like, has left a call.

A signal handler, Ctrl-C, or a lack of memory can raise at any line. In a section, the
end of the section tells the others (`sections.join`). Every other call of all ranks has
one ``except BaseException`` around all that it does, which calls `left`: the others
learn of it at once, whatever the line was. Otherwise they would wait for this rank
until the deadline, if the program catches the exception and makes no other call.

An exception before the first line of a call is like one between two calls, and is the
program's own affair.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeVar

from mpidist._base.errors import PACKAGE
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup

_F = TypeVar("_F", bound=Callable[..., Any])

# These call the program, and are not called by it.
_TESTING: Final = os.path.join(PACKAGE, "testing", "")
_ELASTIC: Final = os.path.join(PACKAGE, "elastic", "_run.py")


def left(group: ReplicaGroup, call: str, error: BaseException) -> None:
    """Tell the other ranks if such an exception has left a call of all ranks.

    Args:
        group: the ranks.
        call: the name of the call.
        error: the exception.
    """
    interrupted = group.guard.breakdown.interrupted(call, error)
    if interrupted and _is_outermost(sys._getframe(1)):
        context.unwind()


def tells(
    call: str,
    group_of: Callable[[Any], ReplicaGroup | None] = operator.attrgetter("_group"),
) -> Callable[[_F], _F]:
    """Return a decorator for a method that all ranks call: it calls `left`.

    Not for calls in a hot path, which have the ``try`` themselves: the decorator costs
    a Python call.

    Args:
        call: the name of the call.
        group_of: returns the ranks of an object of the method's class; None if they
            are not known yet, and nobody can be told.
    """

    def decorate(method: _F) -> _F:
        @functools.wraps(method)
        def told(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except BaseException as error:
                if (group := group_of(self)) is not None:
                    left(group, call, error)
                raise

        # The same type: overloads of the method would not fit another one.
        return told  # type: ignore[return-value]

    return decorate


def _is_outermost(frame: FrameType | None) -> bool:
    """Return whether the program made a call, not a function that mpidist runs for it.

    Args:
        frame: of the call.
    """
    while frame is not None and _is_own(frame):
        frame = frame.f_back
    while frame is not None and not _is_own(frame):
        frame = frame.f_back
    return frame is None or frame.f_code.co_filename == _ELASTIC


def _is_own(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(PACKAGE) and not name.startswith(_TESTING)
