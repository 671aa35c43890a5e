"""Sphinx: `sphinx-build -W docs docs/_build`, with the extra `docs`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mpidist

project = "mpidist"
author = "the mpidist developers"
version = release = mpidist.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

# Single backticks in docstrings are names.
default_role = "py:obj"
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"mpidist {release}"

# napoleon takes what is before a colon for a type: in the first line of a property's
# docstring, and in that of a section on what is returned. Types are in the signatures
# here, so it sees another character in its place.
COLON = "\ue000"


def hide_colons(app, what, name, obj, options, lines):
    for i, line in enumerate(lines):
        if what == "property" or (i and lines[i - 1].strip() == "Returns:"):
            lines[i] = line.replace(":", COLON)


def show_colons(app, what, name, obj, options, lines):
    lines[:] = [line.replace(COLON, ":") for line in lines]


def setup(app):
    app.connect("autodoc-process-docstring", hide_colons, priority=100)
    app.connect("autodoc-process-docstring", show_colons, priority=900)
