"""examples/notebook.ipynb: its cells print what it shows; and tracebacks in IPython."""

from __future__ import annotations

import json
import re

import pytest
from launching import ROOT, plain_environment, run_alone

HERE = {"PYTHONPATH": str(ROOT)}
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def ask(*arguments):
    """Return what a Python prints, without MPI's variables."""
    done = run_alone(*arguments, base=plain_environment(), env=HERE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_cells_print_what_the_notebook_shows():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in code]
    shown = ["".join(x["text"]) for cell in code for x in cell["outputs"]]
    assert len(shown) >= 3
    texts = (ask("-c", "\n".join(sources)), "".join(shown))
    told, expected = (re.sub(r"\(at \S+ in step\)", "", text) for text in texts)
    assert told == expected


CELL = """
import numpy as np, mpidist
def program():
    strategy = mpidist.MPIStrategy()
    def step():
        size = 2 + strategy.replica_id
        return mpidist.get_replica_context().all_reduce("SUM", np.ones(size))
    return strategy.run(step)
mpidist.testing.run(2, program)
"""


# In one IPython: with a handler of the user's, without it, and with all frames.
SHELL = """
import os
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="NoColor")
set_handler = "get_ipython().set_custom_exc"
for first, debug in (
    (f"{set_handler}((Exception,), lambda *args, **kw: print('mine'))", ""),
    (f"{set_handler}((), None)", ""),
    ("", "1"),
):
    os.environ["MPIDIST_DEBUG"] = debug
    for cell in first, CELL:
        result = shell.run_cell(cell, store_history=True)
    assert result.error_in_exec is not None
    print("----- the next one")
"""


def test_tracebacks_in_ipython():
    pytest.importorskip("IPython")
    shown = ask("-c", SHELL.replace("CELL", repr(CELL)))
    of_user, text, whole, _ = shown.split("----- the next one\n")
    assert "in program()" in text
    assert "in program.<locals>.step()" in text
    assert "CollectiveMismatchError" in text
    assert str(ROOT / "mpidist") not in text
    assert str(ROOT / "mpidist") in whole
    assert of_user.splitlines()[-1] == "mine"
