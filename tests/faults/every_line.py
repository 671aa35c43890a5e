"""Raise an exception at every line of mpidist that a rank comes through in a call.

``mpirun -n 2 python tests/faults/every_line.py [VERB ...]`` does so for all verbs, on
rank 0 and on the last one, and prints the lines after which the others waited for the
deadline, or after which the ranks were not in the same state. The suite does some.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, TypeAlias

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from replicas import ON_READ, SUM, SignalError, context, everywhere, make, outcomes

import mpidist
from mpidist._base import nest
from mpidist._base.errors import PACKAGE, is_of_library
from mpidist._strategy.strategy import group_of
from mpidist.elastic._state import storage_of_state


class Injection:
    """Raises an exception at one line of mpidist, as a signal's handler would.

    Args:
        number: of the line, from 1, as this thread comes to them; 0: nowhere.
        error: the exception.

    Attributes:
        count: the lines until now.
        place: where it has raised; "" if it has not.
    """

    def __init__(self, number: int = 0, error: BaseException | None = None) -> None:
        self._number = number
        self._error = error
        self.count = 0
        self.place = ""
        # One object for all frames: Python 3.11 crashed when those of each went away.
        self._hook = self._trace

    def __enter__(self) -> Injection:
        self._before = sys.gettrace()
        sys.settrace(self._hook)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not _is_inside(frame):
            return None
        if event == "line" and not self.place and _counts(frame):
            self.count += 1
            if self.count == self._number and self._error is not None:
                file = frame.f_code.co_filename.removeprefix(PACKAGE)
                self.place = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
                raise self._error
        return self._hook


def _counts(frame: FrameType) -> bool:
    """Return whether the others are to be told of an exception at this line.

    What comes before a first ``try`` is the program's own: as between two calls.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return _is_inside(frame.f_back) and line.strip() != "try:"


def _is_inside(frame: FrameType | None) -> bool:
    """Return whether a frame is of mpidist, or of a library that it has called."""
    while frame is not None and is_of_library(frame):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


