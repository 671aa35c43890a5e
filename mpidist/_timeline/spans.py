"""The events of all ranks on one clock, with who waited for whom."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from mpidist._timeline import parts as of_parts
from mpidist._timeline.observer import Span
from mpidist._timeline.parts import Part

_MEETINGS = ("call", "end of section")


@dataclasses.dataclass
class Timeline:
    """The timeline of a job.

    Attributes:
        hosts: the host of each process, by its rank.
        spans: by their starts.
    """

    hosts: dict[int, str]
    spans: list[Span]


def merge(parts: Sequence[Part]) -> Timeline:
    """Return the timeline of these parts of one job."""
    of_parts.align(list(parts))
    identities: dict[str, int] = {}
    members: dict[int, dict[int, int]] = {}  # process by rank, of each strategy
    for part in parts:
        for strategy in part.strategies.values():
            number = identities.setdefault(strategy.identity, len(identities) + 1)
            members.setdefault(number, {})[strategy.rank] = part.process.rank
    spans = [span for part in parts for span in part.events]
    for part in parts:
        for span in part.events:
            span.strategy = identities[part.strategies[span.strategy].identity]
    begin = min((span.start for span in spans), default=0.0)
    for span in spans:
        span.start -= begin
        span.end -= begin
    spans.sort(key=lambda span: (span.start, -span.end))
    _find_waits(spans, {number: ranks.get(0, -1) for number, ranks in members.items()})
    return Timeline({part.process.rank: part.process.host for part in parts}, spans)


def _find_waits(spans: Iterable[Span], roots: dict[int, int]) -> None:
    """Set what was waited for.

    Args:
        spans: all of them.
        roots: the process that is rank 0, by strategy; -1: it has no part.
    """
    meetings: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        if span.kind in _MEETINGS:
            meetings.setdefault((span.strategy, span.number), []).append(span)
        elif span.kind == "waits":
            span.waited = span.seconds
        elif span.kind == "message" and span.rank != roots[span.strategy]:
            span.waited, span.waited_for = span.seconds, roots[span.strategy]
    for meeting in meetings.values():
        last = max(meeting, key=lambda span: span.start)
        for span in meeting:
            if span is not last:
                waited = min(last.start - span.start, span.seconds)
                span.waited, span.waited_for = waited, last.rank
