"""The layers of docs/architecture.md: what imports what, and who owns which library."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpidist

PACKAGE = Path(mpidist.__file__).parent
ROOT = PACKAGE.parent


def _read_layers() -> list[tuple[str, list[str]]]:
    """Return the table of docs/architecture.md: the rows, from the bottom to the top.

    A module imports only from rows before its own; a name that ends with "/" is a
    folder, of which the others see only what its __init__ gives.
    """
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = text.split("| layer | modules |\n| --- | --- |\n")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return [(title, re.findall(r"`([^`]+)`", names)) for title, names in rows]


LAYERS = _read_layers()
FOLDERS = {
    "_checkpoints": [
        ["_format"],
        ["_items", "_replace"],
        ["_job"],
        ["_checkpoint", "_reader"],
        ["_manager"],
        ["_preemption"],
        ["__init__"],
    ],
    "_bench": [
        ["units", "job", "shapes"],
        ["aims", "machine", "timing"],
        ["table"],
        ["session", "model"],
        ["calls", "collectives", "nests"],
        ["__init__"],
    ],
    "_cli": [
        ["_speaking"],
        ["_bench_command", "_info_command"],
        ["_check_command"],
        ["_main"],
        ["__init__"],
    ],
    "_native": [["__init__"]],
    "_engine": [
        ["buckets", "node"],
        ["nodes", "staging"],
        ["plans"],
        ["core_routes", "gather", "mpi_route"],
        ["header_route", "hierarchical_route"],
        ["device_routes"],
        ["__init__"],
    ],
    "_transports": [
        ["_compression", "_direct"],
        ["_shared", "_staged"],
        ["_nccl"],
        ["_devices"],
        ["__init__"],
    ],
    "testing": [
        ["_fixtures", "_world"],
        ["_communicator"],
        ["_group"],
        ["_run"],
        ["__init__"],
    ],
    "optimizers": [
        ["_arguments", "_clipping", "_schedules"],
        ["_reduction"],
        ["_optimizer"],
        ["_rules"],
        ["__init__"],
    ],
    "data": [
        ["_records", "_sharding", "_prefetch", "_blocks"],
        ["_stages"],
        ["_dataset"],
        ["_sources"],
        ["_feed"],
        ["_iterator", "_describe"],
        ["_distribute"],
        ["__init__"],
    ],
}
OWNERS = {
    "mpi4py": "_comm",
    "cupy": "_arrays",
    "cupyx": "_arrays",
    "cupy_backends": "_arrays",
    "optree": "_nest",
    "cloudpickle": "_commands",
    "ml_dtypes": None,  # a dtype of it is known by its name
}
NEEDED = {"numpy", "optree", "cloudpickle"}  # loaded by `import mpidist`


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module: its full name, and how it is imported."""

    name: str
    line: int
    for_types: bool  # under `if TYPE_CHECKING:`
    lazy: bool  # inside a function

    def __str__(self) -> str:
        return f"line {self.line}: {self.name}"


def imports_of(source: str, is_module: set[str]) -> list[Import]:
    """Return all imports in a source, also those in functions and by name."""
    found = []

    def visit(node: ast.AST, for_types: bool, lazy: bool) -> None:
        for name in _names_in(node, is_module):
            found.append(Import(name, node.lineno, for_types, lazy))  # noqa: PERF401
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith(
            "TYPE_CHECKING"
        ):
            for child in node.body:
                visit(child, True, lazy)
            for child in node.orelse:
                visit(child, for_types, lazy)
            return
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, for_types, lazy or inside)

    visit(ast.parse(source), False, False)
    return found


