"""The fault matrix: its tests exist, and docs/reliability.md has its rows."""

import ast

import pytest
from faults.matrix import CASES, table
from launching import ROOT


@pytest.mark.parametrize("test", sorted({case.test for case in CASES}))
def test_each_test_of_the_matrix_exists(test):
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert name in names


def test_the_page_has_the_matrix():
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert table() in page, "`python -m tests.faults.matrix` prints it"
