"""The rows of `mpidist bench`: as a table in a terminal, and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypedDict

from mpidist._bench.aims import Aim
from mpidist._bench.job import UsageError
from mpidist._bench.machine import MachineFacts, TransportFacts
from mpidist._bench.timing import Timing
from mpidist._bench.units import show_seconds, show_size

FORMAT: Final = "mpidist-bench"
VERSION: Final = 2
COLUMNS: Final = ("work", "bytes", "raw", "mpidist", "ratio", "aim")


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of work, by hand with mpi4py and by mpidist.

    Attributes:
        bench: the benchmark that made the row.
        work: what was done, such as "all_reduce" or "nest of ResNet-50".
        nbytes: the bytes that each rank contributes; None if the work has no size.
        raw: the time of the hand-written code.
        ours: the time of mpidist.
        aim: the most that ``ours`` should be; None if there is no aim.
    """

    bench: str
    work: str
    nbytes: int | None
    raw: Timing
    ours: Timing
    aim: Aim | None

    @property
    def ratio(self) -> float:
        """The time of mpidist divided by that of the hand-written code."""
        return self.ours.median / self.raw.median

    @property
    def is_met(self) -> bool | None:
        """Whether the aim is reached; None if there is none."""
        aim = self.aim
        return None if aim is None else aim.is_met(self.raw.median, self.ours.median)


class Facts(TypedDict):
    """Where and with what a record was made."""

    date: str
    ranks: int
    nodes: int
    crowded: bool
    machine: MachineFacts
    software: dict[str, str]
    transports: dict[str, TransportFacts]
    environment: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Record:
    """A run of ``mpidist bench``.

    Attributes:
        facts: machine, software, ranks, transports and date.
        rows: the rows of all benchmarks.
        notes: remarks for the reader, such as what was left out.
    """

    facts: Facts
    rows: list[Row]
    notes: list[str]

    def to_json(self) -> str:
        """Return the record as JSON, ratios included; times are in seconds."""
        rows = [
            {**dataclasses.asdict(one), "ratio": one.ratio, "is_met": one.is_met}
            for one in self.rows
        ]
        head = {"format": FORMAT, "version": VERSION, "unit": "seconds"}
        whole = {**head, **self.facts, "notes": self.notes, "rows": rows}
        return json.dumps(whole, indent=1) + "\n"


def read_record(path: str) -> Record:
    """Read what `Record.to_json` wrote.

    Raises:
        UsageError: if the file cannot be read, or has other contents.
    """
    try:
        whole = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise UsageError(f"{path} is not what `mpidist bench --json` writes")
    if whole.get("version") != VERSION:
        raise UsageError(
            f"{path} has version {whole.get('version')} of the format; this mpidist "
            f"reads version {VERSION}"
        )
    try:
        rows = [_row_from(row) for row in whole.pop("rows")]
        notes = list(whole.pop("notes"))
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is damaged: {error!r}") from None
    facts: Any = dict(whole)  # what else is in the file
    for key in ("format", "version", "unit"):
        facts.pop(key, None)
    return Record(facts, rows, notes)


def _row_from(row: Any) -> Row:
    """Return the row that a JSON object describes."""
    aim = None if row["aim"] is None else Aim(**row["aim"])
    times = Timing(**row["raw"]), Timing(**row["ours"])
    return Row(row["bench"], row["work"], row["nbytes"], *times, aim)


def text_of(record: Record) -> str:
    """Return a record as text: where it was made, the table, notes."""
    table = [list(COLUMNS), *(cells_of(row) for row in record.rows)]
    notes = ["Medians of alternating samples; of each, the slowest rank's time."]
    if any(one.is_met is False for one in record.rows):
        notes.append("*: the aim is not reached.")
    if any(one.raw.is_noisy or one.ours.is_noisy for one in record.rows):
        notes.append("~: the quartiles are more than 30% of the median apart.")
    parts = [header_of(record.facts), align(table, 1), "\n".join(notes + record.notes)]
    return "\n\n".join(parts) + "\n"


def cells_of(row: Row) -> list[str]:
    """Return the cells of a row, in the order of `COLUMNS`."""
    return [
        row.work,
        "" if row.nbytes is None else show_size(row.nbytes),
        show_seconds(row.raw.median) + "~" * row.raw.is_noisy,
        show_seconds(row.ours.median) + "~" * row.ours.is_noisy,
        f"{row.ratio:.2f}" + "*" * (row.is_met is False),
        "" if row.aim is None else str(row.aim),
    ]


def header_of(facts: Facts) -> str:
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


def align(rows: Sequence[Sequence[str]], heads: int) -> str:
    """Return rows in columns: the first left-aligned, the others right-aligned.

    Args:
        rows: the cells, with as many in each row.
        heads: the number of rows above the line.
    """
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
