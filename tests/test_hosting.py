"""Results in memory that all ranks can write: places, layout, and all-reduces."""

import gc
import itertools
import random
import sys

import numpy as np
import pytest
from launching import run_ranks
from replicas import context, own

import mpidist
from mpidist import _comm, _holdings
from mpidist._holdings import Segment
from mpidist._transports import _arena, _hosting
from mpidist._transports._arena import Arena
from mpidist._transports._hosting import HostedLeaf

SHARED = mpidist.experimental.CommunicationImplementation.SHARED
DIRECT = mpidist.experimental.CommunicationImplementation.DIRECT
KIB = 1024
mpi = pytest.mark.mpi
core = pytest.mark.core


# --- places, in one process -----------------------------------------------------------


@pytest.fixture
def make_arena(monkeypatch):
    monkeypatch.setattr(_holdings, "_held", {})
    monkeypatch.setattr(_arena, "free_bytes", lambda: 2**40)
    kept = []

    def make(nbytes):
        memory = np.zeros(nbytes + 4096, np.uint8)
        kept.append(memory)
        start = -memory.ctypes.data % 4096
        place = (memory.ctypes.data + start, nbytes)
        return Arena(Segment(b"key", 1, lambda: None, [place]), 0, 1, nbytes)

    return make


def test_a_place_is_used_again_when_nothing_refers_to_it(make_arena):
    arena = make_arena(100 * KIB)
    block, start = arena.empty(5000)
    result = np.ndarray((10, 125), np.float32, block)
    row = result[3]
    del block, result  # the view keeps it
    second, other = arena.empty(5000)
    assert other != start
    row[:] = 7
    second[:] = 0
    assert (row == 7).all()
    del row
    third, again = arena.empty(5000)
    assert again == start
    assert arena.parts[0][start] == third[0]  # the others read what is written there
    third[0] = 99
    assert arena.parts[0][start] == 99


def test_no_room_is_none_until_something_is_dropped(make_arena):
    arena = make_arena(64 * KIB)
    kept = []
    while (place := arena.empty(8000)) is not None:
        kept.append(place)
    assert len(kept) == 5  # of 12 KiB each: two pages, and the half that shifts them
    assert arena.empty(1) is not None  # what is smaller may still have room
    del place, kept[1:3]
    # Neighbours that are free are one gap; after a while it is looked for again.
    found = next(filter(None, (arena.empty(18_000) for _ in range(200))))
    assert found[1] == 12 * KIB + 2048
    assert arena.empty(2**20) is None


def test_fresh_pages_are_only_taken_while_memory_is_free(make_arena, monkeypatch):
    arena = make_arena(100 * KIB)
    first = arena.empty(9000)
    monkeypatch.setattr(_arena, "free_bytes", lambda: 0)
    assert arena.empty(9000) is None
    start = first[1]
    del first
    assert arena.empty(9000)[1] == start  # which has pages already


@pytest.mark.parametrize("seed", range(5))
def test_places_never_overlap(make_arena, seed):
    rng = random.Random(seed)
    arena = make_arena(400 * KIB)
    live = []
    given = 0
    for step in range(3000):
        nbytes = rng.choice([100, 4096, 5000, 20_000, 70_000])
        place = arena.empty(nbytes)
        if place is not None:
            given += 1
            block, start = place
            assert block.nbytes == nbytes
            assert start % 4096 == 2048
            assert start + nbytes <= arena.nbytes
            block[:] = step % 251
            live.append((block, start, step % 251))
            del block
        place = None
        for _ in range(rng.randrange(3)):
            if live:
                live.pop(rng.randrange(len(live)))
        ranges = sorted((start, start + block.nbytes) for block, start, _ in live)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
        assert all((block == value).all() for block, _, value in live)
    assert given > 2000


def test_thousands_of_kept_results_are_not_searched_in_each_call(make_arena):
    arena = make_arena(2**25)
    kept = list(filter(None, (arena.empty(100) for _ in range(9000))))
    assert len(kept) == 2**25 // 4096
    looked = []
    arena._gap = lambda room: looked.append(room)
    for _ in range(650):
        assert arena.empty(100) is None
    assert len(looked) <= 10


class StopError(Exception):
    """What a signal's handler raises."""


def interrupt(function, step):
    """Call a function, with an exception before one of its steps; say if it came."""
    left = step

    def trace(frame, event, arg):
        nonlocal left
        if not frame.f_code.co_filename.endswith(("_arena.py", "_holdings.py")):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                raise StopError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except StopError:
        return True
    finally:
        sys.settrace(before)
    return False


