"""GPU buffers under stress: whatever order the GPU does its work in, results are right.

Programs of random calls, with kernels before and after each on three kinds of streams,
run on the stand-in for CuPy (tests/posing.py), whose driver does what is queued late,
early or in random order, another one on each rank. A wait that is taken out of the
transports is found by them.
"""

import random
import sys

import numpy as np
import posing
import pytest
from replicas import all_reduce, context, everywhere, local, no_room

import mpidist
from mpidist._collectives import (
    core_routes,
    node as node_module,
    nodes as nodes_module,
)
from mpidist._strategy.strategy import group_of

pytestmark = [pytest.mark.mpi, pytest.mark.core]

PIECE = 64 * 1024
STEPS = 14
ORDERS = [("late", 0), ("early", 1), *(("random", seed) for seed in range(2, 6))]
# Nothing, one piece, four, and more than there are slots, which are used again.
COUNTS = [0, 700, 5_001, 16_384, 90_001]
GARBAGE = -999.0


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Whatever launch/test has the suite go by, these tests choose for themselves."""
    monkeypatch.delenv("MPIDIST_IMPLEMENTATION", raising=False)
    monkeypatch.setenv("MPIDIST_STAGING_MB", str(PIECE / 2**20))
    # With their header only the smallest; the largest of COUNTS in six pieces.
    monkeypatch.setattr(core_routes, "_EAGER_BYTES_OF_ALL", 8192)
    monkeypatch.setattr(core_routes, "_EAGER_BYTES_CROWDED", 4096)
    monkeypatch.setattr(node_module, "_LARGEST_AREA", PIECE)


def host_array(start, count):
    """Return small integers: their sums are exact."""
    return ((np.arange(count) * 7 + start) % 1009).astype(np.float32)


class Program:
    """Calls with kernels around them, in which CUDA's rules order what must be.

    There are two sets of arrays, which are used by turns: what happens to one is in no
    order with what happens to the other, but for the order of the host.

    Args:
        xp: the stand-in.
        seed: of the program; the same on all ranks.
        verbs: functions of (program, arrays) that make a call in two steps: the
            first returns the inputs to be written, and a function to be called when
            they are, which returns results and what they should be.
    """

    def __init__(self, xp, seed, verbs):
        self.xp = xp
        self.random = random.Random(seed)
        self.null, self.blocking = posing.Stream.null, posing.Stream()
        self.free = [posing.Stream(non_blocking=True) for _ in range(2)]
        self.streams = [self.null, self.blocking, *self.free]
        self.last = [self.null, self.null]
        self.seen = []
        self.verbs = verbs

    def order(self, first, second):
        """Have ``second`` wait for ``first``, where CUDA does not do so by itself."""
        if first is not second and {first, second} & set(self.free):
            second.wait_event(first.record())

    def array(self, count):
        return self.xp.empty(count, np.float32)

    def run(self):
        """Return how many results are wrong."""
        # What is there where a wait is missing may be any number.
        with np.errstate(all="ignore"):
            for step in range(STEPS):
                self.step(step % 2)
            posing.finish_all()
        return sum(not np.array_equal(box[0], want) for box, want in self.seen)

    def step(self, which):
        before, on, after = (self.random.choice(self.streams) for _ in range(3))
        if self.random.random() < 1 / 2:
            before = after = on
        self.order(self.last[which], before)
        inputs, targets, call = self.random.choice(self.verbs)(self)
        with before:
            for x in targets:
                posing.launch(lambda x=x: x.memory.fill(GARBAGE))
            for x, host in inputs:
                posing.launch(lambda x=x, host=host: np.copyto(x.memory, host))
        self.order(before, on)
        with on:
            results = call()
        self.order(on, after)
        with after:
            for x, want in results:
                self.read(x, want)
            for x, _ in (*inputs, *results):
                posing.launch(lambda x=x: x.memory.fill(GARBAGE))
        self.last[which] = after

    def read(self, x, want):
        """Queue a kernel that reads a result."""
        box = []
        posing.launch(lambda: box.append(x.memory.copy()))
        self.seen.append((box, want))


# --- calls of a program ---------------------------------------------------------------


def of_strategy(strategy, rank, size):
    """Return verbs for what a program calls."""

    def hosts_of(start, count):
        return [host_array(start + 31 * r, count) for r in range(size)]

    def single(program):
        hosts = hosts_of(program.random.randrange(99), program.random.choice(COUNTS))
        x = program.array(hosts[0].size)

        def call():
            return [(all_reduce(strategy, "SUM", x), total)]

        total = sum(hosts)
        return [(x, hosts[rank])], [], call

    def nest(program):
        sizes = COUNTS if program.random.random() < 1 / 4 else COUNTS[1:3]
        return reduce([program.random.choice(sizes) for _ in range(3)], program)

    def small(program):  # with its header
        return reduce([program.random.choice([1, 100, 300]) for _ in range(2)], program)

    def reduce(counts, program):
        hosts = [hosts_of(k, n) for k, n in enumerate(counts)]
        arrays = {f"{k}": program.array(n) for k, n in enumerate(counts)}

        def call():
            found = all_reduce(strategy, "SUM", arrays)
            return [(found[f"{k}"], sum(one)) for k, one in enumerate(hosts)]

        inputs = [(x, hosts[int(k)][rank]) for k, x in arrays.items()]
        return inputs, [], call

    def to_root(program):
        hosts = hosts_of(program.random.randrange(99), program.random.choice(COUNTS))
        x, root = program.array(hosts[0].size), program.random.randrange(size)

        def call():
            found = group_of(strategy).collectives.all_reduce(
                mpidist.ReduceOp.SUM, x, root=root
            )
            assert (found is None) == (rank != root)
            return [(found, sum(hosts))] if rank == root else []

        return [(x, hosts[rank])], [], call

    def all_gather(program):
        counts = [program.random.choice(COUNTS) for _ in range(size)]
        hosts = [host_array(r, n) for r, n in enumerate(counts)]
        x = program.array(counts[rank])

        def call():
            found = local(strategy, lambda: context().all_gather(x, 0))
            return [(found, np.concatenate(hosts))]

        return [(x, hosts[rank])], [], call

    def broadcast(program):
        count = program.random.choice(COUNTS)
        host, x = host_array(program.random.randrange(99), count), program.array(count)
        place = strategy.run(lambda: np.zeros(1))

        def call():
            return [(local_of(strategy.extended.broadcast_to(x, place)), host)]

        return [(x, host if rank == 0 else host + 1)], [], call

    def host_sum(program):
        """A call that knows of no GPU, in the memory that theirs went through."""
        hosts = hosts_of(program.random.randrange(99), COUNTS[-1])
        result = np.empty_like(hosts[rank])

        def call():
            result[...] = group_of(strategy).collectives.all_reduce(
                mpidist.ReduceOp.SUM, hosts[rank]
            )
            program.seen.append(([result], sum(hosts)))
            return []

        return [], [], call

    def local_of(value):
        return strategy.experimental_local_results(value)[0]

    # Nests have a buffer that is kept, in which calls can meet: they come often.
    often = [nest, nest, nest, small, small]
    return [single, *often, to_root, all_gather, broadcast, host_sum]


# --- the ways -------------------------------------------------------------------------

WAYS = ["nccl", "direct", "staged", "staged by MPI", "staged between nodes"]


def install(monkeypatch, way, order, seed, rank, size):
    mpi = sys.modules.get("mpi4py.MPI")
    name, version = mpi.get_vendor() if mpi else ("none", (0,))
    if way == "direct" and name == "MPICH" and version < (4, 1):
        pytest.skip("MPI_Reduce of MPICH 4.0 crashes if its root changes")
    nccl = posing.Nccl() if way == "nccl" else None
    seed = 1000 * seed + rank  # ranks are early and late by themselves
    return posing.install(
        monkeypatch, num_devices=size, nccl=nccl, order=order, seed=seed
    )


def set_up(monkeypatch, new_strategy, way):
    """Return a strategy that goes a way."""
    if way == "staged by MPI":
        monkeypatch.setattr(node_module, "make_file", no_room)
    if way == "staged between nodes":  # with 2 ranks by messages, with more in slices
        monkeypatch.setenv("MPIDIST_SIMULATED_NODES", "2")
        monkeypatch.setattr(nodes_module, "LEAST_BYTES", 1)
        monkeypatch.setattr(nodes_module, "LEAST_RANKS", 1)
        monkeypatch.setattr(node_module, "_AREA_BETWEEN_NODES", PIECE)
        monkeypatch.setattr(node_module, "_SLICE_BETWEEN_NODES", PIECE // 4)
    name = way.partition(" ")[0]
    strategy = new_strategy(device="gpu", implementation=name)
    assert group_of(strategy).collectives.resources.transports.device.name == name
    return strategy


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_programs_under_stress(monkeypatch, new_strategy, way, order, seed):
    rank, size = ranks_of(new_strategy)
    xp = install(monkeypatch, way, order, seed, rank, size)
    strategy = set_up(monkeypatch, new_strategy, way)
    wrong = Program(xp, seed, of_strategy(strategy, rank, size)).run()
    assert everywhere(wrong) == [0] * size


def ranks_of(new_strategy):
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
