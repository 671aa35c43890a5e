"""Records as tables: for a terminal, or in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mpidist._bench._results import COPY, Record, Result
from mpidist._bench._units import digits, show_seconds

_GIGA: Final = 1e9
_NOISE: Final = 0.3  # of the median, between the quartiles
_TITLES: Final = {
    "all_reduce": "all_reduce: the sum of one contiguous float32 array",
    "nest": "nest: the sum of a list of gradients, a float32 array each",
    "gather": "gather: float32 arrays of all ranks, concatenated on all",
    "merge": "merge: small calls beside those of MPI in brackets, and updates",
    "train": "train: steps per second, with ratios of time",
}

Row = list[str]


def text_of(record: Record) -> str:
    """Return all tables of a record, with what has to be known about them."""
    parts = [header_of(record.facts)]
    for bench in _benches(record.results):
        results = [one for one in record.results if one.bench == bench]
        rows = _rows(bench, results)
        title = f"{_TITLES[bench]} (ratio: to {results[0].baseline})"
        parts.append(f"{title}\n{align(rows, heads=2)}")
    notes = [_legend(record.results), *record.notes]
    parts.append("\n".join(note for note in notes if note))
    return "\n\n".join(parts) + "\n"


def markdown_of(record: Record, bench: str) -> str:
    """Return the table of one benchmark in Markdown; nothing if it was not run."""
    results = [one for one in record.results if one.bench == bench]
    if not results:
        return ""
    above, below, *rows = _rows(bench, results)
    head = [f"{a} {b}".strip() for a, b in zip(above, below, strict=True)]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def header_of(facts: dict[str, Any]) -> str:
    """Return some lines about where and with what a record was made."""
    machine, software = facts["machine"], facts["software"]
    nodes = "" if facts["nodes"] == 1 else f" on {facts['nodes']} nodes"
    ranks = f"{facts['ranks']} rank{'s' * (facts['ranks'] != 1)}{nodes}"
    crowded = ", more ranks than cores" if facts["crowded"] else ""
    return (
        f"mpidist {software['mpidist']}: {ranks}, {machine['cores']} cores per node"
        f"{crowded}; {machine['processor']}\n"
        f"{software['mpi']}, mpi4py {software['mpi4py']}, NumPy {software['numpy']}, "
        f"Python {software['python']}; {facts['date']}\n"
        f"host arrays: {facts['transports']['host']['text']}"
    )


def align(rows: Sequence[Row], heads: int) -> str:
    """Return rows in columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(heads, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _benches(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(one.bench for one in results))


def _rows(bench: str, results: Sequence[Result]) -> list[Row]:
    """Return two rows of heads, and a row for each result."""
    names = list(dict.fromkeys(name for one in results for name in one.timings))
    above, below = [bench], [""]
    for name in names:
        first, second = _head(name)
        above.append(first)
        below.append(second)
        if any(name in one.ours for one in results):
            above.append("")
            below.append("ratio")
    sized = bench in ("all_reduce", "nest", "gather")
    if sized:
        above += ["GB/s", "of copy"]
        below += ["mpidist", "limit"]
    rows = []
    for one in results:
        row = [one.case]
        for name in names:
            there = name in one.timings
            row.append(_cell(one, name) if there else "")
            if any(name in other.ours for other in results):
                row.append(f"{one.ratio(name):.2f}" if there else "")
        if sized:
            rate, share = one.bytes_per_second("mpidist"), one.share_of_copy("mpidist")
            row.append("" if rate is None else digits(rate / _GIGA))
            row.append("" if share is None else f"{share:.0%}")
        rows.append(row)
    return [above, below, *rows]


def _head(name: str) -> tuple[str, str]:
    for separator in (", ", " "):
        first, found, second = name.partition(separator)
        if found:
            return first, second
    return name, ""


def _cell(result: Result, name: str) -> str:
    timing = result.timings[name]
    if result.bench == "train":
        text = digits(1 / timing.median)
    else:
        text = show_seconds(timing.median)
    return text + ("~" if timing.upper - timing.lower > _NOISE * timing.median else "")


def _legend(results: Sequence[Result]) -> str:
    lines = [
        "Medians of samples that take turns; of each, the time of the slowest rank."
    ]
    if any(COPY in one.timings for one in results):
        lines.append(
            "of copy limit: how near to one copy of the bytes in memory, by all ranks "
            "at once (numpy.copyto)."
        )
    if any(
        t.upper - t.lower > _NOISE * t.median
        for one in results
        for t in one.timings.values()
    ):
        lines.append(
            f"~: the quartiles are more than {_NOISE:.0%} of the median apart."
        )
    return "\n".join(lines)
