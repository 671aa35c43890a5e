"""Operations of MPI that are functions of the native core.

MPI calls them with pointers only, so they need neither mpi.h nor an ABI. They do what
MPI's own do not: sums of small integers wrap (Open MPI's saturate), MIN and MAX of NaN
and of zeros have one answer, the one of the core, and those of unsigned integers are
right (`mpidist._collectives.dtype_table`).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

import numpy as np

from mpidist import _native
from mpidist._base.reduce_op import MPIOp
from mpidist._base.types import DType
from mpidist._mpi.library import mpi_module

# The dtypes whose sums are right in every MPI, which may have hardware for them.
_ADDED: Final = frozenset(("f4", "f8", "i4", "i8", "u4", "u8", "c8", "c16"))


@functools.cache
def host_op(dtype: str, operation: str) -> tuple[Any, Any]:
    """Return what MPI needs to reduce as the core does. It is never freed.

    Args:
        dtype: kind and bytes, as of `mpidist._native.ReduceLeaf`.
        operation: as of `COMBINE`.

    Returns:
        An `mpi4py.MPI.Datatype` of one element, and an `mpi4py.MPI.Op`.
    """
    mpi = mpi_module()
    if operation == "SUM" and dtype in _ADDED:
        return mpi.Datatype.fromcode(np.dtype(dtype).char), mpi.SUM
    # Of two NaNs the left one's bits win, which is the same one in rank order only.
    commutes = operation in ("MIN", "MAX")
    op = make_op(_native.core.op_function(dtype, operation), commutes=commutes)
    nbytes = int(dtype.lstrip("bfiuc"))
    return mpi.BYTE.Create_contiguous(nbytes).Commit(), op


def op_of(dtype: DType, operation: MPIOp) -> Any:
    """Return the `mpi4py.MPI.Op` of a dtype that travels: see `Reduction.wire`."""
    if dtype.char == "g" and operation in ("MIN", "MAX"):
        return host_op(f"f{dtype.itemsize}", operation)[1]
    return getattr(mpi_module(), operation)


def make_op(function: int, *, commutes: bool = False) -> Any:
    """Return an `mpi4py.MPI.Op` of a C function.

    Args:
        function: the address of an ``MPI_User_function``.
        commutes: whether MPI may combine ranks in any order.
    """
    mpi = mpi_module()
    op = mpi.Op()
    code = ctypes.CDLL(mpi.__file__).MPI_Op_create(
        ctypes.c_void_p(function), int(commutes), ctypes.c_void_p(mpi._addressof(op))
    )
    if code:
        raise_error(code)
    return op


def raise_error(code: int) -> None:
    """Raise the exception of an error code of MPI."""
    raise mpi_module().Exception(code)
