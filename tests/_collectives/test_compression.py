"""Compression: the formats, and sums between several nodes, played by one machine."""

import gc
import itertools

import numpy as np
import posing
import pytest
from replicas import (
    all_reduce,
    context,
    core_by_mpi,
    everywhere,
    make,
    needs_core,
    own,
    raises_everywhere,
    sample,
)

import mpidist
from mpidist._base import backend
from mpidist._collectives import compression as _compression
from mpidist._collectives.compression import CODECS, Compression
from mpidist._strategy.strategy import group_of

Options = mpidist.experimental.CommunicationOptions
mpi = pytest.mark.mpi

# --- formats, in one process ----------------------------------------------------------


def through(scheme, x):
    """Return what is left of floats that were sent."""
    packet = np.zeros(_compression.packet_bytes(x.size), np.uint8)
    _compression.encode(CODECS[scheme], x, packet)
    out = np.empty_like(x)
    _compression.decode(CODECS[scheme], packet, out)
    return out


def all_bit_patterns():
    """Return float32 around the places where rounding to 16 bits turns over."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (upper[:, None] | lower).ravel().view(np.float32)


def test_bf16_rounds_to_nearest_even_as_ml_dtypes_does():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = all_bit_patterns()
    halves = np.empty(x.size, np.uint16)
    CODECS["bf16"].encode(x, halves, finite=False)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16)
    found = halves.view(ml_dtypes.bfloat16)
    missing = np.isnan(x)
    assert np.isnan(found[missing].astype(np.float32)).all()
    np.testing.assert_array_equal(halves[~missing], expected[~missing].view(np.uint16))
    out = np.empty_like(x)
    CODECS["bf16"].decode(halves, out)
    np.testing.assert_array_equal(out, found.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("scheme", "bits"), [("fp16", 11), ("bf16", 8)])
def test_what_is_finite_is_rounded_and_never_overflows(scheme, bits, dtype):
    limits = np.finfo(dtype)
    rng = np.random.default_rng(0)
    for largest in (1e-30, 1.0, 7e4, 3e38, 0.99 * limits.max, float(limits.tiny)):
        x = (rng.uniform(-1, 1, 40_000) * largest).astype(dtype)
        x[0] = largest
        y = through(scheme, x)
        big = np.abs(x) > largest * 2.0**-12
        error = np.abs(y[big].astype("float64") / 2 - x[big].astype("float64") / 2)
        assert (error <= np.abs(x[big].astype("float64") / 2) * 2.0**-bits).all()
        assert np.isfinite(y[1:]).all()


@pytest.mark.parametrize("scheme", ["fp16", "bf16"])
def test_what_is_not_finite_travels_as_it_is(scheme):
    x = np.array([np.inf, -np.inf, np.nan, 1.0, -2.5, 0.0, 3e38], "float32")
    y = through(scheme, x)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(x))
    np.testing.assert_array_equal(y[:2], x[:2])
    assert y[-1] == pytest.approx(3e38, rel=2.0**-8)
    y = through(scheme, x[:-1])
    np.testing.assert_array_equal(y, x[:-1])
    assert through(scheme, np.zeros(5, "float32")).tolist() == [0.0] * 5
    assert through(scheme, np.empty(0, "float32")).size == 0


class Alone:
    """The only node."""

    rank, size = 0, 1

    def exchange(self, send, receive):
        receive[...] = send

    def all_gather(self, send, receive, counts):
        receive[...] = send


@pytest.mark.parametrize("scheme", ["fp16", "bf16"])
@pytest.mark.parametrize("poison", [None, np.inf, np.nan])
@np.errstate(over="ignore", invalid="ignore")
def test_errors_are_fed_back_and_those_of_infinities_are_not_kept(scheme, poison):
    rng = np.random.default_rng(1)
    x = rng.normal(size=1000).astype("float32")
    compression = Compression(scheme, error_feedback=True)
    if poison is not None:
        bad = x.copy()
        bad[3] = poison
        compression.begin().allreduce(Alone(), bad)
        np.testing.assert_array_equal(bad[3], poison)
    total = np.zeros(1000)
    for _ in range(100):
        y = x.copy()
        compression.begin().allreduce(Alone(), y)
        total += y
    # All but what is still kept: less than the error of one or two calls.
    assert np.abs(total / 100 - x).max() < 4 * 2.0**-8 / 50
    if scheme == "bf16":
        plain = x.copy()
        Compression(scheme, error_feedback=False).allreduce(Alone(), plain)
        assert np.abs(plain - x).max() > np.abs(total / 100 - x).max()


# --- between nodes --------------------------------------------------------------------


@core_by_mpi
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_compression_where_some_ranks_have_a_gpu(
    nodes, new_strategy, rank, size, monkeypatch, dtype
):
    """What goes by way of a GPU is not compressed, so nothing is."""
    if rank == size - 1:
        posing.install(monkeypatch, seed=rank)
    device = "gpu" if rank == size - 1 else "cpu"
    strategy = new_strategy(device=device, compression="bf16", timeout_seconds=30)
    given = np.full(100_000, 3, dtype)
    if device == "gpu":
        given = group_of(strategy).collectives.device.array_module.asarray(given)
    found = all_reduce(strategy, "SUM", given)
    np.testing.assert_array_equal(backend.to_host(found), np.full(100_000, 3 * size))


@core_by_mpi
@pytest.mark.parametrize("scheme", ["fp16", "bf16"])
def test_compressed_sums_are_close_and_the_same_everywhere(
    nodes, on_nodes, rank, size, scheme
):
    strategy = on_nodes(compression=scheme)
    bits = {"fp16": 11, "bf16": 8}[scheme]
    for count, dtype, op in itertools.product(
        (20_000, 600_000), ("float32", "float64"), ("SUM", "MEAN")
    ):
        x = np.random.default_rng([rank, count]).normal(size=count).astype(dtype)
        values = everywhere(x) if count < 100_000 else None
        result = all_reduce(strategy, op, x)
        again = all_reduce(strategy, op, x)
        assert result.dtype == dtype
        assert result.tobytes() == again.tobytes()
        assert len({*everywhere(result.tobytes())}) == 1
        exact = all_reduce(strategy, op, x, Options(compression="none"))
        assert (exact != result).any()
        if values is not None:
            # Each node's sum is rounded once, and the sum of all once.
            factor = 1 / size if op == "MEAN" else 1
            expected = sum(v.astype("float64") for v in values) * factor
            np.testing.assert_allclose(exact, expected, rtol=1e-4, atol=1e-5)
            bound = np.abs(expected) + sum(
                abs(sum(values[r].astype("float64") for r in ranks)) * factor
                for ranks in nodes
            )
            assert (np.abs(result - expected) <= bound * 2.0**-bits * 1.1 + 1e-5).all()
    small = sample(rank, 8_192, "float32")  # 32 KiB
    found = all_reduce(strategy, "SUM", small)
    exact = all_reduce(strategy, "SUM", small, Options(compression="none"))
    # Not compressed, but added in another order.
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-3)


@core_by_mpi
def test_only_sums_of_floats_are_compressed(on_nodes, rank, size):
    strategy = on_nodes(compression="bf16")
    ints = np.arange(100_000) * 1_001 + rank
    nest = {"ints": ints, "floats": np.full(100_000, 1 + 2.0**-12, "float64")}
    nest["few"] = np.full(4_096, 1 + 2.0**-12)  # 32 KiB, such as a loss
    mean = all_reduce(strategy, "MEAN", nest)
    np.testing.assert_array_equal(
        mean["ints"], np.arange(100_000) * 1_001 + (size - 1) / 2
    )
    assert (mean["floats"] != nest["floats"]).any()
    assert (mean["few"] == nest["few"]).all()
    for op in ("MIN", "MAX"):
        x = nest["floats"] + rank * 2.0**-12
        found = all_reduce(strategy, op, x)
        assert found[0] == x[0] + ((size - 1 if op == "MAX" else 0) - rank) * 2.0**-12


@core_by_mpi
def test_error_feedback_makes_up_for_what_was_lost(on_nodes, rank):
    strategy = on_nodes(compression="bf16", error_feedback=True)
    rng = np.random.default_rng(rank)
    x = rng.normal(size=200_000).astype("float32")

    def reduce_all(tree, options=None):
        parts = strategy.run(lambda: context().all_reduce("SUM", tree, options))
        return np.hstack([own(strategy, part) for part in parts])

    for tree in ([x], [x[:120_000], x[120_000:]]):
        exact = reduce_all(tree, Options(compression="none"))
        total = np.zeros(x.size)
        steps = 30
        for _ in range(steps):
            one = reduce_all(tree)
            total += one
        once = np.abs(one - exact).max()
        mean = np.abs(total / steps - exact).max()
        assert once > 0
        assert mean < once / 5
        assert len({*everywhere(total.tobytes())}) == 1


@core_by_mpi
@pytest.mark.parametrize("number", [1, 2])
def test_variables_do_not_get_the_errors_of_each_other(on_nodes, rank, size, number):
    """Of one optimizer, which steps with them in turn, or of two."""
    strategy = on_nodes(compression="fp16", error_feedback=True)
    large = sample(rank, 100_000, "float32") * np.float32(1e6)
    with strategy.scope():
        v, w = (mpidist.Variable(np.zeros(100_000, "float32")) for _ in range(2))
        made = [mpidist.optimizers.SGD(1.0) for _ in range(number)]
    small = np.ones_like(large)
    strategy.run(lambda: made[0].apply_gradients([(large, v), (None, w)]))
    strategy.run(lambda: made[-1].apply_gradients([(None, v), (small, w)]))
    np.testing.assert_allclose(w.numpy(), -size, rtol=1e-3)
    plans = strategy._group.collectives.plans
    assert len(plans.owned) == (number if size > 1 else 0)
    made.clear()
    gc.collect()
    assert not plans.owned


@core_by_mpi
def test_optimizers_without_errors_share_a_plan(on_nodes):
    """Or each that a program makes would take the memory of one, to the end."""
    strategy = on_nodes(compression="fp16", error_feedback=False)
    v = make(strategy, np.zeros(100_000, "float32"))
    cache = group_of(strategy).collectives.cache
    known = []
    for _ in range(2):
        with strategy.scope():
            one = mpidist.optimizers.SGD(1.0)
        strategy.run(lambda one=one: one.apply_gradients([(v.numpy(), v)]))
        known.append(len(cache))
    assert known[0] == known[1]


@core_by_mpi
@needs_core
def test_options_of_compression_that_differ_raise_on_all_ranks(
    on_nodes, rank, size, monkeypatch
):
    raises_everywhere(
        mpidist.CollectiveMismatchError,
        lambda: on_nodes(compression="fp16" if rank else "bf16"),
    )
    raises_everywhere(
        mpidist.CollectiveMismatchError,
        lambda: on_nodes(compression="fp16", error_feedback=rank == 0),
    )
    strategy = on_nodes()
    x = np.ones(50_000, "float32")
    options = Options(compression="fp16" if rank else None)
    raises_everywhere(
        mpidist.CollectiveMismatchError,
        lambda: strategy.run(lambda: context().all_reduce("SUM", x, options)),
    )
    options = Options(compression="fp16")
    assert (all_reduce(strategy, "SUM", x, options) == size).all()
    monkeypatch.setenv("MPIDIST_COMPRESSION", "bf16" if rank else "")
    raises_everywhere(mpidist.CollectiveMismatchError, lambda: on_nodes())


@mpi
def test_compression_in_the_environment_and_on_one_node(
    new_strategy, rank, size, monkeypatch
):
    monkeypatch.delenv("MPIDIST_IMPLEMENTATION", raising=False)
    monkeypatch.setenv("MPIDIST_COMPRESSION", "bf16")
    x = np.full(50_000, 1 + 2.0**-12, "float32")
    strategy = new_strategy()
    assert (all_reduce(strategy, "SUM", x) == size * x).all()  # one node: as it is
    if size == 1:
        return
    monkeypatch.setenv("MPIDIST_SIMULATED_NODES", "2")
    strategy = new_strategy()
    assert (all_reduce(strategy, "SUM", x) == size).all()
    assert group_of(strategy).collectives.resources.compression == ("bf16", False)
    exact = Options(implementation="DIRECT")
    assert (all_reduce(strategy, "SUM", x, exact) == size * x).all()
