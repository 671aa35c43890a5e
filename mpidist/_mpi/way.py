"""How an all-reduce of a large buffer is made of MPI's collectives."""

from __future__ import annotations

from typing import Final, NamedTuple

from mpidist._base.environment import AllReduceChoice

MOST_PIECE: Final = 64 * 2**20
"""The most bytes of a piece: each that completes restarts the deadline of a wait."""


class Way(NamedTuple):
    """Which collectives of MPI an all-reduce is, and how many at a time.

    Attributes:
        gathers: whether the ranks gather what all have (``Iallgather``), and each adds;
            else ``Iallreduce``. For two ranks both move the same bytes.
        in_flight: how many collectives are in progress at a time.
        piece_bytes: the least bytes of each.
    """

    gathers: bool
    in_flight: int
    piece_bytes: int


def way_of(library: str, size: int) -> Way:
    """Return what is fastest; measured on 2026-11-23, see `mpidist docs performance`.

    Open MPI 5.0.11 reduces to one rank and then broadcasts, if there are fewer than
    four ranks or if the result is to be where the input is (``coll/libnbc``). MPICH
    5.0.2 leaves the network idle while it adds, so several are in progress.

    Args:
        library: the vendor, as of `mpi4py.MPI.get_vendor`.
        size: the number of ranks.
    """
    if library == "Open MPI":
        return Way(size == 2, 4, 2**20) if size < 4 else Way(False, 1, MOST_PIECE)
    return Way(False, 4, 2**20)


def chosen_way(choice: AllReduceChoice) -> Way:
    """Return what the user has chosen (``MPIDIST_ALLREDUCE``)."""
    return Way(*choice, 2**20 if choice.in_flight > 1 else MOST_PIECE)
