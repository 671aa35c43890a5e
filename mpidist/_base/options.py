"""Enumerations, option records and the environment; no arrays, no MPI."""

from __future__ import annotations

import dataclasses
import enum
import os
from typing import Final, Literal

DEFAULT_TIMEOUT_SECONDS: Final = 1800.0
DEFAULT_STALL_SECONDS: Final = 60.0
DEFAULT_BYTES_PER_PACK: Final = 32 * 1024 * 1024
# Of a piece of a GPU buffer that is staged through the host. A piece has a fixed cost
# of some 20 us (two copies to start, three events, an MPI call). 4 MiB take about
# 170 us at 25 GB/s, the speed of a PCIe 4 slot, so the fixed cost is a tenth; and a
# bucket of 32 MiB still has eight pieces. Calculated, not yet measured on a GPU.
DEFAULT_STAGING_BYTES: Final = 4 * 1024 * 1024
SMALLEST_STAGING_BYTES: Final = 64 * 1024

Compression = Literal["none", "fp16", "bf16"]
COMPRESSIONS: Final[tuple[Compression, ...]] = ("none", "fp16", "bf16")


class ReduceOp(enum.Enum):
    """How the values of the replicas are combined.

    ``SUM`` and ``MEAN`` are those of ``tf.distribute.ReduceOp``; ``MIN``, ``MAX``
    and ``PROD`` are additional. Names are accepted in place of members, in upper or
    lower case. ``docs/porting.md`` has the table of dtypes and operations.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"

    @classmethod
    def from_variable_aggregation(cls, aggregation: VariableAggregation) -> ReduceOp:
        """Return the operation that aggregates a variable's updates.

        Args:
            aggregation: ``VariableAggregation.SUM`` or ``MEAN``.

        Raises:
            ValueError: if it is another aggregation.
        """
        if aggregation is VariableAggregation.SUM:
            return cls.SUM
        if aggregation is VariableAggregation.MEAN:
            return cls.MEAN
        raise ValueError(
            f"`VariableAggregation.{aggregation.name}` has no `ReduceOp`; only SUM "
            "and MEAN have one"
        )


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are combined (as in TensorFlow)."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the values that replicas assign to one variable are combined."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3
    ONLY_FIRST_TOWER = 3  # noqa: PIE796 - its name in TensorFlow 1


class CommunicationImplementation(enum.Enum):
    """How flat buffers are moved.

    ``AUTO`` chooses by the device of the array and by what MPI supports. Host arrays
    use shared memory if all ranks are on one node; with several nodes, small arrays use
    MPI messages, and large ones are sent in slices through the shared memory of each
    node. ``DIRECT`` passes the buffer to MPI (for a GPU array, MPI must be CUDA-aware).
    ``SHARED`` is what AUTO does for host arrays; it is an error if there is no shared
    memory. ``STAGED`` copies GPU arrays through host memory, in pieces. ``NCCL`` moves
    GPU arrays by NCCL, which requires a GPU for each rank; if it is unavailable, it is
    an error on all ranks, not a warning as in TensorFlow. For GPU arrays ``AUTO`` is
    NCCL if it is available, otherwise direct if MPI is CUDA-aware, otherwise staged.
    ``RING`` is TensorFlow's name, and means ``AUTO``, since MPI and NCCL choose their
    own algorithms.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"
    DIRECT = "DIRECT"
    SHARED = "SHARED"
    STAGED = "STAGED"


