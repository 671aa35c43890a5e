"""examples/notebook.ipynb: its cells print what it shows; and tracebacks in IPython."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap

import pytest
from launching import ROOT, plain_environment

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def ask(*arguments, **env):
    """Return what a Python prints, without MPI's variables."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**plain_environment(), "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
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


def shown_by_ipython(*before, **env):
    """Return the traceback that IPython shows for the cell, after other cells."""
    pytest.importorskip("IPython")
    cells = [*before, CELL]
    code = f"""
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance(colors="NoColor")
    for cell in {cells!r}:
        result = shell.run_cell(cell, store_history=True)
    assert result.error_in_exec is not None
    """
    return ask("-c", textwrap.dedent(code), **env)


def test_ipython_shows_the_frames_of_the_program():
    text = shown_by_ipython()
    assert "in program()" in text
    assert "in program.<locals>.step()" in text
    assert "CollectiveMismatchError" in text
    assert str(ROOT / "mpidist") not in text


def test_ipython_shows_all_frames_if_asked():
    assert str(ROOT / "mpidist") in shown_by_ipython(MPIDIST_DEBUG="1")


def test_a_handler_of_the_user_stays():
    text = shown_by_ipython(
        "get_ipython().set_custom_exc((Exception,), lambda *args, **kw: print('mine'))"
    )
    assert text.splitlines()[-1] == "mine"
