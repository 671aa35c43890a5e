"""The fault matrix: what can go wrong, what then happens, and the test that shows it.

`docs/reliability.md` has these rows.
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


def table() -> str:
    """Return the matrix as a table in Markdown, faults that end alike in one row."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for case in sorted(CASES, key=lambda case: _KINDS.index(case.kind)):
        key = (case.kind, case.result, case.afterwards)
        alike.setdefault(key, []).append(case.fault)
    heads = ["kind", "fault, on one rank", "how it ends", "the strategy"]
    lines, latest = [heads, ["---"] * len(heads)], ""
    for (kind, result, afterwards), faults in alike.items():
        told = kind if kind != latest else ""
        lines.append([told, "; ".join(faults), result, afterwards])
        latest = kind
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


_KINDS = list(dict.fromkeys(case.kind for case in CASES))

if __name__ == "__main__":
    print(table(), end="")
