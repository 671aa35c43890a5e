import numpy as np
import pytest
from replicas import all_reduce

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]


@pytest.mark.parametrize("implementation", ["direct", "shared"])
@pytest.mark.parametrize("size_bytes", [40, 400_000])
def test_arrays_that_are_not_aligned(
    new_strategy, rank, size, implementation, size_bytes
):
    """As `numpy.frombuffer` makes them, on one rank: mpi4py has no datatype for it."""
    strategy = new_strategy(implementation=implementation)
    x = np.full(size_bytes // 8, rank + 1.0)
    if rank == size - 1:
        x = np.frombuffer(b"head:" + x.tobytes(), x.dtype, offset=5)
        assert not x.flags.aligned

    def step():
        context = mpidist.get_replica_context()
        return context.all_reduce("SUM", x), context.all_reduce("SUM", [x])[0]

    value = strategy.run(step)
    for found in strategy.experimental_local_results(value)[0]:
        np.testing.assert_array_equal(found, np.full(x.shape, size * (size + 1) / 2))
    total = strategy.reduce("MEAN", strategy.run(lambda: x), axis=None)
    np.testing.assert_array_equal(total, np.full(x.shape, (size + 1) / 2))


@pytest.mark.parametrize("implementation", ["direct", "shared"])
def test_complex_numbers_that_are_aligned_as_their_parts(
    new_strategy, rank, size, implementation
):
    """At an odd multiple of half their size on one rank, which NumPy calls aligned."""
    strategy = new_strategy(implementation=implementation)
    room = np.zeros(10)
    x = room[room.ctypes.data % 16 == 0 :][:8].view(np.complex128)
    assert x.ctypes.data % 16 == 8
    assert x.flags.aligned
    x[:] = rank + 1j
    value = strategy.run(
        lambda: mpidist.get_replica_context().all_reduce(
            "SUM", x if rank == size - 1 else x.copy()
        )
    )
    expected = np.full(4, size * (size - 1) / 2 + size * 1j)
    found = strategy.experimental_local_results(value)[0]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("implementation", ["direct", "auto"])
@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_the_order_of_unsigned_integers(
    monkeypatch, new_strategy, dtype, nodes, implementation, rank, size
):
    """Some MPIs compare them as if they were signed."""
    monkeypatch.setenv("MPIDIST_SIMULATED_NODES", nodes)
    strategy = new_strategy(implementation=implementation.upper())
    least = np.arange(size, dtype=dtype)
    most = np.iinfo(dtype).max - least
    for count in (3, 100_003):
        parts = [
            np.where(np.arange(count) % size == k, most[k], least[k])
            for k in range(size)
        ]
        for op, function in (("MAX", np.maximum), ("MIN", np.minimum)):
            found = all_reduce(strategy, op, parts[rank])
            np.testing.assert_array_equal(found, function.reduce(parts))
            assert found.dtype == dtype
