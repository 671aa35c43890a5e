"""Whether all ranks get the same bits from MPI's reductions.

MPI recommends it, but does not demand it (MPI 4.1, section 6.9.1, the advice to
libraries). Mirrored variables need it: copies that differ in the last bit drift
apart. So a strategy between nodes tries it when it is made, with numbers whose sum
depends on the order. All algorithms of Open MPI 5.0 and MPICH 5.0 pass.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import Final

import numpy as np

from mpidist import _native
from mpidist._agreement.channel import OK, Channel
from mpidist._base.types import HostArray
from mpidist._mpi.buffers import BufferCollectives
from mpidist._mpi.communicator import Communicator

# For the room behind a header, and for two of MPI's algorithms.
_COUNTS: Final = (100, 5_000, 30_000)
_FINGERPRINT: Final = 1


def same_on_all_ranks(
    comm: Communicator, channel: Channel, peers: BufferCollectives | None
) -> bool:
    """Return whether sums have the same bits on all ranks. Collective.

    Args:
        comm: the ranks.
        channel: where they exchange headers, which may carry sums.
        peers: the ranks with which this one sums slices of nodes, if it has any.
    """
    # In the state of each rank its own sums would differ, and those of MPI.
    with np.errstate(all="ignore"), _native.DefaultFloatState():
        found = hashlib.blake2b(digest_size=16)
        for count in _COUNTS:
            x = _awkward(comm.rank, count)
            found.update(_sum(comm.buffers, x).data)
        found.update(_behind_header(channel, _awkward(comm.rank, _COUNTS[0])).data)
        own = [b""] * comm.size
        if peers is not None:
            x = _awkward(peers.rank, _COUNTS[-1])
            own[comm.local_rank] = hashlib.blake2b(_sum(peers, x).data).digest()
    digests = comm.all_gather_objects(pickle.dumps((found.digest(), own)))
    sums = [pickle.loads(item) for item in digests]
    slots = [{row[slot] for _, row in sums} - {b""} for slot in range(comm.size)]
    return len({whole for whole, _ in sums}) == 1 and all(len(x) < 2 for x in slots)


def _sum(buffers: BufferCollectives, x: HostArray) -> HostArray:
    total = np.empty_like(x)
    buffers.allreduce(x, total, "SUM")
    return total


def _awkward(rank: int, count: int) -> HostArray:
    """Return floats of all magnitudes, other ones on each rank."""
    rng = np.random.default_rng(rank)
    return (rng.normal(size=count) * 10.0 ** rng.integers(-44, 30, count)).astype("f4")


def _behind_header(channel: Channel, x: HostArray) -> HostArray:
    total = np.zeros_like(x)
    if _native.core is not None and type(channel) is _native.core.Between:
        leaf = _native.ReduceLeaf("f4", "SUM", x.shape, 0)
        reduce = _native.core.BetweenReduce(channel, [leaf], _FINGERPRINT, 0)
        status = reduce.eager(x, total)
        counts: _native.Between = channel
        counts.reductions = counts.reduced = 0  # it is no call of the user
        if status != OK:
            raise RuntimeError(f"MPIStrategy(...): a header has the status {status}")
    return total
