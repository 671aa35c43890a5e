"""Fingerprints of values that ranks compare: the same number in every process.

Ranks never compare Python's `hash`: for strings it differs between processes, for -1
and -2 it is the same, and only the interpreter defines it. A fingerprint is 62 bits of
BLAKE2b. It and its complement are signed 64-bit integers, so MPI can find the maximum
of both (`guard`). It protects against mistakes, not against attacks.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence
from typing import Final

_WORD: Final = 0xFFFFFFFFFFFFFFFF

_BLAKE2B = hashlib.blake2b


@functools.lru_cache(maxsize=1024)
def fingerprint(text: str) -> int:
    """Return 62 bits that depend on a text, as an integer that is not negative."""
    return fingerprint_of_bytes(text.encode("utf-8", "surrogatepass"))


def fingerprint_of(*parts: int | bytes | str) -> int:
    """Return 62 bits that depend on the parts, on their types and on their order.

    Args:
        parts: integers of any size, byte strings and texts. Each is written with its
            type and its length, so different lists of parts are different bytes.
    """
    encoded = [b"%di" % x if type(x) is int else _encode(x) for x in parts]
    return fingerprint_of_bytes(b"".join(encoded))


def _encode(part: int | bytes | str) -> bytes:
    if isinstance(part, str):
        data = part.encode("utf-8", "surrogatepass")
        return b"%ds%b" % (len(data), data)
    if isinstance(part, bytes):
        return b"%db%b" % (len(part), part)
    return b"%di" % part


def fingerprint_of_bytes(data: bytes) -> int:
    """Return 62 bits that depend on a byte string."""
    return int.from_bytes(_BLAKE2B(data, digest_size=8).digest(), "little") >> 2


def fingerprint_of_numbers(numbers: Sequence[int]) -> int:
    """Return 62 bits that depend on the lowest 64 bits of integers."""
    words = [n & _WORD for n in numbers]
    return fingerprint_of_bytes(struct.pack(f"<{len(words)}Q", *words))
