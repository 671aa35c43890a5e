"""Which machine this process runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return what Linux drew at its start: the same in all processes of the machine.

    Returns:
        "" on other systems.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
