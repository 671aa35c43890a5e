"""The programs of tests/conformance, under TensorFlow and under mpidist, side by side.

TensorFlow is asked from the Python that MPIDIST_TENSORFLOW_PYTHON names, by default
this one. Where it has no TensorFlow, that test is skipped; what TensorFlow gave on 3
replicas, when docs/conformance.md was written, is compared in any case.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter

import numpy as np
import pytest
from conformance import report, results, sides
from conformance.programs import PROGRAMS
from conformance.registry import Program, differs
from conformance.results import OnRank0, Own, Raised, Replicas, describe, equal, merge

CASES = [(n, name) for n in report.SIZES for name in PROGRAMS]
if not sides.has_tensorflow():
    reason = f"{sides.tensorflow_python()} has no TensorFlow"
    CASES = [pytest.param(0, "", marks=pytest.mark.skip(reason=reason))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a function that runs both sides once for each number of replicas."""
    made: report.Runs = {}

    def run(n):
        if n not in made:
            made.update(report.run_both([n], tmp_path_factory.mktemp(f"replicas{n}")))
        return made[n]

    return run


@pytest.mark.tensorflow
@pytest.mark.timeout(2 * sides.SECONDS)
@pytest.mark.parametrize(("n", "name"), CASES)
def test_program(runs, n, name):
    program = PROGRAMS[name]
    pair = runs(n)
    if report.verdict_of(program, n, pair) == "FAILED":
        pytest.fail(report.explain(program, n, pair), pytrace=False)


@pytest.mark.core
@pytest.mark.timeout(sides.SECONDS)
def test_programs_against_what_tensorflow_gave(tmp_path):
    """Without TensorFlow: all programs on 3 ranks, against the recorded results."""
    n = report.RECORDED_SIZE
    pair = (sides.read(report.RECORDED), sides.run_mpidist(n, tmp_path))
    assert list(pair[0].results) == list(PROGRAMS), "run launch/conformance"
    failed = [
        report.explain(program, n, pair)
        for program in PROGRAMS.values()
        if report.verdict_of(program, n, pair) == "FAILED"
    ]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)


# --- the programs ---------------------------------------------------------------------


def test_there_are_programs_about_everything():
    sections = Counter(program.section for program in PROGRAMS.values())
    assert len(PROGRAMS) >= 40
    assert min(sections.values()) >= 5
    for program in PROGRAMS.values():
        assert program.what.endswith((".", "?")), program.name
        if program.difference is not None:
            assert program.difference.reason.endswith((".", ")")), program.name


def test_the_page_is_about_these_programs():
    """docs/conformance.md was written after the last change of the programs."""
    page = report.PAGE.read_text(encoding="utf-8")
    for section, programs in report.programs_by_section().items():
        shown = []
        different = [p.name for p in programs if p.difference is not None]
        equal, number = len(programs) - len(different), len(programs)
        title = f"## {section}: {equal} of {number} equal\n"
        if title in page:
            part = page.split(title)[1].split("\n## ")[0]
            for line in re.findall(r"^- ((?:`\w+`(?:, )?)+): ", part, re.M):
                shown += re.findall(r"`(\w+)`", line)
        else:
            assert f" All equal: {section} ({number})." in page
        assert sorted(shown) == sorted(different), section
    equal = sum(p.difference is None for p in PROGRAMS.values())
    number = len(PROGRAMS)
    text = (
        f"{number} programs: {equal} equal, {number - equal} differ on purpose, 0 fail."
    )
    assert text in page
    assert "**fails**" not in page
    for program in PROGRAMS.values():
        if program.difference is not None:
            assert program.difference.reason in page, program.name


# --- what compares them ---------------------------------------------------------------

