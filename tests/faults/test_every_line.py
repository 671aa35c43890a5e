"""An exception at any line of a call is told to the other ranks at once.

Some lines here, spread over each call. All lines of all verbs: ``mpirun -n 2 python
tests/faults/every_line.py``.
"""

from __future__ import annotations

import sys

import pytest
from faults.every_line import GUESTS, KINDS, VERBS, inject, lines_of, new_program

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.core,
    # The hook that the fixture `quiet` sets is not asked by pytest before 8.4.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LINES = 4
# Longer than the limit of a test: a rank that is told only then fails.
DEADLINE = 200.0


@pytest.fixture(autouse=True)
def quiet(size, monkeypatch):
    if size != 2:
        pytest.skip("for two ranks")
    # An exception in a destructor is printed, and goes no further.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)


def numbers_of(count):
    """Return some of the numbers from 1 to count, spread evenly."""
    return sorted({1 + count * i // LINES for i in range(LINES)} | {count})


@pytest.mark.parametrize(
    "verb",
    [
        "merge_call",
        "begun",
        "optimizer",
        "reduce",
        "next",
        "save",
        "context",
        "read",
        "commit",
        "dataset",
        "values",
        pytest.param("torch", marks=pytest.mark.guests),
        pytest.param("torch overlap", marks=pytest.mark.guests),
    ],
)
def test_an_exception_at_any_line_is_told(verb, same_folder):
    if verb.startswith("torch"):
        pytest.importorskip("torch")
    victim = [*VERBS, *GUESTS].index(verb) % 2
    program = new_program(verb, str(same_folder), DEADLINE)
    count = lines_of(program, victim)
    assert count > 20
    for number in numbers_of(count):
        result = inject(program, victim, number, KINDS["SignalError"]("injected"))
        assert not result.problem, result
        if not result.usable:
            program = new_program(verb, str(same_folder), DEADLINE)
    program.strategy.close()


def test_a_restore_is_all_or_nothing_whatever_line_raises(same_folder):
    """Also where it leaves the strategy unusable: variables are old, or restored."""
    folder = str(same_folder)
    program = new_program("restore", folder, DEADLINE)
    count = lines_of(program, 1)
    for number in [*numbers_of(count), *range(count - 20, count)]:
        kind = KINDS["MemoryError" if number % 2 else "SignalError"]
        result = inject(program, 1, number, kind("injected"))
        assert not result.problem, result
        assert set(program.v.numpy()) in ({0.0}, {1.0})
        if not result.usable:
            program = new_program("restore", folder, DEADLINE)
    program.strategy.close()
