"""Programs of the shapes that people bring, on as many ranks as there are.

Each docstring names the shape; each result is that of one process with all rows.
"""

import numpy as np
import pytest

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.core]

ROWS, BATCH = 22, 8  # neither divides by 3; the last batch has 6 rows
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3))


def test_rows_of_the_table_for_other_libraries(strategy, rank, size):
    """docs/guide/coming_from.md, with another value on each rank."""
    x = float(rank)
    mean = strategy.reduce("MEAN", strategy.run(lambda: x), axis=None)
    assert mean == (size - 1) / 2
    for value in (rank + 7.0, np.full(2, rank + 7.0)):
        first = strategy.extended.broadcast_to(value, "/cpu:0")
        np.testing.assert_array_equal(first, np.full_like(value, 7.0))

    def replica():
        context = mpidist.get_replica_context()
        return context.merge_call(lambda strategy: {"rank": rank, "text": f"of {rank}"})

    found = strategy.run(replica)
    assert strategy.experimental_local_results(found["rank"]) == (0,)
    assert found["text"] == "of 0"


def test_jacobi(strategy, rank, size):
    """Jacobi: halos by Sendrecv of mpi4py, beside the strategy's reductions."""
    from mpi4py import MPI

    n, comm = 12, MPI.COMM_WORLD
    alone = np.zeros(n + 2)
    alone[-1] = 1.0
    mine = np.array_split(np.arange(1, n + 1), size)[rank]
    u = alone[mine[0] - 1 : mine[-1] + 2].copy()
    left = rank - 1 if rank else MPI.PROC_NULL
    right = rank + 1 if rank + 1 < size else MPI.PROC_NULL

    def all_reduce(change):
        return mpidist.get_replica_context().all_reduce(np.maximum, change)

    for _ in range(50):
        previous = alone.copy()
        alone[1:-1] = (alone[:-2] + alone[2:]) / 2
        comm.Sendrecv(
            u[1:2].copy(), left, recvbuf=(halo := u[-1:].copy()), source=right
        )
        u[-1:] = halo
        comm.Sendrecv(
            u[-2:-1].copy(), right, recvbuf=(halo := u[:1].copy()), source=left
        )
        u[:1] = halo
        new = (u[:-2] + u[2:]) / 2
        change = np.abs(new - u[1:-1]).max()
        u[1:-1] = new
        changes = strategy.run(all_reduce, args=(change,))
    whole = strategy.gather(strategy.run(lambda: u[1:-1]), axis=0)
    np.testing.assert_allclose(whole, alone[1:-1], rtol=1e-12)
    (largest,) = strategy.experimental_local_results(changes)
    assert float(largest) == np.abs(alone - previous).max()


@pytest.mark.parametrize("library", ["h5py", "zarr"])
def test_files(strategy, rank, same_folder, library):
    """HDF5 and zarr: each rank reads its rows of one file."""
    module = pytest.importorskip(library, reason=f"{library} is not installed")
    path = same_folder / library
    if rank == 0:
        if library == "h5py":
            with module.File(path, "w") as file:
                file["x"] = X
        else:
            module.save(str(path), X)
    strategy.run(lambda: None)
    x = module.File(path, "r")["x"] if library == "h5py" else module.load(str(path))
    rows = mpidist.data.Dataset.from_tensor_slices(x).batch(BATCH)
    read = [
        strategy.gather(element, axis=0)
        for element in strategy.experimental_distribute_dataset(rows)
    ]
    np.testing.assert_array_equal(np.concatenate(read), X)
