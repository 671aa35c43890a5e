"""The fault matrix: its tests exist, and docs/reliability.md has its rows."""

import re

from faults.matrix import CASES, table
from launching import ROOT


def test_the_tests_of_the_matrix_exist():
    for test in {case.test for case in CASES}:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", text, re.M), test


def test_the_page_has_the_matrix():
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert table() in page, "`python -m tests.faults.matrix` prints it"
