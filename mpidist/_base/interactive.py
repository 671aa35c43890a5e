"""Tracebacks in IPython and notebooks, without the frames of this package."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Final

from mpidist._base.environment import debugging
from mpidist._base.errors import PACKAGE, chain

_installed: Final[list[bool]] = []


def hide_own_frames() -> None:
    """Show tracebacks in IPython as in scripts, if this process is an IPython.

    Does nothing if the user has set a handler for exceptions of their own, and with
    ``MPIDIST_DEBUG=1``.
    """
    if _installed or "IPython" not in sys.modules:
        return
    shell = sys.modules["IPython"].get_ipython()
    if shell is None or shell.custom_exceptions:
        return
    _installed.append(True)

    # `Any`: IPython is not typed, and calls it as a method of its shell.
    def show(
        shell: Any,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
        tb_offset: int | None = None,
    ) -> None:
        if not debugging():
            for one in chain(error):
                one.__traceback__ = without_own_frames(one.__traceback__)
            trace = error.__traceback__
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)

    shell.set_custom_exc((Exception,), show)


def is_interactive() -> bool:
    """Return whether this process is a Python prompt, an IPython or a notebook."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return True
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package; as it is if all are."""
    kept = []
    rest = trace
    while rest is not None:
        if not rest.tb_frame.f_code.co_filename.startswith(PACKAGE):
            kept.append(rest)
        rest = rest.tb_next
    result: TracebackType | None = None
    for one in reversed(kept):
        result = TracebackType(result, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return trace if result is None else result
