"""Structures, without MPI."""

import collections
import dataclasses
import functools
import itertools
import types
from typing import Any

import numpy as np
import pytest
from random_examples import given, st

import mpidist
from mpidist._base import nest

Point = collections.namedtuple("Point", "x y")

trees = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=3)),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.tuples(children, children),
        st.dictionaries(st.text(max_size=3), children, max_size=3),
        st.builds(Point, children, children),
        st.dictionaries(st.integers(), children, max_size=3).map(
            collections.OrderedDict
        ),
    ),
    max_leaves=12,
)


@given(trees)
def test_unflatten_is_the_inverse_of_flatten(tree):
    leaves, structure = nest.flatten(tree)
    assert structure.num_leaves == len(leaves)
    again = structure.unflatten(leaves)
    assert again == tree
    assert type(again) is type(tree)
    assert str(structure).count("*") >= len(leaves)


@given(trees)
def test_map_keeps_the_structure(tree):
    mapped = nest.map_structure(lambda leaf: (leaf, 1) and 5, tree)
    assert all(leaf == 5 for leaf in nest.flatten(mapped)[0])
    assert nest.flatten(mapped)[1] == nest.flatten(tree)[1]


def test_leaves_of_mappings_come_by_sorted_key():
    for kind in (dict, collections.OrderedDict, collections.UserDict):
        one = kind([("b", 1), ("a", [2, None])])
        other = kind([("a", [2, None]), ("b", 1)])
        assert nest.flatten(one)[0] == nest.flatten(other)[0] == [2, None, 1]
        assert str(nest.flatten(one)[1]) == str(nest.flatten(other)[1])
    proxy = types.MappingProxyType({"b": 1, "a": 2})
    leaves, structure = nest.flatten(proxy)
    assert leaves == [2, 1]
    assert structure.unflatten([5, 6]) == {"a": 5, "b": 6}


@pytest.mark.parametrize("keys", [("x", "label"), ("label", "x")])
@pytest.mark.parametrize(
    "kind",
    [dict, collections.defaultdict, collections.OrderedDict, collections.UserDict],
)
def test_a_dict_keeps_its_order_after_one_of_another_order(kind, keys):
    # `x, label = batch.values()` took one for the other.
    for order in (keys, keys[::-1]):
        tree = kind()
        tree.update({key: ord(key[0]) for key in order})
        again = nest.map_structure(lambda x: x, [tree])[0]
        assert again == tree
        assert list(again) == list(order)


class Output(collections.OrderedDict):
    """As the outputs of models of Hugging Face."""


class Encoding(collections.UserDict):
    """As what their tokenizers return."""


@pytest.mark.parametrize("kind", [Output, Encoding, collections.Counter])
def test_classes_derived_from_mappings_are_nodes(kind):
    tree = [kind({"b": 1, "a": 2}), 3]
    leaves, structure = nest.flatten(tree)
    assert leaves == [2, 1, 3]
    assert kind.__name__ in str(structure)
    again = structure.unflatten([20, 10, 30])
    assert again == [kind({"b": 10, "a": 20}), 30]
    assert type(again[0]) is kind
    assert list(again[0]) == ["b", "a"]
    assert mpidist.nest.flatten(kind(x=[1, 2])) == [1, 2]


