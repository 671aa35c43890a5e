"""The memory of results."""

import resource
from pathlib import Path

import numpy as np
import pytest

from mpidist import _native
from mpidist._collectives import pool as _pool

pytestmark = pytest.mark.skipif(_native.core is None, reason="needs the native core")


def test_memory_in_use_is_not_given_away():
    """By whatever it is in use."""
    pool = _pool.Pool(2**20)
    shape, dtype = (2**15,), np.dtype(float)

    def address(x):
        return x.__array_interface__["data"][0]

    first = address(pool.empty(shape, dtype))
    assert address(pool.empty(shape, dtype)) == first  # nobody has it
    users = [
        lambda x: x,
        lambda x: x[5:6],
        lambda x: x.T,
        lambda x: x.view(np.uint8),
        memoryview,
        lambda x: np.frombuffer(x, np.int64),
        lambda x: x.base,
        lambda x: lambda: x,
        iter,
        lambda x: np.broadcast_to(x, (2, *shape)),
        lambda x: x.flat,
        lambda x: x.data,
    ]
    for user in users:
        using = user(pool.empty(shape, dtype))
        assert address(pool.empty(shape, dtype)) != first, user
        del using
        assert address(pool.empty(shape, dtype)) == first, user


def test_what_a_pool_keeps_is_limited():
    pool, dtype = _pool.Pool(2**20), np.dtype(float)
    arrays = [pool.empty((2**14,), dtype) for _ in range(20)]
    for number, x in enumerate(arrays):
        x[...] = number
    assert [x[[0, -1]].tolist() for x in arrays] == [[k, k] for k in range(20)]
    assert 0 < sum(x.base is not None for x in arrays) < 8  # whole pages each
    del x, arrays
    assert pool.empty((2**17 - 2**9,), dtype).base is not None  # all of it is free
    for other in (pool, _pool.Pool(0)):
        assert other.empty((2**18,), dtype).base is None


def bytes_of_this_process(name):
    with open("/proc/self/status") as file:
        return next(int(row.split()[1]) << 10 for row in file if row.startswith(name))


@pytest.mark.parametrize("end", [_pool.Pool.close, lambda pool: None])
def test_a_kept_result_keeps_no_memory_but_its_own(end):
    pool, dtype = _pool.Pool(2**28), np.dtype(np.uint8)
    others = [pool.empty((2**26,), dtype) for _ in range(2)]
    kept = pool.empty((2**17,), dtype)
    for x in (*others, kept):
        x[...] = 1
    before = bytes_of_this_process("VmRSS")
    del x, others[0]
    end(pool)
    del pool
    assert bytes_of_this_process("VmRSS") < before - 2**25
    del others
    assert bytes_of_this_process("VmRSS") < before - 2**25 - 2**26
    assert (kept == 1).all()


def test_memory_is_mapped_for_the_first_result_and_counted_as_it_is_used():
    before = bytes_of_this_process("VmSize")
    pool, dtype = _pool.Pool(2**38), np.dtype(float)
    assert bytes_of_this_process("VmSize") < before + 2**30
    x = pool.empty((2**14,), dtype)
    x[...] = 1
    assert bytes_of_this_process("VmSize") > before + 2**37
    assert bytes_of_this_process("VmData") < before + 2**30


def test_where_the_address_space_is_limited_results_have_memory_of_their_own():
    _, hard = limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**42, hard))
    try:
        pool = _pool.Pool(2**43)
        assert pool.empty((2**14,), np.dtype(float)).base is None
        assert pool.empty((2**14,), np.dtype(float)).base is None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages"
)
def test_results_have_huge_pages_as_arrays_of_numpy_do():
    x = _pool.Pool(2**26).empty((2**20,), np.dtype(float))
    start, flags = x.__array_interface__["data"][0], ""
    for row in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = row.partition(" ")
        if "-" in first:
            low, high = (int(part, 16) for part in first.split("-"))
        elif first == "VmFlags:" and low <= start < high:
            flags = rest
    assert "hg" in flags.split()
