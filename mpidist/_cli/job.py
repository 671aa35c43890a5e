"""The ranks that a command runs on, with raw mpi4py, and what a check finds on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np

from mpidist._base import machine
from mpidist._base.errors import format_ranks
from mpidist._mpi import library

RawComm: TypeAlias = Any
"""A communicator of mpi4py. One module imports mpi4py, so its types have no names."""
_T = TypeVar("_T")


class WrongResultError(Exception):
    """A call that was to be timed gave a wrong result; all ranks raise the same."""


class Job:
    """All ranks of COMM_WORLD, and raw mpi4py on a duplicate of it.

    Attributes:
        mpi: the module ``mpi4py.MPI``.
        comm: the communicator that hand-written code uses.
        rank: the rank of this process.
        size: the number of ranks.
        nodes: for each machine the ranks on it, which share memory, as those of a
            strategy do: host names need not differ.
        node: those on the machine of this rank.
        local_size: how many these are.
        near_sizes: the number of ranks in each group that shares memory by what MPI
            says; MPI asks the launcher, which may take one machine for several.
    """

    def __init__(self) -> None:
        """Duplicate COMM_WORLD. Collective; starts MPI."""
        self.mpi: ModuleType = library.mpi_module()
        self.comm: RawComm = self.mpi.COMM_WORLD.Dup()
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        place = machine.node_id(self.mpi.Get_processor_name())
        places: list[str] = self.comm.allgather(place)
        by_place: dict[str, list[int]] = {}
        for rank, other in enumerate(places):
            by_place.setdefault(other, []).append(rank)
        self.nodes: list[list[int]] = list(by_place.values())
        self.node: list[int] = by_place[place]
        self.local_size: int = len(self.node)
        near = self.comm.Split_type(self.mpi.COMM_TYPE_SHARED)
        leaders: list[int] = self.comm.allgather(near.bcast(self.rank, 0))
        near.Free()
        self.near_sizes: list[int] = [leaders.count(k) for k in sorted(set(leaders))]

    def free(self) -> None:
        """Free the communicator. Collective."""
        self.comm.Free()

    def from_root(self, value: _T) -> _T:
        """Return rank 0's value on all ranks. Collective."""
        return self.comm.bcast(value, 0)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return the element-wise maximum over the ranks, on all. Collective."""
        send = np.array(seconds, np.float64)
        receive = np.empty_like(send)
        self.comm.Allreduce(send, receive, self.mpi.MAX)
        return [float(value) for value in receive]

    def everywhere(self, truth: bool) -> bool:
        """Return whether ``truth`` is true on all ranks. Collective."""
        return bool(self.comm.allreduce(bool(truth), self.mpi.LAND))


# --- what a check finds ---------------------------------------------------------------

OK: Final = "ok"
NOTE: Final = "note"
FAILED: Final = "FAILED"
_STATES: Final = (OK, NOTE, FAILED)
BUG: Final = (
    "this should not happen: please report it, with the output of `mpidist info`. "
    "MPIDIST_IMPLEMENTATION=direct uses only MPI"
)


class CheckFailedError(Exception):
    """A check failed; the message says what is wrong, ``advice`` what to do."""

    def __init__(self, wrong: str, advice: str = BUG) -> None:
        super().__init__(wrong)
        self.advice = advice


class Note(NamedTuple):
    """What a check returns that did not fail, but found something to know."""

    text: str
    advice: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The line of one check: what one rank has found, or the same on all ranks."""

    name: str
    state: str
    text: str
    advice: str = ""


def attempt(job: Job, name: str, check: Callable[[], str | Note]) -> Outcome:
    """Make a check on all ranks; return the same outcome on all. Collective."""
    try:
        found = check()
        if isinstance(found, Note):
            mine = Outcome(name, NOTE, *found)
        else:
            mine = Outcome(name, OK, found)
    except CheckFailedError as failure:
        mine = Outcome(name, FAILED, str(failure), failure.advice)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        mine = Outcome(name, FAILED, f"{type(error).__name__}: {first_line}", BUG)
    findings: list[Outcome] = job.comm.allgather(mine)
    worst = max(findings, key=lambda one: _STATES.index(one.state))  # the first of them
    ranks = [rank for rank, one in enumerate(findings) if one.state == worst.state]
    if job.size == 1 or (len(ranks) == job.size and worst.state != FAILED):
        return worst
    return dataclasses.replace(worst, text=f"{format_ranks(ranks)}: {worst.text}")
