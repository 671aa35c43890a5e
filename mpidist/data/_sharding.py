"""Which rows of a global batch are whose: two rules, as numbers.

TensorFlow has both, and which one it takes depends on the auto-shard policy
(`tensorflow/python/data/experimental/ops/distribute.py` of 2.21:
`_LegacyRebatchDataset` for AUTO and DATA, `_RebatchDataset` with
`batch_sizes_for_worker` for OFF).
"""

from __future__ import annotations


def split_as_it_comes(rows: int, replicas: int, replica: int) -> tuple[int, int]:
    """Return the first row of a replica, and the one after its last.

    Pieces of ceil(rows / replicas), until there are no more: 5 rows over 4 replicas
    are 2, 2, 1, 0.
    """
    piece = -(-rows // replicas)
    return min(rows, replica * piece), min(rows, (replica + 1) * piece)


def split_by_plan(
    rows: int, replicas: int, replica: int, batch_size: int
) -> tuple[int, int]:
    """Return the first row of a replica, and the one after its last.

    The full batch is cut into pieces whose sizes differ by one at most, the larger
    ones first: 5 rows over 4 replicas are 2, 1, 1, 1. A smaller batch fills these
    pieces in order: 6 rows of 8 over 3 replicas are 3, 3, 0. A batch of more rows than
    the full one gets a plan of its own.
    """
    piece, larger = divmod(max(rows, batch_size), replicas)
    start = replica * piece + min(replica, larger)
    stop = start + piece + (replica < larger)
    return min(rows, start), min(rows, stop)
