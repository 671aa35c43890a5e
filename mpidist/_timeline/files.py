"""The files of a timeline: the parts of all processes, and the one that they become.

The merged file has the events of all ranks on one clock, with who waited for whom.
"""

from __future__ import annotations

import dataclasses
import glob
import gzip
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from mpidist._timeline.observer import Span
from mpidist._timeline.recorder import (
    END,
    FORMAT,
    PROCESS,
    STRATEGY,
    event_of,
    metadata,
    name_of_thread,
    span_of,
    thread_of,
)

_WINDOWS: Final = 32  # the most windows of time; and the fewest calls in one
# What gzip raises for a file that is something else, or damaged.
_NOT_COMPRESSED: Final = (EOFError, gzip.BadGzipFile, zlib.error)
# Calls that end at nearly the same time on all ranks.
_MEETINGS: Final = ("call", "end of section")


class FormatError(ValueError):
    """A file is not a timeline of mpidist, or not part of one."""


@dataclasses.dataclass
class Timeline:
    """The timeline of a job.

    Attributes:
        hosts: the host of each process, by its rank.
        spans: by their starts.
    """

    hosts: dict[int, str]
    spans: list[Span]


@dataclasses.dataclass
class Part:
    """One process's part.

    Attributes:
        rank: of the process among those of the job.
        size: how many processes the job has.
        host: the name of its machine.
        boot: identifies the clock: the same for processes of one machine.
        epoch: the time of day, in seconds since 1970, at the clock's zero.
        strategies: by their numbers: the ``identity``, which is the same on all ranks
            of one, the ``rank`` of the process in it, and its ``size``.
        events: in the order in which they have ended.
        complete: whether the process has reached the end of the recording.
    """

    rank: int
    size: int
    host: str
    boot: str
    epoch: float
    strategies: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    events: list[Span] = dataclasses.field(default_factory=list)
    complete: bool = False


# --- parts ----------------------------------------------------------------------------


def find_parts(path: Path) -> list[Path]:
    """Return the parts of the timeline ``path`` that are there, by rank."""
    parts = path.parent.glob(f"{glob.escape(path.name)}.rank*")
    by_rank = {x.suffix.removeprefix(".rank"): x for x in parts}
    return [by_rank[rank] for rank in sorted(filter(str.isdecimal, by_rank), key=int)]


def read_part(path: Path) -> Part:
    """Read a part; its last line may be cut off.

    Raises:
        FormatError: if it is none.
        OSError: if it cannot be read.
    """
    part: Part | None = None
    try:
        for event in _events_in(path):
            about = event["args"]
            if part is None:
                if about["format"] != FORMAT:
                    break
                place = about["size"], about["host"], about["boot"], about["epoch"]
                part = Part(event["pid"], *place)
            elif event["ph"] == "X":
                part.events.append(span_of(event))
            elif event["name"] == STRATEGY:
                part.strategies[event["tid"]] = about
            elif event["name"] == END:
                part.complete = True
    except (TypeError, KeyError) as error:
        if part is not None:
            raise FormatError(f"{path} is damaged: {error!r}") from None
    if part is None:
        text = f"{path} is not part of a timeline of this version of mpidist"
        raise FormatError(text)
    return part


def _events_in(path: Path) -> Iterator[Any]:
    """Yield the events of a part, up to one that was not written whole."""
    with open(path, encoding="utf-8", errors="replace") as file:
        if file.readline() != "[\n":
            return
        for line in file:
            try:
                yield json.loads(line.removesuffix(",\n"))
            except ValueError:
                return


def are_complete(parts: list[Part]) -> bool:
    """Return whether all parts of the job are there, each to its end."""
    strategies = [one for part in parts for one in part.strategies.values()]
    there = Counter(one["identity"] for one in strategies)
    wanted = {one["identity"]: one["size"] for one in strategies}
    return there == wanted and all(part.complete for part in parts)


# --- one timeline ---------------------------------------------------------------------


def merge(parts: Sequence[Part]) -> Timeline:
    """Return the timeline of these parts of one job."""
    align(parts)
    made = [(part.rank, x) for part in parts for x in part.strategies.values()]
    identities = dict.fromkeys(strategy["identity"] for _, strategy in made)
    numbers = {identity: number for number, identity in enumerate(identities, 1)}
    # The process that is rank 0, by strategy.
    roots = {numbers[x["identity"]]: rank for rank, x in made if x["rank"] == 0}
    for part in parts:
        for span in part.events:
            span.strategy = numbers[part.strategies[span.strategy]["identity"]]
    spans = [span for part in parts for span in _without_waits_in_calls(part.events)]
    begin = min((span.start for span in spans), default=0.0)
    for span in spans:
        span.start -= begin
        span.end -= begin
    spans.sort(key=lambda span: (span.start, -span.end))
    _find_waits(spans, roots)
    return Timeline({part.rank: part.host for part in parts}, spans)


def _without_waits_in_calls(events: Sequence[Span]) -> Iterator[Span]:
    """Yield the events of a process but the waits in calls that have ended since."""
    starts: dict[int, float] = {}  # by thread: of the first call that has ended later
    for span in reversed(events):
        first = starts.get(thread_of(span), math.inf)
        if span.kind not in ("waits", "waits for begun") or span.end < first:
            if span.kind != "section":
                starts[thread_of(span)] = min(span.start, first)
            yield span


