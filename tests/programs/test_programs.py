"""Programs of the shapes that people bring, on as many ranks as there are.

Each docstring names the shape; each result is that of one process with all rows. Shapes
that are tested elsewhere: TensorFlow's tutorial of custom training is
`examples/custom_training_loop.py`, and the loops of torch and JAX are in
`tests/with_torch` and `tests/with_jax`.
"""

import numpy as np
import pytest

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.core]

ROWS, BATCH = 22, 8  # neither divides by 3; the last batch has 6 rows
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3))
Y = X @ np.array([1.0, -2.0, 0.5]) + 4
SUM = mpidist.ReduceOp.SUM
MEAN = mpidist.ReduceOp.MEAN


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


def batches(epochs=1):
    for start in list(range(0, ROWS, BATCH)) * epochs:
        yield X[start : start + BATCH], Y[start : start + BATCH]


def gradient(w, x, y, rows):
    """Return that of half the mean of the squared errors over ``rows`` rows."""
    return x.T @ (x @ w - y) / rows


def trained_alone(epochs, rate=0.1):
    w = np.zeros(3)
    for x, y in batches(epochs):
        w -= rate * gradient(w, x, y, len(y))
    return w


def dataset(epochs=1):
    return mpidist.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).repeat(epochs)


def test_sonnet_cross_replica_batch_norm(strategy, rank, size):
    """Sonnet: moments over all replicas; the moving mean is kept on each of them."""
    rows = np.split(X[: ROWS // size * size], size)[rank]

    class CrossReplicaBatchNorm:
        def __init__(self):
            self.mean = mpidist.Variable(
                np.zeros(3),
                trainable=False,
                synchronization=mpidist.VariableSynchronization.ON_READ,
                aggregation=mpidist.VariableAggregation.MEAN,
            )

        def __call__(self, x):
            context = mpidist.get_replica_context()
            mean, square = context.all_reduce(
                MEAN, [x.mean(axis=0), (x**2).mean(axis=0)]
            )
            self.mean.assign(0.9 * self.mean.numpy() + 0.1 * mean)
            return (x - mean) / np.sqrt(square - mean**2)

    with strategy.scope():
        norm = CrossReplicaBatchNorm()
    result = strategy.gather(strategy.run(norm, args=(rows,)), axis=0)
    everything = X[: ROWS // size * size]
    expected = (everything - everything.mean(axis=0)) / everything.std(axis=0)
    np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(norm.mean.numpy(), 0.1 * everything.mean(axis=0))


def test_chainermn(strategy, rank):
    """ChainerMN: data of rank 0 for all, its starting weights, and an evaluator."""
    start = np.full(3, float(rank))  # only rank 0's count
    owned = (X, Y) if rank == 0 else (np.zeros_like(X), np.zeros_like(Y))
    x, y = strategy.run(
        lambda: mpidist.get_replica_context().merge_call(lambda strategy: owned)
    )
    with strategy.scope():
        w = mpidist.Variable(start)
    data = mpidist.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    optimizer = mpidist.optimizers.SGD(0.1)

    def step(x, y):
        rows = mpidist.get_replica_context().all_reduce(SUM, len(y))
        optimizer.apply_gradients([(gradient(w.numpy(), x, y, rows), w)])

    def evaluate(x, y):
        return np.array([((x @ w - y) ** 2).sum(), len(y)])

    for batch in strategy.experimental_distribute_dataset(data):
        strategy.run(step, args=batch)
    np.testing.assert_allclose(w.numpy(), trained_alone(1), rtol=1e-12)
    total = np.zeros(2)
    for batch in strategy.experimental_distribute_dataset(data):
        total += strategy.reduce(SUM, strategy.run(evaluate, args=batch), axis=None)
    expected = ((X @ trained_alone(1) - Y) ** 2).mean()
    np.testing.assert_allclose(total[0] / total[1], expected)


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


def test_resume_on_another_number_of_ranks(strategy, rank, same_folder, new_strategy):
    """A training that was saved on all ranks goes on on one; the weights are equal."""
    from mpi4py import MPI

    def train(strategy, restore):
        with strategy.scope():
            w = mpidist.Variable(np.zeros(3), name="w")
        iterator = iter(strategy.experimental_distribute_dataset(dataset(4)))
        optimizer = mpidist.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build([w])
        checkpoint = mpidist.Checkpoint(w=w, optimizer=optimizer, iterator=iterator)

        def step(x, y):
            rows = mpidist.get_replica_context().all_reduce(SUM, len(y))
            optimizer.apply_gradients([(gradient(w.numpy(), x, y, rows), w)])

        def steps(count):
            for _ in range(count):
                strategy.run(step, args=next(iterator))
            return w.numpy().copy()

        if restore:
            checkpoint.restore(same_folder / "half")
        else:
            steps(5)
            checkpoint.save(same_folder / "half")
        return steps(7)

    whole = train(strategy, restore=False)
    alone = train(new_strategy(comm=MPI.COMM_SELF), restore=True)
    np.testing.assert_allclose(alone, whole, rtol=1e-12)
