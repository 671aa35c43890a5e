"""Sizes and times: reading sizes from text, and showing both."""

from __future__ import annotations

import re
from typing import Final

_BYTES: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
_NUMBER: Final = r"(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)"


def parse_size(text: str) -> int:
    """Return the bytes that a text such as ``64KiB``, ``1MB`` or ``4`` means.

    Raises:
        ValueError: if the text has another form, or the size is below one byte.
    """
    match = re.fullmatch(rf"{_NUMBER}\s*([A-Za-z]*)", text.strip())
    scale = _BYTES.get(match[2].upper()) if match else None
    if match is None or scale is None or float(match[1]) * scale < 1:
        raise ValueError(f"expected a size such as 4B, 64KiB or 1MB, got {text!r}")
    return int(float(match[1]) * scale)


def show_size(nbytes: int) -> str:
    """Return for example ``64 KiB``, or ``102.2 MB`` if no binary unit divides it."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if scale <= nbytes < 1024 * scale and nbytes % scale == 0:
            return f"{nbytes // scale} {unit}"
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"


def show_seconds(seconds: float) -> str:
    """Return a time with three digits: ``0.84 us``, ``12.3 ms``, ``2.05 s``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{seconds / 1e-6:.2f} us"


def _digits(number: float) -> str:
    """Return a number with three significant digits, never with an exponent."""
    if number >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
