"""The memory of results."""

import numpy as np

import mpidist
from mpidist._collectives import pool as _pool
from mpidist._strategy.strategy import group_of


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
        lambda x: iter(x),
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
    pool = _pool.Pool(2**20)
    kept = [pool.empty((2**14,), np.dtype(float)) for _ in range(20)]
    assert pool.nbytes <= 2**20
    assert len({x.__array_interface__["data"][0] for x in kept}) == 20
    del kept
    whole = pool.empty((2**17,), np.dtype(float))
    assert whole.nbytes == pool.nbytes == 2**20
    assert pool.empty((2**18,), np.dtype(float)).base is None
    assert _pool.Pool(0).empty((2**17,), np.dtype(float)).base is None


def test_what_packing_needs_is_limited_too():
    """A leaf larger than a bucket, for one rank: once it was kept for ever."""
    limit, size = 2**20, 2**18

    def program():
        strategy = mpidist.MPIStrategy()
        group = group_of(strategy)
        pool = group.collectives.resources.pool
        pool.limit = limit
        to_first = strategy.extended.worker_devices[0]
        totals = []
        for count in (size, 2**14):  # of more bytes than the limit, and of fewer
            value = strategy.run(np.ones, args=(count,))
            total = strategy.extended.reduce_to("SUM", value, to_first)
            totals.append(None if total is None else total.sum())
        return totals, pool.nbytes

    found = mpidist.testing.run(2, program)
    assert [totals for totals, _ in found] == [[2 * size, 2 * 2**14], [None, None]]
    assert all(0 < nbytes <= limit for _, nbytes in found)
