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

# From the bottom to the top. A module imports only from rows before its own; a name
# that ends with "/" is a folder, of which the others see only what its __init__ gives.
LAYERS = [
    (
        "no MPI",
        [
            "_version",
            "_errors",
            "_options",
            "_board",
            "_pool",
            "_functions",
            "_holdings",
            "_mapping",
        ],
    ),
    ("headers by MPI", ["_headers"]),
    ("foreign libraries, and reports", ["_arrays", "_comm", "_nest", "_reports"]),
    (
        "agreement, dtypes, rows, moving a buffer",
        ["_guard", "_dtypes", "_sparse", "_transports/"],
    ),
    ("packing, how a job ends, trying MPI", ["_fusion", "_process", "_probe"]),
    (
        "the short way of an all-reduce, reducing arrays where they are, gathering",
        ["_lean", "_lean_direct", "_residents", "_gathering"],
    ),
    ("the verbs, and the stack of frames", ["_collectives", "_context"]),
    ("from a call to its verb, and values", ["_dispatch", "_values"]),
    ("when copies come together", ["_policies"]),
    ("variables", ["_variables"]),
    ("how values are reduced, proof of sync", ["_cross_device", "_consistency"]),
    ("updates, what commands are made of", ["_updates", "_commands"]),
    ("merge_call", ["_coordinator"]),
    ("replica functions", ["_replica"]),
    ("cross-replica verbs", ["_verbs"]),
    ("loops of steps, who is where", ["_multi_step", "_cluster"]),
    ("datasets", ["data/"]),
    ("the class that offers them", ["_extended"]),
    ("strategies", ["_strategy"]),
    ("losses and optimizers", ["_losses", "optimizers/"]),
    ("checkpoints", ["_checkpoints/"]),
    ("public names", ["experimental", "__init__"]),
    ("the benchmark, a user of them", ["_bench/"]),
    ("the command line", ["_cli/"]),
    ("python -m mpidist", ["__main__"]),
]
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
        ["_units", "_job", "_shapes"],
        ["_contest", "_machine", "_raw", "_torch"],
        ["_results"],
        ["_tables", "_session"],
        ["_moving", "_steps", "_model"],
        ["_run", "_picture"],
        ["__init__"],
    ],
    "_cli": [
        ["_speaking"],
        ["_bench_command", "_info_command"],
        ["_check_command"],
        ["_main"],
        ["__init__"],
    ],
    "_transports": [
        ["_arena", "_compression"],
        ["_direct", "_stream"],
        ["_across", "_shared", "_staged"],
        ["_hosting", "_nodes", "_resident"],
        ["_nccl"],
        ["_devices"],
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
    "torch": "_bench._torch",  # to compare with
    "matplotlib": "_bench._picture",
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


def violations(
    name: str, imports: list[Import], files: dict[str, Path]
) -> Iterator[str]:
    """Describe each import of the package that goes up, sideways, or into a folder."""
    folder = name.split(".")[1] if "." in name else ""
    for one in imports:
        if one.for_types or one.name.split(".")[0] != "mpidist":
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


LAZY = ("mpi4py", "cupy", "cupyx", "torch", "matplotlib")


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


def test_the_architecture_page_has_the_same_layers():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = re.search(r"^\| layer \|.*?(?=\n\n)", page, re.M | re.S)
    assert table is not None, "docs/architecture.md has no table of layers"
    rows = [row.split("|")[1:3] for row in table[0].splitlines()[2:]]
    shown = [
        (title.strip(), re.findall(r"`([^`]+)`", modules)) for title, modules in rows
    ]
    assert shown == [(title, list(names)) for title, names in LAYERS]


# --- the test itself --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source", "problems"),
    [
        ("_fusion", "from mpidist import _arrays", 0),
        ("_fusion", "from mpidist._fusion import Leaf", 1),
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
        ("_fusion", "from mpidist._transports._direct import DirectTransport", 1),
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
