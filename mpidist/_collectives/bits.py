"""Whether all ranks get the same bits from MPI's reductions.

MPI recommends it, but does not demand it (MPI 4.1, section 6.9.1, the advice to
libraries). Mirrored variables need it: copies that differ in the last bit drift
apart. So a strategy between nodes tries it when it is made, with numbers whose sum
depends on the order. All algorithms of Open MPI 5.0 and MPICH 5.0 pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np

from mpidist import _native
from mpidist._agreement.channel import OK, Channel, between_of
from mpidist._base.types import HostArray
from mpidist._mpi.buffers import BufferCollectives, BufferReduction
from mpidist._mpi.communicator import Communicator

# For MPI's algorithms for small and for large arrays; the first fits the room, too.
_COUNTS: Final = (100, 30_000)
_FINGERPRINT: Final = 1

Digests: TypeAlias = tuple[bytes, bytes]
"""Of this rank's sums with all ranks; of those with its peers, b"" without peers."""

NONE: Final[Digests] = (b"", b"")


def digests_of_sums(
    comm: Communicator, channel: Channel, peers: BufferCollectives | None
) -> Digests:
    """Return what `are_same` compares. Collective.

    Args:
        comm: the ranks.
        channel: where they exchange headers, which may carry sums.
        peers: the ranks with which this one sums slices of nodes, if it has any.
    """
    # In the state of each rank its own sums would differ, and those of MPI.
    with np.errstate(all="ignore"), _native.DefaultFloatState():
        found = _behind_header(channel, _awkward(comm.rank, _COUNTS[0])).tobytes()
        for count in _COUNTS:
            found += _sum(comm.buffers, _awkward(comm.rank, count))
        of_peers = b""
        if peers is not None:  # all groups of peers add the same numbers
            of_peers = _digest(_sum(peers, _awkward(peers.rank, _COUNTS[-1])))
    return _digest(found), of_peers


def are_same(rows: Sequence[Digests]) -> bool:
    """Return whether all ranks have the same sums, and all that have peers."""
    sums, of_peers = map(set, zip(*rows, strict=True))
    return len(sums) == 1 and len(of_peers - {b""}) < 2


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _sum(buffers: BufferCollectives, x: HostArray) -> bytes:
    total = np.empty_like(x)
    buffers.allreduce([BufferReduction(x, total, "SUM")])
    return total.tobytes()


def _awkward(rank: int, count: int) -> HostArray:
    """Return floats of all magnitudes, other ones on each rank."""
    rng = np.random.default_rng(rank)
    return (rng.normal(size=count) * 10.0 ** rng.integers(-44, 30, count)).astype("f4")


def _behind_header(channel: Channel, x: HostArray) -> HostArray:
    total = np.zeros_like(x)
    if (between := between_of(channel)) is not None:
        leaf = _native.ReduceLeaf("f4", "SUM", x.shape, 0)
        # Not counted: it is no call of the user.
        reduce = _native.core.Reduce(between, [leaf], 0, _FINGERPRINT, 0, False)
        status = reduce.run(x, total)
        if status != OK:
            raise RuntimeError(f"MPIStrategy(...): a header has the status {status}")
    return total