class Program:
    """A strategy, and the call that is interrupted. Making one is collective.

    Args:
        strategy: a new one.
        verb: the name of the call.
        folder: for checkpoints, the same on all ranks.
    """

    def __init__(self, strategy: mpidist.Strategy, verb: str, folder: str) -> None:
        self.strategy = strategy
        self.verb = verb
        self.v = make(strategy, np.zeros(3), aggregation=SUM)
        make_call = {**VERBS, **GUESTS}[verb]
        self.call: Callable[[], Any] = make_call(strategy, self.v, folder)
        with self.scope():
            self.call()  # makes plans

    def prepare(self) -> None:
        """Make an effect of the call visible. Collective."""
        if self.verb == "restore":
            self.v.assign(np.ones(3))

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the scope that the call is made in."""
        if self.verb == "Variable":
            return self.strategy.scope()
        if isinstance(self.call, InContext):
            return self.call.replica
        return contextlib.nullcontext()


def in_replicas(call: Callable[[], Any]) -> Verb:
    return lambda strategy, v, folder: lambda: strategy.run(call)


def merge(strategy: mpidist.Strategy, v: mpidist.Variable, folder: str) -> Any:
    def merge_fn(strategy: mpidist.Strategy, x: Any) -> Any:
        total = strategy.reduce("SUM", x, axis=None)
        strategy.extended.update(v, lambda v: v.assign_add(np.ones(3)))
        return total

    return lambda: strategy.run(
        lambda: context().merge_call(merge_fn, args=(np.ones(3),))
    )


def optimizer(strategy: mpidist.Strategy, v: mpidist.Variable, folder: str) -> Any:
    with strategy.scope():
        sgd = mpidist.optimizers.SGD(0.1, momentum=0.9)
    return lambda: strategy.run(lambda: sgd.apply_gradients([(np.ones(3), v)]))


def optimizer_outside(
    strategy: mpidist.Strategy, v: mpidist.Variable, folder: str
) -> Any:
    with strategy.scope():
        adam = mpidist.optimizers.Adam(0.1)
    gradient = strategy.run(lambda: np.ones(3))
    return lambda: adam.apply_gradients([(gradient, v)])


class InContext:
    """Calls of a replica context that the program enters itself."""

    def __init__(
        self, strategy: mpidist.Strategy, v: mpidist.Variable, folder: str
    ) -> None:
        self.replica = mpidist.ReplicaContext(strategy, None)

    def __call__(self) -> Any:
        replica = self.replica
        total = replica.all_reduce("SUM", {"a": np.ones(3), "b": 2.0})
        rows = replica.all_gather(np.ones((2, 2)), axis=0)
        return total, rows, replica.merge_call(lambda strategy, x: x, args=(1.0,))


def local_results(strategy: mpidist.Strategy, v: mpidist.Variable, folder: str) -> Any:
    def merge_fn(strategy: mpidist.Strategy, x: Any) -> Any:
        return sum(strategy.experimental_local_results(x))

    return lambda: strategy.run(
        lambda: context().merge_call(merge_fn, args=(np.ones(3),))
    )


def values(strategy: mpidist.Strategy, v: mpidist.Variable, folder: str) -> Any:
    own, registry = strategy.run(lambda: np.ones(3)), group_of(strategy).registry
    total = make(strategy, 0.0, synchronization=ON_READ, aggregation=SUM)

    def read_all() -> Any:
        registry.shows_all = True  # as that of a MirroredStrategy
        try:
            shown = strategy.experimental_local_results({"own": own, "total": total})
            return own.values, total.values, shown
        finally:
            registry.shows_all = False

    return read_all


def commit(strategy: mpidist.Strategy, v: mpidist.Variable, folder: str) -> Any:
    metric = make(strategy, 0.0, synchronization=ON_READ, aggregation=SUM)
    state = mpidist.elastic.State(
        lambda strategy: {"v": v, "metric": metric}, rng=np.random.default_rng(1)
    )
    storage_of_state(state).begin(strategy, lambda: True)
    return state.commit


def read(strategy: mpidist.Strategy, v: mpidist.Variable, folder: str) -> Any:
    metric = make(strategy, 1.0, synchronization=ON_READ, aggregation=SUM)
    return lambda: metric.value()


ROWS: Final = mpidist.data.Dataset.from_tensor_slices(np.arange(10_000.0)).batch(4)


def begin_two() -> list[Any]:
    calls = [context().all_reduce_async("SUM", np.ones(n)) for n in (3, 100_000)]
    return [call.result() for call in calls]


def batches(strategy: mpidist.Strategy, v: mpidist.Variable, folder: str) -> Any:
    steps = iter(strategy.experimental_distribute_dataset(ROWS))
    return lambda: next(steps)


def save(strategy: mpidist.Strategy, v: mpidist.Variable, folder: str) -> Any:
    checkpoint = mpidist.Checkpoint(v=v, rng=np.random.default_rng(1))
    return lambda: checkpoint.save(f"{folder}/saved")


def restore(strategy: mpidist.Strategy, v: mpidist.Variable, folder: str) -> Any:
    checkpoint = mpidist.Checkpoint(v=v, rng=np.random.default_rng(1))
    checkpoint.save(f"{folder}/saved")
    return lambda: checkpoint.restore(f"{folder}/saved")


def torch_step(overlap: bool) -> Verb:
    """Return a backward pass and a step of torch, of two buckets."""

    def verb(strategy: mpidist.Strategy, v: mpidist.Variable, folder: str) -> Any:
        import torch

        import mpidist.torch

        module = torch.nn.Sequential(torch.nn.Linear(2**20, 1), torch.nn.Linear(1, 1))
        for p in module.parameters():
            torch.nn.init.ones_(p)
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        distributed = mpidist.torch.DistributedOptimizer(
            sgd, strategy=strategy, overlap=overlap
        )
        x = torch.ones(1, 2**20)

        def step() -> None:
            module.zero_grad()
            module(x).sum().backward()
            distributed.step()

        step()
        return step

    return verb


Verb: TypeAlias = Callable[[mpidist.Strategy, mpidist.Variable, str], Any]

VERBS: Final[dict[str, Verb]] = {
    "run": in_replicas(lambda: None),
    "all_reduce": in_replicas(lambda: context().all_reduce("SUM", np.ones(3))),
    "large": in_replicas(lambda: context().all_reduce("SUM", np.ones(100_000))),
    "nest": in_replicas(
        lambda: context().all_reduce("SUM", {"a": np.ones(3), "b": [1, 2.0]})
    ),
    "all_gather": in_replicas(lambda: context().all_gather(np.ones((2, 2)), axis=0)),
    "begun": in_replicas(begin_two),
    "merge_call": merge,
    "assign in replicas": lambda s, v, _: lambda: s.run(lambda: v.assign(np.ones(3))),
    "update in replicas": lambda s, v, _: (
        lambda: s.run(lambda: s.extended.update(v, lambda v: v.assign(np.ones(3))))
    ),
    "optimizer": optimizer,
    "context": InContext,
    "local_results": local_results,
    "reduce": lambda s, v, _: functools.partial(
        s.reduce, "SUM", s.run(lambda: np.ones(3)), None
    ),
    "gather": lambda s, v, _: functools.partial(
        s.gather, s.run(lambda: np.ones((2, 2))), 0
    ),
    "reduce_to": lambda s, v, _: functools.partial(
        s.extended.reduce_to, "SUM", s.run(lambda: np.ones(3)), v
    ),
    "batch_reduce_to": lambda s, v, _: functools.partial(
        s.extended.batch_reduce_to, "SUM", [(s.run(lambda: np.ones(3)), v)]
    ),
    "broadcast_to": lambda s, v, _: lambda: s.extended.broadcast_to(np.ones(3), v),
    "update": lambda s, v, _: (
        lambda: s.extended.update(v, lambda v: v.assign_add(np.ones(3)))
    ),
    "optimizer outside": optimizer_outside,
    "assign": lambda s, v, _: lambda: v.assign(np.ones(3)),
    "scatter_add": lambda s, v, _: functools.partial(
        v.scatter_add, mpidist.IndexedSlices(np.ones(2), np.array([0, 2]))
    ),
    "read": read,
    "Variable": lambda s, v, _: lambda: mpidist.Variable(np.ones(3)),
    "buffers_like": lambda s, v, _: lambda: s.buffers_like(np.ones(3)),
    "values_from_function": lambda s, v, _: (
        lambda: s.experimental_distribute_values_from_function(lambda c: np.ones(3))
    ),
    "check_in_sync": lambda s, v, _: lambda: mpidist.check_in_sync([v]),
    "next": batches,
    "dataset": lambda s, v, _: (
        lambda: next(iter(s.experimental_distribute_dataset(ROWS)))
    ),
    "save": save,
    "restore": restore,
    "commit": commit,
    "values": values,
}
# Of programs with torch, which not every environment has.
GUESTS: Final[dict[str, Verb]] = {
    "torch": torch_step(overlap=False),
    "torch overlap": torch_step(overlap=True),
}


# What a rank says that has waited until its deadline.
_AT_DEADLINE: Final = ("did not reach", "made no progress", "wait in different calls")


class Result(NamedTuple):
    """What an exception at one line has done.

    Attributes:
        place: where it was raised; "": the rank has fewer lines.
        problem: what is wrong; "": nothing.
        usable: whether the strategy is.
    """

    place: str
    problem: str
    usable: bool


def inject(program: Program, rank: int, number: int, error: BaseException) -> Result:
    """Make the call, with an exception on one rank. Collective."""
    strategy = program.strategy
    mine = strategy.replica_id == rank
    injection = Injection(number if mine else 0, error)
    program.prepare()

    def call() -> None:
        with injection if mine else contextlib.nullcontext():
            program.call()

    with program.scope():
        found = outcomes(call)
    (place,) = [place for place in everywhere(injection.place) if place] or [""]
    then = outcomes(lambda: strategy.run(lambda: context().all_reduce("SUM", 1.0)))
    names = {row.name for row in then}
    problem = ""
    late = [
        row.message
        for row in [*found, *then]
        if row.message and any(text in row.message for text in _AT_DEADLINE)
    ]
    if late:
        problem = f"told at the deadline: {late[0]}"
    elif len(names) > 1 or "CollectiveMismatchError" in names:
        problem = f"the next call: {[(row.name, row.message[:150]) for row in then]}"
    elif place and names == {"NoneType"}:
        problem = differences(program)
    copies = set(everywhere(program.v.numpy().tobytes()))
    if program.verb == "restore" and len(copies) > 1:
        problem = problem or "not all or nothing"
    inside = everywhere(mpidist.has_strategy())
    if any(inside):
        problem = problem or "a scope was not left"
    return Result(place, problem, names == {"NoneType"} and not problem)


def differences(program: Program) -> str:
    """Return what is not the same on all ranks."""
    guard = group_of(program.strategy).guard
    mine = (program.v.numpy().tobytes(), guard.sequence, len(guard.sections))
    mine = (*mine, group_of(program.strategy).registry.count)
    rows = everywhere(mine)
    return "" if len(set(rows)) == 1 else f"the ranks differ: {rows}"


ARRAYS: Final = (float, np.ndarray)


def results_of_all(strategy: mpidist.Strategy, folder: str) -> dict[str, Any]:
    """Make a call of every kind, twice; return what this rank gets. Collective."""
    found = {}
    for verb in VERBS:
        program = Program(strategy, verb, folder)
        with program.scope():
            leaves = nest.flatten(program.call())[0]
        own = [strategy.experimental_local_results(leaf)[0] for leaf in leaves]
        arrays = [x for x in (*own, program.v.numpy()) if isinstance(x, ARRAYS)]
        found[verb] = [(np.shape(x), np.asarray(x).tobytes()) for x in arrays]
    return found


def lines_of(program: Program, rank: int) -> int:
    """Return how many lines a rank comes through in the call. Collective."""
    injection = Injection()
    mine = program.strategy.replica_id == rank
    with program.scope(), injection if mine else contextlib.nullcontext():
        program.call()
    return int(everywhere(injection.count)[rank])


def new_program(verb: str, folder: str, seconds: float) -> Program:
    """Return a program with a strategy of its own. Collective."""
    options = mpidist.experimental.CommunicationOptions(timeout_seconds=seconds)
    return Program(mpidist.MPIStrategy(communication_options=options), verb, folder)


KINDS: Final = {
    kind.__name__: kind for kind in (SignalError, KeyboardInterrupt, MemoryError)
}


def main() -> int:
    """Raise at every line of every verb, or of those of the command line."""
    names = sys.argv[1:]
    kind = KINDS[names.pop(0)] if names and names[0] in KINDS else SignalError
    folder = everywhere(tempfile.mkdtemp())[0]
    total = 0
    for verb in names or list(VERBS):
        program = new_program(verb, folder, 3.0)
        mine, size = program.strategy.replica_id, program.strategy.num_replicas_in_sync
        for rank in sorted({0, size - 1}):
            count = lines_of(program, rank)
            broken = bad = 0
            start = time.monotonic()
            for number in range(1, count + 1):
                result = inject(program, rank, number, kind("injected"))
                if result.problem and not mine:
                    where = f"{verb}, rank {rank}, {result.place}"
                    print(f"  {where}: {result.problem[:300]}", flush=True)
                bad += bool(result.problem)
                if not result.usable:
                    broken += 1
                    program = new_program(verb, folder, 3.0)
            total += count
            if not mine:
                print(
                    f"{verb}, rank {rank}: {count} lines, {broken} made the strategy "
                    f"unusable, {bad} wrong, {time.monotonic() - start:.0f} s",
                    flush=True,
                )
    if not mine:
        print(f"{total} exceptions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
