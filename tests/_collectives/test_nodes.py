"""One node, and several that one machine plays: reductions, headers, data."""

import ctypes
import functools
import itertools
import mmap
import signal
import time
import warnings

import numpy as np
import pytest
from replicas import (
    SignalError,
    after_the_others,
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
from mpidist import _native
from mpidist._collectives import hierarchical_route, nodes as engine_nodes
from mpidist._mpi import between, buffers
from mpidist._mpi.allreduce_algorithm import NEVER, Algorithm
from mpidist._mpi.requests import Transfer
from mpidist._strategy.strategy import group_of

Options = mpidist.experimental.CommunicationOptions
mpi = pytest.mark.mpi
core = pytest.mark.core
# One node as well, whose ranks share memory.
by_layout = pytest.mark.parametrize("nodes", [1, 2, 3, 4], indirect=True)


def combine_by_nodes(op, nodes, parts):
    """Return the sum or product of parts of ranks: of each node, then of all."""
    combine = np.multiply if op == "PROD" else np.add
    total = functools.reduce(
        combine,
        [functools.reduce(combine, [parts[r] for r in ranks]) for ranks in nodes],
    )
    return total / total.dtype.type(len(parts)) if op == "MEAN" else total


@core_by_mpi
@by_layout
@pytest.mark.parametrize("gathers", [None, False, True])
def test_sums_are_those_of_the_nodes(nodes, on_nodes, rank, size, gathers, monkeypatch):
    """In the order of the ranks, if MPI does not add the sums of more than two nodes.

    On one node large results are where all ranks have written them.
    """
    if gathers is not None:
        chosen = Algorithm(gathers, 2, 2**16, 2**20 if gathers else NEVER)
        monkeypatch.setattr(buffers, "fastest_algorithm", lambda *_: chosen)
    strategy = on_nodes()
    comm = group_of(strategy).communicator
    shape = len(nodes), min(len(ranks) for ranks in nodes)
    assert (comm.num_nodes, comm.smallest_node) == shape
    node = group_of(strategy).collectives.resources.node
    ordered = gathers or len(nodes) < 3
    arrays = [
        (0, "float32"),
        (1, "float64"),
        (3, "float32"),
        (8_192, "float32"),
        (40_001, "float32"),
        (300_001, "float64"),
        (1_000_000, "float32"),
    ]
    operations = ["SUM"] if gathers is not None else ["SUM", "MEAN", "PROD"]
    for op, (count, dtype) in itertools.product(operations, arrays):
        parts = [sample(r, count, dtype) for r in range(size)]
        x = parts[rank].copy()
        before = node.channel.results_in_arena if node is not None else 0
        totals = [all_reduce(strategy, op, x) for _ in range(3)]
        expected = combine_by_nodes(op, nodes, parts)
        if ordered:  # what travels with a header is added in the order of the ranks
            in_order = combine_by_nodes(op, [range(size)], parts)
            assert totals[0].tobytes() in (expected.tobytes(), in_order.tobytes())
        largest = float(np.abs(expected).max(initial=0.0))
        rtol = 16 * np.finfo(dtype).eps
        np.testing.assert_allclose(totals[0], expected, rtol, rtol * largest)
        assert len({*everywhere(totals[0].tobytes())}) == 1
        assert {total.tobytes() for total in totals} == {totals[0].tobytes()}
        assert all(y.flags.c_contiguous and y.flags.writeable for y in totals)
        assert x.tobytes() == parts[rank].tobytes()
        if node is not None and x.nbytes > 128 * 1024:
            assert node.channel.results_in_arena == before + 3


@core_by_mpi
@by_layout
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


@core_by_mpi
@by_layout
@pytest.mark.parametrize("has_core", [True, False])
def test_extremes_of_long_doubles_are_in_one_order(
    on_nodes, rank, size, monkeypatch, has_core
):
    """-0.0 is below 0.0, and NaN wins, whichever rank has it, by every way."""
    strategy = on_nodes()
    if not has_core:
        monkeypatch.setattr(_native, "available", lambda: False)
    direct = Options(implementation="DIRECT")
    device = strategy.extended.worker_devices[0]
    for op, count, first in itertools.product(
        ("MIN", "MAX"), (10, 1000, 40_000), (0.0, -0.0)
    ):
        x = np.full(count, -first if rank else first, np.longdouble)
        x[0] = np.nan if rank == size - 1 else 1
        found = [all_reduce(strategy, op, x, how) for how in (None, direct)]
        value = strategy.run(lambda x=x: x)
        to_root = strategy.extended.reduce_to(op, value, device)
        negative = bool(np.signbit(first)) if size == 1 else op == "MIN"
        for result in found if rank else [*found, to_root]:
            assert np.isnan(result[0])
            assert (np.signbit(result[1:]) == negative).all(), (op, count, first)


@core_by_mpi
@by_layout
def test_products_of_nan_have_the_same_bits_on_all_ranks(on_nodes, rank):
    strategy = on_nodes()
    for count in (1000, 100_000):
        x = np.full(count, -np.nan if rank else np.nan)
        product = all_reduce(strategy, "PROD", x)
        assert np.isnan(product).all()
        assert len({*everywhere(product.tobytes())}) == 1


@mpi
@pytest.mark.parametrize("away", ["first", "last"])
def test_a_rank_that_stays_away_is_named(on_nodes, rank, size, away, monkeypatch):
    """By the deadline of one rank, which comes when it knows that the others wait."""
    monkeypatch.setenv("MPIDIST_STALL_SECONDS", "0.1")
    strategy = on_nodes()
    missing = 0 if away == "first" else size - 1
    waiters = [r for r in range(size) if r != missing]
    short = mpidist.experimental.CommunicationOptions(timeout_seconds=1)
    guard = group_of(strategy).guard

    def late():
        with after_the_others(rank == missing):
            notices = guard.breakdown.notices
            while rank == waiters[0] and size - 2 > sum(  # not of earlier waits
                one.sequence == guard.sequence for one in notices._latest.values()
            ):
                notices.read()
            context().all_reduce("SUM", 1.0, short if rank == waiters[0] else None)

    messages = raises_everywhere(
        mpidist.CollectiveTimeoutError, lambda: strategy.run(late)
    )
    assert all(f"rank {missing} did not reach" in message for message in messages)


@core_by_mpi
@pytest.mark.parametrize("whom", ["first", "last"])
def test_an_interrupt_between_nodes_ends_the_call_everywhere(
    on_nodes, rank, size, whom, monkeypatch
):
    """Neither peers nor the others of their nodes wait for what does not come.

    MPI may still write to a slice that travels, so its memory is kept forever.
    """
    strategy = on_nodes(timeout_seconds=50)
    x = [np.ones(300_000), np.ones(200_000)]  # too large for the core
    for _ in range(3):
        all_reduce(strategy, "SUM", x)
    kept, leak = [], Transfer.leak
    monkeypatch.setattr(Transfer, "leak", lambda self: kept.append(self) or leak(self))
    nodes = group_of(strategy).collectives.resources.nodes
    is_hit = rank == (0 if whom == "first" else size - 1)
    if is_hit:

        def interrupted(*args):
            raise SignalError

        way = group_of(strategy).communicator.buffers if nodes is None else nodes.peers
        monkeypatch.setattr(way, "finish", interrupted)
    start = time.monotonic()
    with pytest.raises(SignalError if is_hit else mpidist.CollectiveTimeoutError):
        all_reduce(strategy, "SUM", x)
    assert time.monotonic() - start < 40  # not by the deadline
    assert kept or nodes is None or not is_hit
    with pytest.raises(mpidist.CollectiveTimeoutError, match="interrupted"):
        all_reduce(strategy, "SUM", x)


@core_by_mpi
def test_a_signal_while_the_core_moves_data_ends_the_call_everywhere(
    new_strategy, nodes, rank, size
):
    if len(nodes) < size or not _native.available():
        pytest.skip("no data are moved by the core")
    strategy = new_strategy(timeout_seconds=50)
    x, is_hit = np.ones(120_000), rank == 0
    channel = group_of(strategy).guard.channel

    def move():
        context().all_reduce("SUM", x)

    strategy.run(move)
    before = channel.iallreduces + channel.iallgathers

    hits = []

    def handler(*_):
        if channel.moves and not hits:
            hits.append(1)
            raise SignalError

    def move_often():
        for _ in range(20_000):
            move()

    kept = signal.signal(signal.SIGALRM, handler) if is_hit else None
    try:
        if is_hit:
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0003)
        with pytest.raises(SignalError if is_hit else mpidist.CollectiveTimeoutError):
            strategy.run(move_often)
    finally:
        if is_hit:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, kept)
    assert before >= 1
    with pytest.raises(mpidist.CollectiveTimeoutError, match="interrupted"):
        strategy.run(move)


