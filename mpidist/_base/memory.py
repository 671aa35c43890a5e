"""Sizes of memory, and memory that is never released."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable
from typing import Final

LINE: Final = 64
"""Bytes of a cache line."""

PAGE: Final = 4096
"""Bytes of a page."""


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple


def lay_out(sizes: Iterable[int], unit: int = LINE) -> tuple[list[int], int]:
    """Return where blocks begin that follow each other in memory, and how large it is.

    Each begins at a multiple of ``unit``; the core has the same layout.
    """
    ends = itertools.accumulate(round_up(size, unit) for size in sizes)
    *starts, nbytes = 0, *ends
    return starts, nbytes


def leak(x: object) -> None:
    """Keep an object alive until the process has ended.

    For buffers of abandoned messages: MPI may write to them until it ends, which is
    after Python.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))
