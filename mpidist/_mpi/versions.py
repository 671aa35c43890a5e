"""What the ranks of a new communicator must have in common, and how they find out.

Functions, arrays, records and headers are sent in forms that depend on the software of
each rank. So ranks first tell each other on a new communicator which software they
have. If it does not match, all of them raise, with both sides in the message.

Protocol: each rank sends one text to all ranks (sizes as 64-bit integers, then bytes,
both by `BufferCollectives.merge`). It is JSON in ASCII, with its own format number.
Ranks whose versions differ in everything else must still be able to read it, so nothing
is pickled, and neither the exchange nor the keys "format", "must" and "problem" may
ever change.
With it goes all that a rank must tell the others before they can work together
("about"): where it is, what it can, what it no longer uses. With many ranks each
exchange more is slow.

Invariant: *all raise, or none does*. A rank raises exactly if some rank has a problem,
or if some text differs from another in "format" or "must". All ranks judge the same
texts, so they get the same result; and versions of mpidist that judge by other rules
differ in "must".

What must be equal, and why:

- *Python*: functions travel as bytecode (`marshal`), which every minor version changes.
- *mpidist*: its headers, commands and layouts have no version numbers of their own.
- *NumPy*, major and minor version: mirrored variables rely on the NumPy of each rank
  to compute the same bits and dtypes. Minor releases may change algorithms, promotion
  of dtypes and random streams; micro releases only fix bugs.
- *cloudpickle*: what it writes refers to private names of that version.
- *byte order*, and *sizes of C types*: arrays travel as bytes. Two machines may have
  the same Python, and a ``long double`` of 80 or of 128 bits.

What may differ: versions of MPI and mpi4py (the MPI libraries of the ranks have
already found each other), of CuPy (each strategy tries it), of the system. The native
core need not be on all ranks either: none then uses it, and one of them says so.
"""

from __future__ import annotations

import importlib.util
import json
import marshal
import pickle
import struct
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from mpidist import _native
from mpidist._base import reporting
from mpidist._base.errors import (
    CollectiveMismatchError,
    format_ranks,
    on_rank,
    ranks_by,
)
from mpidist._version import __version__

_FORMAT: Final = 2  # of "about" too
_CALL: Final = "MPIStrategy(...)"
_OTHER_FORMAT: Final = "format of this agreement"
_SHOWN: Final = 80
ADVICE: Final = (
    "start all ranks from the same environment: the same Python, with the same "
    "packages, on every machine"
)


class _Rank(NamedTuple):
    must: dict[str, str]
    problem: str = ""
    about: dict[str, Any] = {}  # noqa: RUF012 - never changed


def describe() -> dict[str, str]:
    """Return what of this rank must be equal on all ranks. Not collective."""
    bytecode = int.from_bytes(importlib.util.MAGIC_NUMBER[:2], "little")
    name, version = sys.implementation.name, sys.version_info
    double = np.dtype(np.longdouble)
    return {
        "Python": (
            f"{name} {version.major}.{version.minor} (bytecode {bytecode}, marshal "
            f"{marshal.version}, pickle {pickle.HIGHEST_PROTOCOL})"
        ),
        "mpidist": __version__,
        "NumPy": ".".join(np.__version__.split(".")[:2]),
        # Not imported here; one module owns each library (test_rooms.py).
        "cloudpickle": getattr(sys.modules.get("cloudpickle"), "__version__", "none"),
        "byte order": sys.byteorder,
        "C types": (
            f"pointers of {struct.calcsize('P')} bytes, long of "
            f"{struct.calcsize('l')}, long double of {double.itemsize} with "
            f"{np.finfo(double).nmant} bits"
        ),
    }


def write(problem: str = "", more: Callable[[], dict[str, Any]] = dict) -> bytes:
    """Return the text that this rank sends.

    Args:
        problem: why it cannot take part, which all ranks then raise; "": it can.
        more: returns what else the rank says of itself, as JSON has it.
    """
    must: dict[str, str] = {}
    about: dict[str, Any] = {}
    try:
        must = describe()
        about = {
            "core": _native.available(),
            "floats": floating_point_state(),
            **more(),
        }
    except Exception as error:  # a library that does not load, on this rank only
        problem = problem or f"{type(error).__name__}: {error}"
    text = {"format": _FORMAT, "must": must, "problem": problem, "about": about}
    return json.dumps(text).encode("ascii")


