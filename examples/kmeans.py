"""Cluster the flowers of the iris data set by k-means, with the rows on all replicas.

Needs the extra `examples`:

    mpirun -n 3 python examples/kmeans.py

Each replica assigns its own rows to the nearest centre. The sums and counts of the
clusters, all that the new centres need, are reduced in one call. All replicas get
the same bits, so they stop after the same step, and the result does not depend on how
many there are.
"""

import numpy as np
from sklearn.datasets import load_iris

import mpidist

CLUSTERS = 3
STARTS = 10
EXPECTED = 78.8514  # inertia (sum of squared distances) by scikit-learn's KMeans


def lloyd(xp, rows, centres):
    """Improve the centres until they stay; return the inertia and the cluster sizes."""
    context = mpidist.get_replica_context()
    mine = rows[context.replica_id_in_sync_group :: context.num_replicas_in_sync]
    while True:
        squares = ((mine[:, None] - centres) ** 2).sum(axis=2)
        member = xp.eye(len(centres))[squares.argmin(axis=1)]
        inertia, counts, sums = context.all_reduce(
            "SUM", (squares.min(axis=1).sum(), member.sum(axis=0), member.T @ mine)
        )
        previous = centres
        # A cluster that has lost all its rows keeps its centre.
        centres = xp.where(counts[:, None] > 0, sums, previous)
        centres = centres / xp.maximum(counts, 1)[:, None]
        if xp.abs(centres - previous).max() < 1e-9:
            return inertia, counts


def main():
    strategy = mpidist.MPIStrategy()
    xp = strategy.array_module
    rows = xp.asarray(load_iris().data)
    rng = np.random.default_rng(0)  # the same on all ranks

    results = []
    for _ in range(STARTS):
        start = rng.choice(len(rows), CLUSTERS, replace=False)
        result = strategy.run(lloyd, args=(xp, rows, rows[xp.asarray(start)]))
        inertia, counts = strategy.experimental_local_results(result)[0]
        results.append((float(inertia), sorted(int(n) for n in counts)))

    inertia, counts = min(results)
    if strategy.replica_id == 0:
        print(
            f"{STARTS} starts on {strategy.num_replicas_in_sync} replicas: clusters of "
            f"{counts} flowers, inertia {inertia:.4f} (expected: {EXPECTED})"
        )


if __name__ == "__main__":
    main()
