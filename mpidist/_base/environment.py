"""The environment variables ``MPIDIST_*``, and the values if they are not set."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from mpidist._base.memory import PAGE
from mpidist._base.options import (
    COMPRESSIONS,
    LARGEST_NUMBER,
    CommunicationImplementation,
    Compression,
)
from mpidist._base.types import record

DEFAULT_TIMEOUT_SECONDS: Final = 1800.0
DEFAULT_STALL_SECONDS: Final = 60.0
DEFAULT_BYTES_PER_PACK: Final = 32 * 1024 * 1024
# On an H200 a nest of 83 arrays of 89 MB takes 77 ms with 16 MiB, and 35 ms with room
# for all of them.
DEFAULT_STAGING_BYTES: Final = 256 * 1024 * 1024
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


_FLAGS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_LEVELS: Final = {**{text: int(flag) for text, flag in _FLAGS.items()}, "2": 2}
_IMPLEMENTATIONS: Final = {x.name.lower(): x for x in CommunicationImplementation}
_COMPRESSIONS: Final = {name: name for name in COMPRESSIONS}


# --- how a variable is read: given its name, and the value if it is not set ---------


def _text_of(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


def _error(name: str, expected: str) -> ValueError:
    text = _text_of(name)
    return ValueError(
        f"the environment variable {name} is {text!r:.80}; expected {expected}"
    )


def _choice(name: str, default: _T, values: Mapping[str, _T], expected: str = "") -> _T:
    """Return the value that a variable names; the default if it is not set, or auto."""
    text = _text_of(name)
    if text in values:
        return values[text]
    if text in ("", "auto"):
        return default
    known = "1 or 0" if values is _FLAGS else f"one of {', '.join(values)}"
    raise _error(name, f"{expected or known}, or unset it")


def _allreduce(name: str, default: None) -> AllReduceChoice | None:
    text = _text_of(name)
    if text in ("", "auto"):
        return default
    match = re.fullmatch(r"(iallreduce|iallgather)(?::([0-9]{1,4}))?", text)
    in_flight = int(match[2] or 1) if match else 0
    if match is None or not 1 <= in_flight <= MOST_IN_FLIGHT:
        raise _error(
            name,
            f"iallreduce:K or iallgather:K, where K, from 1 to {MOST_IN_FLIGHT}, is "
            "how many are in progress at a time, or auto",
        )
    return AllReduceChoice(match[1] == "iallgather", in_flight)


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


def _mebibytes(name: str, default: int) -> int:
    return int(_number(name, default / 2**20) * 2**20)


def _pages(name: str, default: int) -> int:
    """Return a size in whole pages, and not too few."""
    return max(_mebibytes(name, default) // PAGE * PAGE, SMALLEST_STAGING_BYTES)


def _nodes(name: str, default: int) -> int:
    return max(1, int(_number(name, default)))


def _path(name: str, default: str) -> str:
    return os.environ.get(name, default).strip()


def _variable(
    read: Callable[..., object], name: str, default: object, *how: object
) -> Any:
    """Return a field that is set by a variable; without it by ``default``."""
    reads = functools.partial(read, f"MPIDIST_{name}", default, *how)
    return dataclasses.field(default=default, metadata={"read": reads})


@record
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
        staging_bytes: maximum size of the page-locked memory of staged GPU buffers,
            from ``MPIDIST_STAGING_MB`` (MiB).
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

    abort: bool = _variable(_choice, "ABORT", True, _FLAGS)
    alone: bool = _variable(_choice, "ALONE", False, _FLAGS)
    cuda_aware: bool | None = _variable(_choice, "CUDA_AWARE", None, _FLAGS)
    guard: bool = _variable(_choice, "GUARD", True, _FLAGS)
    timeout_seconds: float = _variable(_number, "TIMEOUT", DEFAULT_TIMEOUT_SECONDS)
    timeout_abort: bool = _variable(_choice, "TIMEOUT_ABORT", False, _FLAGS)
    stall_seconds: float = _variable(_number, "STALL_SECONDS", DEFAULT_STALL_SECONDS)
    bytes_per_pack: int = _variable(_mebibytes, "FUSION_MB", DEFAULT_BYTES_PER_PACK)
    implementation: CommunicationImplementation = _variable(
        _choice, "IMPLEMENTATION", CommunicationImplementation.AUTO, _IMPLEMENTATIONS
    )
    allreduce: AllReduceChoice | None = _variable(_allreduce, "ALLREDUCE", None)
    staging_bytes: int = _variable(_pages, "STAGING_MB", DEFAULT_STAGING_BYTES)
    compression: Compression = _variable(_choice, "COMPRESSION", "none", _COMPRESSIONS)
    error_feedback: bool = _variable(_choice, "ERROR_FEEDBACK", False, _FLAGS)
    simulated_nodes: int = _variable(_nodes, "SIMULATED_NODES", 1)
    trace: int = _variable(_choice, "TRACE", 0, _LEVELS, "0, 1 or 2")
    timeline: str = _variable(_path, "TIMELINE", "")


NAMES: Final = (
    "MPIDIST_DEBUG",
    *(one.metadata["read"].args[0] for one in dataclasses.fields(Environment)),
)
"""The variables that a user may set."""


def read_environment() -> Environment:
    """Read the variables ``MPIDIST_*``.

    Raises:
        ValueError: if a value is invalid; the message names the variable.
    """
    fields = dataclasses.fields(Environment)
    return Environment(**{one.name: one.metadata["read"]() for one in fields})


def debugging() -> bool:
    """Return whether ``MPIDIST_DEBUG`` asks for more checks, and longer tracebacks.

    It is read at each call, and never raises: an exception may be about to be shown.
    """
    text = _text_of("MPIDIST_DEBUG")
    return _FLAGS.get(text, text not in ("", "auto"))