def align(parts: Sequence[Part]) -> None:
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
        if part.boot == first.boot:
            continue
        times, offsets = _offsets(ends, _ends_of(part), part.epoch - first.epoch)
        here = np.array([(event.start, event.end) for event in part.events])
        here += np.interp(here, times, offsets)
        for event, there in zip(part.events, here.tolist(), strict=True):
            event.start, event.end = there


def _ends_of(part: Part) -> dict[tuple[str, int], float]:
    return {
        (part.strategies[event.strategy]["identity"], event.number): event.end
        for event in part.events
        if event.kind in _MEETINGS and not event.raised
    }


def _offsets(
    ours: dict[tuple[str, int], float],
    theirs: dict[tuple[str, int], float],
    otherwise: float,
) -> tuple[list[float], list[float]]:
    """Return times of their clock, and what to add to it there.

    Args:
        ours: the ends of calls, on our clock.
        theirs: the same on theirs.
        otherwise: what to add if they have no call in common: by the time of day.
    """
    common = [(theirs[key], ours[key]) for key in theirs.keys() & ours.keys()]
    if not common:
        return [0.0], [otherwise]
    pairs = np.array(sorted(common))
    windows = np.array_split(pairs, min(_WINDOWS, max(1, len(pairs) // _WINDOWS)))
    times = [float(np.median(window[:, 0])) for window in windows]
    differences = [float(np.median(window[:, 1] - window[:, 0])) for window in windows]
    return times, differences


def _find_waits(spans: Iterable[Span], roots: dict[int, int]) -> None:
    """Set in each span how long it waited, and for which rank.

    Args:
        spans: all of them.
        roots: the process that is rank 0, by strategy, if it has a part.
    """
    meetings: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        if span.kind in _MEETINGS:
            meetings.setdefault((span.strategy, span.number), []).append(span)
        elif span.kind == "waits":
            span.waited = span.seconds
        elif span.kind == "message" and span.rank != roots.get(span.strategy, -1):
            span.waited = span.seconds
            span.waited_for = roots.get(span.strategy, -1)
    for meeting in meetings.values():
        last = max(meeting, key=lambda span: span.start)
        for span in meeting:
            if span is not last:
                waited = min(last.start - span.start, span.seconds)
                span.waited, span.waited_for = waited, last.rank


# --- files ----------------------------------------------------------------------------


def load(path: Path) -> Timeline:
    """Return the timeline ``path``, merged from its parts if there are any.

    Raises:
        FormatError: if a file is something else.
        OSError: if a file is not there, or cannot be read or written.
    """
    if parts := read_parts(path):
        return merge_files(path, parts)
    return read(path)


def read_parts(path: Path) -> list[Part]:
    """Return the parts of the last job that recorded ``path``.

    Raises:
        FormatError: if a file is no part.
        OSError: if one cannot be read.
    """
    parts = [read_part(part) for part in find_parts(path)]
    # Others are left from an earlier job with more ranks.
    return [part for part in parts if part.size == parts[0].size]


def merge_files(path: Path, parts: list[Part]) -> Timeline:
    """Write the timeline ``path`` from its parts; delete these if they are complete.

    Raises:
        OSError: if the timeline cannot be written.
    """
    timeline = merge(parts)
    write(timeline, path)
    if are_complete(parts):
        for part in find_parts(path):
            part.unlink(missing_ok=True)
    return timeline


def write(timeline: Timeline, path: Path) -> None:
    """Write a timeline; compressed, if the name ends in ".gz".

    Raises:
        OSError: if it cannot be written.
    """
    with _open(path, "wt") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": {"source": "mpidist"},\n')
        file.write('"traceEvents": [\n')
        file.write(",\n".join(map(json.dumps, _events_of(timeline))))
        file.write("\n]}\n")


def _events_of(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, host in sorted(timeline.hosts.items()):
        yield metadata(PROCESS, rank, name=f"rank {rank} on {host}", host=host)
        yield metadata("process_sort_index", rank, sort_index=rank)
    threads = {
        (span.rank, thread_of(span)): name_of_thread(span) for span in timeline.spans
    }
    for (rank, number), name in sorted(threads.items()):
        yield metadata(STRATEGY, rank, number, name=name)
    yield from map(event_of, timeline.spans)


def read(path: Path) -> Timeline:
    """Read a timeline that `write` wrote.

    Raises:
        FormatError: if it is none.
        OSError: if it cannot be read.
    """
    try:
        with _open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        spans = [span_of(event) for event in events if event["ph"] == "X"]
        hosts = {
            event["pid"]: event["args"]["host"]
            for event in events
            if event["name"] == PROCESS
        }
    except (ValueError, TypeError, KeyError, *_NOT_COMPRESSED) as error:
        raise FormatError(
            f"{path} is not a timeline of mpidist ({type(error).__name__}: {error})"
        ) from None
    return Timeline(hosts, spans)


def _open(path: Path, mode: str) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, mode, encoding="utf-8", compresslevel=6)  # type: ignore[return-value]  # a text file, by its mode
    return open(path, mode, encoding="utf-8")
