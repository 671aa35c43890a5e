"""Compares the two sides, and writes docs/conformance.md."""

from __future__ import annotations

import datetime
import tempfile
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from conformance import results, sides
from conformance.programs import PROGRAMS
from conformance.registry import Program
from conformance.results import Result

SIZES = (2, 3, 4)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
# TensorFlow's results on some replicas, for machines that do not have it.
RECORDED_SIZE = 3
RECORDED = Path(__file__).resolve().parent / "recorded.jsonl"
NO_RESULT = {"error": "no result", "bases": [], "uncaught": True}
LONGEST = 40  # characters of a result in the report

Verdict = Literal["equal", "on purpose", "FAILED"]
Runs = dict[int, tuple[sides.Run, sides.Run]]


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


def explain(program: Program, n: int, runs: tuple[sides.Run, sides.Run]) -> str:
    """Return what was expected of a program, what it gave, and what it raised."""
    lines = [f"{program.name} on {n} replicas: {program.what}"]
    for side, run in zip(("tensorflow", "mpidist"), runs, strict=True):
        if program.difference is not None:
            expected = results.describe(getattr(program.difference, side)(n))
            lines.append(f"  {side}, declared: {results.show(expected)}")
        lines.append(f"  {side} gave: {results.show(result_of(run, program))}")
        raised = run.messages.get(program.name, [])
        lines += [f"    raised {message:.300}" for message in raised]
    return "\n".join(lines)


def result_of(run: sides.Run, program: Program) -> Result:
    """Return the result of a program; a failure if it has none."""
    return run.results.get(program.name, NO_RESULT)


def verdict_of(program: Program, n: int, runs: tuple[sides.Run, sides.Run]) -> Verdict:
    """Return what `judge` says of the results in two runs."""
    tensorflow, mpidist = (result_of(run, program) for run in runs)
    return judge(program, n, tensorflow, mpidist)


def run_both(
    sizes: Sequence[int], folder: Path | None, names: Sequence[str] = ()
) -> Runs:
    """Run programs on both sides, for several numbers of replicas.

    Args:
        sizes: the numbers of replicas.
        folder: where the results are kept; None: nowhere.
        names: of the programs; all by default.
    """
    with tempfile.TemporaryDirectory() as temporary:
        where = folder or Path(temporary)
        where.mkdir(parents=True, exist_ok=True)
        return {
            n: (
                sides.run_tensorflow(n, where, names),
                sides.run_mpidist(n, where, names),
            )
            for n in sizes
        }


def compare(words: Sequence[str], sizes: Sequence[int], folder: Path | None) -> int:
    """Run both sides; print what is not as declared; return how many are not.

    Args:
        words: run programs whose name or section has one of these; none: all.
        sizes: the numbers of replicas.
        folder: where the results are kept.
    """
    programs = [
        p
        for p in PROGRAMS.values()
        if not words or any(w in p.name or w in p.section for w in words)
    ]
    wrong = 0
    for n, runs in run_both(sizes, folder, [p.name for p in programs]).items():
        verdicts = {p.name: verdict_of(p, n, runs) for p in programs}
        for program in programs:
            if verdicts[program.name] == "FAILED":
                wrong += 1
                print(explain(program, n, runs))
        print(f"{n} replicas: {dict(Counter(verdicts.values()))}")
    return wrong


# --- the page -------------------------------------------------------------------------

INTRODUCTION = """\
# Conformance with TensorFlow

`launch/conformance` runs the programs in `tests/conformance/programs/` twice, under
`tf.distribute.MirroredStrategy` on logical CPU devices and under `MPIStrategy` on as
many ranks, and writes this page. Values (to rounding), dtypes (but for Python numbers),
shapes and classes of errors (or subclasses) are compared on each replica; one replica's
exception and the `ReplicaError` of the others are one error.

Each difference on purpose has its reason and, in brackets, if they are short, the
results of TensorFlow and of mpidist: those of the first program on 2 replicas, with a
bar between these.
"""


def write(page: Path | None, folder: Path | None) -> int:
    """Run everything; write the page, and TensorFlow's results on 3 replicas.

    Args:
        page: the page; None: docs/conformance.md.
        folder: where all results are kept.

    Returns:
        How many results are not as declared.
    """
    runs = run_both(SIZES, folder)
    sides.record(runs[RECORDED_SIZE][0], RECORDED_SIZE, RECORDED)
    failed = 0
    for program in PROGRAMS.values():
        for n, pair in runs.items():
            if verdict_of(program, n, pair) == "FAILED":
                failed += 1
                print(explain(program, n, pair))
    where = page or PAGE
    where.write_text(page_of(runs, datetime.date.today()), encoding="utf-8")
    print(f"wrote {where}: {failed} of {len(PROGRAMS) * len(runs)} not as declared")
    return failed


def page_of(runs: Runs, day: datetime.date) -> str:
    """Return the page about these runs."""
    versions = next(iter(runs.values()))
    parts = [
        INTRODUCTION,
        f"Results of {day.isoformat()}, with TensorFlow {versions[0].version} and "
        f"mpidist {versions[1].version}:\n",
        _totals(runs),
    ]
    for section in programs_by_section():
        parts += _section(section, runs)
    return "\n".join(parts)


def programs_by_section() -> dict[str, list[Program]]:
    found: dict[str, list[Program]] = {}
    for program in PROGRAMS.values():
        found.setdefault(program.section, []).append(program)
    return found


def _totals(runs: Runs) -> str:
    """Return how many programs there are, and the sections that have no own part."""
    total: Counter[str] = Counter()
    alike = []
    for section, programs in programs_by_section().items():
        worst = Counter(_worst(p, runs) for p in programs)
        total += worst
        if not worst.keys() - {"equal"}:
            alike.append(f"{section} ({len(programs)})")
    numbers = f"{total.total()} programs: {total['equal']} equal, "
    numbers += f"{total['on purpose']} differ on purpose, {total['FAILED']} fail."
    return numbers + "".join(f" All equal: {title}." for title in alike) + "\n"


def _worst(program: Program, runs: Runs) -> Verdict:
    verdicts = {verdict_of(program, n, pair) for n, pair in runs.items()}
    order: tuple[Verdict, ...] = ("FAILED", "on purpose", "equal")
    return next(verdict for verdict in order if verdict in verdicts)


def _section(section: str, runs: Runs) -> list[str]:
    programs = programs_by_section()[section]
    by_reason: dict[str, list[Program]] = {}
    failed = []
    for program in programs:
        if _worst(program, runs) == "FAILED":
            failed.append(program)
        if program.difference is not None:
            by_reason.setdefault(program.difference.reason, []).append(program)
    equal = sum(_worst(program, runs) == "equal" for program in programs)
    lines = [f"## {section}: {equal} of {len(programs)} equal\n"]
    lines += [_difference(reason, p, runs) for reason, p in by_reason.items()]
    if by_reason:
        lines.append("")
    if failed:
        names = ", ".join(f"`{program.name}`" for program in failed)
        lines.append(textwrap.fill(f"**fails**: {names}.", 88) + "\n")
    return lines if len(lines) > 1 else []


def _difference(reason: str, programs: list[Program], runs: Runs) -> str:
    """Return the names of programs, the reason, and the results of the first one."""
    names = ", ".join(f"`{program.name}`" for program in programs)
    pair = [result_of(run, programs[0]) for run in next(iter(runs.values()))]
    shown = [" ".join(results.show(x).replace("`", "'").split()) for x in pair]
    line = f"- {names}: {reason}"
    if max(map(len, shown)) <= LONGEST:
        line += f" (`{shown[0]}`; `{shown[1]}`)"
    return line
