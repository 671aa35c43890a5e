"""Operations of MPI that are functions of the native core, or of Python without it.

MPI calls those with pointers only, so they need neither mpi.h nor an ABI. They do what
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
from mpidist._base.reduce_op import COMBINE, MPIOp
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
    if dtype.char != "g" or operation not in ("MIN", "MAX"):
        return getattr(mpi_module(), operation)
    if _native.available():
        return host_op(f"f{dtype.itemsize}", operation)[1]
    return _extreme_without_core(operation)


@functools.cache
def _extreme_without_core(operation: MPIOp) -> Any:
    """Return an `mpi4py.MPI.Op` for MIN or MAX of longdouble. It is never freed."""
    signs = np.logical_or if operation == "MIN" else np.logical_and

    def combine(left: Any, right: Any, _: Any) -> None:
        x, y = (np.frombuffer(data, np.longdouble) for data in (left, right))
        zeros = np.where(signs(np.signbit(x), np.signbit(y)), -0.0, 0.0)
        with np.errstate(all="ignore"):
            COMBINE[operation](x, y, out=y)
        np.copyto(y, zeros, where=y == 0)

    return mpi_module().Op.Create(combine, commute=True)


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
