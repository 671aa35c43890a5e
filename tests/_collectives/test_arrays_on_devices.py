"""The core on NumPy arrays, on host memory that poses as a GPU array, and on CuPy."""

import functools
import itertools
import sys

import ml_dtypes
import numpy as np
import posing
import pytest
from replicas import all_reduce, context, everywhere, local

import mpidist
from mpidist._base import backend
from mpidist._base.reduce_op import COMBINE
from mpidist._strategy.strategy import group_of

pytestmark = [pytest.mark.mpi, pytest.mark.core]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    *map(np.dtype, "?bhilqBHILQefdgFDG"),
    BFLOAT16,
]
ON_A_GPU = [d for d in DTYPES if d.char not in "gG" and d != BFLOAT16]


@pytest.fixture(
    params=[
        "numpy",
        "posing staged",
        "posing direct",
        pytest.param("cupy staged", marks=pytest.mark.gpu),
        pytest.param("cupy direct", marks=pytest.mark.gpu),
        pytest.param("cupy nccl", marks=pytest.mark.gpu),
    ]
)
def where(request, monkeypatch, new_strategy):
    """Give a strategy and the array module of its device."""
    kind, _, implementation = request.param.partition(" ")
    if kind == "cupy":
        strategy = request.getfixturevalue("on_gpus").get(implementation.upper())
        return strategy, strategy.array_module
    if kind == "posing":
        posing.install(monkeypatch)
    strategy = new_strategy(
        device="cpu" if kind == "numpy" else "gpu",
        implementation=implementation or "AUTO",
    )
    return strategy, strategy.array_module


def host(x):
    return x if isinstance(x, (np.ndarray, np.generic)) else x.get()


def values_of(dtype, rank):
    """Return small values of a dtype, for which float sums are exact."""
    base = np.array([[rank + 1, 2, 0], [3, rank, 1]])
    if dtype.kind == "?":
        return base % 2 == 0
    if dtype.kind == "c":
        return (base + 1j * (rank + 1)).astype(dtype)
    return base.astype(dtype)


def expected(op, dtype, arrays):
    """Return what NumPy makes of the arrays of all ranks; None where it is refused."""
    if dtype.kind == "b":
        if op.name in ("MIN", "MAX"):
            return (np.min if op.name == "MIN" else np.max)(arrays, axis=0)
        return None
    if dtype.kind == "c" and op.name in ("MIN", "MAX"):
        return None
    wide = [a.astype(np.float64) for a in arrays] if dtype == BFLOAT16 else arrays
    if op.name == "MEAN":
        result = np.mean(wide, axis=0)
        return result if dtype.kind in "iu" else result.astype(dtype)
    return functools.reduce(COMBINE[op.name], wide).astype(dtype)


def test_functions_as_operations(where, rank, size):
    """They get arrays of the device, in the order of the ranks, and return one."""
    strategy, xp = where
    module = type(xp.ones(1))

    def subtract(a, b):
        assert type(a) is type(b) is module
        return a - b

    total = 10.0 - sum(10.0 + i for i in range(1, size))
    for shape in ((), (2,), (2, 300)):
        mine = xp.asarray(np.full(shape, 10.0 + rank))
        result = all_reduce(strategy, subtract, {"a": mine, "b": [mine]})
        for x in (result["a"], result["b"][0]):
            assert type(x) is module
            np.testing.assert_array_equal(host(x), np.full(shape, total))
        np.testing.assert_array_equal(host(mine), np.full(shape, 10.0 + rank))


def test_dtype_table(where, rank, size):
    strategy, xp = where
    dtypes = DTYPES if xp is np else ON_A_GPU
    for op, dtype in itertools.product(mpidist.ReduceOp, dtypes):
        mine = values_of(dtype, rank)
        reference = expected(op, dtype, [values_of(dtype, r) for r in range(size)])
        x = xp.asarray(mine)
        if reference is None:
            with pytest.raises(TypeError, match=f"{op.name} of {dtype.name} is not"):
                all_reduce(strategy, op, x)
            continue
        alone, packed = local(
            strategy,
            lambda op=op, x=x: (
                context().all_reduce(op, x),
                context().all_reduce(op, [x, x[:, ::2], x.T]),
            ),
        )
        assert isinstance(alone, type(x))
        for result, want in zip(
            [alone, *packed],
            [reference, reference, reference[:, ::2], reference.T],
            strict=True,
        ):
            assert result.dtype == want.dtype, (dtype, op)
            assert result.shape == want.shape
            assert result.flags.c_contiguous
            np.testing.assert_allclose(
                host(result).astype(np.complex128 if dtype.kind == "c" else float),
                want.astype(np.complex128 if dtype.kind == "c" else float),
                rtol=2e-2 if dtype.itemsize == 2 else 1e-6,
                err_msg=f"{dtype} {op}",
            )
        np.testing.assert_array_equal(host(x), mine)