@pytest.mark.mpi(min_size=2)
@core
@pytest.mark.parametrize("count", [10, 7000])
def test_a_gather_inside_another_is_refused_and_the_first_goes_on(
    on_nodes, rank, size, count
):
    """By a signal handler: the gathers of the core know of each other, too."""
    strategy = on_nodes(timeout_seconds=50)
    x = np.full(count, rank, np.int64)
    refused = []

    def gather():
        return context().all_gather(x, 0)

    def handler(*_):
        with pytest.raises(RuntimeError, match="one after the other"):
            gather()
        refused.append(1)
        everywhere(None)

    def step():
        for _ in range(3):  # the core has it then
            gather()
        everywhere(None)
        if rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        else:
            everywhere(None)  # rank 0 was alone when it was hit
        found = gather()
        assert np.array_equal(found, np.repeat(np.arange(size), count))

    kept = signal.signal(signal.SIGALRM, handler)
    try:
        strategy.run(step)
    finally:
        signal.signal(signal.SIGALRM, kept)
    assert len(refused) == (rank == 0)
    strategy.run(gather)


@core_by_mpi
@by_layout
@pytest.mark.parametrize("scheme", ["none", "fp16"])
def test_floating_point_errors_of_the_user_do_not_reach_into_a_call(
    on_nodes, rank, size, scheme
):
    """Whatever `numpy.errstate` says on a rank: the others would wait for it there.

    Overflow is infinite, also of arrays that are read where they are.
    """
    strategy = on_nodes(compression=scheme)
    largest = np.finfo(np.float32).max
    counts = (1, "raise"), (5_000, "error"), (30_000, "ignore"), (300_000, "error")
    for count, first in counts:
        huge = np.full(count, largest, np.float32)
        buffers = strategy.buffers_like(huge)
        buffers[...] = huge
        mixed = np.where(np.arange(count) % 3, 1.0, 1e-30).astype("float32")

        def reduce(how, huge=huge, buffers=buffers, mixed=mixed):
            with warnings.catch_warnings(), np.errstate(all="warn"):
                warnings.simplefilter("error")
                if how != "error":
                    np.seterr(all=how if rank == 0 else "ignore")
                all_reduce = context().all_reduce
                found = [all_reduce("SUM", huge), all_reduce("MEAN", buffers)]
                return [*found, all_reduce("SUM", buffers), all_reduce("SUM", mixed)]

        for how in (first, "raise", "error", "ignore"):  # the first makes the plan
            *infinite, small = own(strategy, strategy.run(reduce, args=(how,)))
            for x in infinite:
                assert (x == (largest if size == 1 else np.inf)).all()
            np.testing.assert_allclose(small, size * mixed, atol=1e-6)


