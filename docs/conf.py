"""Sphinx: `sphinx-build -W docs docs/_build`, with the extra `docs`; or launch/docs."""

import os
import re
import sys
from pathlib import Path

from sphinx.util.nodes import make_refnode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mpidist

project = "mpidist"
author = "the mpidist developers"
copyright = "2026, the mpidist developers"
version = release = mpidist.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

# Single backticks in docstrings are names.
default_role = "py:obj"
# One that names nothing is a warning (`resolve`, below). Of other packages no inventory
# is read, which would need the network.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:(?!obj).*", r".*"),  # types in signatures, each Python's in its own way
    (r"py:obj", r"(collections|glob|jax|numpy|mpi4py|os|torch|typing)(\..*)?"),
]
myst_heading_anchors = 3

# The same pages whether these are installed or not.
autodoc_mock_imports = ["torch", "jax"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"mpidist {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
# Of console blocks the commands are copied, without the prompt and the output.
copybutton_prompt_text = "$ "

# Where the site's pages and files come from: GitHub's workflows say it.
repository = os.environ.get("MPIDIST_REPOSITORY", "")
if not repository and "GITHUB_REPOSITORY" in os.environ:
    repository = "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}".format_map(os.environ)
if repository:
    html_theme_options = {
        "source_view_link": f"{repository}/blob/main/docs/{{filename}}",
        "source_edit_link": f"{repository}/edit/main/docs/{{filename}}",
        "footer_icons": [
            {"name": "Repository", "url": repository, "html": "Repository", "class": ""}
        ],
    }

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


def resolve(app, env, node, contnode):
    """Link a name of another class or module, if it is unambiguous."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].removesuffix("()")
    # 1: any object whose name ends so.
    found = env.domains["py"].find_obj(env, None, None, name, None, 1)
    if len(found) == 1:
        page, anchor = found[0][1].docname, found[0][1].node_id
        return make_refnode(app.builder, node["refdoc"], page, anchor, contnode, name)
    # Several may be meant, or one that is in the code and on no page: as it stands.
    return contnode if found or exists(name) else None


def exists(name):
    """Whether mpidist has what is written so: a module of it, or `Class.attribute`."""
    words = name.removeprefix("mpidist.").split(".")
    found = mpidist
    for word in words:
        if word in getattr(found, "__annotations__", ()):
            return word == words[-1]
        if not hasattr(found, word):
            return False
        found = getattr(found, word)
    return True


def put_readme(app, name, source):
    """Make README.md the front page: its links are from the folder above."""
    if name != "index":
        return
    readme = (Path(app.srcdir).parent / "README.md").read_text(encoding="utf-8")

    def link(match):
        text, target = match.groups()
        if target.startswith(("http", "#")):
            return match[0]
        page = target.removeprefix("docs/")
        if page != target:
            return f"[{text}]({page})"
        # Other files of the repository are not on this site.
        return f"[{text}]({repository}/blob/main/{target})" if repository else text

    readme = re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", link, readme)
    source[0] = source[0].replace("# mpidist\n", f"{readme}\n", 1)


def setup(app):
    app.connect("source-read", put_readme)
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-docstring", hide_colons, priority=100)
    app.connect("autodoc-process-docstring", show_colons, priority=900)
