"""Kills a process that saves without pause, again and again; each time all is whole.

The process is forked from this one, so a kill takes a fraction of a second. It saves to
one path, which is replaced each time, and by a `CheckpointManager`, in turn. After
each kill, at a random moment,

- the last state that was saved, or the one that was being saved, can be restored whole,
  from the path and by the manager, and no newer one that was complete is lost;
- there are no more files than one kill can leave: nothing has piled up.

A third of the saves is by a thread.

usage: kill_saves.py KILLS [SEED [FOLDER]]
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np

import mpidist

COUNT = 40_000  # of numbers in each of two arrays
KEPT = 2
FORMATS: tuple[Literal["npz", "safetensors"], ...] = ("npz", "safetensors")
MOST_SAVES = 8  # of a process, before it is killed


class Training:
    """The objects that are saved, and where to."""

    def __init__(self, folder: Path) -> None:
        self.step = mpidist.Variable(0)
        self.arrays = [mpidist.Variable(np.zeros(COUNT)) for _ in range(2)]
        self.rng = np.random.default_rng(0)
        self.checkpoint = mpidist.Checkpoint(
            arrays=self.arrays, step=self.step, rng=self.rng
        )
        self.path = folder / "saved"
        self.directory = folder / "run"
        self.manager = self.new_manager()

    def new_manager(self) -> mpidist.CheckpointManager:
        return mpidist.CheckpointManager(self.checkpoint, self.directory, KEPT)

    def become(self, number: int) -> None:
        """Take the state of a step."""
        self.step.assign(number)
        for k, v in enumerate(self.arrays):
            v.assign(np.full(COUNT, float(number + k)))
        self.rng.bit_generator.state = np.random.default_rng(number).bit_generator.state

    def seen(self) -> int:
        """Return the step whose state this is, whole."""
        number = int(self.step.numpy())
        for k, v in enumerate(self.arrays):
            assert (v.numpy() == number + k).all(), number
        expected = np.random.default_rng(number).random()
        assert self.rng.random() == expected, number
        return number


def save_without_pause(training: Training, first: int, told: mmap.mmap) -> NoReturn:
    """Save one step after the other; say in shared memory which is done."""
    told_numbers = np.frombuffer(told, np.int64)
    for number in itertools.count(first):
        training.become(number)
        if number % 2:
            file_format = FORMATS[number // 2 % 2]
            training.checkpoint.save(training.path, file_format, number % 3 > 0)
        else:
            training.manager.save(number, wait=number % 3 > 0)
        training.checkpoint.wait()
        told_numbers[number % 2] = number
    raise AssertionError


def debris(training: Training) -> list[str]:
    """Return what is beside whole checkpoints: what kills have left."""
    own = training.path.parent.glob(".saved.tmp-*")
    of_manager = training.directory.glob(".ckpt-*")
    return [path.name for path in (*own, *of_manager)]


def files_in(path: Path) -> int:
    return len(list(path.iterdir()))


def kill_once(training: Training, done: list[int], wait: float) -> list[int]:
    """Fork, kill, look; return the steps that are restored from both places."""
    first = max(done) + 1
    told = mmap.mmap(-1, 16)
    told_numbers = np.frombuffer(told, np.int64)
    told_numbers[:] = done
    child = os.fork()
    if child == 0:
        try:
            save_without_pause(training, first, told)
        finally:
            os._exit(1)  # whatever it was: a traceback is on stderr
    time.sleep(wait)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status), "the process that saves has failed by itself"
    # Two by two, since they take turns; at most one was in the making.
    saved = told_numbers.tolist()
    found: list[int] = []
    left = debris(training)
    for parity, restore in ((0, by_manager), (1, from_path)):
        number = restore(training)
        assert number in (saved[parity], max(saved) + 1), (number, saved)
        assert number % 2 == parity or number == 0
        found.append(number)
    # Each place is tidied by the next save to it.
    assert len({name.split(".")[1][:4] for name in left}) == len(left), left
    if training.path.exists():  # the manifest, its array file, and one more
        assert files_in(training.path) <= 3
    if training.directory.exists():
        whole = [x for x in training.directory.iterdir() if x.name[0] != "."]
        assert len(whole) <= KEPT + 1, whole
    del told_numbers
    return found


def by_manager(training: Training) -> int:
    training.become(0)
    training.manager = training.new_manager()
    path = training.manager.restore_or_initialize()
    number = training.seen()
    assert path is None or path.endswith(f"-{number}")
    return number


def from_path(training: Training) -> int:
    training.become(0)
    if training.path.exists():
        training.checkpoint.restore(training.path)
    return training.seen()


def seconds_of_saves(training: Training) -> float:
    """Return how long a few saves take here."""
    training.become(0)
    elsewhere = training.path.with_name("timing")
    start = time.perf_counter()
    for _ in range(MOST_SAVES):
        training.checkpoint.save(elsewhere)
    return time.perf_counter() - start


def main() -> int:
    kills, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(
        dir=sys.argv[3] if len(sys.argv) > 3 else None
    ) as x:
        training = Training(Path(x))
        longest = seconds_of_saves(training)
        done = [0, 0]
        for number in range(kills):
            before, left = done, debris(training)
            done = kill_once(training, done, rng.uniform(0, longest))
            counts["saves"] += max(done) - max(before)
            counts["amid a save"] += bool({*debris(training)} - {*left})
            if number % 100 == 99:
                print(f"{number + 1} kills: {dict(counts)}", flush=True)
        left = debris(training)
        training.become(max(done) + 1)
        training.checkpoint.save(training.path)
        training.manager.save(max(done) + 2)
        assert not debris(training)
        assert files_in(training.path) == 2
        assert files_in(training.directory) == KEPT
    print(
        f"{kills} kills (seed {seed}), {counts['amid a save']} of them in the middle "
        f"of a save, {counts['saves']} saves: one of the saved states was restored "
        f"whole each time; left by the last kill: {left}, deleted by the next save"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
