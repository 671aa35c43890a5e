"""Fingerprints of arguments of merge_call, without other ranks."""

from mpidist._merge.argument_equality import _canonical


class Node:
    """Refers to itself."""

    def __init__(self):
        self.parent = self
        self.table = {"nodes": [self], "more": {1, 2}}
        self.table["table"] = self.table


def test_what_refers_to_itself():
    one, other = Node(), Node()
    assert _canonical(one) == _canonical(other)
    other.table["more"].add(3)
    assert _canonical(one) != _canonical(other)


def test_the_order_of_a_dict_has_no_effect():
    assert _canonical({"a": 1, "b": [2]}) == _canonical({"b": [2], "a": 1})
    assert _canonical({"a": 1}) != _canonical({"a": 1.0})
