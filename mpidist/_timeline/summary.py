"""What a timeline says, as text: each rank's time, the largest waits, the calls."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

from mpidist._base.names import counted, show_seconds
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


def times_of(timeline: Timeline) -> dict[int, RankTime]:
    """Return where the time of each rank went."""
    found = {rank: RankTime() for rank in sorted(timeline.hosts)}
    bounds: dict[int, list[float]] = {}
    others = max(len(found) - 1, 1)
    meetings: set[tuple[int, int]] = set()
    for span in timeline.spans:
        if span.kind == "section" or span.begun:  # which is beside the program
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


def largest_waits(timeline: Timeline) -> list[Span]:
    """Return the longest wait of each of the calls with the longest waits."""
    waits = [span for span in timeline.spans if span.waited]
    waits.sort(key=lambda span: -span.waited)
    longest: dict[tuple[int, int, str], Span] = {}
    for span in waits:
        longest.setdefault((span.strategy, span.number, span.kind), span)
    return list(longest.values())[:_MOST_WAITS]


def calls_of(timeline: Timeline) -> list[list[Span]]:
    """Return the calls of each kind, those with the most time first."""
    found: dict[str, list[Span]] = {}
    for span in timeline.spans:
        if span.kind not in ("section", "waits for begun"):
            found.setdefault(_COUNTER.sub("", span.text), []).append(span)
    return sorted(found.values(), key=lambda calls: -_seconds_in(calls))


def _seconds_in(calls: Sequence[Span]) -> float:
    return sum(span.seconds for span in calls)


def summarize(timeline: Timeline) -> str:
    """Return the summary, some twenty lines."""
    ranks, hosts = len(timeline.hosts), len(set(timeline.hosts.values()))
    calls = [span for span in timeline.spans if span.kind != "section"]
    if not calls:
        return f"timeline of {counted(ranks, 'rank')}: no calls\n"
    length = max(span.end for span in calls) - min(span.start for span in calls)
    where = f"{counted(ranks, 'rank')} on {counted(hosts, 'host')}"
    times = times_of(timeline)
    lines = [f"timeline of {where}, {show_seconds(length)} in all", ""]
    lines += _table_of_ranks(timeline, times)
    rank, time = max(times.items(), key=lambda item: item[1].caused)
    if time.caused:
        lines += [
            "",
            f"slowest: rank {rank}: each other rank waited {show_seconds(time.caused)} "
            f"for it; it came last to {time.late} calls",
        ]
    lines += ["", "largest waits:"]
    waits = largest_waits(timeline)
    lines += [
        f"{number:>3}  {show_seconds(span.waited):>8} at {show_seconds(span.start)}: "
        f"rank {span.rank} {_for(span)} in call {span.number}, {_short(span.text)}"
        for number, span in enumerate(waits, 1)
    ] or ["  none"]
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
        lines.append(line.format(rank, timeline.hosts[rank], *map(show_seconds, spent)))
    return lines


def _table_of_calls(kinds: Sequence[Sequence[Span]]) -> list[str]:
    line = "{:>5}  {:>8}  {:>8}  {:>15}  {}"
    lines = [line.format("calls", "seconds", "waiting", "bytes", "call")]
    for calls in kinds[:_MOST_CALLS]:
        waited = sum(span.waited for span in calls)
        counts, sizes = Counter[int](), Counter[int]()  # of each rank
        for span in calls:
            counts[span.rank] += 1
            sizes[span.rank] += span.nbytes
        spent = show_seconds(_seconds_in(calls)), show_seconds(waited)
        text = _short(_COUNTER.sub("", calls[0].text))
        most = max(counts.values()), f"{max(sizes.values()):,}"
        lines.append(line.format(most[0], *spent, most[1], text))
    return lines


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
