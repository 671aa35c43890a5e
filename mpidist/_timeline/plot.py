"""Draws a timeline: a row for each rank, its own work, its calls and its waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from mpidist._timeline.files import Timeline
from mpidist._timeline.observer import Span
from mpidist._timeline.summary import largest_waits

# Of the palette of Okabe and Ito, which people with colour blindness can tell apart.
_CALL: Final = "#0072B2"
_WAIT: Final = "#E69F00"
_WORK: Final = "#DDDDDD"
_FAILED: Final = "#D55E00"
_BEGUN: Final = "#009E73"
_MOST_SPANS: Final = 200_000


def draw(timeline: Timeline, path: Path) -> None:
    """Draw a timeline to a picture; its format is that of the name.

    Raises:
        ImportError: without Matplotlib.
        OSError: if the picture cannot be written.
        ValueError: if the format is unknown.
    """
    try:
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "`mpidist timeline --plot` needs Matplotlib: pip install matplotlib"
        ) from error
    ranks = sorted(timeline.hosts)
    rows = {rank: row for row, rank in enumerate(ranks)}
    figure = Figure(figsize=(10, 1.6 + 0.4 * min(len(ranks), 32)), layout="constrained")
    axes: Any = figure.add_subplot()
    spans = [span for span in timeline.spans if span.kind != "section"]
    if len(spans) > _MOST_SPANS:  # the longest ones: the others have no width
        spans = sorted(spans, key=lambda span: -span.seconds)[:_MOST_SPANS]
    boxes: dict[str, list[Any]] = {
        color: [] for color in (_WORK, _CALL, _BEGUN, _WAIT, _FAILED)
    }
    divided = {span.rank for span in spans if span.begun}

    def height_of(span: Span) -> tuple[float, float]:
        above = _ABOVE if span.rank in divided else _WHOLE
        return _BELOW if span.begun else above

    for rank in ranks:
        own = [span for span in spans if span.rank == rank]
        if own:
            start, end = min(s.start for s in own), max(s.end for s in own)
            height = _ABOVE if rank in divided else _WHOLE
            boxes[_WORK].append(_box(start, end, rows[rank], height))
    for span in spans:
        row, middle = rows[span.rank], span.start + span.waited
        height = height_of(span)
        if span.kind == "waits for begun":
            middle = span.end
        boxes[_WAIT].append(_box(span.start, middle, row, height))
        color = _BEGUN if span.begun else _CALL
        color = _FAILED if span.raised else color
        boxes[color].append(_box(middle, span.end, row, height))
    for color, some in boxes.items():
        axes.add_collection(PolyCollection(some, facecolor=color, edgecolor="none"))
    for number, span in enumerate(largest_waits(timeline), 1):
        axes.annotate(
            str(number),
            (span.start + span.waited / 2, rows[span.rank] + sum(height_of(span)) / 2),
            ha="center",
            va="center",
        )
    axes.set_xlim(0, max((span.end for span in spans), default=1.0))
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlabel("time (s)")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    named = [(_WORK, "own work"), (_CALL, "in calls"), (_WAIT, "waiting")]
    if boxes[_BEGUN]:
        named.insert(2, (_BEGUN, "in calls that were begun"))
    if boxes[_FAILED]:
        named.append((_FAILED, "ended with an error"))
    figure.legend(
        handles=[Patch(color=color, label=label) for color, label in named],
        loc="outside upper right",
        ncols=len(named),
        frameon=False,
    )
    figure.savefig(path, dpi=150)


# The top and the bottom of what is drawn, from the middle of its row.
_WHOLE: Final = (-0.35, 0.35)
_ABOVE: Final = (-0.35, 0.08)
_BELOW: Final = (0.1, 0.35)


def _box(
    start: float, end: float, row: int, height: tuple[float, float]
) -> list[tuple[float, float]]:
    low, high = row + height[0], row + height[1]
    return [(start, low), (end, low), (end, high), (start, high)]