def judge(
    rank: int, texts: list[bytes]
) -> tuple[list[dict[str, Any]], Exception | None]:
    """Return what each rank says of itself, and what all of them raise, or None.

    Args:
        rank: this rank.
        texts: of all ranks, in their order.

    Returns:
        What each says of itself (with "core": whether it has the native core), and one
        of None, a ValueError (a rank has a problem) and a CollectiveMismatchError.
    """
    ranks = [_read(text) for text in texts]
    rank_infos = [one.about for one in ranks]
    for other, one in enumerate(ranks):
        if one.problem:
            message = f"{_CALL}: rank {other} cannot take part: {one.problem}"
            return rank_infos, ValueError(on_rank(rank, message))
    lines = _differences(ranks)
    if lines:
        listed = "\n".join(f"  {line}" for line in lines)
        message = (
            f"{_CALL}: the ranks do not have the same software, so they cannot work "
            f"together:\n{listed}\nFunctions, arrays and headers are sent in forms "
            f"that depend on it; {ADVICE}. `mpidist check` compares them"
        )
        return rank_infos, CollectiveMismatchError(on_rank(rank, message))
    floats = floats_that_differ([one.get("floats", "") for one in rank_infos])
    if rank == 0 and floats:
        reporting.warn(f"mpidist: {floats}")
    if rank == 0:
        _tell_without_core(rank_infos)
    return rank_infos, None


def _read(text: bytes) -> _Rank:
    """Read the text of a rank, also of one whose version is not known here."""
    try:
        found = json.loads(text)
        must, number = found["must"], found["format"]
        if number != _FORMAT:
            known = {"mpidist": str(must["mpidist"]), _OTHER_FORMAT: str(number)}
            return _Rank(known, problem=str(found["problem"]))
        must = {str(key): str(value) for key, value in must.items()}
        return _Rank(must, str(found["problem"]), dict(found["about"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        return _Rank({_OTHER_FORMAT: f"unknown ({text[:_SHOWN]!r})"})


def _differences(ranks: list[_Rank]) -> list[str]:
    """Return a line for each property in which the ranks differ."""
    formats = [one.must.get(_OTHER_FORMAT, str(_FORMAT)) for one in ranks]
    rows: list[tuple[str, list[str]]] = [(_OTHER_FORMAT, formats)]
    if len(set(formats)) > 1:
        keys = ["mpidist"]  # the only key that any format has for sure
    else:
        keys = list(dict.fromkeys(key for one in ranks for key in one.must))
    rows += [(key, [one.must.get(key, "unknown") for one in ranks]) for key in keys]
    lines = []
    for name, values in rows:
        groups = ranks_by(values)
        if len(groups) > 1:
            sides = "; ".join(
                f"{x} on {format_ranks(who)}" for x, who in groups.items()
            )
            lines.append(f"{name}: {sides}")
    return lines


def floating_point_state() -> str:
    """Return how this rank rounds in another way than programs usually do; "": it does.

    A library that was built with -ffast-math changes it when it is imported.
    """
    one, little = np.array([1.0]), np.array([2.0**-60])
    with np.errstate(all="ignore"):
        up, down = bool((one + little)[0] > 1), bool((one - little)[0] < 1)
        flushes = bool((np.array([1e-310]) * one)[0] == 0)
    found = []
    if flushes:
        found.append("flushes subnormal numbers to zero")
    if up or down:
        found.append("does not round to nearest")
    return " and ".join(found)


def floats_that_differ(states: list[str]) -> str:
    """Return what users read if ranks round in different ways; "": they do not.

    Args:
        states: the `floating_point_state` of each rank.
    """
    groups = ranks_by(states)
    if len(groups) == 1:
        return ""
    others = "; that of ".join(
        f"{format_ranks(ranks)} {state}" for state, ranks in groups.items() if state
    )
    return (
        f"the processor of {others}, which a library that is built with -ffast-math "
        "can set; with the native core sums of mpidist do not depend on it, but what a "
        "rank computes itself does, so copies of variables may drift apart"
    )


def _tell_without_core(rank_infos: list[dict[str, Any]]) -> None:
    """Warn the user if the native core is missing on some ranks only."""
    lacking = ranks_by([one["core"] for one in rank_infos]).get(False, [])
    if len(lacking) in (0, len(rank_infos)):
        return
    verb = "has" if len(lacking) == 1 else "have"
    reporting.warn(
        f"mpidist: {format_ranks(lacking)} {verb} no native core, which the others "
        "have; all ranks continue without it, and are slower. Install mpidist there "
        "with a C compiler"
    )
