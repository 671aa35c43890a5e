"""The environment variables ``MPIDIST_*``, and the values if they are not set."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Final, NamedTuple

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
DEFAULT_STAGING_BYTES: Final = 4 * 1024 * 1024
SMALLEST_STAGING_BYTES: Final = 64 * 1024
MOST_IN_FLIGHT: Final = 64


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
        staging_bytes: size of the pieces of staged GPU buffers, from
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
    return Environment(
        abort=_flag("MPIDIST_ABORT", True) is not False,
        alone=_flag("MPIDIST_ALONE", False) is True,
        cuda_aware=_flag("MPIDIST_CUDA_AWARE", None),
        guard=_flag("MPIDIST_GUARD", True) is not False,
        timeout_seconds=_number("MPIDIST_TIMEOUT", DEFAULT_TIMEOUT_SECONDS),
        timeout_abort=_flag("MPIDIST_TIMEOUT_ABORT", False) is True,
        stall_seconds=_number("MPIDIST_STALL_SECONDS", DEFAULT_STALL_SECONDS),
        bytes_per_pack=int(
            _number("MPIDIST_FUSION_MB", DEFAULT_BYTES_PER_PACK / 2**20) * 2**20
        ),
        implementation=_implementation("MPIDIST_IMPLEMENTATION"),
        allreduce=_allreduce("MPIDIST_ALLREDUCE"),
        staging_bytes=_staging_bytes("MPIDIST_STAGING_MB"),
        compression=_compression("MPIDIST_COMPRESSION"),
        error_feedback=_flag("MPIDIST_ERROR_FEEDBACK", False) is True,
        simulated_nodes=max(1, int(_number("MPIDIST_SIMULATED_NODES", 1))),
        trace=_trace("MPIDIST_TRACE"),
        timeline=os.environ.get("MPIDIST_TIMELINE", "").strip(),
    )


def debugging() -> bool:
    """Return whether ``MPIDIST_DEBUG`` asks for more checks, and longer tracebacks.

    It is read at each call, and never raises: an exception may be about to be shown.
    """
    text = os.environ.get("MPIDIST_DEBUG", "").strip().lower()
    return text not in ("", "0", "auto", "false", "no", "off")


def _flag(name: str, default: bool | None) -> bool | None:
    text = os.environ.get(name, "").strip().lower()
    if text in ("", "auto"):
        return default
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError(
        f"the environment variable {name} is {text!r:.80}; expected 1 or 0, or unset it"
    )


def _implementation(name: str) -> CommunicationImplementation:
    text = os.environ.get(name, "").strip().upper() or "AUTO"
    try:
        return CommunicationImplementation[text]
    except KeyError:
        names = ", ".join(item.name.lower() for item in CommunicationImplementation)
        raise ValueError(
            f"the environment variable {name} is {text.lower()!r:.80}; expected one of "
            f"{names}, or unset it"
        ) from None


def _allreduce(name: str) -> AllReduceChoice | None:
    text = os.environ.get(name, "").strip().lower()
    if text in ("", "auto"):
        return None
    match = re.fullmatch(r"(iallreduce|iallgather)(?::([0-9]{1,4}))?", text)
    in_flight = int(match[2] or 1) if match else 0
    if match is None or not 1 <= in_flight <= MOST_IN_FLIGHT:
        raise ValueError(
            f"the environment variable {name} is {text!r:.80}; expected iallreduce:K "
            f"or iallgather:K, where K, from 1 to {MOST_IN_FLIGHT}, is how many are in "
            "progress at a time, or auto"
        )
    return AllReduceChoice(match[1] == "iallgather", in_flight)


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
        f"the environment variable {name} is {text!r:.80}; expected one of "
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
            f"the environment variable {name} is {text!r:.80}; expected 0, 1 or 2, or "
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
    if not 0 <= value <= LARGEST_NUMBER:  # nor NaN
        raise ValueError(
            f"the environment variable {name} is {text!r:.80}; expected a number from "
            f"0 to {LARGEST_NUMBER:,.0f}, or unset it"
        )
    return value
