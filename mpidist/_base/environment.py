"""The environment variables ``MPIDIST_*``, and the values if they are not set."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

from mpidist._base.options import (
    COMPRESSIONS,
    LARGEST_NUMBER,
    CommunicationImplementation,
    Compression,
)

DEFAULT_TIMEOUT_SECONDS: Final = 1800.0
DEFAULT_STALL_SECONDS: Final = 60.0
DEFAULT_BYTES_PER_PACK: Final = 32 * 1024 * 1024
# Of a piece of a GPU buffer that is staged through the host. A piece has a fixed cost
# of some 20 us (two copies to start, three events, an MPI call). 4 MiB take about
# 170 us at 25 GB/s, the speed of a PCIe 4 slot, so the fixed cost is a tenth; and a
# bucket of 32 MiB still has eight pieces. Calculated, not yet measured on a GPU.
DEFAULT_STAGING_BYTES: Final = 16 * 1024 * 1024
SMALLEST_STAGING_BYTES: Final = 64 * 1024
MOST_IN_FLIGHT: Final = 64
_T = TypeVar("_T")


class AllReduceChoice(NamedTuple):
    """Which collectives of MPI an all-reduce between nodes is made of.

    Attributes:
        gathers: ``Iallgather``, after which each rank adds; else ``Iallreduce``.
        in_flight: how many are in progress at a time, from 1 to `MOST_IN_FLIGHT`.
    """

    gathers: bool
    in_flight: int

    def __str__(self) -> str:
        return f"{'iallgather' if self.gathers else 'iallreduce'}:{self.in_flight}"


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
        timeout_abort: end the job at the deadline, in place of an exception
            (``MPIDIST_TIMEOUT_ABORT``).
        stall_seconds: wait after which the missing ranks are named on stderr
            (``MPIDIST_STALL_SECONDS``), in seconds.
        bytes_per_pack: default bucket size, from ``MPIDIST_FUSION_MB`` (MiB).
        implementation: what AUTO means (``MPIDIST_IMPLEMENTATION``).
        allreduce: how large arrays are reduced between nodes (``MPIDIST_ALLREDUCE``);
            None: as measured for the MPI library.
        staging_bytes: size of the page-locked memory of staged GPU buffers, from
            ``MPIDIST_STAGING_MB`` (MiB).
        compression: of sums between nodes (``MPIDIST_COMPRESSION``).
        error_feedback: whether its errors are added to later calls
            (``MPIDIST_ERROR_FEEDBACK``).
        simulated_nodes: how many nodes each machine simulates, for tests of several
            nodes on one machine (``MPIDIST_SIMULATED_NODES``).
        trace: 1: a line for each collective call; 2: also when it begins
            (``MPIDIST_TRACE``).
        timeline: the file of the timeline of all ranks (``MPIDIST_TIMELINE``); "":
            none is recorded.
    """

    abort: bool = True
    alone: bool = False
    cuda_aware: bool | None = None
    guard: bool = True
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    timeout_abort: bool = False
    stall_seconds: float = DEFAULT_STALL_SECONDS
    bytes_per_pack: int = DEFAULT_BYTES_PER_PACK
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    allreduce: AllReduceChoice | None = None
    staging_bytes: int = DEFAULT_STAGING_BYTES
    compression: Compression = "none"
    error_feedback: bool = False
    simulated_nodes: int = 1
    trace: int = 0
    timeline: str = ""


def read_environment() -> Environment:
    """Read the variables ``MPIDIST_*``.

    Raises:
        ValueError: if a value is invalid; the message names the variable.
    """
    default = Environment()
    staging = _mebibytes("MPIDIST_STAGING_MB", default.staging_bytes)
    return Environment(
        abort=_choice("MPIDIST_ABORT", _FLAGS, default.abort),
        alone=_choice("MPIDIST_ALONE", _FLAGS, default.alone),
        cuda_aware=_choice("MPIDIST_CUDA_AWARE", _FLAGS, default.cuda_aware),
        guard=_choice("MPIDIST_GUARD", _FLAGS, default.guard),
        timeout_seconds=_number("MPIDIST_TIMEOUT", default.timeout_seconds),
        timeout_abort=_choice("MPIDIST_TIMEOUT_ABORT", _FLAGS, default.timeout_abort),
        stall_seconds=_number("MPIDIST_STALL_SECONDS", default.stall_seconds),
        bytes_per_pack=_mebibytes("MPIDIST_FUSION_MB", default.bytes_per_pack),
        implementation=_choice(
            "MPIDIST_IMPLEMENTATION",
            {item.name.lower(): item for item in CommunicationImplementation},
            default.implementation,
        ),
        allreduce=_allreduce("MPIDIST_ALLREDUCE"),
        # Whole pages, and not too few.
        staging_bytes=max(staging // 4096 * 4096, SMALLEST_STAGING_BYTES),
        compression=_choice(
            "MPIDIST_COMPRESSION",
            {name: name for name in COMPRESSIONS},
            default.compression,
        ),
        error_feedback=_choice(
            "MPIDIST_ERROR_FEEDBACK", _FLAGS, default.error_feedback
        ),
        simulated_nodes=max(1, int(_number("MPIDIST_SIMULATED_NODES", 1))),
        trace=_choice("MPIDIST_TRACE", _LEVELS, default.trace, "0, 1 or 2"),
        timeline=os.environ.get("MPIDIST_TIMELINE", "").strip(),
    )


def debugging() -> bool:
    """Return whether ``MPIDIST_DEBUG`` asks for more checks, and longer tracebacks.

    It is read at each call, and never raises: an exception may be about to be shown.
    """
    text = os.environ.get("MPIDIST_DEBUG", "").strip().lower()
    return text not in ("", "0", "auto", "false", "no", "off")


_FLAGS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_LEVELS: Final = {**{text: int(flag) for text, flag in _FLAGS.items()}, "2": 2}


def _text_of(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


def _choice(name: str, values: Mapping[str, _T], default: _T, expected: str = "") -> _T:
    """Return the value that a variable names; the default if it is not set, or auto."""
    text = _text_of(name)
    if text in values:
        return values[text]
    if text in ("", "auto"):
        return default
    known = "1 or 0" if values is _FLAGS else f"one of {', '.join(values)}"
    raise _error(name, f"{expected or known}, or unset it")


def _error(name: str, expected: str) -> ValueError:
    text = _text_of(name)
    return ValueError(
        f"the environment variable {name} is {text!r:.80}; expected {expected}"
    )


def _allreduce(name: str) -> AllReduceChoice | None:
    text = _text_of(name)
    if text in ("", "auto"):
        return None
    match = re.fullmatch(r"(iallreduce|iallgather)(?::([0-9]{1,4}))?", text)
    in_flight = int(match[2] or 1) if match else 0
    if match is None or not 1 <= in_flight <= MOST_IN_FLIGHT:
        raise _error(
            name,
            f"iallreduce:K or iallgather:K, where K, from 1 to {MOST_IN_FLIGHT}, is "
            "how many are in progress at a time, or auto",
        )
    return AllReduceChoice(match[1] == "iallgather", in_flight)


def _mebibytes(name: str, default: int) -> int:
    return int(_number(name, default / 2**20) * 2**20)


def _number(name: str, default: float) -> float:
    text = _text_of(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= LARGEST_NUMBER:  # nor NaN
        raise _error(name, f"a number from 0 to {LARGEST_NUMBER:,.0f}, or unset it")
    return value
