"""Nested structures, with the rules of tf.nest; the only user of optree.

Nodes are lists, tuples, named tuples, deques, dicts and other standard mappings (with
children in the order of sorted keys), and classes derived from dict and UserDict, if
Class(mapping) makes an object like the first one that was seen; everything else,
including None and strings, is a leaf.

optree keeps the insertion order of an OrderedDict, which may differ between ranks; here
its keys are sorted as well, so that different leaves are never reduced together.
"""

from __future__ import annotations

import collections
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import optree

from mpidist._base.cache import Cache
from mpidist._base.types import Nest

_T = TypeVar("_T")
NAMESPACE: Final = "mpidist"
_Keys: TypeAlias = Any  # a tuple of the keys of a mapping
_Node: TypeAlias = tuple[list[Nest], _Keys, _Keys]  # children, keys, entries
LEAF: Final = "*"
"""The text of the structure of a leaf."""
_PLACE: Final = "\0"  # of a leaf in a text; no repr of a key contains it


class Structure:
    """The structure of a nest: hashable, and comparable between ranks by its text."""

    __slots__ = ("_order", "_parts", "_spec", "_text", "keyed")

    _order: list[int] | None
    _parts: list[str]
    _text: str

    def __init__(self, spec: optree.PyTreeSpec, equal: Structure | None = None) -> None:
        self._spec = spec
        if equal is not None:
            self._order, self._parts = equal._order, equal._parts
            self._text = equal._text
            return
        order: list[int] = []
        self._parts = _describe(spec, 0, order).split(_PLACE)
        self._text = LEAF.join(self._parts)
        identity = order == list(range(len(order)))
        self._order = None if identity else order
        self.keyed: bool = "{" in self._text

    @property
    def num_leaves(self) -> int:
        """The number of leaves."""
        return int(self._spec.num_leaves)

    @property
    def is_leaf(self) -> bool:
        """Whether it is a leaf alone."""
        return self._parts == ["", ""]

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Structure({self._text})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def render(self, leaves: list[str]) -> str:
        """Return the text of this structure with a text in the place of each leaf."""
        pieces = [self._parts[0]]
        for leaf, part in zip(leaves, self._parts[1:], strict=True):
            pieces += (leaf, part)
        return "".join(pieces)

    def each(self, function: Callable[[Nest], _T], leaves: Iterable[Nest]) -> list[_T]:
        """Return what a function returns for each of the leaves.

        Raises:
            TypeError, ValueError, OverflowError: those of the function, which then say
                which leaf it is, as ``['b'][0]``.
        """
        results: list[_T] = []
        for leaf in leaves:
            try:
                results.append(function(leaf))
            except (TypeError, ValueError, OverflowError) as error:
                number = len(results)
                number = number if self._order is None else self._order[number]
                place = "".join(f"[{key!r}]" for key in self._spec.paths()[number])
                error.args = (f"{error}{place and f' (it is the leaf {place})'}",)
                raise
        return results

    def sort(self, leaves: list[Nest]) -> list[Nest]:
        """Return leaves in this structure's order, given those in optree's order."""
        if self._order is None:
            return leaves
        return [leaves[i] for i in self._order]

    def unflatten(self, leaves: Iterable[Nest]) -> Nest:
        """Return a nest with these leaves."""
        if self._order is None:
            return self._spec.unflatten(leaves)
        unsorted: list[Nest] = [None] * len(self._order)
        for position, leaf in zip(self._order, leaves, strict=True):
            unsorted[position] = leaf
        return self._spec.unflatten(unsorted)


def flatten(
    tree: Nest, is_leaf: Callable[[Nest], bool] | None = None
) -> tuple[list[Nest], Structure]:
    """Return the leaves of a nest, and its structure.

    Args:
        tree: the nest.
        is_leaf: returns whether a node is to be a leaf; None: no node is.
    """
    if type(tree) in _PLAIN:
        return [tree], _LEAF_STRUCTURE
    try:
        leaves, spec = optree.tree_flatten(
            tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE
        )
    except RecursionError as error:
        if "flattening" not in str(error):  # there are too few frames left for a node
            raise
        raise endless(tree) from None
    if not _leaf_types.issuperset(map(type, leaves)) and _register_mappings(leaves):
        return flatten(tree, is_leaf)
    structure = _structures.get(spec)
    if structure is None:
        structure = _structures[spec] = Structure(spec)
    elif structure.keyed:  # specs are equal in whatever order dicts have their keys
        structure = Structure(spec, structure)
    return leaves if structure._order is None else structure.sort(leaves), structure


def endless(tree: Nest) -> ValueError:
    """Return the error for a nest at which Python raised a RecursionError."""
    return ValueError(
        f"expected a nest, got a {type(tree).__name__} that contains itself, or is "
        "too deep; leave the part out that leads back to it"
    )


def map_structure(
    function: Callable[..., Nest],
    tree: Nest,
    *others: Nest,
    is_leaf: Callable[[Nest], bool] | None = None,
) -> Nest:
    """Apply ``function`` to the leaves of nests of one structure.

    Raises:
        ValueError: if the structures differ.
    """
    leaves, structure = flatten(tree, is_leaf)
    columns = [leaves]
    for other in others:
        more, its_structure = flatten(other, is_leaf)
        if its_structure != structure:
            raise ValueError(
                f"expected nests of the same structure, got {structure} and "
                f"{its_structure}"
            )
        columns.append(more)
    return structure.unflatten([function(*row) for row in zip(*columns, strict=True)])