class Named(dict):
    """A constructor that takes no mapping."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            self[name] = 1


class Lists(collections.defaultdict):
    """One that takes something else first."""


@dataclasses.dataclass
class Fields(collections.OrderedDict):
    """As an output of Hugging Face, without its care: attributes do not follow keys."""

    loss: object = None

    def __post_init__(self):
        self["loss"] = self.loss


@pytest.mark.parametrize("tree", [Named("x"), Lists(list, x=1), Fields(1)])
def test_an_object_that_its_items_do_not_make_is_a_leaf(tree):
    assert nest.map_structure(lambda x: x, [tree])[0] is tree


def test_an_object_with_attributes_beside_its_items_is_a_leaf():
    class Beside(dict):
        """The first object that is seen decides for its class."""

    tree = Beside(x=1)
    tree.lines = 7
    assert nest.map_structure(lambda x: x, [tree])[0] is tree


def test_attributes_that_are_the_items():
    class Attributes(dict):
        def __init__(self, *args):
            super().__init__(*args)
            self.__dict__ = self

    again = nest.map_structure(lambda x: x + 1, Attributes({"x": 1}))
    again.y = 3
    assert (again.x, again["y"]) == (2, 3)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (1.0, "*"),
        (None, "*"),
        ([1, (2,)], "[*, (*,)]"),
        ({"b": 1, "a": {}}, "{'a': {}, 'b': *}"),
        (Point(1, [2]), "Point(x=*, y=[*])"),
        ({1: 2, "a": 3}, "{1: *, 'a': *}"),
        ({(1, "b"): 2, ("a", 1): 3}, "{('a', 1): *, (1, 'b'): *}"),
        (collections.OrderedDict(b=1, a=2), "OrderedDict{'a': *, 'b': *}"),
        (collections.deque([1, 2]), "deque(*, *)"),
    ],
)
def test_texts(tree, text):
    assert str(nest.flatten(tree)[1]) == text


def test_keys_that_are_sets_are_in_one_order_in_all_processes():
    """The order of a set depends on the hashes of strings; none of these is less."""
    keys = [frozenset("ab"), frozenset("bcd"), (1, frozenset("xy")), frozenset("ac")]
    for some in itertools.permutations(keys):
        leaves, structure = nest.flatten(
            {key: sorted(map(str, key))[0] for key in some}
        )
        assert str(structure) == (
            "{['a', 'b']: *, ['a', 'c']: *, ['b', 'c', 'd']: *, (1, ['x', 'y']): *}"
        )
        assert leaves == ["a", "a", "b", "1"]
        assert list(structure.unflatten(leaves)) == list(some)


def test_render_puts_texts_in_the_place_of_leaves():
    _, structure = nest.flatten({"*": 1, "a": [2, 3]})
    assert structure.render(["x", "y", "z"]) == "{'*': x, 'a': [y, z]}"


def test_arrays_and_sets_are_leaves():
    array = np.ones(3)
    assert nest.flatten([array, {1, 2}, range(3)])[0][0] is array
    assert nest.flatten([array, {1, 2}, range(3)])[1].num_leaves == 3


def test_other_structures_are_refused():
    with pytest.raises(ValueError, match=r"\[\*, \*\] and \[\*, \(\*, \*\)\]"):
        nest.map_structure(lambda a, b: a, [1, 2], [3, (4, 5)])
    with pytest.raises(ValueError, match="same structure"):
        nest.map_structure(lambda a, b: a, [1, 2], (1, 2))


def test_a_nest_that_contains_itself():
    a: list[Any] = [1.0]
    a.append({"b": a})
    a.append(a)
    for call in (
        mpidist.nest.flatten,
        functools.partial(mpidist.get_replica_context().all_reduce, "SUM"),
        mpidist.data.Dataset.from_tensors,
    ):
        with pytest.raises(ValueError, match="got a list that contains itself"):
            call(a)


def test_the_names_of_tensorflow():
    names = mpidist.nest
    tree = {"b": [1, None], "a": (2,)}
    assert names.flatten(tree) == [2, 1, None]
    assert names.map_structure(lambda x, y: (x, y), (1, [2]), (3, [4])) == (
        (1, 3),
        [(2, 4)],
    )
    assert names.pack_sequence_as(tree, "xyz") == {"b": ["y", "z"], "a": ("x",)}
    assert names.pack_sequence_as(0, [[1]]) == [1]
    with pytest.raises(ValueError, match="expected 3 leaves"):
        names.pack_sequence_as(tree, [1])
    with pytest.raises(TypeError, match="expected a sequence of leaves, got None"):
        names.pack_sequence_as(tree, None)
    names.assert_same_structure((1, 2), (3, 4))
    with pytest.raises(ValueError, match="same structure"):
        names.assert_same_structure((1, 2), [3, 4])
    assert [names.is_nested(x) for x in ([], {}, None, np.ones(2))] == [
        True,
        True,
        False,
        False,
    ]