def test_exceptions_between_any_two_steps_leave_places_where_they_are(make_arena):
    """What a rank tells the others is where its memory is, whatever signals raise."""
    came, step = True, 0
    while came:
        arena = make_arena(60 * KIB)
        base = arena.parts[0].ctypes.data
        kept = arena.empty(7000)
        assert arena.empty(3000) is not None  # and dropped
        came = interrupt(lambda arena=arena: arena.empty(7000), step)
        live = [kept]
        for nbytes in (7000, 3000, 7000):
            arena.empty(nbytes)  # and dropped
            block, start = arena.empty(nbytes)
            assert block.ctypes.data == base + start, step
            assert all(not np.shares_memory(block, x) for x, _ in live), step
            live.append((block, start))
        step += 1
    assert step > 50


def test_all_ranks_may_take_fresh_memory_at_once(monkeypatch):
    monkeypatch.setattr(_holdings, "_held", {})
    memory = np.zeros(200 * KIB, np.uint8)
    places = [(memory.ctypes.data, 100 * KIB)] * 2
    arena = Arena(Segment(b"key", 1, lambda: None, places), 0, 2, 100 * KIB)
    monkeypatch.setattr(_arena, "free_bytes", lambda: 70 * KIB)
    assert arena.empty(40 * KIB) is None
    assert arena.empty(30 * KIB) is not None


# --- layout, in one process -----------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_every_element_is_added_up_by_one_rank(ranks):
    rng = np.random.default_rng(ranks)
    dtypes = [np.dtype(t) for t in ("f4", "f8", "c16", "i1", "i8")]
    leaves = [
        HostedLeaf(
            tuple(int(n) for n in rng.integers(1, 80, rng.integers(0, 4))),
            dtypes[rng.integers(len(dtypes))],
            "SUM",
            bool(rng.integers(2)),
        )
        for _ in range(40)
    ]
    leaves.append(HostedLeaf((700_000,), np.dtype("f4"), "SUM", False))
    sizes = [int(np.prod(leaf.shape)) for leaf in leaves]
    counts = [np.zeros(size, int) for size in sizes]
    layouts = [_hosting._lay_out(leaves, rank, ranks) for rank in range(ranks)]
    for starts, end, pieces in layouts:
        assert (starts, end) == layouts[0][:2]
        assert all(start % 64 == 0 for start in starts)
        seen = [np.zeros(size, int) for size in sizes]
        for piece in pieces:
            for leaf, which, first, last in (*piece.own, *piece.entries):
                dtype = leaves[leaf].dtype
                assert dtype == piece.dtype
                part = seen[leaf][which if which is not None else slice(None)]
                assert part.size * dtype.itemsize == last - first
                offset = first - starts[leaf]
                begin = 0 if which is None else which.start
                assert offset == begin * dtype.itemsize
                part += 1
            for leaf, which, first, last in piece.own:
                assert piece.start <= first <= last <= piece.stop
                counts[leaf][which if which is not None else slice(None)] += 1
        assert all((x == 1).all() for x in seen)  # either copied in, or added up here
    assert all((x == 1).all() for x in counts)
    spans = sorted(zip(layouts[0][0], leaves, strict=True), key=lambda pair: pair[0])
    for (start, leaf), (following, _) in itertools.pairwise(spans):
        assert start + int(np.prod(leaf.shape)) * leaf.dtype.itemsize <= following


# --- under MPI ------------------------------------------------------------------------


@pytest.fixture
def shared(new_strategy):
    return new_strategy(implementation=SHARED)


def spy_hosted(strategy, monkeypatch):
    """Return a list that gets an entry for each all-reduce whose results are hosted."""
    seen = []
    for name in ("reduce", "reduce_resident"):
        method = getattr(_hosting.Hosting, name)

        def spied(self, *args, method=method, name=name):
            seen.append(name)
            return method(self, *args)

        monkeypatch.setattr(_hosting.Hosting, name, spied)
    return seen


def run(strategy, function):
    return own(strategy, strategy.run(function))


SIZES = [9_000, 16_384, 100_001, 300_000, 1_234_567]


