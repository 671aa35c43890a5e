"""The registry of values: what happens when the program drops one."""

import sys

import numpy as np
import pytest

import mpidist
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
