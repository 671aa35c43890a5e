"""Nested structures, by the names of tf.nest: the same rules as in all calls.

Nodes are lists, tuples, named tuples, dicts, and objects of classes derived from dict
that ``Class(mapping)`` makes, with children in the order of sorted keys. Everything
else is a leaf, as are None and distributed values.
Nothing here communicates.
"""

from __future__ import annotations

from collections import abc as _abc

from mpidist._base import nest as _nest
from mpidist._base.expect import expect as _expect
from mpidist._base.types import Nest as _Nest


def flatten(structure: _Nest, expand_composites: bool = False) -> list[_Nest]:
    """Return the leaves of a nest; a list of it, if it is a leaf.

    Args:
        structure: the nest.
        expand_composites: accepted and ignored: there are no composite tensors.

    Example::

        mpidist.nest.flatten({"b": 2, "a": (1, None)})  # [1, None, 2]
    """
    return _nest.flatten(structure)[0]


def map_structure(
    func: _abc.Callable[..., _Nest],
    *structure: _Nest,
    check_types: bool = True,
    expand_composites: bool = False,
) -> _Nest:
    """Return the nest of what a function returns for the leaves of nests.

    Args:
        func: called with a leaf of each nest.
        structure: one or more nests of the same structure.
        check_types: accepted and ignored: types of nodes must be the same.
        expand_composites: accepted and ignored.

    Raises:
        ValueError: if the structures differ.

    Example::

        x, y = {"a": 1, "b": [2, 3]}, {"a": 10, "b": [20, 30]}
        mpidist.nest.map_structure(lambda x, y: x + y, x, y)  # {'a': 11, 'b': [22, 33]}
    """
    return _nest.map_structure(func, *structure)


def pack_sequence_as(
    structure: _Nest,
    flat_sequence: _abc.Sequence[_Nest],
    expand_composites: bool = False,
) -> _Nest:
    """Return a nest of a given structure with other leaves.

    Args:
        structure: a nest of that structure.
        flat_sequence: the leaves, in the order of `flatten`.
        expand_composites: accepted and ignored.

    Raises:
        ValueError: if their number is wrong.

    Example::

        mpidist.nest.pack_sequence_as((0, [0, 0]), [1, 2, 3])  # (1, [2, 3])
    """
    shape = _nest.flatten(structure)[1]
    fits = isinstance(flat_sequence, _abc.Iterable)
    _expect(fits, "pack_sequence_as", "a sequence of leaves", flat_sequence)
    leaves = list(flat_sequence)
    if len(leaves) != shape.num_leaves:
        raise ValueError(
            f"pack_sequence_as: expected {shape.num_leaves} leaves for {shape}, got "
            f"{len(leaves)}"
        )
    return leaves[0] if shape.is_leaf else shape.unflatten(leaves)


def assert_same_structure(
    nest1: _Nest,
    nest2: _Nest,
    check_types: bool = True,
    expand_composites: bool = False,
) -> None:
    """Raise unless two nests have the same structure.

    Args:
        nest1: a nest.
        nest2: another.
        check_types: accepted and ignored: types of nodes must be the same.
        expand_composites: accepted and ignored.

    Raises:
        ValueError: if they differ.
    """
    _nest.map_structure(lambda *_: None, nest1, nest2)


def is_nested(structure: _Nest) -> bool:
    """Return whether a value is a node, not a leaf."""
    return not _nest.flatten(structure)[1].is_leaf
