"""Fingerprints of arguments of merge_call, without other ranks."""

import gc

import pytest

from mpidist._merge.argument_equality import _canonical


class Node:
    """Refers to itself: pickling it by value goes to the end of the stack."""

    def __init__(self):
        self.parent = self
        self.collecting = []

    def __getstate__(self):
        self.collecting.append(gc.isenabled())
        return {"parent": self.parent}


@pytest.mark.parametrize("enabled", [True, False])
def test_no_finalizers_run_at_the_end_of_the_stack(enabled):
    """A collection would call them there; they fail, and release nothing, ever."""
    node = Node()
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert _canonical(node) == _canonical(Node())
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert len(node.collecting) > 50  # it went deep
    assert not any(node.collecting)
