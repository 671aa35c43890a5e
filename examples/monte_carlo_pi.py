"""Estimate pi to a wanted accuracy, with a stream of random numbers on each replica.

    mpirun -n 4 python examples/monte_carlo_pi.py

All ranks get the same sums, so all find the estimate good enough at the same time.
"""

import numpy as np

import mpidist

WANTED_ERROR = 5e-4
POINTS = 2**20  # of one round, on all replicas together


def make_stream(context):
    """Return a random generator for one replica, independent of the others'."""
    xp = mpidist.get_strategy().array_module
    seeds = np.random.SeedSequence(2024).spawn(context.num_replicas_in_sync)
    return xp.random.default_rng(seeds[context.replica_id_in_sync_group])


def count_inside(stream, points):
    """Return how many random points of the unit square are in the circle."""
    x, y = stream.random((2, points))
    return (x * x + y * y < 1).sum()


def main():
    strategy = mpidist.MPIStrategy()
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        streams = strategy.experimental_distribute_values_from_function(make_stream)

    inside = points = 0
    error = np.inf
    while error > WANTED_ERROR:
        counts = strategy.run(count_inside, args=(streams, POINTS // n))
        inside += int(strategy.reduce("SUM", counts, axis=None))
        points += POINTS // n * n
        fraction = inside / points
        error = 4 * np.sqrt(fraction * (1 - fraction) / points)

    if strategy.replica_id == 0:
        print(f"pi is {4 * fraction:.4f} +- {error:.4f}, from {points:,} points")


if __name__ == "__main__":
    main()
