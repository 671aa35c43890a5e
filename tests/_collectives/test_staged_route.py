"""The staged route: arrays of a GPU by the routes of host arrays.

On the stand-in for CuPy. That no wait is missing in it:
tests/_collectives/test_gpu_waits.py.
"""

import itertools

import numpy as np
import posing
import pytest
from replicas import all_reduce, everywhere, needs_core

import mpidist
from mpidist._base import nest
from mpidist._collectives import core_routes, node as node_module
from mpidist._strategy.strategy import group_of
from mpidist.experimental import CommunicationOptions

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.core]

PIECE = 16 * 1024
OPERATIONS = ("SUM", "MEAN", "PROD", "MIN", "MAX")
DTYPES = [
    *("bool", "int8", "uint16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64"),
]
# Nothing, with the header, one piece, several, and no multiple of anything.
COUNTS = [0, 5, 3_000, 9_001, 50_003]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("MPIDIST_IMPLEMENTATION", raising=False)
    monkeypatch.setattr(node_module, "_LARGEST_AREA", PIECE)
    monkeypatch.setattr(core_routes, "_EAGER_BYTES_OF_ALL", 8192)
    monkeypatch.setattr(core_routes, "_EAGER_BYTES_CROWDED", 4096)


def values(rank, count, dtype, seed=0):
    """Return numbers with both signs, zeros and, of floats, NaN and infinities."""
    x = np.random.default_rng([seed, rank, count]).integers(-3, 4, count)
    if dtype == "bool":
        return x > 0
    x = np.abs(x).astype(dtype) if dtype.startswith("u") else x.astype(dtype)
    if x.dtype.kind == "f" and count > 100:
        x[7 + rank], x[11], x[50 + rank] = np.nan, np.inf, -0.0
    return x


def defined(op, dtype):
    if dtype == "bool":
        return op in ("MIN", "MAX")
    return not (dtype.startswith("c") and op in ("MIN", "MAX"))


def same_bits(found, want):
    found, want = np.asarray(posing.to_host(found)), np.asarray(want)
    alike = (found.dtype, found.shape) == (want.dtype, want.shape)
    return alike and found.tobytes() == want.tobytes()


def nests():
    """Return (operation, a function that gives the nest of a rank) for many nests."""
    for op, dtype in itertools.product(OPERATIONS, DTYPES):
        if defined(op, dtype):
            for count in COUNTS:
                yield op, lambda r, n=count, d=dtype: [values(r, n, d)]
    for op in ("SUM", "MAX"):
        for counts in ((2, 3), (5, 9_001, 0, 1, 3_000, 50_003, 7)):
            yield (
                op,
                lambda r, c=counts: [
                    values(r, n, ("float32", "int8", "float16")[k % 3])
                    for k, n in enumerate(c)
                ],
            )


@pytest.mark.parametrize(
    ("without", "order", "room", "guard"),
    [
        ("no rank", "late", "0", True),  # of MiB: 64 KiB
        ("no rank", "random", "4", False),
        ("the first", "random", "0", True),
        ("the last", "late", "4", True),
        ("the last", "random", "0", False),
    ],
)
def test_the_bits_are_those_of_host_arrays(
    monkeypatch, new_strategy, without, order, room, guard, rank, size
):
    """With leaves on both sides, and where a rank has no GPU: by the same steps."""
    xp = None
    if rank != {"no rank": None, "the first": 0, "the last": size - 1}[without]:
        xp = posing.install(monkeypatch, order=order, seed=rank)
    monkeypatch.setenv("MPIDIST_STAGING_MB", room)
    strategy = new_strategy(
        device="gpu" if xp else "cpu", implementation="STAGED", guard=guard
    )
    on_host = new_strategy(device="cpu")
    wrong = []
    with np.errstate(all="ignore"):
        for number, (op, make) in enumerate(nests()):
            mine = make(rank)
            arrays = list(mine)
            for k, x in enumerate(mine):
                # Where some ranks have no GPU all leaves of one are in one place.
                if xp and (number + k * (without == "no rank")) % 3:
                    arrays[k] = xp.asarray(x)
            want = all_reduce(on_host, op, mine)
            got = all_reduce(strategy, op, arrays)
            wrong += [
                (op, w.dtype, w.shape)
                for x, y, w in zip(arrays, got, want, strict=True)
                if type(x) is not type(y) or not same_bits(y, w)
            ]
    assert everywhere(wrong) == [[]] * size


# --- errors of CUDA -------------------------------------------------------------------


@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.parametrize("name", ["get", "set", "synchronize"])
@pytest.mark.parametrize("count", [3, 50_003])
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
