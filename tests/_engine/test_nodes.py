"""Several nodes, played by one machine: reductions, headers, messages, compression."""

import functools
import itertools
import time

import numpy as np
import posing
import pytest
from replicas import (
    SignalError,
    after_the_others,
    all_reduce,
    assert_guards_and_merges,
    assert_reduces_nests,
    context,
    everywhere,
    make,
    own,
    raises_everywhere,
    sample,
)

import mpidist
from mpidist import _native
from mpidist._base import backend
from mpidist._engine import device_routes, hierarchical_route
from mpidist._engine import node as node_module
from mpidist._engine import nodes as engine_nodes
from mpidist._mpi.messages import Messages, Transfers
from mpidist._strategy.strategy import group_of
from mpidist._transports import compression as _compression
from mpidist._transports.compression import CODECS, Compression

SHARED = mpidist.experimental.CommunicationImplementation.SHARED
Options = mpidist.experimental.CommunicationOptions
mpi = pytest.mark.mpi
core = pytest.mark.core

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


# --- under MPI ------------------------------------------------------------------------


@pytest.fixture(params=[2, 3, 4])
def nodes(request, monkeypatch, strategy):
    """The nodes that the ranks play: for each a list of its ranks.

    Several machines are several nodes as they are.
    """
    everyone = everywhere(group_of(strategy).communicator.node_ranks)
    machines = sorted(list(x) for x in {*map(tuple, everyone)})
    count = request.param - (len(machines) > 1)  # that each machine plays
    if count > max(map(len, machines)):
        pytest.skip("more nodes than ranks")
    monkeypatch.setenv("MPIDIST_SIMULATED_NODES", str(count))
    monkeypatch.delenv("MPIDIST_IMPLEMENTATION", raising=False)
    found = []
    for ranks in machines:
        of_rank = [k * count // len(ranks) for k in range(len(ranks))]
        found += [
            [rank for rank, node in zip(ranks, of_rank, strict=True) if node == k]
            for k in dict.fromkeys(of_rank)
        ]
    return found


@pytest.fixture
def on_nodes(nodes, new_strategy, monkeypatch):
    """Make strategies that reduce by nodes whatever the size, in small pieces."""
    for module in (hierarchical_route, device_routes):
        monkeypatch.setattr(module, "LEAST_BYTES", 1)
    monkeypatch.setattr(node_module, "_AREA_BETWEEN_NODES", 256 * 1024)
    return lambda **options: new_strategy(implementation=SHARED, **options)


def sum_by_nodes(nodes, count, dtype):
    sums = []
    for ranks in nodes:
        total = sample(ranks[0], count, dtype)
        for rank in ranks[1:]:
            total = total + sample(rank, count, dtype)
        sums.append(total)
    return sums


@mpi
@core
@pytest.mark.parametrize("whole", [True, False])
def test_sums_are_those_of_the_nodes(nodes, on_nodes, rank, whole, monkeypatch):
    if not whole:
        monkeypatch.setattr(Messages, "whole_bytes_of_two", 0)
    strategy = on_nodes()
    comm = group_of(strategy).communicator
    assert (comm.num_nodes, comm.smallest_node) == (
        len(nodes),
        min(len(ranks) for ranks in nodes),
    )
    for count, dtype in [
        (0, "float32"),
        (1, "float64"),
        (3, "float32"),
        (8_192, "float32"),
        (40_001, "float32"),
        (300_001, "float64"),
        (1_000_000, "float32"),
    ]:
        x = sample(rank, count, dtype)
        before = x.copy()
        totals = [all_reduce(strategy, "SUM", x) for _ in range(3)]
        expected = functools.reduce(np.add, sum_by_nodes(nodes, count, dtype))
        assert totals[0].tobytes() == expected.tobytes()
        assert len({*everywhere(totals[0].tobytes())}) == 1
        assert {total.tobytes() for total in totals} == {totals[0].tobytes()}
        assert x.tobytes() == before.tobytes()


@mpi
@core
def test_nests_of_all_kinds(on_nodes, strategy, rank):
    assert_reduces_nests(on_nodes(), strategy, rank)


@mpi
@core
def test_half_floats_are_summed_in_float32(on_nodes, size):
    """1 + 2**-11 is no float16, so sums that round at each step lose what is small."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    strategy = on_nodes()
    for dtype, step in ((np.float16, 2.0**-11), (ml_dtypes.bfloat16, 2.0**-8)):
        for count in (100, 100_000):
            x = np.full(
                count, step if group_of(strategy).communicator.rank else 1.0, dtype
            )
            total = all_reduce(strategy, "SUM", x)
            expected = np.array(1 + (size - 1) * step, np.float32).astype(dtype)
            assert total.dtype == dtype
            assert (total == expected).all()


@mpi
@core
def test_the_guard_and_merge_calls_work_between_nodes(on_nodes, rank, size):
    assert_guards_and_merges(on_nodes(), rank, size)


@mpi
@pytest.mark.parametrize("away", ["first", "last"])
def test_a_rank_that_stays_away_is_named(on_nodes, rank, size, away):
    strategy = on_nodes()
    missing = 0 if away == "first" else size - 1
    # Long enough for the others to come in time on a busy machine.
    short = mpidist.experimental.CommunicationOptions(timeout_seconds=3)
    everywhere(None)

    def late():
        with after_the_others(rank == missing):
            context().all_reduce("SUM", 1.0, None if rank == missing else short)

    messages = raises_everywhere(
        mpidist.CollectiveTimeoutError, lambda: strategy.run(late)
    )
    assert all(f"rank {missing} did not come" in message for message in messages)


@mpi
@core
@pytest.mark.parametrize("whom", ["first", "last"])
def test_an_interrupt_between_nodes_ends_the_call_everywhere(
    on_nodes, rank, size, whom, monkeypatch
):
    """Neither peers nor the others of their nodes wait for what does not come."""
    strategy = on_nodes(timeout_seconds=50)
    x = np.ones(300_000)

    def reduce():
        return context().all_reduce("SUM", x)

    for _ in range(3):
        strategy.run(reduce)
    is_hit = rank == (0 if whom == "first" else size - 1)
    if is_hit:
        nodes = group_of(strategy).collectives.nodes
        messages = (
            group_of(strategy).communicator.messages if nodes is None else nodes.peers
        )

        def interrupted(*args):
            raise SignalError

        monkeypatch.setattr(messages, "wait", interrupted)
    start = time.monotonic()
    with pytest.raises(SignalError if is_hit else mpidist.CollectiveTimeoutError):
        strategy.run(reduce)
    assert time.monotonic() - start < 40  # not by the deadline
    with pytest.raises(mpidist.CollectiveTimeoutError, match="interrupted"):
        strategy.run(reduce)


@mpi
@core
def test_an_interrupt_while_a_slice_travels_keeps_its_memory(
    on_nodes, nodes, rank, size, monkeypatch
):
    """MPI may still write to it, so it is kept forever."""
    strategy = on_nodes(timeout_seconds=50)
    if group_of(strategy).collectives.nodes is None:
        pytest.skip("nodes of one rank send no slices")
    x = np.ones(300_000)
    all_reduce(strategy, "SUM", x)
    kept, is_hit = [], rank == 0
    leak = Transfers.leak

    def noted(self):
        kept.append(self)
        leak(self)

    def interrupted(self):
        raise SignalError

    monkeypatch.setattr(Transfers, "leak", noted)

    if is_hit:
        monkeypatch.setattr(engine_nodes.NodeExchange, "finish", interrupted)
    with pytest.raises(SignalError if is_hit else mpidist.CollectiveTimeoutError):
        all_reduce(strategy, "SUM", x)
    assert kept or not is_hit


@mpi
@core
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


@mpi
@core
@pytest.mark.parametrize("scheme", ["fp16", "none"])
def test_floating_point_errors_of_the_user_do_not_reach_into_a_call(
    on_nodes, rank, size, scheme
):
    strategy = on_nodes(compression=scheme)
    x = np.where(np.arange(50_000) % 3, 1.0, 1e-30).astype("float32")
    with np.errstate(all="raise"):
        found = all_reduce(strategy, "SUM", x)
    np.testing.assert_allclose(found, size * x, atol=1e-6)


@mpi
@core
def test_bytes_of_small_nests_are_counted_without_padding(nodes, new_strategy):
    strategy = new_strategy()
    nest = {"a": np.ones(3, "float32"), "b": np.ones(5, "int8")}
    before = strategy.communication_statistics().bytes.get("Allreduce", 0)
    strategy.run(lambda: context().all_reduce("SUM", nest))
    after = strategy.communication_statistics().bytes["Allreduce"]
    assert after - before == 17


@mpi
@core
def test_what_goes_by_nodes_unless_asked_otherwise(
    nodes, new_strategy, rank, size, monkeypatch
):
    """Small arrays go to all ranks, large ones by nodes: the sums are right at both."""
    strategy = new_strategy()
    host = group_of(strategy).collectives.transports.host
    several = _native.available() and len(nodes) < size
    assert (group_of(strategy).collectives.nodes is not None) == several
    assert host.name == ("shared" if several else "direct")
    made = []
    make = hierarchical_route.HierarchicalReduce.__init__

    def noted(self, *args):
        made.append(args)
        make(self, *args)

    monkeypatch.setattr(hierarchical_route.HierarchicalReduce, "__init__", noted)
    least = hierarchical_route.LEAST_BYTES
    for nbytes in (least - 8, least, 5 * 2**20 + 8):
        x = np.arange(nbytes // 8) % 1000 + rank * 1.0
        for op, expected in (
            ("SUM", (x - rank) * size + size * (size - 1) / 2),
            ("MEAN", x - rank + (size - 1) / 2),
            ("MAX", x - rank + size - 1),
        ):
            made.clear()
            for _ in range(2):
                np.testing.assert_array_equal(all_reduce(strategy, op, x), expected)
            assert len(made) == (several and nbytes >= least)
    made.clear()
    options = Options(implementation="DIRECT")
    np.testing.assert_array_equal(all_reduce(strategy, "MAX", x, options), expected)
    assert not made


@mpi
@core
def test_one_rank_alone_gets_the_sums_of_nodes(on_nodes, rank, size):
    strategy = on_nodes()
    x = sample(rank, 100_000, "float64")
    values = everywhere(x)
    v = make(strategy, np.zeros(1))

    def merge_fn(strategy, x):
        return float(np.sum(strategy.extended.reduce_to("SUM", x, v)))

    for _ in range(2):
        found = strategy.run(lambda: context().merge_call(merge_fn, args=(x,)))
        assert own(strategy, found) == pytest.approx(float(np.sum(sum(values))))


@mpi
@core
def test_the_short_way_meets_the_long_one(nodes, new_strategy, rank, size):
    """Ranks may differ in what lies where, and still make the same call."""
    strategy = new_strategy()
    x = np.arange(2_000.0) + rank
    expected = np.arange(2_000.0) * size + size * (size - 1) / 2
    for turn in range(6):
        shifted = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype)
        shifted[...] = x
        form = (x, np.repeat(x, 2)[::2], shifted)[(turn + rank) % 3]
        np.testing.assert_array_equal(all_reduce(strategy, "SUM", form), expected)
    with np.errstate(all="raise"):
        huge = all_reduce(strategy, "SUM", np.full(3, 1.7e308))
    assert np.isinf(huge).all()
    for count in (300, 700_000):  # one that goes to MPI, and one by nodes
        means = np.arange(float(count)) + rank
        for turn in range(4):
            options = Options(timeout_seconds=40) if (turn + rank) % 2 else None
            found = all_reduce(strategy, "MEAN", means, options)
            np.testing.assert_array_equal(found, means - rank + (size - 1) / 2)
    many = all_reduce(strategy, "MEAN", np.full(20, rank, "int64"))
    np.testing.assert_array_equal(many, np.full(20, (size - 1) / 2))

    def differ():
        context().all_reduce("SUM", x[: 100 + rank])

    all_reduce(strategy, "SUM", x[:100])
    raises_everywhere(mpidist.CollectiveMismatchError, lambda: strategy.run(differ))
    np.testing.assert_array_equal(all_reduce(strategy, "SUM", x), expected)


@mpi
def test_simulated_nodes_that_differ_between_ranks(monkeypatch, rank, size):
    if size == 1:
        return
    monkeypatch.setenv("MPIDIST_SIMULATED_NODES", "2" if rank else "1")
    raises_everywhere(mpidist.CollectiveMismatchError, mpidist.MPIStrategy)


# --- compression ----------------------------------------------------------------------


@mpi
@core
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


@mpi
@core
def test_only_sums_of_floats_are_compressed(on_nodes, rank, size):
    strategy = on_nodes(compression="bf16")
    ints = np.arange(100_000) * 1_001 + rank
    nest = {"ints": ints, "floats": np.full(100_000, 1 + 2.0**-12, "float64")}
    mean = all_reduce(strategy, "MEAN", nest)
    np.testing.assert_array_equal(
        mean["ints"], np.arange(100_000) * 1_001 + (size - 1) / 2
    )
    assert (mean["floats"] != nest["floats"]).any()
    for op in ("MIN", "MAX"):
        x = nest["floats"] + rank * 2.0**-12
        found = all_reduce(strategy, op, x)
        assert found[0] == x[0] + ((size - 1 if op == "MAX" else 0) - rank) * 2.0**-12


@mpi
@core
@pytest.mark.parametrize("packed", [False, True])
def test_error_feedback_makes_up_for_what_was_lost(on_nodes, rank, size, packed):
    strategy = on_nodes(compression="bf16", error_feedback=True)
    rng = np.random.default_rng(rank)
    x = rng.normal(size=200_000).astype("float32")
    tree = [x[:120_000], x[120_000:]] if packed else [x]

    def reduce_all(options=None):
        parts = strategy.run(lambda: context().all_reduce("SUM", tree, options))
        return np.hstack([own(strategy, part) for part in parts])

    exact = reduce_all(Options(compression="none"))
    total = np.zeros(x.size)
    steps = 30
    for _ in range(steps):
        one = reduce_all()
        total += one
    once = np.abs(one - exact).max()
    mean = np.abs(total / steps - exact).max()
    assert once > 0
    assert mean < once / 5
    assert len({*everywhere(total.tobytes())}) == 1


@mpi
@core
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
    assert group_of(strategy).collectives.compression == ("bf16", False)
    exact = Options(implementation="DIRECT")
    assert (all_reduce(strategy, "SUM", x, exact) == size * x).all()
