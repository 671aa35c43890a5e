"""What was measured, as a record: to JSON and back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

from mpidist._bench._contest import Timing
from mpidist._bench._job import UsageError

FORMAT: Final = "mpidist-bench"
VERSION: Final = 1
COPY: Final = "memory copy"


@dataclasses.dataclass(frozen=True)
class Result:
    """One contest: a line of a table.

    Attributes:
        bench: all_reduce, nest, merge, gather or train.
        case: what was done, such as "64 KiB" or "ResNet-50".
        nbytes: what a rank puts in (gather: gets out), in bytes; None where size is
            not what counts.
        baseline: the contestant that ratios are to.
        ours: the contestants that are mpidist, whose ratios are shown.
        timings: of each contestant, by name.
        facts: more about the case, such as the number of tensors.
    """

    bench: str
    case: str
    nbytes: int | None
    baseline: str
    ours: tuple[str, ...]
    timings: dict[str, Timing]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def ratio(self, name: str) -> float:
        """Return the time of a contestant over that of the baseline."""
        return self.timings[name].median / self.timings[self.baseline].median

    def bytes_per_second(self, name: str) -> float | None:
        """Return the bytes of the case over the time of one call."""
        return None if self.nbytes is None else self.nbytes / self.timings[name].median

    def share_of_copy(self, name: str) -> float | None:
        """Return how near to one copy of the bytes in memory; None if not measured."""
        copy = self.timings.get(COPY)
        return None if copy is None else copy.median / self.timings[name].median


@dataclasses.dataclass(frozen=True)
class Record:
    """A run of ``mpidist bench``.

    Attributes:
        facts: machine, software, ranks, transports, date and options.
        results: of all contests.
        notes: what a reader has to know, such as what was left out.
    """

    facts: dict[str, Any]
    results: list[Result]
    notes: list[str]

    def to_json(self) -> str:
        """Return the record as JSON; ratios and rates are in it too."""
        results = []
        for one in self.results:
            row = dataclasses.asdict(one)
            for name, timing in row["timings"].items():
                timing["ratio"] = one.ratio(name)
                timing["bytes_per_second"] = one.bytes_per_second(name)
                timing["share_of_copy"] = one.share_of_copy(name)
            results.append(row)
        head = {"format": FORMAT, "version": VERSION, "unit": "seconds"}
        whole = {**head, **self.facts, "notes": self.notes, "results": results}
        return json.dumps(whole, indent=1) + "\n"


def read_record(path: str) -> Record:
    """Read what `Record.to_json` wrote.

    Raises:
        UsageError: for a file that can not be read, or is something else.
    """
    try:
        whole = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can not be read: {error}") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise UsageError(f"{path} is not what `mpidist bench --json` writes")
    if whole.get("version") != VERSION:
        raise UsageError(
            f"{path} has version {whole.get('version')} of the format; this mpidist "
            f"reads version {VERSION}"
        )
    try:
        names = [field.name for field in dataclasses.fields(Timing)]
        results = [
            Result(
                **{
                    **row,
                    "ours": tuple(row["ours"]),
                    "timings": {
                        key: Timing(**{name: value[name] for name in names})
                        for key, value in row["timings"].items()
                    },
                }
            )
            for row in whole.pop("results")
        ]
        notes = list(whole.pop("notes"))
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is damaged: {error!r}") from None
    facts = {k: v for k, v in whole.items() if k not in ("format", "version", "unit")}
    return Record(facts, results, notes)
