"""The staged route: arrays of a GPU by the routes of host arrays.

On the stand-in for CuPy. That no wait is missing in it: test_gpu_waits.py; that results
are those of host arrays: test_fuzz_values.py.
"""

import numpy as np
import posing
import pytest
from replicas import everywhere, needs_core

import mpidist
from mpidist._base import nest
from mpidist._strategy.strategy import group_of
from mpidist.experimental import CommunicationOptions

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.core]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("MPIDIST_IMPLEMENTATION", raising=False)


# --- errors of CUDA -------------------------------------------------------------------


@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.parametrize("name", ["get", "set", "synchronize"])
@pytest.mark.parametrize("count", [3, 50_003])
@pytest.mark.usefixtures("by_nodes")
def test_an_error_of_a_copy_is_told_to_all(
    monkeypatch, new_strategy, name, count, nodes, rank, size
):
    """Before the header, where values are read, or after it, where results go."""
    xp = posing.install(monkeypatch)
    monkeypatch.setenv("MPIDIST_SIMULATED_NODES", nodes)
    strategy = new_strategy(device="gpu", implementation="STAGED")
    reduce = group_of(strategy).collectives.all_reduce
    x, error = xp.asarray(np.ones(count, np.float32)), None
    reduce(mpidist.ReduceOp.SUM, x)
    with monkeypatch.context() as patch:
        if rank == size - 1:
            owner = posing.Event if name == "synchronize" else posing.ndarray
            patch.setattr(owner, name, lambda self, *args, **how: posing.refuse())
        try:
            reduce(mpidist.ReduceOp.SUM, x)
            reduce(mpidist.ReduceOp.SUM, np.ones(3))  # a call of any kind
        except Exception as raised:
            error = raised
    texts = everywhere(str(error))
    assert all("cudaErrorNotSupported" in text for text in texts)
    assert np.all(reduce(mpidist.ReduceOp.SUM, x).get() == size)


# --- which route ----------------------------------------------------------------------


def route_of(strategy, arrays, implementation="AUTO"):
    options = CommunicationOptions(implementation=implementation)
    group_of(strategy).collectives.all_reduce(mpidist.ReduceOp.SUM, arrays, options)
    how = ("all_reduce", "SUM", options, None, nest.flatten(arrays)[1])
    plan = group_of(strategy).collectives.cache[how].last
    return type(plan).__name__, plan.route


@needs_core
@pytest.mark.usefixtures("one_node")
def test_the_routes(monkeypatch, new_strategy, size):
    xp = posing.install(monkeypatch, num_devices=size, nccl=posing.Nccl())
    strategy = new_strategy(device="gpu")
    small, large = xp.zeros(3), xp.zeros(50_003)
    for arrays, implementation, route in (
        ([small], "AUTO", ("BucketReduce", "nccl")),
        ([small], "STAGED", ("StagedReduce", "staged")),
        ([large], "STAGED", ("StagedReduce", "staged")),
        ([small, np.zeros(3)], "STAGED", ("StagedReduce", "staged")),
        ([np.zeros(3)], "STAGED", ("CoreReduce", "eager")),
        ([large], "DIRECT", ("BucketReduce", "direct")),
    ):
        assert route_of(strategy, arrays, implementation) == route
