"""The engine's routes on one node: eager, and shared with its sources and results."""

from __future__ import annotations

import os
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
    all_reduce,
    context,
    core_by_mpi,
    everywhere,
    local,
    needs_core,
    raises_everywhere,
)

import mpidist
from mpidist import _native
from mpidist._collectives import bucket_route, dtype_table, node as node_module
from mpidist._collectives.plan import Leaf
from mpidist._strategy.strategy import group_of

mpi = pytest.mark.mpi
core = pytest.mark.core


@pytest.fixture
def shared(one_node, new_strategy):
    """A strategy whose ranks share memory, all of them."""
    if not _native.available():
        pytest.skip("the native core is not built")
    return new_strategy(implementation=SHARED)


def channel_of(strategy):
    """Return the channel of the node; None for one rank."""
    node = group_of(strategy).collectives.resources.node
    return None if node is None else node.channel


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
        means = context().all_reduce("MEAN", [*nest, (8 * x).astype("i1")])
        return [single, *context().all_reduce("SUM", nest), *means, many]

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
        assert channel.results_in_arena == before + 3


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
    # Integers, where they are converted to the floats of their mean.
    mixed = [np.full(30_000, rank, np.int8), np.full((2, 3), rank + 0.5)]
    means = all_reduce(shared, "MEAN", mixed)
    assert channel.sources_in_arena == before + 2
    for x, expected in zip(means, ((size - 1) / 2, size / 2), strict=True):
        assert x.dtype == np.float64
        assert (x == expected).all()
    # But not a count beside many floats, which it would copy.
    means = all_reduce(shared, "MEAN", [np.full(30_000, rank + 0.5), rank])
    assert channel.sources_in_arena == before + 2
    assert (means[0] == size / 2).all()
    assert means[1] == (size - 1) / 2


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
@needs_core
@pytest.mark.usefixtures("one_node")
def test_memory_is_unlinked_at_once(new_strategy, rank, size, monkeypatch):
    made, make_file = [], node_module.make_file

    def noted(*args):
        fd, path = make_file(*args)
        made.append(Path(path))
        return fd, path

    monkeypatch.setattr(node_module, "make_file", noted)
    new_strategy(implementation=SHARED)
    everywhere(None)
    assert rank or len(made) == (size > 1)
    assert not [path for path in made if path.exists()]


# --- exceptions from outside --------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@core
@pytest.mark.parametrize("count", [1, 300_000])
def test_a_signal_ends_a_wait_and_the_others_are_told(new_strategy, rank, count):
    """The others do not wait for what does not come, not even till the deadline."""
    strategy = new_strategy(timeout_seconds=50)
    x = np.ones(count)

    def reduce():
        return context().all_reduce("SUM", x)

    strategy.run(reduce)
    everywhere(None)
    start = time.monotonic()
    if rank == 0:

        def handler(number, frame):
            raise SignalError

        kept = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(SignalError):
            strategy.run(reduce)
        signal.signal(signal.SIGALRM, kept)
        everywhere(None)
    else:
        everywhere(None)  # rank 0 was alone when it was hit
        with pytest.raises(mpidist.CollectiveTimeoutError):
            strategy.run(reduce)
    assert time.monotonic() - start < 40
    with pytest.raises(mpidist.CollectiveTimeoutError, match=r"interrupted|has left"):
        strategy.run(reduce)


# --- whole jobs ---------------------------------------------------------------------

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


def test_small_leaves_between_large_ones_share_a_bucket():
    """As the biases of layers do: a collective each would cost more than their data."""
    for dtype, large in (("float32", 600_000), ("int8", 30_000_000)):
        how = dtype_table.reduction(np.dtype(dtype), mpidist.ReduceOp.SUM, "all_reduce")
        leaves = [Leaf((n,), how, False) for n in (large, 5, large, 7)]
        found = bucket_route.plan_buckets(leaves, 32 * 2**20)
        (packed,) = (x for x in found if x.part is None)
        assert (packed.leaves, packed.offsets, packed.size) == ((1, 3), (0, 5), 12)
        for index in (0, 2):
            parts = [x.part for x in found if x.leaves == (index,)]
            numbers = [n for x in parts for n in (x.start, x.stop)]
            assert numbers[:1] + numbers[-1:] == [0, large]
            assert numbers[1:-1:2] == numbers[2::2]
            most = max(x.stop - x.start for x in parts) * how.wire.itemsize
            assert most <= 32 * 2**20
