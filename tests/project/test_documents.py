"""What the documents name is there: links, files, names, tables, the exceptions.

No test here uses the network: of links to other sites nothing is checked.
"""

from __future__ import annotations

import ast
import configparser
import importlib
import inspect
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import ROOT

import mpidist
from mpidist._base import environment as settings
from mpidist._collectives import dtype_table

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [page for page in DOCUMENTS if "_build" not in page.parts]
FOLDERS = (".ci", ".github", "docs", "examples", "launch", "mpidist")
FOLDERS += ("pytest_mpidist", "tests")
MODULES = (
    "",
    "cluster",
    "data",
    "elastic",
    "experimental",
    "losses",
    "metrics",
    "nest",
    "optimizers",
    "summary",
    "testing",
)  # the public ones

by_page = pytest.mark.parametrize(
    "page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT))
)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


# --- links ------------------------------------------------------------------------


def prose(text: str) -> str:
    """Return a page without its fenced blocks, where # begins a comment."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def targets_of(text: str) -> list[str]:
    """Return where the links of a page go: inline ones, references, HTML."""
    text = re.sub(r"`[^`\n]*`", "", prose(text))
    found = re.findall(r"\]\(<?([^)\s>]+)", text)
    found += re.findall(r"^ {0,3}\[[^\]]+\]: *<?([^\s>]+)", text, re.M)
    return found + re.findall(r"<\w+ [^>]*?(?:href|src)=\"([^\"]+)\"", text)


def anchors_of(text: str) -> set[str]:
    """Return the anchors that GitHub and MyST give to the headings of a page."""
    anchors: set[str] = set()
    for title in re.findall(r"^#+ +(.*?)[ #]*$", prose(text), re.M):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w -]", "", shown).lower().replace(" ", "-")
        number, anchor = 0, slug
        while anchor in anchors:
            number, anchor = number + 1, f"{slug}-{number + 1}"
        anchors.add(anchor)
    return anchors


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in targets_of(text):
        if re.match(r"(https?|mailto):", target):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        linked = text if path == page else ""
        if path != page and path.suffix == ".md" and path.is_file():
            linked = text_of(path)
        there = path == page or path.exists()
        if not there or (anchor and anchor not in anchors_of(linked)):
            broken.append(target)
    return broken


@by_page
def test_links_lead_somewhere(page):
    assert broken_links(page, text_of(page)) == []


@by_page
def test_tables_have_a_head(page):
    """What a blank line cuts off a table is shown as text."""
    starts = re.findall(r"(?:^|\n\n)(\|.*\n.*)", prose(text_of(page)))
    assert [start for start in starts if "\n| --- |" not in start] == []


# --- names and files --------------------------------------------------------------


def public_classes() -> dict[type, str]:
    """Return the classes that mpidist exports, each with its public name."""
    found: dict[type, str] = {}
    for name in MODULES:
        module = getattr(mpidist, name) if name else mpidist
        for attribute in module.__all__:
            value = getattr(module, attribute)
            if isinstance(value, type):
                path = f"mpidist.{name}.{attribute}" if name else attribute
                found.setdefault(value, path)
    return found


def test_the_api_pages_have_what_classes_inherit():
    """autodoc leaves out what comes from a base, which may have no entry of its own."""
    page = "\n".join(map(text_of, sorted((ROOT / "docs" / "api").glob("*.md"))))
    entries = re.findall(r"^\.\. autoclass:: (\w+).*\n((?: +:.*\n)*)", page, re.M)
    options = dict(entries)
    classes = public_classes()
    for public, name in classes.items():
        shown = {a for c in public.__mro__ if c in classes for a in vars(c)}
        hidden = {
            attribute
            for base in public.__mro__
            if base.__module__.startswith("mpidist") and base not in classes
            for attribute in vars(base)
            if attribute not in shown and not attribute.startswith("_")
        }
        if hidden:
            assert ":inherited-members:" in options[name.rpartition(".")[2]], (
                f"{name}: {hidden}"
            )


@by_page
def test_names_exist(page):
    for name in re.findall(r"`mpidist\.([A-Za-z_]\w*(?:\.\w+)*)", text_of(page)):
        found: Any = mpidist
        room, *rest = name.split(".")
        if room in ("torch", "jax"):  # not imported, since the libraries may be absent
            source = text_of(ROOT / "mpidist" / room / "__init__.py")
            assert not rest or re.search(rf" as {rest[0]}\b", source), f"mpidist.{name}"
            continue
        for part in name.split("."):
            assert hasattr(found, part), f"mpidist.{name} does not exist"
            found = getattr(found, part)


@by_page
def test_files_in_code_exist(page):
    text = text_of(page)
    folders = "docs|examples|launch|mpidist|pytest_mpidist|tests"
    for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_files_that_comments_name_exist():
    """Comments and messages send people to pages, scripts and tests by their path."""
    pattern = re.compile(
        r"(?<![\w./-])"
        r"((?:docs|examples|tests|(?:pytest_)?mpidist)/[\w/.-]*?\.(?:py|md|c|h)\b"
        r"|launch/[\w/.-]*\w)"
    )
    examples = {"tests/test_x.py", "examples/no_such_file.py", "launch/tset"}
    missing = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            kinds = ("", ".py", ".c", ".h", ".sh", ".sbatch", ".yml", ".toml")
            if not path.is_file() or path.suffix not in kinds:
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            for name in pattern.findall(text):
                if not (ROOT / name).exists() and name not in examples:
                    missing.add(f"{path.relative_to(ROOT)}: {name}")
    assert sorted(missing) == []


# --- what the pages say ---------------------------------------------------------------


def environment_variables() -> set[str]:
    """Return the variables that the package knows."""
    package = Path(mpidist.__file__).parent
    sources = (path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    return {name for text in sources for name in re.findall(r"MPIDIST_[A-Z_]+", text)}


def rows_of(page: Path, title: str) -> list[list[str]]:
    """Return the cells of the table whose first column has this title."""
    text = page.read_text(encoding="utf-8")
    table = re.search(rf"^\| {title} \|.*?(?=\n\n|\Z)", text, re.M | re.S)
    assert table is not None, f"{page.name} has no table of {title}"
    lines = table[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_environment_variables_are_on_their_page():
    _, _, *rows = rows_of(ROOT / "docs" / "settings.md", "variable")
    defaults = {row[0].strip("`"): row[1] for row in rows}
    assert set(defaults) == environment_variables()
    assert float(defaults["MPIDIST_TIMEOUT"]) == settings.DEFAULT_TIMEOUT_SECONDS
    assert float(defaults["MPIDIST_STALL_SECONDS"]) == settings.DEFAULT_STALL_SECONDS
    mebibytes = settings.DEFAULT_BYTES_PER_PACK / 2**20
    assert float(defaults["MPIDIST_FUSION_MB"]) == mebibytes
    environment = settings.read_environment()
    for name, value in (("ABORT", environment.abort), ("GUARD", environment.guard)):
        if f"MPIDIST_{name}" not in os.environ:
            assert bool(int(defaults[f"MPIDIST_{name}"])) is value


def test_the_dtypes_in_porting_are_those_of_the_library():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    head, _, *rows = rows_of(ROOT / "docs" / "porting.md", "dtype")
    ops = [mpidist.ReduceOp[name] for name in head[1:]]
    assert set(ops) == set(mpidist.ReduceOp)
    seen = set()
    for row in rows:
        for name in re.findall(r"`(\w+)`", row[0]):
            dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
            seen.add(dtype)
            for op, cell in zip(ops, row[1:], strict=True):
                if cell == "refused":
                    with pytest.raises(TypeError):
                        dtype_table.reduction(dtype, op, "test")
                else:
                    result = dtype if cell == "itself" else np.dtype(cell)
                    assert dtype_table.reduction(dtype, op, "test").result == result
    assert {np.dtype(code) for code in np.typecodes["AllInteger"]} <= seen
    assert {np.dtype(code) for code in np.typecodes["AllFloat"]} <= seen


def test_the_api_pages_have_all_public_names():
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    page = "\n".join(file.read_text(encoding="utf-8") for file in pages)
    shown: dict[str, list[str]] = {}
    module = ""
    for kind, name in re.findall(r"^\.\. (\w+):: ([\w.]+)(?:\(\))?$", page, re.M):
        if kind == "currentmodule":
            module = name
        elif kind != "automodule":
            shown.setdefault(module, []).append(name)
    assert sorted(shown["mpidist.experimental"]) == mpidist.experimental.__all__
    for name in ("losses", "metrics", "nest", "optimizers", "summary"):
        own = getattr(mpidist, name).__all__
        assert sorted(shown[f"mpidist.{name}"]) == sorted(own)
    own = set(mpidist.data.__all__) - set(mpidist.__all__)
    assert sorted(shown["mpidist.data"]) == sorted(own)
    own = set(mpidist.cluster.__all__) - set(mpidist.__all__)
    assert sorted(shown["mpidist.cluster"]) == sorted(own)
    assert sorted(shown["mpidist.testing"]) == sorted(mpidist.testing.__all__)
    assert sorted(shown["mpidist.elastic"]) == sorted(mpidist.elastic.__all__)
    modules = {x for x in mpidist.__all__ if inspect.ismodule(getattr(mpidist, x))}
    objects = set(mpidist.__all__) - {"__version__"} - modules
    assert sorted(shown["mpidist"]) == sorted(objects)


# --- docstrings -------------------------------------------------------------------


SOURCES = [
    path
    for name in ("mpidist", "pytest_mpidist")
    for path in (ROOT / name).rglob("*.py")
]


def test_there_are_no_doctests():
    """Examples in docstrings have values in comments; programs are in the guides."""
    found = [
        str(path.relative_to(ROOT))
        for path in [*SOURCES, *DOCUMENTS]
        if re.search(r"^ *>>> ", text_of(path), re.M)
    ]
    assert found == []


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield where each docstring is, and its text, of files that have an example."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(SOURCES):
        source = text_of(path)
        # At each collection of tests: to parse all takes as long as to import them.
        if not re.search(r"^ *Example.*::$", source, re.M):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                name = getattr(node, "name", "")
                yield f"{path.relative_to(ROOT)}: {name}", text


def examples() -> Iterator[Any]:
    """Yield the blocks that are indented after a line such as "Example::"."""
    pattern = r"^( *)Example(.*)::\n\n((?:\1 +.*\n|\n)+)"
    for where, text in docstrings():
        guest = re.search("mpidist/(torch|jax)/", where)
        for match in re.finditer(pattern, text + "\n", re.M):
            code = textwrap.dedent(match[3])
            sizes = (2,) if "two replicas" in match[2] else (1, 2, 3)
            marks = [pytest.mark.guests] if guest else []
            yield pytest.param(code, sizes, guest and guest[1], id=where, marks=marks)


class Comparisons(ast.NodeTransformer):
    """Replaces ``f(x)  # 2`` and ``return f(x)  # 2`` by comparisons of the value."""

    def __init__(self, code: str) -> None:
        self._lines = code.splitlines()

    def compared(self, node: ast.Expr | ast.Return) -> ast.AST:
        _, _, text = self._lines[node.end_lineno - 1].partition("  # ")
        if text:
            arguments = [node.value, ast.Constant(text)]
            node.value = ast.Call(ast.Name("compare", ast.Load()), arguments, [])
        return ast.fix_missing_locations(node)

    visit_Expr = visit_Return = compared  # noqa: N815