@core_by_mpi
@needs_core
def test_bytes_of_small_nests_are_counted_without_padding(nodes, new_strategy):
    strategy = new_strategy()
    nest = {"a": np.ones(3, "float32"), "b": np.ones(5, "int8")}
    before = strategy.communication_statistics().bytes.get("Allreduce", 0)
    strategy.run(lambda: context().all_reduce("SUM", nest))
    after = strategy.communication_statistics().bytes["Allreduce"]
    assert after - before == 17


@core_by_mpi
@pytest.mark.parametrize("few", [False, True])
def test_what_goes_by_nodes_unless_asked_otherwise(
    nodes, new_strategy, rank, size, monkeypatch, few
):
    """Small arrays go to all ranks, large ones of nodes of many ranks by nodes."""
    if not few:
        monkeypatch.setattr(engine_nodes, "LEAST_RANKS", 2)
    strategy = new_strategy()
    host = group_of(strategy).collectives.resources.transports.host
    several = _native.available() and len(nodes) < size
    assert (group_of(strategy).collectives.resources.nodes is not None) == several
    assert host.name == ("shared" if several else "direct")
    made = []
    make = hierarchical_route.HierarchicalReduce.__init__

    def noted(self, *args):
        made.append(args)
        make(self, *args)

    monkeypatch.setattr(hierarchical_route.HierarchicalReduce, "__init__", noted)
    least = (engine_nodes.LEAST_BYTES + 7) // 8 * 8
    for nbytes in (between.ROOM, least - 8, least, 5 * 2**20 + 8):
        x = np.arange(nbytes // 8) % 1000 + rank * 1.0
        for op, expected in (
            ("SUM", (x - rank) * size + size * (size - 1) / 2),
            ("MEAN", x - rank + (size - 1) / 2),
            ("MAX", x - rank + size - 1),
        ):
            made.clear()
            for _ in range(2):
                np.testing.assert_array_equal(all_reduce(strategy, op, x), expected)
            smallest = min(map(len, nodes))
            many = several and smallest >= engine_nodes.LEAST_RANKS
            assert len(made) == (many and nbytes >= least)
    made.clear()
    options = Options(implementation="DIRECT")
    np.testing.assert_array_equal(all_reduce(strategy, "MAX", x, options), expected)
    assert not made


@core_by_mpi
@by_layout
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


@core_by_mpi
@by_layout
@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX"])
def test_what_travels_as_another_dtype_is_converted_in_parts(on_nodes, rank, size, op):
    """Of pieces of the nodes, or of buckets, which are at least 1 MiB."""
    strategy = on_nodes(bytes_per_pack=1)
    parts = []
    for r in range(size):
        x = np.arange(300_000) % 120 + r
        nest = [x.astype(y) for y in ("int8", "float32", "float16", "uint16")]
        parts.append([*nest, nest[0][:0], nest[1][:3], nest[2].reshape(600, -1).T])
    for root in (None, size - 1):
        all_reduce = group_of(strategy).collectives.all_reduce
        found = all_reduce(mpidist.ReduceOp[op], parts[rank], root=root)
        for number, total in enumerate(found):
            values = np.array([nest[number] for nest in parts])
            if root not in (None, rank):
                assert total is None
            elif op == "MEAN":
                expected = values.mean(0, dtype="float64")
                np.testing.assert_allclose(total, expected, rtol=1e-3)
            else:
                combine = np.add if op == "SUM" else np.maximum
                expected = combine.reduce(values, 0, values.dtype)
                np.testing.assert_array_equal(total, expected)
                assert total.dtype == values.dtype


@mpi
def test_simulated_nodes_that_differ_between_ranks(monkeypatch, rank, size):
    if size == 1:
        return
    monkeypatch.setenv("MPIDIST_SIMULATED_NODES", "2" if rank else "1")
    raises_everywhere(mpidist.CollectiveMismatchError, mpidist.MPIStrategy)


# --- data behind a header -------------------------------------------------------------


@core_by_mpi
def test_nothing_behind_the_end_of_an_array_is_read(on_nodes, rank, size):
    """The array ends where the next page cannot be read."""
    strategy, page = on_nodes(), mmap.PAGESIZE
    memory = mmap.mmap(-1, 4 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    last = ctypes.c_void_p(address + 3 * page)
    assert libc.mprotect(last, ctypes.c_size_t(page), 0) == 0
    count = 1001  # no multiple of 16 bytes
    x = np.frombuffer(memory, np.float32, count, 3 * page - 4 * count)
    x[...] = rank
    try:
        for _ in range(3):
            total = all_reduce(strategy, "SUM", x)
            assert (total == size * (size - 1) / 2).all()
    finally:
        assert libc.mprotect(last, ctypes.c_size_t(page), 3) == 0


@core_by_mpi
def test_nests_that_share_the_memory_of_data_in_progress(on_nodes, size):
    """Plans grow it; a call may use it when another plan is made.

    In the first nest are more runs of leaves of one dtype than collectives may be in
    progress.
    """
    strategy = on_nodes()
    for shapes in (70 * [20], *([n, n] for n in (300, 3_000, 30_000, 300))):
        nest = [np.ones(n, "i8" if k % 2 else "f4") for k, n in enumerate(shapes)]
        for _ in range(2):
            totals = all_reduce(strategy, "SUM", nest)
            assert all((x == size).all() for x in totals)
