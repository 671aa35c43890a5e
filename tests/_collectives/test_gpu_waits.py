"""GPU buffers under stress: whatever order the GPU does its work in, results are right.

Programs of random calls, with kernels before and after each on three kinds of streams,
run on the stand-in for CuPy (tests/posing.py), whose driver does what is queued late,
early or in random order, another one on each rank. Then each wait is taken out of the
transports, one at a time, and the same programs have to find it.
"""

import ast
import inspect
import itertools
import random
import sys
import types

import numpy as np
import posing
import pytest
from replicas import all_reduce, context, everywhere, local, no_room

import mpidist
from mpidist._base import backend
from mpidist._collectives import (
    core_routes,
    devices,
    staged_route,
)
from mpidist._collectives import nccl as nccl_module
from mpidist._collectives import node as node_module
from mpidist._collectives import nodes as nodes_module
from mpidist._collectives import staged as staged_module
from mpidist._collectives import transports as direct_module
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


# --- calls of a transport -------------------------------------------------------------


def of_transport(transport, rank, size, counts=COUNTS):
    """Return verbs for each call that a transport has."""

    def parts(start, count):
        return [host_array(start + 31 * r, count) for r in range(size)]

    def allreduce(program):
        count, start = program.random.choice(counts), program.random.randrange(99)
        hosts = parts(start, count)
        x, y = program.array(count), program.array(count)

        def call():
            transport.allreduce(x, y, "SUM")
            return [(y, sum(hosts))]

        return [(x, hosts[rank])], [y], call

    def allreduce_in_place(program):
        count, start = program.random.choice(counts), program.random.randrange(99)
        hosts, x = parts(start, count), program.array(count)

        def call():
            transport.allreduce_in_place(x, "MAX")
            return [(x, np.max(hosts, axis=0))]

        return [(x, hosts[rank])], [], call

    def reduce(program):
        count, root = program.random.choice(counts), program.random.randrange(size)
        hosts, x = parts(root, count), program.array(count)

        def call():
            transport.reduce(x, "SUM", root)
            return [(x, sum(hosts) if rank == root else hosts[rank])]

        return [(x, hosts[rank])], [], call

    def broadcast(program):
        count, root = program.random.choice(counts), program.random.randrange(size)
        start = program.random.randrange(99)
        host, x = host_array(start, count), program.array(count)

        def call():
            transport.broadcast(x, root)
            return [(x, host)]

        if rank == root:
            return [(x, host)], [], call
        return [], [x], call

    def all_gather(program):
        several = [program.random.choice(counts) for _ in range(size)]
        if program.random.random() < 1 / 2:
            several = several[:1] * size
        hosts = [host_array(r, n) for r, n in enumerate(several)]
        x, y = program.array(several[rank]), program.array(sum(several))

        def call():
            nbytes = [4 * n for n in several]
            transport.all_gather(backend.as_bytes(x), backend.as_bytes(y), nbytes)
            return [(y, np.concatenate(hosts))]

        return [(x, hosts[rank])], [y], call

    if transport.name == "staged":  # reduces none
        return [broadcast, all_gather]
    return [allreduce, allreduce_in_place, reduce, broadcast, all_gather]


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

    def all_gather(program):
        counts = [program.random.choice(COUNTS) for _ in range(size)]
        hosts = [host_array(r, n) for r, n in enumerate(counts)]
        x = program.array(counts[rank])

        def call():
            found = local(strategy, lambda: context().all_gather(x, 0))
            return [(found, np.concatenate(hosts))]

        return [(x, hosts[rank])], [], call

    def broadcast(program):
        count = program.random.choice(COUNTS[1:])
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
    return [single, *often, all_gather, broadcast, host_sum]


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
    """Return a strategy that goes a way, and the transport that it takes."""
    if way == "staged by MPI":
        monkeypatch.setattr(node_module, "make_file", no_room)
    if way == "staged between nodes":  # with 2 ranks by messages, with more in slices
        monkeypatch.setenv("MPIDIST_SIMULATED_NODES", "2")
        monkeypatch.setattr(nodes_module, "LEAST_BYTES", 1)
        monkeypatch.setattr(node_module, "_AREA_BETWEEN_NODES", PIECE)
        monkeypatch.setattr(node_module, "_SLICE_BETWEEN_NODES", PIECE // 4)
    name = way.partition(" ")[0]
    strategy = new_strategy(device="gpu", implementation=name)
    transport = group_of(strategy).collectives.resources.transports.device
    assert transport.name == name
    return strategy, transport


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_transports_under_stress(monkeypatch, new_strategy, way, order, seed):
    rank, size = ranks_of(new_strategy)
    xp = install(monkeypatch, way, order, seed, rank, size)
    _, transport = set_up(monkeypatch, new_strategy, way)
    wrong = Program(xp, seed, of_transport(transport, rank, size)).run()
    assert everywhere(wrong) == [0] * size


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_programs_under_stress(monkeypatch, new_strategy, way, order, seed):
    rank, size = ranks_of(new_strategy)
    xp = install(monkeypatch, way, order, seed, rank, size)
    strategy, _ = set_up(monkeypatch, new_strategy, way)
    wrong = Program(xp, seed, of_strategy(strategy, rank, size)).run()
    assert everywhere(wrong) == [0] * size


def ranks_of(new_strategy):
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


# --- every wait is needed, and missed -------------------------------------------------

ORDERING = ("record", "wait_event", "synchronize")


class _Without(ast.NodeTransformer):
    """Takes the n-th ordering out of a module; or all but one branch of a choice."""

    def __init__(self, number):
        self.number = number
        self.found = []

    def visit_Expr(self, node):
        call = node.value
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return node
        if call.func.attr not in ORDERING:
            return node
        changed = [ast.Pass()]
        if isinstance(call.func.value, ast.IfExp):
            choice = call.func.value
            changed += [_call_of(choice.body, call), _call_of(choice.orelse, call)]
        for new in changed:
            if self.number == len(self.found):
                node = new
            self.found.append(f"{ast.unparse(call)} -> {ast.unparse(new)}")
        return node


def _call_of(owner, call):
    function = ast.Attribute(owner, call.func.attr, ast.Load())
    return ast.Expr(ast.Call(function, call.args, call.keywords))


def mutants(module):
    """Return what can be taken out of a module."""
    everything = _Without(None)
    everything.visit(ast.parse(inspect.getsource(module)))
    return everything.found


def mutated(module, number):
    """Return a copy of a module without its n-th ordering; None: with all."""
    tree = _Without(number)
    changed = ast.fix_missing_locations(
        tree.visit(ast.parse(inspect.getsource(module)))
    )
    made = types.ModuleType(module.__name__)
    name = "as it is" if number is None else tree.found[number]
    exec(compile(changed, f"<{name}>", "exec"), made.__dict__)
    return made


def test_the_mutants_are_those_of_the_source():
    assert len(mutants(staged_module)) == 1
    assert len(mutants(direct_module)) == 5


def wrong_somewhere(patch, new_strategy, way, order, seed, verbs=of_transport):
    """Return whether a program has wrong results on some rank."""
    rank, size = ranks_of(new_strategy)
    xp = install(patch, way, order, seed, rank, size)
    strategy, transport = set_up(patch, new_strategy, way)
    of = transport if verbs is of_transport else strategy
    wrong = Program(xp, seed, verbs(of, rank, size)).run()
    strategy.close()
    return any(everywhere(wrong))


def found_by(monkeypatch, new_strategy, ways, verbs=of_transport, orders=ORDERS):
    """Return the first order, seed and way of a program that goes wrong, or None."""
    for (order, seed), way in itertools.product(orders, ways):
        with monkeypatch.context() as patch:
            if wrong_somewhere(patch, new_strategy, way, order, seed, verbs):
                return order, seed, way
    return None


def patch_staged(monkeypatch, mutant):
    monkeypatch.setattr(devices, "StagedTransport", mutant.StagedTransport)
    monkeypatch.setattr(devices, "HostMemory", mutant.HostMemory)
    monkeypatch.setattr(staged_route, "store", mutant.store)


@pytest.mark.mpi(min_size=2)  # one rank moves nothing by way of the host
@pytest.mark.parametrize("number", range(len(mutants(staged_module))))
@pytest.mark.parametrize("verbs", [of_transport, of_strategy])
@pytest.mark.one_size
def test_each_wait_of_staged_is_missed(monkeypatch, new_strategy, number, verbs):
    patch_staged(monkeypatch, mutated(staged_module, number))
    found = found_by(monkeypatch, new_strategy, ["staged"], verbs)
    print(mutants(staged_module)[number], found)
    assert found is not None


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("verbs", [of_transport, of_strategy])
@pytest.mark.one_size
def test_nothing_is_missed_in_staged_as_it_is(monkeypatch, new_strategy, verbs):
    """What finds the mutants finds nothing in a copy of the module."""
    patch_staged(monkeypatch, mutated(staged_module, None))
    assert found_by(monkeypatch, new_strategy, ["staged"], verbs) is None


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("other", ["null", "new"])
@pytest.mark.one_size
def test_copies_from_the_gpu_on_another_stream_are_missed(
    monkeypatch, new_strategy, other
):
    """The null stream in the place of the current one, or one that waits for nobody."""

    class Elsewhere:
        def __getattr__(self, name):
            return getattr(backend, name)

        def current_stream(self):
            return (
                posing.Stream.null
                if other == "null"
                else posing.Stream(non_blocking=True)
            )

    monkeypatch.setattr(staged_module, "backend", Elsewhere())
    assert found_by(monkeypatch, new_strategy, ["staged"], of_strategy) is not None


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("number", range(len(mutants(direct_module))))
@pytest.mark.one_size
def test_each_wait_of_direct_is_missed(monkeypatch, new_strategy, number):
    mutant = mutated(direct_module, number)
    monkeypatch.setattr(devices, "DirectTransport", mutant.DirectTransport)
    found = found_by(monkeypatch, new_strategy, ["direct"])
    print(mutants(direct_module)[number], found)
    assert found is not None


@pytest.mark.mpi(min_size=2)
@pytest.mark.one_size
def test_nccl_on_another_stream_is_missed(monkeypatch, new_strategy):
    """The null stream in the place of the current one."""

    class Elsewhere:
        def __getattr__(self, name):
            return getattr(backend, name)

        def current_stream(self):
            return posing.Stream.null

    monkeypatch.setattr(nccl_module, "backend", Elsewhere())
    assert found_by(monkeypatch, new_strategy, ["nccl"]) is not None
