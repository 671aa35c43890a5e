"""Headers between ranks that share no memory: one MPI collective for each.

Every header is one element of one datatype, whatever the call: 64 bytes of header, and
room for a small payload. So ranks whose calls differ make the same call of MPI, and
find the difference in the header.

- Up to `FEW` ranks: ``Allgather``. Every rank has all headers and payloads, and adds
  the payloads in the order of the ranks.
- More ranks: ``Allreduce`` with an operation of the core, which merges two headers and
  adds two payloads. It is not commutative, so MPI adds in the order of the ranks.
- Without the core: ``Allgather`` of the headers alone.

MPI's persistent collectives (MPI 4) are used if there are any, else the non-blocking
ones. With the core they are started and tested in C (``_native/py_between.c``), by
MPI's own functions, whose addresses are found behind mpi4py.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from mpidist import _native
from mpidist._base.memory import LINE, leak
from mpidist._base.types import HostArray
from mpidist._mpi.library import MpiComm, MpiRequest, mpi_module
from mpidist._mpi.ops import make_op, raise_error

FEW: Final = 8
"""The most ranks that gather the elements of all."""

ROOM: Final = 1024
"""Bytes of a payload behind a header; see `mpidist docs performance` for its choice.

Every header carries it, also of calls without a payload, and what does not fit takes
another collective.
"""

WORDS: Final = 6
"""Integers of a header without the core; see `HeaderGather`."""

_WORDS: Final = struct.Struct(f"{WORDS}q")
# With more ranks than cores a rank yields sooner: it takes the core of another one.
_TESTS: Final = 24
_TESTS_CROWDED: Final = 4

# Operations of MPI find their `Between` in this process by a number, which is the same
# on all of its ranks.
_numbers = itertools.count(1)


def look() -> dict[str, Any]:
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


class HeaderCollective:
    """The collective by which headers are exchanged, with its buffers. Collective.

    Args:
        comm: an mpi4py intra-communicator.
        merges: whether MPI merges the elements of all ranks into one.
        element: the bytes of an element.
        said: what the ranks have told each other (`look`).

    Attributes:
        sent: this rank's element.
        received: the elements of all ranks, or the merged one.
        persistent: the persistent request; None if MPI has none.
        begin: starts a non-blocking collective, and returns its request.
        name: MPI's name of the collective.
    """

    def __init__(
        self,
        comm: MpiComm,
        *,
        merges: bool,
        element: int,
        said: list[dict[str, Any]],
    ) -> None:
        mpi = mpi_module()
        rows = 1 if merges else comm.Get_size()
        self.sent: HostArray = _aligned(element)
        self.received: HostArray = _aligned(rows * element)
        self._datatype = mpi.BYTE.Create_contiguous(element).Commit()
        self._op = make_op(_native.core.merge_function()) if merges else None
        send = [self.sent, 1, self._datatype]
        receive = [self.received, 1, self._datatype]
        arguments = (send, receive) if self._op is None else (send, receive, self._op)
        call = "allgather" if self._op is None else "allreduce"
        self.begin: Callable[[], MpiRequest] = _bind(
            getattr(comm, f"I{call}"), arguments
        )
        self.name: str = f"I{call}"
        self.persistent: MpiRequest = None
        if all(one["persistent"] for one in said):
            name = f"{call.capitalize()}_init"
            self.persistent = getattr(comm, name)(*arguments)
            self.name = f"Start of {name}"

    def free(self) -> None:
        """Free what MPI made. No header is in progress."""
        if self.persistent is not None:
            self.persistent.Free()
        self._datatype.Free()
        if self._op is not None:
            self._op.Free()


def open_core_channel(
    comm: MpiComm, said: list[dict[str, Any]], *, crowded: bool
) -> tuple[HeaderCollective, _native.Between]:
    """Return the collective of headers with payloads, and the channel. Collective.

    Args:
        comm: an mpi4py intra-communicator.
        said: what the ranks have told each other (`look`).
        crowded: whether there are more ranks than cores.
    """
    mpi, size = mpi_module(), comm.Get_size()
    element = LINE + ROOM
    collective = HeaderCollective(comm, merges=size > FEW, element=element, said=said)
    # The largest number that some rank has reached: no rank has used it yet.
    number = max(one["number"] for one in said)
    while next(_numbers) < number:
        pass
    functions = ctypes.CDLL(mpi.__file__)
    status, request = mpi.Status(), collective.persistent
    channel = _native.core.Between(
        collective.sent,
        collective.received,
        comm.Get_rank(),
        size,
        _TESTS_CROWDED if crowded else _TESTS,
        number,
        0 if request is None else mpi._addressof(request),
        mpi._addressof(status),
        tuple(
            _address(getattr(functions, name))
            for name in ("MPI_Start", "MPI_Test", "MPI_Iallreduce", "MPI_Iallgather")
        ),
        (mpi._handleof(comm), mpi._handleof(mpi.BYTE)),
        collective.begin if request is None else None,
        mpi._addressof,
        raise_error,
        (collective, status),
    )
    return collective, channel


class HeaderGather:
    """The headers of all ranks without the core: `WORDS` integers of each.

    Args:
        comm: an mpi4py intra-communicator.
        said: what the ranks have told each other (`look`).

    Attributes:
        name: MPI's name of the collective.
        started: how many headers were.
    """

    def __init__(self, comm: MpiComm, said: list[dict[str, Any]]) -> None:
        self._collective = HeaderCollective(comm, merges=False, element=LINE, said=said)
        self._size: int = comm.Get_size()
        self._request: MpiRequest = None
        self.name: str = self._collective.name
        self.started: int = 0
        self._active = False

    def start(self, words: tuple[int, ...]) -> HeaderGather:
        """Publish this rank's integers; return the request for those of all."""
        collective = self._collective
        _WORDS.pack_into(collective.sent.data, 0, *words)
        self.started += 1
        self._active = True
        if collective.persistent is None:
            self._request = collective.begin()
        else:
            self._request = collective.persistent
            self._request.Start()
        return self

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Return whether all ranks have published theirs, and make progress."""
        self._active = not self._request.Test()
        return not self._active

    @property
    def result(self) -> list[tuple[int, ...]]:
        """The integers of each rank, once it has completed."""
        received = self._collective.received.data
        return [_WORDS.unpack_from(received, rank * LINE) for rank in range(self._size)]

    def leak(self) -> None:
        """Leak the buffers: the header is abandoned, and MPI may still use them."""
        leak(self)

    def free(self) -> None:
        """Free what MPI made, if no header is in progress."""
        if self._active:
            self.leak()
        else:
            self._collective.free()


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _bind(call: Callable[..., MpiRequest], arguments: tuple[Any, ...]) -> Any:
    # A function of C: no signal's exception can come between the call and its result.
    return itertools.starmap(call, itertools.repeat(arguments)).__next__


def _aligned(nbytes: int) -> HostArray:
    """Return zeros that begin at a cache line."""
    memory = np.zeros(nbytes + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + nbytes]
