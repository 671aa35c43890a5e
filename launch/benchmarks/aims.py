"""The project's aims for the work and the ranks of a row.

They hold for host memory with the guard on, were set on a machine with two cores, and
depend on where the ranks are:

- "hosts": on several nodes;
- "crowded": on one node with more ranks than cores, and more than 16 ranks;
- "shared cores": on one node with more ranks than cores, and up to 16 ranks;
- "own cores": on one node with a core for each rank.

A single rank has no aims: it does not communicate.
"""

from __future__ import annotations

import dataclasses
from typing import Final

_KIB: Final = 2**10
_MIB: Final = 2**20
_FEW_RANKS: Final = 16

# (bytes, factor): from so many bytes on, at most factor times the time of raw mpi4py.
_Steps = tuple[tuple[int, float], ...]
_ALL_REDUCE: Final[dict[str, _Steps]] = {
    "own cores": (
        (0, 1.0),
        (16 * _KIB, 0.5),
        (64 * _KIB, 0.75),
        (_MIB, 0.9),
        (16 * _MIB, 0.75),
        (64 * _MIB, 0.5),
    ),
    "shared cores": ((0, 1.3), (_KIB, 0.8), (_MIB, 0.85), (64 * _MIB, 0.4)),
    "crowded": ((0, 1.0),),
    "hosts": ((0, 1.5), (_MIB, 1.1)),
}
_SLICED: Final = (16 * _MIB, 0.8)  # with several ranks on each host, hosts send less
# The other aims are for "own cores".
_RATIOS: Final[dict[str, _Steps]] = {
    "nest": ((0, 1.0), (_MIB, 0.28)),
    "nest in buffers_like": ((0, 0.24),),
    "all_gather": ((0, 1.3), (16 * _KIB + 1, 1.0)),
    "update": ((0, 1.2),),
    "elastic": ((0, 1.03),),
}
_SECONDS: Final = {"run": 6e-6, "merge_call": 15e-6}
_BEYOND_RAW: Final = {"reduce": 3e-6, "commit": 50e-6}


@dataclasses.dataclass(frozen=True)
class Aim:
    """The most time that a call may take: factor * raw + seconds.

    Attributes:
        factor: a factor of the time of the hand-written code.
        seconds: seconds to add.
    """

    factor: float
    seconds: float = 0.0

    def __str__(self) -> str:
        if not self.seconds:
            return f"{self.factor:.2f}"
        most = f"{self.seconds * 1e6:g} us"
        return f"raw + {most}" if self.factor else most

    def is_met(self, raw: float, ours: float) -> bool:
        """Return whether a call that takes ``ours`` seconds is fast enough."""
        return ours <= self.factor * raw + self.seconds


def place_of(ranks: int, nodes: int, cores: int) -> str | None:
    """Return where the ranks are, by the names above; None for one rank.

    Args:
        ranks: the number of all ranks, with as many on each node.
        nodes: the number of nodes.
        cores: the number of cores of each node.
    """
    if ranks == 1:
        return None
    if nodes > 1:
        return "hosts"
    if ranks <= cores:
        return "own cores"
    return "shared cores" if ranks <= _FEW_RANKS else "crowded"


def aim_of(kind: str, nbytes: int, ranks: int, nodes: int, cores: int) -> Aim | None:
    """Return the aim of a row, or None if there is none.

    Args:
        kind: the kind of work: "all_reduce", "run" and so on.
        nbytes: the bytes of the array, if the aim depends on them.
        ranks: the number of all ranks, with as many on each node.
        nodes: the number of nodes.
        cores: the number of cores of each node.
    """
    place = place_of(ranks, nodes, cores)
    if place is None:
        return None
    if kind == "all_reduce":
        steps = _ALL_REDUCE[place]
        if place == "hosts" and ranks > nodes:
            steps = (*steps, _SLICED)
        return Aim(_last(steps, nbytes))
    if place != "own cores":
        return None
    if kind in _SECONDS:
        return Aim(0.0, _SECONDS[kind])
    if kind in _BEYOND_RAW:
        return Aim(1.0, _BEYOND_RAW[kind])
    if kind not in _RATIOS:
        return None
    return Aim(_last(_RATIOS[kind], nbytes))


def _last(steps: _Steps, nbytes: int) -> float:
    return next(factor for start, factor in reversed(steps) if nbytes >= start)