def compare(value: Any, text: str) -> Any:
    assert repr(value) == text
    return value


@pytest.mark.parametrize(("code", "sizes", "guest"), [*examples()])
def test_the_examples_in_docstrings_are_true(code, sizes, guest, tmp_path, monkeypatch):
    """On one, two and three replicas, or on two if the example says so."""
    names = {"mpidist": mpidist, "np": np, "compare": compare}
    if guest:
        pytest.importorskip(guest)
        names |= {guest: importlib.import_module(guest)}
        importlib.import_module(f"mpidist.{guest}")
    program = compile(Comparisons(code).visit(ast.parse(code)), "example", "exec")
    for size in sizes:
        (tmp_path / str(size)).mkdir()
        monkeypatch.chdir(tmp_path / str(size))
        if "testing.run(" in code:
            exec(program, dict(names))
            continue

        def replica() -> None:
            exec(program, names | {"strategy": mpidist.MPIStrategy()})

        mpidist.testing.run(size, replica)


# --- exceptions -------------------------------------------------------------------


def public_exceptions() -> dict[type[BaseException], str]:
    """Return the exceptions that mpidist exports, each with its public name."""
    return {c: n for c, n in public_classes().items() if issubclass(c, BaseException)}


def tree_of(names: dict[type[BaseException], str]) -> str:
    """Draw the exceptions below the built-in ones that they come from.

    Beside each is the first line of its docstring.
    """
    children: dict[type, list[type[BaseException]]] = {}
    for error in names:
        for base in error.__bases__:
            children.setdefault(base, []).append(error)
    roots = [base for base in children if base not in names]
    drawn: list[tuple[str, str]] = []

    def draw(error: type, before: str) -> None:
        below = sorted(children.get(error, []), key=lambda child: names[child])
        for child in below:
            branch, indent = (
                ("`-- ", "    ") if child is below[-1] else ("|-- ", "|   ")
            )
            first, *_ = (child.__doc__ or "").splitlines()
            drawn.append((before + branch + names[child], first.replace("`", "")))
            draw(child, before + indent)

    for root in sorted(roots, key=lambda root: (-len(children[root]), root.__name__)):
        drawn.append((root.__name__, ""))
        draw(root, "")
    width = max(len(left) for left, _ in drawn)
    return "".join(f"{left:{width}}  {right}".rstrip() + "\n" for left, right in drawn)


