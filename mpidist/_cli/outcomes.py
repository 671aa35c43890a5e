"""The result of one check, found on each rank and made one line for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final, NamedTuple

from mpidist._base.errors import format_ranks
from mpidist._cli.job import Job

OK: Final = "ok"
NOTE: Final = "note"
FAILED: Final = "FAILED"
_ORDER: Final = (FAILED, NOTE)
BUG: Final = (
    "this should not happen: please report it, with the output of `mpidist info`. "
    "MPIDIST_IMPLEMENTATION=direct uses only MPI"
)


class CheckFailedError(Exception):
    """A check failed; the message says what is wrong, ``advice`` what to do."""

    def __init__(self, wrong: str, advice: str) -> None:
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
    """Make a check on all ranks; return the same outcome on all. Collective.

    Args:
        job: the ranks.
        name: of the check.
        check: returns what it found, which may be a `Note`; or raises.
    """
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
    for state in _ORDER:
        ranks = [rank for rank, one in enumerate(findings) if one.state == state]
        if ranks:
            first = findings[ranks[0]]
            where = f"{format_ranks(ranks)}: " if job.size > 1 else ""
            if len(ranks) == job.size and state == NOTE:
                where = ""
            return dataclasses.replace(first, text=where + first.text)
    return findings[0]
