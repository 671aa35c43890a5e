"""Fills the pages on performance from docs/performance/*.json.

launch/performance calls it with the folder docs/. The pages are docs/performance.md and
docs/performance/tables.md. Between ``<!-- KIND: WORDS -->`` and
``<!-- end -->`` it puts what the marker asks for:

    table: NAME...        times of mpidist and ratios in all NAME.json, and the aims
    compare: NAME...      their ratios alone, if all are there, but for that of making
                          a strategy, which says little
    ratios: NAME...       the ratios of all NAME.json, a column for each job, if all
                          are there
    picture: FILE NAME... all_reduce of them, drawn to FILE.png
    facts: NAME...        machine and software of each, and what is the same once

NAME.json is what `mpidist bench --json` writes. Names without a file are left out of
the others; if none has one, what is there stays.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aims
import draw
import nodes

from mpidist._base.names import show_seconds
from mpidist._cli import bench_command
from mpidist._cli.measuring import show_size

MARKER = re.compile(
    r"(<!-- (table|compare|ratios|picture|facts): ([^>]*?) -->\n)(.*?)(<!-- end -->)",
    re.S,
)
PICTURES = "performance"  # the folder of results, as docs/performance.md links to it
NOISE = 0.3
STRATEGY = "making an MPIStrategy"
Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """Return the jobs in a file of `mpidist bench --json`."""
    whole = json.loads(path.read_text(encoding="utf-8"))
    if whole.get("version") != bench_command.VERSION:
        sys.exit(f"{path} was written by another version; run launch/performance")
    return list(whole.get("records", [whole]))


def aim_of(record: Record, row: dict[str, Any]) -> aims.Aim | None:
    """Return the aim of a row, or None."""
    ranks, nodes = record["ranks"], record["nodes"]
    cores = record["machine"]["cores"]
    return aims.aim_of(row["bench"], row["nbytes"] or 0, ranks, nodes, cores)


def cells_of(record: Record, row: dict[str, Any]) -> list[str]:
    """Return the time of mpidist, its ratio to raw, and the aim of a row."""
    aim = aim_of(record, row)
    raw, ours = row["raw"], row["ours"]
    missed = aim is not None and not aim.is_met(raw["median"], ours["median"])
    noisy = any(t["upper"] - t["lower"] > NOISE * t["median"] for t in (raw, ours))
    time = show_seconds(ours["median"]) + "~" * noisy
    return [time, f"{row['ratio']:.2f}{'*' * missed}", str(aim or "")]


def rows_of(records: Sequence[Record]) -> Iterator[tuple[str, str, list[list[str]]]]:
    """Yield the work and the size of each row, and its cells in each record."""
    rows: dict[tuple[str, int | None], list[list[str]]] = {}
    for i, record in enumerate(records):
        for row in record["rows"]:
            key = row["work"], row["nbytes"]
            cells = rows.setdefault(key, [[""] * 3 for _ in records])
            cells[i] = cells_of(record, row)
    for (work, nbytes), cells in rows.items():
        yield work, "" if nbytes is None else show_size(nbytes), cells


def in_markdown(heads: list[str], lines: list[list[str]]) -> str:
    """Return a table in Markdown, in which all but the first column are numbers."""
    marks = ["---", *["---:"] * (len(heads) - 1)]
    whole = [heads, marks, *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in whole) + "\n"


def table_of(records: Sequence[Record]) -> str:
    """Return a table in Markdown: time and ratio of each record, and the aim."""
    names = [record["software"]["mpi"] for record in records]
    heads = [cell for name in names for cell in (name, "ratio")]
    lines = []
    for work, size, cells in rows_of(records):
        aims_of_row = ", ".join(sorted({aim for *_, aim in cells} - {""}))
        times = [cell for one in cells for cell in one[:2]]
        lines.append([work, size, *times, aims_of_row])
    return in_markdown(["work", "bytes", *heads, "aim"], lines)


def comparison_of(names: Sequence[str], records: Sequence[Record]) -> str:
    """Return a table in Markdown: the ratio of each record, in a column for each."""
    lines = [
        [work, size, *(one[1] for one in cells)]
        for work, size, cells in rows_of(records)
        if work != STRATEGY
    ]
    return in_markdown(["work", "bytes", *names], lines)


def replacement(results: Path, kind: str, words: list[str]) -> str | None:
    """Return the text between two markers; None to leave it."""
    target = words.pop(0) if kind == "picture" else ""
    paths = [results / f"{name}.json" for name in words]
    there = [path for path in paths if path.exists()]
    if not there or (kind in ("ratios", "compare") and there != paths):
        return None
    records = [one for path in there for one in read_records(path)]
    if kind == "table":
        return table_of(records)
    if kind == "compare":
        return comparison_of(words, records)
    if kind == "picture":
        draw.all_reduce(records, results / f"{target}.png")
        return f"![all_reduce, {', '.join(words)}]({PICTURES}/{target}.png)\n"
    if kind == "ratios":
        text = nodes.side_by_side(records)
    else:
        texts = [bench_command.header(record) for record in records]
        notes = [note for record in records for note in record["notes"]]
        text = "\n".join(dict.fromkeys("\n".join([*texts, *notes]).splitlines()))
    return f"```text\n{text}\n```\n"


def main() -> None:
    docs = Path(sys.argv[1])
    results = docs / "performance"

    def fill(match: re.Match[str]) -> str:
        begin, kind, words, old, end = match.groups()
        text = replacement(results, kind, words.split())
        return f"{begin}{old if text is None else text}{end}"

    for page in (docs / "performance.md", results / "tables.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(MARKER.sub(fill, text), encoding="utf-8")


if __name__ == "__main__":
    main()
