"""Draws a timeline: a row for each rank, its own work, its calls and its waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

from mpidist._timeline.files import Timeline
from mpidist._timeline.observer import Span
from mpidist._timeline.summary import largest_waits

# Of the palette of Okabe and Ito, which people with colour blindness can tell apart.
_CALL: Final = "#0072B2"
_WAIT: Final = "#E69F00"
_WORK: Final = "#DDDDDD"
_FAILED: Final = "#D55E00"
_BEGUN: Final = "#009E73"
_NAMES: Final = {
    _WORK: "own work",
    _CALL: "in calls",
    _BEGUN: "in asynchronous calls",
    _WAIT: "waiting",
    _FAILED: "ended with an error",
}
_MOST_SPANS: Final = 200_000
# The top and the height of what is drawn, from the middle of its row.
_WHOLE: Final = (-0.35, 0.7)
_ABOVE: Final = (-0.35, 0.43)
_BELOW: Final = (0.1, 0.25)
_Place: TypeAlias = tuple[float, float]


def draw(timeline: Timeline, path: Path) -> None:
    """Draw a timeline to a picture; its format is that of the name.

    Raises:
        ImportError: without Matplotlib.
        OSError: if the picture cannot be written.
        ValueError: if the format is unknown.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "`mpidist timeline --plot` needs Matplotlib: pip install matplotlib"
        ) from error
    spans = [span for span in timeline.spans if span.kind != "section"]
    # Of many the longest ones: the others have no width.
    spans = sorted(spans, key=lambda span: -span.seconds)[:_MOST_SPANS]
    ranks = sorted(timeline.hosts)
    place_of = _placing(spans, ranks)
    bars: dict[tuple[str, _Place], list[tuple[float, float]]] = {}
    for color, span, start, end in _bars_of(spans, ranks):
        bars.setdefault((color, place_of(span)), []).append((start, end - start))
    figure = Figure(figsize=(10, 1.6 + 0.4 * min(len(ranks), 32)), layout="constrained")
    axes: Any = figure.add_subplot()
    for (color, place), times in bars.items():
        axes.broken_barh(times, place, facecolor=color, edgecolor="none")
    for number, span in enumerate(largest_waits(timeline), 1):
        top, height = place_of(span)
        middle = span.start + span.waited / 2, top + height / 2
        axes.annotate(str(number), middle, ha="center", va="center")
    axes.set_xlim(0, max((span.end for span in spans), default=1.0))
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlabel("time (s)")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    drawn = {_WORK, _CALL, _WAIT, *(color for color, _ in bars)}
    named = [color for color in _NAMES if color in drawn]
    figure.legend(
        handles=[Patch(color=color, label=_NAMES[color]) for color in named],
        loc="outside upper right",
        ncols=len(named),
        frameon=False,
    )
    figure.savefig(path, dpi=150)


def _placing(spans: list[Span], ranks: list[int]) -> Callable[[Span], _Place]:
    """Return a function that returns the top and the height of the bar of a span."""
    rows = {rank: row for row, rank in enumerate(ranks)}
    divided = {span.rank for span in spans if span.begun}

    def place_of(span: Span) -> _Place:
        above = _ABOVE if span.rank in divided else _WHOLE
        top, height = _BELOW if span.begun else above
        return rows[span.rank] + top, height

    return place_of


def _bars_of(
    spans: list[Span], ranks: list[int]
) -> Iterator[tuple[str, Span, float, float]]:
    """Yield bars: the color, a span in the same row, the start and the end.

    Later bars lie over earlier ones: those of each rank's own work come first.
    """
    for rank in ranks:
        if own := [span for span in spans if span.rank == rank and not span.begun]:
            ends = [span.end for span in spans if span.rank == rank]
            yield _WORK, own[0], min(span.start for span in own), max(ends)
    for span in spans:
        is_wait = span.kind == "waits for begun"
        middle = span.end if is_wait else span.start + span.waited
        color = _BEGUN if span.begun else _CALL
        yield _WAIT, span, span.start, middle
        yield _FAILED if span.raised else color, span, middle, span.end
