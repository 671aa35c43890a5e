"""The rooms of docs/architecture.md: what imports what, and who owns which library."""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpidist

PACKAGE = Path(mpidist.__file__).parent
ROOT = PACKAGE.parent


def _read_rooms() -> list[str]:
    """Return the first column of the table of docs/architecture.md, from the bottom up.

    A room is a folder of the package ("_base/") or a file in its top folder.
    """
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = text.split("| room | what is in it |\n| --- | --- |\n")[1].split("\n\n")[0]
    return [
        name.rstrip("/")
        for line in table.splitlines()
        for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])
    ]


ROOMS = _read_rooms()
OWNERS = {
    "mpi4py": "_mpi.library",
    "cupy": "_base.gpus",
    "cupyx": "_base.gpus",
    "cupy_backends": "_base.gpus",
    "optree": "_base.nest",
    "cloudpickle": "_merge.commands",
    "matplotlib": "_timeline.plot",
    "ml_dtypes": "_base.guests",
    "typing_extensions": "_base.types",
}
# Libraries whose users have a room; `guests` knows their arrays.
ROOM_OF = ("torch", "jax")
GUESTS = "mpidist._base.guests"
# Loaded by `import mpidist`.
NEEDED = {"numpy", "optree", "cloudpickle", "typing_extensions"}


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module: its full name, and how it is imported."""

    name: str
    line: int
    lazy: bool  # inside a function

    def __str__(self) -> str:
        return f"line {self.line}: {self.name}"


def imports_of(source: str, is_module: set[str]) -> list[Import]:
    """Return all imports in a source: also in functions, by name, and for types."""
    found = []

    def visit(node: ast.AST, lazy: bool) -> None:
        for name in _names_in(node, is_module):
            found.append(Import(name, node.lineno, lazy))  # noqa: PERF401
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, lazy or inside)

    visit(ast.parse(source), False)
    return found


IMPORTING = ("import_module", "__import__")


def _names_in(node: ast.AST, is_module: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: a relative import"
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            yield whole if whole in is_module else str(node.module)
    elif isinstance(node, ast.Call) and last_name(node.func) in IMPORTING:
        # importlib.import_module("x"), __import__("x"); sys.modules["x"] is no import
        name = node.args[0] if node.args else None
        assert isinstance(name, ast.Constant), f"line {node.lineno}: a computed name"
        yield str(name.value)


def last_name(node: ast.expr) -> str:
    """Return ``c`` for ``a.b.c``, and for ``c``: `ast.unparse` of all calls is slow."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def module_name(path: Path) -> str:
    """Return ``mpidist._collectives.staged`` for its file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache  # not while tests are collected, which each worker does
def imports_of_all() -> dict[str, list[Import]]:
    return {
        name: imports_of(path.read_text(encoding="utf-8"), set(FILES))
        for name, path in FILES.items()
    }


def room_of(name: str) -> str:
    """Return ``_base`` for ``mpidist._base.nest``, and ``__init__`` for ``mpidist``."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_the_table_lists_every_room_once():
    assert len(ROOMS) == len(set(ROOMS)) > 10
    assert sorted(ROOMS) == sorted({room_of(name) for name in FILES})


def test_every_room_has_tests_in_a_folder_of_its_name():
    # A folder tests/torch would be the module where torch is not installed.
    other = {"torch": "with_torch", "jax": "with_jax"}
    for room in ROOMS:
        if (PACKAGE / room).is_dir():
            tests = ROOT / "tests" / other.get(room, room)
            assert list(tests.glob("test_*.py")), tests


def test_no_folder_of_tests_has_the_name_of_a_mark():
    # pytest-mpi takes all tests in a folder "mpi" for marked, and skips them.
    folders = {path.parent.name for path in (ROOT / "tests").rglob("*.py")}
    assert not folders & {"mpi", "mpi_skip", "gpu", "core", "replicas"}
    # Nor of a library: `find_spec` would find it there.
    assert not folders & {"tensorflow", *OWNERS, *ROOM_OF}


EXTENSIONS = {"mpidist._native._core"}  # of C, in the folder that imports it


LAZY = ("mpi4py", "cupy", "cupyx", "secrets", "socket", "subprocess")
KNOWN = {*sys.stdlib_module_names, *OWNERS, *ROOM_OF, *NEEDED}


def violations(
    name: str, imports: list[Import], files: dict[str, Path]
) -> Iterator[str]:
    """Describe each import that a module may not have."""
    for one in imports:
        library = one.name.split(".")[0]
        owner = OWNERS.get(library)
        if library == "mpidist":
            yield from violations_of_order(name, one, files)
        elif library not in KNOWN:
            yield f"{one}: no library that mpidist uses"
        elif owner and name != f"mpidist.{owner}":
            yield f"{one} belongs to {owner}"
        elif library in ROOM_OF and room_of(name) != library and name != GUESTS:
            yield f"{one}: {library} is imported in its room"
        # `import mpidist` leaves out the command line.
        if library in LAZY and not one.lazy and room_of(name) != "_cli":
            yield f"{one} is slow to import: do it inside a function"


def violations_of_order(
    name: str, one: Import, files: dict[str, Path]
) -> Iterator[str]:
    """Describe an import of the package from a later room, or past an __init__."""
    room, target = room_of(name), room_of(one.name)
    if one.name in EXTENSIONS and one.name.startswith(f"{name}."):
        return
    if one.name not in files:
        yield f"{one}: no module of the package"
    elif target == room:
        return  # see test_inside_a_room_imports_form_no_circle
    elif ROOMS.index(target) >= ROOMS.index(room):
        yield f"{one}: {room} comes before {target}"
    elif one.name.split(".")[-1].startswith("_") and one.name.count(".") > 1:
        yield f"{one}: take it from mpidist.{target}"