def test_mpidist_docs_prints_to_any_terminal():
    pages = [
        path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts
    ]
    assert [path for path in pages if not text_of(path).isascii()] == []


def test_the_tree_of_exceptions_is_that_of_the_code():
    """The page has what `tree_of` draws; after a change, paste what this test shows."""
    names = public_exceptions()
    # An exported error whose base is not exported would be a root of its own.
    for error in names:
        for base in error.__bases__:
            assert base in names or base.__module__ == "builtins", error
    shown = re.search(
        r"^```text\n(.*?)^```$", text_of(ROOT / "docs/errors.md"), re.M | re.S
    )
    assert shown is not None
    tree = tree_of(names)
    assert shown[1] == tree, f"docs/errors.md has to have:\n{tree}"


# --- tools ------------------------------------------------------------------------


def test_the_hooks_have_the_versions_of_the_extras():
    """At each commit run the tools that launch/test runs, from the same version on."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    text = setup["options"]["install_requires"]
    text += "".join(setup["options.extras_require"].values())
    known = {line.partition(";")[0].strip() for line in text.splitlines()}
    lists = re.findall(
        r"additional_dependencies:\s+\[(.*)\]",
        text_of(ROOT / ".pre-commit-config.yaml"),
    )
    assert lists
    for packages in lists:
        assert set(re.findall(r'"([^"]+)"', packages)) <= known