F32 = np.float32([1, 2])


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (F32, F32 + np.float32(1e-7), True),
        (F32, F32 + np.float32(1e-3), False),
        (F32, F32.astype(np.float64), False),
        (F32, F32[None], False),
        (np.float64(1), np.float64(1) + 1e-9, False),
        (np.float32([np.nan, np.inf]), np.float32([np.nan, np.inf]), True),
        (np.float32([np.nan, np.inf]), np.float32([np.nan, -np.inf]), False),
        (np.float32([np.inf]), np.float32([1]), False),
        (np.complex64(1 + 2j), np.complex64(1 + 2j), True),
        (np.complex64(1 + 2j), np.complex64(1 - 2j), False),
        (np.array([True]), np.array([1]), False),
        (3, np.int32(3), True),
        (3.0, np.float32(3), True),
        (3, 4, False),
        (3, np.int32([3]), False),
        (True, True, True),
        (True, 1, False),
        ("text", "text", True),
        ("text", None, False),
        ([1, 2], [1, 2], True),
        ([1, 2], (1, 2), False),
        ([1, 2], [1], False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"b": 1}, False),
        (Replicas([1, 2]), Replicas([1, 2]), True),
        (Replicas([1, 2]), Replicas([2, 1]), False),
        (Replicas([1]), [1], False),
        (Raised("ValueError"), Raised("ValueError"), True),
        (Raised("ValueError"), Raised("TypeError"), False),
        (Raised("ValueError"), Raised.of(UnicodeError()), True),
        (Raised.of(UnicodeError()), Raised("ValueError"), False),
        (Raised.of(ValueError("a b"), "A"), Raised.of(ValueError("b a"), "A"), True),
        (Raised.of(ValueError("a b"), "a"), Raised.of(ValueError("c"), "a"), False),
        (
            Raised.of(ValueError(), uncaught=True),
            Raised.of(ValueError(), uncaught=True),
            False,
        ),
    ],
)
def test_equal(a, b, same):
    assert equal(describe(a), describe(b)) is same


def test_merge():
    ranks = [describe([Own(i), OnRank0(i), "same", F32]) for i in range(3)]
    expected = describe([Replicas([0, 1, 2]), 0, "same", F32])
    assert merge(ranks) == expected


def test_merge_of_what_should_be_the_same():
    merged = merge([describe({"a": i, "b": 1}) for i in range(2)])
    assert merged["dict"]["b"] == describe(1)
    assert merged["dict"]["a"] == {"ranks": [describe(0), describe(1)]}
    assert "the ranks differ" in results.show(merged)
    assert not equal(describe({"a": 0, "b": 1}), merged)


def _program(difference=None):
    return Program("A section", "name", "What it does.", lambda d: None, difference)


def test_judge():
    one, two = describe(1), describe(2)
    assert report.judge(_program(), 2, one, one) == "equal"
    assert report.judge(_program(), 2, one, two) == "FAILED"
    declared = _program(differs("Why.", tensorflow=lambda n: n - 1, mpidist=2))
    assert report.judge(declared, 2, one, two) == "on purpose"
    assert report.judge(declared, 2, one, one) == "FAILED"
    assert report.judge(declared, 2, two, two) == "FAILED"
    assert report.judge(declared, 3, one, two) == "FAILED"
    alike = _program(differs("Why.", tensorflow=1, mpidist=1))
    assert report.judge(alike, 2, one, one) == "FAILED"
    ended = describe(Raised.of(ValueError(), uncaught=True))
    expected = _program(differs("Why.", tensorflow=Raised("ValueError"), mpidist=2))
    assert report.judge(expected, 2, ended, two) == "FAILED"


def test_explain_and_page_of_a_failure(monkeypatch):
    program = _program(differs("Why it is so.", tensorflow=1, mpidist=F32))
    monkeypatch.setattr(report, "PROGRAMS", {"name": program})
    runs = {
        2: (
            sides.Run("9.9", {"name": describe(1)}, {}),
            sides.Run("8.8", {"name": describe(F32)}, {"name": ["KeyError: 'x'"]}),
        ),
        3: (sides.Run("9.9", {}, {}), sides.Run("8.8", {"name": describe(F32)}, {})),
    }
    page = report.page_of(runs, datetime.date(2025, 1, 2))
    assert "Results of 2025-01-02, with TensorFlow 9.9 and mpidist 8.8:" in page
    assert "1 programs: 0 equal, 0 differ on purpose, 1 fail.\n" in page
    assert "## A section: 0 of 1 equal\n" in page
    assert "**fails**: `name`." in page
    assert "- `name`: Why it is so. (`1`; `[1, 2]`)" in page
    text = report.explain(program, 3, runs[3])
    assert "no result" in text
    assert "KeyError" in report.explain(program, 2, runs[2])
