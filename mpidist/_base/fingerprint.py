"""Fingerprints of values that ranks compare: the same number in every process.

Ranks never compare Python's `hash`: for strings it differs between processes, for -1
and -2 it is the same, and only the interpreter defines it. A fingerprint is 62 bits of
BLAKE2b. It and its complement are signed 64-bit integers, so MPI can find the maximum
of both (`guard`). It protects against mistakes, not against attacks.
"""

from __future__ import annotations

import functools
import hashlib

_BLAKE2B = hashlib.blake2b


@functools.lru_cache(maxsize=1024)
def fingerprint(text: str) -> int:
    """Return 62 bits that depend on a text, as an integer that is not negative."""
    return fingerprint_of_bytes(text.encode("utf-8", "surrogatepass"))


def fingerprint_of(x: object) -> int:
    """Return 62 bits that depend on the `repr` of an object. Unlike a text's not kept.

    Args:
        x: numbers, texts and bytes, also in lists, tuples and dicts.
    """
    return fingerprint_of_bytes(repr(x).encode())


def fingerprint_of_bytes(data: bytes) -> int:
    """Return 62 bits that depend on a byte string."""
    return int.from_bytes(_BLAKE2B(data, digest_size=8).digest(), "little") >> 2
