"""The words of a header that goes by MPI, which takes the largest of each.

What has to be the same on all ranks is there twice, the second time with all bits
turned: the largest of the one and of the other fit only where all are equal.
"""

from __future__ import annotations

import struct
from typing import Final

FLAG, FINGERPRINT, NOT_FINGERPRINT, SOFT, NOT_SOFT, LATENESS, PATIENCE, MOST, WORDS = (
    range(9)
)

pack: Final = struct.Struct("5q").pack
"""Make the words that are compared: flags, fingerprint, soft, patience, most."""
