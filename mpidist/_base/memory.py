"""Sizes of memory, and memory that is never given back."""

from __future__ import annotations

import ctypes
from typing import Final

LINE: Final = 64
"""Bytes of a cache line."""

PAGE: Final = 4096
"""Bytes of a page."""


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is not below ``number``."""
    return -(-number // multiple) * multiple


def leak(x: object) -> None:
    """Keep an object until the process has ended.

    For buffers of messages that nobody waits for any more: MPI may write to them until
    it has ended, which is after Python has.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))