@mpi
@core
@pytest.mark.parametrize("op", ["SUM", "MEAN", "PROD"])
@pytest.mark.parametrize("size_", SIZES)
def test_results_are_those_in_the_order_of_the_ranks(
    shared, rank, size, monkeypatch, size_, op
):
    seen = spy_hosted(shared, monkeypatch)
    rows = [
        np.random.default_rng([k, size_]).standard_normal(size_).astype("f4")
        for k in range(size)
    ]
    expected = rows[0].copy()
    for row in rows[1:]:
        expected = expected * row if op == "PROD" else expected + row
    if op == "MEAN":
        expected = expected / np.float32(size)
    x = rows[rank].copy()
    for _ in range(3):  # the long way first, then the short one
        found = run(shared, lambda: context().all_reduce(op, x))
        assert found.tobytes() == expected.tobytes()
        assert found.flags.c_contiguous
        assert found.flags.writeable
    assert x.tobytes() == rows[rank].tobytes()
    if shared._collectives.comm.board is not None:
        assert seen == ["reduce"] * 3


@mpi
@core
def test_a_nest_of_many_dtypes_and_sizes(shared, rank, size, monkeypatch):
    seen = spy_hosted(shared, monkeypatch)
    dtypes = ["f4", "f8", "i4", "u2", "c8", "i8"]
    shapes = [(3,), (), (50, 60), (200_000,), (1,), (7, 11, 13), (40_000,)]
    kinds = list(enumerate(itertools.product(dtypes, shapes)))

    def leaf(rank, number, dtype, shape):
        rng = np.random.default_rng([rank, number])
        return rng.integers(-9, 9, shape).astype(dtype)

    nest = {f"{k:02}": leaf(rank, k, *kind) for k, kind in kinds}
    for _ in range(2):
        found = run(shared, lambda: context().all_reduce("SUM", nest))
        for k, (dtype, shape) in kinds:
            x = found[f"{k:02}"]
            expected = sum(leaf(r, k, dtype, shape) for r in range(size))
            expected = np.asarray(expected).astype(dtype)
            assert (x.dtype, x.shape) == (np.dtype(dtype), shape)
            np.testing.assert_array_equal(x, expected)
            x += 1  # what is beside it stays
    if shared._collectives.comm.board is not None:
        assert seen == ["reduce"] * 2


@mpi
@core
def test_results_stay_as_they_are_for_as_long_as_they_are_kept(shared, rank, size):
    """Places, views of places and their order differ from rank to rank."""
    rng = random.Random(rank)
    kept = {}
    for k in range(60):
        count = (9_000, 20_000, 70_000)[k % 3]
        x = np.full(count, k * size + rank, "f4")
        tree = [x, x[:1000].copy()] if k % 5 == 0 else x
        found = run(shared, lambda tree=tree: context().all_reduce("SUM", tree))
        total = sum(k * size + r for r in range(size))
        result, small = found if isinstance(found, list) else (found, None)
        assert (result == total).all()
        if small is not None:
            assert (small == total).all()
            result = small  # a view of a nest keeps all of it
        result[::2] = rank  # each rank has its own
        kept[k] = (result[1:900], total)
        for number in [n for n in kept if rng.random() < 0.1]:
            del kept[number]
        for view, expected in kept.values():
            assert (view[::2] == expected).all()
            assert (view[1::2] == rank).all()


@mpi
@core
def test_a_rank_without_room_takes_all_ranks_the_other_way(
    shared, rank, size, monkeypatch
):
    seen = spy_hosted(shared, monkeypatch)
    if size == 1:
        pytest.skip("one rank reduces nothing")
    arena = shared._collectives.transports.host.arena
    empty = arena.empty
    x = np.full(50_000, float(rank))
    nest = [x, x.astype("f4")]
    total = size * (size - 1) / 2

    def reduce():
        single = context().all_reduce("SUM", x)
        return single, context().all_reduce("SUM", nest)

    for k in range(6):
        none = k % 2 == 1
        here = rank == k // 2 % size
        arena.empty = (lambda nbytes: None) if none and here else empty
        seen.clear()
        single, (first, second) = run(shared, reduce)
        assert (single == total).all()
        assert (first == total).all()
        assert (second == total).all()
        assert len(seen) == (0 if none else 2)


@mpi
@core
def test_results_outlive_their_strategy(new_strategy, rank, size):
    strategy = new_strategy(implementation=SHARED)
    x = np.full(30_000, rank + 1.0)
    kept = [run(strategy, lambda: context().all_reduce("SUM", x)) for _ in range(3)]
    strategy.close()
    del strategy
    gc.collect()
    for result in kept:
        assert (result == size * (size + 1) / 2).all()
        result[:] = rank
    assert all((result == rank).all() for result in kept)


