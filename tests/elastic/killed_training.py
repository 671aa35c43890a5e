"""A training of which ranks are killed, for jobs; prints a line of JSON for each rank.

Each step draws from generators, reads rows of a shuffled dataset, and changes variables
by reductions, by `merge_call` and in ON_READ copies, all in exact integers, and so that
the order of the steps shows. The result is compared with that of one process.

usage: killed_training.py JSON, with the arguments of `Settings`
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

import mpidist
from mpidist import elastic
from mpidist._base import shuffle_seeds

ROWS = 61
BATCH = 7
MODULUS = 1_000_003
EPOCHS = 2


@dataclasses.dataclass
class Settings:
    """Who is killed, and when.

    Attributes:
        kill_after: by rank the seconds after its first step.
        kill_from: by rank another moment from which these seconds count: "start" is
            that before `elastic.run`, "loss" that at which it learns of a loss, "end"
            that at which `elastic.run` has returned.
        kill_in_vote: by rank which of its votes it is killed in, from 1.
        after_vote: whether that is behind the vote, and not before it.
        epochs: how often the rows are read.
        extra: bytes of one more variable.
        pause: seconds that each step takes in addition.
        min_replicas: see `elastic.run`.
        spares: see there.
        directory: see `elastic.State`.
        leave_after: the step after which the program raises on all ranks, unless it has
            restored a checkpoint; 0: never.
        leave_killed: whether all are killed there instead.
        kill_as_spare: the rank that is killed while it waits; -1: none.
        keeps_objects: whether the program uses a variable of its first strategy again.
    """

    kill_after: dict[str, float] = dataclasses.field(default_factory=dict)
    kill_from: dict[str, str] = dataclasses.field(default_factory=dict)
    kill_in_vote: dict[str, int] = dataclasses.field(default_factory=dict)
    after_vote: bool = False
    epochs: int = EPOCHS
    extra: int = 80_000
    pause: float = 0.0
    min_replicas: int = 1
    spares: int = 0
    directory: str | None = None
    leave_after: int = 0
    leave_killed: bool = False
    kill_as_spare: int = -1
    keeps_objects: bool = False


def dataset() -> mpidist.data.Dataset:
    # Without a seed: made again after a loss, and the first time by a spare.
    return mpidist.data.Dataset.range(ROWS).shuffle(ROWS).batch(BATCH)


def mix(value: Any, rows: int, drawn: int) -> Any:
    """Return the next value of the variable in which the order of all steps shows."""
    return (value * 3 + rows + drawn) % MODULUS


def expected(epochs: int) -> tuple[int, int]:
    """Return what one process computes: the mixed value, and the number of steps."""
    value, steps, rng = 1, 0, np.random.default_rng(8)
    shuffle_seeds.begin(0)  # as in a new process
    rows = dataset()
    for _ in range(epochs):
        for batch in rows:
            value = mix(value, int(np.sum(batch)), int(rng.integers(1000)))
            steps += 1
    return value, steps


def build(settings: Settings) -> Any:
    def make(strategy: Any) -> dict[str, Any]:
        return {
            "mixed": mpidist.Variable(np.int64(1), name="mixed"),
            "seen": mpidist.Variable(np.zeros(ROWS, int), name="seen"),
            "metric": mpidist.Variable(
                0, name="metric", synchronization="ON_READ", aggregation="SUM"
            ),
            "large": mpidist.Variable(np.zeros(settings.extra // 8), name="large"),
            "batches": strategy.experimental_distribute_dataset(dataset()),
        }

    return make


class Program:
    """The training of one rank, and what it has measured."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.calls = self.steps = 0
        self.lost_at = 0.0
        self.recoveries: list[float] = []  # from the error to the next call of `train`
        self.reentered: list[float] = []  # times of day
        self.kept: Any = None  # a variable of the first strategy

    def step(self, strategy: Any, state: Any, batch: Any) -> None:
        self.steps += 1
        drawn = int(state.common.integers(1000))
        state.own.random()

        def merge(strategy: Any, counts: Any) -> None:
            total = strategy.extended.reduce_to("SUM", counts, state.seen)
            strategy.extended.update(state.seen, lambda v, x: v.assign_add(x), (total,))

        def replica(rows: Any) -> Any:
            context = mpidist.get_replica_context()
            assert context is not None
            total = context.all_reduce("SUM", np.int64(rows.sum()))
            context.merge_call(merge, (np.bincount(rows, minlength=ROWS),))
            context.all_reduce("SUM", np.ones(self.settings.extra // 8))
            state.metric.assign_add(int(rows.sum()))
            return total

        total = strategy.run(replica, args=(batch,))
        total = strategy.experimental_local_results(total)[0]
        state.mixed.assign(mix(state.mixed.numpy(), int(total), drawn))
        state.large.assign(np.full(self.settings.extra // 8, float(state.mixed)))
        state.step += 1
        time.sleep(self.settings.pause)

    def train(self, strategy: Any, state: Any) -> dict[str, Any]:
        if self.lost_at:
            self.recoveries.append(time.perf_counter() - self.lost_at)
            self.reentered.append(time.time())
        self.calls += 1
        begins = state.step == 0
        if self.calls == 1:
            self.kept = state.mixed
        if self.settings.keeps_objects:
            self.kept.assign_add(0)
        try:
            for epoch in range(state.epoch, self.settings.epochs):
                for batch in state.batches:
                    self.step(strategy, state, batch)
                    state.commit()
                    if self.calls == 1 and state.step == 1:
                        arm(self.settings, "step")
                    if state.step == self.settings.leave_after and begins:
                        if self.settings.leave_killed:
                            kill()
                        raise KeyError("as it was asked to")
                state.epoch = epoch + 1
                state.commit()
            with strategy.scope():
                metric = int(state.metric)
        except mpidist.ReplicaLostError:
            if not self.lost_at:
                arm(self.settings, "loss")
            self.lost_at = time.perf_counter()
            raise
        size = strategy.num_replicas_in_sync
        return {"metric": metric, "size": size, "replica": strategy.replica_id}


def arm(settings: Settings, moment: str) -> None:
    """Set the time at which this rank is killed, if it counts from this moment."""
    after = settings.kill_after.get(str(rank()))
    if after is not None and settings.kill_from.get(str(rank()), "step") == moment:
        timer = threading.Timer(after, kill)
        timer.daemon = True  # also while the process ends
        timer.start()


def rank() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Get_rank())


def wait_for_the_others() -> None:
    """Let all that live print, before the first to raise ends the job."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Shrink().Barrier()


def kill() -> None:
    print(json.dumps({"killed": rank(), "at": time.time()}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_vote(settings: Settings) -> None:
    """Have this rank killed before or behind one of the agreements of its commits."""
    from mpidist._mpi import survival

    number = settings.kill_in_vote.get(str(rank()))
    if number is None:
        return
    agree, left = survival.agree, [number]

    def wrapped(comm: Any, flag: int, wait: Any) -> int:
        left[0] -= 1
        if left[0] == 0 and not settings.after_vote:
            kill()
        result = agree(comm, flag, wait)
        if left[0] == 0:
            kill()
        return result

    survival.agree = wrapped


def kill_as_spare(settings: Settings) -> None:
    """Have this rank killed while it waits as a spare."""
    from mpidist._mpi import survival

    if settings.kill_as_spare != rank():
        return
    failed_ranks, calls = survival.failed_ranks, [0]

    def wrapped(comm: Any) -> tuple[int, ...]:
        calls[0] += 1
        if calls[0] == 3:
            kill()
        return failed_ranks(comm)

    survival.failed_ranks = wrapped


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    arm(settings, "start")
    kill_in_vote(settings)
    kill_as_spare(settings)
    state = elastic.State(
        build(settings),
        epoch=0,
        step=0,
        common=np.random.default_rng(8),
        own=np.random.default_rng([8, rank()]),
        directory=settings.directory,
        every=3,
    )
    program = Program(settings)
    row: dict[str, Any] = {"rank": rank()}
    try:
        result = elastic.run(
            program.train,
            state,
            min_replicas=settings.min_replicas,
            spares=settings.spares,
        )
    except RuntimeError as error:
        print(json.dumps({**row, "error": str(error)}), flush=True)
        wait_for_the_others()
        raise
    arm(settings, "end")
    if result is None:
        print(json.dumps({**row, "spare": True}), flush=True)
        return
    value, steps = expected(settings.epochs)
    metric = settings.epochs * ROWS * (ROWS - 1) // 2
    right = {
        "mixed": int(state.mixed.numpy()) == value,
        "seen": bool((state.seen.numpy() == settings.epochs).all()),
        "large": bool((state.large.numpy() == value).all()),
        "metric": result["metric"] == metric,
        "step": state.step == steps,
    }
    row |= {
        "right": all(right.values()),
        "wrong": [name for name, good in right.items() if not good],
        "size": result["size"],
        "replica": result["replica"],
        "calls": program.calls,
        "steps": program.steps,
        "recoveries": program.recoveries,
        "reentered": program.reentered,
        "own": float(state.own.random()),
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