@dataclasses.dataclass(frozen=True, init=False)
class CommunicationOptions:
    """Options of the collectives of a strategy, or of one call.

    Attributes:
        bytes_per_pack: the maximum number of bytes of leaves that are packed for one
            MPI call. 0, the default, means ``MPIDIST_FUSION_MB`` or 32 MiB. It has no
            effect if leaves are not packed: in shared memory, and for small nests,
            which are sent with their header.
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
            of the same operation with the same structure, shapes and dtypes: for
            gradients of successive steps. It takes as much memory as a rank sends.
            None, the default, means ``MPIDIST_ERROR_FEEDBACK`` or False.
        guard: whether each collective first checks that all ranks make the same call.
            None, the default, means yes, unless ``MPIDIST_GUARD=0``. It belongs to the
            strategy: the options of one call must not set it.
    """

    bytes_per_pack: int
    timeout_seconds: float | None
    implementation: CommunicationImplementation
    guard: bool | None
    compression: Compression | None
    error_feedback: bool | None

    def __init__(
        self,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = (
            CommunicationImplementation.AUTO
        ),
        guard: bool | None = None,
        compression: Compression | None = None,
        error_feedback: bool | None = None,
    ) -> None:
        """Check and keep the options.

        Raises:
            ValueError: if a size or time is negative, or an implementation or
                compression is unknown.
            TypeError: if a size, time or flag has the wrong type.
        """
        if isinstance(bytes_per_pack, bool) or not isinstance(bytes_per_pack, int):
            raise TypeError(
                "CommunicationOptions: expected `bytes_per_pack` to be an int of "
                f"bytes, got {bytes_per_pack!r}"
            )
        if bytes_per_pack < 0:
            raise ValueError(
                "CommunicationOptions: expected `bytes_per_pack` to be 0 (automatic) "
                f"or a number of bytes, got {bytes_per_pack}"
            )
        if timeout_seconds is not None:
            if isinstance(timeout_seconds, bool) or not isinstance(
                timeout_seconds, (int, float)
            ):
                raise TypeError(
                    "CommunicationOptions: expected `timeout_seconds` to be a number "
                    f"of seconds or None, got {timeout_seconds!r}"
                )
            if not timeout_seconds >= 0:
                raise ValueError(
                    "CommunicationOptions: expected `timeout_seconds` to be 0 (no "
                    f"limit) or a number of seconds, got {timeout_seconds}"
                )
        for name, flag in (("guard", guard), ("error_feedback", error_feedback)):
            if flag is not None and not isinstance(flag, bool):
                raise TypeError(
                    f"CommunicationOptions: expected `{name}` to be True, False or "
                    f"None, got {flag!r}"
                )
        if compression is not None and compression not in COMPRESSIONS:
            raise ValueError(
                'CommunicationOptions: expected `compression` to be "fp16", "bf16", '
                f'"none" or None, got {compression!r}'
            )
        object.__setattr__(self, "bytes_per_pack", bytes_per_pack)
        object.__setattr__(self, "timeout_seconds", timeout_seconds)
        object.__setattr__(self, "implementation", _as_implementation(implementation))
        object.__setattr__(self, "guard", guard)
        object.__setattr__(self, "compression", compression)
        object.__setattr__(self, "error_feedback", error_feedback)

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options, overridden by the fields that ``options`` sets."""
        if options is None:
            return self
        if not isinstance(options, CommunicationOptions):
            raise TypeError(
                "expected `options` to be a `mpidist.experimental."
                f"CommunicationOptions`, got {type(options).__name__}"
            )
        implementation = options.implementation
        if implementation is CommunicationImplementation.AUTO:
            implementation = self.implementation
        return CommunicationOptions(
            bytes_per_pack=options.bytes_per_pack or self.bytes_per_pack,
            timeout_seconds=(
                self.timeout_seconds
                if options.timeout_seconds is None
                else options.timeout_seconds
            ),
            implementation=implementation,
            guard=self.guard if options.guard is None else options.guard,
            compression=(
                self.compression if options.compression is None else options.compression
            ),
            error_feedback=(
                self.error_feedback
                if options.error_feedback is None
                else options.error_feedback
            ),
        )


def CollectiveHints(  # noqa: N802 - TensorFlow's name
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Return `CommunicationOptions`; the older TensorFlow name for them."""
    return CommunicationOptions(
        bytes_per_pack=bytes_per_pack, timeout_seconds=timeout_seconds
    )


@dataclasses.dataclass(frozen=True)
class Environment:
    """The values of the environment variables ``MPIDIST_*``.

    Attributes:
        abort: end the whole job on an uncaught exception (``MPIDIST_ABORT``).
        alone: whether a process may run alone if its launcher started several
            (``MPIDIST_ALONE``).
        cuda_aware: whether MPI takes GPU buffers; None: ask MPI
            (``MPIDIST_CUDA_AWARE``).
        guard: check every collective (``MPIDIST_GUARD``).
        timeout_seconds: default deadline (``MPIDIST_TIMEOUT``), in seconds.
        stall_seconds: wait after which the missing ranks are named on stderr
            (``MPIDIST_STALL_SECONDS``), in seconds.
        bytes_per_pack: default bucket size, from ``MPIDIST_FUSION_MB`` (MiB).
        implementation: what AUTO means (``MPIDIST_IMPLEMENTATION``).
        staging_bytes: size of the pieces of staged GPU buffers, from
            ``MPIDIST_STAGING_MB`` (MiB).
        compression: of sums between nodes (``MPIDIST_COMPRESSION``).
        error_feedback: whether its errors are added to later calls
            (``MPIDIST_ERROR_FEEDBACK``).
        simulated_nodes: how many nodes each machine simulates, for tests of several
            nodes on one machine (``MPIDIST_SIMULATED_NODES``).
        trace: 1: a line for each collective call; 2: also when it begins
            (``MPIDIST_TRACE``).
    """

    abort: bool = True
    alone: bool = False
    cuda_aware: bool | None = None
    guard: bool = True
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    stall_seconds: float = DEFAULT_STALL_SECONDS
    bytes_per_pack: int = DEFAULT_BYTES_PER_PACK
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    staging_bytes: int = DEFAULT_STAGING_BYTES
    compression: Compression = "none"
    error_feedback: bool = False
    simulated_nodes: int = 1
    trace: int = 0


