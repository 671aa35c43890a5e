"""Checksums of arrays: short texts and numbers that differ if values do.

Ranks compare them to find copies that have drifted, and results that differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np

from mpidist._base import backend
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.types import Array, DeviceArray, HostArray, Nest

_A = TypeVar("_A", HostArray, DeviceArray, Array)
# Of any buffer: NumPy's types say that arrays are one only from Python 3.12 on.
_crc32: Final[Callable[..., int]] = zlib.crc32

_SMALL_BYTES: Final = 4096
_END_BYTES: Final = 256
_MOST_WORDS: Final = 8192
_LEAST_STEP: Final = 8
SAMPLED_BYTES: Final = 2**20
_FEW_VALUES: Final = 6
_COLUMNS: Final = 509  # a prime, which divides no usual length of rows
_GOLDEN: Final = 0x9E3779B97F4A7C15  # spreads sums of words over all bits
_MASK: Final = 2**62 - 1
_MANTISSA_OF_X87: Final = 63


def value_bytes(x: _A) -> _A:
    """Return the bytes of an array that hold its values, in C order, to compare.

    The 80-bit numbers of x86 are padded with 6 bytes of undefined contents.
    """
    raw = backend.as_bytes(backend.contiguous(x))
    if x.dtype.char in "gG" and np.finfo(np.longdouble).nmant == _MANTISSA_OF_X87:
        rows = raw.reshape(-1, np.dtype(np.longdouble).itemsize)[:, :10]
        return backend.contiguous(rows).reshape(-1)
    return raw


def summarize(x: Array, most_bytes: int | None = None) -> str:
    """Return a short text that differs if dtype, shape or a bit of the values does.

    Small arrays are written out. For large ones it is a checksum of their ends and of
    509 sums of their 64-bit words, so it differs, too, if values have moved (unless by
    a multiple of 4072 bytes): almost as fast as memory, but not safe against an
    adversary.

    Args:
        x: the array.
        most_bytes: of a larger array only some words between the ends are read.
    """
    raw = value_bytes(x)
    size, host = int(raw.size), backend.to_host
    checksum = _crc32(host(raw[:_SMALL_BYTES]), _form(x))
    if size > _SMALL_BYTES:
        checksum = _crc32(host(raw[-_SMALL_BYTES:]), checksum)
        step = 1 if most_bytes is None else max(1, size // most_bytes)
        words = raw[: size // 8 * 8].view(np.uint64)[::step]
        rows = words[: words.size // _COLUMNS * _COLUMNS].reshape(-1, _COLUMNS)
        sums = host(rows.sum(axis=0))
        checksum = _crc32(sums, checksum) ^ int(sums.sum())
    if x.size <= _FEW_VALUES:
        return f"{host(x).tolist()} (checksum {checksum:x})"
    return f"{backend.describe(x)} with checksum {checksum:x}"


def summarize_value(x: Nest, call: str) -> str:
    """Return `summarize` of an array or a number, or of rows and their numbers."""
    if isinstance(x, IndexedSlices):
        rows, indices = (summarize_value(y, call) for y in (x.values, x.indices))
        return f"{rows} at {indices}"
    if type(x) is np.ndarray:
        return summarize(x)
    if backend.is_array(x) or backend.is_number(x):
        return summarize(backend.as_array(x, call)[0])
    return f"a {type(x).__name__}"


def sample(x: Array) -> str:
    """Return a short text that usually differs if the values differ.

    As `summarize`, but its cost does not grow with the size beyond a MiB.
    """
    return summarize(x, SAMPLED_BYTES)


def fingerprint_of_array(x: Array, seed: int) -> int:
    """Return a fingerprint that usually differs if values, dtypes or shapes differ.

    It is the same on every rank, and for arrays on the host and on a GPU. Of arrays of
    more than 64 KiB it reads the ends and some words in between; which words depends on
    the seed.

    Args:
        x: the array.
        seed: a number that is the same on all ranks.
    """
    return _look_at(value_bytes(x), _form(x))(seed)


def fingerprinter(x: Array) -> Callable[[int], int]:
    """Return a function that returns `fingerprint_of_array` for a seed.

    For long-lived arrays: views of the array are made once.

    Args:
        x: an array in C order whose address does not change.
    """
    if x.dtype.char in "gG":  # whose values are copied each time
        return lambda seed: fingerprint_of_array(x, seed)
    return _look_at(backend.as_bytes(x), _form(x))


def _form(x: Array) -> int:
    """Return a number that differs if a dtype or a shape does."""
    # Not by `dtype.char`: C's long and long long are one dtype, but two of these.
    return int(_crc32(f"{x.dtype.str}{x.shape}".encode()))


def _look_at(raw: Array, form: int) -> Callable[[int], int]:
    """Return what returns the fingerprint of bytes of a `_form` for a seed."""
    checksum, host = _crc32, backend.to_host
    if raw.size <= _SMALL_BYTES:
        return lambda seed: checksum(host(raw), form)
    words, step = raw[: raw.size // 8 * 8].view(np.uint64), 1
    if words.size > _MOST_WORDS:
        step = max(_LEAST_STEP, int(words.size) // _MOST_WORDS)
    first, last = raw[:_END_BYTES], raw[-_END_BYTES:]

    def look(seed: int) -> int:
        some = words[seed % step :: step] if step > 1 else words
        total = int(some.sum(dtype=np.uint64))
        ends = checksum(host(last), checksum(host(first), form))
        return (total * _GOLDEN + ends) & _MASK

    return look
