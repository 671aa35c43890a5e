"""What a timeline says, as text: each rank's time, the largest waits, the calls."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

from mpidist._timeline.files import Timeline
from mpidist._timeline.observer import Span

_MOST_WAITS: Final = 3
_MOST_CALLS: Final = 10
_LONGEST_TEXT: Final = 60
# What differs between calls of one kind: the number of an update in its batch.
_COUNTER: Final = re.compile(r" \[#\d+\]$")


@dataclasses.dataclass
class RankTime:
    """Where the time of one rank went, in seconds.

    Attributes:
        waiting: for other ranks, in calls.
        in_calls: the rest of its time in calls: data moves, messages. Of calls that
            were begun, the time for which the program waited for them.
        outside: of calls: the program's own work.
        caused: the time that each other rank waited for this one, on average.
        late: how many calls it was the last to come to.
    """

    waiting: float = 0.0
    in_calls: float = 0.0
    outside: float = 0.0
    caused: float = 0.0
    late: int = 0


@dataclasses.dataclass
class CallTime:
    """The calls of one kind.

    Attributes:
        text: of the first one.
        seconds: in them, summed over ranks.
        waiting: of these, waiting for other ranks.
        counts: how many calls each rank made.
        sizes: the bytes of each rank's buffers in them.
    """

    text: str
    seconds: float = 0.0
    waiting: float = 0.0
    counts: Counter[int] = dataclasses.field(default_factory=Counter)
    sizes: Counter[int] = dataclasses.field(default_factory=Counter)

    @property
    def count(self) -> int:
        """How many calls."""
        return max(self.counts.values())

    @property
    def nbytes(self) -> int:
        """The bytes of one rank's buffers, of that with the most."""
        return max(self.sizes.values())

    def add(self, span: Span) -> None:
        """Add one rank's part of a call."""
        self.seconds += span.seconds
        self.waiting += span.waited
        self.counts[span.rank] += 1
        self.sizes[span.rank] += span.nbytes


def times_of(timeline: Timeline) -> dict[int, RankTime]:
    """Return where the time of each rank went."""
    found = {rank: RankTime() for rank in sorted(timeline.hosts)}
    bounds: dict[int, list[float]] = {}
    others = max(len(found) - 1, 1)
    meetings: set[tuple[int, int]] = set()
    for span in timeline.spans:
        if span.kind == "section":
            continue
        if span.begun:  # beside the program
            continue
        time = found[span.rank]
        time.waiting += span.waited
        time.in_calls += span.seconds - span.waited
        bound = bounds.setdefault(span.rank, [span.start, span.end])
        bound[1] = max(bound[1], span.end)
        if span.waited_for in found:
            late = found[span.waited_for]
            late.caused += span.waited / others
            if (span.strategy, span.number) not in meetings:
                late.late += 1
                meetings.add((span.strategy, span.number))
    for rank, (start, end) in bounds.items():
        time = found[rank]
        time.outside = max(end - start - time.waiting - time.in_calls, 0.0)
    return found


def largest_waits(timeline: Timeline, most: int = _MOST_WAITS) -> list[Span]:
    """Return the longest wait of each of the calls with the longest waits."""
    waits = [span for span in timeline.spans if span.waited]
    waits.sort(key=lambda span: -span.waited)
    longest: dict[tuple[int, int, str], Span] = {}
    for span in waits:
        longest.setdefault((span.strategy, span.number, span.kind), span)
    return list(longest.values())[:most]


def calls_of(timeline: Timeline) -> list[CallTime]:
    """Return the calls by kind, those with the most time first."""
    found: dict[str, CallTime] = {}
    for span in timeline.spans:
        if span.kind in ("section", "waits for begun"):
            continue
        text = _COUNTER.sub("", span.text)
        found.setdefault(text, CallTime(text)).add(span)
    return sorted(found.values(), key=lambda call: -call.seconds)


def summarize(timeline: Timeline) -> str:
    """Return the summary, some twenty lines."""
    ranks, hosts = len(timeline.hosts), len(set(timeline.hosts.values()))
    calls = [span for span in timeline.spans if span.kind != "section"]
    if not calls:
        return f"timeline of {_count(ranks, 'rank')}: no calls\n"
    length = max(span.end for span in calls) - min(span.start for span in calls)
    where = f"{_count(ranks, 'rank')} on {_count(hosts, 'host')}"
    lines = [f"timeline of {where}, {_seconds(length)} in all", ""]
    times = times_of(timeline)
    lines += _table_of_ranks(timeline, times)
    slowest = max(times, key=lambda rank: times[rank].caused)
    if times[slowest].caused:
        time = times[slowest]
        lines += [
            "",
            f"slowest: rank {slowest}: each other rank waited "
            f"{_seconds(time.caused)} for it; it came last to {time.late} calls",
        ]
    lines += ["", "largest waits:"]
    waits = largest_waits(timeline)
    lines += [
        f"{number:>3}  {_seconds(span.waited):>8} at {_seconds(span.start)}: "
        f"rank {span.rank} {_for(span)} in call {span.number}, {_short(span.text)}"
        for number, span in enumerate(waits, 1)
    ]
    if not waits:
        lines.append("  none")
    return "\n".join([*lines, "", *_table_of_calls(calls_of(timeline)), ""])


def _for(span: Span) -> str:
    return f"for rank {span.waited_for}" if span.waited_for >= 0 else "to its end"


def _table_of_ranks(timeline: Timeline, times: dict[int, RankTime]) -> list[str]:
    width = max(map(len, ["host", *timeline.hosts.values()]))
    line = f"{{:>4}}  {{:<{width}}}  {{:>8}}  {{:>8}}  {{:>8}}  {{:>10}}"
    lines = [
        line.format("rank", "host", "own work", "in calls", "waiting", "waited for")
    ]
    for rank, time in times.items():
        spent = time.outside, time.in_calls, time.waiting, time.caused
        lines.append(line.format(rank, timeline.hosts[rank], *map(_seconds, spent)))
    return lines


def _table_of_calls(calls: Sequence[CallTime]) -> list[str]:
    line = "{:>5}  {:>8}  {:>8}  {:>15}  {}"
    lines = [line.format("calls", "seconds", "waiting", "bytes", "call")]
    for call in calls[:_MOST_CALLS]:
        spent = _seconds(call.seconds), _seconds(call.waiting)
        nbytes = f"{call.nbytes:,}"
        lines.append(line.format(call.count, *spent, nbytes, _short(call.text)))
    return lines


def _seconds(seconds: float) -> str:
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
