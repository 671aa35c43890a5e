"""The table of dtype and operation: what MPI is asked to do for each.

=====================  ========  ========  ============  ========
dtype                  SUM       MEAN      MIN, MAX      PROD
=====================  ========  ========  ============  ========
bool                   refused   refused   as uint8      refused
int8, int16            int32     float64   itself        int32
uint8, uint16          uint32    float64   ordered int   uint32
int32, int64           itself    float64   itself        itself
uint32, uint64         itself    float64   ordered int   itself
float16, bfloat16      float32   float32   ordered i32   float32
float32, float64       itself    itself    ordered int   itself
longdouble             itself    itself    by own code   itself
complex                itself    itself    refused       itself
=====================  ========  ========  ============  ========

"float32" means: accumulated in float32 and rounded back once. "int32": the sum wraps
when it is converted back, as NumPy's does; Open MPI's own sums of small integers
saturate. MEAN of integers gives float64; every other result has the dtype of its input.

"ordered" means: values are mapped to signed integers of the same order before MPI, and
back after it. MPICH 4.0.2 and Open MPI 4.1.4 of Debian 12 compare unsigned integers as
if they were signed (Open MPI those of 8 bytes). Of floats MPI leaves open what MIN and
MAX of NaN, or of 0.0 and -0.0, give, and its answer may differ from rank to rank;
integers have no such cases. NaN wins, as in `numpy.maximum`, and -0.0 < 0.0. (The
mapping of IEEE 754 numbers to integers: https://stereopsis.com/radix.html; IEEE
754-2019, section 5.10.)
longdouble has no integer of its size: MPI calls a function of mpidist (`_mpi.ops`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from mpidist._base import backend
from mpidist._base.reduce_op import RULES, MPIOp, ReduceOp
from mpidist._base.types import Array, DType, record

Encoding = Literal["none", "cast", "order"]

# Also of CuPy arrays, which NumPy's types do not know.
_divide: Final[Callable[..., object]] = np.true_divide
_LEAST_INTEGER: Final = 4  # bytes of the smallest that every MPI adds as NumPy does
_MOST_ORDERED: Final = 8  # bytes of the largest


@record
class Reduction:
    """How arrays of one dtype are reduced with one operation.

    Attributes:
        op: the operation that is asked for.
        dtype: of the input.
        compute: dtype that the input is cast to first.
        wire: dtype of the buffer that travels.
        result: dtype of the result.
        encoding: how ``dtype`` becomes ``wire``: by a cast, or in the same order.
    """

    op: ReduceOp
    dtype: DType
    compute: DType
    wire: DType
    result: DType
    encoding: Encoding

    @property
    def combining(self) -> MPIOp:
        """The operation by which values of ranks are combined, two at a time."""
        return RULES[self.op].combining

    def encode(self, x: Array, out: Array) -> None:
        """Write ``x`` into ``out``, in the dtype that travels."""
        if self.encoding == "order":
            x = self._to_ordered(x.astype(self.compute, copy=False))
        out[...] = x

    def decode(self, reduced: Array, num_replicas: int, out: Array) -> None:
        """Write what came back into ``out``, dividing it for MEAN."""
        if self.op is ReduceOp.MEAN:
            count = self.wire.type(num_replicas)
            _divide(reduced, count, out=out, casting="unsafe")
        elif self.encoding == "order":
            out[...] = self._from_ordered(reduced)
        else:
            out[...] = reduced

    def _to_ordered(self, x: Array) -> Array:
        xp = backend.module_of(x)
        bits = x.view(self.wire)
        limits = np.iinfo(self.wire)
        if self.dtype.kind == "u":
            return bits ^ limits.min
        ordered = bits ^ ((bits >> (limits.bits - 1)) & limits.max)
        extreme = limits.max if self.op is ReduceOp.MAX else limits.min
        return xp.where(xp.isnan(x), self.wire.type(extreme), ordered)

    def _from_ordered(self, ordered: Array) -> Array:
        limits = np.iinfo(self.wire)
        flipped: int | Array = limits.min
        if self.dtype.kind != "u":
            flipped = (ordered >> (limits.bits - 1)) & limits.max
        return (ordered ^ flipped).view(self.compute)


@functools.lru_cache(maxsize=256)
def reduction(dtype: DType, op: ReduceOp, call: str) -> Reduction:
    """Return the entry of the table for a dtype and an operation.

    Raises:
        TypeError: for one that is refused, saying what to write.
    """
    backend.check_dtype(dtype, call)

    def entry(
        compute: npt.DTypeLike, result: DType = dtype, *, ordered: bool = False
    ) -> Reduction:
        computed = np.dtype(compute)
        encoding: Encoding = "none" if computed == dtype else "cast"
        if not ordered:
            return Reduction(op, dtype, computed, computed, result, encoding)
        wire = np.dtype(f"i{computed.itemsize}")
        return Reduction(op, dtype, computed, wire, result, "order")

    extreme = op in (ReduceOp.MIN, ReduceOp.MAX)
    kind = backend.number_kind(dtype)
    if kind == "b":
        if not extreme:
            raise TypeError(
                f"{call}: {op.name} of bool is not defined; write `x.astype(int)` to "
                "count, or ReduceOp.MAX for any and ReduceOp.MIN for all"
            )
        return entry(np.uint8)
    if kind == "c" and extreme:
        raise TypeError(
            f"{call}: {op.name} of {dtype.name} is not defined, complex numbers have "
            "no order; reduce `abs(x)` or the real and imaginary parts"
        )
    if kind in "iu":
        if op is ReduceOp.MEAN:
            mean = backend.as_floating(dtype)
            return entry(mean, mean)
        if dtype.itemsize < _LEAST_INTEGER and not extreme:
            return entry(np.int32 if kind == "i" else np.uint32)
        return entry(dtype, ordered=kind == "u" and extreme)
    compute = backend.widened(dtype)
    return entry(compute, ordered=extreme and compute.itemsize <= _MOST_ORDERED)
