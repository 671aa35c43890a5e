"""Names, numbers and times in messages; names made unique."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def counted(number: int, what: str, several: str = "") -> str:
    """Return for example ``1 node``, ``2 nodes``."""
    return f"{number} {what if number == 1 else several or f'{what}s'}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, for a message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def unique(names: Iterable[str]) -> list[str]:
    """Return the names, with a number appended to repeated ones."""
    found: dict[str, None] = {}
    for name in names:
        candidate, number = name, 0
        while candidate in found:
            number += 1
            candidate = f"{name}_{number}"
        found[candidate] = None
    return list(found)


def show_seconds(seconds: float) -> str:
    """Return a time with three digits: ``0.84 us``, ``12.3 ms``, ``2.05 s``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale or not seconds:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{seconds / 1e-6:.2f} us"


def _digits(number: float) -> str:
    """Return a number with three significant digits, never with an exponent."""
    if number >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