def read_environment() -> Environment:
    """Read the variables ``MPIDIST_*``.

    Raises:
        ValueError: if a value is invalid; the message names the variable.
    """
    return Environment(
        abort=_flag("MPIDIST_ABORT", True) is not False,
        alone=_flag("MPIDIST_ALONE", False) is True,
        cuda_aware=_flag("MPIDIST_CUDA_AWARE", None),
        guard=_flag("MPIDIST_GUARD", True) is not False,
        timeout_seconds=_number("MPIDIST_TIMEOUT", DEFAULT_TIMEOUT_SECONDS),
        stall_seconds=_number("MPIDIST_STALL_SECONDS", DEFAULT_STALL_SECONDS),
        bytes_per_pack=int(
            _number("MPIDIST_FUSION_MB", DEFAULT_BYTES_PER_PACK / 2**20) * 2**20
        ),
        implementation=_implementation("MPIDIST_IMPLEMENTATION"),
        staging_bytes=_staging_bytes("MPIDIST_STAGING_MB"),
        compression=_compression("MPIDIST_COMPRESSION"),
        error_feedback=_flag("MPIDIST_ERROR_FEEDBACK", False) is True,
        simulated_nodes=max(1, int(_number("MPIDIST_SIMULATED_NODES", 1))),
        trace=_trace("MPIDIST_TRACE"),
    )


def debugging() -> bool:
    """Return whether ``MPIDIST_DEBUG`` asks for more checks, and longer tracebacks.

    It is read at each call, and never raises: an exception may be about to be shown.
    """
    text = os.environ.get("MPIDIST_DEBUG", "").strip().lower()
    return text not in ("", "0", "auto", "false", "no", "off")


def get_loss_reduction() -> ReduceOp:
    """Return SUM: losses that were divided by the global batch size are added.

    Not collective.
    """
    return ReduceOp.SUM


_NAMES: Final = {op.name: op for op in ReduceOp}


def as_reduce_op(value: object, call: str) -> ReduceOp:
    """Return the `ReduceOp` that a user means.

    Args:
        value: a `ReduceOp`, its name in any case, or `VariableAggregation` SUM or
            MEAN (the StrategyExtended page of TensorFlow writes those).
        call: the name of the calling function, for the message.

    Raises:
        ValueError: if the name is unknown.
        TypeError: if the value has another type.
    """
    if isinstance(value, ReduceOp):
        return value
    if isinstance(value, str):
        op = _NAMES.get(value) or _NAMES.get(value.upper())
        if op is None:
            raise ValueError(
                f"{call}: {value!r} is not a valid ReduceOp; expected one of "
                f"{', '.join(_NAMES)}"
            )
        return op
    if isinstance(value, VariableAggregation):
        return ReduceOp.from_variable_aggregation(value)
    raise TypeError(
        f"{call}: expected `reduce_op` to be a `mpidist.ReduceOp` or its name, got "
        f"{value!r} of type {type(value).__name__}"
    )


def _as_implementation(
    value: CommunicationImplementation | str,
) -> CommunicationImplementation:
    if isinstance(value, CommunicationImplementation):
        return value
    names = ", ".join(item.name for item in CommunicationImplementation)
    if isinstance(value, str):
        try:
            return CommunicationImplementation[value.upper()]
        except KeyError:
            pass
    raise ValueError(
        f"CommunicationOptions: expected `implementation` to be one of {names}, got "
        f"{value!r}"
    )


def _flag(name: str, default: bool | None) -> bool | None:
    text = os.environ.get(name, "").strip().lower()
    if text in ("", "auto"):
        return default
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError(
        f"the environment variable {name} is {text!r}; expected 1 or 0, or unset it"
    )


def _implementation(name: str) -> CommunicationImplementation:
    text = os.environ.get(name, "").strip().upper() or "AUTO"
    try:
        return CommunicationImplementation[text]
    except KeyError:
        names = ", ".join(item.name.lower() for item in CommunicationImplementation)
        raise ValueError(
            f"the environment variable {name} is {text.lower()!r}; expected one of "
            f"{names}, or unset it"
        ) from None


def _staging_bytes(name: str) -> int:
    """Return bytes for a variable in MiB: whole pages, and not too few."""
    nbytes = int(_number(name, DEFAULT_STAGING_BYTES / 2**20) * 2**20)
    return max(nbytes // 4096 * 4096, SMALLEST_STAGING_BYTES)


def _compression(name: str) -> Compression:
    text = os.environ.get(name, "").strip().lower() or "none"
    for known in COMPRESSIONS:
        if text == known:
            return known
    raise ValueError(
        f"the environment variable {name} is {text!r}; expected one of "
        f"{', '.join(COMPRESSIONS)}, or unset it"
    )


def _trace(name: str) -> int:
    text = os.environ.get(name, "").strip()
    if text == "2":
        return 2
    try:
        return int(_flag(name, False) is True)
    except ValueError:
        raise ValueError(
            f"the environment variable {name} is {text!r}; expected 0, 1 or 2, or "
            "unset it"
        ) from None


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ValueError(
            f"the environment variable {name} is {text!r}; expected a number that is "
            "not negative, or unset it"
        )
    return value
