"""Headers between ranks that share no memory: one MPI collective for each.

Every header is one element of one datatype, whatever the call: 64 bytes of header, and
room for a small payload. So ranks whose calls differ make the same call of MPI, and
find the difference in the header.

- Up to `FEW` ranks: ``Allgather``. Every rank has all headers and payloads, and adds
  the payloads in the order of the ranks.
- More ranks: ``Allreduce`` with an operation of the core, which merges two headers and
  adds two payloads. It is not commutative, so MPI adds in the order of the ranks.

MPI's persistent collectives (MPI 4) are used if there are any, else the non-blocking
ones. They are started and tested in C (``_native/py_between.c``), by MPI's own
functions, whose addresses are found behind mpi4py. Without the core ranks gather the
integers of their headers (`Communicator.open_headers`).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections import Counter
from typing import Any, Final

import numpy as np

from mpidist import _native
from mpidist._base.memory import LINE
from mpidist._base.types import HostArray
from mpidist._mpi.library import MpiComm, mpi_module
from mpidist._mpi.ops import make_op, raise_error

FEW: Final = 8
"""The most ranks that gather the elements of all."""

ROOM: Final = 1024
"""Bytes of a payload behind a header; see `mpidist docs performance` for its choice.

Every header carries it, also of calls without a payload, and what does not fit takes
another collective.
"""

# How often a rank tests before it first yields its core, and before each later time.
# With more ranks than cores it yields sooner, as it takes the core of another one; not
# with Open MPI, whose tests yield by themselves (4 B on 16 simulated nodes, over a raw
# Allreduce: 1.45 with 16 tests, 1.75 with 4; MPICH: 1.1 and 1.0).
_TESTS: Final = 24, 4
_TESTS_CROWDED: Final = 4, 4
_TESTS_CROWDED_OPEN_MPI: Final = 16, 16

# Operations of MPI find their `Between` in this process by a number, which is the same
# on all of its ranks.
_numbers = itertools.count(1)


def rank_info() -> dict[str, Any]:
    """Return what a rank tells the others before they exchange headers."""
    return {"persistent": _has_persistent(), "number": next(_numbers)}


@functools.cache
def _has_persistent() -> bool:
    """Return whether MPI has persistent collectives, which are those of MPI 4.

    Those of MPICH 4.0.2 gather the elements of their first time again, and those of
    Intel MPI 2021.18.1 elements of other times, or crash.
    """
    buffers = np.zeros((2, 1))
    mpi = mpi_module()
    name, version = mpi.get_vendor()
    if name == "Intel MPI" or (name == "MPICH" and version < (4, 1)):
        return False
    try:
        mpi.COMM_SELF.Allgather_init(*buffers).Free()
    except (AttributeError, NotImplementedError):
        return False
    return True


class CoreHeaders:
    """The core's channel, and all that MPI needs for its headers. Collective.

    Args:
        comm: an mpi4py intra-communicator.
        rank_infos: what the ranks have told each other (`rank_info`).
        crowded: whether there are more ranks than cores.

    Attributes:
        name: the collective that exchanges headers, for the statistics.
        channel: where ranks exchange headers.
    """

    def __init__(
        self, comm: MpiComm, rank_infos: list[dict[str, Any]], *, crowded: bool
    ) -> None:
        mpi, size = mpi_module(), comm.Get_size()
        merges, element = size > FEW, LINE + ROOM
        sent = _aligned(element)
        received = _aligned(element if merges else size * element)
        datatype = mpi.BYTE.Create_contiguous(element).Commit()
        op = make_op(_native.core.merge_function()) if merges else None
        name = "allreduce" if merges else "allgather"
        self.name: str = f"I{name}"
        self._made: list[Any] = [datatype] if op is None else [datatype, op]
        request = None
        if all(info["persistent"] for info in rank_infos):
            name = f"{name.capitalize()}_init"
            arguments = [sent, 1, datatype], [received, 1, datatype]
            request = getattr(comm, name)(*arguments, *self._made[1:])
            self.name = f"Start of {name}"
            self._made.append(request)
        # The largest number that some rank has reached: no rank has used it yet.
        number = max(info["number"] for info in rank_infos)
        while next(_numbers) < number:
            pass
        functions, status = ctypes.CDLL(mpi.__file__), mpi.Status()
        self.channel: _native.Between = _native.core.Between(
            sent,
            received,
            comm.Get_rank(),
            size,
            _tests(crowded=crowded),
            number,
            0 if request is None else mpi._addressof(request),
            mpi._addressof(status),
            tuple(
                _address(getattr(functions, function))
                for function in (
                    "MPI_Start",
                    "MPI_Test",
                    "MPI_Iallreduce",
                    "MPI_Iallgather",
                )
            ),
            (
                *map(mpi._handleof, (comm, mpi.BYTE, datatype)),
                0 if op is None else mpi._handleof(op),
            ),
            mpi._addressof,
            raise_error,
            (self._made, status),
        )

    def calls(self) -> dict[str, int]:
        """Return how often the core has called functions of MPI."""
        channel = self.channel
        made = Counter(Iallreduce=channel.iallreduces, Iallgather=channel.iallgathers)
        made[self.name] += channel.headers
        return made

    def free(self) -> None:
        """Free what MPI made; no header is in progress, or MPI may still use it."""
        if not self.channel.active:
            for one in reversed(self._made):
                one.Free()


def _tests(*, crowded: bool) -> tuple[int, int]:
    if not crowded:
        return _TESTS
    is_open_mpi = mpi_module().get_vendor()[0] == "Open MPI"
    return _TESTS_CROWDED_OPEN_MPI if is_open_mpi else _TESTS_CROWDED


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _aligned(nbytes: int) -> HostArray:
    """Return zeros that begin at a cache line."""
    memory = np.zeros(nbytes + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + nbytes]