@mpi
@pytest.mark.parametrize("guard", [True, False])
def test_ways_may_differ_from_rank_to_rank(new_strategy, rank, size, guard):
    """Arrays with gaps, numbers of calls before, options that change nothing."""
    strategy = new_strategy(implementation=SHARED, guard=guard)
    options = mpidist.experimental.CommunicationOptions(timeout_seconds=50)
    x = np.full((300, 200), rank + 1.0)
    gaps = np.zeros((300, 400))[:, ::2]
    gaps[:] = x
    total = size * (size + 1) / 2
    for k in range(6):
        mine = gaps if (k + rank) % 2 else x
        some = options if (k // 2 + rank) % 2 else None

        def reduce(mine=mine, some=some):
            single = context().all_reduce("SUM", mine, some)
            return single, context().all_reduce("SUM", {"a": mine, "b": [mine]}, some)

        single, nest = run(strategy, reduce)
        for found in (single, nest["a"], nest["b"][0]):
            assert (found == total).all()


@mpi
def test_update_reads_what_was_reduced(shared, rank, size):
    """Sums in the arena as values of update, more than there are places kept."""
    with shared.scope():
        variable = mpidist.Variable(np.zeros(20_000))

    def merge(strategy, x):
        total = strategy.extended.reduce_to("SUM", x, destinations=variable)
        strategy.extended.update(variable, lambda v, t: v.assign_add(t), args=(total,))

    def step():
        context().merge_call(merge, args=(np.full(20_000, rank + 1.0),))

    for _ in range(20):
        shared.run(step)
    assert (variable.numpy() == 20 * size * (size + 1) / 2).all()


@mpi
@core
def test_a_rank_without_memory_takes_the_long_way(shared, rank, size, monkeypatch):
    """Where it fails for want of memory alone, the call goes on all the same."""
    if shared._collectives.comm.board is None:
        pytest.skip("one rank reduces nothing")
    x = np.full(50_000, rank + 1.0)

    def reduce():
        return context().all_reduce("SUM", x)

    run(shared, reduce)
    copy_in = _hosting.Hosting.copy_in
    for victim in range(size):
        failed = []

        def fail(*args, victim=victim, failed=failed):
            if rank == victim and not failed:
                failed.append(True)
                raise MemoryError
            copy_in(*args)

        monkeypatch.setattr(_hosting.Hosting, "copy_in", fail)
        found = run(shared, reduce)
        assert (found == size * (size + 1) / 2).all()
        assert bool(failed) == (rank == victim)


@mpi
@core
def test_a_loss_that_is_kept_does_not_keep_its_gradients(shared, rank, size):
    if shared._collectives.comm.board is None:
        pytest.skip("one rank reduces nothing")
    empty = shared._collectives.transports.host.arena.empty
    losses, starts = [], set()
    for k in range(10):
        nest = {"gradient": np.full(30_000, 1.0), "loss": np.array(float(k + rank))}
        found = run(shared, lambda nest=nest: context().all_reduce("SUM", nest))
        losses.append(found["loss"])
        del found
        starts.add(empty(240_064)[1])  # 30,000 float64, and a line for the loss
    assert len(starts) == 1
    for k, loss in enumerate(losses):
        assert loss == size * k + size * (size - 1) / 2
        assert (type(loss), loss.shape) == (np.ndarray, ())


@mpi
def test_an_mpi_without_a_second_window(new_strategy, rank, size, monkeypatch, capfd):
    def fail(self, nbytes, zeros):
        raise MemoryError("no room")

    monkeypatch.setattr(_comm.Communicator, "share_segment", fail)
    strategy = new_strategy(implementation=SHARED)
    if size > 1:
        assert strategy._collectives.transports.host.arena is None
        assert "no memory for results: no room" in capfd.readouterr().err
    x = np.full(50_000, rank + 1.0)
    for _ in range(2):
        found = run(strategy, lambda: context().all_reduce("SUM", [x, x]))
        assert all((y == size * (size + 1) / 2).all() for y in found)


FINALIZE = """
import numpy as np
from mpi4py import MPI
import mpidist

def reduce():
    return mpidist.get_replica_context().all_reduce("SUM", np.ones(30_000))

strategy = mpidist.MPIStrategy()
buffer = strategy.buffers_like(np.ones(30_000))
for _ in range(2):
    (found,) = strategy.experimental_local_results(strategy.run(reduce))
if %r == "close":
    strategy.close()
MPI.Finalize()
found += 1
buffer += 1
print(int(found.sum() + buffer.sum()), flush=True)
"""


@pytest.mark.parametrize("how", ["", "close"])
def test_results_outlive_mpi(how):
    done = run_ranks(2, ["-c", FINALIZE % how], timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["120000"] * 2
