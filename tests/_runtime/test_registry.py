"""The registry of values: what happens when the program drops one."""

import copy
import sys
import types
from collections import deque
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist._runtime.registry import Registry
from mpidist._strategy.strategy import group_of


@pytest.mark.mpi(min_size=1)
def test_no_code_in_python_runs_when_a_value_is_dropped() -> None:
    # A signal's handler that raised in it would be ignored: a lost Ctrl-C.
    strategy = mpidist.MPIStrategy()
    value = strategy.run(lambda: np.ones(3))
    key = value._key
    registry = group_of(strategy).registry
    assert registry.get(key) is value
    dropped: list[object] = []
    registry.watch(value, dropped)
    called = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: called.append((event, frame)))
    try:
        del value
    finally:
        sys.setprofile(before)
    python = [frame.f_code.co_name for event, frame in called if event == "call"]
    assert not python
    registry.forget_dropped()
    assert dropped == [key]
    assert registry.get(key) is None
    strategy.close()


@pytest.mark.mpi(min_size=1)
def test_nor_when_a_variable_that_merge_fn_has_made_is_dropped() -> None:
    strategy = mpidist.MPIStrategy()
    names: list[str] = []

    def profile(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    def merge_fn(_: mpidist.Strategy) -> None:
        variables = [mpidist.Variable(1.0), copy.deepcopy(mpidist.Variable(2.0))]
        sys.setprofile(profile)
        variables.clear()
        sys.setprofile(None)

    strategy.run(lambda: mpidist.get_replica_context().merge_call(merge_fn))
    assert names == []
    strategy.close()


class Taken(deque[Any]):
    """Another thread takes the last one after this one has seen it."""

    def __bool__(self) -> bool:
        found = len(self) > 0
        if found:
            self.popleft()
        return found


def test_another_thread_may_take_the_last_value_that_was_dropped() -> None:
    # The default strategy's registry is that of all threads.
    registry = Registry(None, 0, 1)
    registry._dead = Taken()
    registry.wrap(mpidist.Mirrored, 1.0, 1)  # dropped at once
    value = registry.wrap(mpidist.Mirrored, 2.0, 2)
    registry.wrap(mpidist.Mirrored, 3.0, 3)
    registry.forget_dropped()
    assert registry.get(2) is value