def test_buckets_and_chunks(where, monkeypatch, rank, size):
    """Small limits give the same results as one large buffer."""
    strategy, xp = where
    rng = np.random.default_rng(7)
    shapes = [(3, 5), (), (40,), (2, 2, 2), (0,), (11,)]
    data = [rng.integers(0, 99, s).astype(np.float32) for s in shapes]
    mine = [xp.asarray(x + rank) for x in data]
    monkeypatch.setattr(group_of(strategy).communicator.buffers, "most_bytes", 28)

    def step():
        results = []
        for limit in (0, 1, 64, 4096):
            options = mpidist.experimental.CommunicationOptions(bytes_per_pack=limit)
            results.append(context().all_reduce("SUM", mine, options))
        gathered = context().all_gather([mine[0], mine[2]], 0)
        return results, gathered, context().merge_call(merge_fn, (mine[2],))

    def merge_fn(strategy, x):
        everything = strategy.experimental_local_results(x)
        made = mpidist.PerReplica([y * 2 for y in everything])
        return made, everything[-1] + 1

    results, gathered, (scattered, broadcast) = local(strategy, step)
    for result in results:
        for y, x in zip(result, data, strict=True):
            np.testing.assert_array_equal(host(y), x * size + sum(range(size)))
    for y, i in zip(gathered, (0, 2), strict=True):
        want = np.concatenate([data[i] + r for r in range(size)])
        np.testing.assert_array_equal(host(y), want)
    np.testing.assert_array_equal(host(scattered), (data[2] + rank) * 2)
    np.testing.assert_array_equal(host(broadcast), data[2] + size)
    assert isinstance(scattered, type(mine[0]))
    assert isinstance(broadcast, type(mine[0]))


def test_variables(where, rank, size):
    strategy, xp = where
    with strategy.scope():
        v = mpidist.Variable(
            np.full(3, 1.0 + rank), aggregation=mpidist.VariableAggregation.SUM
        )
    assert isinstance(v.read_value(), xp.ndarray)
    strategy.run(lambda: v.assign_add(xp.asarray(np.full(3, float(rank)))))
    want = np.full(3, 1.0 + sum(range(size)))
    np.testing.assert_array_equal(v.numpy(), want)
    np.testing.assert_array_equal(host(v + 1), want + 1)
    np.testing.assert_array_equal(host(xp.asarray(np.ones(3)) * v), want)
    np.testing.assert_array_equal(host(v.value()), want)
    np.testing.assert_array_equal(
        host(xp.asarray(np.ones((2, 3))) @ v), [want.sum()] * 2
    )
    np.testing.assert_array_equal(host(np.sqrt(v)), np.sqrt(want))
    assert float(np.sum(v)) == want.sum()
    with strategy.scope():
        v.assign(np.zeros(3))
        strategy.extended.update(v, lambda v, x: v.assign_sub(x), args=(xp.ones(3),))
    np.testing.assert_array_equal(v.numpy(), -np.ones(3))


def test_update_pattern(where, rank, size):
    strategy, xp = where
    with strategy.scope():
        variables = [mpidist.Variable(np.zeros(n)) for n in (2, 30)]

    def merge_fn(strategy, pairs):
        rate = 0.5
        scale = xp.asarray(np.full(1, rate))
        sums = strategy.extended.batch_reduce_to("SUM", pairs)
        for total, (_, v) in zip(sums, pairs, strict=True):
            strategy.extended.update(
                v, lambda v, g: v.assign_sub(scale * g), args=(total,)
            )
        return strategy.extended.broadcast_to(xp.arange(4), variables[0])

    def step():
        pairs = [(xp.asarray(np.full(v.shape, 1.0 + rank)), v) for v in variables]
        return context().merge_call(merge_fn, args=(pairs,))

    four = local(strategy, step)
    np.testing.assert_array_equal(host(four), np.arange(4))
    for v in variables:
        np.testing.assert_array_equal(
            v.numpy(), np.full(v.shape, -0.5 * size * (size + 1) / 2)
        )


