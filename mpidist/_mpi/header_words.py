"""The words of a header that goes over MPI, which takes the largest of each.

A word that must be the same on all ranks is there twice, the second time with all bits
inverted: the largest of the one is the inverse of the largest of the other only if all
are equal.
"""

from __future__ import annotations

import struct
from typing import Final

(
    FLAG,
    FINGERPRINT,
    NOT_FINGERPRINT,
    VALUE,
    NOT_VALUE,
    LATENESS,
    PATIENCE,
    LARGEST,
    WORDS,
) = range(9)

pack: Final = struct.Struct("5q").pack
"""Make the words that are compared: flag, fingerprint, value, patience, largest."""