def _names_in(node: ast.AST, is_module: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: a relative import"
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            yield whole if whole in is_module else str(node.module)
    elif isinstance(node, ast.Call):
        # importlib.import_module("x"), __import__("x"), sys.modules["x"] is no import
        called = ast.unparse(node.func)
        if called.split(".")[-1] in ("import_module", "__import__"):
            name = node.args[0] if node.args else None
            assert isinstance(name, ast.Constant), (
                f"line {node.lineno}: a computed name"
            )
            yield str(name.value)


def module_name(path: Path) -> str:
    """Return ``mpidist._transports._direct`` for its file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
IMPORTS = {
    name: imports_of(path.read_text(encoding="utf-8"), set(FILES))
    for name, path in FILES.items()
}


def test_the_tables_list_every_file_once():
    listed = [name for _, names in LAYERS for name in names]
    in_folders = [
        f"{folder}/{name}"
        for folder, rows in FOLDERS.items()
        for row in rows
        for name in row
    ]
    assert len(listed) == len(set(listed))
    assert {n.rstrip("/") for n in listed if n.endswith("/")} == set(FOLDERS)
    files = [n for n in listed if not n.endswith("/")] + in_folders
    on_disk = [
        path.relative_to(PACKAGE).with_suffix("").as_posix() for path in FILES.values()
    ]
    assert sorted(files) == sorted(on_disk)


def outer_level(name: str) -> int:
    """Return the row of LAYERS that a full module name belongs to."""
    parts = name.split(".")
    first = parts[1] if len(parts) > 1 else "__init__"
    for level, (_, names) in enumerate(LAYERS):
        if first in names or f"{first}/" in names:
            return level
    raise AssertionError(f"{name} is in no layer")


EXTENSIONS = {"mpidist._native._core"}  # of C, in the folder that imports it


def violations(
    name: str, imports: list[Import], files: dict[str, Path]
) -> Iterator[str]:
    """Describe each import of the package that goes up, sideways, or into a folder."""
    folder = name.split(".")[1] if "." in name else ""
    for one in imports:
        if one.for_types or one.name.split(".")[0] != "mpidist":
            continue
        if one.name in EXTENSIONS and one.name.startswith(f"{name}."):
            continue
        if one.name not in files:
            yield f"{one}: no module of the package"
            continue
        target = one.name.split(".")
        if folder in FOLDERS and len(target) > 1 and target[1] == folder:
            own, others = (_inner_level(n) for n in (name, one.name))
            if others >= own:
                yield f"{one}: not below, in {folder}/"
        elif len(target) > 2:
            yield f"{one}: take it from mpidist.{target[1]}"
        elif outer_level(one.name) >= outer_level(name) and not (
            name == "mpidist" and one.name == "mpidist.experimental"
        ):
            yield f"{one}: not below"


def _inner_level(name: str) -> int:
    parts = name.split(".")
    inner = parts[2] if len(parts) > 2 else "__init__"
    return next(i for i, row in enumerate(FOLDERS[parts[1]]) if inner in row)


@pytest.mark.parametrize("name", FILES)
def test_a_module_imports_only_from_below(name):
    assert list(violations(name, IMPORTS[name], FILES)) == []


@pytest.mark.parametrize("name", FILES)
def test_a_foreign_library_has_one_owner(name):
    own = name.removeprefix("mpidist.")
    wrong = [
        f"{one} belongs to {OWNERS[library]}"
        for one in IMPORTS[name]
        if (library := one.name.split(".")[0]) in OWNERS and OWNERS[library] != own
    ]
    assert wrong == []


def test_owners_do_import_what_they_own():
    for library, owner in OWNERS.items():
        if owner is None or library == "cupy_backends":
            continue
        imported = {one.name.split(".")[0] for one in IMPORTS[f"mpidist.{owner}"]}
        assert library in imported, f"{owner} does not import {library} any more"


LAZY = ("mpi4py", "cupy", "cupyx")


def test_what_is_slow_to_import_is_imported_inside_functions():
    eager = [
        f"{name} {one}"
        for name, imports in IMPORTS.items()
        for one in imports
        if one.name.split(".")[0] in LAZY and not one.lazy
    ]
    assert eager == []


def test_no_other_library_is_imported():
    import sys

    allowed = set(sys.stdlib_module_names) | set(OWNERS) | NEEDED | {"mpidist"}
    others = {
        f"{name} {one}"
        for name, imports in IMPORTS.items()
        for one in imports
        if one.name.split(".")[0] not in allowed
    }
    assert others == set()


def test_every_module_of_the_table_exists():
    names = [name for _, row in LAYERS for name in row]
    assert len(names) == len(set(names)) > 30
    for name in names:
        assert (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file(), name


# --- the test itself --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source", "problems"),
    [
        ("_process", "from mpidist import _arrays", 0),
        ("_process", "from mpidist._process import watch", 1),
        ("_arrays", "from mpidist import _comm", 1),
        ("_arrays", "import mpidist._strategy", 1),
        ("_arrays", "def f():\n    from mpidist import _strategy", 1),
        (
            "_arrays",
            "def f():\n    import importlib as i\n    i.import_module('mpidist')",
            1,
        ),
        ("_arrays", "from mpidist import Variable", 1),
        ("_arrays", "from mpidist import _no_such_module", 1),
        ("_process", "from mpidist._transports._direct import DirectTransport", 1),
        ("_transports._staged", "from mpidist._transports._direct import X", 0),
        ("_transports._direct", "from mpidist._transports._staged import X", 1),
        ("_transports._direct", "from mpidist._transports import X", 1),
        (
            "_arrays",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from mpidist._strategy import Strategy",
            0,
        ),
        (
            "_arrays",
            "if TYPE_CHECKING:\n    pass\nelse:\n    from mpidist import _strategy",
            1,
        ),
    ],
)
def test_the_rules_themselves(name, source, problems):
    found = imports_of(source, set(FILES))
    assert len(list(violations(f"mpidist.{name}", found, FILES))) == problems
