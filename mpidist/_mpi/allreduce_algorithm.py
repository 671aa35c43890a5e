"""The choice of MPI's collectives for an all-reduce of a large buffer."""

from __future__ import annotations

from typing import Final, NamedTuple

from mpidist._base.environment import AllReduceChoice

MOST_PIECE: Final = 64 * 2**20
"""The most bytes of a piece: each that completes restarts the deadline of a wait."""

NEVER: Final = 2**63

_MOST_RANKS: Final = 3  # that exchange parts
_IN_FLIGHT: Final = 4
LEAST_EXCHANGED: Final = 2**20 + 1
"""The least bytes of a sum that is exchanged in parts, if the ranks do that."""


class Algorithm(NamedTuple):
    """Which collectives of MPI an all-reduce is, and how many at a time.

    Attributes:
        gathers: whether the ranks gather what all have (``Iallgather``), and each adds,
            up to 1 MiB; else ``Iallreduce``. For two ranks both move the same bytes.
        in_flight: how many pieces are in progress at a time; of an exchange, how many
            in each of its two steps.
        piece_bytes: the least bytes of each.
        exchanged_bytes: from how many on sums go in two steps: each rank gets its part
            of all arrays (``Ialltoallv``), and adds; then the ranks gather the sums
            (``Iallgatherv``).
    """

    gathers: bool
    in_flight: int
    piece_bytes: int
    exchanged_bytes: int


def fastest_algorithm(library: str, size: int) -> Algorithm:
    """Return the fastest algorithm; measured on 2026-11-27 at 1, 4 and 16 MiB.

    Open MPI 5.0.11 reduces to one rank and then broadcasts, if there are fewer than
    four, or if the result is to be where the input is (``coll/libnbc``). Between two
    and three hosts at 1 Gbit/s that takes 1.6 to 2.0 and 0.8 to 1.2 times its blocking
    ``Allreduce``, an exchange 1.0 and 0.4 to 0.5. From four ranks on an exchange takes
    longer in memory. MPICH 5.0.2 leaves the network idle while it adds, so several are
    in progress; with Open MPI, several arrays of a nest (24 of 1.5 MiB between 4 hosts
    took 1.1 times as long as one ``Allreduce`` of all; 3.5 one after the other).

    Args:
        library: the vendor, as of `mpi4py.MPI.get_vendor`.
        size: the number of ranks.
    """
    if library != "Open MPI":
        return Algorithm(False, _IN_FLIGHT, 2 * 2**20, NEVER)
    if size > _MOST_RANKS:
        return Algorithm(False, _IN_FLIGHT, MOST_PIECE, NEVER)
    return Algorithm(size == 2, _IN_FLIGHT, 2**20, LEAST_EXCHANGED)


def chosen_algorithm(choice: AllReduceChoice) -> Algorithm:
    """Return the algorithm that the user has chosen (``MPIDIST_ALLREDUCE``)."""
    piece_bytes = 2**20 if choice.in_flight > 1 else MOST_PIECE
    exchanged_bytes = LEAST_EXCHANGED if choice.gathers else NEVER
    return Algorithm(choice.gathers, choice.in_flight, piece_bytes, exchanged_bytes)
