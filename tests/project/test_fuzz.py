"""Random programs with faults on random ranks: no rank hangs, none gets out of step.

A program is made from a seed, alike on all ranks: statements of the program level, of
replica functions, of merge_fn and of updates, one inside the other. Then faults are put
somewhere: one rank raises there, skips a statement, does it twice or does another, or
comes with another shape or dtype. Whatever happens,

- every rank ends, by itself and not by the deadline;
- all raise, or none does;
- afterwards the strategy works, the copies of all mirrored variables are equal bit for
  bit, and all ranks are at the same element of the input.

``MPIDIST_FUZZ=500`` runs so many programs instead of a few, ``MPIDIST_FUZZ=500:510``
these seeds, and ``MPIDIST_FUZZ_VERBOSE=1`` shows what was run.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import traceback
from typing import Any

import numpy as np
import pytest
from replicas import (
    FIRST,
    MEAN,
    NONE,
    ON_READ,
    SUM,
    core_on_ranks,
    everywhere,
    fuzz_seeds,
)

import mpidist
from mpidist._base import threads
from mpidist.data import Dataset

DEFAULT_SEEDS = 25
SEEDS_PER_TEST = 25
# Around what goes with its header, from memory that is reused, in several pieces.
COUNTS = (1, 4096, 4097, 8192, 32768, 32769, 2**18)

# What there is at each level, the more often, the more often.
STATEMENTS = {
    level: re.findall(r"\w+", words)
    for level, words in {
        "program": """run run run run update update reduce reduce gather reduce_to
            assign assign read_sum assign_sum next next next state sync apply variable
            save broadcast values scatter swap_read""",
        "replica": """all_reduce all_reduce all_gather merge merge merge assign assign
            assign write_sum read_sum read apply rows sync try try nothing scatter
            none_assign sparse loss variable sizes sizes resident scalar
            one_has_options""",
        "merge": """reduce_to reduce_to assign assign update update updates updates
            read_sum assign_sum results reduce gather sync apply run try try broadcast
            nothing variable""",
        "update": "assign assign read nothing read_sum assign_other",
    }.items()
}
BODIES = {
    ("program", "run"): "replica",
    ("program", "update"): "update",
    ("replica", "merge"): "merge",
    ("replica", "try"): "replica",
    ("merge", "run"): "replica",
    ("merge", "update"): "update",
    ("merge", "updates"): "update",
    ("merge", "try"): "merge",
}
FAULTS = re.findall(
    r"\w+",
    """raise raise raise_after unpicklable exit skip skip twice other other shape dtype
    value""",
)


class FaultError(Exception):
    """What a fault raises."""


class UnpicklableError(Exception):
    """One that other ranks cannot rebuild."""

    def __init__(self, one: Any, two: Any) -> None:
        super().__init__("cannot travel")
        self.one, self.two = one, two


@dataclasses.dataclass
class Node:
    """A statement."""

    number: int
    level: str
    kind: str
    choice: int
    body: list[Node] = dataclasses.field(default_factory=list)

    def lines(self, depth: int = 0) -> list[str]:
        own = f"{'  ' * depth}{self.number}: {self.level} {self.kind} {self.choice}"
        return [own, *(x for child in self.body for x in child.lines(depth + 1))]


class Program:
    """Statements, and the faults of each rank."""

    def __init__(self, seed: int, size: int) -> None:
        self._rng = np.random.default_rng([seed, 1])
        self.nodes: list[Node] = []
        self.statements = self._block("program", int(self._rng.integers(1, 6)), 0)
        self.faults: dict[tuple[int, int], str] = {}
        rng = np.random.default_rng([seed, 2, size])
        for _ in range(int(rng.choice([0, 1, 1, 1, 2]))):
            node = int(rng.integers(len(self.nodes)))
            # merge_fn runs on rank 0.
            coordinator = self.nodes[node].level == "merge"
            rank = 0 if coordinator else int(rng.integers(size))
            self.faults[rank, node] = str(rng.choice(FAULTS))

    def _block(self, level: str, count: int, depth: int) -> list[Node]:
        return [self._node(level, depth) for _ in range(count)]

    def _node(self, level: str, depth: int) -> Node:
        kind = str(self._rng.choice(STATEMENTS[level]))
        if depth >= 5 and (level, kind) in BODIES:
            kind = "assign" if level == "merge" else "all_reduce"
        node = Node(len(self.nodes), level, kind, int(self._rng.integers(1000)))
        self.nodes.append(node)
        if (level, kind) in BODIES:
            count = int(self._rng.integers(1, 4))
            node.body = self._block(BODIES[level, kind], count, depth + 1)
        return node

    def __str__(self) -> str:
        lines = [line for node in self.statements for line in node.lines()]
        return "\n".join([*lines, f"faults (rank, statement): {self.faults}"])


class World:
    """What programs work on; it outlives them."""

    def __init__(self, strategy: mpidist.MPIStrategy, folder: str) -> None:
        self.strategy = strategy
        self.folder = folder
        self.rank = strategy.replica_id
        zeros = np.zeros(3)

        def variable(**kwargs: Any) -> mpidist.Variable:
            return mpidist.Variable(zeros, **kwargs)

        with strategy.scope():
            self.mirrored = [
                variable(name="sum", aggregation=SUM),
                variable(name="mean", aggregation=MEAN),
                variable(name="first", aggregation=FIRST),
            ]
            self.none = variable(name="none", aggregation=NONE)
            self.on_read = [
                variable(name="s", aggregation=SUM, synchronization=ON_READ),
                variable(name="m", aggregation=MEAN, synchronization=ON_READ),
            ]
        self.optimizers = [
            mpidist.optimizers.SGD(0.1, momentum=0.5),
            mpidist.optimizers.Adam(lambda step: 0.1 / (1 + step), global_clipnorm=1.0),
        ]
        self.optimizers[0].build(self.mirrored)
        self.checkpoint = mpidist.Checkpoint(
            mirrored=self.mirrored, on_read=self.on_read[0], state=self
        )
        self.checkpoint_fault = ""
        self.buffers = strategy.buffers_like([zeros, np.zeros(3000), np.zeros(50_000)])
        self.wrong: list[str] = []

    def expect(self, what: str, found: Any, number: int) -> None:
        """Note a sum of what `Runner.own` has given that is wrong."""
        ranks = self.strategy.num_replicas_in_sync
        expected = ranks * number + ranks * (ranks - 1) // 2
        if not np.all(np.asarray(found) == expected):
            self.wrong.append(f"{number}: {what}: {found} for {expected}")

    def state(self) -> int:
        if self.checkpoint_fault:
            raise FaultError(self.checkpoint_fault)
        return 1

    def restore(self, state: int) -> None:
        self.state()

    def in_sync(self) -> list[mpidist.Variable]:
        built = [o for o in self.optimizers if o._state is not None]
        slots = [variable for o in built for variable in o.variables]
        return [*self.mirrored, self.none, *slots]


class Runner:
    """Runs a program on this rank."""

    def __init__(self, world: World, program: Program) -> None:
        self.world, self.program = world, program
        self.strategy = world.strategy
        self.done: set[int] = set()
        self.log: list[str] = []
        self.local: BaseException | None = None  # raised at program level, untold
        self.iterators = self._make_iterators()
        self.latest = self.strategy.run(_ones)

    def _make_iterators(self) -> list[Any]:
        rows = np.arange(24.0).reshape(8, 3)
        dataset = Dataset.from_tensor_slices(rows).shuffle(seed=1).batch(3).repeat()
        strategy, rank = self.strategy, self.world.rank
        return [
            iter(strategy.experimental_distribute_dataset(dataset.prefetch(1))),
            iter(
                strategy.distribute_datasets_from_function(
                    lambda context: [np.full((2, 3), float(i)) for i in range(2 + rank)]
                )
            ),
        ]

    # --- statements -----------------------------------------------------------

    def block(self, nodes: list[Node], handle: Any = None) -> None:
        for node in nodes:
            self.statement(node, handle)

    def statement(self, node: Node, handle: Any) -> None:
        fault = ""
        if node.number not in self.done:
            fault = self.program.faults.get((self.world.rank, node.number), "")
            self.done.add(node.number)
        self.log.append(f"{node.number} {node.level} {node.kind} {fault}")
        if fault in ("raise", "unpicklable", "exit"):
            self.fail(node, fault)
        if fault == "skip":
            return
        kind = node.kind
        if fault == "other":
            others = [x for x in STATEMENTS[node.level] if x != kind]
            kind = others[node.choice % len(others)]
        value = np.full(3, 1.0 + node.choice % 3)
        if fault == "shape":
            value = np.full(4, 1.0)
        elif fault == "dtype":
            value = value.astype(np.complex64)
        elif fault == "value":
            value += 0.5
        self.world.checkpoint_fault = fault if fault in ("shape", "value") else ""
        for _ in range(2 if fault == "twice" else 1):
            method = getattr(self, f"{node.level}_{kind}", None)
            method = method or getattr(self, f"any_{kind}")
            method(node, value, handle)
        if fault == "raise_after":
            self.fail(node, fault)

    def fail(self, node: Node, fault: str) -> None:
        error: BaseException = FaultError(f"{fault} in {node.number}")
        if fault == "unpicklable":
            error = UnpicklableError(lambda: 0, sys)
        elif fault == "exit":
            error = SystemExit(3)
        if node.level == "program":
            self.local = error
        raise error

    def variable(self, node: Node) -> mpidist.Variable:
        return self.world.mirrored[node.choice % 3]

    def any_nothing(self, node: Node, value: Any, handle: Any) -> None:
        pass

    def any_assign(self, node: Node, value: Any, handle: Any) -> None:
        how = ("assign", "assign_add", "assign_sub")[node.choice // 3 % 3]
        getattr(self.variable(node), how)(value)

    def any_sync(self, node: Node, value: Any, handle: Any) -> None:
        mpidist.check_in_sync(self.world.mirrored[: 1 + value.size % 3])

    def any_read_sum(self, node: Node, value: Any, handle: Any) -> None:
        np.asarray(self.world.on_read[node.choice % 2].read_value())

    def any_read(self, node: Node, value: Any, handle: Any) -> None:
        assert self.variable(node).numpy().shape == (3,)

    def any_assign_sum(self, node: Node, value: Any, handle: Any) -> None:
        self.world.on_read[node.choice % 2].assign_add(value)

    def any_scatter(self, node: Node, value: Any, handle: Any) -> None:
        slices = mpidist.IndexedSlices(value[:2], np.array([0, node.choice % 3]))
        self.variable(node).scatter_add(slices)

    def any_variable(self, node: Node, value: Any, handle: Any) -> None:
        mpidist.Variable(value, name=f"made {value.size}", aggregation=SUM)

    def any_try(self, node: Node, value: Any, handle: Any) -> None:
        try:
            self.block(node.body, handle)
        except Exception as error:
            if isinstance(error, mpidist.CollectiveTimeoutError):
                raise
            self.log.append(f"caught {type(error).__name__}")

    # --- program level --------------------------------------------------------

    def program_run(self, node: Node, value: Any, handle: Any) -> None:
        self.latest = self.strategy.run(_replica, args=(node.number,))

    def program_update(self, node: Node, value: Any, handle: Any) -> None:
        variable = self.variable(node)
        arguments = (node.number, value)
        self.strategy.extended.update(variable, _update, args=arguments)

    def program_reduce(self, node: Node, value: Any, handle: Any) -> None:
        op = ("SUM", "MEAN", "MAX")[(node.choice + value.size) % 3]
        self.strategy.reduce(op, self.latest, axis=None)

    def program_gather(self, node: Node, value: Any, handle: Any) -> None:
        self.strategy.gather(self.latest, axis=value.size - 3)

    def program_reduce_to(self, node: Node, value: Any, handle: Any) -> None:
        variable = self.variable(node)
        ones = self.strategy.experimental_distribute_values_from_function(
            lambda context: value
        )
        total = self.strategy.extended.reduce_to("SUM", ones, variable)
        variable.assign(total)

    def program_next(self, node: Node, value: Any, handle: Any) -> None:
        element = self.iterators[node.choice % 2].get_next_as_optional()
        if element.has_value():
            self.latest = self.strategy.run(_sum_rows, args=(element.get_value(),))

    def program_state(self, node: Node, value: Any, handle: Any) -> None:
        iterator = self.iterators[0]
        state = iterator.state()
        # Some steps forward or back; elsewhere, or nowhere, where a fault says so.
        to = max(0, state["position"] + node.choice % 3 - 1) + 2 * (value.size - 3)
        nowhere = value.dtype.kind == "c"
        iterator.restore(state | {"position": "nowhere" if nowhere else to})

    def program_apply(self, node: Node, value: Any, handle: Any) -> None:
        which = self.world.optimizers[node.choice % 2]
        which.apply_gradients([(value, v) for v in self.world.mirrored])

    def program_save(self, node: Node, value: Any, handle: Any) -> None:
        path = os.path.join(self.world.folder, "checkpoint")
        self.world.checkpoint.save(path)
        self.variable(node).assign_add(np.ones(3))
        self.world.checkpoint.restore(path)

    def program_broadcast(self, node: Node, value: Any, handle: Any) -> None:
        variable = self.variable(node)
        variable.assign(self.strategy.extended.broadcast_to(value, variable))

    def program_values(self, node: Node, value: Any, handle: Any) -> None:
        def value_fn(context: mpidist.ValueContext) -> Any:
            if value.dtype.kind == "c":
                raise FaultError("in value_fn")
            return value

        made = self.strategy.experimental_distribute_values_from_function
        self.latest = made(value_fn)

    def program_swap_read(self, node: Node, value: Any, handle: Any) -> None:
        assert float(np.sum(self.world.none)) == 0.0

    # --- replica level --------------------------------------------------------

    def context(self) -> mpidist.ReplicaContext:
        context = mpidist.get_replica_context()
        assert context is not None
        return context

    def replica_all_reduce(self, node: Node, value: Any, handle: Any) -> None:
        op = ("SUM", "MEAN", "MIN")[node.choice % 3]
        self.context().all_reduce(op, {"a": value, "b": [node.choice, value[:1]]})

    def replica_all_gather(self, node: Node, value: Any, handle: Any) -> None:
        rows = np.ones((self.world.rank, value.size))
        self.context().all_gather(rows, 0)

    def replica_merge(self, node: Node, value: Any, handle: Any) -> None:
        own = value + self.world.rank
        self.context().merge_call(_merge, args=(own, node.number))

    def replica_write_sum(self, node: Node, value: Any, handle: Any) -> None:
        self.world.on_read[node.choice % 2].assign_add(value + self.world.rank)

    def replica_apply(self, node: Node, value: Any, handle: Any) -> None:
        which = self.world.optimizers[node.choice % 2]
        gradient = value + self.world.rank
        which.apply_gradients([(gradient, v) for v in self.world.mirrored])

    def replica_rows(self, node: Node, value: Any, handle: Any) -> None:
        rows = np.ones((self.world.rank, value.size))
        assert mpidist.global_batch_size(rows) > 0 or self.world.rank == 0

    def replica_loss(self, node: Node, value: Any, handle: Any) -> None:
        weights = np.ones(3, value.dtype)
        mpidist.compute_average_loss(np.ones(value.size), weights)

    def replica_none_assign(self, node: Node, value: Any, handle: Any) -> None:
        self.world.none.assign(value * 0)  # the same on all ranks

    def own(self, node: Node) -> int:
        """Return a number of this rank and statement."""
        return node.number + self.world.rank

    def replica_sizes(self, node: Node, value: Any, handle: Any) -> None:
        count = COUNTS[node.choice % len(COUNTS)] + value.size
        x = np.full(count, self.own(node), value.dtype)
        # Several times: the first call of its kind goes another way.
        for _ in range(1 + node.choice // 7 % 3):
            self.world.expect("sizes", self.context().all_reduce("SUM", x), node.number)

    def replica_resident(self, node: Node, value: Any, handle: Any) -> None:
        tree = self.world.buffers
        for x in tree:
            x[...] = self.own(node)
        if value.dtype.kind == "c":  # ordinary ones, on one rank
            tree = [x.copy() for x in tree]
        elif value.size > 3:
            tree = tree[1:]
        with np.errstate(all="raise"):
            found = self.context().all_reduce("SUM", tree)
        for x in found:
            self.world.expect("resident", x, node.number)

    def replica_scalar(self, node: Node, value: Any, handle: Any) -> None:
        x = np.array(self.own(node), value.dtype)
        if (node.choice + self.world.rank) % 2:
            x = x[()]
        for _ in range(3):
            self.world.expect(
                "scalar", self.context().all_reduce("SUM", x), node.number
            )

    def replica_one_has_options(self, node: Node, value: Any, handle: Any) -> None:
        options = None
        if node.choice % self.strategy.num_replicas_in_sync == self.world.rank:
            options = mpidist.experimental.CommunicationOptions(timeout_seconds=40)
        count = COUNTS[node.choice // 7 % len(COUNTS)]
        x = np.full(count, self.own(node), value.dtype)
        for one in (None, options, None):
            found = self.context().all_reduce("SUM", x, one)
            self.world.expect("options", found, node.number)

    def replica_sparse(self, node: Node, value: Any, handle: Any) -> None:
        rows = [0] * self.world.rank
        own = mpidist.IndexedSlices(
            np.ones((len(rows), value.size)), np.array(rows, int)
        )
        self.context().all_reduce("SUM", own)

    # --- in merge_fn: rank 0 alone --------------------------------------------

    def merge_reduce_to(self, node: Node, value: Any, handle: Any) -> None:
        variable = self.variable(node)
        total = self.strategy.extended.reduce_to("SUM", handle, variable)
        self.strategy.extended.update(variable, _take, args=(total,))

    def merge_update(self, node: Node, value: Any, handle: Any) -> None:
        variable = self.variable(node)
        arguments = (node.number, value)
        self.strategy.extended.update(variable, _update, args=arguments)

    def merge_updates(self, node: Node, value: Any, handle: Any) -> None:
        # Rank 0 does not wait for the others, until there is no room for messages.
        ballast = bytes(node.choice)
        for k in range(2 + node.choice % 15):
            variable = self.world.mirrored[(node.choice + k) % 3]
            arguments = (node.number, value, ballast)
            self.strategy.extended.update(
                variable, _update, args=arguments, group=k % 16 < 15
            )

    def merge_results(self, node: Node, value: Any, handle: Any) -> None:
        found = self.strategy.experimental_local_results(handle)
        assert len(found) == self.strategy.num_replicas_in_sync

    def merge_reduce(self, node: Node, value: Any, handle: Any) -> None:
        op = ("SUM", "MEAN", "MAX")[node.choice % 3]
        self.strategy.reduce(op, handle, axis=None)

    def merge_gather(self, node: Node, value: Any, handle: Any) -> None:
        self.strategy.gather(handle, axis=value.size - 3)

    def merge_apply(self, node: Node, value: Any, handle: Any) -> None:
        which = self.world.optimizers[node.choice % 2]
        which.apply_gradients([(handle, v) for v in self.world.mirrored])

    def merge_run(self, node: Node, value: Any, handle: Any) -> None:
        self.strategy.run(_replica, args=(node.number,))

    def merge_broadcast(self, node: Node, value: Any, handle: Any) -> None:
        variable = self.variable(node)
        variable.assign(self.strategy.extended.broadcast_to(value, variable))

    # --- in the function of an update -----------------------------------------

    def update_assign(self, node: Node, value: Any, handle: Any) -> None:
        handle.assign_add(value)

    def update_assign_other(self, node: Node, value: Any, handle: Any) -> None:
        self.world.none.assign(value * 0)
        self.variable(node).assign(value)


def _running() -> Runner:
    """Return the program of this rank; functions get here by name on other ranks."""
    assert _now.get()
    return _now.get()[0]


_now = threads.ReplicaLocal[list[Runner]](list)


def _ones() -> Any:
    return np.ones(3)


def _sum_rows(rows: Any) -> Any:
    return rows.sum(axis=0)


def _take(variable: mpidist.Variable, value: Any) -> None:
    variable.assign(value)


def _replica(number: int) -> Any:
    runner = _running()
    runner.block(runner.program.nodes[number].body)
    return np.full(3, 1.0 + runner.world.rank)


def _merge(strategy: mpidist.Strategy, handle: Any, number: Any) -> None:
    runner = _running()
    (node,) = {int(x) for x in strategy.experimental_local_results(number)}
    runner.block(runner.program.nodes[node].body, handle)


def _update(
    variable: mpidist.Variable, number: Any, value: Any, ballast: bytes = b""
) -> None:
    runner = _running()
    runner.block(runner.program.nodes[int(number)].body, variable)
    variable.assign_add(value)


def _run_program(world: World, program: Program) -> tuple[str, str]:
    """Run it; return what this rank raised, and a text for people."""
    strategy = world.strategy
    runner = Runner(world, program)
    _now.get()[:] = [runner]
    error: BaseException | None = None
    try:
        with strategy.scope():
            runner.block(program.statements)
    except BaseException as raised:
        error = raised
    told = error is not None and error is not runner.local
    if not told:
        # Others may be in the middle of what this rank has left or skipped.
        try:
            strategy.reduce("SUM", strategy.run(_ones), axis=None)
        except BaseException as raised:
            error = raised
    text = "".join(traceback.format_exception(error)) if error is not None else ""
    name = type(error).__name__ if error is not None else ""
    if error is runner.local:
        name = "local" if error is not None else ""
    elif name:
        name = "deadline" if "Timeout" in name else "raised"
    _now.get().clear()
    positions = [iterator.state()["position"] for iterator in runner.iterators]
    return name, f"{positions}\n" + "\n".join(runner.log) + f"\n{text}"


def _check(world: World, program: Program, name: str, text: str) -> str:
    """Return what is wrong after a program, the same on all ranks; or nothing."""
    names = everywhere(name)
    texts = everywhere(text)
    counted = {x for x in names if x != "local"}
    problems = []
    if "deadline" in names or len(counted) > 1:
        problems.append(f"the ranks ended with {names}")
    if "local" not in names and len({x.partition("\n")[0] for x in texts}) > 1:
        problems.append("the ranks are at different elements of the input")
    after = ""
    try:
        mpidist.check_in_sync(world.in_sync())
        ones = world.strategy.run(_ones)
        total = world.strategy.reduce("SUM", ones, axis=None)
        assert total[0] == world.strategy.num_replicas_in_sync
    except Exception as error:
        after = f"afterwards: {type(error).__name__}: {error}"
    problems += {x for x in everywhere(after) if x}
    wrong = [x for one in everywhere(world.wrong) for x in one]
    if not {"skip", "twice", "other"} & {*program.faults.values()}:
        problems += wrong  # else two statements that are alike may have met
    world.wrong = []
    if not problems:
        return ""
    parts = [f"--- rank {r}: {names[r]} ---\n{x}" for r, x in enumerate(texts)]
    return "\n".join([*problems, str(program), *parts])


@core_on_ranks
@pytest.mark.parametrize("start", fuzz_seeds(DEFAULT_SEEDS)[::SEEDS_PER_TEST])
def test_no_program_hangs_or_diverges(new_strategy, start, tmp_path_factory):
    folder = everywhere(str(tmp_path_factory.mktemp("fuzz")))[0]
    world = World(new_strategy(timeout_seconds=45), folder)
    size = world.strategy.num_replicas_in_sync
    seeds = fuzz_seeds(DEFAULT_SEEDS)
    endings: dict[str, int] = {}
    for seed in range(start, min(start + SEEDS_PER_TEST, seeds.stop)):
        program = Program(seed, size)
        if "MPIDIST_FUZZ_VERBOSE" in os.environ and world.rank == 0:
            # Before it begins: a hang leaves no other trace.
            print(f"seed {seed}\n{program}", file=sys.stderr, flush=True)
        name, text = _run_program(world, program)
        wrong = _check(world, program, name, text)
        assert not wrong, f"seed {seed} on {size} ranks: {wrong}"
        endings[name] = endings.get(name, 0) + 1
    if "MPIDIST_FUZZ" in os.environ and world.rank == 0:
        print(f"seeds from {start}: {endings}")
