"""`CommunicationOptions`: how a reduction communicates; no arrays, no MPI."""

from __future__ import annotations

import dataclasses
import enum
import warnings
from typing import Any, Final, Literal, TypeAlias

from mpidist._base.expect import as_int, as_member, expect

Compression = Literal["none", "fp16", "bf16"]
LARGEST_NUMBER: Final = 1e9
"""Of seconds (30 years), and of MiB: what is computed from it is an exact integer."""
COMPRESSIONS: Final[tuple[Compression, ...]] = ("none", "fp16", "bf16")


class CommunicationImplementation(enum.Enum):
    """How flat buffers are moved.

    ``AUTO`` chooses by the device of the array and by what MPI supports. Host arrays
    use shared memory if all ranks are on one node; with several nodes MPI's
    collectives, and if each has four ranks or more, large ones MPI's all-reduce of
    slices, through the shared memory of each node. ``DIRECT`` passes the buffer to MPI:
    to its non-blocking collectives, and a GPU array, if MPI is CUDA-aware, to its
    blocking ones. ``SHARED`` is what AUTO does for host arrays; it is an error if there
    is no shared memory. ``STAGED`` copies GPU arrays through host memory. ``NCCL``
    moves GPU arrays by NCCL, which requires a GPU for each rank; if it is unavailable,
    it is an error on all ranks, not a warning as in TensorFlow, which there is if no
    rank has a GPU. For GPU arrays ``AUTO`` is NCCL if it is available, otherwise staged
    on one node; between nodes direct if MPI is CUDA-aware, otherwise staged. ``RING``
    is TensorFlow's name, and means ``AUTO``, since MPI and NCCL choose their own
    algorithms.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"
    DIRECT = "DIRECT"
    SHARED = "SHARED"
    STAGED = "STAGED"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of the collectives of a strategy, or of one call.

    Attributes:
        bytes_per_pack: the maximum number of bytes of leaves that are packed for one
            MPI call. 0, the default, means ``MPIDIST_FUSION_MB`` or 32 MiB. It has no
            effect if leaves are not packed: in shared memory, for small nests, which
            are sent with their header, and for NumPy arrays above 1 MiB that are
            all-reduced in their own dtype.
        timeout_seconds: how long a rank waits for the others before every waiting
            rank raises `CollectiveTimeoutError`, in seconds. None, the default,
            means ``MPIDIST_TIMEOUT`` or 1,800; 0 means no limit.
        implementation: a `CommunicationImplementation` or its name.
        compression: "fp16" or "bf16": sums and means of floats are sent between nodes
            as 16-bit floats, half the bytes of float32, and are rounded twice. It is
            not used in shared memory, for arrays of at most 32 KiB, with ``DIRECT``, or
            for integers. "fp16" has 11 bits of precision, "bf16" 8; neither overflows.
            Values are scaled by a power of two that depends on the largest one: with
            "fp16", values below 2**-29 of it lose precision. All replicas get the same
            bits. "none" sends full precision. None, the default, means
            ``MPIDIST_COMPRESSION`` or "none".
        error_feedback: with ``compression``, add the rounding errors to the next call
            of the same operation with the same structure, shapes and dtypes, or of the
            same optimizer (in JAX of the same `mpidist.jax.value_and_grad`) for the
            same variables: for gradients of successive steps. Reduce different arrays
            of one shape in one call, or as dicts with different keys. It takes as much
            memory as a rank sends.
            None, the default, means ``MPIDIST_ERROR_FEEDBACK`` or False.
        guard: whether each collective first checks that all ranks make the same call.
            None, the default, means yes, unless ``MPIDIST_GUARD=0``. It belongs to the
            strategy: the options of one call must not set it.

    Example::

        options = mpidist.experimental.CommunicationOptions(timeout_seconds=60)
        strategy = mpidist.MPIStrategy(communication_options=options)
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: Any = CommunicationImplementation.AUTO  # or the name of one
    guard: bool | None = None
    compression: Compression | None = None
    error_feedback: bool | None = None

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: if a size or time is negative, or an implementation or
                compression is unknown.
            TypeError: if a size, time or flag has the wrong type.
        """
        call, size = "CommunicationOptions", self.bytes_per_pack
        kind, hint = "an int of bytes", "write 0 for the default"
        as_int(call, "bytes_per_pack", size, least=0, hint=hint, kind=kind)
        seconds: Any = 0.0 if self.timeout_seconds is None else self.timeout_seconds
        fits = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        most = f"{LARGEST_NUMBER:,.0f}"
        what = f"`timeout_seconds` to be a number of seconds up to {most} (0: no limit)"
        expect(fits, call, what, seconds)
        fits = 0 <= seconds <= LARGEST_NUMBER
        expect(fits, call, what, seconds, error=ValueError)
        for name in ("guard", "error_feedback"):
            flag = getattr(self, name)
            fits = flag is None or isinstance(flag, bool)
            expect(fits, call, f"`{name}` to be True, False or None", flag)
        compression = self.compression
        fits = compression is None or compression in COMPRESSIONS
        what = '`compression` to be "fp16", "bf16", "none" or None'
        expect(fits, call, what, compression, error=ValueError)
        # Past the check of a frozen class.
        vars(self)["implementation"] = as_member(
            call, "implementation", self.implementation, CommunicationImplementation
        )

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options, overridden by the fields that ``options`` sets."""
        if options is None:
            return self
        name = "CommunicationOptions"
        what = f"`options` to be a `mpidist.experimental.{name}`"
        hint = "several values are one nest: write `[x, y]`"
        expect(isinstance(options, CommunicationOptions), name, what, options, hint)
        unset = vars(CommunicationOptions())
        given = {name: x for name, x in vars(options).items() if x != unset[name]}
        return dataclasses.replace(self, **given)


CallOptions: TypeAlias = CommunicationOptions | None
"""Options of one call; None: those of the strategy."""


def CollectiveHints(  # noqa: N802 - TensorFlow's name
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Return `CommunicationOptions`; the deprecated TensorFlow name for them."""
    warnings.warn(
        "CollectiveHints is deprecated, as in TensorFlow: write `mpidist.experimental."
        "CommunicationOptions(...)`",
        DeprecationWarning,
        stacklevel=2,
    )
    return CommunicationOptions(
        bytes_per_pack=bytes_per_pack, timeout_seconds=timeout_seconds
    )