def circle(imports: dict[str, list[Import]]) -> list[str]:
    """Return modules that import each other in a circle; an empty list if none do."""
    sorter = graphlib.TopologicalSorter(
        {
            name: [one.name for one in found if one.name in imports]
            for name, found in imports.items()
        }
    )
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_inside_a_room_imports_form_no_circle():
    for room in ROOMS:
        inside = {
            name: found
            for name, found in imports_of_all().items()
            if room_of(name) == room
        }
        assert circle(inside) == []


def test_a_module_imports_what_it_may():
    wrong = {
        name: found
        for name, imports in imports_of_all().items()
        if (found := list(violations(name, imports, FILES)))
    }
    assert wrong == {}


def test_owners_do_import_what_they_own():
    owners = {library: f"mpidist.{owner}" for library, owner in OWNERS.items()}
    del owners["cupy_backends"]
    for library, owner in [*owners.items(), *((x, GUESTS) for x in ROOM_OF)]:
        imported = {one.name.split(".")[0] for one in imports_of_all()[owner]}
        assert library in imported, f"{owner} does not import {library} any more"


# Of Python, NumPy, enumerations, named tuples, and mpi4py, whose names begin so.
NOT_PRIVATE = {"_current_frames", "_exit", "_getframe", "_name_", "_replace"}
NOT_PRIVATE |= {"_addressof", "_handleof"}
# Constructors of public classes, for strategies only.
FOR_STRATEGIES = {"_of_batches", "_of_function", "_of_numpy"}


def foreign_privates(source: str) -> Iterator[str]:
    """Describe each private attribute of an object that another module defines."""
    tree = ast.parse(source)
    known = NOT_PRIVATE | FOR_STRATEGIES
    used = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            known.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            known.add(node.value)  # of __slots__
        elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            owner = ast.unparse(node.value)
            if owner in ("self", "cls", "super()"):
                if isinstance(node.ctx, ast.Store):
                    known.add(node.attr)
            else:
                used.append((owner, node))
    for owner, node in used:
        if node.attr not in known:
            yield f"line {node.lineno}: {owner}.{node.attr}"


def test_no_private_attribute_of_an_object_of_another_module():
    wrong = [
        f"{name} {text}"
        for name, path in FILES.items()
        for text in foreign_privates(path.read_text(encoding="utf-8"))
    ]
    assert wrong == []
    assert [*foreign_privates("def f(x):\n    return x._y")] == ["line 2: x._y"]


PICKLES = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib"}
READS = {"open", "os.open", "np.load", "numpy.load", "np.fromfile", "Path.read_bytes"}
SOCKETS = {"socket.socket", "socket.create_connection", "socket.socketpair"}


def test_what_reads_files_does_not_unpickle_and_nothing_opens_sockets():
    """As SECURITY.md says: pickles come from other ranks, and from them alone."""
    wrong = []
    looked_for = {call.split(".")[-1] for call in SOCKETS | READS}
    for name, path in FILES.items():
        source = path.read_text(encoding="utf-8")
        calls = {
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Call) and last_name(node.func) in looked_for
        }
        pickles = PICKLES & {one.name for one in imports_of_all()[name]}
        forbidden = SOCKETS | (READS if pickles else set())
        wrong += [f"{name}: {call}" for call in sorted(calls & forbidden)]
        if "allow_pickle=True" in source:
            wrong.append(f"{name}: allow_pickle=True")
    assert wrong == []


# --- the test itself --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source", "problems"),
    [
        ("_mpi.buffers", "from mpidist._base import backend", 0),
        ("_mpi.buffers", "from mpidist._base.gpus import Device", 0),
        ("_base.backend", "from mpidist._mpi import buffers", 1),
        ("_base.backend", "import mpidist._strategy.strategy", 1),
        ("_base.backend", "def f():\n    from mpidist._strategy import strategy", 1),
        (
            "_base.backend",
            "def f():\n    import importlib as i\n    i.import_module('mpidist')",
            1,
        ),
        ("_base.backend", "from mpidist import Variable", 1),
        ("_base.backend", "from mpidist import _no_such_module", 1),
        ("_strategy.strategy", "from mpidist.data import Dataset", 0),
        ("_strategy.strategy", "from mpidist.data._dataset import Dataset", 1),
        ("data._distributed", "from mpidist.data._dataset import Dataset", 0),
        ("_base.nest", "import optree", 0),
        ("_base.backend", "import optree", 1),
        ("_base.backend", "import requests", 1),
        ("torch._optimizer", "import torch", 0),
        ("_base.guests", "def f():\n    import torch", 0),
        ("_base.backend", "def f():\n    import torch", 1),
        ("_mpi.library", "def f():\n    import mpi4py", 0),
        ("_mpi.library", "import mpi4py", 1),
        ("_cli.bench", "import subprocess", 0),
        (
            "_base.backend",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from mpidist._strategy.strategy import Strategy",
            1,
        ),
        (
            "_base.backend",
            "if TYPE_CHECKING:\n    pass\nelse:\n    from mpidist import _strategy",
            1,
        ),
    ],
)
def test_the_rules_themselves(name, source, problems):
    found = imports_of(source, set(FILES))
    assert len(list(violations(f"mpidist.{name}", found, FILES))) == problems


def test_a_circle_is_found():
    sources = {
        "mpidist.a": "from mpidist import b",
        "mpidist.b": "def f():\n    from mpidist import c",
        "mpidist.c": "from mpidist.a import x",
    }
    found = {name: imports_of(text, set(sources)) for name, text in sources.items()}
    assert set(circle(found)) == set(sources)
    assert circle({**found, "mpidist.c": []}) == []
