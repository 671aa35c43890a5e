"""The fault matrix: what can go wrong, what then happens, and the test that shows it.

`docs/reliability.md` has these rows; ``python -m tests.faults`` runs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Case(NamedTuple):
    """A fault.

    Attributes:
        kind: the part of the table that it is in.
        fault: what goes wrong, on one rank unless it says otherwise.
        result: how it ends on each rank.
        afterwards: what the strategy is good for: "usable", "unusable", "job ends".
        test: the test, as ``file::function``.
    """

    kind: str
    fault: str
    result: str
    afterwards: str
    test: str


def _read() -> list[Case]:
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    return [Case(*line.split(" | ")) for line in lines if not line.startswith("#")]


CASES = _read()


def table(verdicts: dict[str, dict[str, str]] | None = None) -> str:
    """Return the matrix as a table in Markdown.

    Args:
        verdicts: for each MPI the verdicts by test; None: without such columns, and
            with the faults of a kind that end alike in one row.
    """
    heads = ["kind", "fault, on one rank", "how it ends", "the strategy"]
    cases = sorted(CASES, key=lambda case: _KINDS.index(case.kind))
    rows: list[list[str]]
    if verdicts is None:
        alike: dict[tuple[str, str, str], list[str]] = {}
        for case in cases:
            key = (case.kind, case.result, case.afterwards)
            alike.setdefault(key, []).append(case.fault)
        rows, latest = [], ""
        for (kind, result, afterwards), faults in alike.items():
            told = kind if kind != latest else ""
            rows.append([told, "; ".join(faults), result, afterwards])
            latest = kind
    else:
        heads += verdicts
        rows = [
            [*case[:4], *(by.get(case.test, "not run") for by in verdicts.values())]
            for case in cases
        ]
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


_KINDS = list(dict.fromkeys(case.kind for case in CASES))

if __name__ == "__main__":
    print(table(), end="")