def parts_of(container: Nest) -> dict[Any, Nest] | None:
    """Return what is directly in a mapping, list, tuple or deque; None for a leaf.

    By key, in the order of their leaves; or by number.
    """
    if isinstance(container, Mapping):
        return {key: container[key] for key in _in_order(container)}
    if isinstance(container, (list, tuple, collections.deque)):
        return dict(enumerate(container))
    return None


def with_items(mapping: Nest, items: dict[Any, Nest]) -> Nest:
    """Return items in an object like a mapping; as a dict if its class lacks that."""
    if isinstance(mapping, collections.defaultdict):
        return collections.defaultdict(mapping.default_factory, items)
    return type(mapping)(items) if _is_made_of_items(mapping) else items


# The most frequent leaves, which are not nodes whatever is registered.
_PLAIN: Final = frozenset(
    [np.ndarray, np.float32, np.float64, int, float, bool, str, type(None)]
)
# A training loop has a few structures; the limit is for programs that make new ones
# without end.
_MOST_STRUCTURES: Final = 1024
_MOST_TYPES: Final = 1024
_structures: Cache[optree.PyTreeSpec, Structure] = Cache(_MOST_STRUCTURES)


def _describe(spec: optree.PyTreeSpec, first: int, order: list[int]) -> str:
    """Return the canonical text of ``spec``; append its leaf numbers to order."""
    if spec.is_leaf():
        order.append(first)
        return _PLACE
    rows: list[tuple[Any, optree.PyTreeSpec, int]] = []
    for key, child in zip(spec.entries(), spec.children(), strict=True):
        rows.append((key, child, first))
        first += child.num_leaves
    kind: Any = spec.type  # not None, as for leaves
    if issubclass(kind, dict) or kind in _mappings:
        return _describe_mapping(kind, {row[0]: row for row in rows}, order)
    parts = [_describe(child, start, order) for _, child, start in rows]
    if kind is list:
        return f"[{', '.join(parts)}]"
    if kind is tuple:
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    fields = getattr(kind, "_fields", None)
    if fields is not None:
        parts = [f"{f}={p}" for f, p in zip(fields, parts, strict=True)]
    return f"{kind.__name__}({', '.join(parts)})"


def _describe_mapping(
    kind: type, rows: dict[Any, tuple[Any, optree.PyTreeSpec, int]], order: list[int]
) -> str:
    parts = [
        f"{_fixed(k)!r}: {_describe(*rows[k][1:], order)}" for k in _in_order(rows)
    ]
    return f"{'' if kind is dict else kind.__name__}{{{', '.join(parts)}}}"


def _in_order(keys: Iterable[Any]) -> list[Any]:
    """Sort keys as optree does: by type first; by their texts if they have no order."""
    try:
        return sorted(keys, key=lambda key: (type(key).__qualname__, _fixed(key)))
    except TypeError:
        return sorted(keys, key=lambda key: (type(key).__qualname__, repr(_fixed(key))))


def _fixed(key: Any) -> Any:
    """Return a key with a list for each frozenset, whose order differs by process."""
    if isinstance(key, frozenset):
        return _in_order([*map(_fixed, key)])
    return tuple(map(_fixed, key)) if type(key) is tuple else key


_LEAF_STRUCTURE: Final = Structure(
    optree.treespec_leaf(none_is_leaf=True, namespace=NAMESPACE)
)
_mappings: Final[set[type]] = set()
_leaf_types: Final[set[type]] = set()  # those seen so far
_lock: Final = threading.Lock()


def _register(kind: type) -> None:
    def take_apart(mapping: Nest) -> _Node:
        keys = tuple(_in_order(mapping))
        return [mapping[key] for key in keys], tuple(mapping), keys

    def put_together(order: _Keys, children: Iterable[Nest]) -> Nest:
        found = dict(zip(_in_order(order), children, strict=True))
        return kind({key: found[key] for key in order})

    _mappings.add(kind)
    optree.register_pytree_node(kind, take_apart, put_together, namespace=NAMESPACE)


def _register_mappings(leaves: list[Nest]) -> bool:
    """Register the classes of mappings among leaves; return whether there are any."""
    if len(_leaf_types) > _MOST_TYPES:
        _leaf_types.clear()
    with _lock:
        found = {type(x) for x in leaves if _is_made_of_items(x)}
        for kind in found - _mappings:
            _register(kind)
        _leaf_types.update({*map(type, leaves)} - found)
    return bool(found)


def _is_made_of_items(x: object) -> bool:
    """Return whether ``type(x)(mapping)`` has the items, and attributes like ``x``."""
    if type(x) in _leaf_types or not isinstance(x, (dict, collections.UserDict)):
        return False
    items = {key: object() for key in x}
    try:
        made: Any = type(x)(items)
        both = [getattr(one, "__dict__", {}).keys() for one in (x, made)]
        return dict(made) == items and list(made) == list(x) and both[0] == both[1]
    except Exception:  # of the class
        return False


for _kind in (collections.UserDict, types.MappingProxyType):
    _register(_kind)
