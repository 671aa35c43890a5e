"""The engine's routes on one node: eager, and shared with its sources and results."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import time
import types
from pathlib import Path

import numpy as np
import pytest
from launching import run_ranks
from replicas import (
    SHARED,
    SignalError,
    after_the_others,
    all_reduce,
    assert_guards_and_merges,
    assert_reduces_nests,
    context,
    core_by_mpi,
    everywhere,
    local,
    needs_core,
    own,
    raises_everywhere,
    sample,
)

import mpidist
from mpidist import _native
from mpidist._collectives import node as node_module
from mpidist._strategy.strategy import group_of

mpi = pytest.mark.mpi
core = pytest.mark.core


@pytest.fixture
def shared(one_node, new_strategy):
    """A strategy whose ranks share memory, all of them."""
    if not _native.available():
        pytest.skip("the native core is not built")
    return new_strategy(implementation=SHARED)


@pytest.fixture
def files_made(monkeypatch):
    """The files that this rank makes for a node; other jobs here have theirs."""
    made = []
    make_file = node_module.make_file

    def noted(*args):
        fd, path = make_file(*args)
        made.append(Path(path))
        return fd, path

    monkeypatch.setattr(node_module, "make_file", noted)
    return made


def channel_of(strategy):
    """Return the channel of the node; None for one rank."""
    node = group_of(strategy).collectives.resources.node
    return None if node is None else node.channel


@core_by_mpi
@pytest.mark.parametrize("op", ["SUM", "MEAN", "PROD"])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_results_are_those_in_the_order_of_the_ranks(shared, rank, size, dtype, op):
    channel = channel_of(shared)
    for count in (0, 1, 3, 1000, 9_000, 16_384, 100_001, 300_000, 1_234_567):
        before = channel.results_in_arena if channel else 0
        rows = [sample(k, count, dtype) for k in range(size)]
        expected = rows[0].copy()
        for row in rows[1:]:
            expected = expected * row if op == "PROD" else expected + row
        if op == "MEAN":
            expected = expected / expected.dtype.type(size)
        x = rows[rank].copy()
        for _ in range(3):
            found = all_reduce(shared, op, x)
            assert found.tobytes() == expected.tobytes()
            assert found.flags.c_contiguous
            assert found.flags.writeable
        assert x.tobytes() == rows[rank].tobytes()
        if channel is not None and x.nbytes > 128 * 1024:
            assert channel.results_in_arena == before + 3


@core_by_mpi
def test_a_nest_of_many_dtypes_and_sizes(shared, rank, size):
    channel = channel_of(shared)
    before = channel.results_in_arena if channel else 0
    dtypes = ["f4", "f8", "i4", "u2", "c8", "i8"]
    shapes = [(3,), (), (50, 60), (200_000,), (1,), (7, 11, 13), (40_000,)]
    kinds = list(enumerate(itertools.product(dtypes, shapes)))

    def leaf(rank, number, dtype, shape):
        rng = np.random.default_rng([rank, number])
        return rng.integers(-9, 9, shape).astype(dtype)

    nest = {f"{k:02}": leaf(rank, k, *kind) for k, kind in kinds}
    for _ in range(2):
        found = all_reduce(shared, "SUM", nest)
        for k, (dtype, shape) in kinds:
            x = found[f"{k:02}"]
            expected = sum(leaf(r, k, dtype, shape) for r in range(size))
            expected = np.asarray(expected).astype(dtype)
            assert (x.dtype, x.shape) == (np.dtype(dtype), shape)
            np.testing.assert_array_equal(x, expected)
            x += 1  # what is beside it stays
    if channel is not None:
        assert channel.results_in_arena == before + 2


@core_by_mpi
def test_results_stay_as_they_are_for_as_long_as_they_are_kept(shared, rank, size):
    """Slots of the arena, views of them and their order differ from rank to rank."""
    rng = random.Random(rank)
    kept = {}
    for k in range(60):
        count = (9_000, 20_000, 70_000)[k % 3]
        x = np.full(count, k * size + rank, "f4")
        tree = [x, x[:1000].copy()] if k % 5 == 0 else x
        found = all_reduce(shared, "SUM", tree)
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


@core_by_mpi
def test_results_outlive_their_strategy(new_strategy, rank, size):
    strategy = new_strategy(implementation=SHARED)
    x = np.full(30_000, rank + 1.0)
    kept = [all_reduce(strategy, "SUM", x) for _ in range(3)]
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

        single, nest = local(strategy, reduce)
        for found in (single, nest["a"], nest["b"][0]):
            assert (found == total).all()


@mpi
def test_update_reads_what_was_reduced(shared, rank, size):
    """Sums in the arena as values of update, more than there are slots kept."""
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


@core_by_mpi
def test_nests_of_all_kinds(shared, strategy, rank):
    assert_reduces_nests(shared, strategy, rank)


@core_by_mpi
def test_the_guard_and_merge_calls(shared, rank, size):
    assert_guards_and_merges(shared, rank, size)


@mpi
def test_a_rank_that_stays_away(new_strategy, rank, size):
    strategy = new_strategy(implementation=SHARED)
    if size == 1:
        return
    short = mpidist.experimental.CommunicationOptions(timeout_seconds=1)

    def late():
        with after_the_others(rank == 0):
            context().all_reduce("SUM", 1.0, None if rank == 0 else short)

    raises_everywhere(mpidist.CollectiveTimeoutError, lambda: strategy.run(late))


@core_by_mpi
@needs_core
def test_strategies_that_are_made_and_closed_leave_nothing(size, files_made):
    def mapped():
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        return maps.count("/dev/shm/mpidist-")

    options = mpidist.experimental.CommunicationOptions(implementation=SHARED)
    mpidist.MPIStrategy(communication_options=options).close()
    before = mapped()
    for _ in range(10):
        one = mpidist.MPIStrategy(communication_options=options)
        assert one.reduce("SUM", one.run(lambda: 1), axis=None) == size
        one.close()
    everywhere(None)
    assert mapped() <= before
    assert not [path for path in files_made if path.exists()]


@mpi
def test_options_that_differ_between_ranks(rank, size):
    if size == 1:
        return
    name = "SHARED" if rank else "AUTO"
    options = mpidist.experimental.CommunicationOptions(implementation=name)
    with pytest.raises((ValueError, mpidist.CollectiveError)):
        mpidist.MPIStrategy(communication_options=options)


@core_by_mpi
@pytest.mark.parametrize("count", [1, 5000, 300_000])
def test_overflow_is_infinite_and_no_error(strategy, rank, size, count):
    """As in MPI, whatever `numpy.errstate` says, on whatever rank."""
    x = np.full(count, 3e38, np.float32)
    with np.errstate(all="raise" if rank == 0 else "warn"):
        for _ in range(3):
            total = all_reduce(strategy, "SUM", x)
            assert (total == (x[0] if size == 1 else np.inf)).all()


@core_by_mpi
@pytest.mark.parametrize("count", [1, 5000])
def test_ranks_may_go_different_ways_through_one_call(shared, rank, size, count):
    """What is the same call may be a plain array on one rank, and none on another."""
    x = np.arange(count, dtype=np.float64).reshape(() if count == 1 else -1) + rank
    expected = size * (x - rank) + sum(range(size))
    kinds = {
        "plain": lambda: x,
        "strided": lambda: np.repeat(x, 2, axis=0)[::2] if count > 1 else x[()],
        "read-only": lambda: np.broadcast_to(x, x.shape),
        "subclass": lambda: x.view(Subclass),
    }

    def step(kind, options):
        return context().all_reduce("SUM", kinds[kind](), options)

    for _ in range(2):
        shared.run(lambda: step("plain", None))
    for kind in kinds:
        for culprit in range(size):
            here = rank == culprit
            options = mpidist.experimental.CommunicationOptions() if here else None
            one, other = (kind, "plain") if here else ("plain", kind)
            for chosen, given in ((one, None), (other, None), ("plain", options)):
                result = shared.run(lambda c=chosen, g=given: step(c, g))
                np.testing.assert_array_equal(own(shared, result), expected)


class Subclass(np.ndarray):
    pass


# --- places and sources -------------------------------------------------------------


@core_by_mpi
@pytest.mark.usefixtures("one_node")
def test_a_rank_without_room_takes_all_ranks_the_other_way(
    new_strategy, rank, size, monkeypatch
):
    """Results then have memory of their own on all ranks, and the same bits."""
    if size == 1 or not _native.available():
        pytest.skip("needs several ranks, and the native core")
    monkeypatch.setattr(node_module, "_LARGEST_ARENA", 16 * 2**20)
    strategy = new_strategy(implementation=SHARED)
    node, channel = group_of(strategy).collectives.resources.node, channel_of(strategy)
    x = np.random.default_rng(rank).normal(size=50_000)
    nest = [x, x.astype("f4")]

    def reduce():
        single = context().all_reduce("SUM", x)
        many = context().all_gather(x, 0)
        return [single, *context().all_reduce("SUM", nest), many]

    expected = local(strategy, reduce)
    for culprit in range(size):
        blocks = []
        while rank == culprit and (block := node.pool.take(2**16)) is not None:
            blocks.append(block)
        before = channel.results_in_arena
        found = local(strategy, reduce)
        for got, want in zip(found, expected, strict=True):
            assert got.tobytes() == want.tobytes()
        assert channel.results_in_arena == before
        del blocks, found
        local(strategy, reduce)
        assert channel.results_in_arena == before + 2


@pytest.mark.mpi(min_size=2)
@core
def test_arrays_in_the_arena_are_read_where_they_are(shared, rank, size):
    """Results of earlier calls too, if all ranks pass them in the same order."""
    channel = channel_of(shared)

    def twice():
        x = context().all_reduce("SUM", np.full(30_000, rank + 1.0))
        x += rank
        return context().all_reduce("SUM", x)

    total = size * size * (size + 1) / 2 + size * (size - 1) / 2
    for _ in range(3):
        before = channel.sources_in_arena
        assert (local(shared, twice) == total).all()
        assert channel.sources_in_arena == before + 1


@pytest.mark.mpi(min_size=2)
@core
def test_a_loss_that_is_kept_does_not_keep_its_gradients(shared, rank, size):
    pool = group_of(shared).collectives.resources.node.pool
    losses = []
    for k in range(10):
        nest = {"gradient": np.full(30_000, 1.0), "loss": np.array(float(k + rank))}
        found = all_reduce(shared, "SUM", nest)
        losses.append(found["loss"])
        del found
    assert pool.used == 0
    for k, loss in enumerate(losses):
        assert loss == size * k + size * (size - 1) / 2
        assert (type(loss), loss.shape) == (np.ndarray, ())


@pytest.mark.mpi(min_size=2)
@core
@pytest.mark.parametrize("count", [10, 50_000])
def test_a_rank_without_memory_tells_all(shared, rank, size, monkeypatch, count):
    x = np.full(count, rank + 1.0)

    def reduce():
        return context().all_reduce("SUM", x)

    local(shared, reduce)
    for victim in range(size):
        if rank == victim:
            no_memory_once(shared, monkeypatch)
        raises_everywhere(MemoryError, lambda: shared.run(reduce))
        monkeypatch.undo()
        assert (local(shared, reduce) == size * (size + 1) / 2).all()


def no_memory_once(strategy, monkeypatch):
    """Let the next result of a plan have no memory: private or in the arena."""
    empty = np.empty

    def fail(*args):
        monkeypatch.undo()
        raise MemoryError("no memory here")

    monkeypatch.setattr(np, "empty", fail)
    full = types.SimpleNamespace(take=fail)
    collectives = group_of(strategy).collectives
    collectives.plans.quick.forget()  # the core makes small results itself
    for plan in collectives.cache.plans():
        if plan.route == "shared":
            monkeypatch.setattr(plan, "arena", full)
        else:
            monkeypatch.setattr(plan, "_new", fail)
    assert np.empty is not empty


# --- making the strategy ------------------------------------------------------------


@needs_core
def test_files_of_killed_processes_are_unlinked(monkeypatch, tmp_path):
    monkeypatch.setattr(node_module, "SHARED_MEMORY", str(tmp_path))
    hour_ago = time.time() - 3600
    fd, locked = node_module.make_file(8192, 4096)
    open_fd, abandoned = node_module.make_file(8192, 4096)
    os.close(open_fd)  # as the end of a process does
    others = tmp_path / "mpidist-results.npy"
    others.touch()
    linked = tmp_path / "mpidist-link.shared-memory"
    linked.symlink_to(others)
    young = tmp_path / "mpidist-young.shared-memory"
    for path in (locked, abandoned, others):
        os.utime(path, (hour_ago, hour_ago))
    young.touch()  # it may be locked in a moment
    made_fd, made = node_module.make_file(8192, 4096)
    assert not os.path.exists(abandoned)
    found = {str(path) for path in tmp_path.iterdir()}
    assert found == {locked, made, str(others), str(linked), str(young)}
    os.close(fd)
    os.close(made_fd)


STEPS = ["make_file", "map_file", "connect"]


@core_by_mpi
@pytest.mark.parametrize("step", STEPS)
def test_what_fails_on_one_rank_takes_all_ranks_to_mpi(
    new_strategy, rank, size, monkeypatch, step
):
    """No rank waits for another, and the strategy works: by MPI."""
    if size == 1 or not _native.available():
        pytest.skip("needs several ranks, and the native core")
    monkeypatch.delenv("MPIDIST_IMPLEMENTATION", raising=False)

    def fail(*args, **kwargs):
        raise OSError("no room here")

    for culprit in range(size) if step != "make_file" else [0]:
        with monkeypatch.context() as patch:
            if rank == culprit:
                patch.setattr(node_module, step, fail)
            one = new_strategy()
        assert group_of(one).collectives.resources.transports.host.name == "direct"
        assert all_reduce(one, "SUM", rank) == sum(range(size))
        with monkeypatch.context() as patch:
            if rank == culprit:
                patch.setattr(node_module, step, fail)
            messages = raises_everywhere(
                ValueError, lambda: new_strategy(implementation=SHARED)
            )
        assert all("no room here" in message for message in messages)


@core_by_mpi
def test_memory_is_unlinked_at_once(files_made, shared, rank, size):
    everywhere(None)
    assert rank or len(files_made) == (size > 1)
    assert not [path for path in files_made if path.exists()]


# --- exceptions from outside --------------------------------------------------------


@pytest.fixture
def alarm():
    """Have a signal raise `SignalError` after so many seconds."""

    def handler(number, frame):
        raise SignalError

    before = signal.signal(signal.SIGALRM, handler)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.mpi(min_size=2)
@core
@pytest.mark.parametrize("count", [1, 300_000])
def test_a_signal_ends_a_wait_and_the_others_are_told(new_strategy, rank, alarm, count):
    """The others do not wait for what does not come, not even till the deadline."""
    strategy = new_strategy(timeout_seconds=50)
    x = np.ones(count)

    def reduce():
        return context().all_reduce("SUM", x)

    strategy.run(reduce)
    everywhere(None)
    start = time.monotonic()
    if rank == 0:
        alarm(1.0)
        with pytest.raises(SignalError):
            strategy.run(reduce)
        everywhere(None)
    else:
        everywhere(None)  # rank 0 was alone when it was hit
        with pytest.raises(mpidist.CollectiveTimeoutError):
            strategy.run(reduce)
    assert time.monotonic() - start < 40
    with pytest.raises(mpidist.CollectiveTimeoutError, match=r"interrupted|has left"):
        strategy.run(reduce)


# --- whole jobs ---------------------------------------------------------------------

PROGRAM = """
import hashlib
import numpy as np
import mpidist

strategy = mpidist.MPIStrategy()
rng = np.random.default_rng(strategy.replica_id)
nest = [rng.normal(size=n).astype(np.float32) for n in (3, 7000, 100_000, 1_000_001)]
context = mpidist.get_replica_context
result = strategy.run(lambda: [context().all_reduce("SUM", nest),
                               [context().all_reduce("SUM", x) for x in nest]])
leaves = strategy.experimental_local_results(result)[0]
digest = hashlib.blake2b(b"".join(x.tobytes() for part in leaves for x in part))
print(digest.hexdigest())
"""


@core
def test_results_are_the_same_bits_from_run_to_run(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    runs = [run_ranks(3, [program], timeout=100) for _ in range(2)]
    for one in runs:
        assert one.returncode == 0, one.stderr
    lines = [line for one in runs for line in one.stdout.split()]
    assert len(lines) == 6
    assert len(set(lines)) == 1


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
    done = run_ranks(2, ["-c", FINALIZE % how], timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["120000"] * 2
