"""Reads the parts of a timeline, and puts their events on one clock."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mpidist._timeline.observer import Span
from mpidist._timeline.recorder import END, FIELDS, FORMAT, Process

_WINDOWS: Final = 32  # the most windows of time; and the fewest calls in one
_NUMBER: Final = re.compile(r"\.rank(\d+)$")
# Calls that end at nearly the same time on all ranks.
_SIMULTANEOUS: Final = ("call", "end of section")


class PartError(ValueError):
    """a file is not part of a timeline."""


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A strategy on one rank.

    Attributes:
        identity: the same on all its ranks.
        rank: of the process in it.
        size: how many ranks it has.
    """

    identity: str
    rank: int
    size: int


@dataclasses.dataclass
class Part:
    """One process's part.

    Attributes:
        process: the process.
        strategies: by their numbers.
        events: in the order in which they have ended.
        complete: whether the process has reached the end of the recording.
    """

    process: Process
    strategies: dict[int, Strategy]
    events: list[Span]
    complete: bool

    @property
    def identities(self) -> set[str]:
        """The identities of its strategies."""
        return {strategy.identity for strategy in self.strategies.values()}


def find_parts(path: Path) -> list[Path]:
    """Return the parts of the timeline ``path`` that are there, by rank."""
    found = []
    for name in path.parent.glob(f"{_escaped(path.name)}.rank*"):
        number = _NUMBER.search(name.name)
        if number is not None:
            found.append((int(number[1]), name))
    return [name for _, name in sorted(found)]


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def read_part(path: Path) -> Part:
    """Read a part; its last line may be cut off.

    Raises:
        PartError: if it is none.
        OSError: if it cannot be read.
    """
    lines = _lines_of(path)
    header = next(lines, None)
    if not isinstance(header, dict) or header.pop("mpidist timeline", 0) != FORMAT:
        raise PartError(f"{path} is not part of a timeline of this version of mpidist")
    try:
        part = Part(Process(**header), {}, [], False)
        for line in lines:
            if line == END:
                part.complete = True
            elif isinstance(line, dict):
                number = line.pop("strategy")
                part.strategies[number] = Strategy(**line)
            else:
                fields = dict(zip(FIELDS, line, strict=True))
                part.events.append(Span(part.process.rank, **fields))
    except (TypeError, KeyError, ValueError) as error:
        raise PartError(f"{path} is damaged: {error}") from None
    return part


def _lines_of(path: Path) -> Iterator[Any]:
    """Yield the lines, decoded, up to one that was not written whole."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                return


def of_one_job(parts: list[Part]) -> list[Part]:
    """Return the parts that belong to the job of the first one.

    Others are left from an earlier job with more ranks.
    """
    if not parts:
        return []
    known, found = parts[0].identities, [parts[0]]
    rest = parts[1:]
    while True:
        more = [part for part in rest if part.identities & known]
        if not more:
            return sorted(found, key=lambda part: part.process.rank)
        found += more
        known = known.union(*(part.identities for part in more))
        rest = [part for part in rest if part not in more]


def are_complete(parts: list[Part]) -> bool:
    """Return whether all parts of the job are there, each to its end."""
    there: dict[str, set[int]] = {}
    wanted: dict[str, int] = {}
    for part in parts:
        for strategy in part.strategies.values():
            there.setdefault(strategy.identity, set()).add(strategy.rank)
            wanted[strategy.identity] = strategy.size
    return all(part.complete for part in parts) and all(
        len(there[identity]) == size for identity, size in wanted.items()
    )


def align(parts: list[Part]) -> None:
    """Put the events of all parts on the clock of the first one.

    Processes of one machine have one clock. For another machine, calls are compared
    that end with a header, so at nearly the same time on all ranks: the median
    difference of their ends, in each of up to 32 windows of time, is the offset of its
    clock there; in between it is interpolated, since clocks drift. The error is that
    of a median of message latencies, some ten microseconds.
    """
    first = parts[0]
    ends = _ends_of(first)
    for part in parts[1:]:
        if part.process.boot == first.process.boot:
            continue
        times, offsets = _offsets(ends, _ends_of(part))
        if not len(times):  # nothing in common: the time of day has to do
            times = np.zeros(1)
            offsets = np.array([part.process.epoch - first.process.epoch])
        for name in ("start", "end"):
            here = np.array([getattr(event, name) for event in part.events])
            here += np.interp(here, times, offsets)
            for event, there in zip(part.events, here.tolist(), strict=True):
                setattr(event, name, there)


def _ends_of(part: Part) -> dict[tuple[str, int], float]:
    return {
        (part.strategies[event.strategy].identity, event.number): event.end
        for event in part.events
        if event.kind in _SIMULTANEOUS and not event.raised
    }


def _offsets(
    ours: dict[tuple[str, int], float], theirs: dict[tuple[str, int], float]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return times of their clock, and what to add to it there."""
    common = [(theirs[key], ours[key]) for key in theirs.keys() & ours.keys()]
    if not common:
        return np.zeros(0), np.zeros(0)
    pairs = np.array(sorted(common))
    count = min(_WINDOWS, max(1, len(pairs) // _WINDOWS))
    windows = np.array_split(pairs, count)
    times = np.array([np.median(window[:, 0]) for window in windows])
    differences = [np.median(window[:, 1] - window[:, 0]) for window in windows]
    return times, np.array(differences)
