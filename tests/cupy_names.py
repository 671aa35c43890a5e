"""Which names of CuPy the library uses, and how it calls them: read from its sources.

`uses` follows what is CuPy, or is made by it, through names and attributes: modules
(``sys.modules["cupy"]``, `backend.module_of`, ...), streams, events and communicators.
Arrays can be anything in Python, so of them all attribute names count that NumPy's
arrays have too (`array_attributes`).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

import mpidist

PACKAGE = pathlib.Path(mpidist.__file__).parent
_MAKERS = {
    "array_module": "cupy",
    "current_stream": "cupy.cuda.Stream",
    "module_of": "cupy",
    "nccl_module": "cupy.cuda.nccl",
    "new_event": "cupy.cuda.Event",
}
_GIVES = {
    "cupy.cuda.Stream.record": "cupy.cuda.Event",
    "cupy.cuda.get_current_stream": "cupy.cuda.Stream",
    "cupy.ndarray.data": "cupy.cuda.MemoryPointer",
    "cupy.ndarray.device": "cupy.cuda.Device",
}
# What parameters are, by their names, in these modules; arrays only in the first.
_MODULES = (
    "_base/backend.py",
    "_collectives/nccl.py",
    "_collectives/staged.py",
)
_PARAMETERS = {
    "communicator": "cupy.cuda.nccl.NcclCommunicator",
    "nccl": "cupy.cuda.nccl",
    "near": "cupy.ndarray",
    "stream": "cupy.cuda.Stream",
    "xp": "cupy",
}
_ARRAYS = {"x": "cupy.ndarray", "target": "cupy.ndarray"}
_OF_CUPY = ("get", "set", "data", "device")  # of arrays: not of every dict, too
CLASSES = ("Stream", "Event", "Device", "NcclCommunicator", "ndarray", "MemoryPointer")


@dataclasses.dataclass(frozen=True)
class Use:
    """A name of CuPy, where it is used, and how it is called if it is."""

    path: str
    where: str
    positional: int = -1  # -1: it is not called
    keywords: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def _dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` of names and attributes; "" of anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return parts[0] if parts else ""
    return ".".join((node.id, *reversed(parts)))


class _Reader(ast.NodeVisitor):
    """Reads one module."""

    def __init__(self, where: str, tree: ast.Module) -> None:
        self.where = where
        self.uses: list[Use] = []
        self.names: dict[str, str] = {}
        self.attributes: dict[str, str] = {}
        self._lists: dict[str, str | None] = {}
        self._called: dict[int, ast.Call] = {}
        for _ in range(2):  # attributes are used above where they are set, too
            self.uses.clear()
            self.visit(tree)

    # --- what is CuPy -----------------------------------------------------------------

    def path_of(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Subscript):
            return self._of_subscript(node)
        if isinstance(node, ast.IfExp):
            return self.path_of(node.body) or self.path_of(node.orelse)
        if isinstance(node, ast.Attribute):
            return self._of_attribute(node)
        return self._of_call(node) if isinstance(node, ast.Call) else None

    def _of_subscript(self, node: ast.Subscript) -> str | None:
        text = _dotted(node.value)
        if text == "sys.modules" and isinstance(node.slice, ast.Constant):
            name = str(node.slice.value)
            return name if name.partition(".")[0] in ("cupy", "cupyx") else None
        return self._lists.get(text)

    def _of_attribute(self, node: ast.Attribute) -> str | None:
        owner = self.path_of(node.value)
        if owner is None:
            return (
                _MAKERS.get(node.attr)
                if node.attr == "array_module"
                else (self.attributes.get(node.attr))
            )
        path = f"{owner}.{node.attr}"
        if owner != "cupy.ndarray" or node.attr in ("flags", *_OF_CUPY):
            return _GIVES.get(path, path)
        return None  # of NumPy, as a dtype, or another array

    def _of_call(self, node: ast.Call) -> str | None:
        text = _dotted(node.func)
        first = node.args[0] if node.args else None
        if text in ("sys.modules.get", "importlib.import_module"):
            name = str(first.value) if isinstance(first, ast.Constant) else ""
            return name if name.partition(".")[0] in ("cupy", "cupyx") else None
        maker = _MAKERS.get(text.rpartition(".")[2])
        if maker is not None:
            return maker
        path = self.path_of(node.func)
        if path in _GIVES or path is None:
            return _GIVES.get(path or "")
        return path if path.rpartition(".")[2] in CLASSES else None

    # --- what is read -----------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] in ("cupy", "cupyx"):
                self.names[alias.asname or "cupy"] = alias.name

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = dict(self.names)
        known = _PARAMETERS if self.where in _MODULES else {}
        known = known | (_ARRAYS if self.where == "_base/backend.py" else {})
        for argument in (*node.args.args, *node.args.kwonlyargs):
            self.names.pop(argument.arg, None)
            if argument.arg in known:
                self.names[argument.arg] = known[argument.arg]
        self.generic_visit(node)
        self.names = before

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for one, value in pairs:
                self._bind(one, self.path_of(value))
        self.generic_visit(node)

    def _bind(self, target: ast.expr, path: str | None) -> None:
        if isinstance(target, ast.Name) and path is not None:
            self.names[target.id] = path
        if isinstance(target, ast.Attribute) and path is not None:
            self.attributes[target.attr] = path

    def visit_Call(self, node: ast.Call) -> None:
        self._called[id(node.func)] = node
        if _dotted(node.func) == "made.append":  # a list that threads share
            self._lists["made"] = self.path_of(node.args[0])
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = self.path_of(node.value)
        array = owner == "cupy.ndarray" and node.attr not in _OF_CUPY
        if owner is not None and not array:
            call = self._called.get(id(node))
            where = f"{self.where}:{node.lineno}"
            path = f"{owner}.{node.attr}"
            if call is None:
                self.uses.append(Use(path, where))
            else:
                words = tuple(str(k.arg) for k in call.keywords)
                self.uses.append(Use(path, where, len(call.args), words))
        self.generic_visit(node)


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


@functools.cache  # it takes half a second: not while tests are collected
def uses() -> list[Use]:
    """Return every use of a name of CuPy."""
    return [use for where, tree in modules() for use in _Reader(where, tree).uses]


def array_attributes() -> dict[str, str]:
    """Return the names of attributes that NumPy's arrays have, and a place of each."""
    found: dict[str, str] = {}
    for where, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or node.attr.startswith("_"):
                continue
            if hasattr(np.ndarray, node.attr):
                found.setdefault(node.attr, f"{where}:{node.lineno}")
    return found


def parse(text: str, method: bool = False) -> inspect.Signature:
    """Return a signature that tests/record_cupy.py wrote down; of Cython's, too."""
    found = []
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for part in re.split(r",\s*", text.strip()[1:-1]) if text != "()" else []:
        before, equals, _ = part.partition("=")
        name = before.split()[-1]
        if name == "/":
            continue
        if name == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        this = kind
        if name.startswith("*"):
            star = name.count("*")
            this = (
                inspect.Parameter.VAR_KEYWORD
                if star > 1
                else inspect.Parameter.VAR_POSITIONAL
            )
            kind = inspect.Parameter.KEYWORD_ONLY
        default = None if equals else inspect.Parameter.empty
        found.append(inspect.Parameter(name.lstrip("*"), this, default=default))
    return inspect.Signature(found[1:] if method else found)
