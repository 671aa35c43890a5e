"""Sizes of memory, and memory that is never released."""

from __future__ import annotations

import ctypes
from typing import Final

LINE: Final = 64
"""Bytes of a cache line."""

PAGE: Final = 4096
"""Bytes of a page."""


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple


def leak(x: object) -> None:
    """Keep an object alive until the process has ended.

    For buffers of abandoned messages: MPI may write to them until it ends, which is
    after Python.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))
