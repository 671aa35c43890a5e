"""Compares the two sides; writes docs/conformance.md."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from conformance import results, sides
from conformance.programs import PROGRAMS
from conformance.registry import Program
from conformance.results import Result

SIZES = (2, 3, 4)
MISSING = {"error": "no result", "bases": []}

Verdict = Literal["equal", "on purpose", "FAILED"]


def judge(program: Program, n: int, tensorflow: Result, mpidist: Result) -> Verdict:
    """Return whether the results are what the program declares."""
    if program.difference is None:
        return "equal" if results.equal(tensorflow, mpidist) else "FAILED"
    for expected, got in (
        (program.difference.tensorflow(n), tensorflow),
        (program.difference.mpidist(n), mpidist),
    ):
        if not results.equal(results.describe(expected), got, loose=True):
            return "FAILED"
    # If the two have become equal, then the declaration is out of date.
    return "FAILED" if results.equal(tensorflow, mpidist) else "on purpose"


def explain(program: Program, n: int, tensorflow: Result, mpidist: Result) -> str:
    """Return what was expected of a program and what it gave."""
    lines = [f"{program.name} on {n} replicas: {program.what}"]
    if program.difference is not None:
        for side in ("tensorflow", "mpidist"):
            expected = getattr(program.difference, side)(n)
            lines.append(
                f"  {side}, declared: {results.show(results.describe(expected))}"
            )
    lines.append(f"  TensorFlow: {results.show(tensorflow)}")
    lines.append(f"  mpidist:    {results.show(mpidist)}")
    return "\n".join(lines)


def run_both(
    n: int, folder: Path, names: Sequence[str] = ()
) -> tuple[sides.Run, sides.Run]:
    """Run programs on both sides."""
    return sides.run_tensorflow(n, folder, names), sides.run_mpidist(n, folder, names)


def compare(words: Sequence[str], sizes: Sequence[int], folder: Path | None) -> int:
    """Run both sides and print what is not as declared; return how many are not."""
    names = [
        p.name
        for p in PROGRAMS.values()
        if not words or any(w in p.name or w in p.section for w in words)
    ]
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        where = folder or Path(temporary)
        where.mkdir(parents=True, exist_ok=True)
        for n in sizes:
            left, right = run_both(n, where, names)
            counts: dict[str, int] = {}
            for name in names:
                program = PROGRAMS[name]
                pair = [r.results.get(name, MISSING) for r in (left, right)]
                verdict = judge(program, n, *pair)
                counts[verdict] = counts.get(verdict, 0) + 1
                if verdict == "FAILED":
                    wrong += 1
                    print(explain(program, n, *pair))
                    for side, run in (("TF", left), ("mpidist", right)):
                        for message in run.messages.get(name, []):
                            print(f"    {side}: {message:.300}")
            print(f"n={n}: {counts}")
    return min(wrong, 100)


def write(page: Path | None, folder: Path | None) -> None:
    raise NotImplementedError
