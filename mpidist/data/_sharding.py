"""The rows of a global batch that each replica gets: two rules.

TensorFlow has both, and the auto-shard policy determines which one it uses
(`tensorflow/python/data/experimental/ops/distribute.py` of 2.21:
`_LegacyRebatchDataset` for AUTO and DATA, `_RebatchDataset` with
`batch_sizes_for_worker` for OFF).
"""

from __future__ import annotations


def split_as_it_comes(rows: int, replicas: int, replica: int) -> tuple[int, int]:
    """Return the first row of a replica, and the one after its last.

    Parts of ceil(rows / replicas) rows, until there are no more: 5 rows over 4 replicas
    are 2, 2, 1, 0.
    """
    piece = -(-rows // replicas)
    return min(rows, replica * piece), min(rows, (replica + 1) * piece)


def split_by_plan(
    rows: int, replicas: int, replica: int, batch_size: int
) -> tuple[int, int]:
    """Return the first row of a replica, and the one after its last.

    The full batch is split into parts whose sizes differ by at most one, the larger
    ones first: 5 rows over 4 replicas are 2, 1, 1, 1. A smaller batch fills these parts
    in order: 6 rows of 8 over 3 replicas are 3, 3, 0. A batch with more rows than the
    full one gets its own plan.
    """
    piece, larger = divmod(max(rows, batch_size), replicas)
    start = replica * piece + min(replica, larger)
    stop = start + piece + (replica < larger)
    return min(rows, start), min(rows, stop)