def test_reduce_over_axes(where, rank, size):
    strategy, xp = where
    rows = [np.arange(2.0 * r).reshape(r, 2) for r in range(size)]
    value = strategy.run(lambda: xp.asarray(rows[rank]))
    everything = np.concatenate([*rows])
    for op, fn in [("SUM", np.sum), ("MAX", np.max), ("MIN", np.min)]:
        if size > 1 or op == "SUM":
            result = strategy.reduce(op, value, axis=0)
            np.testing.assert_allclose(host(result), fn(everything, axis=0))
    if size > 1:
        mean = strategy.reduce("MEAN", value, axis=(0, 1))
        np.testing.assert_allclose(host(mean), everything.mean())


@pytest.mark.parametrize("dtype", ["e", "f", "d", "g", BFLOAT16], ids=str)
def test_min_and_max_with_nan_and_signed_zeros(new_strategy, dtype, rank, size):
    """Every rank has the same bits, NaN wins, and -0.0 < 0.0."""
    strategy = new_strategy()
    special = [np.nan, -0.0, 0.0, np.inf, -np.inf, 1.5, -1.5]
    columns = np.array(list(itertools.product(special, repeat=2)), dtype)
    x = columns[:, rank % 2].copy()
    for op, fn in (("MIN", np.minimum), ("MAX", np.maximum)):
        result = all_reduce(strategy, op, x)
        wide = columns.astype(np.float64)
        want = wide[:, 0] if size == 1 else fn(wide[:, 0], wide[:, 1])
        np.testing.assert_array_equal(result.astype(float), want)
        if dtype != "g" and size > 1:
            zeros = (columns == 0).all(axis=1)
            signs = np.signbit(columns[zeros])
            want_sign = signs.any(axis=1) if op == "MIN" else signs.all(axis=1)
            np.testing.assert_array_equal(np.signbit(result[zeros]), want_sign)
        raw = np.ascontiguousarray(result).view(np.uint8)[None]
        nan = np.isnan(result.astype(float))
        rows = strategy.gather(strategy.run(lambda raw=raw: raw), axis=0)
        if dtype == "g":  # ten of its sixteen bytes count
            continue
        assert (rows == rows[0]).all(), nan


@pytest.mark.parametrize("blocking", [False, True])
def test_kernels_are_done_before_mpi(monkeypatch, new_strategy, blocking):
    """Of the current stream; where that is the null stream, of blocking ones too."""
    posing.install(monkeypatch)
    strategy = new_strategy(device="gpu", implementation="DIRECT")
    xp = strategy.array_module
    x, done = xp.ones(3), []
    with posing.Stream() if blocking else posing.Stream.null:
        posing.launch(lambda: done.append("the kernel"))
    assert done == []
    backend.synchronize(x)
    assert done == ["the kernel"]
    posing.launch(lambda: done.append("another"))
    strategy.run(lambda: context().all_reduce("SUM", x))
    assert done == ["the kernel", "another"]


def test_ranks_are_dealt_to_the_gpus_of_the_node(monkeypatch, new_strategy):
    posing.install(monkeypatch, num_devices=2)
    strategy = new_strategy(device="auto", implementation="STAGED")
    on_node = everywhere(group_of(strategy).communicator.local_rank)
    expected = tuple(
        f"/rank:{rank}/device:GPU:{number % 2}" for rank, number in enumerate(on_node)
    )
    devices = strategy.run(lambda: context().devices)
    assert devices[0] == expected[strategy.replica_id]
    assert strategy.extended.worker_devices == expected
    assert group_of(new_strategy(device="gpu:1")).device_name.endswith("GPU:1")
    with pytest.raises(ValueError, match=r"has 2 GPU\(s\), numbered from 0"):
        mpidist.MPIStrategy(device="gpu:2")


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("tpu", ValueError),
        ("gpu:x", ValueError),
        ("auto:1", ValueError),
        (3, TypeError),
    ],
)
def test_bad_devices(device, kind):
    with pytest.raises(kind, match="MPIStrategy"):
        mpidist.MPIStrategy(device=device)


def test_no_gpu_is_said_plainly(monkeypatch):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"CuPy is not installed; write device=.cpu"):
        mpidist.MPIStrategy(device="gpu")
